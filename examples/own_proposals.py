"""A proposal method of your own: windows on a grid. The guide is docs/adding-a-proposal-method.md.

    python examples/own_proposals.py tags.csv photos runs/grid

The run records the class, so that ``detect`` proposes boxes for new photos in the same way.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

import tag2box
from tag2box.proposals.base import FoundBoxes


@dataclass(frozen=True, kw_only=True)
class Grid(tag2box.ProposalMethod):
    """Windows of several sizes, ranked by the standard deviation of the grey values inside."""

    sizes: tuple[float, ...] = (0.25, 0.5, 0.75)
    """Sides of the windows, as fractions of the photo's sides."""
    step: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Distance between neighbouring windows, as a fraction of their side."""

    def search(self, bgr: np.ndarray, min_side: float) -> FoundBoxes:
        """All windows of an image, in its pixels, right and bottom exclusive; the base class does the rest."""
        height, width = bgr.shape[:2]
        windows = [
            (x, y, x + size, y + size)
            for size in self.sizes
            for y in np.arange(0, 1 - size + 1e-9, size * self.step)
            for x in np.arange(0, 1 - size + 1e-9, size * self.step)
        ]
        corners = np.array(windows).reshape(-1, 4) * [width, height, width, height]
        gray = bgr.mean(axis=2)
        scores = [gray[int(y1) : int(y2) + 1, int(x1) : int(x2) + 1].std() for x1, y1, x2, y2 in corners]
        return FoundBoxes(corners, np.array(scores))


def main(tags: Path, photos: Path, out: Path, iterations: int = 100) -> dict[str, int]:
    """Train on these proposals; gives their number in each photo."""
    from own_proposals import Grid  # not __main__.Grid, which no other program can import

    base = tag2box.RECIPES["photos-frozen"]()
    config = replace(
        base,
        data=tag2box.Data(tags=tags, photos=photos),
        proposals=Grid(short_side=200),
        plan=replace(base.plan, iterations=iterations),
    )
    tag2box.train(config, out)
    store = tag2box.ProposalStore.open(out / "proposals")
    counts = {photo: len(store.boxes(photo)) for photo in store.sizes}
    print(counts)
    return counts


if __name__ == "__main__":  # proposals are computed by worker processes, which import this file
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:5]))
