"""Commands about runs: train, detect, evaluate, report, and the demo."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from tag2box.cli.options import Address, Classes, On, PhotosFolder, Split, Where, pool
from tag2box.errors import UserError

if TYPE_CHECKING:
    from tag2box.recipes import Config

app = typer.Typer(rich_markup_mode="markdown")

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
    from tag2box.progress import TerminalProgress

    command.demo(out, seed=seed, overrides=override, keep_maps=keep_maps, progress=TerminalProgress())
    typer.echo(f"report: {out / 'report.html'}")
    typer.echo(f"summary: {out / command.SUMMARY}")


@app.command(
    epilog="Example: `tag2box train tags.csv --photos photos --out runs/mine`. "
    "A dataset is a CSV of tags, a COCO file, a VOC folder or a tree of class folders."
)
def train(
    out: Out,
    data: Annotated[Optional[Path], typer.Argument(metavar="DATA", help="Dataset to learn from (data.tags).")] = None,  # noqa: UP045
    photos: PhotosFolder = None,
    split: Split = None,
    classes: Classes = None,
    proposals: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Proposal store of the photos (data.proposals); default: made inside the run."),
    ] = None,
    config: Annotated[list[Path], typer.Option(help="TOML settings file; may be repeated, later files win.")] = [],  # noqa: B006
    recipe: Annotated[
        str, typer.Option(help="Settings to start from: photos, od-wscl, or others of `tag2box recipes`.")
    ] = "photos",
    system: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="A system of the paper's comparison on top of it: `tag2box systems`."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in OUT with its own settings.")] = False,
    tags: Annotated[Optional[Path], typer.Option(help="DATA, by its older name.", hidden=True)] = None,  # noqa: UP045
    override: Set = [],  # noqa: B006
) -> None:
    """Train a detector from photos and tags. Under torchrun, with all processes that it starts."""
    from tag2box.commands import train as command
    from tag2box.commands.runs import proposing_as
    from tag2box.progress import TerminalProgress, silent
    from tag2box.training.dist import init_distributed

    if resume and (config or override or any((data, tags, photos, split, classes, proposals, system))):
        raise UserError("--resume takes its settings from the run; leave out the dataset, --config, --system and --set")
    named = {"tags": data or tags, "photos": photos, "split": split, "proposals": proposals}
    with init_distributed() as dist:
        progress = TerminalProgress() if dist.is_main else silent
        if resume:
            command.resume(out, progress=progress, dist=dist)
        else:
            settled = _config(_base(recipe, system), config, override, named, classes)
            if proposals is not None:
                settled = proposing_as(settled, proposals)
            command.train(settled, out, progress=progress, dist=dist)
        if dist.is_main:
            typer.echo(f"trained: {out}; try `tag2box detect {out} PHOTO --draw drawn`")


def _base(recipe: str, system: str | None) -> Config:
    """A recipe, and the system on it: what files and --set change."""
    import difflib

    from tag2box.recipes import RECIPES
    from tag2box.systems import find_system

    if recipe not in RECIPES:
        near = difflib.get_close_matches(recipe, RECIPES, 1, 0.0)[0]
        raise UserError(f"--recipe {recipe}: unknown; did you mean {near}? `tag2box recipes` lists all")
    return RECIPES[recipe]() if system is None else find_system(system)(RECIPES[recipe]())


def _config(
    base: Config, files: list[Path], overrides: list[str], named: dict[str, Path | str | None], classes: str | None
) -> Config:
    from dataclasses import replace

    from tag2box import settings
    from tag2box.formats.datasets import class_names
    from tag2box.recipes import Config as Whole

    loaded = settings.load(Whole, files, overrides, base=base)
    given: dict[str, object] = {key: value for key, value in named.items() if value is not None}
    if classes is not None:
        given["classes"] = class_names(classes)
    return replace(loaded, data=replace(loaded.data, **given))  # type: ignore[arg-type]


@app.command(epilog="Example: `tag2box detect runs/mine holiday/ --out boxes.json --draw drawn`")
def detect(
    run: Annotated[Path, typer.Argument(help="A trained run.")],
    photos: Annotated[list[Path], typer.Argument(help="Photos, or folders of them; with --split, a dataset.")],
    out: Annotated[Path, typer.Option(help="COCO JSON to write.")] = Path("detections.json"),
    split: Split = None,
    proposals: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Proposal store of these photos; default: made for this call only."),
    ] = None,
    draw: Annotated[Optional[Path], typer.Option(help="Folder for pictures with the boxes drawn.")] = None,  # noqa: UP045
    voc: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="Folder for comp4_det_SPLIT_CLASS.txt, as VOC's evaluation server takes them; all scores."),
    ] = None,
    min_score: Annotated[float, typer.Option(help="Leave out detections below this score.")] = 0.3,
    override: Annotated[
        list[str],
        typer.Option("--set", metavar="inference.a=b", help="Look in another way: inference.mirror=true, ..."),
    ] = [],  # noqa: B006
    on: On = Where.here,
    address: Address = None,
) -> None:
    """Detect objects in photos with a trained run. Under torchrun, the processes share the photos."""
    from tag2box.commands import detect as command
    from tag2box.progress import TerminalProgress, silent
    from tag2box.training.dist import init_distributed

    with init_distributed() as dist:
        found = command.detect(
            run,
            photos,
            out,
            split=split,
            proposals=proposals,
            draw=draw,
            voc=voc,
            min_score=min_score,
            overrides=override,
            pool=pool(on, address, chunk=1),
            dist=dist,
            progress=TerminalProgress() if dist.is_main else silent,
        )
        if dist.is_main:
            typer.echo(f"{sum(map(len, found.values()))} boxes in {len(found)} photos: {out}")
            if draw is not None:
                typer.echo(f"pictures: {draw}")
            if voc is not None:
                typer.echo(f"files for VOC's evaluation server: {voc}")


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
    from tag2box.metrics.evaluation import metrics_table

    result = command.evaluate(
        truth,
        detections,
        metrics=[name.strip() for name in metrics.split(",") if name.strip()],
        split=split,
        classes=[name.strip() for name in classes.split(",")] if classes else None,
        min_score=min_score,
        json=json,
    )
    Console().print(metrics_table(result))


@app.command(
    epilog="Example: `tag2box report runs/demo/oicr-plus runs/demo/od-wscl --out report.html "
    "--test-photos test/photos --test-truth test/truth.json`"
)
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, the baseline first.")],
    out: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Headline of the page.")] = "tag2box report",
    test_photos: Annotated[
        Path | None, typer.Option(help="Folder of the photos of --test-truth, where they are elsewhere.")
    ] = None,
    test_truth: Annotated[Optional[Path], typer.Option(help="Their truth: COCO JSON or VOC folder.")] = None,  # noqa: UP045
    train_truth: Annotated[Optional[Path], typer.Option(help="Truth of the training photos, for CorLoc.")] = None,  # noqa: UP045
    split: Annotated[str, typer.Option(help="Image list of a VOC folder given as test truth.")] = "test",
    train_split: Annotated[str, typer.Option(help="Image list of a VOC folder given as training truth.")] = "train",
) -> None:
    """Write one self-contained HTML page about one or several runs."""
    from tag2box.commands import report as command
    from tag2box.progress import TerminalProgress

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
        progress=TerminalProgress(),
    )
    typer.echo(f"report: {out}")


@app.command(epilog="Example: `tag2box doctor`")
def doctor() -> None:
    """Check this machine and installation: what is there, what is missing, how to get it."""
    from rich.console import Console

    from tag2box import doctor as command

    checks = command.diagnose()
    Console().print(command.table(checks))
    raise typer.Exit(command.exit_code(checks))
