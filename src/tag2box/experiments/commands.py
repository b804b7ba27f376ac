"""``tag2box reproduce`` and ``tag2box compare``: studies of many runs, written to one page."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from tag2box.cli import options
from tag2box.data.scenes import Scenes
from tag2box.errors import UserError
from tag2box.experiments import comparison, reproduction, study_data, summary
from tag2box.formats.listing import DataSource
from tag2box.progress import TerminalProgress


def study_source(
    source: DataSource,
    test: DataSource | None,
    test_split: str | None,
    proposals: Path | None,
    test_proposals: Path | None,
) -> study_data.StudySource:
    """The data of a study that the options name: generated scenes, or the training and test split of a dataset."""
    if source.path == Path(study_data.SCENES):
        others = (source.photos, source.split, source.classes, test, test_split, proposals, test_proposals)
        if any(value is not None for value in others):
            raise UserError("--on scenes: has its own photos, splits and classes; leave out all but --seeds and --set")
        return Scenes()
    if (proposals is None) != (test_proposals is None):
        raise UserError("--proposals and --test-proposals go together: both splits need boxes of the same method")
    boxes = None if proposals is None or test_proposals is None else study_data.SplitStores(proposals, test_proposals)
    return replace(study_data.splits_of(source, test, test_split), boxes=boxes)


def print_written(written: reproduction.StudyFiles) -> None:
    """Print the table of a study and the files it wrote."""
    for line in written.table.splitlines():
        options.say(line)
    options.say(f"page: {written.page}")
    options.say(f"numbers: {written.numbers}")


def reproduce_command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="A table or figure: table3a, fig4, ...; --list shows all.")
    ] = None,
    on: Annotated[
        str, typer.Option("--on", metavar="DATA", help="`scenes`, or a VOC folder or COCO file with boxes.")
    ] = "scenes",
    row: Annotated[
        list[str], typer.Option("--row", metavar="LABEL", help="Run this row only; repeatable. Default: all rows.")
    ] = [],  # noqa: B006
    seeds: Annotated[
        str | None,
        typer.Option(metavar="0,1,2", help="Seeds of training, and of scenes; default: those of the experiment."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of page, numbers and runs; studies can share it.")] = Path(
        "runs/reproduce"
    ),
    photos: options.PhotosOption = None,
    split: options.SplitOption = None,
    classes: options.ClassesOption = None,
    test: options.TestOption = None,
    test_photos: options.TestPhotosOption = None,
    test_split: options.TestSplitOption = None,
    proposals: options.ProposalsOption = None,
    test_proposals: options.TestProposalsOption = None,
    recipe: options.RecipeOption = None,
    override: Annotated[
        list[str], typer.Option("--set", metavar="a.b=c", help="Override a setting of all rows; repeatable.")
    ] = [],  # noqa: B006
    list_: Annotated[bool, typer.Option("--list", help="List the tables and figures.")] = False,
) -> None:
    """Run a table or figure of the paper at a scale you can afford, and print it beside the paper's.

    Resumable: rerun the same command. Finished runs are cached.

    Example: `tag2box reproduce table3a --on scenes`, or `tag2box reproduce table3a --on VOC2007`
    """
    if list_ or name is None:
        options.print_rich(summary.experiments_table())
        return
    reproduction.find_experiment(name)
    test_source = None if test is None else options.data_source(test, test_photos, None, classes)
    source = options.data_source(Path(on), photos, split, classes)
    written = reproduction.reproduce(
        name,
        study_source(source, test_source, test_split, proposals, test_proposals),
        out,
        rows=row,
        seeds=options.seed_list(seeds),
        recipe=recipe,
        overrides=override,
        commands=[shlex.join(["tag2box", *sys.argv[1:]])],
        progress=TerminalProgress(),
    )
    print_written(written)


def compare_command(
    systems: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="Names of `tag2box systems`; default: all.")
    ] = None,
    on: Annotated[
        list[str],
        typer.Option("--on", metavar="DATA", help="`scenes`, or a VOC folder or COCO file with boxes; repeatable."),
    ] = [study_data.SCENES],  # noqa: B006
    seeds: Annotated[
        str | None, typer.Option(metavar="0,1,2", help="Seeds of training, and of scenes; default: 0,1,2.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of page, numbers and runs; `reproduce` can share it.")] = Path(
        "runs/compare"
    ),
    photos: options.PhotosOption = None,
    split: options.SplitOption = None,
    classes: options.ClassesOption = None,
    test: options.TestOption = None,
    test_photos: options.TestPhotosOption = None,
    test_split: options.TestSplitOption = None,
    proposals: options.ProposalsOption = None,
    test_proposals: options.TestProposalsOption = None,
    recipe: options.RecipeOption = None,
    backbone: Annotated[
        list[str],
        typer.Option("--backbone", metavar="NAME", help="`recipe` (default), `vgg16-narrow` or `vgg16`; repeatable."),
    ] = [],  # noqa: B006
    override: Annotated[
        list[str], typer.Option("--set", metavar="a.b=c", help="Override a setting of all systems; repeatable.")
    ] = [],  # noqa: B006
    students: Annotated[
        bool,
        typer.Option("--students", help="Also train a student on the labels of each system (--set student.a.b=c)."),
    ] = False,
) -> None:
    """Train several systems under equal conditions on any datasets and seeds, and compare them on one page.

    Resumable: rerun the same command. Finished runs are cached.

    Example: `tag2box compare --systems oicr,mist,od-wscl --on scenes --on VOC2007`
    """
    test_source = None if test is None else options.data_source(test, test_photos, None, classes)
    details = (photos, split, classes, test, test_photos, test_split, proposals, test_proposals)
    _check_datasets(on, any(value is not None for value in details))
    sources: list[study_data.StudySource] = []
    for data in dict.fromkeys(on):
        if data == study_data.SCENES and len(set(on)) > 1:  # --split and the like belong to the other dataset
            sources.append(study_source(options.data_source(Path(data), None, None, None), None, None, None, None))
        else:
            source = options.data_source(Path(data), photos, split, classes)
            sources.append(study_source(source, test_source, test_split, proposals, test_proposals))
    written = comparison.compare(
        _system_names(systems),
        sources,
        out,
        seeds=options.seed_list(seeds),
        recipe=recipe,
        backbones=backbone,
        overrides=override,
        students=students,
        commands=[shlex.join(["tag2box", *sys.argv[1:]])],
        progress=TerminalProgress(),
    )
    print_written(written)


def _check_datasets(on: list[str], has_details: bool) -> None:
    others = [data for data in dict.fromkeys(on) if data != study_data.SCENES]
    if has_details and len(others) > 1:
        raise UserError(
            f"--on {others[1]}: --split, --photos, --test and the like apply to one dataset; "
            "compare on one at a time into the same --out, finished runs are kept"
        )


def _system_names(text: str | None) -> tuple[str, ...]:
    names = tuple((text or "").replace(",", " ").split())
    if text is not None and not names:
        raise UserError("--systems: empty; expected names separated by commas, such as oicr,mist; default: all")
    return names
