"""The review server: what the page asks for, and everything that it must not answer."""

from __future__ import annotations

import http.client
import io
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from review_world import CLASSES, SMALL, scene_labels, serving
from tag2box.errors import UserError
from tag2box.labels.journal import JOURNAL_FILE, read_reviews
from tag2box.labels.label_set import LabelSet
from tag2box.review.server import Access, bind_port
from tag2box.review.session import LONG_SIDES, Renderings, ReviewSession, render_photo


@dataclass
class Site:
    """A server in a thread, and the session behind it."""

    folder: Path
    session: ReviewSession
    access: Access

    def get(self, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
        return self.send("GET", path, None, **headers)

    def send(
        self, method: str, path: str, body: bytes | None, *, token: bool = True, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.access.port, timeout=30)
        own = {name.replace("_", "-"): value for name, value in headers.items()}
        if token:
            own.setdefault("Cookie", f"{self.access.cookie}={self.access.token}")
        connection.putrequest(method, path, skip_host="Host" in own)
        for name, value in own.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, content

    def json(self, path: str) -> Any:
        status, _, content = self.get(path)
        assert status == 200, content
        return json.loads(content)

    def act(self, number: int, **sent: Any) -> tuple[int, Any]:
        body = json.dumps({"key": secrets.token_hex(8), **sent}).encode()
        status, _, content = self.send("POST", f"/api/photos/{number}/actions", body, Content_Type="application/json")
        return status, json.loads(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    scene_labels(folder, 7)
    return folder


@pytest.fixture
def site(folder: Path) -> Iterator[Site]:
    (folder / "labels" / JOURNAL_FILE).unlink(missing_ok=True)
    with serving(folder / "labels") as (session, access):
        yield Site(folder, session, access)


# ---------------------------------------------------------------- what it answers


def test_the_page_and_its_files_refer_to_nothing_outside(site: Site) -> None:
    status, headers, page = site.get("/")
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in headers["content-security-policy"]
    for name in ("main.js", "client.js", "list.js", "model.js", "panel.js", "stage.js", "review.css", "icon.svg"):
        status, own, content = site.get(f"/static/{name}")
        assert status == 200 and own["x-content-type-options"] == "nosniff"
        outside = content.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"http://" not in outside and b"https://" not in outside and b"innerHTML" not in outside
    assert b"http" not in page and b"onclick" not in page and b"style=" not in page
    assert site.get("/static/none.js")[0] == 404


def test_the_queue_has_every_photo_once_and_can_be_filtered(site: Site) -> None:
    found = site.json("/api/queue?order=queue")
    assert sorted(found["photos"]) == list(range(7)) and len(found["sampled"]) == 3 and found["done"] == []
    assert found["photos"][2] in found["sampled"]
    cars = site.json("/api/queue?order=file&name=car")["photos"]
    own = [n for n, p in enumerate(site.session.photos) if "car" in {*p.tags, *(box.name for box in p.boxes)}]
    assert cars == own and 0 < len(own) < 7
    assert site.json("/api/queue?order=file&low=0.95")["photos"] == []
    assert site.get("/api/queue?order=best")[0] == 422 and site.get("/api/queue?low=2")[0] == 422
    assert site.json("/api/files")[0] == "scene_0000.jpg"
    described = site.json("/api/set")
    assert described["classes"] == list(CLASSES) and described["photos"] == 7 and described["reviewer"] == "Ada"


def test_an_action_is_stored_before_it_is_answered(site: Site) -> None:
    photo = site.json("/api/photos/0")
    first = photo["boxes"][0]
    status, after = site.act(0, action="reject", boxes={"0": [*first["box"], first["name"], "rejected"]}, based_on=0)
    assert status == 200 and after["revision"] == 1 and after["boxes"][0]["decision"] == "rejected" and after["undo"]
    assert len((site.folder / "labels" / JOURNAL_FILE).read_bytes().splitlines()) == 2
    assert site.act(0, action="done", based_on=1)[1]["done"]
    assert next(own.decision for own in read_reviews(site.folder / "labels").verdicts()) == "rejected"
    progress = site.json("/api/progress?since=0")
    assert (progress["done"], progress["total"], progress["position"]) == (1, 7, 2)
    assert progress["changed"] == [[0, 2, True]] and progress["pace"] is None
    assert site.json("/api/progress?since=2")["changed"] == []
    assert site.json("/api/queue")["done"] == [0]
    assert site.session.counts().rejected == 1


def test_an_outdated_action_is_a_conflict_with_the_photo_as_it_is(site: Site) -> None:
    assert site.act(1, action="done", based_on=0, key="a")[0] == 200
    status, answer = site.act(1, action="reopen", based_on=0, key="b")
    assert status == 409 and "Ada has changed this photo" in answer["problem"]
    assert answer["photo"]["revision"] == 1 and answer["photo"]["done"]
    assert site.act(1, action="done", based_on=0, key="a")[0] == 200, "sent again, because the answer was lost"
    assert site.json("/api/photos/1")["revision"] == 1


@pytest.mark.parametrize(
    "sent",
    [
        {}, {"action": "explode", "based_on": 0}, {"action": "done"}, {"action": "done", "based_on": "0"},
        {"action": "done", "based_on": True}, {"action": "done", "based_on": 0, "key": ""},
        {"action": "done", "based_on": 0, "key": "x" * 65}, {"action": "undo", "based_on": 0},
        {"action": "move", "based_on": 0, "boxes": {"0": [0, 0, 1e9, 5, "car", "open"]}},
        {"action": "move", "based_on": 0, "boxes": {"0": [0, 0, 5, 5, "dragon", "open"]}},
    ],
)  # fmt: skip
def test_impossible_actions_change_nothing(site: Site, sent: dict[str, Any]) -> None:
    status, answer = site.act(2, **sent)
    assert status == 400 and answer["problem"] and "\n" not in answer["problem"]
    assert site.json("/api/photos/2")["revision"] == 0


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b"[" * 100_000, b"\xff", b'{"action": NaN}', b"{" + b" " * (5 << 20)]
)
def test_bodies_that_are_no_actions(site: Site, body: bytes) -> None:
    try:
        status = site.send("POST", "/api/photos/0/actions", body, Content_Type="application/json")[0]
    except (BrokenPipeError, ConnectionResetError):
        status = 400  # refused before all of it was sent
    assert status == 400 and site.json("/api/photos/0")["revision"] == 0


