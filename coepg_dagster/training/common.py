"""What SFT and GRPO share: progress out of a trainer, and a checkpoint that counts only when it is whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from coepg_dagster.inference.transformers_engine import IncompleteCheckpoint, load_checkpoint
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


def save_whole(model: Any, processor: Any, folder: Path) -> int:
    """Saves a checkpoint, loads it again and compares every tensor. Returns the number of parameters.

    Raises IncompleteCheckpoint where a tensor is missing, empty, not finite or different after loading.
    """
    model.save_pretrained(folder, safe_serialization=True)
    processor.save_pretrained(folder)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    loaded, _ = load_checkpoint(folder, dtype, "cpu")  # type: ignore[arg-type]
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


def freeze_vision_tower(model: Any) -> None:
    """Takes the vision tower out of training (Qwen-VL's classes call it `visual`)."""
    model.model.visual.requires_grad_(False)
