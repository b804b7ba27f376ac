"""Models on the hub: what is uploaded, the model card, and loading, against a local server that speaks its API."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import tag2box
from tag2box import hub, runs
from tag2box.cli.student import train_student
from tag2box.cli.train import train
from tag2box.errors import UserError
from tag2box.student.student_training import StudentConfig
from tiny_student import SMALL, tiny_labels
from tiny_world import call, small_config, small_data, small_network


class FakeHub(ThreadingHTTPServer):
    """The part of the hub's HTTP API that huggingface_hub calls, with repositories in memory."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, object]] = []
        self.calls: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    SHA = "0" * 39 + "1"

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        self.server.calls.append(f"POST {self.path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            return self.answer({"url": f"{self.server.address}/owner/name", "name": "owner/name"})
        if "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            return self.answer(
                {"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]}
            )
        if "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.answer(
                {
                    "success": True,
                    "commitOid": self.SHA,
                    "commitUrl": f"{self.server.address}/owner/name/commit/{self.SHA}",
                }
            )
        return self.answer({"errors": [], "warnings": []})  # /api/validate-yaml

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.calls.append(f"{self.command} {self.path}")
        if not self.server.files:
            return self.answer({"error": "Repository not found"}, 404)
        if "/tree/" in self.path:
            files = self.server.files.items()
            return self.answer([{"type": "file", "path": n, "size": len(c), "oid": self.SHA} for n, c in files])
        if self.path.startswith("/api/models/"):
            siblings = [{"rfilename": name} for name in self.server.files]
            return self.answer(
                {"id": "owner/name", "sha": self.SHA, "siblings": siblings, "private": False, "tags": []}
            )
        content = self.server.files[self.path.split(f"/resolve/{self.SHA}/")[1]]
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", self.SHA)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)
        return None

    def answer(self, value: object, code: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(code)
        if code == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    fake = FakeHub()
    thread = threading.Thread(target=fake.serve_forever)
    thread.start()
    yield fake
    fake.shutdown()
    thread.join()
    fake.server_close()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None) -> Path:
    small_network(monkeypatch)
    small_data(tmp_path)
    train(small_config(tmp_path, "plan.iterations=2"), tmp_path / "runs" / "mine")
    return tmp_path / "runs" / "mine"


def test_files_are_written_without_an_upload_and_name_no_photo_or_path(run: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(hub, "_client", lambda *_: pytest.fail("the hub was called"))
    done = hub.push_to_hub(run, "owner/name", out=tmp_path / "upload")
    state = json.loads((run / "state.json").read_text())["folder"]
    assert done.names == (
        "README.md", f"{state}/manifest.json", f"{state}/model.safetensors", f"{state}/state.json", "config.toml",
        "state.json",
    )  # fmt: skip
    assert done.address is None
    for path in (tmp_path / "upload").rglob("*"):
        assert path.is_dir() or not {word for word in (b"photo0", str(tmp_path).encode()) if word in path.read_bytes()}
    card = (tmp_path / "upload" / "README.md").read_text()
    assert "Trained on 4 photos with image-level tags" in card and "no box was used" in card
    assert "None: the run was not evaluated" in card and "What it must not be used for" in card
    one, two = runs.load_run(run), runs.load_run(tmp_path / "upload")
    assert one.classes == two.classes
    assert all(torch.equal(a, b) for a, b in zip(one.detector.parameters(), two.detector.parameters(), strict=True))


def test_a_model_goes_to_the_hub_and_comes_back(run: Path, tmp_path: Path, server: FakeHub, monkeypatch) -> None:
    done = hub.push_to_hub(run, "owner/name", upload=True, endpoint=server.address)
    assert set(server.files) == set(done.names)
    (asked,) = server.created
    assert asked.get("private") is True or asked.get("visibility") == "private"  # by version of huggingface_hub
    assert done.address and "owner/name" in done.address
    monkeypatch.chdir(tmp_path)
    folder = hub.download("owner/name", endpoint=server.address)
    monkeypatch.setattr(hub, "download", lambda name: folder)
    model = tag2box.load("owner/name")
    assert model.classes == runs.load_run(run).classes


def test_a_student_is_pushed_without_its_labels_and_paths(tmp_path: Path, alone: None) -> None:
    train_student(tiny_labels(tmp_path), tmp_path / "student", overrides=(*SMALL, "plan.iterations=1"))
    hub.push_to_hub(tmp_path / "student", "owner/name", out=tmp_path / "upload")
    for path in (tmp_path / "upload").rglob("*"):
        assert path.is_dir() or not {word for word in (b"photo0", str(tmp_path).encode()) if word in path.read_bytes()}
    card = (tmp_path / "upload" / "README.md").read_text()
    assert "A student of tag2box" in card and "Trained on a label set of 4 photos" in card
    photos = sorted((tmp_path / "photos").iterdir())
    one, two = (tag2box.load(tmp_path / name)(photos, min_score=0) for name in ("student", "upload"))
    for a, b in zip(one, two, strict=True):
        assert len(a) and torch.equal(a.detections.boxes, b.detections.boxes)
        assert torch.equal(a.detections.scores, b.detections.scores)


def test_the_card_of_a_student_says_what_its_labels_used() -> None:
    lines = hub._data_lines({"train_photos": 4, "uses": "masks of a model"}, StudentConfig())
    assert any("masks of a model" in line for line in lines)


def test_settings_that_name_code_of_others_are_refused(run: Path, tmp_path: Path, server: FakeHub) -> None:
    hub.push_to_hub(run, "owner/name", upload=True, endpoint=server.address)
    evil = server.files["config.toml"].decode().replace('kind = "oicr"', 'kind = "evil.code:Labeler"')
    evil = evil if "evil" in evil else evil + '\n[extra]\nkind = "evil.code:Labeler"\n'
    server.files["config.toml"] = evil.encode()
    with pytest.raises(UserError, match=r"evil\.code:Labeler, a part of another package"):
        hub.download("owner/name", endpoint=server.address)


def test_what_the_hub_does_not_have_is_one_line(server: FakeHub) -> None:
    with pytest.raises(UserError, match="owner/none: no such folder here, and the Hugging Face Hub said") as told:
        hub.download("owner/none", endpoint=server.address)
    assert "\n" not in str(told.value)
    server.files["weights.bin"] = b"x"
    with pytest.raises(UserError, match=r"has no config\.toml"):
        hub.download("owner/name", endpoint=server.address)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("", False), ("mine", False), ("a/b/c", False), ("owner/name", True), ("runs/typo", False), ("../x", False),
     ("/a/b", False), ("own er/name", False)],
)  # fmt: skip
def test_a_mistyped_path_is_not_looked_up(tmp_path: Path, monkeypatch, name: str, wanted: bool) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub.is_repository(name) == wanted


