"""House rules of the package: size, imports, unique names, and how many files one batch passes through.

python tools/house.py               # table of all measures; exit code 1 if one exceeds its bar
python tools/house.py --no-trace    # without the two short training runs
python tools/house.py --verbose     # with the names behind every number
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "tag2box"
BARS: dict[str, float] = {
    # 155 before storage, labels, review, student, formats of tools, adaptation and MobileSAM were added; four since are
    # addresses, row_parts, rows and row_jobs: photos, results in object storage; agreement, merge and quality three.
    "files": 228,
    "import statements, % of non-blank lines": 6.5,
    "module names used twice": 0,
    "public names defined twice": 15,
    "modules with a single importer": 45,
    "lines of the longest file": 400,
    "one batch: files": 25,  # 45 in version 0.1.0
    "one batch: functions": 150,  # 193
    "one batch, step alone: files": 18,  # 32
    "one batch, step alone: functions": 112,  # 155
    # Two are the search for proposals, which OpenCV did before; two keep detections on disk instead of in memory; three
    # have the precision and the engine of the network, and look for features of training photos in the cache.
    "one photo of detect: files": 32,
}
"""Upper limits. A measure without a bar is only reported."""
SHOWN = 20
"""Names that a violation lists."""


@dataclass(frozen=True)
class Measure:
    """A number, its bar, and the names that make it up."""

    name: str
    value: float
    details: tuple[str, ...] = ()

    @property
    def bar(self) -> float | None:
        """The highest allowed value, if there is one."""
        return BARS.get(self.name)

    @property
    def is_ok(self) -> bool:
        """Whether the value is within its bar."""
        return self.bar is None or self.value <= self.bar


# ---------------------------------------------------------------- source files


@dataclass(frozen=True)
class Module:
    """A source file of the package."""

    name: str  # dotted; of a package, without __init__
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Its syntax tree."""
        return ast.parse(self.text, filename=str(self.path))

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.name if self.path.stem == "__init__" else self.name.rpartition(".")[0]

    @property
    def imports(self) -> list[ast.Import | ast.ImportFrom]:
        """All import statements, also those inside functions; a wrapped one counts once."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def read_modules(package: Path) -> dict[str, Module]:
    """All modules below a package's folder, by dotted name."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path, path.read_text(encoding="utf-8"))
    return modules


def measure_sources(package: Path) -> list[Measure]:
    """All measures that need no run."""
    modules = read_modules(package)
    return [
        Measure("files", len(modules)),
        import_share(modules.values()),
        repeated_basenames(modules.values()),
        repeated_names(modules.values()),
        single_importers(modules),
        longest_file(modules.values()),
    ]


def import_share(modules: Iterable[Module]) -> Measure:
    """Import statements per non-blank line, in per cent; details are the modules with the most."""
    counts = {module.name: len(module.imports) for module in modules}
    lines = sum(1 for module in modules for line in module.text.splitlines() if line.strip())
    most = sorted(counts, key=lambda name: -counts[name])[:10]
    share = 100 * sum(counts.values()) / max(lines, 1)
    name = "import statements, % of non-blank lines"
    return Measure(name, round(share, 2), tuple(f"{module}: {counts[module]}" for module in most))


def repeated_basenames(modules: Iterable[Module]) -> Measure:
    """File names that occur in two folders."""
    counts = Counter(module.path.name for module in modules if module.path.stem != "__init__")
    return Measure(
        "module names used twice",
        sum(count > 1 for count in counts.values()),
        tuple(f"{name}: {count} files" for name, count in sorted(counts.items()) if count > 1),
    )


def repeated_names(modules: Iterable[Module]) -> Measure:
    """Public names that two modules define: top-level functions, classes and constants."""
    homes: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for name in sorted(set(_public_names(module.tree))):
            homes[name].append(module.name)
    repeated = {name: places for name, places in sorted(homes.items()) if len(places) > 1}
    details = tuple(f"{name}: {', '.join(places)}" for name, places in repeated.items())
    return Measure("public names defined twice", len(repeated), details)


