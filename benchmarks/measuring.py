"""How the benchmarks measure: seconds with their spread, peak memory, differences of gradients, what the machine is."""

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

SPARE_MB = 1500  # left to the rest of the machine by a measurement that may grow
NO_ROOM = 77  # exit code of one that needed more


# ---------------------------------------------------------------- the command line they share


def arguments(doc: str | None, name: str, *, repeats: int) -> argparse.ArgumentParser:
    """The options of every part of ``make bench``."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch chooses")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--out", type=Path, default=Path(f"runs/{name}.json"))
    return parser


def set_threads(wanted: int) -> int:
    """Let torch compute with so many threads, 0 being as many as it chooses; how many they are."""
    if wanted:
        torch.set_num_threads(wanted)
    return torch.get_num_threads()


# ---------------------------------------------------------------- time


def measure(work: Callable[[], object], repeats: int, *, warm: bool = True) -> Row:
    """Seconds of a call, once warmed up: smallest, median and largest."""
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
    return {name: round(value, 5) for name, value in ends.items()}


def in_words(seconds: float) -> str:
    """About how long: 40 s, 12 min, 1 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


# ---------------------------------------------------------------- the machine


def machine() -> Row:
    """What the figures depend on, with the speed of a 2,048 GEMM in this very run."""
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
        "gemm_gflops": round(2 * 2048**3 / gemm["wall"]["min"] / 1e9, 1),
        "gemm_gflops_per_cpu_second": round(2 * 2048**3 / gemm["cpu"]["min"] / 1e9, 1),
    }


def cpu_name() -> str:
    """What the processor calls itself."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text(encoding="utf-8").splitlines() if facts.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


# ---------------------------------------------------------------- memory


def peak_mb(work: Callable[[], object]) -> float:
    """Most memory a call held beyond what was there before it, in this process."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the high-water mark
    before = status_mb("VmRSS")
    work()
    return round(status_mb("VmHWM") - before, 1)


def status_mb(field: str) -> float:
    """A figure of this process: VmRSS is what it holds in memory, VmHWM the most it ever held."""
    return _figure(Path("/proc/self/status"), field) / 1024


def free_mb() -> float:
    """What could be used without pushing anything out."""
    return _meminfo("MemAvailable")


def _meminfo(field: str) -> float:
    return _figure(Path("/proc/meminfo"), field) / 1024


def _figure(path: Path, field: str) -> int:
    lines = path.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def in_fresh_process(job: Callable[..., Any], *args: object) -> Any:
    """Run a module's function in a process of its own, so that nothing it frees was there before."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(job, *args).result()


def if_it_fits(job: Callable[..., Any], *args: object) -> Any:
    """The same for a job that may need more memory than there is; then the answer is None."""
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
    if process.exitcode not in {0, NO_ROOM, -signal.SIGKILL}:  # the last is how the system ends what takes too much
        raise RuntimeError(f"{job.__name__} ended with exit code {process.exitcode}; what went wrong stands above")
    return answer


def _guarded(megabytes: float, writer: Connection, job: Callable[..., Any], args: tuple[object, ...]) -> None:
    """Do a job, but end this process once it holds more: better than letting the system choose whom to end."""

    def watch() -> None:
        while status_mb("VmRSS") < megabytes:
            time.sleep(0.05)
        os._exit(NO_ROOM)

    threading.Thread(target=watch, daemon=True).start()
    writer.send(job(*args))


# ---------------------------------------------------------------- gradients


def gradient(module: nn.Module) -> Tensor:
    """The gradients of all that learns, in one vector."""
    learning = [p for p in module.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten().float() for p in learning])


def keep_vector(path: Path, vector: Tensor) -> None:
    """Leave a vector for another process."""
    np.save(path, vector.numpy(), allow_pickle=False)


def relative_difference(path: Path, reference: Path) -> float:
    """|a - b| / |b| of two kept vectors, summed in double precision."""
    a, b = (np.load(file, mmap_mode="r", allow_pickle=False) for file in (path, reference))
    apart = whole = 0.0
    for start in range(0, len(b), 1 << 22):
        x, y = (v[start : start + (1 << 22)].astype(np.float64) for v in (a, b))
        apart, whole = apart + float(((x - y) ** 2).sum()), whole + float((y**2).sum())
    return (apart / whole) ** 0.5 if whole else float(apart > 0)