# ---------------------------------------------------------------- the card


@pytest.mark.parametrize(
    ("test", "wanted"),
    [
        ({}, "| mean | not measured |"),
        ({"voc07": {"mAP": 0.5, "per_class": {"cat": 0.25, "dog": None}}}, "| cat | 25.0 |\n| dog | not measured |"),
        ({"voc07": {"mAP": 0.5}, "intervals": {"voc07": {"mean": [0.4, 0.6]}}}, "| mean | 50.0 (40.0 to 60.0) |"),
    ],
)
def test_the_card_has_the_figures_of_the_run(tmp_path: Path, test: dict[str, object], wanted: str) -> None:
    (tmp_path / "metrics.json").write_text(json.dumps({"test": test}))
    lines = "\n".join(hub._figure_lines(tmp_path))
    assert wanted in lines and "one seed" in lines
    assert ("Without intervals" in lines) == ("intervals" not in test)


def test_the_card_states_the_licence_of_the_weights() -> None:
    config = tag2box.RECIPES["photos"]()
    assert hub._licence_lines(config, None)[:2] == [
        "- This model: not stated by the one who uploaded it: ask before use.",
        "- The backbone began with pretrained weights `lite0`, licence Apache-2.0.",
    ]
    assert hub._licence_lines(config, "mit")[0] == "- This model: mit."


# ---------------------------------------------------------------- mistakes


def test_damaged_weights_are_not_pushed(run: Path, tmp_path: Path) -> None:
    file = run / json.loads((run / "state.json").read_text())["folder"] / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors"):
        hub.push_to_hub(run, "owner/name", out=tmp_path / "up")
    assert not (tmp_path / "up").exists()


@pytest.mark.parametrize(
    "content", ["[]", '{"test": []}', '{"test": {"voc07": 1}}', '{"test": {"voc07": {"per_class": 5}}}']
)
def test_metrics_of_another_program_are_refused(run: Path, tmp_path: Path, content: str) -> None:
    (run / "metrics.json").write_text(content)
    with pytest.raises(UserError, match="not one that tag2box wrote"):
        hub.push_to_hub(run, "owner/name", out=tmp_path / "up")
    assert not (tmp_path / "up").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["push", "run", "name"], "name: no name of a repository; expected owner/name"),
        (["push", "run", "owner/name"], "nothing to do: name a folder to write (--out), or upload with --upload"),
        (["push", "none", "owner/name", "--out", "x"], "none: no run here"),
        (["push", "run", "owner/name", "--out", "full"], "full: exists already; name a new folder"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys, argv, said) -> None:
    (tmp_path / "full").mkdir()
    monkeypatch.chdir(tmp_path)
    done = call(argv, monkeypatch, capsys)
    assert done.code == 2 and said in done.err and done.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_the_command_says_that_nothing_was_uploaded(run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    done = call(["push", str(run), "owner/name", "--out", str(tmp_path / "up")], monkeypatch, capsys)
    assert done.code == 0 and "nothing was uploaded; --upload does it" in done.out + done.err
