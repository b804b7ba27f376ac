"""Share of the contrastive loss in the gradient at the shared neck.

    python benchmarks/wscl_gradient.py runs/table/seed0/od-wscl

Norm of the gradient of lambda * L_wscl over that of all other losses, with respect to the trained parameters of the
neck, on the first batches of a run: for the initial network and for the trained one. During training, the same figure
is ``contrast_share`` of the ``step`` events.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tag2box.cli.training_data import build_regularizer, prepare_data
from tag2box.io import write_json
from tag2box.models.detector import Detector
from tag2box.models.rng import StepRng
from tag2box.progress import TerminalProgress
from tag2box.recipes import Config
from tag2box.run_inputs import cached_features
from tag2box.runs import build_detector, load_run, read_config
from tag2box.training.batches import BatchSource, FeatureBatches, ImageBatches
from tag2box.training.feature_cache import FeatureCache, RoiMaps
from tag2box.training.step import Step
from tag2box.types import Batch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a finished run with WSCL and a trained neck")
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
    """Norm of the gradient of lambda * L_wscl over that of the other losses."""
    detector.train()
    step = Step(detector, config.criterion, build_regularizer(config, detector), config.augment)
    found = step(batch, StepRng(0, 0), measure=True).contrast_share
    if found is None:
        raise SystemExit("this run has no WSCL, or a frozen neck: there is nothing to compare")
    return found


def _source(config: Config, detector: Detector) -> BatchSource:
    photos, store = prepare_data(config)
    views = config.loader.resize.views()
    maps = cached_features(RoiMaps(detector.backbone, photos.photos, store), config, views, TerminalProgress())
    if isinstance(maps, FeatureCache):
        return FeatureBatches(photos, store, config.loader, config.plan.seed, maps)
    return ImageBatches(photos, store, config.loader, config.plan.seed)


if __name__ == "__main__":
    main()
