from tag2box.annotations import Detections as Detections, Photo as Photo, TaggedPhotos as TaggedPhotos, Truth as Truth
from tag2box.cli.data import data_check as data_check, stats as stats
from tag2box.cli.demo import demo as demo
from tag2box.cli.detect import detect as detect
from tag2box.cli.doctor import diagnose as diagnose
from tag2box.cli.evaluate import evaluate as evaluate
from tag2box.cli.import_proposals import import_proposals as import_proposals
from tag2box.cli.label import label as label
from tag2box.cli.label_export import convert as convert, export as export
from tag2box.cli.label_trust import trust as trust
from tag2box.cli.merge import label_agreement as label_agreement, merge_labels as merge_labels
from tag2box.cli.model_export import export_model as export_model
from tag2box.cli.proposal_recall import recall as recall
from tag2box.cli.propose import propose as propose
from tag2box.cli.report import report as report, track as track
from tag2box.cli.review import review_labels as review_labels
from tag2box.cli.student import resume_student as resume_student, train_student as train_student
from tag2box.cli.train import (
    prepare_training as prepare_training,
    resume as resume,
    train as train,
    train_seeds as train_seeds,
)
from tag2box.errors import Interrupted as Interrupted, UserError as UserError
from tag2box.formats.listing import DataSource as DataSource
from tag2box.hub import push_to_hub as push_to_hub
from tag2box.labels.agreement import ClassAgreement as ClassAgreement
from tag2box.labels.journal import read_reviews as read_reviews
from tag2box.labels.label_set import LabelSet as LabelSet
from tag2box.labels.labelled import (
    LabelBox as LabelBox,
    LabelledPhoto as LabelledPhoto,
    LabelledPhotos as LabelledPhotos,
)
from tag2box.labels.quality import RunChoice as RunChoice
from tag2box.labels.reviews import ReviewedPhoto as ReviewedPhoto, Reviews as Reviews, apply_reviews as apply_reviews
from tag2box.labels.rule import LabelRule as LabelRule
from tag2box.labels.trust import Trust as Trust, TrustRule as TrustRule
from tag2box.methods.protocols import Labeler as Labeler, MilStrategy as MilStrategy
from tag2box.models.backbone import Backbone as Backbone, BackboneSettings as BackboneSettings
from tag2box.models.detector import Detector as Detector
from tag2box.models.rng import StepRng as StepRng
from tag2box.predictor import (
    PredictedBox as PredictedBox,
    Prediction as Prediction,
    Predictor as Predictor,
    load as load,
)
from tag2box.progress import Progress as Progress, TerminalProgress as TerminalProgress, silent as silent
from tag2box.proposals.base import ProposalMethod as ProposalMethod
from tag2box.proposals.store import ProposalStore as ProposalStore
from tag2box.recipes import RECIPES as RECIPES, Config as Config, Data as Data
from tag2box.runs import load_run as load_run
from tag2box.student.network import StudentSettings as StudentSettings
from tag2box.student.student_training import StudentConfig as StudentConfig
from tag2box.training.criterion import (
    Criterion as Criterion,
    LossInputs as LossInputs,
    LossOutput as LossOutput,
    LossTerm as LossTerm,
)
from tag2box.training.step import Step as Step
from tag2box.training.trackers import TrackedRun as TrackedRun, Tracker as Tracker, tracking as tracking
from tag2box.types import (
    Batch as Batch,
    BatchMeta as BatchMeta,
    LabelerInput as LabelerInput,
    Labeling as Labeling,
    Outputs as Outputs,
    Proposals as Proposals,
    PseudoBoxes as PseudoBoxes,
    PseudoLabels as PseudoLabels,
    Requirements as Requirements,
)
