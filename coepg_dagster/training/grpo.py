"""GRPO of π'_k from π_k with the C-DREM reward, and of ϕ_k by its own places, on TRL's GRPOTrainer.

The reward is one composite function, since Eq. 9 is a gate and not a weighted sum. TRL's defaults that differ from the
paper are set: loss_type "grpo", beta, epsilon, scale_rewards "group", no bias correction of the KL term.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from transformers import PrinterCallback, set_seed
from trl import GRPOConfig

from coepg_dagster.artifacts import ROLLOUTS
from coepg_dagster.experiment.models import Member
from coepg_dagster.experiment.training import MIN_LR_RATE, Grpo
from coepg_dagster.inference.agents import Grounder
from coepg_dagster.inference.attention import fast_vision
from coepg_dagster.inference.engine import Engine
from coepg_dagster.inference.opening import opened
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.inference.visual import Screenshots, Tower, VisualStore, process_store
from coepg_dagster.jobs import GrounderRlJob, GrpoJob
from coepg_dagster.progress import Ended, Report
from coepg_dagster.provenance import Agent
from coepg_dagster.rewards.estimators import by_episodes
from coepg_dagster.training.adapters import lora_config, merge_adapters
from coepg_dagster.training.cdrem_reward import CdremReward
from coepg_dagster.training.checkpoints import KEPT, Checkpoints
from coepg_dagster.training.common import (
    ReportProgress,
    device_settings,
    keep_float32_sums,
    load_for_training,
    make_fast,
    write_log,
)
from coepg_dagster.training.curating import curated_prompts, curated_rows
from coepg_dagster.training.environments import Environments
from coepg_dagster.training.examples import (
    asked_steps,
    facts_of,
    grounder_prompts,
    grpo_prompts,
    plans_of,
    refuse_few,
    steps_of_episodes,
)
from coepg_dagster.training.grpo_trainer import CdremTrainer, EpisodeTrainer
from coepg_dagster.training.launch import accumulation, is_main, refuse, section_of
from coepg_dagster.training.live_episodes import LiveEpisodes, played
from coepg_dagster.training.monitor import TrainingMonitor
from coepg_dagster.training.packing import can_pack
from coepg_dagster.training.page_reward import PageReward, agreement
from coepg_dagster.training.point_reward import PointReward
from coepg_dagster.training.preflight import preflight
from coepg_dagster.training.probe import Probe, probed_steps
from coepg_dagster.training.sampling import compare_prompts, difference, end_sampling, sampling_settings
from coepg_dagster.training.speed import GradientsInBuckets, check_attention
from coepg_dagster.training.tracking import refuse_missing, tracker_callbacks, tracker_settings
from coepg_dagster.training.transitions import with_transitions
from coepg_dagster.training.validation import KeepBest, Questions, requests_of
from coepg_dagster.training.verified import save_trained

BEST, PROBES = "best", "probe"
"""Folders within the scratch folder: the best weights so far, and the answers to the probe."""


@dataclass(frozen=True)
class Policy:
    """What a policy is trained on, and by what it is rewarded and measured."""

    prompts: Dataset
    screens: Screens
    reward: CdremReward | PointReward | LiveEpisodes
    steps: pa.Table  # of the prompts, with their labels
    best: KeepBest | None = None
    probe: Probe | None = None
    ordered: bool = False  # the prompts are asked in their order, not shuffled


@dataclass(frozen=True)
class Asked:
    """What a planner is asked: steps, pairs of steps (`transitions`), and whether in this order."""

    steps: Sequence[str]
    pairs: Sequence[tuple[str, str]]
    ordered: bool


Make = Callable[[Any, tuple[int, int, int]], Policy]
"""A policy's prompts and reward, given its processor and the resize of its image processor."""


def train_grpo(job: GrpoJob, report: Report) -> dict[str, Any]:
    """Trains π'_k from π_k on the steps that `grpo.prompts` names, and saves it with rollouts.parquet.

    Checkpoints and the rollouts so far are in the scratch folder. Returns the figures of the run; rates in per cent.
    """
    refuse(job.config, job.placement)
    refuse_missing(job.placement)
    asked_about = asked_steps(job, job.config)
    members = {}
    if job.grounder:
        name, checkpoint = job.grounder
        others = job.verifiers if job.config.ensemble and not job.config.plays else {}
        members = {name: Member(model=checkpoint)} | others
    in_vllm = sum(job.models.engine_of(member) == "vllm" for member in members.values())
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(opened(member, job, logs=job.out, share=in_vllm, beside_training=True))
            for name, member in members.items()
        }
        asked, pairs, curated = curated_prompts(job, asked_about, job.train_steps(), engines)
        if pairs and not engines:
            raise Ended(
                "grpo.curation: pairs of screens are for a planner: an end-to-end agent's point could be on both"
            )
        pages = stack.enter_context(Environments(job.config.environment)) if job.config.environment else None

        def planner(processor: Any, resize: tuple[int, int, int]) -> Policy:
            return _planner(job, Asked(asked, pairs, curated.ordered), engines, pages, processor, resize)

        figures = _train(job, planner, report)
        if pages is not None and is_main():
            columns = ["optimizer_step", "group", "reward", "parts", "graders", "live"]
            rollouts = pq.read_table(job.out / ROLLOUTS, columns=columns).to_pylist()
            went = played(rollouts) if job.config.plays else agreement(rollouts)
            figures["page"] = went | {"lost": pages.lost, "restarted": pages.restarted}
        return figures | ({"curation": curated.figures} if curated.figures else {})


