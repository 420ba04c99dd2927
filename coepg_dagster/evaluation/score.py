"""The entry points: tables of steps and predictions, or files of predictions, in; a `Result` out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from coepg_dagster.evaluation.android_control import canonical
from coepg_dagster.evaluation.case import FILE_SAYS, NO_PREDICTION, Action, Case, Notes, ScoringError, Unread, point_of
from coepg_dagster.evaluation.formats import each_prediction
from coepg_dagster.evaluation.mind2web import pad
from coepg_dagster.evaluation.protocols import PROTOCOLS, SOP_PREFIX, find_protocol, misfit_of
from coepg_dagster.evaluation.result import (
    LOST,
    SUCCESS,
    Comparison,
    Result,
    compare_results,
    result_of,
    sop,
    summarise,
)
from coepg_dagster.evaluation.rows import PredictionRow, read_json
from coepg_dagster.progress import Report

MOST_NAMED = 5
"""Rows that a note names."""
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
    `lost` counts further steps of the split, which could not be read, by reason; the result's notes report them.
    """
    find_protocol(protocol)
    labelled = _rows(steps, STEP_COLUMNS, OPTIONAL_STEP_COLUMNS, "steps")
    answers: dict[str, dict[str, Any]] = {}
    for row in _rows(predictions, PREDICTION_COLUMNS, (), "predictions"):
        if row["step_id"] in answers:
            raise ScoringError(f"predictions: step {row['step_id']!r} comes twice; keep one prediction per step")
        answers[row["step_id"]] = row
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
    if any(row.get("view_rule") not in (None, "page", "block 0") for row in labelled):
        notes["view"] = "oracle: steps show the part of the page that holds the target; scrolling there is not judged"
    if lost:
        why = ", ".join(f"{n} {reason}" for reason, n in sorted(lost.items()))
        notes[LOST] = f"{sum(lost.values())} steps could not be read ({why}); a published denominator holds them"
    return _score(protocol, cases, notes, seed)


def score_attempts(
    protocol: str,
    steps: pa.Table,
    attempts: Sequence[pa.Table],
    *,
    seed: int = 0,
    lost: Mapping[str, int] | None = None,
) -> Result:
    """Score several predictions per step by the best of them, metric by metric: pass@n for n tables of predictions.

    Each table is as in `score_steps`. With one table the result is that of `score_steps`. Raises ScoringError.
    """
    first, *others = (score_steps(protocol, steps, table, seed=seed, lost=lost) for table in attempts)
    if not others:
        return first
    best = first.steps
    for metric in first.metrics:
        values = pc.max_element_wise(*(result.steps[metric] for result in (first, *others)))
        best = best.set_column(best.schema.get_field_index(metric), metric, values)
    return summarise(find_protocol(protocol), best, notes=first.notes, seed=seed)


def score_file(
    path: Path,
    format: str,
    protocol: str,
    *,
    labels: Path | None = None,
    answers: Path | None = None,
    seed: int = 0,
    report: Report | None = None,
) -> Result:
    """Score a file of predictions in one of `formats.FORMATS` (`coepg score`).

    `labels` and `answers` are UGround's other files, see `formats.read_uground`. The notes count rows without a prediction
    and those that cannot be read. Raises ScoringError where no row has one.
    """
    find_protocol(protocol)
    base = protocol.removeprefix(SOP_PREFIX)
    cases, notes = each_prediction(path, format, base, labels=labels, answers=answers, report=report)
    result = _score(protocol, _counting_what_lacks(path, cases, notes), notes, seed)
    return replace(result, notes={**result.notes, **_other_judgement(result)})


def score_under_every(
    path: Path,
    format: str,
    *,
    labels: Path | None = None,
    answers: Path | None = None,
    seed: int = 0,
    report: Report | None = None,
) -> tuple[dict[str, Result], dict[str, str]]:
    """`score_file` under every protocol that fits the file, by name; and why the others do not (`coepg score --all`).

    A protocol fits if the rows hold what it judges: it raises nothing, and the labels' actions are those of its family.
    Raises ScoringError where none fits.
    """
    results: dict[str, Result] = {}
    refused: dict[str, str] = {}
    for name in PROTOCOLS:
        try:
            rows, _ = each_prediction(path, format, name, labels=labels, answers=answers)
            sample = [row for row in islice(rows, SAMPLE) if isinstance(row, Case)]
            if misfit := misfit_of(name, sample):
                raise ScoringError(misfit)
            results[name] = score_file(path, format, name, labels=labels, answers=answers, seed=seed, report=report)
        except ScoringError as error:
            refused[name] = str(error)
    if not results:
        raise ScoringError(f"{path}: no protocol fits; for {next(iter(PROTOCOLS))}, {next(iter(refused.values()))}")
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


