"""Findings of a study: the verdict on each claim, with what was compared, by which measure, and what of it is stale.

Runs are compared only if their settings are the same but for those that the comparison is about. The claims are those of
docs/analysis-plan.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import variance
from typing import Any, Final, Literal

from coepg_dagster.evaluation.statistics import LEVEL, Estimate, over_seeds, weighted_sum
from coepg_dagster.provenance import Asset, Ref
from coepg_dagster.reports.paper import command_of
from coepg_dagster.reports.study import BY_JUDGE, STEP_SR, Run, Side, Study, played_by
from coepg_dagster.results import FULL, QUALITY

Verdict = Literal["confirmed", "holds for one seed", "not confirmed", "not testable"]
MARGIN: Final = 2.0
"""Margin of non-inferiority, in points."""
SUPERIORITY: Final = "superiority: above 0"
NON_INFERIORITY: Final = f"non-inferiority: not worse by {MARGIN:g} points"
RATIO: Final = "ratio of variances: above 1"


@dataclass(frozen=True)
class Finding:
    """The verdict on one claim, with the measured difference."""

    claim: str
    verdict: Verdict
    text: str
    value: float | None = None
    ci95: tuple[float, float] | None = None
    test: str = SUPERIORITY
    over: str | None = None  # what the interval is over
    measure: str | None = None
    beside: Mapping[str, Estimate] | None = None  # the same difference by other measures
    stale: tuple[str, ...] = ()  # inputs that are not current, with the cause

    def to_json(self) -> dict[str, Any]:
        others = {name: _numbers(one.value, one.ci95) for name, one in (self.beside or {}).items()}
        return {
            "claim": self.claim,
            "verdict": self.verdict,
            "test": self.test,
            "measure": self.measure,
            **_numbers(self.value, self.ci95),
            "over": self.over,
            "beside": others,
            "stale": list(self.stale),
            "text": self.text,
        }


def _numbers(value: float | None, ci95: tuple[float, float] | None) -> dict[str, Any]:
    return {
        "value": None if value is None else round(value, 3),
        "ci95": None if ci95 is None else [round(end, 3) for end in ci95],
    }


@dataclass(frozen=True)
class About:
    """What a comparison is about: the settings in which the sides may differ, and the artifacts that they have in common."""

    settings: tuple[str, ...] = ()
    common: tuple[Asset, ...] = ()  # of the same iteration, `dataset` of the one before


_SAME_MODELS: Final[tuple[Asset, ...]] = ("planner_sft", "grounder")
_BASE_PAIR: Final = ("models", "models.base_planner", "models.base_grounder")


def findings(study: Study) -> list[Finding]:
    """A finding for every claim of docs/analysis-plan.md, in its order.

    Comparisons planned at k = K use the last iteration that both sides reached; the text names it.
    """
    root, last = study.root, study.last
    full = (root, FULL)

    def against(
        claim: str, one: tuple[str, str], other: tuple[str, str], words: str, about: About, test: str = SUPERIORITY
    ) -> Finding:
        k = study.reached(one, other)
        if k is None:
            lacking = [(*side, last) for side in (one, other) if study.reached(side) is None]
            return replace(_missing(claim, lacking), test=test)
        planned = "" if k == last else f"; at k = {k}, planned at k = {last}"
        return _difference(study, claim, (*one, k), (*other, k), words + planned, about, test)

    def reward(claim: str, one: str, other: str, words: str, *settings: str, test: str = SUPERIORITY) -> Finding:
        about = About(tuple(f"grpo.{name}" for name in settings), _SAME_MODELS)
        return against(claim, (root, one), (root, other), words, about, test)

    labels = About(("benchmark.max_train_steps", "grpo.max_prompts"))
    larger = About((*_BASE_PAIR, "sft.learning_rate", "grpo.learning_rate"))
    same_data = About((), ("dataset",))
    later = [last] if last > 1 else []  # with one iteration there is nothing to compare it with
    return [
        *(_difference(study, f"M_{k} - M_1", (*full, k), (*full, 1), "the aim is 5 points") for k in later),
        _difference(study, "M_1 - M_0", (*full, 1), (*full, 0), "what the first iteration adds to the base pair"),
        against(
            "full - no GRPO", full, (root, "no_grpo"), "both loops over whole iterations", About(("grpo.enabled",))
        ),
        reward("GRPO within an iteration", FULL, "before_grpo", "from the same π_k and ϕ_k", "enabled"),
        reward("full - single grounder", FULL, "no_cdrem", "from the same π_k", "ensemble", test=NON_INFERIORITY),
        _steadier(study, About(("grpo.ensemble",), _SAME_MODELS)),
        reward("full - uniform", FULL, "uniform", "from the same π_k", "own_prior", "verifier_prior"),
        reward("full - prior only", FULL, "prior_only", "from the same π_k", "confidence"),
        reward("probability - literal", FULL, "literal", "from the same π_k", "confidence"),
        reward("temperature - full", "temperature", FULL, "τ = 0.25, from the same π_k", "confidence_temperature"),
        against("decoupled - end-to-end, with GRPO", full, (root, "end_to_end"), "from the same D_{k-1}", same_data),
        against(
            "decoupled - end-to-end, without GRPO",
            (root, "before_grpo"),
            (root, "end_to_end_sft"),
            "from the same D_{k-1}",
            same_data,
        ),
        against("previous - base", full, (root, "init_base"), "where each iteration starts", About(("init",))),
        *(_rise(study, measure) for measure in ("purity_frozen", "purity", "diversity")),
        against("all labels - a quarter", full, (f"{root}_labels_25", FULL), "the loop with fewer labels", labels),
        against("all labels - half", full, (f"{root}_labels_50", FULL), "the loop with fewer labels", labels),
        against("larger - smaller", (f"{root}_large", FULL), full, "a base pair of about ten times the size", larger),
        *(_live(study, k, before) for k, before in (*((k, 1) for k in later), (1, 0))),
    ]


def _difference(
    study: Study,
    claim: str,
    one: Side,
    other: Side,
    words: str,
    about: About = About(),
    test: str = SUPERIORITY,
) -> Finding:
    """The difference of Step SR of two sides, by the judge where both have it, with that by ϕ_k beside."""
    seeds = study.common_seeds(one, other)
    if not seeds:
        return replace(_missing(claim, [side for side in (one, other) if not study.seeds_with(side)]), test=test)
    used = _used(study, (one, other), seeds, "evaluation")
    stale = _stale(used)
    if apart := _differing(used, about):
        return _not_comparable(claim, apart, test, stale)
    measures = [BY_JUDGE, STEP_SR] if _judged(study, seeds, one, other) else [STEP_SR]
    estimates = {measure: study.difference(one, other, seeds, measure=measure) for measure in measures}
    measure, *others = measures
    beside = {name: estimates[name] for name in others}
    unit = f"points of mean {study.words(measure)}"
    words += "".join(f"; {study.words(name)}: {estimate.signed}" for name, estimate in beside.items())
    finding = _verdict(claim, estimates[measure], words, unit, stale, test)
    return replace(finding, measure=measure, beside=beside)


def _judged(study: Study, seeds: Sequence[int], *sides: Side) -> bool:
    """Whether the judge scored every one of these seeds on every test split, for all sides."""
    return all(set(seeds) <= set(study.seeds_with(side, measure=BY_JUDGE)) for side in sides)


Used = Mapping[Side, Mapping[int, tuple[Run, tuple[Ref, ...]]]]
"""What a finding reads: side → seed → the run and its artifacts."""


def _used(study: Study, sides: Iterable[Side], seeds: Sequence[int], *assets: Asset) -> Used:
    return {
        side: {seed: (study.find(*side[:2])[seed], tuple(Ref(asset, side[2]) for asset in assets)) for seed in seeds}
        for side in sides
    }


def _stale(used: Used) -> tuple[str, ...]:
    """The inputs that are not current, as `EXPERIMENT/sSEED evaluation[3]: why`."""
    reads = [(run, ref) for runs in used.values() for run, refs in runs.values() for ref in refs]
    return tuple(dict.fromkeys(f"{run.reference} {ref}: {run.stale[ref]}" for run, ref in reads if ref in run.stale))


def _differing(used: Used, about: About) -> list[str]:
    """How the settings of the sides differ beyond what the comparison is about, a line for each.

    A run's value of a setting is that of all that it was made from: two, where an ablation starts from the models of another
    loop. Settings that a run does not use (those of GRPO at k = 0) do not differ. In what the comparison is about, the seeds
    of one side must agree.
    """
    lines = []
    values: dict[str, dict[tuple[Side, int], frozenset[str]]] = {}
    versions: dict[tuple[Asset, int], dict[str, Side]] = {}
    for side, runs in used.items():
        for seed, (run, refs) in runs.items():
            for ref in refs:
                if ref not in run.made_from:
                    lines.append(f"those of {run.reference} {ref} are not known, its records are not in the event log")
                    continue
                made = run.made_from[ref]
                for name, of in made.settings.items():
                    known = values.setdefault(name, {})
                    known[side, seed] = known.get((side, seed), frozenset()) | of
                for asset in about.common:
                    version = made.versions.get(Ref(asset, side[2] - (asset == "dataset")))
                    if version is not None:
                        versions.setdefault((asset, seed), {})[version] = side
    for name, by_run in sorted(values.items()):
        apart = set(by_run.values())
        if name in about.settings:
            of_sides: dict[Side, set[frozenset[str]]] = {}
            for (side, _), of in by_run.items():
                of_sides.setdefault(side, set()).add(of)
            apart = max(of_sides.values(), key=len)
        if len(apart) > 1:
            places: dict[str, dict[str, None]] = {}
            for (side, _), of in by_run.items():
                places.setdefault(" and ".join(sorted(of)), {})[_name(side)] = None
            each = (f"{value} in {', '.join(sides)}" for value, sides in places.items())
            lines.append(f"{name} is {', but '.join(each)}")
    for (asset, seed), sides in versions.items():
        if len(sides) > 1:
            lines.append(f"{asset} of seed {seed} is not the same in {' and '.join(map(_name, sides.values()))}")
    return lines


def _name(side: Side) -> str:
    experiment, variant, k = side
    return f"{experiment}{'' if variant == FULL else f' {variant}'} at k = {k}"


def _not_comparable(claim: str, apart: Sequence[str], test: str, stale: tuple[str, ...]) -> Finding:
    text = f"The runs have different settings: {'; '.join(apart)}. Make them again with the same.{_staleness(stale)}"
    return Finding(claim, "not testable", text, test=test, stale=stale)


def _staleness(stale: Sequence[str]) -> str:
    return f" Stale: {'; '.join(stale)}." if stale else ""


def _verdict(
    claim: str, one: Estimate, words: str, unit: str, stale: tuple[str, ...], test: str = SUPERIORITY
) -> Finding:
    margin = MARGIN if test == NON_INFERIORITY else 0.0
    verdict: Verdict = "confirmed" if one.seeds > 1 else "holds for one seed"
    if one.ci95 is None:
        verdict = "not testable"
    elif one.ci95[0] <= -margin:
        verdict = "not confirmed"
    opposite = "; the interval lies below 0: the opposite" if one.ci95 and one.ci95[1] < 0 else ""
    seeds = f"{one.seeds} seeds" if one.seeds > 1 else f"1 seed: over {one.over} only"
    named = f"; {test}" if test != SUPERIORITY else ""
    text = f"{one.signed} {unit}, {seeds}{named}; {words}{opposite}.{_staleness(stale)}"
    return Finding(claim, verdict, text, one.value, one.ci95, test, one.over, stale=stale)


def _missing(claim: str, sides: Sequence[Side]) -> Finding:
    commands = ", ".join(f"`{command_of(*side)}`" for side in sides)
    return Finding(claim, "not testable", f"Not run here; {commands or 'no common seed'} makes it.")


def _rise(study: Study, measure: str) -> Finding:
    claim = f"{'frozen purity' if measure == 'purity_frozen' else measure} D_{study.last} - D_0"
    figure = QUALITY[measure]
    seeds = [seed for seed in sorted(study.find(study.root)) if study.has_data(study.root, seed, 0, figure)]
    made = [
        k
        for k in range(1, study.last + 1)
        if seeds and all(study.has_data(study.root, seed, i, figure) for seed in seeds for i in (0, k))
    ]
    if not made:
        return _missing(claim, [(study.root, FULL, study.last)])
    k = made[-1]
    used = _used(study, [(study.root, FULL, i) for i in (k, 0)], seeds, "dataset")
    stale = _stale(used)
    if apart := _differing(used, About()):
        return _not_comparable(claim, apart, SUPERIORITY, stale)
    after, before = (study.data(study.root, i, seeds, figure) for i in (k, 0))
    planned = "" if k == study.last else f"; D_{k} instead of D_{study.last}"
    words = {
        "purity": "by the verifiers of the current pool, which change",
        "purity_frozen": "by the open verifiers alone, which stay the same",
        "diversity": "different verified plans per covered step",
    }
    unit = "plans" if measure == "diversity" else "points"
    estimate = over_seeds(weighted_sum((1.0, after), (-1.0, before)))
    return replace(_verdict(claim, estimate, words[measure] + planned, unit, stale), measure=measure)


def _steadier(study: Study, about: About) -> Finding:
    """The ratio of variances over seeds, single grounder to ensemble, with its F interval."""
    from scipy.stats import f  # slow to import

    claim = "steadier over seeds"
    k = study.reached((study.root, FULL), (study.root, "no_cdrem")) or study.last
    sides: list[Side] = [(study.root, FULL, k), (study.root, "no_cdrem", k)]
    seeds = study.common_seeds(*sides)
    if len(seeds) < 2:
        return replace(_missing(claim, [side for side in sides if len(study.seeds_with(side)) < 2]), test=RATIO)
    used = _used(study, sides, seeds, "evaluation")
    stale = _stale(used)
    if apart := _differing(used, about):
        return _not_comparable(claim, apart, RATIO, stale)
    measure = BY_JUDGE if _judged(study, seeds, *sides) else STEP_SR
    ensemble, single = (study.success(side, seeds, None, measure).values for side in sides)
    spread = [math.sqrt(variance(map(float, values))) for values in (ensemble, single)]
    if not all(spread):
        return Finding(claim, "not testable", "The seeds do not differ at all.", test=RATIO, stale=stale)
    ratio = (spread[1] / spread[0]) ** 2
    n = len(seeds) - 1
    bound = float(f.ppf((1 + LEVEL) / 2, n, n))
    ci95 = ratio / bound, ratio * bound
    wide = ci95[1] / ci95[0] > 100
    verdict: Verdict = "confirmed" if ci95[0] > 1 else "not testable" if wide else "not confirmed"
    text = (
        f"Standard deviation over {len(seeds)} seeds of {study.words(measure)}: {spread[1]:.2f} with a single grounder, "
        f"{spread[0]:.2f} with the ensemble; ratio of variances {ratio:.2f} [{ci95[0]:.2f}, {ci95[1]:.1f}], at k = {k}."
        f"{_staleness(stale)}"
    )
    return Finding(claim, verdict, text, ratio, ci95, RATIO, "seeds", measure, stale=stale)


def _live(study: Study, k: int, before: int) -> Finding:
    claim = f"live play M_{k} - M_{before}"
    for split in study.splits:
        seeds = study.players((before, k), split)
        if not seeds or not (rates := study.live((before, k), seeds, split)):
            continue
        used = _used(study, [(study.root, FULL, i) for i in (k, before)], seeds, "planner", "grounder")
        others = [
            f"{run.reference} M_{i}: {run.live_stale[i, split]}"
            for (_, _, i), runs in used.items()
            for run, _ in runs.values()
            if (i, split) in run.live_stale
        ]
        stale = (*others, *_stale(used))
        if apart := _differing(used, About()):
            return _not_comparable(claim, apart, SUPERIORITY, stale)
        gain = over_seeds(weighted_sum((1.0, rates[1]), (-1.0, rates[0])), "families")
        words = f"{split} in Chromium, {played_by(study.find(study.root)[seeds[0]].live[k, split])}; mean over families"
        return replace(_verdict(claim, gain, words, "points of success", stale), measure="success_rate_macro")
    commands = " and ".join(f"`coepg play {study.root}@{i}`" for i in (before, k))
    return Finding(claim, "not testable", f"Not played here; {commands} make it.")
