"""AndroidControl's protocols: type accuracy, step accuracy, grounding accuracy, as six public scripts count them.

Canonical action types: click, long_press, type, scroll, open_app, back, home, wait, finish. A scroll's value is the
direction in which the content view moves on (the dataset's convention); a `swipe` (UI-Genie's files) is a type of its
own, with the direction of the finger, hence the opposite. Points are pixels of the stored screenshot.

The scripts' quirks are kept, so that the numbers are those that the protocol's owner would get.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from coepg_dagster.evaluation.case import UNPARSED, Action, Case, Protocol, ScoringError, Verdict, skipped
from coepg_dagster.evaluation.metrics import (
    BoxTuple,
    Point,
    contains_either,
    distance,
    gui_r1_f1,
    inside,
    token_f1,
    value_f1,
)
from coepg_dagster.prompts import normal_value

METRICS: Final = ("type_acc", "step_acc", "grounding_acc")
POINTED: Final = frozenset({"click", "long_press"})
TEXTED: Final = frozenset({"type", "open_app", "scroll", "select"})
SCROLLS: Final = frozenset({"scroll", "swipe"})
BUTTONS: Final = frozenset({"back", "home", "system_button"})

_ALIASES: Final = {
    "input_text": "type",
    "type_text": "type",
    "navigate_back": "back",
    "press_back": "back",
    "navigate_home": "home",
    "press_home": "home",
    "open": "open_app",
    "complete": "finish",
    "terminate": "finish",
    "status": "finish",
}


def canonical(action: Action) -> Action:
    """`action` with its type under the canonical name; a name without one is only lower-cased."""
    name = action.type.strip().lower().replace(" ", "_")
    return replace(action, type=_ALIASES.get(name, name))


def _verdict(type_hit: bool, step: bool | None, grounding: bool | None) -> Verdict:
    return Verdict(tuple(None if v is None else float(v) for v in (type_hit, step, grounding)))


def _label_point(case: Case, protocol: str) -> Point:
    if case.label.point is None:
        raise ScoringError(
            f"step {case.step_id}: {protocol} needs the point of the label {case.label.type!r}, not its box"
        )
    return case.label.point


def _size(case: Case, protocol: str) -> tuple[int, int]:
    if case.size is None:
        raise ScoringError(f"step {case.step_id}: {protocol} needs the screenshot's width and height")
    return case.size


def _predicted_point(case: Case) -> Point | None:
    return case.prediction.point if case.prediction else None


def within_14_percent(a: Point, b: Point, size: tuple[int, int]) -> bool:
    """(dx/W)² + (dy/H)² < 0.14²: an ellipse of 14 % of either side."""
    return ((a[0] - b[0]) / size[0]) ** 2 + ((a[1] - b[1]) / size[1]) ** 2 < 0.14**2


def within_14_percent_of_diagonal(a: Point, b: Point, size: tuple[int, int]) -> bool:
    """Distance at most 0.14·√(W² + H²): much laxer than `within_14_percent`."""
    return distance(a, b) <= math.hypot(size[0] * 0.14, size[1] * 0.14)


def judge_gui_r1(case: Case) -> Verdict:
    """GUI-R1: step = click by point or text by F1 ≥ 0.5; wait and back count for the type only; type need not match.

    W and H are those of the image that the model saw where the file names them, although both points are in original
    pixels: as in the published script.
    """
    label, predicted = case.label, case.prediction
    type_hit = predicted is not None and predicted.type == label.type
    if label.type in POINTED:
        size, point = case.seen_size or _size(case, "android_control/gui_r1"), _predicted_point(case)
        hit = point is not None and within_14_percent(_label_point(case, "android_control/gui_r1"), point, size)
        return _verdict(type_hit, hit, hit)
    if label.type in TEXTED:
        return _verdict(type_hit, predicted is not None and gui_r1_f1(predicted.value, label.value) >= 0.5, None)
    return _verdict(type_hit, None, None)


def drop_classes_without_hit(cases: Sequence[Case], verdicts: list[Verdict]) -> list[Verdict]:
    """GUI-R1's sums run over the classes that have a hit, so a class without one leaves the denominator, per metric."""
    hits: dict[tuple[str, str, int], float] = defaultdict(float)
    for case, verdict in zip(cases, verdicts, strict=True):
        for j, value in enumerate(verdict.values):
            hits[case.group, case.label.type, j] += value or 0.0
    return [
        replace(
            verdict,
            values=tuple(
                value if hits[case.group, case.label.type, j] else None for j, value in enumerate(verdict.values)
            ),
        )
        for case, verdict in zip(cases, verdicts, strict=True)
    ]


