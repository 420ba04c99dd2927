"""What commands take in a large project: 20 experiments, 100 iterations, 1,000,000 candidates and 200,000 verdicts in one.

    python -m benchmarks.load

The store and the records are made by the project's own writers, in a temporary folder, without models. Then each command runs in
a process of its own: seconds of CPU time and peak memory, beside how long ten million additions took before and after it, since
the speed of a throttled machine changes. The web server is asked what its pages of assets ask for. `COEPG_CANDIDATES` makes
the tables smaller.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAME = "load"
CANDIDATES = int(os.environ.get("COEPG_CANDIDATES", "1000000"))
PER_STEP, VERIFIED, VERIFIERS = 20, 10, ("verifier_a", "verifier_b")  # one candidate of VERIFIED is verified
EXPERIMENT, SEED, LAST = "load", 13, 99
OTHERS = 19
LIMITS = {"definitions": 5.0, "results": 2.0}
"""Seconds of CPU time."""
DEFINITIONS = """
from coepg_dagster.definitions import defs
defs().get_repository_def().load_all_definitions()
"""
REPOSITORY = Path(__file__).parents[1]
ASSETS = """query Assets { assetNodes { assetKey { path } isPartitioned partitionStats {
  numMaterialized numFailed numPartitions } assetMaterializations(limit: 1) { timestamp runId } } }"""
HISTORY = """query History($key: AssetKeyInput!) { assetNodeOrError(assetKey: $key) { ... on AssetNode {
  assetMaterializations(limit: 100) { partition timestamp metadataEntries { label description } } } } }"""


# --- making -----------------------------------------------------------------------------------------------------------


def make(root: Path) -> None:
    """The project: experiment files, tables, artifacts and their records."""
    from tests.project import make_project

    make_project(root)
    sandbox = (REPOSITORY / "experiments" / "sandbox.yaml").read_text()
    assert "\niterations: 3\n" in sandbox and "\nseeds: [13, 42, 1234]\n" in sandbox
    for i in range(OTHERS):
        (root / "experiments" / f"other_{i}.yaml").write_text(sandbox)
        for seed in (13, 42, 1234):
            (root / "store" / f"other_{i}" / f"s{seed}").mkdir(parents=True)
    mine = sandbox.replace("\niterations: 3\n", f"\niterations: {LAST}\n")
    mine = mine.replace("\nseeds: [13, 42, 1234]\n", f"\nseeds: [{SEED}]\n")
    (root / "experiments" / f"{EXPERIMENT}.yaml").write_text(mine)
    make_tables(root / "tables")
    os.environ.pop("DAGSTER_HOME", None)
    make_records(root)


def make_tables(folder: Path) -> None:
    """The tables of one iteration; `select`, in a process of its own, makes D_k and the decisions from them."""
    import io

    import numpy as np
    import pyarrow as pa
    from PIL import Image

    from coepg_dagster.artifacts import CANDIDATES as PLANS
    from coepg_dagster.artifacts import STEPS, VERDICTS, write_steps, write_table
    from coepg_dagster.steps import CANDIDATE_SCHEMA, STEP_SCHEMA, VERDICT_SCHEMA

    folder.mkdir()
    n, rng = CANDIDATES // PER_STEP, np.random.default_rng(0)
    pictures = []
    for i in range(100):
        out = io.BytesIO()
        Image.new("RGB", (160, 210), (i, 120, 200)).save(out, "PNG")
        pictures.append(out.getvalue())
    steps: dict[str, Any] = dict.fromkeys(STEP_SCHEMA.names, [None] * n)
    steps |= {
        "step_id": [f"made/{i}/0" for i in range(n)],
        "split": ["train"] * n,
        "episode_id": [f"made/{i}" for i in range(n)],
        "step_index": [0] * n,
        "family": [f"family-{i % 40}" for i in range(n)],
        "seed": list(range(n)),
        "goal": [f"Fill in form {i}, then press the button that says Submit" for i in range(n)],
        "history": [[] for _ in range(n)],
        "screenshot": [pictures[i % 100] for i in range(n)],
        "width": [160] * n,
        "height": [210] * n,
        "boxes": [[[40.0, 100.0, 120.0, 140.0]]] * n,
        "action_type": ["CLICK"] * n,
        "value": [""] * n,
    }
    table = pa.table([pa.array(steps[field.name], field.type) for field in STEP_SCHEMA], schema=STEP_SCHEMA)
    write_steps(table, folder / STEPS, ["train"])
    rows = range(n * PER_STEP)
    ids = [f"made/{i // PER_STEP}/0#planner_{'ab'[i % 2]}#{i % PER_STEP // 2}" for i in rows]
    of_step = [steps["step_id"][i // PER_STEP] for i in rows]
    passed = [i % VERIFIED == 0 for i in rows]
    plans = {
        "candidate_id": ids,
        "step_id": of_step,
        "planner": [f"planner_{'ab'[i % 2]}" for i in rows],
        "sample": [i % PER_STEP // 2 for i in rows],
        "text": [f"CLICK: press button {i % PER_STEP} of form {i // PER_STEP}, near the lower left" for i in rows],
        "plan": [f"press button {i % PER_STEP} of form {i // PER_STEP}, near the lower left" for i in rows],
        "action_type": ["CLICK" if ok else "TYPE" for ok in passed],
        "value": [""] * len(rows),
        "gate": ["passed" if ok else "wrong_type" for ok in passed],
        "duplicate_of": [None] * len(rows),
        "prompt_hash": ["0" * 16] * len(rows),
        "sampling_seed": [0] * len(rows),
    }
    write_table(
        pa.table([pa.array(plans[f.name], f.type) for f in CANDIDATE_SCHEMA], schema=CANDIDATE_SCHEMA), folder / PLANS
    )
    asked = [i for i in rows if passed[i] for _ in VERIFIERS]
    hit = (rng.random(len(asked)) < 0.6).tolist()
    votes = {
        "candidate_id": [ids[i] for i in asked],
        "step_id": [of_step[i] for i in asked],
        "verifier": list(VERIFIERS) * (len(asked) // len(VERIFIERS)),
        "hit": hit,
        "x": [80.0 if yes else 5.0 for yes in hit],
        "y": [120.0 if yes else 5.0 for yes in hit],
        "mean_logprob": (-rng.random(len(asked))).tolist(),
        "tokens": [4] * len(asked),
        "text": ["(80,120)"] * len(asked),
        "failure": [None] * len(asked),
    }
    write_table(
        pa.table([pa.array(votes[f.name], f.type) for f in VERDICT_SCHEMA], schema=VERDICT_SCHEMA), folder / VERDICTS
    )


def select_rows(folder: Path) -> None:
    """D_k and the decisions, as the asset `dataset` makes them."""
    import pyarrow.parquet as pq

    from coepg_dagster.artifacts import CANDIDATES as PLANS
    from coepg_dagster.artifacts import DATASET, DECISIONS, STEPS, VERDICTS, all_steps, write_table
    from coepg_dagster.experiment.schema import Regeneration
    from coepg_dagster.pools.selection import select

    read = pq.read_table(folder / PLANS), pq.read_table(folder / VERDICTS)
    dataset, decisions = select(all_steps(folder / STEPS), *read, Regeneration(), LAST, None)
    write_table(dataset, folder / DATASET)
    write_table(decisions, folder / DECISIONS)


def make_records(root: Path) -> None:
    """Every artifact of 100 iterations with its record; each evaluation has an older version too. Only the last has tables."""
    import dagster as dg
    from coepg_dagster.assets.ledger import RECORD, Loop, open_instance

    from coepg_dagster.artifacts import CANDIDATES as PLANS
    from coepg_dagster.artifacts import DATASET, DECISIONS, STEPS, VERDICTS
    from coepg_dagster.auditing.archive import MODELS
    from coepg_dagster.benchmark import SOURCE
    from coepg_dagster.experiment.versions import code_version
    from coepg_dagster.project import Project
    from coepg_dagster.provenance import LOOP, SHARED, Record, Ref
    from coepg_dagster.store import UNPARTITIONED, Store

    tables = {
        "benchmark_steps": [STEPS],
        "candidate_plans": [PLANS],
        "verdicts": [VERDICTS],
        "dataset": [DATASET, DECISIONS],
    }
    select_rows(root / "tables")
    project = Project(root)
    instance, store = open_instance(project), Store(project.store)
    loop = Loop(project.experiments()[EXPERIMENT], SEED, root)
    value = {"macro": 40.0, "micro": 41.0, "ci95": [35.0, 60.0], "ci95_micro": None, "n": 10}
    metrics = dict.fromkeys(("ele_acc", "op_f1", "step_sr"), value)
    scores = {"protocol": "miniwob/point", "rows": 10, "metrics": metrics, "notes": {}}
    configs = {
        "benchmark_steps": loop.experiment.benchmark,
        "open_models": loop.experiment.models,
        "evaluation": loop.experiment.benchmark,
    }
    records: dict[Ref, Record] = {}

    def figures(ref: Ref) -> dict[str, Any]:
        if ref.asset in SHARED:
            return {SOURCE: loop.source(ref.asset), "steps": {"train": CANDIDATES // PER_STEP}}
        if ref.asset == "evaluation":
            return {split: scores for split in ("validation", *loop.experiment.benchmark.test)}
        return {"purity": 70.0, "diversity": 1.5, "coverage": 60.0} if ref.asset == "data_quality" else {}

    def add(ref: Ref, salt: str = "") -> None:
        shared = ref.asset in SHARED
        place = (
            (EXPERIMENT, ref.asset, UNPARTITIONED)
            if shared
            else (EXPERIMENT, f"s{SEED}", ref.asset, str(ref.iteration))
        )
        with store.draft(*place) as draft:
            content = tables.get(ref.asset, []) if shared or ref.iteration == LAST else []
            for file in content:
                os.link(root / "tables" / file, draft / file)
            (draft / "content.json").write_text(json.dumps([str(ref), salt]))
            if ref.asset == "open_models":
                names = "planners/planner_a", "planners/planner_b", *(f"verifiers/{name}" for name in VERIFIERS)
                model = {"checkpoint": "models/planner-a", "version": "0" * 16, "files": {}}
                (draft / MODELS).write_text(json.dumps(dict.fromkeys(names, model)))
            artifact = store.commit(draft, place, ["content.json"])
        record = Record(
            asset=ref.asset,
            iteration=ref.iteration,
            data_version=artifact.version,
            run_id=f"{len(records):032x}",
            folder=str(artifact.folder.relative_to(project.store)),
            inputs=[records[used].as_input() for used in loop.inputs_of(ref)],
            code_version=code_version(loop.experiment, ref.asset),
            config=configs.get(ref.asset, loop.experiment.regeneration).model_dump(mode="json"),
            seed=SEED,
            seconds=60.0,
            device="cpu",
            figures=figures(ref),
            files=dict(artifact.files),
            sizes=artifact.sizes,
        )
        records[ref] = record
        instance.report_runless_asset_event(
            dg.AssetMaterialization(
                loop.key(ref.asset),
                partition=loop.partition(ref),
                metadata={"folder": record.folder, RECORD: dg.MetadataValue.json(record.model_dump(mode="json"))},
                tags={"dagster/data_version": record.data_version},
            )
        )

    for asset in SHARED:
        add(Ref(asset))
    for k in range(LAST + 1):
        for asset in LOOP:
            if asset == "evaluation":
                add(Ref(asset, k), "older")
            add(Ref(asset, k))


# --- measuring --------------------------------------------------------------------------------------------------------


def additions() -> float:
    """Seconds of CPU time for ten million additions."""
    started, x = time.process_time(), 0
    for i in range(10_000_000):
        x += i
    return time.process_time() - started


def measured(command: Sequence[str | Path], project: Path) -> dict[str, Any]:
    """CPU seconds, seconds and peak memory of a command in the project. Raises RuntimeError where it fails.

    Memory is that of the process itself, as long as this one, whose peak the new one begins with, is small.
    """
    before, started = additions(), time.monotonic()
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(command, cwd=project, env=environment(project), stdout=out, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        printed = out.read().decode(errors="replace")
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {printed[-2000:]}")
    return {
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "additions_seconds": (before + additions()) / 2,
        "seconds": seconds,
        "peak_gib": usage.ru_maxrss / 2**20,
        "printed": printed[-200:],
    }


def environment(project: Path) -> dict[str, str]:
    kept = {name: text for name, text in os.environ.items() if name not in ("DAGSTER_HOME", "COEPG_ROOT")}
    paths = os.pathsep.join(filter(None, [str(REPOSITORY), kept.get("PYTHONPATH", "")]))
    return kept | {"HF_HUB_OFFLINE": "1", "COLUMNS": "200", "PYTHONPATH": paths, "COEPG_ROOT": str(project)}


def asked(project: Path) -> dict[str, Any]:
    """CPU seconds of the web server until it answers, and of its answers to what its pages of assets ask for."""
    import httpx
    import psutil

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).parent / "dagster-webserver", "-h", "127.0.0.1", "-p", str(port)]
    command += ["-m", "coepg_dagster.definitions"]
    home = {"DAGSTER_HOME": str(project / ".dagster")}
    started, times = time.monotonic(), dict[str, Any]()
    process = subprocess.Popen(
        command, cwd=project, env=environment(project) | home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def spent() -> float:
        """Seconds of CPU time of the server and its code server."""
        of = psutil.Process(process.pid)
        return sum(one.cpu_times().user + one.cpu_times().system for one in (of, *of.children(recursive=True)))

    def ask(query: str, **variables: Any) -> Any:
        sent = {"query": query, "variables": variables}
        return httpx.post(f"http://127.0.0.1:{port}/graphql", json=sent, timeout=300).json()

    try:
        while True:
            try:
                ask("{ version }")
                break
            except httpx.TransportError:
                if process.poll() is not None or time.monotonic() - started > 300:
                    raise
                time.sleep(0.5)
        times["start"] = {"cpu_seconds": spent(), "seconds": time.monotonic() - started}
        key = {"path": [EXPERIMENT, f"s{SEED}", "evaluation"]}
        for name, query, variables in (("assets", ASSETS, {}), ("asset_history", HISTORY, {"key": key})):
            each = []
            for _ in range(3):
                begin, before = time.monotonic(), spent()
                answer = ask(query, **variables)
                each.append({"cpu_seconds": spent() - before, "seconds": time.monotonic() - begin})
                if "errors" in answer:
                    raise RuntimeError(f"{name}: {answer['errors']}")
            times[name] = {"first": each[0]} | min(each, key=lambda one: one["cpu_seconds"])
            times[name] |= {"bytes": len(json.dumps(answer)), "assets": len(answer["data"].get("assetNodes", [key]))}
        times["additions_seconds"] = additions()
    finally:
        process.terminate()
        process.wait(60)
    return times


def main() -> None:
    root = Path(tempfile.mkdtemp(prefix="coepg-load-"))
    coepg, this = Path(sys.executable).parent / "coepg", [sys.executable, "-m", "benchmarks.load"]
    try:
        subprocess.run([*this, "make", str(root)], check=True, cwd=REPOSITORY)
        commands: dict[str, Sequence[str | Path]] = {
            "definitions": [sys.executable, "-c", DEFINITIONS],
            "results": [coepg, "results", EXPERIMENT],
            "gc": [coepg, "gc", "--dry-run"],
            "trace": [coepg, "trace", f"{EXPERIMENT}@{LAST}#7"],
            "select": [*this, "select", root / "tables"],
            "audit_page": [sys.executable, "-m", "benchmarks.audit_page", str(root / "tables"), str(root / "out")],
        }
        runs: dict[str, Any] = {}
        for name, command in commands.items():
            times = 3 if name in LIMITS else 1  # the speed of a throttled machine changes while a command runs
            each = [measured(command, root) for _ in range(times)]
            runs[name] = min(each, key=lambda run: run["cpu_seconds"]) | {"of": [run["cpu_seconds"] for run in each]}
            print(name, json.dumps(runs[name]), flush=True)
        runs["web_server"] = asked(root)
        print("web_server", json.dumps(runs["web_server"]), flush=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    from benchmarks import baseline  # torch, which it looks for, takes memory

    log = baseline.Log(NAME)
    for name, run in runs.items():
        log(f"{name}: {json.dumps(run)}")
    value = runs["results"]["cpu_seconds"]
    baseline.write(
        NAME,
        command=baseline.command_line(),
        value=value,
        unit="seconds of CPU time of `coepg results`",
        against=LIMITS["results"],
        ratio=LIMITS["results"] / value,
        repetitions=runs,
        device=baseline.cpu_name(),
        limits=LIMITS,
        within=all(runs[name]["cpu_seconds"] <= limit for name, limit in LIMITS.items()),
        candidates=CANDIDATES,
        verdicts=CANDIDATES // VERIFIED * len(VERIFIERS),
        iterations=LAST + 1,
        experiments=OTHERS + 1,
    )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", folder]:
            make(Path(folder))
        case ["select", folder]:
            select_rows(Path(folder))
        case _:
            main()
