"""vLLM in this process, with what it does to requests in its place: it needs an environment of its own (test_vllm.py)."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from coepg_dagster import running
from coepg_dagster.artifacts import write_steps
from coepg_dagster.experiment.models import Models, Serving
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.inference import vllm_server
from coepg_dagster.inference.engine import EngineRefused, Failure, Generation, Request, Sampling
from coepg_dagster.inference.processing import load_processor, probe
from coepg_dagster.inference.vllm_engine import VllmEngine
from coepg_dagster.jobs import CandidatesJob
from coepg_dagster.prompts import grounder_messages


class LLM:
    """Ends every answer at once; as vLLM, refuses all prompts where one of them is too long."""

    gpus: list[str | None] = []
    logprob = -0.5

    def __init__(self, model: str, max_model_len: int, **_: Any) -> None:
        self._processor, self._longest = load_processor(model), max_model_len
        self.llm_engine = SimpleNamespace(engine_core=None)
        self.gpus.append(os.environ.get("CUDA_VISIBLE_DEVICES"))

    def generate(self, prompts: list[dict[str, Any]], settings: list[Any], use_tqdm: bool) -> list[Any]:
        stop, made = self._processor.tokenizer.eos_token_id, []
        for prompt in prompts:
            images = [prompt["multi_modal_data"]["image"]]
            ids = self._processor(text=[prompt["prompt"]], images=images, do_resize=False)["input_ids"][0]
            if len(ids) >= self._longest:
                raise ValueError(f"The decoder prompt (length {len(ids)}) is longer than the maximum model length")
            answer = SimpleNamespace(index=0, finish_reason="stop", token_ids=[stop])
            answer.logprobs = [{stop: SimpleNamespace(logprob=self.logprob)}]
            made.append(SimpleNamespace(prompt_token_ids=ids, num_cached_tokens=0, outputs=[answer]))
        return made


@pytest.fixture(autouse=True)
def _in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "gpus", [])
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=LLM, SamplingParams=SimpleNamespace))  # type: ignore[arg-type]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")


def engine(checkpoint: Path, device: str = "cpu") -> VllmEngine:
    return VllmEngine(str(checkpoint), dtype="float32", device=device, serving=Serving(), share=1, weights="w")


def test_a_prompt_that_is_too_long_costs_itself(
    random_checkpoint: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "longest", lambda _: 300)
    image = probe(load_processor(str(random_checkpoint(0)))).image
    requests = [Request(image, grounder_messages(plan, "compact")) for plan in ("one", "far " * 400, "two")]
    (first,), (long,), (second,) = engine(random_checkpoint(0)).generate(requests, Sampling(8))
    assert isinstance(first, Generation) and isinstance(second, Generation)
    assert isinstance(long, Failure) and "longer than the 300 that vLLM takes: raise `vllm_context`" in long.reason
    # an answer that might not fit would be cut, by a setting that is to change no answer
    [[cut]] = engine(random_checkpoint(0)).generate(requests[:1], Sampling(280))
    assert isinstance(cut, Failure)


def test_a_model_that_overflows_answers_nothing(
    random_checkpoint: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "logprob", math.nan)
    with pytest.raises(EngineRefused, match="a log-probability is no number: the model overflows"):
        engine(random_checkpoint(0))


def test_all_models_of_a_process_are_on_its_gpu(
    random_checkpoint: Callable[[int], Path], models: Models, steps: pa.Table, tmp_path: Path
) -> None:
    """A planner and a grounder that are open together, or members one after another."""
    write_steps(steps, tmp_path / "steps.arrow", ["train"])
    job = CandidatesJob(
        out=tmp_path,
        scratch=tmp_path,
        steps=tmp_path / "steps.arrow",
        models=models.model_copy(update={"engine": "vllm"}),
        device="cuda",
        batch_size=8,
        seed=3,
        processes=1,
        members=dict.fromkeys(("one", "two"), str(random_checkpoint(0))),
        train_split="train",
        max_steps=None,
        config=Regeneration(plans_per_planner=1, max_plan_tokens=8),
    )
    work = running.chunked(job)
    work._make_in_process(work.chunks(), "cuda:1")
    assert LLM.gpus == ["6", "6"]
    assert all(map(work.is_there, work.chunks()))
