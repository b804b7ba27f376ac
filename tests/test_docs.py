"""The documentation tells the truth: commands, options, settings, links, code and examples are those of the package."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer

from tag2box import settings
from tag2box.cli import app
from tag2box.objective import no_exemplars
from tag2box.recipes import RECIPES, Config
from tag2box.types import Proposals, Scene

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
EXAMPLES = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "docs").glob("*.py")])
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
KEYS = {setting.key for setting in settings.describe(Config)}
TABLES = {key.rpartition(".")[0] for key in KEYS} | {"objective"}
PICTURES = {".png", ".jpg"}
IMAGINED = {"objective.labeler.count", "src/tag2box/labelers/top_apart.py"}  # of the labeler the reader is shown to add

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"^(?:\.venv/bin/)?tag2box ([a-z]+)(.*)$", re.MULTILINE)
KEY = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)(?: = [^`]*)?`")
PATH = re.compile(r"(?<![\w.~])/(?:home|work|tmp|root|Users|mnt|opt)/")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def commands(page: Path) -> list[tuple[str, str]]:
    """Every command shown in a block or in backticks: its name, and the rest of the line."""
    inline = re.findall(r"`([^`\n]+)`", prose(page))
    return [found for text in (*blocks(page, ""), *inline) for found in COMMAND.findall(text.replace("\\\n", " "))]


def own(language: str) -> list[object]:
    return [
        pytest.param(text, id=f"{name(page)}-{i}") for page in PAGES for i, text in enumerate(blocks(page, language))
    ]


def options_of(command: str) -> set[str]:
    return {option for parameter in COMMANDS[command].params for option in (*parameter.opts, *parameter.secondary_opts)}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    return module


def anchors(page: Path) -> set[str]:
    """What a heading can be linked by, as GitHub makes it."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_there_are_pages_to_check() -> None:
    wanted = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"} | {
        f"docs/{page}.md" for page in ("method", "architecture", "settings", "evaluation", "scenes", "results")
    }
    assert wanted <= {name(page) for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_and_option_exists(page: Path) -> None:
    for command, rest in commands(page):
        assert command in COMMANDS, f"tag2box {command}"
        words = shlex.split(rest)
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= options_of(command) | {"--help"}, f"tag2box {command}{rest}"
        overrides = [value for option, value in pairwise(words) if option == "--set"]
        assert all(override.partition("=")[0] in KEYS | IMAGINED for override in overrides), rest
        recipes = {value for option, value in pairwise(words) if option == "--recipe"}
        assert recipes <= set(RECIPES), rest


def test_the_readme_shows_every_command() -> None:
    shown = {command for command, _ in commands(ROOT / "README.md")}
    assert set(COMMANDS) - shown <= {"demo"}  # make demo calls it


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"(?:^|`)make ([a-z]+)", text, re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "settings.md"], ids=name)
def test_settings_named_in_prose_exist(page: Path) -> None:
    tops = {key.partition(".")[0] for key in KEYS if "." in key}
    named = {key for key in KEY.findall(prose(page)) if key.partition(".")[0] in tops}
    files = {key for key in named if (ROOT / "src" / "tag2box" / key).exists()}  # objective.py is a file
    assert named - files <= KEYS | TABLES


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_inside_the_project_resolve(page: Path) -> None:
    for target in LINK.findall(prose(page)):
        place, _, anchor = target.partition("#")
        if target.startswith("http") or Path(place).suffix in PICTURES:
            continue
        other = (page.parent / place).resolve() if place else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other), target


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_pictures_are_there(page: Path) -> None:
    shown = [target for target in LINK.findall(prose(page)) if Path(target).suffix in PICTURES]
    assert [target for target in shown if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name == "docs"], ids=name)
def test_files_of_the_package_named_in_docs_exist(page: Path) -> None:
    named = re.findall(r"`([a-z0-9_]+/[a-z0-9_/]+\.py|[a-z_]+\.py)`", prose(page))
    homes = (ROOT, ROOT / "src" / "tag2box", ROOT / "docs")
    assert {file for file in named if not any((home / file).exists() for home in homes)} <= IMAGINED


@pytest.mark.parametrize(
    "row", re.findall(r"^\| (?:eq|sec|before|after|app).*$", prose(ROOT / "docs" / "method.md"), re.M)
)
def test_every_function_of_the_method_is_where_the_table_says(row: str) -> None:
    *_, functions, files, _ = row.split("|")
    sources = [(ROOT / "src" / "tag2box" / file).read_text(encoding="utf-8") for file in re.findall(r"`(.+?)`", files)]
    for function in re.findall(r"`(.+?)`", functions):
        for part in function.split("."):
            assert any(re.search(rf"^ *(?:def|class) {part}\b|^ +{part}:", s, re.M) for s in sources), part


@pytest.mark.parametrize("text", own("toml"))
def test_settings_files_in_the_docs_load(text: str, tmp_path: Path) -> None:
    (tmp_path / "shown.toml").write_text(text, encoding="utf-8")
    assert settings.load(Config, [tmp_path / "shown.toml"]) != Config()


@pytest.mark.parametrize("text", own("python"))
def test_python_in_the_docs_parses_and_its_imports_resolve(text: str) -> None:
    for node in ast.walk(ast.parse(textwrap.dedent(text))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tag2box"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_the_page_of_settings_is_up_to_date() -> None:
    script = load(ROOT / "docs" / "make_settings.py")
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run python docs/make_settings.py"


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLES], ids=name)
def test_no_machine_paths(path: Path) -> None:
    assert PATH.findall(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=name)
def test_examples_are_short_and_can_be_imported_without_running(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert path.parent.name != "examples" or len(text.splitlines()) <= 60
    assert 'if __name__ == "__main__":' in text
    assert callable(getattr(load(path), "main", None) or load(path).page)


def test_the_labeler_of_the_docs_labels_and_survives_nothing(tmp_path: Path) -> None:
    code = next(text for text in blocks(ROOT / "docs" / "architecture.md", "python") if "class TopApart" in text)
    (tmp_path / "labeler_of_the_docs.py").write_text(code, encoding="utf-8")
    labeler = load(tmp_path / "labeler_of_the_docs.py").TopApart(count=2)
    assert not labeler.uses_exemplars
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 1, 10, 10], [40, 40, 60, 60], [0, 0, 5, 5]])
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.1], [0.5, 0.2], [0.9, 0.9]])
    tags = torch.tensor([[True, False], [True, True], [False, False]])
    embed = torch.zeros(4, 2)
    scene = Scene(Proposals(boxes, (3, 0, 1)), tags, (probs, probs), embed, no_exemplars(embed))
    labeling = labeler(scene)
    assert [stage.seeds.rows.tolist() for stage in labeling.stages] == [[0, 2], [0, 2]]
    assert labeling.stages[0].cls.tolist() == [0, 0, 0, 2]
    assert labeling.stages[0].weight[3] == 0