ClickRule = Callable[[Point, Point, tuple[int, int]], bool]


def judge_strict14(case: Case, *, click_rule: ClickRule = within_14_percent) -> Verdict:
    """Every row counts; type and argument must be right; sizes are original; text F1 > 0.5 without containment."""
    label, predicted = case.label, case.prediction
    type_hit = predicted is not None and predicted.type == label.type
    if label.type in POINTED:
        point, size = _predicted_point(case), _size(case, "android_control/strict14")
        hit = point is not None and click_rule(_label_point(case, "android_control/strict14"), point, size)
        return _verdict(type_hit, type_hit and hit, hit)
    if label.type in TEXTED:
        return _verdict(
            type_hit, type_hit and predicted is not None and value_f1(predicted.value, label.value) > 0.5, None
        )
    return _verdict(type_hit, type_hit, None)


_OS_ATLAS_NAMES: Final = {"back": "PRESS_BACK", "home": "PRESS_HOME", "finish": "COMPLETE"}


def os_atlas_text(action: Action) -> str:
    """The action in OS-Atlas' words, without its point: "TYPE [text]", "SCROLL [DOWN]", "PRESS_BACK"."""
    name = _OS_ATLAS_NAMES.get(action.type, action.type.upper())
    if action.type == "scroll":
        return f"{name} [{normal_value(action.value).upper()}]"
    if action.type in ("type", "open_app"):
        return f"{name} [{normal_value(action.value)}]"
    return name


def judge_os_atlas(case: Case) -> Verdict:
    """OS-Atlas: same action word; point within 140 of 1000; text equal, or F1 > 0.5 of the second word alone.

    The published script stops at an answer without a second word; here such an answer is wrong. Points are compared in
    0..1000 without rounding. Grounding: clicks of the right type only.
    """
    label, predicted = case.label, case.prediction
    if predicted is None or predicted.type != label.type:
        return _verdict(False, False, None)
    if label.type in POINTED:
        (width, height), truth = _size(case, "android_control/os_atlas"), _label_point(case, "android_control/os_atlas")
        point = predicted.point or (-0.1 * width, -0.1 * height)  # the script's (-100, -100) of 1000
        far = distance((point[0] / width, point[1] / height), (truth[0] / width, truth[1] / height))
        hit = far * 1000 <= 140
        return _verdict(True, hit, hit if label.type == "click" else None)
    texts = [os_atlas_text(action) for action in (predicted, label)]
    if texts[0] == texts[1]:
        return _verdict(True, True, None)
    if label.type in ("type", "open_app"):
        return _verdict(True, token_f1(texts[0].split()[1], texts[1].split()[1]) > 0.5, None)
    return _verdict(True, False, None)


def _genie_type(action: Action) -> str:
    return "system_button" if action.type in BUTTONS else action.type


def _button(action: Action) -> str:
    return action.value if action.type == "system_button" else action.type


def _direction(action: Action) -> str:
    return action.value.strip().lower()


def judge_ui_genie(case: Case) -> Verdict:
    """UI-Genie: click within 14 % of the diagonal (px, cut to integers); texts contain one another; wait always right.

    An answer that cannot be parsed leaves the denominator. Fact `listed_wrong`: the file states that its owner judged
    this step wrong and does not give the screenshot's size; then a click of the right type cannot be checked and stays
    wrong. Swipe directions are compared as labelled, without reversal.
    """
    label, predicted = case.label, case.prediction
    if predicted is None or not predicted.type:
        return skipped(UNPARSED)
    pointed = label.point is not None and predicted.point is not None and predicted.type in (*POINTED, "swipe")
    if _genie_type(label) != _genie_type(predicted):
        return _verdict(False, False, False if pointed else None)
    hit = False
    if label.type in POINTED:
        if case.size is None and case.facts.get("listed_wrong"):
            return _verdict(True, False, False if pointed else None)
        size, truth = _size(case, "android_control/ui_genie"), _label_point(case, "android_control/ui_genie")
        point = predicted.point or (0.0, 0.0)
        hit = within_14_percent_of_diagonal((int(truth[0]), int(truth[1])), (int(point[0]), int(point[1])), size)
    elif label.type in ("type", "open_app", "finish"):
        a, b = (normal_value(action.value).lower() for action in (predicted, label))
        if label.type == "type":
            a, b = (re.sub(r"\s+", " ", text) for text in (a, b))
        hit = contains_either(a, b) or (label.type != "type" and token_f1(a, b) > 0.5)
    elif label.type in SCROLLS:
        hit = contains_either(_direction(predicted), _direction(label))
    elif _genie_type(label) == "system_button":
        hit = contains_either(_button(predicted).strip().lower(), _button(label).strip().lower())
    elif label.type == "wait":
        hit = True
    return _verdict(True, hit, hit if pointed else None)


