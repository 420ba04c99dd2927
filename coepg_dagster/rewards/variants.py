"""Variants of C-DREM (Table 4 and beyond), and the rewards that each would have given.

A variant changes up to four settings of `Grpo`. An ablation trains with it; `recompute` applies it to the rollout table of
another variant. The rewards are exact, since the table keeps every grounder's point and log-probability, but they are those
of *these* rollouts: training with the variant would have sampled others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
import pyarrow as pa

from coepg_dagster.plugins import find
from coepg_dagster.refusal import Refusal
from coepg_dagster.rewards.cdrem import (
    Confidence,
    Floats,
    NoVerdict,
    ScaleRewards,
    advantages,
    confidences,
    ensemble_weights,
    flatten_spreadless,
    plan_reward,
)
from coepg_dagster.rewards.estimators import estimated
from coepg_dagster.steps import GATE_PASSED

Variant = Literal["no_cdrem", "uniform", "prior", "literal", "probability", "temperature"]

VARIANTS: Final[Mapping[Variant, dict[str, Any]]] = {
    "no_cdrem": {"ensemble": False},
    "uniform": {"confidence": "constant"},  # and every σ is 0
    "prior": {"confidence": "constant"},
    "literal": {"confidence": "log_probability"},
    "probability": {},
    "temperature": {},  # takes τ besides
}
"""Variant → the settings in which it differs from the default."""

DEFAULT_TEMPERATURE: Final = 0.25
"""τ of the variant `temperature`: a quarter lets a sure grounder outweigh an unsure one by e^4 at σ = 1, not by e."""


class CannotRecompute(Refusal, ValueError):
    """Rollouts, or a variant, for which rewards cannot be recomputed; the message says why."""


@dataclass(frozen=True)
class Weighing:
    """How the votes on a plan are weighed: σ of each grounder, and the settings of `Grpo` with the same names.

    ϕ_k is the first grounder; without the ensemble it alone has a vote.
    """

    priors: tuple[float, ...]
    confidence: Confidence = "probability"
    confidence_temperature: float = 1.0
    ensemble: bool = True

    def __call__(self, mean_logprobs: Sequence[float], answered: Sequence[bool]) -> tuple[Floats, Floats]:
        """(c, w) of Eq. 5 and 6 for one plan, shape (N,) each.

        Args:
            mean_logprobs: shape (N,); ignored where a grounder did not answer.
            answered: shape (N,).
        Raises:
            NoVerdict: no grounder with a vote answered.

        >>> c, w = Weighing(priors=(2, 1))([-0.1, -1.2], [True, True])
        >>> c.round(3), w.round(3)
        (array([0.905, 0.301]), array([0.819, 0.181]))
        >>> Weighing(priors=(2, 1), ensemble=False)([-0.1, -1.2], [True, True])[1]
        array([1., 0.])
        """
        mask = np.array(answered, dtype=bool)
        if not self.ensemble:
            mask[1:] = False
        # min(): float32 log-probabilities of sure tokens can be a hair above 0; in this order what is no number stays so
        logprobs = [min(logprob, 0.0) if has else 0.0 for logprob, has in zip(mean_logprobs, answered, strict=True)]
        c = confidences(logprobs, self.confidence)
        return c, ensemble_weights(np.array(self.priors), c, mask, self.confidence_temperature)


def weighing_of(variant: Variant, priors: Sequence[float], temperature: float | None = None) -> Weighing:
    """The weighing of a variant for grounders with the priors σ, shape (N,). Raises CannotRecompute for a wrong τ.

    >>> weighing_of("temperature", (2, 1), temperature=0.5)([-0.1, -1.2], [True, True])[1].round(3)
    array([0.953, 0.047])
    """
    if temperature is not None and variant != "temperature":
        raise CannotRecompute(f"the variant {variant!r} takes no temperature; `temperature` does")
    if temperature is not None and not 0 < temperature < math.inf:
        raise CannotRecompute(f"the temperature is {temperature}: give a number greater than 0")
    tau = 1.0 if variant != "temperature" else DEFAULT_TEMPERATURE if temperature is None else temperature
    sigma = tuple(0.0 if variant == "uniform" else prior for prior in priors)
    return Weighing(sigma, confidence_temperature=tau, **VARIANTS[variant])


RECOMPUTED_SCHEMA: Final = pa.schema(
    [
        pa.field("optimizer_step", pa.int32(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("step_id", pa.string(), nullable=False),
        pa.field("plan", pa.string()),
        pa.field("gate", pa.string(), nullable=False),
        pa.field("weights", pa.list_(pa.float64()), nullable=False),  # in the order of the rollout's graders
        pa.field("reward", pa.float64(), nullable=False),
        pa.field("advantage", pa.float64()),  # null: `needs_more`
        pa.field("logged_reward", pa.float64(), nullable=False),
        pa.field("logged_advantage", pa.float64(), nullable=False),
    ]
)
"""Reward and advantage of each rollout under a variant, beside those used in training; rows as in the rollout table."""


def needs_more(functions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Which of an experiment's advantage functions ask for more than rollouts tell, as the size of a target."""
    return [
        each["name"] for each in functions if set(find("advantage", each["name"]).inputs) - {"rewards", "advantages"}
    ]


