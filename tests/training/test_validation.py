"""GRPO keeps the weights that do best on the validation split, and looking there changes nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerControl, TrainerState

from coepg_dagster.artifacts import seal
from coepg_dagster.evaluation.score import score_steps
from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import Grpo, Lora
from coepg_dagster.inference.predict import predict
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.jobs import Placement
from coepg_dagster.progress import Ended
from coepg_dagster.training.grpo import train_grpo
from coepg_dagster.training.validation import REWARD, KeepBest, best_step
from tests.jobs import grpo_job, quiet

CONFIG = Grpo(
    prompts_per_step=3,
    group_size=2,
    micro_batch_size=6,
    max_steps=2,
    learning_rate=3e-3,
    max_plan_tokens=24,
    probe_steps=0,
)


@dataclass
class Validations:
    """The rewards measured on the validation split, and those that training gets instead."""

    rewards: list[float]
    seen: list[float] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)


@pytest.fixture
def train(
    trained: Callable[[str, int], Path],
    random_checkpoint: Callable[[int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., tuple[dict[str, Any], Path]]:
    """Two steps of GRPO; with `validations`, validated on the training steps that have a target."""

    def run(name: str, validations: Validations | None, placement: Placement | None = None, **change: Any) -> Any:
        out = tmp_path / name
        config = CONFIG.model_copy(update=change | ({"validate_every": 1} if validations else {}))
        used = trained("planner", 0), trained("grounder", 0), config
        placed = {"placement": placement or Placement(), "validation": steps.slice(0, 5) if validations else None}
        job = grpo_job(out, (dataset, steps, models), *used, {"stranger": random_checkpoint(3)}, **placed)
        real = KeepBest._mean_reward

        def mean_reward(self: KeepBest, model: Any) -> float:
            assert validations is not None
            validations.weights.append({name: weights.detach().clone() for name, weights in model.named_parameters()})
            validations.seen.append(real(self, model))
            return validations.rewards[len(validations.seen) - 1]

        with monkeypatch.context() as patch:
            patch.setattr(KeepBest, "_mean_reward", mean_reward)
            return train_grpo(job, quiet), out

    return run


def saved(out: Path) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, by their names in memory."""
    from coepg_dagster.inference.transformers_engine import load_checkpoint

    return dict(load_checkpoint(out, "float32", "cpu")[0].named_parameters())


def test_the_reward_is_the_agents_step_success_and_validation_changes_nothing(
    train: Any, trained: Callable[[str, int], Path], steps: pa.Table, models: Models
) -> None:
    validations = Validations([0.1, 0.2, 0.3])
    figures, out = train("looked", validations)
    _, plain = train("plain", None)
    assert (out / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    assert figures["kept_step"] == 2
    shown = [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]
    assert [(line["step"], line[REWARD]) for line in shown if REWARD in line] == [(0, 0.1), (1, 0.2), (2, 0.3)]

    agent = [
        TransformersEngine(folder, dtype="float32", device="cpu", batch_size=6)
        for folder in (out, trained("grounder", 0))
    ]
    labelled = steps.slice(0, 5)
    result = score_steps("miniwob/point", labelled, predict(*agent, labelled, models, 24, 8))
    assert validations.seen[2] == pytest.approx(result.metrics["step_sr"].micro / 100)
    assert len(set(validations.seen)) > 1, "of little use otherwise"


@pytest.mark.parametrize(("rewards", "kept"), [([0.1, 0.9, 0.3], 1), ([0.9, 0.1, 0.3], 0), ([0.5, 0.1, 0.5], 2)])
def test_the_best_weights_are_saved(train: Any, rewards: list[float], kept: int) -> None:
    validations = Validations(rewards)
    figures, out = train("out", validations)
    assert figures["kept_step"] == kept
    assert [figures[f"{REWARD}_{which}"] for which in ("first", "best", "last")] == [rewards[i] for i in (0, kept, 2)]
    weights = saved(out)
    assert all(torch.equal(weights[name], tensor) for name, tensor in validations.weights[kept].items())
    assert any(
        not torch.equal(a, b)
        for a, b in zip(validations.weights[0].values(), validations.weights[2].values(), strict=True)
    )


def test_adapters_are_chosen_too(train: Any, trained: Callable[[str, int], Path]) -> None:
    validations = Validations([0.9, 0.1, 0.2])
    figures, out = train("out", validations, lora=Lora(rank=4))
    assert figures["kept_step"] == 0 and validations.seen[0] > 0.5, (
        "π_k knows these screens, and is asked with its adapters"
    )
    before, after = load_file(trained("planner", 0) / "model.safetensors"), load_file(out / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before), "an adapter that learnt nothing adds nothing"


def test_it_is_refused_where_no_process_could_answer(train: Any) -> None:
    with pytest.raises(Ended, match=r"grpo.validate_every with strategy zero3.*use `ddp`"):
        train("out", Validations([]), Placement(strategy="zero3"))


def test_a_checkpoint_lets_go_of_weights_that_are_not_needed_again(tmp_path: Path) -> None:
    keep = KeepBest(object(), object(), CONFIG.model_copy(update={"validate_every": 1}), tmp_path)  # type: ignore[arg-type]
    rewards = ((0, 0.1), (4, 0.5), (8, 0.9), (12, 0.2), (16, 0.3))
    kept = []
    for step, _ in rewards:
        state = TrainerState(global_step=step)
        state.log_history = [{"step": at, REWARD: reward} for at, reward in rewards if at <= step]
        if best_step(state) == step:
            save_file({"x": torch.zeros(1)}, keep._file(step))
            seal(keep._file(step))
        keep.on_save(None, state, TrainerControl())  # type: ignore[arg-type]
        kept.append(sorted({int(file.name.split(".")[0]) for file in tmp_path.iterdir()}))
    # the checkpoint before may be continued too, where the newest is damaged
    assert kept == [[0], [0, 4], [4, 8], [8], [8]]
