"""Measuring tools of the benchmarks: seconds with their spread, peak memory, gradient differences, machine facts."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import signal
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Row = dict[str, Any]

SPARE_MB = 1500  # left free for the rest of the machine
OUT_OF_MEMORY = 77  # exit code of a job that exceeded its limit


# ---------------------------------------------------------------- shared command line


def arguments(doc: str | None, name: str, *, repeats: int) -> argparse.ArgumentParser:
    """The options of every part of ``make bench``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--small", action="store_true", help="tiny sizes, a smoke test")
    parser.add_argument("--out", type=Path, default=Path(f"runs/{name}.json"))
    return parser


def set_threads(wanted: int) -> int:
    """Set the number of torch's threads (0: its default) and return it."""
    if wanted:
        torch.set_num_threads(wanted)
    return torch.get_num_threads()


# ---------------------------------------------------------------- time


def measure(work: Callable[[], object], repeats: int, *, warm: bool = True) -> Row:
    """Min, median and max seconds of a call, after one warm-up call."""
    if warm:
        work()
    cpu, wall = [], []
    for _ in range(repeats):
        before = time.process_time(), time.perf_counter()
        work()
        cpu.append(time.process_time() - before[0])
        wall.append(time.perf_counter() - before[1])
    return {"repeats": repeats, "cpu": spread_of(cpu), "wall": spread_of(wall)}


def spread_of(values: list[float]) -> Row:
    ends = {"min": min(values), "median": statistics.median(values), "max": max(values)}
    return {name: round(value, 7) for name, value in ends.items()}


def gflops(operations: float, seconds: float) -> float:
    """Speed in GFLOPS; finite also if the clock is too coarse to see the work."""
    return round(operations / max(seconds, 1e-7) / 1e9, 1)


def in_words(seconds: float) -> str:
    """A rounded duration: 40 s, 12 min, 1 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


# ---------------------------------------------------------------- the machine


def machine() -> Row:
    """Facts that the figures depend on, with the speed of a 2,048 GEMM in this run."""
    a = torch.randn(2048, 2048)
    gemm = measure(lambda: a @ a, 5)
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gb": round(_meminfo("MemTotal") / 1024, 1),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "gemm_gflops": gflops(2 * 2048**3, gemm["wall"]["min"]),
        "gemm_gflops_per_cpu_second": gflops(2 * 2048**3, gemm["cpu"]["min"]),
    }


def cpu_name() -> str:
    """Model name of the processor."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# ---------------------------------------------------------------- memory


def peak_mb(work: Callable[[], object]) -> float:
    """Peak memory of a call in this process, above the level before it."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the high-water mark
    before = status_mb("VmRSS")
    work()
    return round(status_mb("VmHWM") - before, 1)


def status_mb(field: str) -> float:
    """A memory figure of this process: VmRSS (resident) or VmHWM (its high-water mark)."""
    return _figure(Path("/proc/self/status"), field) / 1024


def free_mb() -> float:
    """Available memory of the machine."""
    return _meminfo("MemAvailable")


def _meminfo(field: str) -> float:
    return _figure(Path("/proc/meminfo"), field) / 1024


def _figure(path: Path, field: str) -> int:
    lines = path.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def in_fresh_process(job: Callable[..., Any], *args: object) -> Any:
    """Run a module-level function in a fresh process, so that earlier allocations do not count."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(job, *args).result()


def if_it_fits(job: Callable[..., Any], *args: object) -> Any:
    """Run a job in a fresh process; None if it needs more memory than is available."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    limit = max(free_mb() - SPARE_MB, 500.0)
    process = context.Process(target=_guarded, args=(limit, writer, job, args))
    process.start()
    writer.close()
    try:
        answer = reader.recv()
    except EOFError:
        answer = None
    process.join()
    if process.exitcode not in {0, OUT_OF_MEMORY, -signal.SIGKILL}:  # SIGKILL comes from the system's OOM killer
        raise RuntimeError(f"{job.__name__} ended with exit code {process.exitcode}; see the traceback above")
    return answer


def _guarded(megabytes: float, writer: Connection, job: Callable[..., Any], args: tuple[object, ...]) -> None:
    """Run a job; exit once this process exceeds the limit, before the system's OOM killer acts."""

    def watch() -> None:
        while status_mb("VmRSS") < megabytes:
            time.sleep(0.05)
        os._exit(OUT_OF_MEMORY)

    threading.Thread(target=watch, daemon=True).start()
    writer.send(job(*args))


# ---------------------------------------------------------------- gradients


def gradient(module: nn.Module) -> Tensor:
    """Gradients of all trainable parameters, in one vector."""
    learning = [p for p in module.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().float() for p in learning])


def save_vector(path: Path, vector: Tensor) -> None:
    """Write a vector for another process."""
    np.save(path, vector.numpy(), allow_pickle=False)


def relative_difference(path: Path, reference: Path) -> float:
    """|a - b| / |b| of two saved vectors, summed in double precision."""
    a, b = (np.load(file, mmap_mode="r", allow_pickle=False) for file in (path, reference))
    apart = whole = 0.0
    for start in range(0, len(b), 1 << 22):
        x, y = (v[start : start + (1 << 22)].astype(np.float64) for v in (a, b))
        apart, whole = apart + float(((x - y) ** 2).sum()), whole + float((y**2).sum())
    return (apart / whole) ** 0.5 if whole else float(apart > 0)
