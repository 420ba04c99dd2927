"""The labels of a grounding board by item, for predictions that carry only ids."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

from coepg_dagster.evaluation.case import SEVERAL, Action, Case, ScoringError, Unread
from coepg_dagster.evaluation.exclusions import QUESTION, question
from coepg_dagster.evaluation.grounding import REFUSAL, TARGET
from coepg_dagster.evaluation.rows import BAD_LABEL
from coepg_dagster.readers import boards
from coepg_dagster.readers.boards import Label
from coepg_dagster.readers.rows import ReaderError, Reject

NO_ITEM: Final = "predictions for no item of the board"
_ID_FIELDS: Final = ("id", "step_id", "item", "index")
_INSTRUCTION_FIELDS: Final = ("prompt_to_evaluate", "instruction")
_IMAGE_FIELDS: Final = ("img_filename", "image_path", "img_path", "image")


@dataclass
class BoardLabels:
    """The labelled items of a board, each as a case without a prediction."""

    board: str
    source: Path
    items: dict[str, Case] = field(default_factory=dict)
    instructions: dict[str, str] = field(default_factory=dict)
    unread: list[Unread] = field(default_factory=list)  # entries that cannot be read
    _by_question: dict[tuple[str, str], str] = field(default_factory=dict)  # (image, instruction) → item

    @classmethod
    def read(cls, board: str, source: Path) -> BoardLabels:
        """From the files that the board's owner publishes (`readers.boards`). Raises ScoringError."""
        found = cls(board, source)
        try:
            for label in boards.labels(_board(board), source):
                if isinstance(label, Reject):
                    found.unread.append(Unread(f"{label.file}: entry {label.row}", BAD_LABEL, label.detail))
                else:
                    found._add(label)
        except ReaderError as error:
            raise ScoringError(str(error)) from error
        if not found.items:
            why = f": {found.unread[0].where}: {found.unread[0].detail}" if found.unread else ""
            raise ScoringError(f"{source}: holds no label of {board}{why}")
        return found

    def _add(self, label: Label) -> None:
        item, n = label.item, 1
        while item in self.items:
            n += 1
            item = f"{label.item}-{n}"
        self.items[item] = case_of(self.board, replace(label, item=item))
        self.instructions[item] = label.instruction
        question = _image_name(label.image), label.instruction.strip()
        self._by_question[question] = "" if question in self._by_question else item  # two are no answer

    def item_of(self, row: Mapping[str, Any]) -> str | None:
        """The item that a row of predictions is about: by its id, else by its image and instruction; None: none."""
        own = next((row[name] for name in _ID_FIELDS if row.get(name).__class__ in (str, int)), None)
        for item in (str(own), f"{row.get('platform', '')}_{own}"):
            if own is not None and item in self.items:
                return item
        image = next((row[name] for name in _IMAGE_FIELDS if isinstance(row.get(name), str)), "")
        instruction = (instruction_of(row) or "").strip()
        return self._by_question.get((_image_name(image), instruction)) or None

    def require(self, answered: Collection[str], path: Path, unread: Mapping[str, Unread]) -> None:
        """Raises ScoringError where no item is answered by a file of predictions. `unread`: its first such row by reason."""
        if answered:
            return
        why = unread.get(BAD_LABEL)  # of a row about an item
        if why is None and NO_ITEM not in unread:
            why = next(iter(unread.values()), None)
        if why is not None:
            raise ScoringError(f"{why.where}: {why.detail}; no row about an item of {self.source} can be scored")
        raise ScoringError(
            f"{path}: no row is about one of the {len(self.items):,} items of {self.source}, e.g. "
            f"{next(iter(self.items))!r}: are these labels of another board, or of another version of it?"
        )


def readable_labels(board: str, source: Path) -> list[Label]:
    """The labels of a board. Raises ScoringError where one cannot be read."""
    found = []
    try:
        for label in boards.labels(_board(board), source):
            if isinstance(label, Reject):
                raise ScoringError(f"{label.file}: entry {label.row}: {label.detail}")
            found.append(label)
    except ReaderError as error:
        raise ScoringError(str(error)) from error
    return found


def instruction_of(row: Mapping[str, Any]) -> str | None:
    """The instruction that a row of predictions holds; None where it holds none."""
    return next((row[name] for name in _INSTRUCTION_FIELDS if isinstance(row.get(name), str)), None)


def _image_name(path: str) -> str:
    return PurePosixPath(path.replace("\\", "/")).name


def _board(family: str) -> boards.Board:
    board = boards.board_of(family)
    if board is None:
        raise ScoringError(f"there are label files of {', '.join(boards.BOARDS)} only, not of {family}")
    return board


def case_of(board: str, label: Label) -> Case:
    """The item of a label, without a prediction."""
    facts: dict[str, Any] = {
        name: value for name in ("ui_type", "application", "platform") if (value := getattr(label, name))
    }
    if label.abilities:
        facts["ability"] = SEVERAL.join(label.abilities)
    if board == "screenspot":
        facts[QUESTION] = question(label.group.partition("_")[0], label.instruction)
    found, group = label.boxes, label.group
    if board.startswith("osworld_g"):
        group = facts["target"] = TARGET if found else REFUSAL
    if label.polygon:
        facts["polygon"] = list(label.polygon)
        (x1, y1), (x2, y2) = label.polygon[:2]
        found = ((x1, y1, x1 + x2, y1 + y2),)  # as x, y, width, height, which is what `items` makes of it
    return Case(
        step_id=label.item,
        episode_id=label.image,
        label=Action("click"),
        prediction=None,
        boxes=found or ((0.0, 0.0, 0.0, 0.0),),
        size=label.size,
        group=group,
        facts=facts,
    )
