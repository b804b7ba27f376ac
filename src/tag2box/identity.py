"""The identity of a run: what it is trained on, recorded when it starts, compared when it is resumed or used.

``run.json`` has the settings, the classes, and digests of settings, classes, tags, photos, proposals and of the weights
that training began with; of reviewed boxes their number and digests; of a warm start the digests of the earlier run.
``photos.json`` has size, time and digests of each photo. Paths are not part of it: a run and its dataset may be moved.
"""

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from tag2box import annotations, errors, recipes, settings, storage
from tag2box.labels.labelled import LabelledPhotos
from tag2box.models.detector import Detector
from tag2box.proposals.store import ProposalStore
from tag2box.student.network import StudentModule
from tag2box.student.student_training import StudentConfig
from tag2box.training.feature_cache import weights_digest

AnyConfig = recipes.Config | StudentConfig
"""The settings of a run: of `tag2box train`, or of a student."""

RUN_FILE = "run.json"
PHOTOS_FILE = "photos.json"

_FREE = {"compute.device", "compute.memory", "device", "feature_cache_gb", "loader.workers", "plan.checkpoint_every",
         "plan.keep_checkpoints", "plan.log_every"}  # fmt: skip
"""Settings that may change while a run is trained: where and how fast it is computed, not what."""
_PATHS = {
    "name",
    "feature_cache",
    "warm_start",
    "labels",
    "photos",
    *(f"data.{field.name}" for field in fields(recipes.Data) if field.name != "skip_bad"),
}
_SHA256 = "sha256:"
_REMEDY = "restore it, or train a new run"


@dataclass(frozen=True, slots=True)
class PhotoIdentity:
    """Content of a photo, and digests of its tags and proposals."""

    stamp: storage.FileStamp
    tags: str
    boxes: str = ""  # empty: not known yet

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """From the JSON form: a list of numbers and digests."""
        *stamp, tags, boxes = value
        return cls(storage.FileStamp.from_json(stamp), str(tags), str(boxes))

    def to_json(self) -> list[object]:
        """The JSON form."""
        return [*self.stamp.to_json(), self.tags, self.boxes]


@dataclass(frozen=True, slots=True)
class BoxesIdentity:
    """The reviewed boxes that a run is taught with."""

    photos: int
    boxes: int
    digest: str  # of photos, boxes and classes
    file_sha256: str  # of the file they were read from; empty if it was a folder

    @classmethod
    def of(cls, reviewed: annotations.ReviewedBoxes) -> Self:
        """The identity of reviewed boxes."""
        return cls(len(reviewed), reviewed.count, reviewed.digest(), reviewed.file_sha256)


@dataclass(frozen=True, slots=True)
class WarmStart:
    """The finished run that a run starts from."""

    run_json: str  # SHA-256 of its run.json; empty for runs of version 0.1
    weights: str  # digest of all its weights
    boxes: int = 0  # reviewed boxes that it, or the runs it started from, were taught with

    @classmethod
    def of(cls, folder: Path, detector: Detector) -> Self:
        """The identity of the run in a folder, whose weights a detector has."""
        path, recorded = folder / RUN_FILE, RunIdentity.read(folder)
        digest = storage.file_digest(path) if recorded is not None else ""
        own = recorded.boxes.boxes if recorded is not None and recorded.boxes is not None else 0
        before = recorded.warm_start.boxes if recorded is not None and recorded.warm_start is not None else 0
        return cls(digest, weights_digest("detector", [detector]), max(own, before))


def trained_photos(folder: Path) -> tuple[str, ...]:
    """The ids of the photos that a run was trained on, in order; none if they were not recorded."""
    identity = RunIdentity.read(folder)
    if identity is None or not (folder / PHOTOS_FILE).exists():
        return ()
    return tuple(identity.with_photos(folder).photos)


