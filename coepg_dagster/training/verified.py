"""Saves a trained model, and verifies it: it is loaded again, compared tensor by tensor, and its logits are compared.

Only then its files are moved to their folder; a model that fails leaves no weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from transformers.integrations import unset_hf_deepspeed_config

from coepg_dagster.inference.files import IncompleteCheckpoint
from coepg_dagster.inference.transformers_engine import Dtype, is_finite, load_checkpoint

ROUNDING: Final[Mapping[Dtype, float]] = {"float32": 1e-4, "bfloat16": 0.05}
"""Largest difference of the same logits computed in two ways, as a share of their span. A GPU computes in bf16 here."""

SHARD: Final = "1GB"
"""Weights are saved in files of this size, which are hashed side by side."""

AS_LOADED: Final = "sdpa"
"""The attention of a loaded model; training may use another one."""


def save_trained(trainer: Any, processor: Any, folder: Path, dtype: Dtype) -> dict[str, Any]:
    """Saves a trainer's whole model from its first process. Returns the figures of `save_whole` there, {} in other processes.

    Training cannot continue afterwards: the weights are rounded to `dtype` in place and the optimizer is freed, so that the
    model that is loaded again fits on the same device. Both must agree on the trainer's first example.
    """
    accelerator = trainer.accelerator
    example = trainer.train_dataset[0]
    model = accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    model.set_attn_implementation(AS_LOADED)
    if trainer.is_fsdp_enabled or _zero_stage(accelerator) == 3:  # no process has all of it: all of them compute
        model.eval()  # `eval` of DeepSpeed returns None
        logits: torch.Tensor | None = first_logits(trainer.model_wrapped, processor, example)
        tensors = accelerator.get_state_dict(trainer.model_wrapped)
        unset_hf_deepspeed_config()  # else transformers would shard the loaded model too
    else:
        logits = None
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
        tensors = model.state_dict()
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.callback_handler.optimizer = trainer.callback_handler.lr_scheduler = None
    accelerator.free_memory()
    figures = {}
    if accelerator.is_main_process:
        if logits is None:
            logits = first_logits(model.eval(), processor, example)
        figures = save_whole(
            model, processor, folder, dtype, tensors, expected=(example, logits), device=accelerator.device
        )
    accelerator.wait_for_everyone()
    return figures


def _zero_stage(accelerator: Any) -> int | None:
    plugin = getattr(accelerator.state, "deepspeed_plugin", None)
    return None if plugin is None else plugin.zero_stage


def save_whole(
    model: Any,
    processor: Any,
    folder: Path,
    dtype: Dtype,
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    expected: tuple[Mapping[str, Any], torch.Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Saves a checkpoint as `dtype` in `folder`, after it was loaded again and compared with the trained model.

    Raises IncompleteCheckpoint, and leaves no weights, if a tensor is missing, unexpected, empty, not finite or different
    after loading, or if the loaded model has other logits. While the weights are written, memory holds one copy of them
    besides the loaded model; while they are compared, none.

    Args:
        tensors: the weights, if `model` does not hold them itself.
        expected: (an example of the training data, the trained model's `first_logits` on it).
        device: on which the loaded model computes its logits.
    Returns:
        The numbers of parameters and tensors, and the largest difference of the logits as a share of their span.
    """
    trained = model.state_dict() if tensors is None else tensors
    for name, tensor in trained.items():
        if not is_finite(tensor):
            bad = tensor.numel() - int(torch.isfinite(tensor).sum())
            raise IncompleteCheckpoint(
                f"tensor {name}: {bad} of {tensor.numel()} values are not finite; training diverged and nothing was saved: "
                "lower the learning rate"
            )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as temporary:
        draft = Path(temporary)
        model.config.dtype = dtype
        state = {name: _as_saved(tensor, dtype) for name, tensor in trained.items()}
        # tied tensors became separate copies here; save_pretrained leaves one of them out only if they are the same object
        state |= {name: state[source] for name, source in model.all_tied_weights_keys.items() if name in state}
        model.save_pretrained(draft, safe_serialization=True, state_dict=state, max_shard_size=SHARD)
        del state
        processor.save_pretrained(draft)
        try:
            loaded, loaded_processor = load_checkpoint(draft, dtype, "cpu")
        except IncompleteCheckpoint as error:
            raise IncompleteCheckpoint(str(error).replace(str(draft), str(folder))) from None
        _compare(trained, loaded.state_dict(), dtype, folder)
        figures: dict[str, Any] = {
            "parameters": sum(parameter.numel() for parameter in loaded.parameters()),
            "tensors": len(trained),
        }
        if expected is not None:
            example, logits = expected
            apart = _apart(logits, first_logits(loaded.to(device), loaded_processor, example))
            if apart > ROUNDING["bfloat16" if torch.device(device).type == "cuda" else dtype]:
                raise IncompleteCheckpoint(
                    f"{folder}: loaded again, every tensor is what was trained, but the model answers differently: the logits "
                    f"of its first token differ by {apart:.3g} of their span. Its configuration or its processor was not saved "
                    "as it was used: compare config.json and preprocessor_config.json with those of the base model"
                )
            figures["logits_apart"] = apart
        for file in sorted(draft.iterdir()):
            file.replace(folder / file.name)
    return figures


def _as_saved(tensor: torch.Tensor, dtype: Dtype) -> torch.Tensor:
    return tensor.detach().to("cpu", getattr(torch, dtype) if tensor.is_floating_point() else None)


def _compare(
    trained: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor], dtype: Dtype, folder: Path
) -> None:
    """Compares tensor by tensor, without a second copy of the model. Raises IncompleteCheckpoint."""
    for name in sorted(trained.keys() | stored.keys()):
        if name not in stored:
            what = "was trained and is not in the files"
        elif name not in trained:
            what = "is in the files and was not trained"
        elif not trained[name].numel():
            what = "is empty"
        elif not torch.equal(stored[name], _as_saved(trained[name], dtype)):
            what = "is not what was trained"
        else:
            continue
        raise IncompleteCheckpoint(
            f"{folder}: loaded again, tensor {name} {what}; the checkpoint is refused. Run the step again: if it stays so, "
            "the installed version of transformers cannot save this model; use the one in constraints.txt"
        )


@torch.no_grad()
def first_logits(model: Any, processor: Any, example: Mapping[str, Any]) -> torch.Tensor:
    """The logits of the first token of an answer, (vocabulary,) in float32 on the CPU, computed as in inference.

    `example` has `prompt` and `images`, as training examples do.
    """
    text = processor.apply_chat_template(example["prompt"], tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], images=[example["images"]], return_tensors="pt", do_resize=False)
    parameter = next(model.parameters())
    inputs = inputs.to(parameter.device)
    inputs["pixel_values"] = inputs["pixel_values"].to(parameter.dtype)
    half = torch.autocast(parameter.device.type, torch.bfloat16, enabled=parameter.device.type == "cuda")
    with torch.compiler.set_stance("force_eager"), half:
        logits: torch.Tensor = model(**inputs, use_cache=False, logits_to_keep=1).logits
    return logits[0, -1].float().cpu()


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two vectors of logits, as a share of the first one's span."""
    if one.shape != other.shape:
        return float("inf")
    return float((one - other).abs().max() / (one.max() - one.min()))
