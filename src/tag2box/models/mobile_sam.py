"""MobileSAM: masks from points and boxes, with a small image encoder. Inference only, on square inputs of any size.

Prompt encoder and mask decoder: Kirillov et al., "Segment Anything", ICCV 2023, https://arxiv.org/abs/2304.02643. With
TinyViT as image encoder (``tiny_vit``): Zhang et al., "Faster Segment Anything: Towards Lightweight SAM for Mobile
Applications", 2023, https://arxiv.org/abs/2306.14289. Trained on SA-1B, 11 million photos with masks.

Parameters have the names of the published checkpoint. Letters: N prompts, T tokens of
a prompt, S cells of the embedding, D channels, M masks of a prompt.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from tag2box.models.tiny_vit import ChannelNorm, TinyViT, fold_batch_norms
from tag2box.models.weights import PREPROCESS, find_weights, load_into, state_dict

STRIDE = 16  # input pixels per cell of the embedding
MASK_STRIDE = 4  # input pixels per cell of a mask
_DECODER_HEADS, _DECODER_LAYERS = 8, 2
_MASKS = state_dict.SAM_MASKS  # of a prompt: one for a prompt that is clear, three for whole, part and part of a part
_CORNERS = (2, 3)  # kinds of points: 0 background, 1 foreground, then top left and bottom right of a box
_FOREGROUND, _PADDING = 1, -1


# ---------------------------------------------------------------- prompts


class _FourierFeatures(nn.Module):
    """Sines and cosines of random projections of a place in [0, 1] x [0, 1]."""

    positional_encoding_gaussian_matrix: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("positional_encoding_gaussian_matrix", torch.randn(2, channels // 2))

    def forward(self, places: Float[Tensor, "... 2"]) -> Float[Tensor, "... D"]:
        angles = 2 * math.pi * ((2 * places - 1) @ self.positional_encoding_gaussian_matrix)
        return torch.cat([angles.sin(), angles.cos()], dim=-1)


class PromptEncoder(nn.Module):
    """Points and boxes as tokens."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pe_layer = _FourierFeatures(channels)
        self.point_embeddings = nn.ModuleList(nn.Embedding(1, channels) for _ in range(4))
        self.not_a_point_embed = nn.Embedding(1, channels)
        self.no_mask_embed = nn.Embedding(1, channels)

    def forward(self, points: Float[Tensor, "N T 2"], kinds: Int[Tensor, " T"], side: int) -> Float[Tensor, "N T D"]:
        """Tokens of points in pixels of an input of some side, of which pixel centres are at .5."""
        places = self.pe_layer(points / side)
        learnt = torch.cat([*self.point_embeddings.parameters(), self.not_a_point_embed.weight])
        return torch.where((kinds == _PADDING)[:, None], 0.0, places) + learnt[kinds]

    def grid(self, rows: int, columns: int) -> Float[Tensor, "1 S D"]:
        """Positional encoding of the cells of an embedding."""
        device = self.no_mask_embed.weight.device
        y = (torch.arange(rows, device=device) + 0.5) / rows
        x = (torch.arange(columns, device=device) + 0.5) / columns
        places = torch.stack(torch.meshgrid(x, y, indexing="xy"), dim=-1)
        return self.pe_layer(places.flatten(0, 1)[None])  # type: ignore[no-any-return]


# ---------------------------------------------------------------- mask decoder


class _Attention(nn.Module):
    """Multi-head attention; one of a single batch entry is shared by all entries of the other."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, inner) for _ in range(3))
        self.out_proj = nn.Linear(inner, width)

    def forward(
        self, query: Float[Tensor, "A q D"], key: Float[Tensor, "B k D"], value: Float[Tensor, "B k D"]
    ) -> Float[Tensor, "N q D"]:
        count = len(key) if len(query) == 1 else len(query)
        parts = (self.q_proj(query), self.k_proj(key), self.v_proj(value))
        heads = (part.unflatten(2, (_DECODER_HEADS, -1)).transpose(1, 2).expand(count, -1, -1, -1) for part in parts)
        out = F.scaled_dot_product_attention(*heads)  # (N, heads, q, inner / heads)
        return self.out_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class _LinearStack(nn.Module):
    """Three linear layers with ReLU in between."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, outputs)])

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... o"]:
        first, second, last = self.layers
        return last(F.relu(second(F.relu(first(x)))))  # type: ignore[no-any-return]


