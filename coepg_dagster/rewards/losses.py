"""Options of the policy loss that TRL does not have: factors of β, the weight of the KL term, for each rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import numpy as np
from annotated_types import Gt

from coepg_dagster.plugins import find, plugin, settings_of
from coepg_dagster.rewards.answers import Floats

GIVEN: Final = frozenset({"rewards"})


@plugin("policy_loss", "GuirlVG, arXiv 2508.04389")
def guirlvg_kl(rewards: Floats, *, most: Annotated[float, Gt(0)] = 1.0) -> Floats:
    """Adversarial KL factor α = r / most: rollouts with a high reward are drawn more to the reference.

    Args:
        rewards: shape (B,).
        most: the highest possible reward (2 in GuirlVG, 1 by Eq. 9).

    >>> import numpy as np
    >>> guirlvg_kl(np.array([0.0, 0.5, 1.0]))
    array([0. , 0.5, 1. ])
    """
    return rewards / most


def kl_factors(chosen: Mapping[str, Any], rewards: Floats) -> Floats:
    """The factors of an experiment's plug-in {"name": …, settings…}, shape (B,). Raises ValueError if one is not 0 or more."""
    found = find("policy_loss", chosen["name"])
    factors = np.asarray(found.function(rewards, **settings_of(chosen)), dtype=np.float64)
    if factors.shape != rewards.shape or not np.all(factors >= 0):
        raise ValueError(
            f"the policy_loss {found.name!r} must give a factor of 0 or more for each of {len(rewards)} rollouts"
        )
    return factors
