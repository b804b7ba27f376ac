"""Table 1: COCO's twelve numbers."""

from __future__ import annotations

from tag2box.studies.experiment import OD_WSCL, OICR_PLUS, Column, Experiment, Row
from tag2box.studies.experiments.shared import COMPARED, backbones

NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")


def _paper(*figures: float) -> dict[str, float]:
    return dict(zip(NAMES, figures, strict=False))


VGG16 = _paper(13.7, 27.7, 11.9, 4.4, 14.5, 21.2, 14.7, 24.8, 26.9, 8.8, 27.8, 44.0)
R50 = _paper(13.9, 29.1, 11.8, 4.9, 16.8, 22.3, 15.5, 26.1, 28.0, 9.0, 31.8, 46.6)
R101 = _paper(14.4, 29.0, 12.4, 4.8, 17.3, 23.8, 15.8, 27.0, 30.0, 9.2, 33.6, 51.0)
OTHERS = {
    "PCL": _paper(8.5, 19.4),
    "C-MIDN": _paper(9.6, 21.4),
    "WSOD2": _paper(10.8, 22.7),
    "MIST": _paper(11.4, 24.3, 9.4, 3.6, 12.2, 17.6, 13.5, 22.6, 23.9, 8.5, 25.4, 38.3),
    "CASD": _paper(12.8, 26.4),
}
COCO17 = {
    "MIST, VGG16, COCO17": _paper(12.4, 25.8, 10.5, 3.9, 13.8, 19.9, 14.3, 23.3, 24.6, 9.7, 26.6, 39.6),
    "OD-WSCL, VGG16, COCO17": _paper(13.6, 27.4, 12.2, 4.9, 15.5, 21.6, 14.6, 24.8, 26.8, 9.2, 28.7, 43.8),
    "OD-WSCL, R50-WS, COCO17": _paper(13.8, 27.8, 12.1, 5.7, 17.7, 23.8, 15.1, 26.6, 29.7, 10.1, 33.7, 50.7),
    "OD-WSCL, R101-WS, COCO17": _paper(14.4, 28.7, 12.6, 5.4, 17.9, 25.5, 15.4, 26.8, 29.6, 10.0, 33.3, 50.6),
}

TABLE1 = Experiment(
    name="table1",
    title="COCO's twelve numbers (table 1)",
    shows="OD-WSCL is above the systems before it in all of COCO's numbers, most of all in recall: it finds objects "
    "that others miss.",
    origin="table 1; COCO14, VGG16, MCG proposals where nothing else is said",
    rows=(
        Row(label="OICR+", settings=OICR_PLUS),
        Row(label="OD-WSCL", settings=OD_WSCL, paper=VGG16),
        *backbones("OD-WSCL", OD_WSCL, {"VGG16": VGG16, "R50-WS": R50, "R101-WS": R101}),
        *(Row(label=name, paper=paper, absent=COMPARED) for name, paper in OTHERS.items()),
        *(Row(label=name, paper=paper, absent="another dataset than COCO14") for name, paper in COCO17.items()),
    ),
    columns=tuple(Column(name, ("test", "coco", name)) for name in NAMES),
    watched=("OICR+", "OD-WSCL"),
)
