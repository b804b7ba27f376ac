"""OIM, object instance mining (Lin et al., 2020): more pseudo boxes by position and feature distance; reweighting."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.errors import UserError
from tag2box.methods import discovery, oicr
from tag2box.ops import assign, iou
from tag2box.types import LabelerInput, Labeling, Proposals, PseudoBoxes, PseudoLabels, Requirements


def distances(vectors: Float[Tensor, "P F"], cores: Int[Tensor, " k"]) -> Float[Tensor, "P k"]:
    """d_r: Euclidean distance of every proposal of an image to each core instance, between feature vectors."""
    return torch.cdist(vectors, vectors[cores], compute_mode="donot_use_mm_for_euclid_dist")


def embedding_spread(
    boxes: Float[Tensor, "P 4"], distance: Float[Tensor, " P"], core: int, near_iou: float
) -> Float[Tensor, ""]:
    """D: mean distance over the spatial graph, which is the core instance and the proposals that overlap it."""
    near = iou(boxes, boxes[core : core + 1]).squeeze(1) >= near_iou
    near[core] = True  # an empty box overlaps nothing, itself included
    return distance[near].mean()


def mine_instances(
    boxes: Float[Tensor, "P 4"],
    distance: Float[Tensor, " P"],
    core: int,
    *,
    limit: Float[Tensor, ""],
    free: Bool[Tensor, " P"],
    apart_iou: float,
) -> Int[Tensor, " s"]:
    """The appearance graph: free proposals within the limit, nearest first, after NMS; the core comes first.

    Args:
        limit: rho D.
        free: proposals that may be used.
        apart_iou: maximum IoU of an instance with those accepted before.
    """
    return discovery.keep_apart(boxes, -distance, free & (distance < limit), core, apart_iou)


def label_instances(
    proposals: Proposals, pseudo_boxes: PseudoBoxes, cores: int, num_classes: int, foreground_iou: float
) -> PseudoLabels:
    """Pseudo labels of one stage: the first ``cores`` pseudo boxes have clusters, mined ones only themselves.

    Proposals that overlap a core are its positives. All others are assigned to the pseudo box of highest IoU and are
    background, except for the mined instances themselves.
    """
    own = PseudoBoxes(pseudo_boxes.rows[:cores], pseudo_boxes.cls[:cores], pseudo_boxes.score[:cores])
    around = assign(proposals, own, num_classes, foreground_iou, or_equal=True)
    mined = pseudo_boxes.rows[cores:]
    in_cluster = around.cls < num_classes
    cls, owner = around.cls, torch.where(in_cluster, around.owner, assign(proposals, pseudo_boxes, num_classes).owner)
    cls[mined] = pseudo_boxes.cls[cores:]
    owner[mined] = torch.arange(cores, len(pseudo_boxes), device=owner.device)
    rows = torch.cat([pseudo_boxes.rows, mined.new_zeros(1)])[owner]  # an owner of -1 is the last
    boxes = torch.where((owner >= 0)[:, None], proposals.boxes[rows], proposals.boxes)
    weight = torch.cat([pseudo_boxes.score, pseudo_boxes.score.new_zeros(1)])[owner].to(boxes.dtype)
    return PseudoLabels(cls, weight, boxes, pseudo_boxes, owner)


HARD_FROM = 0.3
"""Below this ratio q a proposal is probably mislabelled rather than hard: its weight is unchanged."""


def reweighted(
    logits: Float[Tensor, "R c1"], labels: PseudoLabels, *, hard_gain: float, seed_cut: float
) -> Float[Tensor, " R"]:
    """Loss weights by q = p / w, the student's probability of the label over the weight.

    Foreground with 0.3 <= q < 1 is hard and is weighted by (1 + ``hard_gain``). A pseudo box with other foreground in
    its cluster is weighted by (1 - ``seed_cut``), so that less discriminative proposals catch up.
    """
    p = logits.detach().softmax(dim=1).gather(1, labels.cls[:, None]).squeeze(1)
    q = p / labels.weight  # inf or NaN if the weight is zero, which is then not hard
    is_foreground = labels.cls < logits.shape[1] - 1
    is_hard = is_foreground & (q >= HARD_FROM) & (q < 1)
    members = labels.owner[is_foreground].bincount(minlength=len(labels.pseudo_boxes))
    is_dominant = torch.zeros_like(is_foreground)
    is_dominant[labels.pseudo_boxes.rows[members > 1]] = True
    factor = torch.where(is_hard, 1 + hard_gain, 1.0)
    return labels.weight * torch.where(is_dominant & is_foreground, 1 - seed_cut, factor)


@dataclass(frozen=True, kw_only=True)
class Oim:
    """The top proposal is the core; other proposals with features as close as those of its neighbours are mined.

    ``criterion.refine.reweight`` is the other half of the system.

    Chenhao Lin, Siwen Wang, Dongqi Xu, Yu Lu and Wayne Zhang: Object Instance Mining for Weakly Supervised Object
    Detection, AAAI 2020. https://arxiv.org/abs/2002.01087

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(labeler=Oim(reach=4.0)))
        >>> config.criterion.requirements.vectors
        True
    """

    kind: Literal["oim"] = "oim"
    reach: Annotated[float, Field(ge=0)] = 5.0
    """rho: an instance is closer to the core than this multiple of the mean distance of the core's neighbours."""
    late_reach: Annotated[float, Field(ge=0)] = 2.0
    """rho late in training."""
    late_from: Annotated[float, Field(ge=0, le=1)] = 0.78
    """Fraction of the training after which ``late_reach`` applies; the authors' is 70,000 of 90,000 iterations."""
    apart_iou: Annotated[float, Field(ge=0, lt=1)] = 1e-6
    """Maximum IoU of two instances of a class."""
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """From this IoU on a proposal is a neighbour and positive of the core; mined instances have none."""

    @property
    def requirements(self) -> Requirements:
        """Feature vectors of proposals."""
        return Requirements(vectors=True)

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Cores, mined instances and pseudo labels of every stage."""
        num_classes = inputs.tags.shape[1]
        cores = [oicr.argmax_pseudo_boxes(inputs, stage) for stage in range(len(inputs.probs))]
        far = _distances(inputs, cores)
        found = [self.find(inputs, probs, own, far) for probs, own in zip(inputs.probs, cores, strict=True)]
        stages = [
            label_instances(inputs.proposals, pseudo_boxes, len(own), num_classes, self.foreground_iou)
            for pseudo_boxes, own in zip(found, cores, strict=True)
        ]
        return Labeling(tuple(stages))

    def find(
        self, inputs: LabelerInput, probs: Float[Tensor, "R C"], cores: PseudoBoxes, far: dict[int, Float[Tensor, " P"]]
    ) -> PseudoBoxes:
        """The cores of one stage, then the mined instances, class after class; no proposal is used twice.

        Args:
            far: distance of every proposal of its image to each core.
        """
        reach = self.late_reach if inputs.fraction >= self.late_from else self.reach
        spans, images = inputs.proposals.spans(), inputs.proposals.image_ids()[cores.rows].tolist()
        free = torch.ones(len(probs), dtype=torch.bool, device=probs.device)
        free[cores.rows] = False
        picks = [torch.stack([cores.rows, cores.cls], dim=1)]
        for core, c, image in zip(cores.rows.tolist(), cores.cls.tolist(), images, strict=True):
            start, inside = spans[image].start, slice(spans[image].start, spans[image].stop)
            boxes, distance = inputs.proposals.boxes[inside], far[core]
            limit = reach * embedding_spread(boxes, distance, core - start, self.foreground_iou)
            found = mine_instances(
                boxes, distance, core - start, limit=limit, free=free[inside], apart_iou=self.apart_iou
            )
            mined = found[1:]
            free[mined + start] = False
            picks.append(torch.stack([mined + start, torch.full_like(mined, c)], dim=1))
        rows, cls = torch.cat(picks).unbind(dim=1)
        return PseudoBoxes(rows, cls, probs[rows, cls])


def _distances(inputs: LabelerInput, cores: Sequence[PseudoBoxes]) -> dict[int, Float[Tensor, " P"]]:
    """Distance of the proposals of an image to each core in it, for the cores of all stages."""
    if inputs.vectors is None:
        raise UserError(
            "labeler oim: compares feature vectors of proposals, and this input has none: set LabelerInput.vectors"
        )
    rows = torch.cat([pseudo_boxes.rows for pseudo_boxes in cores]).unique()
    far: dict[int, Float[Tensor, " P"]] = {}
    for span in inputs.proposals.spans():
        own = rows[(rows >= span.start) & (rows < span.stop)]
        columns = distances(inputs.vectors[span.start : span.stop], own - span.start).T.contiguous()
        far |= dict(zip(own.tolist(), columns, strict=True))
    return far
