"""Rollouts from vLLM: the settings of TRL, what is refused, and what can be checked without a GPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import GenerationConfig
from trl import GRPOConfig
from trl.trainer import grpo_trainer

from coepg_dagster.experiment.models import Models, Serving
from coepg_dagster.experiment.training import Grpo
from coepg_dagster.inference.processing import load_processor, vision_token_ids
from coepg_dagster.inference.transformers_engine import load_checkpoint
from coepg_dagster.progress import Ended
from coepg_dagster.training import sampling
from coepg_dagster.training.cdrem_reward import CdremReward
from coepg_dagster.training.grpo import train_grpo
from coepg_dagster.training.grpo_trainer import CdremTrainer
from coepg_dagster.training.sampling import sampling_settings
from tests.jobs import grpo_job, quiet

VLLM = Grpo(rollouts="vllm")


def settings(config: Grpo, serving: Serving, tokenizer: Any, longest: int = 100) -> dict[str, Any]:
    return sampling_settings(config, serving, tokenizer, "cuda", longest=longest, seconds=90.0)


@pytest.fixture(scope="module")
def tokenizer(random_checkpoint: Callable[[int], Path]) -> Any:
    return load_processor(str(random_checkpoint(0))).tokenizer


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM and a GPU were here."""
    monkeypatch.setattr(sampling, "_require_vllm", lambda device: None)


def test_groups_are_sampled_as_generate_would_and_answers_are_reported_when_they_end(
    either_checkpoint: Path,
) -> None:
    """Groups of several sizes and lengths; some share the words and not the screenshot, some the screenshot and not the words."""
    model, processor = load_checkpoint(either_checkpoint, "float32", "cpu")
    model.train()
    one, two = (Image.effect_noise((96, 128), 90).convert("RGB") for _ in range(2))
    groups = [
        (one, "Click OK", 3),
        (two, "Click OK", 4),
        (two, "Enter red into blue. Click red.", 1),
        (one, "Click", 4),
    ]
    rows = [(image, words) for image, words, size in groups for _ in range(size)]
    texts = [
        processor.apply_chat_template(
            [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": words}]}], tokenize=False
        )
        for _, words in rows
    ]
    images = [[image.copy()] for image, _ in rows]
    inputs = processor(text=texts, images=images, return_tensors="pt", padding=True, padding_side="left")
    # a random model hardly ever ends by itself: a third of its vocabulary may
    ends = list(range(0, len(processor.tokenizer), 3))
    config = GenerationConfig(
        do_sample=True,
        max_new_tokens=6,
        temperature=0.7,
        top_k=0,
        eos_token_id=ends,
        pad_token_id=ends[0],
        suppress_tokens=[ends[1], ends[1] + 1],
    )

    def sampled() -> list[list[int]]:
        torch.manual_seed(3)
        return model.generate(**inputs, generation_config=config)[:, inputs["input_ids"].shape[1] :].tolist()

    reported: list[dict[int, list[int]]] = []
    prefills = []
    hook = model.model.visual.register_forward_pre_hook(
        lambda _, given, settings: prefills.append(len(settings["grid_thw"])), with_kwargs=True
    )
    with sampling.sampling_groups(model, model, reported.append):
        answers = sampled()
    assert answers == sampled(), "afterwards the model's own `generate` samples, the same"
    hook.remove()
    assert prefills == [len(groups), len(rows)]
    assert len(reported) > 1 and not {ends[1], ends[1] + 1} & {token for answer in answers for token in answer}
    lengths = [{len(answer) for answer in part.values()} for part in reported]
    assert all(len(of_part) == 1 for of_part in lengths) and lengths == sorted(lengths, key=min), "at once"
    whole = {
        row: answer[: next(t for t, token in enumerate(answer) if token in ends) + 1]
        for row, answer in enumerate(answers)
        if set(answer) & set(ends)
    }
    assert {row: answer for part in reported for row, answer in part.items()} == whole


def test_neither_engine_samples_vision_tokens(tokenizer: Any, installed: None) -> None:
    unwanted = vision_token_ids(tokenizer)
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") in unwanted and len(unwanted) == 4
    without_vllm = settings(Grpo(), Serving(), tokenizer)
    assert without_vllm == {"use_vllm": False, "generation_kwargs": {"suppress_tokens": unwanted}}
    bias = settings(VLLM, Serving(), tokenizer)["generation_kwargs"]["logit_bias"]
    assert bias == {token: -100.0 for token in unwanted}


def test_where_vllm_runs_is_a_resource_and_reaches_trl(tokenizer: Any, installed: None, tmp_path: Path) -> None:
    serving = Serving(context=2048, rollout_memory=0.25, rollout_sleep=False)
    beside_policy = GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, **settings(VLLM, serving, tokenizer, 2048)
    )
    assert (beside_policy.use_vllm, beside_policy.vllm_mode, beside_policy.vllm_max_model_length) == (
        True,
        "colocate",
        2048,
    )
    assert (beside_policy.vllm_gpu_memory_utilization, beside_policy.vllm_enable_sleep_mode) == (0.25, False)
    assert settings(VLLM, Serving(), tokenizer)["vllm_enable_sleep_mode"] is True
    url = "http://127.0.0.1:8000"
    server = settings(VLLM, Serving(rollout_server=url), tokenizer)
    assert (server["vllm_mode"], server["vllm_server_base_url"], server["vllm_server_timeout"]) == ("server", url, 90.0)
    with pytest.raises(Ended, match=r"2049 tokens, vLLM takes 2048: raise `vllm_context`"):
        settings(VLLM, serving, tokenizer, 2049)


