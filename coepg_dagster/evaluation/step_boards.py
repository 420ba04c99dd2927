"""Step evaluators of GUI-Odyssey, Android in the Wild, Android in the Zoo, GUIAct and OmniACT: is the predicted action the
labelled one?

Points and boxes are pixels of the stored screenshot, and are divided by its size where the owners' rules are in parts of the
screen. Action names are the owners'. Facts: `label_end` and `predicted_end`, the second points of drags; `predicted_box`; for
GUIAct also `positives` and `element` as in `mind2web.judge_seeact`; and for steps of several actions `label_actions` and
`predicted_actions`, lists of `StepAction`.
"""

from __future__ import annotations

import ast
import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from coepg_dagster.evaluation.case import FARTHEST, Action, Case, Protocol, ScoringError, Verdict
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

SEQUENCE, ACTION_SCORE = "sequence_score", "action_score"
GUIACT_ACTIONS: Final = frozenset(
    {
        *("click", "hover", "tap", "input", "select", "select_text", "enter", "copy", "task_complete"),
        *("scroll", "swipe", "answer", ""),
    }
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


@dataclass(frozen=True, slots=True)
class StepAction:
    """One action of a step that may have several; the label's, or the model's."""

    type: str
    value: str = ""
    point: Point | None = None
    end: Point | None = None  # second point of a drag
    box: BoxTuple | None = None  # of the element
    elements: frozenset[str] = frozenset()  # ids: those that are right, or the chosen one


def judge_guiact(case: Case) -> Verdict:
    """Type: all names are equal, in order. Step: each labelled action is right; further predicted ones do not matter.

    An action is right if its name is equal, and: click, hover the element; tap within NEAR; input, answer F1 > 0.5; select both;
    select_text IoU > 0.5; scroll, swipe direction. The graded score is the mean over the labelled actions of what each rule
    measures (IoU, 1 − distance / NEAR, F1, or 1); it is not counted where a label lacks its element's box.
    """
    labels = case.facts.get("label_actions") or [_label_action(case)]
    predicted = case.facts.get("predicted_actions")
    if predicted is None:
        predicted = [] if case.prediction is None else [_predicted_action(case)]
    names = [action.type for action in labels] == [action.type for action in predicted]
    results = [
        _guiact_action(case, mine, label) if mine.type == label.type else (False, 0.0)
        for mine, label in zip(predicted, labels, strict=False)
    ]
    results += [(False, 0.0)] * (len(labels) - len(results))
    scores = [score for _, score in results if score is not None]
    whole = len(scores) == len(labels)
    return Verdict(
        (float(names), float(all(right for right, _ in results)), sum(scores) / len(labels) if whole else None)
    )


def _label_action(case: Case) -> StepAction:
    label, known = case.label, frozenset(node for node, _ in case.facts.get("positives", ()))
    box = case.boxes[0] if case.boxes else None
    return StepAction(label.type, label.value, label.point, case.facts.get("label_end"), box, known)


def _predicted_action(case: Case) -> StepAction:
    mine, chosen = case.prediction, case.facts.get("element")
    assert mine is not None
    elements = frozenset([chosen] if chosen else [])
    return StepAction(
        mine.type, mine.value, mine.point, case.facts.get("predicted_end"), case.facts.get("predicted_box"), elements
    )


def _guiact_action(case: Case, mine: StepAction, label: StepAction) -> tuple[bool, float | None]:
    """Whether a predicted action of the label's name is right, and its score; None where the label lacks what that needs."""
    match label.type:
        case "click" | "hover":
            return _same_element(case, mine, label), _overlap(mine.box, label.box)
        case "tap":
            here, there = _part(case, mine.point), _part(case, label.point)
            far = distance(here, there) if here and there else math.inf
            return far <= NEAR, max(0.0, 1 - far / NEAR)
        case "input" | "answer":
            f1 = squad_f1(mine.value, label.value)
            return f1 > 0.5, f1
        case "select":
            f1, overlap = squad_f1(mine.value, label.value), _overlap(mine.box, label.box)
            right = f1 > 0.5 and _same_element(case, mine, label)
            return right, None if overlap is None else (f1 + overlap) / 2
        case "select_text":
            overlap = iou(_region(mine), _region(label))
            return overlap > 0.5, overlap
        case "scroll" | "swipe":
            right = bool(_way(label)) and _way(mine) == _way(label)
            return right, float(right)
        case _:
            return True, 1.0


def _same_element(case: Case, mine: StepAction, label: StepAction) -> bool:
    if not label.elements:
        raise ScoringError(f"step {case.step_id}: guiact/steps needs `positives` and `element` for {label.type}")
    return bool(mine.elements & label.elements)


def _overlap(mine: BoxTuple | None, label: BoxTuple | None) -> float | None:
    return None if label is None else iou(mine, label)


def iou(one: BoxTuple | None, other: BoxTuple | None) -> float:
    """Intersection over union; 0 without a box, or for boxes without area."""
    if one is None or other is None:
        return 0.0
    width, height = min(one[2], other[2]) - max(one[0], other[0]), min(one[3], other[3]) - max(one[1], other[1])
    if width < 0 or height < 0:
        return 0.0
    union = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)) - width * height
    return width * height / union if union > 0 else 0.0


