"""Recipes: whole settings by name, every number in them the one it was given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tag2box import settings
from tag2box.methods.discovery import Discovery
from tag2box.methods.oicr import Oicr
from tag2box.proposals.selective_search import SelectiveSearch
from tag2box.recipes import RECIPES, Config, table_3a
from tag2box.training.loop import Plan


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_its_own_file(name, tmp_path):
    config = RECIPES[name]()
    (tmp_path / "config.toml").write_text(settings.dump(config))
    assert settings.load(Config, [tmp_path / "config.toml"]) == config


@pytest.mark.parametrize("name", RECIPES)
def test_an_override_starts_from_the_recipe(name):
    base = RECIPES[name]()
    changed = settings.load(Config, [], ["plan.iterations=7"], base=base)
    assert changed == replace(base, plan=replace(base.plan, iterations=7, epochs=None))


def test_the_defaults_are_the_papers():
    config = Config()
    labeler, criterion = config.criterion.labeler, config.criterion
    assert isinstance(labeler, Discovery)
    assert (criterion.sampling.iou_threshold, config.augment.drop, labeler.nms_iou) == (0.5, 0.3, 0.1)
    assert (criterion.contrast.weight, criterion.contrast.temperature, config.heads.stages) == (0.03, 0.2, 3)
    assert (labeler.criterion, criterion.sampling.iou, config.augment.mask, config.augment.noise) == (
        "similarity", True, True, True,
    )  # fmt: skip
    assert (config.drop_block.block, config.drop_block.drop, config.loader.batch_size) == (3, 0.3, 8)


@pytest.mark.parametrize(
    ("discovery", "contrast", "name", "labeler"),
    [
        (False, False, "OICR+", Oicr), (True, False, "OICR+ with OD", Discovery),
        (False, True, "OICR+ with WSCL", Oicr), (True, True, "OD-WSCL", Discovery),
    ],
)  # fmt: skip
def test_table_3a_is_nothing_but_settings(discovery, contrast, name, labeler):
    config = table_3a(Config(), discovery=discovery, contrast=contrast)
    assert (config.name, type(config.criterion.labeler)) == (name, labeler)
    assert config.criterion.contrast.enabled is contrast
    back = replace(config, name="OD-WSCL", criterion=Config().criterion)
    assert back == Config()


def test_od_wscl_is_the_last_row_and_oicr_plus_the_first():
    assert RECIPES["od-wscl"]() == table_3a(Config(), discovery=True, contrast=True)
    assert RECIPES["oicr-plus"]() == table_3a(Config(), discovery=False, contrast=False)
    assert isinstance(RECIPES["scenes"]().proposals, SelectiveSearch)


@pytest.mark.parametrize("name", ["oicr-plus", "photos", "inspection"])
def test_recipes_of_users_have_the_labels_of_oicr_plus(name):
    config = RECIPES[name]()
    assert config.criterion.labeler == Oicr() and not config.criterion.contrast.enabled
    assert config.name == "OICR+"


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"oicr-plus", "photos", "inspection"}))
def test_recipes_of_the_paper_discover_by_its_rule(name):
    labeler = RECIPES[name]().criterion.labeler
    ours = {"photos-frozen", "scenes"}
    assert labeler == Discovery(rule="exclusive" if name in ours else "paper")
    assert table_3a(RECIPES[name](), discovery=True, contrast=True).criterion.labeler == labeler


# ---------------------------------------------------------------- length of training


@pytest.mark.parametrize(
    ("epochs", "count", "batch", "bounds", "iterations"),
    [
        (None, 450, 8, (1, 10**9), 77),  # as many as are set
        (1.0, 1, 8, (1, 10**9), 1),
        (0.001, 3, 8, (1, 10**9), 1),
        (1.0, 17, 8, (1, 10**9), 3),  # the last batch is not full
        (8.0, 100, 8, (1, 10**9), 100),
        (9.0, 447, 8, (1, 10**9), 500),
        (9.0, 450, 8, (300, 6000), 500),
        (9.0, 30, 8, (300, 6000), 300),
        (9.0, 20_000, 8, (300, 6000), 6000),
        (9.0, 0, 8, (300, 6000), 300),
        (1.0, 1000, 2, (1, 10**9), 500),
    ],
)
def test_iterations_follow_from_epochs(epochs, count, batch, bounds, iterations):
    plan = Plan(iterations=77, epochs=epochs, least_iterations=bounds[0], most_iterations=bounds[1])
    found = plan.for_photos(count, batch)
    assert found == replace(plan, iterations=iterations)
    assert found.for_photos(count, batch) == found


@pytest.mark.parametrize("name", ["photos", "inspection"])
def test_recipes_for_photos_are_as_long_as_there_are_photos(name):
    config = RECIPES[name]()
    length = {n: config.plan.for_photos(n, config.loader.batch_size).iterations for n in (50, 450, 2000, 20_000)}
    assert length == {50: 300, 450: 500, 2000: 2250, 20_000: 6000}


@pytest.mark.parametrize(
    ("overrides", "epochs", "iterations"),
    [
        ([], 9.0, 500),
        (["plan.seed=1"], 9.0, 500),
        (["plan.iterations=7"], None, 7),
        (["plan.epochs=2"], 2.0, 100),
        (["plan.epochs=2", "plan.iterations=7"], 2.0, 100),
        (["plan.iterations=7", "plan.epochs=2"], 2.0, 100),
        (["plan.epochs=", "plan.iterations=7"], None, 7),
    ],
)
def test_a_length_in_iterations_replaces_one_in_epochs(overrides, epochs, iterations):
    base = RECIPES["photos"]()
    base = replace(base, plan=replace(base.plan, least_iterations=1))
    plan = settings.load(Config, [], overrides, base=base).plan
    assert plan.epochs == epochs
    assert plan.for_photos(444, 8).iterations == iterations


def test_a_file_replaces_the_length_of_the_recipe_and_an_override_that_of_the_file(tmp_path):
    (tmp_path / "a.toml").write_text("[plan]\niterations = 40\n")
    (tmp_path / "b.toml").write_text("[plan]\nepochs = 3\n")
    base = RECIPES["photos"]()
    assert settings.load(Config, [tmp_path / "a.toml"], base=base).plan.epochs is None
    assert settings.load(Config, [tmp_path / "a.toml", tmp_path / "b.toml"], base=base).plan.epochs == 3
    assert settings.load(Config, [tmp_path / "b.toml"], ["plan.iterations=5"], base=base).plan.epochs is None
    assert settings.load(Config, [tmp_path / "b.toml", tmp_path / "a.toml"], base=base).plan.epochs is None
