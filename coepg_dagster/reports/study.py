"""The study: rows with the measurements of every run of an experiment and its ablations, and findings on the claims.

Pure functions from tables of artifacts to rows (docs/results.json) and findings. docs/analysis-plan.md fixes the comparisons.
Intervals resample episodes and seeds jointly, with replacement, with the same draws on both sides of a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import variance
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa

from coepg_dagster.evaluation.case import ScoringError
from coepg_dagster.evaluation.statistics import LEVEL, RESAMPLES, ByEpisode, Floats, interval, resampling_weights
from coepg_dagster.reports.paper import command_of
from coepg_dagster.results import AVERAGE, FULL, HEADLINES, QUALITY, TRAIN, Row

Pair = tuple[float, float]
Verdict = Literal["confirmed", "not confirmed", "not testable"]
NOT_WORSE_BY: Final = 2.0
"""Non-inferiority margin, in points."""


@dataclass
class Run:
    """The measurements of one loop (an experiment or ablation with one seed)."""

    experiment: str  # name in the tables
    variant: str
    seed: int
    reference: str  # NAME/sSEED, for commands
    rows: list[Row] = field(default_factory=list)  # from `results`, and from tables of artifacts
    success: dict[tuple[int, str], ByEpisode] = field(default_factory=dict)  # (k, split) → Step SR by episode
    data: dict[int, dict[str, ByEpisode]] = field(default_factory=dict)  # k → figure of `data_quality` → by episode
    curves: dict[int, list[tuple[int, float]]] = field(default_factory=dict)  # k → success of GRPO's rollouts
    stale: list[str] = field(default_factory=list)  # causes of stale artifacts
    live: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)  # (k, split) → rates of `coepg play`


def success_by_episode(judged: pa.Table, metric: str) -> ByEpisode:
    """The values of a protocol's table of judged steps, by episode: the macro average is the mean of the episodes' means."""
    values = judged.select(["episode_id", metric]).to_pandas().dropna().groupby("episode_id")[metric].mean()
    return ByEpisode(tuple(values.index), values.to_numpy(), np.ones(len(values)))


def played_by(live: Mapping[str, Any]) -> str:
    """How episodes of `coepg play` were chosen and judged."""
    about = live["made_from"]
    return f"the page's own reward, episodes {about['episodes']}, at most {about['step limit']} steps"


def _rows_of_tables(run: Run) -> Iterator[Row]:
    """Rows of GRPO's rollouts and of live play."""
    of: dict[str, Any] = {"experiment": run.experiment, "variant": run.variant, "seed": run.seed}
    for k, curve in sorted(run.curves.items()):
        yield Row(**of, k=k, split=TRAIN, metric="rollout_step_sr", value=curve[-1][1], protocol="ϕ_k, on rollouts")
    for (k, split), live in sorted(run.live.items()):
        of |= {"k": k, "split": split, "protocol": played_by(live)}
        low, high = live["success"]["ci95"] or (None, None)
        yield Row(**of, metric="success_rate", value=live["success"]["rate"], low=low, high=high)
        for family, rates in live["families"].items():
            yield Row(**of, metric=f"success_rate/{family}", value=rates["success"], n=rates["episodes"])


class Draws:
    """Bootstrap resamples of episodes and seeds. Measures over the same episodes and seeds share their draws."""

    def __init__(self, resamples: int = RESAMPLES) -> None:
        self._resamples = resamples
        self._episodes: dict[tuple[str, ...], Floats] = {}

    def episodes(self, names: tuple[str, ...]) -> Floats:
        """(1 + resamples, episodes): how often each episode is drawn; the first row is the sample itself."""
        if names not in self._episodes:
            rng = np.random.default_rng(len(self._episodes))
            drawn = resampling_weights(len(names), self._resamples, rng)
            self._episodes[names] = np.concatenate([np.ones((1, len(names))), drawn])
        return self._episodes[names]

    def seeds(self, n: int) -> Floats:
        """(1 + resamples, n): the weight of each seed; each row sums to 1."""
        rng = np.random.default_rng(1_000_003)
        drawn = resampling_weights(n, self._resamples, rng) / n
        return np.concatenate([np.full((1, n), 1 / n), drawn])

    def means(self, measured: Sequence[ByEpisode]) -> Floats:
        """(1 + resamples, runs): the mean of each run's measure, in each draw of episodes."""
        columns = []
        for one in measured:
            drawn = self.episodes(one.episodes)
            columns.append((drawn @ one.above) / (drawn @ one.below))
        return np.stack(columns, axis=1)

    def over_seeds(self, values: Floats) -> Floats:
        """(1 + resamples,): the mean over drawn seeds of (1 + resamples, seeds)."""
        return np.asarray((values * self.seeds(values.shape[1])).sum(axis=1))


