"""Table 1: COCO's twelve numbers."""

from __future__ import annotations

from tag2box.studies.experiment import OD_WSCL, OICR_PLUS, Column, Experiment, Row
from tag2box.studies.experiments.shared import NETS, backbones, compared, reported

NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")


def _paper(*figures: float) -> dict[str, float]:
    return dict(zip(NAMES, figures, strict=False))


OURS = {name: reported(f"coco14-mcg-{net}") for name, net in NETS.items()}
COCO17 = {
    "MIST, VGG16, COCO17": _paper(12.4, 25.8, 10.5, 3.9, 13.8, 19.9, 14.3, 23.3, 24.6, 9.7, 26.6, 39.6),
    **{f"OD-WSCL, {name}, COCO17": reported(f"coco17-mcg-{net}") for name, net in NETS.items()},
}

TABLE1 = Experiment(
    name="table1",
    title="COCO's twelve numbers (table 1)",
    shows="OD-WSCL is above the systems before it in all of COCO's numbers, most of all in recall: it finds objects "
    "that others miss.",
    origin="table 1; COCO14, VGG16, MCG proposals where nothing else is said",
    rows=(
        Row(label="OICR+", settings=OICR_PLUS),
        Row(label="OD-WSCL", settings=OD_WSCL, paper=OURS["VGG16"]),
        *backbones("OD-WSCL", OD_WSCL, OURS),
        *(Row(label=s.title, change=s.change, paper=s.figures["coco14"].reported()) for s in compared("coco14")),
        *(Row(label=name, paper=paper, absent="another dataset than COCO14") for name, paper in COCO17.items()),
    ),
    columns=tuple(Column(name, ("test", "coco", name)) for name in NAMES),
    watched=("OICR+", "OD-WSCL"),
)
