"""How much of the gradient at the shared neck comes from the contrastive loss.

    python benchmarks/wscl_gradient.py runs/table/seed0/od-wscl

Norm of the gradient of lambda * L_wscl over that of all other losses, with respect to the head convolution of lite0,
on the first batches of a run: once for the network the run began with, once for the one it ended with.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from tag2box.commands.runs import build_detector, load_run, read_config, roi_maps
from tag2box.commands.train import prepared
from tag2box.io import write_json
from tag2box.models.detector import Detector
from tag2box.models.lite0 import Lite0Backbone
from tag2box.models.rng import StepRng
from tag2box.progress import TerminalProgress
from tag2box.recipes import Config
from tag2box.training.batches import BatchSource, ImageBatches, RoiMapBatches
from tag2box.training.feature_cache import CachedRoiMaps
from tag2box.training.step import Step
from tag2box.types import Batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run with lite0 and WSCL")
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/wscl_gradient.json"))
    args = parser.parse_args()
    config = read_config(args.run)
    trained = load_run(args.run)
    fresh = build_detector(config, len(trained.classes), pretrained=True)
    source = _source(config, fresh)
    batches = [source.batch(iteration) for iteration in range(args.batches)]
    shares = {
        name: [share(config, detector, batch) for batch in batches]
        for name, detector in (("fresh", fresh), ("trained", trained.detector))
    }
    write_json(args.out, {"run": args.run.name, "share": shares})
    for name, found in shares.items():
        print(f"{name}: " + ", ".join(f"{100 * x:.3f} %" for x in found))


def share(config: Config, detector: Detector, batch: Batch) -> float:
    """Norm of lambda * L_wscl's gradient over that of the rest."""
    detector.train()
    if not isinstance(detector.backbone, Lite0Backbone):
        raise SystemExit("this benchmark knows the neck of lite0 only")
    neck = detector.backbone.head.weight
    without = replace(config.criterion, contrast=replace(config.criterion.contrast, weight=0.0))
    grads = []
    for criterion in (config.criterion, without):
        Step(detector, criterion, config.drop_block, config.augment)(batch, StepRng(0, 0))
        assert neck.grad is not None
        grads.append(neck.grad.double())
    return float((grads[0] - grads[1]).norm() / grads[1].norm())


def _source(config: Config, detector: Detector) -> BatchSource:
    photos, store = prepared(config)
    views = config.loader.resize.views()
    maps = roi_maps(detector, photos.photos, store, config=config, views=views, progress=TerminalProgress())
    if isinstance(maps, CachedRoiMaps):
        return RoiMapBatches(photos, store, config.loader, config.plan.seed, maps)
    return ImageBatches(photos, store, config.loader, config.plan.seed)


if __name__ == "__main__":
    main()
