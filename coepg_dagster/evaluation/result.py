"""A scored set of predictions: counts, averages with intervals, and the value of every step; comparison of two; SOP.

The table of steps holds everything that the numbers are made of, so that a stored one gives the same `Result` again.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coepg_dagster.evaluation.case import (
    FILE_SAYS,
    SEVERAL,
    UNPARSED,
    Case,
    Protocol,
    Rows,
    ScoringError,
    Unread,
    Verdict,
    more_than_few,
)
from coepg_dagster.evaluation.statistics import Floats, Ints, Sampled, interval, sampled_averages

Interval = tuple[float, float]
Notes = Mapping[str, int | str | Rows]
LOST = "lost"
"""Key of the note on steps that could not be read: the denominator is short of the published one by these."""
UNJUDGED: Final = "rows that lack what the protocol judges"
_ROWS_AT_ONCE: Final = 5_000
"""Verdicts that are collected before they become a table, which takes a tenth of their memory."""


Classes = Mapping[str, tuple[float, int]]
"""Class → mean in per cent, steps."""


def mean_of(classes: Classes) -> float | None:
    """Unweighted mean of the means of the classes; None where there is none."""
    return float(np.mean([mean for mean, _ in classes.values()])) if classes else None


def _classes_json(classes: Classes) -> dict[str, Any]:
    return {name: {"mean": mean, "n": n} for name, (mean, n) in classes.items()}


@dataclass(frozen=True)
class Metric:
    """One metric in per cent, not rounded. None where nothing was counted."""

    micro: float | None  # over steps
    macro: float | None  # mean over tasks of the mean within each; ScreenSpot: mean of the group accuracies
    ci95: Interval | None  # of `macro`, bootstrap clustered by task; None below two tasks
    ci95_micro: Interval | None
    n: int  # steps in the denominator
    groups: Classes = field(default_factory=dict)
    by: Mapping[str, Classes] = field(default_factory=dict)  # `Protocol.groupings`, as far as the cases have them

    @property
    def class_mean(self) -> float | None:
        """Unweighted mean of the class means (SeeClick's "Operation F1")."""
        return mean_of(self.groups)

    def to_json(self) -> dict[str, Any]:
        body: dict[str, Any] = {
            "micro": self.micro,
            "macro": self.macro,
            "ci95": self.ci95,
            "ci95_micro": self.ci95_micro,
            "class_mean": self.class_mean,
            "n": self.n,
            "groups": _classes_json(self.groups),
        }
        if self.by:
            body["by"] = {
                name: {"mean": mean_of(classes), "groups": _classes_json(classes)} for name, classes in self.by.items()
            }
        return body


@dataclass(frozen=True)
class Result:
    """The scores of a set of predictions under `protocol`. `rows` = `scored` + everything in `skipped`."""

    protocol: str
    rows: int
    scored: int
    skipped: Mapping[str, int]
    metrics: Mapping[str, Metric]
    steps: pa.Table  # STEP_COLUMNS and one column per metric (fractions; null: not counted)
    notes: Notes = field(default_factory=dict)  # what a reader of the numbers must know

    def to_json(self) -> str:
        body = {
            "protocol": self.protocol,
            "rows": self.rows,
            "scored": self.scored,
            "skipped": dict(self.skipped),
            "metrics": {name: metric.to_json() for name, metric in self.metrics.items()},
            "notes": {name: str(note) if isinstance(note, Rows) else note for name, note in self.notes.items()},
        }
        if listed := {name: note.names for name, note in self.notes.items() if isinstance(note, Rows)}:
            body["listed"] = listed
        return json.dumps(body, indent=2)


STEP_COLUMNS = pa.schema(
    [
        pa.field("step_id", pa.string(), nullable=False),
        pa.field("episode_id", pa.string()),  # null: the source names no task, the step is its own
        pa.field("step_index", pa.int32()),
        pa.field("group", pa.string(), nullable=False),  # class of the label, or ScreenSpot's group
        pa.field("skipped", pa.string()),  # why the step is in no denominator
    ]
)
_WEIGHT = "_weight"
"""Suffix of a metric's column of weights, which is there where a weight is not 1 (see `Verdict.weights`)."""


def result_of(
    protocol: Protocol,
    cases: Iterable[Case | Unread],
    *,
    notes: Notes | None = None,
    seed: int = 0,
    skip_unjudged: bool = False,
) -> Result:
    """Judge `cases` under `protocol` and average. Raises ScoringError where there are none, or a step comes twice.

    A case that the protocol cannot judge is an error too; with `skip_unjudged` it costs itself, unless no case of its action
    can be judged and these are more than two and 1 %.

    Cases are taken one after the other and not kept, unless the protocol must see all (`Protocol.finish`). `notes` are
    read after the last case.
    """
    tables: list[pa.Table] = []
    unread: dict[str, Unread] = {}
    columns = _Columns(protocol)
    for row, verdict in _judged(protocol, cases, skip_unjudged):
        if verdict is None:
            unread.setdefault(row.reason, row)
            columns.add_unread(row)
        else:
            columns.add(row, verdict)
        if columns.rows == _ROWS_AT_ONCE:
            tables.append(columns.table())
            columns = _Columns(protocol)
    if columns.rows:
        tables.append(columns.table())
    if not tables:
        raise ScoringError(f"{protocol.name}: there is no prediction to score")
    steps = _joined(protocol, tables)
    if steps["skipped"].null_count == 0 and unread:
        first = next(iter(unread.values()))
        raise ScoringError(f"{first.where}: {first.detail}; none of {steps.num_rows} rows can be scored")
    counts = pc.value_counts(steps["step_id"].combine_chunks())
    twice = counts.field("values").filter(pc.greater(counts.field("counts"), 1))
    if len(twice):
        others = f", and so do {len(twice) - 1:,} others" if len(twice) > 1 else ""
        raise ScoringError(f"step {twice[0].as_py()!r} comes more than once{others}; keep one row per step")
    notes = dict(notes or {})
    for reason, row in unread.items():
        notes[f"{reason}, the first"] = f"{row.where}: {row.detail}"
    if protocol.items is not None and steps.num_rows != protocol.items:
        notes["items"] = f"{steps.num_rows:,} rows; the published board has {protocol.items:,} items"
    return summarise(protocol, steps, notes=notes, seed=seed)


def _judged(
    protocol: Protocol, cases: Iterable[Case | Unread], skip_unjudged: bool
) -> Iterator[tuple[Any, Verdict | None]]:
    """Each case with its verdict, as it comes unless the protocol must see all; a row that cannot be read without one."""
    unjudged, first = Counter[str](), dict[str, Unread]()  # by action
    judged, rows = set[str](), 0

    def judge(row: Case | Unread) -> tuple[Any, Verdict | None]:
        nonlocal rows
        rows += 1
        if isinstance(row, Unread):
            return row, None
        try:
            if protocol.groups and (group := protocol.group_of(row)) not in protocol.groups:
                raise ScoringError(f"step {row.step_id}: group {group!r} is none of {', '.join(protocol.groups)}")
            verdict = protocol.judge(row)
        except ScoringError as error:
            if not skip_unjudged:
                raise
            where = f"step {row.step_id}"
            lost = Unread(where, UNJUDGED, str(error).removeprefix(f"{where}: "))
            unjudged[row.label.type] += 1
            first.setdefault(row.label.type, lost)
            return lost, None
        judged.add(row.label.type)
        return row, verdict

    if protocol.finish is None:
        yield from map(judge, cases)
    else:
        pairs = [judge(row) for row in cases]
        counted = [(row, verdict) for row, verdict in pairs if verdict is not None]
        verdicts = iter(protocol.finish([row for row, _ in counted], [verdict for _, verdict in counted]))
        for row, verdict in pairs:
            yield row, None if verdict is None else next(verdicts)
    for action, n in unjudged.items():
        if action not in judged and more_than_few(n, rows):
            lost = first[action]
            raise ScoringError(f"{lost.where}: {lost.detail}; none of {n} rows of the action {action!r} can be judged")


def _kept_facts(protocol: Protocol) -> list[str]:
    """The facts that the table of steps keeps: those that groupings are made of, and what the file itself says."""
    facts = {fact: None for grouping in protocol.groupings for fact in grouping.split(_CROSS)}
    return [fact for fact in (*facts, FILE_SAYS, EXCLUDED) if fact not in STEP_COLUMNS.names]


_CROSS: Final = " × "
EXCLUDED: Final = "excluded"
"""Fact: the name of the list of wrong labels that has the item."""


class _Columns:
    """The columns of a table of steps, row by row; no case is kept."""

    def __init__(self, protocol: Protocol) -> None:
        self.rows = 0
        self._metrics, self._facts, self._group_of = protocol.metrics, _kept_facts(protocol), protocol.group_of
        self._about: list[list[Any]] = [[] for _ in STEP_COLUMNS]
        self._classes: list[list[str | None]] = [[] for _ in self._facts]
        self._values: list[list[float | None]] = [[] for _ in self._metrics]
        self._weights: dict[int, tuple[float, ...]] = {}  # by row, where it has any

    def add(self, case: Case, verdict: Verdict) -> None:
        ids, episodes, positions, groups, reasons = self._about
        ids.append(case.step_id)
        episodes.append(case.episode_id)
        positions.append(case.step_index)
        groups.append(self._group_of(case))
        reasons.append(verdict.skipped or None)
        facts = case.facts
        for fact, column in zip(self._facts, self._classes, strict=True):
            column.append(facts.get(fact))
        for value, values in zip(verdict.values, self._values, strict=True):
            values.append(value)
        if verdict.weights is not None:
            self._weights[self.rows] = verdict.weights
        self.rows += 1

    def add_unread(self, row: Unread) -> None:
        for value, column in zip((row.where, None, None, "", row.reason), self._about, strict=True):
            column.append(value)
        for classes in self._classes:
            classes.append(None)
        for values in self._values:
            values.append(None)
        self.rows += 1

    def table(self) -> pa.Table:
        """With a column of weights for each metric where one is not 1."""
        columns = [pa.array(column, field.type) for column, field in zip(self._about, STEP_COLUMNS, strict=True)]
        table = pa.table(columns, schema=STEP_COLUMNS)
        for fact, classes in zip(self._facts, self._classes, strict=True):
            table = table.append_column(fact, pa.array(classes, pa.string()))
        for j, (name, values) in enumerate(zip(self._metrics, self._values, strict=True)):
            table = table.append_column(name, pa.array(values, pa.float64()))
            counted = [float(value is not None) for value in values] if self._weights else []
            weights = [self._weights[i][j] if i in self._weights else one for i, one in enumerate(counted)]
            if weights != counted:
                table = table.append_column(name + _WEIGHT, pa.array(weights, pa.float64()))
        return table


def _joined(protocol: Protocol, tables: Sequence[pa.Table]) -> pa.Table:
    """One table; without the facts that no row has."""
    steps = pa.concat_tables(tables, promote_options="default")
    for name in protocol.metrics:
        if name + _WEIGHT in steps.column_names:
            column = steps.schema.get_field_index(name + _WEIGHT)
            counted = pc.cast(pc.is_valid(steps[name]), pa.float64())
            steps = steps.set_column(column, name + _WEIGHT, pc.coalesce(steps[name + _WEIGHT], counted))
    unknown = [fact for fact in _kept_facts(protocol) if steps[fact].null_count == steps.num_rows]
    return steps.drop_columns(unknown)


def _coded(column: pa.ChunkedArray) -> tuple[Ints, pa.Array]:
    """The number of each row's text among the sorted texts, and these; a null is the empty text."""
    encoded = pc.coalesce(column, "").combine_chunks().dictionary_encode()
    order = pc.array_sort_indices(encoded.dictionary).to_numpy()
    ranks = np.empty(len(order), dtype=np.int64)
    ranks[order] = np.arange(len(order))
    return ranks[encoded.indices.to_numpy()], encoded.dictionary.take(pa.array(order))


def _classed(column: pa.ChunkedArray) -> tuple[Ints, list[str]]:
    codes, names = _coded(column)
    return codes, names.to_pylist()


@dataclass(frozen=True)
class _Arrays:
    """The columns of a table of steps from which averages are computed."""

    values: Floats
    weights: Floats
    clusters: Ints
    groups: Ints  # of each row, its place in `names`
    names: list[str]

    @classmethod
    def of(cls, protocol: Protocol, steps: pa.Table) -> _Arrays:
        values = np.stack([steps[m].to_numpy().astype(float) for m in protocol.metrics], axis=1)
        weights = (~np.isnan(values)).astype(float)
        for j, name in enumerate(protocol.metrics):
            if name + _WEIGHT in steps.column_names:
                weights[:, j] = steps[name + _WEIGHT].to_numpy()
        tasks = pc.binary_join_element_wise("task", steps["episode_id"], " ")
        own = pc.binary_join_element_wise("step", steps["step_id"], " ")
        groups, names = _classed(steps["group"])
        return cls(values, weights, _coded(pc.coalesce(tasks, own))[0], groups, names)

    def sampled(self, protocol: Protocol, seed: int) -> Sampled:
        if protocol.macro == "episode":
            return sampled_averages(self.values, self.weights, self.clusters, seed=seed)
        counted = np.bincount(self.groups, self.weights.any(axis=1), len(self.names)) > 0
        present = [name for name, any_row in zip(self.names, counted, strict=True) if any_row]
        names = protocol.groups or tuple(present)
        if unknown := sorted(set(present) - set(names)):
            raise ScoringError(f"{protocol.name}: group {unknown[0]!r} is none of {', '.join(names)}")
        # rows of no group have no weight, so that their place does not matter
        places = np.array([names.index(name) if name in names else 0 for name in self.names])
        return sampled_averages(
            self.values, self.weights, self.clusters, groups=places[self.groups], n_groups=max(1, len(names)), seed=seed
        )


def summarise(protocol: Protocol, steps: pa.Table, *, notes: Notes | None = None, seed: int = 0) -> Result:
    """The `Result` of a table of judged steps (as in `Result.steps`, also read from the store)."""
    arrays = _Arrays.of(protocol, steps)
    notes = dict(notes or {})
    if protocol.macro == "group":
        if absent := [group for group in protocol.groups if group not in arrays.names]:
            notes["groups without rows, counted as 0"] = ", ".join(absent)
    elif pc.any(pc.and_(pc.is_null(steps["episode_id"]), pc.is_null(steps["skipped"]))).as_py():
        notes["tasks"] = "the source names none: such a step is its own task in the macro average and the interval"
    sampled = arrays.sampled(protocol, seed)
    micro_ci, macro_ci = interval(sampled.micros), interval(sampled.macros)
    by = {
        grouping: _classed(pc.binary_join_element_wise(*(steps[fact] for fact in facts), _CROSS))
        for grouping in protocol.groupings
        if set(facts := grouping.split(_CROSS)) <= set(steps.column_names)
    }
    metrics = {
        name: Metric(
            micro=_percent(sampled.micro[j]),
            macro=_percent(sampled.macro[j]),
            ci95=_percent_pair(macro_ci[:, j]),
            ci95_micro=_percent_pair(micro_ci[:, j]),
            n=round(float(arrays.weights[:, j].sum())),
            groups=_by_class(arrays.values[:, j], arrays.weights[:, j], arrays.groups, arrays.names),
            by={
                grouping: _by_class(arrays.values[:, j], arrays.weights[:, j], codes, names)
                for grouping, (codes, names) in by.items()
            },
        )
        for j, name in enumerate(protocol.metrics)
    }
    reasons = Counter(
        {count["values"]: count["counts"] for count in pc.value_counts(steps["skipped"].drop_null()).to_pylist()}
    )
    return Result(
        protocol=protocol.name,
        rows=steps.num_rows,
        scored=steps.num_rows - sum(reasons.values()),
        skipped=dict(sorted(reasons.items())),
        metrics=metrics,
        steps=steps,
        notes=notes,
    )


def _percent(fraction: float) -> float | None:
    return None if math.isnan(fraction) else 100 * float(fraction)


def _percent_pair(pair: Floats) -> Interval | None:
    low, high = (_percent(float(end)) for end in pair)
    return None if low is None or high is None else (low, high)


def _by_class(values: Floats, weights: Floats, codes: Ints, names: Sequence[str]) -> Classes:
    hits = np.bincount(codes, np.nan_to_num(values), len(names))
    counts = np.bincount(codes, weights, len(names))
    sums: dict[str, list[float]] = {}
    for name, h, n in zip(names, hits, counts, strict=True):
        if n > 0 and name:  # a lost step (padding) has no class
            for part in name.split(SEVERAL):
                of = sums.setdefault(part, [0.0, 0.0])
                of[0] += float(h)
                of[1] += float(n)
    return {name: (100 * h / n, round(n)) for name, (h, n) in sorted(sums.items())}


@dataclass(frozen=True)
class Difference:
    """B minus A in one metric, in percentage points, over the same steps."""

    macro: float | None
    ci95: Interval | None  # of `macro`, paired bootstrap clustered by task
    micro: float | None
    ci95_micro: Interval | None
    macro_a: float | None  # the two values that `macro` is the difference of
    macro_b: float | None
    detectable_micro: float | None = None  # smallest true difference of `micro` that would show, see _detectable

    @property
    def differs(self) -> bool | None:
        """Whether the interval of the macro difference excludes 0; None where there is no interval."""
        return None if self.ci95 is None else not self.ci95[0] <= 0 <= self.ci95[1]


@dataclass(frozen=True)
class Comparison:
    protocol: str
    steps: int
    differences: Mapping[str, Difference]
    left_out: tuple[int, int] = (0, 0)  # rows of A and of B that could not be read

    def as_dict(self) -> dict[str, Any]:
        """What `coepg compare --json` prints of it."""
        differences = {
            name: {
                "a": d.macro_a,
                "b": d.macro_b,
                "macro": d.macro,
                "ci95": d.ci95,
                "micro": d.micro,
                "ci95_micro": d.ci95_micro,
                "detectable_micro": d.detectable_micro,
                "differs": d.differs,
            }
            for name, d in self.differences.items()
        }
        return {
            "protocol": self.protocol,
            "steps": self.steps,
            "differences": differences,
            "left_out": dict(zip("ab", self.left_out, strict=True)),
        }


def _detectable(differences: Floats, steps: int) -> float | None:
    """The smallest true difference, percentage points, that 4 of 5 comparisons of this kind would find at 5 % (two-sided).

    It is 2.80 (= 1.96 + 0.84) standard errors of the paired difference, which comes from its resamples, and not below
    6 steps: fewer that changed, even all in one direction, are not significant in the exact sign test.
    """
    if len(differences) < 2 or not steps:
        return None
    normal = NormalDist()
    factor = normal.inv_cdf(0.975) + normal.inv_cdf(0.8)
    return 100 * max(factor * float(np.nanstd(differences, ddof=1)), 6 / steps)


def compare_results(a: Result, b: Result, protocol: Protocol, *, seed: int = 0) -> Comparison:
    """B minus A, paired by step, with intervals from the same resampled tasks.

    Rows that could not be read are left out; where such a row is about a step, that step is missing. Raises ScoringError where
    the two were scored under different protocols or notes that change a metric's meaning, or do not cover the same steps.
    """
    if not a.protocol == b.protocol == protocol.name:
        raise ScoringError(
            f"results of different protocols cannot be compared: {a.protocol} and {b.protocol}; score both under one"
        )
    if a.notes.get("grounder") != b.notes.get("grounder"):
        raise ScoringError("one of the results counts an oracle grounder, the other a real one; give answers to both")
    steps_a, steps_b = _without_unread(a.steps, b.steps), _without_unread(b.steps, a.steps)
    ids = {step: i for i, step in enumerate(steps_b["step_id"].to_pylist())}
    mine = steps_a["step_id"].to_pylist()
    if missing := set(mine) ^ set(ids):
        raise ScoringError(
            f"the two results differ in {len(missing)} steps, for example {min(missing)!r}; compare predictions of the "
            "same steps"
        )
    left = _Arrays.of(protocol, steps_a)
    right = _Arrays.of(protocol, steps_b.take([ids[step] for step in mine]))
    # one sample of both: each resample draws the same tasks for A and B
    both = replace(
        left,
        values=np.concatenate([left.values, right.values], axis=1),
        weights=np.concatenate([left.weights, right.weights], axis=1),
    ).sampled(protocol, seed)
    macro, micro, macros, micros = (
        np.diff(averages.reshape(*averages.shape[:-1], 2, len(protocol.metrics)), axis=-2)[..., 0, :]
        for averages in (both.macro, both.micro, both.macros, both.micros)
    )
    macro_ci, micro_ci = interval(macros), interval(micros)
    macro_a, macro_b = both.macro.reshape(2, -1)
    return Comparison(
        protocol=protocol.name,
        steps=len(mine),
        differences={
            name: Difference(
                macro=_percent(macro[j]),
                ci95=_percent_pair(macro_ci[:, j]),
                micro=_percent(micro[j]),
                ci95_micro=_percent_pair(micro_ci[:, j]),
                macro_a=_percent(macro_a[j]),
                macro_b=_percent(macro_b[j]),
                detectable_micro=_detectable(micros[:, j], int((left.weights[:, j] > 0).sum())),
            )
            for j, name in enumerate(protocol.metrics)
        },
        left_out=(a.rows - steps_a.num_rows, b.rows - steps_b.num_rows),
    )


def _without_unread(steps: pa.Table, others: pa.Table) -> pa.Table:
    """`steps` without rows that could not be read: they are named after their file, so `others` have none of that name."""
    common = pc.is_in(steps["step_id"], others["step_id"].combine_chunks())
    return steps.filter(pc.or_(common, pc.is_null(steps["skipped"])))


def sop_protocol(base: str) -> Protocol:
    """The name and metrics of `sop` over results of protocol `base`; it judges trajectories, hence no single case."""

    def judge(case: Case) -> Verdict:
        raise ScoringError(f"step {case.step_id}: SOP judges trajectories; score under {base}, then call sop()")

    return Protocol(
        name=f"sop/{base}",
        metrics=("pg", "tsr", "score"),
        judge=judge,
        element="as the protocol that judges the steps",
        text="as the protocol that judges the steps",
        denominator="trajectories, each up to its first miss; a step without a row is one; history is the model's own",
        averages="macro over trajectories",
        source="UI-S1, arXiv 2509.11543",
    )


SUCCESS = ("step_sr", "step_acc")
"""The metric that says whether a step succeeded, by protocol."""


def sop(result: Result, *, lengths: Mapping[str, int] | None = None, seed: int = 0) -> Result:
    """Semi-online performance over trajectories (UI-S1): PG = mean(s/t), TSR = mean(s = t), score = their mean.

    s is the number of steps before the first miss, t the trajectory's length: its task's in `lengths`, else up to its last
    step. An answer that cannot be parsed is a miss, and so is a step without a row; steps that the protocol skips for their
    label are not part of a trajectory. Notes count all of these. The steps must have been predicted with the model's own
    history. Needs task and position of every step, and a protocol that decides each; raises ScoringError otherwise.
    """
    metric = next((name for name in SUCCESS if name in result.metrics), None)
    if metric is None:
        raise ScoringError(f"{result.protocol} judges no steps, so there is no semi-online performance")
    tasks: dict[str, dict[int, bool | None]] = defaultdict(dict)  # whether each step succeeded; None: not part of it
    columns = (result.steps[name].to_pylist() for name in ("step_id", "episode_id", "step_index", "skipped", metric))
    for step, episode, index, reason, value in zip(*columns, strict=True):
        if reason not in (None, UNPARSED) and (episode is None or index is None):
            continue
        if episode is None or index is None:
            raise ScoringError(f"step {step!r} has no task or no position in it, which SOP needs")
        if value is None and reason is None:
            raise ScoringError(f"{result.protocol} leaves step {step!r} undecided, so SOP needs another protocol")
        if index in tasks[episode]:
            raise ScoringError(f"task {episode!r} has several steps of index {index}; number its steps one by one")
        tasks[episode][index] = value == 1.0 if reason in (None, UNPARSED) else None
    first = 1 if min((min(steps) for steps in tasks.values()), default=0) == 1 else 0
    trajectories, gaps = dict[str, tuple[float, float, float]](), Rows()
    for episode, steps in tasks.items():
        length = (lengths or {}).get(episode, max(steps) + 1 - first)
        if min(steps) < first or max(steps) >= first + length:
            raise ScoringError(
                f"task {episode!r} has steps of index {min(steps)} to {max(steps)}, but {length} steps from index {first} on; "
                "mend `step_index` or `episode_steps`"
            )
        if len(steps) < length:
            gaps.add(episode)
        total = length - sum(right is None for right in steps.values())
        done = 0
        for place, index in enumerate(sorted(steps), start=first):
            if index != place or steps[index] is False:
                break
            done += steps[index] is True
        if total:
            progress, success = done / total, float(done == total)
            trajectories[episode] = progress, success, (progress + success) / 2
    if not trajectories:
        raise ScoringError(f"{result.protocol} judges no step of a task, so there is no semi-online performance")
    notes = dict(result.notes) | {"rows": "trajectories"}
    for reason, n in result.skipped.items():
        notes[f"steps {'missed' if reason == UNPARSED else 'not judged'}, {reason}"] = n
    if gaps.n:
        notes["trajectories that lack steps, which count as missed"] = gaps
    protocol = sop_protocol(result.protocol)
    rows = list(trajectories.values())
    table = pa.table(
        {
            "step_id": list(trajectories),
            "episode_id": list(trajectories),
            "step_index": [None] * len(rows),
            "group": ["trajectory"] * len(rows),
            "skipped": [None] * len(rows),
        },
        schema=STEP_COLUMNS,
    )
    for j, name in enumerate(protocol.metrics):
        table = table.append_column(name, pa.array([row[j] for row in rows], pa.float64()))
    return summarise(protocol, table, notes=notes, seed=seed)
