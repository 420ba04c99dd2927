"""What makes a training step of a vision-language model fast on a GPU, and changes none of its results.

- The vision tower's windows are attended to in one kernel (torch's flash attention for sequences of different length);
  transformers' sdpa path calls a kernel for each window of each image in each layer.
- Rows of an SFT batch are padded on the right: causality alone keeps the padding out, and without a mask the language
  model's attention is a flash kernel too.
- Activations are computed again in the backward pass for as many layers as memory asks for, and no more.
- Layers are compiled one by one, so that norms, rotary embeddings and gates cost one pass over memory each.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

WINDOWS: Final = "flash_windows"
"""transformers prepares lengths of windows for implementations whose name says flash."""
RIGHT_PADDED: Final = "right_padded"


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


def attend_right_padded(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention without a mask; what padding on the right computes is read by nobody."""
    output: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, None, **settings)
    return output


AttentionInterface.register(WINDOWS, attend_windows)
AttentionInterface.register(RIGHT_PADDED, attend_right_padded)


def fast_vision(model: Any) -> bool:
    """Lets the vision tower attend to its windows in one kernel, where this machine can; returns whether it does."""
    tower = getattr(model.model, "visual", None)
    # Qwen2.5-VL's windows; a tower without any has few attention calls
    if tower is None or not hasattr(tower, "window_size") or model.device.type != "cuda":
        return False
    tower.config._attn_implementation = WINDOWS
    return True


def expect_right_padding(model: Any) -> None:
    """From now on the language model reads no attention mask: for batches that are padded on the right, or not at all."""
    model.model.language_model.config._attn_implementation = RIGHT_PADDED


def recompute(model: Any, share: float) -> int:
    """Computes the activations of so many layers again in the backward pass; returns how many.

    A share of 0.25 takes every fourth layer of the language model and of the vision tower.
    """
    model.gradient_checkpointing_disable()
    if not share:
        return 0
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    kept = 0
    for layers in _stacks(model):
        for i, layer in enumerate(layers):
            layer.gradient_checkpointing = int((i + 1) * share) > int(i * share)
            kept += layer.gradient_checkpointing
    return kept


def compile_layers(model: Any) -> None:
    """Compiles each layer in place; one compilation serves all layers of a kind, for any length of a batch.

    The vision tower is left out where it attends window by window: its loop over windows is no graph.
    """
    for layers in _stacks(model):
        if (
            layers is not model.model.language_model.layers
            and model.model.visual.config._attn_implementation != WINDOWS
        ):
            continue
        for layer in layers:
            layer.compile(dynamic=True)


def _stacks(model: Any) -> list[Any]:
    return [model.model.language_model.layers, model.model.visual.blocks]


def share_gradient_memory(trainer: Any) -> None:
    """Data parallel training keeps gradients once: in the buckets that are summed over the GPUs."""
    handler = trainer.accelerator.ddp_handler
    if handler is not None:
        handler.gradient_as_bucket_view = True