def recompute(
    rollouts: pa.Table,
    variant: Variant,
    temperature: float | None = None,
    scale: ScaleRewards = "group",
    functions: Sequence[Mapping[str, Any]] = (),
) -> pa.Table:
    """Rewards and advantages of `variant` for a rollout table (ROLLOUT_SCHEMA), as RECOMPUTED_SCHEMA in the same order.

    σ is as logged, but 0 for `uniform`. An answer that fails the gate has its reward by all variants.

    Args:
        scale, functions: `scale_rewards` and `advantage` of the training; if one of these `needs_more`, advantages are null.
    Raises:
        NoVerdict: all grounders with a vote failed on a plan.
        CannotRecompute: a wrong temperature, rows that are not whole groups, or rewards with terms or a combiner.
    """
    weighing_of(variant, (), temperature)  # refuses a wrong temperature even if no rollout has graders
    rows = rollouts.to_pylist()
    if any(row.get("parts") for row in rows):
        raise CannotRecompute(
            "the rewards of these rollouts have terms or a combiner besides C-DREM's votes, so that no variant gives them"
        )
    weights = [_weights(row, variant, temperature) for row in rows]
    r_plan = [
        float(plan_reward(w, [_score(grader) for grader in row["graders"]])) if row["graders"] else 1.0
        for row, w in zip(rows, weights, strict=True)
    ]
    passes = [row["gate"] == GATE_PASSED for row in rows]
    rewards = np.where(passes, r_plan, [row["reward"] for row in rows])
    size, firsts = group_size(rollouts), np.flatnonzero(np.diff(rollouts["optimizer_step"].to_numpy())) + 1
    made: list[float] | list[None] = [None] * len(rows)
    if not needs_more(functions):
        made = [a for of_step in np.split(rewards, firsts) for a in _advantages(of_step, size, scale, functions)]
    recomputed = [
        {
            **{name: row[name] for name in ("optimizer_step", "group", "step_id", "plan", "gate")},
            "weights": w,
            "reward": float(reward),
            "advantage": advantage,
            "logged_reward": row["reward"],
            "logged_advantage": row["advantage"],
        }
        for row, w, reward, advantage in zip(rows, weights, rewards, made, strict=True)
    ]
    return pa.Table.from_pylist(recomputed, RECOMPUTED_SCHEMA)


def _advantages(rewards: Floats, size: int, scale: ScaleRewards, functions: Sequence[Mapping[str, Any]]) -> list[float]:
    """Those of the rollouts of an optimizer step, as training computes them."""
    flat, of_eq_10 = flatten_spreadless(rewards, size)[0], advantages(rewards, size, scale)
    made = estimated(functions, flat.reshape(-1, size), of_eq_10.reshape(-1, size), {})
    return made.reshape(-1).tolist()


def _score(grader: Mapping[str, Any]) -> float:
    """What Eq. 4 weighs; tables made before there were point scores have Acc_j only."""
    score = grader.get("score")
    return float(grader["hit"] if score is None else score)


def _weights(row: Mapping[str, Any], variant: Variant, temperature: float | None) -> list[float]:
    graders = row["graders"]
    if not graders:
        return []
    weigh = weighing_of(variant, [grader["prior"] for grader in graders], temperature)
    answered = [grader["failure"] is None for grader in graders]
    try:
        _, w = weigh([grader["mean_logprob"] or 0.0 for grader in graders], answered)
    except NoVerdict as error:
        raise NoVerdict(
            f"optimizer step {row['optimizer_step']}, step {row['step_id']}: {error} "
            f"({graders[0]['grounder']}: {graders[0]['failure']})"
        ) from None
    return [float(weight) for weight in w]


def group_size(rollouts: pa.Table) -> int:
    """G of a rollout table. Raises CannotRecompute if its rows are not consecutive whole groups of one size."""
    keys = list(zip(rollouts["optimizer_step"].to_pylist(), rollouts["group"].to_pylist(), strict=True))
    size = keys.count(keys[0]) if keys else 0
    if size < 2 or any(len(set(keys[i : i + size])) > 1 for i in range(0, len(keys), size)) or len(keys) % size:
        raise CannotRecompute(f"{len(keys)} rollouts are not whole groups of {size}: the table was cut or sorted anew")
    return size


def summary(recomputed: pa.Table) -> dict[str, Any]:
    """How a variant differs from the training, for a table of `recompute`; shares in per cent.

    `same_sign`: rollouts whose advantage has the same sign as in training (or is 0 in both). Where advantages are null, it and
    `same_advantage` are None.
    """
    reward, logged = (recomputed[name].to_numpy() for name in ("reward", "logged_reward"))
    advantage, logged_advantage = (recomputed[name].to_numpy() for name in ("advantage", "logged_advantage"))
    known = not recomputed["advantage"].null_count
    size = group_size(recomputed)
    spreadless, spreadless_logged = (flatten_spreadless(values, size)[1] for values in (reward, logged))
    return {
        "rollouts": len(reward),
        "groups": len(spreadless),
        "mean_reward": float(reward.mean()),
        "mean_reward_logged": float(logged.mean()),
        "frac_reward_zero_std": float(spreadless.mean()),
        "frac_reward_zero_std_logged": float(spreadless_logged.mean()),
        "same_reward": 100 * float((reward == logged).mean()),
        "largest_difference": float(np.abs(reward - logged).max()),
        "same_advantage": 100 * float((advantage == logged_advantage).mean()) if known else None,
        "same_sign": 100 * float((np.sign(advantage) == np.sign(logged_advantage)).mean()) if known else None,
    }


def variant_named(name: str) -> Variant:
    """The variant of that name. Raises CannotRecompute, which lists them, for another name."""
    for variant in get_args(Variant):
        if variant == name:
            return variant  # type: ignore[no-any-return]
    raise CannotRecompute(f"there is no variant {name!r}; choose from {', '.join(VARIANTS)}")
