"""One row for a group of rollouts: the prompt, with its screenshot, is computed once for all its completions.

A row is [prompt without its last token][last token, c_1] … [last token, c_G]. The last token of the prompt is repeated before
each completion, to predict its first token. A completion attends to the prompt and itself, and its positions continue from
the prompt's, as in a separate row; so log-probabilities and gradients are the same. A screenshot is a thousand tokens and a
plan fifty, so that this saves more here than for text (Prefix Grouper, arXiv 2506.05433).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

MASKED: Final = ("sdpa", "eager")
"""Attention that takes any mask; flash attention takes none."""

IGNORED: Final = -100
"""The label of positions at which nothing is predicted."""


def can_pack(model: Any) -> bool:
    """Whether the language model's attention takes a mask of query and key positions."""
    return model.model.language_model.config._attn_implementation in MASKED


@dataclass(frozen=True)
class Packed:
    """Rollouts as one row for each run of equal prompts."""

    inputs: dict[str, Any]  # of the model's forward pass
    labels: torch.Tensor  # (groups, length), IGNORED but at completion tokens
    places: torch.Tensor  # (rollouts, completion length): where a prediction is in (groups, length - 1), flattened
    real: torch.Tensor  # (rollouts, completion length), bool: the tokens that are no padding

    def unpack(self, predictions: torch.Tensor) -> torch.Tensor:
        """The model's value for each token, (groups, length - 1), as (rollouts, completion length); 0 for padding."""
        return predictions.reshape(-1)[self.places].masked_fill(~self.real, 0.0)


def pack(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion: int,
    pixel_values: torch.Tensor,
    image_grid_thw: torch.Tensor,
    mm_token_type_ids: torch.Tensor,
) -> Packed:
    """Packs rollouts: consecutive rollouts of one prompt share a row.

    Args:
        model: the Qwen-VL model itself, without wrappers.
        input_ids, attention_mask, mm_token_type_ids: (rollouts, prompt + completion), prompts padded on the left, completions
            on the right.
        completion: length of the completions, padding included.
        pixel_values: the patches of one image for each rollout, (patches, width).
        image_grid_thw: frames, rows and columns of each image, (rollouts, 3).
    """
    device, start = input_ids.device, input_ids.shape[1] - completion
    images = images_of(pixel_values, image_grid_thw)
    new = first_of_runs(input_ids[:, :start], attention_mask[:, :start], images, image_grid_thw)
    positions, _ = model.model.get_rope_index(
        input_ids[new, :start],
        image_grid_thw=image_grid_thw[new],
        attention_mask=attention_mask[new, :start],
        mm_token_type_ids=mm_token_type_ids[new, :start],
    )
    prompts = attention_mask[new, :start].sum(-1).tolist()
    answers = attention_mask[:, start:].sum(-1).tolist()
    rows = [range(a, b) for a, b in zip(new, [*new[1:], len(input_ids)], strict=True)]
    lengths = [p - 1 + sum(1 + answers[i] for i in row) for p, row in zip(prompts, rows, strict=True)]
    shape = len(rows), max(lengths)
    ids = input_ids.new_zeros(shape)
    labels = input_ids.new_full(shape, IGNORED)
    part = input_ids.new_full(shape, -1)  # 0: the prompt; i: the i-th completion; -1: padding
    place = positions.new_zeros(3, *shape)
    places = input_ids.new_zeros(len(input_ids), completion)
    for g, (p, row) in enumerate(zip(prompts, rows, strict=True)):
        at = p - 1
        ids[g, :at] = input_ids[row[0], start - p : start - 1]
        part[g, :at] = 0
        place[:, g, :at] = positions[:, g, start - p : start - 1]
        for i, rollout in enumerate(row, start=1):
            n = answers[rollout]
            end = at + 1 + n
            ids[g, at:end] = input_ids[rollout, start - 1 : start + n]
            labels[g, at + 1 : end] = ids[g, at + 1 : end]
            part[g, at:end] = i
            place[:, g, at:end] = positions[:, g, start - 1 :] + torch.arange(n + 1, device=device)
            places[rollout, :n] = g * (shape[1] - 1) + torch.arange(at, at + n, device=device)
            at = end
    order = torch.arange(shape[1], device=device)
    before = order[:, None] >= order[None]
    sees = before & ((part[:, None, :] == 0) | (part[:, :, None] == part[:, None, :]))
    mask = sees[:, None]
    if model.model.language_model.config._attn_implementation == "eager":  # it adds its mask to the scores
        mask = torch.zeros(mask.shape, device=device).masked_fill(~mask, torch.finfo(torch.float32).min)
    return Packed(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": place,
            "pixel_values": torch.cat([images[i] for i in new]),
            "image_grid_thw": image_grid_thw[new],
        },
        labels,
        places,
        attention_mask[:, start:].bool(),
    )