def test_a_full_disk_is_reported_and_the_server_continues(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tag2box.labels.journal.os.fsync", _full)
        status, answer = site.act(3, action="done", based_on=0)
        assert status == 503 and "No space left" in answer["problem"]
    assert site.act(3, action="done", based_on=0)[0] == 200


def _full(handle: int) -> None:
    raise OSError(28, "No space left on device")


# ---------------------------------------------------------------- photos


def test_renderings_are_small_upright_and_cached_by_the_browser(site: Site) -> None:
    status, headers, content = site.get("/api/photos/0/screen.jpg")
    assert status == 200 and Image.open(io.BytesIO(content)).size == (SMALL.width, SMALL.height)
    assert site.get("/api/photos/0/screen.jpg", If_None_Match=headers["etag"])[0] == 304
    small = Image.open(io.BytesIO(site.get("/api/photos/0/thumb.jpg")[2]))
    assert max(small.size) == LONG_SIDES["thumb"]
    assert site.get("/api/photos/0/original.jpg")[0] == 422


def test_a_turned_photo_is_shown_upright(tmp_path: Path) -> None:
    labels = scene_labels(tmp_path, 1)
    photo = labels.content.photos[0]
    path = labels.content.path(photo)
    image = Image.open(path).rotate(90, expand=True)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(path, exif=exif)
    entry = type(photo)(photo.id, photo.file, photo.width, photo.height)
    assert Image.open(io.BytesIO(render_photo(path, entry, "screen"))).size == (photo.width, photo.height)


def test_a_photo_that_is_gone_or_another_is_a_message(site: Site) -> None:
    path = site.folder / "photos" / "scene_0005.jpg"
    content, stat = path.read_bytes(), path.stat()
    path.unlink()
    status, _, answer = site.get("/api/photos/5/screen.jpg")
    assert status == 410 and "scene_0005.jpg: this photo is gone" in json.loads(answer)["problem"]
    assert site.json("/api/photos/5")["file"] == "scene_0005.jpg"
    path.write_bytes((site.folder / "photos" / "scene_0001.jpg").read_bytes())
    assert "is not the photo that was labelled" in json.loads(site.get("/api/photos/5/screen.jpg")[2])["problem"]
    path.write_bytes(content)
    assert site.get("/api/photos/5/screen.jpg")[0] == 200
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_the_memory_of_renderings_is_limited(folder: Path) -> None:
    labels = LabelSet.open(folder / "labels").content
    photos = labels.photos
    sizes = [len(render_photo(labels.path(photo), photo, "screen")) for photo in photos]
    kept = Renderings(sizes[0] + sizes[1] + 1)
    for photo in (*photos[:2], photos[0], photos[2]):
        assert kept.get(labels.path(photo), photo, "screen")[:2] == b"\xff\xd8"
    assert kept._bytes <= sizes[0] + sizes[1] + 1 and len(kept._kept) >= 1
    none = Renderings(10)
    assert none.get(labels.path(photos[0]), photos[0], "thumb") and not none._kept


# ---------------------------------------------------------------- who may ask

PLACES = ["/", "/static/main.js", "/api/set", "/api/queue", "/api/photos/0", "/api/photos/0/screen.jpg", "/none"]


@pytest.mark.parametrize("path", PLACES)
def test_nothing_is_answered_without_the_token(site: Site, path: str) -> None:
    for cookie in (
        "",
        f"{site.access.cookie}=wrong",
        f"other={site.access.token}",
        f"{site.access.cookie}=\xff",
        ";;==",
    ):
        status, headers, content = site.get(path, token=False, **({"Cookie": cookie} if cookie else {}))
        assert status == 403 and "set-cookie" not in headers
        assert b"address that `tag2box review` printed" in content
    assert site.get(f"{path}?token=wrong", token=False)[0] == 403
    assert site.get(f"{path}?once=", token=False)[0] == 403


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost.evil:{port}", ""]
)
@pytest.mark.parametrize("path", ["/", "/api/set", "/?token={token}"])
def test_other_hosts_are_refused_even_with_the_token(site: Site, host: str, path: str) -> None:
    own = host.format(port=site.access.port)
    status, headers, _ = site.get(path.format(token=site.access.token), Host=own)
    assert status == 421 and "set-cookie" not in headers
    assert site.get("/api/set", Host=f"localhost:{site.access.port}")[0] == 200


