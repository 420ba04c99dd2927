"""The order of requests that share screenshots, for engines with a prefix cache."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def grouped(shared: Sequence[Hashable], ahead: int = 0) -> list[int]:
    """Positions of requests, those of a group one after another: best for a vLLM with `vllm_settings`.

    With these settings an image is encoded once, and the requests of a scheduler step share its prefix. The encoder cache of
    another vLLM may hold less than the images of two steps. Requests that wait for room in it then start with the few tokens
    before their image, and a request that has started does not look up its prefix again. For such a server the first request
    of each group goes `ahead` groups before the others: they find the prefix, but each image is encoded twice, since the last
    block of a prefix ends within it.

    Args:
        shared: what each request shares with its group, such as the hash of its screenshot; shape (requests,).
        ahead: by how many groups the first request of each group goes before the others.
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
