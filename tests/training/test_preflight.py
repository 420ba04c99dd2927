"""Rows are counted before training as the trainers' own collators count them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl import GRPOTrainer
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import Grpo, Sft
from coepg_dagster.geometry import Space
from coepg_dagster.inference.processing import load_processor, vision_token_ids, without_vision_tokens
from coepg_dagster.inference.screens import Screens
from coepg_dagster.training.examples import NothingToTrainOn, grounder_examples, grpo_prompts, planner_examples
from coepg_dagster.training.grpo import train_grpo
from coepg_dagster.training.preflight import IMAGE_TOKENS, OVER_BUDGET, PREFLIGHT, measure, preflight
from coepg_dagster.training.sft import train_sft
from tests.conftest import png, step, step_table
from tests.inference.scripted import RESIZE
from tests.jobs import grpo_job, quiet, sft_job


@pytest.fixture(scope="module")
def processor(random_checkpoint: Callable[[int], Path]) -> Any:
    return load_processor(str(random_checkpoint(0)))


@pytest.fixture(scope="module")
def screens(steps: pa.Table) -> Screens:
    return Screens(steps, RESIZE)


def test_a_row_has_the_tokens_that_trls_collator_gives_it(
    processor: Any, screens: Screens, steps: pa.Table, dataset: pa.Table
) -> None:
    collate = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=True)
    for examples in (
        planner_examples(dataset, steps, screens, "compact"),
        grounder_examples(dataset, screens, "compact", Space.RESIZED),
    ):
        rows = measure(examples, processor, screens, None, 0).to_pylist()
        for example, row in zip(examples, rows, strict=True):
            batch = collate([dict(example)])
            assert row["tokens"] == int(batch["attention_mask"].sum())
            assert row["image_tokens"] == int((batch["input_ids"] == processor.image_token_id).sum())
            assert row["features"] == int(batch["image_grid_thw"].prod()) // processor.image_processor.merge_size**2
            assert (row["step_id"], row["row_id"], row["reason"]) == (example["step_id"], example["row_id"], None)


def test_a_prompt_counts_its_tokens_and_room_for_the_longest_plan(
    processor: Any, screens: Screens, steps: pa.Table, dataset: pa.Table
) -> None:
    prompts = grpo_prompts(dataset["step_id"].to_pylist(), steps, screens, "compact")
    [row, *_] = measure(prompts, processor, screens, None, 24).to_pylist()
    messages = [
        part | {"image": screens.image("s0")} if part["type"] == "image" else part
        for part in prompts[0]["prompt"][0]["content"]
    ]
    ids = processor.apply_chat_template(
        [[{"role": "user", "content": messages}]], add_generation_prompt=True, tokenize=True, return_dict=True
    )["input_ids"]
    assert row["tokens"] == len(ids[0]) + 24


def test_rows_over_the_budget_are_dropped_with_a_reason_and_none_is_cut(
    random_checkpoint: Callable[[int], Path],
    steps: pa.Table,
    dataset: pa.Table,
    models: Models,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One step of SFT on what is left; the longest row is found again by its id."""
    long = dataset.to_pylist()
    long[2]["plan"] = "Enter red into Search. " * 20
    rows = pa.Table.from_pylist(long, dataset.schema)
    config = Sft(max_steps=1, batch_size=5, micro_batch_size=5, learning_rate=1e-3, max_tokens=100)
    out = tmp_path / "out"
    figures = train_sft(sft_job(out, (rows, steps, models), "planner", random_checkpoint(0), config), quiet)
    assert (figures["rows"], figures["dropped"], figures[f"dropped_{OVER_BUDGET}"]) == (5, 1, 1)
    table = pq.read_table(out / PREFLIGHT)
    assert table.num_rows == 6 and max(table["tokens"].to_pylist()) == figures["longest_row"] > 100
    [dropped] = table.filter(pc.is_valid(table["reason"])).to_pylist()
    assert (dropped["row_id"], dropped["step_id"], dropped["reason"]) == ("r-s2", "s2", OVER_BUDGET)
    output = capsys.readouterr().out
    assert "preflight: 5 of 6 rows kept (max_tokens 100)" in output and f"1 rows dropped: {OVER_BUDGET}" in output


