"""SFT with the rows of a step as one row: the same loss and gradients as with separate rows, and each row once an epoch."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import load_file
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
from trl.trainer.utils import add_fused_lm_head

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import Lora, Sft
from coepg_dagster.inference.screens import Screens, resize_of
from coepg_dagster.inference.transformers_engine import load_checkpoint
from coepg_dagster.inference.visual import KEY, Screenshots
from coepg_dagster.progress import Ended
from coepg_dagster.prompts import grounder_messages, planner_messages
from coepg_dagster.training.examples import planner_examples
from coepg_dagster.training.groups import FIRST, GroupOrder, Groups, in_groups
from coepg_dagster.training.packing import IGNORED, pack_runs, packed_pass
from coepg_dagster.training.sft import train_sft
from tests.jobs import quiet, sft_job

GOALS = ("Click OK", "Enter red into Name. Click Search.", "Click Next")
PLANS = ("OK", "click Name", "click Next", "click red Search red")
LONGEST = 5
"""Tokens of the longest answer."""


class Case:
    """A model, and batches of rows of D_{k-1} as TRL's collator makes them."""

    def __init__(self, checkpoint: Path) -> None:
        self.model, self.processor = load_checkpoint(checkpoint, "float32", "cpu")
        add_fused_lm_head(self.model)
        factor, _, _ = resize_of(self.processor)
        self.images = [Image.effect_noise((w * factor, h * factor), 90).convert("RGB") for w, h in ((3, 4), (4, 3))]

    def batch(self, role: str, groups: list[tuple[int, int, list[tuple[int, int]]]]) -> dict[str, torch.Tensor]:
        """Rows of groups: (goal, image, a plan and the length of the answer for each row)."""
        rows = [(goal, image, plan, n) for goal, image, of_group in groups for plan, n in of_group]
        asked = [
            planner_messages(GOALS[goal], [], "compact")
            if role == "planner"
            else grounder_messages(PLANS[plan], "compact")
            for goal, _, plan, _ in rows
        ]
        texts = [self.processor.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in asked]
        images = [[self.images[image]] for _, image, _, _ in rows]
        made = self.processor(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt")
        draw = torch.Generator().manual_seed(len(rows))
        words = self.processor.tokenizer(" ".join(PLANS))["input_ids"]  # few, so that answers begin alike
        width = made["input_ids"].shape[1] + LONGEST
        batch = {name: torch.zeros(len(rows), width, dtype=torch.long) for name in ("input_ids", "attention_mask")}
        batch |= {"mm_token_type_ids": batch["input_ids"].clone(), "labels": torch.full((len(rows), width), IGNORED)}
        for row, (*_, n) in enumerate(rows):
            real = made["attention_mask"][row].bool()
            prompt = int(real.sum())
            answer = torch.tensor(words)[torch.randint(len(words), (n,), generator=draw)]
            batch["input_ids"][row, : prompt + n] = torch.cat([made["input_ids"][row, real], answer])
            batch["attention_mask"][row, : prompt + n] = 1
            batch["mm_token_type_ids"][row, :prompt] = made["mm_token_type_ids"][row, real]
            batch["labels"][row, prompt : prompt + n] = answer
        return batch | {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}

    def packed(self, batch: dict[str, torch.Tensor], first: list[int]) -> Any:
        images = torch.split(batch["pixel_values"], batch["image_grid_thw"].prod(-1).tolist())
        once = {"pixel_values": torch.cat([images[i] for i in first]), "image_grid_thw": batch["image_grid_thw"][first]}
        called = {"fused_lm_head": True, "use_cache": False, "first": torch.tensor(first)}
        return packed_pass(self.model, self.model, **batch | once | called)

    def gradient(self, of_rows: torch.Tensor) -> torch.Tensor:
        """Of a weighted sum of the rows' log-probabilities."""
        self.model.zero_grad()
        (of_rows * torch.linspace(0.5, 2, len(of_rows))).sum().backward()
        return torch.cat([p.grad.reshape(-1) for p in self.model.parameters() if p.grad is not None])


@pytest.fixture(scope="module")
def case(either_checkpoint: Path) -> Case:
    return Case(either_checkpoint)


ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, LONGEST)), min_size=1, max_size=4)
GROUPS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), ROWS), min_size=1, max_size=3)


