"""Recipes: whole settings by name, every number in them the one it was given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tag2box import settings
from tag2box.methods.discovery import Discovery
from tag2box.methods.oicr import Oicr
from tag2box.proposals.selective_search import SelectiveSearch
from tag2box.recipes import RECIPES, Config, table_3a


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_its_own_file(name, tmp_path):
    config = RECIPES[name]()
    (tmp_path / "config.toml").write_text(settings.dump(config))
    assert settings.load(Config, [tmp_path / "config.toml"]) == config


@pytest.mark.parametrize("name", RECIPES)
def test_an_override_starts_from_the_recipe(name):
    base = RECIPES[name]()
    changed = settings.load(Config, [], ["plan.iterations=7"], base=base)
    assert changed == replace(base, plan=replace(base.plan, iterations=7))


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
