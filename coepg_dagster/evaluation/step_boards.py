"""Step evaluators of GUI-Odyssey, Android in the Wild and GUIAct: is the predicted action the labelled one?

Points and boxes are pixels of the stored screenshot and are divided by its size, because the owners' rules are in parts of
the screen. Action names are the owners'. Facts: `label_end` and `predicted_end`, the second points of drags; for GUIAct
also `positives` and `element` as in `mind2web.judge_seeact`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Final

from coepg_dagster.evaluation.case import Action, Case, Protocol, ScoringError, Verdict
from coepg_dagster.evaluation.metrics import BoxTuple, Point, contains_either, direction, distance, inside, inside_any

TYPE_ACC, STEP_ACC = "type_acc", "step_acc"
NEAR: Final = 0.14
"""Largest distance of two taps that are the same, in parts of the screen: all three owners have it."""


def _part(case: Case, point: Point | None) -> Point | None:
    """A point in parts of the screen."""
    if point is None:
        return None
    if case.size is None:
        raise ScoringError(f"step {case.step_id}: this protocol needs the screenshot's `width` and `height`")
    return point[0] / case.size[0], point[1] / case.size[1]


def _near(case: Case) -> bool:
    """Whether both actions have a point, and these are at most NEAR apart."""
    mine = _part(case, case.prediction.point if case.prediction else None)
    true = _part(case, case.label.point)
    return mine is not None and true is not None and distance(mine, true) <= NEAR


# --- GUI-Odyssey ------------------------------------------------------------------------------------------------------

ODYSSEY_ACTIONS: Final = frozenset(
    {"CLICK", "LONG_PRESS", "SCROLL", "TYPE", "COMPLETE", "IMPOSSIBLE", "HOME", "BACK", "RECENT"}
)
_ANLS: Final = 0.5


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's distance: fewest characters to insert, delete or replace."""
    last = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        row = [i]
        for j, y in enumerate(b, start=1):
            row.append(last[j - 1] if x == y else 1 + min(last[j - 1], last[j], row[-1]))
        last = row
    return last[-1]


def odyssey_text(predicted: str, label: str) -> bool:
    """One contains the other (the empty text is in every text), or 1 − edit distance / longer length ≥ 0.5."""
    a, b = predicted.strip(), label.strip()
    longer = max(len(a), len(b))
    if contains_either(a, b):
        return True
    if abs(len(a) - len(b)) > (1 - _ANLS) * longer:  # the distance is at least that; answers may be very long
        return False
    return 1 - edit_distance(a, b) / longer >= _ANLS


def judge_odyssey(case: Case) -> Verdict:
    """Type equal, and for TYPE the text, for SCROLL the direction, for CLICK and LONG_PRESS the place.

    A place is right in a box of the label (the owner's `sam2_bbox`), borders included, or within NEAR.
    """
    label, predicted = case.label, case.prediction
    if predicted is None or predicted.type.strip() != label.type.strip():
        return Verdict((0.0, 0.0))
    match label.type.strip():
        case "TYPE":
            right = odyssey_text(predicted.value, label.value)
        case "SCROLL":
            right = predicted.value.strip().lower() == label.value.strip().lower()
        case "CLICK" | "LONG_PRESS":
            point = predicted.point
            right = (point is not None and inside_any(point, case.boxes)) or _near(case)
        case _:
            right = True
    return Verdict((1.0, float(right)))


# --- Android in the Wild ----------------------------------------------------------------------------------------------

AITW_ACTIONS: Final = frozenset(
    {"DUAL_POINT", "TYPE", "PRESS_BACK", "PRESS_HOME", "PRESS_ENTER", "STATUS_TASK_COMPLETE", "STATUS_TASK_IMPOSSIBLE"}
)
_TAP: Final = 0.04
"""Largest distance, in parts of the screen, between the two points of a tap."""
_LARGER: Final = 1.4
"""What is added to a box's width and height, in parts of them."""


def _larger(box: BoxTuple) -> BoxTuple:
    """A box in parts of the screen, enlarged; the upper left corner and the size are cut to the screen, as the owner does."""
    x1, y1, x2, y2 = box
    width, height = x2 - x1, y2 - y1
    left, top = max(0.0, x1 - _LARGER * width / 2), max(0.0, y1 - _LARGER * height / 2)
    return left, top, left + min(1.0, width * (1 + _LARGER)), top + min(1.0, height * (1 + _LARGER))


