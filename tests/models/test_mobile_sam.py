"""MobileSAM with random weights: shapes, names, windows, prompts. With the published weights, if they are stored here:
the numbers of the reference implementation.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sam_picture import boxes, picture, points
from torch import nn
from torch.nn import functional as F

from conftest import golden_names, load_golden
from tag2box.models import mobile_sam, tiny_vit
from tag2box.models.mobile_sam import MobileSam, box_prompts, point_prompts
from tag2box.models.tiny_vit import fold_batch_norms
from tag2box.models.weights import state_dict, weight_cache


@pytest.fixture(scope="module")
def tiny() -> MobileSam:
    torch.manual_seed(0)
    return MobileSam(widths=(8, 8, 10, 20), channels=32)


# ---------------------------------------------------------------- random weights


@pytest.mark.parametrize(("width", "height", "side"), [(1, 1, 16), (64, 64, 64), (96, 40, 96), (33, 112, 112)])
def test_an_image_of_any_size_gets_an_embedding_and_masks(tiny, width, height, side):
    embedding = tiny.embed(torch.rand(3, height, width) * 255, side)
    assert embedding.shape == (1, 32, side // 16, side // 16) and embedding.isfinite().all()
    for prompts in (point_prompts(torch.rand(5, 2) * side), box_prompts(boxes(side))):
        out = tiny.masks(embedding, *prompts)
        assert out.logits.shape == (len(prompts[0]), 4, side // 4, side // 4) and out.logits.isfinite().all()
        assert out.ious.shape == (len(prompts[0]), 4)


def test_no_prompts_give_no_masks(tiny):
    out = tiny.masks(tiny.embed(picture(64), 64), *point_prompts(torch.zeros(0, 2)))
    assert out.logits.shape == (0, 4, 16, 16) and out.ious.shape == (0, 4)


def test_prompts_in_a_batch_do_not_affect_each_other(tiny):
    embedding, asked = tiny.embed(picture(64), 64), torch.rand(4, 2) * 64
    together = tiny.masks(embedding, *point_prompts(asked))
    for row in range(4):
        alone = tiny.masks(embedding, *point_prompts(asked[row : row + 1]))
        assert torch.allclose(together.logits[row], alone.logits[0], atol=1e-4)
        assert torch.allclose(together.ious[row], alone.ious[0], atol=1e-4)


def test_nothing_is_trained_and_evaluation_has_no_state(tiny):
    assert not any(p.requires_grad for p in tiny.parameters()) and not tiny.training
    assert torch.equal(tiny.embed(picture(64), 64), tiny.embed(picture(64), 64))


def test_the_tensors_of_the_checkpoint_fold_into_all_parameters_and_no_others():
    shapes = state_dict.shapes_of("mobile-sam", ())
    unused = 320 * 1002 + 1000 + 4_684 + 27  # ImageNet classifier, masks as prompts, counters of batch norms
    assert sum(math.prod(shape) for shape in shapes.values()) == 10_140_231 - unused  # numbers in the checkpoint
    with torch.device("meta"):
        network = MobileSam()
    folded = fold_batch_norms({name: torch.ones(shape) for name, shape in shapes.items()})
    assert {n: tuple(v.shape) for n, v in folded.items()} == {
        n: tuple(v.shape) for n, v in network.state_dict().items()
    }


def test_a_folded_convolution_is_the_convolution_and_its_batch_norm():
    conv, norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4).eval()
    state = {"at.c.weight": conv.weight.detach(), "other.weight": torch.ones(2)}
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = torch.rand(4) + 0.5
        getattr(norm, name).data.copy_(value)
        state[f"at.bn.{name}"] = value
    folded, x = fold_batch_norms(state), torch.randn(2, 3, 5, 6)
    assert set(folded) == {"at.weight", "at.bias", "other.weight"}
    assert torch.allclose(F.conv2d(x, folded["at.weight"], folded["at.bias"], padding=1), norm(conv(x)), atol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 5])
def test_biases_depend_on_the_distance_of_two_cells(window):
    ids = tiny_vit._distance_ids(window)
    for a in range(window**2):
        for b in range(window**2):
            rows, columns = abs(a // window - b // window), abs(a % window - b % window)
            assert ids[a, b] == rows * window + columns


@pytest.mark.parametrize(("rows", "columns"), [(7, 7), (3, 9), (14, 8)])
def test_attention_stays_in_its_window_written_with_loops(rows, columns):
    block = tiny_vit._VitBlock(8, 4, 7).eval()
    nn.init.normal_(block.attn.attention_biases)
    x = torch.randn(2, 8, rows, columns)
    padded = torch.zeros(2, 8, rows + -rows % 7, columns + -columns % 7)
    padded[:, :, :rows, :columns] = x
    expected = torch.zeros_like(padded)
    for image in range(2):
        for top in range(0, padded.shape[2], 7):
            for left in range(0, padded.shape[3], 7):
                cells = padded[image, :, top : top + 7, left : left + 7].reshape(8, 49).T
                out = _attention_with_loops(block.attn, cells)
                expected[image, :, top : top + 7, left : left + 7] = out.T.reshape(8, 7, 7)
    assert torch.allclose(block._attend(x), expected[:, :, :rows, :columns], atol=1e-5)


def _attention_with_loops(attn: tiny_vit._WindowAttention, cells: torch.Tensor) -> torch.Tensor:
    qkv = attn.qkv(attn.norm(cells))  # (49, heads * 3 * 2)
    heads = []
    for head in range(4):
        query, key, value = (qkv[:, 6 * head + 2 * i : 6 * head + 2 * i + 2] for i in range(3))
        logits = query @ key.T / math.sqrt(2) + attn.attention_biases[head][attn.offsets]
        heads.append(logits.softmax(dim=1) @ value)
    return attn.proj(torch.cat(heads, dim=1))


def test_a_point_and_its_padding_are_told_apart_from_corners(tiny):
    encode = tiny.prompt_encoder
    places, kinds = point_prompts(torch.tensor([[8.0, 24.0]]))
    tokens = encode(places, kinds, 32)
    angles = 2 * math.pi * (torch.tensor([-0.5, 0.5]) @ encode.pe_layer.positional_encoding_gaussian_matrix)
    place = torch.cat([angles.sin(), angles.cos()])
    assert torch.allclose(tokens[0, 0], place + encode.point_embeddings[1].weight[0], atol=1e-5)
    assert torch.equal(tokens[0, 1], encode.not_a_point_embed.weight[0])
    corners = encode(*box_prompts(torch.tensor([[8.0, 24.0, 9.0, 25.0]])), 32)
    assert torch.allclose(corners[0, 0], place + encode.point_embeddings[2].weight[0], atol=1e-5)


def test_the_grid_of_places_is_that_of_points_at_the_centres_of_cells(tiny):
    grid = tiny.prompt_encoder.grid(2, 3)
    centres = torch.tensor([[(x + 0.5) / 3, (y + 0.5) / 2] for y in range(2) for x in range(3)])
    assert torch.allclose(grid[0], tiny.prompt_encoder.pe_layer(centres))


# ---------------------------------------------------------------- the published weights


@pytest.mark.skipif(
    not weight_cache.stored_path("mobile-sam").exists(), reason="needs `tag2box weights get mobile-sam`"
)
@pytest.mark.parametrize("file", golden_names("mobile_sam*.npz"))
@pytest.mark.parametrize("side", [512, pytest.param(1024, marks=pytest.mark.slow)])
def test_embedding_and_masks_are_those_of_the_reference_implementation(side, file):
    network, golden = mobile_sam.mobile_sam(), load_golden(file)
    embedding = network.embed(picture(side), side)
    step = side // 64
    assert np.abs(embedding[0, ::32, ::step, ::step].numpy() - golden[f"embedding{side}"]).max() < 1e-4
    for name, prompts in (("points", point_prompts(points(side))), ("boxes", box_prompts(boxes(side)))):
        out = network.masks(embedding, *prompts)
        logits = out.logits[:, :, :: side // 32, :: side // 32].numpy()
        assert np.abs(logits - golden[f"{name}{side}"]).max() < 1e-2  # of logits up to a hundred
        assert np.abs(out.ious.numpy() - golden[f"ious_{name}{side}"]).max() < 1e-4
