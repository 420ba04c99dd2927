"""Whether training changed what a model can do: the same fixed steps before and after, some of training, some of validation.

GRPO's planner is asked while it is trained (`Probe`): before the first step, now and then, and with the weights that are kept;
greedily and, once each, at the temperature of its rollouts. Models of SFT are asked after training, as their checkpoints are,
and their bases beside them (`probe_sft`). Nothing of it changes what is trained, and no test split is read.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import TrainerState

from coepg_dagster.artifacts import whole
from coepg_dagster.evaluation.change import PROBED, change_of, change_text
from coepg_dagster.experiment import Grpo, Models
from coepg_dagster.inference.agents import Grounder, Planner, planner_inputs
from coepg_dagster.inference.engine import Sampling
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.jobs import SftJob
from coepg_dagster.prompts import parse_planner
from coepg_dagster.rewards.gate import gate_of
from coepg_dagster.steps import GATE_PASSED, whole_episodes
from coepg_dagster.training.cdrem_reward import CdremReward
from coepg_dagster.training.validation import CHUNK, Looks, Questions, Scores

SECONDS: Final = "probe_seconds"
"""What a look leaves in the trainer's log; its answers lie in a file."""

Rewards = Mapping[str, float]
"""step id → reward of the answer, 0 to 1."""
Row = TypeVar("Row")


def probed_steps(steps: pa.Table, trained_on: Sequence[str], validation: pa.Table, limit: int) -> dict[str, pa.Table]:
    """The steps of each of PROBED: whole episodes, at most `limit` steps, of what is trained on and of validation."""
    drawn = whole_episodes(steps, limit, frozenset(trained_on)), whole_episodes(validation, limit)
    return dict(zip(PROBED, drawn, strict=True))


def changes(asked: Mapping[str, pa.Table], before: Rewards, after: Rewards) -> dict[str, dict[str, Any] | None]:
    """The Change of each split, over its steps that have a reward; None where it has none."""
    found = {}
    for split, steps in asked.items():
        names = zip(steps["step_id"].to_pylist(), steps["episode_id"].to_pylist(), strict=True)
        rows = [(before[step_id], after[step_id], episode) for step_id, episode in names if step_id in before]
        found[split] = change_of(*zip(*rows, strict=True)) if rows else None
    return found


def probe_steps_between(steps: int, looks: int) -> frozenset[int]:
    """After which of so many optimizer steps GRPO is asked, besides before the first and after the last: evenly spread."""
    return frozenset(round(steps * i / (looks + 1)) for i in range(1, looks + 1)) - {0, steps}


