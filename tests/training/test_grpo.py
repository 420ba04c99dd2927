"""GRPO with C-DREM on tiny checkpoints, through TRL's GRPOTrainer: what TRL does with our rewards, and what is kept."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from trl import GRPOTrainer

from coepg_dagster.artifacts import NoSteps
from coepg_dagster.experiment.models import Member, Models
from coepg_dagster.experiment.training import Grpo, Sft
from coepg_dagster.geometry import Box, Space
from coepg_dagster.inference.agents import Grounder
from coepg_dagster.inference.engine import Failure, Generation
from coepg_dagster.inference.opening import opened
from coepg_dagster.inference.processing import VISION_TOKENS, vision_token_ids
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import TransformersEngine, load_checkpoint
from coepg_dagster.jobs import EndToEndJob
from coepg_dagster.prompts import parse_planner, planner_answer, planner_messages
from coepg_dagster.rewards.cdrem import NoVerdict, advantages, token_f1
from coepg_dagster.rewards.variants import recompute, summary
from coepg_dagster.steps import ROLLOUT_SCHEMA, STEP_SCHEMA
from coepg_dagster.training import grpo
from coepg_dagster.training.cdrem_reward import CdremReward
from coepg_dagster.training.end_to_end import train_end_to_end
from coepg_dagster.training.examples import NothingToTrainOn, asked_steps
from coepg_dagster.training.grpo import train_grpo
from tests import conftest
from tests.inference.openai_server import OpenAIServer, status
from tests.inference.scripted import RESIZE, Scripted, generation, untimed
from tests.jobs import beside, grpo_job, quiet, training_job

CONFIG = Grpo(
    prompts_per_step=3,
    group_size=4,
    micro_batch_size=6,
    max_steps=3,
    learning_rate=1e-3,
    max_plan_tokens=24,
    own_prior=2.0,
    verifier_prior=1.0,
)


@dataclass
class Run:
    """One GRPO run and what was seen of it from outside."""

    out: Path
    init: Path
    figures: dict[str, Any] = field(default_factory=dict)
    trainer: Any = None
    trl_advantages: list[float] = field(default_factory=list)
    pairs: list[tuple[str, str]] = field(default_factory=list)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return pq.read_table(self.out / "rollouts.parquet").to_pylist()


@contextmanager
def watched(run: Run) -> Iterator[None]:
    """Records TRL's final advantages, its trainer, and every pair that any grounder gets."""
    score, ground = GRPOTrainer._generate_and_score_completions, Grounder.ground

    def scored(self: Any, inputs: Any) -> Any:
        run.trainer = self
        output = score(self, inputs)
        run.trl_advantages += output["advantages"].tolist()
        return output

    def grounded(self: Any, plans: Any, *more: Any) -> Any:
        run.pairs += plans
        return ground(self, plans, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GRPOTrainer, "_generate_and_score_completions", scored)
        patch.setattr(Grounder, "ground", grounded)
        yield


