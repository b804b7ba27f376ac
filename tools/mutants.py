"""Mutation testing: change one operator, number or call of the package at a time, and see whether a test notices.

    python tools/mutants.py --count 60            # a sample of all mutants; the same for the same seed
    python tools/mutants.py --only ops/boxes.py   # all mutants of one file
    python tools/mutants.py --known               # mutants that survived once; exit code 1 if one still does

Results are kept in docs/results/mutants.json, so that an interrupted call resumes and a larger --count adds to it;
those of a file that was edited since are dropped. docs/results/mutants.md lists the survivors.

Each mutant is a copy of the package with one change, tested in a forked copy of this process (which has imported torch
and pytest) by the test files of its module, up to the first failure. mutmut works here, too, but it leaves decorated
functions as they are: context managers such as ``io.replacing`` would not be tested.
"""

import argparse
import ast
import compileall
import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "tag2box"
RESULTS = ROOT / "docs" / "results" / "mutants.json"
SECONDS = 300  # a mutant that takes longer than this hangs, which is noticed, too
HEAVY = (
    "torch",
    "numpy",
    "numba",
    "cv2",
    "pydantic",
    "hypothesis",
    "pytest",
    "scipy.io",
    "safetensors.torch",
    "PIL.Image",
)

TESTS: dict[str, tuple[str, ...]] = {
    "io.py": ("test_io.py", "test_storage.py", "test_lock.py", "test_crash.py"),
    "storage.py": ("test_storage.py", "formats/test_export.py", "test_crash.py"),
    "identity.py": ("cli/test_identity.py", "test_crash.py"),
    "training/checkpoint.py": ("training/test_checkpoint.py", "test_crash.py"),
    "training/events.py": ("training/test_events.py", "training/test_event_records.py", "test_crash.py"),
    "proposals/store.py": ("proposals/test_store.py", "test_crash.py"),
    "proposals/mapped_array.py": ("proposals/test_store.py", "test_crash.py"),
    "proposals/shards.py": ("proposals/test_build.py", "proposals/test_build_interrupted.py", "test_crash.py"),
    "models/weights/weight_cache.py": ("models/test_weights.py", "models/test_zoo.py", "test_crash.py"),
    "images.py": ("data",),
    "ops/": ("ops",),
    "methods/": ("methods",),
    "metrics/": ("metrics",),
}
"""Which tests a file, or the files of a folder, must pass; missing ones are left out."""
KNOWN = (
    (
        "ops/boxes.py",
        "(iou(boxes[best], boxes[left]) > iou_threshold)",
        "(iou(boxes[best], boxes[left]) >= iou_threshold)",
    ),
    ("ops/boxes.py", "(iou(ranked, ranked) > iou_threshold)", "(iou(ranked, ranked) >= iou_threshold)"),
    ("methods/discovery.py", "(iou(boxes, boxes[tops]) >= threshold)", "(iou(boxes, boxes[tops]) > threshold)"),
    ("images.py", "scale = 1 / 257", "scale = 1 / 256"),
    ("images.py", "brightest > 255", "brightest >= 255"),
    ("io.py", "        sync(temporary)\n        temporary.replace(path)", "        temporary.replace(path)"),
    ("io.py", "        temporary.replace(path)\n        sync(path.parent)", "        temporary.replace(path)"),
    ("io.py", "        os.fsync(handle)", "        pass"),
)
"""File, text, and what it is replaced by."""

