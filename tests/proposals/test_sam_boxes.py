"""Boxes from MobileSAM's masks, with a tiny random network: they are added, and nothing is overwritten."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fake_sam import use_fake_sam
from tag2box.annotations import Photo
from tag2box.cli.proposal_recall import store_names
from tag2box.errors import UserError
from tag2box.images import read_photo
from tag2box.models.mobile_sam import MobileSam
from tag2box.ops.boxes import iou
from tag2box.proposals import base, build, sam_boxes
from tag2box.proposals.sam_boxes import EmbeddedImage, PromptFile, Sam, SnapBoxes, Snapped, Snapping, grid_points
from tag2box.proposals.selective_search import SelectiveSearch
from tag2box.proposals.store import ProposalStore
from tiny import tiny_photos

SEARCH = SelectiveSearch(min_side=4, max_boxes=30)


@pytest.fixture(autouse=True)
def network(monkeypatch: pytest.MonkeyPatch) -> MobileSam:
    use_fake_sam(monkeypatch)
    return sam_boxes.mobile_sam_network()


def picture(width: int = 100, height: int = 80) -> torch.Tensor:
    rows, cols = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack([(rows // 9 * 37 + cols // 13 * 51) % 256, rows * 3 % 256, cols * 2 % 256]).to(torch.uint8)


# ---------------------------------------------------------------- masks to boxes


@pytest.mark.parametrize(
    ("width", "height", "count", "expected"),
    [
        (10, 10, 1, [[5, 5]]),
        (40, 20, 2, [[10, 10], [30, 10]]),
        (20, 40, 2, [[10, 10], [10, 30]]),
        (100, 1, 2, [[25, 0.5], [75, 0.5]]),
    ],
)
def test_a_grid_has_its_count_along_the_long_side(width, height, count, expected):
    assert grid_points(width, height, count).tolist() == expected


def test_stability_written_with_loops():
    logits = torch.randn(5, 6, 7) * 2
    logits[0] = -3
    for mask, found in zip(logits, sam_boxes.stability(logits), strict=True):
        small, large = ((mask > t).sum().item() for t in (1, -1))
        assert found.item() == pytest.approx(small / max(large, 1))


def test_the_best_boxes_have_an_extent_and_are_no_near_duplicates():
    rows = torch.tensor([[0.0, 0, 0, 0], [0, 0, 10, 10], [0, 0, 10, 10.1], [5, 5, 5, 9], [2, 2, 9, 9]])
    found = SnapBoxes(rows, torch.tensor([1.0, 0.5, 0.6, 0.9, 0.2])).best(min_quality=0.3, nms_iou=0.9)
    assert found.boxes.tolist() == [rows[2].tolist()] and found.quality.tolist() == pytest.approx([0.6])
    assert len(SnapBoxes(rows[:0], rows[:0, 0]).best(0.0, 0.9).boxes) == 0


def test_a_disc_becomes_its_box(network):
    found = EmbeddedImage.of(network, picture(160, 160)).at_points(torch.tensor([[60.0, 70.0]]))
    for radius, box in zip((16, 32, 64), found.boxes.tolist(), strict=True):
        assert box == pytest.approx([max(0, 60 - radius), 70 - radius, 60 + radius, 70 + radius], abs=1)


@pytest.mark.parametrize("size", [(64, 48), (33, 70), (16, 16)])
def test_boxes_lie_inside_the_image_whatever_its_padding(network, size):
    embedded = EmbeddedImage.of(network, picture(*size))
    for found in (embedded.at_points(grid_points(*size, 3)), embedded.at_boxes(torch.tensor([[1.0, 2, 9, 9]]))):  # type: ignore[call-arg]
        assert len(found.boxes) == len(found.quality) > 0
        assert (found.boxes >= 0).all() and (found.boxes <= torch.tensor([*size, *size])).all()
        assert (found.quality >= 0).all() and (found.quality <= 1).all()
    assert len(embedded.at_points(torch.zeros(0, 2)).boxes) == 0


def test_many_prompts_are_split_into_batches(network, monkeypatch):
    embedded = EmbeddedImage.of(network, picture(64, 64))
    asked = grid_points(64, 64, 4)
    whole = embedded.at_points(asked)
    monkeypatch.setattr(sam_boxes, "_BATCH_PIXELS", 3 * 64**2)
    parts = embedded.at_points(asked)
    assert torch.allclose(whole.quality, parts.quality, atol=1e-4) and len(whole.boxes) == 48


# ---------------------------------------------------------------- the method


def test_the_grid_adds_to_selective_search_and_is_deterministic():
    method = Sam(long_side=64, points=3, min_side=0, max_boxes=None)
    found, again = method(picture()), method(picture())
    assert torch.equal(found.boxes, again.boxes) and torch.equal(found.scores, again.scores)
    alone = replace(method, selective_search=False)(picture())
    assert sorted(found.boxes[: len(alone)].tolist()) == sorted(alone.boxes.tolist())  # equal scores are shuffled
    assert len(found) > len(alone) > 0
    assert not found.scores[len(alone) :].any() and (found.scores[:-1] >= found.scores[1:]).all()
    assert len(replace(method, max_boxes=2)(picture())) == 2


def test_a_store_of_the_method_says_what_it_uses_and_the_method_is_built_from_it_again():
    method = Sam(points=5)
    source = json.loads(json.dumps(method.source()))
    assert source["kind"] == "sam" and base.uses_of(source) == "SA-1B masks"
    assert base.method_from_source(source) == method
    assert base.uses_of(SEARCH.source()) == ""


def test_without_weights_the_command_that_gets_them_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("TAG2BOX_HOME", str(tmp_path))
    monkeypatch.setattr(sam_boxes, "mobile_sam_network", sam_boxes.mobile_sam)
    with pytest.raises(UserError, match=r"mobile-sam: no weights of this name .*tag2box weights get mobile-sam"):
        Sam().ready()


# ---------------------------------------------------------------- snapping


def prompts(**boxes: list[list[float]]) -> PromptFile:
    return PromptFile("b.json", "0" * 64, {name: np.array(rows, np.float32) for name, rows in boxes.items()})


def test_prompts_are_clipped_distinct_and_capped():
    file = prompts(a=[[10, 10, 30, 30], [10, 10, 30, 30.5], [-5, -5, 20, 20], [90, 90, 99, 99], [40, 0, 50, 10]])
    found = file.of("a", (60, 50), 2)
    assert found.tolist() == [[10, 10, 30, 30], [0, 0, 20, 20]]
    assert file.of("b", (60, 50), 2).shape == (0, 4)


def write(path: Path, content: object) -> Path:
    path.write_text(json.dumps(content))
    return path


def photo(name: str) -> Photo:
    return Photo(name, Path(f"{name}.jpg"), 100, 80)


def test_a_list_of_results_and_a_coco_file_name_the_same_prompts(tmp_path):
    rows = [
        {"image_id": 7, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 0.2},
        {"image_id": 7, "category_id": 2, "bbox": [5, 6, 7, 8], "score": 0.9},
        {"image_id": 8, "category_id": 2, "bbox": [5, 6, 7, 8], "score": 0.9},
    ]
    images = [{"id": 7, "file_name": "000007.jpg"}, {"id": 8, "file_name": "elsewhere.jpg"}]
    for name, content in (("list", rows), ("coco", {"images": images, "annotations": rows})):
        found = sam_boxes.read_prompts(write(tmp_path / f"{name}.json", content), [photo("000007"), photo("x")])
        assert {key: value.tolist() for key, value in found.boxes.items()} == {
            "000007": [[5, 6, 12, 14], [1, 2, 4, 6]]  # highest score first
        }


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "none of its 0 images"),
        ({}, "or a COCO file with images and annotations"),
        ({"images": [3], "annotations": []}, r"images\[0\]: expected id and file_name"),
        ([{"image_id": "other", "bbox": [1, 2, 3, 4]}], "none of its 1 images"),
        ([{"image_id": "a", "bbox": [1, 2, 3]}], "bbox of four numbers"),
    ],
)
def test_files_without_boxes_of_the_photos_are_refused_in_one_line(tmp_path, content, words):
    with pytest.raises(UserError, match=words) as raised:
        sam_boxes.read_prompts(write(tmp_path / "b.json", content), [photo("a")])
    assert "\n" not in str(raised.value)


def test_proposals_stay_and_only_new_boxes_are_added():
    method = Snapped(proposals=SEARCH, prompts=prompts(a=[[10, 10, 60, 60]]), snapping=Snapping(long_side=64))
    before, after = SEARCH(picture()), method.propose("a", picture())
    assert torch.equal(after.boxes[: len(before)], before.boxes) and len(after) > len(before)
    added = after.boxes[len(before) :]
    assert (iou(added, before.boxes) <= 0.9).all() and ((added[:, 2:] - added[:, :2]) >= method.min_side).all()
    assert not after.scores.any()  # selective search has no ranks, so none are invented
    others = method.propose("b", picture())
    assert torch.equal(others.boxes, before.boxes)


def test_a_ranked_source_ranks_the_added_boxes_by_quality():
    ranked = Sam(long_side=64, points=2, min_side=0)
    method = Snapped(
        proposals=ranked, prompts=prompts(a=[[10, 10, 60, 60]]), snapping=Snapping(long_side=64), min_side=0
    )
    found = method.propose("a", picture())
    assert found.scores[len(ranked(picture())) :].any()


def test_a_snapped_store_resumes_and_names_its_origin(tmp_path):
    photos = tiny_photos(tmp_path, 3).photos
    first = build.build_proposals(photos, SEARCH, tmp_path / "ss", read=read_photo, workers=1)
    file = write(tmp_path / "boxes.json", [{"image_id": photos[1].id, "bbox": [4, 4, 30, 30]}])
    made = Snapped(
        proposals=first, prompts=sam_boxes.read_prompts(file, photos), snapping=Snapping(long_side=64), min_side=2
    )
    assert pickle.loads(pickle.dumps(made)).source() == made.source()  # noqa: S301 - for other processes
    half = build.build_proposals(photos[:2], made, tmp_path / "snapped", read=read_photo, workers=1)
    done = build.build_proposals(photos, made, tmp_path / "snapped", read=read_photo, workers=1)
    assert len(half) == 2 and len(done) == 3
    for each in photos:
        own = first.boxes(each.id)
        assert torch.equal(done.boxes(each.id)[: len(own)], own)
        assert (len(done.boxes(each.id)) > len(own)) == (each.id == photos[1].id)
    assert done.source["proposals"] == first.source and base.uses_of(done.source) == "SA-1B masks"
    assert str(done.source["boxes"]).startswith("boxes.json sha256:")
    assert store_names([first, done]) == ["selective search", "snapped (uses SA-1B masks)"]
    other = replace(made, snapping=Snapping(long_side=64, max_prompts=1))
    with pytest.raises(UserError, match="made with max_prompts 20, not 1"):
        build.build_proposals(photos, other, tmp_path / "snapped", read=read_photo)
    assert ProposalStore.open(tmp_path / "ss").source == first.source
