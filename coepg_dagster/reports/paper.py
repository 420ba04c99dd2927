"""The paper's Tables 1 to 4 and Figures 2, 4, 5, 6 and 7 from rows of results, the paper's own numbers beside them.

Pure: rows of `{experiment, variant, seed, iteration, split, metric, value, ci95}` in (docs/results.json has the same form),
tables and figures out. Values are in per cent. A row with seed None stands for all seeds together; a row with split `average`
for the mean of the test splits. Where they are not given, the plain mean is shown, with an interval only where it is known.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from markupsafe import Markup

from coepg_dagster.evaluation.tables import (
    ANDROID_CONTROL_LEVELS,
    AS_PRINTED,
    MIND2WEB_METRICS,
    MIND2WEB_SPLITS,
    MISSING,
    TABLE_1,
    TABLE_2,
    Table,
    half_up,
)
from coepg_dagster.provenance import Record, Ref
from coepg_dagster.reports.figures import dress, figure, over_k
from coepg_dagster.reports.html import render
from coepg_dagster.steps import GATE_PASSED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL, AVERAGE = "full", "average"
Interval = tuple[float, float]


@dataclass(frozen=True)
class Row:
    """One measured number."""

    experiment: str
    variant: str  # `full` is Co-EPG
    seed: int | None  # None: all seeds together
    iteration: int
    split: str
    metric: str
    value: float
    ci95: Interval | None = None


@dataclass(frozen=True)
class Cell:
    """What a table shows of one quantity: value, 95 % interval where it is known, and over how many seeds."""

    value: float
    ci95: Interval | None
    seeds: int  # 0: not said

    def text(self, digits: int = 1) -> str:
        bounds = self.ci95
        shown = half_up(self.value, digits)
        return shown + (f" [{half_up(bounds[0], digits)}, {half_up(bounds[1], digits)}]" if bounds else "")


def text(cell: Cell | None, digits: int = 1) -> str:
    """A cell as people read it; MISSING for None."""
    return MISSING if cell is None else cell.text(digits)


def rows_of(raw: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Rows as they stand in JSON. Raises ValueError that names the row which cannot be one."""
    rows = []
    for number, entry in enumerate(raw):
        try:
            bounds = entry["ci95"]
            rows.append(Row(**(dict(entry) | {"ci95": tuple(bounds) if bounds else None})))
        except (KeyError, TypeError) as error:
            raise ValueError(f"row {number} of the results is not one: {error}; got {entry}") from None
    return rows


def rows_of_records(experiment: str, variant: str, seed: int, records: Mapping[Ref, Record], train: str) -> list[Row]:
    """The rows of one loop, from the records of its evaluations and of the quality of its data (split `train`)."""
    rows = []
    for ref, record in records.items():
        if ref.iteration is None:
            continue
        of: dict[str, Any] = {"experiment": experiment, "variant": variant, "seed": seed, "iteration": ref.iteration}
        if ref.asset == "evaluation":
            for split, score in record.figures.items():
                for metric, found in score["metrics"].items():
                    if found["macro"] is not None:
                        bounds = found["ci95"]
                        ci95 = (bounds[0], bounds[1]) if bounds else None
                        rows.append(Row(**of, split=split, metric=metric, value=found["macro"], ci95=ci95))
        elif ref.asset == "data_quality":
            for metric, name in QUALITY.items():
                if record.figures.get(name) is not None:
                    rows.append(Row(**of, split=train, metric=metric, value=record.figures[name]))
    return rows


QUALITY: Final = {
    "purity": "purity",
    "purity_frozen": "purity_open",
    "diversity": "diversity",
    "coverage": "coverage",
}
"""Metric of a row → figure of `data_quality`."""


