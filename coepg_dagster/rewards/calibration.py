"""Calibration: does a grounder's confidence predict its hits?

C-DREM weighs votes by c = exp(mean log p) of the coordinate tokens (Eq. 5, 6). If c does not predict the hit (Eq. 3, point in
box), the weights add noise. Confidence and hit of each grounder come from verdicts or from rollouts; failures are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

BINS: Final = 10
"""Bins of equal width over the confidence 0..1."""


@dataclass(frozen=True)
class Bin:
    """The answers whose confidence lies in [low, high); the last bin includes `high`. Shares are from 0 to 1."""

    low: float
    high: float
    n: int
    confidence: float | None  # mean; None: no answer lies here
    hit_rate: float | None
    ci95: tuple[float, float] | None  # Wilson's interval of the hit rate


@dataclass(frozen=True)
class Calibration:
    """How a grounder's confidence agrees with its hits, all from 0 to 1.

    `ece` is Σ_b (n_b / N) · |hit rate − mean confidence| over the bins, `brier` the mean of (confidence − hit)², `auroc` the
    chance that a hit has more confidence than a miss (0.5: the confidence says nothing; None: only hits or only misses).
    """

    n: int
    confidence: float
    hit_rate: float
    ece: float
    brier: float
    auroc: float | None
    bins: tuple[Bin, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "n": self.n,
            "confidence": self.confidence,
            "hit_rate": self.hit_rate,
            "ece": self.ece,
            "brier": self.brier,
            "auroc": self.auroc,
            "bins": [vars(each) for each in self.bins],
        }


def calibration(confidence: npt.ArrayLike, hits: npt.ArrayLike, bins: int = BINS) -> Calibration:
    """The calibration of N answers.

    Args:
        confidence: from 0 to 1, shape (N,).
        hits: 0 or 1, shape (N,).
        bins: number of bins of equal width.
    Raises:
        ValueError: no answers, different shapes, or a value out of range.

    >>> measured = calibration([0.95, 0.9, 0.6, 0.2], [1, 1, 0, 0])
    >>> measured.n, measured.hit_rate, round(measured.ece, 4), round(measured.brier, 6), measured.auroc
    (4, 0.5, 0.2375, 0.103125, 1.0)
    """
    c, h = np.asarray(confidence, dtype=np.float64), np.asarray(hits, dtype=np.float64)
    if not c.size or c.shape != h.shape:
        raise ValueError(f"calibration needs a confidence and a hit for each answer, got {c.size} and {h.size}")
    if not (np.all((c >= 0) & (c <= 1)) and np.all((h == 0) | (h == 1))):
        raise ValueError("a confidence is not within 0..1, or a hit is neither 0 nor 1")
    edges = np.linspace(0, 1, bins + 1)
    place = np.minimum(np.searchsorted(edges, c, side="right") - 1, bins - 1)
    filled, ece = [], 0.0
    for b in range(bins):
        inside = place == b
        n = int(inside.sum())
        if n:
            mean, rate = float(c[inside].mean()), float(h[inside].mean())
            ece += n / c.size * abs(rate - mean)
            filled.append(Bin(float(edges[b]), float(edges[b + 1]), n, mean, rate, wilson(int(h[inside].sum()), n)))
        else:
            filled.append(Bin(float(edges[b]), float(edges[b + 1]), 0, None, None, None))
    brier = float(((c - h) ** 2).mean())
    return Calibration(int(c.size), float(c.mean()), float(h.mean()), ece, brier, auroc(c, h), tuple(filled))


def auroc(confidence: npt.NDArray[np.float64], hits: npt.NDArray[np.float64]) -> float | None:
    """P(confidence of a hit > that of a miss), where a tie counts half; None if all answers are hits or all misses.

    Args:
        confidence: shape (N,).
        hits: 0 or 1, shape (N,).

    >>> auroc(np.array([0.9, 0.6, 0.6, 0.2]), np.array([1.0, 1.0, 0.0, 0.0]))
    0.875
    """
    from scipy.stats import rankdata  # slow to import

    positive = int(hits.sum())
    negative = hits.size - positive
    if not positive or not negative:
        return None
    ranks = rankdata(confidence)
    return float((ranks[hits == 1].sum() - positive * (positive + 1) / 2) / (positive * negative))


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval (low, high) of the share hits / n.

    >>> tuple(round(bound, 3) for bound in wilson(8, 10))
    (0.49, 0.943)
    """
    from scipy.stats import binomtest  # slow to import

    interval = binomtest(hits, n).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def of_verdicts(verdicts: pa.Table) -> dict[str, Calibration]:
    """Verifier → its calibration over a verdict table (VERDICT_SCHEMA); verifiers without any answer are left out."""
    answered = verdicts.filter(pc.is_null(verdicts["failure"]))
    return _by_name(answered["verifier"], answered["mean_logprob"], answered["hit"])


def of_rollouts(rollouts: pa.Table) -> dict[str, Calibration]:
    """Grounder → its calibration over a rollout table (ROLLOUT_SCHEMA). A plan that was sampled twice counts once."""
    seen: dict[tuple[str, str, str], tuple[float, bool]] = {}
    for row in rollouts.select(["step_id", "plan", "graders"]).to_pylist():
        for grader in row["graders"]:
            if grader["failure"] is None:
                seen[grader["grounder"], row["step_id"], row["plan"]] = grader["mean_logprob"], grader["hit"]
    names = pa.array([name for name, _, _ in seen], pa.string())
    logprobs = pa.array([logprob for logprob, _ in seen.values()], pa.float64())
    return _by_name(names, logprobs, pa.array([hit for _, hit in seen.values()], pa.bool_()))


def _by_name(names: Any, mean_logprobs: Any, hits: Any) -> dict[str, Calibration]:
    # min(): float32 log-probabilities of sure tokens can be a hair above 0
    confidence = np.exp(np.minimum(0.0, mean_logprobs.to_numpy(zero_copy_only=False)))
    hit, name_of = hits.to_numpy(zero_copy_only=False), np.array(names.to_pylist(), dtype=object)
    return {
        name: calibration(confidence[name_of == name], hit[name_of == name]) for name in pc.unique(names).to_pylist()
    }


def as_json(calibrations: Mapping[str, Calibration]) -> dict[str, Any]:
    return {name: measured.to_json() for name, measured in calibrations.items()}
