"""Figure 6: what was taught as ground truth."""

from __future__ import annotations

from tag2box.studies.experiment import OD_WSCL, OICR_PLUS, Experiment, Row
from tag2box.studies.pictures import label_pictures
from tag2box.systems import SYSTEMS

FIG6 = Experiment(
    name="fig6",
    title="Pseudo ground truth over training (figure 6)",
    shows="OICR takes one box for each tag; OD-WSCL takes many wrong ones at first and mostly right ones in the end, "
    "some of them difficult objects.",
    rows=(
        Row(label="OICR+", settings=OICR_PLUS),
        Row(label="MIST", change=SYSTEMS["mist"].change),
        Row(label="OD-WSCL", settings=OD_WSCL),
    ),
    notes=("Pictures are of the first seed.",),
    watched=("OICR+", "MIST", "OD-WSCL"),
    draw=label_pictures,
)