class Results:
    """Rows, looked up by what they measure.

    Args:
        splits: the test splits, in the order of the tables; `average` is over all of them.
    """

    def __init__(self, rows: Iterable[Row], splits: Sequence[str]) -> None:
        self.splits = list(splits)
        self._rows: dict[tuple[str, str, int, str, str], list[Row]] = defaultdict(list)
        for row in rows:
            self._rows[row.experiment, row.variant, row.iteration, row.split, row.metric].append(row)

    def cell(self, experiment: str, variant: str, iteration: int, split: str, metric: str) -> Cell | None:
        """The row over all seeds where there is one, else the mean of the seeds; None where nothing was measured."""
        found = self._rows.get((experiment, variant, iteration, split, metric), [])
        joint = next((row for row in found if row.seed is None), None)
        single = [row for row in found if row.seed is not None]
        if joint is not None:
            return Cell(joint.value, joint.ci95, len(single))
        if found:
            return Cell(fmean(row.value for row in found), found[0].ci95 if len(found) == 1 else None, len(found))
        return self._average(experiment, variant, iteration, metric) if split == AVERAGE else None

    def _average(self, experiment: str, variant: str, iteration: int, metric: str) -> Cell | None:
        cells = [self.cell(experiment, variant, iteration, split, metric) for split in self.splits]
        known = [cell for cell in cells if cell is not None]
        if not known or len(known) < len(cells):
            return None
        value, seeds = fmean(cell.value for cell in known), min(cell.seeds for cell in known)
        if any(cell.ci95 is None or cell.seeds != 1 for cell in known):
            return Cell(value, None, seeds)  # what seeds share is not in the splits' intervals
        # one pair of models: its splits have different episodes, so their errors are independent
        low = math.hypot(*(cell.value - cell.ci95[0] for cell in known if cell.ci95)) / len(known)
        high = math.hypot(*(cell.ci95[1] - cell.value for cell in known if cell.ci95)) / len(known)
        return Cell(value, (value - low, value + high), seeds)

    def iterations(self, experiment: str, variant: str, split: str, metric: str) -> list[int]:
        """The iterations at which something was measured."""
        splits = self.splits if split == AVERAGE else [split]
        keys = {key for key in self._rows if key[:2] == (experiment, variant) and key[4] == metric}
        return sorted({key[2] for key in keys if key[3] in (split, *splits)})

    def seeds(self, experiment: str, variant: str, split: str, metric: str) -> dict[int, list[tuple[int, float]]]:
        """Seed → [(iteration, value)]."""
        found: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for (name, kind, iteration, of, what), rows in sorted(self._rows.items()):
            if (name, kind, of, what) == (experiment, variant, split, metric):
                for row in rows:
                    if row.seed is not None:
                        found[row.seed].append((iteration, row.value))
        return dict(found)

    def series(self, experiment: str, variant: str, split: str, metric: str) -> list[tuple[int, Cell]]:
        """[(iteration, cell)] over the iterations that were measured."""
        found = [
            (k, self.cell(experiment, variant, k, split, metric))
            for k in self.iterations(experiment, variant, split, metric)
        ]
        return [(k, cell) for k, cell in found if cell is not None]


def command_of(experiment: str, variant: str, through: int) -> str:
    """The command that makes the runs of a variant; variants have experiment files of their own."""
    name = experiment if variant == FULL else f"{experiment}_{variant}"
    return f"coepg evolve {name} --through {through}"


def _or_command(cell: Cell | None, experiment: str, variant: str, through: int, digits: int = 1) -> str:
    return text(cell, digits) if cell is not None else f"missing: `{command_of(experiment, variant, through)}`"


def table_1(results: Results, experiment: str, iterations: int, protocol: str) -> Table:
    """Ele.Acc, Op.F1 and Step SR on each test split, for the base pair M_0 and M_1 to M_K.

    On the paper's splits its printed rows come first; on others they are no comparison and stand in `paper_table_1`.
    """
    names = MIND2WEB_SPLITS if set(results.splits) == set(MIND2WEB_SPLITS) else {s: s for s in results.splits}
    header = ["Planner + grounder", "Protocol"]
    header += [f"{names[split]} {metric}" for split in results.splits for metric in MIND2WEB_METRICS.values()]
    printed = _printed_table_1() if names is MIND2WEB_SPLITS else ()
    rows = []
    for k in range(iterations + 1):
        name = f"{experiment} M_{k}" + (" (base pair)" if k == 0 else "")
        cells = [results.cell(experiment, FULL, k, split, m) for split in results.splits for m in MIND2WEB_METRICS]
        if any(cells):
            average = text(results.cell(experiment, FULL, k, AVERAGE, "step_sr"))
            rows.append((name, f"{protocol}, macro", *map(text, cells), average))
        else:
            rows.append((name, f"missing: `{command_of(experiment, FULL, k)}`", *[MISSING] * (len(cells) + 1)))
    title = "Table 1: per cent, with 95 % intervals; Avg is the mean of the Step SR of the test splits"
    return Table(title, (*header, "Avg"), (*printed, *rows))


