"""TinyViT-5M as MobileSAM's image encoder: convolutions, then attention in windows, at a stride of 16. Inference only.

Wu et al., "TinyViT: Fast Pretraining Distillation for Small Vision Transformers", ECCV 2022,
https://arxiv.org/abs/2207.10666; without the last stage's stride, and with a neck, in Zhang et al., "Faster Segment
Anything: Towards Lightweight SAM for Mobile Applications", 2023, https://arxiv.org/abs/2306.14289.

Batch norms are folded into the convolutions before them by ``fold_batch_norms``; other parameters have the names of the
published checkpoint. Letters: B images, D channels, W cells of a window.
"""

import re
from collections.abc import Mapping
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from tag2box.models.weights.state_dict import TINY_VIT_DEPTHS, TINY_VIT_EXPANSION, TINY_VIT_HEADS, TINY_VIT_WINDOWS

_STRIDES = (2, 2, 1)  # of the layers between stages: the last one keeps the resolution
_BATCH_NORM_EPS = 1e-5
_BATCH_NORM = re.compile(r"(.*)\.bn\.(weight|bias|running_mean|running_var)")


class _Conv(nn.Conv2d):
    """A convolution with its batch norm folded in."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, kernel // 2, groups=groups)


class _PatchEmbed(nn.Module):
    """Two convolutions of stride 2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.seq = nn.Sequential(_Conv(3, width // 2, 3, 2), nn.GELU(), _Conv(width // 2, width, 3, 2))

    def forward(self, x: Float[Tensor, "B 3 h w"]) -> Float[Tensor, "B D _ _"]:
        return self.seq(x)  # type: ignore[no-any-return]


class _InvertedBottleneck(nn.Module):
    """Three convolutions, the middle one depthwise: a residual block (MBConv), or a change of width and resolution."""

    def __init__(self, inputs: int, outputs: int, hidden: int, stride: int = 1, residual: bool = False) -> None:
        super().__init__()
        self.conv1 = _Conv(inputs, hidden)
        self.conv2 = _Conv(hidden, hidden, 3, stride, groups=hidden)
        self.conv3 = _Conv(hidden, outputs)
        self.residual = residual

    def forward(self, x: Float[Tensor, "B i h w"]) -> Float[Tensor, "B o _ _"]:
        out: Tensor = self.conv3(F.gelu(self.conv2(F.gelu(self.conv1(x)))))
        return F.gelu(x + out) if self.residual else out


class _WindowAttention(nn.Module):
    """Self-attention in a window, with a learnt bias per head for each distance between two cells."""

    offsets: Tensor

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.attention_biases = nn.Parameter(torch.zeros(heads, window * window))
        self.register_buffer("offsets", _distance_ids(window), persistent=False)
        self.heads = heads

    def forward(self, x: Float[Tensor, "B W D"]) -> Float[Tensor, "B W D"]:
        count, cells, width = x.shape
        parts = self.qkv(self.norm(x)).view(count, cells, self.heads, -1).transpose(1, 2)  # (B, heads, W, 3 D/heads)
        query, key, value = parts.chunk(3, dim=3)
        bias = self.attention_biases[:, self.offsets]  # (heads, W, W)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias[None].to(x.dtype))
        return self.proj(out.transpose(1, 2).reshape(count, cells, width))  # type: ignore[no-any-return]


def _distance_ids(window: int) -> Int[Tensor, "W W"]:
    """For each pair of cells, the place of (rows apart, columns apart) in a table of that shape."""
    row, column = torch.arange(window * window) // window, torch.arange(window * window) % window
    return (row[:, None] - row).abs() * window + (column[:, None] - column).abs()


class _Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, TINY_VIT_EXPANSION * width)
        self.fc2 = nn.Linear(TINY_VIT_EXPANSION * width, width)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return self.fc2(F.gelu(self.fc1(self.norm(x))))  # type: ignore[no-any-return]


class _VitBlock(nn.Module):
    """Window attention, a depthwise convolution across windows, and an MLP."""

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.attn = _WindowAttention(width, heads, window)
        self.local_conv = _Conv(width, width, 3, groups=width)
        self.mlp = _Mlp(width)
        self.window = window

    def forward(self, x: Float[Tensor, "B D h w"]) -> Float[Tensor, "B D h w"]:
        x = self.local_conv(x + self._attend(x))
        more: Tensor = self.mlp(x.permute(0, 2, 3, 1))
        return x + more.permute(0, 3, 1, 2)

    def _attend(self, x: Float[Tensor, "B D h w"]) -> Float[Tensor, "B D h w"]:
        (count, width, rows, columns), side = x.shape, self.window
        cells = F.pad(x.permute(0, 2, 3, 1), (0, 0, 0, -columns % side, 0, -rows % side))  # zeros at right and bottom
        down, across = cells.shape[1] // side, cells.shape[2] // side
        windows = cells.view(count, down, side, across, side, width).transpose(2, 3).reshape(-1, side * side, width)
        out: Tensor = self.attn(windows).view(count, down, across, side, side, width).transpose(2, 3)
        return out.reshape(count, down * side, across * side, width)[:, :rows, :columns].permute(0, 3, 1, 2)


class _Stage(nn.Module):
    def __init__(self, blocks: list[nn.Module], downsample: nn.Module | None) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)
        self.downsample = downsample or nn.Identity()

    def forward(self, x: Float[Tensor, "B D h w"]) -> Float[Tensor, "B o _ _"]:
        return self.downsample(self.blocks(x))  # type: ignore[no-any-return]


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of a map."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=1e-6)

    def forward(self, input: Float[Tensor, "B D h w"]) -> Float[Tensor, "B D h w"]:
        """The map, with mean 0 and variance 1 over the channels of each cell before scale and offset."""
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class TinyViT(nn.Module):
    """TinyViT-5M with a neck: an embedding of an image at a stride of 16."""

    def __init__(self, widths: tuple[int, ...], channels: int) -> None:
        super().__init__()
        self.patch_embed = _PatchEmbed(widths[0])
        between: list[nn.Module | None] = [
            _InvertedBottleneck(a, b, b, stride) for (a, b), stride in zip(pairwise(widths), _STRIDES, strict=True)
        ]
        stages = []
        for stage, (width, down) in enumerate(zip(widths, [*between, None], strict=True)):
            heads, window = TINY_VIT_HEADS[stage], TINY_VIT_WINDOWS[stage]
            blocks: list[nn.Module] = [
                _VitBlock(width, heads, window)
                if stage
                else _InvertedBottleneck(width, width, TINY_VIT_EXPANSION * width, residual=True)
                for _ in range(TINY_VIT_DEPTHS[stage])
            ]
            stages.append(_Stage(blocks, down))
        self.layers = nn.Sequential(*stages)
        self.neck = nn.Sequential(
            nn.Conv2d(widths[-1], channels, 1, bias=False),
            ChannelNorm(channels),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            ChannelNorm(channels),
        )

    def forward(self, x: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B D h w"]:
        """The embedding of normalized images."""
        return self.neck(self.layers(self.patch_embed(x)))  # type: ignore[no-any-return]


def fold_batch_norms(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the checkpoint with each batch norm, ``X.bn``, folded into its convolution, ``X.c``, as ``X``."""
    folded = {name: value for name, value in state.items() if ".bn." not in name and not name.endswith(".c.weight")}
    for at in dict.fromkeys(match[1] for name in state if (match := _BATCH_NORM.fullmatch(name))):
        scale = state[f"{at}.bn.weight"].double() / (state[f"{at}.bn.running_var"].double() + _BATCH_NORM_EPS).sqrt()
        weight = state[f"{at}.c.weight"].double() * scale.view(-1, 1, 1, 1)
        bias = state[f"{at}.bn.bias"].double() - state[f"{at}.bn.running_mean"].double() * scale
        folded |= {f"{at}.weight": weight.float(), f"{at}.bias": bias.float()}
    return folded
