"""Controls of the numbers of D_k: plan shuffle, leaks, boxes, blank screens, legible targets.

The plan shuffle gives each verifier a screen with another step's plan. A verifier that reads the plan then hits the target of
that screen about as often as by chance. One that hits it more often ignores the plan, and verifies nothing.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from coepg_dagster.experiment.schema import Quality
from coepg_dagster.geometry import Box, Point, Size, Space, smart_resize
from coepg_dagster.inference.screens import UnreadableScreenshot, decode
from coepg_dagster.pools.candidates import jaccard, plan_tokens
from coepg_dagster.steps import CANDIDATE_SCHEMA, short_hash

TRAIN_ONLY, HAS_ROWS, NO_LEAK = "train_split_only", "has_rows", "no_test_steps"
BOXES_INSIDE, NOT_BLANK = "boxes_inside_screens", "screens_not_blank"
BLOCKING: Final[Mapping[str, str]] = {
    TRAIN_ONLY: "Every step of D_k is in the train split.",
    HAS_ROWS: "D_k has at least one row.",
    NO_LEAK: "No step of D_k belongs to an episode of a validation or test split, and at most {shared_steps_at_most:g} % "
    "have the goal and the screenshot of one of their steps (`quality.shared_steps_at_most`).",
    BOXES_INSIDE: "At most {outside_boxes_at_most:g} % of the steps have a target box that is not inside the screenshot "
    "(`quality.outside_boxes_at_most`).",
    NOT_BLANK: "At most {blank_screens_at_most:g} % of the steps have a screenshot of one colour, or none "
    "(`quality.blank_screens_at_most`).",
}
"""The checks of D_k that must pass before anything is trained on it, each with the statement that holds if it passes.

