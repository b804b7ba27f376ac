"""Fuzzer: every command on mutated files of every format that it reads, and on hostile arguments.

    python tools/fuzz.py                          # 5,000 cases on two cores; exit code 1 if a case fails
    python tools/fuzz.py --minutes 60 --seed 7    # as many as fit into an hour
    python tools/fuzz.py --case 1234              # repeats one case, and keeps its folder
    python tools/fuzz.py --write                  # also writes docs/results/fuzz.json and fuzz.md

A case follows from the seed and its number: a command, a file that is edited, an option that is edited. It runs in a
forked copy of this process, which has imported everything, with limits on time and memory, in a folder of its own. It
must end

- with exit code 0 or 1, or with 2 and one line on stderr (or the usage message of a wrong option); without a traceback;
- within 10 s of processor time and 1 GB of memory;
- without executing code from a file: the hostile ones would create a file named ``canary``;
- with nothing half written: no temporary file is left, every output is missing or can be opened, inputs are unchanged,
  nothing is written outside its folder;
- without control characters from a file on the terminal.
"""

import argparse
import contextlib
import hashlib
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

import torch

import fuzz_corpus
import fuzz_mutators
from fuzz_corpus import Scenario
from tag2box import cli, io

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
SECONDS, WALL_SECONDS, MEGABYTES = 10, 200, 1024  # of the processor, of the clock; of memory
ADDRESS_SPACE = 3 << 30  # beyond that of this process: a case that asks for more is refused by the system
PROGRESS = re.compile(r".+ \(\d+ to do\)|.+: \d+/\d+ \(\d+%\), .+|tag2box: warning: .*")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
LEFT = re.compile(r"\..*")  # temporary files and locks are hidden


@dataclass(frozen=True)
class Case:
    """What is done in a case."""

    number: int
    scenario: Scenario
    argv: tuple[str, ...]
    edited: str  # file in the working folder; empty if only an option is edited
    format: str
    mutation: str


@dataclass
class Outcome:
    """How a case ended."""

    case: Case
    code: int  # negative: the signal
    seconds: float
    megabytes: float
    problems: list[str] = field(default_factory=list)
    stderr: str = ""


# ---------------------------------------------------------------- the folders of a case


@dataclass(frozen=True)
class Slot:
    """One of the places in which cases run; paths in a run are absolute, so each has a corpus of its own."""

    base: Path
    before: dict[Path, bytes] = field(default_factory=dict)  # inputs of the running case

    @property
    def desk(self) -> Path:
        """Working folder of a case, deep enough for ../.. to be seen."""
        return self.base / "outer" / "inner" / "desk"

    @property
    def corpus(self) -> Path:
        """The intact files."""
        return self.base / "corpus"

    def prepare(self) -> None:
        """Write the intact files, at the place where cases find copies of them."""
        fuzz_corpus.write_corpus(self.desk, _run_intact)
        self.desk.rename(self.corpus)

    def lay_out(self, case: Case, seed: int) -> None:
        """Copy the inputs of a case, edit one of them, and remember their contents."""
        for folder in (self.base / "outer", self.base / "tmp"):
            shutil.rmtree(folder, ignore_errors=True)
        self.desk.mkdir(parents=True)
        (self.base / "tmp").mkdir()
        for name in case.scenario.inputs:
            source = self.corpus / name
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, self.desk / name)
        module = "open('canary', 'w').close()\n\nclass Name:\n    pass\n"
        (self.desk / f"{fuzz_mutators.CANARY}.py").write_text(module, encoding="utf-8")
        if case.edited:
            path = self.desk / case.edited
            content, _ = fuzz_mutators.mutate(path.read_bytes(), path.suffix, _rng(seed, case.number, "content"))
            path.write_bytes(content)
            if _rng(seed, case.number, "digests").random() < 0.5:
                fuzz_corpus.reseal(path)
        self.before.clear()
        self.before.update(self.inputs(case))

    def inputs(self, case: Case) -> dict[Path, bytes]:
        """Digests of the files that a case must not change."""
        roots = [self.desk / name for name in case.scenario.inputs if name not in {*case.scenario.changes, "home"}]
        files = [p for root in roots for p in ([root] if root.is_file() else sorted(root.rglob("*"))) if p.is_file()]
        return {file: hashlib.sha256(file.read_bytes()).digest() for file in files}


