"""Before and after training on the same steps: both rates, their paired difference, and whether it is above 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from coepg_dagster.evaluation.statistics import interval, sampled_averages

PROBED: Final = ("train", "validation")
"""Splits on which models are evaluated before and after training; never a test split."""
Change = Mapping[str, Any]
"""`before`, `after`, `difference` in per cent, and `ci95`, the interval of the difference; as it is kept in records."""


def change_of(before: Sequence[float], after: Sequence[float], episodes: Sequence[str]) -> dict[str, Any] | None:
    """The Change from rewards (0 to 1) of the same steps, macro over their episodes; None where there is no step.

    The interval is a bootstrap that draws whole episodes, paired: both rates come from the same draws. None below two episodes.
    """
    if not before:
        return None
    values = np.column_stack([before, after]).astype(float)
    clusters = np.unique(np.array(episodes), return_inverse=True)[1]
    averages = sampled_averages(values, np.ones_like(values), clusters)
    ends = interval((averages.macros[:, 1] - averages.macros[:, 0])[:, None])[:, 0]
    was, is_now = (100 * float(rate) for rate in averages.macro)
    return {
        "before": was,
        "after": is_now,
        "difference": is_now - was,
        "ci95": [100 * float(end) for end in ends] if len(averages.macros) else None,
    }


def rises(change: Change) -> bool:
    """Whether the difference is above 0 with its whole interval; False where there is no interval."""
    return change["ci95"] is not None and change["ci95"][0] > 0


def change_text(change: Change) -> str:
    """`58.6 → 65.7 (+7.1 [+3.0, +11.2])`."""
    ends = change["ci95"]
    inside = f"{change['difference']:+.1f}" + (f" [{ends[0]:+.1f}, {ends[1]:+.1f}]" if ends else "")
    return f"{change['before']:.1f} → {change['after']:.1f} ({inside})"
