"""A release: wheel and sdist hold the whole package, install into an empty environment, and agree on the version."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import lock  # noqa: E402
import release  # noqa: E402


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return release.build(tmp_path_factory.mktemp("dist"))


def copy_of_the_texts(folder: Path) -> Path:
    for name in ("pyproject.toml", "CHANGELOG.md", "CITATION.cff"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def test_the_version_is_the_same_everywhere():
    assert release.version() == "0.2.0"


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("CHANGELOG.md", "## [0.2.0]", "", r"CHANGELOG.md: its first heading is \['0.1.0'\]"),
        ("CHANGELOG.md", "## [", "## ", r"CHANGELOG.md: its first heading is \[\]"),
        ("CITATION.cff", "version: 0.2.0", "version: 0.1.9", r"CITATION.cff: its version is \['0.1.9'\]"),
        ("pyproject.toml", 'version = "0.2.0"', 'version = "0.3.0"', "the version is 0.3.0"),
    ],
)
def test_a_version_that_was_forgotten_is_named(tmp_path, file, old, new, said):
    path = copy_of_the_texts(tmp_path) / file
    path.write_text(path.read_text(encoding="utf-8").replace(old, new), encoding="utf-8")
    with pytest.raises(release.ReleaseError, match=said):
        release.version(tmp_path)


def test_the_wheel_has_the_package_and_nothing_else(built):
    release.check_wheel(built[1])
    with zipfile.ZipFile(built[1]) as archive:
        names = archive.namelist()
    assert {"tag2box/py.typed", "tag2box/__init__.pyi", "tag2box/review/static/index.html"} <= set(names)
    assert all(name.startswith(("tag2box/", "tag2box-0.2.0.dist-info/")) for name in names)


def test_a_wheel_without_one_template_is_refused(built, tmp_path):
    poor = tmp_path / built[1].name
    with zipfile.ZipFile(built[1]) as whole, zipfile.ZipFile(poor, "w") as archive:
        for name in whole.namelist():
            if not name.endswith("report.html.j2"):
                archive.writestr(name, whole.read(name))
    with pytest.raises(release.ReleaseError, match=r"missing, superfluous or changed: .*report\.html\.j2"):
        release.check_wheel(poor)


def test_the_sdist_has_what_a_build_needs_and_no_tests(built):
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "src/tag2box/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests/", ".venv/", "runs/"))]


def test_the_wheel_runs_in_an_empty_environment(built, tmp_path):
    scripts = release.install(built[1], tmp_path / "venv")
    release.check_installed(scripts, "0.2.0")
    with pytest.raises(release.ReleaseError, match=r"expected 9\.9"):
        release.check_installed(scripts, "9.9")


def test_tagging_refuses_changes_and_an_existing_tag(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(release, "ROOT", tmp_path)
    for name in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME", "GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(name, "a@example.com")
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / "new").touch()
    with pytest.raises(release.ReleaseError, match="has changes"):
        release.tag("v1")
    subprocess.run(["git", "add", "new"], cwd=tmp_path, check=True)
    subprocess.run(["git", "commit", "--quiet", "--message", "new"], cwd=tmp_path, check=True)
    release.tag("v1")
    assert "tagged v1" in capsys.readouterr().out
    with pytest.raises(release.ReleaseError, match="v1 exists already"):
        release.tag("v1")


# ---------------------------------------------------------------- the oldest versions


@pytest.mark.parametrize(
    ("needs", "extras", "wanted"),
    [
        ([], {}, ""),
        (["b>=1.2", "a>=3"], {}, "a==3.*\nb==1.2.*\n"),
        (["x[y]>=1"], {}, "x==1.*\n"),
        (["pinned==1.0"], {"more": ["b>=2", "own[more]"], "dev": ["b>=2"]}, "b==2.*\n"),
    ],
)
def test_the_oldest_versions_are_those_of_the_project(needs, extras, wanted):
    lines = "".join(f"{name} = {texts}\n" for name, texts in extras.items())
    assert lock.minimum(f"[project]\ndependencies = {needs}\n[project.optional-dependencies]\n{lines}") == wanted
