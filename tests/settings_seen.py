"""Effects of settings that show without a whole run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from fake_sam import use_fake_sam
from strategies import make_labeler_input, random_boxes
from tag2box.annotations import Photo, TaggedPhotos
from tag2box.cli.training_data import read_training
from tag2box.errors import UserError
from tag2box.methods.oicr import Oicr
from tag2box.methods.wscl import Contrast
from tag2box.models.adversary import ConcreteDropBlock
from tag2box.models.augment import Augment
from tag2box.models.backbone import innermost
from tag2box.models.detector import Detector
from tag2box.models.drop_block import InvertedAttention, hardest_rows
from tag2box.models.lite0 import Lite0
from tag2box.models.resnet_ws import ResNetWs, ResNetWsBackbone
from tag2box.models.rng import RowRng, StepRng, Stream
from tag2box.models.vgg16 import Vgg16, Vgg16Backbone
from tag2box.recipes import Config
from tag2box.training.adaptation import adapt, build_class_maps, build_segments
from tag2box.training.batches import ImageBatches
from tag2box.training.criterion import Criterion
from tag2box.training.loader import count_workers
from tag2box.training.optim import AdversaryOptimizer
from tag2box.training.step import Step
from tag2box.types import Batch, BatchMeta, LabelerInput, Proposals, SideInfo, StageScores
from tiny import tiny_detector, tiny_photos


def row_rng() -> RowRng:
    return StepRng(0, 0).row_rng(Stream.NECK, torch.zeros(1, dtype=torch.long))


def computed(config: Config) -> object:
    """How a step would be run, or the error."""
    memory = config.compute.memory_for(has_cached_maps=True)
    try:
        return memory, config.compute.torch_device(), config.compute.runtime()
    except UserError as error:
        return str(error)


def built_lite0(config: Config) -> object:
    """Network of the lite0 settings: sizes, pooling, trained layers, and the effect of dropout on a vector."""
    torch.manual_seed(0)
    network = config.backbone.build(pretrained=False).train()
    vector = network.neck(5 * torch.randn(1, network.channels, 2, 2), row_rng())
    learns = [name for name, p in network.named_parameters() if p.requires_grad]
    return network.pool, network.map_size, network.frozen_roi_maps, learns, (vector == 0).sum().item()


def layers_of_responses(config: Config) -> object:
    """How many layers of lite0 have responses."""
    return Detector(config.backbone.build(pretrained=False), 1, config.heads).backbone.layers


def believed_maps(config: Config) -> object:
    """The map of a proposal with an objectness of 0.25."""
    return (
        tiny_detector(1, heads=config.heads).weight_by_objectness(torch.ones(1, 1, 1, 1), torch.tensor([0.25])).item()
    )


def built_vgg16(config: Config) -> object:
    """Likewise, narrow: all of VGG16's fc6 would take seconds."""
    assert isinstance(config.backbone, Vgg16)
    torch.manual_seed(0)
    network = Vgg16Backbone(config.backbone, vector_size=64).train()
    vector = network.neck(torch.rand(1, network.channels, 7, 7), row_rng())
    learns = [name for name, p in network.named_parameters() if p.requires_grad]
    return network.preprocess(torch.full((1, 3, 2, 2), 99.0)).tolist(), vector.tolist(), learns


def built_resnet_ws(config: Config) -> object:
    """Likewise, with few channels."""
    assert isinstance(config.backbone, ResNetWs)
    torch.manual_seed(0)
    network = ResNetWsBackbone(config.backbone, width=2, neck=(64, 64)).train()
    vector = network.neck(torch.rand(1, network.channels, 7, 7), row_rng())
    return len(network.res4), network.preprocess(torch.full((1, 3, 2, 2), 99.0)).tolist(), vector.tolist()


def weights_wanted(config: Config) -> object:
    """The weights file that the network requires."""
    with pytest.raises(UserError) as error:
        config.backbone.build(pretrained=True)
    return str(error.value)


def kind_of_backbone(config: Config) -> object:
    return type(config.backbone)


