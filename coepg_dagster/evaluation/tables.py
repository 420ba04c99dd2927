"""Tables of numbers, each with how it was counted; and what the paper prints in its Tables 1 and 2.

Numbers are rounded half up on decimals, as the paper's averages are: 74.05 becomes 74.1, where binary floats give 74.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Final

from coepg_dagster.evaluation.case import ScoringError
from coepg_dagster.markdown import table

MISSING: Final = "–"
PROTOCOL: Final = "Protocol"
"""Head of a column that names the protocol of each row."""
AS_PRINTED: Final = "as printed"
"""Protocol of the paper's rows: Co-EPG states none, and its rows come from papers that count differently."""


def half_up(value: float | Decimal | None, digits: int = 1) -> str:
    """`value` with `digits` decimals, halves up; MISSING for None. A float counts as its shortest decimal."""
    if value is None:
        return MISSING
    exact = value if isinstance(value, Decimal) else Decimal(repr(float(value)))
    return str(exact.quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_UP))


@dataclass(frozen=True)
class Cell:
    """What a table shows of one quantity: its value, the 95 % interval where it is known, and how it was counted."""

    metric: str
    value: float
    ci95: tuple[float, float] | None
    protocol: str

    def text(self, digits: int = 1) -> str:
        """`52.1 [48.4, 55.5]`."""
        ends = "" if self.ci95 is None else f" [{', '.join(half_up(end, digits) for end in self.ci95)}]"
        return half_up(self.value, digits) + ends


