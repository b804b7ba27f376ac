"""A labeler of your own, trained, then used by ``detect``. The guide is docs/adding-a-labeler.md.

python examples/own_labeler.py runs/new
PYTHONPATH=examples tag2box detect runs/new/run runs/new/scenes/test/photos
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

import tag2box
from tag2box.data.scenes import Scenes
from tag2box.ops import assign, nms
from tag2box.training.events import read_events
from tag2box.types import LabelerInput, Labeling, PseudoBoxes, Requirements


@dataclass(frozen=True, kw_only=True)
class TopApart:
    """The best proposals of each present class that hardly overlap are its pseudo boxes; fields are settings."""

    count: int = 2
    requirements: ClassVar[Requirements] = Requirements()  # none beyond scores

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Pseudo labels of every stage."""
        found = (self.find(inputs, probs) for probs in inputs.probs)
        return Labeling(tuple(assign(inputs.proposals, boxes, inputs.tags.shape[1]) for boxes in found))

    def find(self, inputs: LabelerInput, probs: torch.Tensor) -> PseudoBoxes:
        """Pseudo boxes from one teacher's scores, image after image, class after class."""
        picks = [torch.zeros(0, 2, dtype=torch.long)]
        for span, tags in zip(inputs.proposals.spans(), inputs.tags, strict=True):
            inside = slice(span.start, span.stop)
            for c in tags.nonzero().flatten().tolist():
                best = nms(inputs.proposals.boxes[inside], probs[inside, c], 0.1)[: self.count] + span.start
                picks.append(torch.stack([best, torch.full_like(best, c)], dim=1))
        rows, cls = torch.cat(picks).T
        return PseudoBoxes(rows, cls, probs[rows, cls])


def main(out: Path, iterations: int = 20) -> None:
    """Train with the labeler; print the pseudo boxes per tag over time, and the number of detections."""
    from own_labeler import TopApart  # not __main__.TopApart, which no other program can import

    Scenes(train=24, test=4, classes=("car", "fish", "flower")).write(out / "scenes")
    base = tag2box.RECIPES["scenes"]()
    config = replace(
        base,
        data=replace(base.data, photos=out / "scenes/train/photos", tags=out / "scenes/train/tags.csv"),
        criterion=replace(base.criterion, labeler=TopApart(), contrast=replace(base.criterion.contrast, enabled=False)),
        plan=replace(base.plan, iterations=iterations),
    )
    tag2box.train(config, out / "run")
    print(*(e["boxes_per_class"] for e in read_events(out / "run") if e["event"] == "pseudo"), sep="\n")
    found = tag2box.detect(out / "run", [out / "scenes/test/photos"], min_score=0.0)
    print(sum(map(len, found.values())), "detections")


if __name__ == "__main__":  # proposals are made by several processes, which import this file
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