def test_vllm_that_cannot_be_used_is_refused_with_the_alternative(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Ended, match=r"needs a GPU .*use `grpo.rollouts: transformers`"):
        sampling_settings(VLLM, Serving(), tokenizer, "cpu", longest=9, seconds=1)
    with pytest.raises(Ended, match=r"not installed here: install the extra `vllm`"):
        settings(VLLM, Serving(), tokenizer)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text('__version__ = "0.1.0"')
    about = tmp_path / "vllm-0.1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Ended, match=r"TRL currently supports vLLM versions from .*You have version 0\.1\.0"):
        settings(VLLM, Serving(), tokenizer)
    sys.modules.pop("vllm", None)


class OtherSampler:
    """Stands in for TRL's vLLM: another copy of the policy, given its weights, samples from prompt tokens and images.

    As vLLM does, it writes the first image token that it finds out to as many as the image has features.
    """

    made: list[OtherSampler] = []

    def __init__(self, model: Any, processing_class: Any, **settings: Any) -> None:
        self.policy, self.settings, self.mode = model, settings, settings["mode"]
        self.copy, self.processor = load_checkpoint(model.name_or_path, "float32", "cpu")
        self.syncs = 0
        OtherSampler.made.append(self)

    def sync_weights(self) -> None:
        self.syncs += 1
        self.copy.load_state_dict(self.policy.state_dict())

    @torch.no_grad()
    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any) -> Any:
        answers, logprobs, expanded, token = [], [], [], self.processor.image_token_id
        for ids, [image] in zip(prompts, images, strict=True):
            seen = self.processor.image_processor(images=[image], return_tensors="pt")
            features = int(seen["image_grid_thw"].prod()) // self.processor.image_processor.merge_size**2
            first = ids.index(token)
            expanded.append(ids[:first] + [token] * features + ids[first + 1 :])
            if ids.count(token) > 1:  # the answer would be about another prompt
                answers.append([token])
                logprobs.append([[0.0]])
                continue
            prompt = expanded[-1]
            output = self.copy.generate(
                input_ids=torch.tensor([prompt]),
                mm_token_type_ids=torch.tensor([[int(t == token) for t in prompt]]),
                **seen,
                do_sample=True,
                top_k=0,
                max_new_tokens=self.settings["max_completion_length"],
                temperature=self.settings["temperature"],
                sequence_bias=[[[t], bias] for t, bias in self.settings["generation_kwargs"]["logit_bias"].items()],
                output_scores=True,
                return_dict_in_generate=True,
            )
            answer = output.sequences[0, len(prompt) :].tolist()
            scores = torch.stack(output.scores)[:, 0].log_softmax(-1)
            answers.append(answer)
            logprobs.append([[float(scores[t, chosen])] for t, chosen in enumerate(answer)])
        return expanded, answers, logprobs, None