def _region(action: StepAction) -> BoxTuple | None:
    """What a drag selects, in whole pixels, from its left end: empty where the right end is above it, as the owner has it."""
    if action.point is None or action.end is None:
        return None
    (x1, y1), (x2, y2) = sorted((tuple(map(int, action.point)), tuple(map(int, action.end))), key=lambda end: end[0])
    return float(x1), float(y1), float(max(x1, x2)), float(max(y1, y2))


def _way(action: StepAction) -> str:
    if action.point is None or action.end is None:
        return action.value.strip().lower()
    return direction(action.point, action.end)


# --- Android in the Zoo -----------------------------------------------------------------------------------------------

AITZ_ACTIONS: Final = frozenset({"click", "scroll", "type", "press", "stop"})
_ENLARGED: Final = 1.2
_TEXT_RATIO: Final = 0.8


def aitz_name(name: str) -> str:
    """The owner's name of an action: `input` is type, a name that contains one of the five is that one; else empty."""
    name = name.lower()
    return "type" if name == "input" else next((known for known in _AITZ_ORDER if known in name), "")


_AITZ_ORDER: Final = ("click", "scroll", "type", "press", "stop")


def judge_aitz(case: Case) -> Verdict:
    """Type equal, and: click by its predicted *box*; scroll direction; text; button; stop.

    A click is right if its box, enlarged by 1.2 and in whole pixels, contains the labelled point, or has IoU > 0.5 with an
    element (`boxes`, enlarged too) that does. Text: one contains the other, or 2 · longest common subsequence / both lengths
    > 0.8.
    """
    label, predicted = case.label, case.prediction
    name, mine = aitz_name(label.type), "" if predicted is None else aitz_name(predicted.type)
    if predicted is None or not mine or mine != name:
        return Verdict((0.0, 0.0))
    match name:
        case "click":
            right = _aitz_click(case)
        case "scroll":
            right = predicted.value == label.value
        case "type":
            right = contains_either(predicted.value, label.value) or _indel_ratio_above(predicted.value, label.value)
        case "press":
            right = _button(predicted) == _button(label)
        case _:
            right = True
    return Verdict((1.0, float(right)))


def _button(action: Action) -> str:
    return (action.value or action.type.partition("_")[2]).strip().lower()


def _aitz_click(case: Case) -> bool:
    box, truth = case.facts.get("predicted_box"), case.label.point
    if truth is None:
        raise ScoringError(f"step {case.step_id}: aitz/action_matching needs the point of a labelled click")
    if box is None:  # a mere point is none
        return False
    mine = _grown(tuple(map(round, box)))
    if inside(truth, mine):
        return True
    return any(inside(truth, other) and _whole_iou(mine, other) > 0.5 for other in map(_grown, case.boxes))


