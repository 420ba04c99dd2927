"""The size of a model by its config.json: parameters, bytes, and floating-point operations.

Pure arithmetic over the configurations of Qwen2.5-VL and Qwen3-VL; no torch, no weights. `flops` is the count that the
benchmarks and `coepg plan` use; a multiplication with its addition counts as two operations.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from coepg_dagster.refusal import Refusal


class UnknownModel(Refusal, ValueError):
    """A model whose size cannot be computed; the message names it and says what to do."""


LARGEST: Final = 1 << 24
"""Limit of each number that describes a model; vocabularies are the largest, with some 2^18."""


@dataclass(frozen=True)
class Vision:
    """The vision tower; lengths in elements, areas in pixels."""

    layers: int
    hidden: int
    mlp: int
    out: int  # width of the language model
    patch: int
    merge: int  # patches per side of one visual token
    temporal: int
    window: int  # side of an attention window, px; 0: every layer sees the whole image
    whole_image_layers: int
    gated: bool  # Qwen2.5-VL's MLP has a gate, Qwen3-VL's has none
    positions: int  # learnt position embeddings (Qwen3-VL)
    mergers: int  # the merger, and Qwen3-VL's deepstack mergers

    @property
    def block(self) -> int:
        """Parameters of one layer."""
        h, m = self.hidden, self.mlp
        attention = 4 * h * h + 4 * h
        if self.gated:
            return attention + 3 * h * m + 2 * m + h + 2 * h
        return attention + 2 * h * m + m + h + 4 * h

    @property
    def patch_embedding(self) -> int:
        size = 3 * self.temporal * self.patch**2 * self.hidden
        return size if self.gated else size + self.hidden

    @property
    def merger(self) -> int:
        """Parameters of one merger: two linear layers and a norm."""
        wide = self.hidden * self.merge**2
        norm = self.hidden if self.gated else 2 * self.hidden
        first = wide * wide + wide + wide * self.out + self.out + norm
        # a deepstack merger normalises after the patches are joined
        return first * self.mergers + (self.mergers - 1) * 2 * (wide - self.hidden)

    @property
    def parameters(self) -> int:
        return self.layers * self.block + self.patch_embedding + self.merger + self.positions * self.hidden


@dataclass(frozen=True)
class Architecture:
    """A vision-language model: the language model's dimensions, and its vision tower's."""

    layers: int
    hidden: int
    mlp: int
    heads: int
    key_value_heads: int
    head: int  # width of one attention head
    vocabulary: int
    tied: bool  # the output layer is the input embedding
    attention_bias: bool
    head_norm: bool  # Qwen3's norm of queries and keys
    vision: Vision

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str = "config.json") -> Self:
        """From the content of a config.json. Raises UnknownModel for other kinds of model."""
        kind = config.get("model_type")
        if kind not in ("qwen2_5_vl", "qwen3_vl"):
            raise UnknownModel(f"{name}: model_type {kind!r} is not known here; known: qwen2_5_vl, qwen3_vl")
        # in config.json files of transformers 4 the language model's values are at the top level
        text, vision, old = config.get("text_config", config), config["vision_config"], kind == "qwen2_5_vl"
        depth = vision["depth"]
        made = cls(
            layers=text["num_hidden_layers"],
            hidden=text["hidden_size"],
            mlp=text["intermediate_size"],
            heads=text["num_attention_heads"],
            key_value_heads=text["num_key_value_heads"],
            head=text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
            vocabulary=text["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            attention_bias=old or bool(text.get("attention_bias", False)),
            head_norm=not old,
            vision=Vision(
                layers=depth,
                hidden=vision["hidden_size"],
                mlp=vision["intermediate_size"],
                out=vision.get("out_hidden_size", text["hidden_size"]),
                patch=vision.get("patch_size", 14 if old else 16),
                merge=vision.get("spatial_merge_size", 2),
                temporal=vision.get("temporal_patch_size", 2),
                window=vision.get("window_size", 112) if old else 0,
                whole_image_layers=len(vision.get("fullatt_block_indexes", (7, 15, 23, 31))) if old else depth,
                gated=old,
                positions=0 if old else vision.get("num_position_embeddings", 2304),
                mergers=1 if old else 1 + len(vision.get("deepstack_visual_indexes", (8, 16, 24))),
            ),
        )
        for name, value in (*vars(made).items(), *vars(made.vision).items()):
            least = 0 if name in ("window", "whole_image_layers", "positions") else 1
            flag = name in ("tied", "attention_bias", "head_norm", "gated", "vision")
            if not flag and not (type(value) is int and least <= value <= LARGEST):
                raise TypeError(f"{name} is {value!r:.40}, not a whole number from {least} to {LARGEST:,}")
        return made

    @property
    def block(self) -> int:
        """Parameters of one layer of the language model."""
        queries, keys = self.heads * self.head, self.key_value_heads * self.head
        bias = queries + 2 * keys + (self.hidden if self.attention_bias and self.head_norm else 0)
        return (
            2 * self.hidden * (queries + keys)
            + (bias if self.attention_bias else 0)
            + (2 * self.head if self.head_norm else 0)
            + 3 * self.hidden * self.mlp
            + 2 * self.hidden
        )

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding."""
        return self.vocabulary * self.hidden

    @property
    def language(self) -> int:
        """Parameters of the language model, both embeddings included."""
        return self.layers * self.block + self.hidden + self.embedding * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        return self.language + self.vision.parameters

    @property
    def key_value_bytes(self) -> int:
        """Bytes of keys and values of one token, bf16."""
        return 2 * 2 * self.layers * self.key_value_heads * self.head

    def adapters(self, rank: int, *, vision: bool) -> int:
        """Parameters of LoRA adapters of every linear layer of the language model's layers, and of the tower's blocks."""
        h, queries, keys = self.hidden, self.heads * self.head, self.key_value_heads * self.head
        inside = 2 * (h + queries) + 2 * (h + keys) + 3 * (h + self.mlp)
        tower = self.vision
        block = 4 * tower.hidden + 2 * tower.hidden + (3 if tower.gated else 2) * (tower.hidden + tower.mlp)
        return rank * (self.layers * inside + (tower.layers * block if vision else 0))

    def image_tokens(self, width: int, height: int) -> int:
        """Visual tokens of a resized screenshot (px)."""
        side = self.vision.patch * self.vision.merge
        return (width // side) * (height // side)


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of one sequence, by part."""

    language: float
    attention: float
    head: float
    vision: float

    @property
    def total(self) -> float:
        return self.language + self.attention + self.head + self.vision


FORWARD: Final = 1
BACKWARD: Final = 2
"""A layer's backward pass multiplies twice what its forward pass did: for its inputs, and for its weights."""


def flops(
    model: Architecture,
    *,
    image: tuple[int, int],
    text: int,
    scored: int,
    train: bool,
    freeze_vision: bool = False,
    fixed_weights: bool = False,
) -> Flops:
    """The operations for one sequence with one screenshot; recomputed activations are not counted.

    - language: 2 · parameters of the layers · tokens forward, so 6 · parameters · tokens in training
    - attention: 2 · tokens² · width forward in each layer (scores and sums, halved because it is causal)
    - head: 2 · vocabulary · width for each token that is scored
    - vision: 2 · parameters · patches forward, and attention within windows or the whole image

    Args:
        image: (width, height) of the resized screenshot, px.
        text: tokens of the sequence besides the image's, the answer included.
        scored: tokens whose probabilities are computed (the answer's).
        train: with the backward pass.
        freeze_vision: the vision tower has no backward pass.
        fixed_weights: the weights have no gradient (LoRA): the backward pass multiplies once.
    """
    back = (1 if fixed_weights else BACKWARD) if train else 0
    tokens = model.image_tokens(*image) + text
    vision = model.vision
    patches = (image[0] // vision.patch) * (image[1] // vision.patch)
    window = (vision.window // vision.patch) ** 2 if vision.window else patches
    seen = vision.whole_image_layers * patches + (vision.layers - vision.whole_image_layers) * min(window, patches)
    per_token = patches / vision.merge**2
    tower = (
        2 * (vision.layers * vision.block + vision.patch_embedding) * patches
        + 2 * vision.merger * per_token
        + 4 * patches * seen * vision.hidden
    )
    passes = FORWARD + back
    width = model.heads * model.head
    return Flops(
        language=passes * 2.0 * model.layers * model.block * tokens,
        attention=(FORWARD + (BACKWARD if train else 0)) * 2.0 * model.layers * tokens**2 * width,
        head=passes * 2.0 * model.embedding * scored,
        vision=(FORWARD if freeze_vision else passes) * float(tower),
    )


def read(folder: Path) -> Architecture:
    """The architecture of a local checkpoint folder. Raises UnknownModel."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise UnknownModel(f"{folder}: there is no config.json; name a checkpoint's folder or a hub model") from None
    except ValueError as error:
        raise UnknownModel(f"{file}: not valid JSON: {error}") from None
    try:
        return Architecture.of(config, str(file))
    except (AttributeError, KeyError, TypeError, ArithmeticError) as error:
        raise UnknownModel(
            f"{file}: not the configuration of a model ({type(error).__name__}: {error}): copy or download it again"
        ) from None


def _qwen2_5_vl(hidden: int, mlp: int, layers: int, heads: int, kv: int, vocabulary: int, tower_mlp: int) -> Any:
    return {
        "model_type": "qwen2_5_vl",
        "tie_word_embeddings": hidden == 2048,
        "text_config": {
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv,
            "vocab_size": vocabulary,
            "max_position_embeddings": 128000,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": tower_mlp,
            "num_heads": 16,
            "out_hidden_size": hidden,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "tokens_per_second": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    }


_QWEN3_VL_4B: Final[Mapping[str, Any]] = {
    "model_type": "qwen3_vl",
    "tie_word_embeddings": True,
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
        "tie_word_embeddings": True,
    },
    "vision_config": {
        "depth": 24,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_heads": 16,
        "out_hidden_size": 2560,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [5, 11, 17],
    },
}
KNOWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "Qwen/Qwen2.5-VL-3B-Instruct": _qwen2_5_vl(2048, 11008, 36, 16, 2, 151936, 3420),
    "Qwen/Qwen2.5-VL-7B-Instruct": _qwen2_5_vl(3584, 18944, 28, 28, 4, 152064, 3420),
    "Qwen/Qwen2.5-VL-32B-Instruct": _qwen2_5_vl(5120, 27648, 64, 40, 8, 152064, 3456),
    "Qwen/Qwen2.5-VL-72B-Instruct": _qwen2_5_vl(8192, 29568, 80, 64, 8, 152064, 3456),
    "Qwen/Qwen3-VL-4B-Instruct": _QWEN3_VL_4B,
}
"""Configurations of models on the Hugging Face hub, so that a plan needs no network."""