@given(st.sampled_from(["planner", "grounder"]), GROUPS, st.sampled_from(["sdpa", "eager"]))
@settings(max_examples=15, deadline=None)
def test_loss_and_gradients_are_those_of_rows(case: Case, role: str, groups: Any, attention: Any) -> None:
    """Prompts that differ in their goals or plans, answers of one token, a row alone; with the vision tower's gradients."""
    case.model.set_attn_implementation(attention)
    batch = case.batch(role, groups)
    first = [sum(len(rows) for *_, rows in groups[:i]) for i in range(len(groups))]
    alone = case.model(**batch, fused_lm_head=True)
    expected = case.gradient(alone.log_probs.sum(-1))
    together = case.packed(batch, first)
    gradient = case.gradient(together.log_probs.sum(-1))
    torch.testing.assert_close(together.log_probs.sum(-1), alone.log_probs.sum(-1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together.loss, alone.loss, rtol=1e-4, atol=1e-4)
    assert int(together.label_mask.sum()) == int(alone.label_mask.sum()) == int(batch["labels"].ne(IGNORED).sum())
    assert float((gradient - expected).norm() / expected.norm()) < 1e-4


def test_what_rows_begin_with_is_computed_once(case: Case) -> None:
    """A grounder's rows have the screenshot and the first words of the plan in common, a planner's all but the answers."""
    names = ("input_ids", "attention_mask", "mm_token_type_ids", "pixel_values", "image_grid_thw")
    for role, plans in (("planner", [0, 1]), ("grounder", [1, 2])):
        batch = case.batch(role, [(0, 0, [(plan, 2) for plan in plans])])
        patches = int(batch["image_grid_thw"][0].prod())
        once = {name: batch[name] for name in names}
        once |= {"pixel_values": batch["pixel_values"][:patches], "image_grid_thw": batch["image_grid_thw"][:1]}
        packed = pack_runs(case.model, once, torch.ones(2, 2, dtype=torch.bool), [0])
        ids = [row[real] for row, real in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)]
        different = (ids[0] != ids[1]).nonzero() if role == "grounder" else torch.tensor([[len(ids[0]) - 3]])
        shared = int(different[0])
        text = case.processor.tokenizer.decode(ids[0][:shared])
        assert text.rstrip().endswith("click" if role == "grounder" else "assistant")
        assert packed.inputs["input_ids"].shape == (1, sum(map(len, ids)) - shared)


def test_rows_of_two_screenshots_are_never_one(case: Case) -> None:
    batch = case.batch("planner", [(0, 0, [(0, 2)]), (0, 1, [(0, 2)])])
    batch["input_ids"][1, 3] = 7  # within the image's tokens
    with pytest.raises(ValueError, match="rows 0 to 1 have 3 tokens alike, and their image ends later"):
        case.packed(batch, [0])


# which rows a pass has


def order(groups: Groups, rank: int = 0, processes: int = 1, step: int = 0, shuffle: bool = True) -> list[list[int]]:
    sampler = GroupOrder(groups, step=lambda: step, shuffle=shuffle, seed=3, rank=rank, processes=processes)
    passes = list(sampler)
    assert len(passes) == len(sampler)
    return passes


@given(st.lists(st.integers(0, 19), min_size=1, max_size=60), st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))
@settings(max_examples=150)
def test_an_epoch_has_each_row_once_and_as_many_steps_as_without_packing(
    of_steps: list[int], micro: int, accumulation: int, processes: int
) -> None:
    config = Sft(batch_size=micro * accumulation * processes, micro_batch_size=micro, packing=True)
    step_ids = [f"s{i}" for i in of_steps]
    try:
        groups = Groups.of(step_ids, config, processes)
    except Ended as why:
        fewer = re.findall(r"`sft.batch_size: (\d+)`", str(why))
        assert bool(fewer) == (len(set(step_ids)) >= processes)
        for size in fewer:
            enough = Sft.model_validate(config.model_dump() | {"batch_size": int(size)})
            Groups.of(step_ids, enough, processes)
        return
    assert groups.steps == math.ceil(len(step_ids) / config.batch_size)
    of_ranks = [order(groups, rank, processes) for rank in range(processes)]
    assert all(len(passes) == groups.steps * groups.passes for passes in of_ranks)
    assert all(rows for passes in of_ranks for rows in passes), "each process has a forward pass"
    assert Counter(row for passes in of_ranks for rows in passes for row in rows) == Counter(range(len(step_ids)))
    for rows in (rows for passes in of_ranks for rows in passes):
        assert all(Counter(step_ids)[step_ids[row]] == [step_ids[r] for r in rows].count(step_ids[row]) for row in rows)

    # neither passes nor processes decide which groups a step has
    at_once = Groups(groups.rows, groups.steps, 1)
    assert [sorted(rows) for rows in order(at_once)] == [
        sorted(
            row
            for passes in of_ranks
            for rows in passes[step * groups.passes : (step + 1) * groups.passes]
            for row in rows
        )
        for step in range(groups.steps)
    ]
    counts = [len({step_ids[row] for row in rows}) for rows in order(at_once)]
    assert max(counts) - min(counts) <= 1


