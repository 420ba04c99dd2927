"""Variants of C-DREM: what each weighs, and that a rollout table gives back the rewards of any of them."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.experiment.training import Grpo
from coepg_dagster.rewards.cdrem import NoVerdict, advantages, plan_reward
from coepg_dagster.rewards.variants import (
    RECOMPUTED_SCHEMA,
    VARIANTS,
    Variant,
    Weighing,
    group_size,
    recompute,
    summary,
    variant_named,
    weighing_of,
)
from coepg_dagster.steps import ROLLOUT_SCHEMA

SIZE = 4
NAMES = ("grounder_1", "a", "b")
PRIORS = (2.0, 1.0, 1.0)


def grader(j: int, hit: bool, logprob: float, failure: str | None = None) -> dict[str, Any]:
    return {
        "grounder": NAMES[j],
        "x": 1.0,
        "y": 1.0,
        "hit": hit,
        "tokens": 4,
        "mean_logprob": None if failure else logprob,
        "confidence": None if failure else math.exp(min(0.0, logprob)),
        "prior": PRIORS[j],
        "weight": 0.0,
        "seconds": 0.1,
        "failure": failure,
    }


def rollout(graders: list[dict[str, Any]], gate: str = "passed") -> dict[str, Any]:
    return {"step_id": "s", "text": "", "plan": "p", "gate": gate, "graders": graders}


def logged(rows: list[dict[str, Any]], variant: Variant = "probability") -> pa.Table:
    """The rows as training would have written them: weighed by `variant`, in groups of SIZE."""
    for i, row in enumerate(rows):
        r_plan = 1.0
        if row["graders"]:
            weigh = weighing_of(variant, PRIORS[: len(row["graders"])])
            answered = [g["failure"] is None for g in row["graders"]]
            _, weights = weigh([g["mean_logprob"] or 0.0 for g in row["graders"]], answered)
            r_plan = float(plan_reward(weights, np.array([g["hit"] for g in row["graders"]])))
        row |= {"optimizer_step": i // (2 * SIZE), "group": i // SIZE % 2}
        row["reward"] = r_plan if row["gate"] == "passed" else 0.0
    for row, advantage in zip(rows, advantages([row["reward"] for row in rows], SIZE), strict=True):
        row["advantage"] = float(advantage)
    return pa.Table.from_pylist(rows, ROLLOUT_SCHEMA)


@st.composite
def rollouts(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Whole groups: gated, without a target, or graded by ϕ_k and two verifiers, of which a verifier may have failed."""
    rows = []
    for _ in range(SIZE * draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["graded", "graded", "graded", "wrong_type", "no target"]))
        graders = []
        if kind == "graded":
            for j in range(3):
                failure = "timeout" if j and draw(st.integers(0, 5)) == 0 else None
                hit = draw(st.booleans()) if failure is None else False
                graders.append(grader(j, hit, draw(st.floats(-5, 0) | st.just(1e-7)), failure))
        rows.append(rollout(graders, "wrong_type" if kind == "wrong_type" else "passed"))
    return rows


def columns(table: pa.Table, *names: str) -> list[list[float]]:
    return [table[name].to_pylist() for name in names]


@given(rollouts(), st.sampled_from([variant for variant in get_args(Variant) if variant != "uniform"]))
def test_a_table_gives_back_the_rewards_of_its_variant_to_the_last_bit(rows: Any, variant: Variant) -> None:
    table = logged(rows, variant)
    made = recompute(table, variant)
    reward, logged_reward, advantage, logged_advantage = columns(
        made, "reward", "logged_reward", "advantage", "logged_advantage"
    )
    assert (reward, advantage) == (logged_reward, logged_advantage)
    facts = summary(made)
    assert (facts["same_reward"], facts["same_advantage"], facts["same_sign"]) == (100, 100, 100)
    assert facts["largest_difference"] == 0
    assert facts["frac_reward_zero_std"] == facts["frac_reward_zero_std_logged"]


