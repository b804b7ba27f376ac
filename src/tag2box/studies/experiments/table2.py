"""Table 2: mAP50 on VOC."""

from __future__ import annotations

from tag2box.studies.experiment import OD_WSCL, OICR_PLUS, Experiment, Row
from tag2box.studies.experiments.shared import COMPARED, backbones

SELECTIVE_SEARCH: dict[str, tuple[float, ...]] = {
    "WSDDN": (34.8,), "OICR": (41.2, 37.9), "PCL": (43.5, 40.6), "C-WSL": (46.8, 43.0), "WSRPN": (47.9, 43.4),
    "C-MIL": (50.5, 46.7), "C-MIDN": (52.6, 50.2), "WSOD2": (53.6, 47.2), "OIM": (50.1, 45.3), "SLV": (53.5, 49.2),
    "MIST": (54.9, 52.1), "CASD": (56.8, 53.6),
}  # fmt: skip
MCG: dict[str, tuple[float, ...]] = {"MIST, MCG": (56.5, 53.9), "CASD, MCG": (57.4,), "OD-WSCL, MCG": (58.7, 56.2)}


def _paper(figures: tuple[float, ...]) -> dict[str, float]:
    return dict(zip(("VOC07", "VOC12"), figures, strict=False))


TABLE2 = Experiment(
    name="table2",
    title="Average precision on VOC (table 2)",
    shows="With selective search OD-WSCL is second on VOC07 and first on VOC12; with MCG it is first on both.",
    origin="table 2; VGG16, selective search where nothing else is said",
    rows=(
        Row(label="OICR+", settings=OICR_PLUS, paper={"VOC07": 52.3}),
        Row(label="OD-WSCL", settings=OD_WSCL, paper={"VOC07": 56.1, "VOC12": 54.6}),
        *backbones("OD-WSCL", OD_WSCL, {"VGG16": {"VOC07": 56.1, "VOC12": 54.6}}),
        *(Row(label=name, paper=_paper(f), absent=COMPARED) for name, f in SELECTIVE_SEARCH.items()),
        *(
            Row(label=name, paper=_paper(f), absent="needs MCG proposals, with --proposals and --test-proposals")
            for name, f in MCG.items()
        ),
    ),
    notes=("OICR+ (52.3) is from table 3 of the paper: OICR with box regression and DropBlock.",),
    watched=("OICR+", "OD-WSCL"),
)
