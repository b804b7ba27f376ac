"""What the documentation site needs beside the pages of docs/: a hook of MkDocs and an extension of Griffe.

Files outside docs/ that pages link to (changelog, guide for contributors, examples) become pages of the site, and links
to them are rewritten, so that the same Markdown works on GitHub and in the site. mkdocs.yml names this file.
"""

import json
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_LINK = re.compile(r"(?P<text>!?\[(?:[^\]\[]|\[[^\]]*\])*\])\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")
_EXAMPLE = re.compile(r"^Example:\n((?:(?: {4}.*)?\n?)+)", re.MULTILINE)


def outside_pages(root: Path) -> dict[str, str]:
    """Page of the site, by its address, to the file of the project that it shows."""
    scripts = sorted(path.relative_to(root).as_posix() for path in root.glob("examples/*") if path.suffix in _SHOWN)
    return {f"project/{name.lower()}": name for name in PROJECT} | {
        f"{posixpath.splitext(n)[0]}.md": n for n in scripts
    }


def _script(path: Path) -> str:
    return f"# {path.stem}\n\n`{path.parent.name}/{path.name}`\n\n```python\n{path.read_text(encoding='utf-8')}```\n"


def _notebook(path: Path) -> str:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    texts = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in cells]
    return "\n\n".join(f"```python\n{text}\n```" if is_code else text for text, is_code in texts) + "\n"


def _page(path: Path) -> str:
    return path.read_text(encoding="utf-8")


_SHOWN: dict[str, Callable[[Path], str]] = {".py": _script, ".ipynb": _notebook, ".md": _page}


def rewrite_links(text: str, source: str, address: str, pages: dict[str, str]) -> str:
    """Links of a file of the project (its path ``source``) as they are from the page ``address`` of the site.

    Links to what the site does not have become plain text.
    """
    homes = {file: page for page, file in pages.items()}
    folder, here = posixpath.dirname(source), posixpath.dirname(address) or "."

    def moved(match: re.Match[str]) -> str:
        if not match["target"] or re.match(r"[a-z]+:", match["target"]):
            return match[0]
        file = posixpath.normpath(posixpath.join(folder, match["target"]))
        page = homes.get(file) or (file.removeprefix("docs/") if file.startswith("docs/") else None)
        if page is None:
            return match["text"].strip("![]")
        return f"{match['text']}({posixpath.relpath(page, here)}{match['anchor'] or ''})"

    return _LINK.sub(moved, text)


# ---------------------------------------------------------------- MkDocs


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of files outside docs/."""
    pages = outside_pages(ROOT)
    for address, source in pages.items():
        path = ROOT / source
        text = rewrite_links(_SHOWN[path.suffix](path), source, address, pages)
        files.append(File.generated(config, address, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links that leave docs/."""
    if page.file.generated_by is not None:
        return markdown
    source = f"docs/{page.file.src_uri}"
    return rewrite_links(markdown, source, page.file.src_uri, outside_pages(ROOT))


# ---------------------------------------------------------------- Griffe


class Examples(Extension):
    """Code below ``Example:`` in docstrings as a code block."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(_as_block, obj.docstring.value)


def _as_block(match: re.Match[str]) -> str:
    block = f"```python\n{dedent(match[1]).strip()}\n```"
    return f"Example:\n{indent(block, ' ' * 4)}\n"
