"""Detect objects in photos with an ONNX file of `tag2box export`; needs onnxruntime and OpenCV, not tag2box.

python run_onnx.py model.onnx photo.jpg ... [--min-score 0.3] [--draw FOLDER]
"""

import argparse
import json
from pathlib import Path

import cv2
import numpy as np
import onnxruntime


def letterbox(photo, about):
    """The input of the network: the photo resized, at the top left of a canvas; and its height and width there."""
    height, width = photo.shape[:2]
    if about["size"]:
        scale = min(about["size"][0] / height, about["size"][1] / width)
    else:
        scale = min(about["short"] / min(height, width), about["long_max"] / max(height, width))
    h, w = max(1, round(height * scale)), max(1, round(width * scale))
    step, least = about["multiple"], about["least_side"]
    room = about["size"] or [max(least, -(-side // step) * step) for side in (h, w)]
    canvas = np.full((*room, 3), about["colour"], np.uint8)
    how = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
    canvas[:h, :w] = cv2.resize(cv2.cvtColor(photo, cv2.COLOR_BGR2RGB), (w, h), interpolation=how)
    return canvas.transpose(2, 0, 1)[None], (h, w)


def detect(session, about, photo, min_score):
    """Boxes (xyxy, pixels of the photo), scores and class numbers, best first."""
    pixels, (h, w) = letterbox(photo, about)
    boxes, scores, labels = (output[0] for output in session.run(None, {"images": pixels}))
    height, width = photo.shape[:2]
    scales, limits = np.array([width / w, height / h] * 2), np.array([width, height] * 2)
    boxes = np.clip(boxes * scales, 0, limits)
    kept = (scores >= min_score) & (labels >= 0) & (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
    return boxes[kept], scores[kept], labels[kept]


def main():
    """Print the boxes of each photo as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("photos", nargs="+")
    parser.add_argument("--min-score", type=float, default=0.3)
    parser.add_argument("--draw", type=Path, help="folder for pictures with the boxes drawn")
    args = parser.parse_args()
    session = onnxruntime.InferenceSession(args.model, providers=["CPUExecutionProvider"])
    texts = session.get_modelmeta().custom_metadata_map
    names = ("classes", "size", "short", "long_max", "multiple", "least_side", "colour")
    about = {name: json.loads(texts[name]) for name in names}
    for path in args.photos:
        photo = cv2.imread(path)
        if photo is None:
            raise SystemExit(f"{path}: not readable as a photo")
        rows = []
        for box, score, label in zip(*detect(session, about, photo, args.min_score), strict=True):
            rows.append({"class": about["classes"][label], "score": float(score), "box": box.tolist()})
            first, last = box.round().astype(int).reshape(2, 2).tolist()
            cv2.rectangle(photo, first, last, (0, 0, 255), 2)
            cv2.putText(photo, about["classes"][label], first, cv2.FONT_HERSHEY_SIMPLEX, 0.6, (0, 0, 255), 2)
        print(json.dumps({"photo": path, "boxes": rows}))
        if args.draw:
            args.draw.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(args.draw / Path(path).name), photo)


if __name__ == "__main__":
    main()
