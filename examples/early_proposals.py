"""Proposals from a network: WSRPN ranks windows by responses of early layers, and drops half by their MIL scores.

    python examples/early_proposals.py tags.csv photos runs/wsrpn

No box was used to train that network: it knows classes of photos only.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import tag2box
from tag2box.systems import find_system
from tag2box.training.events import read_events


def main(tags: Path, photos: Path, out: Path, iterations: int = 200) -> dict[str, float]:
    """Train the system; gives the losses of its last logged step."""
    base = tag2box.RECIPES["photos-frozen"]()
    config = replace(
        base,
        data=tag2box.Data(tags=tags, photos=photos),
        plan=replace(base.plan, iterations=iterations),
    )
    config = find_system("wsrpn")(config)
    print(config.proposals, config.criterion.rescore, sep="\n")
    tag2box.train(config, out)
    step: Any = [event for event in read_events(out) if event["event"] == "step"][-1]
    print({name: round(value, 3) for name, value in step["losses"].items()})
    return dict(step["losses"])


if __name__ == "__main__":  # proposals are computed by worker processes, which import this file
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:5]))
