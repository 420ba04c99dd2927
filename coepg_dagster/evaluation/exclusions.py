"""Items of public boards whose labels are known to be wrong: versioned lists with their source, and how they are made.

A list leaves items out of a score that is printed beside the whole one, never instead of it. A list that is shipped lies in
the folder `wrong_labels`, named after the family of protocols that it is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Final

from coepg_dagster.evaluation.case import Case, ScoringError
from coepg_dagster.evaluation.metrics import BoxTuple
from coepg_dagster.evaluation.rows import PredictionRow, read_json
from coepg_dagster.readers.boards import Label

QUESTION: Final = "question"
"""Fact: what is asked on which kind of device, for boards without ids (`question`)."""
ITEM_ID: Final = "item_id"
"""Fact: the id of a row in its log, where the step's id adds what tells its versions apart."""
SAME_BOX: Final = 2.0
"""Pixels by which copies of a label differ on each side, since some hold parts of the screen."""


def question(device: str, instruction: str) -> str:
    """How a list names an item of a board without ids, beside its box."""
    return f"{device.strip().lower()}: {' '.join(instruction.split())}"


@dataclass(frozen=True)
class Exclusions:
    """Items of a board whose labels are known to be wrong, and who says so."""

    name: str  # with its version
    source: str
    items: frozenset[str] = frozenset()  # ids
    boxes: Mapping[str, tuple[BoxTuple, ...]] = field(default_factory=dict)  # by question

    def covers(self, case: Case) -> bool:
        """Whether the list has the item of a case: its whole id, or in a log whose ids have several versions the log's id."""
        if case.step_id in self.items or case.facts.get(ITEM_ID) in self.items:
            return True
        listed = self.boxes.get(case.facts.get(QUESTION, ""), ())
        return any(same_box(one, other) for one in listed for other in case.boxes)


def same_box(one: BoxTuple, other: BoxTuple) -> bool:
    """Whether two boxes are one, but for the rounding of copies (SAME_BOX)."""
    return all(abs(a - b) <= SAME_BOX for a, b in zip(one, other, strict=True))


def read_exclusions(path: Path) -> Exclusions:
    """A JSON object of texts `name`, `version`, `source` and a list `items`. Raises ScoringError.

    An item is an id, or for a board without ids {"question": "desktop: close", "box": [x1, y1, x2, y2]}.
    """
    data = read_json(path)
    row = PredictionRow(str(path), data if isinstance(data, dict) else {})
    entries = row.get("items", list)
    name, version, source = (row.text(key) for key in ("name", "version", "source"))
    items, boxes = set[str](), dict[str, tuple[BoxTuple, ...]]()
    for i, entry in enumerate(entries, start=1):
        if isinstance(entry, dict):
            item = row.inner(f"item {i}", entry)
            x1, y1, x2, y2 = item.numbers("field 'box'", item.get("box", list), 4)
            asked = item.text("question")
            boxes[asked] = (*boxes.get(asked, ()), (x1, y1, x2, y2))
        elif isinstance(entry, str):
            items.add(entry)
        else:
            raise row.fail(f"item {i} must be an id, or an object with `question` and `box`")
    if not source or not version or not entries:
        raise row.fail("a list of exclusions needs its version, its source, and 'items' (ids, or questions with boxes)")
    return Exclusions(f"{name} {version}", source, frozenset(items), boxes)


def shipped(protocol: str) -> Exclusions | None:
    """The list of known wrong labels that this package has for the protocol's board; None where it has none."""
    file = resources.files(__package__) / "wrong_labels" / f"{protocol.split('/')[0]}.json"
    with resources.as_file(file) as path:
        return read_exclusions(path) if path.is_file() else None


def changed(old: Iterable[Label], new: Iterable[Label]) -> list[dict[str, Any]]:
    """The items of one version of a board whose target the next version moved or dropped, as entries of a list.

    Such an item is one of `old` on whose kind of device (first part of the group) no item of `new` has its box. Where only the
    instruction changed, the target stayed.
    """
    targets: dict[str, list[BoxTuple]] = {}
    for label in new:
        targets.setdefault(_device(label), []).extend(label.boxes)
    return [
        {"question": question(_device(label), label.instruction), "box": list(box)}
        for label in old
        for box in label.boxes
        if not any(same_box(box, other) for other in targets.get(_device(label), ()))
    ]


def _device(label: Label) -> str:
    return label.group.partition("_")[0]


def list_of_changes(name: str, source: str, old: Iterable[Label], new: Iterable[Label]) -> dict[str, Any]:
    """A list of `changed` items, for `read_exclusions`. Raises ScoringError where there are none."""
    items = changed(old, new)
    if not items:
        raise ScoringError("every target of the first labels is in the second: there is nothing to exclude")
    return {"name": name, "version": "1", "source": source, "items": items}
