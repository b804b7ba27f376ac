from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from tag2box import settings
from tag2box.cli.catalog import RECIPE_COLUMNS, list_recipes, recipe_toml, recipes_table
from tag2box.errors import UserError
from tag2box.paper_runs import PAPER_RUNS
from tag2box.recipes import RECIPES, Config
from tiny_world import call

ROWS = {row.name: row for row in list_recipes()}


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("photos", ("photos", "lite0", "SS", "8", "0.001", "500", "off", "-", "-", "-")),
        ("photos-frozen", ("photos-frozen", "lite0", "SS", "8", "0.0003", "400", "0.03", "-", "-", "-")),
        ("oicr-plus", ("oicr-plus", "lite0", "SS", "8", "0.01", "30,000", "off", "-", "-", "-")),
        (
            "voc07-ss-vgg16",
            ("voc07-ss-vgg16", "vgg16", "SS", "8", "0.01", "30,000", "0.03", "56.1", "69.8", "-"),
        ),
        (
            "coco14-cob-r101-ws",
            ("coco14-cob-r101-ws", "r101-ws", "COB", "8", "0.02", "130,000", "0.01", "31.6", "-", "16.2"),
        ),
    ],
)
def test_a_row_matches_its_recipe(name: str, cells: tuple[str, ...]) -> None:
    assert ROWS[name].cells() == cells and len(cells) == len(RECIPE_COLUMNS)


def test_every_recipe_is_listed_once_and_in_order() -> None:
    assert list(ROWS) == list(RECIPES)


def test_the_table_fits_a_terminal_of_80_columns() -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(recipes_table(list_recipes()))
    lines = console.export_text().splitlines()
    assert len(lines) == 1 + len(RECIPES) and max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    assert [line.split()[0] for line in lines] == ["recipe", *RECIPES]


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_printed_is_a_settings_file_of_the_recipe(name: str, tmp_path: Path) -> None:
    text = recipe_toml(name)
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    assert tomllib.loads(text)["name"] == RECIPES[name]().name
    assert settings.load(Config, [tmp_path / "mine.toml"], base=RECIPES["photos"]()) == RECIPES[name]()
    figures = PAPER_RUNS[name].figures.reported() if name in PAPER_RUNS else {}
    assert text.startswith("# The paper reports") == bool(figures)
    assert all(f"{key} {value:.1f}" in text.splitlines()[0] for key, value in figures.items())


@pytest.mark.parametrize(
    ("name", "near"), [("", "photos"), ("voc07-ss-vgg", "voc07-ss-vgg16"), ("coco17-mgc-vgg16", "coco17-mcg-vgg16")]
)
def test_an_unknown_name_is_one_line(name: str, near: str) -> None:
    with pytest.raises(UserError) as error:
        recipe_toml(name)
    said = str(error.value)
    assert "\n" not in said and "`tag2box recipes`" in said
    assert not name or f"did you mean {near}?" in said


def test_the_command_prints_the_table_or_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = call(["recipes"], monkeypatch, capsys)
    assert listed.code == 0 and all(name in listed.out for name in RECIPES) and "the paper's" in listed.out
    printed = call(["recipes", "voc12-mcg-vgg16"], monkeypatch, capsys)
    assert printed.code == 0 and printed.out == recipe_toml("voc12-mcg-vgg16")
    wrong = call(["recipes", "voc13"], monkeypatch, capsys)
    assert wrong.code == 2 and wrong.out == "" and wrong.err.count("\n") == 1
