"""The prompts of planner, grounder and end-to-end agent, and the parsing of their answers.

Three styles: `web` and `mobile` spell the task and the action types out for pretrained chat models; `compact` is for models
that were trained on nothing else. All put the image before the text, so that all plans of one screenshot share a prefix, and
all expect the same answers: the planner one JSON object {"plan", "action_type", "value"} (Eq. 1), the grounder "(x,y)" (Eq. 2).
The grounder sees screenshot and plan only, never type, value or label.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, Literal

from coepg_dagster.notations import after_reasoning, locate, locate_all
from coepg_dagster.steps import NO_VALUE

Style = Literal["compact", "web", "mobile"]
Message = dict[str, Any]

ACTION_TYPES: Final[Mapping[str, str]] = {
    "CLICK": "click the element; no value",
    "TYPE": "type the value into the element",
    "SELECT": "choose the value in the drop-down list",
}
"""Every action type of the web action space, with its explanation in the prompt."""

SCROLL: Final = "SCROLL"
"""The action by which a planner goes on to the next part of a web page; no label has it (`inference.scrolling`)."""
_SCROLL_USE: Final = "go on to the next part of the page, below this one, because the element is not here; no value"

MOBILE_ACTION_TYPES: Final[Mapping[str, str]] = {
    "CLICK": "tap the element; no value",
    "LONG_PRESS": "press and hold the element; no value",
    "TYPE": "type the value into the field that has the focus",
    "SCROLL": "move the content on; the value is up, down, left or right, the direction in which the view moves",
    "OPEN_APP": "open an app; the value is its name",
    "BACK": "go back; no value",
    "HOME": "go to the home screen; no value",
    "WAIT": "wait for the screen to change; no value",
}
"""Every action type of AndroidControl, in canonical names."""

WITHOUT_VALUE: Final = frozenset(
    name for name, use in (*ACTION_TYPES.items(), *MOBILE_ACTION_TYPES.items()) if use.endswith("no value")
)
"""Action types whose value is NO_VALUE, as the prompts say."""


def needs_target(action_type: str, style: Style) -> bool:
    """Whether an action acts on an element. TYPE does on the web; a phone types into the field that has the focus."""
    return action_type in ("CLICK", "LONG_PRESS", "SELECT") or (action_type == "TYPE" and style != "mobile")


_PLANNER_INSTRUCT: Final = """You operate a {device} to complete a task.
Task: {goal}
{instruction}Previous actions:
{history}
Decide on the single next action. Describe in "plan" which element to act on, so precisely that somebody who sees only \
the screenshot and your description finds it.
Action types:
{actions}
Answer with one JSON object and nothing else: {{"plan": "...", "action_type": "...", "value": "..."}}"""
_GROUNDER_INSTRUCT: Final = """Locate the element that this instruction refers to, precisely.
Instruction: {plan}
Answer with the pixel coordinates of its centre as (x,y) and nothing else."""
_BOX_INSTRUCT: Final = """Locate the element that this instruction refers to, precisely.
Instruction: {plan}
Answer with the pixel coordinates of its bounding box as [x1, y1, x2, y2] and nothing else."""
_END_TO_END_INSTRUCT: Final = """You operate a {device} to complete a task.
Task: {goal}
{instruction}Previous actions:
{history}
Decide on the single next action, and where it acts.
Action types:
{actions}
Answer with one JSON object and nothing else, the point being the pixel coordinates of the element's centre, or empty where \
the action has no target: {{"action_type": "...", "value": "...", "point": "(x,y)"}}"""
_PLANNER_COMPACT: Final = "Task: {goal}\nDone: {history}"
_GROUNDER_COMPACT: Final = "{plan}"


def plain(text: str) -> str:
    """`text` without control tokens: "<|" is written "< |".

    Goals, history and plans come from pages and models. A tokenizer reads "<|image_pad|>" or "<|im_end|>" in them as
    the token itself: with the first, image tokens and features differ in number; the second ends the turn.
    """
    return text.replace("<|", "< |")


def _user(text: str) -> list[Message]:
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": plain(text)}]}]


def assistant(text: str) -> list[Message]:
    """The completion side of a training example."""
    return [{"role": "assistant", "content": [{"type": "text", "text": plain(text)}]}]


