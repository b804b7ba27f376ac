"""docs/adding-a-labeler.md, executed: its file, its test, and its commands, on tiny photos."""

import shlex
import sys
from pathlib import Path

import pytest

from pages import DOCS, blocks, load
from strategies import make_labeler_input
from tag2box import settings
from tag2box.errors import UserError
from tag2box.extend import load_part
from tag2box.recipes import Config
from tag2box.runs import read_config
from tag2box.types import Requirements
from tiny_world import call, small_data, small_network

GUIDE = DOCS / "adding-a-labeler.md"
KIND = "criterion.labeler.kind=my_labelers:Doubt"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's folder: the file of the guide, photos and tags."""
    code = next(text for text in blocks(GUIDE, "python") if "class Doubt" in text)
    (tmp_path / "my_labelers.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_labelers", raising=False)
    load_part.cache_clear()
    return tmp_path


def commands() -> list[list[str]]:
    text = "\n".join(blocks(GUIDE, "")).replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("tag2box ")]


def test_the_commands_train_detect_and_resume(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_data(folder)
    small_network(monkeypatch)
    train, detect, resume = commands()
    assert [words[0] for words in (train, detect, resume)] == ["train", "detect", "train"] and "--resume" in resume
    for words in (train, detect, resume):
        done = call(words, monkeypatch, capsys)
        assert done.code == 0, done.err
    assert 'kind = "my_labelers:Doubt"' in (folder / "runs/doubt/config.toml").read_text(encoding="utf-8")
    assert (folder / "boxes.json").exists()
    assert read_config(folder / "runs/doubt").plan.iterations <= 100  # a first try takes minutes


def test_the_labeler_passes_its_own_test_and_the_empty_cases(folder: Path) -> None:
    code = next(text for text in blocks(GUIDE, "python") if "def test_" in text)
    (folder / "test_doubt.py").write_text(code, encoding="utf-8")
    load(folder / "test_doubt.py").test_background_has_a_lower_weight_and_all_else_is_oicr()
    doubt = load_part("my_labelers:Doubt")
    for sizes, tags in (((), []), ((0,), [[1]]), ((3,), [[0]]), ((1,), [[1]])):
        labeling = doubt()(make_labeler_input(sizes, tags))
        assert [len(stage.cls) for stage in labeling.stages] == [sum(sizes)] * 3
    assert doubt().requirements == Requirements()


def test_its_fields_are_settings_with_bounds(folder: Path) -> None:
    read = settings.load(Config, [], [KIND, "criterion.labeler.background=0.25"])
    assert read.criterion.labeler == load_part("my_labelers:Doubt")(background=0.25)
    with pytest.raises(UserError, match="background"):
        settings.load(Config, [], [KIND, "criterion.labeler.background=2"])


def test_the_guide_names_what_a_built_in_labeler_needs() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    for file in ("src/tag2box/methods", "src/tag2box/extend.py", "tests/methods", "tests/settings_table.py"):
        assert f"`{file}`" in text and (DOCS.parent / file).exists()
