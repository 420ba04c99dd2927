"""How good D_k is: purity, diversity, coverage (Fig. 6), why candidates were dropped, what changed since D_{k-1}."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import pyarrow as pa

from coepg_dagster.experiment import Regeneration
from coepg_dagster.pools.selection import is_verified
from coepg_dagster.steps import GATE_PASSED


def _per_cent(part: float, whole: float) -> float | None:
    return 100 * part / whole if whole else None


def _rows_of(dataset: pa.Table) -> set[tuple[str, int]]:
    return set(zip(dataset["candidate_id"].to_pylist(), dataset["made_in"].to_pylist(), strict=True))


def data_quality(
    steps: pa.Table,
    candidates: pa.Table,
    verdicts: pa.Table,
    decisions: pa.Table,
    dataset: pa.Table,
    previous: pa.Table | None,
    config: Regeneration,
    open_verifiers: frozenset[str],
) -> dict[str, Any]:
    """Named measures of one iteration's data, rates in per cent.

    - purity: verified / generated, over plans for steps with a target; a duplicate counts as the plan that it repeats.
    - purity_open: the same by the open verifiers' votes only, which are the same in every iteration: purity by the
      current pool also rises when its members become lenient (COEPG.md, ambiguity t).
    - diversity: mean number of different verified plans per covered step, before the cap.
    - diversity_kept: mean number of rows of D_k per covered step.
    - coverage: share of the training steps that have a row in D_k.
    - carried_over: rows that D_k took from D_{k-1} as they were.
    - drift: share of the plans of D_k that D_{k-1} did not hold for that step; null for D_0.
    """
    targets = {row["step_id"]: bool(row["boxes"]) for row in steps.select(["step_id", "boxes"]).to_pylist()}
    votes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for verdict in verdicts.select(["candidate_id", "verifier", "hit", "failure"]).to_pylist():
        votes[verdict["candidate_id"]].append(verdict)

    def verified(candidate: str, members: frozenset[str] | None) -> bool:
        answered = [
            vote
            for vote in votes[candidate]
            if vote["failure"] is None and (members is None or vote["verifier"] in members)
        ]
        return bool(answered) and is_verified(sum(vote["hit"] for vote in answered), len(answered), config)

    generated: Counter[str] = Counter()
    pure: Counter[str] = Counter()
    pure_open = 0
    unique_verified: Counter[str] = Counter()
    for row in candidates.to_pylist():
        if not targets[row["step_id"]]:
            continue
        generated[row["planner"]] += 1
        if row["gate"] != GATE_PASSED:
            continue
        original = row["duplicate_of"] or row["candidate_id"]
        if verified(original, None):
            pure[row["planner"]] += 1
            if row["duplicate_of"] is None:
                unique_verified[row["step_id"]] += 1
        pure_open += verified(original, open_verifiers)
    total = sum(generated.values())
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
    covered = set(dataset["step_id"].to_pylist())
    rows = set(zip(dataset["step_id"].to_pylist(), dataset["plan"].to_pylist(), strict=True))
    old = None
    carried = 0
    if previous is not None:
        old = set(zip(previous["step_id"].to_pylist(), previous["plan"].to_pylist(), strict=True))
        # an open planner's candidates have the same ids in every iteration: only with `made_in` do they name a row
        carried = len(_rows_of(dataset) & _rows_of(previous))
    return {
        "rows": dataset.num_rows,
        "generated": candidates.num_rows,
        "purity": _per_cent(sum(pure.values()), total),
        "purity_open": _per_cent(pure_open, total),
        "purity_by_planner": {name: _per_cent(pure[name], n) for name, n in sorted(generated.items())},
        "hit_rate_by_verifier": {name: _per_cent(hits[name], n) for name, n in sorted(answered.items())},
        "failed_by_verifier": dict(sorted(failed.items())),
        "diversity": sum(unique_verified.values()) / len(unique_verified) if unique_verified else None,
        "diversity_kept": dataset.num_rows / len(covered) if covered else None,
        "coverage": _per_cent(len(covered), steps.num_rows),
        "decisions": dict(sorted(Counter(decisions["decision"].to_pylist()).items())),
        "carried_over": carried,
        "drift": None if old is None else _per_cent(len(rows - old), len(rows)),
    }
