"""Pages of systems: their functions are in the files beside them, and they say whether systems are whole."""

import re
import shutil
from pathlib import Path

import pytest

from pages import DOCS, ROOT, load, prose

ROWS = [
    pytest.param(row, id=f"{page.stem}-{i}")
    for page in sorted(DOCS.glob("systems/*.md"))
    for i, row in enumerate(re.findall(r"^\|(?:[^|]|\\\|)*\| `\w[^|]* \| `[^|]*\.py` \|$", prose(page), re.MULTILINE))
]


@pytest.mark.parametrize("row", ROWS)
def test_the_functions_of_a_system_are_in_the_file_of_its_page(row: str) -> None:
    functions, files = (re.findall(r"`(.+?)`", cell) for cell in row.rstrip("|").rsplit("|", 2)[1:])
    sources = [(ROOT / "src" / "tag2box" / file).read_text(encoding="utf-8") for file in files]
    for part in (part for function in functions for part in function.split(".")):
        assert any(re.search(rf"^ *(?:def|class) {part}\b", source, re.MULTILINE) for source in sources), part


def test_every_page_with_equations_is_checked() -> None:
    with_tables = {page.stem for page in DOCS.glob("systems/*.md") if "| file under `src/tag2box` |" in prose(page)}
    assert {row.id.rpartition("-")[0] for row in ROWS} == with_tables


def test_pages_say_what_is_whole_and_what_is_reduced(tmp_path: Path) -> None:
    """As `python docs/make_systems.py --states` writes it."""
    pages = tmp_path / "systems"
    shutil.copytree(DOCS / "systems", pages)
    load(DOCS / "make_systems.py").fill_states(pages)
    for page in pages.glob("*.md"):
        assert page.read_text(encoding="utf-8") == (DOCS / "systems" / page.name).read_text(encoding="utf-8")
    marked = {page.stem for page in pages.glob("*.md") if "<!-- /state -->" in page.read_text(encoding="utf-8")}
    assert marked == {page.stem for page in pages.glob("*.md")} - {"README", "concrete-dropblock"}
