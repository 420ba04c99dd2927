"""The probe: answers on fixed steps of training and of validation, before and after training.

GRPO's planner answers while it is trained (`Probe`): before the first step, at intervals, and with the weights that are kept;
greedily and, once each, at the temperature of its rollouts. After SFT, the checkpoint and its base answer (`probe_sft`).
Probing changes nothing in training and reads no test split.
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

from coepg_dagster.artifacts import seal, whole
from coepg_dagster.evaluation.change import PROBED, change_of, change_text
from coepg_dagster.experiment.models import Member, Models
from coepg_dagster.experiment.training import Grpo
from coepg_dagster.inference.agents import Grounder, Planner, planner_inputs
from coepg_dagster.inference.engine import Sampling
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.jobs import SftJob
from coepg_dagster.progress import Ended
from coepg_dagster.prompts import parse_planner
from coepg_dagster.refusal import Refusal
from coepg_dagster.rewards.gate import gate_of
from coepg_dagster.steps import GATE_PASSED, whole_episodes
from coepg_dagster.training.cdrem_reward import CdremReward
from coepg_dagster.training.validation import CHUNK, PolicyEvaluation, Questions, Scores

SECONDS: Final = "probe_seconds"
"""The entry of a probe in the trainer's log; its answers are in a file."""

Rewards = Mapping[str, float]
"""step id → reward of the answer, 0 to 1."""
Row = TypeVar("Row")


def probed_steps(steps: pa.Table, trained_on: Sequence[str], validation: pa.Table, limit: int) -> dict[str, pa.Table]:
    """The steps of each split of PROBED: whole episodes, at most `limit` steps, of those trained on and of validation.

    Those trained on are drawn anew: of steps that `max_train_steps` left over, only what D_k failed to cover would be probed.
    """
    drawn = whole_episodes(steps, limit, frozenset(trained_on), "probe/"), whole_episodes(validation, limit)
    return dict(zip(PROBED, drawn, strict=True))


def changes(probed: Mapping[str, pa.Table], before: Rewards, after: Rewards) -> dict[str, dict[str, Any] | None]:
    """The Change of each split, over its steps that have a reward; None if there are none."""
    by_split = {}
    for split, steps in probed.items():
        names = zip(steps["step_id"].to_pylist(), steps["episode_id"].to_pylist(), strict=True)
        rows = [(before[step_id], after[step_id], episode) for step_id, episode in names if step_id in before]
        by_split[split] = change_of(*zip(*rows, strict=True)) if rows else None
    return by_split


def probe_steps_between(steps: int, probes: int) -> frozenset[int]:
    """The optimizer steps after which `probes` probes are made, evenly spread between the first and the last of `steps`."""
    return frozenset(round(steps * i / (probes + 1)) for i in range(1, probes + 1)) - {0, steps}


