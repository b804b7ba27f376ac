"""``tag2box compare``: any systems on any datasets and seeds, on equal terms, on one page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path

from tag2box import errors, io, recipes, settings
from tag2box.cli.demo import STUDENT, scenes_student
from tag2box.cli.training_data import check_requirements, read_training
from tag2box.data.scenes import Scenes
from tag2box.experiments import grid, pictures, reproduction, study_data, summary
from tag2box.experiments.experiment import (
    CORLOC,
    LABELS,
    MAP,
    Analysis,
    Experiment,
    StudyColumn,
    StudyResults,
    StudyVariant,
)
from tag2box.models.weights.weight_cache import stored_names
from tag2box.progress import Progress, silent
from tag2box.reporting import formatting as fmt, study_page, study_tables
from tag2box.student.student_training import StudentConfig
from tag2box.systems import SYSTEMS, System, changes, find_system

NAME = "compare"
PAPER = {"voc07": "VOC07", "voc12": "VOC12", "coco14": "COCO14, AP50"}
"""Datasets of the paper -> columns of its figures."""
NAMED_BACKBONES: dict[str, tuple[str, ...]] = {
    "recipe": (),
    "vgg16-narrow": (
        "backbone.kind=vgg16",
        "backbone.weights=vgg16-conv",
        "backbone.train_trunk=false",
        "backbone.neck_channels=128",
        "backbone.neck_size=1024",
    ),
    "vgg16": ("backbone.kind=vgg16", "backbone.weights=vgg16"),
}
"""Names of ``compare --backbone`` -> settings: the recipe's own; VGG16's convolutions, frozen, with a trained neck of a
1 x 1 convolution to 128 channels and two layers of 1,024; VGG16 as in the paper."""
OUTCOME_COLUMNS = tuple(StudyColumn(name, (grid.OUTCOMES, name)) for name in ("found", "part", "grouped", "missed"))
TRIVIAL = StudyColumn("mAP50 in a\ntrivial box", ("test", "verdicts", "voc12", "best"))
COST = (
    StudyColumn("ms\na step", ("cost", "step_seconds"), 1000.0),
    StudyColumn("MB\nat most", ("cost", "peak_memory_mb"), 1.0),
)
NOTES = (
    "The paper's figures were obtained on other data and at another scale: VGG16 trained whole, thousands of photos, "
    "six scales, schedules a hundred times as long, each with its authors' own tricks. Compare orders, not figures.",
    "Here backbone, proposals, schedule, batch and evaluator are the same for all systems, except that WSRPN proposes "
    "its own boxes, and CASD has four views of a photo and trains the last block of lite0. Nothing was tuned for any.",
    "mAP50 in a trivial box: the system's own class scores, with the centred box or the whole photo, whichever is "
    "better. Only what mAP50 adds to it is localisation.",
    "The last column says whether a system is whole, or what it lacks of its paper with these settings.",
    "found, part, grouped, missed: outcomes of the true objects, keeping as many boxes of a class as it has objects.",
)


@dataclass(frozen=True)
class DatasetComparison:
    """All systems on one dataset."""

    experiment: Experiment
    base: recipes.Config
    data: Mapping[int, study_data.StudyData]

    @property
    def runs(self) -> dict[tuple[str, int], grid.GridRun]:
        """A run for each system and seed."""
        return self.experiment.runs(self.base, self.data)


def compare(  # noqa: PLR0913 - the options of the command
    names: Sequence[str],
    sources: Sequence[study_data.StudySource],
    out: Path,
    *,
    seeds: Sequence[int] = (),
    recipe: str | None = None,
    backbones: Sequence[str] = (),
    overrides: Sequence[str] = (),
    students: bool = False,
    commands: Sequence[str] = (),
    progress: Progress = silent,
) -> reproduction.StudyFiles:
    """Run systems, and write ``out/compare.html``, ``.json`` and ``.md``.

    Interrupted, the same call resumes. Finished runs are cached in ``out`` and shared with ``reproduce``.

    Args:
        names: of ``SYSTEMS``; default: all.
        seeds: of training, and of scenes; default: 0, 1 and 2.
        recipe: settings to start from; default: ``scenes`` on scenes, else ``photos-frozen``.
        backbones: of ``NAMED_BACKBONES``, a table each; default: the recipe's.
        overrides: settings of all systems, in the form of ``--set``, applied after the changes of a system; those that
            begin with ``student.`` are of the students.
        students: also train a student on the labels of each system, and show it in a row below.
        commands: command lines shown on the page.
    """
    io.check_writable(out / f"{NAME}.html")
    plans = plan_comparisons(
        names,
        sources,
        out,
        seeds=seeds,
        recipe=recipe,
        backbones=backbones,
        overrides=overrides,
        students=students,
        progress=progress,
    )
    results = run_comparisons(plans, out, progress=progress)
    return write_comparison(results, plans[0].base, out, commands=commands)


def plan_comparisons(  # noqa: PLR0913 - the options of the command
    names: Sequence[str],
    sources: Sequence[study_data.StudySource],
    out: Path,
    *,
    seeds: Sequence[int] = (),
    recipe: str | None = None,
    backbones: Sequence[str] = (),
    overrides: Sequence[str] = (),
    students: bool = False,
    progress: Progress = silent,
) -> list[DatasetComparison]:
    """The runs of a comparison; settings are checked before anything is written."""
    overrides, of_student = _divided(overrides, students)
    reproduction.check_overrides([*overrides, *of_student])
    systems = [find_system(name) for name in dict.fromkeys(names or SYSTEMS)]
    bare, planned = _experiment((), ()), []
    chosen_backbones = list(dict.fromkeys(backbones)) or ["recipe"]
    for (number, source), backbone in product(enumerate(sources), chosen_backbones):
        base = reproduction.base_config(bare, source, recipe, _backbone_settings(backbone))
        rows = [_row(system, base, overrides) for system in systems]
        if students:
            student = _student_settings(source, of_student)
            rows = [row for own in rows for row in (own, _student_row(own, student))]
        experiment = _experiment(systems, rows, backbone if len(chosen_backbones) > 1 else "")
        planned.append((number, experiment, base))
    chosen = reproduction.unique_seeds(seeds or bare.seeds)
    data = [{seed: study_data.open_data(own, seed, out, progress=progress) for seed in chosen} for own in sources]
    return [DatasetComparison(experiment, base, data[number]) for number, experiment, base in planned]


def _backbone_settings(name: str) -> tuple[str, ...]:
    """The settings of a backbone; raises if there is none of this name, or its weights are not stored."""
    if name not in NAMED_BACKBONES:
        raise errors.UserError(f"--backbone {name}: unknown; there are {', '.join(NAMED_BACKBONES)}")
    for setting in NAMED_BACKBONES[name]:
        key, _, value = setting.partition("=")
        if key == "backbone.weights" and value not in stored_names():
            raise errors.UserError(f"--backbone {name}: its weights are not stored here; `tag2box weights get {value}`")
    return NAMED_BACKBONES[name]


def run_comparisons(
    plans: Sequence[DatasetComparison], out: Path, *, progress: Progress = silent
) -> list[StudyResults]:
    """Finish all runs of some comparisons, in one queue."""
    folder = out / reproduction.GRID_FOLDER
    runs = [run for plan in plans for run in plan.runs.values()]
    for run in runs:
        if not grid.is_finished(run, folder):
            _check(run)
    done = grid.finish_all(runs, folder, progress=progress)
    found = [reproduction.gather_results(plan.experiment, plan.data, plan.runs, done) for plan in plans]
    return [_with_outcomes(results) for results in found]


def _check(run: grid.GridRun) -> None:
    """Raise if a dataset lacks what a system requires, before any training."""
    config = run.data.placed(run.config)
    check_requirements(config, read_training(config) if config.criterion.requirements.counts else run.data.tagged)


def _experiment(systems: Sequence[System], rows: Sequence[StudyVariant], backbone: str = "") -> Experiment:
    titles = [system.title for system in systems]
    against = "OICR+" if "OICR+" in titles else (titles or [""])[0]
    return Experiment(
        name=NAME,
        title="Systems compared",
        shows="",
        backbone=backbone,
        origin="its tables 1 and 2; VGG16",
        rows=tuple(rows),
        columns=(MAP, TRIVIAL, CORLOC, *OUTCOME_COLUMNS, *LABELS, *COST),
        against=against,
        tracked=tuple(titles),
    )


def _row(system: System, base: recipes.Config, overrides: Sequence[str]) -> StudyVariant:
    figures = {name: system.reported(dataset) for dataset, name in PAPER.items()}
    row = StudyVariant(
        label=system.title,
        settings=(*changes(base, system(base)), *overrides),
        paper={name: figure for name, figure in figures.items() if figure is not None},
    )
    return replace(row, state=system.state(row.config(base, 0)))  # raises for a setting that the system does not have


def _divided(overrides: Sequence[str], students: bool) -> tuple[list[str], list[str]]:
    """The overrides of systems and those of students; raises if there are some of students, but no students."""
    own = [override for override in overrides if override.strip().startswith(f"{STUDENT}.")]
    if own and not students:
        raise errors.UserError(f"--set {own[0]}: there are no students; add --students")
    rest = [override for override in overrides if override not in own]
    return rest, [override.strip().removeprefix(f"{STUDENT}.") for override in own]


def _student_settings(source: study_data.StudySource, overrides: Sequence[str]) -> StudentConfig:
    """The settings of all students on a dataset."""
    base = scenes_student() if isinstance(source, Scenes) else StudentConfig()
    return settings.load(StudentConfig, [], list(overrides), base=base)


def _student_row(row: StudyVariant, student: StudentConfig) -> StudyVariant:
    """The student of a system's row; the paper has no figures of it."""
    return replace(row, label=f"{row.label}, student", paper={}, state="student on its labels", student=student)