class Probe(Looks):
    """Asks a policy about fixed steps before the first step, `probe_between` times between, and with the weights that are kept.

    Answers lie in `folder`, where a continued run finds those from before its checkpoint; they are judged when training is over,
    so that equal plans are looked for once.

    Args:
        asked: the steps of each split.
        reward: judges answers on them; `judge` is its name.
        seed: of what is sampled.
    """

    def __init__(
        self,
        asked: Mapping[str, pa.Table],
        questions: Questions,
        reward: Scores,
        judge: str,
        config: Grpo,
        seed: int,
        folder: Path,
    ) -> None:
        self._asked, self._questions, self._reward, self._judge = asked, questions, reward, judge
        self._folder, self._looks = folder, config.probe_between
        self._samplings = {
            "greedy": Sampling(config.max_plan_tokens),
            "sampled": Sampling(config.max_plan_tokens, temperature=config.temperature, seed=seed),
        }
        folder.mkdir(parents=True, exist_ok=True)

    def due(self, state: TrainerState) -> bool:
        return state.global_step in probe_steps_between(state.max_steps, self._looks)

    def look(self, state: TrainerState, model: Any) -> None:
        started = time.perf_counter()
        answers: dict[str, dict[str, str]] = {}
        for how, sampling in self._samplings.items():
            mine = [
                pair
                for steps, texts in self._questions.answers(model, sampling)
                for pair in zip(steps, texts, strict=True)
            ]
            answers[how] = dict(gather_object(mine))
        if PartialState().is_main_process:
            with whole(self._file(state.global_step)) as draft:
                draft.write_text(json.dumps(answers))
        PartialState().wait_for_everyone()
        state.log_history.append({"step": state.global_step, SECONDS: time.perf_counter() - started})

    def end(self, state: TrainerState, model: Any) -> dict[str, Any]:
        """Asks a model that was trained to the end; {"probe": figures}. The rate of each look stands in the log, in per cent.

        `train` and `validation` are Changes of the greedy answers, `sampled` holds the same of the sampled ones.
        """
        self.look(state, model)
        started = time.perf_counter()
        steps = sorted({entry["step"] for entry in state.log_history if SECONDS in entry})
        answers = {step: json.loads(self._file(step).read_text()) for step in steps}
        rewards = self._judged(answers)
        found = {how: changes(self._asked, rewards[steps[0], how], rewards[steps[-1], how]) for how in self._samplings}
        for step in steps:
            entry = {"step": step}
            for how in self._samplings:
                at = changes(self._asked, rewards[step, how], rewards[step, how])
                entry |= {f"probe_{split}_{how}": change["after"] for split, change in at.items() if change}
            state.log_history.append(entry)
        for split, change in found["greedy"].items():
            if change:
                print(f"greedy answers on {split} steps, before and after GRPO: {change_text(change)}", flush=True)
        seconds = sum(entry[SECONDS] for entry in state.log_history if SECONDS in entry)
        return {
            "probe": {
                **found["greedy"],
                "sampled": found["sampled"],
                "steps": {split: table.num_rows for split, table in self._asked.items()},
                "judge": self._judge,
                "seconds": seconds + time.perf_counter() - started,
            }
        }

    def _judged(self, answers: Mapping[int, Mapping[str, Mapping[str, str]]]) -> dict[tuple[int, str], Rewards]:
        """(optimizer step, how it was asked) → the rewards. All answers on a step are judged together."""
        asked = [(step, how) for step, hows in answers.items() for how in hows]
        mine, given = self._questions.share(), []
        for start in range(0, len(mine), CHUNK):
            rows = [(look, step_id) for step_id in mine[start : start + CHUNK] for look in asked]
            texts = [answers[step][how][step_id] for (step, how), step_id in rows]
            rewards = self._reward.score(texts, [step_id for _, step_id in rows])
            given += [(*row, reward) for row, reward in zip(rows, rewards, strict=True)]
        found: dict[tuple[int, str], dict[str, float]] = {look: {} for look in asked}
        for look, step_id, reward in gather_object(given):
            found[look][step_id] = reward
        return dict(found)

    def _file(self, step: int) -> Path:
        return self._folder / f"{step:08}.json"


def judge_of(models: Models) -> tuple[str, str]:
    """(name, checkpoint) of the grounder by which π_k and its base are compared; neither was trained with it.

    The first open verifier that is loaded from a checkpoint, since those know how planners write; else the base grounder.
    """
    for name, member in models.verifiers.items():
        if models.engine_of(member) != "openai":
            return name, member.model
    return "base_grounder", models.base_grounder


