"""A group as one row: the same log-probabilities, loss and gradients as a row for each rollout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import Grpo
from coepg_dagster.inference.screens import resize_of
from coepg_dagster.inference.transformers_engine import load_checkpoint
from coepg_dagster.progress import Ended
from coepg_dagster.prompts import planner_messages
from coepg_dagster.training import grpo, grpo_trainer
from coepg_dagster.training.grpo import train_grpo
from coepg_dagster.training.packing import Packed, can_pack, in_passes, pack
from coepg_dagster.training.sampling import compare_logprobs
from tests.jobs import grpo_job, quiet

GOALS = ("Click OK", "Enter red into Name. Click Search.", "Click Next")
LONGEST = 5
"""Tokens of the longest completion."""


class Case:
    """A model, and batches of rollouts as TRL makes them."""

    def __init__(self, checkpoint: Path) -> None:
        self.model, self.processor = load_checkpoint(checkpoint, "float32", "cpu")
        self.model.model.visual.requires_grad_(False)
        add_fused_lm_head(self.model, temperature=0.9, outputs=("log_probs", "entropy"))
        factor, _, _ = resize_of(self.processor)
        self.images = [Image.effect_noise((w * factor, h * factor), 90).convert("RGB") for w, h in ((3, 4), (4, 3))]

    def batch(self, groups: list[tuple[int, int, list[int]]]) -> dict[str, Any]:
        """Rollouts of groups: (goal, image, lengths of the completions)."""
        rows = [(goal, image, n) for goal, image, lengths in groups for n in lengths]
        texts = [
            self.processor.apply_chat_template(
                planner_messages(GOALS[goal], [], "compact"), tokenize=False, add_generation_prompt=True
            )
            for goal, _, _ in rows
        ]
        made = self.processor(
            text=texts, images=[[self.images[i]] for _, i, _ in rows], padding=True, return_tensors="pt"
        )
        draw = torch.Generator().manual_seed(len(rows))
        mask = torch.tensor([[1] * n + [0] * (LONGEST - n) for _, _, n in rows])
        words = [t for t in range(len(self.processor.tokenizer)) if t not in self.processor.tokenizer.all_special_ids]
        answers = torch.tensor(words)[torch.randint(len(words), (len(rows), LONGEST), generator=draw)] * mask
        return {
            "input_ids": torch.cat([made["input_ids"], answers], 1),
            "attention_mask": torch.cat([made["attention_mask"], mask], 1),
            "mm_token_type_ids": torch.cat([made["mm_token_type_ids"], torch.zeros_like(answers)], 1),
            "pixel_values": made["pixel_values"],
            "image_grid_thw": made["image_grid_thw"],
        }

    def rows(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probabilities, entropies) of completion tokens, a row for each rollout: as TRL computes them."""
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, :-LONGEST] = -100
        output = self.model(**batch, labels=labels, fused_lm_head=True)
        return output.log_probs[:, -LONGEST:], output.entropy[:, -LONGEST:]

    def groups(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        packed = pack(self.model, completion=LONGEST, **batch)
        output = self.model(**packed.inputs, labels=packed.labels, fused_lm_head=True)
        return packed.unpack(output.log_probs), packed.unpack(output.entropy)

    def gradient(self, logps: torch.Tensor, seed: int) -> torch.Tensor:
        """Of a random weighing of the log-probabilities."""
        self.model.zero_grad()
        (logps * torch.randn(logps.shape, generator=torch.Generator().manual_seed(seed))).sum().backward()
        return torch.cat([p.grad.reshape(-1) for p in self.model.parameters() if p.grad is not None])


@pytest.fixture(scope="module")
def case(either_checkpoint: Path) -> Case:
    return Case(either_checkpoint)


LENGTHS = st.lists(st.integers(1, LONGEST), min_size=1, max_size=4)
GROUPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), LENGTHS), min_size=1, max_size=3)


