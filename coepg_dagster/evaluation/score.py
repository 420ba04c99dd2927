"""The entry points: tables of steps and predictions, or files of predictions, in; a `Result` out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from coepg_dagster.evaluation.android_control import canonical
from coepg_dagster.evaluation.case import (
    FILE_SAYS,
    MOST_LISTED,
    NO_PREDICTION,
    UNREADABLE,
    Action,
    Case,
    Notes,
    Rows,
    ScoringError,
    Unread,
    point_of,
)
from coepg_dagster.evaluation.exclusions import Exclusions
from coepg_dagster.evaluation.formats import each_prediction
from coepg_dagster.evaluation.labels import BoardLabels
from coepg_dagster.evaluation.mind2web import pad
from coepg_dagster.evaluation.protocols import PROTOCOLS, SOP_PREFIX, find_protocol, misfit_of
from coepg_dagster.evaluation.result import (
    EXCLUDED,
    LOST,
    SUCCESS,
    Comparison,
    Result,
    compare_results,
    result_of,
    sop,
    summarise,
)
from coepg_dagster.geometry import Space
from coepg_dagster.progress import Report
from coepg_dagster.readers.views import blocks, held

SAMPLE = 200
"""Rows from whose labels follows which protocols fit a file."""
STEP_COLUMNS = ("step_id", "episode_id", "step_index", "width", "height", "boxes", "action_type", "value", "family")
OPTIONAL_STEP_COLUMNS = ("episode_steps", "point", "view_rule")
PREDICTION_COLUMNS = ("step_id", "action_type", "value", "x", "y")


def score_steps(
    protocol: str, steps: pa.Table, predictions: pa.Table, *, seed: int = 0, lost: Mapping[str, int] | None = None
) -> Result:
    """Score one prediction per labelled step.

    `steps` needs STEP_COLUMNS of STEP_SCHEMA (screenshots are not read). `predictions` has PREDICTION_COLUMNS: x
    and y are pixels of the stored screenshot or null, action_type is null where the answer could not be parsed. Every
    step needs exactly one prediction; a missing, doubled or unknown one raises ScoringError with the step's name.
    `lost` counts further steps of the split, which could not be read, by reason; the result's notes report them. A prediction
    may have a `block` of the page: then only the targets count that lie in it entirely.
    """
    find_protocol(protocol)
    labelled = _rows(steps, STEP_COLUMNS, OPTIONAL_STEP_COLUMNS, "steps")
    answers: dict[str, dict[str, Any]] = {}
    for row in _rows(predictions, PREDICTION_COLUMNS, ("block",), "predictions"):
        if row["step_id"] in answers:
            raise ScoringError(f"predictions: step {row['step_id']!r} comes twice; keep one prediction per step")
        answers[row["step_id"]] = row
    stopped = [answer["block"] for answer in answers.values() if answer.get("block") is not None]
    cases = []
    for row in labelled:
        answer = answers.pop(row["step_id"], None)
        if answer is None:
            raise ScoringError(
                f"predictions: step {row['step_id']!r} has none; write a row with null action_type, x and y where the "
                "model gave no answer"
            )
        cases.append(_case(row, answer, protocol))
    if answers:
        raise ScoringError(f"predictions: step {next(iter(answers))!r} is not among the labelled steps")
    notes: Notes = {}
    if stopped:
        notes["view"] = (
            f"blocks: the agent scrolled from the top, and stopped at block {sum(stopped) / len(stopped):.2f} on average"
        )
    if any(row.get("view_rule") not in (None, "page", "block 0", "scroll") for row in labelled):
        notes["view"] = "oracle: steps show the part of the page that holds the target; scrolling there is not judged"
    return _score(protocol, cases, notes | _lost_notes(lost), seed)


def score_board(
    protocol: str,
    labels: BoardLabels,
    predictions: pa.Table,
    *,
    lost: Mapping[str, int] | None = None,
) -> Result:
    """Score a grounder's points on items of a board.

    `predictions` has step_id, the item, and x and y in pixels of the stored screenshot, or null where there is no point.
    `lost` as in `score_steps`. Raises ScoringError, also for an item that the labels lack: they changed since it was read.
    """
    cases = []
    for row in _rows(predictions, ("step_id", "x", "y"), (), "predictions"):
        item = labels.items.get(row["step_id"])
        if item is None:
            raise ScoringError(
                f"predictions: {row['step_id']!r} is no item of {labels.source}; were its files changed meanwhile?"
            )
        point = None if row["x"] is None else point_of(row["x"], row["y"])
        cases.append(replace(item, prediction=None if point is None else Action("click", "", point)))
    return _score(protocol, cases, _lost_notes(lost))


def _lost_notes(lost: Mapping[str, int] | None) -> Notes:
    if not lost:
        return {}
    why = ", ".join(f"{n} {reason}" for reason, n in sorted(lost.items()))
    return {LOST: f"{sum(lost.values())} steps could not be read ({why}); a published denominator holds them"}


def score_attempts(
    protocol: str,
    steps: pa.Table,
    attempts: Sequence[pa.Table],
    *,
    lost: Mapping[str, int] | None = None,
) -> Result:
    """Score several predictions per step by the best of them, metric by metric: pass@n for n tables of predictions.

    Each table is as in `score_steps`. With one table the result is that of `score_steps`. Raises ScoringError.
    """
    first, *others = (score_steps(protocol, steps, table, lost=lost) for table in attempts)
    if not others:
        return first
    best = first.steps
    for metric in first.metrics:
        values = pc.max_element_wise(*(result.steps[metric] for result in (first, *others)))
        best = best.set_column(best.schema.get_field_index(metric), metric, values)
    return summarise(find_protocol(protocol), best, notes=first.notes)


@dataclass(frozen=True)
class PredictionFile:
    """A file of predictions and how it is read, see `formats.each_prediction`."""

    path: Path
    format: str
    labels: Path | None = None
    answers: Path | None = None
    space: Space | None = None

    def cases(self, protocol: str, report: Report | None = None) -> tuple[Iterable[Case | Unread], Notes]:
        """Its rows for a protocol, and notes that are complete after the last."""
        return each_prediction(
            self.path,
            self.format,
            protocol.removeprefix(SOP_PREFIX),
            labels=self.labels,
            answers=self.answers,
            space=self.space,
            report=report,
        )


def score_predictions(
    file: PredictionFile,
    protocol: str,
    *,
    exclusions: Exclusions | None = None,
    seed: int = 0,
    report: Report | None = None,
) -> Result:
    """Score a file of predictions (`coepg score`).

    The notes count rows without a prediction and those that cannot be read. The result keeps which items are on the list of
    `exclusions`, for `without`. Raises ScoringError where no row has a prediction.
    """
    find_protocol(protocol)
    if exclusions is not None and (base := protocol.removeprefix(SOP_PREFIX)) != protocol:
        raise ScoringError(
            f"{protocol} judges whole trajectories: no single step can be left out; exclude under {base}"
        )
    cases, notes = file.cases(protocol, report)
    cases = _counting_what_lacks(file.path, cases, notes)
    if exclusions is not None:
        cases = _marked(cases, exclusions)
    cases = iter(cases)
    try:
        result = _score(protocol, cases, notes, seed, skip_unjudged=True)
    except ScoringError as error:
        deque(cases, maxlen=0)  # an archive shows at its end that it is damaged, which then is why
        if str(file.path) in str(error):
            raise
        raise ScoringError(f"{file.path}: {error}") from error
    return replace(result, notes={**result.notes, **_other_judgement(result)})


def score_under_every(
    path: Path,
    format: str,
    *,
    labels: Path | None = None,
    answers: Path | None = None,
    space: Space | None = None,
    report: Report | None = None,
) -> tuple[dict[str, Result], dict[str, str]]:
    """`score_predictions` under every protocol that fits a file, by name; and why the others do not (`coepg score --all`).

    A protocol fits if the rows hold what it judges: it raises nothing, and the labels' actions are those of its family.
    Raises ScoringError where none fits.
    """
    file = PredictionFile(path, format, labels, answers, space)
    results: dict[str, Result] = {}
    refused: dict[str, str] = {}
    for name in PROTOCOLS:
        try:
            rows, _ = file.cases(name)
            sample = [row for row in islice(rows, SAMPLE) if isinstance(row, Case)]
            if misfit := misfit_of(name, sample):
                raise ScoringError(misfit)
            results[name] = score_predictions(file, name, report=report)
        except ScoringError as error:
            refused[name] = str(error)
    if not results:
        first = next(iter(PROTOCOLS))
        raise ScoringError(f"{path}: no protocol fits; for {first}, {refused[first]}")
    return results, refused


def differing_steps(results: Mapping[str, Result]) -> dict[str, dict[str, float | None]]:
    """The steps on which results of the same rows differ, with each protocol's value.

    It is of the metric that says whether a step succeeded, or of the first.
    """
    values: dict[str, dict[str, float | None]] = {}
    for name, result in results.items():
        metric = next(metric for metric in (*SUCCESS, *result.metrics) if metric in result.metrics)
        for step, value in zip(result.steps["step_id"].to_pylist(), result.steps[metric].to_pylist(), strict=True):
            values.setdefault(step, {})[name] = value
    return {step: each for step, each in values.items() if len(set(each.values())) > 1}


def _marked(cases: Iterable[Case | Unread], exclusions: Exclusions) -> Iterator[Case | Unread]:
    """`cases`; those on the list say so."""
    for case in cases:
        if isinstance(case, Case) and exclusions.covers(case):
            yield replace(case, facts={**case.facts, EXCLUDED: exclusions.name})
        else:
            yield case


def without(result: Result, exclusions: Exclusions) -> Result:
    """The result, scored with these `exclusions`, over the items that are not on the list; a note says how many are.

    Raises ScoringError where no item is on the list, or all are.
    """
    listed = result.steps[EXCLUDED] if EXCLUDED in result.steps.column_names else None
    excluded = 0 if listed is None else len(listed) - listed.null_count
    if listed is None or excluded == len(listed):
        raise ScoringError(
            f"{exclusions.name} names {'all' if listed is not None else 'none'} of the {result.rows} items; is it for this "
            "board?"
        )
    notes = {**result.notes, "excluded": f"{excluded} items by {exclusions.name} ({exclusions.source})"}
    return summarise(find_protocol(result.protocol), result.steps.filter(pc.is_null(listed)), notes=notes)


def _counting_what_lacks(path: Path, cases: Iterable[Case | Unread], notes: Notes) -> Iterator[Case | Unread]:
    """`cases`; after the last, `notes` count those that lack a prediction. Raises ScoringError where all do."""
    n, none, unreadable, first = 0, 0, 0, ""
    for case in cases:
        if isinstance(case, Case):
            n += 1
            if case.lacks == NO_PREDICTION:
                none += 1
            elif case.lacks:
                unreadable += 1
                first = first or case.lacks
        yield case
    if n and none + unreadable == n:
        if unreadable:
            raise ScoringError(f"{first}; none of {n} rows has a prediction that can be read")
        raise ScoringError(
            f"{path}: none of its {n} rows has a prediction; give the file with the model's answers, in the fields "
            "that docs/protocols.md names"
        )
    if none:
        notes[NO_PREDICTION] = none
    if unreadable:
        notes |= {UNREADABLE: unreadable, f"{UNREADABLE}, the first": first}


def _other_judgement(result: Result) -> Notes:
    """A note on rows that the file itself judges otherwise, where it judges its rows."""
    if FILE_SAYS not in result.steps.column_names:
        return {}
    said, ours = result.steps[FILE_SAYS], result.steps[next(iter(result.metrics))]
    differ = pc.not_equal(pc.equal(said, "correct"), pc.equal(ours, 1.0))
    ids = result.steps["step_id"].filter(differ)
    if not len(ids):
        return {}
    names = ids.slice(0, MOST_LISTED).to_pylist()
    return {"rows that the file itself judges otherwise": Rows(len(ids), names)}


def _score(
    protocol: str, cases: Iterable[Case | Unread], notes: Notes, seed: int = 0, *, skip_unjudged: bool = False
) -> Result:
    base, lengths = protocol.removeprefix(SOP_PREFIX), dict[str, int]()
    if base != protocol:
        cases = _measured(cases, lengths)
    elif protocol == "mind2web/uground":
        cases = pad(cases, notes)
    result = result_of(find_protocol(base), cases, notes=notes, seed=seed, skip_unjudged=skip_unjudged)
    return result if base == protocol else sop(result, lengths=lengths, seed=seed)


def _measured(cases: Iterable[Case | Unread], lengths: dict[str, int]) -> Iterator[Case | Unread]:
    """`cases`; `lengths` get the number of steps of each task that names it."""
    for case in cases:
        if isinstance(case, Case) and case.episode_id is not None and case.episode_steps is not None:
            length = lengths.setdefault(case.episode_id, case.episode_steps)
            if length != case.episode_steps:
                raise ScoringError(
                    f"step {case.step_id}: task {case.episode_id!r} has {case.episode_steps} steps here and {length} in a row "
                    "before; mend `episode_steps`"
                )
        yield case


def compare(a: Result, b: Result, *, seed: int = 0) -> Comparison:
    """Whether B differs from A: paired by step, with intervals (`coepg compare`). Refuses different protocols."""
    return compare_results(a, b, find_protocol(a.protocol), seed=seed)


def _rows(table: pa.Table, needed: Iterable[str], optional: Iterable[str], what: str) -> list[dict[str, Any]]:
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        raise ScoringError(f"{what}: column {missing[0]!r} is missing (there are {', '.join(table.column_names)})")
    names = [*needed, *(name for name in optional if name in table.column_names)]
    rows: list[dict[str, Any]] = table.select(names).to_pylist()
    return rows


def _case(step: dict[str, Any], answer: dict[str, Any], protocol: str) -> Case:
    x, y = answer["x"], answer["y"]
    if (x is None) != (y is None):
        raise ScoringError(f"predictions: step {step['step_id']!r} has x = {x}, y = {y}; give both or neither")
    point = None if x is None else point_of(x, y)
    prediction = None
    if answer["action_type"] is not None:
        prediction = Action(answer["action_type"], answer["value"] or "", point)
    elif point is not None:
        prediction = Action("", "", point)
    boxes = [(b[0], b[1], b[2], b[3]) for b in step["boxes"]]
    if answer.get("block") is not None:
        boxes = held(boxes, blocks(step["width"], step["height"])[answer["block"]])
    xy = step.get("point")
    label = Action(step["action_type"], step["value"], (xy[0], xy[1]) if xy else None)
    if "android_control" in protocol:
        label, prediction = canonical(label), canonical(prediction) if prediction else None
    return Case(
        step_id=step["step_id"],
        episode_id=step["episode_id"],
        label=label,
        prediction=prediction,
        boxes=tuple(boxes),
        size=(step["width"], step["height"]),
        step_index=step["step_index"],
        episode_steps=step.get("episode_steps"),
        group=step["family"] if find_protocol(protocol).macro == "group" else "",
    )