def estimate(samples: Floats) -> tuple[float, Pair]:
    """(value, 95 % interval) of the first entry and its resamples."""
    low, high = interval(samples[1:, None])[:, 0]
    return float(samples[0]), (float(low), float(high))


class Study:
    """All runs, looked up by experiment, variant and seed.

    Args:
        splits: the test splits; claims are about their mean.
        iterations: K.
    """

    def __init__(self, runs: Sequence[Run], root: str, splits: Sequence[str], iterations: int) -> None:
        self.runs, self.root, self.splits, self.last = list(runs), root, tuple(splits), iterations
        self._of = {(run.experiment, run.variant, run.seed): run for run in runs}
        self.draws = Draws()
        scored = [(row.protocol.partition(" (")[0], run) for run in runs for row in run.rows if row.metric in HEADLINES]
        by = {protocol: run.reference for protocol, run in reversed(scored)}
        if len(by) > 1:
            protocols = ", ".join(f"{name} by {protocol}" for protocol, name in sorted(by.items()))
            raise ScoringError(f"a study compares numbers of one protocol, but {protocols}: score them again by one")

    def find(self, experiment: str, variant: str = FULL) -> dict[int, Run]:
        """Seed → run."""
        return {seed: run for (name, kind, seed), run in self._of.items() if (name, kind) == (experiment, variant)}

    def success(self, experiment: str, variant: str, k: int, seeds: Sequence[int], split: str | None = None) -> Floats:
        """(1 + resamples, seeds): Step SR in per cent, of a split, or the mean of the test splits."""
        runs = self.find(experiment, variant)
        splits = self.splits if split is None else (split,)
        each = [self.draws.means([runs[seed].success[k, name] for seed in seeds]) for name in splits]
        return np.asarray(100 * np.mean(each, axis=0))

    def data(self, experiment: str, k: int, seeds: Sequence[int], measure: str) -> Floats:
        """(1 + resamples, seeds): a measure of D_k."""
        runs = self.find(experiment)
        return self.draws.means([runs[seed].data[k][measure] for seed in seeds])

    def live(self, iterations: tuple[int, int], seeds: Sequence[int], split: str) -> Floats:
        """(1 + resamples, seeds): gain in success of live play, in points, from the first iteration to the second.

        Mean over the families that both played; the resamples draw families.
        """
        runs, gains = self.find(self.root), []
        for seed in seeds:
            one, other = (runs[seed].live[k, split]["families"] for k in iterations)
            families = tuple(sorted(set(one) & set(other)))
            gain = np.array([other[name]["success"] - one[name]["success"] for name in families])
            gains.append(ByEpisode(families, gain, np.ones(len(families))))
        return self.draws.means(gains)

    def seeds_with(self, experiment: str, variant: str, k: int) -> list[int]:
        """The seeds for which an iteration was scored on every test split."""
        runs = self.find(experiment, variant)
        return sorted(seed for seed, run in runs.items() if all((k, split) in run.success for split in self.splits))

    def reached(self, *sides: tuple[str, str]) -> int | None:
        """The last k > 0 at which all seeds of all sides (experiment, variant) were scored, or as many as at any earlier k."""
        wanted = len({run.seed for run in self.runs if run.experiment == self.root})
        best: tuple[int, int] | None = None
        for k in range(self.last + 1):
            common = set.intersection(*(set(self.seeds_with(*side, k)) for side in sides))
            if common and (best is None or len(common) >= min(wanted, best[1])):
                best = k, len(common)
        return best[0] if best and best[0] > 0 else None

    def rows(self) -> list[Row]:
        """One row per run, iteration, split and metric; intervals are over episodes."""
        rows = []
        for run in sorted(self.runs, key=lambda run: (run.experiment, run.variant, run.seed)):
            for row in (*run.rows, *_rows_of_tables(run)):
                measured = run.data.get(row.k, {}).get(QUALITY.get(row.metric, ""))
                if measured is not None:
                    value, (low, high) = estimate(self.draws.means([measured])[:, 0])
                    row = row.model_copy(update={"value": value, "low": low, "high": high})
                if row.value is not None:
                    rows.append(row)
        return rows

    def joint_rows(self) -> list[Row]:
        """Rows over all seeds together (seed None), including the mean of the test splits; shown in the tables of the page."""
        rows = []
        protocols = {
            (row.experiment, row.variant, row.k, row.metric): row.protocol for run in self.runs for row in run.rows
        }
        for experiment, variant in sorted({(run.experiment, run.variant) for run in self.runs}):
            for k in range(self.last + 1):
                seeds = self.seeds_with(experiment, variant, k)
                samples: dict[tuple[str, str], Floats] = {}
                for split in (None, *self.splits) if seeds else ():
                    samples[split or AVERAGE, "step_sr"] = self.success(experiment, variant, k, seeds, split)
                for metric, figure in QUALITY.items() if variant == FULL else ():
                    if with_data := [
                        seed for seed in seeds if figure in self._of[experiment, variant, seed].data.get(k, {})
                    ]:
                        samples[TRAIN, metric] = self.data(experiment, k, with_data, figure)
                for (split, metric), drawn in samples.items():
                    value, (low, high) = estimate(self.draws.over_seeds(drawn))
                    of = {"experiment": experiment, "variant": variant, "seed": None, "k": k, "split": split}
                    protocol = protocols[experiment, variant, k, metric]
                    rows.append(Row(**of, metric=metric, value=value, low=low, high=high, protocol=protocol))
        return rows


