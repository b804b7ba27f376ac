"""Table 3b: other backbones."""

from __future__ import annotations

from tag2box.studies.experiment import OD_WSCL, OICR_PLUS, Experiment, Row
from tag2box.studies.experiments.shared import NETS, backbones, reported
from tag2box.systems import SYSTEMS

OTHERS = {"oicr": (50.9, 51.4), "pcl": (50.8, 53.3), "c-mil": (53.4, 53.9)}
"""System -> mAP50 on R50-WS and on R101-WS."""


def _others(name: str, r50: float, r101: float) -> tuple[Row, ...]:
    system, figures = SYSTEMS[name], {"R50-WS": {"mAP50": r50}, "R101-WS": {"mAP50": r101}}
    lite0 = Row(label=f"{system.title}, lite0", settings=("backbone.kind=lite0",), change=system.change)
    return (lite0, *backbones(system.title, (), figures, change=system.change))


TABLE3B = Experiment(
    name="table3b",
    title="Other backbones (table 3b)",
    shows="OD-WSCL is above the systems before it on ResNets too.",
    origin="table 3b; VOC07",
    rows=(
        Row(label="OICR+, lite0", settings=(*OICR_PLUS, "backbone.kind=lite0")),
        Row(label="OD-WSCL, lite0", settings=(*OD_WSCL, "backbone.kind=lite0")),
        *backbones("OICR+", OICR_PLUS, {"VGG16": {"mAP50": 52.3}, "VGG16, convolutions alone": {}}),
        *backbones("OD-WSCL", OD_WSCL, {"VGG16": reported("voc07-mcg-vgg16"), "VGG16, convolutions alone": {}}),
        *backbones("OD-WSCL", OD_WSCL, {name: reported(f"voc07-mcg-{NETS[name]}") for name in ("R50-WS", "R101-WS")}),
        *(row for name, figures in OTHERS.items() for row in _others(name, *figures)),
    ),
    against="OICR+, lite0",
    notes=(
        "VGG16 is from tables 2 and 3a, with MCG proposals. lite0 is not in the paper: its weights come with a pip "
        "package, the others' with `tag2box weights get`.",
    ),
    watched=("OICR+, lite0", "OD-WSCL, lite0"),
)
