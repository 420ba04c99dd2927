"""A damaged or lost event log: commands say so, and `coepg recover` makes it again from the records in the store."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from coepg_dagster.assets.checks import check_specs
from coepg_dagster.assets.internals import latest_checks
from coepg_dagster.assets.ledger import Loop, archive, assert_sound, open_instance
from coepg_dagster.assets.recovery import RECORDS

from coepg_dagster.project import Project
from coepg_dagster.provenance import NotUsable, Ref
from tests.assets.conftest import InProcess
from tests.assets.light import light_project, plant, steps_log
from tests.faults.evolving import versions
from tests.project import tell

PAGE = 4096


def evolve(project: Project, through: int) -> None:
    """As `coepg evolve`, with light makers."""
    with open_instance(project) as instance:
        InProcess(project, instance).evolve(through)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """Iteration 0, with two versions of D_0 of which the first is current."""
    project = light_project(tmp_path_factory.mktemp("made") / "project")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_HOME", str(project.dagster_home))
        patch.setenv("COEPG_ROOT", str(project.root))
        evolve(project, 0)
        salt = plant(project, "salt", "light/s1", Ref("dataset", 0), "other rows")
        with open_instance(project) as instance:
            InProcess(project, instance).run(0, "dataset")
        salt.unlink()
        with open_instance(project) as instance:
            InProcess(project, instance).run(0, "dataset")
        evolve(project, 0)
    yield project


@pytest.fixture
def project(made: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A copy of it."""
    project = Project(shutil.copytree(made.root, tmp_path / "project"))
    monkeypatch.setenv("DAGSTER_HOME", str(project.dagster_home))
    monkeypatch.setenv("COEPG_ROOT", str(project.root))
    return project


def test_a_lost_event_log_is_made_again_with_every_version(project: Project) -> None:
    before, steps = versions(project), len(steps_log(project))
    with open_instance(project) as instance:
        lineage = [record.data_version for record in archive(project, instance).records]
    shutil.move(project.dagster_home, project.root / "old")
    with pytest.raises(NotUsable, match="run `coepg recover`"):
        evolve(project, 0)
    code, out, err = tell(project.root, "ui")
    assert code == 1 and "run `coepg recover`" in err and len(steps_log(project)) == steps, "nothing was made again"
    code, out, err = tell(project.root, "recover")
    assert (code, err) == (0, "") and out == f"{len(before) + 1} artifacts are in the event log again\n"
    assert versions(project) == before
    with open_instance(project) as instance:
        assert [record.data_version for record in archive(project, instance).records] == lineage
    assert tell(project.root, "recover")[1] == "the event log lacks nothing\n"
    evolve(project, 0)
    assert len(steps_log(project)) == steps, "nothing is made again"
    evolve(project, 1)
    assert versions(project).items() > before.items()
    with open_instance(project) as instance:  # what iteration 0 handed over to iteration 1, in Dagster's graph
        twin = InProcess(project, instance).loop.twin("dataset")
        assert instance.get_latest_data_version_record(twin, True, "1") is not None


def in_the_ui(project: Project) -> tuple[dict[str, Any], dict[str, bool]]:
    """What the UI shows of iteration 0: the metadata of each artifact, and whether each check passed."""
    with open_instance(project) as instance:
        loop, metadata, passed = InProcess(project, instance).loop, dict[str, Any](), dict[str, bool]()
        for asset in (*loop.shared, *loop.made):
            event = instance.get_latest_materialization_event(loop.key(asset))
            assert event is not None and event.asset_materialization is not None
            metadata[asset] = event.asset_materialization.metadata
        keys = [spec.key for asset in loop.made for spec in check_specs(loop, asset)]
        for key, check in latest_checks(instance, keys, "0").items():
            assert check.evaluation is not None
            passed[key.to_user_string()] = check.evaluation.passed
        return metadata, passed


def test_the_ui_shows_what_it_did_before(project: Project) -> None:
    plant(project, "check", "light/s1", Ref("dataset", 0))
    with open_instance(project) as instance:
        InProcess(project, instance).run(0, "dataset")
    before = in_the_ui(project)
    assert {"page", "purity", "inputs"} <= before[0]["data_quality"].keys() and False in before[1].values()
    shutil.move(project.dagster_home, project.root / "old")
    assert tell(project.root, "recover")[0] == 0
    assert in_the_ui(project) == before


