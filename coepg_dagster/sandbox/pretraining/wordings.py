"""How elements are described: four wordings, and the plans that a tiny planner of each wording writes.

The base grounder knows elements in wording A, the base planner plans in B, the planners of the pool in C and D. That
gap is made on purpose: the loop has to close it (more of a familiar wording teaches a grounder nothing).

A  button 'previous'
B  press on the previous button
C  click the element reading 'previous', a button near the lower left
D  use the push button marked previous · use the second input box · use the red square at the top

A *vague* plan names a kind or a place only. Planner GRPO and verification have to remove it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, Literal

Wording = Literal["A", "B", "C", "D"]
WORDINGS: Final[tuple[Wording, ...]] = ("A", "B", "C", "D")

LONGEST_NAME: Final = 24
"""Longer names are cut after the last whole word that fits."""


@dataclass(frozen=True)
class ScreenElement:
    """One visible element; `box` is (x1, y1, x2, y2) in screenshot pixels."""

    kind: str
    name: str
    color: str
    box: tuple[float, float, float, float]

    @property
    def centre(self) -> tuple[float, float]:
        return (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2


_VERBS: Final[Mapping[Wording, Mapping[str, str]]] = {
    "A": {"CLICK": "", "TYPE": "", "SELECT": ""},
    "B": {"CLICK": "press on", "TYPE": "fill in", "SELECT": "pick from"},
    "C": {"CLICK": "click", "TYPE": "type into", "SELECT": "choose from"},
    "D": {"CLICK": "use", "TYPE": "enter text in", "SELECT": "switch"},
}

_SYNONYMS: Final[Mapping[str, str]] = {
    "button": "push button",
    "link": "hyperlink",
    "tab": "page tab",
    "field": "input box",
    "checkbox": "tick box",
    "radio": "option",
    "list": "drop down menu",
    "area": "large text box",
    "section": "row to expand",
    "icon": "symbol",
    "item": "menu line",
    "folder": "tree folder",
    "file": "tree file",
    "shape": "image",
    "box": "square",
    "day": "number",
    "text": "word",
}
_ORDINALS: Final = ("first", "second", "third", "fourth", "fifth")

_ROWS: Final = (103.0, 157.0)
_COLUMNS: Final = (54.0, 107.0)
_PLACES: Final = (
    ("upper left", "top", "upper right"),
    ("left", "middle", "right"),
    ("lower left", "bottom", "lower right"),
)


def place(element: ScreenElement) -> str:
    """Where on the page the element's centre lies, in words: one of nine areas below the instruction bar."""
    x, y = element.centre
    row = sum(y >= border for border in _ROWS)
    column = sum(x >= border for border in _COLUMNS)
    return _PLACES[row][column]


def short_name(name: str) -> str:
    """The name's first words, at most LONGEST_NAME characters where its first word allows that."""
    if len(name) <= LONGEST_NAME:
        return name
    cut = name[: LONGEST_NAME + 1].rfind(" ")
    return name[:cut] if cut > 0 else name[:LONGEST_NAME]


def ordinal(element: ScreenElement, elements: Sequence[ScreenElement]) -> str:
    """ "first" … "fifth" among the elements of its kind in reading order; "" where it is alone or beyond the fifth."""
    same = sorted((other for other in elements if other.kind == element.kind), key=lambda e: (e.box[1], e.box[0]))
    index = same.index(element)
    return _ORDINALS[index] if len(same) > 1 and index < len(_ORDINALS) else ""


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def precise(
    wording: Wording, element: ScreenElement, elements: Sequence[ScreenElement], action_type: str
) -> tuple[str, ...]:
    """Every plan of this wording that says which element is meant; the first is the commonest."""
    name, kind, verb = short_name(element.name), element.kind, _VERBS[wording][action_type]
    match wording:
        case "A":
            return (f"{kind} '{name}'" if name else kind,)
        case "B":
            return (_joined(verb, "the", name, kind),)
        case "C":
            where = f"near the {place(element)}"
            if not name:
                return (f"{verb} the {kind} {where}",)
            return (f"{verb} the element reading '{name}', a {kind} {where}",)
        case "D":
            return _precise_d(verb, name, element, elements)