@dataclass(frozen=True)
class RunIdentity:
    """What a run is trained on; in ``run.json``, and for each photo in ``photos.json``."""

    settings: Mapping[str, object]  # by key, without paths and name
    classes: tuple[str, ...]
    weights: str  # digest of the backbone that training began with
    photos: Mapping[str, PhotoIdentity]  # by id, in order
    boxes: BoxesIdentity | None = None  # None: taught by tags alone
    warm_start: WarmStart | None = None

    @classmethod
    def of(
        cls,
        config: recipes.Config,
        photos: annotations.TaggedPhotos,
        store: ProposalStore,
        detector: Detector,
        reviewed: annotations.ReviewedBoxes | None = None,
    ) -> Self:
        """The identity of a run that starts now."""
        weights = weights_digest("backbone", [detector.backbone])
        boxes = None if reviewed is None else BoxesIdentity.of(reviewed)
        warm = None if config.warm_start is None else WarmStart.of(config.warm_start, detector)
        return cls(flat_settings(config), photos.classes, weights, photo_identities(photos, store), boxes, warm)

    @classmethod
    def of_student(cls, config: StudentConfig, labels: LabelledPhotos, network: StudentModule) -> Self:
        """The identity of a student run that starts now; its labels take the place of proposals."""
        weights = weights_digest("backbone", [network.backbone])
        return cls(flat_settings(config), labels.classes, weights, label_identities(labels))

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The identity of a run without its photos; None for runs of version 0.1, which recorded none."""
        path = folder / RUN_FILE
        if not path.exists():
            return None
        raw = storage.read_checked_json(path, "the identity of a run", _REMEDY)
        try:
            classes = tuple(str(name) for name in raw["classes"])
            boxes, warm = raw.get("boxes"), raw.get("warm_start")
            return cls(
                dict(raw["settings"]),
                classes,
                str(raw["digests"]["weights"]),
                {},
                None if boxes is None else BoxesIdentity(**boxes),
                None if warm is None else WarmStart(**warm),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise errors.UserError(f"{path}: field {error} is missing or of the wrong type; {_REMEDY}") from None

    def with_photos(self, folder: Path) -> Self:
        """The same with the photos of the run."""
        path = folder / PHOTOS_FILE
        raw = storage.read_checked_json(path, "the photos of a run", _REMEDY)
        try:
            photos = {str(name): PhotoIdentity.from_json(value) for name, value in raw["photos"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise errors.UserError(f"{path}: {error} is missing or of the wrong type; {_REMEDY}") from None
        return replace(self, photos=photos)

    def write(self, folder: Path) -> None:
        """Write both files."""
        photos = {name: photo.to_json() for name, photo in self.photos.items()}
        storage.write_checked_json(folder / PHOTOS_FILE, {"format": 1, "photos": photos})
        digests = {
            "settings": _digest(sorted(self.settings.items())),
            "classes": _digest(self.classes),
            "tags": _digest([[name, photo.tags] for name, photo in self.photos.items()]),
            "photos": _digest([[name, photo.stamp.sha256] for name, photo in self.photos.items()]),
            "proposals": _digest([[name, photo.boxes] for name, photo in self.photos.items()]),
            "weights": self.weights,
        }
        content = {"format": 1, "settings": dict(self.settings), "classes": self.classes, "digests": digests}
        if self.boxes is not None:
            content["boxes"] = asdict(self.boxes)
        if self.warm_start is not None:
            content["warm_start"] = asdict(self.warm_start)
        storage.write_checked_json(folder / RUN_FILE, content)

    def check_settings(self, config: AnyConfig, where: Path) -> None:
        """Raise if a setting was changed since the run was started; settings of newer versions are not compared."""
        now = flat_settings(config)
        for key, before in self.settings.items():
            is_lost_file = str(before).startswith(_SHA256) and not str(now.get(key)).startswith(_SHA256)
            if key in now and now[key] != before and key not in _FREE and not is_lost_file:
                was, is_now = (json.dumps(value, ensure_ascii=False) for value in (before, now[key]))
                raise errors.UserError(f"{where}: {key} was {was} when the run was started, is {is_now}; {_REMEDY}")

    def check_classes(self, classes: Sequence[str], where: Path | None) -> None:
        """Raise unless the classes, and their order, are those of the run."""
        for number, (before, now) in enumerate(zip(self.classes, classes, strict=False), start=1):
            if before != now:
                raise errors.UserError(
                    f'{where}: class {number} was "{before}" when the run was started, is "{now}"; restore the tags, '
                    "or train a new run"
                )
        if len(self.classes) != len(classes):
            raise errors.UserError(
                f"{where}: {len(classes)} classes, there were {len(self.classes)} when the run was started; restore "
                "the tags, or train a new run"
            )

    def check_sources(self, config: AnyConfig, where: Path) -> None:
        """Raise if reviewed boxes or a warm start were added to the settings, or removed from them."""
        if not isinstance(config, recipes.Config):
            return
        named = {"data.boxes": (self.boxes, config.data.boxes), "warm_start": (self.warm_start, config.warm_start)}
        for key, (before, now) in named.items():
            if (before is None) != (now is None):
                was, is_now = ("not set" if value is None else "set" for value in (before, now))
                raise errors.UserError(f"{where}: {key} was {was} when the run was started, is {is_now}; {_REMEDY}")

    def check_boxes(self, reviewed: annotations.ReviewedBoxes | None, where: Path | None) -> None:
        """Raise unless reviewed boxes are those of the run."""
        now = None if reviewed is None else BoxesIdentity.of(reviewed)
        if now is not None and self.boxes is not None and now.digest != self.boxes.digest:
            raise errors.UserError(
                f"{where}: the reviewed boxes are not those with which the run was started (now {now.boxes} in "
                f"{now.photos} photos, then {self.boxes.boxes} in {self.boxes.photos}); {_REMEDY}"
            )

    def check_weights(self, detector: Detector | StudentModule) -> None:
        """Raise unless a network has the weights that training began with."""
        warm = self.warm_start
        if (
            warm is not None
            and isinstance(detector, Detector)
            and weights_digest("detector", [detector]) != warm.weights
        ):
            raise errors.UserError(
                "warm_start: its weights are not those with which the run was started; restore them, or train a new run"
            )
        if weights_digest("backbone", [detector.backbone]) != self.weights:
            raise errors.UserError(
                "backbone.weights: the pretrained weights are not those with which the run was started; restore them, "
                "or train a new run"
            )

    def check_photos(
        self, photos: annotations.TaggedPhotos, store: ProposalStore | None, config: recipes.Config
    ) -> None:
        """Raise if photos, tags or, with a store, proposals are not those of the run.

        Without a store, only what is known before proposals are computed is compared.
        """
        now = photo_identities(photos, store, self.photos)
        for place, names, problem in self._differences(now, photos, store, config):
            if names:
                more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
                raise errors.UserError(f"{place}: photo {names[0]}{more} {problem}; {_REMEDY}")
        if store is not None and list(now) != list(self.photos):
            raise errors.UserError(
                f"{config.data.tags}: the photos were in another order when the run was started; {_REMEDY}"
            )

    def check_labels(self, labels: LabelledPhotos, where: Path) -> None:
        """Raise if photos, tags or boxes of a label set are not those of the run."""
        now = label_identities(labels, self.photos)
        if list(now) != list(self.photos):
            raise errors.UserError(f"{where}: has other photos than when the run was started; {_REMEDY}")
        for name, photo in now.items():
            before = self.photos[name]
            if photo.stamp.sha256 != before.stamp.sha256:
                raise errors.UserError(
                    f"{where}: photo {name} is not the one with which the run was started; {_REMEDY}"
                )
            if (photo.tags, photo.boxes) != (before.tags, before.boxes):
                raise errors.UserError(
                    f"{where}: photo {name} had other tags or boxes when the run was started; {_REMEDY}"
                )

    def _differences(
        self,
        now: Mapping[str, PhotoIdentity],
        photos: annotations.TaggedPhotos,
        store: ProposalStore | None,
        config: recipes.Config,
    ) -> Iterator[tuple[Path | None, list[str], str]]:
        """What may have changed: where, in which photos, and in words."""
        tags, both = config.data.tags, [(name, self.photos[name], now[name]) for name in now if name in self.photos]
        yield tags, [name for name in self.photos if name not in now], "is gone since the run was started"
        if store is not None or not config.data.skip_bad:  # else some may be skipped when proposals are computed
            yield tags, [name for name in now if name not in self.photos], "was not there when the run was started"
        changed = [name for name, then, is_now in both if then.stamp.sha256 != is_now.stamp.sha256]
        path = next((photo.path for photo in photos.photos if photo.id in changed[:1]), None)
        yield path, changed, "is not the one with which the run was started"
        tagged = [name for name, then, is_now in both if then.tags != is_now.tags]
        yield tags, tagged, "had other tags when the run was started"
        if store is not None:
            boxed = [name for name, then, is_now in both if then.boxes != is_now.boxes]
            yield store.path, boxed, "had other proposals when the run was started"


def photo_identities(
    photos: annotations.TaggedPhotos, store: ProposalStore | None, known: Mapping[str, PhotoIdentity] | None = None
) -> dict[str, PhotoIdentity]:
    """The identity of each photo; a file is read unless it has the size and time that the store, or ``known``, has."""
    columns = [part.numpy() for part in (photos.tags, photos.unsure, photos.counts) if part is not None]
    found = {}
    for row, photo in enumerate(photos.photos):
        before = (known or {}).get(photo.id) if store is None else store.entry(photo.id)
        stamp = storage.FileStamp.of(photo.path, before.stamp if before else None)
        tags = _short([column[row].tobytes() for column in columns])
        found[photo.id] = PhotoIdentity(stamp, tags, _boxes_digest(store, photo.id) if store is not None else "")
    return found


def label_identities(
    labels: LabelledPhotos, known: Mapping[str, PhotoIdentity] | None = None
) -> dict[str, PhotoIdentity]:
    """The identity of each photo of a label set, with its tags and boxes."""
    found = {}
    for photo in labels.photos:
        before = (known or {}).get(photo.id)
        stamp = storage.FileStamp.of(labels.path(photo), before.stamp if before else photo.stamp)
        tags, boxes = [photo.tags, photo.unsure], [asdict(box) for box in photo.boxes]
        tags += [("reviewed",)] if photo.is_reviewed else []
        found[photo.id] = PhotoIdentity(stamp, *(_short([json.dumps(own).encode()]) for own in (tags, boxes)))
    return found


def _boxes_digest(store: ProposalStore, photo_id: str) -> str:
    return _short([store.boxes(photo_id).numpy().tobytes(), store.scores(photo_id).numpy().tobytes()])


def _short(parts: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def flat_settings(config: AnyConfig) -> dict[str, object]:
    """Settings by key, without name and paths."""
    flat: dict[str, object] = {}

    def add(table: Mapping[str, Any], prefix: str) -> None:
        for name, value in table.items():
            if isinstance(value, dict):
                add(value, f"{prefix}{name}.")
            else:
                flat[f"{prefix}{name}"] = json.loads(json.dumps(value), parse_constant=str)  # JSON has no infinity

    add(tomllib.loads(settings.dump(pathless(config))), "")
    return {key: value for key, value in flat.items() if key not in _PATHS}


def pathless(config: AnyConfig) -> AnyConfig:
    """Settings without name and paths; a file of weights is replaced by the digest of its content."""
    weights = getattr(config.backbone, "weights", None)
    backbone = config.backbone
    if isinstance(weights, str) and Path(weights).is_file():
        path = Path(weights)
        stamp = path.stat()
        named = f"{_SHA256}{_content(path, stamp.st_size, stamp.st_mtime_ns)}"
        backbone = replace(config.backbone, weights=named)  # type: ignore[call-arg]  # a backbone with a field of that name
    if isinstance(config, StudentConfig):
        return replace(config, name="", labels=None, photos=None, backbone=backbone)
    return replace(
        config,
        name="",
        data=recipes.Data(skip_bad=config.data.skip_bad),
        warm_start=None,
        feature_cache=None,
        backbone=backbone,
    )


@lru_cache
def _content(path: Path, _size: int, _time: int) -> str:
    return storage.file_digest(path)
