"""Figure 5: the three challenges in pictures."""

from __future__ import annotations

from tag2box.studies.experiment import OD_WSCL, OICR_PLUS, Experiment, Row
from tag2box.studies.pictures import challenge_pictures

FIG5 = Experiment(
    name="fig5",
    title="The three challenges in pictures (figure 5)",
    shows="Where OICR shows a part, puts neighbours into one box or misses objects, OD-WSCL shows them whole, "
    "apart, and all.",
    rows=(Row(label="OICR+", settings=OICR_PLUS), Row(label="OD-WSCL", settings=OD_WSCL)),
    notes=("Pictures are of the first seed; the paper shows OICR, here it is OICR+.",),
    draw=challenge_pictures,
)
