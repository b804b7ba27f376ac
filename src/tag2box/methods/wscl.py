"""OD-WSCL, the weakly supervised contrastive loss (Seo et al., 2022): exemplars (eq. 5-8) and L_wscl (eq. 11-12).

The |S|^2 similarities are never in memory at once: they are computed in square blocks and, beyond a limit of memory,
recomputed in backward. Similarity is symmetric, so a block above the diagonal serves its rows and, transposed, its
columns.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.utils import get_total_norm

from tag2box.methods import discovery, oicr
from tag2box.ops.losses import at_least_single
from tag2box.types import TAGS_ONLY, AugmentRois, Exemplars, LabelerInput, Labeling

_SIDE = 1024  # of a block: 4 MB in single precision, which fits the CPU cache
_KEPT_BYTES = 128 << 20  # of exponentials that are kept from forward to backward
_NARROW = 40.0  # logits within +-40 span 80, and exp(-80) is still a normal number in single precision


def wscl(
    embed: Float[Tensor, "M D"],
    cls: Int[Tensor, " M"],
    weight: Float[Tensor, " M"],
    *,
    temperature: float,
    positives: Literal["outside", "inside"] = "outside",
) -> Float[Tensor, ""]:
    """L_wscl (eq. 11-12): pull exemplars of one class together, push other classes away, easy instances first.

    ``outside`` is eq. 11, the mean over positives of log-ratios. ``inside`` is the variant of the published code: one
    logarithm of the positives' summed probability. An exemplar alone in its class has no positive and adds zero.
    Sums run in single precision at least, also under autocast.

    >>> z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    >>> wscl(z, torch.tensor([0, 0, 1]), torch.ones(3), temperature=1.0)
    tensor(0.2088)
    """
    if len(cls) == 0:
        return embed.sum() * 0.0
    with torch.autocast(embed.device.type, enabled=False):
        z = at_least_single(embed)
        order = cls.argsort(stable=True)
        z, cls, weight = z[order], cls[order], weight[order].to(z.dtype)
        members = torch.bincount(cls)[cls]
        partition = _log_sum(z, torch.zeros_like(cls), temperature)
        if positives == "outside":
            inner = _mean_positive(z, cls, members, temperature)
        else:
            inner = _log_sum(z, cls, temperature)
        return (torch.where(members > 1, partition - inner, 0.0) * weight).sum() / len(cls)


def _mean_positive(
    embed: Float[Tensor, "M D"], cls: Int[Tensor, " M"], members: Int[Tensor, " M"], temperature: float
) -> Float[Tensor, " M"]:
    """Mean logit of each exemplar with the others of its class: its product with their sum, without any pairs."""
    sums = embed.new_zeros(int(cls.max()) + 1, embed.shape[1]).index_add(0, cls, embed)
    with_all = (embed * sums[cls]).sum(dim=1) - embed.square().sum(dim=1)
    return with_all / ((members - 1).clamp(min=1).to(embed.dtype) * temperature)


def _log_sum(embed: Float[Tensor, "M D"], group: Int[Tensor, " M"], temperature: float) -> Float[Tensor, " M"]:
    """log sum of exp(z_i z_j / temperature) over the others j in i's group; ``group`` is sorted."""
    result: Tensor = _LogSum.apply(embed, group, temperature)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True)
class _Block:
    """Exemplars along both sides of a block of pairs, and a number per pair; those of no pair are -inf or 0."""

    rows: slice
    columns: slice
    values: Float[Tensor, "a b"]