def _run_intact(desk: Path, argv: tuple[str, ...]) -> int:
    """A command in this process, so that the forked ones find everything imported and compiled."""
    home = Path.cwd()
    os.environ["TAG2BOX_HOME"] = f"{desk / 'home'}"
    os.chdir(desk)
    sys.argv = ["tag2box", *argv]
    try:
        with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
            return _call_main()
    finally:
        os.chdir(home)


def _rng(seed: int, number: int, what: str) -> random.Random:
    return random.Random(f"{seed} {number} {what}")


# ---------------------------------------------------------------- cases


def make_case(number: int, seed: int, corpus: Path, setting_names: Sequence[str]) -> Case:
    """The case of a number."""
    rng = _rng(seed, number, "case")
    known = fuzz_corpus.scenarios()
    scenario = rng.choices(known, [s.share for s in known])[0]
    argv, files = (
        scenario.argv,
        [p.relative_to(corpus).as_posix() for t in scenario.targets for p in sorted(corpus.glob(t)) if p.is_file()],
    )
    draw = rng.random()
    if draw < 0.15 or not files:
        argv, mutation = _edit_arguments(scenario, setting_names, rng)
        return Case(number, scenario, argv, "", "arguments", mutation)
    edited = rng.choice(files)
    suffix = Path(edited).suffix
    content = (corpus / edited).read_bytes()
    _, mutation = fuzz_mutators.mutate(content, suffix, _rng(seed, number, "content"))
    return Case(number, scenario, argv, edited, suffix.lstrip(".") or "other", mutation)


def intact_cases() -> list[Case]:
    """Every command on intact files, numbered below zero."""
    return [Case(-1 - i, s, s.argv, "", "intact", "none") for i, s in enumerate(fuzz_corpus.scenarios())]


def _edit_arguments(
    scenario: Scenario, setting_names: Sequence[str], rng: random.Random
) -> tuple[tuple[str, ...], str]:
    """Another value of a setting, or of an argument."""
    argv = list(scenario.argv)
    if scenario.has_settings and rng.random() < 0.8:
        value = rng.choice((*fuzz_mutators.NUMBERS, *fuzz_mutators.NAMES, "[]", "{}", "[1, 2]", "[nan]", "[[1]]"))
        name = rng.choice(setting_names)
        return (*argv, "--set", _argument(f"{name}={value}")), f"--set {name}"
    names = {path for path in (*scenario.outputs, "run") if path in argv}  # outputs stay below the working folder
    places = [i for i, word in enumerate(argv) if i >= len(scenario.command.split()) and word not in names]
    if not places:
        return (*argv, rng.choice(("--unknown", "more", "--set", ""))), "one more"
    place = rng.choice(places)
    values = [v for v in (*fuzz_mutators.NUMBERS, *fuzz_mutators.NAMES) if v not in {"/", "--help"}]  # / has many files
    argv[place] = _argument(rng.choice(values))
    return tuple(argv), f"argument {place}"


def _argument(text: str) -> str:
    return text.replace("\0", "").encode("utf-8", "replace").decode()[:100_000]


def setting_names() -> list[str]:
    """All settings of a run that may be edited."""
    from tag2box import recipes, settings

    names, table = [], ""
    for line in settings.dump(recipes.scenes()).splitlines():
        if line.startswith("["):
            table = line.strip("[]") + "."
        elif "=" in line and not line.startswith("#"):
            names.append(table + line.partition("=")[0].strip())
    return [name for name in names if not name.startswith(fuzz_corpus.SLOW_SETTINGS)]


# ---------------------------------------------------------------- one case


def start(case: Case, slot: Slot, seed: int) -> int:
    """Fork a process that runs a case; returns its id."""
    slot.lay_out(case, seed)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _child(slot.desk, case.argv, slot.base)
    return pid


def _child(desk: Path, argv: tuple[str, ...], base: Path) -> None:
    """The command in this forked process; never returns."""
    code = 70
    try:
        _limit()
        for number, name in ((1, "stdout"), (2, "stderr")):
            handle = os.open(base / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(handle, number)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", encoding="utf-8", errors="backslashreplace") for n in (1, 2))
        (base / "tmp").mkdir(exist_ok=True)
        os.chdir(desk)
        os.environ.update(
            COLUMNS="200", TMPDIR=f"{base / 'tmp'}", TAG2BOX_HOME=f"{desk / 'home'}", TORCH_HOME=f"{desk / 'torch'}"
        )
        tempfile.tempdir = None
        sys.argv = ["tag2box", *argv]
        code = _call_main()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _call_main() -> int:
    try:
        cli.main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 2))
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ADDRESS_SPACE, used + ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)