Names in braces stand for limits of `Quality`.
"""


def shuffled(candidates: pa.Table, steps: pa.Table, similar: float, pairs: int) -> pa.Table:
    """Up to `pairs` candidates (CANDIDATE_SCHEMA), each given the screen of a step that it was not written for.

    `step_id` becomes that of the other screen. It has a target, the size of the screen that the plan was written for, and is
    of another episode. No plan written for it says the same as this one (`similar`, as for duplicates). The choice is
    deterministic: by hashes of names.
    """
    about = {
        row["step_id"]: row
        for row in steps.select(["step_id", "episode_id", "width", "height", "boxes"]).to_pylist()
        if row["boxes"]
    }
    rows = [row for row in candidates.to_pylist() if row["step_id"] in about]
    rows.sort(key=lambda row: hashlib.sha256(row["candidate_id"].encode()).digest())
    plans: dict[str, list[frozenset[str]]] = defaultdict(list)
    for row in rows:
        plans[row["step_id"]].append(plan_tokens(row["plan"]))
    same_size: dict[tuple[int, int], list[str]] = defaultdict(list)
    for step_id in plans:  # in the order of the hashes, so a screen and the plans shuffled to it have nothing in common
        same_size[about[step_id]["width"], about[step_id]["height"]].append(step_id)
    shuffled = []
    for i, row in enumerate(rows):
        here, tokens = about[row["step_id"]], plan_tokens(row["plan"])
        screens = same_size[here["width"], here["height"]]
        for j in range(len(screens)):
            screen = screens[(i + 1 + j) % len(screens)]
            if about[screen]["episode_id"] == here["episode_id"]:
                continue
            if all(tokens != other and jaccard(tokens, other) <= similar for other in plans[screen]):
                shuffled.append(row | {"step_id": screen})
                break
        if len(shuffled) == pairs:
            break
    return pa.Table.from_pylist(shuffled, CANDIDATE_SCHEMA)


def shuffle_rates(verdicts: pa.Table, shuffled: pa.Table, steps: pa.Table) -> dict[str, dict[str, Any]]:
    """Verifier → `pairs`, the number of shuffled pairs that it answered, and in per cent of them `own`, `shuffled`, `chance`.

    own: on the screen that the plan was written for, it hits the target. shuffled: on the other screen, given this plan, it
    hits that one's target. chance: its point on the plan's screen, laid over the other screen, lies in that one's target.
    """
    boxes = dict(zip(steps["step_id"].to_pylist(), steps["boxes"].to_pylist(), strict=True))
    real = {(row["verifier"], row["candidate_id"]): row for row in verdicts.to_pylist() if row["failure"] is None}
    counts: dict[str, list[tuple[bool, bool, bool]]] = defaultdict(list)
    for row in shuffled.to_pylist():
        unshuffled = real.get((row["verifier"], row["candidate_id"]))
        if unshuffled is None or row["failure"] is not None:
            continue
        lucky = unshuffled["x"] is not None and any(
            Box(x1, y1, x2, y2, Space.ORIGINAL).contains(Point(unshuffled["x"], unshuffled["y"], Space.ORIGINAL))
            for x1, y1, x2, y2 in boxes[row["step_id"]]
        )
        counts[row["verifier"]].append((unshuffled["hit"], row["hit"], lucky))
    return {
        name: {
            "pairs": len(rows),
            **{
                what: 100 * sum(row[i] for row in rows) / len(rows)
                for i, what in enumerate(("own", "shuffled", "chance"))
            },
        }
        for name, rows in sorted(counts.items())
    }


def dataset_checks(rows: pa.Table, steps: pa.Table, train_split: str, config: Quality) -> dict[str, str | None]:
    """Each check of BLOCKING → None, or what is wrong with D_k.

    Args:
        rows: D_k (DATASET_SCHEMA).
        steps: the steps of all splits.
    """
    covered = set(rows["step_id"].to_pylist())
    names = ["step_id", "episode_id", "split", "goal", "width", "height", "boxes"]
    about = {row["step_id"]: row for row in steps.select(names).to_pylist()}
    outside = sorted(s for s in covered if s not in about or about[s]["split"] != train_split)
    return {
        TRAIN_ONLY: f"{len(outside)} steps are not in the train split, e.g. {outside[0]}" if outside else None,
        HAS_ROWS: None
        if rows.num_rows
        else "no candidate was verified: name open models that know such screens; decisions.parquet of D_k has why each "
        "was dropped",
        NO_LEAK: _leak(rows, steps, about, train_split, config),
        BOXES_INSIDE: _boxes_outside(rows, about, config),
        NOT_BLANK: _blank(covered, steps, config),
    }


def _leak(
    rows: pa.Table, steps: pa.Table, about: Mapping[str, Mapping[str, Any]], train_split: str, config: Quality
) -> str | None:
    """Training rows that share an episode, or goal and screenshot, with another split (TRAIN_ONLY compares the steps)."""
    others = steps.filter(pc.not_equal(steps["split"], train_split))
    episodes = set(others["episode_id"].to_pylist())
    leaked = sorted({s for s in rows["step_id"].to_pylist() if s in about and about[s]["episode_id"] in episodes})
    if leaked:
        return (
            f"{len(leaked)} steps belong to episodes of a validation or test split, e.g. {leaked[0]}: correct the splits "
            "of the benchmark"
        )
    # the same page for another task is no leak: start pages occur in every split
    theirs = {
        (goal, short_hash(encoded.as_py()))
        for goal, encoded in zip(others["goal"].to_pylist(), others["screenshot"], strict=True)
    }
    pairs = zip(rows["step_id"].to_pylist(), rows["screenshot_hash"].to_pylist(), strict=True)
    shared = sorted(
        {step_id for step_id, seen in pairs if step_id in about and (about[step_id]["goal"], seen) in theirs}
    )
    return _too_many(
        shared, rows, config.shared_steps_at_most, "have the goal and the screenshot of a validation or test step"
    )


def _boxes_outside(rows: pa.Table, about: Mapping[str, Mapping[str, Any]], config: Quality) -> str | None:
    def outside(step_id: str, box: Sequence[float]) -> bool:
        step, (x1, y1, x2, y2) = about[step_id], box
        return not (0 <= x1 <= x2 <= step["width"] and 0 <= y1 <= y2 <= step["height"])

    pairs = zip(rows["step_id"].to_pylist(), rows["box"].to_pylist(), strict=True)
    bad = sorted({step_id for step_id, box in pairs if box is not None and step_id in about and outside(step_id, box)})
    return _too_many(bad, rows, config.outside_boxes_at_most, "have a target box that is not inside the screenshot")


def _blank(covered: set[str], steps: pa.Table, config: Quality) -> str | None:
    bad = []
    mine = steps.filter(pc.is_in(steps["step_id"], pa.array(sorted(covered), pa.string())))
    for step_id, encoded in zip(mine["step_id"], mine["screenshot"], strict=True):
        name = step_id.as_py()
        try:
            bands = decode(name, encoded.as_py()).getextrema()
        except UnreadableScreenshot:
            bad.append(name)  # worse than blank
            continue
        if all(low == high for low, high in bands):  # type: ignore[misc]
            bad.append(name)
    return _too_many(sorted(bad), mine, config.blank_screens_at_most, "have a screenshot of one colour, or none")


def _too_many(bad: list[str], of: pa.Table, at_most: float, what: str) -> str | None:
    """The message if more than `at_most` per cent of the steps of a table are bad, else None."""
    steps = len(set(of["step_id"].to_pylist()))
    if not bad or 100 * len(bad) <= at_most * steps:
        return None
    return f"{len(bad)} of {steps} steps {what}, e.g. {bad[0]}: correct the benchmark, or allow it under `quality`"


def smallest_targets(
    rows: pa.Table, steps: pa.Table, resizes: Sequence[tuple[int, int, int]]
) -> dict[tuple[str, tuple[float, ...]], float]:
    """(step, target) of each row with a box → its smaller side in px of the verifiers' coarsest resized image.

    `resizes` are (factor, min_pixels, max_pixels) of the verifiers' image processors.
    """
    columns = (steps[name].to_pylist() for name in ("step_id", "width", "height"))
    sizes = {step_id: Size(width, height) for step_id, width, height in zip(*columns, strict=True)}
    sides: dict[tuple[str, tuple[float, ...]], float] = {}
    scales: dict[Size, tuple[float, float]] = {}
    for step_id, box in zip(rows["step_id"].to_pylist(), rows["box"].to_pylist(), strict=True):
        if box is None or step_id not in sizes:
            continue
        size = sizes[step_id]
        if size not in scales:
            seen = [smart_resize(size, factor=f, min_pixels=low, max_pixels=high) for f, low, high in resizes]
            scales[size] = (min(s.width for s in seen) / size.width, min(s.height for s in seen) / size.height)
        across, down = scales[size]
        sides[step_id, tuple(box)] = min((box[2] - box[0]) * across, (box[3] - box[1]) * down)
    return sides