def planner_messages(
    goal: str,
    history: Sequence[str],
    style: Style,
    instruction: str | None = None,
    hint: str | None = None,
    scroll: bool = False,
) -> list[Message]:
    """The chat that asks π for (plan, type, value), given Q and h_t; one image placeholder, before the text.

    `instruction` is that of this step, if models may see it (AndroidControl low level). `hint` is the label's action
    (`action_hint`), which only pool planners see, and only with `hindsight_hint`. `scroll`: a web page shows a part of itself,
    and SCROLL is an action; style `compact` names no actions.
    """
    if style == "compact":
        task = goal if instruction is None else f"{goal}\nNow: {instruction}"
        task = task if hint is None else f"{task}\nRight: {hint}"
        return _user(_PLANNER_COMPACT.format(goal=task, history=" ; ".join(history) or "none"))
    text = _instruct(_PLANNER_INSTRUCT, goal, history, style, instruction, {SCROLL: _SCROLL_USE} if scroll else {})
    return _user(
        text if hint is None else f"{text}\nThe right action is known: {hint}. Write the plan that leads to it."
    )


def action_hint(action_type: str, value: str) -> str:
    """An action in the words of a hint."""
    return f"{action_type} {value}".rstrip()


def end_to_end_messages(
    goal: str, history: Sequence[str], style: Style, instruction: str | None = None
) -> list[Message]:
    """The chat that asks an end-to-end agent for (type, value, point); in style `compact` it is the planner's."""
    if style == "compact":
        return planner_messages(goal, history, style, instruction)
    return _user(_instruct(_END_TO_END_INSTRUCT, goal, history, style, instruction))


def _instruct(
    template: str,
    goal: str,
    history: Sequence[str],
    style: Style,
    instruction: str | None,
    more: Mapping[str, str] = MappingProxyType({}),
) -> str:
    actions = {**ACTION_TYPES, **more} if style == "web" else MOBILE_ACTION_TYPES
    return template.format(
        device="web page" if style == "web" else "phone",
        goal=goal,
        instruction="" if instruction is None else f"Instruction for this step: {instruction}\n",
        history="\n".join(f"{i + 1}. {action}" for i, action in enumerate(history)) or "none",
        actions="\n".join(f"- {name}: {use}" for name, use in actions.items()),
    )


def grounder_messages(plan: str, style: Style) -> list[Message]:
    """The chat that asks ϕ for the point of `plan`; one image placeholder, before the text."""
    return _user((_GROUNDER_COMPACT if style == "compact" else _GROUNDER_INSTRUCT).format(plan=plan))


def box_messages(plan: str, style: Style) -> list[Message]:
    """The chat that asks a grounder for the box of `plan`'s element; style `compact` asks as for its point."""
    return _user((_GROUNDER_COMPACT if style == "compact" else _BOX_INSTRUCT).format(plan=plan))


def question_messages(text: str) -> list[Message]:
    """The chat that asks a model any question about a screenshot; one image placeholder, before the text."""
    return _user(text)


def planner_answer(plan: str, action_type: str, value: str) -> str:
    """The answer from which `parse_planner` reads these three."""
    return json.dumps({"plan": plan, "action_type": action_type, "value": value}, ensure_ascii=False)


def grounder_answer(x: int, y: int) -> str:
    """The answer from which `parse_grounder` reads this point; coordinates in the grounder's space."""
    return f"({x},{y})"


def box_answer(x1: int, y1: int, x2: int, y2: int) -> str:
    """The answer from which `parse_grounder` reads the centre of this box; coordinates in the grounder's space."""
    return f"[{x1},{y1},{x2},{y2}]"


def end_to_end_answer(action_type: str, value: str, point: str) -> str:
    """The answer from which `parse_end_to_end` reads these; `point` as from `grounder_answer`, empty without a target."""
    return json.dumps({"action_type": action_type, "value": value, "point": point}, ensure_ascii=False)


@dataclass(frozen=True)
class PlannerAnswer:
    plan: str
    action_type: str
    value: str


@dataclass(frozen=True)
class EndToEndAnswer:
    action_type: str
    value: str
    point: tuple[float, float] | None  # in the model's space; None: it named none