def select_rows(batch: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Some rows of a batch of rollouts, in the order of `rows`. Values that are not one for each row stay as they are.

    Args:
        batch: as TRL makes it; `pixel_values` holds the patches of one image a row, as `image_grid_thw` says.
    """
    n = len(batch["image_grid_thw"])
    images = images_of(batch["pixel_values"], batch["image_grid_thw"])
    chosen: dict[str, Any] = {}
    for name, value in batch.items():
        if name == "pixel_values":
            chosen[name] = torch.cat([images[row] for row in rows]) if len(rows) else value[:0]
        elif isinstance(value, torch.Tensor) and value.ndim and len(value) == n:
            chosen[name] = value[list(rows)]
        else:
            chosen[name] = [value[row] for row in rows] if isinstance(value, list) else value
    return chosen


def in_passes(
    batch: Mapping[str, Any], passes: int, loss_type: str, *, drop: bool, empty: bool, filled: int | None = None
) -> list[dict[str, Any]]:
    """A batch of rollouts as `passes` passes of equal size, or filled one after another; the order of rollouts stays.

    TRL's loss of each must be multiplied by its `share`, which corrects for the rollouts that are left out.

    Args:
        loss_type: TRL's.
        drop: whether rollouts with advantage 0 are left out; without a KL term they have no gradient.
        empty: whether a pass may have no rollout at all.
        filled: rollouts that fill a pass, so that the last passes may have none; None: all passes have as many.
    """
    advantages, tokens = batch["advantages"].tolist(), batch["completion_mask"].sum(-1).tolist()
    every: Sequence[int] = range(len(advantages))
    size = len(every) // passes
    if filled is not None:
        every, size = [row for row in every if not drop or advantages[row]], filled
    result = []
    for start in range(0, passes * size, size):
        whole = every[start : start + size]
        kept = [row for row in whole if not drop or advantages[row]] or ([] if empty else [whole[0]])
        share = len(kept) * passes / len(advantages)
        if loss_type == "bnpo":  # a mean over the tokens of a pass, or of a step where passes are not equal
            of = sum(tokens[row] for row in whole) if filled is None else sum(tokens) / passes
            share = sum(tokens[row] for row in kept) / of
        elif loss_type in ("dapo", "cispo"):  # a mean over the tokens of the step, which TRL has counted
            share = 1.0
        result.append(select_rows(batch, kept) | {"share": share})
    return result


def images_of(pixel_values: torch.Tensor, image_grid_thw: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The patches (patches, width) of each image, from those of a batch (all patches, width); grids are (images, 3)."""
    return torch.split(pixel_values, image_grid_thw.prod(-1).tolist())


def first_of_runs(
    prompts: torch.Tensor, mask: torch.Tensor, images: Sequence[torch.Tensor], image_grid_thw: torch.Tensor
) -> list[int]:
    """The rows whose prompt or screenshot differs from that of the row before.

    Args:
        prompts: tokens, (rows, length), with their `mask`.
        images: the patches of one image for each row (`images_of`), and its grid, (rows, 3).
    """
    alike = (prompts[1:] == prompts[:-1]).all(-1) & (mask[1:] == mask[:-1]).all(-1)
    alike &= (image_grid_thw[1:] == image_grid_thw[:-1]).all(-1)
    again = [same and torch.equal(images[i + 1], images[i]) for i, same in enumerate(alike.tolist())]
    return [0] + [i + 1 for i, same in enumerate(again) if not same]
