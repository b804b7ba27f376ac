"""Typed records of the files in a run folder, from which reports are built."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AliasChoices, BeforeValidator, Field, TypeAdapter, ValidationError

from tag2box import annotations, io
from tag2box.errors import UserError, printable
from tag2box.labels.quality import SIGNS_FILE, BestBoxes, QualitySigns, quality_signs, read_signs
from tag2box.metrics.baselines import Verdict
from tag2box.training.events import Gallery, TrainingWarning


def _numbers_only(value: object) -> object:
    """Keep the plain numbers of a mapping, which may contain nested per-class tables."""
    if not isinstance(value, Mapping):
        return {} if value is None else value
    return {k: v for k, v in value.items() if v is None or (isinstance(v, int | float) and not isinstance(v, bool))}


def _none_is_empty(value: object) -> object:
    return () if value is None else value


Text = Annotated[str, BeforeValidator(str)]
Natural = Annotated[int, Field(ge=0, le=1 << 53)]
FigureMap = Annotated[Mapping[str, float | None], BeforeValidator(_numbers_only)]
PerStage = Annotated[tuple[float | None, ...], BeforeValidator(_none_is_empty)]
ErrorTable = Mapping[str, FigureMap]


@dataclass(frozen=True, slots=True)
class StartInfo:
    """The ``start`` event: name, data, schedule, machine and versions of a run."""

    name: str = ""
    classes: tuple[str, ...] = ()
    train_photos: Natural | None = None
    iterations: Natural | None = None
    seed: Annotated[int, Field(ge=0, le=1 << 64)] | None = None
    proposals_per_photo: float | None = None
    uses: Text = ""  # boxes or masks that the proposal method was trained on
    boxed_photos: Natural = 0  # reviewed photos, which taught with their boxes
    boxes: Natural = 0
    warm_start_boxes: Natural = 0  # of the run that it started from, and of those before
    machine: Mapping[str, Text] = field(default_factory=dict)
    versions: Mapping[str, Text] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A ``step`` event: the losses of one iteration."""

    iteration: Natural
    losses: FigureMap = field(default_factory=dict)
    contrast_share: float | None = None  # of WSCL in the gradient at the neck
    lr: float | None = None
    seconds: float | None = None  # since the start of training


@dataclass(frozen=True, slots=True)
class PseudoCount:
    """A ``pseudo`` event: mean number of pseudo boxes per present image-class pair, and mean tau, by stage."""

    iteration: Natural
    boxes_per_class: PerStage = ()
    threshold: PerStage = ()
    per_class: FigureMap = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EndInfo:
    """The ``end`` event: last iteration, time and memory of a finished training."""

    iteration: Natural
    seconds: float | None = None
    peak_memory_mb: float | None = None


