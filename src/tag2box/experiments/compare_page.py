"""The page of a comparison: a table a dataset, the order found beside the paper's, and the same photos for all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from tag2box.experiments import summary as telling
from tag2box.experiments.experiment import Drawn, Findings
from tag2box.experiments.pictures import side_by_side
from tag2box.experiments.reproduce import Written
from tag2box.experiments.summary import study_table
from tag2box.io import write_json, write_text
from tag2box.recipes import Config
from tag2box.reporting.charts import UNKNOWN, plural, whole
from tag2box.reporting.gallery import Album
from tag2box.reporting.sections import Fact, Section
from tag2box.reporting.study_page import (
    StudyInputs,
    StudyRow,
    StudyTable,
    markdown,
    settings_table,
    table_section,
    write_study_page,
)
from tag2box.reporting.tables import Table
from tag2box.reporting.tables import TableRow as Line

NAME = "compare"
PAPER = {"voc07": "VOC07", "voc12": "VOC12", "coco14": "COCO14, AP50"}
"""Datasets of the paper, and what its figures are called here."""
NOTES = (
    "The paper's figures were obtained on other data and at another size: VGG16 trained whole, thousands of photos, "
    "six scales, schedules a hundred times as long, each with its authors' own tricks. Compare orders, not figures.",
    "Here backbone, proposals, schedule, batch and evaluator are the same for all systems; nothing was tuned for any.",
    "found, part, grouped, missed: fates of the true objects, with as many boxes of a class kept as it has objects.",
)


def write_compare_page(found: Sequence[Findings], base: Config, out: Path, *, commands: Sequence[str] = ()) -> Written:
    """Write the page, the numbers and the tables of what was found."""
    album = Album()
    tables = [table for findings in found if (table := study_table(findings, out)) is not None]
    sections: list[Section] = []
    numbers, text = [], []
    for at, (findings, table) in enumerate(zip(found, tables, strict=True)):
        sections += [_table(findings, table, at), order(table, at), *side_by_side(findings, album, prefix=f"{at}-")]
        numbers.append(telling.study_numbers(findings, table, Drawn(), telling.follow(findings)))
        text.append(f"On {findings.first[1].name}:\n\n{markdown(table)}")
    inputs = StudyInputs(
        kicker="tag2box compare",
        title=found[0].experiment.title,
        shows=f"{plural(len(found[0].results), 'system')} that learn boxes from tags, on the same backbone, proposals, "
        "schedule and evaluator.",
        setting=" ".join(telling.setting(findings) for findings in found),
        origin=found[0].experiment.origin,
        table=None,
        facts=_facts(found, tables),
        sections=tuple(sections),
        about=(*settings_table(tables[0]), *telling.about_study(found[0], base, commands)),
        album=album,
    )
    page, file = out / f"{NAME}.html", out / f"{NAME}.json"
    write_study_page(inputs, page)
    write_json(file, {"experiment": NAME, "systems": list(found[0].results), "datasets": numbers})
    write_text(out / f"{NAME}.md", "\n".join(text))
    return Written(page, file, "\n".join(text))


def _table(findings: Findings, table: StudyTable, at: int) -> Section:
    words = (
        f"{telling.setting(findings)} Each figure is the mean over the seeds, with the smallest and the largest behind "
        "it: a difference within these says nothing. Shares are in per cent. Time and memory are those of training on "
        "this machine; labels' precision and recall are those of the last stage's pseudo boxes in the end."
    )
    return table_section(table, words, notes=NOTES, name=f"{at}-table", title=f"On {findings.first[1].name}")


def _facts(found: Sequence[Findings], tables: Sequence[StudyTable]) -> tuple[Fact, ...]:
    best = [
        replace(telling.facts(findings, table)[0], name=f"Best mAP50, {findings.first[1].name}")
        for findings, table in zip(found, tables, strict=True)
    ]
    folders = {r.folder for findings in found for by_seed in findings.results.values() for r in by_seed.values()}
    seeds = plural(len(found[0].data), "seed")
    return (*best, Fact("Runs", whole(len(folders)), "", f"{plural(len(found), 'dataset')}, {seeds}"))


def order(table: StudyTable, at: int = 0) -> Section:
    """The systems from best to worst, with their places in the paper, and how far the two orders agree."""
    column = table.paper.index(PAPER["voc07"]) if PAPER["voc07"] in table.paper else None
    ours = {row.name: row.figures[0].mean for row in table.run()}
    theirs = {row.name: None if column is None else row.paper[column] for row in table.run()}
    ranked = sorted(table.run(), key=lambda row: -(ours[row.name] or 0.0))
    here, there = _places(ours), _places(theirs)
    lines = [
        Line(
            row.name,
            (
                _figure(ours[row.name]),
                str(here.get(row.name, UNKNOWN)),
                str(there.get(row.name, UNKNOWN)),
                _figure(theirs[row.name]),
            ),
        )
        for row in ranked
    ]
    heads = ("mAP50", "place\nhere", "place in\nthe paper", "paper:\nVOC07")
    sheet = Table("From best to worst", heads, tuple(lines))
    return Section(f"{at}-order", "The order", agreement(table.run(), theirs), tables=(sheet,))


def agreement(rows: Sequence[StudyRow], theirs: Mapping[str, float | None]) -> str:
    """How many pairs of systems stand in the paper's order, and how many of those on which all seeds agree."""
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
        f"Of {plural(pairs, 'pair')} of systems, {agree} stand in the paper's order on VOC07. All seeds agree on "
        f"{sure} of these pairs, and of those {sure_agree} stand in the paper's order."
    )


def _places(figures: Mapping[str, float | None]) -> dict[str, int]:
    known = sorted((value for value in figures.values() if value is not None), reverse=True)
    return {name: known.index(value) + 1 for name, value in figures.items() if value is not None}


def _figure(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f}"