QWEN_ENLARGE: Final = 1.2
QWEN_DISTANCE: Final = 0.04


def _qwen_click(point: Point, boxes: Sequence[BoxTuple], truth: Point | None, case: Case) -> bool:
    for x1, y1, x2, y2 in boxes:
        cx, cy = (x1 + x2) / 2, (y1 + y2) / 2
        w, h = (x2 - x1) * QWEN_ENLARGE / 2, (y2 - y1) * QWEN_ENLARGE / 2
        if inside(point, (cx - w, cy - h, cx + w, cy + h)):
            return True
    if truth is None:
        return False
    width, height = _size(case, "android_control/qwen")
    seen_w, seen_h = case.seen_size or (width, height)
    dx, dy = (truth[0] - point[0]) / width * seen_w, (truth[1] - point[1]) / height * seen_h
    return math.hypot(dx, dy) <= QWEN_DISTANCE * max(seen_w, seen_h)


def judge_qwen(case: Case) -> Verdict:
    """Qwen2.5-VL's rule as in InfiGUI-R1: click in a candidate box enlarged by 1.2, or within 4 % of the longer side.

    `case.boxes` are the candidate boxes: of a click, and of the app's icon on an open_app, which a click there also
    satisfies. An answer that lacks what it needs has neither type nor step; grounding counts predicted clicks that are
    right over labelled clicks, as the script does.
    """
    label, predicted = case.label, case.prediction
    if label.type == "finish":
        return skipped("terminate")
    labelled_click = 1.0 if label.type == "click" else 0.0
    type_hit, hit = False, False
    if predicted is not None:
        same = _genie_type(label) == _genie_type(predicted)
        if label.type in POINTED and same and predicted.point is not None:
            type_hit, hit = (
                True,
                _qwen_click(predicted.point, case.boxes, _label_point(case, "android_control/qwen"), case),
            )
        elif label.type == "open_app" and predicted.type == "click":
            if case.boxes and predicted.point is not None:
                x1, y1, x2, y2 = case.boxes[0]
                type_hit = True
                hit = _qwen_click(predicted.point, case.boxes, ((x1 + x2) / 2, (y1 + y2) / 2), case)
        elif same and label.type in ("type", "open_app"):
            a, b = (normal_value(action.value).lower() for action in (predicted, label))
            type_hit, hit = True, contains_either(a, b)
        elif same and label.type in SCROLLS:
            type_hit, hit = True, _direction(predicted) == _direction(label)
        elif same and _genie_type(label) == "system_button":
            type_hit, hit = True, _button(predicted).strip().lower() == _button(label).strip().lower()
        elif same and label.type == "wait":
            type_hit, hit = True, True
    clicked = hit and predicted is not None and predicted.type == "click"
    grounding = float(clicked) if labelled_click or clicked else None
    return Verdict((float(type_hit), float(hit), grounding), weights=(1.0, 1.0, labelled_click))


@dataclass(frozen=True, slots=True)
class TreeNode:
    """One node of an accessibility tree; the box in pixels of the stored screenshot."""

    box: BoxTuple
    text: str = ""
    content_description: str = ""

    @property
    def area(self) -> float:
        return (self.box[2] - self.box[0]) * (self.box[3] - self.box[1])


def smallest_node(nodes: Sequence[TreeNode], point: Point) -> TreeNode | None:
    """The node of least area that contains `point`, borders included; of equally small ones the first."""
    return min((node for node in nodes if inside(point, node.box)), key=lambda node: node.area, default=None)