def _printed_table_1(wanted: Iterable[str] = TABLE_1) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            name,
            AS_PRINTED,
            *(cell or MISSING for split in TABLE_1[name][:3] for cell in split),
            TABLE_1[name][3] or MISSING,
        )
        for name in wanted
    )


def paper_table_1() -> Table:
    """The paper's own rows of Table 1, for orientation beside results of another benchmark."""
    header = [f"{split} {metric}" for split in MIND2WEB_SPLITS.values() for metric in MIND2WEB_METRICS.values()]
    own = [name for name in TABLE_1 if name.startswith("Co-EPG")]
    title = "The paper's Table 1 on Multimodal-Mind2Web: another benchmark, models a thousand times as large"
    return Table(title, ("Planner + grounder", "Protocol", *header, "Avg"), _printed_table_1(own))


def table_2(results: Results, experiment: str, iterations: int, protocol: str) -> Table:
    """AndroidControl step accuracy, high and low, with the paper's rows; results of other benchmarks do not belong here.

    `results` holds the splits `high` and `low` of an experiment that was scored by an android_control protocol.
    """
    rows: list[tuple[str, ...]] = [(name, AS_PRINTED, *printed) for name, printed in TABLE_2.items()]
    for k in range(iterations + 1):
        cells = [results.cell(experiment, FULL, k, level, "step_acc") for level in ANDROID_CONTROL_LEVELS]
        if any(cells):
            known = [cell.value for cell in cells if cell is not None]
            mean = half_up(fmean(known)) if len(known) == len(cells) else MISSING
            rows.append((f"{experiment} M_{k}", protocol, *map(text, cells), mean))
        else:
            rows.append((f"{experiment} M_{k}", f"missing: `{command_of(experiment, FULL, k)}`", *[MISSING] * 3))
    title = "Table 2: AndroidControl, step accuracy, per cent"
    return Table(title, ("Model", "Protocol", *ANDROID_CONTROL_LEVELS.values(), "Avg"), tuple(rows))


TABLE_3: Final = (
    ("end to end, SFT", "end_to_end_sft", MISSING),
    ("end to end, SFT and GRPO", "end_to_end", "50.1 (it does not say which)"),
    ("decoupled, SFT", "before_grpo", "52.6 (third-party note)"),
    ("decoupled, SFT and GRPO", FULL, "53.5"),
)
"""Model, variant, what the paper prints for 7B at M_1: it compares an end-to-end model with a decoupled one after GRPO."""


def table_3(results: Results, experiment: str, iteration: int) -> Table:
    """One model against planner and grounder, with and without GRPO, which the paper mixes."""
    rows = []
    for name, variant, printed in TABLE_3:
        cell = results.cell(experiment, variant, iteration, AVERAGE, "step_sr")
        rows.append((name, _or_command(cell, experiment, variant, iteration), printed))
    title = f"Table 3: Avg Step SR at iteration {iteration}, per cent"
    return Table(title, ("Model", experiment, "paper, 7B, M_1"), tuple(rows))


TABLE_4: Final = (
    ("w/o C-DREM (ϕ_k alone)", "no_cdrem", "56.50"),
    ("w/o Confidence & Prior (uniform)", "uniform", "57.01"),
    ("w/o Confidence (prior only)", "prior_only", "57.67"),
    ("full", FULL, "58.41"),
    ("literal Eq. 5 (log-probability)", "literal", MISSING),
    ("probability, with temperature", "temperature", MISSING),
)
"""Row, variant, what the paper prints for 7B at M_3."""


def table_4(results: Results, experiment: str, iteration: int) -> Table:
    """The ablation of C-DREM, and what the paper does not have: the literal Eq. 5, and confidences with a temperature."""
    rows = []
    for name, variant, printed in TABLE_4:
        cell = results.cell(experiment, variant, iteration, AVERAGE, "step_sr")
        single = results.seeds(experiment, variant, AVERAGE, "step_sr") or _seed_averages(results, experiment, variant)
        seeds = [value for values in single.values() for k, value in values if k == iteration]
        spread = f"{half_up(min(seeds))} to {half_up(max(seeds))}" if len(seeds) > 1 else MISSING
        rows.append((name, _or_command(cell, experiment, variant, iteration, 2), spread, printed))
    title = f"Table 4: ablation of C-DREM, Avg Step SR at iteration {iteration}, per cent"
    return Table(title, ("Reward", experiment, "over seeds", "paper, 7B, M_3"), tuple(rows))


