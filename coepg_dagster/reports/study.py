"""The study: the measurements of every run of an experiment and its ablations, by run and over all seeds.

Pure functions from tables of artifacts to rows (docs/results.json); `reports.findings` compares. What is made of several
seeds is a mean with the interval of `evaluation.statistics.over_seeds`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa

from coepg_dagster.evaluation.case import ScoringError
from coepg_dagster.evaluation.statistics import ByEpisode, BySeed, Estimate, by_seed, over_seeds, weighted_sum
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.experiment.strict import Strict
from coepg_dagster.experiment.training import Environment, GrounderRl, Grpo, Sft
from coepg_dagster.experiment.versions import ONLY_MEASURED
from coepg_dagster.provenance import Asset, Record, Ref
from coepg_dagster.results import AVERAGE, FULL, HEADLINES, QUALITY, TRAIN, Row, headline_of

STEP_SR, BY_JUDGE = "step_sr", "step_sr_judge"
"""π'_k with ϕ_k, which rewarded it; and with the judge, an independent grounder. See `Study.named`."""
MEASURES: Final = {STEP_SR: "by ϕ_k", BY_JUDGE: "by the judge"}
DOMAIN: Final = "/domain"
"""Ends the name of the part of a test split whose families the base pair was not pretrained on."""
Side = tuple[str, str, int]
"""Experiment, variant, iteration."""
READ: Final[tuple[Asset, ...]] = ("evaluation", "dataset", "planner", "grounder")
"""The assets whose numbers are compared, or that play."""
_SECTIONS: Final[Mapping[Asset, tuple[str, type[Strict]]]] = {
    "planner_sft": ("sft", Sft),
    "grounder": ("sft", Sft),
    "grounder_rl": ("grounder_rl", GrounderRl),
    "planner": ("grpo", Grpo),
    "end_to_end": ("grpo", Grpo),
    "candidate_plans": ("regeneration", Regeneration),
    "verdicts": ("regeneration", Regeneration),
    "dataset": ("regeneration", Regeneration),
}
"""Asset → the section of the experiment file that its record holds, as it was used."""


@dataclass(frozen=True)
class MadeFrom:
    """The settings of everything that an artifact was made from, and the data version of each artifact among it."""

    settings: Mapping[str, frozenset[str]]  # `sft.learning_rate` → its values, as JSON
    versions: Mapping[Ref, str]


def made_from(lineage: Sequence[Record]) -> MadeFrom:
    """From the records of an artifact, which comes first, and of all that it was made from.

    A setting that a record of an older code lacks had its default. Models that were not trained have no settings of training.
    `models` is the version of the open models' weights, `benchmark_steps` that of the steps.
    """
    settings: dict[str, set[str]] = {}

    def note(section: str, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            settings.setdefault(f"{section}.{name}", set()).add(json.dumps(value, sort_keys=True))

    for record in lineage:
        trains = record.asset in ("planner_sft", "grounder", "grounder_rl", "planner", "end_to_end")
        if record.asset in _SECTIONS and not (trains and record.iteration == 0):
            section, kind = _SECTIONS[record.asset]
            left_out = ONLY_MEASURED.get(kind, frozenset())
            known = {**kind().model_dump(mode="json"), **record.config}
            if pages := known.get("environment"):
                known["environment"] = {n: v for n, v in pages.items() if n not in ONLY_MEASURED[Environment]}
            note(section, {name: value for name, value in known.items() if name not in left_out})
        elif record.asset == "open_models":
            note("models", record.config)
            settings.setdefault("models", set()).add(record.data_version)
        elif record.asset == "benchmark_steps":
            settings.setdefault("benchmark_steps", set()).add(record.data_version)
    if lineage[0].asset == "evaluation":
        note("benchmark", lineage[0].config)
    return MadeFrom(
        {name: frozenset(values) for name, values in settings.items()},
        {record.ref: record.data_version for record in reversed(lineage)},
    )


@dataclass
class Run:
    """The measurements of one loop (an experiment or ablation with one seed)."""

    experiment: str  # name in the tables
    variant: str
    seed: int
    reference: str  # NAME/sSEED, for commands
    rows: list[Row] = field(default_factory=list)  # from `results`, and from tables of artifacts
    success: dict[tuple[int, str, str], ByEpisode] = field(
        default_factory=dict
    )  # (k, split, measure) → Step SR by episode
    data: dict[int, dict[str, ByEpisode]] = field(default_factory=dict)  # k → figure of `data_quality` → by episode
    curves: dict[int, list[tuple[int, float]]] = field(default_factory=dict)  # k → success of GRPO's rollouts
    stale: dict[Ref, str] = field(default_factory=dict)  # stale artifact → why
    made_from: dict[Ref, MadeFrom] = field(default_factory=dict)  # of `READ`; none: not known
    live: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)  # (k, split) → rates of `coepg play`
    live_stale: dict[tuple[int, str], str] = field(
        default_factory=dict
    )  # (k, split) → why it is not of the current models


