"""Tables 1, 2 and 3a to 3c of the paper as experiments."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from tag2box import paper_runs, recipes, systems
from tag2box.experiments import experiment, outcomes, study_data
from tag2box.metrics.challenges import challenges, challenges_by_instance_count, is_multi_instance
from tag2box.reporting import formatting as fmt, study_tables

OURS = ("oicr-plus", "od-wscl")
"""Systems with rows of their own in every table."""

NETS = {"VGG16": "vgg16", "R50-WS": "r50-ws", "R101-WS": "r101-ws"}
"""The paper's name of a backbone -> its part in the names of ``PAPER_RUNS``."""

KINDS = {
    "VGG16": ("vgg16", "vgg16", ()),
    "VGG16, convolutions alone": ("vgg16-conv", "vgg16", ("backbone.train_trunk=false",)),
    "R50-WS": ("r50-ws", "resnet_ws", ("backbone.depth=50",)),
    "R101-WS": ("r101-ws", "resnet_ws", ("backbone.depth=101",)),
}
"""Backbone -> the weights it requires, its kind, and further settings."""


def paper_figures(run: str) -> dict[str, float]:
    """The paper's figures of one of its runs, as ``voc07-mcg-vgg16``."""
    return paper_runs.PAPER_RUNS[run].figures.reported()


def compared(dataset: str) -> tuple[systems.System, ...]:
    """The systems before OD-WSCL with figures on a dataset in the paper, oldest first."""
    return tuple(system for name, system in systems.SYSTEMS.items() if name not in OURS and dataset in system.figures)


def backbones(
    method: str,
    settings: Sequence[str],
    paper: Mapping[str, Mapping[str, float]],
    *,
    change: systems.Change = experiment.unchanged,
) -> tuple[experiment.StudyVariant, ...]:
    """A method on each backbone for which the paper has figures; each row requires the backbone's weights."""
    rows = []
    for name, figures in paper.items():
        weights, kind, more = KINDS[name]
        changes = (*settings, f"backbone.kind={kind}", f"backbone.weights={weights}", *more)
        rows.append(
            experiment.StudyVariant(
                label=f"{method}, {name}", settings=changes, change=change, paper=figures, weights=weights
            )
        )
    return tuple(rows)


# ---------------------------------------------------------------- table 1

COCO_NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")


def _paper_coco(*figures: float) -> dict[str, float]:
    return dict(zip(COCO_NAMES, figures, strict=False))


COCO_ROWS = {name: paper_figures(f"coco14-mcg-{net}") for name, net in NETS.items()}
COCO17 = {
    "MIST, VGG16, COCO17": _paper_coco(12.4, 25.8, 10.5, 3.9, 13.8, 19.9, 14.3, 23.3, 24.6, 9.7, 26.6, 39.6),
    **{f"OD-WSCL, {name}, COCO17": paper_figures(f"coco17-mcg-{net}") for name, net in NETS.items()},
}

TABLE1 = experiment.Experiment(
    name="table1",
    title="COCO's twelve numbers (table 1)",
    shows="OD-WSCL is above the systems before it in all of COCO's numbers, most of all in recall: it finds objects "
    "that others miss.",
    origin="table 1; COCO14, VGG16, MCG proposals unless stated otherwise",
    rows=(
        experiment.StudyVariant(label="OICR+", settings=experiment.OICR_PLUS),
        experiment.StudyVariant(label="OD-WSCL", settings=experiment.OD_WSCL, paper=COCO_ROWS["VGG16"]),
        *backbones("OD-WSCL", experiment.OD_WSCL, COCO_ROWS),
        *(
            experiment.StudyVariant(label=s.title, change=s.change, paper=s.figures["coco14"].reported())
            for s in compared("coco14")
        ),
        *(
            experiment.StudyVariant(label=name, paper=paper, absent="another dataset than COCO14")
            for name, paper in COCO17.items()
        ),
    ),
    columns=tuple(experiment.StudyColumn(name, ("test", "coco", name)) for name in COCO_NAMES),
    tracked=("OICR+", "OD-WSCL"),
)


# ---------------------------------------------------------------- table 2

MCG: dict[str, tuple[float, ...]] = {"MIST, MCG": (56.5, 53.9), "CASD, MCG": (57.4,), "OD-WSCL, MCG": (58.7, 56.2)}


def _paper_voc(figures: tuple[float, ...]) -> dict[str, float]:
    return dict(zip(("VOC07", "VOC12"), figures, strict=False))


def _selective_search(system: systems.System) -> dict[str, float]:
    figures = {name: system.reported(dataset) for name, dataset in (("VOC07", "voc07"), ("VOC12", "voc12"))}
    return {name: figure for name, figure in figures.items() if figure is not None}


