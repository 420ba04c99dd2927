"""The step evaluators of GUI-Odyssey, Android in the Wild and GUIAct on worked steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coepg_dagster.evaluation.case import Action, Case, ScoringError
from coepg_dagster.evaluation.protocols import PROTOCOLS
from coepg_dagster.evaluation.step_boards import StepAction, bleu_2, edit_distance, odyssey_text, squad_f1
from coepg_dagster.geometry import Point, Size, Space, Viewport

from .shared import score_file

ODYSSEY, AITW, GUIACT = "gui_odyssey/ams", "aitw/action_matching", "guiact/steps"
SIZE = (1000, 2000)


def step(protocol: str, label: Action, predicted: Action | None, **more: Any) -> float | None:
    case = Case("s", "e", label, predicted, **{"size": SIZE, **more})
    return PROTOCOLS[protocol].judge(case).values[1]


def click(x: float, y: float, name: str = "CLICK") -> Action:
    return Action(name, "", (x, y))


def test_odyssey_clicks_by_box_or_distance_in_parts_of_the_screen() -> None:
    label = click(500, 1000)
    assert step(ODYSSEY, label, click(640, 1000)) == 1 and step(ODYSSEY, label, click(641, 1000)) == 0
    assert step(ODYSSEY, label, click(500, 1280)) == 1 and step(ODYSSEY, label, click(500, 1281)) == 0
    box = {"boxes": ((0, 0, 100, 100),)}
    assert step(ODYSSEY, label, click(100, 100), **box) == 1 and step(ODYSSEY, label, click(101, 100), **box) == 0
    assert step(ODYSSEY, label, click(500, 1000, "LONG_PRESS")) == 0
    assert step(ODYSSEY, label, Action("CLICK")) == 0 and step(ODYSSEY, label, None) == 0
    with pytest.raises(ScoringError, match="`width` and `height`"):
        step(ODYSSEY, label, click(1, 1), size=None)


def test_odyssey_texts_directions_and_keys() -> None:
    assert step(ODYSSEY, Action("TYPE", "weather"), Action("TYPE", " weather in Rome ")) == 1
    assert step(ODYSSEY, Action("TYPE", "abcd"), Action("TYPE", "abxy")) == 1  # 1 - 2 / 4
    assert step(ODYSSEY, Action("TYPE", "abcd"), Action("TYPE", "axyz")) == 0
    assert step(ODYSSEY, Action("TYPE", "abcd"), Action("TYPE", "")) == 1  # the owner's: every text contains it
    assert step(ODYSSEY, Action("SCROLL", "UP"), Action("SCROLL", "up")) == 1
    assert step(ODYSSEY, Action("SCROLL", "UP"), Action("SCROLL", "DOWN")) == 0
    assert step(ODYSSEY, Action("HOME"), Action("HOME", "x")) == 1


@given(st.text("ab ", max_size=6), st.text("ab ", max_size=6))
def test_edit_distance_is_a_metric_and_short_cuts_change_nothing(a: str, b: str) -> None:
    assert edit_distance(a, b) == edit_distance(b, a) <= max(len(a), len(b))
    assert (edit_distance(a, b) == 0) == (a == b)
    x, y = a.strip(), b.strip()
    assert odyssey_text(a, b) == (x in y or y in x or 1 - edit_distance(x, y) / max(len(x), len(y)) >= 0.5)


def test_an_answer_of_any_length_is_judged_at_once() -> None:
    assert step(ODYSSEY, Action("TYPE", "abcd"), Action("TYPE", "x" * 1_000_000)) == 0


def test_aitw_taps_drags_and_types() -> None:
    tap = click(500, 1000, "DUAL_POINT")
    assert step(AITW, tap, click(640, 1000, "DUAL_POINT")) == 1 and step(AITW, tap, click(650, 1000, "DUAL_POINT")) == 0
    # a box of 200 px, enlarged to 480 px from 140 px further left: from 260 to 740
    box = {"boxes": ((400, 900, 600, 1100),)}
    assert step(AITW, tap, click(740, 1000, "DUAL_POINT"), **box) == 1
    assert step(AITW, tap, click(741, 1000, "DUAL_POINT"), **box) == 0
    up, right = {"label_end": (500, 100)}, {"label_end": (900, 1000)}
    assert step(AITW, tap, click(10, 10, "DUAL_POINT"), facts=up | {"predicted_end": (10, 1900)}) == 1  # same axis
    assert step(AITW, tap, click(10, 10, "DUAL_POINT"), facts=right | {"predicted_end": (10, 1900)}) == 0
    assert step(AITW, tap, click(500, 1000, "DUAL_POINT"), facts=up) == 0  # a tap for a drag
    assert step(AITW, Action("TYPE", "a"), Action("TYPE", "b")) == 1
    assert step(AITW, Action("TYPE", "a"), Action("PRESS_BACK")) == 0


def test_guiact_elements_texts_and_directions() -> None:
    facts = {"positives": [("7", 0)], "element": "7"}
    assert step(GUIACT, Action("click"), Action("click"), facts=facts) == 1
    assert step(GUIACT, Action("click"), Action("click"), facts=facts | {"element": "8"}) == 0
    assert step(GUIACT, Action("select", "red"), Action("select", "blue"), facts=facts) == 0
    assert step(GUIACT, click(500, 1000, "tap"), click(500, 1279, "tap")) == 1
    assert step(GUIACT, Action("input", "the red shoe"), Action("input", "Red shoe!")) == 1
    assert step(GUIACT, Action("answer", "a b c"), Action("answer", "c d e")) == 0
    assert step(GUIACT, Action("scroll", "down"), Action("scroll", "up")) == 0
    swipe = {"label_end": (500, 100), "predicted_end": (10, 0)}
    assert step(GUIACT, click(500, 1000, "swipe"), click(10, 900, "swipe"), facts=swipe) == 1
    assert step(GUIACT, Action("swipe", "left"), click(10, 900, "swipe"), facts={"predicted_end": (10, 0)}) == 0
    with pytest.raises(ScoringError, match="`positives`"):
        step(GUIACT, Action("click"), Action("click"))


def test_squad_f1_counts_words() -> None:
    assert squad_f1("", "") == 1 and squad_f1("a", "x") == 0
    assert squad_f1("x x y", "x z z") == pytest.approx(1 / 3)


@settings(max_examples=15)
@given(st.integers(0, 1000), st.integers(0, 2000), st.integers(0, 1000), st.integers(0, 2000))
def test_any_space_back_and_forth_gives_the_same_verdict(tmp_path_factory: Any, x: int, y: int, u: int, v: int) -> None:
    viewport = Viewport(Size(*SIZE), Size(504, 1008))
    path: Path = tmp_path_factory.getbasetemp() / "steps.jsonl"
    for protocol, name in ((ODYSSEY, "CLICK"), (AITW, "DUAL_POINT"), (GUIACT, "tap")):
        lines = []
        for space in Space:
            there = viewport.point(Point(u, v, Space.ORIGINAL), space)
            prediction = {"action_type": name, "point": [there.x, there.y], "end": [there.x, there.y]}
            row = {"step_id": space, "space": space, "width": 1000, "height": 2000, "prediction": prediction}
            row |= {"seen_width": 504, "seen_height": 1008, "group": "tool"}
            label = {"action_type": name, "point": [x, y], "boxes": [[0, 0, 300, 500]]}
            lines.append(json.dumps(row | {"label": label}))
        path.write_text("\n".join(lines))
        assert len(set(score_file(path, "coepg", protocol).steps["step_acc"].to_pylist())) == 1


AITZ, OMNIACT = "aitz/action_matching", "omniact/action_score"


def test_aitz_judges_the_predicted_box() -> None:
    label = click(500, 1000, "click")
    near = {"facts": {"predicted_box": (400, 900, 490, 1100)}}  # enlarged by 1.2: from 391 to 499
    assert step(AITZ, label, Action("click"), **near) == 0
    assert step(AITZ, label, Action("CLICK_ELEMENT"), facts={"predicted_box": (400, 900, 491, 1100)}) == 1  # to 500.1
    # an element with the point in it, of which the box overlaps more than half
    assert step(AITZ, label, Action("click"), **near, boxes=((400, 900, 520, 1100),)) == 1
    assert step(AITZ, label, Action("click"), **near, boxes=((490, 900, 520, 1100),)) == 0
    assert step(AITZ, label, click(500, 1000, "click")) == 0  # a point is no box
    with pytest.raises(ScoringError, match="needs the point of a labelled click"):
        step(AITZ, Action("click"), Action("click"), **near)


def test_aitz_texts_buttons_and_directions() -> None:
    assert step(AITZ, Action("type", "weather"), Action("input", "weather in Rome")) == 1
    assert step(AITZ, Action("type", "abcdefghij"), Action("type", "abcdefghi")) == 1
    assert step(AITZ, Action("type", "abcdefghi1"), Action("type", "abcdefgh22")) == 0  # 2 · 8 / 20 is not above 0.8
    assert step(AITZ, Action("press", "home"), Action("PRESS_HOME")) == 1
    assert step(AITZ, Action("press", "home"), Action("press", "back")) == 0
    assert step(AITZ, Action("scroll", "up"), Action("scroll", "down")) == 0
    assert step(AITZ, Action("stop"), Action("STOP_TASK")) == 1 and step(AITZ, Action("stop"), Action("wait")) == 0


def test_guiact_steps_of_several_actions() -> None:
    labels = [
        StepAction("click", elements=frozenset("7"), box=(0, 0, 10, 10)),
        StepAction("select_text", point=(0, 0), end=(10, 10)),
    ]
    right = [
        StepAction("click", elements=frozenset("7"), box=(0, 0, 10, 20)),
        StepAction("select_text", point=(10, 10), end=(0, 0)),
    ]

    def judged(predicted: list[StepAction]) -> tuple[float | None, ...]:
        facts = {"label_actions": labels, "predicted_actions": predicted}
        return PROTOCOLS[GUIACT].judge(Case("s", "e", Action(""), Action(""), size=SIZE, facts=facts)).values

    # a region from its left end to an end above it is empty, as the owner has it
    assert judged([right[0], StepAction("select_text", point=(0, 0), end=(10, 10))]) == (1, 1, 0.75)
    assert judged([*labels, StepAction("copy")]) == (0, 1, 1)  # further actions matter for the names alone
    assert judged(labels[:1]) == (0, 0, 0.5) and judged([]) == (0, 0, 0)
    assert judged(right)[1] == 1 and judged(labels[::-1]) == (0, 0, 0)


def test_omniact_scripts(tmp_path: Path) -> None:
    row = {"width": 1000, "height": 1000, "label": {"actions": []}}
    script = ["pyautogui.click(20, 20)", 'pyautogui.write("abcd")', 'pyautogui.hotkey("ctrl", "c")']
    label = {"actions": script, "boxes": [[0, 0, 40, 40]]}
    answers: list[list[Any]] = [
        ["pyautogui.click(39.5, 1)", "pyautogui.write('abcd')", "pyautogui.hotkey('C', 'ctrl')"],
        ["pyautogui.click(20, 80)", "pyautogui.write('abxy')", "pyautogui.hotkey('ctrl', 'v')"],
        [{"action_type": "click", "point": [20, 20]}],
        ["__import__('os').system('true')", *script[1:]],
    ]
    rows = [
        row | {"step_id": str(n), "label": label, "prediction": {"actions": answer}} for n, answer in enumerate(answers)
    ]
    path = tmp_path / "scripts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    result = score_file(path, "coepg", OMNIACT)
    weight = 3 - 0.9
    assert result.steps["sequence_score"].to_pylist() == pytest.approx([weight, weight, 0, 0])
    far = 40 / (40 + 40 * 2**0.5)
    text = 1 - (2 / 4 * 1 / 3) ** 0.5
    assert result.steps["action_score"].to_pylist() == pytest.approx(
        [weight, weight * (1 - (far + text + 1) / 3), 0, 0]
    )
    assert result.metrics["sequence_score"].micro == 50
    assert result.notes["rows with an unreadable prediction"] == 1
    path.write_text(json.dumps(row | {"step_id": "x", "label": {"actions": ["import os"]}}))
    with pytest.raises(ScoringError, match="action 1 of `actions` cannot be read"):
        score_file(path, "coepg", OMNIACT)


@given(st.text("ab", max_size=8), st.text("ab", max_size=8))
def test_bleu_is_one_for_equal_texts_alone(a: str, b: str) -> None:
    assert 0 <= bleu_2(a, b) <= 1
    assert (bleu_2(a, b) == 1) == (a == b and len(a) > 1) or sorted(a) == sorted(b)
