"""The plug-ins: every kind of part that settings and commands can name, one literal dict per group.

A value is ``"package.module:Name"`` and is imported on first use. Parts of other packages are named in the same form
wherever a built-in name is accepted, so nothing has to be registered:

    tag2box train photos/ --set criterion.labeler.kind=my_package.labelers:TopTwo

To add a built-in part, write its class and add one line here.
"""

import difflib
import sys
from dataclasses import dataclass, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any

from tag2box.errors import UserError

LABELERS = {
    "oicr": "tag2box.methods.oicr:Oicr",
    "discovery": "tag2box.methods.discovery:Discovery",
    "c_mil": "tag2box.methods.c_mil:CMilLabeler",
    "c_midn": "tag2box.methods.c_midn:CMidnLabeler",
    "pcl": "tag2box.methods.pcl:Pcl",
    "mist": "tag2box.methods.mist:Mist",
    "c_wsl": "tag2box.methods.c_wsl:CWsl",
    "oim": "tag2box.methods.oim:Oim",
    "slv": "tag2box.methods.slv:Slv",
    "wsod2": "tag2box.methods.wsod2:Wsod2",
}
MIL_HEADS = {
    "wsddn": "tag2box.methods.wsddn:Wsddn",
    "c_mil": "tag2box.methods.c_mil:CMil",
    "c_midn": "tag2box.methods.c_midn:CMidn",
}
LOSS_TERMS: dict[str, str] = {}  # of ``criterion.extra``; the built-in terms are fields of the criterion
BACKBONES = {
    "lite0": "tag2box.models.lite0:Lite0",
    "vgg16": "tag2box.models.vgg16:Vgg16",
    "resnet_ws": "tag2box.models.resnet_ws:ResNetWs",
}
STUDENTS = {
    "anchor_free": "tag2box.student.network:AnchorFree",
}
REGULARIZERS = {
    "plain": "tag2box.models.drop_block:DropBlock",
    "concrete": "tag2box.models.adversary:ConcreteDropBlock",
    "inverted": "tag2box.models.drop_block:InvertedAttention",
}
OPTIMIZERS = {
    "sgd": "tag2box.training.optim:Sgd",
    "adam": "tag2box.training.optim:Adam",
}
PROPOSAL_METHODS = {
    "selective_search": "tag2box.proposals.selective_search:SelectiveSearch",
    "edge_boxes": "tag2box.proposals.edge_boxes:EdgeBoxes",
    "combined": "tag2box.proposals.combined:Combined",
    "wsrpn": "tag2box.proposals.early_responses:Wsrpn",
    "sam": "tag2box.proposals.sam_boxes:Sam",
    "imported": "tag2box.proposals.importers.proposal_files:Imported",
}
DATASET_FORMATS = {  # in the order in which they are tried on a path
    "label-set": "tag2box.formats.annotated:LabelSetFolder",
    "voc": "tag2box.formats.voc_boxes:Voc",
    "cvat": "tag2box.formats.cvat_boxes:Cvat",
    "labelstudio": "tag2box.formats.label_studio_boxes:LabelStudio",
    "fiftyone": "tag2box.formats.tool_tags:FiftyOneClassification",
    "coco": "tag2box.formats.coco_boxes:Coco",
    "yolo": "tag2box.formats.yolo_boxes:Yolo",
    "xanylabeling": "tag2box.formats.xanylabeling_boxes:XAnyLabeling",
    "csv-boxes": "tag2box.formats.table_boxes:BoxTable",
    "csv": "tag2box.formats.csv_tags:CsvTable",
    "class-folders": "tag2box.formats.folders:ClassFolders",
    "photos": "tag2box.formats.folders:PhotoFolder",
}
EXPORT_FORMATS = {
    "coco": "tag2box.formats.coco_boxes:CocoExport",
    "coco-results": "tag2box.formats.coco_boxes:CocoResultsExport",
    "voc": "tag2box.formats.voc_boxes:VocExport",
    "voc-results": "tag2box.formats.voc_boxes:VocResultsExport",
    "yolo": "tag2box.formats.yolo_boxes:YoloExport",
    "cvat": "tag2box.formats.cvat_boxes:CvatExport",
    "labelstudio": "tag2box.formats.label_studio_boxes:LabelStudioExport",
    "fiftyone": "tag2box.formats.coco_boxes:FiftyOneExport",
    "xanylabeling": "tag2box.formats.xanylabeling_boxes:XAnyLabelingExport",
    "csv": "tag2box.formats.table_boxes:CsvExport",
}
METRICS = {
    "voc07": "tag2box.metrics.voc_ap:voc07",
    "voc12": "tag2box.metrics.voc_ap:voc12",
    "corloc": "tag2box.metrics.voc_ap:corloc",
    "coco": "tag2box.metrics.coco_ap:coco_scores",
    "challenges": "tag2box.metrics.challenges:challenges",
    "errors": "tag2box.metrics.error_analysis:errors",
    "breakdown": "tag2box.metrics.error_analysis:breakdown",
}
TRACKERS = {
    "tensorboard": "tag2box.training.trackers:TensorBoard",
    "mlflow": "tag2box.training.trackers:MlFlow",
    "wandb": "tag2box.training.trackers:WeightsAndBiases",
}
PROPOSAL_FILE_FORMATS = {
    "selective-search": "tag2box.proposals.importers.matlab:SELECTIVE_SEARCH_MAT",
    "mcg": "tag2box.proposals.importers.matlab:MCG_MAT",
    "edge-boxes": "tag2box.proposals.importers.matlab:EDGE_BOXES_MAT",
    "pkl": "tag2box.proposals.importers.proposal_files:PICKLE_PROPOSALS",
    "npz": "tag2box.proposals.importers.proposal_files:NPZ_PROPOSALS",
    "coco": "tag2box.proposals.importers.proposal_files:COCO_PROPOSALS",
    "json": "tag2box.proposals.importers.proposal_files:JSON_PROPOSALS",
}

