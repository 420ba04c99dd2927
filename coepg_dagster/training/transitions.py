"""Prompts of two screens (UIShift): which action leads from one to the other.

The two are one image, the first on the left, so that a prompt has one screenshot as all others. A grader sees the first alone,
whose pixels have the same coordinates in both.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
from PIL import Image

from coepg_dagster.inference.screens import decode

GOAL: Final = "Which action leads from the left screen to the right screen?"
"""The task in such a prompt; it has no history."""


def with_transitions(steps: pa.Table, pairs: Sequence[tuple[str, str]]) -> tuple[pa.Table, pa.Table, list[str]]:
    """Steps with a further one for each pair (step, later step), as graders and as the planner see them, and the ids of these.

    A further step has the label of the first. Pairs whose screens are the same image say nothing, and are left out.

    Args:
        steps: STEP_SCHEMA.
    """
    if not pairs:
        return steps, steps, []
    rows = {step_id: position for position, step_id in enumerate(steps["step_id"].to_pylist())}
    graded, shown = [], []
    for first, later in pairs:
        row, after = (steps.slice(rows[step_id], 1).to_pylist()[0] for step_id in (first, later))
        if row["screenshot"] == after["screenshot"]:
            continue
        made: dict[str, Any] = row | {"step_id": f"{first}>{later}", "goal": GOAL, "history": []}
        made["episode_id"] = made["step_id"]  # a prompt of its own, and no step of an episode
        if "instruction" in made:
            made["instruction"] = None
        both, width, height = side_by_side(decode(first, row["screenshot"]), decode(later, after["screenshot"]))
        graded.append(made)
        shown.append(made | {"screenshot": both, "width": width, "height": height})
    ids = [row["step_id"] for row in graded]
    tables = [pa.concat_tables([steps, pa.Table.from_pylist(more, steps.schema)]) for more in (graded, shown)]
    return tables[0], tables[1], ids


def side_by_side(left: Image.Image, right: Image.Image) -> tuple[bytes, int, int]:
    """Two images as one PNG, with its width and height; white where one of them is lower."""
    image = Image.new("RGB", (left.width + right.width, max(left.height, right.height)), "white")
    image.paste(left, (0, 0))
    image.paste(right, (left.width, 0))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue(), image.width, image.height
