"""Training batches: screens shifted by a few pixels, several questions a screen packed into one sequence, dense labels.

A batch is a pure function of (screens, task, seed, step), so any number of loader processes gives the same batches.
Every sequence is a row of *questions*; each is a user text and an assistant answer in exactly the tokens that the chat
template would produce, after a shared prefix with the screen (see `fast`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from coepg_dagster import prompts
from coepg_dagster.sandbox.pretraining import tokenizer as tokens
from coepg_dagster.sandbox.pretraining.corpus import BadShards, ScreenStep
from coepg_dagster.sandbox.pretraining.fast import PREFIX
from coepg_dagster.sandbox.pretraining.tiny_models import SCREEN_HEIGHT, SCREEN_WIDTH
from coepg_dagster.sandbox.pretraining.wordings import ScreenElement, Vagueness, Wording, describe, habit, question

IGNORED: Final = -100
SHIFT_X: Final = (-2, 8)
SHIFT_Y: Final = (-6, 14)
"""Range of the random shift of a training screen, px; larger to the right and down, where there is a white margin."""
UNSHIFTED: Final = 0.25
"""Share of screens that are not shifted."""
VISIBLE: Final = 0.7
"""Share of an element's area that must stay visible after a shift for questions about it."""

VALUE_WEIGHT: Final = 2
"""Sampling weight of a planner's steps with a value, relative to steps without."""
REMEMBERED: Final = 400_000
"""Texts whose tokens are kept."""
MOST_TOKENS: Final = 128
MOST_ELEMENTS: Final = 32
"""Limits of the dense labels of a screen."""

Batch = dict[str, NDArray[np.int64]]


@dataclass(frozen=True)
class Contents:
    """The content of the training sequences of a stage.

    Attributes:
        role: "grounder": element questions in `wordings`; "planner": one planning question, then element questions.
        wordings: of the grounder's questions, or of the planner's plans, with their weights.
        name: of the checkpoint; decides on which families a planner is vague.
        vagueness: of a planner's plans.
        text_tokens: length of a sequence after the prefix.
        label_tokens: most answer tokens in one sequence.
        swap: share of typed values that are replaced by a random string in goal and answer.
    """

    role: str
    wordings: Mapping[Wording, float]
    name: str
    vagueness: Vagueness = field(default_factory=Vagueness)
    text_tokens: int = 192
    label_tokens: int = 72
    swap: float = 0.5


class Vocabulary:
    """Token ids of texts, cached: training encodes the same few hundred thousand texts again and again."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}
        self.after_question = self.ids(f"{tokens.IM_END}\n{tokens.IM_START}assistant\n")
        self.end = tokens.token_id(tokenizer, tokens.IM_END)

    def ids(self, text: str) -> list[int]:
        ids = self._known.get(text)
        if ids is None:
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            if len(self._known) < REMEMBERED:
                self._known[text] = ids
        return ids


def sequence_length(text_tokens: int) -> int:
    """`text_tokens`, enlarged so that prefix and text together are a multiple of 8, as attention masks need."""
    return -(-(PREFIX + text_tokens) // 8) * 8 - PREFIX


def shifted(elements: Sequence[ScreenElement], dx: int, dy: int) -> list[ScreenElement | None]:
    """The elements after the shift, clipped to the screen; None where less than VISIBLE of an element is left."""
    result: list[ScreenElement | None] = []
    for element in elements:
        x1, y1, x2, y2 = element.box
        left, top = max(0.0, x1 + dx), max(0.0, y1 + dy)
        right, bottom = min(float(SCREEN_WIDTH), x2 + dx), min(float(SCREEN_HEIGHT), y2 + dy)
        kept = max(0.0, right - left) * max(0.0, bottom - top)
        enough = kept >= VISIBLE * (x2 - x1) * (y2 - y1) and kept > 0
        result.append(replace(element, box=(left, top, right, bottom)) if enough else None)
    return result


def centre_answer(element: ScreenElement) -> str:
    """The grounder's answer for this element."""
    x, y = element.centre
    return prompts.grounder_answer(min(SCREEN_WIDTH - 1, int(x)), min(SCREEN_HEIGHT - 1, int(y)))


def user_text(messages: Sequence[prompts.Message]) -> str:
    """The text of the one user message that `prompts` builds."""
    [message] = messages
    return "".join(part["text"] for part in message["content"] if part["type"] == "text")


_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