def _with_outcomes(results: StudyResults) -> StudyResults:
    extended = {
        label: {seed: grid.with_outcomes(result, results.data[seed]) for seed, result in own.items()}
        for label, own in results.results.items()
    }
    return replace(results, results=extended)


# ---------------------------------------------------------------- tables


def write_comparison(
    found: Sequence[StudyResults], base: recipes.Config, out: Path, *, commands: Sequence[str] = ()
) -> reproduction.StudyFiles:
    """Write the page, the numbers and the tables of a comparison."""
    tables = [table for results in found if (table := summary.study_table(results, out)) is not None]
    sections: list[study_tables.StudySection] = []
    numbers, text = [], []
    for at, (results, table) in enumerate(zip(found, tables, strict=True)):
        drawn = summary.resampled_rows(results)
        sections += [_table_section(results, table, at), *summary.intervals_section(results, drawn, f"{at}-")]
        sections += [*summary.errors_section(results, f"{at}-"), ranking(table, at)]
        sections += pictures.side_by_side(results, prefix=f"{at}-")
        more = {"backbone": results.experiment.backbone} if results.experiment.backbone else {}
        curves = summary.quality_curves(results)
        numbers.append({**summary.study_json(results, table, Analysis(), curves, drawn), **more})
        text.append(f"On {_place(results)}:\n\n{study_tables.markdown(table)}")
    inputs = study_tables.StudyInputs(
        kicker="tag2box compare",
        title=found[0].experiment.title,
        shows=f"{fmt.plural(len(found[0].results), 'system')} trained on tags, with the same schedule and evaluator, "
        "and the same backbone and proposals unless a system is about these.",
        setting=" ".join(summary.setting(results) for results in found),
        origin=found[0].experiment.origin,
        table=None,
        facts=_facts(found, tables),
        sections=tuple(sections),
        about=(*study_tables.settings_table(tables[0]), *summary.about_study(found[0], base, commands)),
    )
    files = reproduction.StudyFiles(out / f"{NAME}.html", out / f"{NAME}.json", "\n".join(text))
    study_page.write_study_page(inputs, files.page)
    io.write_json(files.numbers, {"experiment": NAME, "systems": list(found[0].results), "datasets": numbers})
    io.write_text(out / f"{NAME}.md", files.table)
    return files


