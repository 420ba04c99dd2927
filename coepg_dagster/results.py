"""Results as one tidy table: a row is one number, with its interval and its protocol. Rates are in per cent.

The table is made from the records of loops. `coepg results`, the evolution report, the study, the paper's tables and figures
and docs/results.json are views of it.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from coepg_dagster.artifacts import BOARDS, BY, PAIRS, THIRD_PARTY
from coepg_dagster.evaluation.change import PROBED, change_text
from coepg_dagster.evaluation.result import LOST
from coepg_dagster.evaluation.tables import Cell, Table, half_up, one_protocol, table_of
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.provenance import ORDER, Asset, Record, Ref, Stale

FULL, AVERAGE, TRAIN = "full", "average", "train"
"""The variant that is Co-EPG; the mean of the test splits; the split of rows about D_k and about training."""
HEADLINES: Final = {"step_sr": "Step SR", "step_acc": "step accuracy", "acc": "accuracy"}
"""Headline metric → its name for people; a protocol has exactly one of them."""
QUALITY: Final = {
    "purity_frozen": "purity_open",  # by the open verifiers, the same in every iteration
    "purity": "purity",  # by the pool of the iteration, which grows
    "diversity": "diversity",
    "coverage": "coverage",
}
"""Metric of a row about D_k, the headline first → figure of `data_quality`, which `pools.quality` defines."""
LEARNED: Final[Mapping[str, tuple[Asset, ...]]] = {
    "sft_planner": ("planner_sft",),
    "sft_grounder": ("grounder",),
    "grpo": ("planner", "end_to_end"),
}
"""Changes by training, on the same steps: key of an iteration → the assets that this training makes."""
LEARNED_AS: Final = {"sft_planner": "SFT of the planner", "sft_grounder": "SFT of the grounder", "grpo": "GRPO"}


class Row(BaseModel):
    """One measured number."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    experiment: str
    variant: str = FULL
    seed: int | None  # None: all seeds together
    k: int
    split: str  # of the benchmark, or TRAIN, or AVERAGE, or a grounding board
    metric: str
    value: float | None  # None: nothing was counted
    low: float | None = None  # 95 % interval
    high: float | None = None
    n: int | None = None  # what was counted
    protocol: str  # how it was counted; numbers of one metric are compared only where this is the same

    def to_json(self) -> dict[str, Any]:
        """The row in docs/results.json."""
        known = [None if number is None else round(number, 3) for number in (self.value, self.low, self.high)]
        place = {"experiment": self.experiment, "variant": self.variant, "seed": self.seed, "iteration": self.k}
        number = {"value": known[0], "ci95": None if self.low is None else known[1:]}
        return {**place, "split": self.split, "metric": self.metric, **number, "n": self.n, "protocol": self.protocol}


def rows_of(experiment: Experiment, seed: int, records: Mapping[Ref, Record], name: str | None = None) -> Iterator[Row]:
    """The rows of one loop from its records; `name`: list it under this name as `full`, not as a variant of its table."""
    table, variant = (experiment.table, experiment.variant) if name is None else (name, FULL)
    for k in sorted({ref.iteration for ref in records if ref.iteration is not None}):
        at = {"experiment": table, "variant": variant, "seed": seed, "k": k}
        if evaluation := records.get(Ref("evaluation", k)):
            for split in (experiment.benchmark.validation, *experiment.benchmark.test):
                if score := evaluation.figures.get(split):
                    yield from _scores(at | {"split": split}, score)
            for pair, splits in evaluation.figures.get(PAIRS, {}).items():
                for split, score in splits.items():
                    yield from _scores(at | {"split": split}, score, f"_{pair}")
            for board, score in evaluation.figures.get(BOARDS, {}).items():
                yield from _scores(at | {"split": board}, score)
        if quality := records.get(Ref("data_quality", k)):
            rule = rule_of(quality.config)
            for metric, figure in QUALITY.items():
                yield Row(**at, split=TRAIN, metric=metric, value=quality.figures.get(figure), protocol=rule)
        for training in LEARNED:
            for split, change in (_learned(records, k, training) or {}).items():
                if change is not None:
                    yield from _changes(at | {"split": split}, training, change)
        planner = records.get(Ref("planner", k))
        if planner and (share := planner.figures.get("frac_reward_zero_std")) is not None:
            yield Row(**at, split=TRAIN, metric="frac_reward_zero_std", value=100 * share, protocol="rollouts")
        seconds = [records[Ref(asset, k)].seconds for asset in experiment.made if Ref(asset, k) in records]
        if seconds:
            yield Row(**at, split=TRAIN, metric="seconds", value=sum(seconds), protocol="the clock")