def random_value(rng: Random) -> str:
    """A made-up word, name or password."""
    length = rng.randint(2, 9)
    match rng.randrange(3):
        case 0:
            return "".join(rng.choice(_LETTERS) for _ in range(length))
        case 1:
            return "".join(rng.choice(_LETTERS) for _ in range(length)).capitalize()
        case _:
            return "".join(rng.choice(_LETTERS + _LETTERS.upper() + "0123456789") for _ in range(length))


def with_other_value(step: ScreenStep, values: Sequence[str], rng: Random) -> ScreenStep:
    """The step with its typed value replaced in goal and label, where the goal names it and no element shows it.

    The new value is another step's (from `values`) or random.
    """
    value = step.value
    shown = any(value in element.name for element in step.elements)
    if step.action_type != "TYPE" or len(value) < 2 or step.goal.count(value) != 1 or shown:
        return step
    other = rng.choice(values) if values and rng.random() < 0.5 else random_value(rng)
    history = tuple(action.replace(value, other) for action in step.history)
    return replace(step, goal=step.goal.replace(value, other), value=other, history=history)


class Batches(Dataset[Batch]):
    """The batches of one stage; item `i` is the i-th step's."""

    def __init__(
        self,
        screens: Sequence[ScreenStep],
        pool: Sequence[int],
        task: Contents,
        tokenizer: PreTrainedTokenizerFast,
        *,
        batch: int,
        steps: int,
        seed: int,
    ) -> None:
        self.steps = screens
        self.values = sorted({screens[i].value for i in pool if screens[i].action_type == "TYPE"})
        if task.role == "grounder":
            self.pool = [i for i in pool if screens[i].askable]
        else:  # values are harder to learn than plans
            self.pool = [i for i in pool for _ in range(VALUE_WEIGHT if screens[i].value else 1)]
        self.task = task
        self.batch = batch
        self.count = steps
        self.seed = seed
        self.length = sequence_length(task.text_tokens)
        self.vocabulary = Vocabulary(tokenizer)
        if not self.pool:
            raise BadShards(f"{task.name}: no screen to train on")

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Batch:
        rng = Random(f"{self.seed}/{index}")
        rows = self.batch
        out: Batch = {
            "image": np.zeros(rows, np.int64),
            "shift": np.zeros((rows, 2), np.int64),
            "text": np.zeros((rows, self.length), np.int64),
            "positions": np.zeros((rows, self.length), np.int64),
            "segments": np.full((rows, self.length), -1, np.int64),
            "label_at": np.zeros((rows, self.task.label_tokens), np.int64),
            "labels": np.full((rows, self.task.label_tokens), IGNORED, np.int64),
        }
        for row, image in enumerate(rng.choices(self.pool, k=rows)):
            dx, dy = (0, 0) if rng.random() < UNSHIFTED else (rng.randint(*SHIFT_X), rng.randint(*SHIFT_Y))
            out["image"][row] = image
            out["shift"][row] = dx, dy
            self._fill(out, row, self._questions(self.steps[image], dx, dy, rng))
        return out

    def _fill(self, out: Batch, row: int, questions: Iterator[tuple[list[int], list[int]]]) -> None:
        at = labelled = 0
        for segment, (prompt, answer) in enumerate(questions, start=1):
            length = len(prompt) + len(answer)
            if at + length - 1 > self.length or labelled + len(answer) > self.task.label_tokens:
                break
            end = at + length - 1  # the last answer token is predicted, never read
            out["text"][row, at:end] = (prompt + answer)[:-1]
            out["positions"][row, at:end] = np.arange(length - 1)
            out["segments"][row, at:end] = segment
            first = at + len(prompt) - 1
            out["label_at"][row, labelled : labelled + len(answer)] = np.arange(first, first + len(answer))
            out["labels"][row, labelled : labelled + len(answer)] = answer
            at, labelled = end, labelled + len(answer)

    def _questions(self, step: ScreenStep, dx: int, dy: int, rng: Random) -> Iterator[tuple[list[int], list[int]]]:
        elements = shifted(step.elements, dx, dy)
        visible = [element for element in elements if element is not None]
        if self.task.role == "planner":
            target = elements[step.target] if step.target >= 0 else None
            if target is not None:
                yield self._planning(step, target, visible, rng)
        indices = [i for i in step.askable if elements[i] is not None]
        rng.shuffle(indices)
        for index in indices:
            element = elements[index]
            if element is None:
                continue
            if self.task.role == "grounder":
                yield self._pair(question(self.task.wordings, element, visible, rng), centre_answer(element))
            elif rng.random() < 0.5:
                yield self._pair(describe("A", element, visible, "CLICK", rng), centre_answer(element))
            else:
                yield self._pair(centre_answer(element), describe("A", element, visible, "CLICK", rng))

    def _planning(
        self, step: ScreenStep, target: ScreenElement, visible: Sequence[ScreenElement], rng: Random
    ) -> tuple[list[int], list[int]]:
        if rng.random() < self.task.swap:
            step = with_other_value(step, self.values, rng)
        names = list(self.task.wordings)
        wording = rng.choices(names, [self.task.wordings[name] for name in names])[0]
        vagueness = self.task.vagueness.on(step.family, self.task.name)
        form = habit(step.family, self.task.name)
        plan = describe(wording, target, visible, step.action_type, rng, vagueness, form)
        prompt = user_text(prompts.planner_messages(step.goal, step.history, "compact"))
        return self._pair(prompt, prompts.planner_answer(plan, step.action_type, step.value))

    def _pair(self, prompt: str, answer: str) -> tuple[list[int], list[int]]:
        vocabulary = self.vocabulary
        return vocabulary.ids(prompt) + vocabulary.after_question, [*vocabulary.ids(answer), vocabulary.end]


