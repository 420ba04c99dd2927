"""The reward of GRPO: Eq. 3 to 9 over a batch of rollouts, as TRL calls it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa

from coepg_dagster.experiment import Grpo
from coepg_dagster.geometry import Point, Space
from coepg_dagster.inference.agents import Grounder, GrounderPool, Grounding, Plan, Query, refuse_outage
from coepg_dagster.inference.screens import Screens
from coepg_dagster.prompts import parse_planner
from coepg_dagster.rewards.cdrem import gated, plan_reward
from coepg_dagster.rewards.gate import gate_of
from coepg_dagster.rewards.variants import Weighing
from coepg_dagster.steps import GATE_PASSED
from coepg_dagster.training.examples import completion_text


class CdremReward:
    """Eq. 3 to 9 over a batch of rollouts. `rows` holds those of the last batch (ROLLOUT_SCHEMA without the advantage).

    No grounder is queried for a rollout that fails the gate, since its reward is 0 anyway. A step without a target has
    r_plan = 1 once the gate passes.

    Args:
        grounders: name → grounder, ϕ_k first.
        priors: name → σ_j.
        steps: the training steps, with labels and boxes.
    """

    __name__ = "cdrem"

    def __init__(
        self,
        grounders: Mapping[str, Grounder],
        priors: Mapping[str, float],
        steps: pa.Table,
        screens: Screens,
        config: Grpo,
    ) -> None:
        if not grounders:
            raise ValueError("C-DREM needs at least one grounder: without a vote every plan would be right")
        self._grounders, self._screens = dict(grounders), screens
        sigma = tuple(priors[name] for name in grounders)
        self._weigh = Weighing(sigma, config.confidence, config.confidence_temperature, config.ensemble)
        self._labels = {row["step_id"]: row for row in steps.select(["step_id", "action_type", "value"]).to_pylist()}
        self._pool: GrounderPool | None = None
        self.rows: list[dict[str, Any]] = []

    @property
    def remote(self) -> bool:
        """Whether any grounder computes remotely, and so can answer while this process samples."""
        return any(grounder.remote for grounder in self._grounders.values())

    @contextmanager
    def pool(self) -> Iterator[GrounderPool]:
        """A context for one batch of rollouts: `ask` while it is sampled, then `score`. At its end open queries are dropped."""
        if self._pool is not None:
            yield self._pool
            return
        with GrounderPool(self._grounders) as self._pool:
            try:
                yield self._pool
            finally:
                self._pool = None

    def ask(self, texts: Sequence[str], step_ids: Sequence[str]) -> None:
        """Within `pool`: starts the votes on planner answers that `score` will need later, and returns at once."""
        assert self._pool is not None
        _, _, queries = self._gated(texts, step_ids)
        self._pool.query(list(queries.values()))

    def __call__(self, completions: Sequence[Any], step_id: Sequence[str], **_: Any) -> list[float]:
        """r of Eq. 9 for each of B completions; `step_id` is the dataset's column, one for each completion."""
        texts = [completion_text(completion) for completion in completions]
        return self.score(texts, step_id)

    def recall(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Gives the grounders their answers on the earlier rollouts of a continued run (rows of ROLLOUT_SCHEMA)."""
        kept: dict[str, dict[Query, Grounding]] = {name: {} for name in self._grounders}
        for row in rows:
            for answer in row["graders"]:
                if answer["failure"] is None:
                    point = None if answer["x"] is None else Point(answer["x"], answer["y"], Space.ORIGINAL)
                    kept[answer["grounder"]][row["step_id"], row["plan"]] = Grounding(
                        point, answer["mean_logprob"], answer["tokens"], weights=answer["version"] or ""
                    )
        for name, groundings in kept.items():
            self._grounders[name].keep(groundings)

    def score(self, texts: Sequence[str], step_ids: Sequence[str]) -> list[float]:
        """r of Eq. 9 for each planner answer on its step, shape (B,).

        Raises NoVerdict if all grounders fail on a plan, Ended in an outage of a grounder's server.
        """
        plans, gates, queries = self._gated(texts, step_ids)
        votes: dict[int, tuple[Grounding, ...]] = {}
        if queries:
            with self.pool() as pool:
                by_grounder = pool.groundings(list(queries.values()))
                for name, groundings in zip(self._grounders, by_grounder, strict=True):
                    refuse_outage(f"grounder {name}", groundings)
                votes = dict(zip(queries, zip(*by_grounder, strict=True), strict=True))
        r_plan = np.ones(len(texts))
        self.rows = []
        for i, (plan, gate) in enumerate(zip(plans, gates, strict=True)):
            graders: list[dict[str, Any]] = []
            if i in votes:
                boxes = self._screens.boxes(step_ids[i])
                r_plan[i], graders = self._vote(votes[i], [vote.hits(boxes) for vote in votes[i]])
            self.rows.append(
                {
                    "step_id": step_ids[i],
                    "text": plan.text,
                    "plan": plan.answer and plan.answer.plan,
                    "gate": gate,
                    "graders": graders,
                }
            )
        passes = np.array([gate == GATE_PASSED for gate in gates], dtype=float)
        rewards = gated(passes, passes, r_plan)
        for row, reward in zip(self.rows, rewards, strict=True):
            row["reward"] = float(reward)
        return [float(reward) for reward in rewards]

    def _gated(self, texts: Sequence[str], step_ids: Sequence[str]) -> tuple[list[Plan], list[str], dict[int, Query]]:
        """(the plan of each text, its gate, and by position the queries for those that need a vote)."""
        plans = [Plan(text, parse_planner(text)) for text in texts]
        labels = [self._labels[step_id] for step_id in step_ids]
        gates = [
            gate_of(p.answer, label["action_type"], label["value"]) for p, label in zip(plans, labels, strict=True)
        ]
        queries = {
            i: (step_id, plan.answer.plan)
            for i, (step_id, plan, gate) in enumerate(zip(step_ids, plans, gates, strict=True))
            if gate == GATE_PASSED and plan.answer is not None and self._screens.boxes(step_id)
        }
        return plans, gates, queries

    def _vote(self, votes: Sequence[Grounding], hits: Sequence[bool]) -> tuple[float, list[dict[str, Any]]]:
        """(r_plan of Eq. 4, a GRADER for each grounder), from the N grounders' votes and hits, shape (N,) each."""
        c, weights = self._weigh([vote.mean_logprob for vote in votes], [vote.failure is None for vote in votes])
        graders = [
            {
                "grounder": name,
                "x": vote.point and vote.point.x,
                "y": vote.point and vote.point.y,
                "hit": hit,
                "tokens": vote.tokens,
                "mean_logprob": vote.mean_logprob if vote.failure is None else None,
                "confidence": float(confidence) if vote.failure is None else None,
                "prior": float(prior),
                "weight": float(weight),
                "seconds": vote.seconds,
                "version": vote.weights or None,
                "failure": vote.failure,
            }
            for name, vote, hit, confidence, prior, weight in zip(
                self._grounders, votes, hits, c, self._weigh.priors, weights, strict=True
            )
        ]
        return float(plan_reward(weights, np.array(hits))), graders
