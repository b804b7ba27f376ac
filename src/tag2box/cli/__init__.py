"""The command line. Nothing heavy is imported before a command runs, so that help answers at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from tag2box.errors import Interrupted, UserError

if TYPE_CHECKING:
    from tag2box.recipes import Config

app = typer.Typer(
    help="Object detectors from image-level tags alone: tags in, boxes out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

Set = Annotated[list[str], typer.Option("--set", metavar="a.b=c", help="Override one setting; may be repeated.")]
Out = Annotated[Path, typer.Option(help="Where to write.")]


@app.command(epilog="Example: `tag2box demo --out runs/demo`")
def demo(
    out: Out = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Of scenes and training.")] = 0,
    keep_maps: Annotated[bool, typer.Option(help="Keep the cached RoI maps (about half a gigabyte).")] = False,
    override: Set = [],  # noqa: B006 - typer reads it
) -> None:
    """Generate scenes, train OICR+ and OD-WSCL from their tags, evaluate both, and write an HTML report."""
    from tag2box.commands import demo as command
    from tag2box.engine.progress import Terminal

    command.demo(out, seed=seed, overrides=override, keep_maps=keep_maps, progress=Terminal())
    _say(f"report: {out / 'report.html'}")
    _say(f"summary: {out / command.SUMMARY}")


@app.command(
    epilog="Example: `tag2box train --photos photos --tags tags.csv --out runs/mine --set plan.iterations=2000`"
)
def train(
    out: Out,
    config: Annotated[list[Path], typer.Option(help="TOML settings file; may be repeated, later files win.")] = [],  # noqa: B006
    recipe: Annotated[str, typer.Option(help="Settings to start from: od-wscl, oicr-plus or scenes.")] = "od-wscl",
    photos: Annotated[Optional[Path], typer.Option(help="Folder of the photos (data.photos).")] = None,  # noqa: UP045
    tags: Annotated[Optional[Path], typer.Option(help="CSV with the columns image,tags (data.tags).")] = None,  # noqa: UP045
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in OUT with its own settings.")] = False,
    override: Set = [],  # noqa: B006
) -> None:
    """Train a detector from photos and tags."""
    from tag2box.commands import train as command
    from tag2box.engine.progress import Terminal

    if resume:
        if config or override or photos or tags:
            raise UserError("--resume takes its settings from the run; leave out --config, --set, --photos and --tags")
        command.resume(out, progress=Terminal())
    else:
        command.train(_config(recipe, config, override, photos, tags), out, progress=Terminal())
    _say(f"trained: {out}; try `tag2box detect {out} PHOTO --draw drawn`")


def _config(recipe: str, files: list[Path], overrides: list[str], photos: Path | None, tags: Path | None) -> Config:
    import difflib
    from dataclasses import replace

    from tag2box import settings
    from tag2box.recipes import RECIPES
    from tag2box.recipes import Config as Whole

    if recipe not in RECIPES:
        near = difflib.get_close_matches(recipe, RECIPES, 1, 0.0)[0]
        raise UserError(f"--recipe {recipe}: unknown; did you mean {near}? There are {', '.join(RECIPES)}")
    loaded = settings.load(Whole, files, overrides, base=RECIPES[recipe]())
    data = replace(loaded.data, photos=photos or loaded.data.photos, tags=tags or loaded.data.tags)
    return replace(loaded, data=data)


@app.command(epilog="Example: `tag2box detect runs/mine holiday/ --out boxes.json --draw drawn`")
def detect(
    run: Annotated[Path, typer.Argument(help="A trained run.")],
    photos: Annotated[list[Path], typer.Argument(help="Photos, or folders of them.")],
    out: Annotated[Path, typer.Option(help="COCO JSON to write.")] = Path("detections.json"),
    draw: Annotated[Optional[Path], typer.Option(help="Folder for pictures with the boxes drawn.")] = None,  # noqa: UP045
    min_score: Annotated[float, typer.Option(help="Leave out detections below this score.")] = 0.3,
) -> None:
    """Detect objects in photos with a trained run."""
    from tag2box.commands import detect as command
    from tag2box.engine.progress import Terminal

    found = command.detect(run, photos, out, draw=draw, min_score=min_score, progress=Terminal())
    _say(f"{sum(map(len, found.values()))} boxes in {len(found)} photos: {out}")
    if draw is not None:
        _say(f"pictures: {draw}")


@app.command(epilog="Example: `tag2box evaluate --truth VOC2007 --split test --detections results/ --metrics voc07`")
def evaluate(
    truth: Annotated[Path, typer.Option(help="COCO JSON, or a VOC folder.")],
    detections: Annotated[Path, typer.Option(help="COCO results JSON, or a folder of comp4_det_*_CLASS.txt files.")],
    metrics: Annotated[str, typer.Option(help="Comma-separated.")] = "voc07,voc12,corloc,coco,challenges",
    split: Annotated[str, typer.Option(help="Image list of a VOC folder.")] = "test",
    classes: Annotated[Optional[str], typer.Option(help="Comma-separated; default: all in the truth.")] = None,  # noqa: UP045
    min_score: Annotated[float, typer.Option(help="Detections below it do not count for `challenges`.")] = 0.1,
    json: Annotated[Optional[Path], typer.Option(help="Also write the numbers, in full precision.")] = None,  # noqa: UP045
) -> None:
    """Score detections against truth: VOC AP, CorLoc, COCO's twelve numbers, the three challenges."""
    from rich.console import Console

    from tag2box.commands import evaluate as command
    from tag2box.metrics.run import table

    result = command.evaluate(
        truth,
        detections,
        metrics=[name.strip() for name in metrics.split(",") if name.strip()],
        split=split,
        classes=[name.strip() for name in classes.split(",")] if classes else None,
        min_score=min_score,
        json=json,
    )
    Console().print(table(result))


