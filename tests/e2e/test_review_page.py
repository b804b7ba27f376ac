"""The review page in a real browser: by keyboard, by mouse, on a phone, through kills, conflicts and lost photos."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from review_world import CLASSES, review_server, scene_labels, serving
from tag2box.labels.journal import JOURNAL_FILE, read_reviews
from tag2box.labels.label_set import LabelSet
from tag2box.labels.reviews import states_of

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
ARGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WAIT = 30_000  # milliseconds; a busy machine may be slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    scene_labels(folder, 7)
    return folder


@pytest.fixture
def folder(original: Path) -> Path:
    (original / "labels" / JOURNAL_FILE).unlink(missing_ok=True)
    return original


class Page:
    """A page in a browser of its own, with what tests do again and again."""

    def __init__(self, browser: Any, address: str, width: int = 1280, **more: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 800}, **more)
        self.context.set_default_timeout(WAIT)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._console)
        self.open(address)

    def _console(self, message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.errors.append(message.text)

    def open(self, address: str) -> None:
        self.page.goto(address)
        self.page.wait_for_selector("body[data-shown]")

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *failure: object) -> None:
        self.context.close()
        assert failure[0] is not None or self.errors == []

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    @property
    def shown(self) -> int:
        return int(self.page.evaluate("document.body.dataset.shown"))

    def wait(self, script: str) -> None:
        """Wait for a condition; the page's security policy forbids what Playwright does for it."""
        for _ in range(WAIT // 20):
            if self.page.evaluate(f"Boolean({script})"):
                return
            self.page.wait_for_timeout(20)
        raise AssertionError(f"never: {script}")

    def saved(self) -> None:
        """Wait until the server has confirmed everything."""
        self.wait("document.body.dataset.waiting === '0' && document.querySelector('#connection.ok')")

    def finish(self) -> int:
        """Accept all and wait for the next photo; returns the one that is done."""
        before = self.shown
        self.press("Enter")
        self.wait(f"document.body.dataset.shown !== '{before}'")
        return before

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))


def actions(labels: Path) -> list[dict[str, Any]]:
    """The lines of the journal."""
    return [json.loads(line) for line in (labels / JOURNAL_FILE).read_text().splitlines()[1:]]


def test_three_photos_by_keyboard(browser: Any, folder: Path) -> None:
    labels = folder / "labels"
    with serving(labels) as (session, access), Page(browser, access.address) as page:
        assert page.page.url.endswith(f"#{page.shown}"), "the token is not left in the address"
        first = page.shown
        page.press("x")  # reject the first box
        page.finish()
        page.press("Tab", "a")
        second = page.finish()
        page.press("ArrowRight", "ArrowRight", "Shift+ArrowDown", "Alt+ArrowLeft")
        third = page.finish()
        page.saved()
        names = [session.photos[number].id for number in (first, second, third)]
        done = [key for key, _ in groupby((line["photo"], line["action"]) for line in actions(labels))]
        expected = [(names[0], "reject"), (names[0], "done"), (names[1], "accept"), (names[1], "done")]
        assert done == [*expected, (names[2], "move"), (names[2], "done")]
        reviews = read_reviews(labels)
        assert set(reviews.photos) == set(names) and all(own.reviewer == "Ada" for own in reviews.photos.values())
        assert [own.decision for own in reviews.photos[names[0]].verdicts][0] == "rejected"  # noqa: RUF015
        moved = reviews.photos[names[2]].verdicts[0]
        before = moved.box.box
        assert moved.decision == "corrected" and moved.corrected is not None
        left = max(before[0] - 8, 0.0)
        assert moved.corrected == pytest.approx((left, before[1], before[2] + left - before[0], before[3] + 1), abs=2)
        assert "3 of 7 done" in page.text("#progress-text")