def test_each_epoch_has_an_order_of_its_own_or_that_of_the_curriculum() -> None:
    groups = Groups.of([f"s{i % 12}" for i in range(30)], Sft(batch_size=10, micro_batch_size=5), 1)
    assert (groups.steps, groups.passes) == (3, 2)
    epochs = [order(groups, step=step) for step in (0, 2, 3, 5)]
    assert epochs[0] == epochs[1] != epochs[2] == epochs[3]
    ordered = order(groups, step=3, shuffle=False)
    assert [row for rows in ordered for row in rows if row < 12] == list(range(12))


@given(st.lists(st.integers(1, 8), min_size=40, max_size=60), st.integers(1, 2))
@settings(max_examples=30)
def test_a_pass_has_about_micro_batch_size_rows(sizes: list[int], processes: int) -> None:
    config = Sft(batch_size=64, micro_batch_size=16, packing=True)
    groups = Groups.of([f"s{i}" for i, n in enumerate(sizes) for _ in range(n)], config, processes)
    assume(groups.passes == math.ceil(sum(sizes) / (groups.steps * 16 * processes)))
    assert sum(sizes) / (groups.steps * groups.passes * processes) <= 16


# through the trainer


@pytest.fixture(scope="module")
def several(dataset: pa.Table) -> pa.Table:
    """D_k of the six steps with 1, 2, 3, 1, 2 and 3 plans; rows of a step are apart."""
    rows = [
        row | {"plan": f"{row['plan']}{' now' * n}", "row_id": f"{row['row_id']}-{n}"}
        for n in range(3)
        for i, row in enumerate(dataset.to_pylist())
        if n <= i % 3
    ]
    return pa.Table.from_pylist(rows, dataset.schema)


def trained(
    job_of: Callable[[str, Sft], Any], config: Sft, name: str
) -> tuple[dict[str, torch.Tensor], list[dict[str, float]], dict[str, Any]]:
    """(weights, log, figures) of a run."""
    job = job_of(name, config)
    figures = train_sft(job, quiet)
    log = [json.loads(line) for line in (job.out / "training_log.jsonl").read_text().splitlines()]
    return load_file(job.out / "model.safetensors"), [line for line in log if "loss" in line], figures


@pytest.mark.parametrize(
    ("role", "changed"),
    [
        ("planner", {}),
        ("planner", {"curation": {"perplexity_weighted": {}}}),
        ("planner", {"freeze_vision": False, "attention": "eager"}),
        ("grounder", {}),
        ("grounder", {"lora": Lora(rank=4)}),
        ("end_to_end", {}),
    ],
)
def test_packed_rows_train_the_same_model(
    role: str,
    changed: dict[str, Any],
    several: pa.Table,
    steps: pa.Table,
    models: Models,
    random_checkpoint: Callable[[int], Path],
    tmp_path: Path,
) -> None:
    """Three steps of all rows, in one pass, and in four packed ones of one or two groups; rows may have weights."""

    def job_of(name: str, config: Sft) -> Any:
        return sft_job(tmp_path / name, (several, steps, models), role, random_checkpoint(2), config)

    settings = {"max_steps": 3, "batch_size": 12, "micro_batch_size": 12, "learning_rate": 1e-4, "freeze_vision": True}
    config = Sft(**settings | changed)
    weights, log, figures = trained(job_of, config, "rows")
    together = config.model_copy(update={"packing": True, "micro_batch_size": 3})
    packed, log_packed, figures_packed = trained(job_of, together, "packed")
    groups = 5 if role == "grounder" else 6
    assert figures_packed == figures | {"groups": groups, "loss": figures_packed["loss"]} | {
        name: figures_packed[name] for name in ("logits_apart", "curation") if name in figures_packed
    }
    assert len(log) == len(log_packed) == 3
    for one, other in zip(log, log_packed, strict=True):
        assert one.keys() == other.keys()
        for name in {"loss", "grad_norm", "entropy", "num_tokens", "mean_token_accuracy", "learning_rate"} & one.keys():
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=2e-2 if name in AVERAGED else 1e-6), name
    apart = torch.cat([(weights[name] - packed[name]).abs().flatten() for name in weights])
    assert apart.max() < 1e-4 and apart.mean() < 2e-6, "Adam makes a step of any small gradient, however it was rounded"


