"""The registry of protocols by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from coepg_dagster.evaluation import mind2web
from coepg_dagster.evaluation.case import Protocol, ScoringError

PROTOCOLS: Final[Mapping[str, Protocol]] = {
    protocol.name: protocol
    for protocol in (
        mind2web.MINIWOB_POINT,
        mind2web.SEEACT,
        mind2web.UGROUND,
        mind2web.SEECLICK,
    )
}


def find_protocol(name: str) -> Protocol:
    """The protocol of that name; ScoringError with all names where there is none."""
    try:
        return PROTOCOLS[name]
    except KeyError:
        raise ScoringError(f"protocol {name!r} is not known; choose from {', '.join(PROTOCOLS)}") from None