def judge_aitw(case: Case) -> Verdict:
    """Taps: both in one enlarged box of an element, or within NEAR. Drags: same main axis, whatever the direction.

    Other actions: the type alone; typed text is not compared. Without an end, a DUAL_POINT is a tap.
    """
    label, predicted = case.label, case.prediction
    if predicted is None or predicted.type != label.type:
        return Verdict((0.0, 0.0))
    if label.type != "DUAL_POINT":
        return Verdict((1.0, 1.0))
    start, mine = _part(case, label.point), _part(case, predicted.point)
    if start is None or mine is None:
        return Verdict((1.0, 0.0))
    end = _part(case, case.facts.get("label_end")) or start
    my_end = _part(case, case.facts.get("predicted_end")) or mine
    taps = [distance(start, end) <= _TAP, distance(mine, my_end) <= _TAP]
    if taps[0] != taps[1]:
        return Verdict((1.0, 0.0))
    if not taps[0]:
        # the owner compares (y, x), so that y is the main axis of a diagonal drag
        axes = [abs(b[1] - a[1]) >= abs(b[0] - a[0]) for a, b in ((start, end), (mine, my_end))]
        return Verdict((1.0, float(axes[0] == axes[1])))
    boxes = []
    for x1, y1, x2, y2 in case.boxes:
        upper, lower = _part(case, (x1, y1)), _part(case, (x2, y2))
        if upper and lower:
            boxes.append(_larger((*upper, *lower)))
    same = any(inside(start, box) and inside(mine, box) for box in boxes)
    return Verdict((1.0, float(same or _near(case))))


# --- GUIAct -----------------------------------------------------------------------------------------------------------

GUIACT_ACTIONS: Final = frozenset(
    {"click", "hover", "tap", "input", "select", "enter", "copy", "task_complete", "scroll", "swipe", "answer"}
)
_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")


def squad_f1(predicted: str, label: str) -> float:
    """SQuAD's F1 over words, lower-cased, without punctuation and articles; 1 if both are empty, 0 if one is."""
    sides = []
    for text in (predicted, label):
        plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
        sides.append(Counter(_ARTICLES.sub(" ", plain).split()))
    a, b = sides
    if not a or not b:
        return float(a == b)
    common = (a & b).total()
    return 2 * common / (a.total() + b.total())


def judge_guiact(case: Case) -> Verdict:
    """Name equal, and: click, hover the element; tap within NEAR; input, answer F1 > 0.5; select both; scroll, swipe direction.

    A direction is the action's value, or for a swipe with two points theirs.
    """
    label, predicted = case.label, case.prediction
    if predicted is None or predicted.type != label.type:
        return Verdict((0.0, 0.0))
    match label.type:
        case "click" | "hover":
            right = _element(case)
        case "tap":
            right = _near(case)
        case "input" | "answer":
            right = squad_f1(predicted.value, label.value) > 0.5
        case "select":
            right = squad_f1(predicted.value, label.value) > 0.5 and _element(case)
        case "scroll" | "swipe":
            ends = case.facts.get("label_end"), case.facts.get("predicted_end")
            mine, true = _way(predicted, ends[1]), _way(label, ends[0])
            right = bool(true) and mine == true
        case _:
            right = True
    return Verdict((1.0, float(right)))


def _element(case: Case) -> bool:
    """Whether the chosen element is the label's."""
    if "positives" not in case.facts:
        raise ScoringError(f"step {case.step_id}: guiact/steps needs `positives` and `element` for {case.label.type}")
    return case.facts.get("element") in {node for node, _ in case.facts["positives"]}


def _way(action: Action, end: Point | None) -> str:
    return action.value.strip().lower() if action.point is None or end is None else direction(action.point, end)


NEEDS: Final = "the action names of its owner"
ODYSSEY: Final = Protocol(
    name="gui_odyssey/ams",
    metrics=(TYPE_ACC, STEP_ACC),
    judge=judge_odyssey,
    element="in the label's box (sam2_bbox), borders included, or distance ≤ 0.14 in parts of the screen",
    text="one contains the other, or 1 − edit distance / longer length ≥ 0.5; scroll direction equal",
    denominator="all steps; no answer is wrong",
    averages="random split: mean of the six categories (macro); the other splits: micro",
    source="OpenGVLab/GUI-Odyssey src/eval_mm/GUIOdyssey_action_matching.py and evaluate_GUIOdyssey.py",
    macro="group",
    group_of=lambda case: case.group,
    needs=NEEDS,
)
AITW: Final = Protocol(
    name="aitw/action_matching",
    metrics=(TYPE_ACC, STEP_ACC),
    judge=judge_aitw,
    element="taps both in one box enlarged by 1.4 of its size, or distance ≤ 0.14; drags of the same main axis",
    text="not compared",
    denominator="all steps; no answer is wrong",
    averages="micro, and macro over episodes",
    source="google-research/google-research android_in_the_wild/action_matching.py",
    needs=NEEDS,
)
GUIACT: Final = Protocol(
    name="guiact/steps",
    metrics=(TYPE_ACC, STEP_ACC),
    judge=judge_guiact,
    element="element equal (web); tap at distance ≤ 0.14 in parts of the screen; direction of scroll and swipe",
    text="SQuAD's F1 > 0.5",
    denominator="all steps of one action; no answer is wrong",
    averages="micro",
    source="yiye3/GUICourse evaluation/eval_single_action.py",
    needs=NEEDS,
)
BOARDS: Final = (ODYSSEY, AITW, GUIACT)
