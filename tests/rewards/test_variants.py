"""Variants of C-DREM: what each weighs, and that a rollout table gives back the rewards of any of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from coepg_dagster.artifacts import ROLLOUTS
from coepg_dagster.cli import rewards as cli
from coepg_dagster.experiment.training import Grpo
from coepg_dagster.plugins import chosen
from coepg_dagster.rewards.cdrem import NoVerdict, ScaleRewards, advantages, flatten_spreadless, plan_reward
from coepg_dagster.rewards.estimators import estimated
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


def logged(
    rows: list[dict[str, Any]],
    variant: Variant = "probability",
    scale: ScaleRewards = "group",
    functions: Sequence[dict[str, Any]] = (),
    lowest: float = 0.0,
) -> pa.Table:
    """The rows as training would have written them: weighed by `variant`, in groups of SIZE, two in an optimizer step."""
    for i, row in enumerate(rows):
        r_plan = 1.0
        if row["graders"]:
            weigh = weighing_of(variant, PRIORS[: len(row["graders"])])
            answered = [g["failure"] is None for g in row["graders"]]
            _, weights = weigh([g["mean_logprob"] or 0.0 for g in row["graders"]], answered)
            r_plan = float(plan_reward(weights, np.array([g["hit"] for g in row["graders"]])))
        row |= {"optimizer_step": i // (2 * SIZE), "group": i // SIZE % 2}
        row["reward"] = r_plan if row["gate"] == "passed" else lowest
    for start in range(0, len(rows), 2 * SIZE):
        of_step = rows[start : start + 2 * SIZE]
        rewards = [row["reward"] for row in of_step]
        flat, of_eq_10 = flatten_spreadless(rewards, SIZE)[0], advantages(rewards, SIZE, scale)
        made = estimated(functions, flat.reshape(-1, SIZE), of_eq_10.reshape(-1, SIZE), {})
        for row, advantage in zip(of_step, made.reshape(-1), strict=True):
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


@given(
    rollouts(),
    st.sampled_from([variant for variant in get_args(Variant) if variant != "uniform"]),
    st.sampled_from(get_args(ScaleRewards)),
    st.sampled_from([[], ["rloo"], ["maxrl"], ["drop_spreadless"], ["rloo", "sngs"]]),
    st.sampled_from([0.0, -1.0]),
)
def test_a_table_gives_back_the_rewards_of_its_variant_to_the_last_bit(
    rows: Any, variant: Variant, scale: ScaleRewards, names: list[str], lowest: float
) -> None:
    functions = [chosen("advantage", name) for name in names]
    table = logged(rows, variant, scale, functions, 0.0 if names == ["maxrl"] else lowest)
    made = recompute(table, variant, None, scale, functions)
    reward, logged_reward, advantage, logged_advantage = columns(
        made, "reward", "logged_reward", "advantage", "logged_advantage"
    )
    assert (reward, advantage) == (logged_reward, logged_advantage)
    facts = summary(made)
    assert (facts["same_reward"], facts["same_advantage"], facts["same_sign"]) == (100, 100, 100)
    assert facts["largest_difference"] == 0
    assert facts["frac_reward_zero_std"] == facts["frac_reward_zero_std_logged"]


@pytest.mark.parametrize("name", ["gui_g1_difficulty", "ui_s1_levels"])
def test_advantages_that_need_more_than_rollouts_tell_are_left_out(name: str) -> None:
    table = logged([rollout([grader(0, bool(i % 3), -0.1)]) for i in range(2 * SIZE)])
    made = recompute(table, "probability", functions=[chosen("advantage", "rloo"), chosen("advantage", name)])
    assert made["advantage"].null_count == len(made) and made.schema == RECOMPUTED_SCHEMA
    facts = summary(made)
    assert (facts["same_reward"], facts["same_advantage"], facts["same_sign"]) == (100, None, None)


@pytest.mark.parametrize(
    ("config", "same"),
    [
        ({}, 100),
        ({"scale_rewards": "none"}, 100),
        ({"advantage": ["rloo"]}, 100),
        ({"advantage": ["gui_g1_difficulty"]}, None),
    ],
)
def test_the_command_compares_with_the_advantages_of_the_run(
    config: dict[str, Any], same: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Grpo.model_validate(config)
    rows = [rollout([grader(j, bool((i + j) % 3), -0.1) for j in range(2)]) for i in range(2 * SIZE)]
    known = [] if same is None else run.advantage
    pq.write_table(logged(rows, scale=run.scale_rewards, functions=known), tmp_path / ROLLOUTS)
    record = SimpleNamespace(config=run.model_dump(mode="json"))
    monkeypatch.setattr(cli, "_record_of", lambda *_: (record, tmp_path))
    command = ["recompute", "exp@1", "--variant", "probability"]
    facts = json.loads(CliRunner().invoke(cli.app, [*command, "--json"]).stdout)
    assert (facts["same_reward"], facts["same_advantage"], facts["same_sign"]) == (100, same, same)
    shown = CliRunner().invoke(cli.app, command).stdout
    assert ("those of gui_g1_difficulty need more than the rollouts tell" in shown) == (same is None)


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


@pytest.mark.parametrize("confidence", ["probability", "log_probability"])
def test_what_is_no_number_is_no_confidence(confidence: Any) -> None:
    with pytest.raises(ValueError, match="not a number"):
        Weighing((2.0, 1.0), confidence)([math.nan, -0.1], [True, True])
    assert Weighing((2.0, 1.0), confidence)([math.nan, -0.1], [False, True])[1].tolist() == [0, 1]


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
