"""Names of classes, photos and runs on the terminal: every command shows them as text, whatever is in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.table import Table
from typer.testing import CliRunner, Result

from tag2box.annotations import Photo
from tag2box.cli import app, options
from tag2box.cli.detect import detect
from tag2box.cli.train import train
from tiny import tiny_photos
from tiny_world import call, small_config, small_network

NAMES = ("[red]cat[/red]", "[/]", "\x1b[31mdog\x1b[0m", "\x1b]0;title\x07", "a\u202eb", "../../x", "two\nlines")
SHOWN = ("[red]cat[/red]", "[/]", r"\x1b[31mdog\x1b[0m", r"\x1b]0;title\x07", r"a\u202eb", "../../x", "two lines")


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "300"})


def coco(folder: Path, photos: tuple[Photo, ...], names: tuple[str, ...] = NAMES) -> Path:
    """A COCO file with a box of every class in every photo."""
    images = [{"id": n, "file_name": p.path.name, "width": p.width, "height": p.height} for n, p in enumerate(photos)]
    categories = [{"id": n, "name": name} for n, name in enumerate(names)]
    boxes = [
        {"id": len(names) * i + c, "image_id": i, "category_id": c, "bbox": [1, 1, 9, 9], "area": 81, "iscrowd": 0}
        for i in range(len(photos))
        for c in range(len(names))
    ]
    path = folder / "truth.json"
    path.write_text(json.dumps({"images": images, "categories": categories, "annotations": boxes}))
    return path


@pytest.fixture
def truth(tmp_path: Path) -> Path:
    return coco(tmp_path, tiny_photos(tmp_path, 2).photos)


def is_plain(said: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in said)


@pytest.mark.parametrize("names", [(), NAMES])
def test_a_table_shows_names_as_they_are(
    names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    grid = Table("[bold]", *names)
    for name in names:
        grid.add_row(name)
    options.print_rich(grid)
    said = capsys.readouterr().out
    assert "[bold]" in said and is_plain(said)
    assert all(shown in said for shown, name in zip(SHOWN, NAMES, strict=True) if name in names)


def test_data_check_shows_classes_as_they_are(truth: Path) -> None:
    done = run("data", "check", truth, "--photos", truth.parent / "photos")
    assert is_plain(done.output) and all(shown in done.output for shown in SHOWN)


def test_data_stats_shows_classes_as_they_are(truth: Path) -> None:
    done = run("data", "stats", truth, "--photos", truth.parent / "photos", "--out", truth.with_suffix(".html"))
    assert is_plain(done.output) and all(shown in done.output for shown in SHOWN)


def test_evaluate_shows_classes_as_they_are(truth: Path) -> None:
    found = truth.with_name("found.json")
    found.write_text(json.dumps([{"image_id": 0, "category_id": 0, "bbox": [1, 1, 9, 9], "score": 0.5}]))
    done = run("evaluate", "--truth", truth, "--detections", found, "--metrics", "voc07")
    assert done.exit_code == 0 and is_plain(done.output) and all(shown in done.output for shown in SHOWN)


def test_errors_are_one_plain_line(
    truth: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = truth.with_name("x\x1b[2J\n.json")
    done = call(["evaluate", "--truth", f"{truth}", "--detections", f"{strange}"], monkeypatch, capsys)
    assert (done.code, done.out) == (2, "") and is_plain(done.err) and done.err.count("\n") == 1
    assert r"x\x1b[2J .json: no such file" in done.err


# ---------------------------------------------------------------- files


def test_detect_writes_no_file_outside_its_folders_and_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Classes that lead out of a folder, and photos whose ids differ in a separator or in case only."""
    small_network(monkeypatch)
    photos = tiny_photos(tmp_path, 2).photos
    data = coco(tmp_path, photos, NAMES[:6])
    config = small_config(tmp_path, f"data.tags={data}", "plan.iterations=1")
    train(config, tmp_path / "run")
    for place in ("x/b", "X/b", "x_b", "y/b"):
        file = tmp_path / "new" / f"{place}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(photos[0].path.read_bytes())
    monkeypatch.chdir(tmp_path / "new")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    out = tmp_path / "deep" / "out"
    found = detect(tmp_path / "run", [Path()], out / "b.json", voc=out / "voc", draw=out / "drawn", min_score=0)
    assert sorted(found) == ["X/b", "x/b", "x_b", "y/b"]
    made = {path.relative_to(out).as_posix() for path in tmp_path.rglob("*") if path.is_file() and path not in before}
    assert all(path.startswith(("b.json", "voc/", "drawn/")) for path in made) and len(made) == 1 + 6 + 4
    assert len({path.lower() for path in made}) == len(made)
