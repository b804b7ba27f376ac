"""A labeler of your own: ``python examples/own_labeler.py runs/new``. To add one: docs/adding-a-labeler.md."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import torch

from tag2box.commands.train import train
from tag2box.data.scenes import Scenes
from tag2box.ops.nms import nms
from tag2box.ops.refine import assign
from tag2box.recipes import RECIPES
from tag2box.training.events import read_events
from tag2box.types import LabelerInput, Labeling, PseudoBoxes, Requirements


@dataclass(frozen=True, kw_only=True)
class TopApart:
    """The best proposals of each present class that hardly overlap seed its clusters; fields are settings."""

    kind: Literal["top_apart"] = "top_apart"
    count: int = 2
    requirements: ClassVar[Requirements] = Requirements()  # it looks at scores alone

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Pseudo labels of every stage."""
        return Labeling(
            tuple(assign(inputs.proposals, self.find(inputs, p), inputs.tags.shape[1]) for p in inputs.probs)
        )

    def find(self, inputs: LabelerInput, probs: torch.Tensor) -> PseudoBoxes:
        """The seeds one teacher gives, image after image, class after class."""
        picks = [torch.zeros(0, 2, dtype=torch.long)]
        for span, tags in zip(inputs.proposals.spans(), inputs.tags, strict=True):
            inside = slice(span.start, span.stop)
            for c in tags.nonzero().flatten().tolist():
                best = nms(inputs.proposals.boxes[inside], probs[inside, c], 0.1)[: self.count] + span.start
                picks.append(torch.stack([best, torch.full_like(best, c)], dim=1))
        rows, cls = torch.cat(picks).T
        return PseudoBoxes(rows, cls, probs[rows, cls])


def main(out: Path, iterations: int = 20) -> None:
    """Train with the labeler, and say how many boxes it taught for each tag, stage by stage."""
    Scenes(train=24, test=0, classes=("car", "fish", "flower")).write(out / "scenes")
    base = RECIPES["scenes"]()
    config = replace(
        base,
        data=replace(base.data, photos=out / "scenes/train/photos", tags=out / "scenes/train/tags.csv"),
        criterion=replace(base.criterion, labeler=TopApart(), contrast=replace(base.criterion.contrast, enabled=False)),
        plan=replace(base.plan, iterations=iterations),
    )
    train(config, out / "run")
    print(*(e["boxes_per_class"] for e in read_events(out / "run") if e["event"] == "pseudo"), sep="\n")


if __name__ == "__main__":  # several processes make proposals, and import this file
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