TABLE2 = experiment.Experiment(
    name="table2",
    title="Average precision on VOC (table 2)",
    shows="With selective search OD-WSCL is second on VOC07 and first on VOC12; with MCG it is first on both.",
    origin="table 2; VGG16, selective search unless stated otherwise",
    rows=(
        experiment.StudyVariant(label="OICR+", settings=experiment.OICR_PLUS, paper={"VOC07": 52.3}),
        experiment.StudyVariant(label="OD-WSCL", settings=experiment.OD_WSCL, paper={"VOC07": 56.1, "VOC12": 54.6}),
        *backbones("OD-WSCL", experiment.OD_WSCL, {"VGG16": {"VOC07": 56.1, "VOC12": 54.6}}),
        *(
            experiment.StudyVariant(label=s.title, change=s.change, paper=_selective_search(s))
            for s in compared("voc07")
        ),
        *(
            experiment.StudyVariant(
                label=name, paper=_paper_voc(f), absent="needs MCG proposals, with --proposals and --test-proposals"
            )
            for name, f in MCG.items()
        ),
    ),
    notes=("OICR+ (52.3) is from table 3 of the paper: OICR with box regression and DropBlock.",),
    tracked=("OICR+", "OD-WSCL"),
)


# ---------------------------------------------------------------- table 3a

ALONE, WITH_OTHERS = "one instance", "several instances"  # keys of the JSON file
CONTEXTS = {"all": "all", ALONE: "alone", WITH_OTHERS: "with others"}
"""Test objects by the number of objects of their class on the photo -> words of the page."""
TABLE3A_OUTCOMES = ("found", "missed")


def analyze_table3a(results: experiment.StudyResults, base: recipes.Config) -> experiment.Analysis:
    """Outcomes of all objects, of those alone of their class on a photo, and of those with others of their class."""
    figures = {label: _by_context(label, results) for label in results.results}
    heads = tuple(f"{outcome},\n{words}" for outcome in TABLE3A_OUTCOMES for words in CONTEXTS.values())
    keys = [(context, outcome) for outcome in TABLE3A_OUTCOMES for context in CONTEXTS]
    rows = tuple(fmt.TableRow(label, tuple(own[key].words() for key in keys)) for label, own in figures.items())
    counted = {seed: _count_contexts(data) for seed, data in results.data.items()}
    first = counted[results.first[0]]
    words = (
        f"Of {sum(first.values())} test objects (seed {results.first[0]}) {first[WITH_OTHERS]} share a photo with "
        "others of their class. Argmax labels have one box for all of these; discovery is meant to find the others. "
        "As many boxes of a class are kept as it has objects: with a score threshold, a detector that shows more boxes "
        "would find more. Shares are in per cent."
    )
    numbers = {
        label: {
            context: {outcome: dict(own[context, outcome].by_seed) for outcome in TABLE3A_OUTCOMES}
            for context in CONTEXTS
        }
        for label, own in figures.items()
    }
    table = fmt.Table("Found and missed, with as many boxes as objects", heads, rows)
    section = study_tables.StudySection("contexts", "Alone and with others of the class", words, tables=(table,))
    return experiment.Analysis(
        (section,) if rows else (), {"by_instance_count": numbers, "objects_by_instance_count": counted}
    )


def _count_contexts(data: study_data.StudyData) -> dict[str, int]:
    """Numbers of test objects alone of their class on a photo, and with others."""
    is_multi = [is_other for objects in data.test.objects for is_other in is_multi_instance(objects)]
    return {ALONE: is_multi.count(False), WITH_OTHERS: is_multi.count(True)}


def _by_context(label: str, results: experiment.StudyResults) -> dict[tuple[str, str], study_tables.SeedFigures]:
    """Shares of objects by context and outcome."""
    shares = {}
    for seed, result in results.results[label].items():
        data = results.data[seed]
        found = outcomes.best_of(result.record(data).test_detections or {}, data.test)
        split = challenges_by_instance_count(data.test, found, min_score=0.0)
        everything = (challenges(data.test, found, min_score=0.0), *split)
        shares[seed] = dict(zip(CONTEXTS, map(asdict, everything), strict=True))
    return {
        (context, outcome): study_tables.SeedFigures(
            {seed: 100 * own[context][outcome] for seed, own in shares.items() if own[context][outcome] is not None}
        )
        for context in CONTEXTS
        for outcome in TABLE3A_OUTCOMES
    }


