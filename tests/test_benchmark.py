"""What of its labelled steps would stop an experiment later on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coepg_dagster.benchmark import benchmark_version, is_to_be_fetched, reference_plans, refuse_files, refuse_steps
from coepg_dagster.evaluation.protocols import PROTOCOLS, READERS
from coepg_dagster.experiment.files import load_experiment
from coepg_dagster.experiment.schema import Evaluation, Experiment
from coepg_dagster.readers.importing import load_benchmark
from coepg_dagster.readers.rows import ReaderError
from coepg_dagster.sandbox.miniwob.reader import load_labels, load_targets
from coepg_dagster.sandbox.pretraining.wordings import ScreenElement, is_right, place, short_name
from tests.conftest import step, step_table
from tests.faults.damage import flip_a_bit
from tests.readers.samples import (
    candidate,
    episode,
    mind2web_row,
    picture,
    user_row,
    write_android_control,
    write_mind2web,
    write_user_rows,
)

ROOT = Path(__file__).parent.parent
SANDBOX = load_experiment(ROOT / "experiments" / "sandbox.yaml")


def changed(**change: Any) -> Experiment:
    """The sandbox with another benchmark, and with small steps of GRPO."""
    benchmark = SANDBOX.benchmark.model_dump() | {"test": ["test_seed"], "max_train_steps": None} | change
    grpo = SANDBOX.grpo.model_copy(update={"prompts": "dataset", "prompts_per_step": 2, "micro_batch_size": 16})
    return Experiment.model_validate(SANDBOX.model_dump() | {"benchmark": benchmark, "grpo": grpo.model_dump()})


def steps(**lengths: tuple[int, ...]) -> Any:
    """Steps of each split, in episodes of these lengths."""
    return step_table(
        *(
            step(f"{split}{e}{i}", split=split, episode_id=f"{split}{e}", step_index=i)
            for split, episodes in lengths.items()
            for e, length in enumerate(episodes)
            for i in range(length)
        )
    )


ALL: dict[str, tuple[int, ...]] = {"train": (3, 3), "validation": (2,), "test_seed": (1, 4)}


@pytest.mark.parametrize(
    ("lengths", "change", "message"),
    [
        (ALL, {}, ""),
        (ALL, {"max_train_steps": 3, "max_eval_steps": 2}, ""),
        ({"train": (3,), "validation": (2,)}, {}, "no steps in split test_seed (there are: train, validation)"),
        (
            ALL,
            {"max_train_steps": 2},
            "max_train_steps`: no episode of split 'train' has at most 2 steps, the shortest has 3",
        ),
        (ALL, {"max_eval_steps": 1}, "max_eval_steps`: no episode of split 'validation' has at most 1 steps"),
        (
            ALL | {"train": (1,)},
            {},
            "grpo.prompts_per_step`: it is 2, and split 'train', with `max_train_steps`, has 1",
        ),
    ],
)
def test_steps_that_are_too_few(lengths: Any, change: dict[str, Any], message: str) -> None:
    why = refuse_steps(changed(**change), steps(**lengths))
    assert (len(why) == 1 and message in why[0]) if message else why == []


@pytest.mark.parametrize(
    ("key", "look"),
    [("validation_steps", {"validate_every": 1, "validation_steps": 1}), ("probe_steps", {"probe_steps": 1})],
)
def test_a_look_at_the_validation_split_needs_an_episode_of_it(key: str, look: dict[str, int]) -> None:
    grpo = {"prompts": "dataset", "prompts_per_step": 2} | look
    watched = changed().model_copy(update={"grpo": SANDBOX.grpo.model_copy(update=grpo)})
    why = refuse_steps(watched, steps(**ALL))
    assert len(why) == 1 and f"`grpo.{key}`: no episode of split 'validation'" in why[0]


def test_a_dataset_that_covers_too_few_steps() -> None:
    why = refuse_steps(changed(), steps(**ALL), {0: 5, 1: 1})
    assert len(why) == 1 and "D_1 has 1 training steps" in why[0]
    other = {"prompts": "unseen", "prompts_per_step": 2}
    unseen = changed().model_copy(update={"grpo": SANDBOX.grpo.model_copy(update=other)})
    assert refuse_steps(unseen, steps(**ALL)) == [], "how many of the 6 are left is not known before D_0"
    why = refuse_steps(unseen, steps(**ALL), {0: 4, 1: 5})
    assert len(why) == 1 and "D_1 leaves 1 of 6 training steps without a row" in why[0] and "max_train_steps" in why[0]
    without = changed().model_copy(update={"grpo": SANDBOX.grpo.model_copy(update={"enabled": False})})
    assert refuse_steps(without, steps(**ALL), {1: 1}) == []


def test_user_data_without_what_its_protocol_needs() -> None:
    """A user's steps may have points, or only boxes."""
    mine = changed(reader="jsonl", protocol="android_control/os_atlas")
    why = refuse_steps(mine, steps(**ALL))
    assert len(why) == 1 and "`benchmark.protocol`: step validation00" in why[0] and "needs the point" in why[0]
    assert refuse_steps(changed(reader="jsonl", protocol="miniwob/point"), steps(**ALL)) == []


