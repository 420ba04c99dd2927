"""Arrow schemas of the loop's tables: labelled steps, candidates, verdicts, dataset rows, rollouts.

This module defines only what a row *is*; readers read rows, pools make them, rewards and evaluation score them.
Coordinates in these tables are pixels of the stored screenshot ("original" space), boxes are (x1, y1, x2, y2), borders
included.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

NO_VALUE: Final = ""
"""The normal form of an empty action value ("None" and "no input text" in other data sets are read as this)."""

BOX: Final = pa.list_(pa.float32(), 4)

STEP_SCHEMA: Final = pa.schema(
    [
        pa.field("step_id", pa.string(), nullable=False),  # unique over the whole benchmark
        pa.field("split", pa.string(), nullable=False),
        pa.field("episode_id", pa.string(), nullable=False),  # the task of macro averages and of clustered intervals
        pa.field("step_index", pa.int32(), nullable=False),  # position in the episode, from 0
        pa.field("family", pa.string(), nullable=False),  # MiniWoB++ task, website, or app
        pa.field("seed", pa.int64()),  # of the episode, where the benchmark has one
        pa.field("goal", pa.string(), nullable=False),  # Q
        pa.field("history", pa.list_(pa.string()), nullable=False),  # h_t, oldest first
        pa.field("screenshot", pa.binary(), nullable=False),  # o_t, encoded PNG or JPEG
        pa.field("width", pa.int32(), nullable=False),  # of the screenshot, px
        pa.field("height", pa.int32(), nullable=False),
        pa.field("boxes", pa.list_(BOX), nullable=False),  # every target box; empty: the action has no target
        pa.field("action_type", pa.string(), nullable=False),  # a^type
        pa.field("value", pa.string(), nullable=False),  # a^value, NO_VALUE where the action takes none
    ]
)
"""One labelled step: observation, task, history and the label action (Eq. 1)."""

VISIBLE: Final = ("goal", "history", "instruction")
"""The columns of a step that a model may see, besides its screenshot; only `prompts` puts them into words. `instruction`, which
some sources have (readers.rows), is null if models must not see it."""

CANDIDATE_SCHEMA: Final = pa.schema(
    [
        pa.field("candidate_id", pa.string(), nullable=False),  # step, planner and sample
        pa.field("step_id", pa.string(), nullable=False),
        pa.field("planner", pa.string(), nullable=False),  # name of the pool member
        pa.field("sample", pa.int32(), nullable=False),
        pa.field("text", pa.string(), nullable=False),  # as generated
        pa.field("plan", pa.string()),  # null: the text is no plan
        pa.field("action_type", pa.string()),
        pa.field("value", pa.string()),
        pa.field("gate", pa.string(), nullable=False),  # GATE_*
        pa.field("duplicate_of", pa.string()),  # candidate_id of the first plan that says the same
        pa.field("prompt_hash", pa.string(), nullable=False),  # of the messages that the planner was given
        pa.field("sampling_seed", pa.int64(), nullable=False),  # of the generator that drew this chunk of plans
    ]
)
"""One generated plan for one labelled step. Only those with gate `passed` and no `duplicate_of` are verified."""

GATE_PASSED: Final = "passed"
GATE_UNPARSED: Final = "unparsed"
GATE_WRONG_TYPE: Final = "wrong_type"
GATE_WRONG_VALUE: Final = "wrong_value"
GATE_NO_ANSWER: Final = "no_answer"  # a candidate that the server of its planner did not give
GATE_CUT: Final = "invalid_special_token"  # a rollout that was cut before a vision token

VERDICT_SCHEMA: Final = pa.schema(
    [
        pa.field("candidate_id", pa.string(), nullable=False),
        pa.field("step_id", pa.string(), nullable=False),
        pa.field("verifier", pa.string(), nullable=False),  # name of the pool member
        pa.field("hit", pa.bool_(), nullable=False),  # Acc_j of Eq. 3
        pa.field("x", pa.float64()),  # pixels of the stored screenshot; null: no coordinates in the answer
        pa.field("y", pa.float64()),
        pa.field("mean_logprob", pa.float64()),  # c_j of Eq. 6
        pa.field("tokens", pa.int32(), nullable=False),  # L of Eq. 6
        pa.field("text", pa.string(), nullable=False),
        pa.field("failure", pa.string()),  # set: the verifier gave no answer, which is no vote against the plan
    ]
)
"""One verifier's answer on one candidate; all of them are kept, so that every selection rule can be applied later."""