def _scores(at: Mapping[str, Any], score: Mapping[str, Any], pair: str = "") -> Iterator[Row]:
    """The rows of one split; the average over tasks has the metric's name, that over steps `METRIC_micro`.

    `pair` ends the names if the scores are not the agent's: `step_sr_judge`, `step_sr_judge_micro`.
    """
    notes = score["notes"]
    view = ", oracle view" if "view" in notes else ""
    apart = " (steps lost)" if LOST in notes else ""
    for name, scores in score["metrics"].items():
        for metric, average, ends in ((name + pair, "macro", "ci95"), (f"{name}{pair}_micro", "micro", "ci95_micro")):
            low, high = scores[ends] or (None, None)
            protocol = f"{score['protocol']}, {average}{view}{apart}"
            yield Row(**at, metric=metric, value=scores[average], low=low, high=high, n=scores["n"], protocol=protocol)


def _learned(records: Mapping[Ref, Record], k: int, training: str) -> dict[str, Any] | None:
    """The Change of each split by this training in iteration `k`; None if it was not measured."""
    made = (records[Ref(asset, k)] for asset in LEARNED[training] if Ref(asset, k) in records)
    probe = next((record.figures["probe"] for record in made if record.figures.get("probe")), None)
    return {split: probe[split] for split in PROBED} if probe else None


def _changes(at: Mapping[str, Any], training: str, change: Mapping[str, Any]) -> Iterator[Row]:
    low, high = change["ci95"] or (None, None)
    for part, ends in (("before", {}), ("after", {}), ("difference", {"low": low, "high": high})):
        yield Row(**at, metric=f"{training}_{part}", value=change[part], **ends, protocol="greedy answers")


def _averages(table: Iterable[Row], splits: Sequence[str]) -> list[Row]:
    """For each run and iteration with all splits, the mean of its headline over them, as split `average`.

    The splits have different episodes, so the errors of one pair of models are independent.
    """
    runs: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in table:
        if row.split in splits and row.metric in HEADLINES and row.value is not None and row.seed is not None:
            runs[row.experiment, row.variant, row.seed, row.k, row.metric].append(row)
    averages = []
    for (experiment, variant, seed, k, metric), each in sorted(runs.items()):
        if len(each) == len(splits):
            n, value, ends = len(each), fmean(_value(row) for row in each), dict[str, Any]()
            known = [(_value(row), row.low, row.high) for row in each if row.low is not None and row.high is not None]
            if len(known) == n:
                ends["low"] = value - math.hypot(*(of - low for of, low, _ in known)) / n
                ends["high"] = value + math.hypot(*(high - of for of, _, high in known)) / n
            at = {"experiment": experiment, "variant": variant, "seed": seed, "k": k, "split": AVERAGE}
            protocol = one_protocol(metric, [row.protocol for row in each])
            averages.append(Row(**at, metric=metric, value=value, **ends, protocol=protocol))
    return averages


def _value(row: Row) -> float:
    assert row.value is not None
    return row.value


_AVERAGED: Final = re.compile(r", (?:macro|micro)\b")