def test_boxes_are_drawn_by_mouse_and_by_keys_and_undone(browser: Any, folder: Path) -> None:
    labels = folder / "labels"
    with serving(labels) as (session, access), Page(browser, access.address) as page:
        number = page.shown
        photo = session.photos[number]
        area = page.page.locator("#photo").bounding_box()
        page.press("b")
        scale = area["width"] / photo.width
        page.page.mouse.move(area["x"] + 5 * scale, area["y"] + 6 * scale)
        page.page.mouse.down()
        page.page.mouse.move(area["x"] + 25 * scale, area["y"] + 36 * scale, steps=4)
        page.page.mouse.up()
        page.press("4")  # the class with a tag of HTML in its name
        page.press("b", "ArrowRight", "Enter", "Alt+ArrowRight", "Alt+ArrowDown", "Alt+ArrowDown", "Enter")
        page.saved()
        drawn = list(states_of(photo, session.journal.history.state(photo.id)).values())[len(photo.boxes) :]
        assert drawn[0].box == pytest.approx((5, 6, 25, 36), abs=0.5) and drawn[0].name == CLASSES[3]
        assert (drawn[1].box[2] - drawn[1].box[0], drawn[1].box[3] - drawn[1].box[1]) == pytest.approx(
            (10, 20), abs=0.2
        )
        assert CLASSES[3] in page.text("#box-list") and page.page.locator("#box-list b").count() == 0
        page.press("z", "z")
        page.saved()
        boxes = states_of(photo, session.journal.history.state(photo.id))
        assert boxes[len(photo.boxes)].name != CLASSES[3] and len(photo.boxes) + 1 not in boxes
        page.press("Shift+Z")
        page.saved()
        assert states_of(photo, session.journal.history.state(photo.id))[len(photo.boxes)].name == CLASSES[3]
        page.press("z", "z", "z")
        page.wait("document.querySelector('#live').textContent === 'Nothing to undo'")
        page.saved()
        assert not session.journal.history.state(photo.id).now.boxes
        assert [line["action"] for line in actions(labels)][-3:] == ["redo", "undo", "undo"]


def test_mouse_moves_edges_and_part_or_whole(browser: Any, folder: Path) -> None:
    with serving(folder / "labels") as (session, access), Page(browser, access.address) as page:
        number = next(n for n, own in enumerate(session.photos) if own.labels and own.boxes[0].alternative)
        page.open(f"{access.address}#{number}")
        page.page.reload()
        page.wait(f"document.body.dataset.shown === '{number}'")
        photo = session.photos[number]
        area = page.page.locator("#photo").bounding_box()
        scale = area["width"] / photo.width
        x1, y1, x2, y2 = photo.boxes[0].box
        page.page.mouse.move(area["x"] + x1 * scale, area["y"] + (y1 + y2) / 2 * scale)
        page.page.mouse.down()
        page.page.mouse.move(area["x"] + (x1 + 7) * scale, area["y"] + (y1 + y2) / 2 * scale, steps=3)
        page.page.mouse.up()
        page.saved()
        state = session.journal.history.state(photo.id).now.boxes[0]
        assert state.box == pytest.approx((x1 + 7, y1, x2, y2), abs=0.5)
        page.press("s")
        page.saved()
        assert session.journal.history.state(photo.id).now.boxes[0].box == pytest.approx(photo.boxes[0].alternative)
        page.press("s")
        page.saved()
        assert session.journal.history.state(photo.id).now.boxes[0].box == photo.boxes[0].box


def test_a_reload_keeps_the_photo_and_its_state(browser: Any, folder: Path) -> None:
    with serving(folder / "labels") as (session, access), Page(browser, access.address) as page:
        page.finish()
        page.press("x")
        page.saved()
        number = page.shown
        page.page.reload()
        page.wait(f"document.body.dataset.shown === '{number}'")
        assert page.page.locator("#box-list li.rejected").count() == 1
        page.press("z")
        page.wait("document.querySelectorAll('#box-list li.rejected').length === 0")
        page.press("z")  # the photo before
        page.wait(f"document.body.dataset.shown !== '{number}'")
        page.saved()
        assert not session.journal.history.reviews().photos


def test_two_tabs_do_not_overwrite_each_other(browser: Any, folder: Path) -> None:
    with (
        serving(folder / "labels") as (session, access),
        Page(browser, access.address) as one,
        Page(browser, access.address) as two,
    ):
        assert one.shown == two.shown
        photo = session.photos[one.shown]
        one.press("x")
        one.saved()
        two.press("a")
        two.wait("/changed this photo/.test(document.querySelector('#toasts .bad')?.textContent)")
        two.wait("document.querySelectorAll('#box-list li.rejected').length === 1")
        state = session.journal.history.state(photo.id)
        assert state.revision == 1 and state.now.boxes[0].decision == "rejected"
        two.press("Tab", "a")
        two.saved()
        assert session.journal.history.state(photo.id).revision == 2


def test_a_photo_that_is_deleted_is_a_message_and_the_review_continues(browser: Any, folder: Path) -> None:
    with serving(folder / "labels", order="file") as (session, access):
        lost = folder / "photos" / session.photos[3].file
        hidden = lost.with_suffix(".hidden")
        lost.rename(hidden)
        try:
            with Page(browser, f"{access.address}#2") as page:
                page.press("n")
                page.wait("!document.querySelector('#problem').hidden")
                assert f"{lost.name}: this photo is gone" in page.text("#problem")
                page.press("Enter")
                page.wait("document.body.dataset.shown === '4' && document.querySelector('#problem').hidden")
                page.finish()
                page.saved()
                assert list(session.journal.history.reviews().photos) == [session.photos[4].id]
        finally:
            hidden.rename(lost)