def _seed_averages(results: Results, experiment: str, variant: str) -> dict[int, list[tuple[int, float]]]:
    """Seed → [(iteration, mean of the splits' Step SR)], where a seed has all splits."""
    per_split = [results.seeds(experiment, variant, split, "step_sr") for split in results.splits]
    found: dict[int, list[tuple[int, float]]] = {}
    for seed in sorted(set.intersection(*(set(of) for of in per_split)) if per_split else set()):
        values = [dict(of[seed]) for of in per_split]
        common = set.intersection(*(set(of) for of in values))
        found[seed] = [(k, fmean(of[k] for of in values)) for k in sorted(common)]
    return found


FIGURE_2_PAPER: Final = {"with GRPO": (53.5, 55.0, 58.4), "without GRPO": (52.6, 54.5, 56.5)}
"""The paper's 7B at M_1 to M_3, from a third-party note; of 3B only M_3 with GRPO (51.4) is known."""


def _line(axes: Any, series: Sequence[tuple[int, Cell]], label: str, style: str = "o-", **more: Any) -> None:
    if not series:
        return
    k, values = [k for k, _ in series], [cell.value for _, cell in series]
    bounds = [cell.ci95 or (cell.value, cell.value) for _, cell in series]
    low = [max(0.0, value - b[0]) for value, b in zip(values, bounds, strict=True)]
    high = [max(0.0, b[1] - value) for value, b in zip(values, bounds, strict=True)]
    axes.errorbar(k, values, yerr=[low, high], fmt=style, capsize=3, label=label, **more)


def figure_2(results: Results, experiments: Mapping[str, str]) -> Figure:
    """Avg Step SR over iterations with (solid) and without GRPO (dashed); `experiments`: size → experiment."""
    drawn = figure(9)
    ours, paper = drawn.subplots(1, 2, width_ratios=[2, 1])
    ticks: list[int] = []
    for color, (size, experiment) in enumerate(experiments.items()):
        for variant, style, words in ((FULL, "o-", "with GRPO"), ("no_grpo", "s--", "without GRPO")):
            series = results.series(experiment, variant, AVERAGE, "step_sr")
            ticks += [k for k, _ in series]
            _line(ours, series, f"{size}, {words}", style, color=f"C{color}")
    over_k(ours, ticks, "Avg Step SR, %")
    for (words, values), style in zip(FIGURE_2_PAPER.items(), ("o-", "s--"), strict=True):
        paper.plot([1, 2, 3], values, style, color="0.45", label=words)
    paper.plot([3], [51.4], "^", color="0.7", label="3B, with GRPO")
    paper.set_title("the paper, 7B (third-party note)", fontsize="small")
    over_k(paper, [1, 2, 3], "")
    return drawn


def figure_4(results: Results, experiments: Mapping[float, str], iteration: int) -> Figure:
    """Avg Step SR against labelled steps; `experiments`: per cent of the labelled steps → experiment."""
    drawn = figure()
    axes = drawn.subplots()
    for color, k in enumerate((0, iteration)):
        found = [
            (share, results.cell(name, FULL, k, AVERAGE, "step_sr")) for share, name in sorted(experiments.items())
        ]
        series = [(share, cell) for share, cell in found if cell is not None]
        _line(axes, series, f"M_{k}", "o-" if k else "s--", color=f"C{color}")  # type: ignore[arg-type]
    axes.set_xlabel("labelled steps, % of the training split")
    axes.set_xticks(sorted(experiments))
    dress(axes, "Avg Step SR, %")
    return drawn