DATASET_SCHEMA: Final = pa.schema(
    [
        pa.field("step_id", pa.string(), nullable=False),
        pa.field("plan", pa.string(), nullable=False),
        pa.field("action_type", pa.string(), nullable=False),  # the label's
        pa.field("value", pa.string(), nullable=False),  # the label's
        pa.field("box", BOX),  # the target that the plan was verified against; null: the action has no target
        pa.field("candidate_id", pa.string(), nullable=False),
        pa.field("planner", pa.string(), nullable=False),
        pa.field("made_in", pa.int32(), nullable=False),  # the iteration whose pools made the row
        pa.field("hits", pa.int32(), nullable=False),
        pa.field("answered", pa.int32(), nullable=False),
        pa.field("score", pa.float64(), nullable=False),  # orders the plans of a step, see pools.selection
        pa.field("row_id", pa.string(), nullable=False),  # lasts: see row_id()
        pa.field("screenshot_hash", pa.string(), nullable=False),  # of the screenshot that plan and verifiers saw
    ]
)
"""One row (o, h, p, a) of D_k; o and h are looked up by step_id."""


def short_hash(content: bytes) -> str:
    """Sixteen hex digits of the SHA-256."""
    return hashlib.sha256(content).hexdigest()[:16]


def row_id(candidate_id: str, plan: str, screenshot_hash: str, made_in: int) -> str:
    """The id of a row of D_k: `r` and sixteen hex digits of a hash of candidate, plan, screenshot and iteration.

    It stays the same when D_k is made again with that content, and when the row is carried over into later iterations.
    """
    return "r" + short_hash(json.dumps([candidate_id, plan, screenshot_hash, made_in]).encode())


def fold_of(episode_id: str, folds: int) -> int:
    """The part, 0 .. folds - 1, of an episode, by a hash of its name: whole episodes, the same in every iteration."""
    return int.from_bytes(hashlib.sha256(episode_id.encode()).digest()[:8]) % folds


DECISION_SCHEMA: Final = pa.schema(
    [
        pa.field("candidate_id", pa.string(), nullable=False),
        pa.field("step_id", pa.string(), nullable=False),
        pa.field("decision", pa.string(), nullable=False),
    ]
)
"""Why each candidate is in D_k (`kept`) or not: a gate's name, `duplicate`, `vetoed`, `not_verified` or `over_cap`."""

CURATION_SCHEMA: Final = pa.schema(
    [
        pa.field("row_id", pa.string()),  # of D_{k-1}; null: a prompt of GRPO, which is a step's
        pa.field("step_id", pa.string(), nullable=False),
        pa.field("strategy", pa.string(), nullable=False),  # the plug-in that left it out
        pa.field("reason", pa.string(), nullable=False),
    ]
)
"""Why a row of D_{k-1} or a prompt was left out of a training by a data strategy (`strategies.curation`)."""

