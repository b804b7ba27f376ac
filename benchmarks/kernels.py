"""Kernels and slow reference implementations: RoIPool, RoIAlign, class-wise NMS, pairwise IoU, contrastive loss.

    python benchmarks/kernels.py --out runs/kernels.json

Every figure is the min, median and max of several repetitions, in CPU seconds (summed over threads) and wall seconds.
``curves`` holds growth against RoIs, boxes and exemplars. Peak memory is Linux's high-water mark of a fresh process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from measuring import Row, arguments, in_fresh_process, machine, measure, peak_mb, set_threads
from tag2box.io import write_json
from tag2box.methods.wscl import wscl
from tag2box.ops import roi
from tag2box.ops.boxes import class_nms, iou
from tag2box.ops.roi import roi_align, roi_pool

WIDTH, HEIGHT = 1000, 688  # of the photo; the feature map is 125 x 86


# ---------------------------------------------------------------- inputs


def photo_boxes(count: int, seed: int = 0) -> Tensor:
    """Boxes of all sizes in one photo; half of the sides are below 40 % of the photo's."""
    g = torch.Generator().manual_seed(seed)
    photo = torch.tensor([WIDTH, HEIGHT], dtype=torch.float32)
    side = photo * (0.06 + 0.9 * torch.rand(count, 2, generator=g) ** 1.5)
    corner = (photo - side) * torch.rand(count, 2, generator=g)
    return torch.cat([corner, corner + side], dim=1)


