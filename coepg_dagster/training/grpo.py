"""GRPO of π'_k from π_k with the C-DREM reward, on TRL's GRPOTrainer.

The reward is one composite function, since Eq. 9 is a gate and not a weighted sum. TRL's defaults that differ from the
paper are set: loss_type "grpo", beta, epsilon, scale_rewards "group", no bias correction of the KL term.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate.utils import gather_object
from torch.utils.data import Sampler
from transformers import PrinterCallback, set_seed
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler

from coepg_dagster.experiment import MIN_LR_RATE, Grpo, Member, Models, Serving
from coepg_dagster.geometry import Point, Space
from coepg_dagster.inference.agents import Asked, Asking, Grounder, Plan, Reading
from coepg_dagster.inference.attention import fast_vision
from coepg_dagster.inference.engine import Engine
from coepg_dagster.inference.opening import opened
from coepg_dagster.inference.processing import vision_token_ids, without_vision_tokens
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.inference.visual import Screenshots, Tower, process_store
from coepg_dagster.pools.candidates import gate_of
from coepg_dagster.progress import Report
from coepg_dagster.prompts import parse_planner
from coepg_dagster.provenance import Agent
from coepg_dagster.rewards.cdrem import advantages, flatten_spreadless, gated, plan_reward
from coepg_dagster.rewards.variants import Weighing
from coepg_dagster.steps import GATE_CUT, GATE_PASSED, ROLLOUT_SCHEMA
from coepg_dagster.training.adapters import lora_config, merge_adapters
from coepg_dagster.training.checkpoints import KEPT, Checkpoints, Continues
from coepg_dagster.training.common import (
    ReportProgress,
    device_settings,
    keep_float32_sums,
    load_for_training,
    write_log,
)
from coepg_dagster.training.end_to_end import PointReward
from coepg_dagster.training.examples import NothingToTrainOn, completion_text, grpo_prompts
from coepg_dagster.training.launch import ALONE, Placement, accumulation, is_main, refuse_sharded
from coepg_dagster.training.packing import can_pack, in_passes, pack, refuse_other_screenshots, select_rows
from coepg_dagster.training.preflight import preflight
from coepg_dagster.training.probe import Probe, probed_steps
from coepg_dagster.training.sampling import (
    DIFFERENCE,
    DIFFERENCE_HIGH,
    compare_logprobs,
    compare_prompts,
    difference,
    difference_limit,
    end_sampling,
    sampling_groups,
    sampling_settings,
)
from coepg_dagster.training.speed import (
    GradientsInBuckets,
    check_attention,
    half_activations,
    half_vision,
)
from coepg_dagster.training.stops import Stops
from coepg_dagster.training.validation import KeepBest, Questions, requests_of
from coepg_dagster.training.verified import save_trained
from coepg_dagster.workers import ROLLOUTS

DEFAULT_SERVING = Serving()


class CdremReward:
    """Eq. 3 to 9 over a batch of rollouts; remembers the rows of the batch (ROLLOUT_SCHEMA without the advantage).

    A rollout that fails the gate calls no grounder, which is exact: its reward is 0 whatever they would say. A step
    without a target has r_plan = 1 once the gate passes.

    Args:
        grounders: name → grounder, ϕ_k first, with `priors` σ_j of the same names.
        steps: the training steps, whose labels and boxes decide.
    """

    __name__ = "cdrem"

    def __init__(
        self,
        grounders: Mapping[str, Grounder],
        priors: Mapping[str, float],
        steps: pa.Table,
        screens: Screens,
        config: Grpo,
    ) -> None:
        if not grounders:
            raise ValueError("C-DREM needs at least one grounder: without a vote every plan would be right")
        self._grounders, self._screens = dict(grounders), screens
        self._weigh = Weighing(tuple(priors[name] for name in grounders), config)
        self._labels = {row["step_id"]: row for row in steps.select(["step_id", "action_type", "value"]).to_pylist()}
        self._asking: Asking | None = None
        self.rows: list[dict[str, Any]] = []

    @property
    def elsewhere(self) -> bool:
        """Whether any grounder can answer while this process samples."""
        return any(grounder.elsewhere for grounder in self._grounders.values())

    @contextmanager
    def asking(self) -> Iterator[Asking]:
        """A batch of rollouts, at whose end no grounder is asked any more: `ask` while it is sampled, then `score`."""
        if self._asking is not None:
            yield self._asking
            return
        with Asking(self._grounders) as self._asking:
            try:
                yield self._asking
            finally:
                self._asking = None

    def ask(self, texts: Sequence[str], step_ids: Sequence[str]) -> None:
        """Within `asking`: begins with the votes on planner answers that `score` will get later, and returns at once."""
        assert self._asking is not None
        _, _, pairs = self._gated(texts, step_ids)
        self._asking.ask(list(pairs.values()))

    def __call__(self, completions: Sequence[Any], step_id: Sequence[str], **_: Any) -> list[float]:
        """r of Eq. 9 for each completion; `step_id` is the dataset's column, one per completion."""
        texts = [completion_text(completion) for completion in completions]
        return self.score(texts, step_id)

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Has the grounders keep what they said of the rollouts of a run that is continued (rows of ROLLOUT_SCHEMA)."""
        kept: dict[str, dict[Asked, Reading]] = {name: {} for name in self._grounders}
        for row in rows:
            for said in row["graders"]:
                if said["failure"] is None:
                    point = None if said["x"] is None else Point(said["x"], said["y"], Space.ORIGINAL)
                    kept[said["grounder"]][row["step_id"], row["plan"]] = Reading(
                        point, said["mean_logprob"], said["tokens"], weights=said["version"] or ""
                    )
        for name, readings in kept.items():
            self._grounders[name].keep(readings)

    def score(self, texts: Sequence[str], step_ids: Sequence[str]) -> list[float]:
        """r of Eq. 9 for each planner answer on its step."""
        plans, gates, pairs = self._gated(texts, step_ids)
        votes: dict[int, tuple[Reading, ...]] = {}
        if pairs:
            with self.asking() as asking:
                votes = dict(zip(pairs, zip(*asking.readings(list(pairs.values())), strict=True), strict=True))
        r_plan = np.ones(len(texts))
        self.rows = []
        for i, (plan, gate) in enumerate(zip(plans, gates, strict=True)):
            graders: list[dict[str, Any]] = []
            if i in votes:
                boxes = self._screens.boxes(step_ids[i])
                r_plan[i], graders = self._vote(votes[i], [vote.hits(boxes) for vote in votes[i]])
            self.rows.append(
                {
                    "step_id": step_ids[i],
                    "text": plan.text,
                    "plan": plan.answer and plan.answer.plan,
                    "gate": gate,
                    "graders": graders,
                }
            )
        passes = np.array([gate == GATE_PASSED for gate in gates], dtype=float)
        rewards = gated(passes, passes, r_plan)
        for row, reward in zip(self.rows, rewards, strict=True):
            row["reward"] = float(reward)
        return [float(reward) for reward in rewards]

    def _gated(self, texts: Sequence[str], step_ids: Sequence[str]) -> tuple[list[Plan], list[str], dict[int, Asked]]:
        """(what each text says, its gate, and what grounders are asked about those that need a vote, by position)."""
        plans = [Plan(text, parse_planner(text)) for text in texts]
        labels = [self._labels[step_id] for step_id in step_ids]
        gates = [gate_of(p, label["action_type"], label["value"]) for p, label in zip(plans, labels, strict=True)]
        pairs = {
            i: (step_id, plan.answer.plan)
            for i, (step_id, plan, gate) in enumerate(zip(step_ids, plans, gates, strict=True))
            if gate == GATE_PASSED and plan.answer is not None and self._screens.boxes(step_id)
        }
        return plans, gates, pairs

    def _vote(self, votes: Sequence[Reading], hits: Sequence[bool]) -> tuple[float, list[dict[str, Any]]]:
        """(r_plan of Eq. 4, what each grounder contributed)."""
        c, weights = self._weigh([vote.mean_logprob for vote in votes], [vote.failure is None for vote in votes])
        graders = [
            {
                "grounder": name,
                "x": vote.point and vote.point.x,
                "y": vote.point and vote.point.y,
                "hit": hit,
                "tokens": vote.tokens,
                "mean_logprob": vote.mean_logprob if vote.failure is None else None,
                "confidence": float(confidence) if vote.failure is None else None,
                "prior": float(prior),
                "weight": float(weight),
                "seconds": vote.seconds,
                "version": vote.weights or None,
                "failure": vote.failure,
            }
            for name, vote, hit, confidence, prior, weight in zip(
                self._grounders, votes, hits, c, self._weigh.priors, weights, strict=True
            )
        ]
        return float(plan_reward(weights, np.array(hits))), graders


class PromptOrder(RepeatSampler):  # type: ignore[misc]
    """TRL's order of the prompts, but that of an epoch depends on its number alone: a continued run has it too."""

    def __init__(self, *args: Any, step: Callable[[], int], updates: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._step, self._updates = step, updates

    def __iter__(self) -> Iterator[int]:
        epoch = self._step() // (self.num_samples // self.batch_size * self._updates)
        self.generator.manual_seed(self.seed + epoch)
        yield from super().__iter__()


class CdremTrainer(Continues, GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPO trainer with rewards of spreadless groups made equal, and every rollout kept.

    Rewards are made equal in `_calculate_rewards`, where TRL has gathered those of all processes and groups are whole. The
    rollouts of an optimizer step are a file of their own in `rollouts`; a continued run writes those of the steps that it
    repeats over those of the run before. An answer with a vision token is cut before it, has reward 0 and is counted.

    Groups stay together in the passes of an optimizer step (`_prepare_inputs`), and a group is one row of a pass
    (`_get_per_token_logps_and_entropies`, see `packing`). Without a KL term a rollout without advantage is in no pass: it
    would add nothing.

    What the sampler and the trainer say of a token's probability is compared in each step (`_compute_loss`).

    Grounders that compute elsewhere are asked about a rollout when it ends, while the longer ones are still sampled and while the
    trainer computes log-probabilities; the batch is sampled as without them, so the same tokens are drawn.

    Args:
        shown: where the screenshots of a step are kept for the towers.
        core: the policy without what wraps it.
        whole: whether this process holds all of it: then it samples group by group.
    """

    def __init__(
        self,
        *args: Any,
        reward: CdremReward | PointReward,
        rollouts: Path,
        shown: Screenshots,
        core: Any,
        whole: bool,
        **kwargs: Any,
    ) -> None:
        self._reward, self._rollouts = reward, rollouts
        self._early = reward if isinstance(reward, CdremReward) and reward.elsewhere else None
        self._step_ids: list[str] = []
        self._cut: list[bool] = []
        self._shown, self._core, self._whole = shown, core, whole
        self._packs = can_pack(core)
        self._passes: list[dict[str, Any]] | None = None  # of the rollouts at hand
        self._continued = True  # until the first step shows whether it is
        rollouts.mkdir(parents=True, exist_ok=True)
        super().__init__(*args, reward_funcs=reward, **kwargs)

    def _get_train_sampler(self, dataset: Any = None) -> Sampler[int]:
        order = super()._get_train_sampler(dataset)
        return PromptOrder(
            order.data_source,
            order.mini_repeat_count,
            order.batch_size,
            order.repeat_count,
            seed=order.seed,
            step=lambda: self.state.global_step,
            updates=self.num_iterations,
        )

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self._step_ids = [row["step_id"] for row in inputs]
        self._shown.forget()
        if self._continued and isinstance(self._reward, CdremReward):
            for step in range(0, self.state.global_step, self.num_iterations):
                self._reward.recall(pq.read_table(self._part(step)).to_pylist())
        self._continued = False
        batch = self._early.asking() if self._early else nullcontext()
        with self._shown.keys(), batch:
            made = super()._generate_and_score_completions(inputs)
        refuse_other_screenshots(made, [row["images"][0] for row in inputs], self._shown)
        return made

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """TRL's, but the rollouts of a prompt stay together: TRL shuffles them over the passes of a step."""
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        passes = self.args.steps_per_generation
        if self._step % (passes * self.num_iterations) == 0 or self._passes is None:
            batch = self._generate_and_score_completions(generation_batch)
            alone = self.accelerator.num_processes == 1 and not self._spread
            self._passes = in_passes(batch, passes, self.loss_type, drop=self.beta == 0, empty=alone)
        return self._passes[self._step % passes]

    @property
    def _spread(self) -> bool:
        """Whether something around the model expects a forward pass in every process."""
        return self.is_deepspeed_enabled or self.is_fsdp_enabled

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        if not self._packs:
            found = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **more
            )
            self._logps = found[0].detach()
            return found  # type: ignore[no-any-return]
        rows = {"input_ids": input_ids, "attention_mask": attention_mask}
        rows |= {name: more[name] for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids")}
        said, size = [], batch_size or len(input_ids)
        for start in range(0, len(input_ids), size):
            whole = size >= len(input_ids)  # as in the update: nothing to choose, and nothing to copy
            chunk = rows if whole else select_rows(rows, range(start, min(len(input_ids), start + size)))
            packed = pack(self._core, completion=logits_to_keep, **chunk)
            with self.accelerator.autocast():
                output = model(**packed.inputs, labels=packed.labels, fused_lm_head=True)
            entropy = packed.unpack(output.entropy) if compute_entropy else None
            said.append((packed.unpack(output.log_probs), entropy))
        logps = torch.cat([of_chunk for of_chunk, _ in said])
        self._logps = logps.detach()
        return logps, torch.cat([e for _, e in said if e is not None]) if compute_entropy else None, None

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        share = inputs.get("share", 1.0)
        if not len(inputs["prompt_ids"]):
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        loss: torch.Tensor = share * super()._compute_loss(model, inputs)
        passes = self.args.steps_per_generation
        if "sampling_per_token_logps" in inputs and self._step % (passes * self.num_iterations) < passes:
            self._compare(inputs["sampling_per_token_logps"], inputs["completion_ids"], inputs["completion_mask"])
        return loss

    def _compare(self, sampled: torch.Tensor, completion_ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Ends training where the policy, unchanged since it sampled, says otherwise of the same tokens."""

        def text(row: int, token: int) -> str:
            return str(self.processing_class.tokenizer.decode([int(completion_ids[row, token])]))

        limit = difference_limit(self.accelerator.device.type != "cpu", self.use_vllm)
        mean, high = compare_logprobs(sampled, self._logps, mask, limit, text)
        if not self.use_vllm:  # TRL logs it
            self._metrics["train"][DIFFERENCE].append(mean)
        self._metrics["train"][DIFFERENCE_HIGH].append(high)

    def _tokenize_prompts(self, prompts: Any) -> Any:
        """TRL's, but a prompt is written and tokenized once for its rollouts."""
        new = [i for i, step_id in enumerate(self._step_ids) if not i or step_id != self._step_ids[i - 1]]
        owner = np.repeat(range(len(new)), np.diff([*new, len(prompts)])).tolist()
        ids, images, fields = super()._tokenize_prompts([prompts[i] for i in new])
        return [ids[i] for i in owner], [images[i] for i in owner], select_rows(fields, owner)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        sampling: AbstractContextManager[list[list[float]] | None] = nullcontext()
        if self._whole and not self.use_vllm:
            policy = self.accelerator.unwrap_model(self.model_wrapped)
            sampling = sampling_groups(self._core, policy, self._ask_early)
        with sampling as sampled:
            answers, logprobs = super()._generate_single_turn(*args, **kwargs)
        if sampled is not None:
            logprobs = [of_answer[: len(answer)] for of_answer, answer in zip(sampled, answers, strict=True)]
        tokenizer = self.processing_class.tokenizer
        unwanted = frozenset(vision_token_ids(tokenizer))
        # an image token in a row breaks the count of image features when it is scored: the run must not end for it
        kept = [without_vision_tokens(answer, unwanted, tokenizer.eos_token_id) for answer in answers]
        self._cut = [short != answer for short, answer in zip(kept, answers, strict=True)]
        if logprobs is not None:
            # TRL reads NaN as "not known": the end that was put in place of a vision token was not sampled
            logprobs = [
                [math.nan] if answer[0] in unwanted else of_answer[: len(short)]
                for of_answer, short, answer in zip(logprobs, kept, answers, strict=True)
            ]
        self._ask_early(dict(enumerate(kept)))  # those that nothing ended, and all of other samplers
        return kept, logprobs

    def _ask_early(self, answers: Mapping[int, list[int]]) -> None:
        """Has the grounders begin with finished answers (row of the batch → tokens), where any computes elsewhere."""
        if self._early:
            # as TRL does; an answer that it reads otherwise is asked about by `score`
            texts = self.processing_class.batch_decode(list(answers.values()), skip_special_tokens=True)
            self._early.ask(texts, [self._step_ids[row] for row in answers])

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        raw = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        for row, cut in zip(self._reward.rows, self._cut, strict=True):
            if cut:
                row |= {"reward": 0.0, "gate": GATE_CUT, "plan": None, "graders": []}
        rows = gather_object(self._reward.rows)
        # exact values: TRL holds rewards in float32
        rewards = [row["reward"] for row in rows]
        flat, spreadless = flatten_spreadless(rewards, self.num_generations)
        self._log_metric("groups_without_spread", float(spreadless.mean()))
        self._log_metric("gate_passed", float(np.mean([row["gate"] == GATE_PASSED for row in rows])))
        self._log_metric("invalid_special_token", float(np.mean(gather_object(self._cut))))
        if self.accelerator.is_main_process:
            self._keep(rows, advantages(rewards, self.num_generations, self.scale_rewards))
        return torch.as_tensor(flat, dtype=raw.dtype, device=raw.device)[:, None]

    def _keep(self, rows: list[dict[str, Any]], group_advantages: Any) -> None:
        step = self.state.global_step
        for position, (row, advantage) in enumerate(zip(rows, group_advantages, strict=True)):
            row |= {"optimizer_step": step, "group": position // self.num_generations, "advantage": float(advantage)}
        part = self._part(step)
        pq.write_table(pa.Table.from_pylist(rows, ROLLOUT_SCHEMA), part.with_suffix(".partial"), compression="zstd")
        part.with_suffix(".partial").rename(part)

    def _part(self, step: int) -> Path:
        return self._rollouts / f"{step:08}.parquet"

    def write_rollouts(self, path: Path) -> None:
        """The rollouts of all optimizer steps as one table, in order."""
        with pq.ParquetWriter(path, ROLLOUT_SCHEMA, compression="zstd") as out:
            for step in range(0, self.state.global_step, self.num_iterations):
                out.write_table(pq.read_table(self._part(step)))


def train_grpo(
    init: str,
    own_grounder: tuple[str, str] | None,
    verifiers: Mapping[str, Member | str],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    config: Grpo,
    max_point_tokens: int,
    batch_size: int,
    seed: int,
    device: str,
    out: Path,
    report: Report,
    serving: Serving = DEFAULT_SERVING,
    *,
    scratch: Path,
    placement: Placement = ALONE,
    validation: pa.Table | None = None,
    probed: pa.Table | None = None,
) -> dict[str, Any]:
    """Trains π'_k from π_k (`init`) on the prompts of D_{k-1}; saves it whole, with rollouts.parquet, under `out`.

    Args:
        own_grounder: (name, checkpoint) of ϕ_k, which has prior `config.own_prior`; None: `init` is an end-to-end agent, whose
            own point is judged.
        verifiers: the open verifiers by name; left out where `config.ensemble` is false.
        max_point_tokens, batch_size: of the grounders' answers and forward passes.
        scratch: where checkpoints and the rollouts so far lie.
        validation: steps on which the weights are chosen (`config.validate_every`); None: the last weights are kept.
        probed: steps of validation on which π_k and π'_k are compared, beside as many that are trained on; None: they are not.
    Returns:
        The figures of the run; rates in per cent.
    """
    refuse_sharded(config, placement)
    own = {own_grounder[0]: Member(model=own_grounder[1])} if own_grounder else {}
    members = dict(own)
    if config.ensemble:
        members |= {other: Member.model_validate(verifier) for other, verifier in verifiers.items()}
    in_vllm = sum(models.engine_of(member) == "vllm" for member in members.values())
    with ExitStack() as stack:
        engines = {
            member: stack.enter_context(
                opened(
                    model,
                    models,
                    device=device,
                    batch_size=batch_size,
                    serving=serving,
                    logs=out,
                    share=in_vllm,
                    beside_training=True,
                )
            )
            for member, model in members.items()
        }
        priors = {member: config.own_prior if member in own else config.verifier_prior for member in members}
        return _train(
            init,
            engines,
            priors,
            dataset,
            steps,
            models,
            config,
            max_point_tokens,
            seed,
            device,
            out,
            report,
            scratch,
            placement,
            serving,
            validation,
            probed,
        )


def _train(
    init: str,
    engines: Mapping[str, Engine],
    priors: Mapping[str, float],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    config: Grpo,
    max_point_tokens: int,
    seed: int,
    device: str,
    out: Path,
    report: Report,
    scratch: Path,
    placement: Placement,
    serving: Serving,
    validation: pa.Table | None,
    probed: pa.Table | None,
) -> dict[str, Any]:
    set_seed(seed)
    model, processor = load_for_training(init, "cpu" if placement.sharded else device, models.dtype, config)
    on_gpu = device != "cpu"
    if on_gpu:
        if config.attention == "sdpa":
            fast_vision(model, device)
        if models.dtype == "bfloat16":
            half_activations(model)
        if config.freeze_vision and models.dtype == "bfloat16" and not placement.sharded:
            half_vision(model)  # TRL loads the reference in the type of the first weights, which are the tower's
    check_attention(model, config.attention)
    resize = TransformersEngine.of(model, processor, batch_size=1).resize

    def reward_on(labelled: pa.Table, graders: Mapping[str, Engine]) -> tuple[Screens, CdremReward | PointReward]:
        screens = Screens(labelled, resize)
        if not graders:
            return screens, PointReward(labelled, screens, models.coordinates)
        grounders = {}
        for name, engine in graders.items():
            own_screens = screens if engine.resize == resize else Screens(labelled, engine.resize)
            grounders[name] = Grounder(engine, own_screens, models.prompts, models.coordinates, max_point_tokens)
        return screens, CdremReward(grounders, priors, labelled, screens, config)

    agent: Agent = "decoupled" if engines else "end_to_end"
    screens, reward = reward_on(steps, engines)
    prompts = grpo_prompts(dataset, steps, screens, models.prompts, agent)
    prompts, found = preflight(prompts, processor, screens, config.max_tokens, out, answer=config.max_plan_tokens)
    if len(prompts) < config.prompts_per_step:
        # TRL leaves out what does not fill an optimizer step: it would end at once, with π_k unchanged
        raise NothingToTrainOn(
            f"D_{{k-1}} covers {len(prompts)} steps, fewer than one optimizer step needs: "
            f"lower grpo.prompts_per_step ({config.prompts_per_step})"
        )
    rollouts = config.prompts_per_step * config.group_size
    checkpoints = Checkpoints(scratch / "trainer", placement, every=config.num_iterations)
    stops = Stops(placement.on_trouble)
    sampling = sampling_settings(
        config,
        serving,
        processor.tokenizer,
        device,
        longest=min(found["longest_row"], config.max_tokens or found["longest_row"]),
        seconds=60 * serving.start_minutes,
    )
    own = dict(list(engines.items())[:1])  # ϕ_k, the grounder of M_k

    def asked_of(labelled: pa.Table) -> tuple[Questions, CdremReward | PointReward]:
        shown, judged = reward_on(labelled, own)
        return Questions(
            requests_of(labelled, shown, models.prompts, agent), processor, config.micro_batch_size
        ), judged

    best = probe = None
    if validation is not None:
        best = KeepBest(*asked_of(validation), config, scratch / "best")
    if probed is not None and placement.sharded:
        print(f"no probe: with strategy {placement.strategy} no process can answer alone", flush=True)
    elif probed is not None:
        asked = probed_steps(steps, prompts.with_format(None)["step_id"], probed, config.probe_steps)
        questions = asked_of(pa.concat_tables(asked.values()))
        probe = Probe(asked, *questions, next(iter(own), "labels"), config, seed, scratch / "probe")
    shown = Screenshots(processor)
    # processes that hold parts of the tower gather them together, and must all call it in each pass
    store = None if placement.sharded else process_store()
    Tower(model, shown, store)
    if is_main() and not can_pack(model):
        print(f"each rollout is a row of its own: attention {config.attention} takes no mask for groups", flush=True)
    micro = config.pass_size(packs=can_pack(model), processes=placement.processes)
    trainer = CdremTrainer(
        model=model,
        peft_config=lora_config(model, config.lora, freeze_vision=config.freeze_vision),
        processing_class=processor,
        reward=reward,
        rollouts=scratch / "rollouts",
        shown=shown,
        core=model,
        whole=not placement.sharded,
        train_dataset=prompts,
        callbacks=[ReportProgress(report), checkpoints, stops, *(look for look in (best, probe) if look)],
        args=GRPOConfig(
            output_dir=str(checkpoints.folder),
            num_train_epochs=config.num_train_epochs,
            max_steps=config.max_steps or -1,
            num_generations=config.group_size,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulation(rollouts, micro, "grpo"),
            num_iterations=config.num_iterations,
            max_completion_length=config.max_plan_tokens,
            temperature=config.temperature,
            top_p=1.0,
            top_k=0,
            learning_rate=config.learning_rate,
            lr_scheduler_type=config.lr_scheduler_type,
            lr_scheduler_kwargs={"min_lr_rate": MIN_LR_RATE}
            if config.lr_scheduler_type == "cosine_with_min_lr"
            else None,
            warmup_steps=config.warmup_ratio,
            weight_decay=config.weight_decay,
            adam_beta2=config.adam_beta2,
            max_grad_norm=1.0,
            beta=config.kl_beta,
            epsilon=config.clip_epsilon,
            epsilon_high=config.epsilon_high,
            loss_type=config.loss_type,
            scale_rewards=config.scale_rewards,
            use_bias_correction_kl=False,
            mask_truncated_completions=False,
            **sampling,
            logging_steps=1,
            logging_nan_inf_filter=False,  # Stops looks for them
            save_strategy="no",  # Checkpoints decides
            save_total_limit=KEPT,
            report_to="none",
            disable_tqdm=True,
            seed=seed,
            data_seed=seed,
            **device_settings(device, placement),
        ),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(GradientsInBuckets(trainer))
    compare_prompts(trainer)
    keep_float32_sums(trainer)
    if trainer.ref_model is not None:
        reference = trainer.accelerator.unwrap_model(trainer.ref_model)
        if config.freeze_vision and not placement.sharded:
            reference.model.visual = model.model.visual  # the same weights: one tower encodes for both
        else:
            Tower(reference, shown, store)
            if on_gpu and config.attention == "sdpa":
                fast_vision(reference, device)
    checkpoints.train(trainer)
    stops.end()
    chosen = best.restore(trainer.state, trainer.model) if best else {}
    learned = probe.end(trainer.state, trainer.model) if probe else {}
    end_sampling(trainer)
    trained = merge_adapters(trainer)
    saved = save_trained(trainer, processor, out, models.dtype)
    if is_main():
        trainer.write_rollouts(out / ROLLOUTS)
        write_log(trainer.state, out / "training_log.jsonl")
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    tail = history[-max(1, len(history) // 5) :]
    return {
        "prompts": len(prompts),
        **found,
        "optimizer_steps": trainer.state.global_step,
        **chosen,
        **learned,
        **saved,
        "trained_parameters": trained,
        "warnings": stops.warnings,
        **difference(history),
        "kl_last": float(np.mean([entry["kl"] for entry in tail])) if tail and "kl" in tail[0] else None,
        "groups_without_spread": 100 * float(np.mean([e["groups_without_spread"] for e in history]))
        if history
        else None,
    }