def test_rows_with_an_image_token_without_an_image_are_dropped(
    processor: Any, screens: Screens, steps: pa.Table, dataset: pa.Table, tmp_path: Path
) -> None:
    """Texts are written without control tokens (prompts.plain); this is for whatever gets round that."""

    def poisoned(row: dict[str, Any]) -> dict[str, Any]:
        part = "prompt" if row["step_id"] == "s1" else "completion"
        if row["step_id"] in ("s1", "s3"):
            row[part][0]["content"][-1]["text"] += "<|image_pad|>" if part == "prompt" else "<|vision_start|>"
        return row

    examples = planner_examples(dataset, steps, screens, "compact")
    bad = examples.with_format(None).map(poisoned)
    kept, figures = preflight(bad, processor, screens, None, tmp_path)
    assert list(kept["step_id"]) == ["s0", "s2", "s4", "s5"]
    assert figures[f"dropped_{IMAGE_TOKENS}"] == 2


def test_when_no_row_is_left_it_says_what_to_change(
    processor: Any, screens: Screens, steps: pa.Table, dataset: pa.Table, tmp_path: Path
) -> None:
    prompts = grpo_prompts(dataset["step_id"].to_pylist(), steps, screens, "compact")
    with pytest.raises(NothingToTrainOn, match=r"no row of 6 passed .* the shortest has \d+ tokens: raise max_tokens"):
        preflight(prompts, processor, screens, 20, tmp_path, answer=24)
    assert pq.read_table(tmp_path / PREFLIGHT)["reason"].to_pylist() == [OVER_BUDGET] * 6


def test_a_processor_that_resizes_again_is_refused(
    random_checkpoint: Callable[[int], Path], dataset: pa.Table, tmp_path: Path
) -> None:
    table = step_table(step("s0", screenshot=png(), goal="Click OK"))
    other = load_processor(str(random_checkpoint(0)))
    other.image_processor.size = {"shortest_edge": 28 * 28, "longest_edge": 4 * 28 * 28}
    screens = Screens(table, RESIZE)
    examples = planner_examples(dataset.slice(0, 1), table, screens, "compact")
    with pytest.raises(ValueError, match=r"visual tokens of a screenshot of 84 x 112 px, our resize 12"):
        preflight(examples, other, screens, None, tmp_path)


@given(answer=st.lists(st.integers(0, 9), min_size=1), unwanted=st.frozensets(st.integers(0, 5)))
def test_an_answer_ends_before_its_first_vision_token(answer: list[int], unwanted: frozenset[int]) -> None:
    short = without_vision_tokens(answer, unwanted, 9)
    assert short and not unwanted & set(short)
    assert short == answer[: len(short)] or short == [9]
    assert (short == answer) == (not unwanted & set(answer))


@pytest.mark.parametrize(("terms", "least"), [({}, 0), ({"length": -0.5}, -0.5)])
def test_a_sampled_vision_token_costs_its_rollout_and_not_the_run(
    terms: dict[str, float],
    least: float,
    random_checkpoint: Callable[[int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that samples image tokens after all: in an answer, and as its first token."""
    generate = GRPOTrainer._generate_single_turn
    seen: list[list[int]] = []

    def unsuppressed(self: Any, *args: Any, **kwargs: Any) -> Any:
        answers, logprobs = generate(self, *args, **kwargs)
        image, *_ = vision_token_ids(self.processing_class.tokenizer)
        answers[0][-1] = answers[1][0] = image
        return answers, logprobs

    score = GRPOTrainer._generate_and_score_completions

    def watched(self: Any, inputs: Any) -> Any:
        output = score(self, inputs)
        seen.extend(output["completion_ids"].tolist())
        return output

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", unsuppressed)
    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", watched)
    sizes = {"prompts_per_step": 2, "group_size": 2, "micro_batch_size": 4, "max_steps": 1, "max_plan_tokens": 24}
    config = Grpo.model_validate(sizes | {"ensemble": False, "terms": terms})
    out, used = tmp_path / "out", (random_checkpoint(0), random_checkpoint(1))
    train_grpo(grpo_job(out, (dataset, steps, models), *used, config), quiet)
    rows = pq.read_table(out / "rollouts.parquet").to_pylist()
    assert [row["gate"] == "invalid_special_token" for row in rows] == [True, True, False, False]
    assert [row["reward"] for row in rows[:2]] == [least] * 2 and min(row["reward"] for row in rows) == least
    unwanted = set(vision_token_ids(load_processor(str(out)).tokenizer))
    assert seen and not unwanted & {token for ids in seen for token in ids}
    assert '"invalid_special_token": 0.5' in (out / "training_log.jsonl").read_text()
    assert torch.isfinite(torch.tensor([row["advantage"] for row in rows])).all()
