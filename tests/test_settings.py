"""Settings that are read: files, overrides, and mistakes in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

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
        ("train.rate=1e9", "train", Train(rate=1e9)),
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


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.rate=inf", "must be a finite number"),
        ("train.rate=nan", "must be a finite number"),
        ("train.rate=-inf", "must be a finite number"),
        ("train.rate=1e10", "must be between -1,000,000,000 and 1,000,000,000"),
        ("seed=1_000_000_001", "must be between -1,000,000,000 and 1,000,000,000"),
        ("names={a=1_000_000_001}", "must be between -1,000,000,000 and 1,000,000,000"),
        ("train.scales=[1, 9_999_999_999]", "must be between -1,000,000,000 and 1,000,000,000"),
    ],
)
def test_numbers_are_finite_and_not_huge(override, words):
    with pytest.raises(UserError, match=f"^--set {re.escape(override)}: {words}$"):
        load(Settings, [], [override])


def test_a_bound_of_its_own_replaces_the_general_one():
    @dataclass(frozen=True)
    class Seeded:
        seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0

    assert load(Seeded, [], [f"seed={2**63 - 1}"]).seed == 2**63 - 1
    with pytest.raises(UserError, match=r"less than or equal to 9223372036854775807|valid integer"):
        load(Seeded, [], [f"seed={2**63}"])


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
        ("a = " + "[" * 100_000, "demo.toml: not valid TOML (nested too deeply)"),
        ("a = " + "[" * 60 + "]" * 60, "demo.toml: not valid TOML (nested too deeply)"),
        ("a = " + "{a = " * 60 + "1" + "}" * 60, "demo.toml: not valid TOML (nested too deeply)"),
        ("x = 1\n" + "a." * 300_000 + "a = 1", "demo.toml: not valid TOML (line 2: a key of more than 8 names)"),
        ("[" + "'a'. " * 8 + "a]", "demo.toml: not valid TOML (line 1: a key of more than 8 names)"),
        ("x = {" + '"a" . ' * 8 + "a = 1}", "demo.toml: not valid TOML (line 1: a key of more than 8 names)"),
        ("[" + "a." * 7 + "a]", "demo.toml: unknown key a; valid keys here: name, labeler, train, weights, mode, "
         "colour, seed, extra, parts, names"),
        ("x = 0x" + "f" * 9000, "demo.toml: not valid TOML (an integer of more than 64 bits)"),
        ("x = [9223372036854775808]", "demo.toml: not valid TOML (an integer of more than 64 bits)"),
        ("seed = 9223372036854775807\n[train]\nrate = -1.0", "demo.toml: train.rate = -1.0: must be greater than 0"),
        ("#" * (1 << 20) + "#", "demo.toml: not readable (larger than 1 MB); expected a TOML settings file"),
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
    for device in (tmp_path, Path("/dev/zero"), Path("/dev/urandom")):
        with pytest.raises(UserError, match=rf"^{device}: not readable \(.*\); expected a TOML settings file$"):
            load(Settings, [device])
    Path("latin.toml").write_bytes(b"name = '\xe9'")
    with pytest.raises(
        UserError, match=r"^latin\.toml: not readable as UTF-8 text \(line 1, byte 0xe9\); it seems to be"
    ):
        load(Settings, [Path("latin.toml")])
    with pytest.raises(UserError, match=r"^settings: missing key root: path; set it in a file, or with --set root="):
        load(Needy)
    with pytest.raises(UserError, match=r"^settings: missing key labeler"):
        load(Needy, [], ["root=x"])


def test_dots_in_a_string_are_no_key(write):
    path = write("weights = 'my.data.set.of.2024.v1.2.3.final.csv' # a. b. c. d. e. f. g. h. i. j")
    assert load(Settings, [path]).weights == Path("my.data.set.of.2024.v1.2.3.final.csv")


def test_a_decimal_of_thousands_of_digits_is_one_line(write):
    with pytest.raises(UserError, match=r"^demo\.toml: not valid TOML \(Exceeds the limit .*\)$"):
        load(Settings, [write("x = " + "9" * 9000)])


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (".".join("a" * 9) + "=1", r"^--set a\.a.*: 9 names in a row; expected a key of this program$"),
        (".".join("a" * 40_000) + "=1", r"^--set a\.a.*: 40000 names in a row; expected a key of this program$"),
        ("train.iterations=" + "9" * 9000, r"^--set train\.iterations=9+ \.\.\. 9+: must be a valid integer$"),
        ("train.iterations=0x" + "f" * 9000, r"^--set train\.iterations=0xf+ \.\.\. f+: must be a valid integer$"),
        ("train.iterations=" + "[" * 9000, r"^--set train\.iterations=\[+ \.\.\. \[+: must be a valid integer$"),
        (
            "train.iterations={" + "a." * 9000 + "a=1}",
            r"^--set train\.iterations={[a.]+ \.\.\. [a.]+=1}: must be a valid integer$",
        ),
    ],
    ids=range(6),
)
def test_hostile_overrides_are_one_line(override, line):
    with pytest.raises(UserError, match=line):
        load(Settings, [], [override])


def test_a_union_of_tables_and_leaves_is_a_programming_error():
    @dataclass(frozen=True)
    class Bad:
        both: Oicr | int = 1

    Bad.__annotations__ = {"both": Oicr | int}
    with pytest.raises(TypeError, match="not both"):
        load(Bad, [], ["both=2"])
