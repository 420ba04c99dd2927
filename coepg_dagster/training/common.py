"""What SFT and GRPO share: a model to train, its device, progress out of a trainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from coepg_dagster.inference.transformers_engine import load_checkpoint
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


def device_settings(device: str) -> dict[str, Any]:
    """TrainingArguments for `device` ("cpu" or "cuda")."""
    on_gpu = device != "cpu"
    return {"use_cpu": not on_gpu, "bf16": on_gpu, "fp16": False, "gradient_checkpointing": on_gpu}
