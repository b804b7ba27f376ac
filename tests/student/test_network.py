"""The student's network: shapes on every backbone, decoding, what is frozen, and export-friendly forward passes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tag2box.errors import UserError
from tag2box.models.backbone import Backbone
from tag2box.models.lite0 import Lite0
from tag2box.models.resnet_ws import ResNetWs, ResNetWsBackbone
from tag2box.models.vgg16 import Vgg16, Vgg16Backbone
from tag2box.student.network import STRIDES, AnchorFree, FeaturePyramid, StudentModule, decode_levels, padded
from tiny_student import TinyTrunk

SMALL = AnchorFree(width=8, depth=1)


def backbones() -> list[Backbone]:
    """The built-in ones, with small layers after RoI pooling, which a student does not use."""
    vgg = Vgg16Backbone(Vgg16(), vector_size=8)
    return [Lite0().build(pretrained=False), vgg, ResNetWsBackbone(ResNetWs(), width=8, neck=(8, 8))]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_every_backbone_gives_maps_at_three_strides(number: int) -> None:
    network = SMALL.build(backbones()[number], 5)
    assert isinstance(network, StudentModule)
    with torch.no_grad():
        levels = network(torch.rand(1, 3, 64, 32) * 255)
    assert [tuple(x.shape) for x in levels] == [(1, 9, 64 // s, 32 // s) for s in STRIDES]
    assert all((x[:, 5:] > 0).all() for x in levels)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("frozen", [0, 2, 100])
def test_the_first_stages_are_frozen_and_all_others_learn(number: int, frozen: int) -> None:
    backbone = backbones()[number]
    AnchorFree(width=8, depth=1, frozen_stages=frozen).build(backbone, 3)
    learns = [any(p.requires_grad for p in module.parameters()) for module in backbone.pyramid_modules()]
    assert learns == [number >= frozen for number in range(len(learns))]


def test_lite0_pyramid_ends_with_the_maps_of_the_trunk_and_of_the_whole_network() -> None:
    backbone = Lite0().build(pretrained=False)
    photos = torch.rand(1, 3, 64, 96) * 255
    with torch.no_grad():
        _, middle, last = backbone.pyramid(photos)
        trunk = backbone.trunk(photos)
        assert torch.equal(middle, trunk)
        assert torch.equal(backbone.head(last), backbone.photo_features(trunk))


def test_boxes_are_the_distances_from_the_centre_of_each_cell() -> None:
    levels = tuple(torch.rand(2, 7, 4 // scale, 2 // scale) for scale in (1, 2))
    logits, boxes, cells = decode_levels(levels, (8, 16))
    assert logits.shape == (2, 10, 3) and boxes.shape == (2, 10, 4)
    row = 0
    for level, stride in zip(levels, (8, 16), strict=True):
        for y in range(level.shape[2]):
            for x in range(level.shape[3]):
                left, top, right, bottom = (level[1, 3:, y, x] * stride).tolist()
                centre = ((x + 0.5) * stride, (y + 0.5) * stride)
                wanted = [centre[0] - left, centre[1] - top, centre[0] + right, centre[1] + bottom]
                assert boxes[1, row].tolist() == pytest.approx(wanted, abs=1e-4)
                assert cells[row].tolist() == [*centre, stride]
                assert torch.equal(logits[1, row], level[1, :3, y, x])
                row += 1


def test_initial_boxes_are_squares_of_eight_cells_and_initial_scores_low() -> None:
    torch.manual_seed(0)
    network = SMALL.build(TinyTrunk(), 3)
    logits, boxes, cells = decode_levels(network(torch.rand(1, 3, 64, 64) * 255), network.strides)
    sides = (boxes[0, :, 2:] - boxes[0, :, :2]) / cells[:, 2:]
    assert sides.mean().item() == pytest.approx(8, abs=0.5)
    assert logits.sigmoid().mean().item() == pytest.approx(0.02, abs=0.005)


def test_a_photo_alone_and_in_a_batch_gives_the_same_numbers() -> None:
    network = SMALL.build(Lite0().build(pretrained=False), 3).eval()
    photos = torch.rand(3, 3, 64, 64) * 255
    with torch.no_grad():
        together, alone = network(photos), network(photos[1:2])
    for a, b in zip(together, alone, strict=True):
        assert torch.allclose(a[1:2], b, atol=1e-4)


def test_forward_and_decoding_can_be_traced() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = SMALL.build(TinyTrunk(), 3).eval()

        def forward(self, photos: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            logits, boxes, _ = decode_levels(self.network(photos), self.network.strides)
            return logits.sigmoid(), boxes

    whole, photos = Whole(), torch.rand(1, 3, 64, 96) * 255
    program = torch.export.export(whole, (photos,))
    for a, b in zip(program.module()(photos), whole(photos), strict=True):
        assert torch.allclose(a, b)


def test_space_is_added_right_and_below_in_the_neutral_colour() -> None:
    network = SMALL.build(TinyTrunk(), 3)
    shown = padded(torch.full((3, 33, 64), 9.0), network)
    assert shown.shape == (3, 64, 64) and (shown[:, :33] == 9).all()
    assert padded(torch.zeros(3, 65, 1), network).shape == (3, 96, 96)  # a square, as in training
    assert shown[:, 40, 5].tolist() == pytest.approx(network.backbone.preprocess.neutral())


def test_a_backbone_of_other_strides_is_refused() -> None:
    with pytest.raises(UserError, match="its maps have strides 16"):
        FeaturePyramid(((16, 8),), 8)