@dataclass(frozen=True)
class Table:
    """A titled table of text cells; numbers are per cent."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    protocols: str = ""  # of each metric in it

    def markdown(self) -> str:
        protocols = f"{self.protocols}\n\n" if self.protocols else ""
        return f"**{self.title}**\n\n{protocols}{table(self.header, self.rows)}\n"


def table_of(title: str, header: Sequence[str], rows: Iterable[Sequence[str | Cell | None]], digits: int = 1) -> Table:
    """A table of cells with the protocol of each metric in it, above it or in a column of its own.

    Raises ScoringError where a metric has two.
    """
    rows = [tuple(row) for row in rows]
    text = tuple(tuple(_text(cell, digits) for cell in row) for row in rows)
    protocols = protocols_of(cell for row in rows for cell in row if isinstance(cell, Cell))
    return Table(title, tuple(header), text, "" if PROTOCOL in header else protocols)


def protocols_of(cells: Iterable[Cell]) -> str:
    """The protocol of each metric of cells that stand together. Raises ScoringError where a metric has two."""
    protocols: dict[str, list[str]] = {}
    for cell in cells:
        protocols.setdefault(cell.metric, []).append(cell.protocol)
    metrics: dict[str, list[str]] = {}
    for metric, names in protocols.items():
        metrics.setdefault(one_protocol(metric, names), []).append(metric)
    ways = "; of ".join(f"{', '.join(metric_names)}: {protocol}" for protocol, metric_names in metrics.items())
    return f"Protocol of {ways}." if ways else ""


def _text(cell: str | Cell | None, digits: int) -> str:
    return MISSING if cell is None else cell if isinstance(cell, str) else cell.text(digits)


def one_protocol(metric: str, protocols: Iterable[str]) -> str:
    """The protocol of numbers of one metric that stand together. Raises ScoringError where there are several.

    A bracket after the protocol's name says what single numbers lack; the longest text is returned.
    """
    names = set(protocols)
    ways = sorted({name.partition(" (")[0] for name in names})
    if len(ways) != 1:
        raise ScoringError(
            f"one table holds one protocol: {metric} would be by {' and by '.join(ways)}; score all under one, or "
            "leave the others out"
        )
    return max(names, key=len)


Triple = tuple[str | None, str | None, str | None]
MIND2WEB_SPLITS: Final = {"test_task": "Cross-Task", "test_website": "Cross-Website", "test_domain": "Cross-Domain"}
MIND2WEB_METRICS: Final = {"ele_acc": "Ele.Acc", "op_f1": "Op.F1", "step_sr": "Step SR"}
ANDROID_CONTROL_METRICS: Final = {"type_acc": "type", "grounding_acc": "grounding", "step_acc": "step accuracy"}
METRICS_OF: Final = {"step_sr": MIND2WEB_METRICS, "step_acc": ANDROID_CONTROL_METRICS}
"""Headline of a protocol → its metrics, with their names in tables."""
TABLE_1: Final[Mapping[str, tuple[Triple, Triple, Triple, str | None]]] = {
    "GPT-4 + Choice": (("46.4", "73.4", "40.2"), ("38.0", "67.8", "32.4"), ("42.4", "69.3", "36.8"), "36.5"),
    "GPT-4 + SoM": (("29.6", None, "20.3"), ("20.1", None, "13.9"), ("27.0", None, "23.7"), "19.3"),
    "GPT-4o + SeeClick": (("32.1", None, None), ("33.1", None, None), ("33.5", None, None), None),
    "GPT-4o + UGround-V1-2B": (("48.6", None, None), ("47.6", None, None), ("47.7", None, None), None),
    "GPT-4o + UGround-V1-7B": (("50.7", None, None), ("48.1", None, None), ("48.5", None, None), None),
    "GPT-4V + OmniParser": (("42.4", "87.6", "39.4"), ("41.0", "84.8", "36.5"), ("45.5", "85.7", "42.0"), "39.3"),
    "Explorer-4B": (("53.4", "88.1", "50.7"), ("55.6", "89.5", "51.4"), ("49.8", "88.8", "47.2"), "49.8"),
    "Explorer-7B": (("56.5", "90.3", "53.2"), ("60.5", "90.7", "56.7"), ("55.7", "90.4", "53.0"), "54.3"),
    "AgentTrek-7B": (("60.8", "88.9", "55.7"), ("57.6", "88.1", "51.4"), ("56.0", "87.5", "52.6"), "53.2"),
    "SeeClick-9.6B": (("28.3", "87.0", "25.5"), ("21.4", "80.6", "16.4"), ("23.2", "84.8", "20.8"), "20.9"),
    "AGUVIS-7B": (("64.2", "89.8", "60.4"), ("60.7", "88.1", "54.6"), ("60.4", "89.2", "56.6"), "57.2"),
    "Co-EPG-Web-3B": (("57.7", "88.8", "53.1"), ("56.9", "87.7", "51.1"), ("53.6", "89.6", "50.0"), "51.4"),
    "Co-EPG-Web-7B": (("66.3", "92.4", "61.9"), ("62.3", "91.7", "58.1"), ("59.3", "92.2", "55.3"), "58.4"),
}
"""Printed rows of Table 1: per split Ele.Acc, Op.F1, Step SR; then the mean of the three Step SR."""

ANDROID_CONTROL_LEVELS: Final = {"high": "High", "low": "Low"}
TABLE_2: Final[Mapping[str, tuple[str, str, str]]] = {
    "GPT-4o + SeeClick": ("41.8", "52.8", "47.3"),
    "GPT-4o + UGround-V1-2B": ("50.0", "65.0", "57.5"),
    "GPT-4o + UGround-V1-7B": ("49.8", "66.2", "58.0"),
    "AGUVIS-7B": ("61.5", "80.5", "71.0"),
    "AGUVIS-72B": ("66.4", "84.4", "75.4"),
    "OS-Atlas-4B": ("67.5", "80.6", "74.1"),
    "OS-Atlas-7B": ("71.2", "85.2", "78.2"),
    "GUI-R1-3B": ("46.6", "64.4", "55.5"),
    "GUI-R1-7B": ("51.7", "66.5", "59.1"),
    "UI-R1-3B": ("45.4", "66.4", "55.9"),
    "UI-TARS-2B": ("68.9", "89.3", "79.1"),
    "UI-TARS-7B": ("72.5", "90.8", "81.7"),
    "InfiGUI-R1-3B": ("71.1", "92.1", "81.6"),
    "Co-EPG-Mob-3B": ("73.4", "90.2", "81.8"),
    "Co-EPG-Mob-7B": ("74.2", "92.0", "83.1"),
}
"""Printed rows of Table 2: step accuracy high, low, and their mean."""
