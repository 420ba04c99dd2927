"""The quality of D_k: purity, diversity, coverage (Fig. 6), agreement of the verifiers, changes since D_{k-1}."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from coepg_dagster.evaluation.statistics import ByEpisode
from coepg_dagster.experiment.schema import Quality, Regeneration
from coepg_dagster.pools.candidates import jaccard, plan_tokens
from coepg_dagster.pools.controls import shuffle_rates, smallest_targets
from coepg_dagster.pools.selection import is_verified
from coepg_dagster.steps import GATE_PASSED, GATE_WRONG_TYPE, GATE_WRONG_VALUE, NO_VALUE

if TYPE_CHECKING:
    import pandas as pd

Votes = Mapping[str, Sequence[Mapping[str, Any]]]
"""Candidate → the verdicts on it."""


def _per_cent(part: float, whole: float) -> float | None:
    return 100 * part / whole if whole else None


def _mean(values: Iterable[float]) -> float | None:
    each = list(values)
    return sum(each) / len(each) if each else None


@dataclass(frozen=True)
class Regenerated:
    """D_k and what it was chosen from: the training steps, the tables of both pools, the rule, and the open verifiers."""

    steps: pa.Table
    candidates: pa.Table
    verdicts: pa.Table
    dataset: pa.Table
    config: Regeneration
    open_verifiers: frozenset[str]


def verified_candidates(of: Regenerated) -> pd.DataFrame:
    """The candidates for steps with a target: `step_id`, `episode_id`, `planner` and three columns of booleans.

    `verified`: by the whole pool. `verified_open`: by the open verifiers alone. `first`: it repeats no plan before it. A
    duplicate counts as verified if the plan that it repeats does; a plan that the gate stopped never does.
    """
    answered = of.verdicts.filter(pc.is_null(of.verdicts["failure"]))
    votes = answered.select(["candidate_id", "verifier", "hit"]).to_pandas()

    def verified(cast: pd.DataFrame) -> list[str]:
        counts = cast.groupby("candidate_id")["hit"].agg(["sum", "count"]).itertuples()
        return [str(name) for name, hits, answers in counts if is_verified(int(hits), int(answers), of.config)]

    with_target = of.steps.filter(pc.greater(pc.list_value_length(of.steps["boxes"]), 0))
    columns = ["candidate_id", "step_id", "planner", "gate", "duplicate_of"]
    plans: pd.DataFrame = of.candidates.select(columns).to_pandas()
    rows = plans.merge(with_target.select(["step_id", "episode_id"]).to_pandas(), on="step_id")
    original, passed = rows["duplicate_of"].fillna(rows["candidate_id"]), rows["gate"] == GATE_PASSED
    return rows.assign(
        verified=passed & original.isin(verified(votes)),
        verified_open=passed & original.isin(verified(votes[votes["verifier"].isin(of.open_verifiers)])),
        first=rows["duplicate_of"].isna(),
    )


def by_episode(of: Regenerated) -> dict[str, ByEpisode]:
    """The measures of Fig. 6 by episode, rates in per cent.

    - purity: verified / generated, over plans for steps with a target.
    - purity_open: the same by the votes of the open verifiers, which are the same in every iteration; purity by the
      current pool also rises when its members become lenient (docs/paper_map.md). Left out if not all of them voted.
    - diversity: mean number of different verified plans per covered step, before the cap.
    - coverage: share of the training steps that have a row in D_k.
    """
    rows = verified_candidates(of)
    unique = rows[rows["first"] & rows["verified"]]
    steps = of.steps.select(["step_id", "episode_id"]).to_pandas()
    names = sorted(steps["episode_id"].unique())

    def share(part: pd.Series[Any], whole: pd.DataFrame, scale: float = 100) -> ByEpisode:
        sums = part.groupby(whole["episode_id"]).sum(), whole.groupby("episode_id").size()
        above, below = (np.asarray(each.reindex(names, fill_value=0), np.float64) for each in sums)
        return ByEpisode(tuple(names), scale * above, below)

    per_step = unique.groupby(["step_id", "episode_id"]).size().reset_index(name="plans")
    measures = {
        "purity": share(rows["verified"], rows),
        "purity_open": share(rows["verified_open"], rows),
        "diversity": share(per_step["plans"], per_step, 1),
        "coverage": share(steps["step_id"].isin(of.dataset["step_id"].to_pylist()), steps),
    }
    if not of.open_verifiers <= set(of.verdicts["verifier"].to_pylist()):
        del measures["purity_open"]
    return measures


def data_quality(
    of: Regenerated,
    shuffled: pa.Table,
    decisions: pa.Table,
    previous: pa.Table | None,
    quality: Quality,
    resizes: Sequence[tuple[int, int, int]],
) -> dict[str, Any]:
    """Named measures of one iteration's data, rates in per cent.

    - purity, purity_open, diversity, coverage: those of `by_episode`, over all episodes; None where nothing was counted.
    - type_accuracy: share of the parsed plans that have the label's type. value_accuracy: of those with the label's type, on
      steps that take a value, the share with its value.
    - diversity_kept: mean number of rows of D_k per covered step.
    - plans: plans per step and per task (episode), over all steps and tasks: `raw` (generated), `distinct` (parsed, and
      different after normalising) and `verified` (different ones, before the cap).
    - hit_rate_by_verifier, unreadable_by_verifier: shares of its answers that hit, and that name no point.
      failed_by_verifier: number of requests without any answer.
    - verifier_agreement: share of pairs of verifiers that agree on a plan; verifier_kappa: the same beyond chance (Fleiss).
    - plan_words: mean number of words of a plan of D_k. specificity: mean information of a plan about its step, log(steps /
      steps with that plan) / log(steps); 100: no plan occurs at two steps, 0: all steps have the same one.
    - share_by_planner: of the rows of D_k.
    - carried_over: number of rows that D_k took unchanged from D_{k-1}.
    - repeated: share of the other rows whose plan says the same as one of D_{k-1} for that step. duplicates: number of rows
      that say the same as an earlier row of their step.
    - drift: share of the plans of D_k that D_{k-1} did not hold for that step. drift_words: Jensen-Shannon divergence between
      the words of D_k and D_{k-1}, in bits (0: the same words, 1: no word in common). Both null for D_0.
    - plan_shuffle: see pools.controls. illegible: share of the targets smaller than `legible_px` for some verifier.
    """
    steps, candidates, verdicts, dataset = of.steps, of.candidates, of.verdicts, of.dataset
    rated = verified_candidates(of)
    measures = {name: measured.value for name, measured in by_episode(of).items()}
    votes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for verdict in verdicts.select(["candidate_id", "verifier", "hit", "failure"]).to_pylist():
        votes[verdict["candidate_id"]].append(verdict)
    takes_value = dict(
        zip(steps["step_id"].to_pylist(), pc.not_equal(steps["value"], NO_VALUE).to_pylist(), strict=True)
    )
    gates: Counter[tuple[bool, str]] = Counter()  # (the step takes a value, gate)
    distinct: dict[str, set[frozenset[str]]] = defaultdict(set)
    for row in candidates.select(["step_id", "plan", "gate"]).to_pylist():
        gates[takes_value[row["step_id"]], row["gate"]] += 1
        if row["plan"] is not None:
            distinct[row["step_id"]].add(plan_tokens(row["plan"]))
    right_type = sum(n for (_, gate), n in gates.items() if gate in (GATE_PASSED, GATE_WRONG_VALUE))
    with_value = gates[True, GATE_PASSED] + gates[True, GATE_WRONG_VALUE]
    covered = set(dataset["step_id"].to_pylist())
    sizes = smallest_targets(dataset, steps, resizes)
    boxes = zip(dataset["step_id"].to_pylist(), dataset["box"].to_pylist(), strict=True)
    sides = [sizes[step_id, tuple(box)] for step_id, box in boxes if box is not None and (step_id, tuple(box)) in sizes]
    per = {
        "raw": candidates.num_rows,
        "distinct": sum(map(len, distinct.values())),
        "verified": int((rated["first"] & rated["verified"]).sum()),
    }
    tasks = len(set(steps["episode_id"].to_pylist()))
    return {
        "rows": dataset.num_rows,
        "generated": candidates.num_rows,
        **dict.fromkeys(("purity", "purity_open", "diversity", "coverage")),
        **measures,
        "purity_by_planner": {
            str(name): _per_cent(int(verified.sum()), len(verified))
            for name, verified in rated.groupby("planner")["verified"]
        },
        "type_accuracy": _per_cent(right_type, right_type + sum(gates[v, GATE_WRONG_TYPE] for v in (False, True))),
        "value_accuracy": _per_cent(gates[True, GATE_PASSED], with_value),
        **_by_verifier(verdicts),
        **_agreement(votes),
        "diversity_kept": dataset.num_rows / len(covered) if covered else None,
        "plans": {
            "per_step": {name: n / steps.num_rows for name, n in per.items()},
            "per_task": {name: n / tasks for name, n in per.items()},
        },
        **_plans(dataset),
        "share_by_planner": {
            name: 100 * n / dataset.num_rows for name, n in sorted(Counter(dataset["planner"].to_pylist()).items())
        },
        "decisions": dict(sorted(Counter(decisions["decision"].to_pylist()).items())),
        **_since(dataset, previous, of.config.similar),
        "plan_shuffle": shuffle_rates(verdicts, shuffled, steps),
        "illegible": _per_cent(sum(side < quality.legible_px for side in sides), len(sides)),
        "smallest_target_px": min(sides, default=None),
    }


def _by_verifier(verdicts: pa.Table) -> dict[str, Any]:
    hits: Counter[str] = Counter()
    answered: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for verdict in verdicts.select(["verifier", "hit", "failure"]).to_pylist():
        name = verdict["verifier"]
        if verdict["failure"] is None:
            answered[name] += 1
            hits[name] += verdict["hit"]
        else:
            failed[name] += 1
    return {
        "hit_rate_by_verifier": {name: _per_cent(hits[name], n) for name, n in sorted(answered.items())},
        "unreadable_by_verifier": unreadable_by_verifier(verdicts),
        "failed_by_verifier": dict(sorted(failed.items())),
    }


def unreadable_by_verifier(verdicts: pa.Table) -> dict[str, float]:
    """Verifier → per cent of its answers that name no point (`notations`). Each such answer is a vote against the plan."""
    answers = verdicts.filter(pc.is_null(verdicts["failure"])).select(["verifier", "x"])
    counted = answers.group_by("verifier").aggregate([("x", "count"), ("verifier", "count")])
    rows = zip(*(counted[name].to_pylist() for name in ("verifier", "x_count", "verifier_count")), strict=True)
    return {name: 100 * (answered - read) / answered for name, read, answered in sorted(rows)}


def _agreement(votes: Votes) -> dict[str, float | None]:
    """Pairwise agreement on the plans that two or more verifiers answered, and its Fleiss' kappa (None: undefined)."""
    shares, hits, answers = [], 0, 0
    for each in votes.values():
        answered = [vote["hit"] for vote in each if vote["failure"] is None]
        n, yes = len(answered), sum(answered)
        if n > 1:
            shares.append((yes * (yes - 1) + (n - yes) * (n - yes - 1)) / (n * (n - 1)))
            hits, answers = hits + yes, answers + n
    agreed = _mean(shares)
    if agreed is None:
        return {"verifier_agreement": None, "verifier_kappa": None}
    by_chance = (hits / answers) ** 2 + (1 - hits / answers) ** 2
    kappa = None if by_chance == 1 else (agreed - by_chance) / (1 - by_chance)
    return {"verifier_agreement": 100 * agreed, "verifier_kappa": kappa}