@dataclass(frozen=True)
class Finding:
    """The verdict on one claim, with the measured difference."""

    claim: str
    verdict: Verdict
    value: float | None
    ci95: Pair | None
    text: str

    def to_json(self) -> dict[str, Any]:
        return {
            "claim": self.claim,
            "verdict": self.verdict,
            "value": None if self.value is None else round(self.value, 3),
            "ci95": None if self.ci95 is None else [round(end, 3) for end in self.ci95],
            "text": self.text,
        }


Side = tuple[str, str, int]
"""Experiment, variant, iteration."""


def findings(study: Study) -> list[Finding]:
    """A finding for every claim of docs/analysis-plan.md, in its order.

    Comparisons planned at k = K use the last iteration that both sides reached; the text names it.
    """
    root, last = study.root, study.last

    def against(claim: str, one: tuple[str, str], other: tuple[str, str], words: str, margin: float = 0.0) -> Finding:
        k = study.reached(one, other)
        if k is None:
            lacking = [(*side, last) for side in (one, other) if study.reached(side) is None]
            return _missing(claim, lacking)
        planned = "" if k == last else f"; at k = {k}, planned at k = {last}"
        return _difference(study, claim, (*one, k), (*other, k), words + planned, margin)

    full = (root, FULL)
    control = (f"{root}_no_gap", FULL)
    return [
        _difference(study, f"M_{last} - M_1", (*full, last), (*full, 1), "the aim is 5 points", 0.0),
        _difference(study, "M_1 - M_0", (*full, 1), (*full, 0), "what the first iteration adds to the base pair", 0.0),
        against("full - no GRPO", full, (root, "no_grpo"), "both loops over whole iterations"),
        against("GRPO within an iteration", full, (root, "before_grpo"), "from the same π_k and ϕ_k"),
        against("full - single grounder", full, (root, "no_cdrem"), "not worse, from the same π_k", NOT_WORSE_BY),
        _steadier(study),
        against("full - uniform", full, (root, "uniform"), "from the same π_k"),
        against("full - prior only", full, (root, "prior_only"), "from the same π_k"),
        against("probability - literal", full, (root, "literal"), "from the same π_k"),
        against("temperature - full", (root, "temperature"), full, "τ = 0.25, from the same π_k"),
        against("decoupled - end-to-end, with GRPO", full, (root, "end_to_end"), "from the same D_{k-1}"),
        against(
            "decoupled - end-to-end, without GRPO",
            (root, "before_grpo"),
            (root, "end_to_end_sft"),
            "from the same D_{k-1}",
        ),
        *(_rise(study, measure) for measure in ("purity", "purity_frozen", "diversity")),
        against("all labels - a quarter", full, (f"{root}_labels_25", FULL), "the loop with fewer labels"),
        against("all labels - half", full, (f"{root}_labels_50", FULL), "the loop with fewer labels"),
        against("larger - smaller", (f"{root}_large", FULL), full, "a base pair of about five times the size"),
        _gain_of_the_control(study, control),
        _due_to_the_gap(study, control),
        *(_live(study, k, before) for k, before in ((last, 1), (1, 0))),
    ]


