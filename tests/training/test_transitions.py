"""Prompts of two screens: what the planner sees, what graders see, and GRPO on them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import Grpo
from coepg_dagster.inference.agents import Grounder
from coepg_dagster.training import grpo
from coepg_dagster.training.examples import NothingToTrainOn
from coepg_dagster.training.grpo import train_grpo
from coepg_dagster.training.transitions import GOAL, side_by_side, with_transitions
from tests.jobs import grpo_job, quiet
from tests.training.test_levels import episodes

SIZES = st.tuples(st.integers(1, 40), st.integers(1, 40))


@given(SIZES, SIZES, st.integers(0, 2**31 - 1))
def test_the_left_screen_keeps_its_coordinates(left: tuple[int, int], right: tuple[int, int], seed: int) -> None:
    draw = np.random.default_rng(seed)
    images = [Image.fromarray(draw.integers(0, 256, (h, w, 3), np.uint8)) for w, h in (left, right)]
    encoded, width, height = side_by_side(*images)
    both = Image.open(io.BytesIO(encoded)).convert("RGB")
    assert both.size == (width, height) == (left[0] + right[0], max(left[1], right[1]))
    assert both.crop((0, 0, *left)).tobytes() == images[0].tobytes()
    assert both.crop((left[0], 0, width, right[1])).tobytes() == images[1].tobytes()


def test_a_pair_has_the_first_label_and_no_task(steps: pa.Table) -> None:
    graded, shown, ids = with_transitions(steps, [("s0", "s2"), ("s2", "s4")])
    assert ids == ["s0>s2", "s2>s4"] and graded["step_id"].to_pylist() == [*steps["step_id"].to_pylist(), *ids]
    first, pair = steps.slice(0, 1).to_pylist()[0], graded.slice(6, 1).to_pylist()[0]
    changed = {"step_id": "s0>s2", "episode_id": "s0>s2", "goal": GOAL, "history": []}
    assert pair == first | changed, "a grader sees the first screen alone"
    seen = shown.slice(6, 1).to_pylist()[0]
    assert (seen["width"], seen["height"]) == (2 * first["width"], first["height"])
    assert seen == pair | {name: seen[name] for name in ("screenshot", "width", "height")}
    assert shown.slice(0, 6) == steps and with_transitions(steps, []) == (steps, steps, [])
    rows = steps.to_pylist()
    same = pa.Table.from_pylist([rows[0], rows[1] | {"screenshot": rows[0]["screenshot"]}], steps.schema)
    assert with_transitions(same, [("s0", "s1")])[2] == [], "nothing has changed between these two"


def test_grpo_asks_what_leads_from_one_screen_to_the_other(
    trained: Callable[[str, int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pairs are prompts beside the others; ϕ_k grounds their plans on the first screen, and the probe asks no pair."""
    asked: list[tuple[str, tuple[int, int]]] = []
    grounded: dict[str, tuple[int, int]] = {}
    ground, score = Grounder.ground, grpo.CdremTrainer._generate_and_score_completions

    def watch(self: Any, queries: Any) -> Any:
        grounded.update({step_id: self._screens.image(step_id).size for step_id, _ in queries})
        return ground(self, queries)

    def scored(self: Any, inputs: Any) -> Any:
        asked.extend((row["step_id"], row["images"][0].size) for row in inputs)
        return score(self, inputs)

    monkeypatch.setattr(Grounder, "ground", watch)
    monkeypatch.setattr(grpo.CdremTrainer, "_generate_and_score_completions", scored)
    told = episodes(steps, ["a", "a", "a", "b", "b", "c"], [0, 1, 2, 0, 2, 0])
    settings = {"prompts_per_step": 4, "group_size": 2, "micro_batch_size": 8, "max_plan_tokens": 24, "max_steps": 2}
    config = Grpo.model_validate(
        settings | {"curation": {"transition_pairs": {}}, "combiner": "weighted_sum", "kl_beta": 0.0}
    )
    init = trained("planner", 0), trained("grounder", 0)
    job = grpo_job(tmp_path / "out", (dataset, told, models), *init, config)
    figures = train_grpo(job, quiet)
    assert figures["prompts"] == 8 and figures["curation"]["transition_pairs"] == {"of": 6, "left_out": 0, "pairs": 2}
    sizes = dict(asked)
    assert {step_id for step_id in sizes if ">" in step_id} == {"s0>s1", "s1>s2"} and len(sizes) == 8
    width, height = sizes["s0"]
    assert sizes["s0>s1"] == (2 * width, height) and grounded.get("s0>s1", sizes["s0"]) == sizes["s0"]
    rows = pq.read_table(job.out / "rollouts.parquet").to_pylist()
    assert len(rows) == 16 and {row["step_id"] for row in rows} == set(sizes)
    far = config.model_copy(update={"curation": {"transition_pairs": {"k": 3, "most": 1}}})
    with pytest.raises(NothingToTrainOn, match="no episode has two that lie 3 steps apart: lower `k`"):
        train_grpo(grpo_job(tmp_path / "far", (dataset, told, models), *init, far), quiet)
    with pytest.raises(ValidationError, match="transition_pairs have not: remove one of them"):
        Grpo.model_validate({"environment": {}, "curation": {"transition_pairs": {}}})
