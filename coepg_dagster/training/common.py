"""What SFT and GRPO share: progress out of a trainer, and a checkpoint that counts only when it is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from coepg_dagster.inference.transformers_engine import Dtype, IncompleteCheckpoint, load_checkpoint
from coepg_dagster.progress import Report


class ReportProgress(TrainerCallback):  # type: ignore[misc]
    """Passes a trainer's logs on to `report`."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        if state.is_world_process_zero:
            self._report(state.global_step, state.max_steps, _numbers(logs or {}))


def _numbers(logs: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in logs.items() if isinstance(value, int | float)}


def write_log(state: TrainerState, path: Path) -> None:
    """Everything a trainer logged as JSON lines: the whole run's, however often it was killed and continued."""
    with path.open("w") as out:
        for entry in state.log_history:
            out.write(json.dumps({"step": entry["step"], **_numbers(entry)}) + "\n")


def load_for_training(init: str, device: str, *, freeze_vision: bool) -> tuple[Any, Any]:
    """(model in training mode, processor) from checkpoint `init`, with float32 weights.

    On a GPU the trainers compute in bf16 and keep these float32 weights: with the paper's learning rates most updates would
    round to nothing in bf16.
    """
    model, processor = load_checkpoint(init, "float32", device)
    if freeze_vision:
        model.model.visual.requires_grad_(False)
    return model.train(), processor


def save_trained(trainer: Any, processor: Any, folder: Path, dtype: Dtype) -> int:
    """Saves what a trainer trained, whole, from its first process; returns the number of parameters."""
    accelerator = trainer.accelerator
    tensors = accelerator.get_state_dict(trainer.model_wrapped)  # gathered, where it is sharded
    parameters = 0
    if accelerator.is_main_process:
        parameters = save_whole(accelerator.unwrap_model(trainer.model), processor, folder, dtype, tensors)
    accelerator.wait_for_everyone()
    return parameters


def save_whole(model: Any, processor: Any, folder: Path, dtype: Dtype, tensors: dict[str, Any] | None = None) -> int:
    """Saves a checkpoint as `dtype`, loads it again and compares every tensor. Returns the number of parameters.

    Raises IncompleteCheckpoint where a tensor is missing, empty, not finite or different after loading.

    Args:
        tensors: the weights, where `model` does not hold them itself.
    """
    trained = {
        name: tensor.detach().to("cpu", getattr(torch, dtype) if tensor.is_floating_point() else None)
        for name, tensor in (model.state_dict() if tensors is None else tensors).items()
    }
    model.config.dtype = dtype
    model.save_pretrained(
        folder, safe_serialization=True, state_dict=dict(trained)
    )  # transformers takes tied tensors out
    processor.save_pretrained(folder)
    loaded, _ = load_checkpoint(folder, dtype, "cpu")
    stored = dict(loaded.state_dict())
    for name in sorted(trained.keys() | stored.keys()):
        tensor = stored.get(name)
        if tensor is None or name not in trained or not tensor.numel() or not torch.equal(tensor, trained[name]):
            raise IncompleteCheckpoint(f"{folder}: tensor {name} is not what was trained; the checkpoint is refused")
    return sum(parameter.numel() for parameter in loaded.parameters())


def device_settings(device: str) -> dict[str, Any]:
    """TrainingArguments for `device` ("cpu" or "cuda")."""
    on_gpu = device != "cpu"
    return {"use_cpu": not on_gpu, "bf16": on_gpu, "fp16": False, "gradient_checkpointing": on_gpu}
