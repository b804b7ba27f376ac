"""tools/words.py: banned words are found in prose and identifiers, and exceptions are per line."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TOOLS)
    return importlib.import_module("words")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", []),
        ("Plucky sailors accompany no rivalry.", []),
        ("By luck.", ["1: luck"]),
        ("LUCK and\nLuck", ["1: LUCK", "2: Luck"]),
        ("step_luck = LuckSource(StepLuck)", ["1: Luck", "1: luck"]),
        ("luck2 = 1", ["1: luck"]),
        ("It was broken\n# off.", ["1: broken # off"]),
        ("def goes_on(): ...", ["1: goes_on"]),
        ("kept maps, KeptMaps, keptmaps", ["1: KeptMaps", "1: kept maps"]),
        ("2,000 proposals a photo", ["1: proposals a photo"]),
        ("2,000 proposals per photo; a photo", []),
        ("see spec/method.md", ["1: spec/method.md"]),
        ("--data ../shared/data", ["1: ../shared"]),
        ("| | measured | asked | holds |", ["1: measured | asked | holds"]),
    ],
)
def test_words_are_found(words: ModuleType, text: str, found: list[str]) -> None:
    assert [f"{f.line}: {f.word}" for f in words.findings("docs/page.md", text)] == found


@pytest.mark.parametrize(
    ("path", "text", "count"),
    [
        ("a.py", '"""The objective of the paper."""', 0),
        ("a.py", "objective = 1", 1),
        ("a.py", "my_objective = make(total_objective)", 2),
        ("a.py", "class ObjectiveTwin: ...", 1),
        ("a.py", 'x["objective"]', 1),
        ("a.py", "objectively = subjective = 1", 0),
        ("a.md", "The objective is minimised.", 0),
        ("a.md", "Set `objective.labeler.kind`.", 1),
    ],
)
def test_some_words_are_banned_as_names_only(words: ModuleType, path: str, text: str, count: int) -> None:
    assert len(words.findings(path, text)) == count


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "src" / "tag2box").mkdir(parents=True)
    (tmp_path / "src" / "tag2box" / "a.py").write_text("x = 1\nclue = 2  # read from old files\nclue_box = 3\n")
    (tmp_path / "src" / "tag2box.egg-info").mkdir()
    (tmp_path / "src" / "tag2box.egg-info" / "SOURCES.txt").write_text("luck.py")
    (tmp_path / "README.md").write_text("Nobody knows.")
    (tmp_path / "CHANGELOG.md").write_text("Luck was renamed.")
    return tmp_path


def run(words: ModuleType, root: Path, allowed: str, *options: str) -> int:
    (root / "allowed.txt").write_text(allowed)
    return int(words.main(["--root", str(root), "--allowed", str(root / "allowed.txt"), *options]))


def test_findings_fail_with_file_line_and_suggestion(
    words: ModuleType, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words, repository, "") == 1
    assert capsys.readouterr().out.splitlines() == [
        "src/tag2box/a.py:2: clue -> side info",
        "src/tag2box/a.py:3: clue -> side info",
        "README.md:1: Nobody -> no process, no caller",
    ]


def test_exceptions_are_per_line(words: ModuleType, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    allowed = "# comment\n\nsrc/tag2box/a.py: from old files: on disk\nREADME.md: *: people\n"
    assert run(words, repository, allowed) == 1
    assert capsys.readouterr().out.splitlines() == ["src/tag2box/a.py:3: clue -> side info"]
    assert run(words, repository, allowed + "src/tag2box/a.py: clue_box: too\n") == 0


def test_an_exception_that_allows_nothing_fails(
    words: ModuleType, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    allowed = "src/tag2box/a.py: *: all\nREADME.md: *: people\nREADME.md: luck: none there\n"
    assert run(words, repository, allowed) == 1
    assert "README.md: luck: allows nothing" in capsys.readouterr().out


def test_a_broken_line_of_exceptions_is_named(words: ModuleType, repository: Path) -> None:
    with pytest.raises(SystemExit, match=r"allowed\.txt:2: expected `path: substring: reason`"):
        run(words, repository, "# head\nREADME.md\n")


def test_the_summary_counts_per_folder(words: ModuleType, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words, repository, "", "--summary") == 1
    assert capsys.readouterr().out.split() == ["2", "src/tag2box", "1", "README.md"]
