"""Faster training steps of a vision-language model on a GPU, with the same results up to rounding.

- The vision tower attends to its windows in one kernel (see inference.attention).
- Rows of an SFT batch are padded on the right. Causal attention then never sees the padding, and without a mask the language
  model's attention is a flash kernel too.
- Activations between layers are bf16, as in inference; so is a vision tower that is not trained. Under autocast alone the
  float32 of the embeddings stays float32 from the first layer to the last, which doubles the memory that is moved and kept.
- A vision tower that is not trained encodes a screenshot once (see inference.visual), and there is no backward pass
  through it.
- Activations are computed again in the backward pass for only as many layers as memory requires.
- Layers are compiled one by one, so that norms, rotary embeddings and gates cost one pass over memory each.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface, TrainerCallback
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from coepg_dagster.experiment.training import Attention
from coepg_dagster.inference.attention import WINDOWS
from coepg_dagster.inference.transformers_engine import Dtype, load_checkpoint
from coepg_dagster.progress import Ended
from coepg_dagster.training.launch import is_main

RIGHT_PADDED: Final = "right_padded"


def attend_right_padded(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention without a mask, for rows padded on the right; the results at padding are not used.

    Shapes are those of transformers: query (rows, query heads, tokens, width), key and value (rows, key heads, tokens, width).
    """
    output: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, None, **settings)
    return output


AttentionInterface.register(RIGHT_PADDED, attend_right_padded)


def expect_right_padding(model: Any) -> None:
    """Makes the language model ignore attention masks, for batches that are padded on the right or not at all."""
    model.model.language_model.config._attn_implementation = RIGHT_PADDED


def half_activations(model: Any) -> None:
    """Makes activations between the language model's layers bf16, whatever its weights; norms and loss compute in float32."""

    def halve(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return output.to(torch.bfloat16)

    model.get_input_embeddings().register_forward_hook(halve)


def vision_to_bfloat16(model: Any) -> None:
    """Casts a vision tower that is not trained to bfloat16, for models that are saved as bf16."""
    if any(parameter.requires_grad for parameter in model.model.visual.parameters()):
        raise ValueError("a vision tower that is trained keeps float32 weights")
    model.model.visual.to(torch.bfloat16)


class WrongAttention(Ended):
    """The configured attention cannot be used, or another is in use; the message says what to do."""


_MEANT: Final[dict[Attention, frozenset[str]]] = {
    "sdpa": frozenset({"sdpa", WINDOWS, RIGHT_PADDED}),
    "flash_attention_2": frozenset({"flash_attention_2"}),
    "eager": frozenset({"eager"}),
}
"""Setting → the implementations that it allows; WINDOWS and RIGHT_PADDED call torch's kernels too."""


def load_with_attention(init: str, dtype: Dtype, device: str, attention: Attention) -> tuple[Any, Any]:
    """(model, processor) of a checkpoint with the configured attention. Raises WrongAttention."""
    remedy = "set `attention: sdpa`, which is flash attention of torch itself wherever its inputs allow"
    if attention == "flash_attention_2" and device == "cpu":
        raise WrongAttention(f"attention: flash_attention_2 needs a GPU and there is none here; {remedy}")
    try:
        return load_checkpoint(init, dtype, device, attention)
    except ImportError as error:
        why = str(error).splitlines()[0]
        raise WrongAttention(
            f"attention: {attention} cannot be used here ({why}): install a flash-attn that was built for torch "
            f"{torch.__version__}, or {remedy}"
        ) from None


def check_attention(model: Any, attention: Attention) -> dict[str, str]:
    """Prints and returns the attention of each part of the model. Raises WrongAttention if it is not the configured one."""
    by_part = {}
    for part, layers in zip(("language model", "vision tower"), _stacks(model), strict=True):
        called = {
            module.config._attn_implementation
            for layer in layers
            for module in layer.modules()
            if hasattr(module, "is_causal") and hasattr(module, "config")
        }
        by_part[part] = ", ".join(sorted(map(str, called)))
        if not called <= _MEANT[attention]:
            raise WrongAttention(
                f"attention: {attention} is configured, but the {part} calls {by_part[part]}: transformers fell back. Set "
                f"`attention` to what it can use, or install what {attention} needs"
            )
    if is_main():
        print("attention: " + ", ".join(f"{part} {name}" for part, name in by_part.items()), flush=True)
    return by_part


def recompute(model: Any, share: float) -> int:
    """Computes the activations of a share of the layers again in the backward pass; returns the number of these layers.

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

    The vision tower is left out if it attends window by window: a loop over windows cannot be compiled to one graph.
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


class GradientsInBuckets(TrainerCallback):  # type: ignore[misc]
    """Data parallel training holds gradients once, in the buckets that are summed over the GPUs.

    A gradient moves into its bucket only when it is summed, by default in the last pass of a step; until then gradients take
    four bytes more for each parameter. So the first pass of a step is summed too, which does not change the total.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        if trainer.accelerator.ddp_handler is not None:
            trainer.accelerator.ddp_handler.gradient_as_bucket_view = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        model = self._trainer.model_wrapped
        if isinstance(model, DistributedDataParallel):
            wrapped: Any = model

            def sync() -> AbstractContextManager[None]:
                del wrapped.no_sync  # for the first pass only
                return nullcontext()

            wrapped.no_sync = sync
