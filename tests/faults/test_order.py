"""Runs that meet: of one iteration, out of order, of a predecessor, with other code, by another clock, from another place."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pyarrow.fs as fs
import pytest
from coepg_dagster.assets import ledger
from coepg_dagster.assets.ledger import RECORD, archive
from coepg_dagster.assets.stage import Outcome, StageContext
from coepg_dagster.resources import warm
from coepg_dagster.resources.training import RegenerationResource

from coepg_dagster.auditing.archive import Archive
from coepg_dagster.experiment.versions import CODE
from coepg_dagster.jobs import CandidatesJob, Job
from coepg_dagster.project import Project
from coepg_dagster.provenance import LOOP, NotUsable, Ref
from coepg_dagster.store import Store, changes
from tests.assets.conftest import InProcess
from tests.assets.light import LIGHT_MAKERS, light_project, plant, steps_log
from tests.faults.evolving import evolving, left_over, output_of, versions


def made_by(light: InProcess) -> dict[str, str]:
    return versions(light.project, instance=light.instance)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The data versions of iterations 0 and 1."""
    with dg.DagsterInstance.ephemeral() as instance:
        light = InProcess(light_project(tmp_path_factory.mktemp("undisturbed") / "project"), instance)
        light.evolve(1)
        yield made_by(light)