class Probe(PolicyEvaluation):
    """A policy's answers on fixed steps before the first step, `probe_between` times between, and with the weights kept.

    Answers are written to `folder`, where a continued run reads the earlier ones. They are judged when training is over, so
    that equal plans are grounded once.

    Args:
        probed: the steps of each split.
        reward: judges answers on them; `judge` is its name.
        seed: of the sampled answers.
    """

    def __init__(
        self,
        probed: Mapping[str, pa.Table],
        questions: Questions,
        reward: Scores,
        judge: str,
        config: Grpo,
        seed: int,
        folder: Path,
    ) -> None:
        self._probed, self._questions, self._reward, self._judge = probed, questions, reward, judge
        self._folder, self._between = folder, config.probe_between
        self._samplings = {
            "greedy": Sampling(config.max_plan_tokens),
            "sampled": Sampling(config.max_plan_tokens, temperature=config.temperature, seed=seed),
        }
        folder.mkdir(parents=True, exist_ok=True)

    def due(self, state: TrainerState) -> bool:
        return state.global_step in probe_steps_between(state.max_steps, self._between)

    def evaluate(self, state: TrainerState, model: Any) -> None:
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
            seal(self._file(state.global_step))
        PartialState().wait_for_everyone()
        state.log_history.append({"step": state.global_step, SECONDS: time.perf_counter() - started})

    def end(self, state: TrainerState, model: Any) -> dict[str, Any]:
        """Probes the trained model; returns {"probe": figures}. The success of each probe is added to the log, in per cent.

        `train` and `validation` are Changes of the greedy answers, `sampled` holds those of the sampled ones. Answers that
        cannot be judged cost no training: {"warnings": [why]}.
        """
        self.evaluate(state, model)
        started = time.perf_counter()
        steps = sorted({entry["step"] for entry in state.log_history if SECONDS in entry})
        answers = {step: json.loads(self._file(step).read_text()) for step in steps}
        try:
            rewards = self._judged(answers)
        except Refusal as error:
            return {"warnings": [unmeasured(error)]}
        first, last = steps[0], steps[-1]
        by_sampling = {how: changes(self._probed, rewards[first, how], rewards[last, how]) for how in self._samplings}
        for step in steps:
            entry = {"step": step}
            for how in self._samplings:
                at = changes(self._probed, rewards[step, how], rewards[step, how])
                entry |= {f"probe_{split}_{how}": change["after"] for split, change in at.items() if change}
            state.log_history.append(entry)
        for split, change in by_sampling["greedy"].items():
            if change:
                print(f"greedy answers on {split} steps, before and after GRPO: {change_text(change)}", flush=True)
        seconds = sum(entry[SECONDS] for entry in state.log_history if SECONDS in entry)
        return {
            "probe": {
                **by_sampling["greedy"],
                "sampled": by_sampling["sampled"],
                "steps": {split: table.num_rows for split, table in self._probed.items()},
                "judge": self._judge,
                "seconds": seconds + time.perf_counter() - started,
            }
        }

    def _judged(self, answers: Mapping[int, Mapping[str, Mapping[str, str]]]) -> dict[tuple[int, str], Rewards]:
        """(optimizer step, sampling) → the rewards. All answers on a step are judged together.

        Raises Ended in every process if one of them got no verdict.
        """
        probes = [(step, how) for step, hows in answers.items() for how in hows]
        mine, judged, failed = self._questions.share(), [], list[str]()
        try:
            for start in range(0, len(mine), CHUNK):
                rows = [(probe, step_id) for step_id in mine[start : start + CHUNK] for probe in probes]
                texts = [answers[step][how][step_id] for (step, how), step_id in rows]
                rewards = self._reward.score(texts, [step_id for _, step_id in rows])
                judged += [(*row, reward) for row, reward in zip(rows, rewards, strict=True)]
        except Refusal as error:
            failed = [str(error)]
        if failed := gather_object(failed):
            raise Ended(failed[0])
        by_probe: dict[tuple[int, str], dict[str, float]] = {probe: {} for probe in probes}
        for probe, step_id, reward in gather_object(judged):
            by_probe[probe][step_id] = reward
        return dict(by_probe)

    def _file(self, step: int) -> Path:
        return self._folder / f"{step:08}.json"


def unmeasured(error: Refusal) -> str:
    """The warning that a probe after training came to nothing."""
    return f"the probe measured nothing, and the model is kept without it: {error}"


def judge_of(models: Models) -> tuple[str, str]:
    """(name, checkpoint) of the grounder that judges π_k against its base; neither was trained with it.

    It is the first open verifier that is loaded from a checkpoint, else the base grounder.
    """
    return _first_loaded(models, models.verifiers) or ("base_grounder", models.base_grounder)


def writer_of(models: Models) -> tuple[str, str]:
    """(name, checkpoint) of the planner by whose plans ϕ_k and its base are compared on validation.

    It is the first open planner that is loaded from a checkpoint, else the base planner: the pool wrote what ϕ_k learns from,
    and a base planner may have no words for the domain.
    """
    return _first_loaded(models, models.planners) or ("base_planner", models.base_planner)


