"""The verifier pool Φ: every member grounds every candidate that passed the gate (Eq. 3)."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from coepg_dagster.inference.agents import Grounder, refuse_outage
from coepg_dagster.inference.screens import Screens
from coepg_dagster.steps import GATE_PASSED, VERDICT_SCHEMA


def to_verify(candidates: pa.Table) -> pa.Table:
    """The candidates that verifiers ground: those that passed the gate and are no duplicates."""
    return candidates.filter(pc.and_(pc.equal(candidates["gate"], GATE_PASSED), pc.is_null(candidates["duplicate_of"])))


def give_verdicts(grounder: Grounder, name: str, candidates: pa.Table, screens: Screens) -> pa.Table:
    """The verdicts of pool member `name` (VERDICT_SCHEMA): one for each candidate to verify whose step has a target.

    Raises Ended in an outage of its server.
    """
    rows = [row for row in to_verify(candidates).to_pylist() if screens.boxes(row["step_id"])]
    groundings = grounder.ground([(row["step_id"], row["plan"]) for row in rows])
    refuse_outage(f"verifier {name}", groundings)
    return pa.Table.from_pylist(
        [
            {
                "candidate_id": row["candidate_id"],
                "step_id": row["step_id"],
                "verifier": name,
                "hit": grounding.hits(screens.boxes(row["step_id"])),
                "x": grounding.point and grounding.point.x,
                "y": grounding.point and grounding.point.y,
                "mean_logprob": None if grounding.failure else grounding.mean_logprob,
                "tokens": grounding.tokens,
                "text": grounding.text,
                "failure": grounding.failure,
            }
            for row, grounding in zip(rows, groundings, strict=True)
        ],
        VERDICT_SCHEMA,
    )