def _place(results: StudyResults) -> str:
    """The dataset, and the backbone if there are several."""
    backbone = results.experiment.backbone
    return results.first[1].name + (f", backbone {backbone}" if backbone else "")


def _table_section(results: StudyResults, table: study_tables.StudyTable, at: int) -> study_tables.StudySection:
    words = (
        f"{summary.setting(results)} Each figure is the mean over the seeds, with the smallest and the largest: "
        "differences within this range are not significant. Shares are in per cent. Time and memory are of training "
        "on this machine; labels' precision and recall are of the last stage's pseudo boxes at the end of training."
    )
    return study_tables.StudySection(f"{at}-table", f"On {_place(results)}", words, table=table, warnings=NOTES)


def _facts(found: Sequence[StudyResults], tables: Sequence[study_tables.StudyTable]) -> tuple[fmt.Fact, ...]:
    best = [
        replace(summary.study_facts(results, table)[0], name=f"Best mAP50, {_place(results)}")
        for results, table in zip(found, tables, strict=True)
    ]
    folders = {result.folder for results in found for own in results.results.values() for result in own.values()}
    seeds = fmt.plural(len(found[0].data), "seed")
    return (
        *best,
        fmt.Fact("Runs", fmt.whole(len(folders)), "", f"{fmt.plural(len(found), 'dataset')}, {seeds}"),
    )