@given(GROUPS, st.sampled_from(["sdpa", "eager"]))
@settings(max_examples=15, deadline=None)
def test_log_probabilities_entropies_and_gradients_are_those_of_rows(case: Case, groups: Any, attention: Any) -> None:
    """Prompts of several lengths, completions of one token, the same prompt with another screenshot."""
    case.model.set_attn_implementation(attention)
    batch = case.batch(groups)
    plain, plain_entropy = case.rows(batch)
    expected = case.gradient(plain, 1)
    grouped, entropy = case.groups(batch)
    gradient = case.gradient(grouped, 1)
    torch.testing.assert_close(grouped, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(entropy, plain_entropy, rtol=1e-4, atol=1e-4)
    assert float((gradient - expected).norm() / expected.norm()) < 1e-4


def test_a_prompt_is_computed_once(case: Case) -> None:
    batch = case.batch([(0, 0, [2, 1, 5]), (1, 0, [3]), (1, 1, [1, 1])])
    packed: Packed = pack(case.model, completion=LONGEST, **batch)
    assert packed.inputs["input_ids"].shape[0] == 3 == len(packed.inputs["image_grid_thw"])
    prompts = [int(batch["attention_mask"][i, :-LONGEST].sum()) for i in (0, 3, 4)]
    longest = max(p - 1 + n for p, n in zip(prompts, (3 + 8, 1 + 3, 2 + 2), strict=True))
    assert packed.inputs["input_ids"].shape[1] == longest, "the prompt, and each completion after its last token"
    case.model.set_attn_implementation("sdpa")
    assert can_pack(case.model)
    case.model.model.language_model.config._attn_implementation = "flash_attention_2"
    assert not can_pack(case.model)
    case.model.set_attn_implementation("sdpa")


ADVANTAGES = st.lists(st.sampled_from([0.0, 0.0, 1.0, -0.5]), min_size=8, max_size=8)


def loss(part: dict[str, Any], loss_type: str) -> float:
    """TRL's loss of a pass, from the losses of its tokens."""
    losses, tokens = part["per_token"], part["completion_mask"]
    if not len(losses):
        return 0.0
    match loss_type:
        case "grpo":
            return float((losses.sum(-1) / tokens.sum(-1)).mean())
        case "dr_grpo":
            return float(losses.sum() / (len(losses) * 48))
        case "dapo":
            return float(losses.sum() / part["num_items_in_batch"])
        case _:
            return float(losses.sum() / tokens.sum())


@given(ADVANTAGES, st.sampled_from(["grpo", "dr_grpo", "dapo", "bnpo"]), st.sampled_from([1, 2, 4]), st.booleans())
@settings(max_examples=60)
def test_what_has_no_gradient_is_left_out_and_the_loss_stays(
    advantages: list[float], loss_type: str, passes: int, empty: bool
) -> None:
    """TRL's four ways to average, on whole passes and on what is left of them."""
    draw = torch.Generator().manual_seed(7)
    mask = (torch.arange(3) < torch.randint(1, 4, (8, 1), generator=draw)).long()
    per_token = torch.randn(8, 3, generator=draw) * torch.tensor(advantages)[:, None] * mask
    batch = {
        "advantages": torch.tensor(advantages),
        "completion_mask": mask,
        "per_token": per_token,
        "pixel_values": torch.arange(16.0)[:, None],
        "image_grid_thw": torch.tensor([[1, 1, 2]] * 8),
        "num_images": [1] * 8,
        "num_items_in_batch": mask.sum(),
    }

    whole = in_passes(batch, passes, loss_type, drop=False, empty=False)
    left = in_passes(batch, passes, loss_type, drop=True, empty=empty)
    for all_of_it, rest in zip(whole, left, strict=True):
        assert all_of_it["share"] == 1 and len(all_of_it["advantages"]) == 8 // passes
        assert rest["share"] * loss(rest, loss_type) == pytest.approx(loss(all_of_it, loss_type), abs=1e-6)
        kept = len(rest["advantages"])
        assert kept == max(int((all_of_it["advantages"] != 0).sum()), 0 if empty else 1)
        assert len(rest["pixel_values"]) == 2 * kept == 2 * len(rest["num_images"])


@given(
    st.lists(st.sampled_from([0.0, 0.5, -1.0]), min_size=1, max_size=9),
    st.sampled_from(["grpo", "dr_grpo", "dapo", "bnpo"]),
    st.integers(1, 4),
)
@settings(max_examples=60)
def test_filled_passes_add_up_to_the_mean_over_all_rows(advantages: list[float], loss_type: str, filled: int) -> None:
    """However many rows an optimizer step has: no row is lost, none is twice, and the last passes may be empty."""
    n = len(advantages)
    passes = -(-n // filled) + 1
    mask = (torch.arange(3) < torch.randint(1, 4, (n, 1), generator=torch.Generator().manual_seed(n))).long()
    per_token = torch.arange(1.0, n + 1)[:, None] * torch.tensor(advantages)[:, None] * mask
    batch = {
        "advantages": torch.tensor(advantages),
        "completion_mask": mask,
        "per_token": per_token,
        "pixel_values": torch.arange(2.0 * n)[:, None],
        "image_grid_thw": torch.tensor([[1, 1, 2]] * n),
        "num_items_in_batch": mask.sum() / passes,  # the trainer takes the mean over the passes
    }

    made = in_passes(batch, passes, loss_type, drop=True, empty=True, filled=filled)
    assert len(made) == passes and all(len(part["advantages"]) <= filled for part in made)
    assert [a for part in made for a in part["advantages"].tolist()] == [a for a in advantages if a]
    expected = loss(batch, loss_type) / (passes if loss_type == "dapo" else 1)
    assert sum(part["share"] * loss(part, loss_type) for part in made) / passes == pytest.approx(expected, abs=1e-5)


@given(st.floats(0, 0.2), st.integers(0, 5))
def test_sampler_and_trainer_are_compared_where_both_are_known(apart: float, at: int) -> None:
    sampled = torch.full((2, 3), -1.0)
    computed = sampled.clone()
    computed[at // 3, at % 3] -= apart
    mask = torch.ones(2, 3)
    unknown, padded = sampled.clone(), mask.clone()
    unknown[at // 3, at % 3], padded[at // 3, at % 3] = torch.nan, 0
    assert compare_logprobs(unknown, computed, mask, 0.01, lambda *_: "") == (0.0, 0.0)
    assert compare_logprobs(sampled, computed, padded, 0.01, lambda *_: "") == (0.0, 0.0)
    if apart < 0.0599:
        mean, high = compare_logprobs(sampled, computed, mask, 0.01, lambda *_: "")
        assert mean == pytest.approx(apart / 6, abs=1e-6) and high >= mean - 1e-7
    elif apart > 0.0601:
        with pytest.raises(Ended, match=f"token {at % 3} of rollout {at // 3}, 'x{at}'"):
            compare_logprobs(sampled, computed, mask, 0.01, lambda row, token: f"x{3 * row + token}")


CONFIG = Grpo(
    prompts_per_step=3,
    group_size=4,
    micro_batch_size=12,
    max_steps=1,
    learning_rate=1e-3,
    kl_beta=0.0,
    max_plan_tokens=16,
    ensemble=False,
)


def another_screenshot(batch: Any) -> None:
    patches = int(batch["image_grid_thw"][0].prod())
    batch["pixel_values"] = batch["pixel_values"].roll(4 * patches, 0)


def no_pixels(batch: Any) -> None:
    del batch["pixel_values"]


def doubled_image_tokens(batch: Any) -> None:
    for name in ("prompt_ids", "prompt_mask"):
        first = batch[name][:, :8]
        batch[name] = torch.cat([first, batch[name][:, 8:14], batch[name][:, 8:]], 1)
    types = batch["mm_token_type_ids"]
    batch["mm_token_type_ids"] = torch.cat([types[:, :8], types[:, 8:14], types[:, 8:]], 1)


def flipped_padding(batch: Any) -> None:
    for row, mask in enumerate(batch["prompt_mask"]):
        shift = int((mask == 0).sum()) or 1
        for name in ("prompt_ids", "prompt_mask"):
            batch[name][row] = batch[name][row].roll(-shift)


def another_resize(batch: Any) -> None:
    batch["image_grid_thw"] = batch["image_grid_thw"][:, [0, 2, 1]]


def padding_read_as_image(batch: Any) -> None:
    batch["mm_token_type_ids"] = batch["mm_token_type_ids"].roll(3, 1)


FAULTS = [another_screenshot, no_pixels, doubled_image_tokens, flipped_padding, another_resize, padding_read_as_image]


@pytest.fixture
def train(
    trained: Callable[[str, int], Path], dataset: pa.Table, steps: pa.Table, models: Models, tmp_path: Path
) -> Callable[[Grpo], Any]:
    data, models_of = (dataset, steps, models), (trained("planner", 0), trained("grounder", 0))
    return lambda config: train_grpo(grpo_job(tmp_path / "out", data, *models_of, config), quiet)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_what_silently_spoils_multimodal_rl_ends_training_before_its_first_update(
    fault: Callable[[Any], None], train: Callable[[Grpo], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted between sampler and trainer, as peers had them: the loss falls and the reward does not."""
    score, updates = GRPOTrainer._generate_and_score_completions, []

    def spoilt(self: Any, inputs: Any) -> Any:
        batch = score(self, inputs)
        batch["advantages"][:] = torch.tensor([1.0, -1.0] * 6)  # every rollout counts, whatever the rewards are
        fault(batch)
        return batch

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", spoilt)
    monkeypatch.setattr(grpo.ReportProgress, "on_step_end", lambda *_, **__: updates.append(1), raising=False)
    with pytest.raises((Ended, ValueError, RuntimeError, IndexError)):
        train(CONFIG)
    assert not updates


def test_positions_that_are_one_off_end_training(train: Callable[[Grpo], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*args: Any, **settings: Any) -> Packed:
        packed = pack(*args, **settings)
        packed.inputs["position_ids"][packed.labels.ne(-100).expand(3, -1, -1)] += 1
        return packed

    monkeypatch.setattr(grpo_trainer, "pack", shifted)
    with pytest.raises(Ended, match="sampler and trainer disagree about the same tokens"):
        train(CONFIG)


def test_rows_and_groups_train_the_same_planner(
    train: Callable[[Grpo], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Through TRL's trainer, with a KL term, a group in two passes, and two updates by the same rollouts."""
    config = CONFIG.model_copy(update={"kl_beta": 0.04, "num_iterations": 2, "max_steps": 2, "loss_type": "dr_grpo"})
    norms = []
    for packs in (True, False):
        for module in (grpo, grpo_trainer):
            monkeypatch.setattr(module, "can_pack", lambda _, packs=packs: packs)
        monkeypatch.setattr(Grpo, "pass_size", lambda *_, **__: 6)
        train(config)
        log = [line for line in (tmp_path / "out/training_log.jsonl").read_text().splitlines() if "grad_norm" in line]
        norms.append([json.loads(line) for line in log])
        shutil.rmtree(tmp_path / "out-scratch")
    assert len(norms[0]) == len(norms[1]) == 2
    for groups, rows in zip(*norms, strict=True):
        assert groups.keys() == rows.keys()
        for name in {"loss", "grad_norm", "kl", "entropy", "reward"} & groups.keys():
            assert groups[name] == pytest.approx(rows[name], rel=1e-3, abs=1e-5)
