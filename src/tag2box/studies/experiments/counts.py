"""Figures 1c and 7: objects counted, nothing trained."""

from __future__ import annotations

from tag2box.data.stats import ObjectStats, count_objects
from tag2box.recipes import Config
from tag2box.reporting.gallery import Album
from tag2box.reporting.object_figures import missed_figure, number_figure
from tag2box.reporting.sections import Section
from tag2box.reporting.tables import Row, Table
from tag2box.reporting.text import UNKNOWN, percent, whole
from tag2box.studies.experiment import Drawn, Experiment, Findings

PAPER = {"VOC07": (12_608, 7_306), "COCO14": (894_204, 894_204 - 533_396)}
"""Dataset -> objects, and those that one box a tag can find (section 1 of the paper)."""


def _counted(findings: Findings) -> tuple[str, ObjectStats]:
    _, data = findings.first
    return data.name, count_objects(data.train)


def draw_missed(findings: Findings, base: Config, album: Album) -> Drawn:
    """Objects against image-class pairs, with the paper's two counts."""
    name, stats = _counted(findings)
    objects, pairs = sum(stats.objects), sum(stats.pairs)
    rows = [_row(f"{name}, here", objects, pairs), *(_row(f"{d}, paper", o, p) for d, (o, p) in PAPER.items())]
    table = Table("Objects that one box a tag must miss", ("objects", "found at most", "missed, %"), tuple(rows))
    words = "Counted on the training photos. Difficult objects and crowds are not counted."
    section = Section(
        "missed", "What argmax misses", words, wide=True, figures=(missed_figure(stats),), tables=(table,)
    )
    share = stats.missed_share if objects else None
    return Drawn((section,), {"objects": objects, "pairs": pairs, "missed_share": share})


def _row(name: str, objects: int, pairs: int) -> Row:
    share = percent(1 - pairs / objects) if objects else UNKNOWN
    return Row(name, (whole(objects), whole(pairs), share))


def draw_numbers(findings: Findings, base: Config, album: Album) -> Drawn:
    """How many objects of a class are on the photos that show it."""
    _, stats = _counted(findings)
    words = "Classes that come in numbers gain most from a method that looks for further objects."
    section = Section("numbers", "Objects a photo", words, wide=True, figures=(number_figure(stats),))
    means = {n: o / p for n, o, p in zip(stats.classes, stats.objects, stats.pairs, strict=True) if p}
    return Drawn((section,), {"objects_per_photo": means})


FIG1C = Experiment(
    name="fig1c",
    title="What argmax misses (figure 1c)",
    shows="Taking one box for each tag leaves out about two objects in five on VOC and three in five on COCO.",
    origin="section 1",
    notes=("The paper writes 533,396 of 894,204 for COCO14; we read it as those missed. Nothing is trained for this.",),
    seeds=(0,),
    draw=draw_missed,
)
FIG7 = Experiment(
    name="fig7",
    title="Objects a photo (figure 7)",
    shows="Some classes, as cow, person and sheep on VOC, come in numbers; there, one box a tag misses most.",
    notes=("The paper prints figure 7 without numbers. Nothing is trained for this.",),
    seeds=(0,),
    draw=draw_numbers,
)