# ---------------------------------------------------------------- the oracle


def judge(case: Case, slot: Slot, status: int, usage: resource.struct_rusage) -> Outcome:
    """What is wrong with the end of a case."""
    code = os.waitstatus_to_exitcode(status)
    out, err = ((slot.base / name).read_bytes().decode("utf-8", "replace") for name in ("stdout", "stderr"))
    outcome = Outcome(case, code, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, stderr=err[-3000:])
    lines = [line for line in err.splitlines() if line.strip() and not PROGRESS.fullmatch(line)]
    outcome.problems += _exit_problems(case, code, lines)
    if code == -signal.SIGXCPU or outcome.seconds > SECONDS:  # the limit may strike some ticks early
        outcome.problems.append("slow")
    if outcome.megabytes > MEGABYTES:
        outcome.problems.append("memory")
    if CONTROL.search(out + err):
        outcome.problems.append("control characters")
    outcome.problems += _file_problems(case, slot)
    return outcome


def _exit_problems(case: Case, code: int, lines: Sequence[str]) -> list[str]:
    if any(line.startswith("Traceback") for line in lines) or code not in {0, 1, 2, -signal.SIGXCPU, -signal.SIGKILL}:
        return ["traceback"] if code >= 0 else ["crash"]
    if code < 0:
        return ["hang"]
    is_usage = bool(lines) and lines[0].lstrip().startswith("Usage:")
    is_finding = case.scenario.command == "data check" and len(lines) <= 1
    if code == 2 and not (len(lines) == 1 or is_usage or is_finding):
        return [f"{len(lines)} lines"]
    return []


def _file_problems(case: Case, slot: Slot) -> list[str]:
    desk, problems = slot.desk, []
    if any(path.name == fuzz_mutators.CANARY for path in slot.base.rglob(f"{fuzz_mutators.CANARY}*")):
        problems.append("code run")
    around = {
        path.relative_to(slot.base / "outer").as_posix()
        for path in (slot.base / "outer").rglob("*")
        if desk not in path.parents
    }
    if around != {"inner", "inner/desk"} or {path.name for path in slot.base.iterdir()} - {
        "outer",
        "corpus",
        "tmp",
        "stdout",
        "stderr",
    }:
        problems.append("escaped")
    left = [path for path in desk.rglob("*") if LEFT.fullmatch(path.name)]
    left += [path for path in (slot.base / "tmp").iterdir() if not path.name.startswith("torchinductor_")]
    if left:
        problems.append(f"left {re.sub('[0-9a-f]{4,}', '..', left[0].name)}")
    for name, kind in case.scenario.outputs.items():
        if (desk / name).exists() and not _opens(kind, desk / name):
            problems.append("partial output")
    if slot.inputs(case) != slot.before:
        problems.append("changed input")
    return problems


def _opens(kind: str, path: Path) -> bool:
    try:
        fuzz_corpus.open_output(kind, path)
    except Exception:
        return False
    return True


# ---------------------------------------------------------------- many cases


def run_cases(cases: Iterator[Case], slots: Sequence[Slot], seed: int) -> Iterator[Outcome]:
    """Run cases, one in each slot at a time; outcomes come as they end."""
    free, running = list(slots), dict[int, tuple[Case, Slot, float]]()
    waiting = next(cases, None)
    while running or waiting is not None:
        while free and waiting is not None:
            slot = free.pop()
            running[start(waiting, slot, seed)] = (waiting, slot, time.monotonic())
            waiting = next(cases, None)
        for pid in list(running):
            case, slot, began = running[pid]
            if time.monotonic() - began > WALL_SECONDS:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if ended:
                del running[pid]
                free.append(slot)
                yield judge(case, slot, status, usage)
        time.sleep(0.002)


def describe(outcome: Outcome) -> str:
    """A failed case in a few lines."""
    case = outcome.case
    last = "\n    ".join(outcome.stderr.splitlines()[-6:])
    return (
        f"case {case.number}: {', '.join(outcome.problems) or 'no problem'}; exit {outcome.code}, "
        f"{outcome.seconds:.1f} s, {outcome.megabytes:.0f} MB\n"
        f"    tag2box {' '.join(case.argv)[:300]!r}\n    {case.mutation} on {case.edited or 'arguments'}\n    {last}"
    )


