"""TRL's GRPOTrainer with the C-DREM reward: groups as rows, rewards and advantages of ours, every rollout kept."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate.utils import gather_object
from torch.utils.data import Sampler
from trl import GRPOTrainer
from trl.data_utils import prepare_multimodal_messages
from trl.trainer.utils import RepeatSampler

from coepg_dagster.artifacts import seal, write_table
from coepg_dagster.experiment.training import Grpo, PolicyTraining
from coepg_dagster.inference.processing import vision_token_ids, without_vision_tokens
from coepg_dagster.inference.visual import Screenshots, refuse_other_screenshots
from coepg_dagster.rewards.answers import Floats
from coepg_dagster.rewards.cdrem import advantages, flatten_spreadless
from coepg_dagster.rewards.estimators import estimated, of_whole_episodes
from coepg_dagster.rewards.losses import kl_factors
from coepg_dagster.steps import GATE_CUT, GATE_PASSED, ROLLOUT_SCHEMA
from coepg_dagster.training.cdrem_reward import CdremReward
from coepg_dagster.training.checkpoints import Continues
from coepg_dagster.training.examples import Facts
from coepg_dagster.training.live_episodes import LOST, LiveEpisodes, Sampled
from coepg_dagster.training.packing import can_pack, in_passes, pack, select_rows
from coepg_dagster.training.point_reward import PointReward
from coepg_dagster.training.replay import Prompt, ReplayBuffer, Success
from coepg_dagster.training.sampling import (
    DIFFERENCE,
    DIFFERENCE_HIGH,
    compare_logprobs,
    difference_limit,
    sampling_groups,
)


class PromptOrder(RepeatSampler):  # type: ignore[misc]
    """TRL's order of the prompts; that of an epoch depends on its number alone, so that a continued run has the same.

    Args:
        together: positions of prompts that are asked one after another, as those of an episode; None: each alone.
    """

    def __init__(
        self,
        *args: Any,
        step: Callable[[], int],
        updates: int,
        together: Sequence[Sequence[int]] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._step, self._updates, self._together = step, updates, together

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            epoch = self._step() // (self.num_samples // self.batch_size * self._updates)
            self.generator.manual_seed(self.seed + epoch)
        if self._together is None:
            yield from super().__iter__()
            return
        drawn = torch.randperm(len(self._together), generator=self.generator).tolist()
        positions = [position for block in drawn for position in self._together[block]]
        for start in range(0, len(positions) - self.batch_size + 1, self.batch_size):
            chunk = positions[start : start + self.batch_size]
            yield from [p for _ in range(self.repeat_count) for p in chunk for _ in range(self.mini_repeat_count)]


class PerRollout(float):
    """β of TRL's loss with a factor for each rollout: TRL adds `beta * kl`, with kl of shape (B, completion length)."""

    factors: torch.Tensor

    def __new__(cls, beta: float, factors: torch.Tensor) -> PerRollout:
        made = super().__new__(cls, beta)
        made.factors = factors
        return made

    def __mul__(self, kl: Any) -> Any:
        return float(self) * self.factors[:, None] * kl


