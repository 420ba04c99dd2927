"""Candidates and verdicts written by hand."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from coepg_dagster.steps import CANDIDATE_SCHEMA, DATASET_SCHEMA, VERDICT_SCHEMA, row_id, short_hash


def candidate(step_id: str, planner: str, sample: int, plan: str | None, **change: Any) -> dict[str, Any]:
    return {
        "candidate_id": f"{step_id}#{planner}#{sample}",
        "step_id": step_id,
        "planner": planner,
        "sample": sample,
        "text": plan or "no plan",
        "plan": plan,
        "action_type": plan and "CLICK",
        "value": plan and "",
        "gate": "passed" if plan else "unparsed",
        "duplicate_of": None,
        "prompt_hash": "0" * 16,
        "sampling_seed": 1,
    } | change


def verdict(candidate_id: str, verifier: str, hit: bool | None, **change: Any) -> dict[str, Any]:
    """`hit` None: the verifier failed. Hits lie at (15, 15), misses at (1, 1)."""
    place = {True: 15.0, False: 1.0, None: None}[hit]
    return {
        "candidate_id": candidate_id,
        "step_id": candidate_id.split("#")[0],
        "verifier": verifier,
        "hit": bool(hit),
        "x": place,
        "y": place,
        "mean_logprob": None if hit is None else -0.1,
        "tokens": 0 if hit is None else 2,
        "text": "" if hit is None else f"({place:.0f},{place:.0f})",
        "failure": "out of memory" if hit is None else None,
    } | change


def row(step_id: str, plan: str, **change: Any) -> dict[str, Any]:
    values = {
        "step_id": step_id,
        "plan": plan,
        "action_type": "CLICK",
        "value": "",
        "box": [10.0, 10.0, 20.0, 20.0],
        "candidate_id": f"{step_id}#open#0",
        "planner": "open",
        "made_in": 0,
        "hits": 1,
        "answered": 1,
        "score": 1.0,
        "screenshot_hash": short_hash(b""),
    } | change
    return {
        "row_id": row_id(*(values[name] for name in ("candidate_id", "plan", "screenshot_hash", "made_in")))
    } | values


def candidates(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), CANDIDATE_SCHEMA)


def verdicts(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), VERDICT_SCHEMA)


def rows(*each: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(each), DATASET_SCHEMA)