@pytest.fixture(scope="module")
def run(
    trained: Callable[[str, int], Path],
    random_checkpoint: Callable[[int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path_factory: pytest.TempPathFactory,
) -> Run:
    """Three optimizer steps with a grounder that knows the screens and one that knows nothing."""
    done = Run(tmp_path_factory.mktemp("grpo"), trained("planner", 0))
    grounder, other = trained("grounder", 0), random_checkpoint(3)
    with watched(done):
        done.figures = train_grpo(
            grpo_job(done.out, (dataset, steps, models), done.init, grounder, CONFIG, {"stranger": other}), quiet
        )
    return done


def groups_of(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["optimizer_step"], row["group"]), []).append(row)
    return list(groups.values())


def test_trls_final_advantages_are_ours(run: Run) -> None:
    """Eq. 10: what moves the policy is what the table says, rollout by rollout."""
    stored = [row["advantage"] for row in run.rows]
    assert len(stored) == len(run.trl_advantages) == 3 * 3 * 4
    assert run.trl_advantages == pytest.approx(stored, abs=1e-3)
    assert any(stored), "some group had spread"
    for group in groups_of(run.rows):
        ours = advantages([row["reward"] for row in group], 4)
        assert [row["advantage"] for row in group] == pytest.approx(ours.tolist())


def test_trl_runs_with_the_papers_settings(run: Run) -> None:
    args, trainer = run.trainer.args, run.trainer
    assert (args.loss_type, args.scale_rewards, args.num_iterations) == ("grpo", "group", 1)
    assert (args.beta, args.epsilon, args.epsilon_high, args.delta) == (0.01, 0.2, None, None)
    assert (args.temperature, args.top_p, args.top_k) == (0.9, 1.0, 0)
    assert args.use_bias_correction_kl is False
    assert args.mask_truncated_completions is False
    assert (args.importance_sampling_level, args.top_entropy_quantile, args.entropy_coef) == ("token", 1.0, 0.0)
    assert (trainer.num_generations, len(trainer.reward_funcs), trainer.epsilon_high) == (4, 1, 0.2)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 12


def test_the_default_is_the_papers_batch() -> None:
    paper = Grpo()
    assert (paper.group_size, paper.prompts_per_step * paper.group_size) == (7, 294)
    assert (paper.learning_rate, paper.temperature, paper.kl_beta, paper.clip_epsilon) == (5e-7, 0.9, 0.01, 0.2)
    assert (paper.own_prior, paper.verifier_prior) == (2, 1)


def test_the_reference_of_the_kl_term_is_the_planner_before_grpo(run: Run) -> None:
    assert run.trainer.state.log_history[0]["kl"] == pytest.approx(0, abs=1e-6)
    init = load_file(run.init / "model.safetensors")
    reference = run.trainer.ref_model.state_dict()
    assert all(torch.equal(reference[name], tensor) for name, tensor in init.items() if name in reference)


def test_every_rollout_is_kept_whole(run: Run) -> None:
    table = pq.read_table(run.out / "rollouts.parquet")
    assert table.schema.names == ROLLOUT_SCHEMA.names
    rows = table.to_pylist()
    assert [len(group) for group in groups_of(rows)] == [4] * 9
    assert [(row["optimizer_step"], row["group"]) for row in rows] == sorted(
        (row["optimizer_step"], row["group"]) for row in rows
    )
    for group in groups_of(rows):
        assert len({row["step_id"] for row in group}) == 1, "a group has one prompt"
    assert {row["gate"] for row in rows} >= {"passed"}


def test_the_table_is_enough_to_compute_every_reward_again(run: Run, steps: pa.Table) -> None:
    """Eq. 3 to 9 from the columns alone, written out once more."""
    labels = {row["step_id"]: row for row in steps.to_pylist()}
    seen = set()
    for row in run.rows:
        label, answer = labels[row["step_id"]], parse_planner(row["text"])
        right = (
            answer is not None
            and answer.action_type == label["action_type"]
            and token_f1(answer.value, label["value"]) > 0.5
        )
        assert (row["gate"] == "passed") == right
        assert row["plan"] == (answer.plan if answer else None)
        if not right:
            assert (row["reward"], row["graders"]) == (0, [])
        elif not label["boxes"]:
            assert (row["reward"], row["graders"]) == (1, [])
        else:
            graders = row["graders"]
            assert [(g["grounder"], g["prior"]) for g in graders] == [("grounder_1", 2.0), ("stranger", 1.0)]
            power = [math.exp(g["prior"] * math.exp(g["mean_logprob"])) for g in graders]
            for g, p in zip(graders, power, strict=True):
                assert g["confidence"] == pytest.approx(math.exp(g["mean_logprob"]))
                assert g["weight"] == pytest.approx(p / sum(power))
                inside = g["x"] is not None and any(
                    x1 <= g["x"] <= x2 and y1 <= g["y"] <= y2 for x1, y1, x2, y2 in label["boxes"]
                )
                assert g["hit"] == inside
                assert g["tokens"] >= 1
            assert row["reward"] == pytest.approx(sum(g["weight"] for g in graders if g["hit"]))
        seen.add((right, bool(label["boxes"])))
    assert (True, True) in seen


def test_variants_are_read_off_the_table_and_the_one_that_trained_is_exact(run: Run) -> None:
    table = pq.read_table(run.out / "rollouts.parquet")
    facts = summary(recompute(table, "probability"))
    assert (facts["same_reward"], facts["same_advantage"], facts["largest_difference"]) == (100, 100, 0)
    recomputed = recompute(table, "no_cdrem")
    for row, reward in zip(run.rows, recomputed["reward"].to_pylist(), strict=True):
        if row["graders"]:
            assert reward == row["graders"][0]["hit"]
    seconds = [grader["seconds"] for row in table.to_pylist() for grader in row["graders"]]
    assert any(seconds) and min(seconds) >= 0, "an answer that was known took none"


def test_only_plans_that_passed_the_gate_on_a_target_are_shown_to_grounders(run: Run, steps: pa.Table) -> None:
    targets = {row["step_id"] for row in steps.to_pylist() if row["boxes"]}
    wanted = [
        (row["step_id"], row["plan"]) for row in run.rows if row["gate"] == "passed" and row["step_id"] in targets
    ]
    assert wanted
    assert sorted(run.pairs) == sorted(2 * wanted), "each of the two grounders, and nothing else"


def test_the_policy_moves_and_its_vision_tower_does_not(run: Run) -> None:
    before, after = load_file(run.init / "model.safetensors"), load_file(run.out / "model.safetensors")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert not any("visual" in name for name in moved)
    assert json.loads((run.out / "generation_config.json").read_text()).get("suppress_tokens") is None


def test_figures_and_log(run: Run) -> None:
    assert run.figures["optimizer_steps"] == 3
    assert run.figures["prompts"] == 6
    assert 0 <= run.figures["frac_reward_zero_std"] <= 1
    log = [json.loads(line) for line in (run.out / "training_log.jsonl").read_text().splitlines()]
    rows = run.rows
    for step in range(3):
        of_step = [row for row in rows if row["optimizer_step"] == step]
        [logged] = [entry for entry in log if entry["step"] == step + 1 and "reward" in entry]
        # groups without spread are rounded to 1/1024 for TRL
        assert logged["reward"] == pytest.approx(np.mean([row["reward"] for row in of_step]), abs=2e-3)
        assert logged["gate_passed"] == pytest.approx(np.mean([row["gate"] == "passed" for row in of_step]))


def test_the_same_seed_trains_the_same_planner(
    run: Run,
    trained: Callable[[str, int], Path],
    random_checkpoint: Callable[[int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
) -> None:
    config = CONFIG.model_copy(update={"max_steps": 1})
    kept = []
    for name in ("one", "two"):
        out = tmp_path / name
        grounder, others = trained("grounder", 0), {"stranger": random_checkpoint(3)}
        train_grpo(grpo_job(out, (dataset, steps, models), run.init, grounder, config, others), quiet)
        rows = pq.read_table(out / "rollouts.parquet").to_pylist()
        for row in rows:
            row["graders"] = [grader | {"seconds": None} for grader in row["graders"]]
        kept.append(((out / "model.safetensors").read_bytes(), rows))
        torch.manual_seed(1234)
    assert kept[0] == kept[1]


def test_a_policy_that_wants_vision_tokens_and_groups_without_spread(
    random_checkpoint: Callable[[int], Path],
    trained: Callable[[str, int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An image token in a completion would end the run (features no longer match); equal rewards must move nothing.

    Also: without the ensemble, no verifier is even loaded.
    """
    init = shutil.copytree(random_checkpoint(4), tmp_path / "obsessed")
    obsess(init, steps)
    scores = iter([[0.35] * 4 + [0.0, 0.35, 0.0, 0.7] + [0.4, 0.4 + 1e-4, 0.4, 0.4]])

    def scripted(self: CdremReward, texts: Any, step_ids: Any) -> list[float]:
        rewards = next(scores)
        self.rows = [
            {"step_id": s, "text": t, "plan": None, "gate": "passed", "graders": [], "reward": r}
            for s, t, r in zip(step_ids, texts, rewards, strict=True)
        ]
        return rewards

    monkeypatch.setattr(CdremReward, "score", scripted)
    run = Run(tmp_path / "out", init)
    config = CONFIG.model_copy(update={"max_steps": 1, "ensemble": False})
    absent = {"absent": Path("no/such/checkpoint")}
    with watched(run):
        run.figures = train_grpo(
            grpo_job(run.out, (dataset, steps, models), init, trained("grounder", 0), config, absent), quiet
        )
    assert not any(token in row["text"] for row in run.rows for token in VISION_TOKENS)
    completions = run.trainer._passes
    unwanted = torch.tensor(vision_token_ids(run.trainer.processing_class.tokenizer))
    assert not any(torch.isin(batch["completion_ids"], unwanted).any() for batch in completions)

    assert [row["reward"] for row in run.rows] == [0.35] * 4 + [0.0, 0.35, 0.0, 0.7] + [0.4, 0.4 + 1e-4, 0.4, 0.4]
    assert run.trl_advantages[:4] == [0.0] * 4, "exactly"
    assert run.trl_advantages[8:] == [0.0] * 4
    assert run.trl_advantages[4:8] == pytest.approx(advantages([0.0, 0.35, 0.0, 0.7], 4), abs=1e-4)
    assert [row["advantage"] for row in run.rows] == pytest.approx(run.trl_advantages, abs=1e-4)
    assert run.figures["frac_reward_zero_std"] == pytest.approx(2 / 3)


def obsess(folder: Path, steps: pa.Table) -> None:
    """Changes a checkpoint so that its first choice is a vision token. (Their input embeddings are never read.)"""
    model, processor = load_checkpoint(folder, "float32", "cpu")
    screens = Screens(steps, RESIZE)
    text = processor.apply_chat_template(
        planner_messages("Click OK", [], "compact"), tokenize=False, add_generation_prompt=True
    )
    inputs = processor(text=[text], images=[[screens.image("s0")]], return_tensors="pt", do_resize=False)
    with torch.no_grad():
        hidden = model.model(**inputs).last_hidden_state[0, -1]
        ids = vision_token_ids(processor.tokenizer)
        wanted = [i for i in ids if i != processor.tokenizer.convert_tokens_to_ids("<|vision_start|>")]
        model.get_input_embeddings().weight[wanted] = 60 * hidden / hidden.norm() ** 2
        logits = model(**inputs).logits[0, -1]
    assert logits.argmax() in wanted
    weights = load_file(folder / "model.safetensors")
    name = next(name for name in weights if name.endswith("embed_tokens.weight"))
    weights[name] = model.get_input_embeddings().weight.detach().clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_too_few_prompts_for_one_step_are_an_error_and_not_an_untrained_planner(
    run: Run, trained: Callable[[str, int], Path], dataset: pa.Table, steps: pa.Table, models: Models, tmp_path: Path
) -> None:
    with pytest.raises(NothingToTrainOn, match=r"covers 2 steps.*lower grpo.prompts_per_step \(3\)"):
        train_grpo(
            grpo_job(tmp_path, (dataset.slice(0, 2), steps, models), run.init, trained("grounder", 0), CONFIG), quiet
        )


def in_episodes_of_three(steps: pa.Table, prefix: str = "") -> pa.Table:
    """The steps with other episodes; `prefix` begins all ids."""
    rows = [
        row | {"step_id": prefix + row["step_id"], "episode_id": f"{prefix}e{i // 3}", "step_index": i % 3}
        for i, row in enumerate(steps.to_pylist())
    ]
    return pa.Table.from_pylist(rows, STEP_SCHEMA)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"max_prompts": 4, "prompts_per_step": 4}, r"3 prompts are left by grpo.max_prompts \(4; whole episodes\)"),
        ({"max_tokens": 58, "prompts_per_step": 6}, r"\d prompts are left by grpo.max_tokens \(58\)"),
        (
            {"curation": {"mixed_results": {}}, "prompts_per_step": 6},
            r"\d prompts are left by grpo.curation \(mixed_results\)",
        ),
        (
            {"environment": {"episodes": "whole"}},
            r"D_{k-1} covers 2 steps that begin an episode, .* lower grpo.prompts_per_step \(3\)",
        ),
        ({"probe_steps": 2}, r"no episode of split 'validation' has at most 2 steps.*: raise grpo.probe_steps"),
        (
            {"probe_steps": 0, "validate_every": 1, "validation_steps": 2},
            r"no episode of split 'validation' has at most 2 steps.*: raise grpo.validation_steps",
        ),
    ],
)
def test_too_few_steps_are_refused_with_the_setting_that_left_so_few(
    change: dict[str, Any],
    cause: str,
    run: Run,
    trained: Callable[[str, int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
) -> None:
    config = Grpo.model_validate(CONFIG.model_dump() | {"micro_batch_size": 4, "probe_steps": 0} | change)
    data = dataset, in_episodes_of_three(steps), models
    validation = in_episodes_of_three(steps, "v")
    job = grpo_job(tmp_path / "out", data, run.init, trained("grounder", 0), config, validation=validation)
    with pytest.raises((NothingToTrainOn, NoSteps), match=cause):
        train_grpo(job, quiet)


# the reward alone

PLANS = ["click OK", "click Cancel", "the red box", "<|image_pad|>"]
NAMES = ["own", "a", "b"]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[tuple[str, str]], dict[tuple[str, str], Generation | Failure], Any]:
    """Rollouts (step, text), and what each grounder answers to each plan; at least one answers."""
    rollouts = []
    for _ in range(draw(st.integers(1, 8))):
        answer = planner_answer(
            draw(st.sampled_from(PLANS)), draw(st.sampled_from(["CLICK", "TYPE"])), draw(st.sampled_from(["", "red"]))
        )
        rollouts.append((f"s{draw(st.integers(0, 5))}", draw(st.sampled_from([answer, answer, answer, "no plan"]))))
    answers: dict[tuple[str, str], Generation | Failure] = {}
    for plan in PLANS:
        for name in NAMES:
            x, y = draw(st.sampled_from([(18, 28), (38, 28), (58, 28), (18, 68), (0, 0)]))
            logprobs = draw(st.lists(st.floats(-3, 0), min_size=5, max_size=5))
            pointed = generation("(", str(x), ",", str(y), ")", logprobs=logprobs)
            silent = generation("none", logprobs=[-1.0])
            choices = [pointed, pointed, silent, generation(stop=-0.3)] + (
                [Failure("timeout")] if name != "own" else []
            )
            answers[name, plan.replace("<|", "< |")] = draw(st.sampled_from(choices))
    mode = draw(st.sampled_from(["probability", "log_probability", "constant"]))
    return rollouts, answers, mode, draw(st.sampled_from([1.0, 0.25]))


@given(batch=batches())
def test_gate_and_deduplication_change_no_reward(steps: pa.Table, batch: Any) -> None:
    """Eq. 3 to 9 as a plain loop that asks every grounder about every plan gives the same rewards."""
    rollouts, answers, mode, tau = batch
    screens = Screens(steps, RESIZE)
    engines = {name: Scripted(lambda plan, name=name: answers[name, plan]) for name in NAMES}
    grounders = {name: Grounder(e, screens, "compact", Space.RESIZED, 8) for name, e in engines.items()}
    priors = {"own": 2.0, "a": 1.0, "b": 1.0}
    config = CONFIG.model_copy(update={"confidence": mode, "confidence_temperature": tau})
    reward = CdremReward(grounders, priors, steps, screens, config)
    rewards = reward.score([text for _, text in rollouts], [step_id for step_id, _ in rollouts])

    labels = {row["step_id"]: row for row in steps.to_pylist()}
    for (step_id, text), got, row in zip(rollouts, rewards, reward.rows, strict=True):
        answer, label = parse_planner(text), labels[step_id]
        expected = 0.0
        if answer:
            powers, hits = [], []
            for name in NAMES:
                [reading] = grounders[name].ground([(step_id, answer.plan)])
                if reading.failure:
                    continue
                c = {"probability": math.exp(reading.mean_logprob), "log_probability": reading.mean_logprob}
                powers.append(math.exp(priors[name] * c.get(mode, 1.0) / tau))
                boxes = [Box(*box, Space.ORIGINAL) for box in label["boxes"]]
                hits.append(any(box.contains(reading.point) for box in boxes) if reading.point else False)
            r_plan = sum(p for p, hit in zip(powers, hits, strict=True) if hit) / sum(powers) if label["boxes"] else 1
            r_type = answer.action_type == label["action_type"]
            r_value = token_f1(answer.value, label["value"]) > 0.5
            expected = r_plan if r_type and r_value else 0
        assert got == pytest.approx(expected)
        assert row["reward"] == got
    pa.Table.from_pylist([r | {"optimizer_step": 0, "group": 0, "advantage": 0.0} for r in reward.rows], ROLLOUT_SCHEMA)


def test_identical_plans_are_queried_once_and_failed_gates_never(steps: pa.Table) -> None:
    engine = Scripted(lambda _: generation("(", "18", ",", "28", ")"))
    screens = Screens(steps, RESIZE)
    reward = CdremReward(
        {"own": Grounder(engine, screens, "compact", Space.RESIZED, 8)}, {"own": 2.0}, steps, screens, CONFIG
    )
    good, wrong = planner_answer("click OK", "CLICK", ""), planner_answer("click OK", "TYPE", "x")
    assert reward.score([good, good, wrong, "?", good], ["s0", "s0", "s0", "s0", "s5"]) == [1, 1, 0, 0, 1]
    assert len(engine.requests) == 1
    assert reward.score([wrong, "?"], ["s0", "s0"]) == [0, 0]
    assert len(engine.requests) == 1
    assert [row["gate"] for row in reward.rows] == ["wrong_type", "unparsed"]


@given(batch=batches(), data=st.data())
def test_votes_queried_early_change_no_reward_and_no_row(steps: pa.Table, batch: Any, data: Any) -> None:
    """In any order and in any parts, with some grounders local and some remote."""
    rollouts, answers, mode, tau = batch
    texts, ids = [text for _, text in rollouts], [step_id for step_id, _ in rollouts]
    screens = Screens(steps, RESIZE)
    config = CONFIG.model_copy(update={"confidence": mode, "confidence_temperature": tau})

    def scored(remote: list[bool], early: list[list[int]]) -> tuple[list[float], list[dict[str, Any]]]:
        engines = {
            name: Scripted(lambda plan, name=name: answers[name, plan], remote=away)
            for name, away in zip(NAMES, remote, strict=True)
        }
        grounders = {name: Grounder(e, screens, "compact", Space.RESIZED, 8) for name, e in engines.items()}
        reward = CdremReward(grounders, {"own": 2.0, "a": 1.0, "b": 1.0}, steps, screens, config)
        assert reward.remote == any(remote)
        with reward.pool():
            for part in early:
                reward.ask([texts[i] for i in part], [ids[i] for i in part])
            rewards = reward.score(texts, ids)
        return rewards, untimed(reward.rows)

    places = data.draw(st.lists(st.booleans(), min_size=3, max_size=3))
    early = data.draw(st.lists(st.lists(st.integers(0, len(texts) - 1)), max_size=4))
    rewards, rows = scored(places, early)
    assert (rewards, rows) == scored([False] * 3, [])
    assert advantages(rewards * 2, 2).tolist() == advantages([row["reward"] for row in rows] * 2, 2).tolist()


def test_if_all_grounders_fail_there_is_an_error_and_no_reward(steps: pa.Table) -> None:
    screens = Screens(steps, RESIZE)
    grounder = Grounder(Scripted(lambda _: Failure("timeout")), screens, "compact", Space.RESIZED, 8)
    reward = CdremReward({"own": grounder}, {"own": 2.0}, steps, screens, CONFIG)
    with pytest.raises(NoVerdict, match="never silently 0"):
        reward.score([planner_answer("click OK", "CLICK", "")], ["s0"])


@dataclass
class Early:
    """What a run with a grounder behind an endpoint did, and what it left."""

    queried: list[list[int]]  # of each batch, how many rollouts at a time
    requests: int
    weights: bytes
    rows: list[dict[str, Any]]


@pytest.fixture
def server(trained: Callable[[str, int], Path]) -> Iterator[OpenAIServer]:
    """An endpoint of a grounder that knows the screens."""
    engine = TransformersEngine(str(trained("grounder", 0)), dtype="float32", device="cpu", batch_size=1)
    running = OpenAIServer(engine).start()
    yield running
    running.stop()


@pytest.fixture
def far(server: OpenAIServer, trained: Callable[[str, int], Path]) -> Member:
    return Member(model="tiny", engine="openai", base_url=server.url, processor=str(trained("grounder", 0)))


def test_a_run_that_asks_while_it_samples_is_the_run_that_asks_afterwards(
    run: Run,
    server: OpenAIServer,
    far: Member,
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
) -> None:
    """The same draws, answers, rows in their order, advantages and weights; and no request more."""
    path = far.processor
    config = CONFIG.model_copy(update={"max_steps": 2})

    def trained_with(early: bool) -> Early:
        queried: list[list[int]] = []
        server.requests, out = [], tmp_path / str(early)
        sample, ask = GRPOTrainer._generate_single_turn, CdremReward.ask

        def sampled(self: Any, *args: Any) -> Any:
            queried.append([])
            return sample(self, *args)

        def named(self: CdremReward, texts: Any, step_ids: Any) -> None:
            queried[-1].append(len(texts))
            ask(self, texts, step_ids)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GRPOTrainer, "_generate_single_turn", sampled)
            patch.setattr(CdremReward, "ask", named)
            if not early:
                patch.setattr(CdremReward, "remote", False)
            grounder, others = path, {"far": far}
            train_grpo(grpo_job(out, (dataset, steps, models), run.init, grounder, config, others), quiet)
        rows = untimed(pq.read_table(out / "rollouts.parquet").to_pylist())
        return Early(queried, len(server.requests), (out / "model.safetensors").read_bytes(), rows)

    early, late = trained_with(True), trained_with(False)
    assert late.queried == [[], []]
    assert len(early.queried) == 2 and all(first < 12 and last == 12 for first, *_, last in early.queried)
    assert early.rows == late.rows and any(len(row["graders"]) == 2 for row in early.rows)
    assert early.weights == late.weights
    assert early.requests == late.requests


def test_graders_that_all_fail_while_it_samples_stop_the_step_with_the_reason(
    run: Run,
    server: OpenAIServer,
    far: Member,
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
) -> None:
    path = far.processor
    server.faults = [lambda *_: False] * 2 + [status(400)] * 99  # the two of the probe are answered
    with pytest.MonkeyPatch.context() as patch:
        # ϕ_k too is behind an endpoint where the engine of the experiment is a server
        patch.setattr(grpo, "opened", lambda _, *args, **settings: opened(far, *args, **settings))
        with pytest.raises(NoVerdict, match="no grounder answered for a plan"):
            train_grpo(grpo_job(tmp_path, (dataset, steps, models), run.init, path, CONFIG), quiet)
    assert not list(beside(tmp_path).glob("rollouts/*.parquet")), "no reward, no row"
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join(20)
            assert not thread.is_alive()


def test_a_probe_without_a_verdict_costs_no_training(
    run: Run,
    server: OpenAIServer,
    far: Member,
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ϕ_k's server fails after the last step."""

    def fail_at_the_end(done: int, of: int, figures: Any) -> None:
        if done == of:
            server.faults = [status(400)] * 999

    monkeypatch.setattr(grpo, "opened", lambda _, *args, **settings: opened(far, *args, **settings))
    job = grpo_job(tmp_path / "out", (dataset, steps, models), run.init, far.processor, CONFIG, validation=steps)
    figures = train_grpo(job, fail_at_the_end)
    assert "probe" not in figures and (job.out / "model.safetensors").exists()
    [warning] = figures["warnings"]
    assert "the probe measured nothing, and the model is kept without it: no grounder answered" in warning


def test_without_grounders_there_is_no_reward(steps: pa.Table) -> None:
    with pytest.raises(ValueError, match="at least one grounder"):
        CdremReward({}, {}, steps, Screens(steps, RESIZE), CONFIG)


def test_prompts_are_steps_that_sft_did_not_see(
    run: Run, trained: Callable[[str, int], Path], dataset: pa.Table, steps: pa.Table, models: Models, tmp_path: Path
) -> None:
    """The rollouts, the table of prompts beside the weights, and the probe's training side."""
    config = CONFIG.model_copy(update={"max_steps": 1, "prompts": "unseen", "probe_steps": 4, "probe_between": 0})
    seen, unseen = dataset.slice(0, 2), {"s2", "s3", "s4", "s5"}
    validation = conftest.step_table(conftest.step("v0", screenshot=conftest.png(), goal="Click Cancel"))
    job = grpo_job(
        tmp_path / "out", (seen, steps, models), run.init, trained("grounder", 0), config, validation=validation
    )
    figures = train_grpo(job, quiet)
    asked = [row["step_id"] for row in pq.read_table(job.out / "preflight.parquet").to_pylist()]
    assert set(asked) == unseen and figures["prompts"] == len(asked) == 4
    assert {row["step_id"] for row in pq.read_table(job.out / "rollouts.parquet").to_pylist()} <= unseen
    answers = json.loads((job.scratch / "probe" / "00000000.json").read_text())["greedy"]
    assert set(answers) - {"v0"} == unseen


def test_labels_may_be_fewer_for_grpo_too(dataset: pa.Table, steps: pa.Table, models: Models, tmp_path: Path) -> None:
    """A share of the labels is a share of those that GRPO reads as well, and a larger one holds a smaller one."""
    data, asked = (dataset.slice(0, 2), steps, models), list[frozenset[str]]()
    for most in (1, 2, 3, 9):
        config = Grpo(prompts="unseen", prompts_per_step=1, group_size=2, micro_batch_size=2, max_prompts=most)
        asked.append(asked_steps(grpo_job(tmp_path / f"{most}", data, "no model", "no model", config), config))
    assert [len(one) for one in asked] == [1, 2, 3, 4] and asked[0] < asked[1] < asked[2] < asked[3]
    with pytest.raises(ValidationError, match="max_prompts 1 is below the 2 prompts_per_step"):
        Grpo(prompts_per_step=2, group_size=2, micro_batch_size=2, max_prompts=1)


@pytest.mark.parametrize("covered", [4, 6])
def test_too_few_unseen_steps_are_an_error_before_any_model_is_loaded(
    dataset: pa.Table, steps: pa.Table, models: Models, tmp_path: Path, covered: int
) -> None:
    config = CONFIG.model_copy(update={"prompts": "unseen"})
    data = (dataset.slice(0, covered), steps, models)
    remedy = rf"{6 - covered} training steps have no row in D_{{k-1}}.*lower benchmark.max_train_steps"
    with pytest.raises(NothingToTrainOn, match=remedy):
        train_grpo(grpo_job(tmp_path / "grpo", data, "no model", "no model", config), quiet)
    job = training_job(EndToEndJob, tmp_path / "one", data, "no model", sft=Sft(), grpo=config)
    with pytest.raises(NothingToTrainOn, match=remedy):
        train_end_to_end(job, quiet)