GRADER: Final = pa.struct(
    [
        pa.field("grounder", pa.string(), nullable=False),
        pa.field("x", pa.float64()),
        pa.field("y", pa.float64()),
        pa.field("hit", pa.bool_(), nullable=False),  # Acc_j, Eq. 3
        pa.field("score", pa.float64()),  # what Eq. 4 weighed: Acc_j, or the point score of the experiment
        pa.field("tokens", pa.int32(), nullable=False),  # L, Eq. 6
        pa.field("mean_logprob", pa.float64()),  # Eq. 6
        pa.field("confidence", pa.float64()),  # c_j as used
        pa.field("prior", pa.float64(), nullable=False),  # σ_j
        pa.field("weight", pa.float64(), nullable=False),  # w_j, Eq. 5
        pa.field("seconds", pa.float64(), nullable=False),  # this answer's share of the time of its batch
        pa.field("version", pa.string()),  # of the weights that answered
        pa.field("failure", pa.string()),
    ]
)

LIVE: Final = pa.struct(
    [
        pa.field("episode", pa.int32(), nullable=False),  # which of its group's
        pa.field("step", pa.int32(), nullable=False),  # position in the episode, from 0
        pa.field("x", pa.float64()),  # where ϕ_k put the action, pixels of the screenshot
        pa.field("y", pa.float64()),
        pa.field("entry", pa.string()),  # the action as in the next step's history; null: none was performed
        pa.field("failure", pa.string()),  # at the last step of an episode that was not rewarded: why
    ]
)
"""A rollout as a step of a whole episode on live pages (`training.live_episodes`)."""

PART: Final = pa.struct([pa.field("name", pa.string(), nullable=False), pa.field("score", pa.float64())])

ROLLOUT_SCHEMA: Final = pa.schema(
    [
        pa.field("optimizer_step", pa.int32(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),  # which prompt of the optimizer step
        pa.field("step_id", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("plan", pa.string()),
        pa.field("gate", pa.string(), nullable=False),
        pa.field("graders", pa.list_(GRADER), nullable=False),  # ϕ_k first; empty: gated, or the step has no target
        pa.field("parts", pa.list_(PART)),  # what terms and combiner made the reward of; empty where it is Eq. 9
        pa.field("reward", pa.float64(), nullable=False),  # Eq. 9
        pa.field("advantage", pa.float64(), nullable=False),  # Eq. 10
        pa.field("live", LIVE),  # null: the rollout is no step of a whole episode
        pa.field("sampled_in", pa.int32()),  # the earlier optimizer step of a replayed answer; null: this one
    ]
)
"""One rollout of GRPO with everything that decided its reward, so that any C-DREM variant can be computed from it.

The table is beside the weights of π'_k and not part of their data version, since seconds differ from run to run.
"""


def whole_episodes(steps: pa.Table, limit: int, among: Collection[str] | None = None, draw: str = "") -> pa.Table:
    """At most `limit` steps, in the order of the table: whole episodes, drawn by a hash of their names and of `draw`.

    The same steps are drawn each time, and every family keeps its share. `among`: only steps with these ids. Steps that
    are left over from one draw need another `draw`: by the same hash the episodes of the first come first again.
    """
    rows: dict[str, list[int]] = {}
    for row, (step_id, episode) in enumerate(
        zip(steps["step_id"].to_pylist(), steps["episode_id"].to_pylist(), strict=True)
    ):
        if among is None or step_id in among:
            rows.setdefault(episode, []).append(row)
    chosen: list[int] = []
    for episode in sorted(rows, key=lambda name: hashlib.sha256((draw + name).encode()).digest()):
        if len(chosen) + len(rows[episode]) <= limit:
            chosen += rows[episode]
    return at_rows(steps, chosen)


def at_rows(table: pa.Table, rows: Sequence[int]) -> pa.Table:
    """Some rows, in the order of the table. `Table.take` would copy all screenshots of the table first."""
    wanted = np.zeros(table.num_rows, dtype=bool)
    wanted[list(rows)] = True
    return table.filter(pa.array(wanted))


def rows_in_batches(table: pa.Table, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of these columns, of which few thousand at a time are Python objects: a table of a million takes gigabytes so."""
    for batch in table.select(list(columns)).to_batches(max_chunksize=10_000):
        yield from batch.to_pylist()
