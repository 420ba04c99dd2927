"""LoRA: low-rank adapters are trained in place of the layers' weights, and merged into them at the end.

The result is an ordinary complete checkpoint; nothing after training depends on how it was trained. Checkpoints of a running
training hold the adapters alone. GRPO samples with merged weights too, since adapters take more time than memory there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from torch import nn

from coepg_dagster.experiment.training import Lora
from coepg_dagster.training.launch import is_main


def lora_config(model: Any, lora: Lora | None, *, freeze_vision: bool) -> LoraConfig | None:
    """The configuration of adapters for every linear layer in the language model's layers, and in the blocks of a trained tower.

    Embeddings, the output layer and the tower's merger get none. None: the weights themselves are trained.
    """
    if lora is None:
        return None
    stacks = [model.model.language_model.layers] + ([] if freeze_vision else [model.model.visual.blocks])
    layers = {id(module) for stack in stacks for module in stack.modules() if isinstance(module, nn.Linear)}
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        bias="none",
        target_modules=[name for name, module in model.named_modules() if id(module) in layers],
        task_type="CAUSAL_LM",
    )


@contextmanager
def merged(policy: Any) -> Iterator[None]:
    """A context in which a policy computes with its adapters merged into the weights; without adapters nothing happens.

    It takes a second copy of the adapted weights, which must be whole in this process. Afterwards the weights are the tensors of
    before: what is added in bfloat16 cannot be subtracted again.
    """
    if not isinstance(policy, PeftModel):
        yield
        return
    kept: list[tuple[nn.Parameter, torch.Tensor]] = []
    layers = [module for module in policy.modules() if isinstance(module, LoraLayer)]
    try:
        with torch.no_grad():
            for layer in layers:
                weight = layer.get_base_layer().weight
                kept.append((weight, weight.data))
                delta = layer.get_delta_weight(policy.active_adapter)
                weight.data = (weight.data.float() + delta.float()).to(weight.dtype)
        with policy.disable_adapter():
            yield
    finally:
        for weight, data in kept:
            weight.data = data


def merge_adapters(trainer: Any) -> int:
    """Merges a trainer's adapters, if it has any, into the weights. Returns the number of trained parameters.

    `trainer.model` is then the model without adapters, with the merged weights.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    # DeepSpeed leaves an empty tensor where it has spread a parameter
    trained: int = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)
    if isinstance(model, PeftModel):
        if is_main():
            print(f"LoRA: {trained:,} trained parameters are merged; what is saved is a whole checkpoint", flush=True)
        trainer.model = trainer.model_wrapped = model.merge_and_unload()
    return trained
