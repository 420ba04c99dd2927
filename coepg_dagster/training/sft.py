"""Supervised fine-tuning: D_{k-1} → π_k and ϕ_k, on TRL's SFTTrainer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from accelerate import PartialState
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback, set_seed
from trl import SFTConfig, SFTTrainer

from coepg_dagster.artifacts import FOLD
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.inference.visual import Screenshots, Tower, process_store
from coepg_dagster.jobs import SftJob
from coepg_dagster.progress import Report
from coepg_dagster.refusal import Refusal
from coepg_dagster.steps import fold_of
from coepg_dagster.training.adapters import lora_config, merge_adapters
from coepg_dagster.training.checkpoints import KEPT, Checkpoints, Continues
from coepg_dagster.training.common import (
    ReportProgress,
    device_settings,
    keep_float32_sums,
    load_for_training,
    make_fast,
    write_log,
)
from coepg_dagster.training.curating import curated_rows
from coepg_dagster.training.examples import NothingToTrainOn, end_to_end_examples, grounder_examples, planner_examples
from coepg_dagster.training.groups import FIRST, GroupOrder, Groups, in_groups
from coepg_dagster.training.launch import accumulation, is_main, refuse, section_of
from coepg_dagster.training.monitor import TrainingMonitor
from coepg_dagster.training.packing import packed_pass
from coepg_dagster.training.preflight import preflight
from coepg_dagster.training.probe import probe_sft, unmeasured
from coepg_dagster.training.speed import (
    GradientsInBuckets,
    check_attention,
    compile_layers,
    expect_right_padding,
    recompute,
)
from coepg_dagster.training.tracking import refuse_missing, tracker_callbacks, tracker_settings
from coepg_dagster.training.verified import save_trained

LOADERS: Final = 4
"""Processes that prepare screenshots, for each GPU: preparing a batch of four takes one core about as long as its step."""


class PlainTrainer(Continues, SFTTrainer):  # type: ignore[misc]
    """TRL's SFT trainer, which can be continued, and whose rows may have weights in the loss.

    Args:
        core: the model without wrappers.
        groups: rows that share a row of a pass; None: each row is alone.
    """

    def __init__(self, *args: Any, core: Any, groups: Groups | None, **kwargs: Any) -> None:
        self._core, self._groups = core, groups
        super().__init__(*args, **kwargs)
        if groups is not None:
            # transformers then counts the tokens of a step for the loss; for Qwen-VL, whose classes forbid it, it takes the mean
            # of the passes' means, and packed passes have very different numbers of tokens
            self.model_accepts_loss_kwargs = True

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        if self._groups is None:
            return super()._get_train_sampler(dataset)
        return GroupOrder(
            self._groups,
            step=lambda: self.state.global_step,
            shuffle=self.args.train_sampling_strategy == "random",
            seed=self.args.data_seed,
            rank=self.args.process_index,
            processes=self.args.world_size,
        )

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        weights = inputs.pop(WEIGHT, None)
        if FIRST in inputs:
            model = partial(packed_pass, model, self._core)
        if weights is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = model(**inputs, use_cache=False, fused_lm_head=True)
        tokens = outputs.label_mask.sum() if num_items_in_batch is None else num_items_in_batch
        loss = -(outputs.log_probs.sum(-1) * weights).sum() / tokens
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # as TRL's
        return (loss, outputs) if return_outputs else loss


WEIGHT: Final = "weight"
"""Column of the examples, and entry of a batch: the weight of each row in the loss."""


def with_weights(collate: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A collator whose batches hold the weights of their rows, shape (rows,)."""

    def collated(rows: list[Any]) -> Any:
        return {**collate(rows), WEIGHT: torch.tensor([row[WEIGHT] for row in rows])}

    return collated


def with_keys(collate: Callable[[list[Any]], Any], shown: Screenshots) -> Callable[[list[Any]], Any]:
    """A collator whose batches hold keys of screenshots in place of their pixels."""

    def collated(rows: list[Any]) -> Any:
        with shown.keys():
            return collate(rows)

    return collated


class Forget(TrainerCallback):  # type: ignore[misc]
    """Drops the screenshots of a step when it is done."""

    def __init__(self, shown: Screenshots) -> None:
        self._shown = shown

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._shown.forget()


def train_sft(job: SftJob, report: Report) -> dict[str, Any]:
    """Trains `job.role` from its checkpoint on the rows of D_{k-1}, saves it, and compares it with that checkpoint.

    Only the answer's tokens carry loss. Returns the figures of the run. Checkpoints are in the scratch folder.
    """
    refuse(job.config, job.placement)
    refuse_missing(job.placement)
    dataset, steps = job.rows(), job.train_steps()
    dataset, curated = curated_rows(job, dataset, steps)
    of_folds = _train_folds(job, dataset, steps, report, ordered=curated.ordered) if job.role == "grounder" else {}
    figures = _train(job, dataset, steps, report, ordered=curated.ordered) | of_folds
    if curated.figures:
        figures["curation"] = curated.figures
    if job.role == "end_to_end" or not job.config.probe_steps or not is_main():
        return figures
    try:
        return figures | probe_sft(job, dataset, steps)
    except Refusal as error:
        return figures | {"warnings": [*figures["warnings"], unmeasured(error)]}


