"""The reward written the obvious way, for comparison: one plan, one grounder, one call of `generate` at a time.

Every grounder answers every plan, even of rollouts whose type or value is wrong; every call decodes its screenshot, renders
its prompt and encodes its image. Answers, weights and gate are those of C-DREM, so the rewards are the same. `BatchedReward` is
one step better: one call of `generate` for all plans of a grounder.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from coepg_dagster.inference.agents import coordinate_tokens
from coepg_dagster.inference.processing import token_bytes, vision_token_ids
from coepg_dagster.prompts import PlannerAnswer, grounder_messages, parse_grounder, parse_planner
from coepg_dagster.rewards.cdrem import token_f1

Vote = tuple[tuple[float, float] | None, float]
"""A point in pixels of the image that the model sees, and the mean log-probability of its coordinate tokens, or of all tokens."""


class PlainGrounder:
    """A grounder that calls `generate` of transformers once per plan, or for many plans, greedily."""

    def __init__(
        self, checkpoint: Path | str, max_tokens: int, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        self._processor = AutoProcessor.from_pretrained(checkpoint)
        self._processor.tokenizer.padding_side = "left"
        model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=dtype)
        self._model = model.eval().to(device)
        self._max_tokens = max_tokens
        self._suppressed = vision_token_ids(self._processor.tokenizer)
        ends = model.generation_config.eos_token_id
        self._ends = frozenset([ends] if isinstance(ends, int) else ends)

    def ask(self, screenshot: bytes, plan: str) -> Vote:
        """The grounder's answer to one plan."""
        return self.ask_all([(screenshot, plan)])[0]

    @torch.inference_mode()
    def ask_all(self, pairs: Sequence[tuple[bytes, str]]) -> list[Vote]:
        """The grounder's answers to (screenshot, plan) pairs, by one call of `generate`."""
        images = [[Image.open(io.BytesIO(screenshot)).convert("RGB")] for screenshot, _ in pairs]
        prompts = [
            self._processor.apply_chat_template(
                grounder_messages(plan, "compact"), tokenize=False, add_generation_prompt=True
            )
            for _, plan in pairs
        ]
        inputs = self._processor(text=prompts, images=images, padding=True, return_tensors="pt").to(self._model.device)
        answer = self._model.generate(
            **inputs,
            max_new_tokens=self._max_tokens,
            do_sample=False,
            suppress_tokens=self._suppressed,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = answer.sequences[:, inputs["input_ids"].shape[1] :]
        logprobs = torch.stack(
            [
                torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, None])[:, 0]
                for logits, tokens in zip(answer.logits, ids.T, strict=True)
            ],
            1,
        )
        return [self._vote(*row) for row in zip(ids.tolist(), logprobs.tolist(), strict=True)]

    def _vote(self, ids: list[int], logprobs: list[float]) -> Vote:
        end = next((i for i, token in enumerate(ids) if token in self._ends), None)
        ended = [] if end is None else [logprobs[end]]
        ids, logprobs = ids[:end], logprobs[:end]  # the token that ends the answer, and padding, are left out
        pieces = [token_bytes(self._processor.tokenizer, token) for token in ids]
        chosen = [logprobs[t] for t in coordinate_tokens(pieces)] or logprobs or ended
        return parse_grounder(b"".join(pieces).decode(errors="replace")), sum(chosen) / len(chosen)


class PlainReward:
    """Eq. 3 to 9 in a double loop over rollouts and grounders; a reward function as TRL wants it."""

    __name__ = "plain"

    def __init__(self, grounders: Mapping[str, PlainGrounder], priors: Mapping[str, float], steps: pa.Table) -> None:
        self._grounders, self._priors = grounders, priors
        self._steps = {row["step_id"]: row for row in steps.to_pylist()}
        self.calls = 0

    def __call__(self, completions: Sequence[Any], step_id: Sequence[str], **_: Any) -> list[float]:
        return self.score([text_of(completion) for completion in completions], step_id)

    def score(self, texts: Sequence[str], step_ids: Sequence[str]) -> list[float]:
        """r of Eq. 9 for each planner answer on its step."""
        rows = [(parse_planner(text), self._steps[step_id]) for text, step_id in zip(texts, step_ids, strict=True)]
        votes = iter(self._votes([(step["screenshot"], answer.plan) for answer, step in rows if answer is not None]))
        return [0.0 if answer is None else self._reward(answer, step, next(votes)) for answer, step in rows]

    def _votes(self, pairs: Sequence[tuple[bytes, str]]) -> Iterable[dict[str, Vote]]:
        """The votes of all grounders on each (screenshot, plan)."""
        for pair in pairs:
            self.calls += len(self._grounders)
            yield {name: grounder.ask(*pair) for name, grounder in self._grounders.items()}

    def _reward(self, answer: PlannerAnswer, step: Mapping[str, Any], votes: Mapping[str, Vote]) -> float:
        powers, hits = [], []
        for name, (point, mean_logprob) in votes.items():
            powers.append(math.exp(self._priors[name] * math.exp(min(0.0, mean_logprob))))
            hits.append(point is not None and any(_inside(point, box) for box in step["boxes"]))
        r_plan = sum(p for p, hit in zip(powers, hits, strict=True) if hit) / sum(powers) if step["boxes"] else 1.0
        right = answer.action_type == step["action_type"] and token_f1(answer.value, step["value"]) > 0.5
        return r_plan if right else 0.0


class BatchedReward(PlainReward):
    """The same with one call of `generate` for all plans of a grounder."""

    __name__ = "batched"

    def _votes(self, pairs: Sequence[tuple[bytes, str]]) -> Iterable[dict[str, Vote]]:
        if not pairs:
            return []
        self.calls += len(self._grounders)
        by_grounder = [grounder.ask_all(pairs) for grounder in self._grounders.values()]
        return [dict(zip(self._grounders, votes, strict=True)) for votes in zip(*by_grounder, strict=True)]


def text_of(completion: Any) -> str:
    """The text of one of TRL's conversational completions."""
    content = completion[0]["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _inside(point: tuple[float, float], box: Sequence[float]) -> bool:
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]
