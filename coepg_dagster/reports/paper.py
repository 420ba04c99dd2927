"""The paper's Tables 1 to 4 and Figures 2, 4, 5, 6 and 7 as views of the results, the paper's own numbers beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from coepg_dagster.evaluation.tables import (
    ANDROID_CONTROL_LEVELS,
    AS_PRINTED,
    MIND2WEB_METRICS,
    MIND2WEB_SPLITS,
    MISSING,
    PROTOCOL,
    TABLE_1,
    TABLE_2,
    Cell,
    Table,
    half_up,
    one_protocol,
    protocols_of,
    table_of,
)
from coepg_dagster.reports.figures import dress, figure, over_k
from coepg_dagster.results import AVERAGE, FULL, TRAIN, Cells
from coepg_dagster.steps import GATE_PASSED

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def command_of(experiment: str, variant: str, through: int) -> str:
    """The command that makes the runs of a variant; variants have experiment files of their own."""
    name = experiment if variant == FULL else f"{experiment}_{variant}"
    return f"coepg evolve {name} --through {through}"


def _or_command(cell: Cell | None, experiment: str, variant: str, through: int) -> Cell | str:
    return cell if cell is not None else f"missing: `{command_of(experiment, variant, through)}`"


def _models(experiment: str, iterations: int) -> list[tuple[int, str]]:
    return [(k, f"{experiment} M_{k}") for k in range(iterations + 1)]


def table_1(
    cells: Cells, through: Mapping[str, int], metrics: Mapping[str, str] = MIND2WEB_METRICS, headline: str = "step_sr"
) -> Table:
    """Ele.Acc, Op.F1 and Step SR on each test split, for the base pair M_0 and M_1 to M_K; `through`: experiment → K.

    On the paper's splits its printed rows come first; on others they are not comparable, see `paper_table_1`. `metrics` and
    `headline`: those of another protocol.
    """
    names = MIND2WEB_SPLITS if set(cells.splits) == set(MIND2WEB_SPLITS) else {s: s for s in cells.splits}
    header = ["Planner + grounder", PROTOCOL]
    header += [f"{names[split]} {metric}" for split in cells.splits for metric in metrics.values()]
    rows: list[Sequence[str | Cell | None]] = list(_printed_table_1() if names is MIND2WEB_SPLITS else ())
    for experiment, iterations in through.items():
        for k, name in _models(experiment, iterations):
            wanted = [(split, metric) for split in cells.splits for metric in metrics]
            values = [cells.cell(experiment, FULL, k, *of) for of in [*wanted, (AVERAGE, headline)]]
            rows.append((name + (" (base pair)" if k == 0 else ""), _protocol(values, experiment, k), *values))
    title = f"Table 1: per cent, with 95 % intervals; Avg is the mean of the {metrics[headline]} of the test splits"
    return table_of(title, (*header, "Avg"), rows)


def _protocol(cells: Sequence[Cell | None], experiment: str, k: int) -> str:
    known = [cell.protocol for cell in cells if cell is not None]
    return one_protocol("a row", known) if known else f"missing: `{command_of(experiment, FULL, k)}`"


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
    names = [name for name in TABLE_1 if name.startswith("Co-EPG")]
    title = "The paper's Table 1 on Multimodal-Mind2Web: another benchmark, models a thousand times as large"
    return Table(title, ("Planner + grounder", PROTOCOL, *header, "Avg"), _printed_table_1(names))


def table_2(cells: Cells, levels: Mapping[str, str], iterations: int) -> Table:
    """AndroidControl step accuracy, high and low, with the paper's rows; `levels`: level → the experiment on it.

    Results of other benchmarks do not belong here.
    """
    rows: list[Sequence[str | Cell | None]] = [(name, AS_PRINTED, *printed) for name, printed in TABLE_2.items()]
    experiment = next(iter(levels.values()))
    for k, name in _models(experiment, iterations):
        known = {level: cells.cell(of, FULL, k, AVERAGE, "step_acc") for level, of in levels.items()}
        by_level = [known.get(level) for level in ANDROID_CONTROL_LEVELS]
        values = [cell.value for cell in by_level if cell is not None]
        mean = half_up(fmean(values)) if len(values) == len(by_level) else MISSING
        rows.append((name, _protocol(by_level, experiment, k), *by_level, mean))
    title = "Table 2: AndroidControl, step accuracy, per cent"
    return table_of(title, ("Model", PROTOCOL, *ANDROID_CONTROL_LEVELS.values(), "Avg"), rows)


TABLE_3: Final = (
    ("end to end, SFT", "end_to_end_sft", MISSING),
    ("end to end, SFT and GRPO", "end_to_end", "50.1 (it does not say which)"),
    ("decoupled, SFT", "before_grpo", "52.6 (third-party note)"),
    ("decoupled, SFT and GRPO", FULL, "53.5"),
)
"""Model, variant, the paper's number for 7B at M_1: it compares an end-to-end model with a decoupled one after GRPO."""


