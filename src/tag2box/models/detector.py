"""The detector: a backbone, and heads over RoI feature vectors (MIL, refinement with box regression, similarity)."""

import copy
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from tag2box.models.backbone import Backbone, LayeredBackbone, WrappedBackbone, innermost
from tag2box.models.class_maps import ClassMaps
from tag2box.models.context import Context, ContextBackbone
from tag2box.models.rng import RowRng, dropout
from tag2box.ops.losses import at_least_single, unit_rows
from tag2box.types import Batch, Proposals, StageScores

HEAD_STD = 0.001
"""Standard deviation of initial head weights: scores start nearly uniform."""


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=HEAD_STD)
    nn.init.zeros_(layer.bias)
    return layer


class MilHead(nn.Module):
    """Two linear streams, classification and detection (eq. 1), before their softmaxes."""

    def __init__(self, features: int, columns: int, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.cls = _linear(features, columns)
        self.det = _linear(features, columns)
        self.temperature = temperature

    def logits(
        self, vector: Float[Tensor, "R F"], contrast: Float[Tensor, "R F"] | None = None
    ) -> tuple[Float[Tensor, "R c"], Float[Tensor, "R c"]]:
        """Logits of both streams; the detection stream reads ``contrast``, and is divided by the temperature."""
        return self.cls(vector), self.det(vector if contrast is None else contrast) / self.temperature


class RefineHead(nn.Module):
    """One refinement stage: C+1 class logits and, with ``regress``, box deltas, by class or the same for all."""

    def __init__(self, features: int, num_classes: int, *, regress: bool, by_class: bool = True) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.cls = _linear(features, num_classes + 1)
        self.box = _linear(features, 4 * num_classes if by_class else 4) if regress else None

    def deltas(self, vector: Float[Tensor, "R F"]) -> tuple[Float[Tensor, "R c4"], ...]:
        """Box deltas of every class, one tensor; none without regression."""
        if self.box is None:
            return ()
        found: Tensor = self.box(vector)
        return (found.repeat(1, 4 * self.num_classes // max(1, found.shape[1])),)


class SimilarityHead(nn.Module):
    """phi: two linear layers onto the unit sphere (OD-WSCL, section 4.1)."""

    def __init__(self, features: int, embed_dim: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, features)
        self.out = nn.Linear(features, embed_dim)
        for layer in (self.hidden, self.out):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, vector: Float[Tensor, "R F"]) -> Float[Tensor, "R D"]:
        """Unit-length embeddings."""
        hidden = torch.relu(self.hidden(vector))
        return unit_rows(at_least_single(self.out(hidden)))


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Heads on top of the backbone."""

    stages: Annotated[int, Field(ge=0, le=100)] = 3
    """K, the number of refinement stages; with 0, detections come from the MIL head."""
    regress: bool = True
    """Box regression in every stage."""
    regress_by_class: bool = True
    """Box regression of its own for every class; if off, one for all classes, which learns from the boxes of all."""
    embed_dim: Annotated[int, Field(ge=1, le=65_536)] = 128
    """D, the size of the similarity embedding."""
    mil_background: bool = False
    """A background column in both MIL softmaxes (the published code has one, the paper has none).

    With a single class there is always one: a softmax over one column is constant and has no gradient.
    """

    mil_heads: Annotated[int, Field(ge=1, le=2)] = 1
    """Number of MIL heads; coupled MIL (C-MIDN) needs two."""
    mil_temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of the softmax over proposals; WSDDN's authors use 2."""

    box_prior: Annotated[float, Field(ge=0)] = 0.0
    """Factor on objectness: RoI maps are multiplied by this times the proposal's score; 0 disables it.

    WSDDN's authors use 10 with Edge Boxes. Requires proposals with scores.
    """

    context: Context = Context()

    early_layers: Annotated[int, Field(ge=0, le=2)] = 0
    """Layers before the RoI map whose responses are computed, too, nearest first; layer-wise attention (CASD) uses 2.

    VGG16: conv4, conv3. R-WS: res4, res3. lite0: block 14, block 10.
    """

    region: bool = False
    """A region classifier of its own, which chooses the proposals that the detector sees (WSRPN)."""

    neck: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Size of a trained layer between the backbone's feature vectors and all heads (Linear, ReLU, and dropout at the
    rate of the backbone); default: none. With a frozen neck, such as ``backbone.pooled``, the heads are otherwise
    linear, and WSCL and pseudo labels shape no features."""

    def mil_columns(self, num_classes: int) -> int:
        """Number of columns of the MIL head."""
        return num_classes + int(self.mil_background or num_classes == 1)


class NeckBackbone(WrappedBackbone):
    """A backbone with one more layer at the end of its neck: v' = dropout(relu(W v + b)).

    It is part of the neck, so that own and context vectors, augmented copies, exact steps, several processes and
    feature caches need nothing of their own for it.
    """

    def __init__(self, inner: Backbone, size: int) -> None:
        super().__init__(inner)
        self.layer, self.vector_size = nn.Linear(inner.vector_size, size), size
        self.dropout = innermost(inner).dropout
        nn.init.kaiming_normal_(self.layer.weight, nonlinearity="relu")
        nn.init.zeros_(self.layer.bias)

    def roi_maps(self, features: Float[Tensor, "N c h w"], proposals: Proposals) -> Float[Tensor, "R ch s s"]:
        """Those of the inner backbone."""
        return self.inner.roi_maps(features, proposals)

    def neck(self, maps: Float[Tensor, "R ch s s"], row_rng: RowRng | None = None) -> Float[Tensor, "R F"]:
        """The inner neck, then the layer."""
        return self._last(self.inner.neck(maps, row_rng), row_rng)

    def neck_stem(self, maps: Float[Tensor, "R ch s s"]) -> Float[Tensor, "R ..."]:
        """The first part of the inner neck."""
        return self.inner.neck_stem(maps)

    def neck_tail(
        self, stem: Float[Tensor, "R ..."], factors: Float[Tensor, "R s s"], row_rng: RowRng | None = None
    ) -> Float[Tensor, "R F"]:
        """The rest of the inner neck, then the layer."""
        return self._last(self.inner.neck_tail(stem, factors, row_rng), row_rng)

    def _last(self, vectors: Float[Tensor, "R f"], row_rng: RowRng | None) -> Float[Tensor, "R F"]:
        return dropout(torch.relu(self.layer(vectors)), self.dropout, row_rng)

    def responses(self, maps: Float[Tensor, "R ch s s"], stem: Float[Tensor, "R ..."]) -> Float[Tensor, "R L s s"]:
        """Those of the inner backbone."""
        return self.inner.responses(maps, stem)

    def roi_map_key(self) -> str:
        """The inner key: RoI maps do not depend on the layer."""
        return self.inner.roi_map_key()


def compute_maps(backbone: Backbone, batch: Batch) -> Float[Tensor, "R ch h w"]:
    """The RoI maps of a batch of photos or of trunk maps."""
    if batch.images is not None:
        return backbone.roi_maps(backbone.trunk(batch.images), batch.proposals)
    assert batch.trunks is not None  # a Batch carries one of the three
    photos = enumerate(batch.trunks)
    return torch.cat([backbone.roi_maps(trunk[None], batch.proposals.image(i)) for i, trunk in photos])


class RegionClassifier(nn.Module):
    """WSRPN's second stage: a backbone and a MIL head of its own, trained on tags, that score windows.

    Once convolutions are shared, it reads the RoI maps of the detector, and of its own backbone only the neck is used.
    """

    def __init__(self, backbone: Backbone, features: int, columns: int) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(backbone)
        self.mil = MilHead(features, columns)
        self.is_shared = True

    def maps(self, batch: Batch, maps: Float[Tensor, "R ch h w"]) -> Float[Tensor, "R ch h w"]:
        """The RoI maps that it reads; ``maps`` are those of the detector, which it does not train."""
        return maps.detach() if self.is_shared or batch.maps is not None else compute_maps(self.backbone, batch)

    def logits(
        self, maps: Float[Tensor, "R ch h w"], row_rng: RowRng | None = None
    ) -> tuple[Float[Tensor, "R c"], Float[Tensor, "R c"]]:
        """Logits of both streams, of each window."""
        return self.mil.logits(self.backbone.neck(maps, row_rng)[:, : self.mil.cls.in_features])


class Detector(nn.Module):
    """Trunk, RoI maps, neck and heads, one method each; independent of losses and labels.

    Example:
        detector = Detector(Lite0().build(), num_classes=20, heads=Heads())
        maps = detector.roi_maps(batch)  # (R, ch, h, w)
        vectors = detector.neck(maps)  # (R, F)
        scores = detector.score(vectors)  # MIL and refinement logits, box deltas
    """

    def __init__(self, backbone: Backbone, num_classes: int, heads: Heads, class_maps: ClassMaps | None = None) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.context = context = heads.context
        if heads.early_layers:
            backbone = LayeredBackbone(backbone, heads.early_layers)
        if heads.neck is not None:
            backbone = NeckBackbone(backbone, heads.neck)
        features = self.vector_size = backbone.vector_size
        self.backbone = backbone if context.on == "none" else ContextBackbone(backbone, context.scale, context.regions)
        self.box_prior = heads.box_prior
        columns, temperature = heads.mil_columns(num_classes), heads.mil_temperature
        self.mil, *more = (MilHead(features, columns, temperature=temperature) for _ in range(heads.mil_heads))
        self.mil_more = nn.ModuleList(more)
        self.refine = nn.ModuleList(
            RefineHead(features, num_classes, regress=heads.regress, by_class=heads.regress_by_class)
            for _ in range(heads.stages)
        )
        self.similarity = SimilarityHead(features, heads.embed_dim)
        self.region = RegionClassifier(self.backbone, features, columns) if heads.region else None
        self.class_maps = class_maps.requires_grad_(False) if class_maps is not None else None
        self.is_adapted = False

    def load_adapted(self) -> None:
        """Start from the backbone of the class maps, which has learned the tags."""
        assert self.class_maps is not None
        for backbone in [self.backbone] + ([self.region.backbone] if self.region is not None else []):
            innermost(backbone).load_state_dict(self.class_maps.backbone.state_dict())
        self.is_adapted = True

    def drop_gradients(self, *, trains_region: bool) -> None:
        """Leave those of the region classifier, or those of the detector; shared convolutions are not trained."""
        assert self.region is not None
        own, shared = set(self.region.parameters()), set[nn.Parameter]()
        if self.region.is_shared:
            shared = {p for part in self.backbone.roi_map_modules() for p in part.parameters()}
        for p in self.parameters():
            if (p in own) != trains_region or p in shared:
                p.grad = None

    def roi_maps(self, batch: Batch) -> Float[Tensor, "R ch h w"]:
        """f: one small map per proposal; read from the batch if it comes from the feature cache."""
        maps = compute_maps(self.backbone, batch) if batch.maps is None else batch.maps
        return self.weight_by_objectness(maps, batch.side_info.objectness) if self.box_prior else maps

    def weight_by_objectness(
        self, maps: Float[Tensor, "R ch h w"], objectness: Float[Tensor, " R"] | None
    ) -> Float[Tensor, "R ch h w"]:
        """Maps multiplied by ``box_prior`` times objectness; unchanged if ``box_prior`` is 0."""
        if self.box_prior == 0:
            return maps
        assert objectness is not None  # checked before training starts
        return maps * (self.box_prior * objectness).to(maps)[:, None, None, None]

    def neck(self, maps: Float[Tensor, "R ch h w"], row_rng: RowRng | None = None) -> Float[Tensor, "R F"]:
        """v = eta(f): the feature vector of each proposal; with context, followed by that of its surroundings."""
        return self.backbone.neck(maps, row_rng)

    def own(self, vector: Float[Tensor, "R F"]) -> Float[Tensor, "R f"]:
        """The feature vector of each proposal, without that of its surroundings."""
        return vector if self.context.on == "none" else vector[:, : self.vector_size]

    def score(self, vector: Float[Tensor, "R F"]) -> StageScores:
        """Logits and box deltas of all stages."""
        own = contrast = vector
        if self.context.on != "none":
            own, *_, around = parts = vector.split(self.vector_size, dim=1)
            contrast = self.context.contrast(parts[-2], around)
        seen = contrast if self.context.on in {"mil", "both"} else own  # by the detection stream
        refined = contrast if self.context.on in {"refine", "both"} else own
        stages = [stage for stage in self.refine if isinstance(stage, RefineHead)]
        more = [head for head in self.mil_more if isinstance(head, MilHead)]
        mil_cls, mil_det = self.mil.logits(own, seen)
        return StageScores(
            mil_cls=mil_cls,
            mil_det=mil_det,
            refine=tuple(stage.cls(refined) for stage in stages),
            deltas=tuple(x for stage in stages for x in stage.deltas(own)),
            mil_more=tuple(x for head in more for x in head.logits(own, seen)),
        )

    def embed(self, vector: Float[Tensor, "R F"]) -> Float[Tensor, "R D"]:
        """z = phi(v): unit-length embeddings."""
        embedding: Tensor = self.similarity(vector if self.context.on == "none" else self.own(vector))
        return embedding