AVERAGED = ("entropy", "mean_token_accuracy")
"""TRL logs the mean of these over passes, whatever their numbers of tokens."""


def test_qwen3_vl_and_several_steps_an_epoch(
    several: pa.Table, steps: pa.Table, models: Models, qwen3_checkpoint: Path, tmp_path: Path
) -> None:
    """Two epochs of three steps of two groups; the numbers of updates and of tokens are those of separate rows."""

    def job_of(name: str, config: Sft) -> Any:
        return sft_job(tmp_path / name, (several, steps, models), "planner", qwen3_checkpoint, config)

    config = Sft(epochs=2, batch_size=4, micro_batch_size=2, freeze_vision=True)
    *_, log, figures = trained(job_of, config, "rows")
    *_, log_packed, figures_packed = trained(job_of, config.model_copy(update={"packing": True}), "packed")
    assert figures["optimizer_steps"] == figures_packed["optimizer_steps"] == 6
    assert [line["epoch"] for line in log_packed] == [line["epoch"] for line in log]
    assert log[-1]["num_tokens"] == log_packed[-1]["num_tokens"]


def test_a_batch_smaller_than_the_rows_of_a_step_is_refused(
    several: pa.Table, steps: pa.Table, models: Models, random_checkpoint: Callable[[int], Path], tmp_path: Path
) -> None:
    config = Sft(max_steps=1, batch_size=1, micro_batch_size=1, packing=True)
    job = sft_job(tmp_path / "out", (several, steps, models), "planner", random_checkpoint(2), config)
    with pytest.raises(
        Ended,
        match=r"12 rows are of 6 steps .* has 0 of these whole, .* needs one: set `sft.batch_size: 2`, or `sft.packing",
    ):
        train_sft(job, quiet)


def test_flash_attention_takes_no_packed_rows() -> None:
    with pytest.raises(ValueError, match=r"packing: .*takes no mask.*set `sdpa`"):
        Sft(packing=True, attention="flash_attention_2")


@pytest.mark.parametrize("pixels", [True, False])
def test_a_batch_has_each_screenshot_once(
    pixels: bool, several: pa.Table, steps: pa.Table, models: Models, random_checkpoint: Callable[[int], Path]
) -> None:
    _, processor = load_checkpoint(random_checkpoint(2), "float32", "cpu")
    examples = planner_examples(several, steps, Screens(steps, resize_of(processor)), "compact")
    shown = Screenshots(processor)
    collate = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)
    groups = Groups.of(examples.with_format(None)["step_id"], Sft(batch_size=12, micro_batch_size=12), 1)
    rows = [row for group in (groups.rows[2], groups.rows[1], groups.rows[0]) for row in group]
    plain = collate([examples[row] for row in rows])
    batch = in_groups(collate, shown, pixels=pixels)(examples.__getitems__(rows))
    assert batch[FIRST].tolist() == [0, 3, 5]
    for name in ("input_ids", "attention_mask", "labels", "mm_token_type_ids"):
        assert torch.equal(batch[name], plain[name])
    assert torch.equal(batch["image_grid_thw"], plain["image_grid_thw"][[0, 3, 5]])
    images = torch.split(plain["pixel_values"], plain["image_grid_thw"].prod(-1).tolist())
    if pixels:
        assert torch.equal(batch["pixel_values"], torch.cat([images[i] for i in (0, 3, 5)]))
    else:
        assert batch["pixel_values"].shape == (sum(len(images[i]) for i in (0, 3, 5)), KEY)
