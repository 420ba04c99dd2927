"""The planner pool Π: every member writes plans for every training step."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from coepg_dagster.experiment.models import Member
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.experiment.strict import ExperimentError
from coepg_dagster.inference.agents import Plan, Planner, PlannerInput, assert_answered, planner_inputs
from coepg_dagster.inference.engine import Failure, Sampling
from coepg_dagster.prompts import action_hint
from coepg_dagster.rewards.gate import gate_of
from coepg_dagster.steps import CANDIDATE_SCHEMA, GATE_NO_ANSWER, GATE_PASSED, short_hash


def write_candidates(
    planner: Planner,
    name: str,
    steps: pa.Table,
    config: Regeneration,
    seed: int,
) -> pa.Table:
    """`config.plans_per_planner` plans of pool member `name` for each step (CANDIDATE_SCHEMA, duplicates unmarked).

    A few steps may stay without an answer, so that one request that a server cannot answer does not stop the loop for ever:
    their rows have the gate GATE_NO_ANSWER and no text. Raises Ended if more than chance have none.
    """
    sampling = Sampling(config.max_plan_tokens, config.temperature, config.top_p, config.plans_per_planner, seed)
    labels = steps.select(["step_id", "action_type", "value"]).to_pylist()
    tasks = planner_inputs(steps)
    if config.hindsight_hint:
        hints = [action_hint(label["action_type"], label["value"]) for label in labels]
        tasks = [replace(task, hint=hint) for task, hint in zip(tasks, hints, strict=True)]
    answers = planner.answers(tasks, sampling)
    _refuse_outage(name, tasks, answers)
    rows = []
    for label, task, samples in zip(labels, tasks, answers, strict=True):
        prompt_hash = short_hash(json.dumps(task.messages(planner.style)).encode())
        for sample, plan in enumerate(samples):
            if isinstance(plan, Failure):
                text, answer, gate = "", None, GATE_NO_ANSWER
            else:
                text, answer = plan.text, plan.answer
                gate = gate_of(answer, label["action_type"], label["value"], config.value_mode)
            rows.append(
                {
                    "candidate_id": f"{label['step_id']}#{name}#{sample}",
                    "step_id": label["step_id"],
                    "planner": name,
                    "sample": sample,
                    "text": text,
                    "plan": answer and answer.plan,
                    "action_type": answer and answer.action_type,
                    "value": answer and answer.value,
                    "gate": gate,
                    "duplicate_of": None,
                    "prompt_hash": prompt_hash,
                    "sampling_seed": seed,
                }
            )
    return pa.Table.from_pylist(rows, CANDIDATE_SCHEMA)


def _refuse_outage(name: str, tasks: Sequence[PlannerInput], answers: Sequence[Sequence[Plan | Failure]]) -> None:
    """Prints which steps planner `name` left without an answer. Raises Ended if they are more than chance."""
    failed = {
        task.step_id: answer.reason
        for task, samples in zip(tasks, answers, strict=True)
        for answer in samples
        if isinstance(answer, Failure)
    }
    for step_id, reason in failed.items():
        print(f"planner {name}: no plan for step {step_id}: {reason}", flush=True)
    assert_answered(f"planner {name}", list(failed.values()), len(tasks), "steps")


def plan_tokens(plan: str) -> frozenset[str]:
    """The tokens by which two plans are compared: words, numbers and punctuation marks, lower-cased."""
    return frozenset(re.findall(r"\w+|[^\w\s]", plan.lower()))


def jaccard(a: frozenset[str], b: frozenset[str]) -> float:
    """|a ∩ b| / |a ∪ b|; two empty sets are equal."""
    return len(a & b) / len(a | b) if a or b else 1.0


def mark_duplicates(candidates: pa.Table, similar: float) -> pa.Table:
    """The table with `duplicate_of` set: the first plan of the same step, in table order, that is the same.

    Only plans that passed the gate are compared. Two are the same if their token sets are equal or their Jaccard index
    exceeds `similar`.
    """
    seen: dict[str, list[tuple[str, frozenset[str]]]] = {}
    marks: list[str | None] = []
    for row in candidates.select(["candidate_id", "step_id", "plan", "gate"]).to_pylist():
        mark = None
        if row["gate"] == GATE_PASSED:
            tokens, firsts = plan_tokens(row["plan"]), seen.setdefault(row["step_id"], [])
            mark = next((first for first, other in firsts if tokens == other or jaccard(tokens, other) > similar), None)
            if mark is None:
                firsts.append((row["candidate_id"], tokens))
        marks.append(mark)
    position = candidates.schema.get_field_index("duplicate_of")
    return candidates.set_column(position, CANDIDATE_SCHEMA.field("duplicate_of"), pa.array(marks, pa.string()))


def pool_members(open_members: Mapping[str, Member], trained: Mapping[str, Member]) -> dict[str, Member]:
    """The members of a pool by name: open models, then trained ones, newest first.

    Raises ExperimentError if two members have the same name, or there is none.
    """
    both = set(open_members) & set(trained)
    if both:
        raise ExperimentError(f"pool members need different names: {', '.join(sorted(both))}")
    if not open_members and not trained:
        raise ExperimentError(
            "the pool has no member: in iteration 0 only open models are in it, so `verifiers` must name at least one of them"
        )
    return {**open_members, **trained}
