"""The named systems change their own settings, and none that a comparison keeps equal."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from pathlib import Path

import pytest
from rich.console import Console

from tag2box import settings
from tag2box.cli.catalog import system_overrides, systems_table
from tag2box.cli.training_data import check_attention
from tag2box.errors import UserError
from tag2box.methods.discovery import Discovery
from tag2box.models.adversary import ConcreteDropBlock
from tag2box.models.drop_block import DropBlock, InvertedAttention
from tag2box.models.lite0 import Lite0
from tag2box.paper_runs import PAPER_RUNS
from tag2box.proposals.early_responses import Wsrpn
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.recipes import RECIPES, Config, table_3a
from tag2box.systems import SYSTEMS, System, changes, find_system
from tiny_world import call

PAPER = {
    "wsddn": (34.8, None, None), "oicr": (41.2, 37.9, None), "pcl": (43.5, 40.6, 19.4), "c-wsl": (46.8, 43.0, None),
    "wsrpn": (47.9, 43.4, None), "c-mil": (50.5, 46.7, None), "c-midn": (52.6, 50.2, 21.4), "wsod2": (53.6, 47.2, 22.7),
    "oim": (50.1, 45.3, None), "slv": (53.5, 49.2, None), "mist": (54.9, 52.1, 24.3), "casd": (56.8, 53.6, 26.4),
    "oicr-plus": (52.3, None, None), "od-wscl": (56.1, 54.6, 27.7),
}  # fmt: skip
"""mAP50 on VOC07 and VOC12, AP50 on COCO14: tables 1 to 3 of the paper."""

PROPERTIES = {
    "wsddn": "methods/test_wsddn_spatial.py::test_it_pulls_vectors_together_and_leaves_scores_alone",
    "oicr": "methods/test_oicr.py::test_every_pseudo_box_has_a_present_class_and_is_its_own_foreground",
    "pcl": "methods/test_pcl.py::test_no_more_centres_than_wanted_and_none_for_two_classes",
    "c-wsl": "methods/test_c_wsl.py::test_as_many_pseudo_boxes_as_counted_none_inside_another",
    "wsrpn": "training/test_region_classifier.py::test_each_turn_trains_its_own_part",
    "c-mil": "methods/test_c_mil.py::test_at_the_end_it_is_plain_mil_to_the_bit",
    "c-midn": "methods/test_c_midn.py::test_the_second_head_finds_the_other_object",
    "wsod2": "methods/test_wsod2.py::test_a_regression_onto_an_object_weighs_more_than_one_beside_it",
    "oim": "methods/test_oim.py::test_mined_boxes_are_positive_alone_and_no_proposal_is_mined_twice",
    "slv": "methods/test_slv_voting.py::test_one_confident_box_returns_that_box",
    "mist": "methods/test_mist_selection.py::test_it_is_stricter_than_nms_and_keeps_the_best",
    "casd": "models/test_layered.py::test_a_term_over_layers_trains_what_is_trainable",
    "oicr-plus": "test_systems.py::test_ours_are_the_rows_of_table_3a",
    "od-wscl": "methods/test_discovery.py::test_raising_tau_never_adds_candidates",
}
"""A test of what each system is known by."""

EQUAL = {"data", "superpixels", "segmentation", "augment", "plan", "compute", "inference", "maps", "feature_cache_gb"}
"""Settings that no system changes."""


@pytest.mark.parametrize("name", [*SYSTEMS, *(PROPERTIES.keys() - SYSTEMS.keys())])
def test_every_system_has_a_test_of_its_property(name: str) -> None:
    """A new system comes with one, and none is left without by a change of names."""
    assert name in SYSTEMS and name in PROPERTIES
    file, _, test = PROPERTIES[name].partition("::")
    source = (Path(__file__).parent / file).read_text(encoding="utf-8")
    functions = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    assert functions.count(test) == 1
    assert list(PROPERTIES.values()).count(PROPERTIES[name]) == 1


@pytest.fixture(params=["photos", "scenes", "od-wscl", "voc07-mcg-vgg16"])
def base(request: pytest.FixtureRequest) -> Config:
    return RECIPES[request.param]()


def test_there_are_fourteen_systems_with_the_papers_figures() -> None:
    assert {n: tuple(s.reported(d) for d in ("voc07", "voc12", "coco14")) for n, s in SYSTEMS.items()} == PAPER
    assert SYSTEMS["od-wscl"].figures["voc07"] == PAPER_RUNS["voc07-ss-vgg16"].figures
    assert SYSTEMS["mist"].figures["coco14"].ARl == 38.3
    assert [s.year for s in SYSTEMS.values()] == sorted(s.year for s in SYSTEMS.values())
    assert len({s.title for s in SYSTEMS.values()}) == len(SYSTEMS)


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=list(SYSTEMS))
def test_a_system_changes_only_its_own_settings(system: System, base: Config) -> None:
    after = system(base)
    assert after.name == system.title
    changed = {field.name for field in fields(Config) if getattr(after, field.name) != getattr(base, field.name)}
    assert not changed & EQUAL
    assert "proposals" not in changed or system.name == "wsrpn"
    assert "backbone" not in changed or system.name == "casd"
    assert "loader" not in changed or system.name == "casd"
    assert (after.loader.batch_size, after.loader.max_proposals) == (base.loader.batch_size, base.loader.max_proposals)
    assert after.criterion.mil.over_classes == base.criterion.mil.over_classes
    assert after.criterion.refine.first_stage == base.criterion.refine.first_stage
    assert after.heads.mil_background == base.heads.mil_background


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=list(SYSTEMS))
def test_changes_as_overrides_give_the_system(system: System, base: Config) -> None:
    after = system(base)
    again = settings.load(Config, [], tuple(changes(base, after)), base=base)
    assert replace(again, name=after.name) == after
    assert list(changes(after, after)) == []


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=list(SYSTEMS))
def test_a_system_twice_is_the_system_and_survives_its_own_file(system: System, base: Config, tmp_path: Path) -> None:
    after = system(base)
    if system.name != "slv":  # each call adds a stage
        assert system(after) == after
    (tmp_path / "config.toml").write_text(settings.dump(after))
    assert settings.load(Config, [tmp_path / "config.toml"]) == after


def test_no_two_systems_are_the_same_settings(base: Config) -> None:
    made = [replace(system(base), name="") for system in SYSTEMS.values()]
    assert all(a != b for i, a in enumerate(made) for b in made[:i])


def test_ours_are_the_rows_of_table_3a(base: Config) -> None:
    assert SYSTEMS["oicr-plus"](base) == table_3a(base, discovery=False, contrast=False)
    assert SYSTEMS["od-wscl"](base) == table_3a(base, discovery=True, contrast=True)
    assert isinstance(SYSTEMS["od-wscl"](SYSTEMS["oicr-plus"](base)).criterion.labeler, Discovery)


@pytest.mark.parametrize(
    ("name", "regress", "drop", "stages"),
    [
        ("wsddn", False, 0.0, 0), ("oicr", False, 0.0, 3), ("pcl", False, 0.0, 3), ("c-wsl", True, 0.0, 3),
        ("wsrpn", False, 0.0, 3), ("c-mil", False, 0.0, 3), ("c-midn", False, 0.0, 3), ("wsod2", True, 0.0, 3),
        ("oim", False, 0.0, 3), ("slv", True, 0.0, 4), ("mist", True, 0.3, 3), ("casd", True, 16 / 49, 3),
        ("oicr-plus", True, 0.3, 3), ("od-wscl", True, 0.3, 3),
    ],
)  # fmt: skip
def test_box_regression_dropblock_and_stages_are_as_the_authors_had_them(name, regress, drop, stages) -> None:
    made = SYSTEMS[name](RECIPES["photos-frozen"]())
    assert (made.heads.regress, made.drop_block.drop, made.heads.stages) == (regress, drop, stages)
    own = {"mist": ConcreteDropBlock, "casd": InvertedAttention}
    assert isinstance(made.drop_block, own.get(name, DropBlock))
    assert made.criterion.contrast.enabled is (name == "od-wscl")


def test_wsrpn_keeps_the_budget_of_the_proposals_it_replaces() -> None:
    scenes = RECIPES["scenes"]()
    made = SYSTEMS["wsrpn"](scenes).proposals
    assert isinstance(made, Wsrpn)
    assert (made.short_side, made.max_boxes, made.min_side, made.min_share) == (144, 200, 16, 0)
    small = SYSTEMS["wsrpn"](RECIPES["inspection"]()).proposals
    assert isinstance(small, Wsrpn) and (small.max_boxes, small.min_side, small.min_share) == (1500, 0, 0.015)
    assert SYSTEMS["wsrpn"](replace(scenes, proposals=Imported())).proposals == Wsrpn()


@pytest.mark.parametrize(
    ("recipe", "network"),
    [("photos", "lite0"), ("voc07-ss-vgg16", "vgg16"), ("voc07-ss-r50-ws", "r50-ws"), ("voc07-ss-r101-ws", "r101-ws")],
)
def test_wsrpn_finds_windows_with_the_backbone_it_trains(recipe: str, network: str) -> None:
    made = SYSTEMS["wsrpn"](RECIPES[recipe]())
    assert isinstance(made.proposals, Wsrpn) and made.heads.region and made.criterion.rescore.keep == 0.5
    assert made.proposals.network == network == made.backbone.title
    assert made.proposals.weights == getattr(made.backbone, "weights", None)


@pytest.mark.parametrize(
    "recipe", ["photos", "photos-frozen", "scenes", "od-wscl", "voc07-ss-vgg16", "voc07-ss-r50-ws"]
)
def test_casd_has_four_views_and_layers_that_learn_on_every_backbone(recipe: str) -> None:
    base = RECIPES[recipe]()
    made = SYSTEMS["casd"](base)
    views = made.loader.views((0, 0, 0))
    assert len(views) == 4 and len({view.short for view in views}) == 2 and sum(view.flip for view in views) == 2
    assert (made.criterion.attention.input_weight, made.criterion.attention.layer_weight) == (0.1, 0.1)
    assert made.heads.early_layers == 2
    if isinstance(made.backbone, Lite0):
        assert made.backbone.train_tail and made.backbone.train_blocks == 1 and not made.backbone.pooled
    else:
        assert made.backbone == base.backbone
    check_attention(made)


NARROW, NO_CELLS = "mask net of 64 channels, not 512", "RoI maps of one cell, so that DropBlock drops whole proposals"
FROZEN = "convolutions that are all frozen"
REDUCED = {
    **{("mist", recipe): f"reduced: {NARROW}" for recipe in ("scenes", "photos-frozen")},
    **{("mist", recipe): f"reduced: {NARROW}; {NO_CELLS}" for recipe in ("photos", "inspection")},
    **{
        (name, recipe): "reduced: no DropBlock"
        for name in ("oicr-plus", "od-wscl")
        for recipe in ("photos", "inspection")
    },
    ("wsrpn", "photos"): f"reduced: windows from before the adaptation; {FROZEN}",
    ("wsrpn", "inspection"): f"reduced: {FROZEN}",
}
"""What systems lack on recipes; on all others they are whole."""


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize(
    "recipe", ["scenes", "photos", "inspection", "photos-frozen", "voc07-ss-vgg16", "voc07-ss-r50-ws"]
)
def test_systems_are_whole_but_for_what_light_recipes_leave_out(name: str, recipe: str) -> None:
    system = SYSTEMS[name]
    assert system.state(system(RECIPES[recipe]())) == REDUCED.get((name, recipe), "whole")


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("wsddn", "criterion.spatial.weight=0", "no spatial regularizer"),
        ("oicr", "criterion.labeler.kind=mist", "labels of another labeler"),
        ("pcl", "criterion.refine.over=proposals", "a loss over proposals, not over clusters"),
        ("pcl", "criterion.labeler.kind=oicr", "labels of another labeler"),
        ("c-wsl", "criterion.labeler.kind=oicr", "labels of another labeler"),
        ("c-wsl", "heads.regress=false", "no box regression"),
        ("oim", "criterion.refine.reweight=false", "no reweighted loss"),
        ("oim", "criterion.labeler.kind=oicr", "labels of another labeler"),
        ("slv", "criterion.labeler.kind=oicr", "labels of another labeler"),
        ("slv", "criterion.refine.last_teacher=previous", "votes of one stage, not of the mean of all"),
        ("slv", "heads.regress=false", "no box regression"),
        ("oicr-plus", "heads.regress=false", "no box regression"),
        ("oicr-plus", "drop_block.drop=0", "no DropBlock"),
        ("oicr-plus", "backbone.pooled=true", NO_CELLS),
        ("oicr-plus", "criterion.labeler.kind=pcl", "labels of another labeler"),
        ("od-wscl", "criterion.contrast.enabled=false", "no contrastive loss"),
        ("od-wscl", "criterion.labeler.kind=oicr", "no object discovery by similarity"),
        ("od-wscl", "criterion.labeler.criterion=score_fixed", "no object discovery by similarity"),
        ("od-wscl", "drop_block.drop=0", "no DropBlock"),
        ("od-wscl", "heads.regress=false", "no box regression"),
        ("mist", "drop_block.hidden=128", "mask net of 128 channels, not 512"),
        ("mist", "drop_block.kind=plain", "no Concrete DropBlock"),
        ("mist", "drop_block.drop=0", f"no Concrete DropBlock; {NARROW}"),
        ("mist", "criterion.labeler.kind=oicr", f"labels of another labeler; {NARROW}"),
        ("mist", "heads.regress=false", f"no box regression; {NARROW}"),
        ("mist", ("drop_block.hidden=512", "backbone.pooled=true"), NO_CELLS),
        ("casd", "loader.views_per_image=2", "2 views, not 4"),
        ("casd", "criterion.attention.input_weight=0", "no attention between views"),
        ("casd", "criterion.attention.layer_weight=0", "no attention between layers"),
        ("casd", "heads.early_layers=0", "no early layers"),
        ("casd", "heads.regress=false", "no box regression"),
        ("casd", "drop_block.drop=0", "no inverted attention"),
        ("casd", "drop_block.kind=plain", "no inverted attention"),
        ("casd", ("backbone.train_tail=false", "backbone.train_neck=false"), "attention on frozen layers"),
        ("casd", ("backbone.kind=vgg16", "backbone.train_trunk=false"), "attention on frozen layers"),
        ("c-mil", "criterion.mil.loss=cross_entropy", "cross-entropy, not the hinge loss"),
        ("c-mil", "criterion.mil.subset_score=merged", "subsets scored by merged logits"),
        ("c-mil", "criterion.labeler.positives=top", "positives around the top box alone"),
        ("c-midn", "criterion.mil.guide=mil", "class masks without a segmentation branch"),
        ("c-midn", "heads.mil_heads=1", "one MIL head, not two"),
        ("wsod2", "criterion.labeler.evidence_of=proposal", "evidence of proposals, not of regressed boxes"),
        ("wsod2", "criterion.labeler.belief=one", "weights that end at 1, not at the score"),
        ("wsod2", "heads.regress=false", "evidence of proposals, not of regressed boxes"),
        ("wsrpn", "proposals.network=vgg16", "windows of another network than the backbone"),
        ("wsrpn", "proposals.kind=edge_boxes", "windows of another network than the backbone"),
        ("wsrpn", "adaptation.epochs=2", "windows from before the adaptation"),
        ("wsrpn", "heads.region=false", "no region classifier of its own"),
        ("wsrpn", "criterion.rescore.keep=1", "windows that are not filtered"),
        ("wsrpn", "backbone.train_neck=false", FROZEN),
    ],
)
def test_a_setting_that_takes_a_part_away_makes_a_system_reduced(
    name: str, change: str | tuple[str, ...], reason: str
) -> None:
    system = SYSTEMS[name]
    changed = [change] if isinstance(change, str) else change
    made = settings.load(Config, [], changed, base=system(RECIPES["scenes"]()))
    assert system.state(made) == f"reduced: {reason}"


# ---------------------------------------------------------------- at the command line


@pytest.fixture
def trained(monkeypatch) -> list[Config]:
    calls: list[Config] = []
    monkeypatch.setattr("tag2box.cli.train.train", lambda config, *_, **__: calls.append(config))
    return calls


def test_train_starts_from_a_system_and_overrides_come_on_top(trained, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "mine.toml").write_text("[criterion.labeler]\nshare = 0.3\n")
    argv = ["train", "tags.csv", "--system", "mist", "--config", f"{tmp_path / 'mine.toml'}", "--out", "run"]
    assert call([*argv, "--set", "criterion.contrast.enabled=true"], monkeypatch, capsys).code == 0
    (config,) = trained
    mist = SYSTEMS["mist"](RECIPES["photos"]())
    assert config.name == "MIST" and config.drop_block == mist.drop_block
    assert config.criterion.labeler == replace(mist.criterion.labeler, share=0.3)  # type: ignore[type-var]
    assert config.criterion.contrast.enabled


def test_a_system_stands_on_any_recipe(trained, monkeypatch, capsys) -> None:
    argv = ["train", "tags.csv", "--recipe", "scenes", "--system", "slv", "--out", "run"]
    assert call(argv, monkeypatch, capsys).code == 0
    tags = replace(RECIPES["scenes"]().data, tags=Path("tags.csv"))
    assert trained == [replace(SYSTEMS["slv"](RECIPES["scenes"]()), data=tags)]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["train", "t.csv", "--system", "mits", "--out", "x"], ("mits", "did you mean mist?", "tag2box systems")),
        (["train", "--system", "mist", "--resume", "--out", "x"], ("--resume", "--system")),
        (["systems", "OICR"], ("OICR", "did you mean oicr?")),
        (["systems", "oicr", "--recipe", "fotos"], ("--recipe fotos", "did you mean photos?")),
    ],
)
def test_an_error_is_one_line(argv, words, trained, monkeypatch, capsys) -> None:
    done = call(argv, monkeypatch, capsys)
    assert done.code == 2 and len(done.complaints) == 1 and trained == []
    assert all(word in done.complaints[0] for word in words), done.complaints[0]


def test_the_list_names_all_within_80_columns() -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(systems_table())
    lines = console.export_text().splitlines()
    assert [line.split()[0] for line in lines if line[:1].strip()] == ["system", *SYSTEMS]
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)


def test_one_system_is_printed_as_settings(monkeypatch, capsys) -> None:
    done = call(["systems", "slv"], monkeypatch, capsys)
    assert done.out == system_overrides("slv")
    head, *lines = done.out.splitlines()
    base = RECIPES["photos"]()
    assert head.startswith("# SLV (2020)")
    assert settings.load(Config, [], lines, base=base).criterion == SYSTEMS["slv"](base).criterion
    assert call(["systems"], monkeypatch, capsys).out.count("\n") > len(SYSTEMS)


def test_unknown_names_get_the_nearest() -> None:
    assert find_system("c-mil") is SYSTEMS["c-mil"]
    with pytest.raises(UserError, match="did you mean c-midn"):
        find_system("c-midnn")
