"""Settings that are written and described."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from settings_examples import Colour, Discovery, Mist, Nothing, Oicr, Settings, Train
from tag2box.settings.parse import LARGEST, load
from tag2box.settings.schema import describe, dump, toml

# ---------------------------------------------------------------- what is written


numbers = st.floats(-LARGEST, LARGEST)
integers = st.integers(-LARGEST, LARGEST)
words = st.text(st.characters(exclude_categories=["Cs"]))
unit = st.floats(0, 1, exclude_min=True, exclude_max=True)
labelers = st.one_of(
    st.builds(Oicr, fg_iou=unit), st.builds(Discovery, nms_iou=unit, fg_iou=numbers), st.builds(Mist, share=numbers)
)
trains = st.builds(
    Train,
    iterations=st.integers(1, LARGEST),
    rate=st.none() | st.floats(0, LARGEST, exclude_min=True),
    scales=st.lists(integers).map(tuple),
    window=st.tuples(numbers, numbers).map(lambda pair: tuple(sorted(pair))),
    amp=st.booleans(),
)
everything = st.builds(
    Settings,
    name=words.map(lambda text: text.replace(" ", "")),
    labeler=labelers,
    train=trains,
    weights=st.none() | words.filter(lambda text: "\0" not in text).map(Path),
    mode=st.sampled_from(["fast", "exact"]),
    colour=st.sampled_from(Colour),
    seed=integers | st.just("random"),
    extra=st.none() | st.builds(Mist, share=numbers),
    parts=st.lists(st.builds(Oicr, fg_iou=unit) | st.builds(Discovery, nms_iou=unit)).map(tuple),
    names=st.dictionaries(words, integers),
)


@given(everything)
def test_what_is_dumped_loads_to_an_equal_value(tmp_path_factory, settings):
    path = tmp_path_factory.getbasetemp() / "round.toml"
    path.write_text(dump(settings), encoding="utf-8")
    assert load(Settings, [path]) == settings
    other = Settings(labeler=Mist(share=9.0), extra=Mist(share=9.0), weights=Path("x"), train=Train(rate=9.0))
    loaded = load(Settings, [path], base=other)
    assert loaded.labeler == settings.labeler
    assert (loaded.train, loaded.weights, loaded.extra) == (settings.train, settings.weights, settings.extra)


def test_a_dump_is_toml_with_the_documentation_above_each_field():
    text = dump(Settings())
    assert '# What the run is called.\nname = "run"\n' in text
    assert '\n\n# How pseudo boxes are chosen.\n[labeler]\nkind = "discovery"\n' in text
    assert 'weights = ""\n' in text
    assert tomllib.loads(text)["train"]["scales"] == [480, 576]
    assert "stamp" not in text
    assert dump(Nothing()) == "\n"


def test_a_value_without_a_form_in_toml_is_refused():
    with pytest.raises(TypeError, match="complex has no form in TOML"):
        toml(1j)


# ---------------------------------------------------------------- what is described


def test_every_setting_is_described_with_type_default_and_documentation():
    table = {(s.key, s.kind): (s.type, s.default, s.doc) for s in describe(Settings)}
    assert list(table)[:3] == [("name", ""), ("labeler.kind", "oicr"), ("labeler.fg_iou", "oicr")]
    assert table["name", ""] == ("string", '"run"', "What the run is called.")
    assert table["labeler.fg_iou", "oicr"][0] == "float > 0, < 1"
    assert table["labeler.fg_iou", "oicr"][2] == "A proposal joins its nearest seed above this IoU."
    assert table["labeler.nms_iou", "discovery"][1] == "0.4"
    assert table["labeler.share", "mist"] == ("float", None, "")
    assert table["train.iterations", ""] == ("int >= 1", "100", "How long.")
    assert table["train.rate", ""][0] == 'float > 0 or "" for none'
    assert table["train.scales", ""][:2] == ("list of int", "[480, 576]")
    assert table["train.window", ""][0] == "[float, float]"
    assert table["weights", ""] == ('path or "" for none', '""', "")
    assert table["mode", ""][0] == '"fast" or "exact"'
    assert table["train.amp", ""][:2] == ("true or false", "false")
    assert describe(Nothing) == []


defaults = [s for s in describe(Settings) if s.kind in {"", "discovery"} and s.default and s.key != "extra.kind"]


@pytest.mark.parametrize("setting", defaults, ids=lambda setting: setting.key)
def test_setting_any_key_to_its_own_default_changes_nothing(setting):
    assert load(Settings, [], [f"{setting.key}={setting.default}"]) == Settings()
