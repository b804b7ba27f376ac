"""Charts and tables of runs: losses, pseudo boxes, per-class scores, headline scores, timings, machine, versions."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import torch

from tag2box.annotations import Truth
from tag2box.labels.quality import ClassSigns, QualitySigns
from tag2box.metrics.baselines import Verdict
from tag2box.reporting import formatting as fmt, records
from tag2box.reporting.charts import (
    Bars,
    Key,
    Line,
    Points,
    Reference,
    Stack,
    grouped_bars,
    line_chart,
    stacked_bars,
)

LOSSES = {
    "total": "all terms, weighted as in training",
    "mil": "image-level classification against the tags",
    "refine": "classification of proposals against pseudo labels",
    "box": "regression of proposals towards pseudo boxes",
    "contrast": "similarity within a class against similarity between classes",
    "spatial": "similarity of the features around the top box",
    "attention": "consistency of the attention between views of a photo, and between layers",
    "region": "image-level classification against the tags, by the region classifier",
}
CHALLENGE_KEYS = tuple(field.name for field in fields(records.Challenges))
MAX_POINTS = 240  # per line: more than a chart has pixels for


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawn chart with its heading."""

    title: str
    note: str
    svg: str


@dataclass(frozen=True, slots=True)
class NamedRun:
    """A run with its name and colour class on the page."""

    name: str
    css: str
    record: records.RunRecord


# ---------------------------------------------------------------- curves over training


