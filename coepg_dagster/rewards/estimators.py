"""Advantages other than TRL's (`scale_rewards`: z-score or mean only), and what is done to advantages afterwards.

The functions of an experiment's `advantage` run in order. The positional parameters of each name what it gets, for P prompts
with G rollouts: `rewards` (P, G), where groups without spread have equal ones; `advantages` (P, G) so far; `areas` (P,), the
target's share of the screen, 0 where there is none; `episodes` (P,), equal for prompts of one episode, and `indices` (P,), the
position of a prompt's step in it, for which training asks about the steps of an episode together. It returns advantages (P, G).
The first gets those of Eq. 10.

Where a rollout is a whole episode on live pages, a prompt is a step of a page, G episodes of it are compared, `rewards` are those
of the episodes, the same at each step, and `indices` (P, G) are -1 for those that had ended before it. `areas` are not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Interval

from coepg_dagster.plugins import find, plugin, settings_of
from coepg_dagster.rewards.answers import Floats
from coepg_dagster.rewards.cdrem import ADVANTAGE_EPSILON, SPREAD_FLOOR, ScaleRewards, advantages, flatten_spreadless

Share = Annotated[float, Interval(ge=0, le=1)]

OF_EPISODES: Final = frozenset({"episodes", "indices"})
GIVEN: Final = frozenset({"rewards", "advantages", "areas"}) | OF_EPISODES
Integers = npt.NDArray[np.int64]


@plugin("advantage", "MaxRL")
def maxrl(rewards: Floats) -> Floats:
    """(r - mean) / mean of the group; 0 where the mean is 0: rare successes weigh more than by the spread.

    Raises:
        ValueError: a mean below 0.

    >>> maxrl(np.array([[1, 0, 0, 0], [1, 1, 1, 0]])).round(3)
    array([[ 3.   , -1.   , -1.   , -1.   ],
           [ 0.333,  0.333,  0.333, -1.   ]])
    """
    mean = rewards.mean(axis=1, keepdims=True)
    if np.any(mean < 0):
        raise ValueError(
            "maxrl divides by the mean reward of a group, which is negative here: use rewards of 0 or more"
        )
    return np.where(mean > 0, (rewards - mean) / np.where(mean > 0, mean, 1.0), 0.0)


@plugin("advantage", "RLOO, arXiv 2402.14740; used by InfiGUI-R1 and InfiGUI-G1")
def rloo(rewards: Floats) -> Floats:
    """Leave one out: r_i minus the mean of the group's other rewards, = G / (G - 1) · (r_i - mean).

    >>> rloo(np.array([[1.0, 0, 0, 0]])).round(3)
    array([[ 1.   , -0.333, -0.333, -0.333]])
    """
    others = (rewards.sum(axis=1, keepdims=True) - rewards) / (rewards.shape[1] - 1)
    return np.where(_spread(rewards), rewards - others, 0.0)


@plugin("advantage", "GUI-Libra, arXiv 2602.22190")
def sngs(
    advantages: Floats,
    rewards: Floats,
    *,
    lambda_0: Share = 0.5,
    kappa: Annotated[float, Ge(0)] = 1.5,
    success: Annotated[float, Gt(0)] = 0.5,
) -> Floats:
    """Success-adaptive scaling of negatives: A < 0 is multiplied by clip(lambda_0 + kappa · p̂, 0, 1).

    p̂ is the share of the group's rewards that are at least `success` (GUI-Libra's are 0 or nearly 1; C-DREM's lie between).

    >>> sngs(np.array([[1.0, -1, -1, -1]]), np.array([[0.6, 0, 0, 0]]))
    array([[ 1.   , -0.875, -0.875, -0.875]])
    """
    rate = (rewards >= success).mean(axis=1, keepdims=True)
    return np.where(advantages < 0, advantages * np.clip(lambda_0 + kappa * rate, 0, 1), advantages)


@plugin("advantage", "GUI-G1, arXiv 2505.15810")
def gui_g1_difficulty(
    advantages: Floats,
    areas: npt.NDArray[np.float64],
    *,
    reference: Annotated[float, Gt(0)] = 0.01,
    gamma: Annotated[float, Ge(0)] = 0.5,
) -> Floats:
    """Difficulty by size: times clip((reference / area)^gamma, ½, 2), divided by the batch's mean; 1 without a target.

    Departure: GUI-G1 did not publish its mapping from the relative box size; this is this project's own.

    >>> gui_g1_difficulty(np.ones((2, 2)), np.array([0.01, 0.04]))
    array([[1.33333333, 1.33333333],
           [0.66666667, 0.66666667]])
    """
    powers = np.where(areas > 0, reference / np.maximum(areas, 1e-12), 1.0) ** gamma
    weights = np.clip(powers, 0.5, 2)
    scaled: Floats = advantages * (weights / weights.mean())[:, None]
    return scaled


@plugin("advantage", "DAPO, arXiv 2503.14476, without its sampling")
def drop_spreadless(advantages: Floats, rewards: Floats) -> Floats:
    """Groups without spread do not count: the others are multiplied by P / (number of groups with spread).

    The loss is then the mean over the groups that say something. For `kl_beta: 0`: a KL term counts those groups too.

    >>> drop_spreadless(np.array([[1.0, -1], [0, 0]]), np.array([[1.0, 0], [1, 1]]))
    array([[ 2., -2.],
           [ 0.,  0.]])
    """
    spread = _spread(rewards)
    return advantages * len(rewards) / max(1, int(spread.sum()))


@plugin("advantage", "UI-S1, arXiv 2509.11543")
def ui_s1_levels(
    rewards: Floats,
    episodes: Integers,
    indices: Integers,
    *,
    gamma: Share = 0.5,
    omega: Annotated[float, Ge(0)] = 1.0,
    patches: Annotated[int, Ge(0)] = 1,
    success: Annotated[float, Gt(0)] = 0.5,
) -> Floats:
    """Episode and step level: A = A_E + omega · A_S, where the i-th answers to the steps of an episode are a trajectory.

    A trajectory goes on after an answer with a reward of at least `success`, and after `patches` others, which the expert's
    action replaces; then it ends, and later answers have advantage 0. R_t = Σ gamma^(k - t) r_k from t to the first answer that
    is no success, that one included. A_S is the z-score of R_t among the trajectories that reach step t, A_E that of the sum of
    a trajectory's rewards among those of its episode.

    Departures: the history in a prompt is the label's, not the model's own; so all answers to a step have one prompt. The sum
    of an episode is not discounted. Nothing is sampled again where advantages have little spread (their η).

    Whole episodes on live pages have the model's own history, and no label says what is a miss: all that were played count,
    `patches` and `success` do not, and r is 0 before the last step. So R_t = gamma^(steps that follow t) times the page's reward.

    Two steps, two rollouts, no patch: the second misses at once. R_0 = 1 + 0.5 · 1 and 0.2, R_1 = 1; sums 2 and 0.2.

    >>> ui_s1_levels(np.array([[1, 0.2], [1, 1]]), np.array([0, 0]), np.array([0, 1]), patches=0).round(2)
    array([[ 1.41, -1.41],
           [ 0.71,  0.  ]])

    The same on a live page: the first needs both steps, the second ends at once, and both succeed. R_0 = 0.5 and 1.

    >>> ui_s1_levels(np.ones((2, 2)), np.array([0, 0]), np.array([[0, 0], [1, -1]])).round(2)
    array([[-0.71,  0.71],
           [ 0.  ,  0.  ]])
    """
    made, live = np.zeros_like(rewards), indices.ndim == 2
    played = indices >= 0 if live else np.ones(rewards.shape, bool)
    indices = indices.max(axis=1) if live else indices
    for episode in np.unique(episodes):
        rows = np.flatnonzero(episodes == episode)
        rows = rows[np.argsort(indices[rows], kind="stable")]
        of_episode = rewards[rows]  # (T, G)
        missed, reached = of_episode < success, played[rows]
        if live:
            missed[:] = False
            goes_on = np.vstack([reached[1:], np.zeros((1, rewards.shape[1]), bool)])
            of_episode = np.where(reached & ~goes_on, of_episode, 0.0)
        else:
            reached = np.less_equal(np.cumsum(missed, axis=0) - missed, patches)
        returns = np.zeros_like(of_episode)
        for t in reversed(range(len(rows))):
            later = returns[t + 1] if t + 1 < len(rows) and indices[rows[t + 1]] == indices[rows[t]] + 1 else 0.0
            returns[t] = of_episode[t] + gamma * np.where(missed[t], 0.0, later)
        of_all = _z_scores((of_episode * reached).sum(axis=0))
        for t, row in enumerate(rows):
            here = reached[t]
            made[row, here] = of_all[here] + omega * _z_scores(returns[t, here])
    return made


def _z_scores(values: Floats) -> Floats:
    """(x - mean) / (sample std + 1e-4) as Eq. 10's; 0 for fewer than two numbers, or without spread."""
    if len(values) < 2 or values.std(ddof=1) < SPREAD_FLOOR:
        return np.zeros_like(values)
    scores: Floats = (values - values.mean()) / (values.std(ddof=1) + ADVANTAGE_EPSILON)
    return scores


