"""What `make setup` installs: each file has a pinned SHA-256, and pip refuses any other."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import lock  # noqa: E402

LOCKS = (lock.REST, lock.TORCH, lock.CPU)
ENTRY = re.compile(r"([a-z0-9-]+)==([^ ]+)( ; [^\\]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n")


def pinned(path: Path) -> dict[str, str]:
    return lock.versions(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_a_lock_file_has_only_pinned_versions_with_whole_hashes(path):
    text = "".join(line for line in path.read_text(encoding="utf-8").splitlines(True) if not line.startswith("#"))
    entries = [match[1] for match in ENTRY.finditer(text)]
    assert ENTRY.sub("", text) == ""  # neither addresses nor options
    assert entries and len(entries) == len(set(entries))


def test_the_locks_have_the_versions_of_constraints_txt_and_nothing_twice():
    wanted, rest, torch = pinned(ROOT / "constraints.txt"), pinned(lock.REST), pinned(lock.TORCH)
    assert not rest.keys() & torch.keys()
    assert {name: version for name, version in (rest | torch).items() if name in wanted} == wanted
    assert rest.keys() - wanted.keys() == {"tzdata"}  # on Windows
    assert all(re.match(r"cuda-|nvidia-|triton$", name) for name in torch.keys() - wanted.keys())  # on Linux
    assert pinned(lock.CPU) == {"torch": f"{torch['torch']}+cpu"}


def test_the_locks_satisfy_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tables = (project["build-system"]["requires"], project["project"]["dependencies"])
    locked = pinned(lock.REST) | pinned(lock.TORCH)
    for text in (*tables[0], *tables[1], *project["project"]["optional-dependencies"]["dev"]):
        name, sign, version = re.fullmatch(r"([a-z0-9-]+)(?:\[[a-z0-9]+\])?(>=|==)([0-9.]+)", text).groups()
        found, wanted = (tuple(map(int, number.split("."))) for number in (locked[name], version))
        assert found >= wanted if sign == ">=" else found == wanted, text


@pytest.mark.parametrize(
    ("text", "rest", "torch"),
    [
        ("", [], []),
        ("a==1 \\\n    --hash=sha256:00\ntorch==2 \\\n    --hash=sha256:11\n", ["a"], ["torch"]),
        ("cuda-x==1 ; sys_platform == 'linux' \\\n    --hash=sha256:00\ntorchlike==2\n", ["torchlike"], ["cuda-x"]),
        ("# made by uv\nnvidia-a==1 \\\n    --hash=sha256:00 \\\n    --hash=sha256:11\n", [], ["nvidia-a"]),
    ],
)  # fmt: skip
def test_torch_and_its_libraries_are_set_apart_with_their_hashes(text, rest, torch):
    both = lock.split(text)
    assert [list(lock.versions(part)) for part in both] == [rest, torch]
    assert sum(part.count("--hash") for part in both) == text.count("--hash")


def test_each_call_of_pip_in_setup_checks_hashes_or_installs_only_the_checkout():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = makefile.split("$(READY):")[1].split("\n\n")[0]
    calls = re.findall(r"(\$\(PIP\)|pip install) (.*?)(?:2>|\|\||\n)", recipe)
    assert [(program, options.strip()) for program, options in calls] == [
        ("$(PIP)", "--no-deps -r requirements-cpu.lock"),
        ("$(PIP)", "--no-deps -r requirements-torch.lock"),
        ("$(PIP)", "-r requirements.lock"),
        ("pip install", "--quiet --no-deps --no-build-isolation -e ."),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("flipped", [False, True])
def test_pip_refuses_a_package_of_which_one_bit_changed(tmp_path, flipped):
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "x = 1\n")
        archive.writestr("tiny-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1\n")
        archive.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.dist-info/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    (tmp_path / "r.lock").write_text(f"tiny==1 \\\n    --hash=sha256:{digest}\n")
    if flipped:
        content = bytearray(wheel.read_bytes())
        content[content.index(b"x = 1")] ^= 1
        wheel.write_bytes(content)
    options = re.search(r"^PIP := \S+ install (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert options
    command = [sys.executable, "-m", "pip", "--isolated", "install", *options[1].split(), "-r", "r.lock",
               "--no-index", "--find-links", ".", "--target", "out", "--disable-pip-version-check"]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == flipped, done.stderr
    assert ("DO NOT MATCH THE HASHES" in done.stderr) == flipped
    assert (tmp_path / "out" / "tiny.py").exists() != flipped
