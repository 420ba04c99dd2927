"""The registry of protocols by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from coepg_dagster.evaluation import android_control, mind2web, screenspot
from coepg_dagster.evaluation.case import Protocol, ScoringError
from coepg_dagster.evaluation.result import sop_protocol
from coepg_dagster.markdown import table

SOP_PREFIX: Final = "sop/"

PROTOCOLS: Final[Mapping[str, Protocol]] = {
    protocol.name: protocol
    for protocol in (
        mind2web.MINIWOB_POINT,
        mind2web.SEEACT,
        mind2web.UGROUND,
        mind2web.SEECLICK,
        android_control.UGROUND500,
        android_control.OS_ATLAS,
        android_control.GUI_R1,
        android_control.UI_GENIE,
        android_control.QWEN,
        android_control.STRICT14,
        screenspot.GUI_R1,
        screenspot.UGROUND,
    )
}


FAMILIES: Final = tuple(dict.fromkeys(name.split("/")[0] for name in PROTOCOLS))
"""Benchmarks: the part of a protocol's name before the stroke."""


def find_protocol(name: str) -> Protocol:
    """The protocol of that name, or SOP over it for "sop/NAME"; ScoringError with all names where there is none."""
    base = name.removeprefix(SOP_PREFIX)
    if base not in PROTOCOLS:
        raise ScoringError(
            f"protocol {name!r} is not known; choose from {', '.join(PROTOCOLS)}, or {SOP_PREFIX} before one of them"
        )
    return PROTOCOLS[base] if base == name else sop_protocol(base)


def protocols_markdown() -> str:
    """A table of all protocols: what each counts and where it is defined."""
    head = ("Protocol", "Element or point is right", "Text is right", "Counted", "Its owner prints", "Source")
    rows = [
        (f"`{p.name}`", p.element, p.text, p.denominator, p.averages, p.source)
        for p in (*PROTOCOLS.values(), sop_protocol("PROTOCOL"))
    ]
    return table(head, rows) + "\n"
