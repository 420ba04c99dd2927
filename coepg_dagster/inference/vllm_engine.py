"""vLLM in this process, for throughput: pools and evaluation.

The image comes first in every prompt, and the requests of a screenshot come one after another, so that vLLM encodes and
prefills each screenshot once. An image is identified by the hash of its pixels, so that it is preprocessed once.
"""

from __future__ import annotations

import gc
import hashlib
import math
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from coepg_dagster.experiment.models import Serving
from coepg_dagster.inference.engine import EngineRefused, Failure, Generation, Request, Sampling, Usage
from coepg_dagster.inference.order import grouped
from coepg_dagster.inference.processing import (
    load_processor,
    probe,
    prompt_of,
    token_bytes,
    vision_token_ids,
)
from coepg_dagster.inference.screens import resize_of
from coepg_dagster.inference.vllm_server import vllm_settings
from coepg_dagster.processes import visible


class VllmEngine:
    """A checkpoint in vLLM behind the inference protocol.

    Args:
        weights: the version to keep with answers.
        share: number of vLLM models that are open at once on the device.
        options: further arguments of `vllm.LLM`.
    """

    remote = False

    def __init__(
        self, path: str, *, dtype: str, device: str, serving: Serving, share: int, weights: str, **options: Any
    ) -> None:
        os.environ.update(visible(device))  # before CUDA is touched
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        try:
            from vllm import LLM
        except ImportError as error:
            raise EngineRefused(
                f"engine `vllm`: vLLM cannot be imported here ({error}): install the extra `vllm`, name the interpreter "
                "that has it in `vllm_python` of the resource `engines`, or use `engine: transformers`"
            ) from None
        self._processor, self._weights = load_processor(path), weights
        tokenizer = self._processor.tokenizer
        self._bias = dict.fromkeys(vision_token_ids(tokenizer), -100.0)
        self._pieces: dict[int, bytes] = {}
        settings = vllm_settings(path, dtype, serving, share)
        self._longest: int = settings["max_model_len"]
        self._llm: Any = LLM(**settings, **options)
        [[answer]] = self.generate([probe(self._processor)], Sampling(1))
        if isinstance(answer, Failure):
            self.close()
            raise EngineRefused(f"{path} in vLLM: the probe got no answer: {answer.reason}")

    def close(self) -> None:
        """Gives the device's memory back."""
        shutdown = getattr(self._llm.llm_engine.engine_core, "shutdown", None)
        if shutdown is not None:
            shutdown()
        del self._llm
        gc.collect()

    @property
    def resize(self) -> tuple[int, int, int]:
        return resize_of(self._processor)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Generation | Failure]]:
        from vllm import SamplingParams

        prompts = [prompt_of(self._processor, request) for request in requests]
        hashes: dict[int, str] = {}
        inputs, identities = [], []
        for prompt, request in zip(prompts, requests, strict=True):
            image = request.image
            if id(image) not in hashes:
                hashes[id(image)] = pixel_hash(image)
            identities.append(hashes[id(image)])
            inputs.append(
                {
                    "prompt": prompt.text,
                    "multi_modal_data": {"image": [image]},
                    "multi_modal_uuids": {"image": [identities[-1]]},
                }
            )
        settings = [
            SamplingParams(
                n=sampling.samples,
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                seed=sampling.seed + position,
                logprobs=0,  # of the token itself
                logit_bias=self._bias,
                skip_special_tokens=True,
            )
            for position in range(len(requests))
        ]
        answers: list[list[Generation | Failure]] = [
            [Failure(self._too_long(prompt.tokens, sampling))] * sampling.samples for prompt in prompts
        ]
        # vLLM refuses a whole batch for one prompt that is too long, and cuts an answer that does not fit
        fits = [i for i, prompt in enumerate(prompts) if prompt.tokens + sampling.max_tokens <= self._longest]
        order = [fits[place] for place in grouped([identities[i] for i in fits])]
        outputs = self._llm.generate([inputs[i] for i in order], [settings[i] for i in order], use_tqdm=False)
        for i, output in zip(order, outputs, strict=True):
            answers[i] = self._answers(output, prompts[i].tokens, sampling.samples)
        return answers

    def _too_long(self, tokens: int, sampling: Sampling) -> str:
        return (
            f"a prompt of {tokens} tokens with an answer of {sampling.max_tokens} is longer than the {self._longest} that vLLM "
            "takes: raise `vllm_context` of the resource `engines`, as far as the model has positions"
        )

    def _answers(self, output: Any, tokens: int, samples: int) -> list[Generation | Failure]:
        seen = len(output.prompt_token_ids)
        if seen != tokens:
            reason = (
                f"vLLM counts {seen} prompt tokens; by our resize and chat template it must be {tokens}: "
                "its image processor is not that of the checkpoint"
            )
            return [Failure(reason)] * samples
        cached = output.num_cached_tokens or 0
        return [self._generation(answer, tokens, cached) for answer in sorted(output.outputs, key=lambda o: o.index)]

    def _generation(self, answer: Any, prompt: int, cached: int) -> Generation | Failure:
        if answer.finish_reason not in ("stop", "length"):
            return Failure(f"the answer ended with {answer.finish_reason!r}")
        ids = list(answer.token_ids)
        logprobs = [step[token].logprob for token, step in zip(ids, answer.logprobs, strict=True)]
        if any(map(math.isnan, logprobs)):
            return Failure(
                "a log-probability is no number: the model overflows; use another `models.dtype` or checkpoint", True
            )
        usage, stop = Usage(prompt, cached, len(ids)), None
        if answer.finish_reason == "stop":
            ids.pop()
            stop = logprobs.pop()
        pieces = tuple(self._piece(token) for token in ids)
        text = b"".join(pieces).decode(errors="replace")
        return Generation(text, pieces, tuple(logprobs), answer.finish_reason, stop, usage, self._weights)

    def _piece(self, token: int) -> bytes:
        if token not in self._pieces:
            self._pieces[token] = token_bytes(self._processor.tokenizer, token)
        return self._pieces[token]


def pixel_hash(image: Image.Image) -> str:
    """The identity of an image: a hash of its size and pixels."""
    return hashlib.sha256(repr(image.size).encode() + np.asarray(image).tobytes()).hexdigest()[:32]
