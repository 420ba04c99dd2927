"""C-DREM, the confidence-weighted reward ensemble, and the gate around it (Co-EPG, arXiv 2511.10705, Eq. 3 to 10).

Departures from the paper, each with its reason in docs/paper_map.md:
1. Eq. 5 and 6 use c = mean log p <= 0, by which a higher prior lowers the weight. The default confidence is
   exp(mean log p); `log_probability` is the literal equation.
2. A step without a target (scroll, back, wait) has r_plan = 1 once the gate passes: Eq. 3 is undefined there.
3. Two empty values are equal (Eq. 8). Otherwise F1 of two empty strings would fail every click.
4. A grounder that failed has no vote; the others' weights are renormalised. If all failed, there is an error and no reward.
5. Groups whose rewards spread less than SPREAD_FLOOR have advantage 0 (Eq. 10 divides by the spread).
6. Types and values are compared as normal text (`characters`): the same text in two forms of Unicode is one value.

Shapes: N grounders, B rewards in groups of G = `group_size` consecutive ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from coepg_dagster.characters import normal_text
from coepg_dagster.refusal import Refusal

Floats = npt.NDArray[np.float64]
Confidence = Literal["probability", "log_probability", "constant"]
ScaleRewards = Literal["group", "batch", "none"]
ValueMode = Literal["f1", "exact"]

SPREAD_FLOOR: Final = 1e-3
"""Sample standard deviation below which a group counts as without spread."""

ADVANTAGE_EPSILON: Final = 1e-4
"""What TRL adds to the standard deviation in Eq. 10."""


class NoVerdict(Refusal, RuntimeError):
    """Every grounder failed on a plan: there is nothing to compute a reward from."""


def mean_log_probability(token_logprobs: Sequence[float]) -> float:
    """Eq. 6: c_j = (1/L) Σ log P_j(y_l | y_<l, inputs), over the L generated coordinate tokens, shape (L,).

    Raises:
        ValueError: L is 0.

    >>> mean_log_probability([-0.5, -0.25])
    -0.375
    """
    if not len(token_logprobs):
        raise ValueError("Eq. 6 needs at least one coordinate token; for an answer without any, pass all its tokens")
    return float(np.mean(np.asarray(token_logprobs, dtype=np.float64)))


def confidences(mean_logprobs: npt.ArrayLike, mode: Confidence) -> Floats:
    """c_j as Eq. 5 uses it.

    Args:
        mean_logprobs: mean log p of each answer, at most 0, shape (..., N).
        mode: `probability`: exp(mean log p); `log_probability`: mean log p itself; `constant`: 1.
    Returns:
        c, shape (..., N).
    Raises:
        ValueError: a log-probability that is positive or not a number.

    >>> confidences([-0.105, -1.204], "probability").round(2)
    array([0.9, 0.3])
    >>> confidences([-0.105, -1.204], "log_probability")
    array([-0.105, -1.204])
    """
    logprobs = np.asarray(mean_logprobs, dtype=np.float64)
    if not np.all(logprobs <= 1e-6):
        raise ValueError(f"a mean log-probability is positive or not a number: {logprobs.tolist()}")
    match mode:
        case "probability":
            return np.exp(logprobs)
        case "log_probability":
            return logprobs
        case "constant":
            return np.ones_like(logprobs)


def ensemble_weights(
    priors: npt.ArrayLike, confidence: npt.ArrayLike, answered: npt.ArrayLike, temperature: float = 1.0
) -> Floats:
    """Eq. 5: w_j = exp(σ_j c_j / τ) / Σ_n exp(σ_n c_n / τ), over the grounders that answered; 0 for the others.

    Args:
        priors: σ, shape (N,).
        confidence: c, shape (..., N).
        answered: bool, shape (..., N).
        temperature: τ, 1 in the paper; towards 0 one grounder decides, towards infinity all weigh the same.
    Returns:
        w, shape (..., N), each row summing to 1.
    Raises:
        NoVerdict: a row in which no grounder answered.
        ValueError: the temperature is not positive.

    >>> ensemble_weights([2, 1, 1], [[0.9, 0.3, 0.8], [0.9, 0.3, 0.8]], [[True, True, True], [True, True, False]]).round(3)
    array([[0.629, 0.14 , 0.231],
           [0.818, 0.182, 0.   ]])
    """
    if not temperature > 0:
        raise ValueError(f"the temperature of the weights must be positive, not {temperature}")
    mask = np.asarray(answered, dtype=bool)
    c = np.where(mask, np.asarray(confidence, dtype=np.float64), 0.0)
    if not np.all(mask.any(axis=-1)):
        raise NoVerdict("no grounder answered for a plan: look at their errors; a reward is never silently 0")
    exponent = np.where(mask, np.asarray(priors, dtype=np.float64) * c / temperature, -np.inf)
    unnormalised = np.exp(exponent - exponent.max(axis=-1, keepdims=True))
    weights: Floats = unnormalised / unnormalised.sum(axis=-1, keepdims=True)
    return weights


def plan_reward(weights: npt.ArrayLike, hits: npt.ArrayLike) -> Floats:
    """Eq. 4: r_plan = Σ_j w_j · Acc_j.

    Args:
        weights: w, shape (..., N).
        hits: Acc of Eq. 3, 0 or 1, shape (..., N).
    Returns:
        r_plan, shape (...).

    >>> plan_reward([[0.65, 0.15, 0.2], [1, 0, 0]], [[1, 0, 1], [0, 1, 1]])
    array([0.85, 0.  ])
    """
    reward: Floats = (np.asarray(weights, dtype=np.float64) * np.asarray(hits, dtype=np.float64)).sum(axis=-1)
    return reward


def token_f1(predicted: str, label: str) -> float:
    """F1 over the sets of whitespace tokens of the normal texts, lower-cased (GUI-R1's F1 without its containment rule).

    Two empty values are equal: 1. One empty value: 0. Not `evaluation.metrics.set_f1`: that rounds as the benchmark's
    original code does, by which an F1 of exactly 0.5 (4 common of 5 and 11 words) is above 0.5; this form is exact there.

    >>> token_f1("red running shoes", "running shoes")
    0.8
    """
    p, q = (set(normal_text(text).lower().split()) for text in (predicted, label))
    if not p and not q:
        return 1.0
    common = len(p & q)
    return 2 * common / (len(p) + len(q)) if common else 0.0


def type_reward(predicted: str, label: str) -> float:
    """Eq. 7: 1 if the action type is exactly right, as normal text; else 0.

    >>> type_reward("CLICK", "CLICK"), type_reward("CLICK", "TYPE")
    (1.0, 0.0)
    """
    return float(normal_text(predicted) == normal_text(label))


def value_reward(predicted: str, label: str, mode: ValueMode = "f1") -> float:
    """Eq. 8: 1 if F1(value, label value) > 0.5; else 0. With `exact` F1 must be 1, as Step SR demands.

    >>> value_reward("red running shoes", "running shoes"), value_reward("", "running shoes"), value_reward("", "")
    (1.0, 0.0, 1.0)
    >>> value_reward("red running shoes", "running shoes", "exact"), value_reward("Running  shoes", "running shoes", "exact")
    (0.0, 1.0)
    """
    f1 = token_f1(predicted, label)
    return float(f1 == 1 if mode == "exact" else f1 > 0.5)


def gated(r_type: npt.ArrayLike, r_value: npt.ArrayLike, r_plan: npt.ArrayLike) -> Floats:
    """Eq. 9: 0 where type or value is wrong, else r_plan. Where they are wrong, r_plan may be missing (NaN).

    Args:
        r_type: Eq. 7, 0 or 1, shape (B,).
        r_value: Eq. 8, 0 or 1, shape (B,).
        r_plan: Eq. 4, shape (B,).
    Returns:
        r, shape (B,).

    >>> gated([1, 1, 0], [1, 0, 1], [0.7, 0.7, float("nan")])
    array([0.7, 0. , 0. ])
    """
    passes = (np.asarray(r_type, dtype=np.float64) > 0) & (np.asarray(r_value, dtype=np.float64) > 0)
    return np.where(passes, np.asarray(r_plan, dtype=np.float64), 0.0)


def flatten_spreadless(rewards: npt.ArrayLike, group_size: int) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Rewards for GRPO with one value for each group without spread, and which groups those are.

    A group without spread has a sample standard deviation below SPREAD_FLOOR. Rounding residue of fractional rewards would
    otherwise be divided by itself and grow a thousandfold. The value is the first reward, rounded to the nearest 1/1024:
    float32 sums such numbers exactly, so that reward minus mean is 0 to the last bit in TRL too (for seven times 0.35 it is
    not: TRL's advantage is 3e-4).

    Args:
        rewards: shape (B,), each group consecutive.
        group_size: G, at least 2.
    Returns:
        rewards, shape (B,), and whether each group has no spread, shape (B / G,).
    Raises:
        ValueError: B is no multiple of G, G is below 2, or a reward is not finite.

    >>> rewards, spreadless = flatten_spreadless([0.5, 0.5001, 0, 1], group_size=2)
    >>> rewards, spreadless
    (array([0.5, 0.5, 0. , 1. ]), array([ True, False]))
    """
    groups = _groups(rewards, group_size)
    spreadless = groups.std(axis=1, ddof=1) < SPREAD_FLOOR
    equal = np.round(groups[:, :1] * 1024) / 1024
    return np.where(spreadless[:, None], equal, groups).reshape(-1), spreadless


def advantages(rewards: npt.ArrayLike, group_size: int, scale: ScaleRewards = "group") -> Floats:
    """Eq. 10 as TRL computes it: (r - mean) / (std + 1e-4), with the group's mean and the sample std; 0 without spread.

    Args:
        rewards: shape (B,), each group consecutive.
        group_size: G, at least 2.
        scale: `group`: divided by the std of the group, as in the paper; `batch`: by that of all rewards; `none`: not divided.
    Returns:
        advantages, shape (B,).
    Raises:
        ValueError: as `flatten_spreadless`.

    >>> advantages([1, 0, 0, 1, 0.3, 0.3, 0.3, 0.3], group_size=4).round(3)
    array([ 0.866, -0.866, -0.866,  0.866,  0.   ,  0.   ,  0.   ,  0.   ])
    >>> advantages([1, 0, 0, 1, 0.3, 0.3, 0.3, 0.3], group_size=4, scale="none")
    array([ 0.5, -0.5, -0.5,  0.5,  0. ,  0. ,  0. ,  0. ])
    """
    flat, spreadless = flatten_spreadless(rewards, group_size)
    groups = _groups(flat, group_size)
    result = groups - groups.mean(axis=1, keepdims=True)
    if scale != "none":
        std = groups.std(axis=1, ddof=1, keepdims=True) if scale == "group" else flat.std(ddof=1)
        result = result / (std + ADVANTAGE_EPSILON)
    return np.where(spreadless[:, None], 0.0, result).reshape(-1)


def _groups(rewards: npt.ArrayLike, group_size: int) -> Floats:
    flat = np.asarray(rewards, dtype=np.float64).reshape(-1)
    if group_size < 2 or flat.size % group_size:
        raise ValueError(f"{flat.size} rewards do not make groups of {group_size} (at least 2)")
    if not np.all(np.isfinite(flat)):
        raise ValueError("a reward is not finite")
    return flat.reshape(-1, group_size)
