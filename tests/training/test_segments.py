"""The segmentation branch: it learns from tags alone, on every backbone, and runs with it resume to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tag2box.annotations import TaggedPhotos
from tag2box.cli.train import resume, train
from tag2box.errors import Interrupted, UserError
from tag2box.models.backbone import Backbone
from tag2box.models.lite0 import Lite0
from tag2box.models.resnet_ws import ResNetWs, ResNetWsBackbone
from tag2box.models.vgg16 import Vgg16, Vgg16Backbone
from tag2box.training import adaptation
from tag2box.training.adaptation import Segmentation, build_segments
from tiny import TinyBackbone, tiny_photos
from tiny_world import small_config, small_data, small_network, stopping_at, weights

SETTINGS = Segmentation(side=48, map_epochs=4, epochs=4, batch_size=2, lr=0.02)


def fresh() -> TinyBackbone:
    torch.manual_seed(0)
    return TinyBackbone()


def segments(photos: TaggedPhotos, folder: Path, settings: Segmentation = SETTINGS, seed: int = 0) -> list[object]:
    found = build_segments(fresh(), photos, settings, folder=folder, seed=seed)
    return [found(photo.id).tolist() for photo in photos.photos]


@pytest.mark.parametrize("backbone", ["lite0", "vgg16", "r50-ws", "tiny"])
def test_every_backbone_has_one(tmp_path: Path, backbone: str) -> None:
    torch.manual_seed(0)
    networks: dict[str, Backbone] = {
        "lite0": Lite0().build(pretrained=False),
        "vgg16": Vgg16Backbone(Vgg16(), vector_size=8),
        "r50-ws": ResNetWsBackbone(ResNetWs(), width=2, neck=(8, 8)),
        "tiny": TinyBackbone(),
    }
    photos, network = tiny_photos(tmp_path, 2), networks[backbone]
    settings = Segmentation(side=32, map_epochs=1, epochs=1)
    found = build_segments(network, photos, settings, folder=tmp_path / "maps", seed=0)
    stride = network.pyramid_levels[0][0]
    for photo, tags in zip(photos.photos, photos.tags, strict=True):
        labels = found(photo.id)
        assert abs(labels.shape[0] * stride - 32) < 32 and labels.shape[1] >= labels.shape[0]
        assert set(labels.unique().tolist()) <= {*tags.nonzero().flatten().tolist(), 3}


def test_it_finds_where_the_classes_differ(tmp_path: Path) -> None:
    """After long training, each tag has cells of its own and background is left."""
    photos = tiny_photos(tmp_path, 6)
    settings = replace(SETTINGS, map_epochs=60, epochs=60)
    found = build_segments(fresh(), photos, settings, folder=tmp_path / "maps", seed=0)
    seen = [set(found(photo.id).unique().tolist()) for photo in photos.photos]
    tags = [set(row.nonzero().flatten().tolist()) for row in photos.tags]
    assert sum(len(own & wanted) for own, wanted in zip(seen, tags, strict=True)) > 0.7 * sum(map(len, tags))
    assert sum(3 in own for own in seen) >= 5


def test_it_is_made_once_and_again_for_other_tags_seeds_or_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos, folder = tiny_photos(tmp_path, 4), tmp_path / "maps"
    first, runs = segments(photos, folder), []
    real = adaptation._CellTraining.run_epoch
    monkeypatch.setattr(adaptation._CellTraining, "run_epoch", lambda *_: runs.append(1))
    assert segments(photos, folder) == first and not runs
    monkeypatch.setattr(adaptation._CellTraining, "run_epoch", real)
    names = [len(list(folder.glob("*.npy")))]
    for other, settings, seed in (
        (replace(photos, tags=~photos.tags), SETTINGS, 0),
        (photos, SETTINGS, 1),
        (photos, replace(SETTINGS, foreground=0.9), 0),
    ):
        segments(other, folder, settings, seed)
        names.append(len(list(folder.glob("*.npy"))))
    assert names == [1, 2, 3, 4]


@pytest.mark.parametrize("epoch", [2, 6])
def test_an_interrupted_one_continues_with_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    """During the class maps, or during the segmentation."""
    photos = tiny_photos(tmp_path, 4)
    wanted, real, calls = segments(photos, tmp_path / "whole"), adaptation._Training.save, []

    def killed(self: object, place: Path, number: int) -> None:
        real(self, place, number)  # type: ignore[arg-type]
        calls.append(number)
        if len(calls) == epoch:
            raise KeyboardInterrupt

    monkeypatch.setattr(adaptation._Training, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        segments(photos, tmp_path / "stopped")
    assert not list((tmp_path / "stopped").glob("*.npy"))
    assert segments(photos, tmp_path / "stopped") == wanted
    assert calls[:epoch] == [1, 2, 3, 4, 1, 2][:epoch] and len(calls) == 8


GUIDED = ("heads.mil_heads=2", "criterion.mil.kind=c_midn", "criterion.mil.guide=segmentation",
          "criterion.labeler.kind=c_midn", "criterion.labeler.guide=segmentation", "segmentation.side=48",
          "segmentation.map_epochs=2", "segmentation.epochs=2")  # fmt: skip
RUNS = {
    "c-midn": GUIDED,
    "c-midn, adapted": (*GUIDED, "adaptation.epochs=1", "adaptation.side=32"),
    "wsod2": ("criterion.labeler.kind=wsod2", "criterion.labeler.evidence_of=regressed",
              "criterion.labeler.targets=regressed"),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("memory", ["plain", "exact"])
def test_a_stopped_run_ends_with_the_weights_of_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, memory: str
) -> None:
    small_data(tmp_path)
    small_network(monkeypatch)
    config = small_config(tmp_path, *RUNS[name], f"compute.memory={memory}")
    train(config, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(config, tmp_path / "stopped", progress=stopping_at(3))
    for path in (tmp_path / "stopped" / "maps").rglob("*"):
        path.unlink() if path.is_file() and path.suffix == ".npy" else None  # computed again
    resume(tmp_path / "stopped")
    whole, again = weights(tmp_path / "whole"), weights(tmp_path / "stopped")
    assert {key: value.tolist() for key, value in whole.items()} == {key: x.tolist() for key, x in again.items()}


def test_a_photo_that_is_gone_is_named_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_data(tmp_path)
    small_network(monkeypatch)
    config = small_config(tmp_path, *GUIDED)
    train(config, tmp_path / "whole")
    (tmp_path / "photos" / "photo1.jpg").unlink()
    with pytest.raises(UserError, match=r"photo1\.jpg"):
        train(config, tmp_path / "again")
