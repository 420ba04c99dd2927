"""What SFT and GRPO share: loading a model for training, settings of its device, progress of a trainer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from coepg_dagster.experiment.training import PolicyTraining, Sft
from coepg_dagster.inference.attention import fast_vision
from coepg_dagster.inference.transformers_engine import Dtype
from coepg_dagster.jobs import GrounderRlJob, GrpoJob, SftJob, TrainingJob
from coepg_dagster.progress import Report
from coepg_dagster.training.speed import half_activations, load_with_attention, vision_to_bfloat16


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
    """Writes everything that a trainer logged as JSON lines, all parts of a continued run included."""
    with path.open("w") as out:
        for entry in state.log_history:
            out.write(json.dumps({"step": entry["step"], **_numbers(entry)}) + "\n")


def load_for_training(init: str, device: str, dtype: Dtype, config: Sft | PolicyTraining) -> tuple[Any, Any]:
    """(model in training mode, processor) from checkpoint `init`.

    On a GPU the trainers compute in bf16 and keep float32 weights: with the paper's learning rates most updates would round to
    nothing in bf16. With LoRA the weights stay in `dtype`, and the adapters are float32. The exception is sampling in vLLM: it
    merges and unmerges the adapters at every step, and rounding errors would add up in bf16 weights.
    """
    merged = isinstance(config, PolicyTraining) and config.rollouts == "vllm"
    kept: Dtype = "float32" if config.lora is None or merged or device == "cpu" else dtype
    model, processor = load_with_attention(init, kept, device, config.attention)
    if config.freeze_vision:
        model.model.visual.requires_grad_(False)
    return model.train(), processor


def device_settings(job: TrainingJob) -> dict[str, Any]:
    """TrainingArguments that depend on the device of a job."""
    gpu = job.on_gpu
    settings: dict[str, Any] = {"use_cpu": not gpu, "bf16": gpu, "fp16": False, "gradient_checkpointing": gpu}
    if job.placement.strategy == "fsdp":
        # else each process would keep the gradients of the whole model between the passes of an optimizer step
        settings["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    return settings


def make_fast(model: Any, job: SftJob | GrpoJob | GrounderRlJob) -> None:
    """Sets the kernels and types with which a model is trained on a GPU; both trainings have these, see `training.speed`."""
    config = job.config
    if not job.on_gpu:
        return
    if config.attention == "sdpa":
        fast_vision(model, job.device)
    if job.models.dtype == "bfloat16":
        half_activations(model)
        # sharded parameters of one unit have one type; else TRL's reference gets the type of the first weights, the tower's
        if config.freeze_vision and not job.placement.sharded:
            vision_to_bfloat16(model)


def keep_float32_sums(trainer: Any) -> None:
    """FSDP sums gradients and returns losses in float32, as data parallel training does; accelerate asks for bf16."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    policy = getattr(plugin, "mixed_precision_policy", None)
    if plugin is not None and policy is not None:
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)
