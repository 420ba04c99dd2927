"""The default engine: a local checkpoint of transformers, batched, on CPU or GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Literal

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from coepg_dagster.inference.attention import decode, fast_vision, prefill, with_room
from coepg_dagster.inference.engine import Failure, Generation, Request, Sampling, Usage
from coepg_dagster.inference.files import IncompleteCheckpoint
from coepg_dagster.inference.processing import (
    Prompt,
    load_processor,
    prompt_of,
    token_bytes,
    vision_token_ids,
)
from coepg_dagster.inference.screens import resize_of
from coepg_dagster.inference.visual import Screenshots, Tower, process_store
from coepg_dagster.inference.weights import local_folder, local_version
from coepg_dagster.progress import Ended

Dtype = Literal["float32", "bfloat16"]


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite. On a CPU `torch.isfinite` takes 25 times as long: 16 s for a 3B model."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    if tensor.element_size() == 1:  # neither is there for 8 bits
        tensor = tensor.half()
    low, high = torch.aminmax(tensor)  # NaN if any value is
    return bool(torch.isfinite(low) & torch.isfinite(high))


def load_checkpoint(path: str | Path, dtype: Dtype, device: str, attention: str = "sdpa") -> tuple[Any, Any]:
    """(model in eval mode, processor) of a local folder or hub model; safetensors only, no remote code.

    Raises IncompleteCheckpoint if weights are missing, unexpected or not finite: for a key with another name transformers
    would start with random weights.
    """
    folder = local_folder(str(path))
    processor = load_processor(str(folder))
    processor.tokenizer.padding_side = "left"
    model, info = AutoModelForImageTextToText.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        attn_implementation=attention,
        use_safetensors=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # refused below, with the names
        output_loading_info=True,
    )
    wrong = {
        kind: sorted(map(str, info[kind]))
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
        if info[kind]
    }
    if wrong:
        raise IncompleteCheckpoint(f"{path}: {wrong}; was it saved by another version of transformers?")
    model = model.to(device)
    bad = [name for name, tensor in model.named_parameters() if not is_finite(tensor)]
    if bad:
        raise IncompleteCheckpoint(
            f"{path}: not finite: {', '.join(bad[:5])}; copy or download the checkpoint again. If it was trained here, "
            "training diverged: lower the learning rate"
        )
    if model.generation_config.eos_token_id is None:  # of some merged checkpoints; vLLM takes the tokenizer's too
        model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    return model.eval(), processor


OVERFLOWS: Final = (
    "computes numbers that are infinite or none at all, though its weights are finite: its answers would say nothing. Use "
    "another `models.dtype` or another checkpoint; if it was trained here, training diverged: lower the learning rate"
)

LIKELY: Final = 1024
"""So many of the likeliest tokens contain the nucleus of almost every distribution of a trained model."""


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """`probabilities` (rows, vocabulary) with 0 for all tokens outside the nucleus: the likeliest with `top_p` of the mass.

    Sorting a whole vocabulary takes longer than a step of the model, so it is done only if the LIKELY tokens do not suffice.
    """
    ranked, order = probabilities.topk(min(LIKELY, probabilities.shape[-1]), -1)
    if bool((ranked.sum(-1) < top_p).any()):
        ranked, order = probabilities.sort(-1, descending=True)
    ranked[ranked.cumsum(-1) - ranked >= top_p] = 0
    return torch.zeros_like(probabilities).scatter(-1, order, ranked)


class TransformersEngine:
    """A Qwen-VL checkpoint behind the inference protocol.

    The image comes first in every prompt, so all requests of one screenshot share the prefix up to the end of the
    image. It is computed once; its keys and values serve all plans of that screenshot and all samples of a request.
    """

    remote = False
    _shown: Screenshots | None

    def __init__(self, path: str | Path, *, dtype: Dtype, device: str, batch_size: int) -> None:
        model, processor = load_checkpoint(path, dtype, device)
        if dtype == "bfloat16":
            fast_vision(model)
        self._shown = Screenshots(processor)
        Tower(model.requires_grad_(False), self._shown, process_store())
        self._setup(model, processor, batch_size, str(path))

    @classmethod
    def of(cls, model: Any, processor: Any, *, batch_size: int) -> TransformersEngine:
        """An engine around a model that is already loaded (a policy in training), with its `Tower` if it has one."""
        engine = cls.__new__(cls)
        tower = vars(model.model.visual).get("forward")
        engine._shown = tower.shown if isinstance(tower, Tower) else None
        engine._setup(model, processor, batch_size)
        return engine

    def _setup(self, model: Any, processor: Any, batch_size: int, path: str | None = None) -> None:
        self._model, self._processor, self._batch_size = model, processor, batch_size
        self._tokenizer = processor.tokenizer
        self._suppressed = torch.tensor(vision_token_ids(self._tokenizer), device=model.device)
        eos = model.generation_config.eos_token_id
        self._stops = torch.tensor([eos] if isinstance(eos, int) else eos, device=model.device)
        self._pieces: dict[int, bytes] = {}
        self._path = path

    @property
    def resize(self) -> tuple[int, int, int]:
        return resize_of(self._processor)

    @cached_property
    def weights(self) -> str:
        """The version of the weights: a hash; for a hub model its commit; empty for a model in training."""
        return "" if self._path is None else local_version(self._path)

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Generation | Failure]]:
        prompts = [prompt_of(self._processor, request) for request in requests]
        # A batch holds screenshots of one size, whose prefixes have one length. Requests of one screenshot stay together.
        seen: dict[int, int] = {}
        for request in requests:
            seen.setdefault(id(request.image), len(seen))
        order = sorted(range(len(requests)), key=lambda i: (requests[i].image.size, seen[id(requests[i].image)]))
        rows = max(1, self._batch_size // sampling.samples)
        answers: list[list[Generation | Failure]] = [[] for _ in requests]
        done = 0
        for _, same_size in groupby(order, key=lambda i: requests[i].image.size):
            indices = list(same_size)
            for start in range(0, len(indices), rows):
                batch = indices[start : start + rows]
                outputs = self._generate_batch(
                    [prompts[i] for i in batch], [requests[i].image for i in batch], sampling, sampling.seed + done
                )
                for position, i in enumerate(batch):
                    answers[i] = list(outputs[position * sampling.samples : (position + 1) * sampling.samples])
                done += len(batch)
        return answers

    @torch.inference_mode()
    def _generate_batch(
        self,
        prompts: list[Prompt],
        images: list[Image.Image],
        sampling: Sampling,
        seed: int,
    ) -> list[Generation]:
        device = self._model.device
        prefixes: dict[tuple[int, str], tuple[int, Image.Image]] = {}
        first = []  # whether a row's prefix is computed for it, not shared with an earlier row
        for prompt, image in zip(prompts, images, strict=True):
            key = id(image), prompt.head
            first += [key not in prefixes] + [False] * (sampling.samples - 1)
            prefixes.setdefault(key, (len(prefixes), image))
        cache, next_position = self._prefill([head for _, head in prefixes], [image for _, image in prefixes.values()])
        owner = [
            prefixes[id(image), prompt.head][0]
            for prompt, image in zip(prompts, images, strict=True)
            for _ in range(sampling.samples)
        ]
        suffixes = [prompt.rest for prompt in prompts for _ in range(sampling.samples)]
        length = max(map(len, suffixes))
        pad = self._tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (length - len(s)) + s for s in suffixes], device=device)
        real = torch.tensor([[0] * (length - len(s)) + [1] * len(s) for s in suffixes], device=device)
        prefix = cache.get_seq_length()
        cache = with_room(cache, torch.tensor(owner, device=device), length + sampling.max_tokens)
        mask = torch.cat([real.new_ones(len(suffixes), prefix), real], dim=1)
        position = (next_position[owner][:, None] + real.cumsum(-1) - 1).clamp(min=0)
        generator = torch.Generator(device=device).manual_seed(seed)
        tokens: list[torch.Tensor] = []
        logprobs: list[torch.Tensor] = []
        ended = torch.zeros(len(suffixes), dtype=torch.bool, device=device)
        for _ in range(sampling.max_tokens):
            logits = decode(self._model, self._model, cache, ids, mask, position).float()
            if not tokens and not is_finite(logits):
                raise Ended(f"{self._path or 'the model in training'} {OVERFLOWS}")
            token = self._choose(logits, sampling, generator)
            tokens.append(token)
            logprobs.append(torch.log_softmax(logits, -1).gather(-1, token[:, None])[:, 0])
            ended |= torch.isin(token, self._stops)
            if ended.all():
                break
            ids, position = token[:, None], position[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(suffixes), 1)], dim=1)
        chosen, scores = torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist()
        return [
            self._generation(row, row_scores, prefix + len(suffix), 0 if computed else prefix)
            for row, row_scores, suffix, computed in zip(chosen, scores, suffixes, first, strict=True)
        ]

    def _prefill(self, heads: list[str], images: list[Image.Image]) -> tuple[Any, torch.Tensor]:
        """(keys and values of each prefix, the position of the token after each, shape (prefixes,))."""
        if self._shown is None:
            return self._prefilled(heads, images)
        with self._shown.keys():
            prefilled = self._prefilled(heads, images)
            if self._path is not None:  # a trainer forgets its batches itself
                self._shown.forget()
            return prefilled

    def _prefilled(self, heads: list[str], images: list[Image.Image]) -> tuple[Any, torch.Tensor]:
        device = self._model.device
        inputs = self._processor(
            text=heads,
            images=[[image] for image in images],
            padding=True,
            return_tensors="pt",
            do_resize=False,
            device=str(device),  # on a GPU the pixels are scaled and cut into patches there
        ).to(device)
        if not bool(inputs["attention_mask"].all()):
            raise ValueError("prefixes of one batch differ in length: give images of one size and one chat template")
        inputs["pixel_values"] = inputs["pixel_values"].to(self._model.dtype)
        _, cache, next_position = prefill(self._model, self._model, inputs)
        return cache, next_position

    def _choose(self, logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> torch.Tensor:
        """The next token of each row (rows,), from logits (rows, vocabulary); never a vision token."""
        logits = logits.index_fill(-1, self._suppressed, -torch.inf)
        if sampling.temperature == 0:
            return logits.argmax(-1)
        probabilities = torch.softmax(logits / sampling.temperature, -1)
        if sampling.top_p < 1:
            probabilities = nucleus(probabilities, sampling.top_p)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]

    def _generation(self, ids: list[int], logprobs: list[float], prompt: int, cached: int) -> Generation:
        stops = set(self._stops.tolist())
        end = next((t for t, token in enumerate(ids) if token in stops), None)
        kept = ids[:end]
        pieces = tuple(self._piece(token) for token in kept)
        text = b"".join(pieces).decode(errors="replace")
        usage = Usage(prompt, cached, len(ids) if end is None else end + 1)
        if end is None:
            return Generation(text, pieces, tuple(logprobs), "length", None, usage, self.weights)
        return Generation(text, pieces, tuple(logprobs[:end]), "stop", logprobs[end], usage, self.weights)

    def _piece(self, token: int) -> bytes:
        if token not in self._pieces:
            self._pieces[token] = token_bytes(self._tokenizer, token)
        return self._pieces[token]
