"""web_3b, shrunk: SFT, GRPO, candidates and verdicts of one iteration by `coepg evolve`, on one GPU; seconds of each asset.

The experiment is experiments/web_3b.yaml with few steps, placed by machines/h200x1.yaml. Its planner and grounder are
Qwen2.5-VL-3B with random weights, of true width and with the whole vision tower, and with `--layers` of 36 layers. The other
planners and the verifiers are the tiny models, since random weights never write a plan: they make D_0. The data are Parquet files
in the format of Multimodal-Mind2Web, made from MiniWoB++ screens, with the whole page as the target. The baseline is written anew
after each artifact, so that a run that is cut short leaves a partial result. `--quick` takes the tiny models for all, on a CPU,
and writes no baseline.

`--kills` sends SIGKILL to `coepg evolve` once in GRPO, after its first checkpoint, and once while candidates are made, after
their first chunk; the same command continues. The baseline, `one_iteration_killed`, then has the seconds of each piece, how long
the processes of a killed one lived on, whether anything finished was made again, and the steps in the log of GRPO. A checkpoint
of all 36 layers takes 38 GB: run it where there is room, in memory if possible (`TMPDIR=/dev/shm`).
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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from PIL import Image

from benchmarks import sized
from benchmarks.baseline import Log, command_line, write, write_none
from coepg_dagster.artifacts import SEAL
from coepg_dagster.sandbox.miniwob.reader import load_snapshot

NAME: Final = "one_iteration"
EXPERIMENT: Final = "web_3b_shrunk"
MACHINE: Final = "h200x1"
ROOT: Final = Path(__file__).parents[1]
PAGE: Final = 728, 952
"""A MiniWoB++ screen of 168 × 224, larger: 884 visual tokens."""
TASKS: Final = {"train": 40, "test_task": 2, "test_website": 2, "test_domain": 2}
KILLS: Final = {
    "grpo": f"*-planner-1-*/trainer/checkpoint-*/whole.json{SEAL}",
    "candidates": f"*-candidate_plans-1-*/candidates-*.parquet{SEAL}",
}
"""Stage → the file of the scratch folders after which `coepg evolve` is killed: a checkpoint, a chunk of the pool."""


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
    full["sft"] |= {"epochs": 1, "max_steps": 4, "batch_size": 8, "micro_batch_size": 2, "probe_steps": 8}
    full["grpo"] |= {
        "prompts_per_step": 4,
        "group_size": 4,
        "micro_batch_size": 4,
        "max_steps": 3,
        "max_plan_tokens": 32,
        "probe_steps": 8,
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
    """`folder` as a project with the experiment, its data, the tiny models, and the profile of the machine."""
    write_data(folder / "data" / "mind2web", page)
    for name in ("planner-a", "planner-b", "verifier-a", "verifier-b"):
        shutil.copytree(ROOT / "models" / name, folder / "models" / name)
    (folder / "experiments").mkdir()
    settings = yaml.safe_dump(experiment(dtype=dtype), sort_keys=False)
    (folder / "experiments" / f"{EXPERIMENT}.yaml").write_text(settings)
    (folder / "machines").mkdir()
    profile = yaml.safe_load((ROOT / "machines" / f"{MACHINE}.yaml").read_text())
    profile["grpo_cdrem"]["save_every"] = 2  # of three steps: one checkpoint
    (folder / "machines" / f"{MACHINE}.yaml").write_text(yaml.safe_dump(profile))
    for name in ("dagster.yaml", "workspace.yaml"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def complete(project: Path) -> dict[Path, float]:
    """The folder of every complete artifact → when it was completed."""
    folders = (project / "store" / EXPERIMENT).glob("s*/*/*/*")
    return {folder: folder.stat().st_mtime for folder in folders if folder.is_dir()}


def processes_of(project: Path) -> list[str]:
    """The processes that work in a project, or whose command names it."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            if str(project) in f"{process.cwd()} {command}" and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {command[-200:]}")
    return found


