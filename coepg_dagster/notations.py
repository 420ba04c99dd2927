"""Finds the answer in a model's text, and the point in a grounder's answer. docs/engines.md has the table of notations.

Text is read in this order. Reasoning is cut: the answer follows the last `</think>`, and a `<think>` without its end has no
answer; the last `<answer>` counts. In the answer every group of two numbers (a point) or four (a box, read as its centre) is a
candidate of one of three ranks: named (a tag, a call, a key, x and y), in brackets, bare. The first candidate of the highest
rank is the model's point. A refused notation is skipped: no answer, which is counted, is better than a place that the model did
not mean.

All patterns take linear time: quantifiers are possessive or bounded, and a number does not begin within another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Final

from coepg_dagster.characters import SAME, WITHOUT_WIDTH


@dataclass(frozen=True)
class Location:
    """The point that an answer names, in the space in which its model answers, and the characters of its numbers.

    `spans` are the (start, end) of each number in the text: two of a point, four of a box. `corners` are (x1, y1, x2, y2); those
    of a point are in one place.
    """

    x: float
    y: float
    spans: tuple[tuple[int, int], ...]
    corners: tuple[float, float, float, float]


_REASONING: Final = re.compile(r"[<\[◁](/?)(?:think|thinking|thought|reasoning|seed:think)[>\]▷]", re.IGNORECASE)
_ANSWER: Final = re.compile(r"<(/?)answer>", re.IGNORECASE)

_DIGITS: Final = r"[-+]?(?:[0-9]++(?:\.[0-9]++)?+|\.[0-9]++)(?:[eE][-+]?[0-9]++)?+"
# not within a word, a date, a time or another number, and no per cent
_NUMBER: Final = rf"(?<![\w.+-])(?<![0-9][:/*])({_DIGITS})(?:\ ?px)?+(?![\w%])(?!\.[0-9])"
_BETWEEN_PAIRS: Final = r"(?:\s*+(?:[,;–—→-]|->|to\b|and\b|or\b)\s*+|\ *+)"
_JOIN: Final = (  # "1, 2"  "1), (2"  "1 2"
    rf"(?:\s*+[\"']?+\s*+(?:[\])]{{1,2}}+{_BETWEEN_PAIRS}[\[(]{{1,2}}+|,)\s*+[\"']?+|[\ \t]++)"
)
_NAME: Final = r"(?:point|point_2d|bbox|bbox_2d|box|start_box|start_point|coordinates?|position|location|centre|center)"
_GROUP: Final = re.compile(rf"{_NUMBER}(?:{_JOIN}{_NUMBER})++", re.IGNORECASE)
_EACH: Final = re.compile(_NUMBER, re.IGNORECASE)
_BEFORE: Final = re.compile(
    rf"""
    (?:
        (?P<refused>
            (?<!\w)["']?(?:box_2d|\w{{0,20}}size|resolution)["']?\ {{0,4}}[:=]
          | ["'](?:x|y|(?:top|upper|bottom|lower)[ _-]?(?:left|right))["']\ {{0,4}}:
        )
      | (?P<named>
            <\|?(?:{_NAME}|click|box_start|begin_of_box|det)\|?>
          | (?<!\w)(?:(?:left|right|middle|double|triple|long)?_?click|tap|press|long_?press|move_?to)\(
          | (?<!\w)["']?{_NAME}["']?\ {{0,4}}[:=]
        )
      | (?P<open>[>\[(])
    )
    [\s"'\[(]{{0,16}}+\Z
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""The text before a group of numbers, searched in the BEFORE characters before it."""
BEFORE: Final = 64
MOST_GROUPS: Final = 1000
"""Limit of the groups of numbers of an answer that are read; no answer needs more."""
FARTHEST: Final = 1e9
"""No screen has such a coordinate, in any space. Squares of larger ones, as rewards compute them, need not be finite."""
_TWO_PLACES: Final = re.compile("and|or", re.IGNORECASE)
_AFTER: Final = re.compile(r"[\s\"']{0,8}+[\])<]")


def _labelled(*names: str) -> str:
    """Numbers with these labels, in this order: x=1, y=2."""
    between = r"[\"']?+\s*+(?:[,;]|and\b)?+\s*+"
    return between.join(rf"(?<!\w)[\"']?{name}[\"']?\s*+[:=]\s*+[\"']?+{_NUMBER}" for name in names)


_LABELS: Final = (
    ("x1", "y1", "x2", "y2"),
    ("x_?min", "y_?min", "x_?max", "y_?max"),
    ("left", "top", "right", "bottom"),
    (r"x(?:[ _-]coord(?:inate)?)?", r"y(?:[ _-]coord(?:inate)?)?"),
)
_LABELLED: Final = re.compile(
    rf"(?<!<points )(?:{'|'.join(_labelled(*names) for names in _LABELS)})"
    r"(?![\"']?\s*+[,;]?+\s*+[\"']?(?:w|h|width|height)[\"']?\s*+[:=])",
    re.IGNORECASE,
)
_NAMED, _BRACKETED, _BARE = range(3)

# one character for each, so that the rest keeps its place
_PUNCTUATION: Final = SAME | {ord("、"): ",", ord("【"): "[", ord("】"): "]"}

Span = tuple[int, int]


def after_reasoning(text: str) -> int | None:
    """The position at which the answer begins: after the last end of reasoning. None if reasoning does not end."""
    start, open_ = 0, False
    for tag in _REASONING.finditer(text):
        open_ = not tag[1]
        if not open_:
            start = tag.end()
    return None if open_ else start


def locate(text: str) -> Location | None:
    """The point that a grounder's answer names, by the rules above; None if it names none. Never raises."""
    folded, places = text.translate(_PUNCTUATION), None
    if not WITHOUT_WIDTH.isdisjoint(folded):
        places = [i for i, character in enumerate(folded) if character not in WITHOUT_WIDTH]
        folded = "".join(folded[i] for i in places)
    chosen = next(iter(_of_best_rank(folded)), None)
    if chosen is None or places is None:
        return chosen
    return replace(chosen, spans=tuple((places[a], places[b - 1] + 1) for a, b in chosen.spans))


def locate_all(text: str) -> list[tuple[float, float]]:
    """Every point, or centre of a box, of the rank of `locate`'s, in the order of the answer. Never raises."""
    folded = "".join(c for c in text.translate(_PUNCTUATION) if c not in WITHOUT_WIDTH)
    return [(location.x, location.y) for location in _of_best_rank(folded)]


def _of_best_rank(text: str) -> list[Location]:
    """The places of the highest rank in an answer, in its order."""
    found: dict[int, list[Location]] = {}
    for rank, spans in _candidates(text):
        location = _place([float(text[a:b]) for a, b in spans], spans)
        if location is not None:
            found.setdefault(rank, []).append(location)
    return sorted(found[min(found)], key=lambda location: location.spans[0]) if found else []


def _candidates(text: str) -> Iterator[tuple[int, list[Span]]]:
    """(rank, spans of the numbers) of each point or box of an answer."""
    start, end = after_reasoning(text), len(text)
    if start is None:
        return
    tags = list(_ANSWER.finditer(text, start))
    opened = [i for i, tag in enumerate(tags) if not tag[1]]
    if opened:
        start = tags[opened[-1]].end()
        end = tags[opened[-1] + 1].start() if opened[-1] + 1 < len(tags) else end
    for match in islice(_LABELLED.finditer(text, start, end), MOST_GROUPS):
        yield _NAMED, [span for span in match.regs[1:] if span[0] >= 0]
    answer = text[start:end]
    first, last = start + len(answer) - len(answer.lstrip()), start + len(answer.rstrip())
    for match in islice(_GROUP.finditer(text, start, end), MOST_GROUPS):
        a, b = match.span()
        numbers = list(islice(_EACH.finditer(text, a, b), 5))
        if len(numbers) not in (2, 4):
            continue
        before = _BEFORE.search(text, max(start, a - BEFORE), a)
        if before and before["refused"]:
            continue
        closed = _AFTER.match(text, b, end)
        gaps = [text[left.end() : right.start()] for left, right in pairwise(numbers)]
        if any(map(_TWO_PLACES.search, gaps)):
            continue
        blanks = [gap.isspace() for gap in gaps]
        # numbers without commas count only if they stand alone, in a tag or in brackets
        alone = all(blanks) and (before or a == first) and (closed or b == last)
        if any(blanks) and not alone:
            continue
        rank = _BARE if before is None else _NAMED if before["named"] else _BRACKETED if closed else _BARE
        yield rank, [number.span(1) for number in numbers]


def _place(numbers: Sequence[float], spans: Sequence[Span]) -> Location | None:
    """A point, or the centre of a box; None if a number is beyond any screen or the corners are out of order."""
    if not all(abs(number) <= FARTHEST for number in numbers):
        return None
    if len(numbers) == 2:
        x, y = numbers
        return Location(x, y, tuple(spans), (x, y, x, y))
    x1, y1, x2, y2 = numbers
    if x1 > x2 or y1 > y2:
        return None
    return Location(x1 / 2 + x2 / 2, y1 / 2 + y2 / 2, tuple(spans), (x1, y1, x2, y2))
