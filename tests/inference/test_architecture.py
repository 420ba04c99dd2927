"""Sizes and operation counts that are read off a config.json are those of the model itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from coepg_dagster.inference.architecture import KNOWN, Architecture, UnknownModel, flops, read

THREE, SEVEN = (Architecture.of(KNOWN[f"Qwen/Qwen2.5-VL-{size}-Instruct"]) for size in ("3B", "7B"))


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-VL-3B-Instruct", "Qwen/Qwen2.5-VL-7B-Instruct"])
def test_parameters_are_those_of_the_model(name: str) -> None:
    config = Qwen2_5_VLConfig(**{key: value for key, value in KNOWN[name].items() if key != "model_type"})
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config)
    architecture = Architecture.of(KNOWN[name])
    assert architecture.parameters == sum(p.numel() for p in model.parameters())
    assert architecture.vision.parameters == sum(p.numel() for p in model.model.visual.parameters())
    # the same from what transformers writes
    assert Architecture.of(config.to_dict()) == architecture


@pytest.mark.parametrize("known", [{}, KNOWN["Qwen/Qwen3-VL-4B-Instruct"]], ids=["default", "4B"])
def test_parameters_of_qwen3_vl(known: dict[str, Any]) -> None:
    config = Qwen3VLConfig(**{key: value for key, value in known.items() if key != "model_type"})
    with torch.device("meta"):
        model = Qwen3VLForConditionalGeneration(config)
    architecture = Architecture.of(config.to_dict())
    assert architecture.parameters == sum(p.numel() for p in model.parameters())
    assert architecture.vision.parameters == sum(p.numel() for p in model.model.visual.parameters())


def test_operations_are_those_that_torch_counts(random_checkpoint: Callable[[int], Path]) -> None:
    folder = random_checkpoint(0)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    processor: Any = AutoProcessor.from_pretrained(folder)
    text = processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Click red."}]}], tokenize=False
    )
    inputs = processor(text=[text], images=[[Image.new("RGB", (168, 224))]], return_tensors="pt")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(**inputs)
    tokens = inputs["input_ids"].shape[1]
    known = read(folder)
    words = tokens - known.image_tokens(168, 224)
    expected = flops(known, image=(168, 224), text=words, scored=tokens, train=False)
    # eager attention computes what causality would spare, and a bias or a norm is no matrix product
    assert counter.get_total_flops() == pytest.approx(expected.total + expected.attention, rel=0.02)


@given(text=st.integers(1, 4000), more=st.integers(1, 1000), frozen=st.booleans())
def test_longer_sequences_and_larger_models_cost_more(text: int, more: int, frozen: bool) -> None:
    def cost(model: Architecture, words: int, train: bool = True) -> float:
        return flops(model, image=(1288, 728), text=words, scored=20, train=train, freeze_vision=frozen).total

    assert cost(THREE, text) < cost(THREE, text + more)
    assert cost(THREE, text) < cost(SEVEN, text)
    assert cost(THREE, text, train=False) < cost(THREE, text) <= 3 * cost(THREE, text, train=False) * (1 + 1e-9)


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(UnknownModel, match="llama"):
        read(tmp_path)
    for damaged in ({"model_type": "qwen2_5_vl"}, {"model_type": "qwen3_vl", "text_config": None, "vision_config": {}}):
        (tmp_path / "config.json").write_text(json.dumps(damaged))
        with pytest.raises(UnknownModel, match="not the configuration of a model"):
            read(tmp_path)
    with pytest.raises(UnknownModel, match=r"no config\.json"):
        read(tmp_path / "none")


NUMBERS = [
    *(
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    ),
    *("depth", "patch_size", "spatial_merge_size", "temporal_patch_size", "out_hidden_size"),
]


@given(
    st.sampled_from(NUMBERS),
    st.integers(max_value=0)
    | st.integers(1 << 25)
    | st.floats()
    | st.text(max_size=3)
    | st.booleans()
    | st.lists(st.none()),
)
def test_a_configuration_with_another_kind_of_number_is_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, value: Any
) -> None:
    folder = tmp_path_factory.getbasetemp()
    config = json.loads(json.dumps(KNOWN["Qwen/Qwen2.5-VL-3B-Instruct"]))
    config["vision_config" if name in NUMBERS[6:] else "text_config"][name] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownModel, match="not the configuration of a model"):
        read(folder)
