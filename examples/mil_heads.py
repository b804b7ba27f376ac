"""MIL heads: WSDDN, C-MIL (bags that are split) and C-MIDN (two coupled heads), on the same photos.

    python examples/mil_heads.py tags.csv photos runs/mil-heads

What differs is how tags become scores of proposals: ``criterion.mil`` and, for C-MIDN, a second head. Printed is the
image-level loss at the end; losses of different heads cannot be compared with each other, only their course can.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import tag2box
from tag2box.systems import find_system
from tag2box.training.events import read_events


def main(tags: Path, photos: Path, out: Path, iterations: int = 200) -> dict[str, list[float]]:
    """Train three systems; gives the MIL loss of each logged step."""
    base = tag2box.RECIPES["photos-frozen"]()
    base = replace(
        base,
        data=tag2box.Data(tags=tags, photos=photos, proposals=out / "proposals"),  # computed once for all
        feature_cache=out / "maps",
        plan=replace(base.plan, iterations=iterations),
    )
    courses = {}
    for name in ("wsddn", "c-mil", "c-midn"):
        tag2box.train(find_system(name)(base), out / name)
        steps: list[Any] = [event for event in read_events(out / name) if event["event"] == "step"]
        courses[name] = [step["losses"]["mil"] for step in steps]
        print(f"{name}: {courses[name][0]:.3f} -> {courses[name][-1]:.3f}")
    return courses


if __name__ == "__main__":  # proposals are computed by worker processes, which import this file
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:5]))