def exemplars(count: int, classes: int = 8, dim: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """Unit embeddings around a centre per class, their classes and weights."""
    torch.manual_seed(0)
    cls = torch.arange(count) % classes
    embed = functional.normalize(torch.randn(classes, dim)[cls] + torch.randn(count, dim), dim=1)
    return embed.requires_grad_(), cls, torch.rand(count)


# ---------------------------------------------------------------- references


def adaptive_pool_loop(features: Tensor, boxes: Tensor, grad: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Adaptive max-pooling box by box, and the gradient of the feature map if ``grad`` is given.

    Its bins have integer borders; those of RoIPool are computed in floating point and may exceed the map.
    """
    cells = ((boxes - torch.tensor([0.0, 0.0, 1.0, 1.0])) / 8 + 0.5).floor().long()
    pooled, total = [], torch.zeros_like(features)
    for i, (x1, y1, x2, y2) in enumerate(cells.tolist()):
        crop = features[..., y1 : y2 + 1, x1 : x2 + 1].detach().requires_grad_(grad is not None)
        pooled.append(functional.adaptive_max_pool2d(crop, 7))
        if grad is not None:
            total[..., y1 : y2 + 1, x1 : x2 + 1] += torch.autograd.grad(pooled[-1], crop, grad[i : i + 1])[0]
    return torch.cat(pooled).detach(), total


def grid_sample_loop(features: Tensor, boxes: Tensor, *, size: int, scale: float) -> Tensor:
    """RoIAlign by torch's ``grid_sample``, box by box."""
    extent = torch.tensor([features.shape[3], features.shape[2]]) / scale
    low, high = boxes[:, :2] / extent, boxes[:, 2:] / extent
    theta = torch.cat([torch.diag_embed(high - low), (high + low - 1)[:, :, None]], dim=2)
    grids = functional.affine_grid(theta, [len(boxes), 1, size, size], align_corners=False)
    sampled = (functional.grid_sample(features, g[None], padding_mode="border", align_corners=False) for g in grids)
    return torch.cat(list(sampled))


def greedy_loop(boxes: Tensor, scores: Tensor, labels: Tensor, threshold: float) -> list[int]:
    """NMS, one box at a time."""
    kept: dict[int, list[int]] = {}
    order = scores.argsort(descending=True, stable=True).tolist()
    found = []
    for i in order:
        mine = kept.setdefault(int(labels[i]), [])
        if not (iou(boxes[i : i + 1], boxes[mine]) > threshold).any():
            mine.append(i)
            found.append(i)
    return found


def iou_loop(a: Tensor, b: Tensor) -> Tensor:
    """Pairwise IoU, a row at a time."""
    return torch.cat([iou(row[None], b) for row in a])


def wscl_at_once(embed: Tensor, cls: Tensor, weight: Tensor) -> Tensor:
    """The loss of eq. 11-12 with all pairs in one matrix."""
    logits = embed @ embed.T / 0.2
    logits = logits.masked_fill(torch.eye(len(cls), dtype=torch.bool), -torch.inf)
    is_positive = (cls[:, None] == cls[None, :]).fill_diagonal_(False)
    mean = torch.where(is_positive, logits, 0.0).sum(dim=1) / is_positive.sum(dim=1).clamp(min=1)
    return ((logits.logsumexp(dim=1) - mean) * weight).sum() / len(cls)


# ---------------------------------------------------------------- figures


def compare(name: str, case: Row, ours: Callable[[], object], twin: tuple[str, Callable[[], object]]) -> Row:
    """One row of the table: our time and that of the reference, which runs once."""
    slow = {"name": twin[0], **measure(twin[1], 1, warm=False)}
    fast = measure(ours, case["repeats"])
    print(f"{name}: {fast['cpu']['min']:.3f} CPU s; {twin[0]}: {slow['cpu']['min']:.3f}", flush=True)
    return {"name": name, **case, "ours": fast, "twin": slow}


def our_pool(features: Tensor, boxes: Tensor, grad: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """RoIPool 7 x 7 at stride 8 and, if ``grad`` is given, the gradient of the feature map."""
    leaf = features.detach().requires_grad_(grad is not None)
    pooled = roi_pool(leaf, boxes, torch.zeros(len(boxes), dtype=torch.long), size=7, scale=1 / 8)
    return pooled, torch.zeros(()) if grad is None else torch.autograd.grad(pooled, leaf, grad)[0]


def time_roi_pool(repeats: int, rois: int, channels: int) -> list[Row]:
    features, boxes = torch.randn(1, channels, 86, 125), photo_boxes(rois)
    grad = torch.randn(rois, channels, 7, 7)
    case = {"repeats": repeats, "rois": rois, "channels": channels, "map": [86, 125], "grid": 7}
    rows = []
    for name, args in (
        ("RoIPool forward", (features, boxes)),
        ("RoIPool forward + backward", (features, boxes, grad)),
    ):
        twin = ("loop of adaptive max-pools", partial(adaptive_pool_loop, *args))
        rows.append(compare(name, case, partial(our_pool, *args), twin))
    ours = our_pool(features, boxes, grad)
    rows[0]["equal_share_with_the_loop"] = float((ours[0] == adaptive_pool_loop(features, boxes)[0]).float().mean())
    with plain_torch():
        rows[1]["plain_torch"] = measure(lambda: our_pool(features, boxes, grad), 1, warm=False)
        plain = our_pool(features, boxes, grad)
    rows[1]["equal_to_plain_torch"] = torch.equal(ours[0], plain[0])
    rows[1]["largest_difference_of_gradients"] = float((ours[1] - plain[1]).abs().max())
    return rows


@contextmanager
def plain_torch() -> Iterator[None]:
    """Disable the compiled kernel inside the block."""
    threshold = roi._MIN_COMPILED_WINDOWS
    roi._MIN_COMPILED_WINDOWS = 1 << 62
    try:
        yield
    finally:
        roi._MIN_COMPILED_WINDOWS = threshold


def time_roi_align(repeats: int, rois: int) -> Row:
    features, boxes = torch.randn(1, 112, 43, 63), photo_boxes(rois)

    def ours() -> Tensor:
        return roi_align(features, boxes, torch.zeros(rois, dtype=torch.long), size=14, scale=1 / 16)

    def loop() -> Tensor:
        return grid_sample_loop(features, boxes, size=14, scale=1 / 16)

    case = {"repeats": repeats, "rois": rois, "channels": 112, "map": [43, 63], "grid": 14}
    row = compare("RoIAlign forward", case, ours, ("loop of grid_sample", loop))
    return row | {"largest_difference": float((ours() - loop()).abs().max())}


def class_boxes(classes: int, each: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same proposals in every class with noise, as after box regression; scores and labels."""
    g = torch.Generator().manual_seed(1)
    boxes = photo_boxes(each).repeat(classes, 1) + 10 * torch.randn(classes * each, 4, generator=g)
    boxes[:, 2:] = torch.maximum(boxes[:, 2:], boxes[:, :2] + 4)
    return boxes, torch.rand(len(boxes), generator=g), torch.arange(classes).repeat_interleave(each)


def time_nms(repeats: int, classes: int, each: int, threshold: float) -> Row:
    case = {"repeats": repeats, "classes": classes, "boxes_each": each, "iou": threshold}
    inputs = class_boxes(classes, each)
    twin = ("one box at a time", lambda: greedy_loop(*inputs, threshold))
    row = compare(f"NMS at {threshold}", case, lambda: class_nms(*inputs, threshold), twin)
    kept = class_nms(*inputs, threshold).tolist()
    return row | {"kept": len(kept), "same_kept": kept == greedy_loop(*inputs, threshold)}


def time_iou(repeats: int, count: int) -> Row:
    boxes = photo_boxes(count)
    case = {"repeats": repeats, "boxes": count}
    row = compare(
        "IoU of all pairs", case, lambda: iou(boxes, boxes), ("a row at a time", lambda: iou_loop(boxes, boxes))
    )
    return row | {"equal": torch.equal(iou(boxes, boxes), iou_loop(boxes, boxes))}


def step_of(loss: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    (grad,) = torch.autograd.grad(loss(*inputs), inputs[0])
    return grad


def in_blocks(embed: Tensor, cls: Tensor, weight: Tensor) -> Tensor:
    return wscl(embed, cls, weight, temperature=0.2)


def time_wscl(repeats: int, count: int) -> Row:
    inputs = exemplars(count)
    twin = ("all pairs at once", lambda: step_of(wscl_at_once, inputs))
    row = compare(
        "WSCL forward + backward", {"repeats": repeats, "exemplars": count}, lambda: step_of(in_blocks, inputs), twin
    )
    a, b = step_of(in_blocks, inputs), step_of(wscl_at_once, inputs)
    row["relative_difference"] = float((a - b).norm() / b.norm())
    row["ours"]["peak_mb"] = in_fresh_process(peak_of_wscl, "blocks", count)
    row["twin"]["peak_mb"] = in_fresh_process(peak_of_wscl, "at once", count)
    return row


def peak_of_wscl(way: str, count: int) -> float:
    inputs = exemplars(count)
    step_of(in_blocks, exemplars(64))
    return peak_mb(lambda: step_of(in_blocks if way == "blocks" else wscl_at_once, inputs))


# ---------------------------------------------------------------- growth


def curves(repeats: int, share: int, channels: int) -> list[Row]:
    """Seconds against size, one row per point; for the contrastive loss also peak memory."""
    rows: list[Row] = []
    for count in (2000 // share, 4000 // share, 8000 // share, 16000 // share, 32000 // share):
        inputs = exemplars(count)
        point = measure(lambda: step_of(in_blocks, inputs), repeats)  # noqa: B023
        peak = in_fresh_process(peak_of_wscl, "blocks", count)
        rows.append({"kernel": "WSCL", "against": "exemplars", "x": count, **point, "peak_mb": peak})
    counts = [count // share for count in (250, 500, 1000, 2000, 4000)]
    for count in counts:
        inputs = class_boxes(20, count)
        point = measure(lambda: class_nms(*inputs, 0.4), repeats)  # noqa: B023
        rows.append({"kernel": "NMS", "against": "boxes of a class", "x": count, **point})
    for count in counts:
        features, grad = torch.randn(1, channels, 86, 125), torch.randn(count, channels, 7, 7)
        point = measure(partial(our_pool, features, photo_boxes(count), grad), repeats)
        rows.append({"kernel": "RoIPool", "against": "RoIs", "x": count, **point})
    return rows


def main() -> None:
    parser = arguments(__doc__, "kernels", repeats=5)
    parser.add_argument("--curves", action="store_true", help="also measure growth; takes minutes")
    args = parser.parse_args()
    set_threads(args.threads)
    share, channels = (50, 16) if args.small else (1, 512)
    facts = machine()
    rows = [
        *time_roi_pool(args.repeats, 2000 // share, channels),
        time_roi_align(args.repeats, 2000 // share),
        time_nms(args.repeats, 20, 2000 // share, 0.4),
        time_nms(args.repeats, 20, 2000 // share, 0.1),
        time_iou(args.repeats, 2000 // share),
        time_wscl(args.repeats, 15573 // share),
    ]
    write_json(
        args.out,
        {"machine": facts, "rows": rows, "curves": curves(args.repeats, share, channels) if args.curves else []},
    )


if __name__ == "__main__":
    main()