def _public_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            inside = [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
            names = [n.id for n in inside]
        yield from (name for name in names if not name.startswith("_") or name.endswith("__"))


def single_importers(modules: Mapping[str, Module]) -> Measure:
    """Modules that exactly one other module imports; packages themselves are not counted."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module in modules.values():
        for target in _imported(module, modules):
            importers[target].add(module.name)
    files = [name for name, module in modules.items() if module.path.stem not in {"__init__", "__main__"}]
    single = [name for name in files if len(importers[name] - {name}) == 1]
    details = tuple(f"{name}: {', '.join(importers[name])}" for name in single)
    return Measure("modules with a single importer", len(single), details)


def _imported(module: Module, modules: Mapping[str, Module]) -> Iterator[str]:
    """Names of the package's modules that a module imports."""
    for node in module.imports:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
            continue
        above = module.package.split(".")[: None if node.level < 2 else 1 - node.level] if node.level else []
        source = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            whole = f"{source}.{alias.name}"
            target = whole if whole in modules else source
            if target in modules:
                yield target


def longest_file(modules: Iterable[Module]) -> Measure:
    """Lines of the longest file; details are all files above the bar."""
    name = "lines of the longest file"
    lengths = {module.name: len(module.text.splitlines()) for module in modules}
    long = [f"{module}: {lines}" for module, lines in lengths.items() if lines > BARS[name]]
    return Measure(name, max(lengths.values(), default=0), tuple(long))


# ---------------------------------------------------------------- traced runs


def measure_calls() -> list[Measure]:
    """Files and functions that one batch and one photo pass through, from traced tiny runs."""
    from call_trace import trace_all  # needs torch

    with tempfile.TemporaryDirectory() as folder:
        passed = trace_all(Path(folder))
    batch, step, live, photo = (passed[name] for name in ("batch", "step", "live", "photo"))
    return [
        Measure("one batch: files", len(batch.files), batch.files),
        Measure("one batch: functions", len(batch.functions), batch.functions),
        Measure("one batch, step alone: files", len(step.files), step.files),
        Measure("one batch, step alone: functions", len(step.functions), step.functions),
        Measure("one batch, live pixels: files", len(live.files), live.files),
        Measure("one batch, live pixels: functions", len(live.functions), live.functions),
        Measure("one photo of detect: files", len(photo.files), photo.files),
        Measure("one photo of detect: functions", len(photo.functions), photo.functions),
    ]


# ---------------------------------------------------------------- output


def table(measures: Sequence[Measure]) -> str:
    """Measure, value, bar and whether it is met."""
    rows = [("measure", "value", "bar", "ok")]
    for m in measures:
        verdict = "" if m.bar is None else "yes" if m.is_ok else "NO"
        rows.append((m.name, f"{m.value:g}", "" if m.bar is None else f"{m.bar:g}", verdict))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}  {d}".rstrip() for a, b, c, d in rows]
    return "\n".join(lines)


def as_json(measures: Sequence[Measure]) -> str:
    """The same for programs."""
    rows = [{"name": m.name, "value": m.value, "bar": m.bar, "ok": m.is_ok, "details": m.details} for m in measures]
    return json.dumps(rows, indent=1)


def violations(measures: Sequence[Measure]) -> list[str]:
    """One line per exceeded bar, with the first names behind it."""
    lines = []
    for m in (m for m in measures if not m.is_ok):
        more = len(m.details) - SHOWN
        rest = (f"... and {more} more: --verbose",) if more > 0 else ()
        names = "".join(f"\n    {line}" for line in (*m.details[:SHOWN], *rest))
        lines.append(f"house rule: {m.name}: {m.value:g}, at most {m.bar:g} allowed{names}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print all measures; 1 if a bar is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, default=PACKAGE, help="folder of the package")
    parser.add_argument("--no-trace", action="store_true", help="leave out the traced runs")
    parser.add_argument("--verbose", action="store_true", help="print the names behind every number")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    measures = measure_sources(args.package) + ([] if args.no_trace else measure_calls())
    print(as_json(measures) if args.json else table(measures))
    if args.verbose and not args.json:
        for m in measures:
            print(f"\n{m.name}:", *(f"  {line}" for line in m.details), sep="\n")
    failed = violations(measures)
    print(*failed, sep="\n", end="\n" if failed else "", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