COMPARED = {
    ">": ">=",
    ">=": ">",
    "<": "<=",
    "<=": "<",
    "==": "!=",
    "!=": "==",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
}
COMPUTED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "*"), ast.Pow: ("**", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    file: str  # below the package
    line: int
    start: int  # of the changed text, in characters
    end: int
    new: str
    old: str

    @property
    def key(self) -> str:
        """Names the mutant in the results."""
        return f"{self.file}:{self.line}:{self.start}:{self.new}"

    def apply(self, source: str) -> str:
        """The changed file."""
        return source[: self.start] + self.new + source[self.end :]


# ---------------------------------------------------------------- mutants of a file


def mutants_of(file: str, source: str) -> list[Mutant]:
    """Every mutant of a file, in order."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda m: (m.start, m.new))


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, source: str) -> None:
        self.file, self.source, self.found = file, source, list[Mutant]()
        self._lines = [0]
        for line in source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def _place(self, line: int, column: int) -> int:
        text = self.source[self._lines[line - 1] : self._lines[line]]
        return self._lines[line - 1] + len(text.encode()[:column].decode())

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        return self._place(node.lineno, node.col_offset), self._place(node.end_lineno or 0, node.end_col_offset or 0)

    def _add(self, node: ast.expr | ast.stmt, start: int, end: int, new: str) -> None:
        self.found.append(Mutant(self.file, node.lineno, start, end, new, self.source[start:end]))

    def _operator(self, node: ast.expr, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Replace an operator between two operands."""
        begin, stop = self._span(left)[1], self._span(right)[0]
        pattern = r"\s+".join(map(re.escape, old.split())) if old[0].isalpha() else re.escape(old)
        match = re.search(pattern, self.source[begin:stop])
        if match:
            self._add(node, begin + match.start(), begin + match.end(), new)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Another comparison."""
        names = {ast.Gt: ">", ast.GtE: ">=", ast.Lt: "<", ast.LtE: "<=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
                 ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}  # fmt: skip
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, operands[1:], strict=False):
            old = names[type(operator)]
            self._operator(node, left, right, old, COMPARED[old])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Another operator; texts and paths are left alone."""
        is_text = any(
            isinstance(side, ast.JoinedStr) or isinstance(getattr(side, "value", None), str)
            for side in (node.left, node.right)
        )
        if type(node.op) in COMPUTED and not is_text:
            self._operator(node, node.left, node.right, *COMPUTED[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """``and`` to ``or`` and back."""
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._operator(node, left, right, old, new)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Without ``not`` or the sign."""
        if isinstance(node.op, ast.Not | ast.USub):
            start = self._span(node)[0]
            self._add(node, start, start + (4 if isinstance(node.op, ast.Not) else 1), "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Another number or truth value."""
        value = node.value
        new: object = None
        if isinstance(value, bool):
            new = not value
        elif isinstance(value, int | float):
            new = value + 1 if isinstance(value, int) else value * 2 or 1.0
        if new is not None:
            self._add(node, *self._span(node), repr(new))

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call whose result is not used, such as an fsync, is left out."""
        if isinstance(node.value, ast.Call):
            self._add(node, *self._span(node), "pass")
        if not isinstance(node.value, ast.Constant):
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Messages are not mutated."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Nor are other texts."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Annotations are not mutated, values are."""
        if node.value is not None:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Defaults and body, without annotations and decorators."""
        for default in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """The body, without decorators."""
        for statement in node.body:
            self.visit(statement)


def all_mutants(only: str | None = None) -> list[Mutant]:
    """Mutants of all files that have tests to kill them."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if test_files(file) and (only is None or file.startswith(only)):
            found += mutants_of(file, path.read_text(encoding="utf-8"))
    return found


def known_mutants() -> list[Mutant]:
    """The mutants of KNOWN; raises if the code has changed so that one is no longer there."""
    found = []
    for file, old, new in KNOWN:
        source = (PACKAGE / file).read_text(encoding="utf-8")
        if source.count(old) != 1:
            raise SystemExit(f"{file}: {old!r} is not there once; update KNOWN in tools/mutants.py")
        start = source.index(old)
        found.append(Mutant(file, source.count("\n", 0, start) + 1, start, start + len(old), new, old))
    return found


def test_files(file: str) -> list[str]:
    """The tests of a file of the package."""
    names = next(
        (tests for place, tests in TESTS.items() if file == place or (place.endswith("/") and file.startswith(place))),
        (),
    )
    return [f"tests/{name}" for name in names if (ROOT / "tests" / name).exists()]


# ---------------------------------------------------------------- testing a mutant


class Overlay:
    """A copy of the package in which one file at a time is changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        compileall.compile_dir(folder / "src", quiet=2)

    def verdict(self, mutant: Mutant | None, tests: Sequence[str]) -> str:
        """``killed``, ``survived`` or ``hangs``; without a mutant, the tests must pass."""
        if mutant is None:
            return self._run(tests)
        path = self.folder / "src" / "tag2box" / mutant.file
        source = path.read_text(encoding="utf-8")
        compiled = Path(importlib.util.cache_from_source(f"{path}"))
        compiled.unlink(missing_ok=True)  # its time stamp counts seconds
        try:
            path.write_text(mutant.apply(source), encoding="utf-8")
            return self._run(tests)
        finally:
            path.write_text(source, encoding="utf-8")

    def _run(self, tests: Sequence[str]) -> str:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os._exit(self._child(tests))
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return "killed" if os.waitstatus_to_exitcode(status) else "survived"
            time.sleep(0.02)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "hangs"

    def _child(self, tests: Sequence[str]) -> int:
        silent = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(silent, number)
        sys.dont_write_bytecode = True
        sys.path.insert(0, f"{self.folder / 'src'}")
        os.environ.update(
            PYTHONPATH=f"{self.folder / 'src'}", PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1",
            HYPOTHESIS_STORAGE_DIRECTORY=f"{self.folder / 'hypothesis'}",
        )  # fmt: skip
        os.chdir(ROOT)
        try:
            import pytest

            options = [
                "-x",
                "-q",
                "-p",
                "no:cacheprovider",
                "-p",
                "no:xdist",
                "-W",
                "ignore",
                f"--basetemp={self.folder / 'pytest'}",
            ]
            return int(pytest.main([*options, *tests]))
        except BaseException:
            return 1


# ---------------------------------------------------------------- results


def load_results() -> dict[str, dict[str, object]]:
    """Verdicts by mutant, of files that are still as they were."""
    known = json.loads(RESULTS.read_text(encoding="utf-8"))["mutants"] if RESULTS.exists() else {}
    digests = {file: file_digest(file) for file in {str(entry["file"]) for entry in known.values()}}
    return {key: entry for key, entry in known.items() if digests[str(entry["file"])] == entry["digest"]}


def file_digest(file: str) -> str:
    """Digest of a file of the package; empty if it is gone."""
    path = PACKAGE / file
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


def write_results(results: dict[str, dict[str, object]], total: int) -> None:
    """Write both files."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"total": total, "mutants": results}, indent=1) + "\n", encoding="utf-8")
    RESULTS.with_suffix(".md").write_text(_markdown(results, total), encoding="utf-8")


def _markdown(results: dict[str, dict[str, object]], total: int) -> str:
    counts: dict[str, Counter[str]] = {}
    for entry in results.values():
        row = counts.setdefault(str(entry["file"]), Counter())
        row["tested"] += 1
        row["killed"] += entry["verdict"] != "survived"
        row["survived"] += entry["verdict"] == "survived"
    heads = ("tested", "killed", "survived")
    lines = [
        "# Mutants", "",
        f"`make mutants`: {len(results)} of {total} mutants tested. One that makes a test hang counts as killed.", "",
        f"| file | {' | '.join(heads)} |", "|---|---:|---:|---:|",
    ]  # fmt: skip
    for file, row in sorted(counts.items()):
        lines.append(f"| {file} | {' | '.join(str(row[head]) for head in heads)} |")
    all_of = sum(counts.values(), Counter[str]())
    lines += [f"| **all** | {' | '.join(str(all_of[head]) for head in heads)} |", "", "## Survivors", ""]
    survivors = [entry for _, entry in sorted(results.items()) if entry["verdict"] == "survived"]
    lines += [f"- {e['file']}:{e['line']}: `{e['code']}`: `{e['old']}` to `{e['new']}`" for e in survivors] or ["None."]
    return "\n".join(lines) + "\n"


def _entry(mutant: Mutant, verdict: str) -> dict[str, object]:
    source = (PACKAGE / mutant.file).read_text(encoding="utf-8")
    code = source.splitlines()[mutant.line - 1].strip()
    shown = {"old": " ".join(mutant.old.split()), "new": " ".join(mutant.new.split())}
    return {
        "file": mutant.file,
        "line": mutant.line,
        "code": code,
        **shown,
        "verdict": verdict,
        "digest": file_digest(mutant.file),
    }


@contextlib.contextmanager
def _overlay() -> Iterator[Overlay]:
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="tag2box-mutants-") as name:
        yield Overlay(Path(name))


def main(argv: Sequence[str] | None = None) -> int:
    """Test mutants; 1 if a known one survives, or if tests fail without a mutant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, help="size of the sample; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="beginning of the file's path below the package, such as ops/ or io.py")
    parser.add_argument("--survivors", action="store_true", help="test those again that survived, with newer tests")
    parser.add_argument("--known", action="store_true", help="test the hand-made mutants instead; writes nothing")
    args = parser.parse_args(argv)
    chosen = known_mutants() if args.known else all_mutants(args.only)
    total = len(all_mutants())
    if args.count is not None and args.count < len(chosen):
        chosen = random.Random(args.seed).sample(chosen, args.count)
    results = {} if args.known else load_results()
    if args.survivors:
        chosen = [m for m in all_mutants() if results.get(m.key, {}).get("verdict") == "survived"]
        results = {key: entry for key, entry in results.items() if entry["verdict"] != "survived"}
    left = sorted((m for m in chosen if m.key not in results), key=lambda m: m.file)
    with _overlay() as overlay:
        for tests in sorted({tuple(test_files(m.file)) for m in left}):
            if overlay.verdict(None, tests) != "survived":
                print(f"{' '.join(tests)}: fail without a mutant", file=sys.stderr)
                return 1
        survived = 0
        for number, mutant in enumerate(left, 1):
            verdict = overlay.verdict(mutant, test_files(mutant.file))
            survived += verdict == "survived"
            print(
                f"{number}/{len(left)} {verdict}: {mutant.file}:{mutant.line} {mutant.old!r} -> {mutant.new!r}",
                flush=True,
            )
            results[mutant.key] = _entry(mutant, verdict)
            if not args.known:
                write_results(results, total)
    return int(args.known and survived > 0)


if __name__ == "__main__":
    sys.exit(main())
