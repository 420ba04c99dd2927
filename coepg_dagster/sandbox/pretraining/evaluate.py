"""Accuracy of a tiny model, with the Hugging Face code that also serves it: greedy, in batches.

These numbers are for the model cards. The loop is evaluated by `coepg_dagster.evaluation`, under published protocols.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from coepg_dagster import prompts
from coepg_dagster.sandbox.pretraining import tokenizer as tokens
from coepg_dagster.sandbox.pretraining.corpus import Corpus, ScreenStep
from coepg_dagster.sandbox.pretraining.wordings import Wording, describe, is_right, likely_actions, vague

POINT_TOKENS: Final = 8
ANSWER_TOKENS: Final = 96


@torch.no_grad()
def generate(
    model: Any,
    processor: Any,
    images: Sequence[NDArray[np.uint8]],
    messages: Sequence[list[prompts.Message]],
    max_new_tokens: int,
    *,
    batch: int | None = None,
    temperature: float | None = None,
) -> list[str]:
    """The answers to one chat per image; greedy, or sampled at `temperature` from torch's global random state.

    `batch` chats at a time; by default 64 on a CPU and 256 on a GPU.
    """
    batch = batch or (256 if model.device.type == "cuda" else 64)
    ids = processor.tokenizer.get_vocab()
    vision = [ids[name] for name in (tokens.IMAGE_PAD, tokens.VIDEO_PAD, tokens.VISION_START, tokens.VISION_END)]
    sampling = (
        {"do_sample": False} if temperature is None else {"do_sample": True, "temperature": temperature, "top_k": 0}
    )
    texts = [processor.apply_chat_template(chat, add_generation_prompt=True) for chat in messages]
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    answers = [""] * len(texts)
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        inputs = processor(
            text=[texts[i] for i in chosen],
            images=[Image.fromarray(images[i]) for i in chosen],
            padding=True,
            return_tensors="pt",
        ).to(model.device)
        output = model.generate(**inputs, max_new_tokens=max_new_tokens, suppress_tokens=vision, **sampling)
        new = output[:, inputs["input_ids"].shape[1] :]
        for i, text in zip(chosen, processor.tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
            answers[i] = text
    return answers


def ground(
    model: Any, processor: Any, images: Sequence[NDArray[np.uint8]], plans: Sequence[str]
) -> list[tuple[float, float] | None]:
    """The grounder's points, px; None where the answer is no point."""
    chats = [prompts.grounder_messages(plan, "compact") for plan in plans]
    return [prompts.parse_grounder(text) for text in generate(model, processor, images, chats, POINT_TOKENS)]


def inside(point: tuple[float, float] | None, boxes: Sequence[Sequence[float]]) -> bool:
    """Whether the point lies in one of the boxes, borders included."""
    return point is not None and any(b[0] <= point[0] <= b[2] and b[1] <= point[1] <= b[3] for b in boxes)


@dataclass(frozen=True)
class Rate:
    """A share of `count` cases, in per cent."""

    share: float
    count: int

    def __str__(self) -> str:
        return f"{self.share:.1f} ({self.count})"


def _rates(hits: Mapping[str, list[bool]]) -> dict[str, Rate]:
    return {name: Rate(100 * sum(values) / len(values), len(values)) for name, values in sorted(hits.items())}


def grounding(
    model: Any, processor: Any, screens: Corpus, indices: Sequence[int], wording: Wording, questions: int = 1200
) -> dict[str, Rate]:
    """Click-in-box of precise element descriptions, "all" and per kind; always on the same questions, at most `questions`."""
    rng = Random(0)
    pairs = [(i, e) for i in indices for e in screens.steps[i].askable]
    rng.shuffle(pairs)
    pairs = pairs[:questions]
    plans = []
    for i, e in pairs:
        element = screens.steps[i].elements[e]
        plans.append(describe(wording, element, screens.steps[i].elements, likely_actions(element.kind)[0], rng))
    points = ground(model, processor, [screens.images[i] for i, _ in pairs], plans)
    hits: dict[str, list[bool]] = defaultdict(list)
    for (i, e), point in zip(pairs, points, strict=True):
        element = screens.steps[i].elements[e]
        hit = inside(point, [element.box])
        hits["all"].append(hit)
        hits[element.kind].append(hit)
    return _rates(hits)


def plan(
    model: Any, processor: Any, screens: Corpus, indices: Sequence[int], temperature: float | None = None
) -> list[prompts.PlannerAnswer | None]:
    """The planner's answers to steps of `screens`; None where an answer cannot be read."""
    chats = [prompts.planner_messages(screens.steps[i].goal, screens.steps[i].history, "compact") for i in indices]
    images = [screens.images[i] for i in indices]
    texts = generate(model, processor, images, chats, ANSWER_TOKENS, temperature=temperature)
    return [prompts.parse_planner(text) for text in texts]


def _same_value(step: ScreenStep, answer: prompts.PlannerAnswer) -> bool:
    return prompts.normal_value(step.value).lower() == answer.value.lower()


def planning(
    model: Any,
    processor: Any,
    screens: Corpus,
    indices: Sequence[int],
    wordings: Sequence[Wording],
    *,
    temperature: float | None = None,
) -> dict[str, Rate]:
    """Share of steps whose answer can be read, whose type and value are right, and whose plan is precise or vague.

    "value" counts all steps, "typed value" those that have one. "plan" is right where it is one of the precise plans of
    the target; "vague" where it is a vague plan that fits the target.
    """
    hits: dict[str, list[bool]] = defaultdict(list)
    for i, answer in zip(indices, plan(model, processor, screens, indices, temperature), strict=True):
        step = screens.steps[i]
        hits["readable"].append(answer is not None)
        hits["type"].append(answer is not None and answer.action_type == step.action_type)
        hits["value"].append(answer is not None and _same_value(step, answer))
        if step.value:
            hits["typed value"].append(hits["value"][-1])
        if step.target >= 0:
            target = step.elements[step.target]
            text = "" if answer is None else answer.plan
            hits["plan"].append(is_right(text, wordings, target, step.elements, step.action_type))
            hits["vague"].append(any(text in vague(wording, target, step.action_type) for wording in wordings))
    return _rates(hits)


def pair(
    planner: tuple[Any, Any], grounder: tuple[Any, Any], screens: Corpus, indices: Sequence[int]
) -> dict[str, Rate]:
    """A planner and a grounder together: element accuracy, right type and value, and step success (all of them)."""
    answers = dict(zip(indices, plan(*planner, screens, indices), strict=True))
    plans = {i: answer.plan for i, answer in answers.items() if answer is not None}
    points = dict(zip(plans, ground(*grounder, [screens.images[i] for i in plans], list(plans.values())), strict=True))
    hits: dict[str, list[bool]] = defaultdict(list)
    for i, answer in answers.items():
        step = screens.steps[i]
        operation = answer is not None and answer.action_type == step.action_type and _same_value(step, answer)
        element = not step.boxes or inside(points.get(i), step.boxes)
        hits["element"].append(element)
        hits["operation"].append(operation)
        hits["step"].append(element and operation)
    return _rates(hits)
