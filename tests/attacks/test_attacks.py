"""Every hostile file against the command that gets it: nothing runs, nothing hangs, one line of error."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
from hostile_files import ATTACKS, CANARY, readme

from tag2box.cli import COMMANDS, main
from tag2box.cli.train import train
from tiny_world import Finished, small_config, small_data, small_network

SECONDS, MEGABYTES = 10, 1024
ADDRESS_SPACE = 3 << 30  # beyond that of this process
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


@dataclass(frozen=True)
class Outcome:
    """How a command ended, and what it cost."""

    done: Finished
    seconds: float
    megabytes: float


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos, tags, and a run of the tiny network."""
    folder = tmp_path_factory.mktemp("trained") / "outer" / "desk"
    small_data(folder)
    with pytest.MonkeyPatch.context() as patch:
        small_network(patch)
        train(small_config(folder, "plan.iterations=2"), folder / "run")
    return folder


@pytest.fixture
def desk(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of these, two folders deep, and the weight cache beside it."""
    for words in {attack.command.split(" ")[0] for attack in ATTACKS.values()}:  # once, and not in each child
        for name in (name for name in COMMANDS if name.startswith(words)):
            import_module(COMMANDS[name][0].partition(":")[0])
    small_network(monkeypatch)
    monkeypatch.setenv("TAG2BOX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copytree(trained, tmp_path / "outer" / "desk")
    monkeypatch.chdir(tmp_path / "outer" / "desk")
    return tmp_path / "outer" / "desk"


def run(command: str, desk: Path) -> Outcome:
    """The command in a forked process with limits on time and memory."""
    said = {name: desk.parent.parent / name for name in ("stdout", "stderr")}
    child = os.fork()
    if child == 0:
        _run_and_exit(command, said)
    _, status, used = os.wait4(child, 0)
    texts = [path.read_bytes().decode() for path in said.values()]
    for path in said.values():
        path.unlink()
    code = os.waitstatus_to_exitcode(status)
    return Outcome(Finished(code, *texts), used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def _run_and_exit(command: str, said: dict[str, Path]) -> None:
    code = 99
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (6 * SECONDS, 6 * SECONDS))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        space = pages * resource.getpagesize() + ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (space, space))
        signal.alarm(300)
        for number, path in enumerate(said.values(), start=1):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", encoding="utf-8") for number in (1, 2))
        sys.argv = ["tag2box", *command.split()]
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    except BaseException as error:
        print(f"traceback: {error!r}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def listing(folder: Path) -> set[str]:
    """Everything below a folder but the outputs of commands."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return {name for name in names if not re.match(r"outer/desk/(out|drawn|voc-out)\b|home\b", name)}


def attacked(name: str, desk: Path) -> Finished:
    """Build a hostile file and run its command, which must do no harm."""
    attack = ATTACKS[name]
    attack.build(desk)
    before, idle = listing(desk.parents[1]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    outcome = run(attack.command, desk)
    done = outcome.done
    assert done.code == attack.code, done
    assert all(word in done.out + done.err for word in attack.says), done
    assert not CONTROL.search(done.out + done.err)
    assert "hunter2" not in done.out + done.err
    assert not (desk / CANARY).exists()
    assert listing(desk.parents[1]) == before
    assert outcome.seconds < SECONDS
    assert outcome.megabytes < idle + MEGABYTES
    return done


HARMLESS = [name for name, attack in ATTACKS.items() if attack.code == 0]
LISTED = [name for name, attack in ATTACKS.items() if attack.command.startswith("data check photos")]


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in {*HARMLESS, *LISTED}])
def test_a_hostile_file_is_refused_in_one_line(name: str, desk: Path) -> None:
    done = attacked(name, desk)
    assert len(done.complaints) == (done.code == 2), done.err
    assert not (desk / "out").exists()


@pytest.mark.parametrize("name", LISTED)
def test_a_hostile_photo_is_listed_and_the_others_are_checked(name: str, desk: Path) -> None:
    done = attacked(name, desk)
    assert not done.complaints


def test_a_class_cannot_leave_the_folders_of_detect(desk: Path) -> None:
    attacked("class-climbs", desk)
    before = listing(desk.parents[1])
    found = run("detect out photos --out out.json --voc voc-out --min-score 0", desk).done
    assert found.code == 0, found.err
    assert listing(desk.parents[1]) == before
    assert any("climbed" in path.name for path in (desk / "voc-out").iterdir())


def test_a_class_cannot_put_a_script_into_a_page(desk: Path) -> None:
    attacked("class-script", desk)
    page = (desk / "out").read_text(encoding="utf-8")
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


def test_the_limits_of_this_test_are_real(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attack that succeeded would be seen: code that runs, memory, a traceback."""

    def careless() -> None:
        Path(CANARY).touch()
        bytearray(b"x") * (4 << 30)

    monkeypatch.setitem(globals(), "main", careless)
    outcome = run("weights list", desk)
    assert outcome.done.code == 99 and "MemoryError" in outcome.done.err and (desk / CANARY).exists()


def test_the_readme_lists_every_attack() -> None:
    assert (Path(__file__).parent / "README.md").read_text(encoding="utf-8") == readme()