def _gain_of_the_control(study: Study, control: tuple[str, str]) -> Finding:
    claim, k = "gain without the made gap", study.reached(control)
    if k is None:
        return _missing(claim, [(*control, study.last)])
    words = f"M_{k} - M_0 of the control, whose base grounder knows the planners' wordings"
    return _difference(study, claim, (*control, k), (*control, 0), words, 0.0)


def _difference(study: Study, claim: str, one: Side, other: Side, words: str, margin: float) -> Finding:
    seeds = sorted(set(study.seeds_with(*one)) & set(study.seeds_with(*other)))
    if not seeds:
        return _missing(claim, [side for side in (one, other) if not study.seeds_with(*side)])
    samples = study.draws.over_seeds(study.success(*one, seeds) - study.success(*other, seeds))
    return _judged(claim, samples, words, "points of mean Step SR", len(seeds), margin)


def _judged(claim: str, samples: Floats, words: str, unit: str, seeds: int, margin: float = 0.0) -> Finding:
    value, ci95 = estimate(samples)
    verdict: Verdict = "confirmed" if ci95[0] > -margin else "not confirmed"
    opposite = "; the interval lies below 0: the opposite" if ci95[1] < 0 else ""
    drawn = f"{seeds} seed{'s' if seeds > 1 else ''}"
    text = f"{value:+.1f} [{ci95[0]:+.1f}, {ci95[1]:+.1f}] {unit}, {drawn}; {words}{opposite}."
    return Finding(claim, verdict, value, ci95, text)


def _missing(claim: str, sides: Sequence[Side]) -> Finding:
    commands = ", ".join(f"`{command_of(*side)}`" for side in sides)
    return Finding(claim, "not testable", None, None, f"Not run here; {commands or 'no common seed'} makes it.")


def _rise(study: Study, measure: str) -> Finding:
    claim = f"{'frozen purity' if measure == 'purity_frozen' else measure} D_{study.last} - D_0"
    runs, figure = study.find(study.root), QUALITY[measure]

    def there(k: int) -> bool:
        return bool(runs) and all(figure in run.data.get(i, {}) for run in runs.values() for i in (0, k))

    made = [k for k in range(1, study.last + 1) if there(k)]
    if not made:
        return _missing(claim, [(study.root, FULL, study.last)])
    k, seeds = made[-1], sorted(runs)
    change = study.data(study.root, k, seeds, figure) - study.data(study.root, 0, seeds, figure)
    planned = "" if k == study.last else f"; D_{k} instead of D_{study.last}"
    words = {
        "purity": "by the verifiers of the current pool, which change",
        "purity_frozen": "by the open verifiers alone, which stay the same",
        "diversity": "different verified plans per covered step",
    }
    unit = "plans" if measure == "diversity" else "points"
    return _judged(claim, study.draws.over_seeds(change), words[measure] + planned, unit, len(seeds))


