"""Qwen2.5-VL's forward pass over many screens of one size at once, on the weights of the Hugging Face model.

The library's own forward loops over images and builds masks that synchronise with the device. Here all screens have one
size and one prompt, so positions are constants, vision attention is one batched call, and several questions about one
screen share its visual tokens: each question attends to the prompt's head, the screen and itself. The result equals the
library's (tests compare them). Shapes are static and nothing synchronises, so a step can be captured as a CUDA graph.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from coepg_dagster.sandbox.pretraining import tokenizer as tokens
from coepg_dagster.sandbox.pretraining.tiny_models import (
    GRID_HEIGHT,
    GRID_WIDTH,
    MERGE,
    PATCH,
    SCREEN_HEIGHT,
    SCREEN_WIDTH,
    VISUAL_TOKENS,
)

_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
_STD: Final = (0.26862954, 0.26130258, 0.27577711)
PATCH_ROWS: Final = SCREEN_HEIGHT // PATCH
PATCH_COLUMNS: Final = SCREEN_WIDTH // PATCH
HEAD: Final = 4
"""Tokens before the screen: <|im_start|>, user, newline, <|vision_start|>."""
PREFIX: Final = HEAD + VISUAL_TOKENS + 1
"""Tokens up to and including <|vision_end|>."""
FIRST_TEXT_POSITION: Final = HEAD + max(GRID_WIDTH, GRID_HEIGHT) + 1
"""Rotary position of the first token after <|vision_end|>."""


class FastModel(nn.Module):
    """A view of a Hugging Face Qwen2.5-VL that shares its parameters."""

    model: Any
    head_ids: Tensor
    tail_ids: Tensor
    mean: Tensor
    std: Tensor
    vision_angles: Tensor
    prefix_angles: Tensor
    text_angles: Tensor

    def __init__(self, model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.model = model
        ids = tokenizer.get_vocab()
        newline = tokenizer.encode("\n", add_special_tokens=False)
        head = [ids[tokens.IM_START], ids["user"], *newline, ids[tokens.VISION_START]]
        self._constant("head_ids", torch.tensor(head))
        self._constant("tail_ids", torch.tensor([ids[tokens.VISION_END]]))
        self._constant("mean", torch.tensor(_MEAN).view(3, 1, 1) * 255)
        self._constant("std", torch.tensor(_STD).view(3, 1, 1) * 255)
        self._constant("vision_angles", _vision_angles(model.config.vision_config))
        prefix, text = _text_angles(model.config.text_config)
        self._constant("prefix_angles", prefix)
        self._constant("text_angles", text)

    def _constant(self, name: str, value: Tensor) -> None:
        self.register_buffer(name, value, persistent=False)

    def screens(self, images: Tensor) -> Tensor:
        """Visual tokens (B, VISUAL_TOKENS, hidden) of uint8 screens (B, SCREEN_HEIGHT, SCREEN_WIDTH, 3)."""
        visual = self.model.model.visual
        count = images.shape[0]
        x = (images.permute(0, 3, 1, 2).float() - self.mean) / self.std
        x = x.view(count, 3, GRID_HEIGHT, MERGE, PATCH, GRID_WIDTH, MERGE, PATCH)
        x = x.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(count, PATCH_ROWS * PATCH_COLUMNS, 3, 1, PATCH * PATCH)
        weight = visual.patch_embed.proj.weight  # (hidden, 3, 2, PATCH, PATCH): both frames of a still image are equal
        x = F.linear(x.flatten(2), weight.sum(2).flatten(1))
        cos, sin = self.vision_angles.cos(), self.vision_angles.sin()
        for block in visual.blocks:
            x = x + _vision_attention(block.attn, block.norm1(x), cos, sin)
            x = x + block.mlp(block.norm2(x))
        merger = visual.merger
        merged: Tensor = merger.mlp(merger.ln_q(x).view(count, VISUAL_TOKENS, -1))
        return merged

    def states(self, visual: Tensor, text: Tensor, positions: Tensor, segments: Tensor) -> Tensor:
        """Last hidden states (B, T, hidden) of the text tokens.

        Args:
            visual: (B, VISUAL_TOKENS, hidden) from `screens`.
            text: (B, T) ids of one or more questions, each with its answer, one after the other.
            positions: (B, T) of each token within its question, from 0.
            segments: (B, T) number of the question, from 1; a token sees the prefix and its own question.
        """
        language = self.model.model.language_model
        count, length = text.shape
        embed = language.embed_tokens
        head, tail = embed(self.head_ids), embed(self.tail_ids)
        x = torch.cat(
            [head.expand(count, -1, -1), visual.to(head.dtype), tail.expand(count, -1, -1), embed(text)], dim=1
        )
        angles = torch.cat([self.prefix_angles.expand(count, -1, -1), self.text_angles[positions]], dim=1)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        total = PREFIX + length
        owner = F.pad(segments, (PREFIX, 0))
        seen = (owner[:, None, :] == 0) | (owner[:, None, :] == owner[:, :, None])
        causal = torch.ones(total, total, dtype=torch.bool, device=text.device).tril()
        mask = (seen & causal)[:, None]
        for layer in language.layers:
            x = x + _text_attention(layer.self_attn, layer.input_layernorm(x), cos, sin, mask)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        last: Tensor = language.norm(x[:, PREFIX:])
        return last

    def logits(self, states: Tensor) -> Tensor:
        """(…, vocabulary) of hidden states; the output weights are the embeddings."""
        result: Tensor = self.model.lm_head(states)
        return result

    @property
    def embeddings(self) -> Tensor:
        """(vocabulary, hidden)."""
        weight: Tensor = self.model.model.language_model.embed_tokens.weight
        return weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def _vision_attention(attention: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    count, length, width = x.shape
    heads = attention.num_heads
    q, k, v = attention.qkv(x).view(count, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    q, k = _rotate(q.float(), cos, sin).to(v.dtype), _rotate(k.float(), cos, sin).to(v.dtype)
    mixed = F.scaled_dot_product_attention(q, k, v)
    result: Tensor = attention.proj(mixed.transpose(1, 2).reshape(count, length, width))
    return result


def _text_attention(attention: Any, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
    count, length, _ = x.shape
    size = attention.head_dim

    def heads(projected: Tensor) -> Tensor:
        return projected.view(count, length, -1, size).transpose(1, 2)

    q, k, v = heads(attention.q_proj(x)), heads(attention.k_proj(x)), heads(attention.v_proj(x))
    q, k = _rotate(q.float(), cos, sin).to(v.dtype), _rotate(k.float(), cos, sin).to(v.dtype)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    result: Tensor = attention.o_proj(mixed.transpose(1, 2).reshape(count, length, -1))
    return result


def _vision_angles(config: Any) -> Tensor:
    """(patches, head_dim) rotation angles; patches in the processor's order, the four of one visual token together."""
    size = config.hidden_size // config.num_heads
    frequencies = 1.0 / 10000.0 ** (torch.arange(0, size // 2, 2, dtype=torch.float) / (size // 2))
    rows, columns = torch.meshgrid(torch.arange(PATCH_ROWS), torch.arange(PATCH_COLUMNS), indexing="ij")

    def ordered(grid: Tensor) -> Tensor:
        return grid.reshape(GRID_HEIGHT, MERGE, GRID_WIDTH, MERGE).permute(0, 2, 1, 3).flatten().float()

    angles = torch.cat([ordered(rows)[:, None] * frequencies, ordered(columns)[:, None] * frequencies], dim=-1)
    return torch.cat([angles, angles], dim=-1)


def _text_angles(config: Any) -> tuple[Tensor, Tensor]:
    """Rotation angles (PREFIX, head_dim) of the head and screen, (positions, head_dim) of the text after."""
    rope = config.rope_parameters
    size = config.hidden_size // config.num_attention_heads
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size)
    rows, columns = torch.meshgrid(torch.arange(GRID_HEIGHT), torch.arange(GRID_WIDTH), indexing="ij")
    screen = torch.stack([torch.zeros(VISUAL_TOKENS), rows.flatten().float(), columns.flatten().float()]) + HEAD
    before, after = torch.arange(HEAD).float(), torch.tensor([FIRST_TEXT_POSITION - 1.0])
    positions = torch.cat([before.expand(3, -1), screen, after.expand(3, -1)], dim=1)  # time, row, column
    dimension = torch.repeat_interleave(torch.arange(3), torch.tensor(rope["mrope_section"]))
    prefix = positions[dimension].T * frequencies  # each frequency follows one of time, row, column
    text = (torch.arange(config.max_position_embeddings).float() + FIRST_TEXT_POSITION)[:, None] * frequencies
    return torch.cat([prefix, prefix], dim=-1), torch.cat([text, text], dim=-1)
