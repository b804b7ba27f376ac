"""Every file of examples/ is executed, on tiny photos."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tag2box import recipes, runs
from tag2box.data.scenes import Scenes
from tag2box.formats.csv_tags import read_tags
from tiny_world import small_config, small_data, small_network

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ELSEWHERE = {
    "own_loop.py": "training/test_loss_term_guide.py",
    "onnx_inference.py": "student/test_student_export.py",  # is the script that an export writes, and runs there
}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """Tags, photos and a new folder; the recipe is small, and its network tiny."""
    small_data(tmp_path)
    small_network(monkeypatch)
    monkeypatch.setitem(recipes.RECIPES, "photos-frozen", lambda: small_config(tmp_path))
    return tmp_path / "tags.csv", tmp_path / "photos", tmp_path / "out"


def example(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_no_example_is_left_out() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    files = {path.name for path in EXAMPLES.glob("*.py")}
    assert {name for name in files if f'example("{name[:-3]}")' not in text} == set(ELSEWHERE)
    for name, place in ELSEWHERE.items():
        assert name in (Path(__file__).parent / place).read_text(encoding="utf-8")


def test_mil_heads(data: tuple[Path, Path, Path]) -> None:
    courses = example("mil_heads").main(*data, iterations=2)
    assert set(courses) == {"wsddn", "c-mil", "c-midn"}
    assert all(len(course) == 2 and min(course) > 0 for course in courses.values())


def test_pseudo_boxes(data: tuple[Path, Path, Path]) -> None:
    found = example("pseudo_boxes").main(*data, iterations=2)
    assert found["oicr"] == 1.0  # one box per tag
    assert set(found) == {"oicr", "pcl", "mist", "oim", "slv"} and min(found.values()) > 0


def test_contrastive(data: tuple[Path, Path, Path]) -> None:
    terms = example("contrastive").main(*data, iterations=2)
    assert {name: "contrast" in own for name, own in terms.items()} == {
        "OICR+": False, "OICR+ with OD": False, "OICR+ with WSCL": True, "OD-WSCL": True,
    }  # fmt: skip


def test_counts(data: tuple[Path, Path, Path]) -> None:
    tags, photos, out = data
    with pytest.raises(SystemExit, match="has no counts"):
        example("counts").main(*data, iterations=2)
    tagged = read_tags(tags, photos)
    rows = [[c for c, on in zip(tagged.classes, row, strict=True) if on] for row in tagged.tags.tolist()]
    lines = [
        f"{p.path.name},{';'.join(r)},{';'.join(f'{c}:2' for c in r)}" for p, r in zip(tagged.photos, rows, strict=True)
    ]
    tags.write_text("\n".join(["image,tags,counts", *lines]) + "\n")
    given, boxes = example("counts").main(tags, photos, out, iterations=2)
    assert given == 2.0 and 1.0 <= boxes <= 2.0


def test_evidence(data: tuple[Path, Path, Path]) -> None:
    assert example("evidence").main(*data, iterations=2)["refine"] > 0


def test_attention(data: tuple[Path, Path, Path]) -> None:
    assert "attention" in example("attention").main(*data, iterations=2)


def test_early_proposals(data: tuple[Path, Path, Path]) -> None:
    assert example("early_proposals").main(*data, iterations=2)["mil"] > 0
    assert runs.read_config(data[2]).proposals.kind == "wsrpn"


def test_own_backbone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_data(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setitem(recipes.RECIPES, "photos-frozen", lambda: small_config(tmp_path))
    example("own_backbone").main(tmp_path / "tags.csv", tmp_path / "photos", tmp_path / "out", iterations=2)
    assert type(runs.load_run(tmp_path / "out").detector.backbone).__name__ == "PlainBackbone"


def test_own_proposals(data: tuple[Path, Path, Path]) -> None:
    counts = example("own_proposals").main(*data, iterations=2)
    assert len(counts) == 4 and min(counts.values()) > 5


class SmallScenes(Scenes):
    """Scenes as the examples draw them, but small."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{**given, "train": 4, "test": 2, "width": 96, "height": 96, "smallest": 24, "largest": 48})


@pytest.fixture
def small_scenes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_network(monkeypatch)
    monkeypatch.setattr("tag2box.data.scenes.Scenes", SmallScenes)
    monkeypatch.setitem(recipes.RECIPES, "scenes", lambda: small_config(tmp_path))
    for name in ("own_labeler", "train_from_python"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path / "out"


def test_own_labeler(small_scenes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("own_labeler").main(small_scenes, iterations=2)
    assert "detections" in capsys.readouterr().out


def test_train_from_python(small_scenes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example("train_from_python").main(small_scenes, iterations=2)
    assert "voc07" in capsys.readouterr().out and list((small_scenes / "drawn").iterdir())


def test_tags_from_voc(tmp_path: Path) -> None:
    Scenes(train=2, test=1, width=96, height=96, smallest=24, largest=48).write(tmp_path)
    example("tags_from_voc").main(tmp_path / "train" / "truth.json", None, tmp_path / "tags.csv")
    written = read_tags(tmp_path / "tags.csv", tmp_path / "train" / "photos")
    assert len(written) == 2 and written.tags.any()
