"""From nothing to boxes in Python: draw a few scenes, train on their tags, detect in photos never seen.

    python examples/train_from_python.py runs/example       # a folder that does not exist yet

It takes a minute or two. Four test photos prove nothing: this shows the calls, not what the method can do.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import tag2box
from tag2box.data.scenes import Scenes


def main(out: Path, iterations: int = 60) -> None:
    """Scenes, training, detection and evaluation, all inside ``out``."""
    world = Scenes(train=24, test=4, classes=("car", "fish", "flower"), most_classes=2)
    world.write(out / "scenes")  # photos, tags.csv and, for evaluation only, truth.json

    config = tag2box.RECIPES["scenes"]()
    config = replace(
        config,
        data=replace(config.data, photos=out / "scenes/train/photos", tags=out / "scenes/train/tags.csv"),
        proposals=replace(config.proposals, max_boxes=60),
        plan=replace(config.plan, iterations=iterations),
    )
    tag2box.train(config, out / "run")

    found = tag2box.detect(
        out / "run", [out / "scenes/test/photos"], out / "boxes.json", draw=out / "drawn", min_score=0.1
    )
    for photo, boxes in found.items():
        print(f"{photo}: {len(boxes)} boxes, best score {max(boxes.scores.tolist(), default=0):.2f}")

    result = tag2box.evaluate(out / "scenes/test/truth.json", out / "boxes.json", metrics=["voc07", "challenges"])
    print(result.to_json())
    print(f"pictures: {out / 'drawn'}")


if __name__ == "__main__":  # proposals are made by several processes, which import this file
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
