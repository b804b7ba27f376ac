"""``tag2box report``: runs in, one self-contained HTML page out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tag2box.annotations import Photo, Truth
from tag2box.commands.assess import DETECTIONS, METRICS, Exam, assess
from tag2box.commands.evaluate import dataset
from tag2box.commands.runs import proposals_of, read_config, required
from tag2box.commands.train import prepared
from tag2box.errors import UserError
from tag2box.formats.datasets import read_photos, read_truth
from tag2box.formats.detection_files import read_detections
from tag2box.formats.listing import DataSource
from tag2box.progress import Progress, silent
from tag2box.proposals.recall import measure_recall
from tag2box.recipes import Config
from tag2box.reporting.page import write_report
from tag2box.reporting.records import ProposalRecall, ReportInputs, RunRecord, read_run


def report(  # noqa: PLR0913 - one keyword an option of the command
    runs: Sequence[Path],
    out: Path,
    *,
    title: str = "tag2box report",
    test_photos: Path | None = None,
    test_truth: Path | None = None,
    train_truth: Path | None = None,
    split: str = "test",
    train_split: str = "train",
    test_proposals: Path | None = None,
    commands: Sequence[str] = (),
    progress: Progress = silent,
) -> None:
    """Write a page about one or several runs, the baseline first; runs not yet assessed are, where truth is given.

    Args:
        test_photos: folder of the photos ``test_truth`` speaks of, where they are not where its format has them.
        train_truth: for CorLoc and for pictures; never seen by training.
        split: image list of a VOC folder given as ``test_truth``; ``train_split`` likewise.
        test_proposals: where the proposals of the test photos are or shall be kept; default: beside ``out``.
    """
    if not runs:
        raise UserError("no runs given; name at least one run folder")
    if test_photos is not None and test_truth is None:
        raise UserError("--test-photos says where the photos of --test-truth are; give that too")
    if train_truth is not None and test_truth is None:
        raise UserError("--train-truth needs --test-truth as well: a run is assessed on both at once")
    config = read_config(runs[0])
    training, _ = prepared(config, progress)
    test = train = None
    if test_truth is not None:
        source = dataset(test_truth, photos=test_photos, split=split, classes=training.classes)
        test = exam(source, test_proposals or out.parent / "test-proposals")
    if train_truth is not None:
        truth = read_truth(dataset(train_truth, split=train_split, classes=training.classes))
        train = Exam(training.photos, in_order(truth, training.photos, train_truth), required(config.data.proposals))
    for run in runs:
        if test is not None and not (run / METRICS).exists():
            assess(run, test=test, train=train, progress=progress)
    inputs = ReportInputs(
        title=title,
        runs=[_record(run, test) for run in runs],
        commands=commands,
        train_photos={photo.id: photo.path for photo in training.photos},
        test_photos={photo.id: photo.path for photo in test.photos} if test else {},
        train_truth=train.truth if train else None,
        test_truth=test.truth if test else None,
        proposal_recall={
            name: _reach(e, config, progress) for name, e in (("train", train), ("test", test)) if e is not None
        },
    )
    write_report(inputs, out)


def exam(source: DataSource, proposals: Path) -> Exam:
    """The photos of a dataset, with its truth."""
    photos = read_photos(source)
    return Exam(photos, in_order(read_truth(source), photos, source.path), proposals)


def in_order(truth: Truth, photos: Sequence[Photo], where: Path) -> Truth:
    """The truth of some photos, in their order."""
    index = {name: i for i, name in enumerate(truth.ids)}
    missing = [photo.id for photo in photos if photo.id not in index]
    if missing:
        raise UserError(f"{where}: says nothing about photo {missing[0]} ({len(missing)} missing)")
    rows = [index[photo.id] for photo in photos]
    return Truth(
        truth.classes,
        tuple(truth.ids[i] for i in rows),
        tuple(truth.sizes[i] for i in rows),
        tuple(truth.objects[i] for i in rows),
    )


def _record(run: Path, test: Exam | None) -> RunRecord:
    if test is None or not (run / DETECTIONS).exists():
        return read_run(run)
    return read_run(run, test_detections=read_detections(run / DETECTIONS, test.truth))


def _reach(exam: Exam, config: Config, progress: Progress) -> ProposalRecall:
    store = proposals_of(exam.photos, config, exam.proposals, progress)
    got = measure_recall([store.boxes(name) for name in exam.truth.ids], exam.truth)
    return ProposalRecall(
        {str(t): r for t, r in zip(got.thresholds, got.recall, strict=True)},
        got.mean_best_overlap,
        got.boxes_per_image,
    )
