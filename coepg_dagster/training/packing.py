"""Rows that begin alike as one row: the prompt, with its screenshot, is computed once for all of them.

A packed row is [shared beginning][rest of row 1] … [rest of row G]. The rest begins at the last token of the prompt or before,
since that token predicts the first one of the answer. A rest attends to the beginning and itself, and its positions continue
from the beginning's, as in a separate row; so log-probabilities and gradients are the same. A screenshot is a thousand tokens
and a plan fifty, so that this saves more here than for text (Prefix Grouper, arXiv 2506.05433).

Rollouts of a prompt differ in their completions alone (GRPO). Rows of SFT may differ in their prompts too: a grounder's prompt is
the screenshot, then the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
    """Rows of a batch, of which those of each run share one."""

    inputs: dict[str, Any]  # of the model's forward pass
    labels: torch.Tensor  # (runs, length), IGNORED but at the tokens of answers
    places: torch.Tensor  # (rows, longest answer): where a prediction is in (runs, length - 1), flattened
    real: torch.Tensor  # (rows, longest answer), bool: the tokens that are no padding

    def unpack(self, predictions: torch.Tensor) -> torch.Tensor:
        """The model's value for each token, (runs, length - 1), as (rows, longest answer); 0 for padding."""
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
    start = input_ids.shape[1] - completion
    images = images_of(pixel_values, image_grid_thw)
    first = first_of_runs(input_ids[:, :start], attention_mask[:, :start], images, image_grid_thw)
    batch = {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "mm_token_type_ids": mm_token_type_ids,
        "pixel_values": torch.cat([images[i] for i in first]),
        "image_grid_thw": image_grid_thw[first],
    }
    return pack_runs(model, batch, attention_mask[:, start:].bool(), first)


def pack_runs(model: Any, batch: Mapping[str, torch.Tensor], answers: torch.Tensor, first: Sequence[int]) -> Packed:
    """Packs rows: those of a run share a row, in which what they begin with alike, up to the answers, is computed once.

    Args:
        model: the Qwen-VL model itself, without wrappers.
        batch: `input_ids`, `attention_mask` and `mm_token_type_ids`, (rows, length), padded on either side; `pixel_values`, the
            patches of one image for each run, (patches, width), and `image_grid_thw`, its frames, rows and columns, (runs, 3).
        answers: (rows, longest answer), bool: the tokens of each answer, then padding. A row ends with its answer.
        first: the first row of each run, ascending from 0.
    Raises:
        ValueError: the rows of a run differ before the end of their image.
    """
    device = batch["input_ids"].device
    input_ids, real = batch["input_ids"].cpu(), batch["attention_mask"].cpu().bool()
    tokens = [row[here] for row, here in zip(input_ids, real, strict=True)]
    kinds = batch["mm_token_type_ids"].cpu()[first]
    learnt = answers.sum(-1).tolist()
    positions, _ = model.model.get_rope_index(
        input_ids[first],
        image_grid_thw=batch["image_grid_thw"].cpu(),
        attention_mask=real[first],
        mm_token_type_ids=kinds,
    )
    runs = [range(a, b) for a, b in pairwise([*first, len(tokens)])]
    shared = [_alike([tokens[i] for i in run], min(len(tokens[i]) - learnt[i] for i in run) - 1) for run in runs]
    lengths = [n + sum(len(tokens[i]) - n for i in run) for n, run in zip(shared, runs, strict=True)]
    shape = len(runs), max(lengths)
    ids = torch.zeros(shape, dtype=input_ids.dtype)
    labels = torch.full(shape, IGNORED, dtype=input_ids.dtype)
    part = torch.full(shape, -1)  # 0: the beginning; i: the rest of the i-th row; -1: padding
    place = positions.new_zeros(3, *shape)
    places = torch.zeros(answers.shape, dtype=torch.long)
    for g, (n, run) in enumerate(zip(shared, runs, strict=True)):
        here = real[run[0]]
        if kinds[g][here][n:].any():
            raise ValueError(
                f"rows {run[0]} to {run[-1]} have {n} tokens alike, and their image ends later: are they of one screenshot, and "
                "is it before the text that differs?"
            )
        where = positions[:, g, here]
        ids[g, :n] = tokens[run[0]][:n]
        part[g, :n] = 0
        place[:, g, :n] = where[:, :n]
        at = n
        for i, row in enumerate(run, start=1):
            rest = tokens[row][n:]
            end, answer = at + len(rest), learnt[row]
            ids[g, at:end] = rest
            labels[g, end - answer : end] = ids[g, end - answer : end]
            part[g, at:end] = i
            place[:, g, at:end] = where[:, n, None] + torch.arange(len(rest))
            places[row, :answer] = g * (shape[1] - 1) + torch.arange(end - answer - 1, end - 1)
            at = end
    part, order = part.to(device), torch.arange(shape[1], device=device)
    before = order[:, None] >= order[None]
    sees = before & ((part[:, None, :] == 0) | (part[:, :, None] == part[:, None, :]))
    mask = sees[:, None]
    if model.model.language_model.config._attn_implementation == "eager":  # it adds its mask to the scores
        mask = torch.zeros(mask.shape, device=device).masked_fill(~mask, torch.finfo(torch.float32).min)
    return Packed(
        {
            "input_ids": ids.to(device),
            "attention_mask": mask,
            "position_ids": place.to(device),
            "pixel_values": batch["pixel_values"],
            "image_grid_thw": batch["image_grid_thw"],
        },
        labels.to(device),
        places.to(device),
        answers,
    )


def _alike(rows: Sequence[torch.Tensor], most: int) -> int:
    """With how many tokens all rows begin alike, at most `most`."""
    for row in rows[1:]:
        different = (row[:most] != rows[0][:most]).nonzero()
        most = int(different[0]) if len(different) else most
    return most


def packed_pass(
    model: Any,
    core: Any,
    *,
    labels: torch.Tensor,
    first: torch.Tensor,
    fused_lm_head: bool,
    use_cache: bool,
    **batch: Any,
) -> Any:
    """The output of a model with TRL's fused head for rows of SFT, packed; its `log_probs` are (rows, longest answer).

    Args:
        model: what is called: `core`, the Qwen-VL model itself, or a wrapper of it.
        labels: (rows, length), IGNORED but at the tokens of answers.
        first, batch: as of `pack_runs`; first as a tensor.
    """
    lengths = labels.ne(IGNORED).sum(-1, keepdim=True)
    answers = torch.arange(int(lengths.max()), device=labels.device) < lengths
    packed = pack_runs(core, batch, answers, first.tolist())
    output = model(**packed.inputs, labels=packed.labels, fused_lm_head=fused_lm_head, use_cache=use_cache)
    output.log_probs = packed.unpack(output.log_probs)
    return output


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