class CdremTrainer(Continues, GRPOTrainer):  # type: ignore[misc]
    """TRL's GRPO trainer that makes the rewards of groups without spread equal, and writes all rollouts to disk.

    Rewards are made equal in `_calculate_rewards`, where TRL has gathered those of all processes, so that groups are complete.
    `rollouts` has one file for each optimizer step that samples; a continued run overwrites those of the steps that it repeats.
    An answer with a vision token is cut before it, has reward 0, or the lowest where rewards go below, and is counted.

    Groups stay together in the passes of an optimizer step (`_prepare_inputs`), and a group is one row of a pass
    (`_get_per_token_logps_and_entropies`, see `packing`). Without a KL term, rollouts with advantage 0 are left out, since they
    add nothing to the gradient.

    `_compute_loss` compares the sampler's and the trainer's log-probabilities in each step.

    Groups without spread are asked other prompts (`max_num_gen_batches`), and groups without a success get an earlier one
    (`replay`), between sampling and TRL's own work (`_generate_single_turn`), so that TRL sees a batch as any other.

    Remote grounders get a rollout as soon as it ends, while longer ones are still sampled and the trainer computes
    log-probabilities. This does not change which tokens are sampled.

    Args:
        rollouts: the folder of the rollouts.
        shown: the screenshots of a step, for the vision towers.
        core: the policy without wrappers.
        whole: whether this process holds the whole policy; if so, it samples group by group.
        objective: the settings with the plug-ins that follow Eq. 10 and the factor of β.
        facts: of the steps, for advantage plug-ins.
    """

    beta: float  # TRL's
    num_generations: int  # TRL's

    def __init__(
        self,
        *args: Any,
        reward: CdremReward | PointReward | LiveEpisodes,
        rollouts: Path,
        shown: Screenshots,
        core: Any,
        whole: bool,
        objective: PolicyTraining,
        facts: Facts,
        **kwargs: Any,
    ) -> None:
        self._reward, self._rollouts = reward, rollouts
        self._objective, self._facts = objective, facts
        self._reward_if_cut = min(0.0, objective.composite.lowest)
        self._early = reward if isinstance(reward, CdremReward) and reward.remote else None
        self._inputs: list[dict[str, Any]] = []  # TRL's, of the batch
        self._prompts: list[Any] = []  # TRL's, of the batch
        self._asked: list[Prompt] = []  # of each rollout that is being sampled
        self._cut: list[bool] = []
        self._buffer = ReplayBuffer(**objective.replay.model_dump()) if objective.replay else None
        self._replayed: dict[int, Success] = {}  # row of the batch → what stands there
        self._then: torch.Tensor | None = None  # log-probabilities of replayed rows; the forward pass adds the others
        self._shown, self._core, self._whole = shown, core, whole
        self._packs = can_pack(core)
        self._passes: list[dict[str, Any]] | None = None  # of the current rollouts
        self._first_step = True  # of this process; a continued run then recalls earlier answers
        rollouts.mkdir(parents=True, exist_ok=True)
        super().__init__(*args, reward_funcs=reward, **kwargs)

    def _get_train_sampler(self, dataset: Any = None) -> Sampler[int]:
        order = super()._get_train_sampler(dataset)
        return PromptOrder(
            order.data_source,
            order.mini_repeat_count,
            order.batch_size,
            order.repeat_count,
            shuffle=order.shuffle,
            seed=order.seed,
            step=lambda: self.state.global_step,
            updates=self.num_iterations,
            together=self._facts.together,
        )

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self._inputs, self._asked = inputs, _asked(inputs)
        self._replayed = {}
        self._shown.forget()
        if self._first_step and isinstance(self._reward, CdremReward):
            for step in range(0, self.state.global_step, self.num_iterations):
                self._reward.recall(pq.read_table(self._part(step)).to_pylist())
        self._first_step = False
        batch = self._early.pool() if self._early else nullcontext()
        with self._shown.keys(), batch:
            made = super()._generate_and_score_completions(inputs)
        # TRL's is that of the batch where `scale_rewards` is "batch"
        self._metrics["train"]["frac_reward_zero_std"][-1] = self._frac_reward_zero_std
        refuse_other_screenshots(made, [row["images"][0] for row in inputs], self._shown)
        mine = slice(self.accelerator.process_index * len(inputs), (self.accelerator.process_index + 1) * len(inputs))
        for name, values in self._instead.items():
            made[name] = torch.as_tensor(values[mine], dtype=made["advantages"].dtype, device=made["advantages"].device)
        if self._replayed:
            then = torch.full(made["completion_ids"].shape, math.nan, device=made["completion_ids"].device)
            for row, success in self._replayed.items():
                then[row, : len(success.logprobs)] = torch.tensor(success.logprobs)
            if "old_per_token_logps" in made:
                then = torch.where(then.isnan(), made["old_per_token_logps"], then)
            made["old_per_token_logps"] = then
        return made

    def _generate(self, prompts: Any) -> Any:
        self._prompts = prompts  # the list that TRL goes on with
        return super()._generate(prompts)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        """As TRL's, but the rollouts of a prompt stay together; TRL shuffles them over the passes of a step."""
        if not self.model.training:
            return super()._prepare_inputs(generation_batch)
        passes = self.args.steps_per_generation
        if self._step % (passes * self.num_iterations) == 0 or self._passes is None:
            batch = self._generate_and_score_completions(generation_batch)
            alone = self.accelerator.num_processes == 1 and not self._spread
            self._passes = in_passes(
                batch, passes, self.loss_type, drop=self.beta == 0, empty=alone, filled=self._rows_of_a_pass
            )
        return self._passes[self._step % passes]

    @property
    def _rows_of_a_pass(self) -> int | None:
        """How many rows fill a pass; None: all passes have as many."""
        return None

    @property
    def _spread(self) -> bool:
        """Whether DeepSpeed or FSDP needs a forward pass in every process."""
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
        if batch_size is not None:
            batch_size = self._rows_of_a_pass or batch_size
        if not self._packs:
            unpacked = super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy, **more
            )
            self._hold(unpacked[0])
            return unpacked  # type: ignore[no-any-return]
        rows = {"input_ids": input_ids, "attention_mask": attention_mask}
        rows |= {name: more[name] for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids")}
        chunks, size = [], batch_size or len(input_ids)
        for start in range(0, len(input_ids), size):
            whole = size >= len(input_ids)  # as in the update: no rows are selected, and nothing is copied
            chunk = rows if whole else select_rows(rows, range(start, min(len(input_ids), start + size)))
            packed = pack(self._core, completion=logits_to_keep, **chunk)
            with self.accelerator.autocast():
                output = model(**packed.inputs, labels=packed.labels, fused_lm_head=True)
            entropy = packed.unpack(output.entropy) if compute_entropy else None
            chunks.append((packed.unpack(output.log_probs), entropy))
        logps = torch.cat([of_chunk for of_chunk, _ in chunks])
        self._hold(logps)
        return logps, torch.cat([e for _, e in chunks if e is not None]) if compute_entropy else None, None

    def _hold(self, logps: torch.Tensor) -> None:
        self._logps = logps.detach()
        if self._then is not None:
            self._then.copy_(torch.where(self._then.isnan(), self._logps, self._then))

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        share = inputs.get("share", 1.0)
        if not len(inputs["prompt_ids"]):
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        beta = self.beta
        if "kl_factor" in inputs:
            self.beta = PerRollout(beta, inputs["kl_factor"])
        if "old_per_token_logps" in inputs:
            # TRL leaves them out where they are those of the forward pass of the update, and reads them after it
            self._then = inputs["old_per_token_logps"].clone()
            inputs = inputs | {"old_per_token_logps": self._then}
        try:
            loss: torch.Tensor = share * super()._compute_loss(model, inputs)
        finally:
            self.beta, self._then = beta, None
        passes = self.args.steps_per_generation
        if "sampling_per_token_logps" in inputs and self._step % (passes * self.num_iterations) < passes:
            self._compare(inputs["sampling_per_token_logps"], inputs["completion_ids"], inputs["completion_mask"])
        return loss

    def _compare(self, sampled: torch.Tensor, completion_ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Raises Ended if the policy, unchanged since it sampled, gives the same tokens other log-probabilities.

        `sampled`, `completion_ids` and `mask` have the shape (rollouts, completion length).
        """

        def text(row: int, token: int) -> str:
            return str(self.processing_class.tokenizer.decode([int(completion_ids[row, token])]))

        limit = difference_limit(self.accelerator.device.type != "cpu", self.use_vllm)
        mean, high = compare_logprobs(sampled, self._logps, mask, limit, text)
        if not self.use_vllm:  # TRL logs it
            self._metrics["train"][DIFFERENCE].append(mean)
        self._metrics["train"][DIFFERENCE_HIGH].append(high)

    def _tokenize_prompts(self, prompts: Any) -> Any:
        """As TRL's, but a prompt is rendered and tokenized once for all its rollouts."""
        new = [i for i, asked in enumerate(self._asked) if not i or asked != self._asked[i - 1]]
        owner = np.repeat(range(len(new)), np.diff([*new, len(prompts)])).tolist()
        ids, images, fields = super()._tokenize_prompts([prompts[i] for i in new])
        return [ids[i] for i in owner], [images[i] for i in owner], select_rows(fields, owner)

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, fields: Any, num_generations: int, *args: Any, **kwargs: Any
    ) -> Any:
        """As TRL's. `prompt_ids`, `images`, and the batch that TRL holds, are changed in place where another prompt is asked."""
        answers, logprobs, self._cut = self._sample(prompt_ids, images, fields, num_generations, *args, **kwargs)
        if logprobs is not None:  # always, in one process that holds the whole model; `launch.refusals` refuses others
            if self._objective.max_num_gen_batches > 1:
                self._ask_others(prompt_ids, images, answers, logprobs)
            if self._buffer is not None:
                self._replay(self._buffer, answers, logprobs)
        return answers, logprobs

    def _sample(self, *args: Any, **kwargs: Any) -> tuple[list[list[int]], list[list[float]] | None, list[bool]]:
        """(tokens, log-probabilities, whether it was cut) of each answer to the prompts that `_asked` names."""
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
        # with a vision token in an answer, image tokens and features differ in number when it is scored; that would end the run
        kept = [without_vision_tokens(answer, unwanted, tokenizer.eos_token_id) for answer in answers]
        cut = [short != answer for short, answer in zip(kept, answers, strict=True)]
        if logprobs is not None:
            # TRL reads NaN as unknown: an end that replaces a vision token was not sampled
            logprobs = [
                [math.nan] if answer[0] in unwanted else of_answer[: len(short)]
                for of_answer, short, answer in zip(logprobs, kept, answers, strict=True)
            ]
        self._ask_early(dict(enumerate(kept)))  # answers cut at the limit, and all answers of other samplers
        return kept, logprobs, cut

    def _ask_others(
        self, prompt_ids: list[Any], images: list[Any], answers: list[list[int]], logprobs: list[list[float]]
    ) -> None:
        """Asks other prompts in place of those whose groups have no spread, until all have or it has sampled often enough.

        DAPO goes on in the order of the data. Here the others are drawn from all prompts, by seed and step alone: the order of
        the epoch stays as it is, and a continued run draws the same. A group stays if no other one with spread was found.
        """
        size, whole = self.num_generations, self._asked
        _, spreadless = flatten_spreadless(self._rewards_of(answers, self._cut), size)
        missing = np.flatnonzero(spreadless).tolist()
        others, asked_again = self._others(set(whole)), 0
        lacking = len(missing)
        for _ in range(self._objective.max_num_gen_batches - 1):
            rows = [row for row in islice(others, len(missing)) for _ in range(size)]
            if not rows:
                break
            asked_again += len(rows) // size
            self._asked = _asked(rows)
            prompts = [prepare_multimodal_messages(row["prompt"], images=row["images"]) for row in rows]
            ids, shown, fields = self._tokenize_prompts(prompts)
            new, new_logprobs, cut = self._sample(ids, shown, fields, size)
            assert new_logprobs is not None
            _, useless = flatten_spreadless(self._rewards_of(new, cut), size)
            for group in np.flatnonzero(~useless):
                there, here = missing.pop(0) * size, int(group) * size
                both: list[tuple[list[Any], list[Any]]] = [
                    (self._inputs, rows),
                    (self._prompts, prompts),
                    (whole, self._asked),
                    (prompt_ids, ids),
                    (images, shown),
                    (answers, new),
                    (logprobs, new_logprobs),
                    (self._cut, cut),
                ]
                for held, made in both:
                    held[there : there + size] = made[here : here + size]
        self._asked = whole
        self._log_metric("groups_asked_again", float(asked_again))
        self._log_metric("groups_resampled", float(lacking - len(missing)))

    def _others(self, without: set[Prompt]) -> Iterator[dict[str, Any]]:
        """All prompts but those of `without`, in an order that seed and step decide."""
        order = list(range(len(self.train_dataset)))
        random.Random(f"{self.args.seed} {self.state.global_step}").shuffle(order)
        names = self.train_dataset.with_format(None)
        for place in order:
            if _asked([names[place]])[0] not in without:
                yield self.train_dataset[place]

    def _replay(self, buffer: ReplayBuffer, answers: list[list[int]], logprobs: list[list[float]]) -> None:
        """Puts earlier successes in the place of the first answers of groups that have none, then keeps those of this step."""
        size, step = self.num_generations, self.state.global_step
        rewards = self._rewards_of(answers, self._cut).reshape(-1, size)
        wants = buffer.wants(rewards)
        sampled = [Success(*made, step) for made in zip(answers, logprobs, strict=True)]
        for group, first in enumerate(range(0, len(answers), size)):
            asked = self._asked[first]
            earlier = buffer.draw(asked, self.args.seed, step, group) if wants[group] else None
            if earlier is not None:
                # TRL and the comparison of sampler and trainer read NaN as unknown: another policy sampled it
                answers[first], logprobs[first] = earlier.tokens, [math.nan] * len(earlier.tokens)
                self._cut[first], self._replayed[first] = False, earlier
        for group, first in enumerate(range(0, len(answers), size)):
            buffer.add(self._asked[first], sampled[first : first + size], rewards[group].tolist())
        self._log_metric("groups_replayed", float(len(self._replayed)))

    def _rewards_of(self, answers: Sequence[Sequence[int]], cut: Sequence[bool]) -> Floats:
        """The rewards of answers to the prompts that `_asked` names, shape (B,)."""
        texts = self.processing_class.batch_decode(answers, skip_special_tokens=True)
        step_ids, plans = zip(*self._asked, strict=True)
        rewards = self._reward([[{"content": text}] for text in texts], step_id=step_ids, plan=plans)
        return np.where(cut, self._reward_if_cut, rewards)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        if self._buffer is not None:
            self._buffer.save(Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self._buffer is not None:
            self._buffer.load(Path(resume_from_checkpoint))

    def _ask_early(self, answers: Mapping[int, list[int]]) -> None:
        """Starts remote grounders, if there are any, on finished answers (row of the batch → tokens)."""
        if self._early:
            # decoded as by TRL; if TRL decodes an answer differently, `score` queries it
            texts = self.processing_class.batch_decode(list(answers.values()), skip_special_tokens=True)
            self._early.ask(texts, [self._asked[row][0] for row in answers])

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> torch.Tensor:
        raw = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        for row, cut in zip(self._reward.rows, self._cut, strict=True):
            if cut:
                row |= {"reward": self._reward_if_cut, "gate": GATE_CUT, "plan": None, "graders": []}
        rows = gather_object(self._reward.rows)
        self._log_metric("gate_passed", float(np.mean([row["gate"] == GATE_PASSED for row in rows])))
        self._log_metric("invalid_special_token", float(np.mean(gather_object(self._cut))))
        return torch.as_tensor(self._compared(rows), dtype=raw.dtype, device=raw.device)[:, None]

    def _compared(self, rows: list[dict[str, Any]]) -> Floats:
        """Compares the rollouts of all processes in their groups, keeps them, and returns their rewards for TRL, shape (B,)."""
        # exact values: TRL holds rewards in float32
        rewards = [row["reward"] for row in rows]
        flat, spreadless = flatten_spreadless(rewards, self.num_generations)
        self._frac_reward_zero_std = float(spreadless.mean())
        of_eq_10 = advantages(rewards, self.num_generations, self.scale_rewards)
        self._instead = self._of_plugins(rows, flat, of_eq_10)
        for place, success in self._replayed.items():
            rows[place]["sampled_in"] = success.sampled_in
        groups = [{"group": position // self.num_generations} for position in range(len(rows))]
        if self.accelerator.is_main_process:
            self._keep(
                [row | group for row, group in zip(rows, groups, strict=True)],
                self._instead.get("advantages", of_eq_10),
            )
        return flat

    def _of_plugins(self, rows: list[dict[str, Any]], rewards: Floats, of_eq_10: Floats) -> dict[str, Floats]:
        """What plug-ins put in the place of TRL's, for the rollouts of all processes, shape (B,): advantages and factors of β."""
        instead, shape = {}, (-1, self.num_generations)
        if self._objective.advantage:
            asked = [row["step_id"] for row in rows[:: self.num_generations]]
            areas = np.array([self._facts.areas[step_id] for step_id in asked])
            names, indices = zip(*(self._facts.places[step_id] for step_id in asked), strict=True)
            _, episodes = np.unique(names, return_inverse=True)
            instead["advantages"] = estimated(
                self._objective.advantage,
                rewards.reshape(shape),
                of_eq_10.reshape(shape),
                {"areas": areas, "episodes": episodes, "indices": np.array(indices)},
            ).reshape(-1)
        if self._objective.policy_loss:
            instead["kl_factor"] = kl_factors(self._objective.policy_loss, rewards)
        return instead

    def _keep(self, rows: list[dict[str, Any]], advantages_of_rows: Any) -> None:
        step = self.state.global_step
        for row, advantage in zip(rows, advantages_of_rows, strict=True):
            row |= {"optimizer_step": step, "advantage": float(advantage)}
        write_table(pa.Table.from_pylist(rows, ROLLOUT_SCHEMA), self._part(step))
        seal(self._part(step))

    def _part(self, step: int) -> Path:
        return self._rollouts / f"{step:08}.parquet"

    def write_rollouts(self, path: Path) -> None:
        """The rollouts of all optimizer steps as one table, in order."""
        with pq.ParquetWriter(path, ROLLOUT_SCHEMA, compression="zstd") as out:
            for step in range(0, self.state.global_step, self.num_iterations):
                # a run that an older version began lacks the newer columns
                out.write_table(pq.read_table(self._part(step), schema=ROLLOUT_SCHEMA))


class EpisodeTrainer(CdremTrainer):
    """GRPO whose rollouts are whole episodes on live pages: each step of an episode is a row, with the episode's advantage.

    A batch has as many rows as its episodes have steps, so that for TRL each row is a group of one, whose advantage is replaced,
    and passes are filled with `micro_batch_size` rows; the last ones may be empty. Its loss is the mean over all rows.
    """

    _reward: LiveEpisodes

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        with self._shown.keys():
            self._reward.play([row["step_id"] for row in inputs], self.num_generations, self._answers)
        rows = [dict(episode.steps[t].asked) for episode, t in self._reward.steps]
        size, self.num_generations = self.num_generations, 1
        try:
            made = super()._generate_and_score_completions(rows)
        finally:
            self.num_generations = size
        # TRL's are those of rows
        ended = [episode.reward for episode in self._reward.episodes if episode.failure != LOST]
        self._metrics["train"]["reward"][-1] = float(np.mean(ended))
        self._metrics["train"]["reward_std"][-1] = float(np.std(ended))
        return made

    @property
    def _rows_of_a_pass(self) -> int:
        plays = self._objective.plays if isinstance(self._objective, Grpo) else None
        assert plays is not None
        episodes: int = self.args.per_device_train_batch_size
        return max(self._objective.micro_batch_size, episodes * plays.max_steps)

    def _answers(self, rows: Sequence[dict[str, Any]]) -> list[Sampled]:
        """The policy's answer to each prompt; as many different prompts are computed at once as a step has."""
        made: list[Sampled] = []
        for chunk in _chunks(rows, self._objective.prompts_per_step):
            self._asked = _asked(chunk)
            prompts = [prepare_multimodal_messages(row["prompt"], images=row["images"]) for row in chunk]
            answers, logprobs, cut = self._sample(*self._tokenize_prompts(prompts), self.num_generations)
            assert logprobs is not None  # `launch.refusals` refuses other samplers
            texts = self.processing_class.batch_decode(answers, skip_special_tokens=True)
            made += [Sampled(*one) for one in zip(answers, logprobs, texts, cut, strict=True)]
        return made

    def _generate_single_turn(self, *_: Any) -> Any:
        answers = [episode.steps[t].answer for episode, t in self._reward.steps]
        self._cut = [answer.cut for answer in answers]
        return [answer.tokens for answer in answers], [answer.logprobs for answer in answers]

    def _compared(self, rows: list[dict[str, Any]]) -> Floats:
        rewards, lengths = self._reward.outcomes(self._objective.group_size)
        of_steps = of_whole_episodes(self._objective.advantage, rewards, lengths, self._objective.scale_rewards)
        mine = np.array([of_steps[episode.group, t, episode.number] for episode, t in self._reward.steps])
        self._instead = {"advantages": mine}
        raw = np.array([row["reward"] for row in rows])
        if self._objective.policy_loss:
            self._instead["kl_factor"] = kl_factors(self._objective.policy_loss, raw)
        spread = np.nanmax(rewards, axis=1, initial=0) > np.nanmin(rewards, axis=1, initial=1)
        self._frac_reward_zero_std = 1 - float(spread.mean())
        self._log_metric("episode_steps", float(lengths[~np.isnan(rewards)].mean()))
        self._log_metric("episodes_lost", float(np.isnan(rewards).sum()))
        self._keep(rows, mine)
        return raw


def _chunks(rows: Sequence[dict[str, Any]], prompts: int) -> Iterator[list[dict[str, Any]]]:
    """Consecutive rows with at most so many different prompts; equal ones stand together."""
    chunk: list[dict[str, Any]] = []
    names: set[str] = set()
    for row in rows:
        if row["step_id"] not in names and len(names) == prompts:
            yield chunk
            chunk, names = [], set()
        chunk.append(row)
        names.add(row["step_id"])
    if chunk:
        yield chunk


def _asked(rows: Sequence[Mapping[str, Any]]) -> list[Prompt]:
    return [(row["step_id"], row.get("plan")) for row in rows]