@dataclass(frozen=True, slots=True)
class ClassRecord:
    """Mean and per-class values of AP or CorLoc, as fractions."""

    mean: Annotated[float | None, Field(validation_alias=AliasChoices("mean", "mAP"))] = None
    per_class: FigureMap = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Challenges:
    """Outcomes of the test objects, as shares of all objects."""

    found: float | None = None
    part: float | None = None
    grouped: float | None = None
    missed: float | None = None
    other: float | None = None


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """Kinds of the top boxes of all (photo, tag) pairs, as shares; tables also have them by class, size and count."""

    correct: float | None = None
    other_class: float | None = None
    part: float | None = None
    too_large: float | None = None
    surroundings: float | None = None
    nowhere: float | None = None
    pairs: Natural = 0
    by_class: ErrorTable = field(default_factory=dict)
    by_size: ErrorTable = field(default_factory=dict)
    by_count: ErrorTable = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BaselineRecord:
    """Figures of a trivial row."""

    voc07: ClassRecord | None = None
    voc12: ClassRecord | None = None
    corloc: ClassRecord | None = None
    coco: FigureMap = field(default_factory=dict)
    errors: ErrorRecord | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What test and training photos have in common: errors, trivial rows, verdicts by figure, scores of proposals."""

    errors: ErrorRecord | None = None
    baselines: Mapping[str, BaselineRecord] = field(default_factory=dict)
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    extents: FigureMap = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OnTest(Measured):
    """Figures on the test photos."""

    voc07: ClassRecord | None = None
    voc12: ClassRecord | None = None
    coco: FigureMap = field(default_factory=dict)
    challenges: Challenges | None = None


@dataclass(frozen=True, slots=True)
class OnTrain(Measured):
    """Figures on the training photos."""

    corloc: ClassRecord | None = None


@dataclass(frozen=True, slots=True)
class Metrics:
    """The file ``metrics.json``; every part is optional."""

    test: OnTest | None = None
    train: OnTrain | None = None
    truth_boxes_per_class: float | None = None

    @property
    def ap(self) -> ClassRecord | None:
        """Average precision at IoU 0.5: VOC 2007's 11 points or, without these, the area under the curve."""
        return (self.test.voc07 or self.test.voc12) if self.test else None

    @property
    def ap_verdict(self) -> Verdict | None:
        """``ap`` against the best trivial row with the same class scores."""
        return self.test.verdicts.get("voc07" if self.test.voc07 else "voc12") if self.test else None

    @property
    def corloc_verdict(self) -> Verdict | None:
        """CorLoc against the best trivial row."""
        return self.train.verdicts.get("corloc") if self.train else None

    @property
    def corloc(self) -> ClassRecord | None:
        """Correct localization on the training photos."""
        return self.train.corloc if self.train else None

    @property
    def challenges(self) -> Challenges | None:
        """Outcomes of the test objects."""
        return self.test.challenges if self.test else None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The contents of one run folder."""

    name: str
    folder: Path
    config: str | None = None
    start: StartInfo = StartInfo()
    steps: tuple[StepRecord, ...] = ()
    pseudo: tuple[PseudoCount, ...] = ()
    galleries: tuple[Gallery, ...] = ()
    resumed_at: tuple[int, ...] = ()
    end: EndInfo | None = None
    metrics: Metrics = Metrics()
    test_detections: Mapping[str, annotations.Detections] | None = None
    train_top_boxes: Mapping[str, annotations.Detections] | None = None  # the best box of every tag
    own_detections: Mapping[str, annotations.Detections] | None = None  # on photos without ground truth
    warnings: tuple[TrainingWarning, ...] = ()
    signs: QualitySigns | None = None  # of quality, without true boxes


@dataclass(frozen=True, slots=True)
class ProposalRecall:
    """Recall of the proposals of one split."""

    recall: Mapping[str, float]  # IoU, e.g. "0.5" -> share of objects
    mean_best_overlap: float | None = None
    boxes_per_photo: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportInputs:
    """Everything a report shows. Only ``runs`` is required; sections without data are left out."""

    title: str
    runs: Sequence[RunRecord]  # the first is the baseline, the last the run of interest
    commands: Sequence[str] = ()
    train_photos: Mapping[str, Path] = field(default_factory=dict)
    test_photos: Mapping[str, Path] = field(default_factory=dict)
    own_photos: Mapping[str, Path] = field(default_factory=dict)  # without ground truth
    train_truth: annotations.Truth | None = None
    test_truth: annotations.Truth | None = None
    proposal_recall: Mapping[str, ProposalRecall] = field(default_factory=dict)  # by split
    draw_score: float = 0.5  # test detections below this score are not drawn


# ---------------------------------------------------------------- reading a run folder

Record = TypeVar("Record")


def read_run(folder: Path, *, test_detections: Mapping[str, annotations.Detections] | None = None) -> RunRecord:
    """Read a run folder; missing files leave their part empty."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such run folder; expected one written by training, check the path")
    config, metrics, events = folder / "config.toml", folder / "metrics.json", folder / "events.jsonl"
    log = _EventReader()
    if events.exists():
        log.read(events)
    start = log.start or StartInfo()
    return RunRecord(
        name=start.name or folder.resolve().name,
        folder=folder,
        config=_text(config, "the settings of a run") if config.exists() else None,
        start=start,
        steps=_by_iteration(log.steps),
        pseudo=_by_iteration(log.pseudo),
        galleries=_by_iteration(log.galleries),
        resumed_at=tuple(log.resumed_at),
        end=log.end,
        metrics=_read_metrics(metrics) if metrics.exists() else Metrics(),
        test_detections=test_detections,
        warnings=tuple(log.warnings),
        signs=read_signs(folder / SIGNS_FILE) if (folder / SIGNS_FILE).exists() else None,
    )