def picture() -> torch.Tensor:
    """Structure at several sizes."""
    rows, cols = torch.meshgrid(torch.arange(80), torch.arange(100), indexing="ij")
    return torch.stack([(rows // 9 * 37 + cols // 13 * 51) % 256, rows * 3 % 256, cols * 2 % 256]).to(torch.uint8)


def boxes_of_a_photo(config: Config) -> object:
    """Proposals of one picture."""
    found = config.proposals(picture())
    return found.boxes.tolist(), found.scores.tolist()


def boxes_with_fake_sam(config: Config) -> object:
    """Proposals of one picture, from masks that need no weights."""
    with pytest.MonkeyPatch.context() as patch:
        use_fake_sam(patch)
        return boxes_of_a_photo(config)


def superpixels_of_a_photo(config: Config) -> object:
    """Superpixels of one picture."""
    return config.superpixels(picture()).tolist()


def counts_read(config: Config) -> object:
    """The object counts of a run."""
    counts = read_training(config).counts
    return None if counts is None else counts.tolist()


def readers(config: Config) -> object:
    """How many processes would read photos."""
    return count_workers(config.loader.workers, batch_bytes=1000)


def orders(config: Config) -> object:
    """Which photos share a batch."""
    photos = TaggedPhotos(
        (), tuple(Photo(f"{i}", Path(), 9 + i % 2, 10 - i % 2) for i in range(8)), torch.ones(8, 0) > 0
    )
    source = ImageBatches(photos, NoBoxes(), config.loader, seed=0)
    return [[turn.index for turn in source.sampled(iteration)] for iteration in range(4)]


class NoBoxes:
    def boxes(self, photo_id: str, /) -> torch.Tensor:
        return torch.zeros(0, 4)

    def scores(self, photo_id: str, /) -> torch.Tensor:
        return torch.zeros(0)


def model_wanted(config: Config) -> object:
    """The structured forest that the search requires."""
    try:
        config.proposals.ready()
    except UserError as error:
        return str(error)
    return "none"


def photos_read(config: Config) -> object:
    """The outcome of reading a dataset of which a photo is missing."""
    try:
        return len(read_training(config))
    except UserError as error:
        return str(error)


def labels_of_inputs(config: Config) -> object:
    """What the labeler makes of many random proposals, with counts of their objects."""
    inputs = make_labeler_input((80, 60), [[1, 0, 1], [0, 1, 1]], seed=1)
    labels = config.criterion.labeler(replace(inputs, side_info=SideInfo(counts=torch.full((2, 3), 3)))).stages
    return [(x.cls.tolist(), x.weight.tolist(), x.pseudo_boxes.rows.tolist()) for x in labels]


def labels_on_the_way(config: Config) -> object:
    """Pseudo labels of random proposals with feature vectors and evidence, early and late in training."""
    inputs = make_labeler_input((80, 60), [[1, 0, 1], [0, 1, 1]], seed=1)
    evidence = torch.rand(140, generator=torch.Generator().manual_seed(1))
    g = torch.Generator().manual_seed(2)
    deltas = tuple(4 * torch.randn(140, 12, generator=g) for _ in inputs.probs)
    maps = tuple(torch.arange(100).view(10, 10) // 3 % 7 for _ in inputs.proposals.sizes)
    side_info = SideInfo(evidence=evidence, superpixels=maps)
    proposals = replace(inputs.proposals, frames=((150, 150),) * len(maps))
    inputs = replace(inputs, proposals=proposals, vectors=inputs.embed, deltas=deltas, side_info=side_info)
    labeler = config.criterion.for_classes(("person", "disc", "bar")).labeler
    stages = [x for p in (0.3, 0.9) for x in labeler(replace(inputs, fraction=p)).stages]
    pseudo_boxes = [x.pseudo_boxes.placed(inputs.proposals).tolist() for x in stages]
    return pseudo_boxes, [(x.cls.tolist(), x.weight.tolist()) for x in stages]


def with_guides(inputs: LabelerInput) -> LabelerInput:
    """Four photos of 30 proposals with evidence of class maps and segmentation."""
    g = torch.Generator().manual_seed(1)
    segments = tuple(torch.randint(4, (8, 8), generator=g) for _ in range(4))
    proposals = replace(inputs.proposals, frames=((150, 150),) * 4)
    side_info = SideInfo(class_evidence=torch.rand(120, 3, generator=g), segments=segments)
    return replace(inputs, proposals=proposals, side_info=side_info)


def layers_that_adapt(config: Config) -> tuple[str, ...]:
    """The weights of lite0 that one step of adaptation changes."""
    backbone = Lite0().build(pretrained=False)
    before = {name: value.clone() for name, value in backbone.named_parameters()}
    with TemporaryDirectory() as folder:
        photos, maps = tiny_photos(Path(folder), 2), build_class_maps(backbone, 3, config.adaptation)
        adapt(maps, photos, config.adaptation, folder=Path(folder) / "maps", seed=0)
    return tuple(name for name, value in backbone.named_parameters() if not torch.equal(value, before[name]))


def segments_of_photos(config: Config) -> object:
    """The segmentation of tiny photos by the tiny network."""
    with TemporaryDirectory() as folder:
        photos = tiny_photos(Path(folder), 4)
        backbone = innermost(tiny_detector(3).backbone)
        found = build_segments(backbone, photos, config.segmentation, folder=Path(folder) / "maps", seed=0)
        return [found(photo.id).tolist() for photo in photos.photos]


def mil_scores_of_inputs(config: Config) -> object:
    """MIL scores of random logits of many proposals, with two heads."""
    inputs = make_labeler_input((30,) * 4, [[1, 1, 1]] * 4)
    logits = torch.randn(4, 120, 3, generator=torch.Generator().manual_seed(0))
    scores = StageScores(logits[0], logits[1], (), (), (logits[2], logits[3]))
    inputs = with_guides(inputs)
    result = config.criterion.mil(scores, BatchMeta(inputs.proposals, inputs.tags, side_info=inputs.side_info), 0.01)
    return result.scores.tolist(), None if result.second is None else result.second.tolist(), result.loss.item()


def labels_of_two_heads(config: Config) -> object:
    """Pseudo labels of many random proposals with different scores of two MIL heads, and subsets of three."""
    inputs = make_labeler_input((30,) * 4, [[1, 1, 1]] * 4)
    inputs = with_guides(replace(inputs, second=inputs.probs[1], subsets=torch.arange(120) // 3, fraction=0.01))
    labels = config.criterion.labeler(inputs).stages
    return [(x.cls.tolist(), x.weight.tolist(), x.pseudo_boxes.rows.tolist()) for x in labels]


def inverted_cells(config: Config) -> object:
    """The cells that inverted attention drops of random proposals, early and late in training."""
    own, g = config.drop_block, torch.Generator().manual_seed(0)
    assert isinstance(own, InvertedAttention)
    is_hard = hardest_rows(torch.rand(30, generator=g), torch.arange(30) % 2 == 0, (30,), own.hardest)
    gradient, rand = torch.randn(30, 7, 7, generator=g), torch.rand(30, 7, 7, generator=g)
    return [own.invert(gradient, rand, is_hard, late=fraction >= own.late).tolist() for fraction in (0.3, 0.7)]


def adversarial_step(config: Config) -> object:
    """The factors of a mask net, and its weights after an adversarial step."""
    assert isinstance(config.drop_block, ConcreteDropBlock)
    net, rng, g = config.drop_block.build(5, 0), StepRng(0, 0), torch.Generator().manual_seed(0)
    images, maps = torch.zeros(60, dtype=torch.long), torch.rand(60, 5, 3, 3, generator=g)
    factors = net.factors(net.draw(rng, images, 3), maps, images)
    boxes = random_boxes(60, g)
    batch = Batch(("a",), torch.ones(1, 3, dtype=torch.bool), Proposals(boxes, (60,)), maps=maps)
    plain = Criterion(labeler=Oicr(), contrast=Contrast(enabled=False))
    Step(tiny_detector(3), plain, net, Augment()).adversarial_step(batch, rng)
    AdversaryOptimizer.of(net).step(cuts=1)
    return factors.tolist(), [p.tolist() for p in net.parameters()]
