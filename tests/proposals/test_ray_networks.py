"""Networks on a Ray cluster with a simulated GPU: Ray counts one on the second node, where there is none."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import ray_works
from corners import paint

from tag2box.cli.detect import detect
from tag2box.cli.label import label
from tag2box.cli.student import train_student
from tag2box.images import View
from tag2box.parallel.ray_data import RayPool
from tag2box.run_inputs import NetworkPool
from tag2box.training.feature_cache import FeatureCache, RoiMaps
from tiny import tiny_detector, tiny_photos, tiny_store
from tiny_student import SMALL, tiny_labels

ray = pytest.importorskip("ray")
STORE = 100 * 2**20


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Two nodes of one processor each; the second one says that it has a GPU."""
    from ray.cluster_utils import Cluster

    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    nodes = Cluster()
    try:
        nodes.add_node(num_cpus=1, object_store_memory=STORE, include_dashboard=False)
        nodes.add_node(num_cpus=1, num_gpus=1, object_store_memory=STORE, include_dashboard=False)
        nodes.wait_for_nodes(timeout=120)
        ray.init(address=nodes.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()
        patch.undo()


@pytest.mark.parametrize(("is_gpu_used", "expected"), [(True, {"0"}), (False, {""})])
def test_only_work_that_uses_a_gpu_gets_one(tmp_path: Path, is_gpu_used: bool, expected: set[str]) -> None:
    photos = [paint(tmp_path, f"p{number}", 0, (20, 9)) for number in range(3)]
    work = ray_works.UsesGpu(is_gpu_used=is_gpu_used)
    found = {photo.id: gpus for photo, gpus in RayPool(chunk=1)(work, photos, lost=ray_works.no_gpus)}
    assert len(found) == 3 and set(found.values()) == expected


def test_a_feature_cache_filled_there_is_equal_to_the_byte(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 4).photos
    live = RoiMaps(tiny_detector(3).backbone, photos, tiny_store(tmp_path, photos, counts=(4, 0, 1, 6)))
    workers = NetworkPool(RayPool(chunk=1), partial(tiny_detector, 3, seed=9))
    for name, compute in (("here", None), ("there", partial(workers.features, live))):
        cache = FeatureCache(live, tmp_path / name)
        cache.build([View(32, long_max=64)], compute=compute)
        cache.close()
    here, there = ({path.name: path.read_bytes() for path in (tmp_path / name).glob("*.f16")} for name in
                   ("here", "there"))  # fmt: skip
    assert len(here) == 1 and here == there


def test_a_student_detects_there_as_here(tmp_path: Path) -> None:
    train_student(tiny_labels(tmp_path), tmp_path / "run", overrides=(*SMALL, "plan.iterations=1"))
    for name, pool in (("here", None), ("there", RayPool(chunk=1))):
        detect(tmp_path / "run", [tmp_path / "photos"], tmp_path / f"{name}.json", min_score=0, pool=pool)
    assert (tmp_path / "here.json").read_bytes() == (tmp_path / "there.json").read_bytes()
    assert len((tmp_path / "here.json").read_bytes()) > 1000


def test_a_student_labels_there_as_here(tmp_path: Path) -> None:
    labels = tiny_labels(tmp_path)
    train_student(labels, tmp_path / "run", overrides=(*SMALL, "plan.iterations=1"))
    here, there = (
        label(tmp_path / "run", labels, tmp_path / name, pool=pool).content
        for name, pool in (("here", None), ("there", RayPool(chunk=1)))
    )
    assert here.photos == there.photos
    assert sum(len(photo.boxes) for photo in here.photos) > 0
