"""A scored set of predictions: counts, averages with intervals, and the value of every step; comparison of two; SOP.

The table of steps holds everything that the numbers are made of, so that a stored one gives the same `Result` again.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from coepg_dagster.evaluation.case import Case, Protocol, ScoringError, Verdict
from coepg_dagster.evaluation.statistics import Floats, Sampled, interval, sampled_averages

Interval = tuple[float, float]
Notes = Mapping[str, int | str]
LOST = "lost"
"""Key of the note on steps that could not be read: the denominator is short of the published one by these."""


@dataclass(frozen=True)
class Metric:
    """One metric in per cent, not rounded. None where nothing was counted."""

    micro: float | None  # over steps
    macro: float | None  # mean over tasks of the mean within each; ScreenSpot: mean of the group accuracies
    ci95: Interval | None  # of `macro`, bootstrap clustered by task; None below two tasks
    ci95_micro: Interval | None
    n: int  # steps in the denominator
    groups: Mapping[str, tuple[float, int]] = field(default_factory=dict)  # class → mean in per cent, steps

    @property
    def class_mean(self) -> float | None:
        """Unweighted mean of the class means (SeeClick's "Operation F1")."""
        return float(np.mean([mean for mean, _ in self.groups.values()])) if self.groups else None

    def to_json(self) -> dict[str, Any]:
        return {
            "micro": self.micro,
            "macro": self.macro,
            "ci95": self.ci95,
            "ci95_micro": self.ci95_micro,
            "class_mean": self.class_mean,
            "n": self.n,
            "groups": {name: {"mean": mean, "n": n} for name, (mean, n) in self.groups.items()},
        }


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
            "notes": dict(self.notes),
        }
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


def result_of(protocol: Protocol, cases: Sequence[Case], *, notes: Notes | None = None, seed: int = 0) -> Result:
    """Judge `cases` under `protocol` and average. Raises ScoringError where there are none, or a step comes twice."""
    if not cases:
        raise ScoringError(f"{protocol.name}: there is no prediction to score")
    twice = [step for step, n in Counter(case.step_id for case in cases).items() if n > 1]
    if twice:
        raise ScoringError(f"{protocol.name}: {len(twice)} steps come more than once, the first is {twice[0]!r}")
    verdicts = [protocol.judge(case) for case in cases]
    if protocol.finish:
        verdicts = protocol.finish(cases, verdicts)
    return summarise(protocol, _steps_table(protocol, cases, verdicts), notes=notes, seed=seed)


def _steps_table(protocol: Protocol, cases: Sequence[Case], verdicts: Sequence[Verdict]) -> pa.Table:
    table = pa.table(
        {
            "step_id": [case.step_id for case in cases],
            "episode_id": [case.episode_id for case in cases],
            "step_index": [case.step_index for case in cases],
            "group": [protocol.group_of(case) for case in cases],
            "skipped": [verdict.skipped or None for verdict in verdicts],
        },
        schema=STEP_COLUMNS,
    )
    for j, name in enumerate(protocol.metrics):
        values = pa.array([verdict.values[j] for verdict in verdicts], pa.float64())
        table = table.append_column(name, values)
        weights = [float(v.values[j] is not None) if v.weights is None else v.weights[j] for v in verdicts]
        if any(w != float(v.values[j] is not None) for w, v in zip(weights, verdicts, strict=True)):
            table = table.append_column(name + _WEIGHT, pa.array(weights, pa.float64()))
    return table


@dataclass(frozen=True)
class _Arrays:
    """The columns of a table of steps from which averages are computed."""

    values: Floats
    weights: Floats
    clusters: np.ndarray
    groups: list[str]

    @classmethod
    def of(cls, protocol: Protocol, steps: pa.Table) -> _Arrays:
        values = np.stack([steps[m].to_numpy().astype(float) for m in protocol.metrics], axis=1)
        weights = (~np.isnan(values)).astype(float)
        for j, name in enumerate(protocol.metrics):
            if name + _WEIGHT in steps.column_names:
                weights[:, j] = steps[name + _WEIGHT].to_numpy()
        named = zip(steps["episode_id"].to_pylist(), steps["step_id"].to_pylist(), strict=True)
        tasks = [f"task {episode}" if episode is not None else f"step {step}" for episode, step in named]
        return cls(values, weights, np.unique(tasks, return_inverse=True)[1], steps["group"].to_pylist())

    def sampled(self, protocol: Protocol, seed: int) -> Sampled:
        if protocol.macro == "episode":
            return sampled_averages(self.values, self.weights, self.clusters, seed=seed)
        names = protocol.groups or tuple(sorted(set(self.groups)))
        unknown = sorted(set(self.groups) - set(names))
        if unknown:
            raise ScoringError(f"{protocol.name}: group {unknown[0]!r} is none of {', '.join(names)}")
        codes = np.array([names.index(group) for group in self.groups])
        return sampled_averages(self.values, self.weights, self.clusters, groups=codes, n_groups=len(names), seed=seed)


def summarise(protocol: Protocol, steps: pa.Table, *, notes: Notes | None = None, seed: int = 0) -> Result:
    """The `Result` of a table of judged steps (as in `Result.steps`, also read from the store)."""
    arrays = _Arrays.of(protocol, steps)
    notes = dict(notes or {})
    if protocol.macro == "group":
        if absent := [group for group in protocol.groups if group not in set(arrays.groups)]:
            notes["groups without rows, counted as 0"] = ", ".join(absent)
    elif steps["episode_id"].null_count:
        notes["tasks"] = "the source names none: such a step is its own task in the macro average and the interval"
    sampled = arrays.sampled(protocol, seed)
    micro_ci, macro_ci = interval(sampled.micros), interval(sampled.macros)
    metrics = {
        name: Metric(
            micro=_percent(sampled.micro[j]),
            macro=_percent(sampled.macro[j]),
            ci95=_percent_pair(macro_ci[:, j]),
            ci95_micro=_percent_pair(micro_ci[:, j]),
            n=round(float(arrays.weights[:, j].sum())),
            groups=_by_group(arrays.values[:, j], arrays.weights[:, j], arrays.groups),
        )
        for j, name in enumerate(protocol.metrics)
    }
    reasons = Counter(reason for reason in steps["skipped"].to_pylist() if reason is not None)
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


