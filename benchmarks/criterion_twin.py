"""Reference of the OD-WSCL criterion written with loops, one proposal at a time (docs/method.md).

Slow on purpose: tests compare losses and gradients with it, ``criterion.py`` times it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tag2box.types import AugmentRois, Proposals, StageScores

Tops = dict[tuple[int, int, int], int]  # (image, stage, class) -> row


@dataclass(frozen=True)
class Exemplar:
    """One member of S."""

    z: Tensor
    cls: int
    row: int
    weight: Tensor


@dataclass(frozen=True)
class PseudoBox:
    """One pseudo box."""

    row: int
    cls: int
    score: Tensor


def overlap(a: Sequence[float], b: Sequence[float]) -> float:
    """IoU of two boxes."""
    across = max(min(a[2], b[2]) - max(a[0], b[0]), 0.0)
    down = max(min(a[3], b[3]) - max(a[1], b[1]), 0.0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - across * down
    return across * down / union if union > 0 else 0.0


def total_loss(
    scores: StageScores,
    z: Tensor,
    *,
    proposals: Proposals,
    tags: Tensor,
    views: AugmentRois,
    positives: str = "outside",
    rule: str = "paper",
) -> Tensor:
    """L = L_mil + L_cls + L_reg + 0.03 L_wscl, with the settings of ``Criterion()`` and a rule of discovery."""
    boxes = proposals.boxes.tolist()
    mil, loss = mil_scores_and_loss(scores, proposals, tags)
    teachers = [mil.detach(), *(logits.detach().softmax(dim=1)[:, : tags.shape[1]] for logits in scores.refine[:-1])]
    tops = find_tops(teachers, proposals, tags)
    sampled = sample(z, teachers[0], tops, boxes, proposals=proposals, tags=tags, views=views)
    members = list(sampled)
    held = {(e.row, e.cls) for e in sampled}
    for stage, teacher in enumerate(teachers):
        pseudo_boxes: dict[int, list[PseudoBox]] = {}
        for image, span in enumerate(proposals.spans()):
            key = (image, stage)
            pseudo_boxes[image] = discover(z.detach(), teacher, sampled, tops, boxes, span=span, key=key, rule=rule)
            for pseudo_box in pseudo_boxes[image]:
                if (pseudo_box.row, pseudo_box.cls) not in held:
                    held.add((pseudo_box.row, pseudo_box.cls))
                    omega = difficulty(teachers[0], span, pseudo_box.row, pseudo_box.cls)
                    members.append(Exemplar(z[pseudo_box.row], pseudo_box.cls, pseudo_box.row, omega))
        factor = 3.0 if stage == 0 else 1.0
        deltas = scores.deltas[stage] if scores.deltas else None
        loss = loss + factor * stage_loss(scores.refine[stage], deltas, pseudo_boxes, boxes, proposals)
    return loss + 0.03 * contrast(members, positives)


def mil_scores_and_loss(scores: StageScores, proposals: Proposals, tags: Tensor) -> tuple[Tensor, Tensor]:
    """X of all proposals, and the binary cross-entropy of its sums over proposals."""
    parts, loss = [], scores.mil_cls.new_zeros(())
    for image, span in enumerate(proposals.spans()):
        rows = slice(span.start, span.stop)
        x = scores.mil_cls[rows].softmax(dim=1) * scores.mil_det[rows].softmax(dim=0)
        parts.append(x)
        for c in range(tags.shape[1] if len(span) else 0):
            phi = x[:, c].sum().clamp(1e-6, 1 - 1e-6)
            loss = loss - (phi if tags[image, c] else 1 - phi).log() / tags.shape[1]
    return torch.cat(parts), loss / len(proposals.sizes)


def find_tops(teachers: list[Tensor], proposals: Proposals, tags: Tensor) -> Tops:
    """Top-scoring proposal per present class; a proposal is the top of at most one class."""
    tops: Tops = {}
    for stage, teacher in enumerate(teachers):
        for image, span in enumerate(proposals.spans()):
            taken: set[int] = set()
            for c in tags[image].nonzero().flatten().tolist():
                column = teacher[span.start : span.stop, c].tolist()
                free = [i for i in range(len(span)) if i not in taken]
                if free:
                    best = max(free, key=lambda i: (column[i], -i))
                    taken.add(best)
                    tops[image, stage, c] = span.start + best
    return tops


def difficulty(mil: Tensor, span: range, row: int, c: int) -> Tensor:
    """omega: share of a proposal in its image's score."""
    return mil[row, c] / mil[span.start : span.stop, c].sum()


def sample(
    z: Tensor,
    mil: Tensor,
    tops: Tops,
    boxes: list[list[float]],
    *,
    proposals: Proposals,
    tags: Tensor,
    views: AugmentRois,
) -> list[Exemplar]:
    """S: proposals with IoU >= 0.5 to a teacher's top, each with its augmented copies."""
    rows, classes, weights = [], [], []
    for image, span in enumerate(proposals.spans()):
        for c in tags[image].nonzero().flatten().tolist() if len(span) else []:
            best = [row for (i, _, k), row in tops.items() if (i, k) == (image, c)]
            for row in span:
                if row in best or any(overlap(boxes[row], boxes[top]) >= 0.5 for top in best):
                    rows.append(row)
                    classes.append(c)
                    weights.append(difficulty(mil, span, row, c))
    copies = views(torch.tensor(rows, dtype=torch.long)).embed
    kinds = [z[rows], *copies]
    return [
        Exemplar(kind[i], c, row, w)
        for kind in kinds
        for i, (row, c, w) in enumerate(zip(rows, classes, weights, strict=True))
    ]