def comparable(table: Iterable[Row], experiment: Experiment) -> tuple[list[Row], list[str]]:
    """The rows with the protocol and the rule of `experiment`, and a line for each iteration with other rows, left out.

    A changed protocol or rule makes artifacts stale. Until they are made again, their numbers are not comparable.
    """
    of_boards = {name: board.protocol for name, board in experiment.evaluation.boards.items()}
    rule = rule_of(experiment.regeneration.model_dump())
    kept: list[Row] = []
    left: dict[tuple[Any, ...], str] = {}
    for row in table:
        by, *scored = _AVERAGED.split(row.protocol, maxsplit=1)
        wanted = of_boards.get(row.split, experiment.benchmark.protocol) if scored else rule
        if (scored or row.metric in QUALITY) and by != wanted:
            left.setdefault((row.experiment, row.variant, row.k, by), wanted)
        else:
            kept.append(row)
    lines = [
        f"left out: {of}{'' if variant == FULL else f' {variant}'}, k = {k}: by {by}, not by {wanted}, until it is made again"
        for (of, variant, k, by), wanted in left.items()
    ]
    return kept, lines


def rule_of(config: Mapping[str, Any]) -> str:
    """The rule by which the plans of D_k were verified, as text, from the settings of its pools."""
    return f"rule {config['rule']}" + (f" with k = {config['k']}" if config["rule"] == "k_of_n" else "")


