"""The evolution report of a loop: the paper's tables and figures from available results, a case study, and stale artifacts.

One file with its images inside. Other variants, sizes and label shares of the same seed are shown beside the loop. For each
missing result the report names the command that makes it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from coepg_dagster.evaluation.score import score_steps
from coepg_dagster.evaluation.tables import MIND2WEB_SPLITS, Table
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.provenance import Record, Ref
from coepg_dagster.reports import paper
from coepg_dagster.reports.figures import png
from coepg_dagster.reports.html import image_type, render, shown_steps
from coepg_dagster.reports.paper import command_of
from coepg_dagster.results import (
    AVERAGE,
    FULL,
    HEADLINES,
    TRAIN,
    Cells,
    Row,
    board_tables,
    comparable,
    headline,
    headline_of,
    overview,
    probe_lines,
    rows_of,
    short_splits,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # slow to import: only where a figure is drawn

CASES: Final = 4
"""Number of steps in the case study, each of another family."""


@dataclass(frozen=True)
class ShownLoop:
    """One loop whose results the report shows: an experiment at the report's seed."""

    experiment: Experiment
    records: Mapping[Ref, Record]


@dataclass(frozen=True)
class Evolution:
    """The content of a report.

    Args:
        table: from `results.results`, for the loop itself.
        loops: the loop itself, then others of the same seed that were made from its experiment file.
        progress: for Figure 5: reward → curves of `paper.grpo_progress`.
        cases: from `case_study`.
    """

    experiment: Experiment
    seed: int
    table: Mapping[str, Any]
    loops: Sequence[ShownLoop]
    progress: Mapping[str, Sequence[Sequence[tuple[int, float]]]] = field(default_factory=dict)
    cases: Sequence[Mapping[str, Any]] = ()
    crumbs: Sequence[tuple[str, str]] = ()

    def cells(self) -> tuple[Cells, str, list[str]]:
        """(cells of all loops, headline metric, lines on what is left out for another protocol or rule).

        Ablations are listed as variants of the experiment; the loop itself is always `full` under its own name.
        """
        rows: list[Row] = []
        for loop in self.loops:
            name = self.experiment.name if loop.experiment.name == self.experiment.name else None
            rows += rows_of(loop.experiment, self.seed, loop.records, name)
        table, left_out = comparable(rows, self.experiment)
        return Cells(table, self.experiment.benchmark.test), headline_of(table), left_out

    @property
    def last(self) -> int:
        """The newest iteration that was made; 0 where there is none."""
        return max((row["iteration"] for row in self.table["iterations"]), default=0)

    @property
    def sizes(self) -> dict[str, str]:
        """Figures 2 and 7: the experiment, and those with other base models."""
        others = [m.experiment for m in self.loops if m.experiment.variant == FULL and self._other_base(m.experiment)]
        return {e.name: e.name for e in (self.experiment, *others)}

    @property
    def levels(self) -> dict[str, str]:
        """Table 2: level of AndroidControl → the experiment on it."""
        full = [m.experiment for m in self.loops if m.experiment.variant == FULL and not self._other_base(m.experiment)]
        return {e.benchmark.level: e.name for e in (*full, self.experiment)}

    @property
    def labels(self) -> dict[float, str]:
        """Figure 4: per cent of the labelled steps → experiment that differs in nothing else."""
        whole = self.experiment.benchmark.max_train_steps
        by_share: dict[float, str] = {100: self.experiment.name}
        for loop in self.loops:
            limit = loop.experiment.benchmark.max_train_steps
            alike = loop.experiment.variant == FULL and _but_labels(loop.experiment) == _but_labels(self.experiment)
            if whole and limit and limit < whole and alike:
                by_share[100 * limit / whole] = loop.experiment.name
        return by_share

    def _other_base(self, other: Experiment) -> bool:
        return (other.models.base_planner, other.models.base_grounder) != (
            self.experiment.models.base_planner,
            self.experiment.models.base_grounder,
        )


def _but_labels(experiment: Experiment) -> tuple[object, ...]:
    """What decides the results, but the number of labelled steps and of prompts, which come from them."""
    sections = {"benchmark", "models", "agent", "init", "sft", "grounder_rl", "grpo", "regeneration", "evaluation"}
    settings = experiment.model_dump(include=sections)
    settings["benchmark"].pop("max_train_steps")
    settings["grpo"].pop("max_prompts")
    return settings, experiment.made  # who takes D_k has the labels of its parent


@dataclass(frozen=True)
class Section:
    """A table or figure of the page, and the commands for missing parts of it."""

    title: str
    tables: Sequence[Table] = ()
    image: str | None = None  # base64 PNG
    note: str = ""
    missing: Sequence[str] = ()  # commands


def write_report(evolution: Evolution, page: Path) -> str:
    """Writes the page; returns Figures 6 and 7 as Markdown, for the Dagster UI."""
    iterations = evolution.table["iterations"]
    cells, metric, left_out = evolution.cells()
    sections = _sections(evolution, cells, metric)
    page.write_text(
        render(
            "evolution.html",
            evolution=evolution,
            numbers=overview(evolution.experiment, evolution.seed, evolution.loops[0].records)[0],
            sections=sections,
            probes=probe_lines(evolution.loops[0].records),
            short=[*short_splits(iterations), *left_out],
            stale=[f"{asset}[{row['iteration']}]: {why}" for row in iterations for asset, why in row["stale"].items()],
            crumbs=evolution.crumbs,
        ),
        "utf-8",
    )
    shown = [section for section in sections if section.title.startswith(("Figure 7", "Figure 6")) and section.image]
    return "\n\n".join(f"**{s.title}**\n\n![{s.title}](data:image/png;base64,{s.image})" for s in shown)