def _steadier(study: Study) -> Finding:
    """The ratio of variances over seeds, single grounder to ensemble, with its F interval."""
    from scipy.stats import f  # slow to import

    claim = "steadier over seeds"
    k = study.reached((study.root, FULL), (study.root, "no_cdrem")) or study.last
    sides: list[Side] = [(study.root, FULL, k), (study.root, "no_cdrem", k)]
    seeds = sorted(set(study.seeds_with(*sides[0])) & set(study.seeds_with(*sides[1])))
    if len(seeds) < 2:
        return _missing(claim, [side for side in sides if len(study.seeds_with(*side)) < 2])
    ensemble, single = (study.success(*side, seeds)[0] for side in sides)
    spread = [math.sqrt(variance(map(float, values))) for values in (ensemble, single)]
    if not all(spread):
        return Finding(claim, "not testable", None, None, "The seeds do not differ at all.")
    ratio = (spread[1] / spread[0]) ** 2
    n = len(seeds) - 1
    bound = float(f.ppf((1 + LEVEL) / 2, n, n))
    ci95 = ratio / bound, ratio * bound
    wide = ci95[1] / ci95[0] > 100
    verdict: Verdict = "confirmed" if ci95[0] > 1 else "not testable" if wide else "not confirmed"
    text = (
        f"Standard deviation over {len(seeds)} seeds: {spread[1]:.2f} with a single grounder, {spread[0]:.2f} with the ensemble; "
        f"ratio of variances {ratio:.2f} [{ci95[0]:.2f}, {ci95[1]:.1f}], at k = {k}."
    )
    return Finding(claim, verdict, ratio, ci95, text)


def _due_to_the_gap(study: Study, control: tuple[str, str]) -> Finding:
    claim, k = "gain due to the made gap", study.reached((study.root, FULL), control)
    if k is None:
        return _missing(claim, [(*side, study.last) for side in ((study.root, FULL), control)])
    seeds = sorted(set(study.seeds_with(study.root, FULL, k)) & set(study.seeds_with(*control, k)))
    gains = [
        study.success(name, FULL, k, seeds) - study.success(name, FULL, 0, seeds) for name in (study.root, control[0])
    ]
    words = f"gain from M_0 to M_{k} of {study.root} less that of the control"
    return _judged(claim, study.draws.over_seeds(gains[0] - gains[1]), words, "points of mean Step SR", len(seeds))


def _live(study: Study, k: int, before: int) -> Finding:
    claim = f"live play M_{k} - M_{before}"
    runs = study.find(study.root)
    for split in study.splits:
        both = {seed: [run.live.get((i, split)) for i in (before, k)] for seed, run in runs.items()}
        seeds = sorted(seed for seed, (a, b) in both.items() if a and b and played_by(a) == played_by(b))
        if seeds:
            gain = study.draws.over_seeds(study.live((before, k), seeds, split))
            words = f"episodes of {split} in Chromium, judged by the page; mean over families, which are drawn"
            return _judged(claim, gain, words, "points of success", len(seeds))
    commands = " and ".join(f"`coepg play {study.root}@{i}`" for i in (before, k))
    return Finding(claim, "not testable", None, None, f"Not played here; {commands} make it.")


def missing_runs(study: Study, wanted: Mapping[str, tuple[str, str, int, int]], iterations: int) -> list[str]:
    """The commands for missing iterations of `wanted`: reference → (experiment, variant, seed, first iteration)."""
    lacking = []
    for reference, (experiment, variant, seed, first) in wanted.items():
        run = study.find(experiment, variant).get(seed)
        needed = range(first, iterations + 1)
        if not all(run and (k, split) in run.success for k in needed for split in study.splits):
            since = f" --from {first}" if first else ""
            lacking.append(f"coepg evolve {reference}{since} --through {iterations}")
    return lacking