def web(folder: Path) -> Path:
    small: dict[str, Any] = {
        "screenshot": {"bytes": picture(400, 300), "path": None},
        "pos_candidates": [candidate(10, 10, 60, 20)],
    }
    for split, tasks in (("train", 40), ("test_task", 3)):
        write_mind2web(folder / f"{split}-0.parquet", [mind2web_row(f"{split}{i}", **small) for i in range(tasks)])
    return folder


def mobile(folder: Path) -> Path:
    splits = {"train": [0, 1], "validation": [2], "test": [3]}
    return write_android_control(folder, [episode(i) for i in range(4)], splits).parent


@pytest.mark.parametrize(
    ("reader", "sample", "test"), [("mind2web", web, "test_task"), ("android_control", mobile, "test")]
)
def test_every_protocol_that_an_experiment_may_name_scores_its_steps(
    reader: Any, sample: Any, test: str, tmp_path: Path
) -> None:
    source = sample(tmp_path / "data")
    table, _ = load_benchmark(reader, source, tmp_path / "out")
    names = [name for name, rule in PROTOCOLS.items() if reader in READERS[name.split("/")[0]] and not rule.needs]
    assert len(names) >= 3
    for name in names:
        experiment = changed(reader=reader, path=source, test=[test], protocol=name)
        assert refuse_files(experiment, tmp_path) == []
        assert refuse_steps(experiment, table) == []
    if reader == "android_control":
        strange = changed(reader=reader, path=source, test=["tast"], protocol=names[0])
        assert refuse_files(strange, tmp_path) == [
            "benchmark: no steps in split tast (there are: test, train, validation)"
        ]


def test_user_data_names_its_splits(tmp_path: Path) -> None:
    lines = [json.dumps({"split": split}) for split in ("train", "train", "dev", "test")]
    (tmp_path / "steps.jsonl").write_text("\n".join([*lines, "{half a li", "[]", '{"split": 1}', ""]))
    mine = changed(reader="jsonl", path=tmp_path, validation="dev", test=["test"])
    assert refuse_files(mine, tmp_path) == []
    assert (
        "no steps in split validation (there are: dev, test, train)"
        in refuse_files(changed(reader="jsonl", path=tmp_path, test=["test"]), tmp_path)[0]
    )


def test_the_snapshot_is_checked_without_its_screenshots() -> None:
    assert refuse_files(SANDBOX, ROOT) == []
    assert refuse_files(changed(path=Path("data/nothere")), ROOT)[0].startswith("benchmark: ")


def test_a_snapshot_that_was_written_anew_has_the_same_version(tmp_path: Path) -> None:
    """As by a fresh clone beside a store that was moved."""
    shutil.copytree(ROOT / SANDBOX.benchmark.path, tmp_path / SANDBOX.benchmark.path)
    same = benchmark_version(SANDBOX.benchmark, ROOT, tmp_path)
    file = next((tmp_path / SANDBOX.benchmark.path).glob("*.parquet"))
    os.utime(file, (1, 1))
    assert benchmark_version(SANDBOX.benchmark, tmp_path, tmp_path) == same
    flip_a_bit(file)
    assert benchmark_version(SANDBOX.benchmark, tmp_path, tmp_path) != same