def _plans(dataset: pa.Table) -> dict[str, float | None]:
    """Length and specificity of the plans of D_k."""
    plans = [
        (step_id, plan_tokens(plan))
        for step_id, plan in zip(dataset["step_id"].to_pylist(), dataset["plan"].to_pylist(), strict=True)
    ]
    used: dict[frozenset[str], set[str]] = defaultdict(set)
    for step_id, tokens in plans:
        used[tokens].add(step_id)
    steps = len({step_id for step_id, _ in plans})
    mean = _mean(math.log(steps / len(used[tokens])) for _, tokens in plans)
    return {
        "plan_words": _mean(len(plan.split()) for plan in dataset["plan"].to_pylist()),
        "specificity": None if mean is None or steps == 1 else 100 * mean / math.log(steps),
    }


def _since(dataset: pa.Table, previous: pa.Table | None, similar: float) -> dict[str, Any]:
    """What D_k repeats: of D_{k-1}, and within a step."""
    columns = ["row_id", "step_id", "plan"]
    plans: dict[str, list[frozenset[str]]] = defaultdict(list)
    duplicates = 0
    rows = dataset.select(columns).to_pylist()
    for row in rows:
        tokens = plan_tokens(row["plan"])
        duplicates += _same(tokens, plans[row["step_id"]], similar)
        plans[row["step_id"]].append(tokens)
    if previous is None:
        return {"carried_over": 0, "repeated": None, "duplicates": duplicates, "drift": None, "drift_words": None}
    old_rows = previous.select(columns).to_pylist()
    old_plans: dict[str, list[frozenset[str]]] = defaultdict(list)
    for row in old_rows:
        old_plans[row["step_id"]].append(plan_tokens(row["plan"]))
    old_ids = {row["row_id"] for row in old_rows}
    new = [row for row in rows if row["row_id"] not in old_ids]
    repeated = sum(_same(plan_tokens(row["plan"]), old_plans[row["step_id"]], similar) for row in new)
    old = {(row["step_id"], row["plan"]) for row in old_rows}
    now = {(row["step_id"], row["plan"]) for row in rows}
    words, old_words = (Counter(w for _, plan in each for w in plan.lower().split()) for each in (now, old))
    return {
        "carried_over": len(rows) - len(new),
        "repeated": _per_cent(repeated, len(new)),
        "duplicates": duplicates,
        "drift": _per_cent(len(now - old), len(now)),
        "drift_words": jensen_shannon(words, old_words),
    }


def _same(tokens: frozenset[str], others: Iterable[frozenset[str]], similar: float) -> bool:
    return any(tokens == other or jaccard(tokens, other) > similar for other in others)


def jensen_shannon(a: Counter[str], b: Counter[str]) -> float | None:
    """The Jensen-Shannon divergence of two counts, in bits, 0..1, to nine decimals; None where one is empty."""
    from scipy.spatial.distance import jensenshannon  # slow to import

    if not a.total() or not b.total():
        return None
    words = sorted(a.keys() | b.keys())
    distance = jensenshannon([a[word] for word in words], [b[word] for word in words], base=2)
    # the last digits of a sum depend on the processor, and the version of the artifact would with them
    return round(float(distance) ** 2, 9)
