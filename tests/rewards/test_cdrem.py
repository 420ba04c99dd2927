"""Eq. 3 to 10 of Co-EPG: properties over random inputs, and golden numbers."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl.trainer.utils import nanstd

from coepg_dagster.evaluation.metrics import set_f1
from coepg_dagster.rewards.cdrem import (
    SPREAD_FLOOR,
    NoVerdict,
    advantages,
    confidences,
    ensemble_weights,
    flatten_spreadless,
    gated,
    mean_log_probability,
    plan_reward,
    token_f1,
    type_reward,
    value_reward,
)

LOGPROB = st.floats(-8, 0)
PRIOR = st.floats(0, 4)


@st.composite
def ensembles(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """(σ, mean log p) of 1 to 6 grounders."""
    n = draw(st.integers(1, 6))
    size = {"min_size": n, "max_size": n}
    return np.array(draw(st.lists(PRIOR, **size))), np.array(draw(st.lists(LOGPROB, **size)))


def weights(priors: Any, logprobs: Any, mode: Any = "probability") -> np.ndarray:
    return ensemble_weights(priors, confidences(logprobs, mode), np.ones(np.shape(logprobs), dtype=bool))


# Eq. 6


def test_mean_log_probability_is_the_mean_over_the_coordinate_tokens() -> None:
    assert mean_log_probability([-0.1, -0.2, -0.6]) == pytest.approx(-0.3)


def test_mean_log_probability_needs_a_token() -> None:
    with pytest.raises(ValueError, match="at least one coordinate token"):
        mean_log_probability([])


# Eq. 5


@given(ensembles(), st.sampled_from(["probability", "log_probability", "constant"]))
def test_weights_sum_to_one(ensemble: tuple[np.ndarray, np.ndarray], mode: Any) -> None:
    w = weights(*ensemble, mode)
    assert w.sum() == pytest.approx(1)
    assert (w >= 0).all()


@given(LOGPROB, PRIOR, st.floats(0.01, 3))
def test_at_equal_confidence_the_weight_grows_with_the_prior(logprob: float, low: float, more: float) -> None:
    w = weights([low, low + more], [logprob, logprob])
    assert w[1] > w[0]


@given(st.floats(-8, -0.01), PRIOR, st.floats(0.01, 3))
def test_the_literal_equation_reverses_that(logprob: float, low: float, more: float) -> None:
    w = weights([low, low + more], [logprob, logprob], "log_probability")
    assert w[1] < w[0]


@given(
    st.floats(0.01, 4), st.floats(-8, -0.01), st.floats(0.001, 1), st.sampled_from(["probability", "log_probability"])
)
def test_at_equal_prior_the_weight_grows_with_the_confidence(prior: float, low: float, share: float, mode: Any) -> None:
    w = weights([prior, prior], [low, low * (1 - share)], mode)
    assert w[1] > w[0] or w[1] == pytest.approx(w[0], abs=1e-7)
    assert w[1] >= w[0]


@given(st.lists(LOGPROB, min_size=1, max_size=6), st.sampled_from(["probability", "log_probability", "constant"]))
def test_without_priors_the_weights_are_uniform(logprobs: list[float], mode: Any) -> None:
    assert weights(np.zeros(len(logprobs)), logprobs, mode) == pytest.approx(1 / len(logprobs))


@given(ensembles(), st.randoms(use_true_random=False))
def test_permuting_the_grounders_permutes_the_weights(ensemble: tuple[np.ndarray, np.ndarray], random: Any) -> None:
    priors, logprobs = ensemble
    order = list(range(len(priors)))
    random.shuffle(order)
    assert weights(priors[order], logprobs[order]) == pytest.approx(weights(priors, logprobs)[order])


@given(ensembles(), st.data())
def test_failed_grounders_are_left_out_and_the_rest_renormalised(
    ensemble: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    priors, logprobs = ensemble
    answered = np.array(data.draw(st.lists(st.booleans(), min_size=len(priors), max_size=len(priors)).filter(any)))
    w = ensemble_weights(priors, confidences(logprobs, "probability"), answered)
    assert (w[~answered] == 0).all()
    assert w[answered] == pytest.approx(weights(priors[answered], logprobs[answered]))


def test_all_failed_is_an_error_and_not_a_reward_of_zero() -> None:
    with pytest.raises(NoVerdict, match="never silently 0"):
        ensemble_weights([1, 2], [[0.5, 0.5], [0.5, 0.5]], [[True, False], [False, False]])


@pytest.mark.parametrize("broken", [[0.1], [float("nan")], [float("inf")]])
def test_a_confidence_that_is_no_log_probability_is_refused(broken: list[float]) -> None:
    with pytest.raises(ValueError, match="positive or not a number"):
        confidences(broken, "probability")


# mean log p of the 72B, the 32B and ϕ_k, with σ = (1, 1, 2); docs/paper_map.md
WEIGHT_TABLE = [
    ((-0.1, -0.1, -0.1), (0.344, 0.344, 0.311), (0.224, 0.224, 0.553)),
    ((-0.5, -0.5, -0.5), (0.384, 0.384, 0.233), (0.261, 0.261, 0.478)),
    ((-2, -2, -2), (0.468, 0.468, 0.063), (0.318, 0.318, 0.364)),
    ((-0.8, -0.8, -0.05), (0.249, 0.249, 0.502), (0.159, 0.159, 0.681)),
    ((-0.05, -0.05, -0.8), (0.452, 0.452, 0.096), (0.339, 0.339, 0.322)),
    ((-0.1, -0.1, -0.05), (0.333, 0.333, 0.333), (0.212, 0.212, 0.576)),
]


@pytest.mark.parametrize(("logprobs", "literal", "probability"), WEIGHT_TABLE)
def test_weight_table(logprobs: Any, literal: Any, probability: Any) -> None:
    assert weights([1, 1, 2], logprobs, "log_probability") == pytest.approx(literal, abs=6e-4)
    assert weights([1, 1, 2], logprobs, "probability") == pytest.approx(probability, abs=6e-4)


def test_rows_of_the_ablation() -> None:
    logprobs = [-0.8, -0.3, -0.05]
    assert weights([2], [-0.05]) == pytest.approx([1])  # w/o C-DREM: ϕ_k alone
    assert weights([0, 0, 0], logprobs) == pytest.approx(1 / 3)  # w/o Confidence & Prior
    assert weights([1, 1, 2], logprobs, "constant") == pytest.approx([0.212, 0.212, 0.576], abs=6e-4)  # w/o Confidence


def test_the_literal_form_favours_the_trained_grounder_only_where_it_is_twice_as_sure() -> None:
    assert weights([1, 2], [-0.2, -0.1], "log_probability") == pytest.approx([0.5, 0.5])
    assert weights([1, 2], [-0.2, -0.09], "log_probability")[1] > 0.5
    assert weights([1, 2], [-0.2, -0.11], "log_probability")[1] < 0.5


# Eq. 4


@given(ensembles(), st.data())
def test_plan_reward_lies_between_all_miss_and_all_hit(
    ensemble: tuple[np.ndarray, np.ndarray], data: st.DataObject
) -> None:
    w = weights(*ensemble)
    n = len(w)
    hits = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    assert plan_reward(w, np.zeros(n)) == 0
    assert plan_reward(w, np.ones(n)) == pytest.approx(1)
    assert plan_reward(w, hits) + plan_reward(w, ~hits) == pytest.approx(1)


def test_a_batch_is_its_rows() -> None:
    logprobs = np.array([[-0.1, -0.5], [-2.0, -0.05]])
    hits = np.array([[1, 0], [1, 1]])
    batch = plan_reward(weights([1, 2], logprobs), hits)
    assert batch == pytest.approx(
        [plan_reward(weights([1, 2], row), hit) for row, hit in zip(logprobs, hits, strict=True)]
    )


# Eq. 7 to 9


def test_type_is_exact() -> None:
    assert (type_reward("CLICK", "CLICK"), type_reward("click", "CLICK"), type_reward("CLICKS", "CLICK")) == (1, 0, 0)


@pytest.mark.parametrize(
    ("predicted", "label", "f1", "reward"),
    [
        ("", "", 1, 1),  # every click
        ("  ", "", 1, 1),
        ("x", "", 0, 0),
        ("", "x", 0, 0),
        ("New York", "new york", 1, 1),
        ("new", "new york", 2 / 3, 1),
        ("new york", "new jersey", 0.5, 0),  # strictly more than 0.5
        ("a b c", "a b d", 2 / 3, 1),
        ("york new", "new york", 1, 1),
        ("new-york", "new york", 0, 0),
        ("cafe\u0301", "CAF\u00c9", 1, 1),  # é in two forms
        ("“１２３”\u00a0\u200bOK", '"123" ok', 1, 1),
        ("\u200b", "", 1, 1),
    ],
)
def test_value(predicted: str, label: str, f1: float, reward: float) -> None:
    assert token_f1(predicted, label) == pytest.approx(f1)
    assert value_reward(predicted, label) == reward


TEXT = st.text("ab c", max_size=8)


@given(st.text(max_size=9), st.text(max_size=9))
def test_the_form_of_unicode_decides_nothing(predicted: str, label: str) -> None:
    other = unicodedata.normalize("NFD", label)
    assert value_reward(other, label) == type_reward(other, label) == 1
    assert value_reward(predicted, other) == value_reward(predicted, label)


@given(TEXT, TEXT)
def test_f1_is_symmetric_and_one_for_the_same(a: str, b: str) -> None:
    assert token_f1(a, b) == token_f1(b, a)
    assert token_f1(a, a) == 1
    assert 0 <= token_f1(a, b) <= 1


def test_the_threshold_is_exact_where_the_rounding_of_public_evaluations_is_not() -> None:
    """Why there are two forms of one formula: merged, verdicts would change on one side or the other."""
    differ = []
    for p in range(1, 17):
        for q in range(1, 17):
            for common in range(min(p, q) + 1):
                words = [f"w{i}" for i in range(p + q)]
                predicted, label = words[:p], words[p - common : p - common + q]
                exact = 4 * common > p + q
                assert value_reward(" ".join(predicted), " ".join(label)) == exact
                if (set_f1(set(predicted), set(label)) > 0.5) != exact:
                    differ.append((p, q, common))
    assert differ == [(5, 11, 4), (11, 5, 4)]


def test_gate() -> None:
    nan = float("nan")
    assert gated([1, 0, 1, 0], [1, 1, 0, 0], [0.7, nan, nan, nan]).tolist() == [0.7, 0, 0, 0]


# Eq. 10

REWARD = st.sampled_from([0.0, 0.1, 0.35, 0.4, 1 / 3, 0.7, 1.0]) | st.floats(0, 1)


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[float], int]:
    size, n = draw(st.integers(2, 8)), draw(st.integers(1, 4))
    return draw(st.lists(REWARD, min_size=size * n, max_size=size * n)), size


def trl_advantages(rewards: np.ndarray, size: int) -> np.ndarray:
    """The lines of GRPOTrainer._generate_and_score_completions, in its float32."""
    r = torch.tensor(rewards, dtype=torch.float32)
    mean = torch.nanmean(r.view(-1, size), dim=1).repeat_interleave(size)
    std = nanstd(r.view(-1, size), dim=1).repeat_interleave(size)
    return ((r - mean) / (std + 1e-4)).numpy()


@given(groups())
def test_advantages_are_what_trl_makes_of_the_flattened_rewards(group: tuple[list[float], int]) -> None:
    rewards, size = group
    flat, spreadless = flatten_spreadless(rewards, size)
    ours, theirs = advantages(rewards, size), trl_advantages(flat, size)
    # float32 keeps rewards to 6e-8, which a spread of 1e-3 makes 6e-5
    np.testing.assert_allclose(ours, theirs, atol=3e-4)
    empty = np.repeat(spreadless, size)
    assert (ours[empty] == 0).all()
    assert (theirs[empty] == 0).all(), "exactly 0 in TRL's float32 too"


@given(groups())
def test_groups_with_spread_reach_trl_as_they_are(group: tuple[list[float], int]) -> None:
    rewards, size = group
    flat, spreadless = flatten_spreadless(rewards, size)
    kept = np.array(rewards).reshape(-1, size)[~spreadless]
    assert (flat.reshape(-1, size)[~spreadless] == kept).all()
    assert (kept.std(axis=1, ddof=1) >= SPREAD_FLOOR).all()
    moved = np.abs(flat - rewards).reshape(-1, size)[spreadless]
    assert (moved <= 1 / 2048 + SPREAD_FLOOR * size).all()


@given(groups())
def test_each_group_has_mean_zero_and_keeps_its_order(group: tuple[list[float], int]) -> None:
    rewards, size = group
    for r, a in zip(np.reshape(rewards, (-1, size)), advantages(rewards, size).reshape(-1, size), strict=True):
        assert a.mean() == pytest.approx(0, abs=1e-9)
        assert (np.diff(a[np.argsort(r, kind="stable")]) >= 0).all()


@pytest.mark.parametrize("value", [0.35, 0.4, 0.1, 1 / 3, 0.7])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_equal_fractional_rewards_have_no_advantage(value: float, dtype: Any) -> None:
    """The naive float32 z-score of such a group is not 0; a leave-one-out baseline blew it up to thousands."""
    rewards = np.full(7, value, dtype=dtype)
    assert (advantages(rewards, 7) == 0).all()
    flat, spreadless = flatten_spreadless(rewards, 7)
    assert spreadless.all()
    assert (trl_advantages(flat, 7) == 0).all()


def test_the_naive_z_score_of_equal_rewards_is_not_zero() -> None:
    """Why rewards are flattened to sums that float32 holds exactly."""
    assert (trl_advantages(np.full(7, 0.35), 7) != 0).any()


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_seven_to_one(dtype: Any) -> None:
    same = np.array([0.35] * 7 + [0.35 + 1e-4], dtype=dtype)
    assert (advantages(same, 8) == 0).all()
    apart = advantages(np.array([0.35] * 7 + [0.75], dtype=dtype), 8)
    # mean 0.4, sample std 0.4 / √8
    assert apart == pytest.approx([-0.05 / (0.4 / 8**0.5 + 1e-4)] * 7 + [0.35 / (0.4 / 8**0.5 + 1e-4)], abs=1e-5)


def test_groups_are_apart() -> None:
    assert advantages([0, 1, 0.5, 0.5], 2)[:2] == pytest.approx(advantages([0, 1], 2))
    assert advantages([0, 1], 2) == pytest.approx([-0.5 / (0.5**0.5 + 1e-4), 0.5 / (0.5**0.5 + 1e-4)])


@pytest.mark.parametrize(("rewards", "size"), [([1, 2, 3], 2), ([1, 2], 1), ([1, float("nan")], 2)])
def test_what_is_no_group_is_refused(rewards: list[float], size: int) -> None:
    with pytest.raises(ValueError, match=r"groups|finite"):
        advantages(rewards, size)