def _sections(evolution: Evolution, cells: Cells, metric: str) -> list[Section]:
    experiment, last, words = evolution.experiment, evolution.last, HEADLINES[metric]
    name, splits = experiment.name, experiment.benchmark.test
    sections = []
    if experiment.benchmark.protocol.startswith("android_control"):
        sections.append(Section("Table 2", [paper.table_2(cells, evolution.levels, last)]))
    if metric == "step_sr":
        beside = [] if set(splits) == set(MIND2WEB_SPLITS) else [paper.paper_table_1()]
        no_grpo = [] if cells.cell(name, "no_grpo", last, AVERAGE, metric) else [command_of(name, "no_grpo", last)]
        shares = [share for share in (25, 50) if share not in evolution.labels]
        sections += [
            Section("Table 1", [paper.table_1(cells, {name: last}), *beside]),
            Section("Table 3: one model, or planner and grounder", [paper.table_3(cells, name, last)]),
            Section("Table 4: ablation of C-DREM", [paper.table_4(cells, name, last)]),
            _figure("Figure 2: with and without GRPO", paper.figure_2(cells, evolution.sizes), missing=no_grpo),
            _figure(
                "Figure 4: labelled steps",
                paper.figure_4(cells, evolution.labels, last),
                "The paper has 6,862 labelled steps against the 283,500 of its baseline.",
                [command_of(f"{name}_labels_{share}", FULL, last) for share in shares],
            ),
            _figure(
                "Figure 5: success during GRPO",
                paper.figure_5(evolution.progress),
                "Share of sampled plans on training steps that pass the gate and that the iteration's own grounder finds in "
                "the box; mean of four optimizer steps. The paper evaluates checkpoints on a test split.",
                [command_of(name, kind, last) for kind in (FULL, "no_cdrem") if kind not in evolution.progress],
            ),
        ]
    if alone := board_tables(experiment, evolution.seed, evolution.loops[0].records):
        note = "ϕ_k alone: the instruction of an item takes the place of a plan."
        sections.append(Section("Grounding boards", alone, note=note))
    sections += [
        _figure(
            "Figure 6: quality of D_k",
            paper.figure_6(cells, name),
            paper.FIGURE_6_PAPER,
            [] if cells.series(name, FULL, TRAIN, "purity") else [command_of(name, FULL, last)],
        ),
        _figure(
            f"Figure 7: {words} of each test split",
            paper.figure_7(cells, evolution.sizes, metric, f"{words}, %"),
            "The paper's M_3, 7B: 61.9, 58.1 and 55.3 on Cross-Task, Cross-Website and Cross-Domain.",
        ),
    ]
    return sections


def _figure(title: str, drawn: Figure, note: str = "", missing: Sequence[str] = ()) -> Section:
    return Section(title, image=png(drawn), note=note, missing=missing)


class _Inside:
    """Screenshots as data URLs, for a page that is one file."""

    def put(self, image: bytes | pa.Buffer) -> str:
        encoded = memoryview(image)
        kind = image_type(bytes(encoded[:4]))
        return f"data:image/{kind};base64,{base64.b64encode(encoded).decode()}"


def case_study(
    protocol: str, steps: pa.Table, predictions: Mapping[int, pa.Table], splits: Sequence[str], count: int = CASES
) -> list[dict[str, Any]]:
    """Like the paper's Figure 3, by rule: test steps that failed at M_1 and succeed at the newest M_K, K > 1.

    The first such step, by id, of each family, for the first `count` families that have one. Each case has `step` (what is
    shown of it) and `attempts`, one per iteration from M_1 on: k, plan, action, value, point, right. Empty where no step
    qualifies. `predictions`: iteration → table of the evaluation; only steps count that all of them have, since the file's
    limit may have changed between two.
    """
    known = sorted(k for k in predictions if k > 0)
    if len(known) < 2:
        return []
    tests = steps.drop_columns(["screenshot"])  # those stay on the disk
    tests = tests.filter(pc.is_in(tests["split"], pa.array(splits, pa.string())))
    for k in known:
        tests = tests.filter(pc.is_in(tests["step_id"], predictions[k]["step_id"].combine_chunks()))
    if not tests.num_rows:
        return []
    right: dict[int, set[str]] = {}
    for k in known:
        scored = predictions[k].filter(pc.is_in(predictions[k]["step_id"], tests["step_id"]))
        result = score_steps(protocol, tests, scored)
        success = result.steps[headline(result.metrics)].to_pylist()
        right[k] = {s for s, value in zip(result.steps["step_id"].to_pylist(), success, strict=True) if value == 1}
    family = dict(zip(tests["step_id"].to_pylist(), tests["family"].to_pylist(), strict=True))
    chosen: dict[str, str] = {}
    for step_id in sorted(right[known[-1]] - right[known[0]]):
        chosen.setdefault(family[step_id], step_id)
    wanted = [chosen[name] for name in sorted(chosen)][:count]
    shown = {step["id"]: step for step in shown_steps(steps, wanted, _Inside())}
    answers = {k: {row["step_id"]: row for row in _rows(predictions[k], wanted)} for k in known}
    return [
        {
            "step": shown[step_id],
            "attempts": [answers[k][step_id] | {"k": k, "right": step_id in right[k]} for k in known],
        }
        for step_id in wanted
    ]


def _rows(predictions: pa.Table, wanted: Sequence[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = predictions.filter(
        pc.is_in(predictions["step_id"], pa.array(wanted, pa.string()))
    ).to_pylist()
    return rows
