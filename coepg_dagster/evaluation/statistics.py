"""Averages of per-step values with bootstrap intervals clustered by task, and intervals over seeds and episodes.

Belongs here: arithmetic on arrays. What a value means is decided by the protocols.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
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
MANY_CLUSTERS: Final = 20_000
"""Above this, clusters that hold the same sums are drawn together, as one multinomial count: the same distribution."""


@dataclass(frozen=True)
class Sampled:
    """Per metric: both averages, as fractions (NaN where no row counts), and their values in every resample."""

    micro: Floats  # (metrics,)
    macro: Floats  # (metrics,)
    micros: Floats  # (resamples, metrics); no rows below two clusters
    macros: Floats  # (resamples, metrics)


@dataclass(frozen=True)
class ByEpisode:
    """A mean as sums by episode, Σ `above` / Σ `below`, of which `by_seed` takes the part of each episode."""

    episodes: tuple[str, ...]
    above: Floats  # (episodes,)
    below: Floats  # (episodes,)

    @property
    def value(self) -> float | None:
        """The mean; None where nothing was counted."""
        return float(self.above.sum() / self.below.sum()) if self.below.any() else None


@dataclass(frozen=True)
class BySeed:
    """A quantity measured once with each of S seeds, and what each of E episodes adds to it. In the quantity's unit."""

    values: Floats  # (S,)
    episodes: tuple[str, ...]
    parts: Floats  # (S, E); a seed's sum of squares estimates its sampling variance over episodes; NaN: not known


def by_seed(measured: Sequence[ByEpisode]) -> BySeed:
    """The mean of each seed, linearised: an episode's part is (above − mean · below) / Σ below, times √(n / (n − 1)).

    An episode that a seed lacks adds nothing to it; one that counts for no seed is none, as its number decides how wide the
    interval is. From a single episode the parts are not known. Raises ValueError if nothing was counted.
    """
    counts = [one.below != 0 for one in measured]
    counted = (name for one, of in zip(measured, counts, strict=True) for name in compress(one.episodes, of))
    episodes = tuple(dict.fromkeys(counted))
    place = {name: i for i, name in enumerate(episodes)}
    values, parts = np.zeros(len(measured)), np.zeros((len(measured), len(episodes)))
    for seed, (one, of) in enumerate(zip(measured, counts, strict=True)):
        if one.value is None:
            raise ValueError("a mean over seeds needs a value of every seed; of one, nothing was counted")
        n, values[seed] = int(np.count_nonzero(of)), one.value
        unbiased = np.sqrt(n / (n - 1)) if n > 1 else np.nan
        columns = [place[name] for name in compress(one.episodes, of)]
        parts[seed, columns] = unbiased * (one.above - one.value * one.below)[of] / one.below.sum()
    return BySeed(values, episodes, parts)


