"""Appendix C: what a candidate is judged by."""

from __future__ import annotations

from tag2box.studies.experiment import OD_WSCL, Experiment, Row

FIXED = {0.2: 50.3, 0.3: 56.2, 0.4: 57.4, 0.5: 56.2, 0.6: 56.1, 0.7: 55.6, 0.8: 54.4}


def _fixed(threshold: float, figure: float) -> Row:
    settings = ("objective.labeler.criterion=score_fixed", f"objective.labeler.score_threshold={threshold}")
    return Row(label=f"score above {threshold:g}", settings=(*OD_WSCL, *settings), paper={"mAP50": figure})


APPENDIX_C = Experiment(
    name="appendix-c",
    title="Similarity or score (appendix C)",
    shows="Objects found by their similarity to the top one are better labels than objects found by their score, which "
    "also depends much on its threshold.",
    origin="appendix C; VOC07, VGG16, MCG proposals",
    rows=(
        *(_fixed(threshold, figure) for threshold, figure in FIXED.items()),
        Row(
            label="score, adaptive",
            settings=(*OD_WSCL, "objective.labeler.criterion=score_adaptive"),
            paper={"mAP50": 53.2},
        ),
        Row(
            label="similarity, adaptive",
            settings=(*OD_WSCL, "objective.labeler.criterion=similarity"),
            paper={"mAP50": 58.7},
        ),
    ),
    against="similarity, adaptive",
    watched=("score above 0.2", "score above 0.4", "score above 0.8", "score, adaptive", "similarity, adaptive"),
)
