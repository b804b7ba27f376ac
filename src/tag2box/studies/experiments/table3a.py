"""Table 3a: discovery and the contrastive loss, each on and off."""

from __future__ import annotations

from tag2box.studies.experiment import OD, OD_WSCL, OICR_PLUS, WSCL, Experiment, Row

TABLE3A = Experiment(
    name="table3a",
    title="Object discovery and WSCL (table 3a)",
    shows="Discovery and the contrastive loss each help, and together more than either: each makes the other better.",
    origin="table 3a; VOC07, VGG16",
    rows=(
        Row(label="OICR+", settings=OICR_PLUS, paper={"mAP50": 52.3}),
        Row(label="+ OD", settings=OD, paper={"mAP50": 56.1}),
        Row(label="+ WSCL", settings=WSCL, paper={"mAP50": 54.5}),
        Row(label="+ both (OD-WSCL)", settings=OD_WSCL, paper={"mAP50": 58.7}),
    ),
    notes=("The paper's text says selective search, its figure (58.7) is that of MCG in table 2.",),
    watched=("OICR+", "+ OD", "+ WSCL", "+ both (OD-WSCL)"),
)