def _train_folds(
    job: SftJob, dataset: pa.Table, steps: pa.Table, report: Report, *, ordered: bool
) -> dict[str, list[int]]:
    """Trains a grounder without each part of the episodes, into folders below that of ϕ_k; returns the rows of each.

    Those that are done are in the scratch folder, and are not trained again when a killed run is continued.
    """
    folds = job.config.folds
    if folds is None:
        return {}
    dataset = dataset.filter(pc.is_valid(dataset["box"]))  # the others are none of its examples
    columns = (steps[name].to_pylist() for name in ("step_id", "episode_id"))
    fold = {step_id: fold_of(episode, folds) for step_id, episode in zip(*columns, strict=True)}
    of_rows = np.array([fold[step_id] for step_id in dataset["step_id"].to_pylist()])
    if len(set(of_rows.tolist())) == 1:
        raise NothingToTrainOn(
            f"sft.folds: all {len(of_rows)} rows with a target are of one of the {folds} parts of the episodes, so that none are "
            "left to train without it: set another number, or `folds: null`"
        )
    counts = []
    for i in range(folds):
        scratch = job.scratch / FOLD.format(i)
        done, made, rows = scratch / "done", scratch / "model", dataset.filter(pa.array(of_rows != i))
        counts.append(rows.num_rows)
        if not done.exists():
            part = job.model_copy(update={"out": made, "scratch": scratch})
            _train(part, rows, steps, report, ordered=ordered)
            if is_main():
                done.touch()
            PartialState().wait_for_everyone()
        if is_main():
            shutil.copytree(made, job.out / FOLD.format(i))
    return {"fold_rows": counts}


def _train(job: SftJob, dataset: pa.Table, steps: pa.Table, report: Report, *, ordered: bool) -> dict[str, Any]:
    config, models = job.config, job.models
    set_seed(job.seed)
    model, processor = load_for_training(job.init, job.first_device, models.dtype, config)
    shown = Screenshots(processor)
    Tower(model, shown, None if job.placement.sharded else process_store())
    make_fast(model, job)
    if job.on_gpu:
        if config.attention == "sdpa" and not config.packing:  # packed rows need their mask
            expect_right_padding(model)
        recompute(model, config.recompute)
        if config.compile:
            compile_layers(model)
    check_attention(model, config.attention)
    screens = Screens(steps, TransformersEngine.of(model, processor, batch_size=1).resize)
    examples, checked = preflight(
        _examples(job, dataset, steps, screens), processor, screens, config.max_tokens, job.out
    )
    processes = job.placement.processes
    groups = Groups.of(examples.with_format(None)["step_id"], config, processes) if config.packing else None
    checkpoints = Checkpoints(job.scratch / "trainer", job.placement)
    monitor = TrainingMonitor(job.placement.on_anomaly, section_of(config))
    passes = groups.passes if groups else accumulation(config.batch_size, config.micro_batch_size, processes)
    trainer = PlainTrainer(
        model=model,
        core=model,
        groups=groups,
        peft_config=lora_config(model, config.lora, freeze_vision=config.freeze_vision),
        processing_class=processor,
        train_dataset=examples,
        callbacks=[ReportProgress(report), checkpoints, monitor, Forget(shown), *tracker_callbacks(job)],
        args=_arguments(job, checkpoints.folder, passes, ordered=ordered),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(GradientsInBuckets(trainer))
    keep_float32_sums(trainer)
    if groups:
        trainer.data_collator = in_groups(trainer.data_collator, shown, pixels=job.on_gpu)
    elif not job.on_gpu:  # on a GPU other processes prepare the screenshots, and do not share this one's keys
        trainer.data_collator = with_keys(trainer.data_collator, shown)
    if WEIGHT in examples.column_names:
        trainer.data_collator = with_weights(trainer.data_collator)
    checkpoints.train(trainer)
    monitor.end()
    trained = merge_adapters(trainer)
    saved = save_trained(trainer, processor, job.out, models.dtype)
    if is_main():
        write_log(trainer.state, job.out / "training_log.jsonl")
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {
        "rows": len(examples),
        **({"groups": len(groups.rows)} if groups else {}),
        **checked,
        "optimizer_steps": trainer.state.global_step,
        "loss": float(np.mean(losses)),
        **saved,
        "trained_parameters": trained,
        "warnings": monitor.warnings,
    }


def _examples(job: SftJob, dataset: pa.Table, steps: pa.Table, screens: Screens) -> Dataset:
    """Prompts and answers of the rows of D_{k-1} for the role that is trained."""
    prompts, space = job.models.prompts, job.models.coordinates
    match job.role:
        case "planner":
            return planner_examples(dataset, steps, screens, prompts)
        case "grounder":
            return grounder_examples(dataset, screens, prompts, space, job.config.target)
        case "end_to_end":
            return end_to_end_examples(dataset, steps, screens, prompts, space)


def _arguments(job: SftJob, folder: Path, passes: int, *, ordered: bool) -> SFTConfig:
    """TRL's settings: `passes` forward and backward passes for each optimizer step, checkpoints in `folder`."""
    config = job.config
    return SFTConfig(
        output_dir=str(folder),
        num_train_epochs=config.epochs,
        max_steps=config.max_steps or -1,
        per_device_train_batch_size=config.micro_batch_size,
        gradient_accumulation_steps=passes,
        learning_rate=config.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=config.warmup_ratio,
        weight_decay=config.weight_decay,
        max_grad_norm=1.0,
        max_length=None,  # TRL's default of 1024 would cut image tokens
        completion_only_loss=True,
        logging_steps=1,
        logging_nan_inf_filter=False,  # TrainingMonitor checks for them
        save_strategy="no",  # Checkpoints decides
        save_total_limit=KEPT,
        **tracker_settings(job),
        remove_unused_columns=False,  # the examples find their images by step_id
        disable_tqdm=True,
        seed=job.seed,
        data_seed=job.seed,
        train_sampling_strategy="sequential" if ordered else "random",
        ddp_find_unused_parameters=False,
        dataloader_num_workers=LOADERS if job.on_gpu else 0,
        dataloader_persistent_workers=job.on_gpu,
        # `recompute` chose the layers
        **device_settings(job) | {"gradient_checkpointing": False},
    )
