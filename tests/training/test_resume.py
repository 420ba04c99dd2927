"""Killed and continued: a run that is killed, and run again, ends with the bytes of a run that was never killed."""

from __future__ import annotations

import hashlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coepg_dagster import running
from coepg_dagster.artifacts import seal, write_steps
from coepg_dagster.experiment.models import Member, Models
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.experiment.training import Grpo, Lora, Sft
from coepg_dagster.inference.transformers_engine import TransformersEngine
from coepg_dagster.jobs import CandidatesJob, GrpoJob, Job, Placement, SftJob
from coepg_dagster.progress import Ended
from coepg_dagster.training.checkpoints import WHOLE, Checkpoints
from tests.inference.openai_server import OpenAIServer


def end_at(when: str, number: signal.Signals) -> None:
    """From now on this process is ended by `number` at a place such as `step 3`, `save 2` or `chunk 2`."""

    def here(place: str) -> None:
        if place == when:
            signal.raise_signal(number)

    save, write, made = Checkpoints.on_save, running.write_table, itertools.count(1)

    def at_step(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        here(f"step {state.global_step}")

    def at_save(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        here(f"save {state.global_step}")
        save(self, args, state, control)

    def at_chunk(table: pa.Table, path: Path) -> None:
        path.with_name(f".{path.name}.1.partial").write_bytes(b"half")
        here(f"chunk {next(made)}")
        write(table, path)

    Checkpoints.on_step_begin = at_step  # type: ignore[method-assign]
    Checkpoints.on_save = at_save  # type: ignore[method-assign]
    running.write_table = at_chunk
    running.CHUNK = 2


@pytest.fixture
def common(tmp_path: Path, steps: pa.Table, dataset: pa.Table, models: Models) -> dict[str, Any]:
    write_steps(steps, tmp_path / "steps.arrow", ["train"])
    pq.write_table(dataset, tmp_path / "dataset.parquet")
    return {
        "steps": tmp_path / "steps.arrow",
        "dataset": tmp_path / "dataset.parquet",
        "models": models,
        "device": "cpu",
        "batch_size": 8,
        "seed": 3,
        "train_split": "train",
    }


def run(job: Job, when: str = "never", number: signal.Signals = signal.SIGKILL) -> tuple[int, str]:
    """Runs a job in a process of its own, with the `out` and scratch folders of the job before: (exit code, its output).

    The process is forked, so that it need not import torch.
    """
    job.out.mkdir(parents=True, exist_ok=True)
    job.scratch.mkdir(parents=True, exist_ok=True)
    log = job.scratch / "log"

    def child() -> None:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
        os.dup2(1, 2)
        sys.stdout = os.fdopen(1, "w", buffering=1)
        end_at(when, number)
        seen: list[int] = []
        try:
            running.run(job, lambda done, of, figures: seen.append(done))
        except Ended as why:
            os.write(1, str(why).encode())
            os._exit(1)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            raise
        os.write(1, f"first report {seen[0]}".encode())
        os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(120)
    assert process.exitcode is not None, "it hangs"
    return process.exitcode, log.read_text()


def hashes(folder: Path, *names: str) -> list[str]:
    return [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]


def logged(folder: Path) -> list[dict[str, float]]:
    """What a training logged, less what is measured with a clock."""
    keys = ("step", "loss", "learning_rate", "grad_norm", "reward", "kl", "epoch")
    lines = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in keys if key in line} for line in lines if "loss" in line]


def validated(folder: Path) -> list[tuple[int, float]]:
    """(step, validation reward) of every look."""
    lines = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    return [(int(line["step"]), line["validation_reward"]) for line in lines if "validation_reward" in line]


def probed(folder: Path) -> list[dict[str, float]]:
    """The lines of the probes in a training log, in its order."""
    lines = [json.loads(line) for line in (folder / "training_log.jsonl").read_text().splitlines()]
    return [line for line in lines if "probe_train_greedy" in line]


def rollouts(folder: Path) -> list[dict[str, Any]]:
    """Every rollout, less what is measured with a clock."""
    rows: list[dict[str, Any]] = pq.read_table(folder / "rollouts.parquet").to_pylist()
    return [row | {"graders": [grader | {"seconds": None} for grader in row["graders"]]} for row in rows]


def compare(make: Callable[[str], Job], ends: list[tuple[str, signal.Signals]], *names: str) -> list[str]:
    """Runs a job once to its end, and once more ended by each of `ends`; the files must be equal. What was printed."""
    whole, killed = make("whole"), make("killed")
    code, output = run(whole)
    assert code == 0, output[-3000:]
    printed = []
    for when, number in [*ends, ("never", signal.SIGKILL)]:
        code, output = run(killed, when, number)
        assert code == (0 if when == "never" else 1 if number == signal.SIGTERM else -number), (when, output[-3000:])
        printed.append(output)
    assert hashes(whole.out, *names) == hashes(killed.out, *names)
    return printed