def run_signs(folder: Path, best: BestBoxes, classes: Sequence[str]) -> QualitySigns:
    """The signs of a run's quality, from its best boxes in its photos and from its galleries."""
    galleries = read_run(folder).galleries
    moments = [each.of_stage(each.stages - 1) for each in galleries]
    stages = [each.of_stage(number) for each in galleries[-1:] for number in range(each.stages)]
    return quality_signs(best, classes, moments, stages)


def _read_metrics(path: Path) -> Metrics:
    return _parse(Metrics, _with_whole_characters(io.read_json(path, "the figures of an evaluation")), str(path))


def parse_errors(numbers: Mapping[str, object]) -> ErrorRecord:
    """The record of an error analysis."""
    return _parse(ErrorRecord, numbers, "error analysis")


def _with_whole_characters(value: object) -> Any:
    """JSON without halves of surrogate pairs, which no page can have: names of files that are not UTF-8."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def _text(path: Path, what: str) -> str:  # a killed process may have left half a character at its end
    return io.read_bytes(path, what, io.TEXT_LIMIT).decode("utf-8", errors="replace")


_MAX_LOSSES = 200  # a curve is drawn for each


class _EventReader:
    """Collects events in file order. A resume drops everything after the iteration it restarts from."""

    def __init__(self) -> None:
        self.start: StartInfo | None = None
        self.end: EndInfo | None = None
        self.steps: dict[int, StepRecord] = {}
        self.losses: set[str] = set()
        self.pseudo: dict[int, PseudoCount] = {}
        self.galleries: dict[int, Gallery] = {}
        self.resumed_at: list[int] = []
        self.warnings: list[TrainingWarning] = []

    def read(self, path: Path) -> None:
        lines = _text(path, "the events of a run").splitlines()
        filled = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
        for number, line in filled:
            where = f"{path}:{number}"
            try:
                event = _with_whole_characters(json.loads(line)) if "\\ud" in line else json.loads(line)
            except (ValueError, RecursionError) as error:  # also a number of thousands of digits, or deep nesting
                if isinstance(error, json.JSONDecodeError) and number == filled[-1][0]:  # stopped while writing
                    return
                raise UserError(f"{where}: not a JSON event; remove this line and build the report again") from None
            if not isinstance(event, dict) or not isinstance(event.get("event"), str):
                raise UserError(f'{where}: expected an object with an "event" name; remove this line')
            self.add(event, where)

    def add(self, event: dict[str, Any], where: str) -> None:
        """Add one event; unknown kinds are ignored."""
        match event["event"]:
            case "start":
                self.start = _parse(StartInfo, event, where)
            case "step":
                step = _parse(StepRecord, event, where)
                self.steps[step.iteration] = step
                self.losses.update(step.losses)
                if len(self.losses) > _MAX_LOSSES:
                    raise UserError(f"{where}: more than {_MAX_LOSSES} different losses; expected the log of a run")
            case "pseudo":
                count = _parse(PseudoCount, event, where)
                self.pseudo[count.iteration] = count
            case "gallery":
                gallery = _parse(Gallery, event, where)
                self.galleries[gallery.iteration] = gallery
            case "warning":
                self.warnings.append(_parse(TrainingWarning, event, where))
            case "resume":
                self.rewind(_parse(EndInfo, event, where).iteration)
            case "end":
                self.end = _parse(EndInfo, event, where)

    def rewind(self, iteration: int) -> None:
        """Drop everything after ``iteration``, from which training resumed."""
        self.resumed_at.append(iteration)
        self.end = None
        self.warnings = [own for own in self.warnings if own.iteration <= iteration]
        parts: tuple[dict[int, Any], ...] = (self.steps, self.pseudo, self.galleries)
        for part in parts:
            for later in [number for number in part if number > iteration]:
                del part[later]


def _by_iteration(found: Mapping[int, Record]) -> tuple[Record, ...]:
    return tuple(found[k] for k in sorted(found))


_validators: dict[type, TypeAdapter[Any]] = {}  # to create one takes longer than to read an event


def _parse(kind: type[Record], value: object, where: str) -> Record:
    if kind not in _validators:
        _validators[kind] = TypeAdapter(kind)
    try:
        return _validators[kind].validate_python(value)  # type: ignore[no-any-return]
    except ValidationError as error:
        first = error.errors()[0]
        name = printable(".".join(str(part) for part in first["loc"]) or kind.__name__)
        message = " ".join(str(first["msg"]).split())
        raise UserError(f"{where}: {name}: {message}; fix or remove it and build the report again") from None