class _LogSum(torch.autograd.Function):
    """Log-sums by block, and their gradient: softmax-weighted sums of embeddings, by block again.

    Logits within a narrow range are turned into exponentials once: sums of these neither overflow nor underflow. The
    first blocks of them are kept for backward, as far as ``_KEPT_BYTES`` reach; the others are computed again.
    """

    @staticmethod
    def forward(ctx: Any, embed: Tensor, group: Tensor, temperature: float) -> Tensor:
        ctx.temperature = temperature
        ctx.is_narrow = float(embed.square().sum(dim=1).max()) / temperature <= _NARROW
        ctx.kept, room = [], _KEPT_BYTES if ctx.needs_input_grad[0] else 0
        total = embed.new_zeros(len(embed)) if ctx.is_narrow else embed.new_full((len(embed),), -torch.inf)
        for block in _blocks(embed, group, temperature, exponentials=ctx.is_narrow):
            values, rows, columns = block.values, block.rows, block.columns
            if ctx.is_narrow:
                total[rows] += values.sum(dim=1)
                if rows != columns:
                    total[columns] += values.sum(dim=0)
                room -= values.nbytes
                if room >= 0:
                    ctx.kept.append(values.clone())
            else:
                total[rows] = torch.logaddexp(total[rows], values.logsumexp(dim=1))
                if rows != columns:
                    total[columns] = torch.logaddexp(total[columns], values.logsumexp(dim=0))
        total = total.log() if ctx.is_narrow else total
        ctx.save_for_backward(embed, group, total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        embed, group, total = ctx.saved_tensors
        total = total.masked_fill(total.isneginf(), torch.inf)  # alone in its group: all probabilities are zero
        pull = torch.zeros_like(embed)
        with torch.autocast(embed.device.type, enabled=False):
            for block in _blocks(embed, group, ctx.temperature, exponentials=ctx.is_narrow, kept=ctx.kept):
                ends = [(total[part], grads[0][part]) for part in (block.rows, block.columns)]
                shares = (_shares if ctx.is_narrow else _wide_shares)(block.values, *ends)
                pull[block.rows].addmm_(shares, embed[block.columns])
                if block.rows != block.columns:
                    pull[block.columns].addmm_(shares.T, embed[block.rows])
        return pull / ctx.temperature, None, None


def _blocks(
    embed: Float[Tensor, "M D"],
    group: Int[Tensor, " M"],
    temperature: float,
    *,
    exponentials: bool,
    kept: Sequence[Float[Tensor, "a b"]] = (),
) -> Iterator[_Block]:
    """Logits on and above the diagonal, or their exponentials, block by block; ``kept`` are the first ones.

    All blocks share their memory: a block of its own would cost more in page faults than in its exponentials.
    """
    factor = math.log2(math.e) if exponentials else 1.0  # 2^x is computed faster than e^x
    scaled, memory = embed * (factor / temperature), embed.new_empty(min(_SIDE, len(embed)) ** 2)
    edges = [slice(start, min(start + _SIDE, len(embed))) for start in range(0, len(embed), _SIDE)]
    firsts, lasts = group[::_SIDE].tolist(), [int(group[edge.stop - 1]) for edge in edges]
    number = 0
    for i, rows in enumerate(edges):
        for j, columns in enumerate(edges[i:], start=i):
            if firsts[j] > lasts[i]:
                break
            left, right = scaled[rows], embed[columns]
            values = memory[: len(left) * len(right)].view(len(left), len(right))
            if number < len(kept):
                yield _Block(rows, columns, values.copy_(kept[number]))
            else:
                torch.mm(left, right.T, out=values)
                if i == j:
                    values.fill_diagonal_(-torch.inf)
                if firsts[i] != lasts[j]:
                    values.masked_fill_(group[rows][:, None] != group[columns][None, :], -torch.inf)
                yield _Block(rows, columns, values.exp2_() if exponentials else values)
            number += 1


_End = tuple[Float[Tensor, " a"], Float[Tensor, " a"]]
"""Log-sum and incoming gradient of the exemplars along one side of a block."""


def _shares(values: Float[Tensor, "a b"], left: _End, right: _End) -> Float[Tensor, "a b"]:
    """g_i softmax_i(j) + g_j softmax_j(i): gradient of the logit of a pair, from both of its exemplars."""
    factors = [grad * (-total).exp() for total, grad in (left, right)]
    return values.mul_(factors[0][:, None] + factors[1][None, :])


def _wide_shares(logits: Float[Tensor, "a b"], left: _End, right: _End) -> Float[Tensor, "a b"]:
    """The same from logits, whose exponentials may be too large or too small for their type."""
    from_left = (logits - left[0][:, None]).exp_().mul_(left[1][:, None])
    return from_left.addcmul_((logits - right[0]).exp_(), right[1].expand_as(logits))


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """IoU sampling (eq. 5): the proposals that are exemplars of their class before discovery.

    Jinhwan Seo, Wonho Bae, Danica J. Sutherland, Junhyug Noh and Daijin Kim: Object Discovery via Contrastive Learning
    for Weakly Supervised Object Detection, ECCV 2022. https://arxiv.org/abs/2208.07576

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(sampling=Sampling(iou_threshold=0.6)))
        >>> config.criterion.sampling
        Sampling(iou=True, iou_threshold=0.6)
    """

    iou: bool = True
    """Also sample the neighbours of the top proposals; if off, only the top proposals."""
    iou_threshold: Annotated[float, Field(gt=0, le=1)] = 0.5
    """tau_IoU: minimum IoU of a neighbour with a top proposal."""

    def __call__(self, inputs: LabelerInput, augment_rois: AugmentRois) -> Exemplars:
        """S (eq. 5-8): sampled proposals and their augmented copies over the whole batch, with their classes."""
        rows, cls = self._rows(inputs)
        copies = augment_rois(rows)
        repeats = 1 + copies.embed.shape[0]
        own = torch.cat([inputs.embed[rows][None], copies.embed]).flatten(0, 1)  # (repeats * m, D)
        probs = [
            torch.cat([p[rows, cls][None], v[:, torch.arange(len(rows)), cls]]).flatten()
            for p, v in zip(inputs.probs, copies.probs, strict=True)
        ]
        return Exemplars(
            own,
            cls.repeat(repeats),
            instance_difficulty(inputs, rows, cls).repeat(repeats),
            rows.repeat(repeats),
            tuple(probs),
        )

    def _rows(self, inputs: LabelerInput) -> tuple[Int[Tensor, " m"], Int[Tensor, " m"]]:
        tops = [oicr.argmax_pseudo_boxes(inputs, stage) for stage in range(len(inputs.probs))]
        images, spans = inputs.proposals.image_ids()[tops[0].rows].tolist(), inputs.proposals.spans()
        # image, class and top rows; every stage has the same (image, class) pairs in the same order
        found = [(images[i], c, torch.stack([t.rows[i] for t in tops])) for i, c in enumerate(tops[0].cls.tolist())]
        if inputs.side_info.reviewed is not None:
            found = _with_reviewed_boxes(found, spans, inputs.side_info.reviewed)
        rows, classes = [tops[0].rows.new_zeros(0)], [tops[0].rows.new_zeros(0)]
        for image, c, own in found:
            span, near = spans[image], own.unique()
            if self.iou:
                inside = inputs.proposals.boxes[span.start : span.stop]
                near = discovery.neighbours(inside, own - span.start, self.iou_threshold) + span.start
            rows.append(near)
            classes.append(torch.full_like(near, c))
        return torch.cat(rows), torch.cat(classes)


_Tops = tuple[int, int, Int[Tensor, " k"]]
"""An image, one of its classes, and the proposals whose neighbours show it."""


def _with_reviewed_boxes(found: Sequence[_Tops], spans: Sequence[range], codes: Int[Tensor, " R"]) -> list[_Tops]:
    """The top proposals of photos that are not reviewed, then the boxes of each class of those that are."""
    kept = [one for one in found if codes[one[2][0]] == TAGS_ONLY]
    for image, span in enumerate(spans):
        own = codes[span.start : span.stop]
        boxed = own[own >= 0].unique().tolist()
        kept += [(image, c, (own == c).nonzero().flatten() + span.start) for c in boxed]
    return kept


def instance_difficulty(inputs: LabelerInput, rows: Int[Tensor, " m"], cls: Int[Tensor, " m"]) -> Float[Tensor, " m"]:
    """omega (eq. 12): a proposal's MIL score over the sum of its image's, for the class of the exemplar."""
    mil = inputs.probs[0]
    sums = torch.stack([x.sum(dim=0) for x in inputs.proposals.split(mil)])  # (N, C)
    return mil[rows, cls] / sums[inputs.proposals.image_ids()[rows], cls].clamp(min=torch.finfo(mil.dtype).tiny)


def relative_difficulty(omega: Float[Tensor, " M"], group: Int[Tensor, " M"]) -> Float[Tensor, " M"]:
    """omega divided by its mean over the exemplars of each group, so that this mean is 1; zeros stay zero.

    >>> relative_difficulty(torch.tensor([0.1, 0.3, 0.2]), torch.tensor([0, 0, 5]))
    tensor([0.5000, 1.5000, 1.0000])
    """
    _, group = group.unique(return_inverse=True)
    members = torch.bincount(group)
    means = omega.new_zeros(len(members)).index_add(0, group, omega) / members
    return omega / means.clamp(min=torch.finfo(omega.dtype).tiny)[group]


def no_exemplars(embed: Float[Tensor, "R D"]) -> Exemplars:
    """The empty set S."""
    none = torch.zeros(0, dtype=torch.long, device=embed.device)
    return Exemplars(embed[:0], none, embed.new_zeros(0), none)


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """The weakly supervised contrastive loss (eq. 11-12).

    Jinhwan Seo, Wonho Bae, Danica J. Sutherland, Junhyug Noh and Daijin Kim: Object Discovery via Contrastive Learning
    for Weakly Supervised Object Detection, ECCV 2022. https://arxiv.org/abs/2208.07576

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(contrast=Contrast(weight=0.01)))
        >>> config.criterion.contrast.temperature
        0.2
    """

    enabled: bool = True
    weight: Annotated[float, Field(ge=0)] = 0.03
    """lambda; 0.01 on COCO in the paper."""
    temperature: Annotated[float, Field(gt=0)] = 0.2
    """epsilon."""
    positives: Literal["outside", "inside"] = "outside"
    """Where the positives are averaged: outside the logarithm (the paper) or inside it (its published code)."""
    omega: Literal["share", "batch", "pair"] = "share"
    """Weight of an exemplar: eq. 12, its share of its photo's score, which is a few thousandths among many proposals;
    or that divided by its mean over the batch, or over each (photo, class) pair, so that the mean weight is 1."""

    def __call__(self, exemplars: Exemplars, images: Int[Tensor, " R"]) -> Float[Tensor, ""]:
        """The unweighted loss over S^U; ``images`` are the photos of the proposals."""
        return wscl(
            exemplars.embed,
            exemplars.cls,
            exemplars.weight if self.omega == "share" else self._relative(exemplars, images),
            temperature=self.temperature,
            positives=self.positives,
        )

    def _relative(self, exemplars: Exemplars, images: Int[Tensor, " R"]) -> Float[Tensor, " M"]:
        """omega divided by its mean over the batch or over each pair."""
        if self.omega == "batch":
            return relative_difficulty(exemplars.weight, torch.zeros_like(exemplars.cls))
        return relative_difficulty(exemplars.weight, images[exemplars.rows] * (1 << 31) + exemplars.cls)


def with_discovered(inputs: LabelerInput, labeling: Labeling) -> Exemplars:
    """S^U: the sampled exemplars and, once each, the discovered proposals that were not among them."""
    s = inputs.exemplars
    rows = torch.cat([s.rows, *(stage.pseudo_boxes.rows for stage in labeling.stages)])
    cls = torch.cat([s.cls, *(stage.pseudo_boxes.cls for stage in labeling.stages)])
    new = first_occurrence(rows, cls, inputs.tags.shape[1])
    new = new[new >= len(s)]
    return Exemplars(
        torch.cat([s.embed, inputs.embed[rows[new]]]),
        torch.cat([s.cls, cls[new]]),
        torch.cat([s.weight, instance_difficulty(inputs, rows[new], cls[new])]),
        torch.cat([s.rows, rows[new]]),
    )


def first_occurrence(rows: Int[Tensor, " a"], cls: Int[Tensor, " a"], num_classes: int) -> Int[Tensor, " b"]:
    """Positions at which a (proposal, class) pair appears for the first time, in order."""
    keys = rows * num_classes + cls
    _, inverse = keys.unique(return_inverse=True)
    first = torch.full((int(inverse.max()) + 1 if len(keys) else 0,), len(keys), device=rows.device)
    first = first.scatter_reduce(0, inverse, torch.arange(len(keys), device=rows.device), reduce="amin")
    return first.sort().values


def contrast_share(neck: Sequence[nn.Parameter], contrast: Sequence[Tensor | None]) -> float | None:
    """||g|| / ||G - g||: gradient g of lambda L_wscl against that of all other losses, given G in ``grad`` of the neck.

    None if nothing in the neck is trained, or no other loss has a gradient there.
    """
    pairs = [(p.grad, g) for p, g in zip(neck, contrast, strict=True) if p.grad is not None and g is not None]
    others = [p.grad for p, g in zip(neck, contrast, strict=True) if p.grad is not None and g is None]
    own = get_total_norm([g for _, g in pairs]).item()
    rest = get_total_norm([*(total - g for total, g in pairs), *others]).item()
    return own / rest if rest > 0 and math.isfinite(own / rest) else None
