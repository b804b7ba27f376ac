"""The page about trust: verdicts on the classes of a label set, intervals, calibration, thresholds, what to do next."""

from collections.abc import Sequence
from pathlib import Path

from markupsafe import Markup

from tag2box.labels.calibration import PrecisionPoint
from tag2box.labels.shares import Estimate, binomial_interval
from tag2box.labels.trust import ClassTrust, Trust, advice
from tag2box.reporting import charts, formatting as fmt, plots
from tag2box.reporting.sections import Figure, Section, SectionPage, write_page

VERDICT_CSS = {"use": "verdict-use", "review more": "verdict-more", "do not use": "verdict-not"}
_BEFORE, _AFTER = charts.Key("scores", "split-0"), charts.Key("calibrated", "run-0")
_MOST_CURVES = 20  # classes with a curve of their own
_KIND_WORDS = {
    "raw": "scores as they are",
    "constant": "a constant",
    "beta": "beta calibration",
    "isotonic": "isotonic regression",
}


def write_trust_page(found: Trust, name: str, out: Path) -> None:
    """Write the page about what can be trusted of a label set as one self-contained HTML file."""
    write_page(build_trust_page(found, name), out)


def build_trust_page(found: Trust, name: str) -> SectionPage:
    """Turn a trust into everything the template shows."""
    return SectionPage(
        kicker="tag2box trust",
        title=f"What to trust in {name}",
        lede=_lede(found),
        facts=_facts(found),
        sections=(_verdicts(found), _next(found), _scores(found), _thresholds(found), _method(found)),
    )


def _lede(found: Trust) -> str:
    names = {word: [n for n, own in found.classes.items() if own.verdict == word] for word in VERDICT_CSS}
    parts = [f"{word[0].upper()}{word[1:]}: {fmt.listed(own)}." for word, own in names.items() if own]
    return (
        f"A person has reviewed {fmt.plural(found.sampled, 'photo')} of a random sample, with "
        f"{fmt.plural(found.overall.precision.count, 'label')}. " + " ".join(parts)
    )


def _facts(found: Trust) -> tuple[fmt.Fact, ...]:
    usable = sum(own.verdict == "use" for own in found.classes.values())
    return (
        fmt.Fact("Precision", fmt.percent(found.overall.precision.share), "%", _between(found.overall.precision)),
        fmt.Fact("Recall", fmt.percent(found.overall.recall.share), "%", _between(found.overall.recall)),
        fmt.Fact(
            "Classes to use", f"{usable} of {len(found.classes)}", "", f"lower bound {_points(found.rule.use_from)}"
        ),
        fmt.Fact(
            "Labels reviewed", fmt.whole(found.overall.precision.count), "", f"of {fmt.whole(found.overall.labels)}"
        ),
    )


def _between(own: Estimate) -> str:
    low, high = own.interval
    return f"95 % interval: {100 * low:.0f} to {100 * high:.0f} %" if own.count else "nothing reviewed"


def _points(share: float) -> str:
    return f"{100 * share:g} % or more"


# ---------------------------------------------------------------- verdicts


def _verdicts(found: Trust) -> Section:
    rule, rows = found.rule, [*found.classes.items(), ("all classes", found.overall)]
    bars = [
        plots.IntervalRow(name, *own.precision.interval, own.precision.share, _figure(own), VERDICT_CSS[own.verdict])
        for name, own in rows
    ]
    limits = (
        (rule.refuse_below, f"do not use: upper bound below {100 * rule.refuse_below:g} %"),
        (rule.use_from, f"use: lower bound {_points(rule.use_from)}"),
    )
    keys = tuple(charts.Key(word, css) for word, css in VERDICT_CSS.items())
    figure = Figure(
        "Precision of each class",
        "share of labels that are right, per cent, with its 95 % interval; dashed: the limits of the verdicts",
        (Markup(plots.interval_bars(bars, limits, label="Precision of each class with its interval")),),
        f"A class is used if its whole interval lies right of {100 * rule.use_from:g} %, and not used if it lies left "
        f"of {100 * rule.refuse_below:g} %. Marks: disc, use; ring, review more; square, do not use.",
        keys,
    )
    words = "A label is right if the reviewer accepted it, or moved it only slightly (IoU 0.5 or more)."
    return Section("verdicts", "Verdicts", words, wide=True, figures=(figure,), tables=(_table(found),))


def _figure(own: ClassTrust) -> str:
    return f"{own.precision.hits} of {own.precision.count}"


def _table(found: Trust) -> fmt.Table:
    wanted = f"score for\n{100 * found.rule.precision:g} %"
    heads = ("verdict", "labels", "reviewed", "precision\n%", "95 %\ninterval", "recall\n%", wanted, "review\nmore")
    rows = []
    for name, own in (*found.classes.items(), ("all classes", found.overall)):
        low, high = own.precision.interval
        cells = (
            own.verdict,
            fmt.whole(own.labels),
            fmt.whole(own.precision.count),
            fmt.percent(own.precision.share),
            f"{100 * low:.0f} to {100 * high:.0f}" if own.precision.count else fmt.UNKNOWN,
            fmt.percent(own.recall.share),
            "not reached" if own.threshold is None else f"{own.threshold:.3f}",
            "all" if own.more is None else fmt.whole(own.more) if own.more else fmt.UNKNOWN,
        )
        rows.append(fmt.TableRow(name, cells))
    return fmt.Table("Each class", heads, tuple(rows))


