"""JSON lines of other programs: where a line ends, and what JSON is."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coepg_dagster import jsonlines

TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\u2028\u2029\x85\x0b\x0c\x1c\x1e\ufeff\r\n"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
MARK = b"\xef\xbb\xbf"


@settings(max_examples=50)
@given(st.lists(VALUES, max_size=6), st.sampled_from([b"\n", b"\r\n", b"\n \n\n"]), st.booleans(), st.booleans())
def test_what_was_written_is_read_whatever_its_text(
    values: list[Any], ending: bytes, mark: bool, escaped: bool
) -> None:
    written = [json.dumps(value, ensure_ascii=escaped).encode() for value in values]
    content = ending.join(written)
    lines = list(jsonlines.lines(io.BytesIO(MARK * mark + content)))
    assert [jsonlines.parse(line) for _, line in lines] == values
    every = content.split(b"\n")
    assert all(line.strip(MARK + b"\r\n") == every[number].rstrip(b"\r") for number, line in lines)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"goal": "caf\xe9"}', "not UTF-8 text"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8 text"),
        (b"\xed\xa0\xbd", "not UTF-8 text"),  # half a surrogate pair as bytes
        (b"{", "invalid JSON"),
        ("", "invalid JSON"),
        (b'{"a": 1} {"b": 2}', "invalid JSON"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_json_says_why(text: str | bytes, why: str) -> None:
    with pytest.raises(jsonlines.NotJson, match=why):
        jsonlines.parse(text)


@given(st.integers(1, 6000), st.booleans())
def test_a_number_of_any_length_is_read(digits: int, negative: bool) -> None:
    value = jsonlines.parse("-" * negative + "9" * digits)
    assert value == (-1 if negative else 1) * (int("9" * digits) if digits < 19 else float("9" * digits))


def test_a_line_without_end_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonlines, "MAX_LINE", 16)
    content = b'{"a": 1}\n' + b'{"b": "' + b"x" * 100 + b'"}\n{"c": 3}\n' + b"1" * 17
    lines = list(jsonlines.lines(io.BytesIO(content)))
    assert [number for number, _ in lines] == [0, 1, 2, 3] and max(len(line) for _, line in lines) == 17
    assert [jsonlines.parse(lines[i][1]) for i in (0, 2)] == [{"a": 1}, {"c": 3}]
    for i in (1, 3):
        with pytest.raises(jsonlines.NotJson, match="longer than 16 bytes"):
            jsonlines.parse(lines[i][1])
