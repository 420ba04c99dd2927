"""The tiny Qwen2.5-VL of the embedded benchmark: presets, construction, saving and the check of what was saved.

The classes are those of transformers (`Qwen2_5_VLForConditionalGeneration`, `Qwen2_5_VLProcessor`), so that code for
Qwen2.5-VL-7B serves and trains these models too. A screen of 168 x 224 px passes the image processor unresized.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, cast

import torch
from safetensors.torch import load_file
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from coepg_dagster.refusal import Refusal
from coepg_dagster.sandbox.pretraining import tokenizer as tokens

PATCH: Final = 14
MERGE: Final = 2
CELL: Final = PATCH * MERGE
"""Side of the square of pixels behind one visual token."""
SCREEN_WIDTH: Final = 168
SCREEN_HEIGHT: Final = 224
GRID_WIDTH: Final = SCREEN_WIDTH // CELL
GRID_HEIGHT: Final = SCREEN_HEIGHT // CELL
VISUAL_TOKENS: Final = GRID_WIDTH * GRID_HEIGHT

Preset = Literal["small", "medium", "base", "large"]


@dataclass(frozen=True)
class ModelSize:
    """The widths and depths of one preset."""

    vision_hidden: int
    vision_mlp: int
    vision_depth: int
    vision_heads: int
    hidden: int
    mlp: int
    depth: int
    heads: int
    key_value_heads: int


PRESETS: Final[Mapping[Preset, ModelSize]] = {
    "small": ModelSize(64, 192, 3, 4, 96, 192, 3, 4, 2),
    "medium": ModelSize(80, 192, 3, 4, 96, 192, 3, 4, 2),
    "base": ModelSize(96, 256, 3, 4, 128, 256, 4, 4, 2),
    "large": ModelSize(192, 512, 4, 6, 256, 640, 6, 8, 4),
}
"""In the sandbox `small` is the base pair and most of the pools, `base` verifier_a, `medium` the judge. Two more sizes of the
base pair: `base` in the middle, `large` the largest."""

INITIALIZER_RANGE: Final = 0.08
"""Five times transformers' default: at these widths, training from the default stays at chance."""

_MAX_POSITIONS: Final = 2048
_MIN_PIXELS: Final = 4 * CELL * CELL
_MAX_PIXELS: Final = 64 * CELL * CELL


def _mrope_section(head_dim: int) -> list[int]:
    """Rotary frequencies for time, height and width; they sum to head_dim / 2."""
    half = head_dim // 2
    time = half // 4
    height = (half - time) // 2
    return [time, height, half - time - height]


def configuration(size: ModelSize, tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLConfig:
    """The model configuration of `size` over this vocabulary."""
    ids = tokenizer.get_vocab()
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": size.hidden,
            "intermediate_size": size.mlp,
            "num_hidden_layers": size.depth,
            "num_attention_heads": size.heads,
            "num_key_value_heads": size.key_value_heads,
            "max_position_embeddings": _MAX_POSITIONS,
            "initializer_range": INITIALIZER_RANGE,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": _mrope_section(size.hidden // size.heads),
            },
            "bos_token_id": ids[tokens.END_OF_TEXT],
            "eos_token_id": ids[tokens.IM_END],
            "pad_token_id": ids[tokens.END_OF_TEXT],
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": size.vision_depth,
            "hidden_size": size.vision_hidden,
            "intermediate_size": size.vision_mlp,
            "num_heads": size.vision_heads,
            "out_hidden_size": size.hidden,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "window_size": 8 * CELL,
            "fullatt_block_indexes": list(range(size.vision_depth)),
            "initializer_range": INITIALIZER_RANGE,
        },
        image_token_id=ids[tokens.IMAGE_PAD],
        video_token_id=ids[tokens.VIDEO_PAD],
        vision_start_token_id=ids[tokens.VISION_START],
        vision_end_token_id=ids[tokens.VISION_END],
        tie_word_embeddings=True,
    )


def processor(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLProcessor:
    """Tokenizer, image processor and chat template as one processor."""
    pixels = {"shortest_edge": _MIN_PIXELS, "longest_edge": _MAX_PIXELS}
    settings: dict[str, Any] = {"size": pixels, "patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**settings),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**settings),
        chat_template=tokens.CHAT_TEMPLATE,
    )


def build(
    preset: Preset, tokenizer: PreTrainedTokenizerFast, seed: int
) -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor]:
    """A model of `preset` with random fp32 weights drawn from `seed`, and its processor.

    The global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(configuration(PRESETS[preset], tokenizer))
    ids = tokenizer.get_vocab()
    generation = model.generation_config
    generation.eos_token_id = ids[tokens.IM_END]
    generation.pad_token_id = ids[tokens.END_OF_TEXT]
    generation.bos_token_id = ids[tokens.END_OF_TEXT]
    generation.do_sample = False
    return model, processor(tokenizer)


def parameter_count(model: Qwen2_5_VLForConditionalGeneration) -> int:
    """Number of trainable parameters, tied embeddings counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


class BadCheckpoint(Refusal, RuntimeError):
    """A checkpoint on disk differs from the model that was saved."""


def save(
    model: Qwen2_5_VLForConditionalGeneration,
    model_processor: Qwen2_5_VLProcessor,
    directory: Path,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a plain Hugging Face checkpoint, weights rounded to `dtype`, and reload it to check that it is complete.

    Raises BadCheckpoint for missing or unexpected keys, values that are not finite, or weights that differ.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rounded: Any = Qwen2_5_VLForConditionalGeneration(model.config)
    rounded = rounded.to(dtype)
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config = model.generation_config
    rounded.save_pretrained(directory)
    model_processor.save_pretrained(directory)
    _write_compact(directory / "tokenizer.json")
    check(directory, rounded)


def _write_compact(path: Path) -> None:
    """The same JSON without indentation: a third of the bytes, six times in the repository."""
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")), ensure_ascii=False, separators=(",", ":")), "utf-8")


def check(directory: Path, expected: Qwen2_5_VLForConditionalGeneration | None = None) -> None:
    """Reload the checkpoint in fp32 and compare it with its own file and, if given, with `expected`.

    Raises BadCheckpoint.
    """
    loading: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained
    loaded, report = loading(directory, dtype=torch.float32, output_loading_info=True)
    wrong = {name: sorted(keys) for name, keys in report.items() if keys}
    if wrong:
        raise BadCheckpoint(f"{directory}: {wrong}; make it again with `coepg pretrain`")
    stored = load_file(directory / "model.safetensors")
    state = loaded.state_dict()
    not_finite = [name for name, tensor in stored.items() if not torch.isfinite(tensor).all()]
    if not_finite:
        raise BadCheckpoint(f"{directory}: not finite: {not_finite}; lower the learning rate and pretrain again")
    if expected is not None:
        saved = expected.state_dict()
        differs = [name for name in saved if not torch.equal(saved[name].float(), state[name])]
        if differs:
            raise BadCheckpoint(f"{directory}: reloaded weights differ from the model's: {differs}")


def load(directory: Path) -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor]:
    """A checkpoint's model in fp32 and its processor."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    return model, cast(Qwen2_5_VLProcessor, Qwen2_5_VLProcessor.from_pretrained(directory))
