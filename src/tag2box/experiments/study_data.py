"""Where a study takes place: photos with tags to learn from, photos with truth to be measured on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tag2box.annotations import Photo, TaggedPhotos, Truth
from tag2box.commands.assess import Exam
from tag2box.commands.data_stats import title
from tag2box.commands.report import exam, in_order
from tag2box.data.scenes import Scenes
from tag2box.errors import UserError
from tag2box.formats.datasets import dataset_format, has_boxes, read_tagged, read_truth
from tag2box.formats.listing import DataSource
from tag2box.formats.voc_tags import voc_root
from tag2box.io import wait_for_lock
from tag2box.progress import Progress, silent
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.proposals.store import INDEX, ProposalStore
from tag2box.recipes import Config, Data

SPLITS = ("train", "test")
SCENES = "scenes"
"""The name that ``--on`` has for generated photos."""

_LEARN, _TEST = ("trainval", "train"), ("test", "val")  # image lists of a VOC folder, in the order they are looked for


@dataclass(frozen=True)
class Boxes:
    """Stores of proposals made elsewhere, as ``tag2box proposals import`` writes them, one for each part."""

    train: Path
    test: Path


@dataclass(frozen=True)
class Splits:
    """A dataset of somebody's own: the part to learn from and the part to be measured on."""

    train: DataSource
    test: DataSource
    boxes: Boxes | None = None


Place = Scenes | Splits
"""Generated photos, of which each seed has its own, or a dataset, which all seeds share."""


@dataclass(frozen=True)
class StudyData:
    """A dataset opened for a study. Training is told of ``source`` alone, which has no key for boxes.

    Rows that ask for counts are told of ``counted`` instead: the same photos, their objects counted from boxes.
    """

    name: str
    source: Data
    tagged: TaggedPhotos
    train: Truth
    test_photos: tuple[Photo, ...]
    test: Truth
    home: Path  # of what is kept of it
    fingerprint: str
    counted: Data
    boxes: Boxes | None = None

    def placed(self, config: Config) -> Config:
        """Settings that learn from this dataset, with proposals and maps where all runs on it share them."""
        source = self.counted if config.criterion.requirements.counts else self.source
        data = replace(source, proposals=self.proposals(config, "train"))
        return replace(config, data=data, feature_cache=self.home / "maps")

    def exam(self, config: Config) -> Exam:
        """The photos to be measured on."""
        return Exam(self.test_photos, self.test, self.proposals(config, "test"))

    def train_exam(self, config: Config) -> Exam:
        """The training photos with their truth: for CorLoc, after training."""
        return Exam(self.tagged.photos, self.train, self.proposals(config, "train"))

    def boxes_of(self, config: Config) -> str:
        """What proposals made elsewhere add to what a cell depends on; empty where they are made here."""
        if not isinstance(config.proposals, Imported):
            return ""
        return _digest([ProposalStore.open(self._brought(part)).path.joinpath(INDEX).read_text() for part in SPLITS])

    def _brought(self, part: str) -> Path:
        if self.boxes is None:
            raise UserError(
                "proposals made elsewhere are wanted: name their stores with --proposals and --test-proposals"
            )
        return self.boxes.train if part == "train" else self.boxes.test

    def proposals(self, config: Config, part: str) -> Path:
        """Where the boxes of a part, found with a method, are or shall be kept."""
        if isinstance(config.proposals, Imported):
            return self._brought(part)
        method = config.proposals.source()
        name = _digest([json.dumps(method, sort_keys=True, default=str)])
        return self.home / "proposals" / f"{self.fingerprint}-{method['kind']}-{name}" / part


def splits_of(source: DataSource, test: DataSource | None, test_split: str | None) -> Splits:
    """The two parts of a dataset; of a VOC folder, the image lists everybody uses where none are named."""
    form = dataset_format(source)
    if test is None and not form.names_splits:
        raise UserError(f"{source.path}: name the photos to be measured on too, with --test FILE")
    learn = _with_split(source, source.split, _LEARN)
    return Splits(learn, _with_split(test or replace(source, split=None), test_split, _TEST))


def _with_split(source: DataSource, split: str | None, usual: Sequence[str]) -> DataSource:
    if split is not None or not dataset_format(source).names_splits:
        return replace(source, split=split)
    lists = voc_root(source.path) / "ImageSets" / "Main"
    found = next((name for name in usual if (lists / f"{name}.txt").exists()), None)
    if found is None:
        raise UserError(f"{lists}: no list {' or '.join(usual)}; name one with --split and --test-split")
    return replace(source, split=found)


def open_data(place: Place, seed: int, home: Path, *, progress: Progress = silent) -> StudyData:
    """The dataset of a seed: scenes are drawn on first use, a dataset is read."""
    if isinstance(place, Scenes):
        return _open_scenes(replace(place, seed=seed), home, progress)
    _check(place.train)
    _check(place.test)
    source = Data(
        tags=place.train.path, photos=place.train.photos, split=place.train.split, classes=place.train.classes
    )
    tagged = read_tagged(place.train)
    test = exam(replace(place.test, classes=tagged.classes), home)
    return replace(_opened(title(place.train), source, tagged, test, home), boxes=place.boxes)


def _check(source: DataSource) -> None:
    if not has_boxes(source):
        raise UserError(
            f"{source.path}: has no boxes, and a study is measured against them; name a VOC folder or COCO file with"
        )


def _open_scenes(world: Scenes, home: Path, progress: Progress) -> StudyData:
    folder = home / SCENES / f"seed{world.seed}"
    title = f"scenes of seed {world.seed}"
    with (
        wait_for_lock(
            folder.with_suffix(".lock"), lambda: progress(f"{title}: another process draws them; waiting", 1)
        ),
        progress(title, world.train + world.test) as bar,
    ):
        world.write(folder, on_progress=lambda *_: bar.advance())
    learn, test = folder / "train", folder / "test"
    source = Data(tags=learn / "tags.csv", photos=learn / "photos", classes=world.classes)
    tagged = read_tagged(source.source())
    truth = DataSource(path=test / "truth.json", photos=test / "photos", classes=world.classes)
    return _opened(SCENES, source, tagged, exam(truth, home), home, truth=learn / "truth.json")


def _opened(
    name: str, source: Data, tagged: TaggedPhotos, test: Exam, home: Path, truth: Path | None = None
) -> StudyData:
    where = source.source()
    boxes = read_truth(replace(where, path=truth or where.path, classes=tagged.classes))
    train = in_order(boxes, tagged.photos, where.path)
    twice = {photo.path for photo in tagged.photos} & {photo.path for photo in test.photos}
    if twice:
        raise UserError(f"{min(twice)}: both learnt from and measured on; name parts that share no photo")
    seen = _digest([*_told(tagged.photos, train), *_told(test.photos, test.truth), str(tagged.tags.tolist())])
    counted = replace(source, tags=truth or source.tags, counts="boxes")
    return StudyData(name, source, tagged, train, test.photos, test.truth, home, seen, counted)


def _told(photos: Sequence[Photo], truth: Truth) -> Iterator[str]:
    """All that figures depend on, but for pixels, for which the size of their file stands."""
    yield str(truth.classes)
    for photo, objects in zip(photos, truth.objects, strict=True):
        marks = objects.labels.tolist(), objects.difficult.tolist(), objects.crowd.tolist()
        yield f"{photo.id} {photo.width}x{photo.height} {_bytes(photo.path)} {objects.boxes.tolist()} {marks}"


def _bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise UserError(f"{path}: no such photo ({error.strerror}); put it back") from None


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
