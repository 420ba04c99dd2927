"""SFT of π_k and ϕ_k on tiny checkpoints, through TRL's SFTTrainer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from trl import SFTTrainer

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import Sft
from coepg_dagster.geometry import Space
from coepg_dagster.inference.screens import Screens
from coepg_dagster.inference.transformers_engine import TransformersEngine, load_checkpoint
from coepg_dagster.inference.visual import names, screenshot_key
from coepg_dagster.notations import locate
from coepg_dagster.prompts import parse_grounder, parse_planner
from coepg_dagster.training.examples import (
    NothingToTrainOn,
    grounder_examples,
    grpo_prompts,
    planner_examples,
    unseen_steps,
)
from coepg_dagster.training.sft import train_sft
from tests.conftest import step, step_table
from tests.jobs import quiet, sft_job
from tests.pools.tables import row, rows

RESIZE = (28, 3136, 50176)
CONFIG = Sft(max_steps=2, batch_size=6, micro_batch_size=3, learning_rate=1e-3, freeze_vision=True)


def train(
    role: Any, init: Path, dataset: pa.Table, steps: pa.Table, models: Models, out: Path, config: Sft = CONFIG
) -> dict[str, torch.Tensor]:
    train_sft(sft_job(out, (dataset, steps, models), role, init, config), quiet)
    return load_file(out / "model.safetensors")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """The batches that a trainer computes its loss on."""
    batches: list[dict[str, torch.Tensor]] = []
    compute_loss = SFTTrainer.compute_loss

    def spy(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append({name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)})
        return compute_loss(self, model, inputs, *args, **kwargs)

    monkeypatch.setattr(SFTTrainer, "compute_loss", spy)
    return batches


@pytest.mark.parametrize("role", ["planner", "grounder"])
def test_sft(
    role: str,
    random_checkpoint: Callable[[int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
    seen: list[dict[str, torch.Tensor]],
) -> None:
    """One run, looked at from all sides: loss, images, frozen vision, saved weights, and the same run again."""
    init = random_checkpoint(2)
    torch.manual_seed(99)
    after = train(role, init, dataset, steps, models, tmp_path / "one")
    _, processor = load_checkpoint(init, "float32", "cpu")

    # loss on the answer's tokens only, its end included
    answers = set()
    for batch in seen:
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            learnt = labels != -100
            assert (labels[learnt] == ids[learnt]).all()
            answer = processor.tokenizer.decode(ids[learnt])
            assert answer.rstrip().endswith("<|im_end|>")
            answers.add(answer.rstrip().removesuffix("<|im_end|>"))
            prompt = processor.tokenizer.decode(ids[~learnt])
            assert prompt.replace("<|endoftext|>", "").rstrip().endswith("<|im_start|>assistant")
    parse: Any = parse_planner if role == "planner" else parse_grounder
    assert len(answers) >= 5
    assert all(parse(answer) for answer in answers)

    # the trainer's own processor sees the pixels that the engine sees: one resize, not two
    screens = Screens(steps, RESIZE)
    images = [screens.image(f"s{i}") for i in range(6)]
    keys = {screenshot_key(image).hex() for image in images}
    assert all(set(names(batch["pixel_values"], batch["image_grid_thw"])) <= keys for batch in seen)

    # trained, and frozen where configured
    before = load_file(init / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert not any("visual" in name for name in moved)
    assert any("visual" in name for name in before)

    # what was saved is what is loaded
    loaded, _ = load_checkpoint(tmp_path / "one", "float32", "cpu")
    assert all(torch.equal(tensor, after[name]) for name, tensor in loaded.state_dict().items() if name in after)
    assert not (tmp_path / "one" / "trainer").exists() or not any((tmp_path / "one" / "trainer").rglob("*.bin"))

    # the same seed gives the same bytes, whatever the global state was
    torch.manual_seed(1)
    train(role, init, dataset, steps, models, tmp_path / "two")
    weights = [(tmp_path / run / "model.safetensors").read_bytes() for run in ("one", "two")]
    assert weights[0] == weights[1]

    # and its progress is on record
    log = [json.loads(line) for line in (tmp_path / "one" / "training_log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == 2


# examples


def test_the_grounder_learns_the_centre_of_the_verified_box_in_its_space(steps: pa.Table, dataset: pa.Table) -> None:
    screens = Screens(steps, RESIZE)
    centres = [(18, 28), (38, 28), (58, 28), (18, 68), (38, 68)]
    for space, scale in ((Space.RESIZED, (1, 1)), (Space.NORM_1000, (1000 / 84, 1000 / 112))):
        examples = grounder_examples(dataset, screens, "compact", space)
        answers = [example["completion"][0]["content"][0]["text"] for example in examples]
        assert [parse_grounder(a) for a in answers] == [(round(x * scale[0]), round(y * scale[1])) for x, y in centres]
    assert len(examples) == 5, "the step without a target is left out"
    prompts = [example["prompt"][0]["content"][1]["text"] for example in examples]
    assert prompts == [row["plan"] for row in dataset.to_pylist() if row["box"]]


def test_the_grounder_may_learn_the_box(steps: pa.Table, dataset: pa.Table) -> None:
    """Its answer is read as the centre; the four numbers are the row's box in the grounder's space."""
    screens = Screens(steps, RESIZE)
    for space, scale in ((Space.RESIZED, (1, 1)), (Space.NORM_1000, (1000 / 84, 1000 / 112))):
        examples = grounder_examples(dataset, screens, "compact", space, "box")
        for example, one in zip(examples, (one for one in dataset.to_pylist() if one["box"]), strict=True):
            found = locate(example["completion"][0]["content"][0]["text"])
            assert found is not None and len(found.spans) == 4
            assert found.corners == tuple(round(edge * scale[i % 2]) for i, edge in enumerate(one["box"]))


def test_the_planner_learns_the_plan_and_the_label(steps: pa.Table, dataset: pa.Table) -> None:
    examples = planner_examples(dataset, steps, Screens(steps, RESIZE), "compact")
    answers = [parse_planner(example["completion"][0]["content"][0]["text"]) for example in examples]
    assert [(a.plan, a.action_type, a.value) for a in answers if a] == [
        (row["plan"], row["action_type"], row["value"]) for row in dataset.to_pylist()
    ]


def test_grpo_prompts_are_the_covered_steps_once_without_their_labels(steps: pa.Table, dataset: pa.Table) -> None:
    twice = pa.concat_tables([dataset.slice(1, 3), dataset.slice(1, 2)])
    prompts = grpo_prompts(twice["step_id"].to_pylist(), steps, Screens(steps, RESIZE), "compact")
    assert prompts["step_id"][:] == ["s1", "s2", "s3"]
    assert set(prompts[0]) == {"images", "prompt", "step_id"}


@pytest.mark.parametrize("rows", [1, 4, 6])
def test_updates_are_as_many_for_every_size_of_d_k(
    rows: int,
    random_checkpoint: Callable[[int], Path],
    dataset: pa.Table,
    steps: pa.Table,
    models: Models,
    tmp_path: Path,
) -> None:
    """Fewer rows than a batch, one epoch and a half, and fewer than an epoch of them."""
    config = Sft(epochs=1, max_steps=3, batch_size=4, micro_batch_size=2, freeze_vision=True)
    data = (dataset.slice(0, rows), steps, models)
    figures = train_sft(sft_job(tmp_path / "out", data, "planner", random_checkpoint(2), config), quiet)
    assert (figures["rows"], figures["optimizer_steps"]) == (rows, 3)


def test_nothing_to_learn_from_is_an_error(steps: pa.Table, dataset: pa.Table) -> None:
    screens = Screens(steps, RESIZE)
    no_target = dataset.filter(pa.compute.is_null(dataset["box"]))
    assert len(planner_examples(no_target, steps, screens, "compact")) == 1
    with pytest.raises(NothingToTrainOn, match="decisions"):
        grounder_examples(no_target, screens, "compact", Space.RESIZED)


def test_the_resize_is_that_of_the_processor(random_checkpoint: Callable[[int], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(random_checkpoint(0), tmp_path / "copy")
    model, processor = load_checkpoint(folder, "float32", "cpu")
    assert TransformersEngine.of(model, processor, batch_size=1).resize == RESIZE


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["train", "train", "validation", "test"]),
            st.integers(0, 4),
            st.sampled_from(["Click OK", "Click No"]),
            st.integers(0, 3),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_unseen_steps_are_all_that_neither_training_nor_another_split_has(
    drawn: list[tuple[str, int, str, int, bool]],
) -> None:
    """Each is drawn as (split, episode, goal, screenshot, whether a train step has a row in D_k)."""
    table = step_table(
        *(
            step(f"s{i}", split=split, episode_id=f"e{episode}", goal=goal, screenshot=bytes([screen]))
            for i, (split, episode, goal, screen, _) in enumerate(drawn)
        )
    )
    with_row = [i for i, (split, *_, has_row) in enumerate(drawn) if split == "train" and has_row]
    others = [i for i, (split, *_) in enumerate(drawn) if split != "train"]
    taken = {(drawn[i][2], drawn[i][3]) for i in (*with_row, *others)}
    expected = [
        f"s{i}"
        for i, (split, episode, goal, screen, has_row) in enumerate(drawn)
        if split == "train" and not has_row and (goal, screen) not in taken
        and all(drawn[other][1] != episode for other in others)
    ]  # fmt: skip
    assert unseen_steps(rows(*(row(f"s{i}", "press OK") for i in (*with_row, *with_row))), table, "train") == expected
