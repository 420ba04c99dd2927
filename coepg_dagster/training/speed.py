"""What makes a training step of a vision-language model fast on a GPU, and changes none of its results beyond rounding.

- The vision tower's windows are attended to in one kernel (see inference.attention).
- Rows of an SFT batch are padded on the right: causality alone keeps the padding out, and without a mask the language
  model's attention is a flash kernel too.
- What flows from layer to layer is bf16, as in inference; so is a vision tower that is not trained. Under autocast alone
  the embeddings' float32 stays float32 from the first layer to the last, which doubles the memory that is moved and kept.
- In GRPO the screenshot of a group is prepared once, not once for each rollout and again when they are scored; and a vision
  tower that is not trained encodes it once for all passes of a step.
- A vision tower that is not trained keeps nothing for a backward pass, and there is none through it.
- Activations are computed again in the backward pass for as many layers as memory asks for, and no more.
- Layers are compiled one by one, so that norms, rotary embeddings and gates cost one pass over memory each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import AttentionInterface, BatchFeature, TrainerCallback
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


def half_vision(model: Any) -> None:
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


class LeanVision:
    """A vision tower's forward pass that encodes equal images once, and computes gradients only if the tower is trained.

    transformers' checkpointing has the embeddings of patches ask for gradients, for adapters in the layers above. A tower
    without any would be computed again in the backward pass, and gone back through, for nobody.

    Args:
        remember: what a tower that is not trained made of an image is kept until `forget`: for the rollouts of a step, which
            are scored, shuffled and trained on in several passes, and share a screenshot within a group.
    """

    def __init__(self, tower: Any, *, remember: bool) -> None:
        self._tower, self._encode, self._remember = tower, tower.forward, remember
        self._known: dict[Any, tuple[torch.Tensor, Any]] = {}

    def forget(self) -> None:
        """Before the tower is asked about other images."""
        self._known.clear()

    def __call__(self, pixels: torch.Tensor, grid_thw: torch.Tensor, **settings: Any) -> Any:
        trained = any(parameter.requires_grad for parameter in self._tower.parameters())
        kept = self._remember and not trained and not torch.is_inference_mode_enabled()
        known = self._known if kept else {}
        patches = grid_thw.prod(-1).tolist()
        images = torch.split(pixels, patches)
        sums = torch.stack([image.sum(dtype=torch.float64) for image in images]).tolist()
        seen = {key: image for key, (image, _) in known.items()}
        keys, new = [], dict[str, int]()
        for i, (image, *of_image) in enumerate(zip(images, grid_thw.tolist(), sums, strict=True)):
            key = str(of_image)
            while key in seen and not torch.equal(image, seen[key]):
                key += "+"  # another image with the same sum
            if key not in seen:
                seen[key], new[key] = image, i
            keys.append(key)
        with torch.set_grad_enabled(torch.is_grad_enabled() and trained):
            if len(new) == len(images) and not kept:
                return self._encode(pixels, grid_thw=grid_thw, **settings)
            if new:
                chosen, merged = list(new.values()), self._tower.config.spatial_merge_size**2
                given = torch.cat([images[i] for i in chosen])
                output = self._encode(given, grid_thw=grid_thw[chosen], **settings)
                own = [patches[i] for i in chosen]
                encoded = _split(output, {len(given): own, len(given) // merged: [n // merged for n in own]})
                known.update(zip(new, zip(torch.split(given, own), encoded, strict=True), strict=True))
            return _join([known[key][1] for key in keys])


def _split(output: Any, lengths: Mapping[int, list[int]]) -> list[Any]:
    """What a tower returned for some images, image by image.

    Args:
        lengths: by the length of a tensor, how much of it is of which image.
    """
    if isinstance(output, torch.Tensor):
        return list(torch.split(output, lengths[len(output)]))
    if isinstance(output, Mapping):
        parts = [_split(value, lengths) for value in output.values()]
        return [type(output)(**dict(zip(output, of_one, strict=True))) for of_one in zip(*parts, strict=True)]
    return [type(output)(of_one) for of_one in zip(*(_split(value, lengths) for value in output), strict=True)]


def _join(outputs: Sequence[Any]) -> Any:
    """One output of several images, from what `_split` made."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(outputs))
    if isinstance(first, Mapping):
        return type(first)(**{name: _join([output[name] for output in outputs]) for name in first})
    return type(first)(_join(of_all) for of_all in zip(*outputs, strict=True))


def lean_vision(model: Any, *, remember: bool = False) -> LeanVision:
    """Has a model's vision tower encode as LeanVision does, from now on."""
    lean = LeanVision(model.model.visual, remember=remember)
    model.model.visual.forward = lean
    return lean


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


@contextmanager
def each_image_once(image_processor: Any) -> Iterator[None]:
    """Within it an image that a Qwen-VL image processor was given before is not prepared again; what it returns is the same."""
    prepare = image_processor.preprocess
    known: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def once(images: Any, *args: Any, **kwargs: Any) -> Any:
        flat = [image for part in images for image in (part if isinstance(part, list | tuple) else [part])]
        settings = repr((args, sorted(kwargs.items())))
        keys = [(settings, image.size, image.mode, image.tobytes()) for image in flat]
        new = {key: image for key, image in zip(keys, flat, strict=True) if key not in known}
        if new:
            made = prepare(list(new.values()), *args, **kwargs)
            grids = torch.as_tensor(made["image_grid_thw"])
            pieces = torch.split(torch.as_tensor(made["pixel_values"]), grids.prod(-1).tolist())
            known.update(zip(new, zip(pieces, grids, strict=True), strict=True))
        pixels, sizes = zip(*(known[key] for key in keys), strict=True)
        return BatchFeature({"pixel_values": torch.cat(pixels), "image_grid_thw": torch.stack(sizes)})

    image_processor.preprocess = once
    try:
        yield
    finally:
        del image_processor.preprocess


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