def thin(line: Points, limit: int = MAX_POINTS) -> Points:
    """At most ``limit`` points, each the mean of its neighbours."""
    size = -(-len(line) // limit) or 1
    chunks = [line[i : i + size] for i in range(0, len(line), size)]
    return tuple((sum(x for x, _ in c) / len(c), sum(y for _, y in c) / len(c)) for c in chunks)


def smooth(line: Points) -> Points:
    """A moving average over a twentieth of the points."""
    reach = len(line) // 40
    out = []
    for i, (x, _) in enumerate(line):
        r = min(reach, i, len(line) - 1 - i)  # a shrinking, symmetric window does not bend the ends
        around = [y for _, y in line[i - r : i + r + 1]]
        out.append((x, sum(around) / len(around)))
    return tuple(out)


def loss_charts(runs: Sequence[NamedRun]) -> tuple[Chart, ...]:
    """One small chart per loss, with a line per run."""
    present = {
        name for run in runs for step in run.record.steps for name, value in step.losses.items() if fmt.known(value)
    }
    ordered = [name for name in LOSSES if name in present] + sorted(present - set(LOSSES))
    charts = []
    for name in ordered:
        lines = []
        for run in runs:
            raw = _points([(s.iteration, s.losses.get(name)) for s in run.record.steps])
            if raw and any(y for _, y in raw):  # a method without this term writes zeros
                lines.append(Line(run.name, run.css, smooth(thin(raw)), thin(raw)))
        if lines:
            charts.append(Chart(name, LOSSES.get(name, ""), line_chart(lines, label=f"Loss {name} over training")))
    return (*charts, *share_charts(runs))


def share_charts(runs: Sequence[NamedRun]) -> tuple[Chart, ...]:
    """The gradient of WSCL at the neck in per cent of all other losses', for runs that have WSCL and train the neck."""
    lines = []
    for run in runs:
        shares = [(s.iteration, s.contrast_share) for s in run.record.steps]
        raw = _points([(at, None if share is None else 100 * share) for at, share in shares])
        if raw:
            lines.append(Line(run.name, run.css, smooth(thin(raw)), thin(raw)))
    note = "norm of the gradient of λ contrast, in per cent of that of all other losses"
    svg = line_chart(lines, label="Share of the contrastive loss in the gradient at the neck") if lines else ""
    return (Chart("contrast at the neck", note, svg),) if lines else ()


def count_charts(runs: Sequence[NamedRun], truth: float | None) -> tuple[Chart, ...]:
    """Pseudo boxes per present image-class pair over training, one chart per stage; the true number is dashed."""
    reference = Reference("true", truth) if truth is not None and math.isfinite(truth) else None
    charts = []
    for stage in range(_stages(runs)):
        lines = _stage_lines(runs, stage, "boxes_per_class")
        if lines:
            svg = line_chart(lines, label=f"Pseudo boxes per class, stage {stage + 1}", reference=reference)
            charts.append(Chart(f"stage {stage + 1}", "pseudo boxes per tagged class of a photo", svg))
    return tuple(charts)


def threshold_charts(runs: Sequence[NamedRun]) -> tuple[Chart, ...]:
    """The similarity threshold tau over training, one chart per stage, for labelers that have one."""
    charts = []
    for stage in range(_stages(runs)):
        lines = _stage_lines(runs, stage, "threshold")
        if lines:
            svg = line_chart(lines, label=f"Threshold tau, stage {stage + 1}")
            charts.append(Chart(f"τ, stage {stage + 1}", "minimum cosine similarity of a further object", svg))
    return tuple(charts)


def _stages(runs: Sequence[NamedRun]) -> int:
    counts = (max(len(p.boxes_per_class), len(p.threshold)) for run in runs for p in run.record.pseudo)
    return max(counts, default=0)


def _stage_lines(runs: Sequence[NamedRun], stage: int, what: str) -> list[Line]:
    lines = []
    for run in runs:
        series = [
            (p.iteration, values[stage])
            for p in run.record.pseudo
            for values in [p.boxes_per_class if what == "boxes_per_class" else p.threshold]
            if stage < len(values)
        ]
        raw = _points(series)
        if raw:
            lines.append(Line(run.name, run.css, smooth(thin(raw)), thin(raw)))
    return lines


def _points(pairs: Sequence[tuple[int, float | None]]) -> Points:
    return tuple((float(x), y) for x, y in pairs if y is not None and math.isfinite(y))


# ---------------------------------------------------------------- bars


def true_numbers(truth: Truth | None) -> dict[str, float]:
    """Mean number of objects per class on the photos that show it, without difficult objects and crowds."""
    if truth is None:
        return {}
    totals, photos = torch.zeros(len(truth.classes)), torch.zeros(len(truth.classes))
    for objects in truth.objects:
        counted = objects.labels[~(objects.difficult | objects.crowd)]
        per_class = torch.bincount(counted, minlength=len(truth.classes))
        totals += per_class
        photos += per_class > 0
    return {name: float(totals[i] / photos[i]) for i, name in enumerate(truth.classes) if photos[i]}


def class_count_chart(runs: Sequence[NamedRun], truth: Truth | None) -> str:
    """Pseudo boxes per class at the end of training; empty if no run recorded them."""
    last = [run.record.pseudo[-1].per_class if run.record.pseudo else {} for run in runs]
    names = tuple(dict.fromkeys(name for table in last for name in table))
    if not names:
        return ""
    true = true_numbers(truth)
    groups = [Bars(n, tuple(table.get(n) for table in last), true.get(n)) for n in names]
    top = max([v for g in groups for v in (*g.values, g.mark) if v is not None and math.isfinite(v)], default=1.0)
    label = "Pseudo boxes per class at the end of training"
    return grouped_bars(groups, _keys(runs), label=label, limit=top or 1.0, show=fmt.format_number)


def class_chart(scores: Sequence[records.ClassRecord | None], runs: Sequence[NamedRun], label: str) -> str:
    """Bars of a per-class score, one per run; empty if no run has it."""
    names = tuple(dict.fromkeys(n for s in scores if s for n in s.per_class))
    if not names:
        return ""
    groups = [Bars(n, tuple(s.per_class.get(n) if s else None for s in scores)) for n in names]
    return grouped_bars(groups, _keys(runs), label=label)


def challenge_chart(runs: Sequence[NamedRun]) -> str:
    """Found, part, grouped, missed and other objects as stacked bars; empty if no run was evaluated for them."""
    stacks = []
    for run in runs:
        got = run.record.metrics.challenges
        if got and fmt.known(got.found):
            shares = (got.found, got.part, got.grouped, got.missed, got.other)
            stacks.append(Stack(run.name, tuple(share or 0.0 for share in shares)))
    return stacked_bars(stacks, CHALLENGE_KEYS, label="Outcomes of the objects of the test photos") if stacks else ""


def recall_chart(splits: Sequence[tuple[str, records.ProposalRecall]]) -> str:
    """Recall of the proposals at each IoU, one bar per split."""
    overlaps = sorted({overlap for _, split in splits for overlap in split.recall})
    groups = [Bars(f"IoU ≥ {o}", tuple(split.recall.get(o) for _, split in splits)) for o in overlaps]
    keys = [Key(name, f"split-{index}") for index, (name, _) in enumerate(splits)]
    return grouped_bars(groups, keys, label="Recall of the proposals") if groups else ""


def _keys(runs: Sequence[NamedRun]) -> list[Key]:
    return [Key(run.name, run.css) for run in runs]


# ---------------------------------------------------------------- scores


@dataclass(frozen=True, slots=True)
class RunScore:
    """One run's figure in a headline."""

    run: str
    css: str
    value: str
    difference: str  # from the first run; empty for the first run itself
    better: bool
    remark: str = ""  # if it is not above a trivial row


@dataclass(frozen=True, slots=True)
class Headline:
    """A summary score of the report, per run."""

    name: str
    note: str
    scores: tuple[RunScore, ...]


def headlines(runs: Sequence[NamedRun]) -> tuple[Headline, ...]:
    """mAP50 on the test photos and CorLoc on the training photos, each with its difference from the first run."""
    all_metrics = [run.record.metrics for run in runs]
    measures: tuple[tuple[str, str, list[records.ClassRecord | None], list[Verdict | None]], ...] = (
        (
            "mAP50",
            "test photos: are the boxes right, and ranked right?",
            [m.ap for m in all_metrics],
            [m.ap_verdict for m in all_metrics],
        ),
        (
            "CorLoc",
            "training photos: is the top box of each tag right?",
            [m.corloc for m in all_metrics],
            [m.corloc_verdict for m in all_metrics],
        ),
    )
    out = []
    for name, note, scores, verdicts in measures:
        means = [s.mean if s else None for s in scores]
        if any(fmt.known(mean) for mean in means):
            out.append(Headline(name, note, _scores(runs, means, verdicts)))
    return tuple(out)


def _scores(
    runs: Sequence[NamedRun], means: Sequence[float | None], verdicts: Sequence[Verdict | None]
) -> tuple[RunScore, ...]:
    first = means[0]
    out = []
    for index, (run, mean, verdict) in enumerate(zip(runs, means, verdicts, strict=True)):
        compared = index > 0 and mean is not None and first is not None
        difference = fmt.points(mean, first) if compared else ""
        remark = verdict.words() if verdict is not None and not verdict.is_above else ""
        out.append(RunScore(run.name, run.css, fmt.percent(mean), difference, difference.startswith("+"), remark))
    return tuple(out)


# ---------------------------------------------------------------- runs and machines

RUN_FACTS: tuple[tuple[str, Callable[[records.RunRecord], str]], ...] = (
    ("training photos", lambda run: fmt.whole(run.start.train_photos)),
    ("reviewed boxes", lambda run: fmt.whole(run.start.boxes or None)),
    ("iterations done", lambda run: fmt.whole(_iterations_done(run))),
    ("seed", lambda run: fmt.UNKNOWN if run.start.seed is None else str(run.start.seed)),
    ("proposals per photo", lambda run: fmt.format_number(run.start.proposals_per_photo)),
    ("also uses", lambda run: run.start.uses or fmt.UNKNOWN),
    ("training time", lambda run: fmt.duration(run.end.seconds if run.end else None)),
    ("time per iteration (median)", lambda run: fmt.duration(iteration_seconds(run))),
    ("peak memory", lambda run: _megabytes(run.end.peak_memory_mb if run.end else None)),
    ("resumed at iteration", lambda run: ", ".join(str(i) for i in run.resumed_at) or fmt.UNKNOWN),
)


def facts_table(runs: Sequence[NamedRun]) -> fmt.Table | None:
    """What each run took; rows without any value are left out."""
    rows = [fmt.TableRow(name, tuple(fact(run.record) for run in runs)) for name, fact in RUN_FACTS]
    return _runs_table("Training", runs, rows)


def signs_table(runs: Sequence[NamedRun]) -> fmt.Table | None:
    """Signs of quality without true boxes, where `tag2box label` recorded them: by class, and of the run."""
    known = [(run, run.record.signs) for run in runs if run.record.signs is not None]
    if not known:
        return None
    kinds = ("score", "margin")
    heads = tuple(f"{run.name}\n{kind}" for run, _ in known for kind in kinds)
    classes = dict.fromkeys(name for _, signs in known for name in signs.classes)
    none = ClassSigns(0)
    rows = [
        fmt.TableRow(name, tuple(_sign(own, kind) for own in owns for kind in kinds))
        for name in classes
        for owns in [[signs.classes.get(name, none) for _, signs in known]]
    ]
    rows.append(fmt.TableRow("mean", tuple(_sign(signs, kind) for _, signs in known for kind in kinds)))
    for field, words in (("stages", "overlap, last two stages"), ("stability", "overlap, last two moments")):
        cells = tuple(cell for _, signs in known for cell in (fmt.format_number(getattr(signs, field)), ""))
        rows.append(fmt.TableRow(words, cells))
    return fmt.Table("Best boxes of the training photos", heads, tuple(rows))


def _sign(own: ClassSigns | QualitySigns, kind: str) -> str:
    value = fmt.format_number(getattr(own, kind))
    return f"{value} (not recognised)" if kind == "margin" and getattr(own, "is_unrecognised", False) else value


def machine_table(runs: Sequence[NamedRun]) -> fmt.Table | None:
    """The machines of the runs."""
    tables = [run.record.start.machine for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    return _runs_table("Machine", runs, [fmt.TableRow(n, tuple(t.get(n, fmt.UNKNOWN) for t in tables)) for n in names])


def versions_table(runs: Sequence[NamedRun]) -> fmt.Table | None:
    """The software versions of the runs."""
    tables = [run.record.start.versions for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    return _runs_table("Versions", runs, [fmt.TableRow(n, tuple(t.get(n, fmt.UNKNOWN) for t in tables)) for n in names])


def _runs_table(caption: str, runs: Sequence[NamedRun], rows: Sequence[fmt.TableRow]) -> fmt.Table | None:
    """One column per run, or a single column if all runs agree."""
    kept = tuple(row for row in rows if any(cell != fmt.UNKNOWN for cell in row.cells))
    if not kept:
        return None
    if len(runs) > 1 and all(len(set(row.cells)) == 1 for row in kept):
        return fmt.Table(caption, ("all runs",), tuple(fmt.TableRow(row.name, row.cells[:1]) for row in kept))
    return fmt.Table(caption, tuple(run.name for run in runs), kept)


def _iterations_done(run: records.RunRecord) -> int | None:
    if run.end:
        return run.end.iteration
    return run.steps[-1].iteration if run.steps else None


def _megabytes(value: float | None) -> str:
    return f"{fmt.whole(value)} MB" if value else fmt.UNKNOWN


def iteration_seconds(run: records.RunRecord) -> float | None:
    """Median time per iteration; the seconds of ``step`` events count from the start of training."""
    timed = [(0, 0.0), *((step.iteration, step.seconds) for step in run.steps if step.seconds is not None)]
    rates = [(after - before) / (b - a) for (a, before), (b, after) in pairwise(timed) if b > a and after >= before]
    return statistics.median(rates) if rates else None


def recall_table(splits: Sequence[tuple[str, records.ProposalRecall]]) -> fmt.Table | None:
    """Figures of the proposals beside the recall chart."""
    rows = (
        fmt.TableRow("boxes per photo", tuple(fmt.format_number(split.boxes_per_photo) for _, split in splits)),
        fmt.TableRow("mean best overlap", tuple(fmt.percent(split.mean_best_overlap) for _, split in splits)),
    )
    kept = tuple(row for row in rows if any(cell != fmt.UNKNOWN for cell in row.cells))
    return fmt.Table("Proposals", tuple(name for name, _ in splits), kept) if kept else None