def sft_in(folder: Path, common: dict[str, Any], checkpoint: Path, **more: Any) -> SftJob:
    """SFT of the checkpoint, of a planner unless `more` says so, in a folder of its own."""
    job = {"role": "planner", "validation_split": "train", "max_plan_tokens": 16, "max_point_tokens": 8}
    return SftJob(
        **common | job | {"out": folder / "out", "scratch": folder / "scratch", "init": str(checkpoint)} | more
    )


def test_sft_is_continued_also_in_a_second_epoch(
    common: dict[str, Any], random_checkpoint: Callable[[int], Path], tmp_path: Path
) -> None:
    """Three epochs of two steps. Killed in a step, in a checkpoint that is not whole yet, and ended by SIGTERM."""

    def make(name: str) -> Job:
        return sft_in(
            tmp_path / name,
            common,
            random_checkpoint(2),
            config=Sft(epochs=3, batch_size=3, micro_batch_size=3, learning_rate=1e-3),
            placement=Placement(save_every=2 if name == "whole" else 1),
        )

    at = random.Random(time.time_ns()).choice([2, 3])
    ends = [(f"step {at}", signal.SIGKILL), ("save 4", signal.SIGKILL), ("step 4", signal.SIGTERM)]
    printed = compare(make, ends, "model.safetensors")
    assert f"continues from checkpoint-{at}" in printed[1]
    assert "continues from checkpoint-3" in printed[2], "checkpoint 4 was not whole"
    assert "SIGTERM: saved at step 5 of 6. Run the same step again" in printed[2]
    assert "continues from checkpoint-5" in printed[3]
    log = logged(tmp_path / "killed" / "out")
    assert log == logged(tmp_path / "whole" / "out")
    assert [line["step"] for line in log] == [1, 2, 3, 4, 5, 6]
    kept = sorted(path.name for path in (tmp_path / "killed" / "scratch" / "trainer").glob("checkpoint-*"))
    assert kept == ["checkpoint-4", "checkpoint-5"]


@pytest.mark.long
def test_sft_with_lora_is_continued(
    common: dict[str, Any], random_checkpoint: Callable[[int], Path], tmp_path: Path
) -> None:
    """Its checkpoints hold the adapters alone; the merged weights are the same bytes. `max_steps` goes beyond its epoch."""

    def make(name: str) -> Job:
        return sft_in(
            tmp_path / name,
            common,
            random_checkpoint(2),
            role="grounder",
            config=Sft(epochs=1, max_steps=4, batch_size=3, micro_batch_size=3, learning_rate=1e-2, lora=Lora(rank=4)),
            placement=Placement(save_every=2),
        )

    printed = compare(make, [("step 3", signal.SIGKILL)], "model.safetensors")
    assert "continues from checkpoint-2" in printed[1]
    log = logged(tmp_path / "killed" / "out")
    assert log == logged(tmp_path / "whole" / "out") and [line["step"] for line in log] == [1, 2, 3, 4]
    kept = tmp_path / "killed" / "scratch" / "trainer" / "checkpoint-2"
    assert [file.name for file in kept.glob("*.safetensors")] == ["adapter_model.safetensors"]


@pytest.mark.long
def test_packed_sft_is_continued_also_in_a_second_epoch(
    common: dict[str, Any], dataset: pa.Table, random_checkpoint: Callable[[int], Path], tmp_path: Path
) -> None:
    """Two epochs of three steps of two groups each, with one, two or three plans of a step."""
    rows = [
        row | {"plan": row["plan"] + " now" * n} for i, row in enumerate(dataset.to_pylist()) for n in range(1 + i % 3)
    ]
    pq.write_table(pa.Table.from_pylist(rows, dataset.schema), tmp_path / "several.parquet")

    def make(name: str) -> Job:
        return sft_in(
            tmp_path / name,
            common,
            random_checkpoint(2),
            dataset=tmp_path / "several.parquet",
            config=Sft(epochs=2, batch_size=4, micro_batch_size=2, learning_rate=1e-3, packing=True),
            placement=Placement(save_every=1),
        )

    ends = [("step 2", signal.SIGKILL), ("save 4", signal.SIGKILL), ("step 4", signal.SIGTERM)]
    printed = compare(make, ends, "model.safetensors")
    assert "continues from checkpoint-2" in printed[1] and "continues from checkpoint-3" in printed[2]
    assert "continues from checkpoint-5" in printed[3]
    log = logged(tmp_path / "killed" / "out")
    assert log == logged(tmp_path / "whole" / "out") and [line["step"] for line in log] == [1, 2, 3, 4, 5, 6]


