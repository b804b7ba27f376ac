"""What a run tells about itself while it learns: losses, pseudo boxes, thresholds, and a few photos for the report."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tag2box.engine.source import Source
from tag2box.engine.step import Step
from tag2box.model.luck import Luck
from tag2box.objective import Outcome
from tag2box.types import Seeds


def step_event(iteration: int, outcome: Outcome, lr: float, seconds: float) -> dict[str, object]:
    """Losses of one batch."""
    losses = {name: value.item() for name, value in outcome.losses.named().items()}
    return {
        "iteration": iteration,
        "losses": {**losses, "total": outcome.total.item()},
        "lr": lr,
        "seconds": seconds,
    }


def pseudo_event(iteration: int, outcome: Outcome, classes: Sequence[str]) -> dict[str, object]:
    """Mean number of pseudo boxes per present image-class pair, by stage and (last stage) by class; mean tau."""
    labeling, pairs = outcome.labeling, outcome.tags.sum(dim=0)  # (C,)
    last = torch.bincount(labeling.stages[-1].seeds.cls, minlength=len(classes))
    return {
        "iteration": iteration,
        "boxes_per_class": [_ratio(len(stage.seeds), int(pairs.sum())) for stage in labeling.stages],
        "threshold": [t.mean().item() if len(t) else None for t in labeling.thresholds]
        or [None] * len(labeling.stages),
        "per_class": {name: _ratio(int(n), int(p)) for name, n, p in zip(classes, last, pairs, strict=True) if p},
    }


def _ratio(count: int, of: int) -> float | None:
    return count / of if of else None


def gallery_event(
    iteration: int, step: Step, source: Source, luck: Luck, count: int, *, progress: float = 0.0
) -> dict[str, object]:
    """Pseudo ground truth of the last stage on the same few training photos, in their own pixels."""
    batch = source.still(count)
    seeds = step.look(batch.to(step.device), luck, progress).labeling.stages[-1].seeds.to(torch.device("cpu"))
    photos = [
        _photo(photo, span, seeds, batch.proposals.boxes[span.start : span.stop], source.photo_boxes(photo))
        for photo, span in zip(batch.ids, batch.proposals.spans(), strict=True)
    ]
    return {"iteration": iteration, "photos": photos}


def _photo(photo: str, span: range, seeds: Seeds, seen: Tensor, own: Tensor) -> dict[str, object]:
    inside = (seeds.rows >= span.start) & (seeds.rows < span.stop) & seeds.score.isfinite()
    boxes = own[seeds.rows[inside] - span.start]
    if seeds.boxes is not None and len(boxes):
        sides = own[:, 2:].amax(dim=0) / seen[:, 2:].amax(dim=0)  # the view only scales
        boxes = seeds.boxes[inside] * sides.repeat(2)
    return {
        "id": photo,
        "boxes": [[round(v, 1) for v in row] for row in boxes.tolist()],
        "labels": seeds.cls[inside].tolist(),
        "scores": [round(v, 4) for v in seeds.score[inside].tolist()],
    }
