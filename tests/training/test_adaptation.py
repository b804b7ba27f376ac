"""Adaptation: it learns the tags, resumes to the bit, is cached, and its class maps serve training and detection."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from tag2box import runs
from tag2box.annotations import TaggedPhotos
from tag2box.cli.detect import detect
from tag2box.cli.train import resume, train
from tag2box.errors import UserError
from tag2box.models.class_maps import CellMaps, ClassMaps
from tag2box.models.lite0 import Lite0
from tag2box.progress import silent
from tag2box.recipes import Config
from tag2box.settings import load
from tag2box.training import adaptation
from tag2box.training.adaptation import Adaptation, adapt, build_class_maps, random_crop
from tag2box.training.class_evidence import ClassEvidence, photo_maps
from tiny import TinyBackbone, tiny_photos, tiny_store
from tiny_world import small_config, small_data, small_network, weights

SETTINGS = Adaptation(epochs=3, side=32, batch_size=2, lr=0.05)
CELLS = replace(SETTINGS, part="cells", lr=0.002)
BOTH = pytest.mark.parametrize("settings", [SETTINGS, CELLS], ids=["backbone", "cells"])


def fresh(settings: Adaptation = SETTINGS) -> ClassMaps:
    torch.manual_seed(0)
    return build_class_maps(TinyBackbone(), 3, settings)


def tensors(class_maps: ClassMaps) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in class_maps.state_dict().items()}


def adapted(photos: TaggedPhotos, folder: Path, settings: Adaptation = SETTINGS, seed: int = 0) -> ClassMaps:
    class_maps = fresh(settings)
    adapt(class_maps, photos, settings, folder=folder, seed=seed)
    return class_maps


@BOTH
def test_it_learns_the_tags(tmp_path: Path, settings: Adaptation) -> None:
    photos = tiny_photos(tmp_path, 6)
    class_maps = adapted(photos, tmp_path / "maps", replace(settings, epochs=150))
    found = ClassEvidence(class_maps, photos.photos, tiny_store(tmp_path, photos.photos))
    scores = torch.stack([photo_maps(found.class_maps, photo).amax(dim=(1, 2)) for photo in photos.photos])
    assert scores[photos.tags].min() > scores[~photos.tags].mean()
    assert not any(p.requires_grad for p in class_maps.parameters())


def test_a_second_call_loads_what_the_first_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = tiny_photos(tmp_path, 4)
    first = adapted(photos, tmp_path / "maps")
    monkeypatch.setattr(adaptation, "random_crop", None)  # what training would call
    assert tensors(adapted(photos, tmp_path / "maps")) == tensors(first)


@pytest.mark.parametrize("change", ["tags", "seed", "settings", "photos"])
def test_what_it_depends_on_is_not_mixed_up(tmp_path: Path, change: str) -> None:
    photos = tiny_photos(tmp_path, 4)
    first = tensors(adapted(photos, tmp_path / "maps"))
    settings = replace(SETTINGS, lr=0.01) if change == "settings" else SETTINGS
    if change == "tags":
        photos = replace(photos, tags=~photos.tags)
    if change == "photos":
        photos = photos.part([True, True, True, False])
    assert tensors(adapted(photos, tmp_path / "maps", settings, seed=int(change == "seed"))) != first


def test_cells_alone_leave_the_backbone_as_it_is(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 4)
    before, after = fresh(CELLS), adapted(photos, tmp_path / "maps", CELLS)
    assert isinstance(after, CellMaps)
    assert torch.equal(after.backbone.conv.weight, before.backbone.conv.weight)  # type: ignore[arg-type,union-attr]
    assert not torch.equal(after.classifier[0].weight, before.classifier[0].weight)  # type: ignore[index]
    assert (after.deviation != 1).any()


def test_frozen_stages_keep_their_weights(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 2)
    class_maps = build_class_maps(Lite0().build(pretrained=False), 3, SETTINGS)
    before = {name: value.clone() for name, value in class_maps.state_dict().items()}
    adapt(class_maps, photos, replace(SETTINGS, frozen_stages=4, lr=1e-3), folder=tmp_path / "maps", seed=0)
    frozen = tuple(f"backbone.{part}." for part in ("stem", *(f"body.{block}" for block in range(5))))
    changed = {name for name, value in class_maps.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if not name.startswith(frozen)}


def test_cells_of_many_photos_are_those_of_evenly_spaced_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = tiny_photos(tmp_path, 5)
    monkeypatch.setattr(adaptation, "_CELL_PHOTOS", 3)
    few = adapted(photos, tmp_path / "few", CELLS)
    monkeypatch.undo()
    part = photos.part([True, False, True, False, True])
    assert tensors(few) == tensors(adapted(part, tmp_path / "part", CELLS))


@BOTH
@pytest.mark.parametrize("epoch", [1, 2])
def test_an_interrupted_one_continues_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: int, settings: Adaptation
) -> None:
    photos = tiny_photos(tmp_path, 5)
    kind = adaptation._Training if settings.part == "backbone" else adaptation._CellTraining
    whole = tensors(adapted(photos, tmp_path / "undisturbed", settings))
    real = kind.run_epoch

    def interrupted(self: object, number: int, bar: object) -> None:
        if number == epoch:
            raise KeyboardInterrupt
        real(self, number, bar)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "run_epoch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        adapted(photos, tmp_path / "maps", settings)
    monkeypatch.setattr(kind, "run_epoch", real)
    assert tensors(adapted(photos, tmp_path / "maps", settings)) == whole
    (folder,) = (tmp_path / "maps").glob("adapted-*/epoch-*")
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "model.safetensors"]


def test_a_flipped_bit_is_refused(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 4)
    adapted(photos, tmp_path / "maps")
    (path,) = (tmp_path / "maps").glob("adapted-*/epoch-*/model.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors: damaged.*remove the folder"):
        adapted(photos, tmp_path / "maps")


def test_divergence_is_an_error_in_one_line(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 4)
    class_maps = fresh()
    with torch.no_grad():
        class_maps.classifier.weight.fill_(float("inf"))
    with pytest.raises(UserError, match=r"adaptation diverged in epoch 1.*lower adaptation\.lr"):
        adapt(class_maps, photos, SETTINGS, folder=tmp_path / "maps", seed=0, progress=silent)
    assert not list((tmp_path / "maps").glob("adapted-*/epoch-*"))


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0.05, 1), st.integers(0, 2**32))
def test_a_crop_has_the_side_and_the_range_of_pixels(height: int, width: int, share: float, seed: int) -> None:
    photo = torch.rand(3, height, width) * 255
    crop = random_crop(photo, 16, share, np.random.default_rng(seed))
    assert crop.shape == (3, 16, 16)
    assert bool(((crop >= 0) & (crop <= 255)).all())
    assert torch.equal(crop, random_crop(photo, 16, share, np.random.default_rng(seed)))


def test_unsure_tags_teach_nothing(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 4)
    unsure = ~photos.tags  # only present classes are left
    class_maps = adapted(replace(photos, unsure=unsure), tmp_path / "maps", replace(SETTINGS, epochs=30))
    found = ClassEvidence(class_maps, photos.photos, tiny_store(tmp_path, photos.photos))
    assert all(photo_maps(found.class_maps, photo).mean() > 0.5 for photo in photos.photos)  # no class was ever absent


def test_evidence_of_photos_without_proposals_is_empty(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 2)
    store = tiny_store(tmp_path, photos.photos, counts=[0, 4])
    found = ClassEvidence(fresh(), photos.photos, store)
    assert found("photo0").shape == (0, 3)
    assert found("photo1").shape == (4, 3)


def test_dense_features_of_lite0_hold_the_sparse_ones() -> None:
    """With every second cell dropped they are those at stride 32."""
    torch.manual_seed(0)
    backbone = Lite0().build(pretrained=False).eval()
    with torch.no_grad():
        for p in backbone.parameters():
            p.mul_(3)  # initial weights shrink signals to nothing
        trunk = backbone.trunk(torch.rand(1, 3, 64, 96) * 255)
        sparse, dense = backbone.photo_features(trunk), backbone.photo_features(trunk, dense=True)
    assert sparse.shape == (1, 1280, 2, 3)
    assert dense.shape == (1, 1280, 4, 6)
    torch.testing.assert_close(dense[:, :, ::2, ::2], sparse, atol=1e-4, rtol=1e-4)
    assert sparse.std() > 0


# ---------------------------------------------------------------- in a run

LEVERS = ("adaptation.epochs=2", "adaptation.side=32", "adaptation.lr=0.05", "criterion.prior.evidence=1",
          "criterion.prior.area=0.3", "inference.prior.evidence=2", "inference.prior.area=0.9")  # fmt: skip


@pytest.mark.parametrize("part", ["backbone", "cells"])
def test_a_run_with_levers_is_resumed_and_detects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    small_data(tmp_path)
    small_network(monkeypatch)
    config = small_config(tmp_path, *LEVERS, f"adaptation.part={part}")
    train(config, tmp_path / "whole")
    first = weights(tmp_path / "whole")
    assert any(name.startswith("class_maps.") for name in first)
    conv = "backbone.conv.weight"
    assert torch.equal(first[conv], first[f"class_maps.{conv}"])  # the frozen part of the detector is the adapted one

    real = adaptation._Training.save

    def killed(self: object, place: Path, epoch: int) -> None:
        real(self, place, epoch)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(adaptation._Training, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "stopped")
    monkeypatch.setattr(adaptation._Training, "save", real)
    resume(tmp_path / "stopped")
    assert {name: value.tolist() for name, value in weights(tmp_path / "stopped").items()} == {
        name: value.tolist() for name, value in first.items()
    }
    found = detect(tmp_path / "whole", [tmp_path / "photos"], min_score=0)
    plain = detect(
        tmp_path / "whole",
        [tmp_path / "photos"],
        min_score=0,
        overrides=["inference.prior.evidence=0", "inference.prior.area=0"],
    )
    assert found.keys() == plain.keys()
    assert any(found[name].scores.tolist() != plain[name].scores.tolist() for name in found)


def test_runs_of_several_seeds_can_share_an_adaptation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def built(seed: int, *own: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
        overrides = [*LEVERS, f"plan.seed={seed}", *own]
        detector = runs.build_detector(load(Config, [], overrides), 2, pretrained=False)
        values = {name: value.tolist() for name, value in detector.state_dict().items() if "classifier" in name}
        heads = {name: value.tolist() for name, value in detector.state_dict().items() if "refine" in name}
        return values, heads

    own = "adaptation.seed=5"
    assert built(0, own)[0] == built(1, own)[0]
    assert built(0, own)[1] != built(1, own)[1]
    assert built(0)[0] != built(1)[0]

    small_data(tmp_path)
    small_network(monkeypatch)
    seeds: list[int] = []
    monkeypatch.setattr(adaptation, "adapt", lambda *given, seed, **others: seeds.append(seed))
    for number, more in enumerate(([own], [])):
        train(small_config(tmp_path, *LEVERS, "plan.seed=1", *more), tmp_path / f"run-{number}")
    assert seeds == [5, 1]


@pytest.mark.parametrize("key", ["criterion", "inference"])
def test_evidence_without_adaptation_is_refused_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    small_data(tmp_path)
    small_network(monkeypatch)
    with pytest.raises(UserError, match=rf"{key}\.prior\.evidence: needs class maps; set adaptation\.epochs"):
        train(small_config(tmp_path, f"{key}.prior.evidence=1"), tmp_path / "run")
    train(small_config(tmp_path), tmp_path / "run")
    with pytest.raises(UserError, match=r"inference\.prior\.evidence: needs class maps, and the run was trained"):
        detect(tmp_path / "run", [tmp_path / "photos"], overrides=["inference.prior.evidence=1"])