def table_3(cells: Cells, experiment: str, iteration: int) -> Table:
    """One model against planner and grounder, each with and without GRPO; the paper mixes the two."""
    rows = []
    for name, variant, printed in TABLE_3:
        cell = cells.cell(experiment, variant, iteration, AVERAGE, "step_sr")
        rows.append((name, _or_command(cell, experiment, variant, iteration), printed))
    title = f"Table 3: Avg Step SR at iteration {iteration}, per cent"
    return table_of(title, ("Model", experiment, f"paper, 7B, M_1, {AS_PRINTED}"), rows)


TABLE_4: Final = (
    ("w/o C-DREM (ϕ_k alone)", "no_cdrem", "56.50"),
    ("w/o Confidence & Prior (uniform)", "uniform", "57.01"),
    ("w/o Confidence (prior only)", "prior_only", "57.67"),
    ("full", FULL, "58.41"),
    ("literal Eq. 5 (log-probability)", "literal", MISSING),
    ("probability, with temperature", "temperature", MISSING),
)
"""Row, variant, the paper's number for 7B at M_3."""


def table_4(cells: Cells, experiment: str, iteration: int) -> Table:
    """The ablation of C-DREM, and two rows that the paper lacks: the literal Eq. 5, and confidences with a temperature."""
    rows = []
    for name, variant, printed in TABLE_4:
        cell = cells.cell(experiment, variant, iteration, AVERAGE, "step_sr")
        single = cells.seeds(experiment, variant, AVERAGE, "step_sr")
        seeds = [value for values in single.values() for k, value in values if k == iteration]
        spread = f"{half_up(min(seeds))} to {half_up(max(seeds))}" if len(seeds) > 1 else MISSING
        rows.append((name, _or_command(cell, experiment, variant, iteration), spread, printed))
    title = f"Table 4: ablation of C-DREM, Avg Step SR at iteration {iteration}, per cent"
    return table_of(title, ("Reward", experiment, "over seeds", f"paper, 7B, M_3, {AS_PRINTED}"), rows, digits=2)


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


def _over_k(axes: Any, shown: Sequence[tuple[int, Cell]], label: str) -> None:
    """Labels axes that show these cells over k. Raises ScoringError where they are of two protocols."""
    protocols_of(cell for _, cell in shown)
    over_k(axes, [k for k, _ in shown], label)


def figure_2(cells: Cells, experiments: Mapping[str, str]) -> Figure:
    """Avg Step SR over iterations with (solid) and without GRPO (dashed); `experiments`: size → experiment."""
    drawn = figure(9)
    ours, paper = drawn.subplots(1, 2, width_ratios=[2, 1])
    shown: list[tuple[int, Cell]] = []
    for color, (size, experiment) in enumerate(experiments.items()):
        for variant, style, words in ((FULL, "o-", "with GRPO"), ("no_grpo", "s--", "without GRPO")):
            series = cells.series(experiment, variant, AVERAGE, "step_sr")
            shown += series
            _line(ours, series, f"{size}, {words}", style, color=f"C{color}")
    _over_k(ours, shown, "Avg Step SR, %")
    for (words, values), style in zip(FIGURE_2_PAPER.items(), ("o-", "s--"), strict=True):
        paper.plot([1, 2, 3], values, style, color="0.45", label=words)
    paper.plot([3], [51.4], "^", color="0.7", label="3B, with GRPO")
    paper.set_title("the paper, 7B (third-party note)", fontsize="small")
    over_k(paper, [1, 2, 3], "")
    return drawn


def figure_4(cells: Cells, experiments: Mapping[float, str], iteration: int) -> Figure:
    """Avg Step SR against labelled steps; `experiments`: per cent of the labelled steps → experiment."""
    drawn = figure()
    axes = drawn.subplots()
    shown: list[Cell] = []
    for color, k in enumerate((0, iteration)):
        measured = [
            (share, cells.cell(name, FULL, k, AVERAGE, "step_sr")) for share, name in sorted(experiments.items())
        ]
        series = [(share, cell) for share, cell in measured if cell is not None]
        shown += [cell for _, cell in series]
        _line(axes, series, f"M_{k}", "o-" if k else "s--", color=f"C{color}")  # type: ignore[arg-type]
    axes.set_xlabel("labelled steps, % of the training split")
    axes.set_xticks(sorted(experiments))
    protocols_of(shown)
    dress(axes, "Avg Step SR, %")
    return drawn


