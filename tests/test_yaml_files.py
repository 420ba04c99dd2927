"""YAML 1.2, read strictly: what plain words mean, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.yaml_files import MAX_BYTES, MAX_VALUES, BadYaml, dump, parse, read

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn"]), max_size=20).filter(
    lambda text: "Infinity" not in text  # replaced below, where it is a number
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=10,
)


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same types: True is not 1, and 1 is not 1.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@given(JSON)
def test_json_is_yaml(value: Any) -> None:
    text = json.dumps(value, ensure_ascii=False).replace("Infinity", ".inf")
    assert same(parse(text), value)


@given(JSON | st.sampled_from(["yes", "1e5", "013", "1:30", "null", "0o7", "~", ""]))
def test_what_is_written_is_read_again(value: Any) -> None:
    assert same(parse(dump({"a": value})), {"a": value})
    assert same(yaml.safe_load(dump({"a": value})), {"a": value})


@pytest.mark.parametrize(
    ("word", "value"),
    [
        *(
            (word, word)
            for word in ("yes", "no", "on", "off", "y", "n", "Yes", "OFF", "1:30", "190:20:30", "1_000", "0b1")
        ),
        *(
            (word, word)
            for word in ("2001-01-01", "=", "1e", "e5", "0x", "0o8", "1.2.3", "nUll", "tRue", "--1", "+-1", "inf")
        ),
        *(("~", None), ("null", None), ("NULL", None), ("", None)),
        *(("true", True), ("TRUE", True), ("False", False)),
        *(("0", 0), ("-0", 0), ("+12", 12), ("-7", -7), ("0o17", 15), ("0xfF", 255)),
        *(("1e-5", 1e-5), ("1E5", 1e5), ("1.", 1.0), (".5", 0.5), ("-.5e+2", -50.0), ("1.0e-3", 1e-3)),
        *((".inf", float("inf")), ("-.INF", float("-inf"))),
        *(("!!str 013", "013"), ("!!str true", "true"), ("!!float 3", 3.0), ("'1'", "1"), ('"\\u00e9"', "é")),
    ],
)
def test_what_a_word_means(word: str, value: Any) -> None:
    assert same(parse(f"a: {word}"), {"a": value})


@given(st.integers(0, 10**6), st.integers(1, 3), st.sampled_from(["", "-", "+"]))
def test_a_whole_number_with_leading_zeros_is_refused(number: int, zeros: int, sign: str) -> None:
    """Eleven or thirteen: the two versions of YAML differ."""
    with pytest.raises(yaml.YAMLError, match="leading zeros"):
        parse(f"a: {sign}{'0' * zeros}{number}")


@given(st.lists(TEXT, min_size=1, max_size=5, unique=True), st.data())
def test_a_key_that_stands_twice_is_refused_at_any_depth(keys: list[str], data: st.DataObject) -> None:
    pairs = [f"{json.dumps(key, ensure_ascii=False)}: 1" for key in [*keys, data.draw(st.sampled_from(keys))]]
    text = "{" + ", ".join(data.draw(st.permutations(pairs))) + "}"
    for outer in ("{}", "a: {}", "a: [1, {{b: {}}}]"):
        with pytest.raises(yaml.YAMLError, match="stands twice"):
            parse(outer.format(text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nA: 2\na: 3", "line 3, column 1: not valid YAML: the key `a` stands twice: keep one"),
        ("1: 2", "a key must be text"),
        ("true: 2", "a key must be text"),
        ("? [a]\n: 1", "a key must be text"),
        ("a: !!python/object/apply:os.system ['true']", "none of YAML's core schema"),
        ("a: !!timestamp 2001-01-01", "none of YAML's core schema"),
        ("a: !!set {b}", "none of YAML's core schema"),
        ("a: !mine 1", "none of YAML's core schema"),
        ("a: !!int x", "not a whole number"),
        ("a: !!bool yes", "not true or false"),
        ("a: !!map [1]", "is for mappings"),
        ("a: !!seq {b: 1}", "is for lists"),
        ("a: !!str [b]", "expected a scalar node"),
        ("a: &a [*a]", "recursive"),
        ("a: *b", "undefined alias"),
        ("a: 1\n---\nb: 2", "another document"),
        ('a: "\\0"', "control characters"),
        ('a: "\\ud800"', "surrogate"),
        ("a: \x07", "special characters"),
        (f"a: {'9' * 5000}", "too large a number"),
        ("a: 0x" + "f" * 100, "too large a number"),
        ("[" * 1000, "not valid YAML"),
        ("a: [", "not valid YAML"),
        ("\t a: 1", "not valid YAML"),
        ("a: 1 " + "#" * MAX_BYTES, "bytes"),
        (
            "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 40)),
            f"{MAX_VALUES:,}",
        ),
    ],
)
def test_what_is_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(text)
    with pytest.raises(BadYaml) as refused:
        read(file)
    assert str(refused.value).startswith(str(file)) and message in str(refused.value) and "\n" not in str(refused.value)


@given(st.text(max_size=60) | st.text(" \n-:[]{}&*!|>'\"#%@`,?ab01~", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        value = parse(text)
    except (yaml.YAMLError, RecursionError):
        return
    json.dumps(value)


def test_anchors_and_byte_order_marks_are_read(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_bytes(b"\xef\xbb\xbfa: &x {b: 1}\r\nc: *x\r\n")
    assert read(file) == {"a": {"b": 1}, "c": {"b": 1}}


def test_what_is_no_readable_file(tmp_path: Path) -> None:
    (tmp_path / "latin1").write_bytes(b"a: \xe9")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    for name, message in (
        ("latin1", "utf-8"),
        ("folder", "no file"),
        ("loop", "no such"),
        ("nothing", "no such"),
        ("x" * 300, "long"),
    ):
        with pytest.raises(BadYaml, match=message):
            read(tmp_path / name)
