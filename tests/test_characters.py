"""The one rule by which characters that look the same are the same."""

from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from coepg_dagster.characters import SAME, WITHOUT_WIDTH, normal_text, print_line, visible

WRITTEN = st.text(max_size=20) | st.text([*map(chr, SAME), *WITHOUT_WIDTH, "e", "\u0301", "가", "ᄀ", "ᅡ"], max_size=20)


@given(WRITTEN)
def test_normal_text_is_normal(text: str) -> None:
    normal = normal_text(text)
    assert normal_text(normal) == normal == unicodedata.normalize("NFC", normal)


MARKS = st.lists(st.tuples(st.integers(0, 20), st.sampled_from([*WITHOUT_WIDTH])))


@given(WRITTEN, MARKS)
def test_the_same_text_in_another_form_is_the_same(text: str, marks: list[tuple[int, str]]) -> None:
    other = unicodedata.normalize("NFD", normal_text(text))
    for place, mark in marks:
        other = other[:place] + mark + other[place:]
    assert normal_text(other) == normal_text(text)


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126)))
def test_ascii_is_as_it_is_and_full_width_is_ascii(text: str) -> None:
    assert normal_text(text) == text
    assert normal_text("".join(chr(ord(character) + 0xFEE0) for character in text)) == text


@pytest.mark.parametrize(
    ("written", "normal"),
    [
        ("cafe\u0301", "café"),
        ("“a” ‘b’ „c‟", '"a" \'b\' "c"'),
        ("１２３　Ａｂｃ＠", "123 Abc@"),
        ("a\u00a0b\u202fc\u2009d", "a b c d"),
        ("\ufeffso\u00adft\u200b", "soft"),
        ("2024\u201101\u201102 \u22125", "2024-01-02 -5"),
        ("x² ½ ﬁ ① ٣ – —", "x² ½ ﬁ ① ٣ – —"),  # others than these stay
    ],
)
def test_by_example(written: str, normal: str) -> None:
    assert normal_text(written) == normal


@given(st.text(max_size=40))
def test_what_is_shown_steers_nothing_and_is_spelt(text: str) -> None:
    shown = visible(text, one_line=True)
    steering = {"Cc", "Zl", "Zp"} | {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
    assert not any({unicodedata.category(c), unicodedata.bidirectional(c)} & steering for c in shown.replace("\t", ""))
    assert visible(shown) == shown and (shown == text or any(mark in shown for mark in ("⟨U+", "⏎")))


def test_what_is_shown_by_example() -> None:
    assert (
        visible("press \u202egnp\x1b[2J\x9b\nNext سلام 日本 \u200e")
        == "press ⟨U+202E⟩gnp⟨U+001B⟩[2J⟨U+009B⟩\nNext سلام 日本 \u200e"
    )
    assert visible("a\nverdict judge: hit", one_line=True) == "a⏎verdict judge: hit"


@given(
    WRITTEN | st.sampled_from(["[rank0]: out of memory", "[/INST]", "[red]", "\x1b]0;owned\x07", "\x1b[2J", ":smile:"])
)
def test_a_printed_line_is_the_text(text: str) -> None:
    file = io.StringIO()
    print_line(Console(file=file, force_terminal=True, no_color=True, width=20), text)
    assert file.getvalue() == visible(text).expandtabs() + "\n"