@pytest.mark.slow
@pytest.mark.long
def test_two_evolves_of_one_experiment_at_once(
    tmp_path: Path, undisturbed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them makes an iteration; the other waits for its slots, or is refused and says by whom; neither is in the way."""
    monkeypatch.setattr(warm, "_server", None)
    monkeypatch.setattr(warm, "IMPORTED", [])
    project = light_project(tmp_path / "project", seconds=0.2)
    both = [evolving(project) for _ in range(2)]
    codes = [process.wait(600) for process in both]
    assert 0 in codes, output_of(project)
    if 1 in codes:
        assert "iteration 0 is being written by run" in output_of(project)
    assert "Traceback" not in output_of(project)
    last = evolving(project)
    assert last.wait(300) == 0, output_of(project)
    assert versions(project) == {ref: version for ref, version in undisturbed.items() if "[1]" not in ref}
    assert left_over(project) == []


def test_the_same_artifact_committed_twice_at_once(tmp_path: Path) -> None:
    """As two seeds do with the benchmark that they share."""
    store, errors, folders = Store(tmp_path), list[BaseException](), set[Path]()
    gate = threading.Barrier(4)

    def commit() -> None:
        try:
            with store.draft("a") as draft:
                (draft / "rows").write_bytes(bytes(100_000))
                gate.wait(30)
                folders.add(store.commit(draft, ("a", "all"), ["rows"]).folder)
        except BaseException as error:  # noqa: BLE001 - the test reports it
            errors.append(error)

    threads = [threading.Thread(target=commit) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == [] and len(folders) == 1
    assert store.dead_drafts() == [] and list((tmp_path / ".drafts").iterdir()) == []


@pytest.mark.long
def test_a_partition_out_of_order_is_refused_with_what_it_lacks(light: InProcess) -> None:
    light.run(None)
    assert "dataset[0] does not exist: materialize dataset[0] first" in light.why(light.run(1, "planner_sft"))
    light.run(0)
    assert "does not exist: materialize" in light.why(light.run(2, "planner_sft"))
    assert {step["k"] for step in steps_log(light.project)} == {None, 0}


@pytest.mark.long
def test_an_iteration_made_again_while_its_successor_trains(light: InProcess, undisturbed: dict[str, str]) -> None:
    """π_1 was trained on the first D_0; with another D_0 meanwhile, nothing goes on from it until it is made again."""
    light.make(0)
    others = InProcess(light.project, light.instance)

    def while_training(work: StageContext) -> Outcome:
        outcome = LIGHT_MAKERS["planner_sft"](work)
        if work.k == 1 and salt.exists() and not done:
            done.append(others.run(0, "dataset").success)
        return outcome

    done: list[bool] = []
    salt = plant(light.project, "salt", "light/s1", Ref("dataset", 0), "other rows")
    light.settings["makers"] = LIGHT_MAKERS | {"planner_sft": while_training}
    result = light.run(1)
    assert done == [True] and not result.success
    why = light.why(result)
    assert "is stale" in why and "dataset[0] is now" in why
    assert light.loop.record(light.instance, Ref("planner", 1)) is None
    salt.unlink()
    light.settings.clear()
    others.run(0, "dataset")  # as it was
    light.evolve(1)
    assert made_by(light) == undisturbed


def test_a_change_of_code_between_two_tries_starts_the_job_afresh(
    light: InProcess, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What a killed job left is continued by the same code with the same inputs alone: `scratch` is named by both."""
    names = []

    def killed(self: RegenerationResource, context: object, job: Job, root: Path) -> None:
        names.append(job.scratch.name)
        raise RuntimeError("killed")

    def job(work: StageContext) -> Outcome:
        work.run_job(CandidatesJob, members={}, steps=tmp_path, train_split="train", max_steps=None,
                     config=work.loop.experiment.regeneration, processes=1)  # fmt: skip
        raise AssertionError("never")

    monkeypatch.setattr(RegenerationResource, "launch", killed)
    light.make(0)
    light.settings["makers"] = LIGHT_MAKERS | {"candidate_plans": job}
    light.run(0, "candidate_plans")
    light.run(0, "candidate_plans")
    with monkeypatch.context() as patch:
        patch.setitem(CODE, "candidate_plans", CODE["candidate_plans"] + 1)
        light.run(0, "candidate_plans")
    plant(light.project, "salt", "light/s1", Ref("benchmark_steps"))
    light.run(None, "benchmark_steps")
    light.run(0, "candidate_plans")
    assert len(names) == 4 and names[0] == names[1] and len(set(names)) == 3


@pytest.mark.parametrize("jump", [-40 * 86400.0, pytest.param(40 * 86400.0, marks=pytest.mark.long)])
def test_a_clock_that_jumps_changes_nothing(
    light: InProcess, undisturbed: dict[str, str], jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By forty days, back or forth, between two iterations."""
    light.make(0)
    true = time.time
    monkeypatch.setattr(time, "time", lambda: true() + jump)
    light.evolve(1)
    assert made_by(light) == undisturbed
    assert "0 runs" not in light.evolve(1)[1] and light.loop.stale(light.loop.records(light.instance)) == {}


@pytest.mark.long
def test_a_store_that_was_moved_with_its_project(light: InProcess, tmp_path: Path, undisturbed: dict[str, str]) -> None:
    light.evolve(0)
    before = made_by(light)
    light.project.root.rename(tmp_path / "elsewhere")
    moved = InProcess(Project(tmp_path / "elsewhere"), light.instance)
    steps = len(steps_log(moved.project))
    moved.evolve(0)
    assert made_by(moved) == before and len(steps_log(moved.project)) == steps, "nothing was made again"
    moved.evolve(1)
    assert made_by(moved) == undisturbed


@pytest.mark.long
def test_a_store_that_was_copied_to_an_s3_server_and_back(light: InProcess, undisturbed: dict[str, str]) -> None:
    """As docs/your-own.md says; the store itself is a folder."""
    server = pytest.importorskip("moto.server", reason="pip install 'moto[server]'").ThreadedMotoServer(port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        bucket = fs.S3FileSystem(
            access_key="x",
            secret_key="y",  # noqa: S106 - of the test's own server
            endpoint_override=f"http://{host}:{port}",
            allow_bucket_creation=True,
        )
        light.evolve(0)
        before, steps, store = made_by(light), len(steps_log(light.project)), light.project.store
        bucket.create_dir("backup")
        fs.copy_files(str(store), "backup/mine/store", destination_filesystem=bucket)
        shutil.rmtree(store)
        fs.copy_files("backup/mine/store", str(store), source_filesystem=bucket)
    finally:
        server.stop()
    light.evolve(0)
    assert made_by(light) == before and len(steps_log(light.project)) == steps, "nothing was made again"
    records = light.loop.records(light.instance)
    assert all(changes(record.files, store / record.folder) == [] for record in records.values())
    light.evolve(1)
    assert made_by(light) == undisturbed


def old(record: dict[str, object]) -> dict[str, object]:
    """A record as the version before made it: without what came since."""
    return {name: value for name, value in record.items() if name not in ("files", "sizes", "place", "failed_checks")}


@pytest.mark.long
def test_a_store_of_the_version_before_is_read_and_one_of_a_later_version_is_refused(
    light: InProcess, undisturbed: dict[str, str]
) -> None:
    light.make(0)
    for ref in [Ref("benchmark_steps"), *(Ref(asset, 0) for asset in LOOP)]:
        record = light.loop.record(light.instance, ref)
        assert record is not None
        report(light, ref, old(record.model_dump(mode="json")))
    light.evolve(1)
    assert made_by(light) == undisturbed
    assert isinstance(archive(light.project, light.instance), Archive)
    newest = light.loop.record(light.instance, Ref("dataset", 1))
    assert newest is not None
    report(light, Ref("dataset", 1), newest.model_dump(mode="json") | {"from_the_future": 1})
    with pytest.raises(NotUsable, match=r"dataset\[1\] cannot be read \(from_the_future: .*another version"):
        light.evolve(1)


def report(light: InProcess, ref: Ref, record: dict[str, object]) -> None:
    light.instance.report_runless_asset_event(
        dg.AssetMaterialization(
            light.loop.key(ref.asset),
            partition=light.loop.partition(ref),
            metadata={RECORD: dg.MetadataValue.json(record)},
        )
    )


def test_a_damaged_claim_says_which_file_to_delete(light: InProcess) -> None:
    light.make(0)
    claim = light.project.store / ".claims" / "light" / "s1" / "0.json"
    plant(light.project, "salt", "light/s1", Ref("dataset", 0))
    for content in ("", '{"run', "[]", '"x"', json.dumps({"run": "x"})):
        claim.write_text(content)
        assert f"{claim} is damaged: delete it once no run of iteration 0 goes on" in light.why(light.run(0, "dataset"))
    claim.unlink()
    assert light.run(0, "dataset").success


def test_locks_of_processes_that_were_killed_before_their_run_began_go(light: InProcess) -> None:
    folder = light.project.store / ".claims" / "evolve"
    folder.mkdir(parents=True)
    (folder / "of-the-dead").touch()
    with ledger.living_run(light.project.store, "of-the-living"):
        ledger.end_dead_runs(light.instance, light.project.store)
        assert [path.name for path in folder.iterdir()] == ["of-the-living"]


def test_a_slot_of_a_run_whose_end_was_written_before_it_was_freed_comes_back(light: InProcess) -> None:
    """Who wrote that it is over was killed in between; a run that goes on keeps its slot."""
    slots, store = light.instance.event_log_storage, light.project.store
    job = light.defs.resolve_implicit_global_asset_job_def()
    run = light.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
    slots.set_concurrency_slots("gpu", 1)
    assert slots.claim_concurrency_slot("gpu", run.run_id, "a step").is_claimed
    ledger.end_dead_runs(light.instance, store)
    assert slots.get_concurrency_info("gpu").active_run_ids == {run.run_id}
    light.instance.report_run_failed(run)
    assert slots.get_concurrency_info("gpu").active_run_ids == {run.run_id}
    ledger.end_dead_runs(light.instance, store)
    assert slots.get_concurrency_info("gpu").active_run_ids == set()