@dataclass
class Table:
    """Counts by command and format."""

    rows: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        """Count a case."""
        row = self.rows.setdefault((outcome.case.scenario.command, outcome.case.format), Counter())
        row["cases"] += 1
        row[f"exit {outcome.code}"] += 1
        row["failed"] += bool(outcome.problems)
        for problem in outcome.problems:
            row[problem] += 1

    def to_json(self) -> list[dict[str, object]]:
        """One object per row."""
        return [{"command": command, "format": form, **dict(row)} for (command, form), row in sorted(self.rows.items())]

    def markdown(self) -> str:
        """A table of commands and formats."""
        heads = ("cases", "exit 0", "exit 1", "exit 2", "failed")
        lines = [f"| command | format | {' | '.join(heads)} |", f"|---|---|{'---:|' * len(heads)}"]
        for (command, form), row in sorted(self.rows.items()):
            lines.append(f"| {command} | {form} | {' | '.join(str(row[head]) for head in heads)} |")
        total: Counter[str] = sum(self.rows.values(), Counter())
        lines.append(f"| **all** | | {' | '.join(str(total[head]) for head in heads)} |")
        return "\n".join(lines) + "\n"


def _numbers(count: int, minutes: float | None, first: int) -> Iterator[int]:
    end = time.monotonic() + 60 * (minutes or 0)
    number = first
    while (minutes is not None and time.monotonic() < end) or (minutes is None and number < first + count):
        yield number
        number += 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run cases; 1 if any fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000, help="number of cases")
    parser.add_argument("--minutes", type=float, help="as many cases as fit, instead of --count")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="repeat one case, and keep its folder")
    parser.add_argument("--intact", action="store_true", help="first every command on intact files: it must succeed")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write docs/results/fuzz.json and fuzz.md")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    fuzz_corpus.tiny_program()
    memory = Path("/dev/shm")  # files of a case are many and short-lived
    folder = Path(tempfile.mkdtemp(prefix="tag2box-fuzz-", dir=memory if memory.is_dir() else None))
    jobs = 1 if args.case is not None else args.jobs
    slots = [Slot(folder / f"slot{i}") for i in range(jobs)]
    for slot in slots:
        slot.prepare()
    numbers = iter([args.case]) if args.case is not None else _numbers(args.count, args.minutes, args.first)
    names = setting_names()
    edited = (make_case(number, args.seed, slots[0].corpus, names) for number in numbers)
    began, table, failed = time.monotonic(), Table(), list[Outcome]()
    for outcome in run_cases(chain(intact_cases() if args.intact else (), edited), slots, args.seed):
        if outcome.case.number < 0 and outcome.code > _worst_intact_code(outcome.case.scenario):
            outcome.problems.append("intact files refused")
        table.add(outcome)
        if outcome.problems or args.case is not None:
            failed += [outcome] if outcome.problems else []
            print(describe(outcome), flush=True)
    seconds = time.monotonic() - began
    if args.case is None:
        print(f"{table.markdown()}\n{len(failed)} failed; {seconds:.0f} s")
        shutil.rmtree(folder)
    else:
        print(f"kept: {slots[0].desk}")
    if args.write:
        _write_results(args, table, failed, seconds)
    return int(bool(failed))


def _worst_intact_code(scenario: Scenario) -> int:
    return 2 if scenario.is_refused else int(scenario.command == "data check")  # which has warnings


def _write_results(args: argparse.Namespace, table: Table, failed: Sequence[Outcome], seconds: float) -> None:
    cases = [{**asdict(o), "case": o.case.number, "argv": o.case.argv, "mutation": o.case.mutation} for o in failed]
    total = sum(row["cases"] for row in table.rows.values())
    command = f"python tools/fuzz.py --count {total} --seed {args.seed}"
    result = {"command": command, "seconds": round(seconds), "cases": total, "failed": cases, "table": table.to_json()}
    io.write_json(RESULTS / "fuzz.json", result)
    took = f"{seconds / 60:.0f} minutes on {args.jobs} cores"
    head = f"# Fuzzing\n\n`{command}`: {total} cases, {len(failed)} failed, {took}.\n\n"
    io.write_text(RESULTS / "fuzz.md", head + table.markdown())


if __name__ == "__main__":
    sys.exit(main())
