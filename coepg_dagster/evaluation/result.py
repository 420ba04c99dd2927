"""A scored set of predictions: counts, averages with intervals, and the value of every step."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from coepg_dagster.evaluation.case import Case, Protocol, ScoringError, Verdict
from coepg_dagster.evaluation.statistics import averages

Interval = tuple[float, float]


@dataclass(frozen=True)
class Metric:
    """One metric in per cent, not rounded. None where nothing was counted, or the source names no tasks."""

    micro: float | None  # over steps
    macro: float | None  # mean over tasks of the mean within each; ScreenSpot: mean of the group accuracies
    ci95: Interval | None  # of `macro`, bootstrap clustered by task
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
    """What `protocol` says about a set of predictions. `rows` = `scored` + everything in `skipped`."""

    protocol: str
    rows: int
    scored: int
    skipped: Mapping[str, int]
    metrics: Mapping[str, Metric]
    steps: pa.Table  # step_id, episode_id, skipped, and one column per metric (fractions, null: not counted)
    notes: Mapping[str, int | str] = field(default_factory=dict)  # what a reader of the numbers must know

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


def judge_all(protocol: Protocol, cases: Sequence[Case]) -> list[Verdict]:
    verdicts = [protocol.judge(case) for case in cases]
    return protocol.finish(cases, verdicts) if protocol.finish else verdicts


def result_of(
    protocol: Protocol, cases: Sequence[Case], *, notes: Mapping[str, int | str] | None = None, seed: int = 0
) -> Result:
    """Judge `cases` under `protocol` and average. Raises ScoringError where there is nothing, or a step comes twice."""
    if not cases:
        raise ScoringError(f"{protocol.name}: there is no prediction to score")
    twice = [step for step, n in Counter(case.step_id for case in cases).items() if n > 1]
    if twice:
        raise ScoringError(f"{protocol.name}: step {twice[0]!r} and {len(twice) - 1} others come more than once")
    verdicts = judge_all(protocol, cases)
    values = np.array([[math.nan if v is None else v for v in verdict.values] for verdict in verdicts], dtype=float)
    weights = np.array(
        [verdict.weights or tuple(0.0 if v is None else 1.0 for v in verdict.values) for verdict in verdicts],
        dtype=float,
    )
    episodes = [case.episode_id if case.episode_id is not None else f"{case.step_id}" for case in cases]
    _, clusters = np.unique(np.array(episodes, dtype=object).astype(str), return_inverse=True)
    notes = dict(notes or {})
    groups = [protocol.group_of(case) for case in cases]
    group_codes = None
    if protocol.macro == "group":
        unknown = sorted(set(groups) - set(protocol.groups))
        if unknown:
            raise ScoringError(f"{protocol.name}: group {unknown[0]!r} is none of {', '.join(protocol.groups)}")
        group_codes = np.array([protocol.groups.index(group) for group in groups])
        if absent := [group for group in protocol.groups if group not in set(groups)]:
            notes["groups_without_rows_count_0"] = ", ".join(absent)
    elif any(case.episode_id is None for case in cases):
        notes["tasks"] = "not named by the source: every step is its own task, so macro equals micro"
    average = averages(values, weights, clusters, groups=group_codes, n_groups=len(protocol.groups), seed=seed)
    metrics = {}
    for j, name in enumerate(protocol.metrics):
        metrics[name] = Metric(
            micro=_percent(average.micro[j]),
            macro=_percent(average.macro[j]),
            ci95=_percent_pair(average.macro_interval[:, j]),
            ci95_micro=_percent_pair(average.micro_interval[:, j]),
            n=round(float(weights[:, j].sum())),
            groups=_by_group(values[:, j], weights[:, j], groups),
        )
    reasons = Counter(verdict.skipped for verdict in verdicts if verdict.skipped)
    columns: dict[str, Any] = {
        "step_id": [case.step_id for case in cases],
        "episode_id": [case.episode_id for case in cases],
        "skipped": [verdict.skipped or None for verdict in verdicts],
    }
    columns |= {name: pa.array(values[:, j], from_pandas=True) for j, name in enumerate(protocol.metrics)}
    schema = pa.schema(
        [pa.field(name, pa.string()) for name in ("step_id", "episode_id", "skipped")]
        + [pa.field(name, pa.float64()) for name in protocol.metrics]
    )
    return Result(
        protocol=protocol.name,
        rows=len(cases),
        scored=len(cases) - sum(reasons.values()),
        skipped=dict(sorted(reasons.items())),
        metrics=metrics,
        steps=pa.table(columns, schema=schema),
        notes=notes,
    )


def _percent(fraction: float) -> float | None:
    return None if math.isnan(fraction) else 100 * float(fraction)


def _percent_pair(pair: Sequence[float] | np.ndarray) -> Interval | None:
    low, high = (_percent(float(end)) for end in pair)
    return None if low is None or high is None else (low, high)


def _by_group(values: np.ndarray, weights: np.ndarray, groups: Sequence[str]) -> dict[str, tuple[float, int]]:
    out = {}
    names = np.array(groups, dtype=object)
    for name in sorted(set(groups)):
        here = names == name
        n = float(weights[here].sum())
        if n > 0:
            out[name] = (100 * float(np.nansum(values[here])) / n, round(n))
    return out
