"""UI-S1's advantages of episode and step, on numbers written out and against a slow reading of the definition."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.rewards.cdrem import advantages
from coepg_dagster.rewards.estimators import of_whole_episodes, ui_s1_levels


def test_three_steps_by_hand() -> None:
    """Rollout 0 is right throughout, 1 misses the second step and is patched, 2 misses twice and has ended."""
    rewards = np.array([[1.0, 1, 0.2], [1, 0, 0.2], [1, 1, 1]])
    zeros, order = np.zeros(3, int), np.arange(3)
    made = ui_s1_levels(rewards, zeros, order, patches=1)
    # returns: R_0 = 1 + ½ + ¼, 1 + ½ · 0, 0.2; R_1 = 1 + ½, 0, 0.2; R_2 = 1, 1. Sums: 3, 2, 0.2 + 0.2
    assert made[0] == pytest.approx(_z(3, 2, 0.4) + _z(1.75, 1, 0.2), abs=1e-3)
    assert made[1] == pytest.approx(_z(3, 2, 0.4) + _z(1.5, 0, 0.2), abs=1e-3)
    assert made[2] == pytest.approx([*_z(3, 2, 0.4)[:2], 0], abs=1e-3), "both right: no spread of the step; 2 has ended"
    alone = ui_s1_levels(rewards, zeros, order, omega=0.0)
    assert alone[0] == pytest.approx(_z(3, 2, 0.4), abs=1e-3)
    ended = ui_s1_levels(rewards, zeros, order, patches=0)
    assert ended[2].tolist() == [pytest.approx(_z(3, 1, 0.2)[0], abs=1e-3), 0, 0]


def _z(*values: float) -> np.ndarray:  # type: ignore[type-arg]
    return (np.array(values) - np.mean(values)) / np.std(values, ddof=1)


@given(st.data())
def test_it_is_the_definition_read_slowly(data: st.DataObject) -> None:
    """For each trajectory by itself, in any order of the prompts; steps of other episodes change nothing."""
    lengths = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    group = data.draw(st.integers(2, 4))
    where = [(episode, step) for episode, length in enumerate(lengths) for step in range(length)]
    where = data.draw(st.permutations(where))
    numbers = st.sampled_from([0.0, 0.2, 0.5, 0.75, 1.0])
    rewards = np.array([[data.draw(numbers) for _ in range(group)] for _ in where])
    gamma, patches = data.draw(st.sampled_from([0.0, 0.5, 1.0])), data.draw(st.integers(0, 2))
    made = ui_s1_levels(
        rewards,
        np.array([e for e, _ in where]),
        np.array([t for _, t in where]),
        gamma=gamma,
        patches=patches,
        omega=2.0,
    )
    of = {place: rewards[row] for row, place in enumerate(where)}
    for row, (episode, t) in enumerate(where):
        returns, sums = {}, []
        for i in range(group):
            path, misses = [], 0
            for k in range(lengths[episode]):
                path.append(of[episode, k][i])
                misses += path[-1] < 0.5
                if misses > patches:
                    break
            sums.append(sum(path))
            if t < len(path):
                stretch = path[t:]
                until = next((k for k, r in enumerate(stretch) if r < 0.5), len(stretch) - 1)
                returns[i] = sum(gamma**k * r for k, r in enumerate(stretch[: until + 1]))
        for i in range(group):
            expected = _score(sums[i], sums) + 2 * _score(returns[i], [*returns.values()]) if i in returns else 0
            assert made[row, i] == pytest.approx(expected, abs=1e-9)


def _score(value: float, among: list[float]) -> float:
    spread = float(np.std(among, ddof=1)) if len(among) > 1 else 0.0
    return 0.0 if spread < 1e-3 else (value - float(np.mean(among))) / (spread + 1e-4)


PAGES = st.integers(2, 5).flatmap(
    lambda group: st.lists(
        st.lists(st.tuples(st.sampled_from([0.0, 1.0, math.nan]), st.integers(1, 4)), min_size=group, max_size=group),
        min_size=1,
        max_size=3,
    )
)
"""Pages, each with G episodes: reward (NaN: lost) and number of steps."""


@given(PAGES, st.sampled_from(["group", "none"]))
def test_every_step_of_an_episode_has_its_advantage_in_its_group(
    pages: list[list[tuple[float, int]]], scale: str
) -> None:
    rewards, lengths = (np.array([[one[i] for one in page] for page in pages]) for i in range(2))
    lengths = lengths.astype(np.int64)
    made = of_whole_episodes([], rewards, lengths, scale)  # type: ignore[arg-type]
    assert made.shape == (len(pages), lengths.max(), rewards.shape[1])
    for page, (of, steps) in enumerate(zip(rewards, lengths, strict=True)):
        left = np.flatnonzero(~np.isnan(of))
        alone = advantages(of[left], len(left), scale) if len(left) > 1 else np.zeros(len(left))  # type: ignore[arg-type]
        assert alone.sum() == pytest.approx(0, abs=1e-9)
        assert made[page, 0].sum() == pytest.approx(0, abs=1e-9), "what was lost is in no mean"
        for g in range(len(of)):
            expected = alone[list(left).index(g)] if g in left else 0.0
            assert made[page, : steps[g], g] == pytest.approx(expected, abs=1e-12)
            assert not made[page, steps[g] :, g].any()


@given(PAGES)
def test_functions_of_an_experiment_see_episodes(pages: list[list[tuple[float, int]]]) -> None:
    """RLOO by hand for each group; the two levels of UI-S1 from the page's reward and the steps that follow."""
    rewards, lengths = (np.array([[one[i] for one in page] for page in pages]) for i in range(2))
    lengths = lengths.astype(np.int64)
    loo = of_whole_episodes([{"name": "rloo"}], rewards, lengths)
    levels = of_whole_episodes([{"name": "ui_s1_levels", "gamma": 0.5, "omega": 2.0}], rewards, lengths)
    for page, (of, steps) in enumerate(zip(rewards, lengths, strict=True)):
        left = np.flatnonzero(~np.isnan(of))
        for g in left if len(left) > 1 else ():
            others = [of[i] for i in left if i != g]
            assert loo[page, 0, g] == pytest.approx(of[g] - np.mean(others), abs=1e-12)
            for t in range(steps[g]):
                returns = {i: of[i] * 0.5 ** (steps[i] - 1 - t) for i in left if t < steps[i]}
                expected = _score(of[g], list(of[left])) + 2 * _score(returns[g], [*returns.values()])
                assert levels[page, t, g] == pytest.approx(expected, abs=1e-9)
