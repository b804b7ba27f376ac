"""``tag2box review``: a local web page on which people correct the boxes of a label set."""

import getpass
import os
import sys
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tag2box.errors import LONGEST_LINE, UserError, printable
from tag2box.labels.review_order import Order
from tag2box.labels.reviews import ReviewCounts
from tag2box.progress import Progress, TerminalProgress, silent

if TYPE_CHECKING:
    from tag2box.review.server import Access

_OPTIONAL = {"fastapi", "starlette", "uvicorn"}


def review_labels(
    labels: Path,
    *,
    photos: Path | None = None,
    port: int = 0,
    reviewer: str | None = None,
    order: Order = "queue",
    seed: int = 0,
    on_ready: "Callable[[Access, list[str]], None] | None" = None,
    progress: Progress = silent,
) -> ReviewCounts:
    """Serve the review page of a label set until Ctrl-C or SIGTERM; returns what the review came to.

    Args:
        labels: the label set; the reviews are kept beside it, in ``reviews.jsonl``.
        photos: root of the photos, if they were moved since.
        port: of this machine, 0 for a free one. The page cannot be reached from other machines.
        reviewer: name that is stored with every action; default: the user's login name.
        order: ``queue`` (what teaches most first, every third photo from a random sample), ``random`` or ``file``.
        seed: of the random sample; a review that was begun keeps its own.
        on_ready: receives the address of the page, and lines about photos that are gone and the like.
    """
    try:
        from tag2box.review import server, session
    except ModuleNotFoundError as error:
        if error.name not in _OPTIONAL:
            raise
        raise UserError(f"the review page needs {error.name}, which is missing: pip install tag2box[review]") from None
    bound = server.bind_port(port)
    with bound:
        name = reviewer if reviewer is not None else _login()
        opened = session.ReviewSession(
            labels, photos=photos, reviewer=name, order=order, seed=seed, progress=progress
        )  # fmt: skip
        try:
            access = server.Access(bound.getsockname()[1])
            if on_ready is not None:
                on_ready(access, opened.notices)
            server.serve(opened, bound, access)
            return opened.counts()
        finally:
            opened.close()


def _login() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""


# ---------------------------------------------------------------- the command


def review_command(
    labels: Annotated[Path, typer.Argument(metavar="LABELS", help="A label set of `tag2box label`.")],
    photos: Annotated[Path | None, typer.Option("--photos", help="Folder of the photos, if they were moved.")] = None,
    port: Annotated[int, typer.Option(help="Port on this machine; 0: any that is free.")] = 0,
    reviewer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name that is stored with your decisions; default: login name.")
    ] = None,
    order: Annotated[
        Order,
        typer.Option(help="queue: what teaches most first, every third photo from a random sample."),
    ] = "queue",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random sample, for a review that begins.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Review the boxes of a label set on a local web page: accept, reject, correct, draw.

    Every decision is stored at once, in reviews.jsonl beside the labels. Stop with Ctrl-C; the same command continues.

    Example: `tag2box review labels`
    """

    def ready(access: "Access", notices: list[str]) -> None:
        for line in notices:
            _say(f"warning: {line}", err=True)
        _say(f"review page: {access.address}")
        _say("Ctrl-C ends the review; everything is stored as you go")
        sys.stdout.flush()
        if browser and _has_display():
            threading.Thread(target=webbrowser.open, args=(access.address_once(),), daemon=True).start()

    counts = review_labels(
        labels,
        photos=photos,
        port=port,
        reviewer=reviewer,
        order=order,
        seed=seed,
        on_ready=ready,
        progress=TerminalProgress(),
    )
    _say(
        f"{counts.photos} photos reviewed: {counts.accepted} boxes accepted, {counts.rejected} rejected, "
        f"{counts.corrected} corrected, {counts.added} added"
    )
    _say(f"next: tag2box trust {labels}, or tag2box export {labels} --format coco --only-reviewed")


def _has_display() -> bool:
    """Whether a browser with windows can be opened; one inside the terminal would hide the address."""
    return sys.platform in {"darwin", "win32"} or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))


def _say(line: str, *, err: bool = False) -> None:
    typer.echo(printable(line, LONGEST_LINE), err=err)
