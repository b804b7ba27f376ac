"""Confidence intervals of figures, differences between runs, and figures by size and number of objects, as tables."""

from collections.abc import Mapping, Sequence

from tag2box.annotations import Detections, Truth
from tag2box.metrics import baselines, bootstrap, error_analysis, evaluation
from tag2box.reporting import formatting as fmt, records, run_figures

FIGURES = {"mAP50": ("voc12", "mAP"), "CorLoc": ("corloc", "mean")}
INTERVAL = evaluation.INTERVAL_ROW


def interval_tables(runs: Sequence[run_figures.NamedRun], inputs: records.ReportInputs) -> tuple[fmt.Table, ...]:
    """mAP50 and CorLoc of all runs with intervals and differences from the first, then the last run by groups."""
    sets: tuple[tuple[str, str, Truth | None, list[Mapping[str, Detections] | None]], ...] = (
        ("mAP50", "test photos", inputs.test_truth, [run.record.test_detections for run in runs]),
        ("CorLoc", "training photos", inputs.train_truth, [run.record.train_top_boxes for run in runs]),
    )
    tables = []
    for name, words, truth, found in sets:
        if truth is not None and any(own is not None for own in found):
            weights = bootstrap.photo_weights(len(truth))
            metric, path = FIGURES[name][0], FIGURES[name]
            drawn = [
                None if own is None else bootstrap.resampled_figures(truth, own, [metric], weights)[path]
                for own in found
            ]
            tables.append(resampled_table(f"{name}, {words}, in per cent", [run.name for run in runs], drawn))
    last = runs[-1].record.test_detections
    if inputs.test_truth is not None and last is not None:
        tables.append(group_table(f"{runs[-1].name}, test photos", inputs.test_truth, last))
    return tuple(tables)


def resampled_table(
    caption: str, names: Sequence[str], drawn: Sequence[bootstrap.FloatArray | None], *, against: int = 0
) -> fmt.Table:
    """A figure of each row with its interval, and its difference from that of one row, resample by resample."""
    rows, first, is_compared = [], drawn[against], len(names) > 1
    for at, (name, own) in enumerate(zip(names, drawn, strict=True)):
        ends = None if own is None else bootstrap.interval(own)
        gap = None if own is None or first is None or at == against else bootstrap.difference(own, first)
        value = fmt.UNKNOWN if own is None or ends is None else fmt.percent(float(own[0]))
        more = difference_cells(gap) if is_compared else ()
        rows.append(fmt.TableRow(name, (value, ends.words() if ends else fmt.UNKNOWN, *more)))
    more_heads = (f"above\n{names[against]}", f"{INTERVAL}\nof the difference", "share\nabove")
    heads = (caption.partition(",")[0], INTERVAL, *(more_heads if is_compared else ()))
    return fmt.Table(caption, heads, tuple(rows))


def difference_cells(gap: bootstrap.FigureDifference | None) -> tuple[str, str, str]:
    """Difference, interval and share above, in per cent; an interval that contains 0 says so."""
    if gap is None:
        return (fmt.UNKNOWN,) * 3
    ends = f"{100 * gap.low:+.1f} to {100 * gap.high:+.1f}".replace("-", "−")  # noqa: RUF001 - a true minus sign
    return (
        fmt.points(gap.value, 0.0),
        ends if gap.is_significant else f"{ends} (contains 0)",
        fmt.percent(gap.share_above),
    )


def group_table(caption: str, truth: Truth, found: Mapping[str, Detections]) -> fmt.Table:
    """AP, CorLoc and recall by size and number of objects, with intervals, beside those of the centred box."""
    weights = bootstrap.photo_weights(len(truth))
    own = bootstrap.resampled_figures(truth, found, ["breakdown"], weights)
    numbers = error_analysis.breakdown(truth, found)
    scores = baselines.best_scores(found, len(truth.classes))
    trivial = baselines.scored_baselines(truth, scores, baselines.SAME_SCORES)[0]
    others = error_analysis.breakdown(truth, trivial.detections)
    rows = []
    for path in ((), *((kind, name) for kind in ("by_size", "by_count") for name in _table(numbers, (kind,)))):
        values, bars, cells = _table(numbers, path), _table(others, path), []
        for figure in error_analysis.BREAKDOWN_FIGURES:
            ends = bootstrap.interval(own["breakdown", *path, figure])
            spread = f" ({ends.words()})" if ends is not None else ""
            cells += [f"{fmt.marked(_number(values, figure), _number(bars, figure))}{spread}"]
            cells += [fmt.percent(_number(bars, figure))]
        rows.append(fmt.TableRow(path[-1] if path else "all", (*cells, fmt.whole(_number(values, "objects")))))
    titles = ("AP50", "CorLoc", "recall")
    heads = tuple(head for title in titles for head in (title, f"{title},\ncentred box"))
    words = f"By size and number of objects: {caption}, in per cent, with {INTERVAL}s ({fmt.BELOW})"
    return fmt.Table(words, (*heads, "objects"), tuple(rows))


def _table(numbers: Mapping[str, object], path: Sequence[str]) -> Mapping[str, object]:
    """The numbers at a place; empty if there are none."""
    for key in path:
        below = numbers.get(key)
        numbers = below if isinstance(below, Mapping) else {}
    return numbers


def _number(numbers: Mapping[str, object], name: str) -> float | None:
    value = numbers.get(name)
    return value if isinstance(value, int | float) else None
