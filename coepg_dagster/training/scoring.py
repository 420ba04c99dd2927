"""What the rewards of GRPO share: a batch of answers as groups of one step, for the terms, and their record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from coepg_dagster.geometry import Box, Viewport
from coepg_dagster.rewards.answers import Answers, Floats
from coepg_dagster.rewards.combiners import PARTS
from coepg_dagster.rewards.composite import Composite


def boxes_of(boxes: Sequence[Box]) -> Floats:
    """Boxes as (x1, y1, x2, y2), shape (M, 4)."""
    return np.array([(box.x1, box.y1, box.x2, box.y2) for box in boxes], dtype=np.float64).reshape(-1, 4)


def size_of(viewport: Viewport) -> tuple[float, float]:
    """(width, height) of a stored screenshot, px."""
    return float(viewport.original.width), float(viewport.original.height)


def in_groups(asked: Sequence[Any], answers: Sequence[Answers]) -> list[Answers]:
    """B answers, one row each, as the groups in which they are scored.

    Args:
        asked: what each answered; neighbours with equal ones are a group, and share their boxes, size and references.
    """
    groups = []
    for _, rows in groupby(range(len(asked)), key=lambda row: asked[row]):
        group = [answers[row] for row in rows]
        joined = replace(
            group[0],
            areas=np.concatenate([a.areas for a in group]),
            texts=[text for a in group for text in a.texts],
            plans=[plan for a in group for plan in a.plans],
            candidates=[places for a in group for places in a.candidates],
        )
        groups.append(joined)
    return groups


def all_terms(composite: Composite, groups: Sequence[Answers]) -> dict[str, Floats]:
    """Term → its score of each of the B answers of all groups, shape (B,)."""
    if not composite.terms:
        return {}
    of_groups = [composite.term_scores(group) for group in groups]
    return {name: np.concatenate([scores[name] for scores in of_groups]) for name in composite.terms}


def as_parts(
    composite: Composite,
    parsed: Floats,
    types: Floats,
    values: Floats,
    point: Floats,
    terms: Mapping[str, Floats],
) -> list[list[dict[str, Any]]]:
    """What each of B rewards was made of (`parts` of ROLLOUT_SCHEMA); empty where it is Eq. 9."""
    if composite.plain:
        return [[] for _ in parsed]
    named = dict(zip(PARTS, (parsed, types, values, point), strict=True)) | dict(terms)
    return [
        [{"name": name, "score": float(scores[row])} for name, scores in named.items()] for row in range(len(parsed))
    ]