def probe_sft(job: SftJob, dataset: pa.Table, steps: pa.Table) -> dict[str, Any]:
    """What the checkpoint that a job made does better than its base, both greedy; {"probe": figures} as those of `Probe`.

    Planner: the share of steps on which its plan passes the gate and `judge_of` finds the target by it. Grounder: the share of
    plans by which it finds the target. Those are rows of D_{k-1}, one for each step, and on validation, where there are none, the
    plans of the base planner that pass the gate.

    One model is loaded at a time; those that this process trained must be out of use.

    Args:
        dataset, steps: D_{k-1} and the steps of the train split, which the job names.
    """
    started = time.perf_counter()
    gc.collect()  # a trainer and its model refer to each other
    if job.on_gpu:
        torch.cuda.empty_cache()
    models, limit, compared = job.models, job.config.probe_steps, (job.init, str(job.out))

    def opened(checkpoint: str) -> TransformersEngine:
        return TransformersEngine(checkpoint, dtype=models.dtype, device=job.device, batch_size=job.batch_size)

    planner = job.role == "planner"
    rows = [row for row in dataset.select(["step_id", "plan", "box"]).to_pylist() if planner or row["box"]]
    asked = probed_steps(steps, [row["step_id"] for row in rows], job.validation_steps(), limit)
    both = pa.concat_tables(asked.values())
    if planner:
        judge, checkpoint = judge_of(models)
        texts = [_plans(opened(one), both, job) for one in compared]
        before, after = _successes(judge, opened(checkpoint), texts, both, job)
    else:
        judge = "labels"
        plans = _passing(_plans(opened(models.base_planner), asked["validation"], job), both)
        learnt = set(asked["train"]["step_id"].to_pylist())
        plans |= {row["step_id"]: row["plan"] for row in reversed(rows) if row["step_id"] in learnt}
        before, after = (_hits(opened(one), plans, both, job) for one in compared)
    found = changes(asked, before, after)
    for split, change in found.items():
        if change:
            print(f"greedy answers on {split} steps, base and after SFT: {change_text(change)}", flush=True)
    counts = {split: sum(step_id in before for step_id in asked[split]["step_id"].to_pylist()) for split in asked}
    return {"probe": {**found, "steps": counts, "judge": judge, "seconds": time.perf_counter() - started}}


def _parts(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), CHUNK):
        yield rows[start : start + CHUNK]


def _plans(engine: TransformersEngine, steps: pa.Table, job: SftJob) -> dict[str, str]:
    """step id → what a planner answers."""
    planner = Planner(engine, Screens(steps, engine.resize), job.models.prompts)
    found = {}
    for part in _parts(planner_inputs(steps)):
        for task, (plan,) in zip(part, planner.plan(part, Sampling(job.max_plan_tokens)), strict=True):
            found[task.step_id] = plan.text
    return found


def _grounder(engine: TransformersEngine, screens: Screens, job: SftJob) -> Grounder:
    return Grounder(engine, screens, job.models.prompts, job.models.coordinates, job.max_point_tokens)


def _successes(
    judge: str, engine: TransformersEngine, answers: Sequence[Mapping[str, str]], steps: pa.Table, job: SftJob
) -> list[dict[str, float]]:
    """The reward of each planner's answers, by one grounder alone."""
    screens = Screens(steps, engine.resize)
    reward = CdremReward({judge: _grounder(engine, screens, job)}, {judge: 1.0}, steps, screens, Grpo())
    found: list[dict[str, float]] = [{} for _ in answers]
    for part in _parts(steps["step_id"].to_pylist()):
        rows = [(i, step_id) for step_id in part for i in range(len(answers))]
        rewards = reward.score([answers[i][step_id] for i, step_id in rows], [step_id for _, step_id in rows])
        for (i, step_id), value in zip(rows, rewards, strict=True):
            found[i][step_id] = value
    return found


def _passing(answers: Mapping[str, str], steps: pa.Table) -> dict[str, str]:
    """step id → the plan of a planner's answer, where it passes the gate and the step has a target."""
    plans = {}
    for row in steps.select(["step_id", "action_type", "value", "boxes"]).to_pylist():
        text = answers.get(row["step_id"])
        if text is None or not row["boxes"]:
            continue
        answer = parse_planner(text)
        if answer and gate_of(answer, row["action_type"], row["value"]) == GATE_PASSED:
            plans[row["step_id"]] = answer.plan
    return plans


def _hits(engine: TransformersEngine, plans: Mapping[str, str], steps: pa.Table, job: SftJob) -> dict[str, float]:
    """step id → whether the grounder finds the step's target by its plan."""
    screens = Screens(steps, engine.resize)
    grounder = _grounder(engine, screens, job)
    found = {}
    for part in _parts(list(plans.items())):
        for (step_id, _), reading in zip(part, grounder.ground(part), strict=True):
            found[step_id] = float(reading.hits(screens.boxes(step_id)))
    return found
