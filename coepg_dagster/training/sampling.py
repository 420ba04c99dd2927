"""Who samples the rollouts of GRPO: transformers, or vLLM beside the policy on its GPU or as a server.

vLLM gets the policy's weights before each optimizer step. On the same GPU it sleeps while the policy is updated: its weights
and keys and values are given up, and come back from the policy. What it says of a token's probability differs a little from
what the trainer computes; TRL corrects for that (importance sampling) and logs the difference, which we report.
"""

from __future__ import annotations

import gc
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from trl.import_utils import is_vllm_available

from coepg_dagster.experiment import Grpo, Serving
from coepg_dagster.inference.attention import decode, prefill, with_room
from coepg_dagster.inference.processing import vision_token_ids
from coepg_dagster.progress import Ended
from coepg_dagster.training.packing import first_of_runs

DIFFERENCE: Final = "sampling/sampling_logp_difference/mean"
"""TRL's name, in the log, for the mean |log p of the sampler − log p of the trainer| over the sampled tokens of a step."""
DIFFERENCE_HIGH: Final = "sampling/sampling_logp_difference/p99"
"""Its 99th percentile."""


def difference_limit(on_gpu: bool, vllm: bool) -> float:
    """The mean difference, in nats, above which the two do not see the same; rounding alone stays far below.

    Measured: 1e-6 on a CPU; 0.02 for a 3B model in vLLM, up to 0.35 for a tiny one with random weights (bf16).
    """
    return 0.01 if not on_gpu else 0.5 if vllm else 0.2


def sampling_settings(
    config: Grpo, serving: Serving, tokenizer: Any, device: str, *, longest: int, seconds: float
) -> dict[str, Any]:
    """The part of TRL's GRPOConfig that says who samples; vision tokens are never sampled by either.

    Args:
        longest: tokens of the longest prompt with its answer.
        seconds: how long a server may take to answer at first.
    Raises:
        Ended: vLLM was asked for and cannot be used here.
    """
    unwanted = vision_token_ids(tokenizer)
    if config.rollouts == "transformers":
        return {"use_vllm": False, "generation_kwargs": {"suppress_tokens": unwanted}}
    _require_vllm(device)
    # TRL suppresses nothing on this path; a sampled image token would break the count of image features
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
        warnings.simplefilter("error", UserWarning)  # TRL warns of versions that it was not made for
        try:
            is_vllm_available()
        except UserWarning as warning:
            raise Ended(f"grpo.rollouts: vllm: {warning}; install such a version, or {instead}") from None


def compare_prompts(trainer: Any) -> None:
    """From now on vLLM sees a prompt as the trainer scores it, or the run ends: compared token by token, for every rollout.

    TRL 1.16 gives a vLLM on the same GPU prompts whose image tokens are written out already; vLLM writes the first of them out
    once more, and answers about another prompt (huggingface/trl#6294, vllm-project/vllm#57796). It gets one for each image here.
    """
    engine = getattr(trainer, "vllm_generation", None)
    if engine is None:
        return
    image_token, sample = trainer.processing_class.image_token_id, engine.generate

    def compared(prompts: list[list[int]], **settings: Any) -> Any:
        asked = [one_per_image(ids, image_token) for ids in prompts] if engine.mode == "colocate" else prompts
        seen, *answers = sample(prompts=asked, **settings)
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
    """Prompt tokens with each run of image tokens as one."""
    return [token for i, token in enumerate(ids) if token != image_token or i == 0 or ids[i - 1] != image_token]


def end_sampling(trainer: Any) -> None:
    """Gives back the memory of a vLLM on this GPU; training is over with it."""
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

    What peers saw as "the loss falls and the reward does not" was such a difference: pixels dropped on the way, image tokens
    doubled, padding read as image, positions one off.

    Args:
        sampled, computed: (rollouts, tokens); NaN: not known.
        mask: the tokens that are no padding.
        limit: of the mean.
        text: what rollout and token stand for, for people.
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
    """{"sampling_logp_difference": its mean over a trainer's log}; empty where the trainer's own model sampled."""
    found = [entry[DIFFERENCE] for entry in history if DIFFERENCE in entry]
    return {"sampling_logp_difference": sum(found) / len(found)} if found else {}


@contextmanager
def sampling_groups(
    model: Any, policy: Any, tell: Callable[[dict[int, list[int]]], None]
) -> Iterator[list[list[float]]]:
    """Within it, `policy.generate` computes a prompt once for the rollouts that follow each other with it, as groups do.

    Gives the list that then holds the log-probabilities of the sampled tokens of each row, what follows an end included.

    Args:
        model: the Qwen-VL model itself, without what wraps it.
        policy: the model that TRL asks, `model` or its adapters'.
        tell: is told of answers (row → tokens) as soon as they ended; not of those that nothing ended.
    """
    logprobs: list[list[float]] = []

    def generate(**inputs: Any) -> torch.Tensor:
        sequences, logprobs[:] = generate_groups(model, policy, tell, **inputs)
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
    *,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    pixel_values: torch.Tensor,
    image_grid_thw: torch.Tensor,
    mm_token_type_ids: torch.Tensor,
    generation_config: Any,
) -> tuple[torch.Tensor, list[list[float]]]:
    """Prompts (rows, length), padded on the left, each with one image, and after them what was sampled for each.

    Draws what transformers' `generate` draws from the same random state, up to rounding of the logits. The second value are
    the sampled tokens' log-probabilities, as the trainer computes them: at the temperature, over the whole vocabulary.
    """
    rows, device = len(input_ids), input_ids.device
    images = torch.split(pixel_values, image_grid_thw.prod(-1).tolist())
    new = first_of_runs(input_ids, attention_mask, pixel_values, image_grid_thw)
    owner = torch.isin(torch.arange(rows, device=device), torch.tensor(new, device=device)).cumsum(0) - 1
    prompts = {
        "input_ids": input_ids[new],
        "attention_mask": attention_mask[new],
        "pixel_values": torch.cat([images[i] for i in new]),
        "image_grid_thw": image_grid_thw[new],
        "mm_token_type_ids": mm_token_type_ids[new],
    }
    logits, cache, position = prefill(model, policy, prompts)
    cache = with_room(cache, owner, generation_config.max_new_tokens)
    logits, position, mask = logits[owner], position[owner][:, None], attention_mask
    ends = torch.as_tensor(generation_config.eos_token_id, device=device).view(-1)
    suppressed = torch.tensor(generation_config.suppress_tokens, device=device)
    open_ = torch.ones(rows, dtype=torch.bool, device=device)
    computed = torch.arange(rows, device=device)  # the rows that are: those that ended are let go by halves
    sampled: list[torch.Tensor] = []
    logprobs: list[torch.Tensor] = []
    while True:
        scores = logits.float() / generation_config.temperature
        probabilities = torch.softmax(scores.index_fill(-1, suppressed, -torch.inf), -1)
        if len(computed) < rows:  # a row draws the same, whether others are computed or not
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