def _spread(rewards: Floats) -> npt.NDArray[np.bool_]:
    """Whether a group's rewards differ, shape (P, 1)."""
    differ: npt.NDArray[np.bool_] = np.ptp(rewards, axis=1, keepdims=True) > 0
    return differ


def is_estimator(name: str) -> bool:
    """Whether a function computes advantages anew, so that what came before it would be lost."""
    return "advantages" not in find("advantage", name).inputs


def by_episodes(functions: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of those of an experiment's functions that compare the steps of an episode."""
    return [each["name"] for each in functions if not OF_EPISODES.isdisjoint(find("advantage", each["name"]).inputs)]


def estimated(
    functions: Sequence[Mapping[str, Any]],
    rewards: Floats,
    advantages: Floats,
    of_prompts: Mapping[str, npt.NDArray[Any]],
) -> Floats:
    """The advantages after an experiment's functions, each {"name": …, settings…}, shape (P, G).

    Args:
        of_prompts: `areas`, `episodes` and `indices`, or those that the functions ask for, shape (P,).
    Raises:
        ValueError: a function did not give finite numbers of that shape.
    """
    for chosen in functions:
        estimator = find("advantage", chosen["name"])
        given = {"rewards": rewards, "advantages": advantages, **of_prompts}
        made = np.asarray(
            estimator.function(*(given[name] for name in estimator.inputs), **settings_of(chosen)), dtype=np.float64
        )
        if made.shape != rewards.shape or not np.all(np.isfinite(made)):
            raise ValueError(f"the advantage {estimator.name!r} gave no finite numbers of the shape {rewards.shape}")
        advantages = made
    return advantages


def of_whole_episodes(
    functions: Sequence[Mapping[str, Any]], rewards: Floats, lengths: Integers, scale: ScaleRewards = "group"
) -> Floats:
    """The advantage of each step of G whole episodes on each of P pages, shape (P, T, G); T steps are those of the longest.

    Without functions it is that of the episode in its group, Eq. 10, at each of its steps. An episode that was lost is in no
    group; a group in which fewer than two are left has advantage 0. Where an experiment's functions weigh a batch's groups
    against each other, they see those of as many episodes together.

    Args:
        functions: as for `estimated`.
        rewards: of each episode, (P, G); NaN: it was lost.
        lengths: steps of each episode, (P, G).
        scale: as for Eq. 10.

    >>> of_whole_episodes([], np.array([[1, 0, 0, np.nan]]), np.array([[1, 2, 1, 2]])).round(2)
    array([[[ 1.15, -0.58, -0.58,  0.  ],
            [ 0.  , -0.58,  0.  ,  0.  ]]])
    """
    t = int(lengths.max(initial=0))
    made, kept = np.zeros((len(rewards), t, rewards.shape[1])), ~np.isnan(rewards)
    counts = kept.sum(axis=1)
    for g in np.unique(counts[counts >= 2]).tolist():
        pages = np.flatnonzero(counts == g)
        columns = np.nonzero(kept[pages])[1].reshape(-1, g)
        left = rewards[pages[:, None], columns]
        flat = flatten_spreadless(left, g)[0].reshape(-1, g)
        played = np.arange(t)[None, :, None] < lengths[pages[:, None], columns][:, None]  # (pages, T, g)
        of_eq_10 = advantages(left, g, scale).reshape(-1, g)
        by_step = {
            "episodes": np.repeat(pages, t),
            "indices": np.where(played, np.arange(t)[None, :, None], -1).reshape(-1, g),
        }
        of_steps = estimated(functions, np.repeat(flat, t, axis=0), np.repeat(of_eq_10, t, axis=0), by_step)
        made[pages[:, None, None], np.arange(t)[None, :, None], columns[:, None]] = np.where(
            played, of_steps.reshape(played.shape), 0.0
        )
    return made
