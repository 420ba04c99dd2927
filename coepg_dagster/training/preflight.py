"""The check of every row before training: its image tokens must match the image's features, and its length the budget.

A row over the budget is dropped with a reason, never cut, since image tokens or the answer might be cut off. Tokens are counted
as TRL's collators make them; image tokens by the grid of the image processor, once for each size of a screenshot.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset
from PIL import Image
from trl import apply_chat_template
from trl.data_utils import prepare_multimodal_messages

from coepg_dagster.inference.files import IncompleteCheckpoint
from coepg_dagster.inference.processing import vision_token_ids
from coepg_dagster.inference.screens import Screens
from coepg_dagster.training.examples import NothingToTrainOn
from coepg_dagster.training.launch import is_main

PREFLIGHT: Final = "preflight.parquet"
OVER_BUDGET: Final = "over_max_tokens"
IMAGE_TOKENS: Final = "image_tokens"

BATCH: Final = 512
"""Rows that are tokenized in one call."""

PREFLIGHT_SCHEMA: Final = pa.schema(
    [
        pa.field(
            "row", pa.int32(), nullable=False
        ),  # of the examples, in the order of D_{k-1} (SFT) or of the steps (GRPO)
        pa.field("step_id", pa.string(), nullable=False),
        pa.field("row_id", pa.string()),  # of D_{k-1}; null: a prompt of GRPO, which is a step's
        pa.field("tokens", pa.int32(), nullable=False),  # of the whole row; GRPO: with the longest answer
        pa.field("image_tokens", pa.int32(), nullable=False),  # placeholders in the row
        pa.field("features", pa.int32(), nullable=False),  # what the image processor's grid gives
        pa.field("reason", pa.string()),  # why the row is left out; null: it is trained on
    ]
)
"""The result for each row. The table is beside the weights and not part of their data version."""


def preflight(
    examples: Dataset, processor: Any, screens: Screens, max_tokens: int | None, out: Path, *, answer: int = 0
) -> tuple[Dataset, dict[str, int]]:
    """(the rows to train on, figures); every row with its reason goes to `out`/preflight.parquet.

    Args:
        max_tokens: longer rows are dropped; None: any length.
        answer: tokens of the longest answer to a prompt without a completion (GRPO).
    Raises:
        NothingToTrainOn: no row is left.
        IncompleteCheckpoint: the image processor resizes an image that was already resized, so that no row would be right.
    """
    table = measure(examples, processor, screens, max_tokens, answer)
    reasons = table["reason"].to_pylist()
    kept = [row for row, reason in enumerate(reasons) if reason is None]
    dropped = Counter(reason for reason in reasons if reason is not None)
    longest = max(table["tokens"].to_pylist())
    if is_main():
        out.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, out / PREFLIGHT, compression="zstd")
        budget = "any length" if max_tokens is None else f"max_tokens {max_tokens}"
        print(f"preflight: {len(kept)} of {len(reasons)} rows kept ({budget}), longest {longest} tokens", flush=True)
        for reason, count in sorted(dropped.items()):
            print(f"preflight: {count} rows dropped: {reason} (see {PREFLIGHT} beside the weights)", flush=True)
    if not kept:
        worst, count = dropped.most_common(1)[0]
        shortest = min(table["tokens"].to_pylist())
        remedy = (
            f"the shortest has {shortest} tokens: raise max_tokens ({max_tokens}), or give smaller screenshots"
            if worst == OVER_BUDGET
            else "their texts hold additional image tokens, or none: was the chat template changed?"
        )
        raise NothingToTrainOn(f"no row of {len(reasons)} passed the preflight ({count} × {worst}); {remedy}")
    figures = {"dropped": len(reasons) - len(kept), "longest_row": longest}
    figures |= {f"dropped_{reason}": count for reason, count in sorted(dropped.items())}
    return (examples.select(kept) if dropped else examples), figures


def measure(examples: Dataset, processor: Any, screens: Screens, max_tokens: int | None, answer: int) -> pa.Table:
    """PREFLIGHT_SCHEMA for each row of `examples`. Arguments and errors: as `preflight`."""
    unwanted = set(vision_token_ids(processor.tokenizer))
    image_token = processor.image_token_id

    @cache
    def features_of(width: int, height: int) -> int:
        grid = processor.image_processor(images=[Image.new("RGB", (width, height))], return_tensors="pt")
        features: int = int(grid["image_grid_thw"].prod()) // processor.image_processor.merge_size**2
        ours: int = width * height // (processor.image_processor.patch_size * processor.image_processor.merge_size) ** 2
        if features != ours:
            raise IncompleteCheckpoint(
                f"the image processor makes {features} visual tokens of a screenshot of {width} x {height} px, our resize "
                f"{ours}: was its size changed after the screenshots were prepared?"
            )
        return features

    plain = examples.with_format(None).to_list()  # without decoding a screenshot
    rows: list[dict[str, Any]] = []
    for start in range(0, len(plain), BATCH):
        part = plain[start : start + BATCH]
        texts = [rendered(example, processor) for example in part]
        prompts = _ids(processor, [prompt for prompt, _ in texts])
        completions = _ids(processor, [completion for _, completion in texts])
        for example, prompt, completion in zip(part, prompts, completions, strict=True):
            resized = screens.viewport(example["step_id"]).resized
            features = features_of(resized.width, resized.height)
            images = prompt.count(image_token)
            # for each placeholder the processor writes as many tokens as its image has features
            placeholders = images * features + completion.count(image_token)
            tokens = len(prompt) - images + images * features + (len(completion) or answer)
            reason = None
            if placeholders != features or unwanted & set(completion):
                reason = IMAGE_TOKENS
            elif max_tokens is not None and tokens > max_tokens:
                reason = OVER_BUDGET
            rows.append(
                {
                    "row": len(rows),
                    "step_id": example["step_id"],
                    "row_id": example.get("row_id"),
                    "tokens": tokens,
                    "image_tokens": placeholders,
                    "features": features,
                    "reason": reason,
                }
            )
    return pa.Table.from_pylist(rows, PREFLIGHT_SCHEMA)


def rendered(example: dict[str, Any], processor: Any) -> tuple[str, str]:
    """(prompt, completion) of a row as its collator writes them; a prompt alone has no completion."""
    messages = {"prompt": prepare_multimodal_messages(example["prompt"], images=[None])}
    if "completion" in example:
        messages["completion"] = prepare_multimodal_messages(example["completion"])
    texts = apply_chat_template(messages, processor)
    return texts["prompt"], texts.get("completion", "")


def _ids(processor: Any, texts: list[str]) -> list[list[int]]:
    ids: list[list[int]] = processor.tokenizer(texts, add_special_tokens=False)["input_ids"]
    return ids
