"""A project whose artifacts are small JSON files, for tests of everything around them.

The graph, twins, ledger, claims, checks, pools, conditions and sensors are the real ones. Files in the project's folder
`control/` plant what a test needs, each named KIND-LOOP-ASSET-PARTITION: `salt` changes the content, `fail` fails the step,
`check` fails its blocking checks, `progress` reports that all is done, `worker` runs a real worker process that has a child and
hangs, `meet` waits until the loop that the file names has made something of the same iteration. `control/seconds` is how long
each step takes, also of those that go on.
"""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import dagster as dg
from coepg_dagster.assets.checks import CHECKS
from coepg_dagster.assets.ledger import Loop
from coepg_dagster.assets.stage import Outcome, StageContext, StageFunction
from coepg_dagster.resources.launcher import job_environment, run_process

from coepg_dagster.jobs import EvaluationJob
from coepg_dagster.project import Project
from coepg_dagster.provenance import LOOP_RL, SHARED, Asset, Ref
from tests.project import REPOSITORY

CONTENT = "content.json"

EXPERIMENT = """
description: a loop of small JSON files
iterations: 2
seeds: [1, 2]
shown: [1, 2]
pool: gpu
benchmark: {reader: miniwob, path: data, test: [test_seed], protocol: miniwob/point}
models:
  base_planner: models/base
  base_grounder: models/base
  planners: {planner_a: models/base}
  verifiers: {verifier_a: models/base}
"""


def light_project(root: Path, *others: str, seconds: float = 0) -> Project:
    """A fresh project in `root`, with the experiment `light` and smaller others, each with a pool of its own."""
    for folder in ("experiments", "control", "data", "models/base"):
        (root / folder).mkdir(parents=True)
    (root / "control" / "seconds").write_text(str(seconds))
    (root / "data" / "rows").write_text("1")
    (root / "models" / "base" / "model.safetensors").write_text("1")
    (root / "experiments" / "light.yaml").write_text(EXPERIMENT)
    for name in others:
        text = EXPERIMENT.replace("pool: gpu", f"pool: {name}").replace("iterations: 2", "iterations: 1")
        (root / "experiments" / f"{name}.yaml").write_text(text)
    shutil.copy(REPOSITORY / "dagster.yaml", root)
    return Project(root)


def automate(project: Project, name: str, *what: str) -> None:
    """Names in the file of an experiment what of it is automated."""
    file = project.root / "experiments" / f"{name}.yaml"
    file.write_text(f"{file.read_text()}automation: [{', '.join(what)}]\n")


def plant(project: Project, kind: str, loop: str, ref: Ref, text: str = "planted") -> Path:
    """Makes a file in `control/` for a loop like `light/s1`; unlink it to take the plant away."""
    path = _planted(project.root, kind, loop, ref)
    path.write_text(text)
    return path


def steps_log(project: Project) -> list[dict[str, Any]]:
    """Every step that began to make an artifact, in order: asset, k, loop, run, start, end (seconds)."""
    log = project.root / "control" / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return sorted(lines, key=lambda step: step["start"])


def _planted(root: Path, kind: str, loop: str, ref: Ref) -> Path:
    return root / "control" / f"{kind}-{loop.replace('/', '-')}-{ref.asset}-{ref.iteration}"


def _maker(asset: Asset) -> StageFunction:
    def make(work: StageContext) -> Outcome:
        root, loop, ref = work.loop.root, work.loop.name, work.ref
        start = time.time()
        if _planted(root, "worker", loop, ref).exists():
            hang(work)
        if (meets := _planted(root, "meet", loop, ref)).exists():
            _meet(work, meets.read_text())
        while time.time() < start + float((root / "control" / "seconds").read_text()):
            time.sleep(0.02)
        if _planted(root, "progress", loop, ref).exists():
            work.context.log.info("3/3")
        if _planted(root, "fail", loop, ref).exists():
            raise RuntimeError("planted failure")
        salt = _planted(root, "salt", loop, ref)
        content = {
            "inputs": {str(used): record.data_version for used, record in sorted(work.inputs.items(), key=str)},
            "salt": salt.read_text() if salt.exists() else "",
            "rows": (root / "data" / "rows").read_text() if asset == "benchmark_steps" else "",
        }
        (work.draft / CONTENT).write_text(json.dumps(content))
        step = {"asset": asset, "k": ref.iteration, "loop": loop, "run": work.context.run.run_id}
        with (root / "control" / "log.jsonl").open("a") as log:
            log.write(json.dumps(step | {"start": start, "end": time.time()}) + "\n")
        bad = _planted(root, "check", loop, ref).exists()
        checks = {name: "planted" if bad else None for name in CHECKS.get(asset, ())}
        config = work.loop.experiment.regeneration.model_dump(mode="json") if asset == "data_quality" else {}
        return Outcome([CONTENT], _figures(asset, work), checks, config=config)

    make.__doc__ = f"`{asset}`, as a small JSON file."
    return make


def _figures(asset: Asset, work: StageContext) -> dict[str, Any]:
    if asset == "evaluation":
        score = score_of(40.0 + 5 * work.k, [35.0, 60.0])
        return {"validation": score, "test_seed": score}
    if asset == "data_quality":
        return {"purity": 70.0 + work.k, "diversity": 1.5, "coverage": 60.0}
    return {}


def score_of(macro: float, ci95: list[float] | None, notes: dict[str, str] | None = None) -> dict[str, Any]:
    """A split's figures in the record of an evaluation: ten steps by miniwob/point, each metric with this value."""
    value = {"macro": macro, "micro": 41.0, "ci95": ci95, "ci95_micro": None, "n": 10}
    metrics = dict.fromkeys(("ele_acc", "op_f1", "step_sr"), value)
    return {"protocol": "miniwob/point", "rows": 10, "metrics": metrics, "notes": notes or {}}


def _meet(work: StageContext, loop: str) -> None:
    end = time.monotonic() + 300
    while not any((step["loop"], step["k"]) == (loop, work.k) for step in steps_log(Project(work.loop.root))):
        assert time.monotonic() < end, f"{loop} made nothing while {work.ref} of {work.loop.name} waited for it"
        time.sleep(0.2)


def hang(work: StageContext) -> None:
    """Starts tests.assets.hanging_worker through the real launcher; it never ends by itself."""
    loop = work.loop
    job = EvaluationJob(
        out=work.draft,
        scratch=work.store.scratch("hanging"),
        steps=loop.root / "none",
        models=work.models,
        device="cpu",
        batch_size=1,
        seed=0,
        planner="none",
        grounder="none",
        splits=[],
        max_steps=None,
        protocol="none",
        max_plan_tokens=1,
        max_point_tokens=1,
        processes=1,
    )
    run_process(
        work.context,
        job,
        REPOSITORY,
        job_environment(1),
        timeout_minutes=5,
        grace_seconds=2,
        module="tests.assets.hanging_worker",
    )


LIGHT_MAKERS: dict[Asset, StageFunction] = {asset: _maker(asset) for asset in (*SHARED, *LOOP_RL)}


def light_definitions(project: Project, **settings: Any) -> dg.Definitions:
    """The real definitions, with light makers and all steps of a run in one process."""
    from coepg_dagster.definitions import build

    return dg.Definitions.merge(
        build(project, **({"makers": LIGHT_MAKERS} | settings)), dg.Definitions(executor=dg.in_process_executor)
    )


def light_artifacts(loop: Loop) -> dg.Definitions:
    """The definitions of one loop, in use or not, as the command line has them, with light makers."""
    from coepg_dagster.definitions import artifacts

    return artifacts([loop], LIGHT_MAKERS)
