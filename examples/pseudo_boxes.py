"""Pseudo labels: how OICR, PCL, MIST, OIM and SLV choose the boxes that the next stage is trained with.

    python examples/pseudo_boxes.py tags.csv photos runs/pseudo-boxes

All take the scores of one stage and give the labels of the next. OICR takes one box per tag; PCL cluster centres; MIST
all top proposals that hardly overlap; OIM similar ones in the photo; SLV a vote of all. Printed are boxes per tag.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import tag2box
from tag2box.systems import find_system
from tag2box.training.events import read_events


def main(tags: Path, photos: Path, out: Path, iterations: int = 200) -> dict[str, float]:
    """Train five systems; gives the mean number of pseudo boxes per tag in the last stage, at the end."""
    base = tag2box.RECIPES["photos-frozen"]()
    base = replace(
        base,
        data=tag2box.Data(tags=tags, photos=photos, proposals=out / "proposals"),
        feature_cache=out / "maps",
        plan=replace(base.plan, iterations=iterations),
    )
    found = {}
    for name in ("oicr", "pcl", "mist", "oim", "slv"):
        tag2box.train(find_system(name)(base), out / name)
        last: Any = [event for event in read_events(out / name) if event["event"] == "pseudo"][-1]
        found[name] = last["boxes_per_class"][-1]
        print(f"{name}: {found[name]:.2f} pseudo boxes per tag")
    return found


if __name__ == "__main__":  # proposals are computed by worker processes, which import this file
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:5]))
