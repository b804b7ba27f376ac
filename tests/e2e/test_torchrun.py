"""``torchrun -m tag2box``: the words of one process, with several; and what is left when one of them dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tag2box.cli.student import train_student
from tag2box.training.events import read_events
from tiny_student import SMALL, tiny_labels
from tiny_world import World, environment, process, same, story, weights

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tag2box")
LEARNING = (
    "backbone.train_tail=true", "backbone.dropout=0.3", "loader.workers=0", "loader.batch_size=3",
    "plan.optimizer.kind=sgd", "plan.optimizer.lr=0.01", "plan.iterations=8",
)  # fmt: skip


def started(argv: Sequence[str], cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TORCHRUN, *argv], cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(running: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = running.communicate(timeout=300)
    return running.returncode, out + err


def workers_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if b"tag2box" in Path(f"/proc/{child}/cmdline").read_bytes()]


def steps(run: Path) -> int:
    file = run / "events.jsonl"
    return file.read_text().count('"event": "step"') if file.exists() else 0


@pytest.fixture(scope="module")
def undisturbed(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("torchrun")
    code, said = ended(started(world.argv(folder / "two", *LEARNING), folder))
    assert code == 0, said
    assert said.count("trained:") == 1
    return folder / "two"


def test_two_processes_train_what_one_trains(world: World, undisturbed: Path, tmp_path: Path) -> None:
    from tag2box.cli.train import train

    train(world.config(*LEARNING), tmp_path / "one")
    one, two = weights(tmp_path / "one"), weights(undisturbed)
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4, msg=name)
    told = [event["event"] for event in story(undisturbed)]
    assert told == [event["event"] for event in story(tmp_path / "one")]  # one writer


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_ends_the_run_and_the_same_command_resumes_to_the_same_bits(
    world: World, undisturbed: Path, tmp_path: Path, rank: int
) -> None:
    argv = world.argv(tmp_path / "run", *LEARNING)
    running = started(argv, tmp_path)
    deadline = time.monotonic() + 200
    while steps(tmp_path / "run") < 3 and running.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(workers_of(running.pid)[rank], signal.SIGKILL)
    code, _ = ended(running)
    assert code != 0
    code, said = ended(started(argv, tmp_path))
    assert code == 0, said
    assert "resume" in [event["event"] for event in story(tmp_path / "run")]
    assert same(weights(tmp_path / "run"), weights(undisturbed))


STEP = """
import pathlib
import torch
from tag2box.training.dist import init_distributed

with init_distributed() as dist:
    layer = torch.nn.Linear(2, 1)
    layer(torch.ones(1, 2)).sum().backward()
    dist.all_reduce_gradients(layer.parameters())
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
names = [(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()]
pathlib.Path(f"threads-{dist.rank}").write_text(" ".join(names))
"""


def test_no_thread_of_the_process_group_is_left_when_a_process_ends(tmp_path: Path) -> None:
    # such a thread aborts the process now and then, in the teardown of the interpreter
    (tmp_path / "step.py").write_text(STEP)
    argv = [*TORCHRUN[: TORCHRUN.index("-m", 2)], "step.py"]
    done = subprocess.run(
        argv, check=False, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert "gloo" not in (tmp_path / f"threads-{rank}").read_text()


def test_other_settings_do_not_resume_a_run(world: World, undisturbed: Path, tmp_path: Path) -> None:
    before = weights(undisturbed)
    code, said = ended(started(world.argv(undisturbed, *LEARNING, "plan.iterations=13"), tmp_path))
    assert code != 0
    assert len(re.findall(r"^tag2box: .*already holds a run with other settings", said, re.MULTILINE)) == 1
    assert same(weights(undisturbed), before)


def test_a_mistake_is_reported_once(world: World, tmp_path: Path) -> None:
    argv = ["train", str(tmp_path / "nowhere.csv"), "--out", str(tmp_path / "run")]
    code, said = ended(started(argv, tmp_path))
    assert code != 0
    assert len(re.findall(r"^tag2box: .*nowhere\.csv", said, re.MULTILINE)) == 1
    assert not (tmp_path / "run").exists()


def test_two_processes_detect_what_one_detects(world: World, tmp_path: Path) -> None:
    run = world.trained("od-wscl")
    words = ["detect", f"{run}", f"{world.test / 'photos'}", "--min-score", "0", "--draw", f"{tmp_path / 'drawn'}"]
    code, said = ended(started([*words, "--out", f"{tmp_path / 'two.json'}"], tmp_path))
    assert code == 0, said
    assert said.count("boxes in 4 photos") == 1
    alone = process([*words, "--out", f"{tmp_path / 'one.json'}"], tmp_path)
    assert alone.code == 0, alone.err
    assert (tmp_path / "two.json").read_bytes() == (tmp_path / "one.json").read_bytes()
    assert len(list((tmp_path / "drawn").glob("*.jpg"))) == 4


def losses(run: Path) -> list[float]:
    return [event["losses"]["total"] for event in read_events(run) if event["event"] == "step"]  # type: ignore[index, misc]


def test_two_processes_train_the_student_that_one_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]  # of the tiny backbone
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, folders)))
    labels = tiny_labels(tmp_path)
    how = (*SMALL, "plan.iterations=4", "plan.batch_size=3", "noise.drop=0.3", "augmentation.copy_paste=0.5")
    train_student(labels, tmp_path / "one", overrides=how)
    words = ["student", f"{labels}", "--out", f"{tmp_path / 'two'}", *(word for key in how for word in ("--set", key))]
    code, said = ended(started(words, tmp_path))
    assert code == 0, said
    assert said.count("trained:") == 1
    alone = losses(tmp_path / "one")
    assert len(alone) == 4 and losses(tmp_path / "two") == pytest.approx(alone, rel=1e-3)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4, msg=name)