def test_a_snapshot_of_other_columns(tmp_path: Path) -> None:
    for file in (ROOT / "data" / "miniwob").glob("*.parquet"):
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "train.parquet").unlink()
    write_mind2web(tmp_path / "train.parquet", [mind2web_row("t", screenshot=None)])
    why = refuse_files(changed(path=tmp_path), ROOT)
    assert len(why) == 1 and "train.parquet: is no file of a MiniWoB++ snapshot, column 'split' is missing" in why[0]
    (tmp_path / "train.parquet").write_bytes(b"PAR1 and no more")
    assert refuse_files(changed(path=tmp_path), ROOT)[0].startswith("benchmark: ")


def test_public_benchmarks_are_planned_before_they_are_fetched(tmp_path: Path) -> None:
    web_7b = load_experiment(ROOT / "experiments" / "web_7b.yaml").benchmark
    assert is_to_be_fetched(web_7b, tmp_path) and not is_to_be_fetched(SANDBOX.benchmark, tmp_path)
    (tmp_path / web_7b.path).mkdir(parents=True)
    assert not is_to_be_fetched(web_7b, tmp_path)


def test_reference_plans_of_the_sandbox_name_the_target_of_every_step() -> None:
    steps = load_labels(ROOT / "data" / "miniwob", ("step_id", "boxes", "action_type"))
    plans = reference_plans(SANDBOX.benchmark, ROOT, steps)
    assert list(plans) == steps["step_id"].to_pylist()
    targets = load_targets(ROOT / "data" / "miniwob")
    for row in steps.to_pylist():
        kind, name, _ = targets[row["step_id"]]
        element = ScreenElement(kind, name, "", tuple(row["boxes"][0]))
        plan = plans[row["step_id"]]
        assert kind in plan and short_name(name) in plan and place(element) in plan
        assert is_right(plan, ["C"], element, [element], row["action_type"])


@given(st.lists(st.none() | st.just("") | st.text(min_size=1), min_size=1, max_size=6))
def test_reference_plans_are_the_instructions_of_the_steps_or_the_first_without_is_named(
    texts: list[str | None],
) -> None:
    mine = changed(reader="jsonl").benchmark
    table = pa.table({"step_id": [f"s{i}" for i in range(len(texts))], "instruction": pa.array(texts, pa.string())})
    lacking = [i for i, text in enumerate(texts) if not text]
    if lacking:
        with pytest.raises(
            ReaderError, match=rf"{len(lacking)} of {len(texts)} validation steps .* e\.g\. s{lacking[0]}:"
        ):
            reference_plans(mine, Path(), table)
    else:
        assert list(reference_plans(mine, Path(), table).values()) == texts


def test_steps_without_a_plan_are_refused_before_anything_runs() -> None:
    mine = changed(reader="jsonl").model_copy(update={"evaluation": Evaluation(oracle_plan=True)})
    table = steps(**ALL)
    for plan, refused in (("press OK", False), (None, True)):
        column = pa.array([plan] * table.num_rows, pa.string())
        why = refuse_steps(mine, table.append_column("instruction", column))
        assert bool(why) == refused and (not why or "`evaluation.oracle_plan`: 2 of 2 validation steps" in why[0])


def test_boxes_in_another_unit_are_refused_before_anything_runs(tmp_path: Path) -> None:
    mine = changed(reader="jsonl", path=tmp_path, test=["test"])
    for boxes, refused in (([[10, 10, 50, 30]], False), ([[0.1, 0.1, 0.5, 0.5]], True)):
        rows = [user_row(split, split=split, boxes=boxes) for split in ("train", "validation", "test")]
        why = refuse_files(mine, write_user_rows(tmp_path, list(rows)))
        assert bool(why) == refused and all("all boxes lie in 0..1" in line for line in why), why
