"""Table 3a: discovery and the contrastive loss, each on and off."""

from __future__ import annotations

from dataclasses import asdict

from tag2box.metrics.challenges import challenges, challenges_by_company, in_company
from tag2box.recipes import Config
from tag2box.reporting.gallery import Album
from tag2box.reporting.sections import Section
from tag2box.reporting.study_page import SeedFigures
from tag2box.reporting.tables import Row as Line
from tag2box.reporting.tables import Table
from tag2box.studies.datasets import StudyData
from tag2box.studies.experiment import OD, OD_WSCL, OICR_PLUS, WSCL, Drawn, Experiment, Findings, Row
from tag2box.studies.fates import best_of

COMPANY = ("alone", "in company")
WHERE = ("all", *COMPANY)
SHOWN = ("found", "missed")


def draw(findings: Findings, base: Config, album: Album) -> Drawn:
    """The fates of all objects, of those alone of their class in a photo, and of those that argmax must leave out."""
    figures = {label: _by_company(label, findings) for label in findings.results}
    heads = tuple(f"{fate},\n{where}" for fate in SHOWN for where in WHERE)
    lines = tuple(
        Line(label, tuple(own[where, fate].words() for fate in SHOWN for where in WHERE))
        for label, own in figures.items()
    )
    counted = {seed: _counted(data) for seed, data in findings.data.items()}
    first = counted[findings.first[0]]
    words = (
        f"Of {sum(first.values())} test objects (seed {findings.first[0]}) {first[COMPANY[1]]} share a photo with "
        "others of their class. Labels by argmax have one box for all of these; discovery is there to find the rest. "
        "Of each class as many boxes are kept as it has objects: from a score up, a detector that shows more boxes "
        "would find more. Shares are in per cent."
    )
    numbers = {
        label: {where: {fate: dict(own[where, fate].by_seed) for fate in SHOWN} for where in WHERE}
        for label, own in figures.items()
    }
    table = Table("Found and missed, with as many boxes as objects", heads, lines)
    section = Section("company", "Alone and in company", words, tables=(table,))
    return Drawn((section,) if lines else (), {"company": numbers, "company_objects": counted})


def _counted(data: StudyData) -> dict[str, int]:
    """How many test objects are alone and in company."""
    company = [is_other for objects in data.test.objects for is_other in in_company(objects)]
    return dict(zip(COMPANY, (company.count(False), company.count(True)), strict=True))


def _by_company(label: str, findings: Findings) -> dict[tuple[str, str], SeedFigures]:
    """Shares of objects by their company and fate."""
    shares = {}
    for seed, result in findings.results[label].items():
        data = findings.data[seed]
        found = best_of(result.record(data).test_detections or {}, data.test)
        fates = (challenges(data.test, found, min_score=0.0), *challenges_by_company(data.test, found, min_score=0.0))
        shares[seed] = dict(zip(WHERE, map(asdict, fates), strict=True))
    return {
        (where, fate): SeedFigures(
            {seed: 100 * own[where][fate] for seed, own in shares.items() if own[where][fate] is not None}
        )
        for where in WHERE
        for fate in SHOWN
    }


TABLE3A = Experiment(
    name="table3a",
    title="Object discovery and WSCL (table 3a)",
    shows="Discovery and the contrastive loss each help, and together more than either: each makes the other better.",
    origin="table 3a; VOC07, VGG16",
    rows=(
        Row(label="OICR+", settings=OICR_PLUS, paper={"mAP50": 52.3}),
        Row(label="+ OD", settings=OD, paper={"mAP50": 56.1}),
        Row(label="+ WSCL", settings=WSCL, paper={"mAP50": 54.5}),
        Row(label="+ both (OD-WSCL)", settings=OD_WSCL, paper={"mAP50": 58.7}),
    ),
    notes=("The paper's text says selective search, its figure (58.7) is that of MCG in table 2.",),
    watched=("OICR+", "+ OD", "+ WSCL", "+ both (OD-WSCL)"),
    draw=draw,
)