def scrolls_down(answer: PlannerAnswer | None) -> bool:
    """Whether an answer goes on to the next part of a web page: SCROLL or "SCROLL DOWN", by any other direction not."""
    if answer is None or answer.action_type.split()[0] != SCROLL:
        return False
    return {*answer.action_type.lower().split()[1:], *answer.value.lower().split()} <= {"down"}


_EMPTY_VALUES: Final = frozenset({"", "none", "no input text"})
_JSON: Final = json.JSONDecoder(strict=False)  # models write line ends into strings as they are
_OBJECT: Final = re.compile(r'\{\s*+"')
MOST_OBJECTS: Final = 32
"""Number of places in an answer that are tried as the start of a JSON object, so that parsing takes linear time."""


def normal_value(value: str) -> str:
    """`value` without outer blanks; every way of saying "no value" becomes NO_VALUE."""
    stripped = value.strip()
    return NO_VALUE if stripped.lower() in _EMPTY_VALUES else stripped


def parse_planner(text: str) -> PlannerAnswer | None:
    """The planner's answer: the first JSON object with the keys `plan` and `action_type`; None if there is no plan.

    Reasoning is cut (`notations`); other text around the object, also braces and code fences, is skipped. Never evaluates
    anything, and never raises.
    """
    answer = json_object(text, "plan", "action_type")
    plan = answer.get("plan") if answer else None
    action = _action(answer) if answer else None
    if action is None or not (isinstance(plan, str) and plan.strip() and _can_be_kept(plan)):
        return None
    return PlannerAnswer(plan.strip(), *action)


def parse_end_to_end(text: str) -> EndToEndAnswer | None:
    """An end-to-end agent's answer: the first JSON object with an `action_type`, as `parse_planner`; None without one.

    Its `point` is read as a grounder's answer is.
    """
    answer = json_object(text, "action_type")
    action = _action(answer) if answer else None
    if answer is None or action is None:
        return None
    point = answer.get("point")
    return EndToEndAnswer(*action, parse_grounder(point if isinstance(point, str) else json.dumps(point)))


def json_object(text: str, *keys: str) -> dict[str, Any] | None:
    """The first JSON object in a text that has all of `keys`, also within another object; None if there is none.

    Reasoning is cut, as for `parse_planner`.
    """
    start = after_reasoning(text)
    if start is None:
        return None
    for brace in islice(_OBJECT.finditer(text, start), MOST_OBJECTS):
        try:
            answer: dict[str, Any] = _JSON.raw_decode(text, brace.start())[0]
        except (ValueError, RecursionError):  # ValueError: no JSON, or a number of thousands of digits
            continue
        if answer.keys() >= set(keys):
            return answer
    return None


def _action(answer: Any) -> tuple[str, str] | None:
    """(type, value) of an answer; None if it has no type, or its value is neither text nor a number."""
    action_type, value = answer.get("action_type"), answer.get("value")
    if not (isinstance(action_type, str) and action_type.strip()):
        return None
    if not isinstance(value, str | int | float | None) or isinstance(value, bool):
        return None
    action = action_type.strip().upper(), normal_value("" if value is None else str(value))
    return action if _can_be_kept("".join(action)) else None


def _can_be_kept(text: str) -> bool:
    """Whether a table can hold the text: JSON can spell half a surrogate pair, which it cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_grounder(text: str) -> tuple[float, float] | None:
    """The point that a grounder's answer names, or the centre of its box, in the grounder's space; None: it names none.

    `notations` defines which notations are read.
    """
    location = locate(text)
    return (location.x, location.y) if location else None


def parse_corners(text: str) -> tuple[float, float, float, float] | None:
    """The box (x1, y1, x2, y2) that a grounder's answer names; a point has both corners in one place. As `parse_grounder`."""
    location = locate(text)
    return location.corners if location else None


def parse_points(text: str) -> list[tuple[float, float]]:
    """Every point that a grounder's answer names in the notation of the first, in order."""
    return locate_all(text)


def coordinate_span(text: str) -> list[tuple[int, int]]:
    """The character spans (start, end) of the numbers that `parse_grounder` reads: two for a point, four for a box, or none."""
    location = locate(text)
    return list(location.spans) if location else []