def _by_group(values: Floats, weights: Floats, groups: Sequence[str]) -> dict[str, tuple[float, int]]:
    names, codes = np.unique(np.array(groups, dtype=str), return_inverse=True)
    hits, counts = np.bincount(codes, np.nan_to_num(values)), np.bincount(codes, weights)
    return {
        str(name): (100 * float(h) / float(n), round(float(n)))
        for name, h, n in zip(names, hits, counts, strict=True)
        if n > 0 and name  # a lost step (padding) has no class
    }


@dataclass(frozen=True)
class Difference:
    """B minus A in one metric, in percentage points, over the same steps."""

    macro: float | None
    ci95: Interval | None  # of `macro`, paired bootstrap clustered by task
    micro: float | None
    ci95_micro: Interval | None
    macro_a: float | None  # the two values that `macro` is the difference of
    macro_b: float | None

    @property
    def differs(self) -> bool | None:
        """Whether the interval of the macro difference excludes 0; None where there is no interval."""
        return None if self.ci95 is None else not self.ci95[0] <= 0 <= self.ci95[1]


@dataclass(frozen=True)
class Comparison:
    protocol: str
    steps: int
    differences: Mapping[str, Difference]

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
                "differs": d.differs,
            }
            for name, d in self.differences.items()
        }
        return {"protocol": self.protocol, "steps": self.steps, "differences": differences}


def compare_results(a: Result, b: Result, protocol: Protocol, *, seed: int = 0) -> Comparison:
    """B minus A, paired by step, with intervals from the same resampled tasks.

    Raises ScoringError where the two were scored under different protocols or notes that change a metric's meaning, or
    do not cover the same steps.
    """
    if not a.protocol == b.protocol == protocol.name:
        raise ScoringError(
            f"results of different protocols cannot be compared: {a.protocol} and {b.protocol}; score both under one"
        )
    if a.notes.get("grounder") != b.notes.get("grounder"):
        raise ScoringError("one of the results counts an oracle grounder, the other a real one; give answers to both")
    ids = {step: i for i, step in enumerate(b.steps["step_id"].to_pylist())}
    mine = a.steps["step_id"].to_pylist()
    if missing := set(mine) ^ set(ids):
        raise ScoringError(
            f"the two results differ in {len(missing)} steps, for example {min(missing)!r}; compare predictions of the "
            "same steps"
        )
    left = _Arrays.of(protocol, a.steps)
    right = _Arrays.of(protocol, b.steps.take([ids[step] for step in mine]))
    one, two = left.sampled(protocol, seed), right.sampled(protocol, seed)
    macro_ci, micro_ci = interval(two.macros - one.macros), interval(two.micros - one.micros)
    return Comparison(
        protocol=protocol.name,
        steps=len(mine),
        differences={
            name: Difference(
                macro=_percent(two.macro[j] - one.macro[j]),
                ci95=_percent_pair(macro_ci[:, j]),
                micro=_percent(two.micro[j] - one.micro[j]),
                ci95_micro=_percent_pair(micro_ci[:, j]),
                macro_a=_percent(one.macro[j]),
                macro_b=_percent(two.macro[j]),
            )
            for j, name in enumerate(protocol.metrics)
        },
    )


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
        denominator="trajectories, each up to its first miss; history is the model's own",
        averages="macro over trajectories",
        source="UI-S1, arXiv 2509.11543",
    )


SUCCESS = ("step_sr", "step_acc")
"""The metric that says whether a step succeeded, by protocol."""


def sop(result: Result, *, seed: int = 0) -> Result:
    """Semi-online performance over trajectories (UI-S1): PG = mean(s/t), TSR = mean(s = t), score = their mean.

    s is the number of steps before the first miss, t the trajectory's length. The steps must have been predicted with
    the model's own history. Needs task and position of every step, and a protocol that decides each; raises
    ScoringError otherwise. Skipped steps are not part of a trajectory.
    """
    metric = next((name for name in SUCCESS if name in result.metrics), None)
    if metric is None:
        raise ScoringError(f"{result.protocol} judges no steps, so there is no semi-online performance")
    trajectories: dict[str, list[tuple[int, float]]] = defaultdict(list)
    columns = (result.steps[name].to_pylist() for name in ("step_id", "episode_id", "step_index", "skipped", metric))
    for step, episode, index, reason, value in zip(*columns, strict=True):
        if reason is not None:
            continue
        if episode is None or index is None:
            raise ScoringError(f"step {step!r} has no task or no position in it, which SOP needs")
        if value is None:
            raise ScoringError(f"{result.protocol} leaves step {step!r} undecided, so SOP needs another protocol")
        trajectories[episode].append((index, value))
    rows = []
    for steps in trajectories.values():
        successes = [value == 1.0 for _, value in sorted(steps)]
        done = successes.index(False) if False in successes else len(successes)
        progress, success = done / len(successes), float(done == len(successes))
        rows.append((progress, success, (progress + success) / 2))
    protocol = sop_protocol(result.protocol)
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
    return summarise(protocol, table, notes={"rows": "trajectories"}, seed=seed)
