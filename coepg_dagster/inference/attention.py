"""Attention of a Qwen-VL model with the same numbers as transformers', in fewer and faster kernels.

transformers calls a kernel for each window of each image in each layer of the vision tower. With a mask, as in decoding, it
also copies keys and values for every query head that shares them. `prefill` and `decode` are the two passes of sampling, for
the pools and for GRPO.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

WINDOWS: Final = "flash_windows"
"""transformers prepares lengths of windows for implementations with "flash" in their names."""
SHARED_KEYS: Final = "shared_keys"


def attend_windows(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each window of the patches of a batch of images. Needs a GPU and half precision.

    Args:
        query, key, value: (1, heads, patches, width).
        cu_seq_lens_q: where each window begins, and the end of the last, shape (windows + 1,).
        max_length_q: patches of the largest window.
    Returns:
        (1, patches, heads, width), and no weights.
    """
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    ends = cu_seq_lens_q.to(torch.int32)
    output: Any = varlen_attn(q, k, v, ends, ends, max_length_q, max_length_q, scale=settings["scaling"])
    return output[None], None


def attend_shared_keys(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one new token per row to keys and values that query heads share; more tokens are left to transformers.

    Args:
        query: (rows, query heads, 1, width).
        key, value: (rows, key heads, tokens, width).
        attention_mask: bool, (rows, 1, 1, tokens); True: attended.
    Returns:
        (rows, 1, query heads, width), and no weights.
    """
    rows, heads, tokens, width = query.shape
    if tokens > 1:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **settings
        )
        return output
    groups = query.view(rows, key.shape[1], heads // key.shape[1], width)
    scores = (groups @ key.transpose(2, 3)).float() * scaling
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask, -torch.inf)
    return (scores.softmax(-1).to(value.dtype) @ value).reshape(rows, 1, heads, width), None


AttentionInterface.register(WINDOWS, attend_windows)
AttentionInterface.register(SHARED_KEYS, attend_shared_keys)
AttentionMaskInterface.register(SHARED_KEYS, sdpa_mask)


def fast_vision(model: Any, device: str | None = None) -> bool:
    """Has the vision tower attend to its windows in one kernel, if this machine can. Returns whether it does.

    Args:
        device: on which the model will compute; None: the one that it is on.
    """
    tower = getattr(model.model, "visual", None)
    # only Qwen2.5-VL has windows; a tower without them makes few attention calls
    if tower is None or not hasattr(tower, "window_size") or torch.device(device or model.device).type != "cuda":
        return False
    if tower.config.hidden_size // tower.config.num_heads % 8:  # a condition of the kernel
        return False
    tower.config._attn_implementation = WINDOWS
    return True


@contextmanager
def decoding(model: Any) -> Iterator[None]:
    """A context in which the language model uses `attend_shared_keys`."""
    config = model.model.language_model.config
    before, config._attn_implementation = config._attn_implementation, SHARED_KEYS
    try:
        yield
    finally:
        config._attn_implementation = before


@functools.cache
def cache_argument(kind: type) -> str:
    """The name of the keys and values among the arguments of a model's forward pass; it differs within transformers 5."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"  # type: ignore[attr-defined]


def prefill(model: Any, forward: Any, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """The first pass over prompts with images.

    Args:
        model: the Qwen-VL model itself, without wrappers.
        forward: what is called: `model`, or its wrapper with adapters.
        inputs: as the processor makes them, of B prompts.
    Returns:
        logits of the token after each prompt (B, vocabulary), keys and values, and the position of that token (B,).
    """
    named = ("mm_token_type_ids", "image_grid_thw", "attention_mask")
    positions, _ = model.model.get_rope_index(inputs["input_ids"], **{name: inputs[name] for name in named})
    output = forward(**inputs, position_ids=positions, use_cache=True, logits_to_keep=1)
    keys_and_values = getattr(output, "cache", None) or output.past_key_values
    return output.logits[:, -1], keys_and_values, positions.amax((0, 2)) + 1


def decode(
    model: Any, forward: Any, keys_and_values: Any, ids: torch.Tensor, mask: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """Logits (rows, vocabulary) of the token after `ids`.

    Args:
        model, forward: as for `prefill`.
        keys_and_values: of all tokens before `ids`; those of `ids` are added.
        ids: (rows, tokens).
        mask: 1 for real tokens, 0 for padding, of all tokens before `ids` and of these: (rows, tokens before + tokens).
        position: of `ids`, (rows, tokens).
    """
    with decoding(model):
        output = forward(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position.expand(3, -1, -1),
            use_cache=True,
            logits_to_keep=1,
            **{cache_argument(type(model)): keys_and_values},  # type: ignore[arg-type]
        )
    logits: torch.Tensor = output.logits[:, -1]
    return logits


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer, with room for new ones behind them, so that a new token copies nothing.

    Args:
        keys, values: (prefixes, key heads, tokens, width).
        owner: for each row, the prefix that it starts from, shape (rows,).
        room: number of tokens that follow.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, owner: torch.Tensor, room: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        length = keys.shape[-2]
        self._all = tuple(t.new_empty(len(owner), t.shape[1], length + room, t.shape[3]) for t in (keys, values))
        for all_, prefix in zip(self._all, (keys, values), strict=True):
            all_[:, :, :length] = prefix[owner]
        self.keys, self.values = (all_[:, :, :length] for all_ in self._all)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        for all_, new in zip(self._all, (key_states, value_states), strict=True):
            all_[:, :, start:end] = new
        self.keys, self.values = (all_[:, :, :end] for all_ in self._all)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps these rows alone."""
        length = self.keys.shape[-2]
        self._all = tuple(all_[indices] for all_ in self._all)
        self.keys, self.values = (all_[:, :, :length] for all_ in self._all)


def with_room(cache: DynamicCache, owner: torch.Tensor, room: int) -> DynamicCache:
    """The cache with one row for each of `owner`, copied from that row of it, and room for `room` more tokens."""
    for i, layer in enumerate(cache.layers):
        cache.layers[i] = RoomyLayer(layer.keys, layer.values, owner, room)
    return cache