@given(rollouts(), st.sampled_from(get_args(Variant)))
def test_every_variant_written_out(rows: Any, variant: Variant) -> None:
    table = logged(rows)
    made = recompute(table, variant, 0.5 if variant == "temperature" else None)
    assert made.schema == RECOMPUTED_SCHEMA
    power = {
        "no_cdrem": lambda j, _: float(j == 0),
        "uniform": lambda *_: 1.0,
        "prior": lambda j, _: math.exp(PRIORS[j]),
        "literal": lambda j, c: math.exp(PRIORS[j] * min(0, c)),
        "probability": lambda j, c: math.exp(PRIORS[j] * math.exp(min(0, c))),
        "temperature": lambda j, c: math.exp(PRIORS[j] * math.exp(min(0, c)) / 0.5),
    }[variant]
    for row, got in zip(rows, made.to_pylist(), strict=True):
        if row["gate"] != "passed" or not row["graders"]:
            assert got["reward"] == (row["gate"] == "passed")
            assert got["weights"] == ([] if not row["graders"] else got["weights"])
            continue
        powers = [0.0 if g["failure"] else power(j, g["mean_logprob"]) for j, g in enumerate(row["graders"])]
        weights = [p / sum(powers) for p in powers]
        assert got["weights"] == pytest.approx(weights)
        assert got["reward"] == pytest.approx(sum(w for w, g in zip(weights, row["graders"], strict=True) if g["hit"]))
    assert made["advantage"].to_pylist() == advantages(made["reward"].to_pylist(), SIZE).tolist()


def test_uniform_is_what_an_ablation_without_priors_and_confidence_trains_with() -> None:
    weigh = weighing_of("uniform", PRIORS)
    assert weigh == Weighing((0.0, 0.0, 0.0), "constant")
    assert weigh([-1.0, -2.0, -0.1], [True] * 3)[1] == pytest.approx([1 / 3] * 3)
    assert weigh([-1.0, 0.0, -0.1], [True, False, True])[1] == pytest.approx([1 / 2, 0, 1 / 2])


@given(st.lists(st.floats(-4, 0), min_size=3, max_size=3, unique=True))
def test_temperature_goes_from_one_vote_over_eq_5_to_equal_votes(logprobs: list[float]) -> None:
    def weights(tau: float) -> list[float]:
        return weighing_of("temperature", (1.0, 1.0, 1.0), tau)(logprobs, [True] * 3)[1].tolist()

    eq5 = Weighing((1.0, 1.0, 1.0))(logprobs, [True] * 3)[1].tolist()
    assert weights(1.0) == eq5
    assert weights(1e6) == pytest.approx([1 / 3] * 3, abs=1e-5)
    surest = int(np.argmax(np.exp(logprobs)))
    colder = [weights(tau)[surest] for tau in (4.0, 1.0, 0.25, 0.05)]
    assert colder == sorted(colder)


def test_the_variants_are_those_of_the_ablations() -> None:
    assert set(VARIANTS) == set(get_args(Variant))
    default = Grpo()
    assert weighing_of("probability", PRIORS) == Weighing(
        PRIORS, default.confidence, default.confidence_temperature, default.ensemble
    ), "the default is `probability`"
    assert weighing_of("no_cdrem", PRIORS) == Weighing(PRIORS, ensemble=False)
    assert weighing_of("temperature", PRIORS, 0.5) == Weighing(PRIORS, confidence_temperature=0.5)
    assert weighing_of("temperature", PRIORS).confidence_temperature == 0.25


def test_without_c_drem_the_trained_grounder_must_have_answered() -> None:
    rows = [rollout([grader(0, True, -0.1), grader(1, True, -0.1)]) for _ in range(SIZE)]
    rows[2]["graders"][0] = grader(0, False, 0, failure="timeout")
    table = logged(rows)
    assert recompute(table, "prior")["reward"].to_pylist()[2] == 1
    with pytest.raises(NoVerdict, match=r"optimizer step 0, step s: no grounder answered.*grounder_1: timeout"):
        recompute(table, "no_cdrem")


def test_what_is_no_table_of_whole_groups_is_refused() -> None:
    table = logged([rollout([]) for _ in range(3 * SIZE)])
    assert group_size(table) == SIZE
    for broken in (table.slice(1), table.slice(0, SIZE + 1), table.slice(0, 0), table.slice(0, 1)):
        with pytest.raises(ValueError, match="not whole groups"):
            recompute(broken, "prior")


def test_names_and_temperatures_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"no variant 'magic'; choose from no_cdrem, uniform"):
        variant_named("magic")
    with pytest.raises(ValueError, match="takes no temperature"):
        weighing_of("prior", PRIORS, 0.5)
    for tau in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="greater than 0"):
            weighing_of("temperature", PRIORS, tau)
