"""Validation during GRPO: the weights with the best reward on the validation split are kept; never by loss or a test split.

The reward is that of the agent M_k, on greedy answers to a fixed part of the validation split: 1 if the gate passes and ϕ_k
alone hits the target with the plan. (With all graders of C-DREM a validation costs three times as much, and on the sandbox it
prefers other weights than Step SR does.) Step 0 is validated too, so that the result is never worse there than π_k. A
validation draws no random numbers and changes nothing in training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Protocol

import pyarrow as pa
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from coepg_dagster.artifacts import seal, whole
from coepg_dagster.experiment.training import Grpo
from coepg_dagster.inference.agents import PlannerInput, planner_inputs
from coepg_dagster.inference.engine import Failure, Request, Sampling
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.prompts import Style
from coepg_dagster.provenance import Agent

REWARD: Final = "validation_reward"
"""The entry of a validation in the trainer's log."""


CHUNK: Final = 64
"""Number of steps whose screenshots are held at once."""


class Scores(Protocol):
    """A reward of answers on labelled steps."""

    def score(self, texts: Sequence[str], step_ids: Sequence[str]) -> list[float]: ...


Ask = Callable[[str], Request]
"""The request to an agent on a step, by the step's id."""


def requests_of(steps: pa.Table, screens: Screens, style: Style, agent: Agent) -> dict[str, Ask]:
    """Step id → what makes its request to the agent, in the order of the table; only that decodes the screenshot."""

    def ask(task: PlannerInput) -> Ask:
        messages = task.messages(style) if agent == "decoupled" else task.end_to_end_messages(style)
        return lambda step_id: Request(screens.image(step_id), messages)

    return {task.step_id: ask(task) for task in planner_inputs(steps)}


class Questions:
    """Fixed steps on which a model answers while it is trained; each process takes a share of them.

    This uses separate random generators and leaves the model as it was. Each process must hold the whole model.

    Args:
        ask: the requests, by step id (`requests_of`).
        batch_size: requests per forward pass.
    """

    def __init__(self, ask: Mapping[str, Ask], processor: Any, batch_size: int) -> None:
        self._ask, self._processor, self._batch_size = ask, processor, batch_size

    def share(self) -> list[str]:
        """The steps of this process."""
        processes = PartialState()
        return list(self._ask)[processes.process_index :: processes.num_processes]

    def answers(self, model: Any, sampling: Sampling) -> Iterator[tuple[list[str], list[str]]]:
        """(step ids, the text of the model's answer on each), in chunks of this process's steps."""
        mine, number = self.share(), {step_id: i for i, step_id in enumerate(self._ask)}
        training = model.training
        # adapters are within the layers of the model that they were added to
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        engine = TransformersEngine.of(base.eval(), self._processor, batch_size=self._batch_size)
        try:
            for start in range(0, len(mine), CHUNK):
                steps = mine[start : start + CHUNK]
                drawn = replace(sampling, seed=sampling.seed + number[steps[0]])
                with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
                    answers = engine.generate([self._ask[step_id](step_id) for step_id in steps], drawn)
                # this engine never fails
                yield steps, [answer.text for (answer,) in answers if not isinstance(answer, Failure)]
        finally:
            model.train(training)


class PolicyEvaluation(TrainerCallback):  # type: ignore[misc]
    """Calls `evaluate` on a policy before its first optimizer step, and after each step that is `due`."""

    def due(self, state: TrainerState) -> bool:
        """Whether `evaluate` is called after the current step."""
        raise NotImplementedError

    def evaluate(self, state: TrainerState, model: Any) -> None:
        """Lets the policy answer, and keeps the result."""
        raise NotImplementedError

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any, **_: Any
    ) -> None:
        if state.global_step == 0:
            self.evaluate(state, model)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any, **_: Any
    ) -> None:
        if self.due(state):
            self.evaluate(state, model)


class KeepBest(PolicyEvaluation):
    """Validates before the first step, after every `validate_every` steps and after the last; of equal results the later wins.

    Weights are kept in `folder` as long as a continued run may need them.
    """

    def __init__(self, questions: Questions, reward: Scores, config: Grpo, folder: Path) -> None:
        assert config.validate_every is not None
        self._questions, self._reward, self._folder = questions, reward, folder
        self._every, self._sampling = config.validate_every, Sampling(config.max_plan_tokens)
        folder.mkdir(parents=True, exist_ok=True)
        self._before: Path | None = None  # the best at the checkpoint before; None: this process made none yet

    def due(self, state: TrainerState) -> bool:
        return bool(state.global_step % self._every == 0 or state.global_step >= state.max_steps)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Deletes all weights but those that a run needs to continue from this checkpoint, or from the one before it."""
        if PartialState().is_main_process:
            best = self._file(best_step(state))
            if self._before is not None:
                for file in self._folder.iterdir():
                    if not file.name.startswith((best.name, self._before.name)):
                        file.unlink()
            self._before = best

    def evaluate(self, state: TrainerState, model: Any) -> None:
        reward = self._mean_reward(model)
        print(f"step {state.global_step}: validation reward {reward:.4f}", flush=True)
        state.log_history.append({"step": state.global_step, REWARD: reward})
        if best_step(state) == state.global_step and PartialState().is_main_process:
            trained = {name: weights.detach().cpu().contiguous() for name, weights in _trained(model)}
            with whole(self._file(state.global_step)) as draft:
                save_file(trained, draft)
            seal(self._file(state.global_step))

    def _mean_reward(self, model: Any) -> float:
        rewards: list[float] = []
        for steps, texts in self._questions.answers(model, self._sampling):
            rewards += self._reward.score(texts, steps)
        return fmean(gather_object(rewards))

    def restore(self, state: TrainerState, model: Any) -> dict[str, float]:
        """Loads the best weights into a model that was trained to the end; returns figures of the validations."""
        best, rewards = best_step(state), validations(state)
        if best != state.global_step:
            kept = load_file(self._file(best))
            with torch.no_grad():
                for name, weights in _trained(model):
                    weights.copy_(kept[name])
        return {
            "kept_step": best,
            f"{REWARD}_first": rewards[0],
            f"{REWARD}_best": rewards[best],
            f"{REWARD}_last": rewards[state.global_step],
        }

    def _file(self, step: int) -> Path:
        return self._folder / f"{step:08}.safetensors"


def validations(state: TrainerState) -> dict[int, float]:
    """Optimizer step → its validation reward."""
    return {entry["step"]: entry[REWARD] for entry in state.log_history if REWARD in entry}


def best_step(state: TrainerState) -> int:
    """The step with the highest validation reward so far; the latest of equals."""
    return max((reward, step) for step, reward in validations(state).items())[1]


def _trained(model: Any) -> list[tuple[str, Any]]:
    return [(name, weights) for name, weights in model.named_parameters() if weights.requires_grad]
