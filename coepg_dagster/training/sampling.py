"""Sampling of the rollouts of GRPO: by transformers, or by vLLM on the policy's GPU or as a server.

vLLM gets the policy's weights before each optimizer step. On the same GPU it sleeps while the policy is updated: it frees the
memory of its weights, keys and values, and loads the weights from the policy again. Its log-probabilities differ a little from
the trainer's; TRL corrects for that (importance sampling) and logs the difference, which we report.
"""

from __future__ import annotations

import gc
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from trl.import_utils import is_vllm_available

from coepg_dagster.experiment.models import Serving
from coepg_dagster.experiment.training import PolicyTraining
from coepg_dagster.inference.attention import decode, prefill, with_room
from coepg_dagster.inference.processing import vision_token_ids
from coepg_dagster.progress import Ended
from coepg_dagster.training.adapters import merged
from coepg_dagster.training.packing import first_of_runs, images_of, select_rows

DIFFERENCE: Final = "sampling/sampling_logp_difference/mean"
"""TRL's name, in the log, for the mean |log p of the sampler − log p of the trainer| over the sampled tokens of a step."""
DIFFERENCE_HIGH: Final = "sampling/sampling_logp_difference/p99"
"""Its 99th percentile."""


def difference_limit(on_gpu: bool, vllm: bool) -> float:
    """The mean difference, in nats, above which sampler and trainer see different inputs; rounding alone stays far below.

    Measured: 1e-6 on a CPU; 0.02 for a 3B model in vLLM, up to 0.35 for a tiny one with random weights (bf16).
    """
    return 0.01 if not on_gpu else 0.5 if vllm else 0.2


def sampling_settings(
    config: PolicyTraining, serving: Serving, tokenizer: Any, device: str, *, longest: int, seconds: float
) -> dict[str, Any]:
    """The part of TRL's GRPOConfig that selects the sampler, which never samples vision tokens.

    Args:
        longest: tokens of the longest prompt with its answer.
        seconds: limit of the time until a server's first answer.
    Raises:
        Ended: vLLM is configured and cannot be used here.
    """
    unwanted = vision_token_ids(tokenizer)
    if config.rollouts == "transformers":
        return {"use_vllm": False, "generation_kwargs": {"suppress_tokens": unwanted}}
    _require_vllm(device)
    # TRL suppresses no tokens with vLLM; with a sampled image token, image tokens and features would differ in number
    settings: dict[str, Any] = {"use_vllm": True, "generation_kwargs": {"logit_bias": dict.fromkeys(unwanted, -100.0)}}
    if serving.rollout_server is not None:
        return settings | {
            "vllm_mode": "server",
            "vllm_server_base_url": serving.rollout_server,
            "vllm_server_timeout": seconds,
        }
    if longest > serving.context:
        raise Ended(
            f"grpo.rollouts: vllm: the longest prompt with its plan has {longest} tokens, vLLM takes {serving.context}: raise "
            "`vllm_context` of the resource `engines`, or lower grpo.max_tokens"
        )
    return settings | {
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": serving.rollout_memory,
        "vllm_max_model_length": serving.context,
        "vllm_enable_sleep_mode": serving.rollout_sleep,
    }


def _require_vllm(device: str) -> None:
    instead = "use `grpo.rollouts: transformers`"
    if device == "cpu":
        raise Ended(f"grpo.rollouts: vllm needs a GPU and there is none here; {instead}")
    if importlib.util.find_spec("vllm") is None:
        raise Ended(f"grpo.rollouts: vllm: vLLM is not installed here: install the extra `vllm`, or {instead}")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # TRL warns about versions that it does not support
        try:
            is_vllm_available()
        except UserWarning as warning:
            raise Ended(f"grpo.rollouts: vllm: {warning}; install such a version, or {instead}") from None