class Cells:
    """The rows of a table by experiment, variant, split and metric.

    Args:
        splits: the test splits, in the order of the tables; `average` is over all of them.
    """

    def __init__(self, table: Iterable[Row], splits: Sequence[str]) -> None:
        self.splits, rows = list(splits), list(table)
        known = [row for row in (*rows, *_averages(rows, splits)) if row.value is not None]
        self._of: dict[tuple[str, ...], dict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
        for row in sorted(known, key=lambda row: (row.k, row.seed is None, row.seed or 0)):
            self._of[row.experiment, row.variant, row.split, row.metric][row.k].append(row)

    def _rows(self, *of: str) -> Mapping[int, list[Row]]:
        return self._of.get(of, {})

    def cell(self, experiment: str, variant: str, k: int, split: str, metric: str) -> Cell | None:
        """The row over all seeds if there is one, else the mean of the seeds; None if nothing was measured."""
        rows = self._rows(experiment, variant, split, metric).get(k, [])
        single, joint = [row for row in rows if row.seed is not None], [row for row in rows if row.seed is None]
        if not rows:
            return None
        shown = (joint or single)[0]
        value = _value(shown) if joint else fmean(_value(row) for row in single)
        alone = joint or len(single) == 1
        ends = (shown.low, shown.high) if alone and shown.low is not None and shown.high is not None else None
        return Cell(metric, value, ends, one_protocol(metric, [row.protocol for row in rows]))

    def series(self, experiment: str, variant: str, split: str, metric: str) -> list[tuple[int, Cell]]:
        """[(iteration, cell)] over the iterations that were measured."""
        of = (experiment, variant, split, metric)
        cells = ((k, self.cell(*of[:2], k, *of[2:])) for k in self._rows(*of))
        return [(k, cell) for k, cell in cells if cell is not None]

    def seeds(self, experiment: str, variant: str, split: str, metric: str) -> dict[int, list[tuple[int, float]]]:
        """Seed → [(iteration, value)]."""
        values: dict[int, list[tuple[int, float]]] = {}
        for k, rows in self._rows(experiment, variant, split, metric).items():
            for row in rows:
                if row.seed is not None:
                    values.setdefault(row.seed, []).append((k, _value(row)))
        return values


def headline(metrics: Mapping[str, Any]) -> str:
    """The headline metric among the `metrics` of a protocol."""
    return next(name for name in HEADLINES if name in metrics)


def results(
    experiment: Experiment, seed: int, records: Mapping[Ref, Record], stale: Mapping[Ref, Stale]
) -> dict[str, Any]:
    """Per iteration: metrics of each test split and of validation, data quality, what training changed, seconds, what is stale.

    What `coepg results --json` prints. Intervals are of the macro value, None stands for what was not computed. Asset names
    have no prefix.
    """
    rows = {(row.k, row.split, row.metric): row for row in rows_of(experiment, seed, records, experiment.name)}

    def value(*of: Any) -> float | None:
        return rows[of].value if of in rows else None

    def split(k: int, name: str) -> dict[str, Any] | None:
        evaluation = records.get(Ref("evaluation", k))
        score = evaluation.figures.get(name) if evaluation else None
        if score is None:
            return None
        figures: dict[str, Any] = {"steps": score["rows"], "protocol": score["protocol"]}
        if LOST in score["notes"]:
            figures[LOST] = score["notes"][LOST]
        for metric in score["metrics"]:
            row = rows[k, name, metric]
            ends = None if row.low is None else [row.low, row.high]
            figures[metric] = {"macro": row.value, "micro": value(k, name, f"{metric}_micro"), "ci95": ends}
        return figures

    def pairs(k: int) -> dict[str, dict[str, Any]]:
        evaluation = records.get(Ref("evaluation", k))
        scores = evaluation.figures.get(PAIRS, {}) if evaluation else {}
        return {
            pair: {name: success(k, name, of, pair) for name, of in splits.items()} for pair, splits in scores.items()
        }

    def success(k: int, name: str, score: Mapping[str, Any], pair: str) -> dict[str, Any]:
        row = rows[k, name, f"{headline(score['metrics'])}_{pair}"]
        return {"macro": row.value, "ci95": None if row.low is None else [row.low, row.high]}

    def boards(k: int) -> dict[str, Any]:
        scores = evaluation.figures.get(BOARDS, {}) if (evaluation := records.get(Ref("evaluation", k))) else {}
        found = {name: board(of) for name, of in scores.items()}
        return {BOARDS: found} if found else {}

    def board(score: Mapping[str, Any]) -> dict[str, Any]:
        lost = {LOST: score["notes"][LOST]} if LOST in score["notes"] else {}
        return {"items": score["rows"], "protocol": score["protocol"], **lost, **score["metrics"]}

    benchmark = experiment.benchmark
    return {
        "experiment": experiment.name,
        "seed": seed,
        "iterations": [
            {
                "iteration": k,
                "splits": {name: split(k, name) for name in benchmark.test},
                "validation": split(k, benchmark.validation),
                **{metric: value(k, TRAIN, metric) for metric in QUALITY},
                **{training: _learned(records, k, training) for training in LEARNED},
                PAIRS: pairs(k),
                **boards(k),
                "seconds": {
                    asset: record.seconds for asset in experiment.made if (record := records.get(Ref(asset, k)))
                },
                "stale": {asset: str(stale[Ref(asset, k)]) for asset in ORDER if Ref(asset, k) in stale},
            }
            for k in sorted(k for k, _, metric in rows if metric == "seconds")
        ],
    }


def overview(experiment: Experiment, seed: int, records: Mapping[Ref, Record]) -> tuple[Table, list[str]]:
    """The overview table with a row per iteration, and a line for each iteration left out for another protocol or rule."""
    name, splits = experiment.name, experiment.benchmark.test
    table, left_out = comparable(rows_of(experiment, seed, records, name), experiment)
    cells, metric = Cells(table, splits), headline_of(table)
    rows: list[list[str | Cell | None]] = []
    for k, seconds in cells.series(name, FULL, TRAIN, "seconds"):
        shown = [cells.cell(name, FULL, k, split, metric) for split in splits]
        shown += [cells.cell(name, FULL, k, TRAIN, measure) for measure in QUALITY]
        rows.append([str(k), *shown, f"{seconds.value / 60:.1f}"])
    heads = [
        "k",
        *(f"{split} {HEADLINES[metric]}" for split in splits),
        *(metric.replace("purity_frozen", "frozen purity") for metric in QUALITY),
        "minutes",
    ]
    return table_of(f"{name}/s{seed}: per cent, with 95 % intervals", heads, rows), left_out


def board_tables(experiment: Experiment, seed: int, records: Mapping[Ref, Record]) -> list[Table]:
    """For each grounding board on which ϕ_k was tested alone, a table with a row per iteration."""
    if not experiment.evaluation.boards:
        return []
    name = experiment.name
    table, _ = comparable(rows_of(experiment, seed, records, name), experiment)
    return tables_of_boards(
        f"{name}/s{seed}", Cells(table, experiment.benchmark.test), name, experiment.evaluation.boards
    )


def tables_of_boards(title: str, cells: Cells, experiment: str, boards: Iterable[str]) -> list[Table]:
    """A table for each of `boards` that was measured, with a row per iteration of the experiment; `title` begins its title."""
    tables = []
    for board in boards:
        rows: list[list[str | Cell | None]] = [
            [str(k), over_items, cells.cell(experiment, FULL, k, board, "acc")]
            for k, over_items in cells.series(experiment, FULL, board, "acc_micro")
        ]
        if rows:
            of = f"{title}: ϕ_k alone on {board}, per cent, with 95 % intervals"
            tables.append(table_of(of, ["k", "over items", "macro"], rows))
    return tables


def board_notes(evaluation: Record) -> list[str]:
    """What ϕ_k does alone on each grounding board, a sentence for each, from the record of an evaluation."""
    notes = []
    for name, score in evaluation.figures.get(BOARDS, {}).items():
        of = score["metrics"]["acc"]
        ends = f" [{', '.join(half_up(end) for end in of['ci95_micro'])}]" if of["ci95_micro"] else ""
        notes.append(
            f"Alone on {name}: {half_up(of['micro'])}{ends} per cent of {of['n']:,} items, by {score['protocol']}."
        )
    return notes


def headline_of(table: Iterable[Row]) -> str:
    """The headline of the protocol by which these rows were scored."""
    metrics = {row.metric for row in table}
    return next((metric for metric in HEADLINES if metric in metrics), "step_sr")


def learned_text(iteration: Mapping[str, Any]) -> list[str]:
    """What training changed in an iteration of `results`, a line for each training."""
    lines = []
    for name, what in LEARNED_AS.items():
        changes = [f"{split} {change_text(change)}" for split, change in (iteration[name] or {}).items() if change]
        if changes:
            lines.append(f"k = {iteration['iteration']}, {what}: {', '.join(changes)}")
    return lines


PAIR_NAMES: Final = {
    "judge": "π'_k with the judge",
    "base_planner": "the base planner with ϕ_k",
    "attempts": "the best of several sampled plans of π'_k with ϕ_k",
    "oracle_plan": "reference plans with ϕ_k",
}


def pairs_text(iteration: Mapping[str, Any]) -> list[str]:
    """The success rates of other pairs than the agent in an iteration of `results`, a line for each pair."""
    lines = []
    for pair, splits in iteration[PAIRS].items():
        rates = [f"{name} {of['macro']:.1f}" for name, of in splits.items() if of["macro"] is not None]
        what = PAIR_NAMES.get(pair) or f"π'_k with ϕ_k, {pair.removeprefix(BY)}"
        lines.append(f"k = {iteration['iteration']}, {what}: {', '.join(rates)}")
    return lines


def probe_lines(records: Mapping[Ref, Record]) -> list[str]:
    """What the probes of `pools.threats` found in each iteration, a line for each verifier and for each agent."""
    lines = []
    for k in sorted({ref.iteration for ref in records if ref.iteration is not None}):
        quality, evaluation = records.get(Ref("data_quality", k)), records.get(Ref("evaluation", k))
        for name, patterns in (quality.figures.get("trigger") or {} if quality else {}).items():
            parts = [f"{pattern} {_rated(rates['beyond'])}" for pattern, rates in patterns.items()]
            lines.append(
                f"k = {k}, points that a patch steals from {name}, beyond chance, per cent: {', '.join(parts)}"
            )
        if evaluation and (found := evaluation.figures.get(THIRD_PARTY)):
            parts = [f"{of} {_rated(found[of])}" for of in ("misled", "by_grounder", "by_planner", "acts_otherwise")]
            lines.append(f"k = {k}, third-party text, per cent of {found['steps']} steps: {', '.join(parts)}")
    return lines


def _rated(rate: Mapping[str, Any]) -> str:
    return f"{rate['rate']:.1f}" + (f" [{rate['ci95'][0]:.1f}, {rate['ci95'][1]:.1f}]" if rate["ci95"] else "")


def short_splits(iterations: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each test split that has fewer steps than the published one; `iterations` as of `results`."""
    lines = (f"{k}: {of[LOST]}" for row in iterations for k, of in row["splits"].items() if of and LOST in of)
    return list(dict.fromkeys(lines))
