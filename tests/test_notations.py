"""Every notation with any numbers is read, what is refused is refused, and the characters that count are those of the numbers."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coepg_dagster.characters import WITHOUT_WIDTH, normal_text
from coepg_dagster.markdown import table
from coepg_dagster.notations import FARTHEST, locate
from coepg_dagster.prompts import coordinate_span, parse_grounder

PLACE = re.compile(r"(?<![A-Z])(?:X1|Y1|X2|Y2|X|Y)(?![A-Z0-9])")
NUMBERS = (
    st.integers(-99999, 99999).map(str)
    | st.floats(-1e6, 1e6).map(repr)
    | st.floats(-FARTHEST, FARTHEST).map(repr)
    | st.floats(0, 1).map("{:.4f}".format)
    | st.builds("{:.3e}".format, st.floats(-1e9, 1e9))
    | st.builds("{:+d}".format, st.integers(0, 999))
    | st.integers(0, 999).map("{:03d}".format)
)
NOTATIONS = {
    "(X, Y)": "this project, UGround, GTA1",
    "[X, Y]": "ShowUI (0 to 1), Aria-UI, UI-Venus",
    "X, Y": "",
    "（X，Y）": "full-width brackets, commas and digits",
    "(Xpx, Ypx)": "",
    "x=X, y=Y": "",
    "x: X\ny: Y": "",
    "<point>X Y</point>": "UI-TARS 1.5, Seed1.5-VL",
    "<point>[[X, Y]]</point>": "OS-Atlas",
    '<point x="X" y="Y" alt="Save">Save</point>': "Molmo (per cent of the image)",
    "<click>X, Y</click>": "",
    "<|box_start|>(X,Y)<|box_end|>": "UI-TARS",
    "click(start_box='(X,Y)')": "UI-TARS",
    "click(start_box='<|box_start|>(X,Y)<|box_end|>')": "UI-TARS",
    "click(point='<point>X Y</point>')": "UI-TARS 1.5",
    "Thought: the second of (1, 2).\nAction: click(start_box='(X,Y)')": "UI-TARS",
    "pyautogui.click(X, Y)": "Aguvis, OpenCUA",
    "pyautogui.click(x=X, y=Y, clicks=1, button='left')": "Aguvis, OpenCUA, Jedi",
    '{"x": X, "y": Y}': "",
    '{"point": [X, Y]}': "",
    '{"POINT": [X, Y], "to": "up"}': "AgentCPM-GUI",
    '[{"point_2d": [X, Y], "label": "Save"}]': "Qwen2.5-VL, Qwen3-VL, InfiGUI-G1",
    "{'action': 'CLICK', 'value': None, 'position': [X, Y]}": "ShowUI",
    "<answer>[{'action': 'click', 'point': [X, Y], 'input_text': 'no input text'}]</answer>": "GUI-R1",
    '<tool_call>\n{"name": "computer_use", "arguments": {"action": "left_click", "coordinate": [X, Y]}}\n</tool_call>': (
        "Qwen2.5-VL, Qwen3-VL, Jedi, GUI-Owl"
    ),
    "<think>Not (1, 2).</think>(X, Y)": "any model that thinks aloud",
    "[X1, Y1, X2, Y2]": "",
    "[[X1, Y1, X2, Y2]]": "CogAgent, SeeClick",
    "CLICK(box=[[X1,Y1,X2,Y2]], element_info='Save')": "CogAgent",
    "[[X1, Y1], [X2, Y2]]": "",
    "(X1,Y1),(X2,Y2)": "Qwen2-VL, OS-Atlas, where special tokens are left out",
    "(X1, Y1) to (X2, Y2)": "",
    "<|object_ref_start|>Save<|object_ref_end|><|box_start|>(X1,Y1),(X2,Y2)<|box_end|>": "Qwen2-VL, OS-Atlas",
    "<ref>Save</ref><box>[[X1, Y1, X2, Y2]]</box>": "InternVL",
    "<|ref|>Save<|/ref|><|det|>[[X1, Y1, X2, Y2]]<|/det|>": "DeepSeek-VL2",
    "<|begin_of_box|>[[X1,Y1,X2,Y2]]<|end_of_box|>": "GLM-4.5V",
    "<bbox>X1 Y1 X2 Y2</bbox>": "Seed1.5-VL",
    '```json\n[{"bbox_2d": [X1, Y1, X2, Y2], "label": "Save"}]\n```': "Qwen2.5-VL, Qwen3-VL",
    '{"x1": X1, "y1": Y1, "x2": X2, "y2": Y2}': "",
}
"""How a point (X, Y) or a box with the corners (X1, Y1) and (X2, Y2) may be written → who is known to write so."""

REFUSED = {
    "<think>(12, 34) or": "reasoning that does not end",
    "[12, 34, 56]": "neither two numbers nor four",
    "[[12, 34], [56, 34], [56, 78], [12, 78]]": "a polygon",
    "[[56, 78, 12, 34]]": "corners out of order, perhaps x, y, width, height",
    '{"x": 12, "y": 34, "width": 56, "height": 78}': "a corner or a centre: it does not say",
    '[{"box_2d": [12, 34, 56, 78], "label": "Save"}]': "Gemini: y comes first",
    '<points x1="12" y1="34" x2="56" y2="78" alt="rows">rows</points>': "Molmo: several points",
    "<loc0012><loc0034><loc0056><loc0078>": "PaliGemma, Florence-2: tokens with bins of their own",
    "(12%, 34%)": "per cent",
    "(12; 34)": "no comma",
    "(12, 34) or (56, 78)": "two places",
    '{"top_left": [12, 34], "bottom_right": [56, 78]}': "corners apart",
    "image_size: [1920, 1080]": "a size",
    "1920x1080": "a size",
    "(1e99, 34)": "beyond any screen",
    "(1.2.3, 4)": "not a number",
    "١٢, ٣٤": "digits that are neither ASCII nor full-width",
}
"""What is not read → why."""

POINTS = [written for written in NOTATIONS if "X1" not in written]
BOXES = [written for written in NOTATIONS if "X1" in written]


def full_width(text: str) -> str:
    return "".join(chr(ord(character) + 0xFEE0) if 33 <= ord(character) <= 126 else character for character in text)


def filled(notation: str, numbers: list[str]) -> str:
    """The notation with its numbers in the order in which it has them; full-width ones where its brackets are."""
    if "（" in notation:
        numbers = [full_width(number) for number in numbers]
    names = ["X1", "Y1", "X2", "Y2"] if "X1" in notation else ["X", "Y"]
    values = dict(zip(names, numbers, strict=True))
    return PLACE.sub(lambda name: values[name[0]], notation)


@st.composite
def boxes(draw: st.DrawFn) -> list[str]:
    xs, ys = (sorted((draw(NUMBERS), draw(NUMBERS)), key=float) for _ in "xy")
    return [xs[0], ys[0], xs[1], ys[1]]


@given(st.sampled_from(POINTS), NUMBERS, NUMBERS)
def test_every_notation_of_a_point_with_any_numbers(notation: str, x: str, y: str) -> None:
    text = filled(notation, [x, y])
    assert parse_grounder(text) == (float(x), float(y))
    assert [normal_text(text[a:b]) for a, b in coordinate_span(text)] == [x, y]


@given(st.sampled_from(BOXES), boxes())
def test_of_a_box_the_centre_and_the_characters_of_all_four_numbers(notation: str, corners: list[str]) -> None:
    text, (x1, y1, x2, y2) = filled(notation, corners), map(float, corners)
    assert parse_grounder(text) == pytest.approx((x1 / 2 + x2 / 2, y1 / 2 + y2 / 2))
    assert [text[a:b] for a, b in coordinate_span(text)] == corners


SENTENCES = st.text("ab é漢.!?*\n-", max_size=20)


@given(st.sampled_from([*NOTATIONS]), SENTENCES, SENTENCES, st.booleans())
def test_words_around_it_do_no_harm(notation: str, before: str, after: str, thought: bool) -> None:
    """Nor does reasoning before it, whether its beginning was part of the prompt or not."""
    numbers = ["12", "34", "56.5", "78"][: 4 if "X1" in notation else 2]
    alone = filled(notation, numbers)
    text = f"{'<think>(1, 2)' if thought else '(3, 4)'}</think>{before} {alone} {after}"
    assert parse_grounder(text) == parse_grounder(alone) != None  # noqa: E711
    assert [text[a:b] for a, b in coordinate_span(text)] == [alone[a:b] for a, b in coordinate_span(alone)]


@given(st.sampled_from([*NOTATIONS]), st.data())
def test_characters_without_width_do_no_harm(notation: str, data: st.DataObject) -> None:
    numbers = ["12", "34", "56.5", "78"][: 4 if "X1" in notation else 2]
    alone = filled(notation, numbers)
    cut = data.draw(st.integers(0, len(alone)))
    text = alone[:cut] + data.draw(st.sampled_from([*WITHOUT_WIDTH])) + alone[cut:]
    assert parse_grounder(text) == parse_grounder(alone)
    assert len(coordinate_span(text)) == len(numbers)


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_names_no_point(text: str) -> None:
    assert parse_grounder(text) is None
    assert coordinate_span(text) == []


@given(st.lists(NUMBERS, min_size=1, max_size=9).filter(lambda numbers: len(numbers) not in (2, 4)), st.booleans())
def test_a_list_of_any_other_length_is_neither_point_nor_box(numbers: list[str], pairs: bool) -> None:
    parts = [f"[{', '.join(numbers[i : i + 2])}]" for i in range(0, len(numbers), 2)] if pairs else numbers
    assert parse_grounder(f"[{', '.join(parts)}]") is None


@given(boxes())
def test_corners_out_of_order_are_no_box(corners: list[str]) -> None:
    x1, y1, x2, y2 = corners
    disordered = float(x1) < float(x2) or float(y1) < float(y2)
    assert (parse_grounder(f"[{x2}, {y2}, {x1}, {y1}]") is None) == disordered


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("step 1: (12,34)", (12, 34)),
        ("The element is at (12.5, 34.25).", (12.5, 34.25)),
        ("-3 , 4", (-3, 4)),
        ("(3.5e2, 1.2e2)", (350, 120)),
        ("[ 350 , 120 ]", (350, 120)),
        ("[350 120]", (350, 120)),
        ("350 120", (350, 120)),
        ("Row 350 120 is it", None),
        ("In 2024 12, 34", None),
        ('["350", "120"]', (350, 120)),
        ("(−3, 4)", (-3, 4)),  # the minus sign
        ("x, y = 350, 120", (350, 120)),
        ("The cross in the upper right corner (350, 120)", (350, 120)),
        ("from (300, 100) to (400, 140)", (350, 120)),
        ("(300, 100) - (400, 140)", (350, 120)),
        ("1,234,567", None),
        # the highest rank, then the first
        ('{"label": "Row (1, 2)", "point": [3, 4]}', (3, 4)),
        ('{"image_size": [1080, 1920], "bbox_2d": [1, 2, 3, 4]}', (2, 3)),
        ("of 1, 2 I take (3, 4), not (5, 6)", (3, 4)),
        ('[{"bbox_2d": [1, 2, 3, 4]}, {"bbox_2d": [5, 6, 7, 8]}]', (2, 3)),
        ("(1, 2) <answer>(3, 4)</answer> (5, 6)", (3, 4)),
        # reasoning
        ("<think>(1, 2)", None),
        ("<think>(1, 2)</think>", None),
        ("(1, 2)</think>(3, 4)", (3, 4)),
        ("<THINK>(1, 2)</THINK><think>(3, 4)</think>[5, 6]", (5, 6)),
        ("(1, 2)<think>or (3, 4)", None),
        ("", None),
    ],
)
def test_by_example(text: str, point: tuple[float, float] | None) -> None:
    assert parse_grounder(text) == point


@given(st.text() | st.text("(<[xy12.,-:= '\"e)]>/point%\u200b１，", max_size=60))
@settings(max_examples=300)
def test_garbage_never_raises(text: str) -> None:
    location = locate(text)
    if location is not None:
        assert len(location.spans) in (2, 4)
        assert all(0 <= a < b <= len(text) for a, b in location.spans)


HUGE = [
    "(",
    "1",
    "1 ",
    "1,",
    "1.",
    "(1",
    "1)",
    "1,1;",
    "x=",
    "x=1,y=1 ",
    "point=(1,2) ",
    "<think>",
    "'' ",
    "1e",
    "１，",
    "\u200b",
]


@pytest.mark.parametrize("unit", HUGE)
def test_huge_answers_take_linear_time(unit: str) -> None:
    started = time.process_time()
    locate(unit * (400_000 // len(unit)))
    assert time.process_time() - started < 2


def documented() -> str:
    """The two tables, as docs/engines.md shows them."""

    def code(written: str) -> str:
        return f"`` {written} ``".replace("\n", " ⏎ ")

    read = table(("Read", "Written so by"), [(code(text), by or "–") for text, by in NOTATIONS.items()])
    refused = table(("Not read", "Why"), [(code(text), why) for text, why in REFUSED.items()])
    return f"{read}\n\n{refused}\n"


def test_the_tables_of_the_documentation() -> None:
    page = (Path(__file__).parents[1] / "docs/engines.md").read_text(encoding="utf-8")
    shown = page.split("<!-- notations -->\n")[1].split("\n<!-- /notations -->")[0]
    assert shown == documented().strip(), "docs/engines.md: paste what documented() gives"
