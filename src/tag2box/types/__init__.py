"""The notation, and the types that cross borders.

Letters, used in every signature and shape comment:

    N  images in a batch            C  foreground classes, 0 .. C-1; background is index C, the last
    R  proposals in the batch       K  refinement stages
    D  embedding size               F  feature-vector size
    M  exemplars                    S  seeds (pseudo ground-truth boxes)

Boxes are xyxy float pixels with exclusive right and bottom edges.
"""

from __future__ import annotations

from tag2box.types.batch import Batch, Clues, Facts, Proposals
from tag2box.types.labels import Exemplars, Labeling, Losses, Needs, PseudoLabels, Scene, Seeds
from tag2box.types.outputs import Outputs, StageScores, ViewMaker, Views
from tag2box.types.photos import Photo, TaggedPhotos
from tag2box.types.truth import Detections, Objects, Truth

__all__ = [
    "Batch",
    "Clues",
    "Detections",
    "Exemplars",
    "Facts",
    "Labeling",
    "Losses",
    "Needs",
    "Objects",
    "Outputs",
    "Photo",
    "Proposals",
    "PseudoLabels",
    "Scene",
    "Seeds",
    "StageScores",
    "TaggedPhotos",
    "Truth",
    "ViewMaker",
    "Views",
]
