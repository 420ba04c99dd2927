"""What makes a training step of a vision-language model fast on a GPU, and changes none of its results beyond rounding.

- The vision tower's windows are attended to in one kernel (see inference.attention).
- Rows of an SFT batch are padded on the right: causality alone keeps the padding out, and without a mask the language
  model's attention is a flash kernel too.
- What flows from layer to layer is bf16, as in inference; so is a vision tower that is not trained. Under autocast alone
  the embeddings' float32 stays float32 from the first layer to the last, which doubles the memory that is moved and kept.
- A vision tower that is not trained encodes a screenshot once (see inference.visual), and there is no backward pass
  through it.
- Activations are computed again in the backward pass for as many layers as memory asks for, and no more.
- Layers are compiled one by one, so that norms, rotary embeddings and gates cost one pass over memory each.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface, TrainerCallback
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from coepg_dagster.experiment import Attention
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
    """Causal attention without a mask; what padding on the right computes is read by nobody."""
    output: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, None, **settings)
    return output


AttentionInterface.register(RIGHT_PADDED, attend_right_padded)


def expect_right_padding(model: Any) -> None:
    """From now on the language model reads no attention mask: for batches that are padded on the right, or not at all."""
    model.model.language_model.config._attn_implementation = RIGHT_PADDED


def half_activations(model: Any) -> None:
    """Lets the language model's layers pass bf16 on, whatever its weights are; norms and the loss stay float32 inside."""

    def halve(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        return output.to(torch.bfloat16)

    model.get_input_embeddings().register_forward_hook(halve)


def vision_to_bfloat16(model: Any) -> None:
    """Computes a vision tower that is not trained in bf16 throughout: for models that are saved as bf16."""
    if any(parameter.requires_grad for parameter in model.model.visual.parameters()):
        raise ValueError("a vision tower that is trained keeps float32 weights")
    model.model.visual.to(torch.bfloat16)


class WrongAttention(Ended):
    """Attention that was asked for cannot be used, or another is in use; the message says what to do."""


_MEANT: Final[dict[Attention, frozenset[str]]] = {
    "sdpa": frozenset({"sdpa", WINDOWS, RIGHT_PADDED}),
    "flash_attention_2": frozenset({"flash_attention_2"}),
    "eager": frozenset({"eager"}),
}
"""What transformers may call; ours are torch's kernels, called with what they can be spared left out."""


def load_with_attention(init: str, dtype: Dtype, device: str, attention: Attention) -> tuple[Any, Any]:
    """(model, processor) of a checkpoint with the attention that was asked for. Raises WrongAttention."""
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
    """Prints which attention each part of the model calls. Raises WrongAttention where it is not what was asked for."""
    found = {}
    for part, layers in zip(("language model", "vision tower"), _stacks(model), strict=True):
        called = {
            module.config._attn_implementation
            for layer in layers
            for module in layer.modules()
            if hasattr(module, "is_causal") and hasattr(module, "config")
        }
        found[part] = ", ".join(sorted(map(str, called)))
        if not called <= _MEANT[attention]:
            raise WrongAttention(
                f"attention: {attention} was asked for, but the {part} calls {found[part]}: transformers fell back. Set "
                f"`attention` to what it can use, or install what {attention} needs"
            )
    if is_main():
        print("attention: " + ", ".join(f"{part} {name}" for part, name in found.items()), flush=True)
    return found


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


class GradientsInBuckets(TrainerCallback):  # type: ignore[misc]
    """Data parallel training keeps gradients once: in the buckets that are summed over the GPUs.

    A gradient gets its place in a bucket when it is summed. What passes add up before lay beside the buckets, four bytes more
    for each parameter, until the last pass of a step; so the first one is summed too, which adds nothing to the total.
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
                del wrapped.no_sync  # from the second pass on it is as it was
                return nullcontext()

            wrapped.no_sync = sync
