from __future__ import annotations

import gzip
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tag2box.annotations import Truth
from tag2box.data.scenes import Scenes
from tag2box.errors import UserError
from tag2box.proposals.edge_boxes import EdgeBoxes, color_gradient, thin_edges
from tag2box.proposals.recall import measure_recall

SMALL = EdgeBoxes(short_side=64, min_side=16, max_boxes=100)


def _scene(index: int) -> torch.Tensor:
    return torch.from_numpy(Scenes().draw("train", index).image).permute(2, 0, 1)


@pytest.mark.parametrize("short_side", [None, 64])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 30), (30, 1), (2, 2), (16, 16), (40, 25)])
def test_a_plain_photo_has_no_edges_to_enclose(height: int, width: int, short_side: int | None) -> None:
    found = EdgeBoxes(short_side=short_side, min_side=0)(torch.full((3, height, width), 90, dtype=torch.uint8))
    assert found.boxes.shape == (0, 4)


def test_boxes_are_ranked_distinct_inside_and_the_same_every_time() -> None:
    image = _scene(3)
    found = SMALL(image)
    assert 20 < len(found) <= 100 and len(found.boxes.unique(dim=0)) == len(found)
    assert (found.scores.diff() <= 0).all() and (found.scores > 0).all()
    assert (found.boxes >= 0).all() and (found.boxes[:, 2] <= 224).all() and (found.boxes[:, 3] <= 192).all()
    assert (found.boxes[:, 2:] - found.boxes[:, :2]).min() >= 16
    SMALL(_scene(4))
    again = SMALL(image)
    assert torch.equal(found.boxes, again.boxes) and torch.equal(found.scores, again.scores)


def test_the_best_box_is_that_of_the_only_object() -> None:
    image = torch.full((3, 100, 160), 30, dtype=torch.uint8)
    image[:, 30:80, 40:120] = 220
    best = EdgeBoxes(short_side=None, smoothing=1.0)(image).boxes[0]
    assert (best - torch.tensor([40.0, 30, 120, 80])).abs().max() <= 6


OTHER = {
    "short_side": 96, "max_boxes": 5, "min_side": 40, "alpha": 0.5, "beta": 0.5, "smoothing": 1.0, "min_share": 0.4,
}  # fmt: skip


def test_every_setting_has_an_effect() -> None:
    assert {f.name for f in fields(EdgeBoxes)} == {*OTHER, "kind", "model"}  # the model has a test of its own
    image = _scene(3)
    before = SMALL(image).boxes
    for name, value in OTHER.items():
        assert not torch.equal(before, replace(SMALL, **{name: value})(image).boxes), name


def test_it_finds_the_objects_of_generated_scenes() -> None:
    scenes = [Scenes().draw("test", i) for i in range(6)]
    method = EdgeBoxes(short_side=96, min_side=16, max_boxes=400)
    boxes = [method(torch.from_numpy(s.image).permute(2, 0, 1)).boxes for s in scenes]
    truth = Truth(Scenes().classes, tuple("abcdef"), ((224, 192),) * 6, tuple(s.objects for s in scenes))
    assert measure_recall(boxes, truth).recall[0] >= 0.8


# ---------------------------------------------------------------- edges


@pytest.mark.parametrize(
    ("vector", "angle"), [((1, 0), 0.0), ((0, 1), 0.5), ((1, 1), 0.25), ((-1, 1), 0.75), ((-1, -1), 0.25)]
)
def test_the_direction_is_that_across_the_edge(vector: tuple[int, int], angle: float) -> None:
    y, x = np.mgrid[:32, :32]
    ramp = 128 + 3 * (vector[0] * x + vector[1] * y - 16 * sum(vector))
    strength, normals = color_gradient(np.repeat(ramp.clip(0, 255).astype(np.uint8)[..., None], 3, 2), 0.0)
    assert strength.max() == 1.0 and strength.min() >= 0.0
    off = np.abs(normals[8:24, 8:24] / np.pi - angle)
    assert np.minimum(off, 1 - off).max() < 0.02


