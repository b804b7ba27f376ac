"""Table 3c: IoU sampling, random masking and Gaussian noise, each on and off."""

from __future__ import annotations

from tag2box.studies.experiment import OD_WSCL, OICR_PLUS, Experiment, Row

FIGURES = {
    (True, False, False): 56.8,
    (False, True, False): 55.1,
    (False, False, True): 54.8,
    (True, True, False): 57.4,
    (True, False, True): 57.4,
    (False, True, True): 55.2,
    (True, True, True): 58.7,
}
"""IoU sampling, masking, noise -> mAP50."""


def _row(iou: bool, mask: bool, noise: bool) -> Row:
    on = {"IoU": iou, "mask": mask, "noise": noise}
    switches = [f"objective.sampling.iou={iou}", f"augment.mask={mask}", f"augment.noise={noise}"]
    settings = (*OD_WSCL, *(switch.lower() for switch in switches))
    label = " + ".join(name for name, is_on in on.items() if is_on)
    return Row(label=label, settings=settings, paper={"mAP50": FIGURES[iou, mask, noise]})


TABLE3C = Experiment(
    name="table3c",
    title="Augmentations of the exemplars (table 3c)",
    shows="Each of the three helps alone, IoU sampling most, and all of them together help most.",
    origin="table 3c; VOC07, VGG16, MCG proposals",
    rows=(Row(label="OICR+", settings=OICR_PLUS, paper={"mAP50": 52.3}), *(_row(*on) for on in FIGURES)),
    watched=("OICR+", "IoU", "mask", "noise", "IoU + mask + noise"),
)
