"""From candidates and verdicts to D_k: which plans are verified, and which of those are kept."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.geometry import Box, Point, Space
from coepg_dagster.inference.agents import is_outage
from coepg_dagster.rewards.cdrem import NoVerdict
from coepg_dagster.steps import DATASET_SCHEMA, DECISION_SCHEMA, GATE_PASSED, row_id, rows_in_batches, short_hash

KEPT, DUPLICATE, VETOED, NOT_VERIFIED, OVER_CAP = "kept", "duplicate", "vetoed", "not_verified", "over_cap"


def is_verified(hits: int, answered: int, config: Regeneration) -> bool:
    """Whether a plan is verified by the rule, if `hits` of `answered` verifiers hit the target. A failed one has no vote."""
    match config.rule:
        case "any":
            return hits >= 1
        case "majority":
            return 2 * hits > answered
        case "all":
            return hits == answered
        case "k_of_n":
            assert config.k is not None  # the configuration was validated
            return hits >= config.k


def select(
    steps: pa.Table,
    candidates: pa.Table,
    verdicts: pa.Table,
    config: Regeneration,
    iteration: int,
    previous: pa.Table | None,
    vetoed: Callable[[str, str], bool] = lambda step_id, plan: False,
) -> tuple[pa.Table, pa.Table]:
    """(D_k, decisions): rows of DATASET_SCHEMA, and the decision on every candidate (DECISION_SCHEMA).

    The box of a row, in pixels of the original screenshot, is the target that most verifiers of its plan hit. Ties go to the
    target with the higher mean confidence exp(c_j) of those verifiers, then to the first of the label.

    The plans of a step are ordered by score = share of hits + mean exp(c_j) of the hitting verifiers / 1000, then by
    id; the first `max_plans_per_step` are kept. Rows of `previous` (D_{k-1}) join them as `carry_over` says. Plans of a step
    that an auditor `vetoed` are neither kept nor carried over.

    A plan on which all verifiers failed is not verified. Raises NoVerdict if these are more than chance leaves (`is_outage`), or
    if a plan was given to none: an outage must not look like wrong plans.
    """
    labels = {row["step_id"]: row for row in steps.select(["step_id", "action_type", "value", "boxes"]).to_pylist()}
    votes: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for verdict in rows_in_batches(verdicts, ("candidate_id", "hit", "x", "y", "mean_logprob", "failure")):
        votes[verdict["candidate_id"]].append(verdict)
    decisions: dict[str, str] = {}
    verified: dict[str, list[dict[str, Any]]] = defaultdict(list)
    judged, unanswered = 0, []
    of_plan = ("candidate_id", "step_id", "planner", "plan", "gate", "duplicate_of")
    for row in rows_in_batches(candidates, of_plan):
        candidate, label = row["candidate_id"], labels[row["step_id"]]
        if row["gate"] != GATE_PASSED:
            decisions[candidate] = row["gate"]
        elif row["duplicate_of"] is not None:
            decisions[candidate] = DUPLICATE
        elif vetoed(row["step_id"], row["plan"]):
            decisions[candidate] = VETOED
        else:
            if label["boxes"]:
                judged += 1
                if all(vote["failure"] is not None for vote in votes[candidate]):
                    unanswered.append(candidate)
            kept = _verify(row, label, votes[candidate], config, iteration)
            decisions[candidate] = KEPT if kept else NOT_VERIFIED
            if kept:
                verified[row["step_id"]].append(kept)
    missing = [candidate for candidate in unanswered if not votes[candidate]]
    if missing or is_outage(len(unanswered), judged):
        first = (missing or unanswered)[0]
        raise NoVerdict(
            f"candidate {first}: no verifier answered ({len(votes[first])} failed), as for {len(unanswered)} of {judged} plans; "
            "see `verdicts`, and materialize it again once its servers are well"
        )
    old: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in previous.to_pylist() if previous is not None else []:
        if not vetoed(row["step_id"], row["plan"]):
            old[row["step_id"]].append(row)
    kept_rows: list[dict[str, Any]] = []
    for position, step_id in enumerate(labels):
        ranked = sorted(verified[step_id], key=lambda row: (-row["score"], row["candidate_id"]))
        for row in ranked[config.max_plans_per_step :]:
            decisions[row["candidate_id"]] = OVER_CAP
        stay = ranked[: config.max_plans_per_step]
        seen = short_hash(steps["screenshot"][position].as_py()) if stay else ""
        for row in stay:
            row["row_id"] = row_id(row["candidate_id"], row["plan"], seen, iteration)
            row["screenshot_hash"] = seen
        kept_rows += stay + _carried(stay, old[step_id], config)
    return (
        pa.Table.from_pylist(kept_rows, DATASET_SCHEMA),
        pa.table(
            [
                candidates["candidate_id"],
                candidates["step_id"],
                pa.array([decisions[c] for c in candidates["candidate_id"].to_pylist()], pa.string()),
            ],
            schema=DECISION_SCHEMA,
        ),
    )


def _verify(
    row: dict[str, Any], label: dict[str, Any], votes: Sequence[dict[str, Any]], config: Regeneration, iteration: int
) -> dict[str, Any] | None:
    """The D_k row of a candidate, or None if it is not verified."""
    boxes = [Box(x1, y1, x2, y2, Space.ORIGINAL) for x1, y1, x2, y2 in label["boxes"]]
    answered = [vote for vote in votes if vote["failure"] is None]
    hitting = [vote for vote in answered if vote["hit"]]
    score, box = 1.0, None
    if boxes:
        if not answered or not is_verified(len(hitting), len(answered), config):
            return None
        score = len(hitting) / len(answered) + _confidence(hitting) / 1000
        box = _most_hit(boxes, hitting)
    return {
        "step_id": row["step_id"],
        "plan": row["plan"],
        "action_type": label["action_type"],
        "value": label["value"],
        "box": box,
        "candidate_id": row["candidate_id"],
        "planner": row["planner"],
        "made_in": iteration,
        "hits": len(hitting),
        "answered": len(answered),
        "score": score,
    }


def _confidence(votes: Sequence[dict[str, Any]]) -> float:
    """The mean confidence exp(c_j) of some verifiers; 0 for none."""
    # min() before exp(): greedy float32 log-probabilities can be a hair above 0
    sure = [math.exp(min(0.0, vote["mean_logprob"])) for vote in votes]
    return sum(sure) / len(sure) if sure else 0.0


def _most_hit(boxes: Sequence[Box], hitting: Sequence[dict[str, Any]]) -> list[float]:
    """The target that most verifiers hit, [x1, y1, x2, y2]: see `select`."""

    def rank(box: Box) -> tuple[int, float]:
        inside = [vote for vote in hitting if box.contains(Point(vote["x"], vote["y"], Space.ORIGINAL))]
        return len(inside), _confidence(inside)

    best = max(boxes, key=rank)  # the first of equal ones
    return [best.x1, best.y1, best.x2, best.y2]


def _carried(
    kept: Sequence[dict[str, Any]], old: Sequence[dict[str, Any]], config: Regeneration
) -> list[dict[str, Any]]:
    """The rows of D_{k-1} for one step that D_k keeps. `old` has the best one first."""
    if config.carry_over == "none":
        return []
    if config.carry_over == "best_plan_per_step":
        return [] if kept else list(old[:1])
    new_plans = {row["plan"] for row in kept}
    return [row for row in old if row["plan"] not in new_plans]
