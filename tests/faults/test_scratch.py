"""What a killed job left and a disk damaged since is made again: the result is that of a run without either."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from coepg_dagster.artifacts import write_steps, write_table
from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import Grpo, Sft
from coepg_dagster.jobs import GrpoJob, Job, Placement, SftJob
from tests.faults.damage import cut_off, flip_a_bit
from tests.training.test_resume import hashes, logged, rollouts, run

pytestmark = pytest.mark.long

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory, steps: pa.Table, dataset: pa.Table, models: Models) -> Any:
    folder = tmp_path_factory.mktemp("inputs")
    write_steps(steps, folder / "steps.arrow", ["train"])
    write_table(dataset, folder / "dataset.parquet")
    settings = {"device": "cpu", "batch_size": 8, "seed": 3, "train_split": "train", "validation_split": "train"}
    return settings | {"steps": folder / "steps.arrow", "dataset": folder / "dataset.parquet", "models": models}


def without(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def flipped(name: str) -> Damage:
    return lambda folder: flip_a_bit(folder / name)


def cut(name: str) -> Damage:
    return lambda folder: cut_off(folder / name)


NEWEST = "trainer/checkpoint-3"


@pytest.fixture(scope="module")
def sft(common: Any, random_checkpoint: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SFT whole; and killed in its last step but one, with the checkpoints of steps 2 and 3."""
    root = tmp_path_factory.mktemp("sft")

    def make(name: str) -> Job:
        return SftJob(
            **common,
            out=root / name / "out",
            scratch=root / name / "scratch",
            role="planner",
            init=str(random_checkpoint(2)),
            max_plan_tokens=16,
            max_point_tokens=8,
            config=Sft(max_steps=4, batch_size=3, micro_batch_size=3, learning_rate=1e-3),
            placement=Placement(save_every=1),
        )

    assert run(make("whole"))[0] == 0 and run(make("killed"), "step 3")[0] == -signal.SIGKILL
    return make


@pytest.mark.parametrize(
    ("damage", "continues"),
    [
        pytest.param(flipped(f"{NEWEST}/model.safetensors"), 2, id="a bit of the weights"),
        pytest.param(flipped(f"{NEWEST}/optimizer.pt"), 2, id="a bit of the optimizer"),
        pytest.param(flipped(f"{NEWEST}/whole.json"), 2, id="a bit of the list of files"),
        pytest.param(cut(f"{NEWEST}/model.safetensors"), 2, id="weights cut off"),
        pytest.param(without(f"{NEWEST}/rng_state.pth"), 2, id="a file is gone"),
        pytest.param(
            lambda folder: [flip_a_bit(file) for file in folder.glob("trainer/*/model.safetensors")],
            None,
            id="both checkpoints",
        ),
    ],
)
def test_training_goes_on_from_the_newest_checkpoint_that_is_undamaged(
    sft: Any, damage: Damage, continues: int | None, tmp_path: Path
) -> None:
    whole, killed = sft("whole"), sft("killed")
    damaged = killed.model_copy(update={"out": tmp_path / "out", "scratch": tmp_path / "scratch"})
    shutil.copytree(killed.scratch, damaged.scratch)
    damage(damaged.scratch)
    code, output = run(damaged)
    assert code == 0, output[-3000:]
    assert "checkpoint-3 is damaged: it is not continued" in output
    assert (f"continues from checkpoint-{continues}" in output) if continues else ("continues from" not in output)
    assert hashes(damaged.out, "model.safetensors") == hashes(whole.out, "model.safetensors")
    assert logged(damaged.out) == logged(whole.out)


@pytest.mark.parametrize("name", ["rollouts/00000001.parquet", "best/*.safetensors", "probe/*.json"])
def test_so_does_grpo_without_what_it_kept_beside_its_checkpoints(
    common: Any,
    trained: Callable[[str, int], Path],
    name: str,
    tmp_path: Path,
) -> None:
    def make(name: str) -> Job:
        return GrpoJob(
            **common,
            out=tmp_path / name / "out",
            scratch=tmp_path / name / "scratch",
            init=str(trained("planner", 0)),
            grounder=("grounder_1", str(trained("grounder", 0))),
            verifiers={},
            max_point_tokens=8,
            config=Grpo(
                prompts_per_step=3,
                group_size=2,
                micro_batch_size=6,
                max_steps=4,
                learning_rate=3e-3,
                max_plan_tokens=16,
                validate_every=1,
                probe_between=2,
            ),
            placement=Placement(save_every=1),
        )

    whole, killed = make("whole"), make("killed")
    assert run(whole)[0] == 0 and run(killed, "step 3")[0] == -signal.SIGKILL
    newest = sorted(killed.scratch.glob(name))[-1]
    flip_a_bit(newest)
    code, output = run(killed)
    assert code == 0, output[-3000:]
    assert "needs a file beside it that is damaged: it is not continued" in output
    assert hashes(killed.out, "model.safetensors") == hashes(whole.out, "model.safetensors")
    assert rollouts(killed.out) == rollouts(whole.out) and logged(killed.out) == logged(whole.out)