def success_by_episode(judged: pa.Table, metric: str) -> ByEpisode:
    """The values of a protocol's table of judged steps, by episode: the macro average is the mean of the episodes' means."""
    values = judged.select(["episode_id", metric]).to_pandas().dropna().groupby("episode_id")[metric].mean()
    return ByEpisode(tuple(values.index), values.to_numpy(), np.ones(len(values)))


def played_by(live: Mapping[str, Any]) -> str:
    """How episodes of `coepg play` were chosen and judged."""
    about, most = live["made_from"], max(family["episodes"] for family in live["families"].values())
    episodes = f"{most} episodes of a family {about['episodes']}"
    return f"the page's own reward, {episodes}, at most {about['step limit']} steps"


def _rows_of_tables(run: Run) -> Iterator[Row]:
    """Rows of GRPO's rollouts and of live play."""
    of: dict[str, Any] = {"experiment": run.experiment, "variant": run.variant, "seed": run.seed}
    for k, curve in sorted(run.curves.items()):
        yield Row(**of, k=k, split=TRAIN, metric="rollout_step_sr", value=curve[-1][1], protocol="ϕ_k, on rollouts")
    for (k, split), live in sorted(run.live.items()):
        of |= {"k": k, "split": split, "protocol": played_by(live)}
        low, high = live["success"]["ci95"] or (None, None)
        yield Row(**of, metric="success_rate", value=live["success"]["rate"], low=low, high=high)
        low, high = live["macro"]["ci95"] or (None, None)
        yield Row(**of, metric="success_rate_macro", value=live["macro"]["rate"], low=low, high=high)
        for family, rates in live["families"].items():
            yield Row(**of, metric=f"success_rate/{family}", value=rates["success"], n=rates["episodes"])