def judge_uground500(case: Case) -> Verdict:
    """UGround: the point must lie in the smallest node that contains the true point; typed text must be equal.

    Fact `nodes`: the accessibility tree, as `TreeNode`s. Label and prediction name the element; `prediction.point` is the
    grounder's. A click equals open_app where the node that it hits names the app, and navigate_back where it says
    "back"; for a label `click` the app's name is empty, which every text contains.
    """
    label, predicted = case.label, case.prediction
    nodes = case.facts.get("nodes")
    if nodes is None:
        raise ScoringError(
            f"step {case.step_id}: android_control/uground500 needs the accessibility tree; "
            "give the sample file as labels"
        )
    if predicted is None:
        return Verdict((0.0, 0.0, None))
    point, pair = predicted.point, {label.type, predicted.type}
    same = predicted.type == label.type
    if same and label.type in ("click", "long_press", "type"):
        target = smallest_node(nodes, _label_point(case, "android_control/uground500"))
        hit = target is not None and point is not None and inside(point, target.box)
        hit = hit and (label.type != "type" or label.value == predicted.value)
        return _verdict(True, hit, hit)
    hit = same and label.value == predicted.value
    if pair not in ({"click", "open_app"}, {"click", "back"}):
        return _verdict(same, hit, None)
    needle = "back" if "back" in pair else (label.value.lower() if label.type == "open_app" else "")
    node = smallest_node(nodes, point) if point is not None else None
    texts = [text.lower() for text in (node.text, node.content_description)] if node else []
    hit = any(text and needle in text for text in texts)
    attempted = 0.0 if predicted.type == "open_app" else 1.0  # the script counts this hit without the attempt
    return Verdict((0.0, float(hit), float(hit) if attempted or hit else None), weights=(1.0, 1.0, attempted))


UGROUND500: Final = Protocol(
    name="android_control/uground500",
    metrics=METRICS,
    judge=judge_uground500,
    element="point in the smallest accessibility node that contains the true point",
    text="equal; a click may stand for open_app or navigate_back where the node says so",
    denominator="planned steps with a sample (500, status included)",
    averages="micro",
    source="OSU-NLP-Group/UGround offline_evaluation/AndroidControl/eval.py",
    needs="accessibility tree",
)
OS_ATLAS: Final = Protocol(
    name="android_control/os_atlas",
    metrics=METRICS,
    judge=judge_os_atlas,
    element="distance ≤ 140 in 0..1000 coordinates",
    text="whole action equal, or F1 > 0.5 of the second word (type, open_app); scroll direction equal",
    denominator="all test steps (7,708)",
    averages="micro",
    source="OS-Copilot/OS-Atlas eval/eval_scripts/android_control/evaluation_unify.py",
)
GUI_R1: Final = Protocol(
    name="android_control/gui_r1",
    metrics=METRICS,
    judge=judge_gui_r1,
    finish=drop_classes_without_hit,
    element="(dx/W)² + (dy/H)² < 0.14², W and H of the resized image",
    text="F1 ≥ 0.5, one token may contain the other; the type need not match",
    denominator="step: click, long_press, type, open_app, scroll; type: all; classes without a hit drop out",
    averages="micro",
    source="ritzz-ai/GUI-R1 guir1/eval/eval_omni.py",
)
UI_GENIE: Final = Protocol(
    name="android_control/ui_genie",
    metrics=METRICS,
    judge=judge_ui_genie,
    element="distance ≤ 14 % of the diagonal",
    text="one contains the other (open_app also F1 > 0.5); wait always right",
    denominator="all steps and terminate; answers that cannot be parsed are left out",
    averages="micro",
    source="Euphoria16/UI-Genie src/ms-swift/eval_results_androidcontrol.py",
)
QWEN: Final = Protocol(
    name="android_control/qwen",
    metrics=METRICS,
    judge=judge_qwen,
    element="in a candidate box enlarged by 1.2, or distance ≤ 0.04·max(W, H)",
    text="one contains the other; open_app also by a click on the icon; wait always right",
    denominator="steps without terminate",
    averages="micro",
    source="Reallm-Labs/InfiGUI-R1 eval/android_control/evaluate_android_control.py",
)
STRICT14: Final = Protocol(
    name="android_control/strict14",
    metrics=METRICS,
    judge=judge_strict14,
    element="(dx/W)² + (dy/H)² < 0.14², W and H of the original image; the type must match",
    text="F1 > 0.5 without containment; the type must match",
    denominator="all rows",
    averages="micro",
    source="this project",
)