def discover(
    z: Tensor,
    teacher: Tensor,
    sampled: list[Exemplar],
    tops: Tops,
    boxes: list[list[float]],
    *,
    span: range,
    key: tuple[int, int],
    rule: str,
) -> list[PseudoBox]:
    """Pseudo boxes of one image and stage: more similar to the top than the exemplars' mean, and by a rule."""
    mine = {c: row for (image, stage, c), row in tops.items() if (image, stage) == key}
    pseudo_boxes = []
    for c, top in mine.items():
        near = [float(e.z.detach() @ z[top]) for e in sampled if e.cls == c]
        tau = sum(near) / len(near)
        to_tops = {k: (z[span.start : span.stop] @ z[row]).tolist() for k, row in mine.items()}
        candidates = [
            row
            for i, row in enumerate(span)
            if row != top and is_candidate(to_tops[c][i], tau, [to_tops[k][i] for k in mine if k != c], rule)
        ]
        score = teacher[:, c].tolist()
        kept = [top]
        for row in sorted(candidates, key=lambda row: (-score[row], row)):
            if all(overlap(boxes[row], boxes[k]) <= 0.1 for k in kept):
                kept.append(row)
        pseudo_boxes += [PseudoBox(row, c, teacher[row, c]) for row in kept]
    return pseudo_boxes


def is_candidate(similarity: float, tau: float, others: list[float], rule: str) -> bool:
    """Whether one proposal is a candidate by a rule of discovery."""
    if rule == "published":
        return similarity >= tau or any(other <= 0 for other in others)
    return similarity > tau and (rule == "paper" or all(similarity > other for other in others))


def stage_loss(
    logits: Tensor,
    deltas: Tensor | None,
    pseudo_boxes: dict[int, list[PseudoBox]],
    boxes: list[list[float]],
    proposals: Proposals,
) -> Tensor:
    """L_cls and L_reg of one stage: the target of a proposal is the pseudo box with the highest IoU."""
    loss = logits.new_zeros(())
    for image, span in enumerate(proposals.spans()):
        for row in span if pseudo_boxes[image] else []:
            near = [overlap(boxes[row], boxes[pseudo_box.row]) for pseudo_box in pseudo_boxes[image]]
            best = near.index(max(near))
            pseudo_box = pseudo_boxes[image][best]
            target = pseudo_box.cls if near[best] > 0.5 else logits.shape[1] - 1
            term = -logits[row].log_softmax(dim=0)[target]
            if deltas is not None and near[best] > 0.5:
                wanted = proposals.boxes.new_tensor(code(boxes[pseudo_box.row], boxes[row]))
                own = deltas[row, 4 * pseudo_box.cls : 4 * pseudo_box.cls + 4]
                term = term + functional.smooth_l1_loss(own, wanted, reduction="sum")
            loss = loss + pseudo_box.score * term / len(span)
    return loss / len(proposals.sizes)


def code(target: Sequence[float], box: Sequence[float]) -> list[float]:
    """The deltas that move ``box`` onto ``target``."""
    size = [box[2] - box[0], box[3] - box[1]]
    wanted = [target[2] - target[0], target[3] - target[1]]
    shift = [(target[i] + wanted[i] / 2 - box[i] - size[i] / 2) / size[i] for i in (0, 1)]
    grow = [float(torch.tensor(wanted[i] / size[i], dtype=torch.float64).log()) for i in (0, 1)]
    return [10 * shift[0], 10 * shift[1], 5 * grow[0], 5 * grow[1]]


def contrast(members: list[Exemplar], positives: str) -> Tensor:
    """L_wscl over S^U, one exemplar at a time; recomputed in backward, so that not all pairs are stored."""
    if not members:
        return torch.zeros(())
    z = torch.stack([e.z for e in members])
    cls = torch.tensor([e.cls for e in members])
    loss = z.new_zeros(())
    for i, member in enumerate(members):
        term = checkpoint(contrast_of, z, cls, i, positives, use_reentrant=False)
        loss = loss + member.weight * term
    return loss / len(members)


def contrast_of(z: Tensor, cls: Tensor, i: int, positives: str) -> Tensor:
    """L_wscl of exemplar i (eq. 11), or the published code's variant of it."""
    logits = z @ z[i] / 0.2
    others = torch.arange(len(cls)) != i
    positive_rows = others & (cls == cls[i])
    if not positive_rows.any():
        return z.new_zeros(())
    inner = logits[positive_rows].mean() if positives == "outside" else logits[positive_rows].logsumexp(dim=0)
    return logits[others].logsumexp(dim=0) - inner