def _grown(box: tuple[float, ...]) -> BoxTuple:
    """A box enlarged about its centre."""
    x1, y1, x2, y2 = box
    x, y, width, height = (x1 + x2) / 2, (y1 + y2) / 2, (x2 - x1) * _ENLARGED, (y2 - y1) * _ENLARGED
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _whole_iou(one: BoxTuple, other: BoxTuple) -> float:
    """Intersection over union, a box having at least one square pixel."""
    width = max(0.0, min(one[2], other[2]) - max(one[0], other[0]))
    height = max(0.0, min(one[3], other[3]) - max(one[1], other[1]))
    areas = (max((box[2] - box[0]) * (box[3] - box[1]), 1.0) for box in (one, other))
    return width * height / (sum(areas) - width * height)


def _indel_ratio_above(a: str, b: str) -> bool:
    """Whether 2 · LCS / (both lengths) is above _TEXT_RATIO (the package Levenshtein calls it ratio)."""
    total = len(a) + len(b)
    if 2 * min(len(a), len(b)) <= _TEXT_RATIO * total:  # answers may be very long
        return total == 0
    last = [0] * (len(b) + 1)
    for x in a:
        row = [0]
        for j, y in enumerate(b, start=1):
            row.append(last[j - 1] + 1 if x == y else max(last[j], row[-1]))
        last = row
    return 2 * last[-1] / total > _TEXT_RATIO


# --- OmniACT ----------------------------------------------------------------------------------------------------------

_LONGEST_LINE: Final = 10_000


def script_action(line: str) -> StepAction | None:
    """The action of a line of a PyAutoGUI script: `pyautogui.click(10, 20)`, `pyautogui.hotkey("ctrl", "c")`.

    Nothing is evaluated. None where it is no such call with plain numbers and texts.
    """
    try:
        call = ast.parse(line[:_LONGEST_LINE].strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
    ):
        return None
    if call.func.value.id.lower() != "pyautogui":
        return None
    given = [_constant(argument) for argument in (*call.args, *(keyword.value for keyword in call.keywords))]
    numbers = [float(value) for value in given if type(value) in (int, float) and abs(value) <= FARTHEST]
    texts = [value for value in given if isinstance(value, str)]
    point = (numbers[0], numbers[1]) if len(numbers) > 1 else None
    return StepAction(call.func.attr.lower(), "+".join(texts), point)


def _constant(argument: ast.expr) -> Any:
    if isinstance(argument, ast.UnaryOp) and isinstance(argument.op, ast.USub):
        value = _constant(argument.operand)
        return -value if type(value) in (int, float) else None
    return argument.value if isinstance(argument, ast.Constant) else None


def judge_omniact(case: Case) -> Verdict:
    """Sequence score: as many actions, of the same names in order. Action score: 1 less the penalties of the actions, or 0.

    Each of n actions takes away a share of 1 / n: a click its distance to the box d as d / (d + diagonal of the box); a key or
    a set of keys that differs all; a text 1 − BLEU-2 over characters. Other actions cost nothing. A script of n actions weighs
    n − 0.9.
    """
    labels: list[StepAction] = case.facts.get("label_actions") or [_label_action(case)]
    predicted: list[StepAction] = case.facts.get("predicted_actions") or (
        [] if case.prediction is None or not case.prediction.type else [_predicted_action(case)]
    )
    weight = len(labels) - 0.9
    names = [[action.type.lower() for action in actions] for actions in (labels, predicted)]
    if names[0] != names[1]:
        return Verdict((0.0, 0.0), weights=(weight, weight))
    lost = sum(_penalty(case, mine, label) for mine, label in zip(predicted, labels, strict=True)) / len(labels)
    return Verdict((weight, weight * max(0.0, 1 - lost)), weights=(weight, weight))


