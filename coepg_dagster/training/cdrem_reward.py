"""The reward of GRPO: Eq. 3 to 9 over a batch of rollouts, as TRL calls it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from coepg_dagster.experiment.training import Grpo
from coepg_dagster.geometry import Point, Space
from coepg_dagster.inference.agents import Grounder, GrounderPool, Grounding, Plan, Query, refuse_outage
from coepg_dagster.inference.screens import Screens
from coepg_dagster.prompts import parse_planner
from coepg_dagster.rewards.answers import Answers, Floats
from coepg_dagster.rewards.cdrem import plan_reward
from coepg_dagster.rewards.composite import parts_of
from coepg_dagster.rewards.gate import gate_of
from coepg_dagster.rewards.variants import Weighing
from coepg_dagster.training.examples import completion_text
from coepg_dagster.training.scoring import all_terms, as_parts, boxes_of, in_groups, size_of


class CdremReward:
    """Eq. 3 to 9 over a batch of rollouts. `rows` holds those of the last batch (ROLLOUT_SCHEMA without the advantage).

    No grounder is queried for a rollout whose reward its point does not decide: by Eq. 9, one that fails the gate. A step
    without a target has r_plan = 1 once the gate passes. With plug-ins the reward is that of `config.composite`, where the point
    score takes the place of Acc_j in Eq. 4.

    Args:
        grounders: name → grounder, ϕ_k first.
        priors: name → σ_j.
        steps: the training steps, with labels and boxes.
        references: step id → its verified plans in D_{k-1}, for terms that ask for them.
    """

    __name__ = "cdrem"

    def __init__(
        self,
        grounders: Mapping[str, Grounder],
        priors: Mapping[str, float],
        steps: pa.Table,
        screens: Screens,
        config: Grpo,
        references: Mapping[str, Sequence[str]] = MappingProxyType({}),
    ) -> None:
        if not grounders:
            raise ValueError("C-DREM needs at least one grounder: without a vote every plan would be right")
        self._grounders, self._screens = dict(grounders), screens
        self._composite, self._references = config.composite, references
        sigma = tuple(priors[name] for name in grounders)
        self._weigh = Weighing(sigma, config.confidence, config.confidence_temperature, config.ensemble)
        self._labels = {row["step_id"]: row for row in steps.select(["step_id", "action_type", "value"]).to_pylist()}
        self._value_mode = config.value_mode
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
        _, _, _, queries = self._gated(texts, step_ids)
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
        plans, gates, parts, queries = self._gated(texts, step_ids)
        votes: dict[int, tuple[Grounding, ...]] = {}
        if queries:
            with self.pool() as pool:
                by_grounder = pool.groundings(list(queries.values()))
                for name, groundings in zip(self._grounders, by_grounder, strict=True):
                    refuse_outage(f"grounder {name}", groundings)
                votes = dict(zip(queries, zip(*by_grounder, strict=True), strict=True))
        lowest = self._composite.lowest_point
        r_plan = np.array([lowest if self._screens.boxes(step_id) else 1.0 for step_id in step_ids])
        self.rows, answers = [], []
        for i, (plan, gate) in enumerate(zip(plans, gates, strict=True)):
            places = _corners(votes.get(i, ()))
            boxes, size = boxes_of(self._screens.boxes(step_ids[i])), size_of(self._screens.viewport(step_ids[i]))
            graders: list[dict[str, Any]] = []
            if i in votes:
                scores = self._composite.point_scores(Answers(places, boxes, size))
                r_plan[i], graders = self._vote(
                    votes[i], [vote.hits(self._screens.boxes(step_ids[i])) for vote in votes[i]], scores
                )
            self.rows.append(
                {
                    "step_id": step_ids[i],
                    "text": plan.text,
                    "plan": plan.answer and plan.answer.plan,
                    "gate": gate,
                    "graders": graders,
                }
            )
            own = places[:1] if i in votes else np.full((1, 4), np.nan)
            said = plan.answer.plan if plan.answer else ""
            known = self._references.get(step_ids[i], ())
            answers.append(Answers(own, boxes, size, [plan.text], [said], references=known))
        terms = all_terms(self._composite, in_groups(step_ids, answers))
        rewards = self._composite.combine(*parts, r_plan, terms)
        made = as_parts(self._composite, *parts, r_plan, terms)
        for row, reward, of_row in zip(self.rows, rewards, made, strict=True):
            row |= {"parts": of_row, "reward": float(reward)}
        return [float(reward) for reward in rewards]

    def _gated(
        self, texts: Sequence[str], step_ids: Sequence[str]
    ) -> tuple[list[Plan], list[str], tuple[Floats, Floats, Floats], dict[int, Query]]:
        """(the plan of each text, its gate, (parsed, type, value) of shape (B,) each, the queries for those that need a vote)."""
        plans = [Plan(text, parse_planner(text)) for text in texts]
        labels = [(self._labels[step_id]["action_type"], self._labels[step_id]["value"]) for step_id in step_ids]
        pairs = list(zip(plans, labels, strict=True))
        gates = [gate_of(plan.answer, *label, self._value_mode) for plan, label in pairs]
        read = [parts_of(plan.answer, *label, self._value_mode) for plan, label in pairs]
        parsed, types, values = np.array(read, dtype=np.float64).reshape(-1, 3).T
        needed = self._composite.needs_point(parsed, types, values)
        queries = {
            i: (step_id, plan.answer.plan)
            for i, (step_id, plan) in enumerate(zip(step_ids, plans, strict=True))
            if needed[i] and plan.answer is not None and self._screens.boxes(step_id)
        }
        return plans, gates, (parsed, types, values), queries

    def _vote(
        self, votes: Sequence[Grounding], hits: Sequence[bool], scores: Floats
    ) -> tuple[float, list[dict[str, Any]]]:
        """(r_plan of Eq. 4, a GRADER for each grounder), from the N grounders' votes, hits and scores, shape (N,) each."""
        c, weights = self._weigh([vote.mean_logprob for vote in votes], [vote.failure is None for vote in votes])
        graders = [
            {
                "grounder": name,
                "x": vote.point and vote.point.x,
                "y": vote.point and vote.point.y,
                "hit": hit,
                "score": float(score),
                "tokens": vote.tokens,
                "mean_logprob": vote.mean_logprob if vote.failure is None else None,
                "confidence": float(confidence) if vote.failure is None else None,
                "prior": float(prior),
                "weight": float(weight),
                "seconds": vote.seconds,
                "version": vote.weights or None,
                "failure": vote.failure,
            }
            for name, vote, hit, score, confidence, prior, weight in zip(
                self._grounders, votes, hits, scores, c, self._weigh.priors, weights, strict=True
            )
        ]
        return float(plan_reward(weights, scores)), graders


def _corners(votes: Sequence[Grounding]) -> Floats:
    """The point of each vote as a box without size, NaN where there is none, shape (N, 4)."""
    points = [(vote.point.x, vote.point.y) if vote.point else (np.nan, np.nan) for vote in votes]
    return np.array([(*point, *point) for point in points], dtype=np.float64).reshape(-1, 4)