def ranking(table: study_tables.StudyTable, at: int = 0) -> study_tables.StudySection:
    """The systems from best to worst with their ranks here and in the paper, and how far both orders agree."""
    column = table.paper.index(PAPER["voc07"]) if PAPER["voc07"] in table.paper else None
    ours = {row.name: row.figures[0].mean for row in table.measured()}
    theirs = {row.name: None if column is None else row.paper[column] for row in table.measured()}
    here, there = _ranks(ours), _ranks(theirs)
    rows = []
    for name in sorted(ours, key=lambda name: -(ours[name] or 0.0)):
        ranks = (str(ranked.get(name, fmt.UNKNOWN)) for ranked in (here, there))
        rows.append(
            fmt.TableRow(name, (study_tables.reported(ours[name]), *ranks, study_tables.reported(theirs[name])))
        )
    heads = ("mAP50", "rank\nhere", "rank in\nthe paper", "paper:\nVOC07")
    sheet = fmt.Table("From best to worst", heads, tuple(rows))
    return study_tables.StudySection(f"{at}-order", "The order", agreement(table.measured(), theirs), tables=(sheet,))


def agreement(rows: Sequence[study_tables.StudyRow], theirs: Mapping[str, float | None]) -> str:
    """How many pairs of systems are in the paper's order, and how many of those on which all seeds agree."""
    pairs = sure = agree = sure_agree = 0
    for a, b in combinations([row for row in rows if theirs.get(row.name) is not None], 2):
        gaps = [a.figures[0].by_seed[s] - b.figures[0].by_seed[s] for s in a.figures[0].by_seed]
        side = (theirs[a.name] or 0.0) - (theirs[b.name] or 0.0)
        if not gaps or not side:
            continue
        is_same = sum(gaps) * side > 0
        is_sure = all(gap > 0 for gap in gaps) or all(gap < 0 for gap in gaps)
        pairs, agree = pairs + 1, agree + is_same
        sure, sure_agree = sure + is_sure, sure_agree + (is_sure and is_same)
    return (
        f"Of {fmt.plural(pairs, 'pair')} of systems, {agree} are in the paper's order on VOC07. All seeds agree on "
        f"{sure} of these pairs, and of those {sure_agree} are in the paper's order."
    )


def _ranks(figures: Mapping[str, float | None]) -> dict[str, int]:
    known = sorted((value for value in figures.values() if value is not None), reverse=True)
    return {name: known.index(value) + 1 for name, value in figures.items() if value is not None}
