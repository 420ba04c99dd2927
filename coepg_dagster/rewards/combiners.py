"""How the parts of a reward become one number.

A combiner's positional parameters name the parts that it gets, shape (B,) each: `parsed` (the answer could be read), `type`
(Eq. 7), `value` (Eq. 8), `point` (r_plan of Eq. 4, or the score of the answer's own point; 1 where the action has no target),
and any term of the experiment by its name. The weighted terms are added to its result. Where point scores go below 0, `point` is
the part above their lowest, which is added to the result too.
"""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np
from annotated_types import Ge

from coepg_dagster.plugins import plugin
from coepg_dagster.rewards.answers import Floats
from coepg_dagster.rewards.cdrem import gated

Weight = Annotated[float, Ge(0)]

PARTS: Final = ("parsed", "type", "value", "point")


@plugin("combiner", "Co-EPG, arXiv 2511.10705, Eq. 9")
def gate(type: Floats, value: Floats, point: Floats) -> Floats:
    """0 where type or value is wrong, else `point`. The default."""
    return gated(type, value, point)


@plugin("combiner", "GRPO with several rewards, e.g. SE-GUI, arXiv 2505.12370")
def weighted_sum(
    type: Floats,
    value: Floats,
    point: Floats,
    *,
    action: Weight = 0.25,
    text: Weight = 0.25,
    place: Weight = 0.5,
) -> Floats:
    """action · type + text · value + place · point, and no gate: a right point counts whatever the type is."""
    return action * type + text * value + place * point


@plugin("combiner", "UI-S1, arXiv 2509.11543")
def ui_s1(parsed: Floats, type: Floats, value: Floats, point: Floats) -> Floats:
    """Staged gate: 0.1 · parsed + 0.4 · 1[parsed] · type + 0.5 · 1[parsed and type] · value · point."""
    return 0.1 * parsed + 0.4 * parsed * type + 0.5 * parsed * type * value * point


@plugin("combiner", "GUI-Libra, arXiv 2602.22190")
def gui_libra(
    parsed: Floats, type: Floats, value: Floats, point: Floats, *, format: Annotated[float, Ge(0)] = 0.1
) -> Floats:
    """Product: format · parsed + (1 - format) · type · value · point."""
    return format * parsed + (1 - format) * type * value * point


@plugin("combiner", "GUI-R1, arXiv 2504.10458")
def gui_r1(format: Floats, type: Floats, value: Floats, point: Floats) -> Floats:
    """0.8 · accuracy + 0.2 · format, with accuracy = type · value · point and format by the term of that name."""
    return 0.8 * type * value * point + 0.2 * format


@plugin("combiner", "InfiGUI-R1, arXiv 2504.14239")
def infigui_r1(parsed: Floats, type: Floats, value: Floats, point: Floats, sub_goal: Floats) -> Floats:
    """0.1 · parsed + 0.9 · (0.2 · type + 0.8 · param), param = value · point; where it is 0, 0.2 · sub_goal in its place."""
    param = value * point
    accuracy: Floats = 0.2 * type + np.where(param > 0, 0.8 * param, 0.2 * sub_goal)
    return 0.1 * parsed + 0.9 * accuracy
