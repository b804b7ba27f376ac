"""Pages in a browser: the score slider, enlarged pictures, tables on a phone. Skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from demo_runs import write_demo

from tag2box.reporting.report_page import write_report

sync_api = pytest.importorskip("playwright.sync_api")
BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    demo = write_demo(folder)
    runs = [replace(run, own_detections=run.test_detections) for run in demo.runs]
    photos = dict(list(demo.test_photos.items())[5:8])
    write_report(replace(demo, runs=runs, own_photos=photos), folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"], timeout=180_000)
        yield started
        started.close()


@pytest.fixture
def phone(browser: Any, page_file: Path) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 390, "height": 800})
    page.set_default_timeout(180_000)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or faults.append(request.url))
    page.goto(page_file.as_uri())
    yield page
    assert faults == [], "scripts run, and nothing is fetched"
    page.close()


def visible(page: Any, kind: str) -> int:
    return page.locator(f"#detections .photo .box.{kind}:not([hidden])").count()


def captions(page: Any, kind: str) -> int:
    found = page.locator("#detections figcaption").all_inner_texts()
    return sum(int(part.split()[0]) for text in found for part in text.split(" · ") if part.split()[-1] == kind)


def test_the_slider_filters_boxes_and_counts_again(phone: Any) -> None:
    before = {kind: visible(phone, kind) for kind in ("right", "wrong", "missed")}
    assert phone.locator("#detections .slider").is_visible()
    phone.locator("#detections .min-score").fill("0.05")
    low = {kind: visible(phone, kind) for kind in before}
    phone.locator("#detections .min-score").fill("1")
    high = {kind: visible(phone, kind) for kind in before}
    assert low["right"] > before["right"] > high["right"] == 0
    assert low["missed"] < before["missed"] < high["missed"]
    assert len({own["right"] + own["missed"] for own in (low, before, high)}) == 1, "every object is one of both"
    for kind in before:
        assert captions(phone, kind) == high[kind]
    assert phone.locator("#photos output").inner_text() == "1.00", "both sliders say the same"


def test_a_picture_is_enlarged_and_closed(phone: Any) -> None:
    small = phone.locator("#photos .photo").first
    width = small.bounding_box()["width"]
    small.click()
    large = phone.locator("dialog[open] .photo")
    assert large.bounding_box()["width"] > 1.5 * width
    assert large.locator(".box").count() == small.locator(".box").count()
    phone.keyboard.press("Escape")
    assert phone.locator("dialog[open]").count() == 0


def test_names_can_be_hidden(phone: Any) -> None:
    name = phone.locator("#photos .box:not([hidden]) b").first
    assert name.is_visible()
    phone.locator("#detections .show-names").uncheck()
    assert not name.is_visible()


def test_wide_tables_say_that_they_scroll_and_the_page_does_not(phone: Any) -> None:
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    table = phone.locator("#classes .scroll").first
    hint = "box => getComputedStyle(box.querySelector('caption'), '::after').content"
    assert "scroll sideways" in table.evaluate(hint)
    table.evaluate("box => { box.scrollLeft = box.scrollWidth; box.dispatchEvent(new Event('scroll')); }")
    assert "scroll back" in table.evaluate(hint)
    narrow = phone.locator(".scroll:not(.more)").first
    assert "scroll" not in narrow.evaluate("box => getComputedStyle(box, '::after').content")
