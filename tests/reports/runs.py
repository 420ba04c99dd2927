"""Runs of a study whose numbers are known."""

from __future__ import annotations

from typing import Any

import numpy as np

from coepg_dagster.evaluation.statistics import ByEpisode
from coepg_dagster.provenance import Ref
from coepg_dagster.reports.findings import Finding, findings
from coepg_dagster.reports.study import BY_JUDGE, READ, STEP_SR, MadeFrom, Run, Study
from coepg_dagster.results import FULL, Row

SPLITS = ("test_a", "test_b")
EPISODES = tuple(f"e{i}" for i in range(40))


def measured(rate: float, seed: int = 0) -> ByEpisode:
    """Forty episodes that succeed at about this rate; the same seed and a higher rate: the same successes and more."""
    luck = np.random.default_rng(seed).random(len(EPISODES))
    return ByEpisode(EPISODES, (luck < rate).astype(float), np.ones(len(EPISODES)))


def measured_row(of: Run, k: int, split: str, metric: str, value: float, **more: Any) -> Row:
    place = {"experiment": of.experiment, "variant": of.variant, "seed": of.seed, "k": k, "split": split}
    return Row(**place, metric=metric, value=value, **{"protocol": "miniwob/point, macro"} | more)


def run(variant: str, seed: int, rates: dict[int, float], experiment: str = "box") -> Run:
    """A run with these success rates by iteration, on both splits."""
    name = experiment if variant == FULL else f"{experiment}_{variant}"
    made = Run(experiment, variant, seed, f"{name}/s{seed}")
    made.made_from = {Ref(asset, k): MadeFrom({}, {}) for asset in READ for k in range(4)}
    for k, rate in rates.items():
        for split in SPLITS:
            made.success[k, split, STEP_SR] = measured(rate, seed)
            value = 100 * float(made.success[k, split, STEP_SR].above.mean())
            made.rows.append(measured_row(made, k, split, "step_sr", value, low=0.0, high=100.0))
    return made


def study(*runs: Run) -> Study:
    return Study(runs, "box", SPLITS, 3)


def by_claim(of: Study) -> dict[str, Finding]:
    return {one.claim: one for one in findings(of)}


def judge(made: Run, rates: dict[int, float]) -> Run:
    """The same run with these rates by the judge."""
    for k, rate in rates.items():
        for split in SPLITS:
            made.success[k, split, BY_JUDGE] = measured(rate, made.seed)
            made.rows.append(measured_row(made, k, split, "step_sr_judge", 100 * rate))
    return made


def made_with(made: Run, k: int, **settings: Any) -> Run:
    """The same run whose evaluation of iteration k was made with these settings (`grpo_x` is `grpo.x`)."""
    used = {name.replace("_", ".", 1): frozenset({str(value)}) for name, value in settings.items()}
    made.made_from[Ref("evaluation", k)] = MadeFrom(used, {})
    return made


def played(rates: dict[str, float], episodes: int = 9, of: str = "of benchmark_steps x") -> dict[str, Any]:
    """A summary of live play with these rates by family."""
    families = {
        name: {"success": rate, "episodes": episodes, "solved": round(rate * episodes / 100)}
        for name, rate in rates.items()
    }
    mean = {"rate": float(np.mean(list(rates.values()))), "ci95": [0.0, 100.0]}
    about = {"episodes": of, "step limit": 16}
    return {"families": families, "success": mean, "macro": mean, "made_from": about}
