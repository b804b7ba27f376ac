"""Word list of the project: fails on private metaphors, personified machines and references to unpublished papers.

    python tools/words.py               # file:line: word -> suggestion; exit code 1 if there is any
    python tools/words.py --summary     # number of findings per folder

Whole words, whatever their case, in prose and in identifiers (``step_luck`` and ``LuckSource`` contain "luck").
Exceptions are lines of words_allowed.txt, ``path: substring: reason``: findings on lines of that file that contain the
substring are allowed (``*``: on all lines). An exception that allows nothing is reported, too.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = Path(__file__).with_name("words_allowed.txt")
PLACES = ("src", "docs", "examples", "benchmarks", "tools", "tests", "README.md", "CONTRIBUTING.md", "SECURITY.md")
SUFFIXES = (".py", ".md", ".toml", ".html", ".txt", ".css")
RATES = r"(?:boxes|proposals|seconds|numbers|objects|megabytes|gigabytes|KB|MB|GB|rows|lines|views)"
ITEMS = r"(?:photo|image|proposal|class|row|step|box|core|call|tag|iteration|process|seed)"

WORDS: dict[str, str] = {
    "luck": "RNG",
    "dice": "RNG stream",
    "looks": "views (or another verb: machines do not look)",
    "rival": "adversary",
    "rivals": "adversaries",
    "oppose": "adversarial step",
    "anew": "again",
    "broken off": "interrupted",
    "goes on": "resumes, continues",
    "company": "context, batch",
    "nobody": "no process, no caller",
    "somebody": "a process, a caller",
    "whoever": "whichever process",
    "clue": "side info",
    "clues": "side info",
    "fates": "outcomes",
    "kept maps": "feature cache",
    "sift": "subset",
    "sifted": "subset",
    "optimiser": "optimizer",
    "regulariser": "regularizer",
}
"""Words and phrases, with what to write instead."""
TEXTS: dict[str, str] = {
    r"\bmeasured \| asked \| holds\b": "measured | target | met",
    r"\bspec/method\.md": "docs/method.md",
    r"\.\./shared\b": "a path that readers have",
    r"\bstyle rule R\d": "the rule itself",
    rf"\b{RATES} an? {ITEMS}\b": "per",
}
"""Regular expressions on the text as it is, with what to write instead."""
IDENTIFIERS: dict[str, str] = {"objective": "criterion"}
"""Words that are fine in prose, but not as names: of variables, functions, settings."""


@dataclass(frozen=True)
class Finding:
    """A word that should not be there."""

    path: str
    line: int
    word: str
    suggestion: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word} -> {self.suggestion}"


@dataclass(frozen=True)
class AllowedLine:
    """Lines of a file on which findings are allowed."""

    path: str
    substring: str
    reason: str

    def allows(self, path: str, line: str) -> bool:
        """Whether it covers a line."""
        return path == self.path and (self.substring == "*" or self.substring in line)


# ---------------------------------------------------------------- search


def _pattern(phrase: str) -> re.Pattern[str]:
    """A phrase in prose or in an identifier, also with a line break or a comment sign between its words."""
    words = phrase.split()
    prose = r"[\s#]+".join(words)
    snake = "_".join(words)
    camel = "".join(word.capitalize() for word in words)
    plain = rf"(?<![A-Za-z])(?:{prose}|{snake})(?![A-Za-z])"
    return re.compile(rf"(?i:{plain})|(?<![A-Z]){camel}(?![a-z])")


_PATTERNS = {phrase: (_pattern(phrase), suggestion) for phrase, suggestion in WORDS.items()}
_TEXTS = [(re.compile(text), suggestion) for text, suggestion in TEXTS.items()]
_KEYS = {word: re.compile(rf"(?<=[`\"'.]){word}(?=[.`\"'=])") for word in IDENTIFIERS}


def findings(path: str, text: str) -> list[Finding]:
    """All findings in a text, by line."""
    starts = [(match.start(), match.group(), suggestion) for match, suggestion in _matches(text)]
    found = {(text.count("\n", 0, start) + 1, " ".join(word.split()), suggestion) for start, word, suggestion in starts}
    if path.endswith(".py"):
        found |= _identifiers(text)
    return [Finding(path, *item) for item in sorted(found)]


def _matches(text: str) -> Iterator[tuple[re.Match[str], str]]:
    for pattern, suggestion in (*_PATTERNS.values(), *_TEXTS):
        yield from ((match, suggestion) for match in pattern.finditer(text))
    for word, key in _KEYS.items():
        yield from ((match, IDENTIFIERS[word]) for match in key.finditer(text))


def _identifiers(text: str) -> set[tuple[int, str, str]]:
    """Names in Python code that are, or contain, a word of IDENTIFIERS."""
    names = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.NAME]
    return {
        (token.start[0], token.string, suggestion)
        for token in names
        for word, suggestion in IDENTIFIERS.items()
        if re.search(rf"(?<![a-z]){word}(?![a-z])|{word.capitalize()}(?![a-z])", token.string)
    }


# ---------------------------------------------------------------- files


def source_files(root: Path) -> Iterator[Path]:
    """All files that are searched."""
    for place in PLACES:
        path = root / place
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        files = (file for file in inside if file.is_file() and file.suffix in SUFFIXES)
        yield from (file for file in files if not any(part.endswith(".egg-info") for part in file.parts))


def read_allowed(path: Path) -> list[AllowedLine]:
    """The exceptions; empty lines and those that begin with # are skipped."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    allowed = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = line.split(": ", 2)
        if len(fields) != 3:
            raise SystemExit(f"{path}:{number}: expected `path: substring: reason`, got {line!r}")
        allowed.append(AllowedLine(*fields))
    return allowed


def check(root: Path, allowed: Sequence[AllowedLine]) -> tuple[list[Finding], list[AllowedLine]]:
    """Findings that no exception covers, and exceptions that cover nothing."""
    left: list[Finding] = []
    used: set[AllowedLine] = set()
    for file in source_files(root):
        path, text = file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")
        lines = text.splitlines()
        for finding in findings(path, text):
            covering = [e for e in allowed if e.allows(path, lines[finding.line - 1])]
            used.update(covering)
            left += [] if covering else [finding]
    return left, [line for line in allowed if line not in used]


def summary(found: Iterable[Finding]) -> list[str]:
    """Findings per folder, the most first; of the package, per subpackage."""
    rooms: Counter[str] = Counter()
    for finding in found:
        parts = finding.path.split("/")
        depth = 3 if parts[0] == "src" else 2 if parts[0] == "tests" else 1
        rooms["/".join(parts[: min(depth, max(1, len(parts) - 1))] if len(parts) > 1 else parts)] += 1
    return [f"{count:5d}  {room}" for room, count in rooms.most_common()]


def main(argv: Sequence[str] | None = None) -> int:
    """Print all findings; 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=ROOT, help="folder of the repository")
    parser.add_argument("--allowed", type=Path, default=ALLOWED, help="file of exceptions")
    parser.add_argument("--summary", action="store_true", help="number of findings per folder instead of each")
    args = parser.parse_args(argv)
    found, unused = check(args.root, read_allowed(args.allowed))
    print(*(summary(found) if args.summary else found), sep="\n", end="\n" if found else "")
    for line in unused:
        print(f"{args.allowed.name}: {line.path}: {line.substring}: allows nothing -> delete the line")
    return 1 if found or unused else 0


if __name__ == "__main__":
    sys.exit(main())
