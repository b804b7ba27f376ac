"""Other MIL strategies, the spatial term, no stages: the exact step and several processes give the same gradients."""

from __future__ import annotations

import pytest
import torch

from tag2box.methods.c_midn import CMidn, CMidnLabeler
from tag2box.methods.c_mil import CMil, CMilLabeler
from tag2box.methods.oicr import Oicr
from tag2box.methods.wscl import Contrast
from tag2box.methods.wsddn import Spatial
from tag2box.methods.wsod2 import Wsod2
from tag2box.methods.wsrpn import Rescore
from tag2box.models.augment import Augment
from tag2box.models.detector import Heads
from tag2box.models.drop_block import DropBlock
from tag2box.models.rng import StepRng
from tag2box.training.criterion import Criterion, LossOutput
from tag2box.training.dist import DistContext
from tag2box.training.step import Step
from tag2box.types import Batch, Proposals, SideInfo
from tiny import tiny_detector
from together import together

OFF = Contrast(enabled=False)
SIZES, TAGS = (9, 0, 1, 12), ((0, 2), (1,), (2,), (0, 1))
SYSTEMS: dict[str, tuple[Criterion, Heads]] = {
    "wsddn": (
        Criterion(labeler=Oicr(), contrast=OFF, spatial=Spatial(weight=1.0, iou=0.1)),
        Heads(stages=0, mil_temperature=2.0),
    ),
    "c_mil": (Criterion(mil=CMil(), labeler=CMilLabeler(), contrast=OFF), Heads(embed_dim=6)),
    "c_midn": (Criterion(mil=CMidn(cell=2.0), labeler=CMidnLabeler(cell=2.0), contrast=OFF), Heads(mil_heads=2)),
    "c_midn with segments": (
        Criterion(mil=CMidn(guide="segmentation"), labeler=CMidnLabeler(guide="segmentation"), contrast=OFF),
        Heads(mil_heads=2),
    ),
    "wsod2": (
        Criterion(labeler=Wsod2(evidence_of="regressed", targets="regressed"), contrast=OFF),
        Heads(embed_dim=6),
    ),
    "rescored": (Criterion(rescore=Rescore(keep=0.5, begin=0.0)), Heads(embed_dim=6)),
    "prior": (Criterion(), Heads(embed_dim=6, box_prior=3.0)),
    "all with WSCL": (
        Criterion(mil=CMidn(), labeler=CMilLabeler(), spatial=Spatial(weight=1.0)),
        Heads(mil_heads=2, embed_dim=6),
    ),
}


def batch() -> Batch:
    g = torch.Generator().manual_seed(2)
    corner = torch.rand(sum(SIZES), 2, generator=g) * 20
    boxes = torch.cat([corner, corner + 6 + torch.rand(sum(SIZES), 2, generator=g) * 14], dim=1).double()
    tags = torch.zeros(len(SIZES), 3, dtype=torch.bool)
    for i, present in enumerate(TAGS):
        tags[i, list(present)] = True
    images = torch.rand(len(SIZES), 3, 40, 44, generator=g, dtype=torch.float64) * 255
    side_info = SideInfo(
        objectness=torch.rand(sum(SIZES), generator=g, dtype=torch.float64),
        superpixels=tuple(torch.randint(3, (10, 11), generator=g) for _ in SIZES),
        segments=tuple(torch.randint(4, (5, 6), generator=g) for _ in SIZES),
    )
    proposals = Proposals(boxes, SIZES, ((44, 40),) * len(SIZES))
    return Batch(tuple(map(str, range(len(SIZES)))), tags, proposals, images=images, side_info=side_info)


def learn(name: str, part: Batch, **how: object) -> tuple[LossOutput, dict[str, torch.Tensor]]:
    criterion, heads = SYSTEMS[name]
    detector = tiny_detector(3, frozen=False, heads=heads).double()
    step = Step(detector, criterion, DropBlock(block=2), Augment(), **how)  # type: ignore[arg-type]
    outcome = step(part, StepRng(11, 4), 0.02)
    return outcome, {n: p.grad.clone() for n, p in detector.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", SYSTEMS)
def test_photo_by_photo_and_over_processes_gradients_are_those_of_all_at_once(name: str) -> None:
    outcome, wanted = learn(name, batch())
    exact, grads = learn(name, batch(), memory="exact")

    def work(dist: DistContext) -> dict[str, torch.Tensor]:
        photos = [batch().photo(i) for i in range(len(SIZES))]
        return learn(name, photos[dist.rank], memory="exact", dist=dist)[1]

    assert exact.total.item() == pytest.approx(outcome.total.item(), rel=1e-12)
    for found in (grads, *together(len(SIZES), work)):
        for key, grad in wanted.items():
            torch.testing.assert_close(found[key], grad, rtol=1e-9, atol=1e-11, msg=key)
    assert any(key.startswith("mil.") and grad.any() for key, grad in wanted.items())


def test_without_stages_there_are_labels_but_no_loss_on_them() -> None:
    outcome, grads = learn("wsddn", batch())
    assert len(outcome.labeling.stages) == 1 and len(outcome.labeling.stages[0].pseudo_boxes) == 5
    assert list(outcome.losses) == ["mil", "refine", "box", "contrast", "spatial"]
    assert not any(name.startswith("refine") for name in grads)