def test_grpo_is_continued_with_every_rollout_once(
    common: dict[str, Any],
    trained: Callable[[str, int], Path],
    random_checkpoint: Callable[[int], Path],
    tmp_path: Path,
) -> None:
    """Two epochs of two steps, killed after the rollouts of a step were written but before it was done.

    The weights that are kept are older than the checkpoint, and are restored. One grounder is behind an endpoint, and queried
    while rollouts are sampled.
    """
    stranger = str(random_checkpoint(3))
    server = OpenAIServer(TransformersEngine(stranger, dtype="float32", device="cpu", batch_size=1)).start()
    far = Member(model="tiny", engine="openai", base_url=server.url, processor=stranger)

    def make(name: str) -> Job:
        return GrpoJob(
            **common,
            out=tmp_path / name / "out",
            scratch=tmp_path / name / "scratch",
            init=str(trained("planner", 0)),
            grounder=("grounder_1", str(trained("grounder", 0))),
            verifiers={"stranger": far},
            validation_split="train",
            max_point_tokens=8,
            config=Grpo(
                prompts_per_step=3,
                group_size=2,
                micro_batch_size=3,
                max_steps=4,
                learning_rate=3e-3,
                max_plan_tokens=16,
                validate_every=1,
                probe_between=2,
            ),
            placement=Placement(save_every=2),
        )

    printed = compare(make, [("step 3", signal.SIGKILL)], "model.safetensors")
    server.stop()
    assert "continues from checkpoint-2" in printed[1]
    validations = [dict(validated(tmp_path / name / "out")) for name in ("whole", "killed")]
    assert validations[0] == validations[1] and list(validations[0]) == [0, 1, 2, 3, 4]
    probes = [probed(tmp_path / name / "out") for name in ("whole", "killed")]
    assert probes[0] == probes[1] and [line["step"] for line in probes[0]] == [0, 1, 3, 4]
    kept = max(validations[0], key=lambda step: (validations[0][step], step))
    assert kept < 2, "of little use otherwise"
    assert probes[0][3] == probes[0][kept] | {"step": 4}, "the last are of the weights that are kept"
    whole, rows = (rollouts(tmp_path / name / "out") for name in ("whole", "killed"))
    assert whole == rows
    assert [row["optimizer_step"] for row in rows] == [step for step in range(4) for _ in range(6)]
    orders = [[row["step_id"] for row in rows if row["optimizer_step"] // 2 == epoch] for epoch in (0, 1)]
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1], "each epoch has an order of its own"
    assert logged(tmp_path / "killed" / "out") == logged(tmp_path / "whole" / "out")


@pytest.mark.long
def test_grpo_with_other_prompts_and_earlier_successes_is_continued(
    common: dict[str, Any], trained: Callable[[str, int], Path], tmp_path: Path
) -> None:
    """The successes are in the checkpoint; which prompts are asked instead, and which success is drawn, seed and step decide."""

    def make(name: str) -> Job:
        return GrpoJob(
            **common,
            out=tmp_path / name / "out",
            scratch=tmp_path / name / "scratch",
            init=str(trained("planner", 0)),
            grounder=("grounder_1", str(trained("grounder", 0))),
            verifiers={},
            validation_split="train",
            max_point_tokens=8,
            config=Grpo.model_validate(
                {"prompts_per_step": 3, "group_size": 2, "micro_batch_size": 2, "max_steps": 6, "learning_rate": 1e-3}
                | {"max_plan_tokens": 24, "temperature": 0.7, "kl_beta": 0.0, "probe_steps": 0}
                | {"max_num_gen_batches": 3, "replay": {"below_mean": 2.0, "below_std": 10.0, "size": 3}}
            ),
            placement=Placement(save_every=2),
        )

    printed = compare(make, [("step 3", signal.SIGKILL), ("save 4", signal.SIGKILL)], "model.safetensors")
    assert "continues from checkpoint-2" in printed[1]
    whole, killed = (rollouts(tmp_path / name / "out") for name in ("whole", "killed"))
    assert whole == killed and logged(tmp_path / "killed" / "out") == logged(tmp_path / "whole" / "out")
    assert any(row["sampled_in"] is not None and row["optimizer_step"] >= 4 for row in killed), (
        "replayed after it went on"
    )
    log = [json.loads(line) for line in (tmp_path / "killed" / "out" / "training_log.jsonl").read_text().splitlines()]
    assert sum(line.get("groups_resampled", 0) for line in log) > 0


def test_a_pool_step_loses_one_chunk_at_most(
    common: dict[str, Any], trained: Callable[[str, int], Path], tmp_path: Path
) -> None:
    del common["dataset"]

    def make(name: str) -> Job:
        return CandidatesJob(
            **common,
            out=tmp_path / name / "out",
            scratch=tmp_path / name / "scratch",
            members={"learnt": str(trained("planner", 0))},
            max_steps=None,
            config=Regeneration(plans_per_planner=2, max_plan_tokens=16),
            processes=1,
        )

    printed = compare(make, [("chunk 2", signal.SIGKILL)], "candidates.parquet")
    assert printed[1].endswith("first report 2"), "the first chunk was there: the first report is of the second"


def test_what_another_placement_left_is_not_continued(tmp_path: Path) -> None:
    """Its files are others: without this, training would go on with a new optimizer, or end."""
    for step, strategy, processes in [(1, "ddp", 1), (2, "zero2", 1), (3, "ddp", 2)]:
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        about = {"step": step, "processes": processes, "strategy": strategy, "files": {}}
        (folder / WHOLE).write_text(json.dumps(about))
        seal(folder / WHOLE)
    assert Checkpoints(tmp_path, Placement()).last() == tmp_path / "checkpoint-1"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert Checkpoints(tmp_path, Placement(strategy="fsdp")).last() is None
