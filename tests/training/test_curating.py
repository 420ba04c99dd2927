"""Data strategies in front of real trainings on tiny checkpoints: what is left out, measured, weighted and ordered."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from trl import SFTTrainer

from coepg_dagster.artifacts import CURATION, FOLD, ROLLOUTS
from coepg_dagster.experiment.models import Member, Models, Serving
from coepg_dagster.experiment.training import Grpo, Sft
from coepg_dagster.geometry import Point
from coepg_dagster.inference import opening
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.steps import fold_of
from coepg_dagster.training.curating import RowMeasures, curated_rows
from coepg_dagster.training.examples import NothingToTrainOn
from coepg_dagster.training.grpo import train_grpo
from coepg_dagster.training.sft import train_sft
from tests.jobs import beside, grpo_job, quiet, sft_job

SFT: dict[str, Any] = {"max_steps": 1, "batch_size": 4, "micro_batch_size": 4, "freeze_vision": True}


def test_sft_trains_on_what_stays_and_says_what_does_not(
    random_checkpoint: Callable[[int], Path], steps: pa.Table, dataset: pa.Table, models: Models, tmp_path: Path
) -> None:
    """Of six rows: one has no target, one plan is generic, one is hit by half of its verifiers."""
    rows = dataset.to_pylist()
    rows[0]["plan"], rows[1]["answered"] = "click the button", 2
    data = (pa.Table.from_pylist(rows, dataset.schema), steps, models)
    curation = {"seed_rules": {"area_at_most": 0.25, "side_at_least": 1.0}, "pass_rate": {"at_least": 0.6}}
    config = Sft(**SFT, curation=curation)
    assert config.curation["pass_rate"] == {"at_least": 0.6, "at_most": 1.0, "samples": 8}
    figures = train_sft(sft_job(tmp_path / "out", data, "grounder", random_checkpoint(2), config), quiet)
    assert figures["rows"] == 3
    assert figures["curation"] == {
        "seed_rules": {"of": 5, "left_out": 1, "generic_plan": 1},
        "pass_rate": {"of": 4, "left_out": 1, "too_hard": 1, "pass_rate": 0.875},
    }
    assert pq.read_table(tmp_path / "out" / CURATION).to_pylist() == [
        {"row_id": "r-s0", "step_id": "s0", "strategy": "seed_rules", "reason": "generic_plan"},
        {"row_id": "r-s1", "step_id": "s1", "strategy": "pass_rate", "reason": "too_hard"},
    ]


def test_a_continued_run_trains_on_the_same_rows(
    random_checkpoint: Callable[[int], Path], steps: pa.Table, dataset: pa.Table, models: Models, tmp_path: Path
) -> None:
    job = sft_job(
        tmp_path / "out",
        (dataset, steps, models),
        "planner",
        random_checkpoint(2),
        Sft(**SFT, curation={"curriculum": {}}),
    )
    first, _ = curated_rows(job, dataset, steps)
    assert json.loads((beside(tmp_path / "out") / "curation.json").read_text())["kept"] == [0, 1, 2, 3, 4, 5]
    changed = dataset.set_column(dataset.schema.get_field_index("hits"), "hits", pa.array([0] * 5 + [1], pa.int32()))
    assert curated_rows(job, changed, steps)[0]["step_id"].to_pylist() == first["step_id"].to_pylist()


def test_nothing_left_is_an_error(
    random_checkpoint: Callable[[int], Path], steps: pa.Table, dataset: pa.Table, models: Models, tmp_path: Path
) -> None:
    config = Sft(**SFT, curation={"seed_rules": {"side_at_least": 1e6}})
    job = sft_job(tmp_path / "out", (dataset, steps, models), "grounder", random_checkpoint(2), config)
    with pytest.raises(NothingToTrainOn, match="seed_rules leaves none of 5"):
        train_sft(job, quiet)


def test_measures_of_a_model_that_knows_the_answers(
    trained: Callable[[str, int], Path],
    random_checkpoint: Callable[[int], Path],
    steps: pa.Table,
    dataset: pa.Table,
    models: Models,
    tmp_path: Path,
) -> None:
    """Perplexity is near 1 for what was learnt and high for what was not; maps have a cell per visual token, largest 1."""
    knows, does_not = (
        RowMeasures(sft_job(tmp_path / name, (dataset, steps, models), "grounder", init, Sft(**SFT)), dataset, steps)
        for name, init in (("knows", trained("grounder", 0)), ("random", random_checkpoint(0)))
    )
    low, high = knows.perplexities(range(3)), does_not.perplexities(range(3))
    assert max(low) < 1.5 < 3 < min(high)
    maps = knows.attention([0, 2], layers=2)
    assert [one.shape for one in maps if one is not None] == [(4, 3)] * 2  # 84 x 112 px in cells of 28
    assert all(one is not None and one.max() == 1 and one.min() >= 0 for one in maps)
    assert not np.array_equal(maps[0], maps[1])


def test_the_attention_of_an_answer_is_that_of_one_whole_pass(
    random_checkpoint: Callable[[int], Path], steps: pa.Table, dataset: pa.Table, models: Models, tmp_path: Path
) -> None:
    """Token by token with kept keys, against one pass over prompt and answer with all of its attention."""
    from coepg_dagster.inference.screens import Screens, resize_of
    from coepg_dagster.inference.transformers_engine import load_checkpoint
    from coepg_dagster.training.curating import _attended, _filled, _inputs
    from coepg_dagster.training.examples import grounder_examples
    from coepg_dagster.training.preflight import rendered

    model, processor = load_checkpoint(random_checkpoint(3), "float32", "cpu", "eager")
    [example, *_] = grounder_examples(dataset, Screens(steps, resize_of(processor)), "compact", models.coordinates)
    inputs = _inputs(processor, rendered(example, processor)[0], example["images"][0], model)
    with torch.inference_mode():
        stepwise = _filled(_attended(model, inputs, 4, set(), 2))
        answer = model.generate(**inputs, max_new_tokens=3, do_sample=False, eos_token_id=-1)
        extra = answer.shape[1] - inputs["input_ids"].shape[1]
        whole_inputs = dict(inputs) | {
            "input_ids": answer,
            "attention_mask": torch.ones_like(answer),
            "mm_token_type_ids": torch.nn.functional.pad(inputs["mm_token_type_ids"], (0, extra)),
        }
        output = model(**whole_inputs, output_attentions=True)
    together = torch.stack([a[0].mean(0)[-extra - 1 :] for a in output.attentions[-2:]]).numpy()
    assert stepwise.shape == together.shape
    assert np.allclose(stepwise, together, atol=1e-5)


def test_a_checker_is_asked_for_boxes(
    trained: Callable[[str, int], Path], steps: pa.Table, dataset: pa.Table, models: Models, tmp_path: Path
) -> None:
    """The checker answers points, near the centres that it learnt; a small square around them holds the labels' points."""
    job = sft_job(
        tmp_path / "out",
        (dataset, steps, models),
        "planner",
        trained("grounder", 0),
        Sft(**SFT, curation={"label_check": {"by": "open", "side": 8.0}}),
        checkers={"open": Member(model=str(trained("grounder", 0)))},
    )
    places = RowMeasures(job, dataset, steps).boxes(range(6), "open")
    assert all(isinstance(place, Point) for place in places)
    kept, curated = curated_rows(job, dataset, steps)
    assert "s5" in kept["step_id"].to_pylist(), "without a target there is nothing to check"
    assert kept.num_rows >= 5 and curated.figures["label_check"]["of"] == 6