def grpo_progress(rollouts: pa.Table, grounder: str, window: int = 4) -> list[tuple[int, float]]:
    """[(optimizer step, per cent)]: sampled plans of a rollout table that pass the gate and that `grounder` finds in the box.

    Step SR on training steps at sampling temperature, by the same judge for all rewards; the mean of the last `window`
    optimizer steps. Steps without a target count as right once the gate passes.
    """
    sums: dict[int, list[bool]] = defaultdict(list)
    for row in rollouts.select(["optimizer_step", "gate", "graders"]).to_pylist():
        votes = [grader["hit"] for grader in row["graders"] if grader["grounder"] == grounder]
        sums[row["optimizer_step"]].append(row["gate"] == GATE_PASSED and (votes[0] if votes else not row["graders"]))
    steps = sorted(sums)
    rates = [100 * fmean(sums[step]) for step in steps]
    return [(step, fmean(rates[max(0, i + 1 - window) : i + 1])) for i, step in enumerate(steps)]


def figure_5(curves: Mapping[str, Sequence[Sequence[tuple[int, float]]]]) -> Figure:
    """Success during GRPO: reward → one curve of (optimizer step, per cent) per seed. Lines are means, bands min to max."""
    drawn = figure()
    axes = drawn.subplots()
    for color, (name, seeds) in enumerate(curves.items()):
        values: dict[int, list[float]] = defaultdict(list)
        for curve in seeds:
            for step, value in curve:
                values[step].append(value)
        steps = sorted(step for step, at_step in values.items() if len(at_step) == len(seeds))
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
    dress(axes, "success of rollouts, %")
    return drawn


def figure_6(cells: Cells, experiment: str) -> Figure:
    """Purity, by the current and by the frozen verifiers, and coverage (left), and diversity (right) of D_k over k."""
    drawn = figure(9)
    left, right = drawn.subplots(1, 2)
    shown: list[tuple[int, Cell]] = []
    styles = {"purity": "o-", "purity_frozen": "s-", "coverage": "^:"}
    words = {"purity": "purity, current verifiers", "purity_frozen": "purity, frozen verifiers"}
    for color, (metric, style) in enumerate(styles.items()):
        series = cells.series(experiment, FULL, TRAIN, metric)
        shown += series
        _line(left, series, words.get(metric, metric), style, color=f"C{color}")
    _over_k(left, shown, "%")
    for values in cells.seeds(experiment, FULL, TRAIN, "diversity").values():
        right.plot(*zip(*values, strict=True), color="0.75", linewidth=1)
    diversity = cells.series(experiment, FULL, TRAIN, "diversity")
    _line(right, diversity, "diversity", color="C3")
    _over_k(right, diversity, "different verified plans per covered step")
    return drawn


FIGURE_6_PAPER: Final = "The paper gives the changes only: purity +8.84, diversity about +4 plans per task."


def figure_7(
    cells: Cells, experiments: Mapping[str, str], metric: str = "step_sr", label: str = "Step SR, %"
) -> Figure:
    """Step SR of each test split over the iterations; `experiments`: size → experiment. On its splits, the paper's M_3.

    `metric` and `label`: the headline metric of another protocol.
    """
    drawn = figure(9, 3.2)
    panels = drawn.subplots(1, len(cells.splits), sharey=True, squeeze=False)[0]
    for position, (axes, split) in enumerate(zip(panels, cells.splits, strict=True)):
        shown: list[tuple[int, Cell]] = []
        for color, (size, experiment) in enumerate(experiments.items()):
            series = cells.series(experiment, FULL, split, metric)
            shown += series
            _line(axes, series, size, color=f"C{color}")
        if set(cells.splits) == set(MIND2WEB_SPLITS):
            column = list(MIND2WEB_SPLITS).index(split)
            for size, marker in (("3B", "^"), ("7B", "s")):
                value = TABLE_1[f"Co-EPG-Web-{size}"][column]
                axes.plot([3], [float(str(value[2]))], marker, color="0.45", label=f"paper, {size}")  # type: ignore[index]
        axes.set_title(split, fontsize="medium")
        _over_k(axes, shown, label if position == 0 else "")
    return drawn
