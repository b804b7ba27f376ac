"""The documentation site: built strictly and offline, no dead link or anchor, search that works from disk."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag

import pytest

import tag2box
from pages import DOCS, PAGES, ROOT, load

LOADED = {"img": "src", "script": "src", "link": "href", "source": "src", "iframe": "src"}
WEB = re.compile(r"(?:[a-z]+:)?//", re.IGNORECASE)
BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)


class PageParser(HTMLParser):
    """Ids, links, and what a browser would load."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        self.ids |= {given[key] for key in ("id", "name") if key in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if LOADED.get(tag) in given:
            self.loaded.append(given[LOADED[tag]])


def parsed(path: Path) -> PageParser:
    parser = PageParser()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` does, where no address of the web can be reached."""
    out = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT, check=False, capture_output=True, text=True,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not re.search("WARNING|ERROR", done.stderr), done.stderr
    return out


@pytest.fixture(scope="module")
def html(site: Path) -> dict[Path, PageParser]:
    return {path: parsed(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_every_page_is_in_the_site(site: Path) -> None:
    for page in PAGES:
        if page.is_relative_to(DOCS):
            place = page.relative_to(DOCS).with_suffix(".html")
            assert (site / (place.with_stem("index") if place.stem == "README" else place)).exists(), page
    assert {"changelog", "contributing", "security"} == {path.stem for path in (site / "project").glob("*.html")}
    examples = {path.stem for path in (ROOT / "examples").iterdir() if path.suffix in {".py", ".ipynb"}}
    assert examples == {path.stem for path in (site / "examples").glob("*.html")}
    assert not list(site.rglob("make_*.py"))


def test_links_and_anchors_lead_somewhere(html: dict[Path, PageParser]) -> None:
    dead = []
    for path, page in html.items():
        for link in page.links:
            place, anchor = urldefrag(link)
            if WEB.match(link) or link.startswith("mailto:"):
                continue
            target = (path.parent / unquote(place)).resolve() if place else path
            known = html[target].ids if target in html else set()
            if not target.is_file() or (anchor and unquote(anchor) not in known):
                dead.append((path.name, link))
    assert dead == []


def test_pages_load_nothing_from_the_web(site: Path, html: dict[Path, PageParser]) -> None:
    for path, page in html.items():
        assert page.loaded, path
        for link in page.loaded:
            assert not WEB.match(link), (path, link)
            assert link.startswith("data:") or (path.parent / unquote(urldefrag(link)[0])).exists(), (path, link)
    for path in site.rglob("*.css"):
        found = re.findall(r"url\(\s*['\"]?([^)'\"]+)|@import\s+['\"]([^'\"]+)", path.read_text(encoding="utf-8"))
        assert not [link for pair in found for link in pair if WEB.match(link)], path


def test_the_api_page_shows_every_public_name_and_only_these(site: Path) -> None:
    listed = re.findall(r"^::: tag2box\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(tag2box.__all__)
    assert {f"tag2box.{public}" for public in tag2box.__all__} <= parsed(site / "api.html").ids


def test_search_has_every_section_and_is_there_for_pages_from_disk(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    places = {entry["location"] for entry in index["docs"]}
    assert {"index.html", "labels.html#the-rule", "api.html#tag2box.train", "systems/oicr.html"} <= places
    script = (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert json.loads(script.removeprefix("var __index = ")) == index


@pytest.mark.parametrize(
    ("text", "source", "address", "wanted"),
    [
        ("", "docs/a.md", "a.md", ""),
        ("[x](b.md#c) [y](#z)", "docs/a.md", "a.md", "[x](b.md#c) [y](#z)"),
        ("[x](../CHANGELOG.md)", "docs/a.md", "a.md", "[x](project/changelog.md)"),
        ("[x](../../examples/own.py)", "docs/systems/a.md", "systems/a.md", "[x](../examples/own.md)"),
        ("[x](docs/a.md#b)", "CHANGELOG.md", "project/changelog.md", "[x](../a.md#b)"),
        ("![p](docs/images/p.png)", "README.md", "project/readme.md", "![p](../images/p.png)"),
        ("[`x`](tests/y.md) left", "SECURITY.md", "project/security.md", "`x` left"),
        ("[x](https://example.org/a)", "docs/a.md", "a.md", "[x](https://example.org/a)"),
    ],
)
def test_links_that_leave_the_docs_are_rewritten(text: str, source: str, address: str, wanted: str) -> None:
    pages = {"project/changelog.md": "CHANGELOG.md", "examples/own.md": "examples/own.py"}
    assert load(ROOT / "tools" / "docs_site.py").rewrite_links(text, source, address, pages) == wanted


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"], timeout=180_000)
        yield started
        started.close()


@pytest.mark.skipif(not BROWSER, reason="no browser")
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_and_search_answers_from_disk(site: Path, browser: Any, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.set_default_timeout(180_000)
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or faults.append(request.url))
    for name in ("real-photos.html", "api.html", "systems/index.html", "index.html"):
        page.goto((site / name).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), name
    if width < 500:
        page.locator("label.md-header__button[for=__search]").click()
    page.locator(".md-search__input").press_sequentially("calibrated scores")
    first = page.locator(".md-search-result__item a").first
    first.wait_for(state="attached")
    assert "trust-classes.html" in {link.split("?")[0].split("/")[-1].split("#")[0] for link in hrefs(page)}
    assert faults == [], "scripts run, and nothing is fetched"
    page.close()


def hrefs(page: Any) -> list[str]:
    return page.locator(".md-search-result__item a").evaluate_all("links => links.map(link => link.href)")
