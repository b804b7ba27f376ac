"""The simulated reviewer: its order, its table, and a whole study with the tiny network, resumed without work."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from bench_figures import bench
from tag2box.cli.label_export import convert
from tag2box.formats.listing import DataSource
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos
from tiny import tiny_photos
from tiny_world import small_network, story, tree

SETTINGS = ("heads.embed_dim=6", "proposals.min_side=6", "proposals.max_boxes=12", "loader.batch_size=2",
            "loader.resize.scales=[48]", "inference.scales=[48]", "plan.iterations=2", "plan.gallery=0")  # fmt: skip


@pytest.fixture
def oracle() -> ModuleType:
    return bench("oracle_reviewer")


def voc_folder(folder: Path) -> Path:
    """Eight tiny photos with one box per tag, split in two."""
    photos = tiny_photos(folder, 8)
    images = [
        {"id": i, "file_name": p.path.name, "width": p.width, "height": p.height} for i, p in enumerate(photos.photos)
    ]
    rows = [(i, c) for i, tags in enumerate(photos.tags.tolist()) for c, is_tag in enumerate(tags) if is_tag]
    boxes = [
        {"id": n, "image_id": i, "category_id": c, "bbox": [4 + 10 * c, 6, 16, 20], "area": 320, "iscrowd": 0}
        for n, (i, c) in enumerate(rows)
    ]
    categories = [{"id": c, "name": name} for c, name in enumerate(photos.classes)]
    file = folder / "truth.json"
    file.write_text(json.dumps({"images": images, "categories": categories, "annotations": boxes}))
    source = DataSource(path=file, photos=folder / "photos")
    convert(source, folder / "VOC", export="voc", splits={"train": 0.5, "test": 0.5})
    return folder / "VOC"


@pytest.mark.slow
def test_a_study_reviews_trains_and_measures_once(
    tmp_path: Path, oracle: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_network(monkeypatch)
    out = tmp_path / "out"
    overrides = [word for one in SETTINGS for word in ("--set", one)]
    argv = [f"{voc_folder(tmp_path)}", "--recipe", "od-wscl", "--out", f"{out}", "--shares", "50", *overrides]
    oracle.main(argv)
    written = json.loads((out / "oracle.json").read_text())
    found = written["rows"]
    assert written["command"].startswith("python benchmarks/oracle_reviewer.py") and written["commit"]
    photos = len((tmp_path / "VOC" / "ImageSets" / "Main" / "train.txt").read_text().split())
    assert [row["row"] for row in found] == ["tags", "tags, longer", "random 50 %", "queue 50 %", "all boxes"]
    assert [row["photos"] for row in found] == [0, 0, round(photos / 2), round(photos / 2), photos]
    assert [row["boxes"] > 0 for row in found] == [False, False, True, True, True]
    assert all(row["mAP50"] is not None and row["trivial"] for row in found)
    assert [row["CorLoc of tags, longer"] is None for row in found] == [True, True, False, False, True]
    # Half of the tags have an object that no proposal reaches, so that a perfect choice gives 0.5, too.
    assert [row["CorLoc of a perfect choice"] for row in found] == [0.5] * 4 + [None]
    start = story(out / "seed0" / "all-boxes")[0]
    assert (start["boxed_photos"], start["boxes"]) == (photos, found[-1]["boxes"])
    before, table = tree(out / "seed0"), capsys.readouterr().out
    oracle.main(argv)
    assert tree(out / "seed0") == before and capsys.readouterr().out == table
    assert table.count("\n") == 7 and "| all boxes |" in table


def test_doubtful_photos_come_first(oracle: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "QUEUE", "tag2box.labels.no_such_module")
    sure = LabelBox((0, 0, 9, 9), "a", 0.9, margin=0.9)
    boxes = {
        "sure": (sure,),
        "close": (LabelBox((0, 0, 9, 9), "a", 0.9, margin=0.1),),
        "nested": (LabelBox((0, 0, 9, 9), "a", 0.9, margin=0.9, alternative=(1, 1, 2, 2)),),
        "empty": (),
    }
    photos = tuple(
        LabelledPhoto(name, f"{name}.jpg", 10, 10, ("a",) if own else (), own) for name, own in boxes.items()
    )
    labels = LabelSet(LabelledPhotos(Path(), ("a",), photos))
    assert oracle.review_order(labels, "queue", 0) == ["nested", "close", "sure", "empty"]
    drawn = [oracle.review_order(labels, "random", seed) for seed in range(4)]
    assert drawn[0] == oracle.review_order(labels, "random", 0)
    assert all(sorted(own) == sorted(boxes) for own in drawn) and len(set(map(tuple, drawn))) > 1


def test_the_table_has_means_and_ranges(oracle: ModuleType) -> None:
    assert oracle.markdown([]).count("\n") == 1
    cells = {"photos": 3, "boxes": 9, "trivial": {"whole photo": 0.1}, "CorLoc of the others": None}
    rows = [{"row": "tags", "mAP50": value, **cells} for value in (0.25, 0.35)]
    assert oracle.markdown(rows).splitlines()[-1] == "| tags | 3 | 9 | 30.0 (25.0 to 35.0) | 10.0 | - | - | - |"
