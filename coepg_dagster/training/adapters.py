"""LoRA: low-rank adapters beside the weights of the layers, trained instead of them, and merged into them at the end.

What is saved is a whole, ordinary checkpoint, so nothing after training knows how it was trained. While it runs, checkpoints
hold the adapters alone.
"""

from __future__ import annotations

from typing import Any

from peft import LoraConfig, PeftModel
from torch import nn

from coepg_dagster.experiment import Lora
from coepg_dagster.training.launch import is_main


def lora_config(model: Any, lora: Lora | None, *, freeze_vision: bool) -> LoraConfig | None:
    """What a trainer of TRL adds adapters by: to every linear layer of the language model's layers, and of the tower's blocks.

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


def merge_adapters(trainer: Any) -> int:
    """Adds a trainer's adapters to the weights, if it has any; returns how many parameters were trained.

    From then on `trainer.model` is the model that training started from, with other weights.
    """
    model = trainer.accelerator.unwrap_model(trainer.model)
    # DeepSpeed leaves an empty tensor where it has spread a parameter
    trained: int = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)
    if isinstance(model, PeftModel):
        if is_main():
            print(f"LoRA: {trained:,} trained parameters are merged; what is saved is a whole checkpoint", flush=True)
        trainer.model = trainer.model_wrapped = model.merge_and_unload()
    return trained