class Evolution:
    """`coepg evolve` in a project, in one piece or in several; what is in `made`, `pieces` and `again` goes into the baseline."""

    def __init__(self, project: Path, command: list[str], environment: dict[str, str], say: Log, limit: float) -> None:
        self.project, self._command, self._environment, self._say = project, command, environment, say
        self.output = project / "evolve.log"
        self.began = time.time()
        self._end = self.began + limit
        self.made: dict[str, float] = {}
        self.pieces: list[dict[str, Any]] = []
        self.again: set[str] = set()
        self._done: dict[Path, float] = {}
        self._kept: dict[Path, float] = {}

    def piece(self, kill_in: str | None, keep: Callable[[], None]) -> int | None:
        """Runs the command, to its end or until it is killed in a stage of KILLS; its exit code, None if it was killed.

        `keep` is called after each artifact.
        """
        began = time.time()
        about: dict[str, Any] = {"killed_in": None, "continues": []}
        with self.output.open("a") as out:
            run = subprocess.Popen(
                self._command,
                cwd=self.project,
                env=self._environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            while run.poll() is None:
                time.sleep(0.1)
                self._look(about["continues"], keep)
                if kill_in and (there := list(self._scratch().glob(KILLS[kill_in]))):
                    self._done, self._kept = complete(self.project), {file: file.stat().st_mtime for file in there}
                    about |= {"killed_in": kill_in, "processes": len(processes_of(self.project))}
                    os.kill(run.pid, signal.SIGKILL)
                    about["killed_after"] = round(time.time() - began, 1)
                    run.wait()
                    about |= self._gone()
                elif time.time() > self._end:
                    self._say("`coepg evolve` had not ended at the time limit")
                    run.send_signal(signal.SIGINT)
                    run.wait(60)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
        self._look(about["continues"], keep)
        about |= {"seconds": round(time.time() - began, 1), "code": run.returncode}
        self.pieces.append(about)
        self._say(f"piece: {json.dumps(about)}")
        return None if about["killed_in"] else run.returncode

    def _scratch(self) -> Path:
        return self.project / "store" / ".scratch"

    def _look(self, continues: list[str], keep: Callable[[], None]) -> None:
        """Notes what was completed, what says that it continues, and what was there before and is made again."""
        now = complete(self.project)
        for folder, when in sorted(now.items(), key=lambda item: item[1]):
            artifact = f"{folder.parts[-3]}@{folder.parts[-2]}"
            if artifact not in self.made:
                self.made[artifact] = round(when - self.began, 1)
                self._say(f"{artifact} after {self.made[artifact]:.0f} s")
                keep()
            if any(folder != old and folder.parent == old.parent for old in self._done):
                self.again.add(f"another version of {artifact}")
        self.again |= {str(old) for old, when in self._done.items() if now.get(old) != when}
        for file, when in self._kept.items():
            with suppress(FileNotFoundError):  # a scratch folder is deleted when its job is done
                if file.stat().st_mtime != when:
                    self.again.add(file.name)
        for log in self._scratch().glob("*/worker.log"):
            with suppress(FileNotFoundError):
                lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
                continues += [line for line in lines if line.startswith("continues from") and line not in continues]

    def _gone(self) -> dict[str, Any]:
        """Waits until no process of the project is left, at most a minute."""
        began = time.time()
        while (left := processes_of(self.project)) and time.time() < began + 60:
            time.sleep(0.2)
        return {"others_ended_after": round(time.time() - began, 1), "left_behind": left}


def steps_logged(project: Path) -> list[int]:
    """The optimizer steps in the log of iteration 1's GRPO, in order."""
    [log] = (project / "store" / EXPERIMENT).glob("s*/planner/1/*/training_log.jsonl")
    return [int(entry["step"]) for entry in map(json.loads, log.read_text().splitlines()) if "loss" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the tiny models on a CPU; proves the code path")
    parser.add_argument("--layers", type=int, default=8, help="of the language model; 36 is the true size")
    parser.add_argument(
        "--kills", action="store_true", help="kill it in GRPO and while candidates are made, and continue"
    )
    parser.add_argument("--timeout", type=float, default=380, help="seconds, after which `coepg evolve` is interrupted")
    options = parser.parse_args()
    cuda, name = torch.cuda.is_available(), f"{NAME}_killed" if options.kills else NAME
    if not cuda and not options.quick:
        reason = "no GPU here; `--quick` proves the code path on a CPU"
        write_none(name, "s", reason)
        raise SystemExit(reason)
    say = Log(name, Path(tempfile.mkdtemp(prefix="quick-"))) if options.quick else Log(name)
    folder = Path(tempfile.mkdtemp(prefix="one-iteration-")).resolve()
    device, dtype, page = ("cpu", "float32", (168, 224)) if options.quick else ("cuda", "bfloat16", PAGE)
    project = make_project(folder, dtype=dtype, page=page)
    started = time.perf_counter()
    size: sized.Size = "tiny" if options.quick else "3B"
    sized.make_checkpoint(project / "models" / "trained", size, device=device, layers=options.layers)
    say(f"checkpoint in {folder} after {time.perf_counter() - started:.0f} s")
    if cuda:
        torch.cuda.empty_cache()  # the iteration's processes need it
    outside = {key: value for key, value in os.environ.items() if key not in ("DAGSTER_HOME", "COEPG_ROOT")}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = outside | {"HF_HUB_OFFLINE": "1", "COLUMNS": "160", "PYTHONPATH": path}
    coepg = [sys.executable, "-c", "from coepg_dagster.cli import app; app()"]
    command = [*coepg, "evolve", EXPERIMENT, "--through", "1", "--on", MACHINE, *["--device", "cpu"] * options.quick]
    evolution = Evolution(project, command, environment, say, options.timeout)

    def record(failed: str | None, iterations: list[dict[str, Any]], **more: Any) -> None:
        if options.quick:
            return
        write(
            name,
            command=command_line(),
            value=None if failed else round(time.time() - evolution.began, 1),
            unit=f"s for iterations 0 and 1{', killed twice' if options.kills else ''}",
            against=None,
            ratio=None,
            repetitions=[],
            log=say.path,
            reason=failed,
            layers=options.layers,
            iterations=iterations,
            made_after_seconds=evolution.made,
            pieces=evolution.pieces,
            made_again=sorted(evolution.again),
            **more,
        )

    def keep() -> None:
        record("`coepg evolve` had not ended", [])

    for stage in [*(KILLS if options.kills else ()), None]:
        code = evolution.piece(stage, keep)
        if code is not None:
            break
    seconds = time.time() - evolution.began
    results = subprocess.run(
        [*coepg, "results", EXPERIMENT, "--json"], cwd=project, env=environment, capture_output=True, text=True
    )
    iterations = json.loads(results.stdout)["iterations"] if results.returncode == 0 else []
    for iteration in iterations:
        say(f"iteration {iteration['iteration']}, seconds: {iteration['seconds']}")
    killed = [piece["killed_in"] for piece in evolution.pieces[:-1]]
    failed = None
    if code:
        say(evolution.output.read_text(errors="replace")[-6000:])
        failed = f"`coepg evolve` ended with code {code}; the log has its output"
    elif options.kills and killed != [*KILLS]:
        failed = f"it ended before it could be killed in each of {', '.join(KILLS)}: {killed}"
    left, steps = processes_of(project), [] if code else steps_logged(project)
    if not code:
        say(f"SFT, GRPO, candidates and verdicts of one iteration: {seconds:.0f} s; GRPO logged steps {steps}")
        say(f"made again: {sorted(evolution.again) or 'nothing'}; left behind: {left or 'no process'}")
    record(failed, iterations, grpo_steps=steps, left_behind=left)
    if failed:
        raise SystemExit(failed)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