def train_grounder_rl(job: GrounderRlJob, report: Report) -> dict[str, Any]:
    """Trains ϕ_k on the plans of D_{k-1} by the score of its own place, and saves it with rollouts.parquet, as `train_grpo`."""
    refuse(job.config, job.placement)
    refuse_missing(job.placement)
    steps, models = job.train_steps(), job.models
    rows = job.rows()
    refuse_few(rows.num_rows - rows["box"].null_count, job.config)
    rows, curated = curated_rows(job, rows, steps)

    def grounder(processor: Any, resize: tuple[int, int, int]) -> Policy:
        screens = Screens(steps, resize)
        prompts = grounder_prompts(rows, screens, models.prompts)
        reward = PointReward(steps, screens, models.coordinates, job.config.composite, "grounder")
        return Policy(prompts, screens, reward, steps, ordered=curated.ordered)

    figures = _train(job, grounder, report)
    return figures | ({"curation": curated.figures} if curated.figures else {})


def _planner(
    job: GrpoJob,
    asked: Asked,
    engines: Mapping[str, Engine],
    pages: Environments | None,
    processor: Any,
    resize: tuple[int, int, int],
) -> Policy:
    """The prompts of a planner, or of an end-to-end agent where no grounder is open, and its reward: by `pages`, if there are."""
    config, models = job.config, job.models
    steps, shown, more = with_transitions(job.train_steps(), asked.pairs)
    references = plans_of(job.rows()) if config.terms else {}

    def reward_on(
        labelled: pa.Table, graders: Mapping[str, Engine], config: Grpo, pages: Environments | None = None
    ) -> tuple[Screens, CdremReward | PointReward]:
        screens = Screens(labelled, resize)
        if not graders:
            composite, mode = config.composite, config.value_mode
            return screens, PointReward(labelled, screens, models.coordinates, composite, value_mode=mode)
        grounders = {}
        for name, engine in graders.items():
            resized = screens if engine.resize == resize else Screens(labelled, engine.resize)
            grounders[name] = Grounder(engine, resized, models.prompts, models.coordinates, job.max_point_tokens)
        about = (grounders, priors, labelled, screens, config, references)
        return screens, CdremReward(*about) if pages is None else PageReward(*about, environments=pages)

    def played_on(pages: Environments) -> LiveEpisodes:
        [phi] = engines.values()
        assert config.environment is not None

        def ground(frames: pa.Table) -> Grounder:
            seen = Screens(frames, phi.resize)
            return Grounder(phi, seen, models.prompts, models.coordinates, job.max_point_tokens)

        return LiveEpisodes(steps, resize, models.prompts, ground, pages, config.environment)

    agent: Agent = "decoupled" if engines else "end_to_end"
    trained_grounder = dict(list(engines.items())[:1])  # ϕ_k, the grounder of M_k; empty for an end-to-end agent
    priors = {name: config.own_prior if name in trained_grounder else config.verifier_prior for name in engines}
    reward: CdremReward | PointReward | LiveEpisodes
    if config.plays and pages is not None:
        screens, reward = Screens(steps, resize), played_on(pages)
    else:
        screens, reward = reward_on(steps, engines, config, pages)
    if more:
        screens = Screens(shown, resize)
    names = [*asked.steps, *more]
    prompts = grpo_prompts(frozenset(names), shown, screens, models.prompts, agent)
    if asked.ordered:
        position = {step_id: i for i, step_id in enumerate(prompts.with_format(None)["step_id"])}
        prompts = prompts.select([position[step_id] for step_id in names])

    def questions_on(labelled: pa.Table) -> tuple[Questions, CdremReward | PointReward]:
        resized, judge = reward_on(labelled, trained_grounder, config.by_labels())
        requests = requests_of(labelled, resized, models.prompts, agent)
        return Questions(requests, processor, config.micro_batch_size), judge

    best = probe = None
    if config.validate_every is not None:
        validated = job.validation_steps(config.validation_steps, "grpo.validation_steps")
        best = KeepBest(*questions_on(validated), config, job.scratch / BEST)
    if config.probe_steps and job.placement.sharded:
        print(f"no probe: with strategy {job.placement.strategy} no process can answer alone", flush=True)
    elif config.probe_steps:
        limit = config.probe_steps
        validation = job.validation_steps(limit, "grpo.probe_steps")
        train, trained_on = job.train_steps(), prompts.with_format(None)["step_id"]
        if config.plays:  # prompts are the first steps of episodes
            trained_on = steps_of_episodes(train, trained_on)
        probed = probed_steps(train, trained_on, validation, limit)
        questions = questions_on(pa.concat_tables(probed.values()))
        judge = next(iter(trained_grounder), "labels")
        probe = Probe(probed, *questions, judge, config, job.seed, job.scratch / PROBES)
    return Policy(prompts, screens, reward, steps, best, probe, asked.ordered)


