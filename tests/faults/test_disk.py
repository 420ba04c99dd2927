"""A disk that is full or read-only: what is wrong is said, nothing is half-written, and with room the loop goes on."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from coepg_dagster.assets.ledger import EVOLVE_TAG, IN_PROCESS, claim, end_dead_runs, living_run, open_instance
from safetensors import SafetensorError
from sqlalchemy.exc import SQLAlchemyError

from coepg_dagster.artifacts import write_steps, write_table
from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.experiment.training import Sft
from coepg_dagster.inference.visual import POOLED, VisualStore
from coepg_dagster.jobs import CandidatesJob, Job, Placement, SftJob
from coepg_dagster.project import Project
from coepg_dagster.provenance import NotUsable
from coepg_dagster.refusal import Refusal, machine_trouble
from tests.assets.conftest import InProcess
from tests.assets.light import light_project
from tests.assets.test_ledger import Running, begin
from tests.faults.disk import Disk, small_disk
from tests.faults.evolving import left_over, versions
from tests.training.test_resume import hashes, run

ROOM = r"No space left on device.*: free space on that disk, then run this again: what was finished is kept"
WRITABLE = r"Read-only file system.*: make it writable, then run this again: what was finished is kept"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with small_disk(tmp_path / "disk", 3) as mounted:
        yield mounted


def test_a_table_that_does_not_fit_leaves_the_old_one_and_no_half(disk: Disk) -> None:
    file = disk.path / "rows.parquet"
    write_table(pa.table({"row": ["old"]}), file)
    big = pa.table({"row": [os.urandom(1 << 20).hex() for _ in range(4)]})
    with pytest.raises(OSError) as error:
        write_table(big, file)
    assert "free space on that disk" in (machine_trouble(error.value) or "")
    assert [path.name for path in disk.path.iterdir()] == ["rows.parquet"]
    assert pq.read_table(file).to_pylist() == [{"row": "old"}]


def test_embeddings_that_do_not_fit_are_held_in_memory(disk: Disk, capsys: pytest.CaptureFixture[str]) -> None:
    store, cpu = VisualStore(disk.path / "visual"), torch.device("cpu")
    kept, lost = {POOLED: torch.ones(10, 10)}, {POOLED: torch.rand(1000, 1000)}
    store.put("tower", "aa", kept)
    for name in ("bb", "cc"):
        store.put("tower", name, lost)
    assert capsys.readouterr().out.count("no more visual embeddings are kept") == 1
    found = store.get("tower", "bb", cpu)
    assert found is not None and torch.equal(found[POOLED], lost[POOLED])
    again = VisualStore(disk.path / "visual")
    assert again.get("tower", "aa", cpu) is not None and again.get("tower", "bb", cpu) is None
    assert [path.name for path in disk.path.rglob("*") if path.is_file()] == ["aa.safetensors"]


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OSError(28, "No space left on device", "x"), "free space"),
        (OSError(122, "Disk quota exceeded"), "free space"),
        (SafetensorError("Error while serializing: IoError(Os { code: 28, kind: StorageFull, … })"), "free space"),
        (
            RuntimeError("[enforce fail at inline_container.cc:664] . PytorchStreamWriter failed writing file"),
            "full or",
        ),
        (RuntimeError("(sqlite3.OperationalError) database or disk is full\n[SQL: INSERT …]"), "free space"),
        (RuntimeError("(sqlite3.OperationalError) attempt to write a readonly database"), "writable"),
        (RuntimeError("(sqlite3.DatabaseError) database disk image is malformed"), "`coepg recover`"),
        (OSError(30, "Read-only file system", "x"), "writable"),
        (MemoryError(), "micro_batch_size"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), "micro_batch_size"),
        (ValueError("5 rows are left"), None),
    ],
)
def test_what_libraries_say_of_disk_and_memory_is_understood(error: Exception, remedy: str | None) -> None:
    said = machine_trouble(error)
    assert said is None if remedy is None else said is not None and remedy in said and "[SQL" not in said


@dataclass
class Undisturbed:
    """An iteration on disks with room: what it made, and the bytes that it took of each disk."""

    versions: dict[str, str]
    took: dict[str, int]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    project = light_project(tmp_path_factory.mktemp("undisturbed") / "project")
    with (
        pytest.MonkeyPatch.context() as patch,
        small_disk(project.store, 6) as store,
        small_disk(project.dagster_home, 6) as home,
        opened(project, patch) as light,
    ):
        light.run(None)
        disks = {"store": store, "home": home}
        before = {which: disk.room for which, disk in disks.items()}
        light.evolve(0)
        took = {which: before[which] - disk.room for which, disk in disks.items()}
        return Undisturbed(versions(project, instance=light.instance), took)


@contextlib.contextmanager
def opened(project: Project, patch: pytest.MonkeyPatch) -> Iterator[InProcess]:
    """A project with the Dagster instance of its home."""
    patch.setenv("DAGSTER_HOME", str(project.dagster_home))
    patch.setenv("COEPG_ROOT", str(project.root))
    with open_instance(project) as instance:
        yield InProcess(project, instance)


Fault = tuple[Callable[[Disk, int], None], Callable[[Disk], None]]
"""What happens to a disk of which an iteration takes so many bytes, and how it ends."""


def full(share: float = 0) -> Fault:
    """Room for a share of what an iteration takes."""
    return (lambda disk, took: disk.fill(int(share * took))), (lambda disk: disk.free())


def read_only() -> Fault:
    return (lambda disk, _: disk.read_only(True)), (lambda disk: disk.read_only(False))


@pytest.mark.parametrize(
    ("which", "fault", "says"),
    [
        pytest.param("store", full(), ROOM, id="store full"),
        pytest.param("store", full(1 / 10), ROOM, id="store almost full", marks=pytest.mark.long),
        pytest.param("store", full(2 / 3), ROOM, id="store full at a later step", marks=pytest.mark.long),
        pytest.param("store", read_only(), WRITABLE, id="store read-only", marks=pytest.mark.long),
        pytest.param("home", full(), r"disk (I/O error|is full)", id="event log full", marks=pytest.mark.long),
        pytest.param("home", full(1 / 2), r"disk (I/O error|is full)", id="event log full later",
                     marks=pytest.mark.long),
        pytest.param("home", read_only(), "readonly database|unable to open|Read-only", id="event log read-only",
                     marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_loop_on_a_disk_that_fails_goes_on_when_it_is_well(
    which: str, fault: Fault, says: str, undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = light_project(tmp_path / "project")
    before, after = fault
    with (
        small_disk(project.store if which == "store" else project.dagster_home, 6) as disk,
        opened(project, monkeypatch) as light,
    ):
        light.run(None)
        before(disk, undisturbed.took[which])
        with pytest.raises((Refusal, OSError, SQLAlchemyError)) as failed:
            light.evolve(0)
        # as `coepg` says it, without a traceback
        why = str(failed.value) if isinstance(failed.value, Refusal) else machine_trouble(failed.value)
        assert re.search(says, why or repr(failed.value))
        after(disk)
        light.evolve(0)
        made = versions(project, instance=light.instance)
        left = left_over(project)
    assert made == undisturbed.versions
    assert left == []


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (full(), "free space"),
        ((lambda disk, _: disk.fill_with_files(), lambda disk: disk.free()), "free space"),
        (read_only(), "make it writable"),
    ],
)
def test_a_claim_that_does_not_fit_leaves_the_old_one_and_no_half(
    fault: Fault, says: str, light: InProcess, tmp_path: Path
) -> None:
    """Neither a claim that is new nor one that replaces that of an ended run; who holds one keeps it."""
    before, after = fault
    with small_disk(tmp_path / "disk", 3, files=100) as disk:
        folder = disk.path / ".claims" / "light" / "s1"
        first, second, third = (Running(light.instance, begin(light, dg.DagsterRunStatus.STARTED)) for _ in range(3))
        for k in (1, 2):
            claim(first, folder, k)
        claim(second, folder, 3)
        light.instance.report_run_canceled(first.run)
        written = {file.name: file.read_text() for file in folder.glob("*.json")}
        before(disk, 0)
        for k in (0, 1):
            with pytest.raises(OSError) as failed:
                claim(third, folder, k)
            assert says in (machine_trouble(failed.value) or "")
        assert {file.name: file.read_text() for file in folder.glob("*.json")} == written
        assert not [file for file in folder.iterdir() if file.suffix not in (".json", ".lock")]
        after(disk)
        with pytest.raises(NotUsable, match="iteration 3 is being written by run"):
            claim(third, folder, 3)
        for k in (0, 1, 2):
            claim(third, folder, k)
            with pytest.raises(NotUsable, match="is being written by run"):
                claim(second, folder, k)


def test_a_run_on_a_full_disk_is_not_taken_for_dead(light: InProcess, tmp_path: Path) -> None:
    alive, dead = (begin(light, dg.DagsterRunStatus.STARTED, **{EVOLVE_TAG: IN_PROCESS}) for _ in range(2))

    def statuses() -> list[str]:
        return [light.instance.get_run_by_id(run.run_id).status.value for run in (alive, dead)]

    with small_disk(tmp_path / "disk", 3, files=100) as disk, living_run(disk.path, alive.run_id):
        disk.fill()
        disk.fill_with_files()

        def begins() -> None:
            with living_run(disk.path, "another"):
                pass

        for needs_a_file in (begins, lambda: end_dead_runs(light.instance, disk.path)):
            with pytest.raises(OSError) as failed:
                needs_a_file()
            assert "free space" in (machine_trouble(failed.value) or "")
        assert statuses() == ["STARTED", "STARTED"]
        disk.free()
        disk.fill()  # the locks have no content
        begins()
        assert end_dead_runs(light.instance, disk.path) == [dead.run_id]
        assert statuses() == ["STARTED", "FAILURE"]


@pytest.fixture
def common(tmp_path: Path, steps: pa.Table, dataset: pa.Table, models: Models) -> dict[str, Any]:
    write_steps(steps, tmp_path / "steps.arrow", ["train"])
    write_table(dataset, tmp_path / "dataset.parquet")
    return {"steps": tmp_path / "steps.arrow", "models": models, "device": "cpu", "batch_size": 8, "seed": 3}


def compare(make: Callable[[str], Job], file: str, megabytes: float, leave: int, tmp_path: Path) -> str:
    """A job whole, and one whose scratch folder is on a disk that is full at first; what the second says."""
    whole, cramped = make("whole"), make("cramped")
    assert run(whole)[0] == 0
    with small_disk(cramped.scratch, megabytes) as disk:
        (cramped.scratch / "log").symlink_to(tmp_path / "log")  # of `run`
        disk.fill(leave)
        code, output = run(cramped)
        assert code == 1, output[-3000:]
        disk.free()
        assert not (cramped.out / file).exists()
        # `.1.partial` is what `run` plants
        assert not [path for path in cramped.scratch.rglob("*.partial") if not path.name.endswith(".1.partial")]
        code, again = run(cramped)
        assert code == 0, again[-3000:]
        assert hashes(whole.out, file) == hashes(cramped.out, file)
        shutil.rmtree(cramped.scratch, ignore_errors=True)
    return output


@pytest.mark.long
def test_a_checkpoint_that_does_not_fit(
    common: dict[str, Any], random_checkpoint: Callable[[int], Path], tmp_path: Path
) -> None:
    """The one before is whole: training goes on from there."""

    def make(name: str) -> Job:
        return SftJob(
            **common,
            dataset=tmp_path / "dataset.parquet",
            out=tmp_path / name / "out",
            scratch=tmp_path / name / "scratch",
            role="planner",
            init=str(random_checkpoint(2)),
            train_split="train",
            validation_split="train",
            max_plan_tokens=16,
            max_point_tokens=8,
            config=Sft(max_steps=3, batch_size=3, micro_batch_size=3, learning_rate=1e-3, probe_steps=0),
            placement=Placement(save_every=1),
        )

    size = sum(file.stat().st_size for file in random_checkpoint(2).rglob("*") if file.is_file())
    # weights, and twice as much of the optimizer: room for one checkpoint and a half
    output = compare(make, "model.safetensors", 30 * size / (1 << 20), int(4.5 * size), tmp_path)
    assert machine_trouble(RuntimeError(output.strip().splitlines()[-1])), output


@pytest.mark.long
def test_a_chunk_that_does_not_fit(common: dict[str, Any], trained: Callable[[str, int], Path], tmp_path: Path) -> None:
    def make(name: str) -> Job:
        return CandidatesJob(
            **common,
            out=tmp_path / name / "out",
            scratch=tmp_path / name / "scratch",
            members={"learnt": str(trained("planner", 0))},
            train_split="train",
            max_steps=None,
            config=Regeneration(plans_per_planner=2, max_plan_tokens=16),
            processes=1,
        )

    output = compare(make, "candidates.parquet", 2, 5 * 4096, tmp_path)
    assert "No space left on device" in output