CONFIG = Grpo(
    rollouts="vllm",
    prompts_per_step=2,
    group_size=2,
    micro_batch_size=2,
    max_steps=2,
    max_plan_tokens=8,
    ensemble=False,
)


def test_a_run_with_another_sampler_says_how_far_its_probabilities_are_off(
    random_checkpoint: Callable[[int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
    installed: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TRL's own path, from our settings to our figures; only the engine is another."""
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", OtherSampler)
    monkeypatch.setattr(OtherSampler, "made", [])
    happened: list[str] = []
    ask, log_probabilities = CdremReward.ask, CdremTrainer._get_per_token_logps_and_entropies

    def queried(self: CdremReward, texts: Any, step_ids: Any) -> None:
        happened.append(f"{len(texts)} asked about")
        ask(self, texts, step_ids)

    def computed(self: Any, *args: Any, **settings: Any) -> Any:
        happened.append("log-probabilities")
        return log_probabilities(self, *args, **settings)

    monkeypatch.setattr(CdremReward, "ask", queried)
    monkeypatch.setattr(CdremReward, "remote", True)
    monkeypatch.setattr(CdremTrainer, "_get_per_token_logps_and_entropies", computed)
    out, data, used = tmp_path / "out", (dataset, steps, models), (random_checkpoint(0), random_checkpoint(1))
    figures = train_grpo(grpo_job(out, data, *used, CONFIG, serving=Serving(context=512)), quiet)
    # remote graders begin before the trainer's own passes: of the policy and of the reference, then of the update
    passes = ["log-probabilities"] * 4
    assert happened == ["4 asked about", *passes, "4 asked about", *passes]
    [engine] = OtherSampler.made
    assert engine.syncs == 2, "before each optimizer step"
    assert engine.settings["mode"] == "colocate" and engine.settings["max_model_length"] == 512
    assert (engine.settings["temperature"], engine.settings["max_completion_length"]) == (0.9, 8)
    log = [json.loads(line) for line in (out / "training_log.jsonl").read_text().splitlines()]
    differences = [line[sampling.DIFFERENCE] for line in log if sampling.DIFFERENCE in line]
    assert len(differences) == 2
    assert figures["sampling_logp_difference"] == pytest.approx(sum(differences) / 2)
    # the same weights, images, prompts and temperature: what is left is the share of the tokens that are biased out
    assert 0 < figures["sampling_logp_difference"] < 0.05


def test_a_prompt_that_the_engine_sees_otherwise_ends_the_run(
    random_checkpoint: Callable[[int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
    installed: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What TRL 1.16 does by itself: image tokens that are written out already are written out once more."""
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", OtherSampler)
    monkeypatch.setattr(sampling, "one_per_image", lambda ids, token: ids)
    config = CONFIG.model_copy(update={"max_steps": 1})
    used = random_checkpoint(0), random_checkpoint(1)
    with pytest.raises(Ended, match=r"23 of them the image's, .* with 12: its answers would be about something else"):
        train_grpo(grpo_job(tmp_path / "out", (dataset, steps, models), *used, config), quiet)


@given(parts=st.lists(st.integers(0, 3), max_size=12))
def test_runs_of_image_tokens_become_one(parts: list[int]) -> None:
    once = sampling.one_per_image(parts, 0)
    assert [t for t in once if t] == [t for t in parts if t]
    assert all(pair != (0, 0) for pair in pairwise(once)) and (0 in once) == (0 in parts)
    assert sampling.one_per_image(once, 0) == once
