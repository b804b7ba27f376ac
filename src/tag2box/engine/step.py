"""The life of a batch, in one short function."""

from __future__ import annotations

from dataclasses import dataclass

from tag2box.model.detector import Detector
from tag2box.model.regularise import DropBlock
from tag2box.model.views import Augment, view_maker
from tag2box.objective import Objective, Outcome
from tag2box.types import Batch


@dataclass(frozen=True)
class Step:
    """Network, regulariser, views and objective, called on a batch."""

    detector: Detector
    objective: Objective
    regularise: DropBlock
    augment: Augment

    def __call__(self, batch: Batch) -> Outcome:
        """Maps, scores of the regularised maps, embeddings of the clean ones, then the objective on those alone."""
        detector = self.detector
        maps = detector.roi_maps(batch)
        scores = detector.score(detector.neck(self.regularise(maps)))
        clean = self.objective.uses_embeddings
        embed = detector.embed(detector.neck(maps)) if clean else detector.no_embedding(maps)
        views = view_maker(detector, maps, scores, proposals=batch.proposals, augment=self.augment)
        return self.objective(
            scores, embed, proposals=batch.proposals, tags=batch.tags, views=views, unsure=batch.unsure
        )