def test_what_the_event_log_knows_stays(project: Project) -> None:
    """A version that was made since, before anybody asked for the others."""
    before = versions(project)
    shutil.move(project.dagster_home, project.root / "old")
    plant(project, "salt", "light/s1", Ref("benchmark_steps"), "other steps")
    with open_instance(project) as instance:
        InProcess(project, instance).run(None, "benchmark_steps")
    assert tell(project.root, "recover")[0] == 0
    after = versions(project)
    changed = {ref for ref in before if after[ref] != before[ref]}
    assert changed == {"benchmark_steps"}


def test_what_was_made_by_a_deleted_run_or_wiped_comes_back(project: Project) -> None:
    """Both are buttons of the web UI, and take it out of the event log."""
    before = versions(project)
    with open_instance(project) as instance:
        loop = InProcess(project, instance).loop
        record = loop.record(instance, Ref("planner_sft", 0))
        assert record is not None
        instance.delete_run(record.run_id)
        instance.wipe_assets([loop.key("dataset")])
    assert versions(project).items() < before.items()
    assert tell(project.root, "recover")[0] == 0
    assert versions(project) == before


def test_a_project_of_a_version_without_records_gets_them(project: Project) -> None:
    shutil.rmtree(project.store / RECORDS)
    before = versions(project)
    evolve(project, 0)
    shutil.rmtree(project.dagster_home)
    assert tell(project.root, "recover")[0] == 0
    assert versions(project) == before


def test_seeds_of_two_machines_become_one_project(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/your-own.md says: what is not there is copied, then `coepg recover`."""
    other = light_project(tmp_path / "other")
    file = other.root / "experiments" / "light.yaml"
    file.write_text(file.read_text().replace("seeds: [1, 2]", "seeds: [2, 1]"))
    with monkeypatch.context() as there:
        there.setenv("DAGSTER_HOME", str(other.dagster_home))
        there.setenv("COEPG_ROOT", str(other.root))
        evolve(other, 0)
        second = versions(other, "light/s2")
    first = versions(project)

    def unless_there(source: str, target: str) -> None:
        if not Path(target).exists():
            shutil.copy2(source, target)

    shutil.copytree(other.store, project.store, copy_function=unless_there, dirs_exist_ok=True)
    assert tell(project.root, "recover")[0] == 0
    assert versions(project) == first and versions(project, "light/s2") == second
    with open_instance(project) as instance:
        loop = Loop(project.experiments()["light"], 2, project.root)
        assert loop.stale(loop.records(instance)) == {}
        both = archive(project, instance)
        for name in ("light/s1", "light/s2"):  # each has what it was made from, the shared inputs too
            above = both.lineage(both.newest(name, "evaluation", 0))
            assert {record.asset for record in above} >= {"benchmark_steps", "open_models"}


def test_a_damaged_record_costs_itself(project: Project) -> None:
    file = project.store / RECORDS / "light" / "s1" / "dataset" / "0.jsonl"
    lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([b"\xff", lines[0][:50], b'{"at": 1}', b"[]", *lines]) + lines[0][:80])
    before = versions(project)
    shutil.rmtree(project.dagster_home)
    code, out, err = tell(project.root, "recover")
    assert code == 0 and err.count("is no record and left out") == 5, err
    assert f"{file}:1 " in err and "artifacts are in the event log again" in out
    del before["dataset[0]"]  # the last line was the current one
    assert {ref: version for ref, version in versions(project).items() if ref != "dataset[0]"} == before


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 40))])
def test_any_damaged_page_is_found_before_something_is_made(seed: int, project: Project) -> None:
    before, steps = versions(project), len(steps_log(project))
    file = project.dagster_home / "history" / "runs" / "index.db"
    with file.open("r+b") as database:
        database.seek(random.Random(seed).randrange(file.stat().st_size // PAGE) * PAGE)
        database.write(random.Random(seed).randbytes(PAGE))
    try:
        evolve(project, 0)
    except NotUsable as why:
        assert "move the folder `.dagster` away, and run `coepg recover`" in str(why)
        shutil.rmtree(project.dagster_home)
        assert tell(project.root, "recover")[0] == 0
    else:
        assert seed != 0, "this page holds something"
    assert versions(project) == before and len(steps_log(project)) == steps


def test_a_sound_event_log_is_sound(project: Project) -> None:
    with open_instance(project) as instance:
        assert_sound(instance)
    with dg.DagsterInstance.ephemeral() as instance:
        assert_sound(instance)
