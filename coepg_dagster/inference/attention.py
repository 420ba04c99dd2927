"""Attention of a Qwen-VL model as its uses here ask for it: the same numbers as transformers', in fewer and faster kernels.

transformers calls a kernel for each window of each image in each layer of the vision tower; and where there is a mask, as in
decoding, it copies keys and values once for every query head that shares them. `prefill` and `decode` are the two passes of
sampling, for the pools and for GRPO.
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
"""transformers prepares lengths of windows for implementations whose name says flash."""
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
    scaling: float,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention within each window of the patches of a batch of images; query, key, value: (1, heads, patches, width).

    Returns (1, patches, heads, width). Needs a GPU and half precision, as torch's kernel does.
    """
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    ends = cu_seq_lens_q.to(torch.int32)
    output: Any = varlen_attn(q, k, v, ends, ends, max_length_q, max_length_q, scale=scaling)
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
    """Attention of one new token per row, (rows, query heads, 1, width), to keys and values that heads share.

    Several tokens per row are left to transformers. Returns (rows, 1, query heads, width).
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
    """Lets the vision tower attend to its windows in one kernel, where this machine can; returns whether it does.

    Args:
        device: where the model will compute; None: where it lies.
    """
    tower = getattr(model.model, "visual", None)
    # Qwen2.5-VL's windows; a tower without any has few attention calls
    if tower is None or not hasattr(tower, "window_size") or torch.device(device or model.device).type != "cuda":
        return False
    if tower.config.hidden_size // tower.config.num_heads % 8:  # the kernel's own condition
        return False
    tower.config._attn_implementation = WINDOWS
    return True


@contextmanager
def decoding(model: Any) -> Iterator[None]:
    """Within it the language model attends to keys and values that its query heads share."""
    config = model.model.language_model.config
    before, config._attn_implementation = config._attn_implementation, SHARED_KEYS
    try:
        yield
    finally:
        config._attn_implementation = before


@functools.cache
def _cache_argument(kind: type) -> str:
    """What a model's forward pass calls keys and values; renamed within transformers 5."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"  # type: ignore[attr-defined]


def prefill(model: Any, asked: Any, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, Any, torch.Tensor]:
    """Of prompts with images: logits of the token after each, keys and values, and the position of that token.

    Args:
        model: the Qwen-VL model itself, without what wraps it.
        asked: what is called, `model` or its adapters'.
        inputs: as the processor makes them.
    """
    named = ("mm_token_type_ids", "image_grid_thw", "attention_mask")
    positions, _ = model.model.get_rope_index(inputs["input_ids"], **{name: inputs[name] for name in named})
    output = asked(**inputs, position_ids=positions, use_cache=True, logits_to_keep=1)
    keys_and_values = getattr(output, "cache", None) or output.past_key_values
    return output.logits[:, -1], keys_and_values, positions.amax((0, 2)) + 1


def decode(
    model: Any, asked: Any, keys_and_values: Any, ids: torch.Tensor, mask: torch.Tensor, position: torch.Tensor
) -> torch.Tensor:
    """Logits (rows, vocabulary) of the token after `ids` (rows, tokens), which are at `position` (rows, tokens).

    Args:
        mask: of these tokens and all before them.
    """
    with decoding(model):
        output = asked(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position.expand(3, -1, -1),
            use_cache=True,
            logits_to_keep=1,
            **{_cache_argument(type(model)): keys_and_values},  # type: ignore[arg-type]
        )
    logits: torch.Tensor = output.logits[:, -1]
    return logits


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values of one layer with room behind them: new ones are written there, and nothing is copied.

    Args:
        owner: for each row, the row of keys and values that it starts from.
        room: how many tokens follow.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, owner: torch.Tensor, room: int) -> None:
        super().__init__()
        self.lazy_initialization(keys, values)
        length = keys.shape[-2]
        self._all = tuple(t.new_empty(len(owner), t.shape[1], length + room, t.shape[3]) for t in (keys, values))
        for all_, given in zip(self._all, (keys, values), strict=True):
            all_[:, :, :length] = given[owner]
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
        """Goes on with these rows alone."""
        length = self.keys.shape[-2]
        self._all = tuple(all_[indices] for all_ in self._all)
        self.keys, self.values = (all_[:, :, :length] for all_ in self._all)


def with_room(cache: DynamicCache, owner: torch.Tensor, room: int) -> DynamicCache:
    """The cache for rows that each start from the row `owner` of it, with room for so many more tokens."""
    for i, layer in enumerate(cache.layers):
        cache.layers[i] = RoomyLayer(layer.keys, layer.values, owner, room)
    return cache
