"""Table 3b: other backbones."""

from __future__ import annotations

from tag2box.studies.experiment import OD_WSCL, OICR_PLUS, Experiment, Row
from tag2box.studies.experiments.shared import COMPARED, NETS, backbones, reported

OTHERS = {"OICR": (50.9, 51.4), "PCL": (50.8, 53.3), "C-MIL": (53.4, 53.9)}

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
        *(
            Row(label=f"{name}, {net}", paper={"mAP50": figure}, absent=COMPARED)
            for name, figures in OTHERS.items()
            for net, figure in zip(("R50-WS", "R101-WS"), figures, strict=True)
        ),
    ),
    against="OICR+, lite0",
    notes=(
        "VGG16 is from tables 2 and 3a, with MCG proposals. lite0 is not in the paper: its weights come with a pip "
        "package, the others' with `tag2box weights get`.",
    ),
    watched=("OICR+, lite0", "OD-WSCL, lite0"),
)