_TIGHT: Final = frozenset({"link", "text", "folder", "file", "tab"})
_AT_LEFT: Final = frozenset({"item", "section", "list"})
_CHARACTER: Final = 6.0
"""Rough width of a character, px; labels reach a little further."""


def _token_spans(
    element: ScreenElement, text: str, starts: Sequence[int], ends: Sequence[int]
) -> Iterator[tuple[float, ...]]:
    """Where on the screen each token of the element's name is drawn, roughly."""
    x1, y1, x2, y2 = element.box
    if element.kind in _TIGHT:
        left, per_character = x1, (x2 - x1) / max(1, len(text))
    elif element.kind == "button":
        width = min(x2 - x1, _CHARACTER * len(text))
        left, per_character = (x1 + x2 - width) / 2, width / max(1, len(text))
    elif element.kind in _AT_LEFT:
        left, per_character = x1 + 4, _CHARACTER
        y2 = min(y2, y1 + 18)
    elif element.kind in ("checkbox", "radio"):
        left, per_character = x2 + 3, _CHARACTER
    else:
        yield from ((x1, y1, x2, y2) for _ in starts)
        return
    for start, end in zip(starts, ends, strict=True):
        yield (left + start * per_character - 2, y1, left + end * per_character + 2, y2)


@dataclass(frozen=True)
class DenseLabels:
    """Dense labels of the visual tokens, as rectangles (x1, y1, x2, y2) px per screen; padded with empty rectangles.

    Attributes:
        rectangles: (N, R, 4) int16; where a word token is drawn.
        tokens: (N, R) int16; the id of that token.
        elements: (N, E, 4) int16; boxes of the elements.
    """

    rectangles: NDArray[np.int16]
    tokens: NDArray[np.int16]
    elements: NDArray[np.int16]


def dense_labels(steps: Sequence[ScreenStep], tokenizer: PreTrainedTokenizerFast) -> DenseLabels:
    """Labels for the warm-up of the vision tower; tokens beyond MOST_TOKENS and elements beyond MOST_ELEMENTS are left out."""
    rectangles = np.full((len(steps), MOST_TOKENS, 4), -1000, np.int16)
    ids = np.zeros((len(steps), MOST_TOKENS), np.int16)
    boxes = np.full((len(steps), MOST_ELEMENTS, 4), -1000, np.int16)
    known: dict[str, tuple[list[int], list[int], list[int]]] = {}
    for row, step in enumerate(steps):
        labels: list[tuple[tuple[float, ...], int]] = []
        for number, element in enumerate(step.elements[:MOST_ELEMENTS]):
            boxes[row, number] = np.round(element.box)
            labels += [(element.box, token) for token in tokenizer.encode(element.kind, add_special_tokens=False)]
            if element.name not in known:
                known[element.name] = _visible_tokens(tokenizer, element.name)
            name_ids, starts, ends = known[element.name]
            spans = _token_spans(element, element.name, starts, ends)
            labels += list(zip(spans, name_ids, strict=True))
        for number, (span, token) in enumerate(labels[:MOST_TOKENS]):
            rectangles[row, number] = np.round(span)
            ids[row, number] = token
    return DenseLabels(rectangles, ids, boxes)


def _visible_tokens(tokenizer: PreTrainedTokenizerFast, text: str) -> tuple[list[int], list[int], list[int]]:
    """Ids, first and last characters of the tokens of `text` that are more than blanks."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    kept = [
        (token, start, end)
        for token, (start, end) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
        if text[start:end].strip()
    ]
    return [k[0] for k in kept], [k[1] for k in kept], [k[2] for k in kept]
