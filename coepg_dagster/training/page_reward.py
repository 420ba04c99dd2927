"""The reward of GRPO from live pages: a plan is grounded by ϕ_k, the action is performed, and the page says whether it succeeds.

C-DREM's reward of the same answer is recorded beside it, so that the two can be compared (`agreement`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from coepg_dagster.inference.agents import refuse_outage
from coepg_dagster.prompts import ACTION_TYPES, parse_planner
from coepg_dagster.rewards.cdrem import NoVerdict
from coepg_dagster.training.cdrem_reward import CdremReward
from coepg_dagster.training.environments import Environments, is_lost

CDREM, PAGE = "cdrem", "page"
"""The parts of a rollout's reward in ROLLOUT_SCHEMA: that of C-DREM, which does not count, and the page's, which does."""
HALF: Final = 0.5
"""C-DREM says yes from this reward on: the graders with most weight hit."""


class PageReward(CdremReward):
    """1 where the page says that the action succeeds, else 0. An answer that cannot be performed has 0, and no page is asked.

    The label decides nothing: an action other than the label's that the page rewards has 1. Equal actions at one step are
    performed once, as pages are deterministic. Where two environments died with a question, its reward is 0.
    """

    __name__ = "page"

    def __init__(self, *args: Any, environments: Environments, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        steps: pa.Table = args[2]
        seen = ("step_id", "family", "seed", "step_index", "goal", "action_type", "value", "boxes")
        self._steps = {row["step_id"]: row for row in steps.select(list(seen)).to_pylist()}
        self._environments = environments
        self._known: dict[tuple[Any, ...], bool] = {}

    def score(self, texts: Sequence[str], step_ids: Sequence[str]) -> list[float]:
        """As CdremReward's, but by pages.

        Raises NoVerdict where ϕ_k gave no answer, Ended where all environments failed or a page is not the recorded one.
        """
        of_cdrem = super().score(texts, step_ids)
        actions = self._actions(texts, step_ids)
        new = list(dict.fromkeys(action for action in actions if action is not None and action not in self._known))
        for action, answer in zip(new, self._environments.ask([self._question(a) for a in new]), strict=True):
            if not is_lost(answer):  # else the next answer like it is tried again
                self._known[action] = bool(answer["success"])
        rewards = [float(action is not None and self._known.get(action, False)) for action in actions]
        for row, cdrem, reward in zip(self.rows, of_cdrem, rewards, strict=True):
            row |= {"reward": reward, "parts": [{"name": CDREM, "score": cdrem}, {"name": PAGE, "score": reward}]}
        return rewards

    def _actions(self, texts: Sequence[str], step_ids: Sequence[str]) -> list[tuple[Any, ...] | None]:
        """(step, type, value, x, y) of each answer; None: it cannot be performed."""
        answers = [parse_planner(text) for text in texts]
        asked = {
            row: (step_id, answer.plan)
            for row, (step_id, answer) in enumerate(zip(step_ids, answers, strict=True))
            if answer is not None and answer.action_type in ACTION_TYPES
        }
        name, grounder = next(iter(self._grounders.items()))
        groundings = grounder.ground(list(asked.values()))
        refuse_outage(f"grounder {name}", groundings)
        if failed := [grounding.failure for grounding in groundings if grounding.failure]:
            raise NoVerdict(
                f"grounder {name} gave no answer for {len(failed)} of {len(groundings)} plans, so that no page can judge them: "
                f"{failed[0]}. A reward is never silently 0: see to its engine and run the step again"
            )
        actions: list[tuple[Any, ...] | None] = [None] * len(texts)
        for row, grounding in zip(asked, groundings, strict=True):
            answer, point = answers[row], grounding.point
            assert answer is not None
            size = self._screens.viewport(step_ids[row]).original
            if point is not None and 0 <= point.x < size.width and 0 <= point.y < size.height:
                actions[row] = (step_ids[row], answer.action_type, answer.value, point.x, point.y)
        return actions

    def _question(self, action: tuple[Any, ...]) -> dict[str, Any]:
        step_id, action_type, value, x, y = action
        step = self._steps[step_id]
        label = {"label_type": step["action_type"], "label_value": step["value"], "label_boxes": step["boxes"]}
        about = {name: step[name] for name in ("family", "seed", "step_index", "goal")}
        return {**about, **label, "action_type": action_type, "value": value, "x": x, "y": y}


def agreement(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """How often C-DREM (yes from HALF on) and the page say the same of an answer, from rollouts (ROLLOUT_SCHEMA) with both parts.

    Returns their number, the share on which they agree, Cohen's kappa (None where one of them always says the same), the shares
    of what C-DREM accepts that the page rewards, and of what the page rewards that C-DREM accepts, and the share on which ϕ_k's
    own hit and the page agree: the rest of the difference is what verifiers hit and ϕ_k, whose point is performed, does not.
    Shares in per cent, None over nothing.

    >>> hits = [{"hit": True}, {"hit": False}]
    >>> part = lambda *said: {"parts": [{"name": n, "score": s} for n, s in zip(("cdrem", "page"), said)], "graders": hits}
    >>> agreement([part(1.0, 1.0), part(0.7, 0.0), part(0.0, 0.0), part(0.4, 1.0)])
    {'rollouts': 4, 'agree': 50.0, 'kappa': 0.0, 'cdrem_is_right': 50.0, 'page_is_found': 50.0, 'own_hit_agrees': 50.0}
    """
    said = []
    own = []
    for row in rows:
        parts = {part["name"]: part["score"] for part in row["parts"] or ()}
        if CDREM in parts and PAGE in parts:
            said.append((parts[CDREM] >= HALF, parts[PAGE] > 0))
            own.append(any(grader["hit"] for grader in row["graders"][:1]) == said[-1][1])
    n = len(said)
    both, yes, rewarded = (
        sum(kind) for kind in ([c and p for c, p in said], [c for c, _ in said], [p for _, p in said])
    )
    same = sum(c == p for c, p in said)
    chance = (yes * rewarded + (n - yes) * (n - rewarded)) / n**2 if n else 1.0
    return {
        "rollouts": n,
        "agree": 100 * same / n if n else None,
        "kappa": (same / n - chance) / (1 - chance) if chance < 1 else None,
        "cdrem_is_right": 100 * both / yes if yes else None,
        "page_is_found": 100 * both / rewarded if rewarded else None,
        "own_hit_agrees": 100 * sum(own) / n if n else None,
    }
