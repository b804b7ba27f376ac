from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, strategies as st

from tag2box.data.check import ADVICE, FIRST, SEVERITIES, Tally
from tag2box.errors import UserError, printable
from tag2box.formats.listing import Fault, refuse


def test_the_strict_answer_is_the_line() -> None:
    with pytest.raises(UserError, match=r"^tags.csv:2: no photo$"):
        refuse(Fault("missing photo", "a.jpg", "tags.csv:2: no photo"))


@given(st.text(st.characters(exclude_categories=[]), max_size=2000))
def test_any_content_of_a_file_becomes_one_short_printable_line(text: str) -> None:
    fault = Fault("bad row", text, f"t.csv: {text}")
    for said in (fault.subject, fault.line):
        assert len(said.splitlines()) <= 1 and len(said) < 700
        assert said.encode().decode() == said  # a lone surrogate, as a broken file name brings, could not be printed
        assert all(letter.isprintable() or unicodedata.category(letter) == "Zs" for letter in said)
        assert printable(said) == said


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("two\r\nlines", "two  lines"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("a\u202egpj.exe\u2066", r"a\u202egpj.exe\u2066"),
        ("c\u200bat\ufeff", r"c\u200bat\ufeff"),
        ("a\udcff", r"a\udcff"),
        ("\U000e0041", r"\U000e0041"),
        ("größe 犬\u3000x", "größe 犬\u3000x"),
    ],
)
def test_what_a_terminal_obeys_or_hides_is_shown(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize("text", ["x" * 601, "\x1b" * 601, "y\n" * 10**6])
def test_the_ends_of_a_long_text_are_kept(text: str) -> None:
    short = printable(text)
    assert len(short) <= 600 and " ... " in short and printable(short) == short


@given(st.text(st.characters(exclude_categories=["C", "Z"]), max_size=100))
def test_harmless_text_is_left_alone(text: str) -> None:
    assert printable(text) == text


def test_a_tally_of_nothing_finds_nothing() -> None:
    assert Tally().findings() == ()


def test_a_tally_keeps_the_first_names_and_counts_all() -> None:
    tally = Tally()
    for number in range(1000):
        tally.on_fault(Fault("bad row", f"row {number}", f"line {number}"))
        tally.on_fault(Fault("bad row", f"row {number}", f"line {number}"))  # met again by a second reading
        tally.add("photo no row names", f"{number}.jpg")
    rows, strays = tally.findings()
    assert (rows.kind, rows.severity, rows.count) == ("bad row", "error", 1000)
    assert rows.names == tuple(f"row {number}" for number in range(FIRST))
    assert rows.lines == tuple(f"line {number}" for number in range(FIRST))
    assert (strays.severity, strays.count, strays.lines) == ("note", 1000, ())


def test_findings_come_gravest_first_and_every_kind_has_advice() -> None:
    tally = Tally()
    for kind in reversed(ADVICE):
        tally.add(kind, "x")
    order = [SEVERITIES.index(finding.severity) for finding in tally.findings()]
    assert order == sorted(order) and len(order) == len(ADVICE)
    assert all(finding.advice for finding in tally.findings())
