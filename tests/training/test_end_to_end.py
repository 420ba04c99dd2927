"""The end-to-end agent: its examples, its reward, its training, and what it does on steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import Grpo, Sft
from coepg_dagster.geometry import Space
from coepg_dagster.inference.predict import predict_end_to_end
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.jobs import EndToEndJob
from coepg_dagster.prompts import end_to_end_answer, end_to_end_messages, parse_end_to_end
from coepg_dagster.steps import ROLLOUT_SCHEMA
from coepg_dagster.training.end_to_end import train_end_to_end
from coepg_dagster.training.examples import end_to_end_examples
from coepg_dagster.training.point_reward import PointReward
from tests.jobs import quiet, training_job

RESIZE = (28, 56 * 56, 28 * 28 * 1280)


def test_an_answer_is_read_back_and_garbage_is_none() -> None:
    answer = parse_end_to_end(end_to_end_answer("TYPE", "red", "(12,40)"))
    assert answer is not None
    assert (answer.action_type, answer.value, answer.point) == ("TYPE", "red", (12.0, 40.0))
    for empty in ("", "nowhere"):
        without = parse_end_to_end(end_to_end_answer("CLICK", "", empty))
        assert without is not None and without.point is None
    for text in ("", "{", "[1]", '{"value": ""}', '{"action_type": 3}', '{"action_type": "\\ud800"}'):
        assert parse_end_to_end(text) is None


@pytest.mark.parametrize("style", ["web", "mobile", "compact"])
def test_the_prompt_of_the_agent_holds_goal_and_history_and_asks_for_no_plan(style: Any) -> None:
    text = end_to_end_messages("Click OK", ["[a] b -> CLICK"], style)[0]["content"][1]["text"]
    assert "Click OK" in text and "[a] b -> CLICK" in text and '"plan"' not in text
    assert style == "compact" or '"point": "(x,y)"' in text


def test_examples_are_the_rows_of_d_k_without_their_plans(steps: pa.Table, dataset: pa.Table) -> None:
    examples = end_to_end_examples(dataset, steps, Screens(steps, RESIZE), "compact", Space.RESIZED)
    texts = [row["completion"][0]["content"][0]["text"] for row in examples]
    assert len(texts) == dataset.num_rows and not any("click" in text for text in texts)
    assert parse_end_to_end(texts[0]).point == (18.0, 28.0)  # type: ignore[union-attr]
    assert parse_end_to_end(texts[5]).point is None  # type: ignore[union-attr]


def test_the_reward_is_gate_and_point(steps: pa.Table) -> None:
    reward = PointReward(steps, Screens(steps, RESIZE), Space.RESIZED)
    answers = [
        ("s0", end_to_end_answer("CLICK", "", "(18,28)"), 1.0),
        ("s0", end_to_end_answer("CLICK", "", "(80,100)"), 0.0),
        ("s0", end_to_end_answer("CLICK", "", ""), 0.0),
        ("s0", end_to_end_answer("TYPE", "", "(18,28)"), 0.0),
        ("s2", end_to_end_answer("TYPE", "blue", "(58,28)"), 0.0),
        ("s5", end_to_end_answer("CLICK", "", ""), 1.0),  # the step has no target
        ("s5", "no JSON", 0.0),
    ]
    assert reward.score([text for _, text, _ in answers], [step for step, _, _ in answers]) == [r for *_, r in answers]
    table = pa.Table.from_pylist([row | {"optimizer_step": 0, "group": 0, "advantage": 0.0} for row in reward.rows])
    assert table.select(["step_id", "gate"]).num_rows == len(answers)
    not_here = {"sampled_in", "live"}  # of replayed answers, and of live pages
    assert {*table.column_names} | not_here == set(ROLLOUT_SCHEMA.names)


@pytest.mark.slow
def test_it_learns_the_answers_by_heart_and_goes_on_with_grpo(
    random_checkpoint: Callable[[int], Path], models: Models, steps: pa.Table, dataset: pa.Table, tmp_path: Path
) -> None:
    sft = Sft(epochs=30, batch_size=6, micro_batch_size=6, learning_rate=4e-3, freeze_vision=False)
    grpo = Grpo(prompts_per_step=2, group_size=2, micro_batch_size=4, max_steps=1, max_plan_tokens=48)
    grpo = grpo.model_copy(update={"validate_every": 1, "probe_steps": 0, "curation": {"curriculum": {"samples": 2}}})
    sft = Sft.model_validate(sft.model_dump() | {"curation": {"seed_rules": {"area_at_most": 1.0}}})
    data, init = (dataset, steps, models), random_checkpoint(3)
    figures = train_end_to_end(
        training_job(EndToEndJob, tmp_path / "out", data, init, validation=steps, sft=sft, grpo=grpo), quiet
    )
    assert figures["rows"] == 6 and figures["optimizer_steps"] == 1
    assert {*figures["sft_curation"]} == {"seed_rules"} and {*figures["curation"]} == {"curriculum"}
    assert figures["validation_reward_best"] >= figures["validation_reward_first"] > 0, "its own points are judged"
    assert pq.read_table(tmp_path / "out" / "rollouts.parquet").num_rows == 4
    engine = TransformersEngine(tmp_path / "out-scratch" / "before_grpo", dtype="float32", device="cpu", batch_size=6)
    predictions = predict_end_to_end(engine, steps, models, 48)
    assert predictions["action_type"].to_pylist() == steps["action_type"].to_pylist()
    assert predictions["plan"].null_count == steps.num_rows and predictions["x"].null_count == 0
