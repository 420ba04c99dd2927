"""Micro and macro averages of per-step values, and their bootstrap intervals clustered by task.

Belongs here: arithmetic on arrays. What a value means is decided by the protocols.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

RESAMPLES: Final = 2000
"""Bootstrap resamples behind every interval."""
LEVEL: Final = 0.95
_CELLS_AT_ONCE: Final = 200_000
"""Size of one batch of resampling weights: small enough to stay in the cache (1.6 MB), which halves the time."""


@dataclass(frozen=True)
class Sampled:
    """Per metric: both averages, as fractions (NaN where no row counts), and their values in every resample."""

    micro: Floats  # (metrics,)
    macro: Floats  # (metrics,)
    micros: Floats  # (resamples, metrics); no rows below two clusters
    macros: Floats  # (resamples, metrics)


@dataclass(frozen=True)
class ByEpisode:
    """A mean as sums by episode, Σ `above` / Σ `below`, so that whole episodes can be drawn again."""

    episodes: tuple[str, ...]
    above: Floats  # (episodes,)
    below: Floats  # (episodes,)

    @property
    def value(self) -> float | None:
        """The mean; None where nothing was counted."""
        return float(self.above.sum() / self.below.sum()) if self.below.any() else None


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    out = np.full(np.broadcast_shapes(numerator.shape, denominator.shape), np.nan)
    np.divide(numerator, denominator, out=out, where=denominator > 0)
    return out


def _sums(per_row: Floats, codes: Ints, n_codes: int) -> Floats:
    """(codes, metrics): the sum of the rows of each code."""
    return np.stack([np.bincount(codes, per_row[:, j], n_codes) for j in range(per_row.shape[1])], axis=1)


def resampling_weights(n_clusters: int, resamples: int, rng: np.random.Generator) -> Floats:
    """(resamples, clusters): how often each cluster is drawn when n_clusters are drawn with replacement."""
    drawn = rng.integers(0, n_clusters, (resamples, n_clusters)) + n_clusters * np.arange(resamples)[:, None]
    return np.bincount(drawn.ravel(), minlength=resamples * n_clusters).reshape(resamples, n_clusters).astype(float)


def sampled_averages(
    values: Floats,
    weights: Floats,
    clusters: Ints,
    *,
    groups: Ints | None = None,
    n_groups: int = 0,
    seed: int = 0,
) -> Sampled:
    """Micro average over rows and macro average over clusters of `values`, with their bootstrap resamples.

    `values` (rows, metrics) holds fractions, NaN where a row does not count, and `weights` what each row adds to the
    denominator (1, or 0 where it does not count). `clusters` (rows,) numbers the task of each row from 0; whole tasks
    are drawn (with replacement, RESAMPLES times, from `seed`), because steps of one task are not independent. Where
    `groups` is given, the macro average is instead the mean of the means of `n_groups` groups, a group without rows
    counting 0 (ScreenSpot). The same clusters and seed give the same draws, so two calls make a paired comparison.
    """
    if values.ndim != 2 or values.shape != weights.shape or len(values) != len(clusters):
        raise ValueError(f"values {values.shape}, weights {weights.shape}, clusters {clusters.shape}: shapes differ")
    n_clusters, n_metrics = int(clusters.max()) + 1 if len(clusters) else 0, values.shape[1]
    hits = np.nan_to_num(values)
    sums, counts = _sums(hits, clusters, n_clusters), _sums(weights, clusters, n_clusters)
    means = np.nan_to_num(_ratio(sums, counts))
    has_rows = (counts > 0).astype(float)
    micro = _ratio(sums.sum(0), counts.sum(0))

    cell_sums = cell_counts = np.zeros((0, 0, 0))
    if groups is not None:
        cells, shape = clusters * n_groups + groups, (n_clusters, n_groups, n_metrics)
        cell_sums = _sums(hits, cells, n_clusters * n_groups).reshape(shape)
        cell_counts = _sums(weights, cells, n_clusters * n_groups).reshape(shape)

    def macro_of(drawn: Floats) -> Floats:
        if groups is None:
            return _ratio(drawn @ means, drawn @ has_rows)
        per_group = _ratio(np.tensordot(drawn, cell_sums, 1), np.tensordot(drawn, cell_counts, 1))
        means_of_groups: Floats = np.nan_to_num(per_group).mean(axis=1)
        return means_of_groups

    macro = macro_of(np.ones((1, n_clusters)))[0]
    if n_clusters < 2:
        return Sampled(micro, macro, np.zeros((0, n_metrics)), np.zeros((0, n_metrics)))
    rng = np.random.default_rng(seed)
    micros, macros, left = [], [], RESAMPLES
    while left:
        batch = min(left, max(1, _CELLS_AT_ONCE // n_clusters))
        drawn = resampling_weights(n_clusters, batch, rng)
        micros.append(_ratio(drawn @ sums, drawn @ counts))
        macros.append(macro_of(drawn))
        left -= batch
    return Sampled(micro, macro, np.concatenate(micros), np.concatenate(macros))


def interval(samples: Floats) -> Floats:
    """(2, metrics) percentile interval at LEVEL of (resamples, metrics); NaN where a metric has no resample."""
    known = ~np.isnan(samples).all(axis=0)
    out = np.full((2, samples.shape[1]), np.nan)
    if known.any():
        out[:, known] = np.nanquantile(samples[:, known], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return out