class Study:
    """All runs, looked up by experiment, variant and seed.

    Args:
        splits: the test splits; claims are about their mean.
        iterations: K.
        embedded: the steps are those of the embedded benchmark, whose plan and models the page describes.
    """

    def __init__(
        self, runs: Sequence[Run], root: str, splits: Sequence[str], iterations: int, embedded: bool = True
    ) -> None:
        self.runs, self.root, self.splits, self.last = list(runs), root, tuple(splits), iterations
        self.embedded = embedded
        self._of = {(run.experiment, run.variant, run.seed): run for run in runs}
        # those of grounding boards are of other protocols, and stand in tables of their own
        scored = [(row, run) for run in runs for row in run.rows if row.split in splits and row.metric in HEADLINES]
        self.metric = headline_of(row for row, _ in scored)  # the protocol's name of success: step_sr, or step_acc
        by = {row.protocol.partition(" (")[0]: run.reference for row, run in reversed(scored)}
        if len(by) > 1:
            protocols = ", ".join(f"{name} by {protocol}" for protocol, name in sorted(by.items()))
            raise ScoringError(f"a study compares numbers of one protocol, but {protocols}: score them again by one")

    def named(self, measure: str) -> str:
        """The metric of a measure in rows and tables: `step_acc_judge`, where success is `step_acc`."""
        return self.metric + measure.removeprefix(STEP_SR)

    def words(self, measure: str) -> str:
        """A measure for people: `Step SR by the judge`."""
        return f"{HEADLINES[self.metric]} {MEASURES[measure]}"

    def find(self, experiment: str, variant: str = FULL) -> dict[int, Run]:
        """Seed → run."""
        return {seed: run for (name, kind, seed), run in self._of.items() if (name, kind) == (experiment, variant)}

    def success(self, side: Side, seeds: Sequence[int], split: str | None = None, measure: str = STEP_SR) -> BySeed:
        """Step SR in per cent, of a split, or the mean of the test splits."""
        experiment, variant, k = side
        runs = self.find(experiment, variant)
        splits = self.splits if split is None else (split,)
        each = [by_seed([runs[seed].success[k, name, measure] for seed in seeds]) for name in splits]
        return weighted_sum(*((100 / len(splits), one) for one in each))

    def difference(
        self, one: Side, other: Side, seeds: Sequence[int], split: str | None = None, measure: str = STEP_SR
    ) -> Estimate:
        """`success` of one side minus that of the other, in points; paired by seeds and episodes."""
        sides = ((1.0, one), (-1.0, other))
        return over_seeds(weighted_sum(*((sign, self.success(side, seeds, split, measure)) for sign, side in sides)))

    def seeds_with(self, side: Side, split: str | None = None, measure: str = STEP_SR) -> list[int]:
        """The seeds for which an iteration was scored on a split, or on every test split."""
        experiment, variant, k = side
        runs, splits = self.find(experiment, variant), self.splits if split is None else (split,)
        return sorted(seed for seed, run in runs.items() if all((k, name, measure) in run.success for name in splits))

    def common_seeds(self, *sides: Side, split: str | None = None, measure: str = STEP_SR) -> list[int]:
        """The seeds for which all sides were scored (`seeds_with`)."""
        return sorted(set.intersection(*(set(self.seeds_with(side, split, measure)) for side in sides)))

    def data(self, experiment: str, k: int, seeds: Sequence[int], figure: str) -> BySeed:
        """A figure of D_k."""
        runs = self.find(experiment)
        return by_seed([runs[seed].data[k][figure] for seed in seeds])

    def live(self, iterations: Sequence[int], seeds: Sequence[int], split: str) -> list[BySeed]:
        """Success of live play in each of these iterations, in per cent: the mean over the families that all of them played.

        Empty if there is no such family. The parts are those of families: each has episodes of its own, so that what differs
        between families holds what differs between episodes.
        """
        runs = self.find(self.root)
        played = {(seed, k): runs[seed].live[k, split]["families"] for seed in seeds for k in iterations}
        families = sorted(set.intersection(*map(set, played.values())))
        if not families:
            return []
        rates = {at: np.array([of[family]["success"] for family in families]) for at, of in played.items()}
        ones = np.ones(len(families))
        return [by_seed([ByEpisode(tuple(families), rates[seed, k], ones) for seed in seeds]) for k in iterations]

    def players(self, iterations: Sequence[int], split: str) -> list[int]:
        """The seeds that played a split in all these iterations; of several protocols, those of the one with most seeds."""
        by_protocol: dict[str, list[int]] = {}
        for seed, run in sorted(self.find(self.root).items()):
            protocols = {played_by(run.live[k, split]) if (k, split) in run.live else "" for k in iterations}
            if len(protocols) == 1 and "" not in protocols:
                by_protocol.setdefault(protocols.pop(), []).append(seed)
        return max(by_protocol.values(), key=len, default=[])

    def live_rate(self, k: int, split: str) -> tuple[Estimate, str] | None:
        """Success of M_k over the seeds that played a split by one protocol, mean over families, and that protocol."""
        if not (players := self.players([k], split)):
            return None
        protocol = played_by(self.find(self.root)[players[0]].live[k, split])
        rates = self.live([k], players, split)
        return (over_seeds(rates[0], "families"), protocol) if rates else None

    def reached(self, *sides: tuple[str, str]) -> int | None:
        """The last k > 0 at which all seeds of all sides (experiment, variant) were scored, or as many as at any earlier k."""
        wanted = len({run.seed for run in self.runs if run.experiment == self.root})
        best: tuple[int, int] | None = None
        for k in range(self.last + 1):
            common = set.intersection(*(set(self.seeds_with((*side, k))) for side in sides))
            if common and (best is None or len(common) >= min(wanted, best[1])):
                best = k, len(common)
        return best[0] if best and best[0] > 0 else None

    def rows(self) -> list[Row]:
        """One row per run, iteration, split and metric; intervals are over episodes."""
        rows = []
        for run in sorted(self.runs, key=lambda run: (run.experiment, run.variant, run.seed)):
            for row in (*run.rows, *_rows_of_tables(run)):
                measured = run.data.get(row.k, {}).get(QUALITY.get(row.metric, ""))
                if measured is not None and measured.value is not None:
                    estimate = over_seeds(by_seed([measured]))
                    low, high = estimate.ci95 or (None, None)
                    row = row.model_copy(update={"value": estimate.value, "low": low, "high": high})
                if row.value is not None:
                    rows.append(row)
        return rows

    def joint_rows(self) -> list[Row]:
        """Rows over all seeds together (seed None), including the mean of the test splits; shown in the tables of the page.

        `n` is the number of seeds; with one, the interval is over episodes only.
        """
        rows = []
        protocols = {
            (row.experiment, row.variant, row.k, row.metric): row.protocol for run in self.runs for row in run.rows
        }

        def add(side: Side, split: str, metric: str, estimate: Estimate, protocol: str) -> None:
            low, high = estimate.ci95 or (None, None)
            of = {"experiment": side[0], "variant": side[1], "seed": None, "k": side[2], "split": split}
            number = {"value": estimate.value, "low": low, "high": high, "n": estimate.seeds}
            rows.append(Row(**of, metric=metric, **number, protocol=protocol))

        for experiment, variant in sorted({(run.experiment, run.variant) for run in self.runs}):
            for k in range(self.last + 1):
                side: Side = (experiment, variant, k)
                seeds = self.seeds_with(side)
                places = {place[1:] for seed in seeds for place in self.find(*side[:2])[seed].success if place[0] == k}
                of_tests = [(None, measure) for measure in MEASURES] if seeds else []
                for split, measure in (*of_tests, *sorted(places)):
                    if self.seeds_with(side, split, measure) == seeds:
                        estimate = over_seeds(self.success(side, seeds, split, measure))
                        metric = self.named(measure)
                        add(side, split or AVERAGE, metric, estimate, protocols[*side, metric])
                for metric, figure in QUALITY.items() if variant == FULL else ():
                    if with_data := [seed for seed in seeds if self.has_data(experiment, seed, k, figure)]:
                        estimate = over_seeds(self.data(experiment, k, with_data, figure))
                        add(side, TRAIN, metric, estimate, protocols[*side, metric])
        for k in range(self.last + 1):
            for split in self.splits:
                if (played := self.live_rate(k, split)) is not None:
                    add((self.root, FULL, k), split, "success_rate_macro", *played)
        return rows

    def has_data(self, experiment: str, seed: int, k: int, figure: str) -> bool:
        """Whether a figure of D_k was measured."""
        measured = self.find(experiment)[seed].data.get(k, {}).get(figure)
        return measured is not None and measured.value is not None


def missing_runs(study: Study, wanted: Mapping[str, tuple[str, str, int, range]]) -> list[str]:
    """The commands for missing iterations of `wanted`: reference → (experiment, variant, seed, its iterations)."""
    lacking = []
    for reference, (experiment, variant, seed, needed) in wanted.items():
        run = study.find(experiment, variant).get(seed)
        if not all(run and (k, split, STEP_SR) in run.success for k in needed for split in study.splits):
            since = f" --from {needed[0]}" if needed[0] else ""
            lacking.append(f"coepg evolve {reference}{since} --through {needed[-1]}")
    return lacking
