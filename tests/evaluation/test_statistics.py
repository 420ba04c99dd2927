"""Intervals over seeds: exact where the answer is known, and they cover as often as they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm, t

from coepg_dagster.evaluation.statistics import ByEpisode, BySeed, by_seed, over_seeds, weighted_sum

EPISODES = tuple(f"e{i}" for i in range(60))


def measured(values: np.ndarray) -> BySeed:
    """From (seeds, episodes)."""
    names = EPISODES[: values.shape[1]]
    return by_seed([ByEpisode(names, row, np.ones(len(row))) for row in values])


@pytest.mark.parametrize("seeds", [3, 5, 8])
@pytest.mark.parametrize(
    ("of_seed", "of_episode", "of_both"),
    [(0.0, 0.0, 1.0), (0.0, 1.0, 1.0), (0.1, 0.3, 1.0), (1.0, 1.0, 1.0)],
)
def test_intervals_over_seeds_cover_and_are_not_wide_for_nothing(
    seeds: int, of_seed: float, of_episode: float, of_both: float
) -> None:
    """Differences of two sides whose true mean is 0; standard deviations of seeds, episodes, and what both have together."""
    trials, n, rng = 200, len(EPISODES), np.random.default_rng(seeds)
    covered, widths = 0, []
    for _ in range(trials):
        shared = of_episode * rng.standard_normal(n)
        values = of_seed * rng.standard_normal((seeds, 1)) + shared + of_both * rng.standard_normal((seeds, n))
        low, high = over_seeds(measured(values)).ci95 or (np.nan, np.nan)
        covered += low <= 0 <= high
        widths.append(high - low)
    ideal = 2 * norm.ppf(0.975) * np.sqrt(of_seed**2 / seeds + of_episode**2 / n + of_both**2 / (seeds * n))
    assert covered / trials >= 0.93 - 2.6 * np.sqrt(0.93 * 0.07 / trials)
    assert np.mean(widths) <= {3: 2.2, 5: 1.5, 8: 1.3}[seeds] * ideal


def test_two_rates_of_binary_steps_are_covered_too() -> None:
    """As in a study: episodes of different difficulty succeed or fail, and seeds are better or worse at both sides."""
    rng, covered, trials = np.random.default_rng(1), 0, 200
    for _ in range(trials):
        hard, luck = rng.normal(0, 1.5, len(EPISODES)), rng.normal(0, 0.3, (2, 5, 1))
        logits = hard + luck
        one, other = (rng.random((5, len(EPISODES))) < 1 / (1 + np.exp(-side)) for side in logits)
        low, high = over_seeds(
            weighted_sum((1, measured(one.astype(float))), (-1, measured(other.astype(float))))
        ).ci95 or (1, -1)
        covered += low <= 0 <= high
    assert covered / trials >= 0.91


def test_if_only_seeds_differ_it_is_their_t_interval() -> None:
    means = np.array([1.0, 2.0, 4.0])
    estimate = over_seeds(measured(np.repeat(means[:, None], 10, axis=1)))
    half = t.ppf(0.975, 2) * means.std(ddof=1) / np.sqrt(3)
    assert estimate.ci95 == pytest.approx((means.mean() - half, means.mean() + half))
    assert (estimate.seeds, estimate.over) == (3, "seeds and episodes")


def test_one_seed_has_the_t_interval_of_its_episodes_and_says_so() -> None:
    values = np.array([[0.0, 1.0, 1.0, 0.0, 1.0]])
    estimate = over_seeds(measured(values))
    half = t.ppf(0.975, 4) * values.std(ddof=1) / np.sqrt(5)
    assert estimate.ci95 == pytest.approx((0.6 - half, 0.6 + half))
    assert (estimate.seeds, estimate.over) == (1, "episodes")
    assert over_seeds(measured(values), "families").over == "families"


def test_from_one_episode_nothing_is_known_of_others() -> None:
    assert over_seeds(measured(np.array([[1.0], [2.0]]))).ci95 is None


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=5), st.integers(2, 6))
def test_a_difference_to_itself_is_exactly_nothing(means: list[float], episodes: int) -> None:
    values = np.array(means)[:, None] + np.random.default_rng(0).random((len(means), episodes))
    one = measured(values)
    nothing = over_seeds(weighted_sum((1, one), (-1, one)))
    assert (nothing.value, nothing.ci95) == (0, (0, 0))


def test_a_sum_takes_episodes_of_the_same_name_as_the_same_and_others_apart() -> None:
    rng = np.random.default_rng(2)
    one, other = rng.random((3, 20)), rng.random((3, 20))
    paired = over_seeds(weighted_sum((1, measured(one)), (-1, measured(other))))
    direct = over_seeds(measured(one - other))
    assert paired.value == pytest.approx(direct.value) and paired.ci95 == pytest.approx(direct.ci95)
    names = tuple(f"x{i}" for i in range(20))
    apart = by_seed([ByEpisode(names, row, np.ones(20)) for row in other])
    both = weighted_sum((0.5, measured(one)), (0.5, apart))
    assert len(both.episodes) == 40 and both.values == pytest.approx((one.mean(1) + other.mean(1)) / 2)
    with pytest.raises(ValueError, match="different numbers of seeds"):
        weighted_sum((1, measured(one)), (1, measured(other[:2])))


def test_a_ratio_is_linearised() -> None:
    """Purity: verified over generated; an episode with more plans weighs more."""
    rng = np.random.default_rng(3)
    below = rng.integers(1, 9, 40).astype(float)
    one = ByEpisode(tuple(map(str, range(40))), rng.binomial(below.astype(int), 0.6).astype(float), below)
    part = by_seed([one]).parts[0]
    drawn = [rng.integers(0, 40, 40) for _ in range(2000)]
    resampled = np.std([one.above[rows].sum() / below[rows].sum() for rows in drawn])
    assert np.sqrt((part**2).sum()) == pytest.approx(resampled, rel=0.1)
    with pytest.raises(ValueError, match="nothing was counted"):
        by_seed([ByEpisode(("a",), np.zeros(1), np.zeros(1))])


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), min_size=1, max_size=8),
    st.integers(0, 50),
)
def test_episodes_that_do_not_count_change_nothing(seeds: int, sums: list[tuple[int, int]], more: int) -> None:
    names = tuple(f"e{i}" for i in range(len(sums)))
    above, below = np.array(sums, float).T
    counted = [ByEpisode(names, above + seed, below) for seed in range(seeds)]
    others, nothing = tuple(f"other {i}" for i in range(more)), np.zeros(more)
    longer = [ByEpisode(names + others, np.append(a.above, nothing), np.append(a.below, nothing)) for a in counted]
    assert over_seeds(by_seed(longer)) == over_seeds(by_seed(counted))
