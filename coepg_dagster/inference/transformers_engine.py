"""The default engine: a local checkpoint of transformers, batched, on CPU or GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from coepg_dagster.inference.engine import Failure, Generation, Request, Sampling
from coepg_dagster.progress import Report

VISION_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")
"""A model that writes one of these breaks the count of image features when its answer is scored again; never sampled."""


class IncompleteCheckpoint(RuntimeError):
    """Loading a checkpoint left weights missing, unexpected or not finite."""


def load_checkpoint(path: str | Path, dtype: Literal["float32", "bfloat16"], device: str) -> tuple[Any, Any]:
    """(model in eval mode, processor) of a local folder or hub name; safetensors only, no remote code.

    Raises IncompleteCheckpoint where weights are missing, unexpected or not finite: transformers would otherwise start
    with random weights after a renamed key.
    """
    processor = AutoProcessor.from_pretrained(path, trust_remote_code=False)
    processor.tokenizer.padding_side = "left"
    model, info = AutoModelForImageTextToText.from_pretrained(
        path, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False, output_loading_info=True
    )
    wrong = {kind: sorted(info[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[kind]}
    if wrong:
        raise IncompleteCheckpoint(f"{path}: {wrong}; was it saved by another version of transformers?")
    bad = [name for name, tensor in model.named_parameters() if not torch.isfinite(tensor).all()]
    if bad:
        raise IncompleteCheckpoint(
            f"{path}: not finite: {', '.join(bad[:5])}; training diverged, lower the learning rate"
        )
    return model.to(device).eval(), processor


def vision_token_ids(tokenizer: Any) -> list[int]:
    """Ids of those VISION_TOKENS that the tokenizer has."""
    vocabulary = tokenizer.get_vocab()
    return [vocabulary[token] for token in VISION_TOKENS if token in vocabulary]


_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """The bytes that a token of a byte-level BPE tokenizer stands for; empty for special tokens."""
    if token_id in tokenizer.all_special_ids:
        return b""
    token: str = tokenizer.convert_ids_to_tokens(token_id)
    if token_id in tokenizer.added_tokens_decoder:
        return token.encode()
    return bytes(_BYTES[character] for character in token)


class TransformersEngine:
    """A checkpoint behind the inference protocol."""

    def __init__(
        self, path: str | Path, *, dtype: Literal["float32", "bfloat16"], device: str, batch_size: int
    ) -> None:
        model, processor = load_checkpoint(path, dtype, device)
        self._setup(model, processor, batch_size)

    @classmethod
    def of(cls, model: Any, processor: Any, *, batch_size: int) -> TransformersEngine:
        """An engine around a model that is already loaded (a policy in training)."""
        engine = cls.__new__(cls)
        engine._setup(model, processor, batch_size)
        return engine

    def _setup(self, model: Any, processor: Any, batch_size: int) -> None:
        self._model, self._processor, self._batch_size = model, processor, batch_size
        self._tokenizer = processor.tokenizer
        self._suppressed = vision_token_ids(self._tokenizer)
        eos = model.generation_config.eos_token_id
        self._stops = frozenset([eos] if isinstance(eos, int) else eos or [self._tokenizer.eos_token_id])
        self._pieces: dict[int, bytes] = {}

    @property
    def resize(self) -> tuple[int, int, int]:
        images = self._processor.image_processor
        size = images.size
        return images.patch_size * images.merge_size, size["shortest_edge"], size["longest_edge"]

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, report: Report | None = None
    ) -> list[list[Generation | Failure]]:
        prompts = [
            self._processor.apply_chat_template(request.messages, tokenize=False, add_generation_prompt=True)
            for request in requests
        ]
        # Prompts of like length share a batch (little padding); ties keep their order, so screenshots stay together.
        order = sorted(range(len(requests)), key=lambda i: len(prompts[i]))
        rows = max(1, self._batch_size // sampling.samples)
        answers: list[list[Generation | Failure]] = [[] for _ in requests]
        for start in range(0, len(order), rows):
            batch = order[start : start + rows]
            outputs = self._generate_batch(
                [prompts[i] for i in batch], [requests[i] for i in batch], sampling, sampling.seed + start
            )
            for position, i in enumerate(batch):
                answers[i] = list(outputs[position * sampling.samples : (position + 1) * sampling.samples])
            if report:
                report(min(start + rows, len(order)), len(order), {})
        return answers

    @torch.inference_mode()
    def _generate_batch(
        self, prompts: list[str], requests: list[Request], sampling: Sampling, seed: int
    ) -> list[Generation]:
        inputs = self._processor(
            text=prompts, images=[[r.image] for r in requests], padding=True, return_tensors="pt", do_resize=False
        ).to(self._model.device)
        if "pixel_values" in inputs:
            inputs["pixel_values"] = inputs["pixel_values"].to(self._model.dtype)
        torch.manual_seed(seed)
        draw: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            draw = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        output = self._model.generate(
            **inputs,
            **draw,
            max_new_tokens=sampling.max_tokens,
            num_return_sequences=sampling.samples,
            suppress_tokens=self._suppressed,
            return_dict_in_generate=True,
            output_logits=True,
        )
        ids = output.sequences[:, inputs["input_ids"].shape[1] :]
        logprobs = torch.stack(
            [
                torch.log_softmax(logits.float(), -1).gather(-1, ids[:, t, None])[:, 0]
                for t, logits in enumerate(output.logits)
            ],
            dim=1,
        )
        return [
            self._generation(row, row_logprobs)
            for row, row_logprobs in zip(ids.tolist(), logprobs.tolist(), strict=True)
        ]

    def _generation(self, ids: list[int], logprobs: list[float]) -> Generation:
        end = next((t for t, token in enumerate(ids) if token in self._stops), None)
        kept = ids[:end]
        pieces = tuple(self._piece(token) for token in kept)
        text = b"".join(pieces).decode(errors="replace")
        return Generation(text, pieces, tuple(logprobs[: len(kept)]), "length" if end is None else "stop")

    def _piece(self, token: int) -> bytes:
        if token not in self._pieces:
            self._pieces[token] = token_bytes(self._tokenizer, token)
        return self._pieces[token]
