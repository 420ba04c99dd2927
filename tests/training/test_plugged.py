"""GRPO with plug-ins: one run of tiny models in which reward, advantages and loss are not the default ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from trl import GRPOTrainer

from coepg_dagster import plugins
from coepg_dagster.artifacts import CURATION
from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import GrounderRl, Grpo
from coepg_dagster.geometry import Space
from coepg_dagster.inference.agents import Grounder
from coepg_dagster.inference.screens import Screens
from coepg_dagster.jobs import GrounderRlJob
from coepg_dagster.progress import Ended
from coepg_dagster.prompts import parse_corners, parse_points, planner_answer
from coepg_dagster.rewards.answers import Floats
from coepg_dagster.rewards.composite import Composite
from coepg_dagster.rewards.estimators import rloo, sngs
from coepg_dagster.rewards.terms import hit
from coepg_dagster.rewards.variants import CannotRecompute, recompute
from coepg_dagster.training.cdrem_reward import CdremReward
from coepg_dagster.training.grpo import at_the_start, train_grounder_rl, train_grpo
from coepg_dagster.training.grpo_trainer import PerRollout
from coepg_dagster.training.point_reward import PointReward
from tests.inference.scripted import RESIZE, Scripted, generation
from tests.jobs import grpo_job, quiet, training_job

PLUGGED = Grpo.model_validate(
    {
        "prompts_per_step": 3,
        "group_size": 4,
        "micro_batch_size": 6,
        "max_steps": 2,
        "num_iterations": 2,
        "learning_rate": 1e-3,
        "max_plan_tokens": 24,
        "kl_beta": 0.1,
        "point_score": "se_gui",
        "terms": {"format": 0.25, "gui_rcpo": {"weight": 0.5, "side": 10.0}, "sub_goal": 0},
        "combiner": "ui_s1",
        "advantage": ["rloo", "sngs"],
        "policy_loss": "guirlvg_kl",
        "importance_sampling_level": "sequence",
        "epsilon_high": 0.3,
        "delta": 4.0,
    }
)


def test_a_run_with_plugins_is_what_they_say(
    trained: Callable[[str, int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    losses: list[dict[str, Any]] = []
    compute = GRPOTrainer._compute_loss

    def computed(self: Any, model: Any, inputs: Any) -> Any:
        losses.append({"advantages": inputs["advantages"], "factors": inputs["kl_factor"], "beta": self.beta})
        return compute(self, model, inputs)

    monkeypatch.setattr(GRPOTrainer, "_compute_loss", computed)
    planner, grounder = trained("planner", 0), trained("grounder", 0)
    job = grpo_job(tmp_path / "out", (dataset, steps, models), planner, grounder, PLUGGED)
    figures = train_grpo(job, quiet)
    rollouts = pq.read_table(job.out / "rollouts.parquet")
    rows = rollouts.to_pylist()
    assert len(rows) == 12 and figures["optimizer_steps"] == 2
    for row in rows:
        part = {each["name"]: each["score"] for each in row["parts"]}
        assert list(part) == ["parsed", "type", "value", "point", "format", "gui_rcpo", "sub_goal"]
        staged = part["parsed"] * (0.1 + 0.4 * part["type"] + 0.5 * part["type"] * part["value"] * part["point"])
        assert row["reward"] == pytest.approx(staged + 0.25 * part["format"] + 0.5 * part["gui_rcpo"])
        for grader in row["graders"]:
            assert grader["score"] >= 0.5 if grader["hit"] else grader["score"] <= 0.5
        if row["graders"]:
            score = sum(grader["weight"] * grader["score"] for grader in row["graders"])
            assert part["point"] == pytest.approx(score)
    rewards = np.array([row["reward"] for row in rows]).reshape(-1, 4)
    assert max(np.ptp(rewards, axis=1)) > 0, "some group learns"
    expected = sngs(rloo(rewards), rewards).reshape(-1)
    assert [row["advantage"] for row in rows] == pytest.approx(expected, abs=1e-3)
    used = torch.cat([each["advantages"] for each in losses]).tolist()
    assert used == pytest.approx([row["advantage"] for row in rows] * 2, abs=1e-6), "two updates by the same rollouts"
    factors = torch.cat([each["factors"] for each in losses]).tolist()
    assert factors == pytest.approx(rewards.reshape(-1).tolist() * 2, abs=1e-3)
    assert all(isinstance(each["beta"], PerRollout) for each in losses)
    assert 0 <= figures["collapse_first"] <= 1 and figures["entropy_first"] > 0
    with pytest.raises(CannotRecompute, match="terms or a combiner"):
        recompute(rollouts, "no_cdrem")


@given(
    st.lists(st.floats(0, 2), min_size=1, max_size=4), st.floats(1e-5, 1), st.integers(1, 5), st.integers(0, 2**31 - 1)
)
def test_the_factor_of_the_kl_term_is_that_of_each_rollout(
    factors: list[float], beta: float, length: int, seed: int
) -> None:
    """J_i = A_i - α_i β KL: TRL adds `beta * kl` to the loss of each token."""
    kl = torch.rand((len(factors), length), generator=torch.Generator().manual_seed(seed))
    made = PerRollout(beta, torch.tensor(factors)) * kl
    assert made == pytest.approx(np.array(factors)[:, None] * beta * kl.numpy(), rel=1e-5)
    assert PerRollout(beta, torch.tensor(factors)) == beta != 0.0


def scripted(steps: pa.Table, config: Grpo, *answers: str) -> CdremReward:
    """The reward by grounders with prior 1, each of which answers the same to everything."""
    screens = Screens(steps, RESIZE)
    grounders = {
        f"g{i}": Grounder(Scripted(lambda _, text=text: generation(*text)), screens, "compact", Space.RESIZED, 8)
        for i, text in enumerate(answers)
    }
    return CdremReward(grounders, dict.fromkeys(grounders, 1.0), steps, screens, config)


def test_a_point_score_takes_the_place_of_acc_in_eq_4(steps: pa.Table) -> None:
    config = Grpo.model_validate({"point_score": {"name": "gui_g2", "alpha": 0.5}, "confidence": "constant"})
    good = planner_answer("click OK", "CLICK", "")
    row = next(row for row in steps.to_pylist() if row["boxes"])
    label = planner_answer("click OK", row["action_type"], row["value"])
    reward = scripted(steps, config, "(18,28)", "(1,1)")
    (got,) = reward.score([label or good], [row["step_id"]])
    scores = [grader["score"] for grader in reward.rows[0]["graders"]]
    assert got == pytest.approx(sum(scores) / 2) and scores[0] != scores[1]
    assert reward.rows[0]["parts"] == []


def test_a_plan_that_fails_the_gate_earns_no_more_than_one_that_misses(
    steps: pa.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "_known", dict(plugins._known))

    @plugins.plugin("reward", "a test", lowest=-1.0)
    def signed(points: Floats, boxes: Floats) -> Floats:
        return 2 * hit(points, boxes) - 1

    row = next(row for row in steps.to_pylist() if row["boxes"] and row["action_type"] == "CLICK")
    for combiner in ("gate", "weighted_sum", "ui_s1", "gui_libra"):
        config = Grpo.model_validate({"point_score": "signed", "combiner": combiner})
        answers = [
            planner_answer("click OK", row["action_type"], row["value"]),
            planner_answer("x", "SELECT", "x"),
            "?",
        ]
        miss, wrong, unreadable = scripted(steps, config, "(1,1)").score(answers, [row["step_id"]] * 3)
        assert miss >= wrong >= unreadable == -1, combiner


def test_without_a_gate_a_plan_of_the_wrong_type_is_grounded_too(steps: pa.Table) -> None:
    row = next(row for row in steps.to_pylist() if row["boxes"] and row["action_type"] == "CLICK")
    wrong = planner_answer("click OK", "SELECT", "x")
    assert not scripted(steps, Grpo(), "(18,28)").score([wrong], [row["step_id"]])[0]
    reward = scripted(steps, Grpo.model_validate({"combiner": "weighted_sum"}), "(18,28)")
    reward.score([wrong], [row["step_id"]])
    assert len(reward.rows[0]["graders"]) == 1 and reward.rows[0]["gate"] == "wrong_type"


def test_a_grounders_own_box_and_points_are_scored(steps: pa.Table) -> None:
    row = next(row for row in steps.to_pylist() if row["boxes"])
    screens = Screens(steps, RESIZE)
    viewport = screens.viewport(row["step_id"])
    scale = viewport.resized.width / viewport.original.width, viewport.resized.height / viewport.original.height
    x1, y1, x2, y2 = (float(side * scale[i % 2]) for i, side in enumerate(row["boxes"][0]))
    box, miss = f"({x1}, {y1}, {x2}, {y2})", f"({x1 - 5}, {y1 - 5})"
    reward = PointReward(
        steps,
        screens,
        Space.RESIZED,
        Composite(point_score={"name": "gui_g1", "alpha": 0.25, "beta": 0.125}),
        "grounder",
    )
    ids = [row["step_id"]] * 2
    assert reward.score([box, "nothing"], ids, ["a plan"] * 2) == pytest.approx([1, 0])
    assert [(made["plan"], made["gate"]) for made in reward.rows] == [("a plan", "passed"), ("a plan", "unparsed")]
    several = PointReward(steps, screens, Space.RESIZED, Composite(point_score={"name": "infigui_g1"}), "grounder")
    centre = f"({(x1 + x2) / 2}, {(y1 + y2) / 2})"
    assert several.score([f"{miss}\n{centre}", centre], ids) == pytest.approx([1 / 2, 1])


def test_corners_and_points_are_those_of_the_answer() -> None:
    assert parse_corners("bbox: [1, 2, 3, 4]") == (1, 2, 3, 4) and parse_corners("(5,6)") == (5, 6, 5, 6)
    assert parse_corners("none") is None and parse_points("none") == []
    assert parse_points("<point>1, 2</point> or <point>3, 4</point>, not (7, 8)") == [(1, 2), (3, 4)]


def test_monitors_of_the_start_are_of_its_first_fifth() -> None:
    history = [{"entropy": 1.0 - i / 10, "frac_reward_zero_std": i / 10} for i in range(10)]
    assert at_the_start(history) == {"entropy_first": pytest.approx(0.95), "collapse_first": pytest.approx(0.05)}
    assert at_the_start([{"frac_reward_zero_std": 1.0}]) == {"entropy_first": None, "collapse_first": 1.0}
    assert at_the_start([]) == {"entropy_first": None, "collapse_first": None}


def test_a_grounder_learns_from_the_place_of_its_own_answer(
    trained: Callable[[str, int], Path], dataset: pa.Table, steps: pa.Table, models: Models, tmp_path: Path
) -> None:
    """Several plans of one step are prompts of their own; the weights move, and the rollouts say by what."""
    config = GrounderRl.model_validate(
        {
            "enabled": True,
            "point_score": "gui_g2",
            "combiner": {"name": "weighted_sum", "action": 0.0, "text": 0.0, "place": 1.0},
            "terms": {"format": 0.5},
            "prompts_per_step": 4,
            "group_size": 4,
            "micro_batch_size": 8,
            "max_steps": 1,
            "learning_rate": 1e-3,
            "max_plan_tokens": 8,
            "warmup_ratio": 0.0,
            "temperature": 1.0,
            "kl_beta": 0.0,
        }
    )
    rows = [row | {"plan": plan} for row in dataset.to_pylist() for plan in (row["plan"], f"the {row['plan']}")]
    twice = pa.Table.from_pylist(rows, dataset.schema)
    init = trained("grounder", 0)
    job = training_job(GrounderRlJob, tmp_path / "out", (twice, steps, models), init, config=config)
    figures = train_grounder_rl(job, quiet)
    rows = pq.read_table(job.out / "rollouts.parquet").to_pylist()
    assert figures["optimizer_steps"] == 1 and figures["prompts"] == sum(
        box is not None for box in twice["box"].to_pylist()
    )
    groups = [rows[i : i + 4] for i in range(0, len(rows), 4)]
    assert len(groups) == 4 and len({(g[0]["step_id"], g[0]["plan"]) for g in groups}) == 4
    for group in groups:
        assert len({(row["step_id"], row["plan"]) for row in group}) == 1 and not any(row["graders"] for row in group)
    for row in rows:
        part = {each["name"]: each["score"] for each in row["parts"]}
        assert row["reward"] == pytest.approx(part["point"] + 0.5 * part["format"])
        assert part["parsed"] == float(row["gate"] == "passed")
    assert any(row["advantage"] for row in rows)
    before, after = (load_file(folder / "model.safetensors") for folder in (init, job.out))
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_grounder_is_asked_about_the_rows_that_its_strategies_keep(
    trained: Callable[[str, int], Path], dataset: pa.Table, steps: pa.Table, models: Models, tmp_path: Path
) -> None:
    """SE-GUI's filters measure the model that training starts from; what they leave out is no prompt, and on record."""
    rows = dataset.to_pylist()
    rows[0]["plan"] = "click the button"
    data, init = (pa.Table.from_pylist(rows, dataset.schema), steps, models), trained("grounder", 0)
    curation = {"seed_rules": {}, "attention_filter": {"threshold": 0.0, "layers": 1}}
    settings = {"enabled": True, "prompts_per_step": 1, "group_size": 2, "micro_batch_size": 2, "max_steps": 1}
    config = GrounderRl.model_validate(settings | {"max_plan_tokens": 8, "curation": curation})
    job = training_job(GrounderRlJob, tmp_path / "out", data, init, config=config)
    figures = train_grounder_rl(job, quiet)
    left_out = pq.read_table(job.out / CURATION).to_pylist()
    assert {"row_id": "r-s0", "step_id": "s0", "strategy": "seed_rules", "reason": "generic_plan"} in left_out
    assert figures["curation"]["attention_filter"]["of"] == sum(row["box"] is not None for row in rows) - 1
    assert figures["prompts"] == sum(row["box"] is not None for row in rows) - len(left_out)
    asked = {row["step_id"] for row in pq.read_table(job.out / "rollouts.parquet").to_pylist()}
    assert not asked & {row["step_id"] for row in left_out}

    weighed = GrounderRl.model_validate(settings | {"curation": {"perplexity_weighted": {}}})
    job = training_job(GrounderRlJob, tmp_path / "weighed", data, init, config=weighed)
    with pytest.raises(Ended, match="perplexity_weighted weighs rows, and GRPO has no weights"):
        train_grounder_rl(job, quiet)
