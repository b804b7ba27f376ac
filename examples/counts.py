"""C-WSL: counts of objects beside the tags, as many pseudo boxes as there are objects.

    python examples/counts.py tags.csv photos runs/counts

The table has a column ``counts`` (``dog:2;ball:1``); a tag without a count counts as one. Without any it is OICR.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import tag2box
from tag2box.formats.datasets import read_tagged
from tag2box.formats.listing import DataSource
from tag2box.systems import find_system
from tag2box.training.events import read_events


def main(tags: Path, photos: Path, out: Path, iterations: int = 200) -> tuple[float, float]:
    """Train C-WSL; gives the mean count per tag, and the pseudo boxes per tag at the end."""
    tagged = read_tagged(DataSource(path=tags, photos=photos))
    if tagged.counts is None:
        raise SystemExit(f"{tags}: has no counts; see docs/datasets.md")
    given = tagged.counts[tagged.tags].clamp(min=1).float().mean().item()
    base = tag2box.RECIPES["photos-frozen"]()
    config = replace(
        base,
        data=tag2box.Data(tags=tags, photos=photos, proposals=out / "proposals"),
        plan=replace(base.plan, iterations=iterations),
    )
    tag2box.train(find_system("c-wsl")(config), out / "c-wsl")
    last: Any = [event for event in read_events(out / "c-wsl") if event["event"] == "pseudo"][-1]
    print(f"{given:.2f} objects per tag, {last['boxes_per_class'][-1]:.2f} pseudo boxes per tag")
    return given, float(last["boxes_per_class"][-1])


if __name__ == "__main__":  # proposals are computed by worker processes, which import this file
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:5]))
