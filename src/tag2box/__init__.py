"""tag2box: object detectors from image-level tags alone.

Every command of the ``tag2box`` program is a function here (``propose``, ``train``, ``detect``, ``evaluate``,
``report``, ...), beside the classes to build on or to extend. Names are imported on first use, so that
``import tag2box`` is quick:

    import tag2box

    model = tag2box.load("runs/mine")
    print(model("photo.jpg").names)
"""

from importlib import import_module
from typing import Any

_MODULES = {
    # commands
    "apply_reviews": "tag2box.labels.reviews",
    "data_check": "tag2box.cli.data",
    "stats": "tag2box.cli.data",
    "convert": "tag2box.cli.label_export",
    "demo": "tag2box.cli.demo",
    "detect": "tag2box.cli.detect",
    "diagnose": "tag2box.cli.doctor",
    "evaluate": "tag2box.cli.evaluate",
    "export": "tag2box.cli.label_export",
    "export_model": "tag2box.cli.model_export",
    "import_proposals": "tag2box.cli.import_proposals",
    "label": "tag2box.cli.label",
    "train_seeds": "tag2box.cli.train",
    "label_agreement": "tag2box.cli.merge",
    "merge_labels": "tag2box.cli.merge",
    "push_to_hub": "tag2box.hub",
    "read_reviews": "tag2box.labels.journal",
    "recall": "tag2box.cli.proposal_recall",
    "prepare_training": "tag2box.cli.train",
    "propose": "tag2box.cli.propose",
    "report": "tag2box.cli.report",
    "resume": "tag2box.cli.train",
    "resume_student": "tag2box.cli.student",
    "review_labels": "tag2box.cli.review",
    "track": "tag2box.cli.report",
    "tracking": "tag2box.training.trackers",
    "train": "tag2box.cli.train",
    "train_student": "tag2box.cli.student",
    "load": "tag2box.predictor",
    "trust": "tag2box.cli.label_trust",
    "load_run": "tag2box.runs",
    # settings
    "RECIPES": "tag2box.recipes",
    "Config": "tag2box.recipes",
    "StudentConfig": "tag2box.student.student_training",
    "Data": "tag2box.recipes",
    "Interrupted": "tag2box.errors",
    "UserError": "tag2box.errors",
    "Progress": "tag2box.progress",
    "TerminalProgress": "tag2box.progress",
    "silent": "tag2box.progress",
    # datasets and results
    "DataSource": "tag2box.formats.listing",
    "ClassAgreement": "tag2box.labels.agreement",
    "RunChoice": "tag2box.labels.quality",
    "Detections": "tag2box.annotations",
    "LabelBox": "tag2box.labels.labelled",
    "LabelledPhoto": "tag2box.labels.labelled",
    "LabelledPhotos": "tag2box.labels.labelled",
    "LabelRule": "tag2box.labels.rule",
    "LabelSet": "tag2box.labels.label_set",
    "Photo": "tag2box.annotations",
    "PredictedBox": "tag2box.predictor",
    "Prediction": "tag2box.predictor",
    "Predictor": "tag2box.predictor",
    "ReviewedPhoto": "tag2box.labels.reviews",
    "Reviews": "tag2box.labels.reviews",
    "TaggedPhotos": "tag2box.annotations",
    "Trust": "tag2box.labels.trust",
    "TrustRule": "tag2box.labels.trust",
    "Truth": "tag2box.annotations",
    # networks
    "Backbone": "tag2box.models.backbone",
    "BackboneSettings": "tag2box.models.backbone",
    "StudentSettings": "tag2box.student.network",
    "Detector": "tag2box.models.detector",
    # training
    "Criterion": "tag2box.training.criterion",
    "LossInputs": "tag2box.training.criterion",
    "LossOutput": "tag2box.training.criterion",
    "LossTerm": "tag2box.training.criterion",
    "Step": "tag2box.training.step",
    "StepRng": "tag2box.models.rng",
    "Batch": "tag2box.types",
    "BatchMeta": "tag2box.types",
    "Outputs": "tag2box.types",
    "Proposals": "tag2box.types",
    "TrackedRun": "tag2box.training.trackers",
    "Tracker": "tag2box.training.trackers",
    # methods
    "Labeler": "tag2box.methods.protocols",
    "MilStrategy": "tag2box.methods.protocols",
    "LabelerInput": "tag2box.types",
    "Labeling": "tag2box.types",
    "PseudoBoxes": "tag2box.types",
    "PseudoLabels": "tag2box.types",
    "Requirements": "tag2box.types",
    "ProposalMethod": "tag2box.proposals.base",
    "ProposalStore": "tag2box.proposals.store",
}
"""Public names and the modules that define them; ``__init__.pyi`` repeats them for type checkers and editors."""

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tag2box' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
