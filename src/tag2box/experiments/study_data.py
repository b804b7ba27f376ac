"""The dataset of a study: training photos with tags, test photos with boxes, shared proposals and feature caches."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from tag2box import annotations, errors, io, recipes
from tag2box.cli.data import dataset_title
from tag2box.cli.evaluate import EvalSet, class_map_rows, eval_set, truth_in_order
from tag2box.data.scenes import Scenes
from tag2box.formats import datasets, listing, voc_tags
from tag2box.metrics.baselines import Baseline
from tag2box.models.class_maps import ClassMaps
from tag2box.progress import Progress, silent
from tag2box.proposals import base, shards
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.proposals.store import INDEX, ProposalStore
from tag2box.training.adaptation import Adaptation, adapt, build_class_maps

SPLITS = ("train", "test")
SCENES = "scenes"
"""The value of ``--on`` for generated photos."""

PROBE = Adaptation(part="cells", epochs=16)
"""How the probe of frozen features learns the tags: the class maps of C-MIDN's segmentation do, too."""

_TRAIN, _TEST = ("trainval", "train"), ("test", "val")  # image lists of a VOC folder, in order of preference


@dataclass(frozen=True)
class SplitStores:
    """Stores of proposals, one per split, as written by ``tag2box proposals import`` or ``tag2box propose``."""

    train: Path
    test: Path

    def method(self) -> base.ProposalMethod:
        """The method that both were made with; ``Imported`` if they were imported, or boxes were snapped."""
        train, test = (ProposalStore.open(path, False).source for path in (self.train, self.test))
        if train.get("kind") == test.get("kind") and train.get("kind") in {Imported.kind, base.SNAPPED}:
            return Imported()
        if train != test:
            difference = shards.source_difference(dict(test), train)
            raise errors.UserError(f"{self.test}: {difference} as {self.train}; both splits need boxes of one method")
        try:
            return base.method_from_source(train)
        except errors.UserError as error:
            raise errors.UserError(f"{self.train}: source.kind = {train.get('kind')}: {error}") from None


@dataclass(frozen=True)
class Splits:
    """The training and test split of a dataset; ``boxes`` are proposals made beforehand."""

    train: listing.DataSource
    test: listing.DataSource
    boxes: SplitStores | None = None


StudySource = Scenes | Splits
"""Generated scenes, different for each seed, or a dataset shared by all seeds."""


@dataclass(frozen=True)
class StudyData:
    """A dataset opened for a study. Training gets ``source`` alone, which has no boxes.

    Systems that require counts get ``counted``: the same photos, with objects counted from boxes.
    """

    name: str
    source: recipes.Data
    tagged: annotations.TaggedPhotos
    train: annotations.Truth
    test_photos: tuple[annotations.Photo, ...]
    test: annotations.Truth
    home: Path  # folder of shared proposals and feature caches
    fingerprint: str
    counted: recipes.Data
    boxes: SplitStores | None = None

    def placed(self, config: recipes.Config) -> recipes.Config:
        """Settings with the length for these photos, and the paths of what their runs share: proposals, features."""
        source = self.counted if config.criterion.requirements.counts else self.source
        data = replace(source, proposals=self.proposals(config, "train"))
        plan = config.plan.for_photos(len(self.tagged), config.loader.batch_size)
        return replace(config, data=data, plan=plan, feature_cache=self.home / "maps")

    def test_set(self, config: recipes.Config) -> EvalSet:
        """The test photos and their truth."""
        return EvalSet(self.test_photos, self.test, self.proposals(config, "test"))

    def train_set(self, config: recipes.Config) -> EvalSet:
        """The training photos and their truth, for CorLoc after training."""
        return EvalSet(self.tagged.photos, self.train, self.proposals(config, "train"))

    def with_probe(self, config: recipes.Config, split: str, progress: Progress = silent) -> EvalSet:
        """A split with the rows of a classifier of frozen features that learned the tags.

        They are what the class maps of an adapted run give: its scores in trivial boxes, and the boxes of its maps.
        """
        found = self.test_set(config) if split == "test" else self.train_set(config)
        key = f"{split} {config.backbone}"
        if key not in self._probe_rows:
            self._probe_rows[key] = class_map_rows(self._probe(config, progress), found)
        return replace(found, baselines=self._probe_rows[key])

    @cached_property
    def _probe_rows(self) -> dict[str, tuple[Baseline, ...]]:
        return {}

    def _probe(self, config: recipes.Config, progress: Progress) -> ClassMaps:
        """Class maps of cells of the frozen backbone; what they learned is cached beside the features."""
        with torch.random.fork_rng([]):  # of initial weights
            torch.manual_seed(0)
            backbone = config.backbone.build(pretrained=True)
            maps = build_class_maps(backbone, len(self.tagged.classes), PROBE)
        maps = maps.to(config.compute.torch_device())
        adapt(maps, self.tagged, PROBE, folder=self.home / "maps", seed=0, progress=progress)
        return maps

    def stores_digest(self, config: recipes.Config) -> str:
        """A digest of imported proposals; empty if proposals are computed."""
        if not isinstance(config.proposals, Imported):
            return ""
        return _digest([ProposalStore.open(self._imported(split)).path.joinpath(INDEX).read_text() for split in SPLITS])

    def _imported(self, split: str) -> Path:
        if self.boxes is None:
            raise errors.UserError(
                "imported proposals are required: name their stores with --proposals and --test-proposals"
            )
        return self.boxes.train if split == "train" else self.boxes.test

    def proposals(self, config: recipes.Config, split: str) -> Path:
        """The store of a split's proposals, which need not exist yet."""
        if isinstance(config.proposals, Imported):
            return self._imported(split)
        if self.boxes is not None and self.boxes.method() == config.proposals:
            return self._imported(split)
        method = config.proposals.source()
        name = _digest([json.dumps(method, sort_keys=True, default=str)])
        return self.home / "proposals" / f"{self.fingerprint}-{method['kind']}-{name}" / split