def test_rows_weigh_in_the_loss_as_chosen(
    random_checkpoint: Callable[[int], Path],
    steps: pa.Table,
    dataset: pa.Table,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With equal weights the loss is TRL's; the weights of a batch are those of its rows."""
    losses: list[tuple[float, float, list[float]]] = []
    from coepg_dagster.training import sft

    weighted = sft.PlainTrainer.compute_loss

    def spy(self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        weights = inputs["weight"]
        with torch.no_grad():
            equal = weighted(self, model, {**inputs, "weight": torch.ones_like(weights)}, False, num_items_in_batch)
            plain = {name: value for name, value in inputs.items() if name != "weight"}
            theirs = SFTTrainer.compute_loss(self, model, plain, False, num_items_in_batch)
        losses.append((float(equal), float(theirs), weights.tolist()))
        return weighted(self, model, inputs, return_outputs, num_items_in_batch)

    monkeypatch.setattr(sft.PlainTrainer, "compute_loss", spy)
    config = Sft(**SFT | {"batch_size": 6, "micro_batch_size": 3}, curation={"perplexity_weighted": {}})
    job = sft_job(tmp_path / "out", (dataset, steps, models), "planner", random_checkpoint(2), config)
    figures = train_sft(job, quiet)
    assert figures["curation"]["perplexity_weighted"]["perplexity"] > 3
    assert all(equal == pytest.approx(theirs, rel=1e-5) for equal, theirs, _ in losses)
    seen = [weight for *_, weights in losses for weight in weights]
    assert len(set(seen)) > 1 and np.mean(seen) == pytest.approx(1)


def test_grpo_asks_about_what_stays_in_the_order_of_the_curriculum(
    trained: Callable[[str, int], Path],
    random_checkpoint: Callable[[int], Path],
    steps: pa.Table,
    dataset: pa.Table,
    models: Models,
    tmp_path: Path,
) -> None:
    """Prompts that π_k always or never solves are left out; the rest goes from those it solves often to rarely."""
    config = Grpo(
        prompts_per_step=2,
        group_size=2,
        micro_batch_size=2,
        max_steps=1,
        max_plan_tokens=48,
        kl_beta=0.0,
        temperature=0.9,
        curation={"mixed_results": {"samples": 4}, "curriculum": {"samples": 4}},
    )
    graders = trained("planner", 0), trained("grounder", 0)
    figures = train_grpo(grpo_job(tmp_path / "out", (dataset, steps, models), *graders, config), quiet)
    mixed, curriculum = figures["curation"]["mixed_results"], figures["curation"]["curriculum"]
    left_out = pq.read_table(tmp_path / "out" / CURATION).to_pylist()
    assert 0 < mixed["left_out"] == len(left_out) == mixed.get("all_right", 0) + mixed.get("all_wrong", 0)
    assert {row["row_id"] for row in left_out} == {None}
    assert 0 < curriculum["pass_rate"] < 1 and curriculum["of"] == figures["prompts"] == 6 - len(left_out)
    order = json.loads((beside(tmp_path / "out") / "curation.json").read_text())["kept"]
    asked = list(dict.fromkeys(pq.read_table(tmp_path / "out" / ROLLOUTS)["step_id"].to_pylist()))
    assert asked == [f"s{i}" for i in order][: len(asked)]


def test_folds_of_which_one_has_all_rows_are_refused_before_any_is_trained(
    random_checkpoint: Callable[[int], Path], steps: pa.Table, dataset: pa.Table, models: Models, tmp_path: Path
) -> None:
    data = dataset.slice(0, 1), steps, models
    job = sft_job(tmp_path / "out", data, "grounder", random_checkpoint(2), Sft.model_validate(SFT | {"folds": 2}))
    with pytest.raises(
        NothingToTrainOn, match=r"sft.folds: all 1 rows with a target are of one of the 2 parts.*`folds: null`"
    ):
        train_sft(job, quiet)
    assert not (tmp_path / "out").exists()


def test_each_fold_is_trained_without_its_episodes(
    random_checkpoint: Callable[[int], Path], steps: pa.Table, dataset: pa.Table, models: Models, tmp_path: Path
) -> None:
    """ϕ_k is what it is without folds; the grounders beside it have seen the others' rows only, and are kept by a killed run."""
    data, init = (dataset, steps, models), random_checkpoint(2)
    learning: dict[str, Any] = SFT | {"max_steps": 2, "learning_rate": 1e-3}
    plain = sft_job(tmp_path / "plain", data, "grounder", init, Sft(**learning))
    folded = sft_job(tmp_path / "folded", data, "grounder", init, Sft(**learning, folds=2))
    without, figures = train_sft(plain, quiet), train_sft(folded, quiet)
    assert figures == without | {"fold_rows": figures["fold_rows"]} and sum(figures["fold_rows"]) == 5
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "folded")]
    assert weights[0] == weights[1]
    of_folds = []
    for i in range(2):
        folder = tmp_path / "folded" / FOLD.format(i)
        seen = pq.read_table(folder / "preflight.parquet")["step_id"].to_pylist()
        assert seen and {fold_of(step_id, 2) for step_id in seen} == {1 - i}  # here each step is an episode
        of_folds.append((folder / "model.safetensors").read_bytes())
    assert len({weights[0], *of_folds}) == 3
    made = (beside(tmp_path / "folded") / FOLD.format(0) / "model" / "model.safetensors").stat().st_mtime_ns
    shutil.rmtree(tmp_path / "folded")
    assert train_sft(folded, quiet) == figures
    assert (beside(tmp_path / "folded") / FOLD.format(0) / "model" / "model.safetensors").stat().st_mtime_ns == made


def test_prompts_are_measured_beside_graders_that_fill_vllms_share_of_the_gpu(
    random_checkpoint: Callable[[int], Path],
    steps: pa.Table,
    dataset: pa.Table,
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[float] = []

    @contextmanager
    def served(path: str, *, dtype: Any, device: str, serving: Serving, share: int, **_: Any) -> Iterator[Any]:
        taken.append(serving.memory / share)
        yield TransformersEngine(path, dtype=dtype, device=device, batch_size=8)

    monkeypatch.setattr(opening, "vllm_server", served)
    config = Grpo(
        prompts_per_step=2,
        group_size=2,
        micro_batch_size=4,
        max_steps=1,
        max_plan_tokens=8,
        probe_steps=0,
        curation={"curriculum": {"samples": 2}},
    )
    data = dataset, steps, models.model_copy(update={"engine": "vllm"})
    checkpoints = [random_checkpoint(seed) for seed in (0, 1, 2)]
    train_grpo(grpo_job(tmp_path / "out", data, *checkpoints[:2], config, {"other": checkpoints[2]}), quiet)
    assert len(taken) == 2 and sum(taken) == pytest.approx(Serving().memory)