def test_colours_of_equal_brightness_have_an_edge_between_them() -> None:
    image = np.zeros((20, 20, 3), np.uint8)
    image[:, :10], image[:, 10:] = (0, 0, 200), (0, 104, 0)  # BGR; both have a lightness of about 38
    strength, _ = color_gradient(image, 0.0)
    assert strength[:, 9:11].min() == 1.0 and strength[:, :8].max() == strength[:, 12:].max() == 0.0


def _sample(image: np.ndarray, x: float, y: float) -> float:
    height, width = image.shape
    x, y = min(max(x, 0), width - 1), min(max(y, 0), height - 1)
    left, top = min(int(x), width - 2), min(int(y), height - 2)
    dx, dy = x - left, y - top
    upper = image[top, left] * (1 - dx) + image[top, left + 1] * dx
    lower = image[top + 1, left] * (1 - dx) + image[top + 1, left + 1] * dx
    return upper * (1 - dy) + lower * dy


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_thinning_matches_one_written_with_loops(seed: int) -> None:
    rng = np.random.default_rng(seed)
    strength = rng.random((7, 9)).astype(np.float32)
    normals = (rng.random((7, 9)) * math.pi).astype(np.float32)
    thin = thin_edges(strength, normals)
    for y in range(7):
        for x in range(9):
            step = math.cos(normals[y, x]), math.sin(normals[y, x])
            sides = [_sample(strength, x + s * step[0], y + s * step[1]) for s in (1, -1)]
            if abs(max(sides) - strength[y, x]) > 0.05:  # OpenCV interpolates with five bits
                assert thin[y, x] == (strength[y, x] if strength[y, x] > max(sides) else 0)


# ---------------------------------------------------------------- structured forests

OPTIONS = {
    "numberOfTrees": 4, "numberOfTreesToEvaluate": 4, "selfsimilarityGridSize": 5, "stride": 2, "shrinkNumber": 2,
    "patchSize": 32, "patchInnerSize": 16, "numberOfGradientOrientations": 4, "gradientSmoothingRadius": 0,
    "regFeatureSmoothingRadius": 2, "ssFeatureSmoothingRadius": 8, "gradientNormalizationRadius": 4,
}  # fmt: skip


def _forest() -> bytes:
    """Four trees of one leaf each: every patch has the same three edge pixels."""
    lines = ["%YAML:1.0", "---", "options:", *(f"   {name}: {value}" for name, value in OPTIONS.items())]
    rows = {
        "childs": [[0]] * 4,
        "featureIds": [[0]] * 4,
        "thresholds": [[0.5]] * 4,
        "edgeBoundaries": [[0], [3], [6], [9, 12]],
        "edgeBins": [[0, 127, 255]] * 4,
    }
    for name, trees in rows.items():
        lines += [f"{name}:", *(f"   - [ {', '.join(map(str, tree))} ]" for tree in trees)]
    return "\n".join([*lines, ""]).encode()


def test_a_model_finds_the_edges_instead(tmp_path: Path) -> None:
    model = tmp_path / "model.yml.gz"
    model.write_bytes(gzip.compress(_forest()))
    method = replace(SMALL, model=model)
    method.ready()
    edges, normals = method._edges(np.random.default_rng(0).integers(0, 256, (64, 80, 3), np.uint8))
    assert edges.shape == normals.shape == (64, 80) and edges.max() > 0
    image = _scene(3)[:, 60:124, 60:140]
    crops = [replace(SMALL, short_side=None, min_side=40, model=given)(image).boxes for given in (model, None)]
    assert not torch.equal(*crops)


BROKEN = {
    "no such file": None,
    "empty": b"",
    "yaml of something else": b"%YAML:1.0\n---\nfoo: 1\n",  # OpenCV divides by zero, which ends the process
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_broken_model_is_reported_in_one_line(tmp_path: Path, content: bytes | None, capfd) -> None:
    model = tmp_path / "model.yml"
    if content is not None:
        model.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.yml: (no such file|not usable as a structured forest)") as caught:
        EdgeBoxes(model=model).ready()
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""
