"""The reward written the obvious way, for comparison: one plan, one grounder, one call of `generate` at a time.

Every grounder answers every plan, even of rollouts whose type or value is wrong; every call decodes its screenshot, renders
its prompt and encodes its image. Answers, weights and gate are those of C-DREM, so the rewards are the same.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from coepg_dagster.inference.agents import coordinate_tokens
from coepg_dagster.inference.processing import token_bytes, vision_token_ids
from coepg_dagster.prompts import grounder_messages, parse_grounder, parse_planner
from coepg_dagster.rewards.cdrem import token_f1


class PlainGrounder:
    """A grounder that calls `generate` of transformers once per plan, greedily."""

    def __init__(self, checkpoint: Path, max_tokens: int) -> None:
        self._processor = AutoProcessor.from_pretrained(checkpoint)
        self._model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()
        self._max_tokens = max_tokens
        self._suppressed = vision_token_ids(self._processor.tokenizer)

    @torch.inference_mode()
    def ask(self, screenshot: bytes, plan: str) -> tuple[tuple[float, float] | None, float]:
        """(point in pixels of the image that the model sees, mean log-probability of its coordinate tokens, or of all tokens)."""
        image = Image.open(io.BytesIO(screenshot)).convert("RGB")
        chat = grounder_messages(plan, "compact")
        prompt = self._processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        inputs = self._processor(text=[prompt], images=[image], return_tensors="pt")
        answer = self._model.generate(
            **inputs,
            max_new_tokens=self._max_tokens,
            do_sample=False,
            suppress_tokens=self._suppressed,
            output_logits=True,
            return_dict_in_generate=True,
        )
        ids = answer.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        logprobs = [
            float(torch.log_softmax(logits[0].float(), -1)[token])
            for logits, token in zip(answer.logits, ids, strict=True)
        ]
        pieces = [token_bytes(self._processor.tokenizer, token) for token in ids]
        if pieces and not pieces[-1]:  # the token that ends the answer
            pieces, ended = pieces[:-1], [logprobs.pop()]
        else:
            ended = []
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
        texts = [
            content if isinstance(content, str) else "".join(part["text"] for part in content)
            for content in (completion[0]["content"] for completion in completions)
        ]
        return self.score(texts, step_id)

    def score(self, texts: Sequence[str], step_ids: Sequence[str]) -> list[float]:
        """r of Eq. 9 for each planner answer on its step."""
        return [self._one(text, self._steps[step_id]) for text, step_id in zip(texts, step_ids, strict=True)]

    def _one(self, text: str, step: Mapping[str, Any]) -> float:
        answer = parse_planner(text)
        if answer is None:
            return 0.0
        powers, hits = [], []
        for name, grounder in self._grounders.items():
            self.calls += 1
            point, mean_logprob = grounder.ask(step["screenshot"], answer.plan)
            powers.append(math.exp(self._priors[name] * math.exp(min(0.0, mean_logprob))))
            hits.append(point is not None and any(_inside(point, box) for box in step["boxes"]))
        r_plan = sum(p for p, hit in zip(powers, hits, strict=True) if hit) / sum(powers) if step["boxes"] else 1.0
        right = answer.action_type == step["action_type"] and token_f1(answer.value, step["value"]) > 0.5
        return r_plan if right else 0.0


def _inside(point: tuple[float, float], box: Sequence[float]) -> bool:
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]