def _train(job: GrpoJob | GrounderRlJob, make: Make, report: Report) -> dict[str, Any]:
    config, models = job.config, job.models
    set_seed(job.seed)
    model, processor = load_for_training(job.init, job.first_device, models.dtype, config)
    make_fast(model, job)
    check_attention(model, config.attention)
    policy = make(processor, TransformersEngine.of(model, processor, batch_size=1).resize)
    screens, best, probe = policy.screens, policy.best, policy.probe
    prompts, checked = preflight(
        policy.prompts, processor, screens, config.max_tokens, job.out, answer=config.max_plan_tokens
    )
    left_out = {
        f"{section_of(config)}.curation ({', '.join(config.curation)})": bool(config.curation),
        f"{section_of(config)}.max_tokens ({config.max_tokens})": len(prompts) < len(policy.prompts),
    }
    refuse_few(len(prompts), config, [setting for setting, is_so in left_out.items() if is_so])
    plays = isinstance(config, Grpo) and config.plays is not None
    compared = [] if plays else by_episodes(config.advantage)
    if compared and policy.ordered:
        raise Ended(
            f"grpo.advantage: {compared[0]} asks about the steps of an episode together, and one of "
            f"{', '.join(config.curation)} puts prompts in another order: remove one of them"
        )
    rollouts = job.scratch / "rollouts"
    beside = {rollouts: 1, job.scratch / BEST: 0, job.scratch / PROBES: 0}
    checkpoints = Checkpoints(job.scratch / "trainer", job.placement, every=config.num_iterations, beside=beside)
    monitor = TrainingMonitor(job.placement.on_anomaly, section_of(config), ordered=policy.ordered)
    longest = min(checked["longest_row"], config.max_tokens or checked["longest_row"])
    seconds = 60 * job.serving.start_minutes
    sampling = sampling_settings(config, job.serving, processor.tokenizer, job.device, longest=longest, seconds=seconds)
    shown = Screenshots(processor)
    # processes that each hold a part of the tower must all call it in each pass, so nothing is looked up
    store = None if job.placement.sharded else process_store()
    Tower(model, shown, store)
    if is_main() and not can_pack(model):
        print(f"one row for each rollout: attention {config.attention} takes no mask for groups", flush=True)
    micro = config.pass_size(packs=can_pack(model), processes=job.placement.processes)
    trainer = (EpisodeTrainer if plays else CdremTrainer)(
        model=model,
        peft_config=lora_config(model, config.lora, freeze_vision=config.freeze_vision),
        processing_class=processor,
        reward=policy.reward,
        rollouts=rollouts,
        shown=shown,
        core=model,
        whole=not job.placement.sharded,
        objective=config,
        facts=facts_of(policy.steps, prompts.with_format(None)["step_id"] if compared else None),
        train_dataset=prompts,
        callbacks=[
            ReportProgress(report),
            checkpoints,
            monitor,
            *(evaluation for evaluation in (best, probe) if evaluation),
            *tracker_callbacks(job),
        ],
        args=_arguments(job, checkpoints.folder, micro, sampling, ordered=policy.ordered),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(GradientsInBuckets(trainer))
    compare_prompts(trainer)
    keep_float32_sums(trainer)
    if trainer.ref_model is not None:
        _make_reference_fast(trainer.accelerator.unwrap_model(trainer.ref_model), model, job, shown, store)
    checkpoints.train(trainer)
    monitor.end()
    chosen = best.restore(trainer.state, trainer.model) if best else {}
    learned = probe.end(trainer.state, trainer.model) if probe else {}
    end_sampling(trainer)
    trained = merge_adapters(trainer)
    saved = save_trained(trainer, processor, job.out, models.dtype)
    if is_main():
        trainer.write_rollouts(job.out / ROLLOUTS)
        write_log(trainer.state, job.out / "training_log.jsonl")
    return {
        "prompts": len(prompts),
        **checked,
        "optimizer_steps": trainer.state.global_step,
        **chosen,
        **learned,
        **saved,
        "trained_parameters": trained,
        "warnings": [*monitor.warnings, *learned.get("warnings", ())],
        **_monitored([entry for entry in trainer.state.log_history if "reward" in entry]),
    }


def _make_reference_fast(
    reference: Any, model: Any, job: GrpoJob | GrounderRlJob, shown: Screenshots, store: VisualStore | None
) -> None:
    """Gives TRL's reference model the vision tower of the trained model where that is frozen, else a fast one of its own."""
    if job.config.freeze_vision and not job.placement.sharded:
        reference.model.visual = model.model.visual  # the same weights: one tower encodes for both
        return
    Tower(reference, shown, store)
    if job.on_gpu and job.config.attention == "sdpa":
        fast_vision(reference, job.device)


def _monitored(history: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of a run's monitors, from the log entries of its optimizer steps."""
    tail = history[-max(1, len(history) // 5) :]
    return {
        **difference(history),
        "kl_last": float(np.mean([entry["kl"] for entry in tail])) if tail and "kl" in tail[0] else None,
        "frac_reward_zero_std": float(np.mean([e["frac_reward_zero_std"] for e in history])) if history else None,
        **at_the_start(history),
        **{name: float(np.mean([e[name] for e in history])) for name in REGROUPED if history and name in history[0]},
    }


REGROUPED: Final = ("groups_asked_again", "groups_resampled", "groups_replayed", "episodes_lost")
"""Figures of `max_num_gen_batches`, `replay` and whole episodes, where they are set, as means of the optimizer steps: groups
sampled again, groups that another prompt has replaced, groups that got an earlier success, episodes that were left out."""


def at_the_start(history: Sequence[Mapping[str, float]]) -> dict[str, float | None]:
    """Monitors of the first fifth of a run's optimizer steps: what GRPO can still find, and how much of it says nothing.

    `entropy_first`: mean entropy of the sampled tokens, nats; SFT that went too far leaves little. `collapse_first`: AVSPO's
    rate of collapse, the share of groups whose rewards do not differ, which predicts where a run ends (arXiv 2605.21125).
    """
    head = history[: max(1, len(history) // 5)]
    # a step whose groups all lack spread has no pass, and so no entropy
    entropy = [entry["entropy"] for entry in head if "entropy" in entry]
    return {
        "entropy_first": float(np.mean(entropy)) if entropy else None,
        "collapse_first": float(np.mean([entry["frac_reward_zero_std"] for entry in head])) if head else None,
    }


def _arguments(
    job: GrpoJob | GrounderRlJob, folder: Path, micro: int, sampling: Mapping[str, Any], *, ordered: bool
) -> GRPOConfig:
    """TRL's settings: passes of `micro` rollouts, checkpoints in `folder`, rollouts by `sampling_settings`."""
    config = job.config
    return GRPOConfig(
        output_dir=str(folder),
        # TRL would spread the reference over all visible GPUs ("auto"), in each process anew
        model_init_kwargs={"device_map": None} if job.placement.strategy == "fsdp" else None,
        num_train_epochs=config.num_train_epochs,
        max_steps=config.max_steps or -1,
        num_generations=config.group_size,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation(
            config.prompts_per_step * config.group_size, micro, job.placement.processes
        ),
        num_iterations=config.num_iterations,
        max_completion_length=config.max_plan_tokens,
        temperature=config.temperature,
        top_p=1.0,
        top_k=0,
        learning_rate=config.learning_rate,
        lr_scheduler_type=config.lr_scheduler_type,
        lr_scheduler_kwargs={"min_lr_rate": MIN_LR_RATE} if config.lr_scheduler_type == "cosine_with_min_lr" else None,
        warmup_steps=config.warmup_ratio,
        weight_decay=config.weight_decay,
        adam_beta2=config.adam_beta2,
        max_grad_norm=1.0,
        beta=config.kl_beta,
        epsilon=config.clip_epsilon,
        epsilon_high=config.epsilon_high,
        delta=config.delta,
        importance_sampling_level=config.importance_sampling_level,
        loss_type=config.loss_type,
        scale_rewards=config.scale_rewards,
        use_bias_correction_kl=False,
        mask_truncated_completions=False,
        **sampling,
        logging_steps=1,
        logging_nan_inf_filter=False,  # TrainingMonitor checks for them
        save_strategy="no",  # Checkpoints decides
        save_total_limit=KEPT,
        **tracker_settings(job),
        disable_tqdm=True,
        seed=job.seed,
        data_seed=job.seed,
        shuffle_dataset=not ordered,
        **device_settings(job),
    )
