"""The order in which requests that share a screenshot are asked, for engines with a prefix cache."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final

AHEAD: Final = 64
"""More screenshots than one step of a scheduler takes: 64 small ones fill vLLM's batch of 16,384 tokens."""


def leaders_first(shared: Sequence[Hashable], ahead: int = AHEAD) -> list[int]:
    """Positions of requests, ordered so that what a group shares has been computed before the group asks for it.

    Requests that a scheduler takes in the same step cannot share a prefix: none of them has computed it yet. So the first
    request of each group goes `ahead` groups before the others of it, which follow one another.

    Args:
        shared: what each request shares with those of its group, such as the hash of its screenshot.
    """
    groups: dict[Hashable, list[int]] = {}
    for position, key in enumerate(shared):
        groups.setdefault(key, []).append(position)
    members = list(groups.values())
    order = []
    for place in range(len(members) + ahead):
        if place < len(members):
            order.append(members[place][0])
        if place >= ahead:
            order += members[place - ahead][1:]
    return order