def weighted_sum(*terms: tuple[float, BySeed]) -> BySeed:
    """Σ weight · quantity, seed by seed and episode by episode: a difference is paired in both.

    Episodes of the same name are the same. Raises ValueError if the terms differ in their number of seeds.
    """
    episodes = tuple(dict.fromkeys(name for _, one in terms for name in one.episodes))
    place = {name: i for i, name in enumerate(episodes)}
    if len({len(one.values) for _, one in terms}) != 1:
        raise ValueError("the terms have different numbers of seeds")
    values = np.sum([weight * one.values for weight, one in terms], axis=0)
    parts = np.zeros((len(values), len(episodes)))
    for weight, one in terms:
        parts[:, [place[name] for name in one.episodes]] += weight * one.parts
    return BySeed(values, episodes, parts)


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with its 95 % interval (None: not known from so little), and what the interval is over."""

    value: float
    ci95: tuple[float, float] | None
    seeds: int
    over: str  # `seeds and episodes`, or `episodes` where there is one seed

    @property
    def signed(self) -> str:
        """A difference as text: `+1.3 [+0.1, +2.6]`."""
        ends = f" [{self.ci95[0]:+.1f}, {self.ci95[1]:+.1f}]" if self.ci95 else ""
        return f"{self.value:+.1f}{ends}"


def over_seeds(measured: BySeed, unit: str = "episodes") -> Estimate:
    """The mean over S seeds, and a 95 % interval for other seeds and other episodes. In the unit of `measured`.

    Seeds are crossed with E episodes, both drawn at random: a value is μ + seed + episode + both together. With A the
    variance of the mean as the seeds' means show it, B as the episodes' means show it, and C that of `both together`, which
    is in A and in B, the half width is √(t²(S−1) · A + t²(E−1) · max(0, B − C)), t(n) being Student's 97.5 % quantile.
    Two-way random effects: Searle, Casella & McCulloch, Variance Components, 1992, ch. 4; squared half widths of independent
    parts, each with its own t, cover at least the nominal level: Banerjee, Sankhyā 22, 1960. A t interval with
    Satterthwaite's degrees of freedom covers 87 % with two seeds and 93 % with three, a percentile bootstrap over three 76 %.

    From one seed the interval is over episodes only and says nothing about other seeds. `unit` names what the episodes are
    where they are something else (families). The interval is symmetric, and not cut at the ends of a scale.
    """
    from scipy.stats import t  # slow to import

    s, e = measured.parts.shape
    mean, over = float(measured.values.mean()), unit if s == 1 else f"seeds and {unit}"
    quantile = (1 + LEVEL) / 2
    of_episodes = float((measured.parts.mean(axis=0) ** 2).sum())  # B
    if e < 2 or np.isnan(of_episodes):
        return Estimate(mean, None, s, over)
    squared = t.ppf(quantile, e - 1) ** 2 * of_episodes
    if s > 1:
        together = float(measured.parts.var(axis=0, ddof=1).sum()) / s  # C
        of_seeds = float(measured.values.var(ddof=1)) / s  # A
        squared = t.ppf(quantile, s - 1) ** 2 * of_seeds
        squared += t.ppf(quantile, e - 1) ** 2 * max(0.0, of_episodes - together)
    half = float(np.sqrt(squared))
    return Estimate(mean, (mean - half, mean + half), s, over)


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    out = np.full(np.broadcast_shapes(numerator.shape, denominator.shape), np.nan)
    np.divide(numerator, denominator, out=out, where=denominator > 0)
    return out


def _sums(per_row: Floats, codes: Ints, n_codes: int) -> Floats:
    """(codes, metrics): the sum of the rows of each code."""
    return np.stack([np.bincount(codes, per_row[:, j], n_codes) for j in range(per_row.shape[1])], axis=1)


def _resampling_weights(n_clusters: int, resamples: int, rng: np.random.Generator) -> Floats:
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
    are drawn (with replacement, RESAMPLES times, from `seed`), because steps of one task are not independent (above
    MANY_CLUSTERS by kinds of tasks, so that time and memory do not grow with rows × resamples). Where
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
    of_kind = np.ones(n_clusters)
    if n_clusters > MANY_CLUSTERS:
        parts = (sums, counts) if groups is None else (cell_sums, cell_counts)
        first, of_kind = _kinds([part.reshape(n_clusters, -1) for part in parts])
        sums, counts, means, has_rows = sums[first], counts[first], means[first], has_rows[first]
        if groups is not None:
            cell_sums, cell_counts = cell_sums[first], cell_counts[first]

    def macro_of(drawn: Floats) -> Floats:
        if groups is None:
            return _ratio(drawn @ means, drawn @ has_rows)
        per_group = _ratio(np.tensordot(drawn, cell_sums, 1), np.tensordot(drawn, cell_counts, 1))
        means_of_groups: Floats = np.nan_to_num(per_group).mean(axis=1)
        return means_of_groups

    macro = macro_of(of_kind[None])[0]
    if n_clusters < 2:
        return Sampled(micro, macro, np.zeros((0, n_metrics)), np.zeros((0, n_metrics)))
    rng = np.random.default_rng(seed)
    micros, macros, left = [], [], RESAMPLES
    while left:
        batch = min(left, max(1, _CELLS_AT_ONCE // len(of_kind)))
        if n_clusters > MANY_CLUSTERS:
            drawn = rng.multinomial(n_clusters, of_kind / n_clusters, size=batch).astype(float)
        else:
            drawn = _resampling_weights(n_clusters, batch, rng)
        micros.append(_ratio(drawn @ sums, drawn @ counts))
        macros.append(macro_of(drawn))
        left -= batch
    return Sampled(micro, macro, np.concatenate(micros), np.concatenate(macros))


def _kinds(parts: Sequence[Floats]) -> tuple[Ints, Floats]:
    """Of rows that are equal in all columns of all parts: the first of each kind, and how many there are."""
    kinds = np.zeros(len(parts[0]), dtype=np.int64)
    for part in parts:
        for column in part.T:
            values, codes = np.unique(column, return_inverse=True)
            if len(values) > 1:
                kinds = np.unique(kinds * len(values) + codes, return_inverse=True)[1]
    _, first, counts = np.unique(kinds, return_index=True, return_counts=True)
    return first, counts.astype(float)


def interval(samples: Floats) -> Floats:
    """(2, metrics) percentile interval at LEVEL of (resamples, metrics); NaN where a metric has no resample."""
    known = ~np.isnan(samples).all(axis=0)
    out = np.full((2, samples.shape[1]), np.nan)
    if known.any():
        out[:, known] = np.nanquantile(samples[:, known], [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return out