def compare_prompts(trainer: Any) -> None:
    """Makes each sampling compare, for every rollout and token by token, vLLM's prompt with the trainer's; a difference ends it.

    TRL 1.16 gives a vLLM on the same GPU prompts whose image tokens are already expanded. vLLM expands the first of them again
    and answers another prompt (huggingface/trl#6294, vllm-project/vllm#57796). Here it gets one token for each image.
    """
    engine = getattr(trainer, "vllm_generation", None)
    if engine is None:
        return
    image_token, sample = trainer.processing_class.image_token_id, engine.generate

    def compared(prompts: list[list[int]], **settings: Any) -> Any:
        collapsed = [one_per_image(ids, image_token) for ids in prompts] if engine.mode == "colocate" else prompts
        seen, *answers = sample(prompts=collapsed, **settings)
        for ours, theirs in zip(prompts, seen, strict=True):
            if list(ours) != list(theirs):
                raise Ended(
                    f"grpo.rollouts: vllm: vLLM saw a prompt of {len(theirs)} tokens, {theirs.count(image_token)} of them the "
                    f"image's, the trainer scores one of {len(ours)} with {ours.count(image_token)}: its answers would be "
                    "about something else. Use a version of vLLM that TRL was tried with, or `grpo.rollouts: transformers`"
                )
        return (seen, *answers)

    engine.generate = compared


def one_per_image(ids: list[int], image_token: int) -> list[int]:
    """Prompt tokens (ids) with each run of image tokens replaced by one."""
    return [token for i, token in enumerate(ids) if token != image_token or i == 0 or ids[i - 1] != image_token]


def end_sampling(trainer: Any) -> None:
    """Frees the memory of a vLLM on this GPU. Training must be over."""
    engine = getattr(getattr(trainer, "vllm_generation", None), "llm", None)
    if engine is None:
        return
    shutdown = getattr(engine.llm_engine.engine_core, "shutdown", None)
    if shutdown is not None:
        shutdown()
    del trainer.vllm_generation.llm, engine
    gc.collect()
    torch.cuda.empty_cache()


def compare_logprobs(
    sampled: torch.Tensor, computed: torch.Tensor, mask: torch.Tensor, limit: float, text: Callable[[int, int], str]
) -> tuple[float, float]:
    """(mean, 99th percentile) of |log p of the sampler − log p of the trainer| over the same tokens, in nats.

    Such a difference can look like "the loss falls and the reward does not rise". Known causes are lost pixels, image tokens
    expanded twice, padding read as image, and positions that are off by one.

    Args:
        sampled, computed: (rollouts, tokens); NaN: unknown.
        mask: the tokens that are not padding, (rollouts, tokens).
        limit: of the mean.
        text: (rollout, token) → the text of that token, for the message.
    Raises:
        Ended: the mean is above the limit.
    """
    apart = torch.where(mask.bool(), (sampled - computed).abs(), torch.nan)
    known = apart[~apart.isnan()]
    if not len(known):
        return 0.0, 0.0
    mean, high = float(known.mean()), float(known.quantile(0.99))
    if mean > limit:
        row, token = (apart > limit).nonzero()[0].tolist()
        raise Ended(
            f"sampler and trainer disagree about the same tokens: log-probabilities lie {mean:.3g} nats apart on average (at "
            f"most {limit:g}, over {len(known)} tokens). The first is token {token} of rollout {row}, {text(row, token)!r}: "
            f"{float(sampled[row, token]):.3f} when it was sampled, {float(computed[row, token]):.3f} now. They see different "
            "prompts: look for pixels, image tokens, padding or positions that were changed between the two"
        )
    return mean, high


def difference(history: list[dict[str, Any]]) -> dict[str, float]:
    """{"sampling_logp_difference": its mean over a trainer's log}; empty if the log has none."""
    logged = [entry[DIFFERENCE] for entry in history if DIFFERENCE in entry]
    return {"sampling_logp_difference": sum(logged) / len(logged)} if logged else {}


