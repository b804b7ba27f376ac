"""Proposals from a network: WSRPN ranks windows by responses of early layers, and drops half by their MIL scores.

    python examples/early_proposals.py tags.csv photos runs/wsrpn

No box was used to train that network: it knows classes of photos only.
"""

import sys
from dataclasses import replace
from pathlib import Path

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
    step = [event for event in read_events(out) if event["event"] == "step"][-1]
    print({name: round(value, 3) for name, value in step["losses"].items()})
    return step["losses"]


if __name__ == "__main__":  # proposals are computed by worker processes, which import this file
    main(*map(Path, sys.argv[1:4]), *map(int, sys.argv[4:5]))
