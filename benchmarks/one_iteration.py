"""web_3b, shrunk: SFT, GRPO, candidates and verdicts of one iteration by `coepg evolve`, on one GPU; seconds of each asset.

The experiment is experiments/web_3b.yaml with few steps. Its planner and grounder are Qwen2.5-VL-3B with random weights, of
true width and with the whole vision tower, and with `--layers` of 36 layers. The other planners and the verifiers are the
tiny models, since random weights never write a plan: they make D_0. The data are Parquet files in the format of
Multimodal-Mind2Web, made from MiniWoB++ screens, with the whole page as the target. The baseline is written anew after each
artifact, so that a run that is cut short leaves a partial result. `--quick` takes the tiny models for all, on a CPU,
and writes no baseline.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from PIL import Image

from benchmarks import sized
from benchmarks.baseline import Log, command_line, write, write_none
from coepg_dagster.sandbox.miniwob.reader import load_snapshot

NAME: Final = "one_iteration"
EXPERIMENT: Final = "web_3b_shrunk"
ROOT: Final = Path(__file__).parents[1]
PAGE: Final = 728, 952
"""A MiniWoB++ screen of 168 × 224, larger: 884 visual tokens."""
TASKS: Final = {"train": 40, "test_task": 2, "test_website": 2, "test_domain": 2}


def write_data(folder: Path, size: tuple[int, int]) -> None:
    """Files in the format of Multimodal-Mind2Web, a task of one click for each screen."""
    folder.mkdir(parents=True)
    clicks = {
        row["screenshot"]: row["goal"]
        for row in load_snapshot(ROOT / "data" / "miniwob").to_pylist()
        if row["family"] in ("click-test-2", "click-button") and row["action_type"] == "CLICK"
    }
    screens = iter(clicks.items())
    box = json.dumps({"backend_node_id": "1", "bounding_box_rect": f"0,0,{size[0]},{size[1]}"})
    target = json.dumps({"tag": "body", "attributes": box, "backend_node_id": "1", "is_original_target": True})
    for split, count in TASKS.items():
        rows = []
        for i in range(count):
            encoded, goal = next(screens)
            page = io.BytesIO()
            Image.open(io.BytesIO(encoded)).convert("RGB").resize(size, Image.Resampling.NEAREST).save(page, "PNG")
            rows.append(
                {
                    "action_uid": f"{split}{i}",
                    "annotation_id": f"{split}{i}",
                    "website": "made",
                    "confirmed_task": goal,
                    "operation": json.dumps({"op": "CLICK", "original_op": "CLICK", "value": ""}),
                    "pos_candidates": [target],
                    "screenshot": {"bytes": page.getvalue(), "path": None},
                    "action_reprs": ["[button]  Go -> CLICK"],
                    "target_action_index": "0",
                }
            )
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}-0.parquet")


def experiment(*, dtype: str) -> dict[str, Any]:
    """experiments/web_3b.yaml with few steps and local models."""
    full: dict[str, Any] = yaml.safe_load((ROOT / "experiments" / "web_3b.yaml").read_text())
    full["benchmark"] |= {"path": "data/mind2web", "max_train_steps": 32, "max_eval_steps": 4}
    full["sft"] |= {"epochs": 1, "max_steps": 4, "batch_size": 8, "micro_batch_size": 2}
    full["grpo"] |= {
        "prompts_per_step": 4,
        "group_size": 4,
        "micro_batch_size": 4,
        "max_steps": 2,
        "max_plan_tokens": 32,
    }
    full["regeneration"] |= {"plans_per_planner": 2, "max_plan_tokens": 40, "max_point_tokens": 12}
    return full | {
        "description": "web_3b in a few steps, with random weights.",
        "iterations": 1,
        "seeds": [13],
        "models": {
            "base_planner": "models/trained",
            "base_grounder": "models/trained",
            "planners": {"planner_a": "models/planner-a", "planner_b": "models/planner-b"},
            "verifiers": {"verifier_a": "models/verifier-a", "verifier_b": "models/verifier-b"},
            "prompts": "compact",
            "dtype": dtype,
        },
    }


def make_project(folder: Path, *, dtype: str, page: tuple[int, int]) -> Path:
    """`folder` as a project with the experiment, its data and the tiny models."""
    write_data(folder / "data" / "mind2web", page)
    for name in ("planner-a", "planner-b", "verifier-a", "verifier-b"):
        shutil.copytree(ROOT / "models" / name, folder / "models" / name)
    (folder / "experiments").mkdir()
    settings = yaml.safe_dump(experiment(dtype=dtype), sort_keys=False)
    (folder / "experiments" / f"{EXPERIMENT}.yaml").write_text(settings)
    for name in ("dagster.yaml", "workspace.yaml"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def made_after(project: Path, began: float) -> dict[str, float]:
    """Artifact → seconds from `began` until it was complete, in the order in which they were made."""
    times = {}
    for folder in (project / "store" / EXPERIMENT).glob("s*/*/*/*"):
        if folder.is_dir():
            times[f"{folder.parts[-3]}@{folder.parts[-2]}"] = round(folder.stat().st_mtime - began, 1)
    return dict(sorted(times.items(), key=lambda item: item[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the tiny models on a CPU; proves the code path")
    parser.add_argument("--layers", type=int, default=8, help="of the language model; 36 is the true size")
    parser.add_argument("--timeout", type=float, default=380, help="seconds, after which `coepg evolve` is interrupted")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    if not cuda and not options.quick:
        reason = "no GPU here; `--quick` proves the code path on a CPU"
        write_none(NAME, "s", reason)
        raise SystemExit(reason)
    say = Log(NAME, Path(tempfile.mkdtemp(prefix="quick-"))) if options.quick else Log(NAME)
    folder = Path(tempfile.mkdtemp(prefix="one-iteration-"))
    device, dtype, page = ("cpu", "float32", (168, 224)) if options.quick else ("cuda", "bfloat16", PAGE)
    project = make_project(folder, dtype=dtype, page=page)
    started = time.perf_counter()
    size: sized.Size = "tiny" if options.quick else "3B"
    sized.make_checkpoint(project / "models" / "trained", size, device=device, layers=options.layers)
    say(f"checkpoint after {time.perf_counter() - started:.0f} s")
    if cuda:
        torch.cuda.empty_cache()  # the iteration's processes need it
    outside = {key: value for key, value in os.environ.items() if key not in ("DAGSTER_HOME", "COEPG_ROOT")}
    environment = outside | {"HF_HUB_OFFLINE": "1", "COLUMNS": "160", "PYTHONPATH": str(ROOT)}
    coepg = [sys.executable, "-c", "from coepg_dagster.cli import app; app()"]
    printed, began, made = folder / "evolve.log", time.time(), dict[str, float]()

    def record(failed: str | None, iterations: list[dict[str, Any]], seconds: float) -> None:
        if options.quick:
            return
        write(
            NAME,
            command=command_line(),
            value=None if failed else round(seconds, 1),
            unit="s for iterations 0 and 1",
            against=None,
            ratio=None,
            repetitions=[],
            log=say.path,
            reason=failed,
            layers=options.layers,
            iterations=iterations,
            made_after_seconds=made,
        )

    with printed.open("w") as out:
        run = subprocess.Popen(
            [*coepg, "evolve", EXPERIMENT, "--through", "1", "--device", device],
            cwd=project,
            env=environment,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while run.poll() is None:
                time.sleep(1)
                for artifact, seconds in made_after(project, began).items():
                    if artifact not in made:
                        made[artifact] = seconds
                        say(f"{artifact} after {seconds:.0f} s")
                        record("`coepg evolve` had not ended", [], seconds)
                if run.returncode is None and time.time() - began > options.timeout:
                    say(f"`coepg evolve` had not ended after {options.timeout:.0f} s")
                    run.send_signal(signal.SIGINT)
                    run.wait(60)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGTERM)
                run.wait()
    seconds = time.time() - began
    results = subprocess.run(
        [*coepg, "results", EXPERIMENT, "--json"], cwd=project, env=environment, capture_output=True, text=True
    )
    iterations = json.loads(results.stdout)["iterations"] if results.returncode == 0 else []
    for iteration in iterations:
        say(f"iteration {iteration['iteration']}, seconds: {iteration['seconds']}")
    if run.returncode:
        say(printed.read_text(errors="replace")[-6000:])
    else:
        say(f"SFT, GRPO, candidates and verdicts of one iteration: {seconds:.0f} s")
    record(
        f"`coepg evolve` ended with code {run.returncode}; the log has its output" if run.returncode else None,
        iterations,
        seconds,
    )
    if run.returncode:
        raise SystemExit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
