"""The order in which requests that share a screenshot are asked, for engines with a prefix cache."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def leaders_first(shared: Sequence[Hashable], ahead: int) -> list[int]:
    """Positions of requests, ordered so that what a group shares has been computed before the group asks for it.

    With 0 ahead the requests of a group follow one another. That is best for a vLLM whose encoder cache holds what two steps
    take (`vllm_settings`): requests share a prefix within a step, and an image is encoded once. Where that cache is smaller,
    vLLM starts the requests that wait for room in it with the few tokens before their image; what has started does not look
    for its prefix again. There the first request of each group goes `ahead` groups before the others of it: their prefixes
    are found, at the price of encoding each image twice, since the last block of a prefix ends within it.

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
