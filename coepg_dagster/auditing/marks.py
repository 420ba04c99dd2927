"""What auditors mark in a D_k: plans and whole steps that they veto or flag, with a reason.

The file MARKS beside the artifacts of a loop only grows: of the lines about the same plan or step the last one counts, and its
first n lines are a version. A D_k that leaves something out has in its record, under VETOES, the version that it read. A mark
counts from the iteration on whose D_k it was set, so that it never makes earlier models stale. A flag changes no data.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from filelock import FileLock, Timeout
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from coepg_dagster import jsonlines
from coepg_dagster.artifacts import append_line
from coepg_dagster.pools.candidates import plan_tokens
from coepg_dagster.provenance import Record
from coepg_dagster.refusal import Refusal
from coepg_dagster.steps import short_hash

MARKS: Final = "marks.jsonl"
VETOES: Final = "vetoes"
"""Figure of a D_k that read vetoes: their version, how many lines of MARKS it read, how many candidates they left out."""
MAX_FILE: Final = 1 << 28
"""Bytes that a file of marks may have."""

Kind = Literal["veto", "flag", "withdraw"]


class NotMarked(Refusal, ValueError):
    """A mark that cannot be set, or a file of marks that cannot be read."""


def _one_line(text: str) -> str:
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in text):
        raise ValueError("must be one line of text without control characters")
    return text


_Line = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1), AfterValidator(_one_line)]


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    mark: Kind
    by: Annotated[_Line, Field(max_length=100)]
    reason: Annotated[_Line, Field(max_length=1000)]


class Marking(_Said):
    """What an auditor says about the plan of a row or candidate, or about its whole step."""

    whole_step: bool = False


class Mark(_Said):
    """A line of MARKS."""

    at: AwareDatetime
    iteration: int = Field(ge=0)  # it counts for D_k from this k on
    step_id: str
    plan: str | None  # None: the whole step
    of: str  # the row or candidate on which it was set

    @property
    def key(self) -> tuple[str, str | None]:
        """What it is about: the step, and which plan of it (None: all)."""
        return self.step_id, None if self.plan is None else same_plan(self.plan)


def same_plan(plan: str) -> str:
    """A hash that plans share if they say the same, as in `pools.candidates.mark_duplicates`."""
    return short_hash(json.dumps(sorted(plan_tokens(plan))).encode())


@dataclass(frozen=True)
class Vetoes:
    """The vetoes that count for one D_k."""

    keys: frozenset[tuple[str, str | None]]
    lines: int  # of the file, when it was read

    @property
    def version(self) -> str | None:
        """Changes with what is left out, not with reasons and flags. None: no veto."""
        return short_hash(json.dumps(sorted(self.keys, key=str)).encode()) if self.keys else None

    def covers(self, step_id: str, plan: str) -> bool:
        """Whether a plan of a step is vetoed, by itself or with its step."""
        return (step_id, None) in self.keys or (step_id, same_plan(plan)) in self.keys

    def figures(self, left_out: int) -> dict[str, Any]:
        """What the record of a D_k that read them has; `left_out`: how many candidates are not in it for that reason."""
        return {VETOES: {"version": self.version, "lines": self.lines, "left_out": left_out}} if self.keys else {}


def read_marks(file: Path) -> list[Mark]:
    """The lines of a file of marks, oldest first; none where there is no file. Raises NotMarked, which names the line."""
    if not file.exists():
        return []
    if file.stat().st_size > MAX_FILE:
        raise NotMarked(f"{file} has more than {MAX_FILE:,} bytes: move it away")
    marks = []
    with file.open("rb") as stream:
        for number, line in jsonlines.lines(stream):
            try:
                marks.append(Mark.model_validate(jsonlines.parse(line)))
            except (jsonlines.NotJson, ValidationError) as error:
                raise NotMarked(f"{file}:{number + 1} is no mark ({_why(error)}): correct the line") from None
    return marks


def last_marks(marks: Sequence[Mark]) -> list[Mark]:
    """What is vetoed or flagged and was not withdrawn, in the order of the first mark about it."""
    return [mark for mark in _last(marks, None).values() if mark.mark != "withdraw"]


def vetoes(marks: Sequence[Mark], iteration: int) -> Vetoes:
    """The vetoes among `marks` that count for D_k of `iteration`."""
    last = _last(marks, iteration)
    return Vetoes(frozenset(key for key, mark in last.items() if mark.mark == "veto"), len(marks))


def vetoes_changed(record: Record, now: Vetoes) -> str | None:
    """Why a D_k is stale if the vetoes that count for it are not those that it read; else None."""
    read = (record.figures.get(VETOES) or {}).get("version")
    return None if read == now.version else f"its vetoes changed ({read or 'none'} → {now.version or 'none'})"


def marking(values: Any) -> Marking:
    """`values` as Marking. Raises NotMarked."""
    try:
        return Marking.model_validate(values)
    except ValidationError as error:
        raise NotMarked(f"the mark is refused: {_why(error)}") from None


def add_mark(file: Path, said: Marking, iteration: int, step_id: str, plan: str | None, of: str) -> Mark:
    """Appends a mark; `plan` is that of the row or candidate `of`. Raises NotMarked where it would change nothing.

    Every line is on the disk before this returns. Only one process writes at a time.
    """
    if plan is None and not said.whole_step:
        raise NotMarked(f"{of}: the answer is no plan, so only its whole step can be marked")
    mark = Mark(
        **said.model_dump(exclude={"whole_step"}),
        at=datetime.now(UTC).replace(microsecond=0),
        iteration=iteration,
        step_id=step_id,
        plan=None if said.whole_step else plan,
        of=of,
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(file.with_name(f".{MARKS}.lock"), timeout=30):
            before = _last(read_marks(file), iteration).get(mark.key)  # a damaged file takes no more lines
            if mark.mark == "withdraw" and (before is None or before.mark == "withdraw"):
                what = "the step" if mark.plan is None else "the plan"
                raise NotMarked(
                    f"{of}: {what} is neither vetoed nor flagged in D_{iteration}, so there is nothing to withdraw; numbers "
                    "of rows change when D_k is made again: take the `row` that `coepg marks` shows"
                )
            append_line(file, json.dumps(mark.model_dump(mode="json")).encode())
    except Timeout:
        raise NotMarked(f"{file} is being written by another process: try again") from None
    return mark


def shown_marks(marks: Sequence[Mark], dataset: Record, iteration: int | None = None) -> list[dict[str, Any]]:
    """The marks that concern one version of D_k, as plain data; `key` is that of Mark.

    `applied`: the veto was read, so that D_k leaves it out. `counts`: it is the last word, so the next D_k will read it. A veto
    that is applied and no longer counts was withdrawn since. `iteration`: only marks that count for that D_k; None: all.
    """
    lines = (dataset.figures.get(VETOES) or {}).get("lines", 0)
    read = {key: mark for key, mark in _last(marks[:lines], dataset.iteration).items() if mark.mark == "veto"}
    now = {key: mark for key, mark in _last(marks, iteration).items() if mark.mark != "withdraw"}
    return list(_shown(read, now))


def _shown(read: Mapping[Any, Mark], now: Mapping[Any, Mark]) -> Iterator[dict[str, Any]]:
    for key in dict.fromkeys([*read, *now]):
        was, current = read.get(key), now.get(key)
        same = was is not None and current is not None and current.mark == "veto"
        for mark, applied, counts in ((was, True, same), (None if same else current, False, True)):
            if mark is not None:
                yield mark.model_dump(mode="json") | {"key": list(key), "applied": applied, "counts": counts}


def _last(marks: Sequence[Mark], iteration: int | None) -> dict[tuple[str, str | None], Mark]:
    """The last mark about each plan or step, of those that count for D_k of `iteration` (None: of all)."""
    return {mark.key: mark for mark in marks if iteration is None or mark.iteration <= iteration}


def _why(error: ValueError) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        return ": ".join([*(str(part) for part in first["loc"]), first["msg"]])
    return str(error)