def splits_of(source: listing.DataSource, test: listing.DataSource | None, test_split: str | None) -> Splits:
    """The two splits of a dataset; for a VOC folder, the usual image lists if none are named."""
    form = datasets.dataset_format(source)
    if test is None and not form.names_splits:
        raise errors.UserError(f"{source.path}: name the test photos too, with --test FILE")
    train = _with_split(source, source.split, _TRAIN)
    return Splits(train, _with_split(test or replace(source, split=None), test_split, _TEST))


def _with_split(source: listing.DataSource, split: str | None, usual: Sequence[str]) -> listing.DataSource:
    if split is not None or not datasets.dataset_format(source).names_splits:
        return replace(source, split=split)
    lists = voc_tags.voc_root(source.path) / "ImageSets" / "Main"
    found = next((name for name in usual if (lists / f"{name}.txt").exists()), None)
    if found is None:
        raise errors.UserError(f"{lists}: no list {' or '.join(usual)}; name one with --split and --test-split")
    return replace(source, split=found)


def open_data(source: StudySource, seed: int, home: Path, *, progress: Progress = silent) -> StudyData:
    """Open the dataset of a seed: scenes are generated on first use, a dataset is read."""
    if isinstance(source, Scenes):
        return _open_scenes(replace(source, seed=seed), home, progress)
    train = source.train
    _check(train)
    _check(source.test)
    data = recipes.Data(tags=train.path, photos=train.photos, split=train.split, classes=train.classes)
    tagged = datasets.read_tagged(train)
    test = eval_set(replace(source.test, classes=tagged.classes), home)
    return replace(_opened(dataset_title(train), data, tagged, test, home), boxes=source.boxes)


def _check(source: listing.DataSource) -> None:
    if not datasets.has_boxes(source):
        raise errors.UserError(
            f"{source.path}: has no boxes, which evaluation needs; name a VOC folder or COCO file with boxes"
        )


def _open_scenes(world: Scenes, home: Path, progress: Progress) -> StudyData:
    folder = home / SCENES / f"seed{world.seed}"
    title = f"scenes of seed {world.seed}"
    with (
        io.wait_for_lock(
            folder.with_suffix(".lock"), lambda: progress(f"{title}: another process generates them; waiting", 1)
        ),
        progress(title, world.train + world.test) as bar,
    ):
        world.write(folder, on_progress=lambda *_: bar.advance())
    train, test = folder / "train", folder / "test"
    source = recipes.Data(tags=train / "tags.csv", photos=train / "photos", classes=world.classes)
    tagged = datasets.read_tagged(source.source())
    truth = listing.DataSource(path=test / "truth.json", photos=test / "photos", classes=world.classes)
    return _opened(SCENES, source, tagged, eval_set(truth, home), home, truth=train / "truth.json")


def _opened(
    name: str,
    source: recipes.Data,
    tagged: annotations.TaggedPhotos,
    test: EvalSet,
    home: Path,
    truth: Path | None = None,
) -> StudyData:
    where = source.source()
    boxes = datasets.read_truth(replace(where, path=truth or where.path, classes=tagged.classes))
    train = truth_in_order(boxes, tagged.photos, where.path)
    twice = {photo.path for photo in tagged.photos} & {photo.path for photo in test.photos}
    if twice:
        raise errors.UserError(
            f"{min(twice)}: in both the training and the test split; name splits that share no photo"
        )
    lines = [*_describe(tagged.photos, train), *_describe(test.photos, test.truth), str(tagged.tags.tolist())]
    counted = replace(source, tags=truth or source.tags, counts="boxes")
    return StudyData(name, source, tagged, train, test.photos, test.truth, home, _digest(lines), counted)


def _describe(photos: Sequence[annotations.Photo], truth: annotations.Truth) -> Iterator[str]:
    """Everything figures depend on; pixels are represented by the size of their file."""
    yield str(truth.classes)
    for photo, objects in zip(photos, truth.objects, strict=True):
        marks = objects.labels.tolist(), objects.difficult.tolist(), objects.crowd.tolist()
        yield f"{photo.id} {photo.width}x{photo.height} {_bytes(photo.path)} {objects.boxes.tolist()} {marks}"


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise errors.UserError(f"{path}: no such photo ({error.strerror}); put it back") from None


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
