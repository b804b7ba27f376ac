"""COCO's twelve numbers, computed by faster-coco-eval, which agrees with the official evaluator."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from faster_coco_eval import COCO, COCOeval_faster

from tag2box.annotations import Detections, Truth
from tag2box.metrics.voc_ap import ObjectAreas


@dataclass(frozen=True, slots=True)
class CocoScores:
    """COCO's summary, in the official order; None if no object falls into the range."""

    AP: float | None = None
    AP50: float | None = None
    AP75: float | None = None
    APs: float | None = None
    APm: float | None = None
    APl: float | None = None
    AR1: float | None = None
    AR10: float | None = None
    AR100: float | None = None
    ARs: float | None = None
    ARm: float | None = None
    ARl: float | None = None


def coco_scores(truth: Truth, detections: Mapping[str, Detections], *, areas: ObjectAreas | None = None) -> CocoScores:
    """COCO bounding-box AP and AR (Lin et al., 2014).

    ``areas`` gives per image the area of each object, which makes it small, medium or large: COCO files contain areas
    of masks. Without it, the area of the box is used. Difficult objects are ignored like crowds, the only way the COCO
    evaluator has.
    """
    if not truth.ids:
        return CocoScores()
    run = COCOeval_faster(
        _truth_index(truth, areas or {}), _result_index(truth, detections), "bbox", print_function=_quiet
    )
    run.evaluate()
    run.accumulate()
    run.summarize()
    values = [float(value) for value in run.stats[: len(fields(CocoScores))]]
    return CocoScores(*(value if value >= 0 else None for value in values))


def _quiet(*_: object) -> None:
    """Replaces print."""


def _frame(truth: Truth) -> dict[str, list[dict[str, object]]]:
    return {
        "images": [
            {"id": number, "width": width, "height": height}
            for number, (width, height) in enumerate(truth.sizes, start=1)
        ],
        "categories": [{"id": number, "name": name} for number, name in enumerate(truth.classes, start=1)],
    }


def _xywh(box: list[float]) -> list[float]:
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]


def _truth_index(truth: Truth, areas: ObjectAreas) -> COCO:
    rows: list[dict[str, object]] = []
    for number, (image_id, objects) in enumerate(zip(truth.ids, truth.objects, strict=True), start=1):
        boxes = [_xywh(box) for box in objects.boxes.double().tolist()]
        sizes = areas[image_id].tolist() if image_id in areas else [box[2] * box[3] for box in boxes]
        ignored = (objects.difficult | objects.crowd).tolist()
        for box, label, size, ignore in zip(boxes, objects.labels.tolist(), sizes, ignored, strict=True):
            common = {"id": len(rows) + 1, "image_id": number, "category_id": label + 1}
            rows.append({**common, "bbox": box, "area": size, "iscrowd": int(ignore)})
    return COCO({**_frame(truth), "annotations": rows}, print_function=_quiet)


def _result_index(truth: Truth, detections: Mapping[str, Detections]) -> COCO:
    rows: list[dict[str, object]] = []
    for number, image_id in enumerate(truth.ids, start=1):
        found = detections.get(image_id, Detections.empty())
        columns = (found.boxes.double().tolist(), found.labels.tolist(), found.scores.double().tolist())
        for corners, label, score in zip(*columns, strict=True):
            box = _xywh(corners)
            common = {"id": len(rows) + 1, "image_id": number, "category_id": label + 1, "iscrowd": 0}
            rows.append({**common, "bbox": box, "area": box[2] * box[3], "score": score})
    return COCO({**_frame(truth), "annotations": rows}, print_function=_quiet)