GROUPS = {
    "labeler": LABELERS,
    "MIL head": MIL_HEADS,
    "loss term": LOSS_TERMS,
    "backbone": BACKBONES,
    "student": STUDENTS,
    "regularizer": REGULARIZERS,
    "optimizer": OPTIMIZERS,
    "proposal method": PROPOSAL_METHODS,
    "proposal file format": PROPOSAL_FILE_FORMATS,
    "dataset format": DATASET_FORMATS,
    "export format": EXPORT_FORMATS,
    "metric": METRICS,
    "tracker": TRACKERS,
}
"""Every group of plug-ins by the name that error messages give it."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """Marks a settings field that holds a part of a group: ``labeler: Annotated[Labeler, Plugin("labeler")]``."""

    group: str

    def built_in(self) -> dict[str, type]:
        """The classes of the group by kind."""
        return {kind: load_part(path) for kind, path in GROUPS[self.group].items()}

    def find(self, kind: str) -> type:
        """The settings class of a kind: a built-in name, or ``package.module:Name``."""
        return settings_class(self.group, kind)

    def kind_of(self, part: object) -> str:
        """The kind under which settings find the class of a part again."""
        cls = type(part)
        path = f"{cls.__module__}:{cls.__qualname__}"
        return next((kind for kind, known in GROUPS[self.group].items() if known == path), path)


def find_part(group: str, kind: str) -> Any:
    """The class (or function) that a kind of a group names; a UserError names the choices."""
    known = GROUPS[group]
    if kind in known:
        return load_part(known[kind])
    if ":" in kind:
        return load_part(kind)
    near = difflib.get_close_matches(kind, known, 1)
    choices = " or ".join(f'"{name}"' for name in known)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UserError(f'must be {choices or "the name of a class"}, or "package.module:Name" of your own{hint}')


@cache
def load_part(path: str) -> Any:
    """Import ``package.module:Name``."""
    module, _, name = path.partition(":")
    try:
        part: Any = import_module(module)
        for attribute in name.split("."):
            part = getattr(part, attribute)
    except ImportError as error:
        raise UserError(
            f'"{path}" cannot be imported ({error}); install its package, or add its folder to PYTHONPATH '
            f"(Python looked in {len(sys.path)} places)"
        ) from None
    except AttributeError:
        raise UserError(f'"{path}": {module} has no attribute {name}; check the spelling') from None
    return part


def settings_class(group: str, kind: str) -> type:
    """``find_part`` for parts that are built from settings: a dataclass, whose fields are the settings."""
    found = find_part(group, kind)
    if not (isinstance(found, type) and is_dataclass(found)):
        raise UserError(
            f'"{kind}": a {group} is a dataclass whose fields are its settings; decorate it with @dataclass'
        )
    return found