def _first_loaded(models: Models, pool: Mapping[str, Member]) -> tuple[str, str] | None:
    """The first member of a pool that is loaded from a checkpoint; None if servers have all."""
    loaded = (name for name, member in pool.items() if models.engine_of(member) != "openai")
    return next(((name, pool[name].model) for name in loaded), None)


def probe_sft(job: SftJob, dataset: pa.Table, steps: pa.Table) -> dict[str, Any]:
    """Compares the checkpoint of a job with its base, both greedy; returns {"probe": figures} as those of `Probe`.

    A planner succeeds on a step if its plan passes the gate and `judge_of` hits the target with it. A grounder succeeds if it
    hits the target with a given plan: on training steps one of D_{k-1}, on validation steps one of `writer_of` that passes the
    gate.

    One model is loaded at a time; the model that this process trained must no longer be used.

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
    probed = probed_steps(steps, [row["step_id"] for row in rows], job.validation_steps(), limit)
    both = pa.concat_tables(probed.values())
    if planner:
        judge, checkpoint = judge_of(models)
        texts = [_plans(opened(one), both, job) for one in compared]
        before, after = _successes(judge, opened(checkpoint), texts, both, job)
    else:
        judge = "labels"
        plans = _passing(_plans(opened(writer_of(models)[1]), probed["validation"], job), both)
        learnt = set(probed["train"]["step_id"].to_pylist())
        plans |= {row["step_id"]: row["plan"] for row in reversed(rows) if row["step_id"] in learnt}
        before, after = (_hits(opened(one), plans, both, job) for one in compared)
    by_split = changes(probed, before, after)
    for split, change in by_split.items():
        if change:
            print(f"greedy answers on {split} steps, base and after SFT: {change_text(change)}", flush=True)
    counts = {split: sum(step_id in before for step_id in probed[split]["step_id"].to_pylist()) for split in probed}
    return {"probe": {**by_split, "steps": counts, "judge": judge, "seconds": time.perf_counter() - started}}


def _parts(rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
    for start in range(0, len(rows), CHUNK):
        yield rows[start : start + CHUNK]


def _plans(engine: TransformersEngine, steps: pa.Table, job: SftJob) -> dict[str, str]:
    """step id → the text of a planner's answer."""
    planner = Planner(engine, Screens(steps, engine.resize), job.models.prompts)
    texts = {}
    for part in _parts(planner_inputs(steps)):
        for task, (plan,) in zip(part, planner.plan(part, Sampling(job.max_plan_tokens)), strict=True):
            texts[task.step_id] = plan.text
    return texts


def _grounder(engine: TransformersEngine, screens: Screens, job: SftJob) -> Grounder:
    return Grounder(engine, screens, job.models.prompts, job.models.coordinates, job.max_point_tokens)


def _successes(
    judge: str, engine: TransformersEngine, answers: Sequence[Mapping[str, str]], steps: pa.Table, job: SftJob
) -> list[dict[str, float]]:
    """The reward of each planner's answers, by one grounder alone."""
    screens = Screens(steps, engine.resize)
    reward = CdremReward({judge: _grounder(engine, screens, job)}, {judge: 1.0}, steps, screens, Grpo())
    of_each: list[dict[str, float]] = [{} for _ in answers]
    for part in _parts(steps["step_id"].to_pylist()):
        rows = [(i, step_id) for step_id in part for i in range(len(answers))]
        rewards = reward.score([answers[i][step_id] for i, step_id in rows], [step_id for _, step_id in rows])
        for (i, step_id), value in zip(rows, rewards, strict=True):
            of_each[i][step_id] = value
    return of_each


def _passing(answers: Mapping[str, str], steps: pa.Table) -> dict[str, str]:
    """step id → the plan of a planner's answer, if it passes the gate and the step has a target."""
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
    """step id → 1 if the grounder hits the step's target with its plan, else 0."""
    screens = Screens(steps, engine.resize)
    grounder = _grounder(engine, screens, job)
    hits = {}
    for part in _parts(list(plans.items())):
        for (step_id, _), grounding in zip(part, grounder.ground(part), strict=True):
            hits[step_id] = float(grounding.hits(screens.boxes(step_id)))
    return hits