@app.command(
    epilog="Example: `tag2box report runs/demo/oicr-plus runs/demo/od-wscl --out report.html "
    "--test-photos test/photos --test-truth test/truth.json`"
)
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, the baseline first.")],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Headline of the page.")] = "tag2box report",
    test_photos: Annotated[Optional[Path], typer.Option(help="Folder of test photos.")] = None,  # noqa: UP045
    test_truth: Annotated[Optional[Path], typer.Option(help="Their truth: COCO JSON or VOC folder.")] = None,  # noqa: UP045
    train_truth: Annotated[Optional[Path], typer.Option(help="Truth of the training photos, for CorLoc.")] = None,  # noqa: UP045
    split: Annotated[str, typer.Option(help="Image list of a VOC folder given as test truth.")] = "test",
    train_split: Annotated[str, typer.Option(help="Image list of a VOC folder given as training truth.")] = "train",
) -> None:
    """Write one self-contained HTML page about one or several runs."""
    from tag2box.commands import report as command
    from tag2box.engine.progress import Terminal

    again = "tag2box " + " ".join(sys.argv[1:])
    command.report(
        runs,
        out,
        title=title,
        test_photos=test_photos,
        test_truth=test_truth,
        train_truth=train_truth,
        split=split,
        train_split=train_split,
        commands=[again],
        progress=Terminal(),
    )
    _say(f"report: {out}")


@app.command(epilog="Example: `tag2box doctor`")
def doctor() -> None:
    """Check this machine and installation: what is there, what is missing, how to get it."""
    from rich.console import Console

    from tag2box import doctor as command

    checks = command.diagnose()
    Console().print(command.table(checks))
    raise typer.Exit(command.exit_code(checks))


def _say(line: str) -> None:
    typer.echo(line)


def main() -> None:
    """Entry point of the ``tag2box`` command: a user's mistake is one line on standard error and exit code 2."""
    try:
        app()
    except UserError as error:
        typer.echo(f"tag2box: {error}", err=True)
        sys.exit(2)
    except OSError as error:  # a full disk, a folder that may not be written
        typer.echo(f"tag2box: {error}", err=True)
        sys.exit(2)
    except Interrupted as stop:
        typer.echo(f"tag2box: {stop}", err=True)
        sys.exit(130)