def _next(found: Trust) -> Section:
    lines = advice(found) or ("Nothing: every class can be used.",)
    more = sum(own.more or 0 for own in found.classes.values())
    words = (
        f"About {fmt.whole(more)} further labels would decide, or narrow the intervals to "
        f"{100 * found.rule.width:g} points on either side, if the shares stay what they are. Review photos of the "
        "random sample: only those count."
        if more
        else "What the reviews suggest."
    )
    return Section("next", "What to do next", words, warnings=lines)


# ---------------------------------------------------------------- scores


def _scores(found: Trust) -> Section:
    own = found.reliability
    words = (
        "A calibrated score is the probability that the label is right. Each disc is a tenth of the reviewed labels, "
        "in order of their scores; calibrated ones are of photos that the calibration was not fitted to."
    )
    if own.error_before is None or own.error_after is None:
        return Section("scores", "Scores", "Too few reviews to compare scores with the truth.")
    series = [
        plots.Dots(key, tuple((b.probability, b.precision, b.count) for b in bins))
        for key, bins in ((_BEFORE, own.before), (_AFTER, own.after))
    ]
    verb = "falls" if own.error_after < own.error_before else "rises"
    figure = Figure(
        "Reliability",
        "on the diagonal, a score of 70 % means that 70 % are right",
        (Markup(plots.reliability_chart(series, label="Reliability before and after calibration")),),
        f"The expected calibration error {verb} from {fmt.percent(own.error_before)} to "
        f"{fmt.percent(own.error_after)} points.",
        (_BEFORE, _AFTER),
    )
    return Section("scores", "Scores", words, wide=True, figures=(figure,), tables=(_kinds(found),), prose=True)


def _kinds(found: Trust) -> fmt.Table:
    rows = []
    for name, own in (*found.classes.items(), ("all classes", found.overall)):
        whose = "" if own.is_own else ", of all classes, shifted to this one"
        rows.append(
            fmt.TableRow(
                name, (_KIND_WORDS[own.calibration.kind] + whose, *(_at(own, score) for score in (0.25, 0.5, 0.75)))
            )
        )
    heads = ("calibration", "score 0.25\nmeans", "0.5", "0.75")
    return fmt.Table("Probabilities of scores, in per cent", heads, tuple(rows))


def _at(own: ClassTrust, score: float) -> str:
    return f"{100 * own.calibration.one(score):.0f}"


# ---------------------------------------------------------------- thresholds


def _thresholds(found: Trust) -> Section:
    shown = [("all classes", found.overall), *found.classes.items()][: _MOST_CURVES + 1]
    figures = tuple(_curve(name, own, found) for name, own in shown if own.curve)
    words = (
        f"The precision of the labels with at least a score. The threshold of a class is the smallest score from which "
        f"it reaches {100 * found.rule.precision:g} %, with at least {found.rule.least} reviewed labels above; labels "
        "below it become ignore regions with `tag2box label --trust`."
    )
    return Section("thresholds", "Precision over score", words, figures=figures)


def _curve(name: str, own: ClassTrust, found: Trust) -> Figure:
    points = tuple(reversed(own.curve))  # ascending scores
    kept = [point for point in points if point.labels >= min(5, own.precision.count)]
    lines = [
        charts.Line("upper", "split-0", _line(kept, "high")),
        charts.Line("precision", "run-0", tuple((p.score, 100 * p.precision) for p in kept)),
        charts.Line("lower", "split-0", _line(kept, "low")),
    ]
    svg = charts.line_chart(
        lines,
        label=f"Precision of {name} over score",
        x_label="score",
        reference=charts.Reference("wanted", 100 * found.rule.precision),
    )
    reading = (
        f"{100 * found.rule.precision:g} % are not reached at any score."
        if own.threshold is None
        else f"{100 * found.rule.precision:g} % from a score of {own.threshold:.3f} on"
        + (
            "."
            if len(own.curve) and own.precision.count >= found.rule.own_from
            else ", expected from the calibration of all classes."
        )
    )
    return Figure(name, f"per cent right, {_figure(own)} reviewed", (Markup(svg),), reading)


def _line(points: Sequence[PrecisionPoint], end: str) -> charts.Points:
    return tuple((p.score, 100 * getattr(binomial_interval(p.right, p.labels), end)) for p in points)


# ---------------------------------------------------------------- how it was measured


def _method(found: Trust) -> Section:
    rule = found.rule
    rows = (
        (
            "photos",
            f"{found.sampled} of the random sample, of {found.photos} reviewed; others are hard ones, not counted",
        ),
        (
            "interval",
            "Clopper and Pearson, 95 %; labels of one photo count as fewer if they are right or wrong together",
        ),
        ("use", f"lower bound {_points(rule.use_from)}"),
        ("do not use", f"upper bound below {100 * rule.refuse_below:g} %"),
        ("review more", f"anything else, or fewer than {rule.least} reviewed labels"),
        (
            "calibration",
            f"own from {rule.own_from} reviewed labels on, if enough are right and enough wrong; of the kind with the "
            "lowest Brier score on held-out labels",
        ),
        ("recall", "objects of the reviewed photos that had a right label; the others were added by the reviewer"),
        ("labels", found.labels_digest[:16]),
        ("run", str(found.run.get("folder", fmt.UNKNOWN))),
    )
    table = fmt.Table("Rule and data", ("",), tuple(fmt.TableRow(name, (words,)) for name, words in rows))
    return Section(
        "method", "How it was measured", "Settings of the rule, and what was reviewed.", tables=(table,), prose=True
    )