def test_the_token_is_exchanged_for_a_cookie(site: Site) -> None:
    status, headers, _ = site.get(f"/?token={site.access.token}", token=False)
    assert status == 200
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and cookie.startswith(f"{site.access.cookie}=")
    assert site.get("/api/set", token=False, Cookie=cookie.partition(";")[0])[0] == 200
    assert site.get("/api/set", token=False, X_Token=site.access.token)[0] == 200
    assert site.get(f"/api/set?token={site.access.token}", token=False)[0] == 403, "the address opens the page only"


def test_the_address_of_the_browser_works_once(site: Site) -> None:
    query = "/?" + site.access.address_once().partition("?")[2]
    assert site.get(query, token=False)[0] == 200
    assert site.get(query, token=False)[0] == 403


def test_pages_of_other_sites_can_neither_read_nor_write(site: Site) -> None:
    body = json.dumps({"action": "done", "based_on": 0, "key": "x"}).encode()
    path = "/api/photos/0/actions"
    assert site.send("POST", path, body, Content_Type="text/plain")[0] == 415
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{site.access.port + 1}", "https://127.0.0.1"):
        assert site.send("POST", path, body, Content_Type="application/json", Origin=origin)[0] == 403
        assert site.get("/api/set", Origin=origin)[0] == 403
        assert site.get(f"/?token={site.access.token}", token=False, Origin=origin)[0] == 403
    status, headers, _ = site.get("/api/photos/0/screen.jpg")
    assert status == 200 and headers["cross-origin-resource-policy"] == "same-origin"
    assert "access-control-allow-origin" not in headers and headers["referrer-policy"] == "no-referrer"
    own = f"http://127.0.0.1:{site.access.port}"
    assert site.send("POST", path, body, Content_Type="application/json", Origin=own)[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/api/photos/7", "/api/photos/-1", "/api/photos/7/screen.jpg", "/api/photos/99999999999999999999",
        "/api/photos/..%2f..%2fetc/screen.jpg", "/static/..%2fserver.py", "/static/../server.py",
        "/static/%2e%2e/%2e%2e/cli/review.py", "/api/photos/0/..%2f..%2fpasswd.jpg", "//etc/passwd", "/static/",
        "/docs", "/openapi.json", "/api/photos/0x0", "/api/photos/0/actions",
    ],
)  # fmt: skip
def test_no_other_file_can_be_read(site: Site, path: str) -> None:
    status, _, content = site.get(path)
    assert status in {404, 405, 422}
    assert b"root:" not in content and b"import " not in content


# ---------------------------------------------------------------- starting


def test_a_port_that_is_taken_is_one_line() -> None:
    with bind_port(0) as taken, pytest.raises(UserError, match=r"--port \d+: cannot be used .*name another, or 0"):
        bind_port(taken.getsockname()[1])


def test_photos_of_another_set_are_refused(tmp_path: Path) -> None:
    scene_labels(tmp_path / "one", 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"none of its photos is in .*empty; name another --photos"):
        ReviewSession(tmp_path / "one" / "labels", photos=tmp_path / "empty")
    first, second = sorted((tmp_path / "one" / "photos").iterdir())
    first.unlink()
    session = ReviewSession(tmp_path / "one" / "labels")
    session.close()
    assert session.notices == ["scene_0000.jpg: this photo is gone; it cannot be reviewed"]
    Image.new("RGB", (160, 120)).save(second)
    with pytest.raises(UserError, match="is not the photo that was labelled"):
        ReviewSession(tmp_path / "one" / "labels")
