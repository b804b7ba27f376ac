"""OD-WSCL: object discovery and the contrastive loss, each on and off (the paper's table 3a).

    python examples/contrastive.py tags.csv photos runs/contrastive

Discovery finds further objects by their similarity to exemplars of all photos; the loss learns the embedding in which
they are compared. With both off it is OICR+.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import tag2box
from tag2box import recipes
from tag2box.training.events import read_events


def main(tags: Path, photos: Path, out: Path, iterations: int = 200) -> dict[str, set[str]]:
    """Train the four rows; gives the names of the loss terms of each."""
    base = tag2box.RECIPES["photos-frozen"]()
    base = replace(
        base,
        data=tag2box.Data(tags=tags, photos=photos, proposals=out / "proposals"),
        feature_cache=out / "maps",
        plan=replace(base.plan, iterations=iterations),
    )
    terms = {}
    for discovery in (False, True):
        for contrast in (False, True):
            config = recipes.table_3a(base, discovery=discovery, contrast=contrast)
            run = out / f"discovery-{discovery}-contrast-{contrast}"
            tag2box.train(config, run)
            events = list(read_events(run))
            step: Any = [event for event in events if event["event"] == "step"][-1]
            pseudo: Any = [event for event in events if event["event"] == "pseudo"][-1]
            terms[config.name] = {name for name, value in step["losses"].items() if value}
            print(
                f"{config.name}: {pseudo['boxes_per_class'][-1]:.2f} boxes per tag, losses {sorted(terms[config.name])}"
            )
    return terms


if __name__ == "__main__":  # proposals are computed by worker processes, which import this file
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:5]))
