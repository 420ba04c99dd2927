"""The order in which requests that share a screenshot are asked, for engines with a prefix cache."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def grouped(shared: Sequence[Hashable], ahead: int = 0) -> list[int]:
    """Positions of requests, those of a group one after another: best for a vLLM with `vllm_settings`.

    There an image is encoded once, and requests share a prefix within a step. A vLLM whose encoder cache holds less than what
    two steps take starts the requests that wait for room in it with the few tokens before their image; what has started does
    not look for its prefix again. For such a server the first request of each group goes `ahead` groups before the others:
    their prefixes are found, at the price of encoding each image twice, since the last block of a prefix ends within it.

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
