"""The registry of protocols by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from coepg_dagster.evaluation import android_control, grounding, mind2web, screenspot, step_boards
from coepg_dagster.evaluation.case import Case, Protocol, ScoringError
from coepg_dagster.evaluation.result import sop_protocol
from coepg_dagster.markdown import table
from coepg_dagster.readers import boards

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
        *grounding.BOARDS,
        *step_boards.BOARDS,
    )
}


_WEB: Final = frozenset({"miniwob", "mind2web", "mind2web_blocks", "jsonl"})
READERS: Final[Mapping[str, frozenset[str]]] = {
    "miniwob": _WEB,
    "mind2web": _WEB,
    "android_control": frozenset({"android_control", "jsonl"}),
    "screenspot": frozenset({"screenspot", "jsonl"}),
    "screenspot_v2": frozenset({"screenspot", "jsonl"}),
    **{
        board.name.split("/")[0]: frozenset({"jsonl"})
        for board in (*grounding.BOARDS, *step_boards.BOARDS)
        if board is not grounding.SCREENSPOT_V2
    },
}
"""By family: the readers whose labelled steps have the actions and the labels that its protocols judge."""


def find_protocol(name: str) -> Protocol:
    """The protocol of that name, or SOP over it for "sop/NAME". Raises ScoringError with all names where there is none."""
    base = name.removeprefix(SOP_PREFIX)
    if base not in PROTOCOLS:
        raise ScoringError(
            f"protocol {name!r} is not known; choose from {', '.join(PROTOCOLS)}, or {SOP_PREFIX} before one of them"
        )
    return PROTOCOLS[base] if base == name else sop_protocol(base)


def refuse_protocol(name: str, reader: str) -> None:
    """Raises ScoringError where a protocol cannot judge the steps of a reader; the message lists those that can.

    Steps hold actions, boxes and points. A protocol that needs more scores files of predictions only; so does SOP, for
    which a model must have written its own history.
    """
    choice = [known for known, rule in PROTOCOLS.items() if reader in READERS[known.split("/")[0]] and not rule.needs]
    if name not in choice:
        base = name.removeprefix(SOP_PREFIX)
        why = "is not known"
        if base in PROTOCOLS:
            why = f"does not judge the actions of reader {reader!r}"
            if reader in READERS[base.split("/")[0]]:
                needs = PROTOCOLS[base].needs or "a history that the model wrote itself"
                why = f"needs {needs}, so it scores files of predictions only (`coepg score`)"
        raise ScoringError(f"protocol {name!r} {why}; choose from {', '.join(choice)}")


def refuse_no_board(name: str) -> None:
    """Raises ScoringError where a protocol is not one of a grounding board whose labels can be read; the message lists those."""
    choice = [known for known in PROTOCOLS if boards.board_of(known) is not None]
    if name not in choice:
        raise ScoringError(f"protocol {name!r} is of no grounding board; choose from {', '.join(choice)}")


_ACTIONS: Final[Mapping[str, frozenset[str]]] = {
    "miniwob": frozenset(mind2web.OPERATIONS),
    "mind2web": frozenset(mind2web.OPERATIONS),
    "gui_odyssey": step_boards.ODYSSEY_ACTIONS,
    "aitw": step_boards.AITW_ACTIONS,
    "aitz": step_boards.AITZ_ACTIONS,
    "guiact": step_boards.GUIACT_ACTIONS,
}
"""By family: its labels' actions, where they are not `android_control`'s or a single click."""


def misfit_of(name: str, cases: Sequence[Case]) -> str:
    """Why cases are not of the kind that the protocol of that name judges; empty where they are."""
    family = name.split("/")[0]
    actions = {case.label.type for case in cases}
    if family in _ACTIONS:
        other = actions - _ACTIONS[family]
    elif family == "android_control":
        other = actions & _ACTIONS["mind2web"]
    elif family == "omniact":
        return "" if all("label_actions" in case.facts for case in cases) else "rows without `actions`"
    else:
        return "" if all(case.boxes and case.group for case in cases) else "rows without a box or a group"
    return f"labels with the action {min(other)!r}" if other else ""


def protocols_markdown() -> str:
    """A table of all protocols: what each counts and where it is defined."""
    head = ("Protocol", "Element or point is right", "Text is right", "Counted", "Its owner prints", "Source")
    rows = [
        (f"`{p.name}`", p.element, p.text, p.denominator, p.averages, p.source)
        for p in (*PROTOCOLS.values(), sop_protocol("PROTOCOL"))
    ]
    return table(head, rows) + "\n"