def test_filters_and_classes_by_name(browser: Any, folder: Path) -> None:
    with serving(folder / "labels") as (session, access), Page(browser, access.address) as page:
        page.press("0")
        page.page.keyboard.type("cup")
        page.press("Enter")
        page.saved()
        assert CLASSES[3] in {
            own.name for own in next(iter(session.journal.history.photos.values())).now.boxes.values()
        }
        page.press("o")
        page.page.select_option("#filter-class", "car")
        page.page.select_option("#filter-order", "file")
        page.page.click("#filter-apply")
        wanted = [n for n, own in enumerate(session.photos) if "car" in {*own.tags, *(box.name for box in own.boxes)}]
        page.wait(f"document.querySelectorAll('.photo-row').length === {len(wanted)}")
        assert page.page.locator("#filter-class option").all_inner_texts() == ["All classes", *CLASSES]
        page.press("?")
        assert page.page.locator("#help").is_visible()


def test_phone(browser: Any, folder: Path) -> None:
    with (
        serving(folder / "labels") as (session, access),
        Page(browser, access.address, width=390, has_touch=True, is_mobile=True) as page,
    ):
        assert page.page.evaluate("document.documentElement.scrollWidth") <= 390
        for name in ("reject", "accept", "finish"):
            size = page.page.locator(f"#{name}").bounding_box()
            assert size["height"] >= 44 and size["width"] >= 80 and size["x"] + size["width"] <= 390
        before = page.shown
        page.page.tap("#reject")
        page.page.tap("#finish")
        page.wait(f"document.body.dataset.shown !== '{before}'")
        page.saved()
        found = session.journal.history.reviews().photos[session.photos[before].id]
        assert found.verdicts[0].decision == "rejected"


CONTRAST = """
() => {
  const rgb = (text) => text.match(/[0-9.]+/g).slice(0, 3).map(Number);
  const alpha = (text) => Number(text.match(/[0-9.]+/g)[3] ?? 1);
  const light = (own) => own.map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  const level = (own) => light(own).reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const found = [];
  for (const own of document.querySelectorAll("h1, h2, h3, p, b, small, span, kbd, button, dt, dd")) {
    const text = [...own.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!text || !own.checkVisibility() || own.closest(":disabled, .rejected, #toasts, .sr")) continue;
    let ground = own;
    while (ground && alpha(getComputedStyle(ground).backgroundColor) < 1) ground = ground.parentElement;
    const a = level(rgb(getComputedStyle(own).color));
    const b = level(rgb(getComputedStyle(ground ?? document.body).backgroundColor));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${own.tagName} ${own.className} ${own.textContent.trim()}: ${ratio}`);
  }
  return found;
}
"""


NAMELESS = """
() => [...document.querySelectorAll("button, select, input")]
  .filter((own) => !(own.ariaLabel || own.textContent.trim() || own.labels?.length))
  .map((own) => own.outerHTML)
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_and_controls_have_names(browser: Any, folder: Path, scheme: str) -> None:
    with serving(folder / "labels") as (_, access), Page(browser, access.address, color_scheme=scheme) as page:
        page.press("x")
        page.saved()
        assert page.page.evaluate(CONTRAST) == []
        page.press("?")
        assert page.page.evaluate(CONTRAST) == []
        assert page.page.evaluate(NAMELESS) == []
        page.press("Escape")
        outline = page.page.evaluate("getComputedStyle(document.activeElement).outlineWidth")
        assert page.page.evaluate("document.activeElement.id") == "stage" and outline != "0px"


@pytest.fixture
def two_photos(tmp_path: Path) -> Path:
    scene_labels(tmp_path, 4)
    return tmp_path / "labels"


def test_a_killed_server_loses_nothing_and_the_page_waits_for_it(browser: Any, two_photos: Path) -> None:
    with review_server(two_photos) as server, Page(browser, server.address) as page:
        page.finish()
        page.saved()
        server.kill()
        page.press("x")
        page.wait("/cannot be reached/.test(document.querySelector('#banner').textContent)")
        assert "1 action is kept here" in page.text("#banner") and f"--port {server.port}" in page.text("#banner")
        page.errors.clear()
        assert len(read_reviews(two_photos)) == 1 and len(actions(two_photos)) == 1
        with review_server(two_photos, "--port", str(server.port)) as again:
            page.wait("/started again/.test(document.querySelector('#banner').textContent)")
            other = page.context.new_page()
            other.goto(again.address)  # any tab with the new address lets the old one continue
            page.saved()
            page.wait("document.querySelector('#banner').hidden")
            other.close()
            code, out = again.stop()
    assert code == 0 and re.search(r"1 photos? reviewed: \d+ boxes accepted, 0 rejected, 0 corrected, 0 added", out)
    assert "tag2box export" in out and "tag2box trust" in out
    assert [line["action"] for line in actions(two_photos)] == ["done", "reject"]
    LabelSet.open(two_photos).verify()
