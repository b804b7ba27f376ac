"""Table 2: mAP50 on VOC."""

from __future__ import annotations

from tag2box.studies.experiment import OD_WSCL, OICR_PLUS, Experiment, Row
from tag2box.studies.experiments.shared import backbones, compared
from tag2box.systems import System

MCG: dict[str, tuple[float, ...]] = {"MIST, MCG": (56.5, 53.9), "CASD, MCG": (57.4,), "OD-WSCL, MCG": (58.7, 56.2)}


def _paper(figures: tuple[float, ...]) -> dict[str, float]:
    return dict(zip(("VOC07", "VOC12"), figures, strict=False))


def _selective_search(system: System) -> dict[str, float]:
    figures = {name: system.reported(dataset) for name, dataset in (("VOC07", "voc07"), ("VOC12", "voc12"))}
    return {name: figure for name, figure in figures.items() if figure is not None}


TABLE2 = Experiment(
    name="table2",
    title="Average precision on VOC (table 2)",
    shows="With selective search OD-WSCL is second on VOC07 and first on VOC12; with MCG it is first on both.",
    origin="table 2; VGG16, selective search where nothing else is said",
    rows=(
        Row(label="OICR+", settings=OICR_PLUS, paper={"VOC07": 52.3}),
        Row(label="OD-WSCL", settings=OD_WSCL, paper={"VOC07": 56.1, "VOC12": 54.6}),
        *backbones("OD-WSCL", OD_WSCL, {"VGG16": {"VOC07": 56.1, "VOC12": 54.6}}),
        *(Row(label=s.title, change=s.change, paper=_selective_search(s)) for s in compared("voc07")),
        *(
            Row(label=name, paper=_paper(f), absent="needs MCG proposals, with --proposals and --test-proposals")
            for name, f in MCG.items()
        ),
    ),
    notes=("OICR+ (52.3) is from table 3 of the paper: OICR with box regression and DropBlock.",),
    watched=("OICR+", "OD-WSCL"),
)
