"""Settings that are read: files, overrides, and mistakes in them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from settings_examples import Colour, Discovery, Mist, Needy, Nothing, Oicr, Settings, Train
from tag2box.errors import UserError
from tag2box.settings.parse import load


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def writer(text: str, name: str = "demo.toml") -> Path:
        Path(name).write_text(text, encoding="utf-8")
        return Path(name)

    return writer


# ---------------------------------------------------------------- what is read


def test_nothing_given_is_the_defaults():
    assert load(Nothing) == Nothing()
    assert load(Settings) == Settings()


def test_files_merge_deeply_from_left_to_right_and_overrides_come_last(write):
    one = write("name = 'one'\n[train]\niterations = 5\nrate = 1\nscales = [1, 2]", "one.toml")
    two = write("[train]\niterations = 6\nscales = [3]", "two.toml")
    got = load(Settings, [one, two], ["train.rate=0.5", "weights=a/b.pt"])
    assert got == Settings(name="one", train=Train(iterations=6, rate=0.5, scales=(3,)), weights=Path("a/b.pt"))


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("weights=", "weights", None),
        ('weights=""', "weights", None),
        ("weights=2024", "weights", Path("2024")),
        ("name=123", "name", "123"),
        ("name=2024-01-01", "name", "2024-01-01"),
        ('name="a=b"', "name", "a=b"),
        ("name=a=b", "name", "a=b"),
        (" mode = exact ", "mode", "exact"),
        ("colour=blue", "colour", Colour.BLUE),
        ("seed=random", "seed", "random"),
        ("seed=3", "seed", 3),
        ("names={a=1}", "names", {"a": 1}),
        ("names.b=2", "names", {"b": 2}),
        ("extra={share=0.25}", "extra", Mist(share=0.25)),
        ("extra.share=1", "extra", Mist(share=1.0)),
        ("parts=[{kind='oicr', fg_iou=0.2}]", "parts", (Oicr(fg_iou=0.2),)),
        ("train.scales=[]", "train", Train(scales=())),
        ("train.rate=", "train", Train(rate=None)),
        ("train.rate=1e-3", "train", Train(rate=0.001)),
        ("train.rate=inf", "train", Train(rate=float("inf"))),
        ("train={amp=true}", "train", Train(amp=True)),
    ],
)
def test_an_override_is_toml_or_else_a_string(override, key, value):
    got = getattr(load(Settings, [], [override]), key)
    assert got == value
    assert type(got) is type(value)


def test_a_float_written_without_a_point_is_a_float():
    rate = load(Settings, [], ["train.rate=1"]).train.rate
    assert isinstance(rate, float)


def test_a_partial_table_keeps_the_rest_of_the_default_instance_and_of_the_base():
    assert load(Settings, [], ["labeler.fg_iou=0.9"]).labeler == Discovery(nms_iou=0.4, fg_iou=0.9)
    base = Settings(name="base", labeler=Oicr(fg_iou=0.1), train=Train(rate=None))
    got = load(Settings, [], ["labeler.fg_iou=0.2", "train.amp=true"], base=base)
    assert got == Settings(name="base", labeler=Oicr(fg_iou=0.2), train=Train(rate=None, amp=True))


@pytest.mark.parametrize(
    ("files", "overrides", "expected"),
    [
        ([], ["labeler.kind=oicr"], Oicr()),
        (["[labeler]\nnms_iou = 0.2"], ["labeler.kind=oicr"], Oicr()),
        (["[labeler]\nnms_iou = 0.2"], ["labeler.kind=discovery"], Discovery(nms_iou=0.2)),
        (["[labeler]\nkind = 'oicr'\nfg_iou = 0.2"], ["labeler.kind=discovery"], Discovery(nms_iou=0.4)),
        (["[labeler]\nkind = 'oicr'\nfg_iou = 0.2", "[labeler]\nkind = 'mist'\nshare = 1"], [], Mist(share=1.0)),
        (["[labeler]\nkind = 'oicr'", "[labeler]\nfg_iou = 0.2"], [], Oicr(fg_iou=0.2)),
        ([], ["labeler.fg_iou=0.2", "labeler.kind=oicr"], Oicr(fg_iou=0.2)),
        ([], ["labeler.kind=oicr", "labeler.fg_iou=0.2"], Oicr(fg_iou=0.2)),
    ],
)
def test_another_kind_starts_from_its_own_defaults(write, files, overrides, expected):
    paths = [write(text, f"{i}.toml") for i, text in enumerate(files)]
    assert load(Settings, paths, overrides).labeler == expected


def test_required_tables_take_their_own_defaults():
    got = load(Needy, [], ["root=x", "labeler.kind=oicr"])
    assert got == Needy(root=Path("x"), train=Train(), labeler=Oicr())


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[train]\niteratons = 1", "demo.toml: unknown key train.iteratons; did you mean train.iterations?"),
        ("iterations = 1", "demo.toml: unknown key iterations; did you mean train.iterations?"),
        ("[trian]\namp = true", "demo.toml: unknown key trian; did you mean train?"),
        ("stamp = 1", "demo.toml: unknown key stamp; valid keys here: name, labeler, train, weights, mode, colour, "
         "seed, extra, parts, names"),
        ("[train]\niterations = 'ten'", 'demo.toml: train.iterations = "ten": must be a valid integer'),
        ("[train]\niterations = '3'", 'demo.toml: train.iterations = "3": must be a valid integer'),
        ("[train]\niterations = 3.0", "demo.toml: train.iterations = 3.0: must be a valid integer"),
        ("[train]\niterations = true", "demo.toml: train.iterations = true: must be a valid integer"),
        ("[train]\niterations = 0", "demo.toml: train.iterations = 0: must be greater than or equal to 1"),
        ("[train]\nscales = [1, 'b']", 'demo.toml: train.scales = [1, "b"]: item 2: must be a valid integer'),
        ("[train]\nwindow = [2, 1]", "demo.toml: train: window must not end before it begins"),
        ('name = "a\\n b"', 'demo.toml: name = "a\\n b": must not contain spaces'),
        ("seed = 'x'", "demo.toml: seed = \"x\": must be a valid integer or must be 'random'"),
        ("mode = 'slow'", "demo.toml: mode = \"slow\": must be 'fast' or 'exact'"),
        ("labeler = 'oicr'", 'demo.toml: labeler = "oicr": expected a table; set its keys one by one, such as '
         "labeler.kind"),
        ("[labeler]\nkind = 'oicrr'", 'demo.toml: labeler.kind = "oicrr": must be "oicr" or "discovery" or "mist"; '
         "did you mean oicr?"),
        ("[labeler]\nkind = 'oicr'\nnms_iou = 0.5", "demo.toml: labeler.nms_iou is a setting of kind discovery, but "
         "labeler.kind is oicr"),
        ("[labeler]\nkind = 'mist'", "demo.toml: missing key labeler.share: float; set it in a file, or with --set "
         "labeler.share=..."),
        ("[[parts]]\nkind = 'oicr'\nfg_ious = 1", "demo.toml: unknown key parts.0.fg_ious; did you mean "
         "parts.0.fg_iou?"),
        ("[[parts]]\nfg_iou = 1", 'demo.toml: parts.0: missing key parts.0.kind: "oicr" or "discovery"'),
        ("a = 1\nb = = 2", "demo.toml: not valid TOML (line 2, column 5: invalid value)"),
        ("a = ", "demo.toml: not valid TOML (end of document: invalid value)"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_one_line(write, text, line):
    path = write(text)
    with pytest.raises(UserError) as caught:
        load(Settings, [path])
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("", "--set : expected key=value, such as --set plan.iterations=500"),
        ("train.amp", "--set train.amp: expected key=value, such as --set plan.iterations=500"),
        ("train..amp=1", "--set train..amp=1: expected key=value, such as --set plan.iterations=500"),
        ("labeler.nms_iou=2", "--set labeler.nms_iou=2: must be less than 1"),
        ("labeler={nms_iou=2}", "--set labeler={nms_iou=2}: labeler.nms_iou = 2: must be less than 1"),
        ("train.amp=True", "--set train.amp=True: must be a valid boolean"),
        ("train.rate=0", "--set train.rate=0: must be greater than 0"),
        ("train.window=[2,1]", "--set train.window=[2,1]: train: window must not end before it begins"),
        ("train.epochs=3", "--set train.epochs=3: unknown key train.epochs; valid keys here: iterations, rate, scales, "
         "window, amp"),
        ("labeler=oicr", "--set labeler=oicr: expected a table; set its keys one by one, such as labeler.kind"),
        ("train.iterations=1\nname=2", "--set train.iterations=1 name=2: must be a valid integer"),
    ],
)  # fmt: skip
def test_a_mistake_in_an_override_is_one_line(override, line):
    with pytest.raises(UserError) as caught:
        load(Settings, [], [override])
    assert str(caught.value) == line


def test_the_last_to_write_is_blamed(write):
    path = write("[train]\nwindow = [0.5, 0.6]\namp = false")
    with pytest.raises(UserError, match=r"^--set train.window=\[2,1\]: train: window"):
        load(Settings, [path], ["train.window=[2,1]"])


def test_missing_files_and_keys_are_named(tmp_path, write):
    with pytest.raises(UserError, match=r"^none\.toml: no such file; expected a TOML settings file$"):
        load(Settings, [Path("none.toml")])
    with pytest.raises(UserError, match="not readable as a TOML settings file"):
        load(Settings, [tmp_path])
    Path("latin.toml").write_bytes(b"name = '\xe9'")
    with pytest.raises(UserError, match="not readable as a TOML settings file"):
        load(Settings, [Path("latin.toml")])
    with pytest.raises(UserError, match=r"^settings: missing key root: path; set it in a file, or with --set root="):
        load(Needy)
    with pytest.raises(UserError, match=r"^settings: missing key labeler"):
        load(Needy, [], ["root=x"])


def test_a_union_of_tables_and_leaves_is_a_programming_error():
    @dataclass(frozen=True)
    class Bad:
        both: Oicr | int = 1

    Bad.__annotations__ = {"both": Oicr | int}
    with pytest.raises(TypeError, match="not both"):
        load(Bad, [], ["both=2"])