def _precise_d(verb: str, name: str, element: ScreenElement, elements: Sequence[ScreenElement]) -> tuple[str, ...]:
    synonym = _SYNONYMS.get(element.kind, element.kind)
    where = f"at the {place(element)}"
    nth = ordinal(element, elements)
    if element.kind in ("box", "shape") and name:
        return (f"{verb} the {name} {synonym}", f"{verb} the {name} {synonym} {where}")
    plans = []
    if name and not name[0].isdigit():
        plans += [f"{verb} the {synonym} marked {name}", f"{verb} the {synonym} marked {name} {where}"]
    if nth:
        plans.append(f"{verb} the {nth} {synonym}")
    if not plans:
        plans.append(f"{verb} the {synonym} {where}")
    return tuple(plans)


def gold_plan(kind: str, name: str, box: tuple[float, float, float, float], action_type: str) -> str:
    """The plan for an element with this box (px) that names it, its kind and its place: wording C, which needs no others."""
    return precise("C", ScreenElement(kind, name, "", box), (), action_type)[0]


def vague(wording: Wording, element: ScreenElement, action_type: str) -> tuple[str, ...]:
    """Plans of this wording that fit the element and many others: they name its kind or its place only."""
    verb = _VERBS[wording][action_type]
    match wording:
        case "A":
            return (element.kind,)
        case "B":
            return (f"{verb} a {element.kind}", f"{verb} the {place(element)}")
        case "C":
            return (f"{verb} any {element.kind}", f"{verb} the element near the {place(element)}")
        case "D":
            return (f"{verb} one {_SYNONYMS.get(element.kind, element.kind)}", f"{verb} it at the {place(element)}")


@dataclass(frozen=True)
class Vagueness:
    """How often a planner is vague: `often` on a `families` share of the task families, `seldom` on the others.

    It differs by family, and each family has its own way of being vague, so that vagueness shows in greedy plans too,
    not in sampled ones only.
    """

    families: float = 0.0
    often: float = 0.0
    seldom: float = 0.0

    def on(self, family: str, salt: str) -> float:
        """The probability of a vague plan on this family, for the planner named `salt`."""
        return self.often if _drawn(salt, family) / 2**32 < self.families else self.seldom


def _drawn(*parts: str) -> int:
    """A number in [0, 2**32) that depends on `parts` only."""
    return zlib.crc32("/".join(parts).encode())


def habit(family: str, salt: str) -> int:
    """Which of its two vague plans the planner named `salt` uses on this family: 0 (kind) or 1 (place)."""
    return _drawn(salt, family, "habit") % 2


def likely_actions(kind: str) -> tuple[str, ...]:
    """The action types with which an element of this kind is used; for questions that have no action of their own."""
    if kind in ("field", "area"):
        return ("TYPE", "CLICK")
    return ("SELECT", "CLICK") if kind == "list" else ("CLICK",)


def describe(
    wording: Wording,
    element: ScreenElement,
    elements: Sequence[ScreenElement],
    action_type: str,
    rng: Random,
    vagueness: float = 0.0,
    vague_form: int = 0,
) -> str:
    """One plan of this wording, drawn with `rng`; vague with probability `vagueness`, then mostly in form `vague_form`.

    Of several precise plans the first is drawn half the time.
    """
    if vagueness and rng.random() < vagueness:
        plans = vague(wording, element, action_type)
        return plans[vague_form % len(plans)] if rng.random() < 0.9 else rng.choice(plans)
    plans = precise(wording, element, elements, action_type)
    return plans[0] if len(plans) == 1 or rng.random() < 0.5 else rng.choice(plans[1:])


def question(
    wordings: Mapping[Wording, float], element: ScreenElement, elements: Sequence[ScreenElement], rng: Random
) -> str:
    """One precise description of an element in a wording drawn by weight, with an action that fits its kind."""
    names = list(wordings)
    wording = names[0] if len(names) == 1 else rng.choices(names, [wordings[name] for name in names])[0]
    return describe(wording, element, elements, rng.choice(likely_actions(element.kind)), rng)


def is_right(
    plan: str, wordings: Sequence[Wording], element: ScreenElement, elements: Sequence[ScreenElement], action: str
) -> bool:
    """Whether `plan` is a precise plan for this element in one of these wordings."""
    return any(plan in precise(wording, element, elements, action) for wording in wordings)


def askable(elements: Sequence[ScreenElement]) -> list[int]:
    """Indices of the elements whose kind and shortened name are unique on the screen."""
    seen: dict[tuple[str, str], int] = {}
    for element in elements:
        key = (element.kind, short_name(element.name))
        seen[key] = seen.get(key, 0) + 1
    return [i for i, element in enumerate(elements) if seen[element.kind, short_name(element.name)] == 1]
