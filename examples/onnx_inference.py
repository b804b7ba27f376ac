"""Boxes of photos by an ONNX file of `tag2box export`, with onnxruntime and OpenCV alone; one line of JSON per photo.

python run_onnx.py model.onnx 0.3 photo.jpg ...   (0.3: least score)
"""

import json
import sys

import cv2
import numpy as np
import onnxruntime


def main(model: str, min_score: str, *photos: str) -> None:
    """Print the boxes of photos."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map  # values are JSON
    keys = ("size", "classes", "colour", "short", "long_max", "multiple", "least_side")
    size, classes, colour, short, long_max, step, least = (json.loads(about[key]) for key in keys)
    for path in photos:
        if (photo := cv2.imread(path)) is None:
            sys.exit(f"{path}: not readable as a photo")
        height, width = photo.shape[:2]
        free = (short / min(height, width), long_max / max(height, width))
        scale = min((size[0] / height, size[1] / width) if size else free)  # with a fixed input, as large as fits
        h, w = max(1, round(height * scale)), max(1, round(width * scale))
        room = size or [max(least, -(-max(h, w) // step) * step)] * 2
        canvas = np.full((*room, 3), colour, np.uint8)  # the photo is at its top left, in RGB
        how = cv2.INTER_AREA if scale < 1 else cv2.INTER_LINEAR
        canvas[:h, :w] = cv2.resize(photo, (w, h), interpolation=how)[..., ::-1]
        boxes, scores, labels = (out[0] for out in session.run(None, {"images": canvas.transpose(2, 0, 1)[None]}))
        boxes = np.clip(boxes * np.array([width / w, height / h] * 2), 0, [width, height] * 2)  # pixels of the photo
        kept = (scores >= float(min_score)) & (labels >= 0) & (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
        rows = zip(boxes[kept].tolist(), scores[kept].tolist(), labels[kept].tolist(), strict=True)
        found = [{"class": classes[label], "score": score, "box": box} for box, score, label in rows]
        print(json.dumps({"photo": path, "boxes": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