TABLE3A = experiment.Experiment(
    name="table3a",
    title="Object discovery and WSCL (table 3a)",
    shows="Discovery and the contrastive loss each help, and together more than either: each makes the other better.",
    origin="table 3a; VOC07, VGG16",
    rows=(
        experiment.StudyVariant(label="OICR+", settings=experiment.OICR_PLUS, paper={"mAP50": 52.3}),
        experiment.StudyVariant(label="+ OD", settings=experiment.OD, paper={"mAP50": 56.1}),
        experiment.StudyVariant(label="+ WSCL", settings=experiment.WSCL, paper={"mAP50": 54.5}),
        experiment.StudyVariant(label="+ both (OD-WSCL)", settings=experiment.OD_WSCL, paper={"mAP50": 58.7}),
    ),
    notes=("The paper's text says selective search, its figure (58.7) is that of MCG in table 2.",),
    tracked=("OICR+", "+ OD", "+ WSCL", "+ both (OD-WSCL)"),
    analyze=analyze_table3a,
)


# ---------------------------------------------------------------- table 3b

OTHERS = {"oicr": (50.9, 51.4), "pcl": (50.8, 53.3), "c-mil": (53.4, 53.9)}
"""System -> mAP50 on R50-WS and on R101-WS."""


def _others(name: str, r50: float, r101: float) -> tuple[experiment.StudyVariant, ...]:
    system, figures = systems.SYSTEMS[name], {"R50-WS": {"mAP50": r50}, "R101-WS": {"mAP50": r101}}
    lite0 = experiment.StudyVariant(
        label=f"{system.title}, lite0", settings=("backbone.kind=lite0",), change=system.change
    )
    return (lite0, *backbones(system.title, (), figures, change=system.change))


TABLE3B = experiment.Experiment(
    name="table3b",
    title="Other backbones (table 3b)",
    shows="OD-WSCL is above the systems before it on ResNets too.",
    origin="table 3b; VOC07",
    rows=(
        experiment.StudyVariant(label="OICR+, lite0", settings=(*experiment.OICR_PLUS, "backbone.kind=lite0")),
        experiment.StudyVariant(label="OD-WSCL, lite0", settings=(*experiment.OD_WSCL, "backbone.kind=lite0")),
        *backbones("OICR+", experiment.OICR_PLUS, {"VGG16": {"mAP50": 52.3}, "VGG16, convolutions alone": {}}),
        *backbones(
            "OD-WSCL", experiment.OD_WSCL, {"VGG16": paper_figures("voc07-mcg-vgg16"), "VGG16, convolutions alone": {}}
        ),
        *backbones(
            "OD-WSCL",
            experiment.OD_WSCL,
            {name: paper_figures(f"voc07-mcg-{NETS[name]}") for name in ("R50-WS", "R101-WS")},
        ),
        *(row for name, figures in OTHERS.items() for row in _others(name, *figures)),
    ),
    against="OICR+, lite0",
    notes=(
        "VGG16 is from tables 2 and 3a, with MCG proposals. lite0 is not in the paper: its weights come with a pip "
        "package, those of the others with `tag2box weights get`.",
    ),
    tracked=("OICR+, lite0", "OD-WSCL, lite0"),
)


# ---------------------------------------------------------------- table 3c

AUGMENTATIONS = {
    (True, False, False): 56.8,
    (False, True, False): 55.1,
    (False, False, True): 54.8,
    (True, True, False): 57.4,
    (True, False, True): 57.4,
    (False, True, True): 55.2,
    (True, True, True): 58.7,
}
"""IoU sampling, masking, noise -> mAP50."""


def _augmented(iou: bool, mask: bool, noise: bool) -> experiment.StudyVariant:
    on = {"IoU": iou, "mask": mask, "noise": noise}
    switches = [f"criterion.sampling.iou={iou}", f"augment.mask={mask}", f"augment.noise={noise}"]
    settings = (*experiment.OD_WSCL, *(switch.lower() for switch in switches))
    label = " + ".join(name for name, is_on in on.items() if is_on)
    return experiment.StudyVariant(label=label, settings=settings, paper={"mAP50": AUGMENTATIONS[iou, mask, noise]})


TABLE3C = experiment.Experiment(
    name="table3c",
    title="Augmentations of the exemplars (table 3c)",
    shows="Each of the three helps alone, IoU sampling most, and all three together help most.",
    origin="table 3c; VOC07, VGG16, MCG proposals",
    rows=(
        experiment.StudyVariant(label="OICR+", settings=experiment.OICR_PLUS, paper={"mAP50": 52.3}),
        *(_augmented(*on) for on in AUGMENTATIONS),
    ),
    tracked=("OICR+", "IoU", "mask", "noise", "IoU + mask + noise"),
)
