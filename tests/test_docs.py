"""The documentation is up to date: commands, options, settings, links, code and examples are those of the package."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import typer

from pages import DOCS, PAGES, ROOT, blocks, load, name, prose
from tag2box import settings
from tag2box.cli import app
from tag2box.cli.label import LabelSettings
from tag2box.extend import load_part
from tag2box.labels.trust import TrustRule
from tag2box.recipes import RECIPES, Config
from tag2box.student.student_training import StudentConfig
from tag2box.systems import SYSTEMS

EXAMPLES = sorted([*(ROOT / "examples").glob("*.py"), *DOCS.glob("*.py")])
PROGRAM = typer.main.get_command(app)
KEYS = {setting.key for setting in settings.describe(Config)}
STUDENT_KEYS = {setting.key for setting in settings.describe(StudentConfig)}
LABEL_KEYS = {setting.key for setting in settings.describe(LabelSettings)}
TRUST_KEYS = {setting.key for setting in settings.describe(TrustRule)}
TABLES = {key.rpartition(".")[0] for key in KEYS} | {"criterion"}
PICTURES = {".png", ".jpg", ".svg"}
IMAGINED = {  # files, modules and settings of the parts that guides add
    "criterion.labeler.background", "my_labelers.py", "my_metrics.py", "my_backbones.py", "my_proposals.py",
    "my_format.py", "my_losses.py", "run_onnx.py",
}  # fmt: skip

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"^(?:\.venv/bin/)?tag2box ([a-z].*)$", re.MULTILINE)
KEY = re.compile(r"`([a-z_]+(?:\.[a-z_]+)+)(?: = [^`]*)?`")
PATH = re.compile(r"(?<![\w.~])/(?:home|work|tmp|root|Users|mnt|opt)/")


def leaves(command: typer.core.TyperCommand, before: str = "") -> dict[str, typer.core.TyperCommand]:
    """Every command by all its words: ``data check`` is one, ``data`` is none."""
    inside = getattr(command, "commands", None)
    if inside is None:
        return {before.strip(): command}
    return {name: leaf for word, part in inside.items() for name, leaf in leaves(part, f"{before} {word}").items()}


COMMANDS = leaves(PROGRAM)
GROUPS = {name.partition(" ")[0] for name in COMMANDS if " " in name}


def typed(page: Path) -> list[list[str]]:
    """The command lines of the blocks, as words: they must be whole."""
    return [
        shlex.split(line, comments=True)
        for text in blocks(page, "")
        for line in COMMAND.findall(text.replace("\\\n", " "))
    ]


def named(page: Path) -> list[list[str]]:
    """The commands in backticks, as words: they may omit obvious arguments."""
    return [shlex.split(line) for text in re.findall(r"`([^`\n]+)`", prose(page)) for line in COMMAND.findall(text)]


def leaf_of(words: list[str]) -> str:
    return " ".join(words[: 2 if words[0] in GROUPS else 1])


def own(language: str) -> list[object]:
    return [
        pytest.param(text, id=f"{name(page)}-{i}") for page in PAGES for i, text in enumerate(blocks(page, language))
    ]


def options_of(command: str) -> set[str]:
    return {option for parameter in COMMANDS[command].params for option in (*parameter.opts, *parameter.secondary_opts)}


def anchors(page: Path) -> set[str]:
    """What a heading can be linked by, as GitHub makes it."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_there_are_pages_to_check() -> None:
    wanted = {"README.md", "CONTRIBUTING.md", "CHANGELOG.md"} | {
        f"docs/{page}.md" for page in ("method", "architecture", "settings", "evaluation", "scenes", "results")
    }
    wanted |= {f"docs/{page}.md" for page in ("datasets", "proposals", "weights")}
    assert wanted <= {name(page) for page in PAGES}
    assert all(typed(ROOT / f"docs/{page}.md") for page in ("datasets", "proposals", "weights"))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_and_option_exists(page: Path) -> None:
    for words in (*typed(page), *named(page)):
        if words[0] in GROUPS and len(words) == 1:
            continue  # the group is spoken of
        assert leaf_of(words) in COMMANDS, words
        given = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert given <= options_of(leaf_of(words)) | {"--help"}, words


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_backticks_are_broken_over_lines(page: Path) -> None:
    assert [line for line in prose(page).splitlines() if line.count("`") % 2] == []  # commands in them go unchecked


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_command_line_is_understood_as_it_stands(page: Path) -> None:
    for words in typed(page):
        name_, rest = leaf_of(words), words[len(leaf_of(words).split()) :]
        COMMANDS[name_].make_context(name_, list(rest))  # raises where an argument is missing, or a value is none
        keys = {override.partition("=")[0] for option, override in pairwise(words) if option == "--set"}
        known = {key.removeprefix("proposals.") for key in KEYS} if name_ == "propose" else KEYS | IMAGINED
        known |= {"label": LABEL_KEYS, "trust": TRUST_KEYS, "student": STUDENT_KEYS}.get(name_, set())
        assert keys <= known, words
        assert {value for option, value in pairwise(words) if option == "--recipe"} <= set(RECIPES), words
        assert {value for option, value in pairwise(words) if option == "--system"} <= set(SYSTEMS), words


