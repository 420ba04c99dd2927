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
    """Passes a trainer's logs on to `report` and keeps them as JSON lines in `log`."""

    def __init__(self, report: Report, log: Path) -> None:
        self._report, self._log = report, log

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        numbers = {key: float(value) for key, value in (logs or {}).items() if isinstance(value, int | float)}
        with self._log.open("a") as out:
            out.write(json.dumps({"step": state.global_step, **numbers}) + "\n")
        self._report(state.global_step, state.max_steps, numbers)


def load_for_training(init: str, device: str, *, freeze_vision: bool) -> tuple[Any, Any]:
    """(model in training mode, processor) from checkpoint `init`, with float32 weights.

    On a GPU the trainers compute in bf16 and keep these float32 weights: with the paper's learning rates most updates would
    round to nothing in bf16.
    """
    model, processor = load_checkpoint(init, "float32", device)
    if freeze_vision:
        model.model.visual.requires_grad_(False)
    return model.train(), processor


def save_whole(model: Any, processor: Any, folder: Path, dtype: Dtype) -> int:
    """Saves a checkpoint as `dtype`, loads it again and compares every tensor. Returns the number of parameters.

    Raises IncompleteCheckpoint where a tensor is missing, empty, not finite or different after loading.
    """
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder, safe_serialization=True)
    processor.save_pretrained(folder)
    loaded, _ = load_checkpoint(folder, dtype, "cpu")
    trained, stored = dict(model.state_dict()), dict(loaded.state_dict())
    for name in sorted(trained.keys() | stored.keys()):
        tensor = stored.get(name)
        if tensor is None or name not in trained or not tensor.numel() or not torch.equal(tensor, trained[name].cpu()):
            raise IncompleteCheckpoint(f"{folder}: tensor {name} is not what was trained; the checkpoint is refused")
    return sum(parameter.numel() for parameter in loaded.parameters())


def device_settings(device: str) -> dict[str, Any]:
    """TrainingArguments for `device` ("cpu" or "cuda")."""
    on_gpu = device != "cpu"
    return {"use_cpu": not on_gpu, "bf16": on_gpu, "fp16": False, "gradient_checkpointing": on_gpu}