class _TokenMlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(width, state_dict.SAM_HIDDEN), nn.Linear(state_dict.SAM_HIDDEN, width)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return self.lin2(F.relu(self.lin1(x)))  # type: ignore[no-any-return]


class _TwoWayBlock(nn.Module):
    """Tokens attend to each other and to the image, then the image to the tokens."""

    def __init__(self, width: int, is_first: bool) -> None:
        super().__init__()
        self.self_attn = _Attention(width, width)
        self.cross_attn_token_to_image = _Attention(width, width // 2)
        self.mlp = _TokenMlp(width)
        self.cross_attn_image_to_token = _Attention(width, width // 2)
        self.norm1, self.norm2, self.norm3, self.norm4 = (nn.LayerNorm(width) for _ in range(4))
        self.is_first = is_first

    def forward(
        self,
        tokens: Float[Tensor, "N T D"],
        cells: Float[Tensor, "B S D"],
        prompt: Float[Tensor, "N T D"],
        places: Float[Tensor, "1 S D"],
    ) -> tuple[Float[Tensor, "N T D"], Float[Tensor, "N S D"]]:
        if self.is_first:  # the tokens are still the prompt itself
            tokens = self.norm1(self.self_attn(tokens, tokens, tokens))
        else:
            tokens = self.norm1(tokens + self.self_attn(tokens + prompt, tokens + prompt, tokens))
        tokens = self.norm2(tokens + self.cross_attn_token_to_image(tokens + prompt, cells + places, cells))
        tokens = self.norm3(tokens + self.mlp(tokens))
        cells = self.norm4(cells + self.cross_attn_image_to_token(cells + places, tokens + prompt, tokens))
        return tokens, cells


class _TwoWayTransformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_TwoWayBlock(width, is_first=not index) for index in range(_DECODER_LAYERS))
        self.final_attn_token_to_image = _Attention(width, width // 2)
        self.norm_final_attn = nn.LayerNorm(width)

    def forward(
        self, prompt: Float[Tensor, "N T D"], cells: Float[Tensor, "1 S D"], places: Float[Tensor, "1 S D"]
    ) -> tuple[Float[Tensor, "N T D"], Float[Tensor, "N S D"]]:
        tokens = prompt
        for layer in self.layers:
            tokens, cells = layer(tokens, cells, prompt, places)
        found = self.final_attn_token_to_image(tokens + prompt, cells + places, cells)
        return self.norm_final_attn(tokens + found), cells


class MaskDecoder(nn.Module):
    """Masks of prompts, and an estimate of each mask's IoU with the object."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.transformer = _TwoWayTransformer(channels)
        self.iou_token = nn.Embedding(1, channels)
        self.mask_tokens = nn.Embedding(_MASKS, channels)
        self.output_upscaling = nn.Sequential(
            nn.ConvTranspose2d(channels, channels // 4, 2, 2),
            ChannelNorm(channels // 4),
            nn.GELU(),
            nn.ConvTranspose2d(channels // 4, channels // 8, 2, 2),
            nn.GELU(),
        )
        self.output_hypernetworks_mlps = nn.ModuleList(_LinearStack(channels, channels // 8) for _ in range(_MASKS))
        self.iou_prediction_head = _LinearStack(channels, _MASKS)

    def forward(
        self,
        embedding: Float[Tensor, "1 D h w"],
        places: Float[Tensor, "1 S D"],
        prompt: Float[Tensor, "N T D"],
    ) -> tuple[Float[Tensor, "N 4 hh ww"], Float[Tensor, "N 4"]]:
        """Logits of the masks at a stride of 4, and the estimated IoUs."""
        own = torch.cat([self.iou_token.weight, self.mask_tokens.weight])[None].expand(len(prompt), -1, -1)
        tokens, cells = self.transformer(torch.cat([own, prompt], dim=1), embedding.flatten(2).transpose(1, 2), places)
        fine = self.output_upscaling(cells.transpose(1, 2).unflatten(2, embedding.shape[2:]))  # (N, D/8, 4h, 4w)
        filters = torch.stack([mlp(tokens[:, 1 + i]) for i, mlp in enumerate(self.output_hypernetworks_mlps)], dim=1)
        masks = (filters @ fine.flatten(2)).unflatten(2, fine.shape[2:])
        return masks, self.iou_prediction_head(tokens[:, 0])


# ---------------------------------------------------------------- the whole


@dataclass(frozen=True, slots=True)
class MaskOutput:
    """Masks of some prompts: logits, positive inside, at a stride of 4; and the estimated IoU of each."""

    logits: Float[Tensor, "N M h w"]
    ious: Float[Tensor, "N M"]


class MobileSam(nn.Module):
    """MobileSAM. ``embed`` an image once, then ask for the masks of many prompts."""

    preprocess = PREPROCESS["torchvision"]

    def __init__(
        self, widths: tuple[int, ...] = state_dict.TINY_VIT_WIDTHS, channels: int = state_dict.SAM_CHANNELS
    ) -> None:
        super().__init__()
        self.image_encoder = TinyViT(widths, channels)
        self.prompt_encoder = PromptEncoder(channels)
        self.mask_decoder = MaskDecoder(channels)
        self.requires_grad_(False)
        self.eval()

    def embed(self, image: Float[Tensor, "3 h w"], side: int) -> Float[Tensor, "1 D s s"]:
        """Embedding of RGB pixels 0 .. 255, zero-padded at right and bottom to a square; a multiple of 16.

        The network was trained on squares of 1024 pixels. Smaller ones are faster: places are relative to the square,
        and the windows of attention cover more of it.
        """
        normal = self.preprocess(image[None])
        padded = F.pad(normal, (0, side - image.shape[2], 0, side - image.shape[1]))
        return self.image_encoder(padded)  # type: ignore[no-any-return]

    def masks(
        self, embedding: Float[Tensor, "1 D s s"], points: Float[Tensor, "N T 2"], kinds: Int[Tensor, " T"]
    ) -> MaskOutput:
        """Four masks per prompt: the first for a clear prompt, three for whole, part and part of a part.

        Args:
            points: in pixels of the input, for each prompt.
            kinds: of the points, the same for all prompts; see ``point_prompts`` and ``box_prompts``.
        """
        rows, columns = embedding.shape[2:]
        prompt = self.prompt_encoder(points, kinds, rows * STRIDE)
        dense = embedding + self.prompt_encoder.no_mask_embed.weight[:, :, None, None]
        return MaskOutput(*self.mask_decoder(dense, self.prompt_encoder.grid(rows, columns), prompt))


Prompts = tuple[Float[Tensor, "N T 2"], Int[Tensor, " T"]]


def point_prompts(points: Float[Tensor, "N 2"]) -> Prompts:
    """Prompts of one foreground point each."""
    return torch.stack([points, torch.zeros_like(points)], dim=1), torch.tensor([_FOREGROUND, _PADDING])


def box_prompts(boxes: Float[Tensor, "N 4"]) -> Prompts:
    """Prompts of one box each."""
    return boxes.view(-1, 2, 2), torch.tensor(_CORNERS)


def mobile_sam(weights: str = "mobile-sam") -> MobileSam:
    """The network with stored weights."""
    found = find_weights(weights)
    network = MobileSam()
    load_into(network, fold_batch_norms(found.tensors), weights)
    return network