def grpo_progress(rollouts: pa.Table, grounder: str, window: int = 4) -> list[tuple[int, float]]:
    """[(optimizer step, per cent)]: sampled plans of a rollout table that pass the gate and that `grounder` finds in the box.

    Step SR on training steps at sampling temperature, by one judge that all rewards share; the mean of the last `window`
    optimizer steps. Steps without a target count as right once the gate passes.
    """
    sums: dict[int, list[bool]] = defaultdict(list)
    for row in rollouts.select(["optimizer_step", "gate", "graders"]).to_pylist():
        votes = [grader["hit"] for grader in row["graders"] if grader["grounder"] == grounder]
        sums[row["optimizer_step"]].append(row["gate"] == GATE_PASSED and (votes[0] if votes else not row["graders"]))
    steps = sorted(sums)
    rates = [100 * fmean(sums[step]) for step in steps]
    return [(step, fmean(rates[max(0, i + 1 - window) : i + 1])) for i, step in enumerate(steps)]


def figure_5(
    curves: Mapping[str, Sequence[Sequence[tuple[int, float]]]], label: str = "success of rollouts, %"
) -> Figure:
    """Success during GRPO: reward → one curve of (optimizer step, per cent) per seed. Lines are means, bands min to max."""
    drawn = figure()
    axes = drawn.subplots()
    for color, (name, seeds) in enumerate(curves.items()):
        values: dict[int, list[float]] = defaultdict(list)
        for curve in seeds:
            for step, value in curve:
                values[step].append(value)
        steps = sorted(step for step, found in values.items() if len(found) == len(seeds))
        axes.plot(
            steps,
            [fmean(values[step]) for step in steps],
            color=f"C{color}",
            label=f"{name} ({len(seeds)} seed{'s' if len(seeds) > 1 else ''})",
        )
        if len(seeds) > 1:
            low, high = [min(values[step]) for step in steps], [max(values[step]) for step in steps]
            axes.fill_between(steps, low, high, color=f"C{color}", alpha=0.18)
    axes.set_xlabel("optimizer step of GRPO")
    dress(axes, label)
    return drawn


def figure_6(results: Results, experiment: str, split: str = "train") -> Figure:
    """Purity, by the current and by the frozen verifiers, and coverage (left), and diversity (right) of D_k over k."""
    drawn = figure(9)
    left, right = drawn.subplots(1, 2)
    ticks: list[int] = []
    styles = {"purity": "o-", "purity_frozen": "s-", "coverage": "^:"}
    words = {"purity": "purity, current verifiers", "purity_frozen": "purity, frozen verifiers"}
    for color, (metric, style) in enumerate(styles.items()):
        series = results.series(experiment, FULL, split, metric)
        ticks += [k for k, _ in series]
        _line(left, series, words.get(metric, metric), style, color=f"C{color}")
    over_k(left, ticks, "%")
    for values in results.seeds(experiment, FULL, split, "diversity").values():
        right.plot(*zip(*values, strict=True), color="0.75", linewidth=1)
    _line(right, results.series(experiment, FULL, split, "diversity"), "diversity", color="C3")
    over_k(right, ticks, "different verified plans per covered step")
    return drawn


FIGURE_6_PAPER: Final = "The paper gives the changes only: purity +8.84, diversity about +4 plans per task."


def figure_7(
    results: Results, experiments: Mapping[str, str], metric: str = "step_sr", label: str = "Step SR, %"
) -> Figure:
    """Step SR of each test split over the iterations; `experiments`: size → experiment. On its splits, the paper's M_3.

    `metric` and `label` stand for Step SR where another protocol has another headline.
    """
    drawn = figure(9, 3.2)
    panels = drawn.subplots(1, len(results.splits), sharey=True, squeeze=False)[0]
    for position, (axes, split) in enumerate(zip(panels, results.splits, strict=True)):
        ticks: list[int] = []
        for color, (size, experiment) in enumerate(experiments.items()):
            series = results.series(experiment, FULL, split, metric)
            ticks += [k for k, _ in series]
            _line(axes, series, size, color=f"C{color}")
        if set(results.splits) == set(MIND2WEB_SPLITS):
            column = list(MIND2WEB_SPLITS).index(split)
            for size, marker in (("3B", "^"), ("7B", "s")):
                value = TABLE_1[f"Co-EPG-Web-{size}"][column]
                axes.plot([3], [float(str(value[2]))], marker, color="0.45", label=f"paper, {size}")  # type: ignore[index]
        axes.set_title(split, fontsize="medium")
        over_k(axes, ticks, label if position == 0 else "")
    return drawn


def html_table(table: Table) -> Markup:
    """A table as HTML, escaped, for a page to hold; text between backticks is code."""
    return Markup(render("table.html", table=table))  # noqa: S704 (the template escapes)
