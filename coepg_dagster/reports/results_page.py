"""results.md and its figures, made from the rows and findings of a study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from coepg_dagster.evaluation.tables import METRICS_OF, MISSING, Cell, Table, table_of
from coepg_dagster.reports import paper
from coepg_dagster.reports.figures import save
from coepg_dagster.reports.findings import Finding
from coepg_dagster.reports.html import render
from coepg_dagster.reports.study import BY_JUDGE, DOMAIN, STEP_SR, Side, Study, played_by
from coepg_dagster.results import AVERAGE, FULL, HEADLINES, TRAIN, Cells, tables_of_boards
from coepg_dagster.training.learned import FEW_ROLLOUTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES: Final = "images/results"
"""Folder of the figures, beside the page."""
MECHANISM: Final = {
    "purity_frozen": "frozen purity",
    "purity": "purity",
    "diversity": "diversity",
    "coverage": "coverage",
    "frac_reward_zero_std": "groups without spread",
    "grpo_before": "before GRPO",
    "grpo_after": "after GRPO",
}
"""Metrics of D_k and GRPO that may explain a missed claim: metric → column heading."""


PARTS: Final = (
    ("base planner and ϕ_k: SFT of ϕ alone", FULL, "step_sr_base_planner", "step_sr"),
    ("π_k and the judge: SFT of π alone", "before_grpo", BY_JUDGE, BY_JUDGE),
    ("π'_k and the judge: GRPO too", FULL, BY_JUDGE, BY_JUDGE),
    ("π_k and ϕ_k: SFT of both", "before_grpo", STEP_SR, STEP_SR),
    ("M_k = π'_k and ϕ_k", FULL, STEP_SR, STEP_SR),
    ("the best of several plans of π'_k, and ϕ_k", FULL, "step_sr_attempts", "step_sr_attempts"),
    ("reference plans and ϕ_k", FULL, "step_sr_oracle_plan", "step_sr_oracle_plan"),
)
"""Pair of models, variant, metric, and the metric of the same at k = 0, where all variants are the base pair."""

GAINS: Final = (
    ("SFT of ϕ: reference plans, ϕ_k − ϕ_{k-1}", "step_sr_oracle_plan", (FULL, 0), (FULL, 1)),
    ("SFT of π: the judge, π_k − π'_{k-1}", BY_JUDGE, ("before_grpo", 0), (FULL, 1)),
    ("GRPO: the judge, π'_k − π_k", BY_JUDGE, (FULL, 0), ("before_grpo", 0)),
    ("the whole iteration: the judge, π'_k − π'_{k-1}", BY_JUDGE, (FULL, 0), (FULL, 1)),
    ("the whole iteration: M_k − M_{k-1}", STEP_SR, (FULL, 0), (FULL, 1)),
)
"""What is compared, the measure, and both sides: variant, iterations before k."""

NOTHING: Final = Table("", (), ())


def write_page(
    study: Study,
    findings: Sequence[Finding],
    missing: Sequence[str],
    left_out: Mapping[str, str],
    out: Path,
    *,
    docs: str = "",
    into: str = "",
) -> Path:
    """Writes results.md and its figures into `out`; returns the page's path.

    Args:
        docs: what leads from `out` to the project's docs, "" or a path that ends with a stroke.
        into: the option of `coepg reproduce` that names `out`.
    """
    root, large = study.root, f"{study.root}_large"
    reached = study.reached((root, FULL)) or study.last  # by every seed of the main experiment
    cells = Cells([*study.rows(), *study.joint_rows()], study.splits)
    in_table_1 = {root: study.last}
    if (by_large := study.reached((large, FULL))) is not None:
        in_table_1[large] = by_large
    seen = [
        int(row.value) for run in study.runs for row in run.rows if row.metric == "rollouts" and row.value is not None
    ]
    paper_s = study.metric == STEP_SR  # Mind2Web's, on which the paper's tables and its Figures 2 and 4 are
    page = out / "results.md"
    page.write_text(
        render(
            "results.md",
            embedded=study.embedded,
            docs=docs,
            into=into,
            root=root,
            last=study.last,
            reached=reached,
            claims=_claims(findings),
            judged=_judged(study, cells),
            parts=_parts(study, cells),
            gains=_gains(study),
            domain=_domain(study, cells),
            seen=seen,
            few=[rollouts for rollouts in seen if rollouts < FEW_ROLLOUTS],
            enough=FEW_ROLLOUTS,
            measures=[study.words(measure) for measure in (BY_JUDGE, STEP_SR)],
            table_1=paper.table_1(cells, in_table_1, METRICS_OF[study.metric], study.metric),
            table_3=paper.table_3(cells, root, reached) if paper_s else NOTHING,
            table_4=paper.table_4(cells, root, reached) if paper_s else NOTHING,
            seeds=sorted(study.find(root)),
            figures=_figures(study, cells, reached, out),
            plays=_plays(study),
            boards=tables_of_boards(root, cells, root, _boards(study)),
            cost=_cost(cells, study),
            mechanism=_mechanism(cells, root, study.last),
            missing=_by_experiment(missing),
            left_out=left_out,
            causes=sorted({_cause(why) for run in study.runs for why in run.stale.values()}),
            stale=sum(bool(run.stale) for run in study.runs),
            runs=len(study.runs),
        )
    )
    return page


def _cause(why: str) -> str:
    """The first cause of a staleness, without the names of the artifacts between and of files."""
    ahead, _, cause = why.rpartition(": ")
    return "files are not in the store, such as weights of models" if ahead.endswith("gone from the store") else cause


def _claims(findings: Sequence[Finding]) -> Table:
    rows = []
    for one in findings:
        verdict = f"**{one.verdict}**" if one.verdict == "confirmed" else one.verdict
        rows.append((one.claim, one.test, verdict + (", on stale inputs" if one.stale else ""), one.text))
    return Table("Claims", ("claim", "test", "here", "what was measured"), tuple(rows))


def _judged(study: Study, cells: Cells) -> Table:
    """Step SR of each agent by ϕ_k and by the judge; no row if no store has a judge."""
    rows: list[list[str | Cell | None]] = []
    for experiment, variant in sorted({(run.experiment, run.variant) for run in study.runs}):
        for k in range(study.last + 1):
            if (by_judge := cells.cell(experiment, variant, k, AVERAGE, study.named(BY_JUDGE))) is not None:
                name = experiment if variant == FULL else f"{experiment} {variant}"
                rows.append([f"{name} M_{k}", by_judge, cells.cell(experiment, variant, k, AVERAGE, study.metric)])
    title = f"Mean {HEADLINES[study.metric]} of the test splits by the judge, the primary measure, and by ϕ_k; per cent"
    return table_of(title, ("agent", study.words(BY_JUDGE), study.words(STEP_SR)), rows)


def _validation(study: Study) -> str | None:
    """The split that pairs of models are scored on and claims are not about."""
    measures = {study.named(metric) for _, _, metric, _ in PARTS}
    scored = (row.split for run in study.runs for row in run.rows if row.metric in measures)
    return next((split for split in scored if split not in study.splits), None)


def _parts(study: Study, cells: Cells) -> Table:
    """Step SR of pairs of models on the validation split: which of them gained, and what is left for whom."""
    if (split := _validation(study)) is None:
        return NOTHING
    later, rows = range(1, study.last + 1), list[list[str | Cell | None]]()
    for name, variant, metric, at_0 in PARTS:
        at_0_and_later = [(FULL, 0, at_0), *((variant, k, metric) for k in later)]
        values = [cells.cell(study.root, of, k, split, study.named(measured)) for of, k, measured in at_0_and_later]
        if any(values[1:]):
            rows.append([name, *values])
    title = f"{HEADLINES[study.metric]} on validation of pairs of models, per cent; over the seeds that reached k"
    return table_of(title, ("pair", "k = 0", *(f"k = {k}" for k in later)), rows)


def _gains(study: Study) -> Table:
    """What each step of an iteration adds on the validation split, over the seeds that have both sides."""
    if (split := _validation(study)) is None:
        return NOTHING
    iterations, rows = range(1, study.last + 1), list[list[str]]()
    for name, measure, *sides in GAINS:
        row = []
        for k in iterations:
            one, other = ((study.root, variant, k - back) for variant, back in sides)
            row.append(_signed(study, one, other, split, measure) or MISSING)
        if any(text != MISSING for text in row):
            rows.append([name, *row])
    title = f"What each step of iteration k adds on validation, points of {HEADLINES[study.metric]}; paired by seeds and episodes"
    return Table(title, ("step", *(f"k = {k}" for k in iterations)), tuple(map(tuple, rows)))


def _domain(study: Study, cells: Cells) -> Table:
    """Step SR of M_k in those families of the test splits that the base pair was not pretrained on."""
    iterations, rows = range(study.last + 1), list[list[str | Cell | None]]()
    pairs = [(1, 0), *([(study.last, 1)] if study.last > 1 else [])]
    for split in (split + DOMAIN for split in study.splits):
        for measure in (BY_JUDGE, STEP_SR):
            values = [cells.cell(study.root, FULL, k, split, study.named(measure)) for k in iterations]
            if any(values):
                sides = [[(study.root, FULL, k) for k in pair] for pair in pairs]
                gains = [_signed(study, one, other, split, measure) for one, other in sides]
                rows.append([f"{split}, {study.words(measure)}", *values, *gains])
    title = (
        f"Families that the base pair was never pretrained on: {HEADLINES[study.metric]}, per cent, and gains in points"
    )
    return table_of(
        title, ("split", *(f"M_{k}" for k in iterations), *(f"M_{k} - M_{before}" for k, before in pairs)), rows
    )


def _signed(study: Study, one: Side, other: Side, split: str, measure: str) -> str | None:
    """The difference of two sides on a split, over the seeds that have both; None without such a seed."""
    seeds = study.common_seeds(one, other, split=split, measure=measure)
    return study.difference(one, other, seeds, split, measure).signed if seeds else None


def _figures(study: Study, cells: Cells, last: int, out: Path) -> list[tuple[str, str]]:
    """Draws the figures into files; returns (title, file) of each."""
    root = study.root
    sizes = {size: name for size, name in (("small", root), ("large", f"{root}_large")) if study.find(name)}
    drawn: list[tuple[str, str, Figure]] = []
    if study.metric == STEP_SR:
        shares = {100.0: root, 50.0: f"{root}_labels_50", 25.0: f"{root}_labels_25"}
        there = {share: name for share, name in shares.items() if study.find(name)}
        scored = [{k for k, _ in cells.series(name, FULL, AVERAGE, STEP_SR)} for name in there.values()]
        by_all = max(set.intersection(*scored), default=last)
        drawn += [
            ("figure-2", "Figure 2: with and without GRPO over iterations", paper.figure_2(cells, sizes)),
            (
                "figure-4",
                f"Figure 4: Step SR at k = {by_all} against labelled steps",
                paper.figure_4(cells, there, by_all),
            ),
        ]
    curves = {
        words: [run.curves[last] for run in study.find(root, variant).values() if last in run.curves]
        for variant, words in ((FULL, "C-DREM"), ("no_cdrem", "single grounder"))
    }
    if all(curves.values()):
        title = (
            f"Figure 5: success of GRPO's rollouts on training steps at k = {last}, judged by ϕ_{last} for both rewards (not "
            "Step SR on a test split: see the analysis plan); bands are smallest to largest of the seeds"
        )
        drawn.append(("figure-5", title, paper.figure_5(curves)))
    over_k = paper.figure_7(cells, sizes, study.metric, f"{HEADLINES[study.metric]}, %")
    drawn += [
        ("figure-6", "Figure 6: purity, coverage and diversity of D_k", paper.figure_6(cells, root)),
        ("figure-7", "Figure 7: each test split over the iterations", over_k),
    ]
    (out / FIGURES).mkdir(parents=True, exist_ok=True)
    for file, _, picture in drawn:
        save(picture, out / FIGURES / f"{file}.png")
    return [(title, f"{FIGURES}/{file}.png") for file, title, _ in drawn]


def _boards(study: Study) -> list[str]:
    """The grounding boards on which ϕ_k was tested alone: what was scored by other protocols than the test splits."""
    scored = [row for row in study.rows() if row.metric == "acc_micro"]
    own = {row.protocol for row in scored if row.split in study.splits}
    return sorted({row.split for row in scored if row.protocol not in own})


def _plays(study: Study) -> list[tuple[Table, list[str]]]:
    """Success of live play by iteration and family, a table for each split and protocol; and the commands to play again.

    The last columns are over the seeds of the experiment, where several played.
    """
    played: dict[tuple[str, str], dict[tuple[str, int], Mapping[str, Any]]] = {}
    for run in sorted(study.runs, key=lambda run: run.reference):
        for (k, split), live in sorted(run.live.items()):
            played.setdefault((split, played_by(live)), {})[run.reference, k] = live
    tables, order = [], {split: place for place, split in enumerate(study.splits)}
    for (split, protocol), columns in sorted(
        played.items(), key=lambda item: (order.get(item[0][0], len(order)), item[0])
    ):
        together: dict[str, Cell] = {}
        for k in sorted({k for _, k in columns}):
            rate = study.live_rate(k, split)
            if rate is not None and rate[1] == protocol and rate[0].seeds > 1:
                estimate = rate[0]
                cell = Cell("success_rate_macro", estimate.value, estimate.ci95, protocol)
                together[f"{study.root} M_{k}, {estimate.seeds} seeds"] = cell
        rows: list[list[str | Cell | None]] = [
            [f"**{name}**", *(_rate(live[of], of, protocol) for live in columns.values()), *more]
            for name, of, more in (
                ("all episodes", "success", [None] * len(together)),
                ("mean of families", "macro", list(together.values())),
            )
        ]
        families = sorted({family for live in columns.values() for family in live["families"]})
        for family in families:
            solved = [_solved(live["families"].get(family)) for live in columns.values()]
            rows.append([family, *solved, *([None] * len(together))])
        title = f"{split}: success by the page's own reward, in Chromium; per cent, and episodes solved"
        most = max(of["episodes"] for live in columns.values() for of in live["families"].values())
        commands = [f"coepg play {name}@{k} --split {split} --episodes {most}" for name, k in columns]
        header = ("family", *(f"{name} M_{k}" for name, k in columns), *together)
        tables.append((table_of(title, header, rows), commands))
    return tables


def _rate(of: Mapping[str, Any], average: str, protocol: str) -> Cell:
    metric = "success_rate_macro" if average == "macro" else "success_rate"
    return Cell(metric, of["rate"], tuple(of["ci95"]) if of["ci95"] else None, protocol)


def _solved(rates: Mapping[str, Any] | None) -> str | None:
    return None if rates is None else f"{rates['solved']}/{rates['episodes']}"


def _cost(cells: Cells, study: Study) -> Table:
    """Seconds and model calls of each iteration, per point that it gained."""
    rows = []
    before: float | None = None
    for k in range(study.last + 1):
        score = cells.cell(study.root, FULL, k, AVERAGE, study.metric)
        seconds, calls = (cells.cell(study.root, FULL, k, TRAIN, name) for name in ("seconds", "model_calls"))
        if score is None or seconds is None or calls is None:
            continue
        gained = None if before is None else score.value - before
        per = [f"{cost.value / gained:,.0f}" if gained and gained > 0 else "–" for cost in (seconds, calls)]
        change = "–" if gained is None else f"{gained:+.1f}"
        rows.append((f"{k}", f"{seconds.value:,.0f}", f"{calls.value:,.0f}", change, *per))
        before = score.value
    header = ("k", "seconds", "model calls", "points gained", "seconds per point", "calls per point")
    return Table("Mean over seeds; seconds of all assets of an iteration, one core each", header, tuple(rows))


def _mechanism(cells: Cells, root: str, last: int) -> Table:
    measured = [[cells.cell(root, FULL, k, TRAIN, metric) for metric in MECHANISM] for k in range(last + 1)]
    rows = [(f"{k}", *row) for k, row in enumerate(measured) if any(row)]
    title = (
        "D_k and GRPO over the iterations; per cent, but diversity in plans per step. Before and after: greedy answers on "
        "the same training steps, by ϕ_k alone"
    )
    return table_of(title, ("k", *MECHANISM.values()), rows)


def _by_experiment(commands: Sequence[str]) -> list[str]:
    """The commands of one experiment's seeds as one line."""
    seeds: dict[tuple[str, str], list[str]] = {}
    for one in commands:
        name, _, rest = one.partition("/s")
        seed, _, options = rest.partition(" ")
        seeds.setdefault((name, options), []).append(seed)
    return [f"`{name}/sSEED {options}`, SEED being {', '.join(of)}" for (name, options), of in seeds.items()]