@contextmanager
def sampling_groups(
    model: Any, policy: Any, tell: Callable[[dict[int, list[int]]], None]
) -> Iterator[list[list[float]]]:
    """A context in which `policy.generate` computes a prompt once for consecutive rollouts of it, as groups are.

    Yields a list that then holds the log-probabilities of each row's sampled tokens, those after an end included.

    Args:
        model: the Qwen-VL model itself, without wrappers.
        policy: the model that TRL calls: `model`, or its wrapper with adapters.
        tell: called with answers (row → tokens) as soon as they end; not with answers cut at the limit.
    """
    logprobs: list[list[float]] = []

    def generate(generation_config: Any, **inputs: torch.Tensor) -> torch.Tensor:
        with merged(policy):
            sequences, logprobs[:] = generate_groups(model, policy, tell, inputs, generation_config)
        return sequences

    policy.generate = generate
    try:
        yield logprobs
    finally:
        del policy.generate


@torch.no_grad()
def generate_groups(
    model: Any,
    policy: Any,
    tell: Callable[[dict[int, list[int]]], None],
    inputs: Mapping[str, torch.Tensor],
    generation_config: Any,
) -> tuple[torch.Tensor, list[list[float]]]:
    """Samples an answer to each prompt, with one image each. Prompts are computed once for consecutive equal rows.

    From the same random state, the tokens are those of transformers' `generate`, up to rounding of the logits.

    Args:
        model, policy, tell: as for `sampling_groups`.
        inputs: input_ids, attention_mask and mm_token_type_ids (rows, length), padded on the left; pixel_values (patches,
            width) and image_grid_thw (rows, 3).
    Returns:
        prompts and answers (rows, length + tokens), and the log-probabilities of the sampled tokens (rows, tokens) as the
        trainer computes them: at the temperature, over the whole vocabulary.
    """
    input_ids, attention_mask, grid = (inputs[name] for name in ("input_ids", "attention_mask", "image_grid_thw"))
    rows, device = len(input_ids), input_ids.device
    new = first_of_runs(input_ids, attention_mask, images_of(inputs["pixel_values"], grid), grid)
    owner = torch.isin(torch.arange(rows, device=device), torch.tensor(new, device=device)).cumsum(0) - 1
    prompts = select_rows(inputs, new)
    logits, cache, position = prefill(model, policy, prompts)
    cache = with_room(cache, owner, generation_config.max_new_tokens)
    logits, position, mask = logits[owner], position[owner][:, None], attention_mask
    ends = torch.as_tensor(generation_config.eos_token_id, device=device).view(-1)
    suppressed = torch.tensor(generation_config.suppress_tokens, device=device)
    open_ = torch.ones(rows, dtype=torch.bool, device=device)
    # the rows still computed; rows that ended are dropped once they are half
    computed = torch.arange(rows, device=device)
    sampled: list[torch.Tensor] = []
    logprobs: list[torch.Tensor] = []
    while True:
        scores = logits.float() / generation_config.temperature
        probabilities = torch.softmax(scores.index_fill(-1, suppressed, -torch.inf), -1)
        if len(computed) < rows:  # the draws of a row must not depend on which others are computed
            every = probabilities.new_ones(rows, probabilities.shape[-1])
            probabilities = every.index_copy(0, computed, probabilities)
        tokens = torch.multinomial(probabilities, 1)[:, 0]
        of_computed = torch.log_softmax(scores, -1).gather(-1, tokens[computed, None])[:, 0]
        logprobs.append(scores.new_zeros(rows).index_copy(0, computed, of_computed))
        sampled.append(torch.where(open_, tokens, generation_config.pad_token_id))
        ended = open_ & torch.isin(tokens, ends)
        open_ &= ~ended
        answers = ended.nonzero()[:, 0].tolist()
        if answers:
            so_far = torch.stack(sampled, 1)
            tell({row: so_far[row].tolist() for row in answers})
        left = int(open_.sum())
        if len(sampled) == generation_config.max_new_tokens or not left:
            return torch.cat([input_ids, torch.stack(sampled, 1)], 1), torch.stack(logprobs, 1).tolist()
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        if 2 * left <= len(computed):
            kept = open_[computed].nonzero()[:, 0]
            computed, mask, position = computed[kept], mask[kept], position[kept]
            cache.batch_select_indices(kept)
        logits = decode(model, policy, cache, sampled[-1][computed, None], mask, position)
        position = position + 1