@dataclass(frozen=True)
class Exclusions:
    """Items of a board whose labels are known to be wrong, and who says so."""

    name: str  # with its version
    source: str
    items: frozenset[str]


def read_exclusions(path: Path) -> Exclusions:
    """A JSON object of texts `name`, `version`, `source` and a list of ids, `items`. Raises ScoringError."""
    data = read_json(path)
    row = PredictionRow(str(path), data if isinstance(data, dict) else {})
    items = row.get("items", list)
    name, version, source = (row.text(key) for key in ("name", "version", "source"))
    if not source or not version or not items or not all(isinstance(item, str) for item in items):
        raise row.fail("a list of exclusions needs its version, its source, and ids (texts) in 'items'")
    return Exclusions(f"{name} {version}", source, frozenset(items))


def without(result: Result, exclusions: Exclusions, *, seed: int = 0) -> Result:
    """The result over the items that are not excluded; a note says how many are, and by whom.

    An item of a `mai_ui` log goes by its `id`, to which the step's id adds what tells its versions apart. Raises
    ScoringError where no step is on the list, or all are.
    """
    ids = result.steps["step_id"].to_pylist()
    kept = [not ({step, step.rpartition("-")[0]} & exclusions.items) for step in ids]
    if not any(kept) or all(kept):
        raise ScoringError(
            f"{exclusions.name} names {'all' if not any(kept) else 'none'} of the {len(ids)} items; is it for this board?"
        )
    notes = {**result.notes, "excluded": f"{kept.count(False)} items by {exclusions.name} ({exclusions.source})"}
    return summarise(find_protocol(result.protocol), result.steps.filter(pa.array(kept)), notes=notes, seed=seed)


def _counting_what_lacks(path: Path, cases: Iterable[Case | Unread], notes: Notes) -> Iterator[Case | Unread]:
    """`cases`; after the last, `notes` count those that lack a prediction. Raises ScoringError where all do."""
    lacking, n = Counter[str](), 0
    for case in cases:
        if isinstance(case, Case):
            n += 1
            if case.lacks:
                lacking[case.lacks] += 1
        yield case
    if n and lacking[NO_PREDICTION] == n:
        raise ScoringError(
            f"{path}: none of its {n} rows has a prediction; give the file with the model's answers, in the fields "
            "that docs/protocols.md names"
        )
    notes |= dict(sorted(lacking.items()))


def _other_judgement(result: Result) -> Notes:
    """A note on rows that the file itself judges otherwise, where it judges its rows."""
    if FILE_SAYS not in result.steps.column_names:
        return {}
    said, ours = result.steps[FILE_SAYS], result.steps[next(iter(result.metrics))]
    differ = pc.not_equal(pc.equal(said, "correct"), pc.equal(ours, 1.0))
    ids = result.steps["step_id"].filter(differ)
    if not len(ids):
        return {}
    first = ", ".join(ids.slice(0, MOST_NAMED).to_pylist())
    return {
        "rows that the file itself judges otherwise": f"{len(ids)} ({first}{', …' if len(ids) > MOST_NAMED else ''})"
    }


def _score(protocol: str, cases: Iterable[Case | Unread], notes: Notes, seed: int) -> Result:
    base = protocol.removeprefix(SOP_PREFIX)
    if base == "mind2web/uground":
        every = list(cases)
        padded = pad([case for case in every if isinstance(case, Case)])
        if len(padded) > len(every):
            notes["padded"] = len(padded) - len(every)
        cases = padded
    result = result_of(find_protocol(base), cases, notes=notes, seed=seed)
    return result if base == protocol else sop(result, seed=seed)


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
    xy = step.get("point")
    label = Action(step["action_type"], step["value"], (xy[0], xy[1]) if xy else None)
    if "android_control" in protocol:
        label, prediction = canonical(label), canonical(prediction) if prediction else None
    return Case(
        step_id=step["step_id"],
        episode_id=step["episode_id"],
        label=label,
        prediction=prediction,
        boxes=tuple((b[0], b[1], b[2], b[3]) for b in step["boxes"]),
        size=(step["width"], step["height"]),
        step_index=step["step_index"],
        episode_steps=step.get("episode_steps"),
        group=step["family"] if find_protocol(protocol).macro == "group" else "",
    )
