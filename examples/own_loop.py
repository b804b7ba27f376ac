"""A training loop of your own over the parts of tag2box.

    python examples/own_loop.py tags.csv photos runs/own

``step`` is the plain step of ``training/step.py``: forward, criterion, backward. Everything around it is yours.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

import tag2box


def main(tags: Path, photos: Path, out: Path, iterations: int = 100) -> list[float]:
    """Train and save the weights; gives the losses."""
    config = replace(tag2box.RECIPES["photos"](), data=tag2box.Data(tags=tags, photos=photos))
    step, source = tag2box.prepare_training(config, out)
    optimizer = torch.optim.AdamW((p for p in step.detector.parameters() if p.requires_grad), lr=3e-4)
    losses = []
    for i in range(iterations):
        loss = step(source.batch(i), tag2box.StepRng(seed=0, iteration=i), fraction=i / iterations)
        optimizer.step()
        losses.append(loss.total.item())
        print(f"{i + 1}: {losses[-1]:.3f}", {name: round(term.item(), 3) for name, term in loss.losses.items()})
    save_file(step.detector.state_dict(), out / "detector.safetensors")
    return losses


if __name__ == "__main__":  # proposals are computed by worker processes, which import this file
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:5]))
