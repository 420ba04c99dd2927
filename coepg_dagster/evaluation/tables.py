"""Tables 1 and 2 of the paper: its printed rows with ours beside them, the protocol of each row named.

Numbers are rounded half up on decimals, as the paper's averages are: 74.05 becomes 74.1, where binary floats give 74.0.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Final, Literal

from coepg_dagster.evaluation.case import ScoringError
from coepg_dagster.evaluation.result import LOST, Result
from coepg_dagster.markdown import table

Average = Literal["micro", "macro"]
MISSING: Final = "–"
AS_PRINTED: Final = "as printed"
"""Protocol of the paper's rows: Co-EPG states none, and its rows come from papers that count differently."""


def half_up(value: float | Decimal | None, digits: int = 1) -> str:
    """`value` with `digits` decimals, halves up; MISSING for None. A float counts as its shortest decimal."""
    if value is None:
        return MISSING
    exact = value if isinstance(value, Decimal) else Decimal(repr(float(value)))
    return str(exact.quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_UP))


def mean(values: Sequence[float | str | None]) -> Decimal | None:
    """The exact mean of decimals; None where one is missing."""
    if any(value is None for value in values):
        return None
    return sum((Decimal(str(value)) for value in values), Decimal(0)) / len(values)


@dataclass(frozen=True)
class Table:
    """A titled table of text cells; numbers are per cent."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        return f"**{self.title}**\n\n{table(self.header, self.rows)}\n"

    def csv(self) -> str:
        """Header and rows; a missing number is an empty field."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows(["" if cell == MISSING else cell for cell in row] for row in self.rows)
        return out.getvalue()

    def latex(self) -> str:
        """A `table` environment with plain rules (needs no package)."""
        columns = "ll" + "r" * (len(self.header) - 2)
        body = [" & ".join(_tex(cell) for cell in row) + r" \\" for row in self.rows]
        return "\n".join(
            [
                r"\begin{table}",
                rf"\caption{{{_tex(self.title)}}}",
                rf"\begin{{tabular}}{{{columns}}}",
                r"\hline",
                " & ".join(_tex(cell) for cell in self.header) + r" \\",
                r"\hline",
                *body,
                r"\hline",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )


_TEX: Final = str.maketrans(
    {"\\": r"\textbackslash{}", "–": "--", "≤": r"$\leq$"}
    | {c: "\\" + c for c in "&%$#_{}"}
    | {"~": r"\~{}", "^": r"\^{}"}
)


def _tex(text: str) -> str:
    return text.translate(_TEX)


Triple = tuple[str | None, str | None, str | None]
MIND2WEB_SPLITS: Final = {"test_task": "Cross-Task", "test_website": "Cross-Website", "test_domain": "Cross-Domain"}
MIND2WEB_METRICS: Final = {"ele_acc": "Ele.Acc", "op_f1": "Op.F1", "step_sr": "Step SR"}
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


def _one_protocol(results: Iterable[Result], family: str) -> str:
    """The protocol of all results; ScoringError where they differ, belong elsewhere, or count an oracle grounder."""
    results = list(results)
    names = sorted({result.protocol for result in results})
    if len(names) != 1:
        raise ScoringError(f"one table holds one protocol, not {', '.join(names) or 'none'}; make a table for each")
    if names[0].split("/")[0] != family:
        raise ScoringError(f"{names[0]} results do not belong in the {family} table")
    if any("grounder" in result.notes for result in results):
        raise ScoringError("a result with an oracle grounder does not belong in this table; score with real answers")
    return names[0]


def _value(result: Result | None, metric: str, average: Average) -> float | None:
    return None if result is None else getattr(result.metrics[metric], average)


def _rule(protocol: str | None, average: Average, results: Iterable[Result]) -> str:
    """How a row was counted, with what makes it another number than the owner's."""
    noted = {note for result in results for note in result.notes}
    apart = [said for note, said in (("view", "oracle view"), (LOST, "steps lost")) if note in noted]
    return ", ".join([f"{protocol}, {average}", *apart])


def mind2web_table(ours: Mapping[str, Mapping[str, Result]], *, average: Average = "macro") -> Table:
    """Table 1: `ours` maps a model's name to its results by split (MIND2WEB_SPLITS; a missing split is left blank)."""
    protocol = _one_protocol((r for splits in ours.values() for r in splits.values()), "mind2web") if ours else None
    header = ["Planner + grounder", "Protocol"]
    header += [f"{split} {metric}" for split in MIND2WEB_SPLITS.values() for metric in MIND2WEB_METRICS.values()]
    rows = [
        (name, AS_PRINTED, *(cell or MISSING for split in printed[:3] for cell in split), printed[3] or MISSING)
        for name, printed in TABLE_1.items()
    ]
    for name, splits in ours.items():
        unknown = set(splits) - set(MIND2WEB_SPLITS)
        if unknown:
            raise ScoringError(f"{name}: split {min(unknown)!r} is none of {', '.join(MIND2WEB_SPLITS)}")
        values = [[_value(splits.get(s), m, average) for m in MIND2WEB_METRICS] for s in MIND2WEB_SPLITS]
        cells = [half_up(value) for split in values for value in split]
        rows.append(
            (name, _rule(protocol, average, splits.values()), *cells, half_up(mean([split[2] for split in values])))
        )
    title = "Table 1: Multimodal-Mind2Web, per cent; Avg is the mean of the three Step SR"
    return Table(title, (*header, "Avg"), tuple(rows))


def android_control_table(ours: Mapping[str, Mapping[str, Result]], *, average: Average = "micro") -> Table:
    """Table 2: `ours` maps a model's name to its results by level (`high`, `low`; a missing level is left blank)."""
    results = (r for levels in ours.values() for r in levels.values())
    protocol = _one_protocol(results, "android_control") if ours else None
    rows: list[tuple[str, ...]] = [(name, AS_PRINTED, *printed) for name, printed in TABLE_2.items()]
    for name, levels in ours.items():
        unknown = set(levels) - set(ANDROID_CONTROL_LEVELS)
        if unknown:
            raise ScoringError(f"{name}: level {min(unknown)!r} is none of {', '.join(ANDROID_CONTROL_LEVELS)}")
        values = [_value(levels.get(level), "step_acc", average) for level in ANDROID_CONTROL_LEVELS]
        rows.append((name, _rule(protocol, average, levels.values()), *map(half_up, values), half_up(mean(values))))
    title = "Table 2: AndroidControl, step accuracy, per cent; Avg is the mean of High and Low"
    return Table(title, ("Model", "Protocol", *ANDROID_CONTROL_LEVELS.values(), "Avg"), tuple(rows))


def protocols_table(results: Mapping[str, Result]) -> Table:
    """The same predictions under several protocols, to show how far they are apart; the one table that mixes them."""
    metrics = list(dict.fromkeys(name for result in results.values() for name in result.metrics))
    header = ["Protocol", "Scored", "Skipped"]
    for name in metrics:
        header += [f"{name} micro", f"{name} macro", f"{name} steps"]
    rows = []
    for protocol, result in results.items():
        cells = [protocol, str(result.scored), str(sum(result.skipped.values()))]
        for name in metrics:
            value = result.metrics.get(name)
            if value is None:
                cells += [MISSING] * 3
            else:
                cells += [half_up(value.micro, 2), half_up(value.macro, 2), str(value.n)]
        rows.append(tuple(cells))
    return Table("The same predictions under each protocol, per cent", tuple(header), tuple(rows))


def results_table(results: Mapping[str, Result]) -> Table:
    """Results of one protocol beside each other: micro, macro and the interval of the macro average of each metric."""
    if not results:
        raise ScoringError("there is no result to tabulate")
    first = next(iter(results.values()))
    protocol = _one_protocol(results.values(), first.protocol.split("/")[0])
    header = ["Predictions", "Steps"]
    for metric in first.metrics:
        header += [f"{metric} micro", f"{metric} macro", f"{metric} 95 %"]
    rows = []
    for name, result in results.items():
        cells = [name, str(result.scored)]
        for value in result.metrics.values():
            ends = value.ci95
            cells += [half_up(value.micro, 2), half_up(value.macro, 2)]
            cells.append(MISSING if ends is None else f"{half_up(ends[0])} to {half_up(ends[1])}")
        rows.append(tuple(cells))
    return Table(f"{protocol}, per cent", tuple(header), tuple(rows))