def _penalty(case: Case, mine: StepAction, label: StepAction) -> float:
    match label.type.lower():
        case "click":
            box = label.box or _centred(label.point, case.boxes)
            if box is None:
                raise ScoringError(f"step {case.step_id}: omniact/action_score needs the box whose centre a click is")
            if mine.point is None:
                return 1.0
            dx, dy = (
                max(0.0, abs((low + high) / 2 - place) - (high - low) / 2)
                for low, high, place in ((box[0], box[2], mine.point[0]), (box[1], box[3], mine.point[1]))
            )
            far, diagonal = math.hypot(dx, dy), math.hypot(box[2] - box[0], box[3] - box[1])
            return far / (far + diagonal) if far else 0.0
        case "press":
            return float(mine.value.strip() != label.value.strip())
        case "hotkey":
            return float(_keys(mine.value) != _keys(label.value))
        case "write":
            return 1 - bleu_2(mine.value, label.value)
        case _:
            return 0.0


def _keys(value: str) -> frozenset[str]:
    return frozenset(key.strip() for key in value.lower().split("+"))


def _centred(point: Point | None, boxes: Sequence[BoxTuple]) -> BoxTuple | None:
    """The box whose centre the point is."""
    return next((box for box in boxes if point == ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)), None)


def bleu_2(candidate: str, reference: str) -> float:
    """BLEU over characters and pairs of them, lower-cased, equally weighted, with the brevity penalty and no smoothing."""
    candidate, reference = candidate.lower(), reference.lower()
    product = 1.0
    for n in (1, 2):
        mine, true = (Counter(text[i : i + n] for i in range(len(text) - n + 1)) for text in (candidate, reference))
        hits = (mine & true).total()
        if not hits:
            return 0.0
        product *= hits / mine.total()
    brevity = 1.0 if len(candidate) > len(reference) else math.exp(1 - len(reference) / len(candidate))
    return brevity * math.sqrt(product)


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
    metrics=(TYPE_ACC, STEP_ACC, ACTION_SCORE),
    judge=judge_guiact,
    element="element equal (web); tap at distance ≤ 0.14 in parts of the screen; direction of scroll and swipe; selected "
    "region IoU > 0.5; all actions of a step",
    text="SQuAD's F1 > 0.5",
    denominator="all steps; no answer is wrong",
    averages="micro: name of all actions, success, and graded score",
    source="yiye3/GUICourse evaluation/eval_single_action.py and evaluation.py",
    group_of=lambda case: " ".join(action.type for action in case.facts.get("label_actions", ())) or case.label.type,
    needs=NEEDS,
)
AITZ: Final = Protocol(
    name="aitz/action_matching",
    metrics=(TYPE_ACC, STEP_ACC),
    judge=judge_aitz,
    element="predicted box, enlarged by 1.2, contains the labelled point, or has IoU > 0.5 with an element that does",
    text="one contains the other, or 2 · common subsequence / both lengths > 0.8; scroll direction and button equal",
    denominator="all steps; no answer is wrong",
    averages="micro, and each action type; over episodes as sop/aitz/action_matching",
    source="IMNearth/CoAT coat/evaluate.py",
    group_of=lambda case: aitz_name(case.label.type),
    needs=NEEDS,
)
OMNIACT: Final = Protocol(
    name="omniact/action_score",
    metrics=(SEQUENCE, ACTION_SCORE),
    judge=judge_omniact,
    element="click: 1 − d / (d + diagonal of the box) at distance d to it",
    text="write: BLEU-2 over characters; keys equal",
    denominator="all tasks, a script of n actions weighs n − 0.9; other actions than the label's, or none, give 0",
    averages="micro over weights",
    source="OmniACT's evaluator in OSU-NLP-Group/UGround offline_evaluation/OmniACT/eval_action.py",
    group_of=lambda case: f"{len(case.facts.get('label_actions', ' '))} actions",
    needs="scripts of actions",
)
BOARDS: Final = (ODYSSEY, AITW, AITZ, GUIACT, OMNIACT)
