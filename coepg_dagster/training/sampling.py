"""Who samples the rollouts of GRPO: transformers, or vLLM beside the policy on its GPU or as a server.

vLLM gets the policy's weights before each optimizer step. On the same GPU it sleeps while the policy is updated: its weights
and keys and values are given up, and come back from the policy. What it says of a token's probability differs a little from
what the trainer computes; TRL corrects for that (importance sampling) and logs the difference, which we report.
"""

from __future__ import annotations

import gc
import importlib.util
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from transformers.generation.streamers import BaseStreamer
from trl.import_utils import is_vllm_available

from coepg_dagster.experiment import Grpo, Serving
from coepg_dagster.inference.processing import vision_token_ids
from coepg_dagster.progress import Ended

DIFFERENCE: Final = "sampling/sampling_logp_difference/mean"
"""TRL's name, in the log, for the mean |log p of vLLM − log p of the trainer| over the sampled tokens of a step."""


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


def difference(history: list[dict[str, Any]]) -> dict[str, float]:
    """{"sampling_logp_difference": its mean over a trainer's log}; empty where the trainer's own model sampled."""
    found = [entry[DIFFERENCE] for entry in history if DIFFERENCE in entry]
    return {"sampling_logp_difference": sum(found) / len(found)} if found else {}


class _Ends(BaseStreamer):  # type: ignore[misc]
    """Hears each token that `generate` samples, of all rows at once, and tells which answers it ended."""

    def __init__(self, ends: Collection[int], tell: Callable[[dict[int, list[int]]], None]) -> None:
        self._ends, self._tell = frozenset(ends), tell
        self._open: dict[int, list[int]] | None = None

    def put(self, value: torch.Tensor) -> None:
        if self._open is None:  # the prompts come first
            self._open = {row: [] for row in range(len(value))}
            return
        tokens = value.tolist()
        for row, answer in self._open.items():
            answer.append(tokens[row])
        ended = {row: answer for row, answer in self._open.items() if answer[-1] in self._ends}
        if ended:
            self._open = {row: answer for row, answer in self._open.items() if row not in ended}
            self._tell(ended)

    def end(self) -> None:
        pass


@contextmanager
def as_they_end(model: Any, ends: Collection[int], tell: Callable[[dict[int, list[int]]], None]) -> Iterator[None]:
    """Within it, one call of `model.generate` tells of its answers (row → tokens) as soon as a token of `ends` ended them.

    The whole batch is sampled as without it: the same draws, whoever listens. Answers that nothing ended are not told of.
    """
    model.generate = partial(model.generate, streamer=_Ends(ends, tell))
    try:
        yield
    finally:
        del model.generate
