"""Training examples: chats made from D_k and the labelled steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, List, Value

from coepg_dagster.artifacts import all_steps
from coepg_dagster.experiment.training import GrounderRl, GrounderTarget, Grpo, PolicyTraining
from coepg_dagster.geometry import Box, Space
from coepg_dagster.inference.agents import planner_inputs
from coepg_dagster.inference.screens import Screens
from coepg_dagster.jobs import TrainingJob
from coepg_dagster.prompts import (
    Message,
    Style,
    assistant,
    box_answer,
    end_to_end_answer,
    grounder_answer,
    grounder_messages,
    planner_answer,
)
from coepg_dagster.provenance import Agent
from coepg_dagster.refusal import Refusal
from coepg_dagster.steps import short_hash, whole_episodes
from coepg_dagster.training.launch import section_of

_CHAT = List({"role": Value("string"), "content": List({"type": Value("string"), "text": Value("string")})})


class NothingToTrainOn(Refusal, ValueError):
    """D_{k-1} holds no row for the training of this model."""


def _chat(messages: list[Message]) -> list[Message]:
    """The messages with the same keys in every part, as Arrow needs it; chat templates read `type` only."""
    return [
        {"role": m["role"], "content": [{"type": p["type"], "text": p.get("text")} for p in m["content"]]}
        for m in messages
    ]


def planner_examples(dataset: pa.Table, steps: pa.Table, screens: Screens, style: Style) -> Dataset:
    """One example per row of D_k: (screenshot, Q, h_t) → plan, label type, label value."""
    tasks = {task.step_id: task for task in planner_inputs(steps)}
    rows = [
        {
            "step_id": row["step_id"],
            "row_id": row.get("row_id"),
            "prompt": _chat(tasks[row["step_id"]].messages(style)),
            "completion": _chat(assistant(planner_answer(row["plan"], row["action_type"], row["value"]))),
            **_weight(row),
        }
        for row in dataset.to_pylist()
    ]
    return _examples(rows, screens)


def grounder_examples(
    dataset: pa.Table, screens: Screens, style: Style, space: Space, target: GrounderTarget = "centre"
) -> Dataset:
    """One example per row of D_k with a target: (screenshot, plan) → centre of its box, or the box; integers in `space`."""
    rows = []
    for row in dataset.to_pylist():
        if row["box"] is None:
            continue
        rows.append(
            {
                "step_id": row["step_id"],
                "row_id": row.get("row_id"),
                "prompt": _chat(grounder_messages(row["plan"], style)),
                "completion": _chat(assistant((_centre if target == "centre" else _box)(row, screens, space))),
                **_weight(row),
            }
        )
    return _examples(rows, screens)


def end_to_end_examples(dataset: pa.Table, steps: pa.Table, screens: Screens, style: Style, space: Space) -> Dataset:
    """One example per row of D_k without its plan: (screenshot, Q, h_t) → label type, label value, centre of its box."""
    tasks = {task.step_id: task for task in planner_inputs(steps)}
    rows = []
    for row in dataset.to_pylist():
        point = "" if row["box"] is None else _centre(row, screens, space)
        answer = end_to_end_answer(row["action_type"], row["value"], point)
        rows.append(
            {
                "step_id": row["step_id"],
                "row_id": row.get("row_id"),
                "prompt": _chat(tasks[row["step_id"]].end_to_end_messages(style)),
                "completion": _chat(assistant(answer)),
                **_weight(row),
            }
        )
    return _examples(rows, screens)


def _centre(row: dict[str, Any], screens: Screens, space: Space) -> str:
    """The centre of a row's box as a grounder's answer, integers in `space`."""
    centre = screens.viewport(row["step_id"]).point(_box_of(row).centre, space)
    return grounder_answer(round(centre.x), round(centre.y))


def _box(row: dict[str, Any], screens: Screens, space: Space) -> str:
    """A row's box as a grounder's answer, integers in `space`."""
    box = screens.viewport(row["step_id"]).box(_box_of(row), space)
    return box_answer(round(box.x1), round(box.y1), round(box.x2), round(box.y2))


def _box_of(row: dict[str, Any]) -> Box:
    x1, y1, x2, y2 = row["box"]
    return Box(x1, y1, x2, y2, Space.ORIGINAL)


def _weight(row: dict[str, Any]) -> dict[str, float]:
    """The weight of a row in the loss, where data strategies gave it one (`training.curating`)."""
    return {"weight": row["weight"]} if "weight" in row else {}


def asked_steps(job: TrainingJob, config: Grpo) -> frozenset[str]:
    """The ids of the train steps that GRPO asks about, as `config.prompts` and `max_prompts` say. Loads no model.

    Of whole episodes on live pages they are those that begin one.

    Raises NothingToTrainOn if they do not fill an optimizer step.
    """
    if config.prompts == "dataset":
        asked = frozenset(job.rows()["step_id"].to_pylist())
    else:
        asked = frozenset(unseen_steps(job.rows(), all_steps(job.steps), job.train_split))
    if config.plays:
        steps = job.train_steps().select(["step_id", "step_index"]).to_pylist()
        asked &= {row["step_id"] for row in steps if row["step_index"] == 0}
    refuse_few(len(asked), config)
    if config.max_prompts is not None:
        steps = all_steps(job.steps).select(["step_id", "episode_id"])
        asked = frozenset(whole_episodes(steps, config.max_prompts, among=asked)["step_id"].to_pylist())
        refuse_few(len(asked), config, [f"grpo.max_prompts ({config.max_prompts}; whole episodes)"])
    return asked


def unseen_steps(rows: pa.Table, steps: pa.Table, train_split: str) -> list[str]:
    """The ids of train steps that what was trained on D_k (`rows`) has not seen, in the order of `steps`, those of all splits.

    Left out are steps with a row, with goal and screenshot of a step that has one, and what would be a leak: steps with an
    episode, or with goal and screenshot, of another split.
    """
    covered = set(rows["step_id"].to_pylist())
    hashes = (short_hash(encoded.as_py()) for encoded in steps["screenshot"])
    names = (steps[name].to_pylist() for name in ("step_id", "split", "episode_id", "goal"))
    about = [
        (step_id, split, episode, (goal, seen))
        for step_id, split, episode, goal, seen in zip(*names, hashes, strict=True)
    ]
    episodes = {episode for _, split, episode, _ in about if split != train_split}
    known = {shown for step_id, split, _, shown in about if split != train_split or step_id in covered}
    return [
        step_id
        for step_id, split, episode, shown in about
        if split == train_split and episode not in episodes and shown not in known
    ]


def steps_of_episodes(steps: pa.Table, some: Collection[str]) -> list[str]:
    """The ids of all steps of the episodes that steps with the ids `some` are of."""
    rows, wanted = steps.select(["step_id", "episode_id"]).to_pylist(), set(some)
    episodes = {row["episode_id"] for row in rows if row["step_id"] in wanted}
    return [row["step_id"] for row in rows if row["episode_id"] in episodes]


def plans_of(rows: pa.Table) -> dict[str, list[str]]:
    """Step id → the plans of D_{k-1} for it, in their order."""
    plans: dict[str, list[str]] = {}
    for step_id, plan in zip(rows["step_id"].to_pylist(), rows["plan"].to_pylist(), strict=True):
        plans.setdefault(step_id, []).append(plan)
    return plans


@dataclass(frozen=True)
class Facts:
    """What advantages may be made by, of each step by its id: its target's share of the screen (0 without one), its episode and
    its position in it; and the positions of prompts that are asked one after another (None: each alone)."""

    areas: Mapping[str, float]
    places: Mapping[str, tuple[str, int]]
    together: Sequence[Sequence[int]] | None = None


def facts_of(steps: pa.Table, prompts: Sequence[str] | None) -> Facts:
    """The facts of all steps. `prompts`: the steps of the prompts, if those of an episode are to be asked together.

    Raises NothingToTrainOn if no episode has two prompts.
    """
    columns = ("step_id", "episode_id", "step_index", "width", "height", "boxes")
    rows = {row["step_id"]: row for row in steps.select(columns).to_pylist()}
    areas = {
        step_id: min(((x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in row["boxes"]), default=0.0)
        / (row["width"] * row["height"])
        for step_id, row in rows.items()
    }
    facts = Facts(areas, {step_id: (row["episode_id"], row["step_index"]) for step_id, row in rows.items()})
    if prompts is None:
        return facts
    episodes: dict[str, list[int]] = {}
    for position, step_id in enumerate(prompts):
        episodes.setdefault(facts.places[step_id][0], []).append(position)
    if all(len(positions) == 1 for positions in episodes.values()):
        raise NothingToTrainOn(
            f"grpo.advantage compares the steps of an episode, and each of the {len(prompts)} prompts is of another one: remove "
            "ui_s1_levels, or give steps of whole episodes (`episode_id`, `step_index`)"
        )
    together = [sorted(positions, key=lambda p: facts.places[prompts[p]][1]) for positions in episodes.values()]
    return replace(facts, together=together)


def refuse_few(prompts: int, config: PolicyTraining, left_out: Sequence[str] = ()) -> None:
    """Raises NothingToTrainOn if so few prompts do not fill an optimizer step: TRL would drop them and train nothing.

    `left_out`: the settings that left the others out, there being enough without them.
    """
    if prompts >= config.prompts_per_step:
        return
    if left_out:
        raise NothingToTrainOn(
            f"{prompts} prompts are left by {' and '.join(left_out)}, fewer than one optimizer step needs: loosen that, or lower "
            f"{section_of(config)}.prompts_per_step ({config.prompts_per_step})"
        )
    if isinstance(config, GrounderRl):
        raise NothingToTrainOn(
            f"D_{{k-1}} has {prompts} rows with a target, fewer than one optimizer step needs: lower "
            f"grounder_rl.prompts_per_step ({config.prompts_per_step})"
        )
    remedy = f"lower grpo.prompts_per_step ({config.prompts_per_step})"
    steps = "steps that begin an episode" if isinstance(config, Grpo) and config.plays else "steps"
    if isinstance(config, Grpo) and config.prompts == "unseen":
        raise NothingToTrainOn(
            f"grpo.prompts is `unseen`, and {prompts} training {steps} have no row in D_{{k-1}}, fewer than one optimizer step "
            f"needs: lower benchmark.max_train_steps, so that steps are left for GRPO, {remedy}, or set grpo.prompts to `dataset`"
        )
    raise NothingToTrainOn(f"D_{{k-1}} covers {prompts} {steps}, fewer than one optimizer step needs: {remedy}")


def grpo_prompts(
    asked: Collection[str], steps: pa.Table, screens: Screens, style: Style, agent: Agent = "decoupled"
) -> Dataset:
    """One prompt for each of `steps` with an id in `asked`, in their order, with its step_id for the reward."""
    rows = [
        {
            "step_id": task.step_id,
            "prompt": _chat(task.messages(style) if agent == "decoupled" else task.end_to_end_messages(style)),
        }
        for task in planner_inputs(steps)
        if task.step_id in asked
    ]
    return _examples(rows, screens)


def grounder_prompts(dataset: pa.Table, screens: Screens, style: Style) -> Dataset:
    """One prompt for each row of D_k with a target, with its step_id and plan for the reward."""
    rows = [
        {"step_id": row["step_id"], "plan": row["plan"], "prompt": _chat(grounder_messages(row["plan"], style))}
        for row in dataset.to_pylist()
        if row["box"] is not None
    ]
    return _examples(rows, screens)


def completion_text(completion: Any) -> str:
    """The text of one of TRL's conversational completions."""
    content = completion[0]["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content if part["type"] == "text")


def _examples(rows: list[dict[str, Any]], screens: Screens) -> Dataset:
    """The rows as a dataset that looks up screenshots when it is read, so that each is in memory once, not once per plan."""
    if not rows:
        raise NothingToTrainOn("D_{k-1} has no usable row: its decisions say why the candidates were dropped")

    def with_images(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {**batch, "images": [[screens.image(step_id)] for step_id in batch["step_id"]]}

    kinds = {"step_id": Value("string"), "row_id": Value("string"), "plan": Value("string"), "weight": Value("float64")}
    features = {name: kinds.get(name, _CHAT) for name in rows[0]}
    return Dataset.from_list(rows, features=Features(features)).with_transform(with_images)