def test_the_readme_shows_every_command() -> None:
    readme = ROOT / "README.md"
    shown = {words[0] for words in (*typed(readme), *named(readme))}
    assert {command.partition(" ")[0] for command in COMMANDS} - shown <= {"demo"}  # make demo calls it


def test_every_command_is_shown_somewhere() -> None:
    shown = {leaf_of(words) for page in PAGES for words in (*typed(page), *named(page))}
    assert set(COMMANDS) <= shown


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "settings.md"], ids=name)
def test_settings_named_in_prose_exist(page: Path) -> None:
    tops = {key.partition(".")[0] for key in KEYS if "." in key}
    named = {key for key in KEY.findall(prose(page)) if key.partition(".")[0] in tops}
    files = {key for key in named if (ROOT / "src" / "tag2box" / key).exists()}  # recipes.py is a file
    old = set(Config.RENAMED) if page.name == "CHANGELOG.md" else set()
    assert named - files <= KEYS | TABLES | old | (STUDENT_KEYS if page.name == "student.md" else set())


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


def test_every_system_has_its_line_and_its_page() -> None:
    lines = {
        words[0]: line for line in prose(DOCS / "systems" / "README.md").splitlines() if (words := line.split("| ")[1:])
    }
    for system in SYSTEMS.values():
        line = lines[f"{system.title} "]
        assert f"--system {system.name} " in line and str(system.year) in line


@pytest.mark.parametrize("page", [page for page in PAGES if page.is_relative_to(DOCS)], ids=name)
def test_files_of_the_package_named_in_docs_exist(page: Path) -> None:
    named = re.findall(r"`([a-z0-9_]+/[a-z0-9_/]+\.py|[a-z_]+\.py)`", prose(page))
    homes = (ROOT, ROOT / "src" / "tag2box", DOCS)
    assert {file for file in named if not any((home / file).exists() for home in homes)} <= IMAGINED


@pytest.mark.parametrize("row", re.findall(r"^\| (?:eq|sec|before|after|app).*$", prose(DOCS / "method.md"), re.M))
def test_every_function_of_the_method_is_in_the_file_of_the_table(row: str) -> None:
    *_, functions, files, _ = row.split("|")
    sources = [(ROOT / "src" / "tag2box" / file).read_text(encoding="utf-8") for file in re.findall(r"`(.+?)`", files)]
    for function in re.findall(r"`(.+?)`", functions):
        for part in function.split("."):
            assert any(re.search(rf"^ *(?:def|class) {part}\b|^ +{part}:", s, re.M) for s in sources), part


@pytest.fixture
def guide_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The modules of the guides whose settings files name them, on Python's path."""
    code = next(text for text in blocks(DOCS / "adding-a-loss-term.md", "python") if "class MilEntropy" in text)
    (tmp_path / "my_losses.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_losses", None)
    load_part.cache_clear()


@pytest.mark.usefixtures("guide_modules")
@pytest.mark.parametrize("text", own("toml"))
def test_settings_files_in_the_docs_load(text: str, tmp_path: Path) -> None:
    (tmp_path / "shown.toml").write_text(text, encoding="utf-8")
    assert settings.load(Config, [tmp_path / "shown.toml"]) != Config()


@pytest.mark.parametrize("text", own("python"))
def test_python_in_the_docs_parses_and_its_imports_resolve(text: str) -> None:
    for node in ast.walk(ast.parse(textwrap.dedent(text))):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("tag2box")
            and node.module not in IMAGINED
        ):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


def test_the_page_of_settings_is_up_to_date() -> None:
    script = load(DOCS / "make_settings.py")
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run python docs/make_settings.py"


@pytest.mark.parametrize("path", [*PAGES, *EXAMPLES], ids=name)
def test_no_machine_paths(path: Path) -> None:
    assert PATH.findall(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", EXAMPLES, ids=name)
def test_examples_are_short_and_can_be_imported_without_running(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert path.parent.name != "examples" or len(text.splitlines()) <= 100
    assert 'if __name__ == "__main__":' in text
    assert callable(getattr(load(path), "main", None) or load(path).page)
