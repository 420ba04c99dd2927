"""`coepg reproduce`: runs every loop of a study, each iteration in its own process, many at a time.

A study is an experiment with all its seeds and every overlay that descends from it. Each process is the ordinary
`coepg evolve`, which makes the artifacts, so an interrupted study continues where it stopped.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Final

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from coepg_dagster.assets.evolve import Where, make_inputs
from coepg_dagster.assets.ledger import REPRODUCING, Loop, alone, archive, keep_limits, restore_limits
from coepg_dagster.resources.launcher import job_environment
from coepg_dagster.resources.warm import WarmProcess
from rich.console import Console

from coepg_dagster.artifacts import (
    CANDIDATES,
    DATASET,
    PAIR_PREDICTIONS,
    PAIRS,
    PREDICTIONS,
    ROLLOUTS,
    STEPS,
    VERDICTS,
    steps_of,
)
from coepg_dagster.auditing.archive import Archive, NotFound, selected_by
from coepg_dagster.characters import print_line
from coepg_dagster.evaluation.score import score_steps
from coepg_dagster.experiment.files import ABLATIONS
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.experiment.strict import ExperimentError
from coepg_dagster.inference.weights import is_local
from coepg_dagster.planning.machine import Machine
from coepg_dagster.pools.quality import Regenerated, by_episode
from coepg_dagster.processes import LAST_WORDS, ended, words_left
from coepg_dagster.progress import Pace, local_time, span_text
from coepg_dagster.project import Project
from coepg_dagster.provenance import Asset, Record, Ref
from coepg_dagster.reports.findings import findings
from coepg_dagster.reports.paper import grpo_progress
from coepg_dagster.reports.results_page import write_page
from coepg_dagster.reports.study import DOMAIN, READ, STEP_SR, Run, Study, made_from, missing_runs, success_by_episode
from coepg_dagster.results import TRAIN, Row, headline, rows_of
from coepg_dagster.running import BASE_PLANNER, JUDGE, ORACLE_PLAN
from coepg_dagster.yaml_files import read as read_yaml

ONE_ANSWER: Final = frozenset({JUDGE, BASE_PLANNER, ORACLE_PLAN})
"""Pairs of models that answer each step once."""

ATTEMPTS: Final = 2
"""How often one iteration of a loop is tried before it counts as failed."""
VISIBLE_GPUS: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class StudyLoops:
    """The loops of a study, most important first, and the experiments that cannot run here, with the reason."""

    root: Experiment
    loops: tuple[Loop, ...]
    left_out: Mapping[str, str]


def find_study(project: Project, name: str, seeds: Sequence[int] | None = None) -> StudyLoops:
    """The experiment `name` and its overlays, with all their seeds or only `seeds`. Raises ExperimentError.

    First the experiment itself, then its ablations, then the overlays that count as separate experiments.
    """
    mains, overlays = project.experiments(), project.experiments(ABLATIONS)
    root, known = mains.named(name), mains | overlays
    unknown = sorted(set(seeds or ()) - set(root.seeds))
    if unknown:
        raise ExperimentError(
            f"{name} has the seeds {root.seeds}, not {unknown}: add them to its file, or choose others"
        )
    members = [root, *sorted((e for e in overlays.values() if _descends(e, name, known)), key=lambda e: _rank(e, root))]
    loops, left_out = [], {}
    for experiment in members:
        missing = missing_checkpoints(project.root, experiment)
        if missing:
            left_out[experiment.name] = f"{', '.join(missing)} is not there: its file says how to make it"
            continue
        chosen = [seed for seed in experiment.seeds if seeds is None or seed in seeds]
        loops += [Loop(experiment, seed, project.root) for seed in chosen]
    return StudyLoops(root, tuple(loops), left_out)


def is_begun(study: StudyLoops, instance: dg.DagsterInstance) -> bool:
    """Whether an iteration of one of its loops was evaluated, so that there is something to show."""
    return any(ref.asset == "evaluation" for loop in study.loops for ref in loop.records(instance))


def _descends(experiment: Experiment, ancestor: str, known: Mapping[str, Experiment]) -> bool:
    parent = experiment.parent
    while parent is not None and parent != ancestor:
        above = known.get(parent)
        parent = above.parent if above else None
    return parent is not None


def _rank(experiment: Experiment, root: Experiment) -> tuple[bool, bool, str]:
    return experiment.table != root.name, "dataset" not in experiment.made, experiment.name


def missing_checkpoints(root: Path, experiment: Experiment) -> list[str]:
    """The local checkpoint folders that an experiment names and that do not exist."""
    named = experiment.models.checkpoints()
    return [path for path in named if is_local(root, path) and not (root / path).is_dir()]


@dataclass
class LoopTask:
    """One iteration of one loop."""

    loop: Loop
    k: int
    after: list[tuple[str, int]]  # (loop, iteration) that must be done first
    attempts: int = 0
    started: float = 0.0
    why: str = ""
    gpu: dict[str, str] = field(default_factory=dict)  # environment that shows it one GPU

    @property
    def key(self) -> tuple[str, int]:
        return self.loop.name, self.k

    @property
    def command(self) -> str:
        """What a person would type."""
        return " ".join(["coepg", *self.arguments])

    @property
    def arguments(self) -> list[str]:
        return ["evolve", self.loop.name, "--from", str(self.k), "--through", str(self.k)]


def loop_tasks(study: StudyLoops, instance: dg.DagsterInstance) -> list[LoopTask]:
    """The iterations that are missing or stale, most important first.

    A loop that takes its data from its parent is made at the last iteration only, where it is compared: none of its
    iterations depends on another.
    """
    tasks = []
    for loop in study.loops:
        records = loop.records(instance)
        stale = loop.stale(records)
        todo = set(loop.to_make(records, stale, loop.experiment.iterations))
        todo |= {k for k in range(loop.experiment.iterations + 1) if loop.awaited(records, stale, k)}
        alone = takes_its_data(loop)
        for k in sorted(k for k in todo if k >= first_of(loop)):
            before = [(loop.name, k - 1)] if k and not alone else []
            of_parent = [(loop.parent.name, k)] if loop.parent is not None and alone else []
            tasks.append(LoopTask(loop, k, before + of_parent))
    return tasks


def takes_its_data(loop: Loop) -> bool:
    """Whether D_{k-1} is the parent's: then no iteration of the loop depends on another."""
    return "dataset" in loop.experiment.taken


def first_of(loop: Loop) -> int:
    """The first iteration of a loop that a study makes."""
    return loop.experiment.iterations if takes_its_data(loop) else 0


@dataclass
class Reproduction:
    """Runs the tasks of a study in `jobs` processes."""

    project: Project
    instance: dg.DagsterInstance
    console: Console
    jobs: int
    place: list[str]  # the options of `coepg evolve` that say where it runs
    machine: Machine  # the same with the profile, for the GPUs
    running: dict[tuple[str, int], tuple[LoopTask, WarmProcess]] = field(default_factory=dict)

    def run(self, study: StudyLoops, definitions: Callable[[Loop], dg.Definitions]) -> list[LoopTask]:
        """Makes what is missing or stale; returns the tasks that could not be made, each with the reason.

        Args:
            definitions: loop → definitions that contain it.
        """
        for name, why in study.left_out.items():
            print_line(self.console, f"left out: {name}: {why}")
        self._inputs(study, definitions)
        waiting = loop_tasks(study, self.instance)
        of, done = len(waiting), 0
        failed: list[LoopTask] = []
        print_line(self.console, f"{of} iterations to make, {self.jobs} at a time")
        started, pace = time.monotonic(), Pace()
        pace.text(0, of, time.time())
        try:
            with pool_slots(self.project, self.instance, {loop.experiment.pool for loop in study.loops}, self.jobs):
                while waiting or self.running:
                    self._start(waiting, failed)
                    for task, code in self._ended():
                        if code == 0:
                            done += 1
                            took, now = time.monotonic() - task.started, time.time()
                            print_line(
                                self.console,
                                f"{local_time(now)} {task.loop.name} k={task.k} made in {span_text(took)}"
                                f"{self._score(task)}; {pace.text(done, of, now)}",
                            )
                        elif task.attempts < ATTEMPTS:
                            waiting.insert(0, task)
                        else:
                            task.why = self._why(task, code)
                            failed.append(task)
                            print_line(self.console, f"failed: {task.command}: {task.why}")
                    time.sleep(0.2)
        finally:
            self._stop()
        minutes = (time.monotonic() - started) / 60
        print_line(self.console, f"{done} made, {len(failed)} not, {minutes:.1f} minutes")
        return failed

    def _inputs(self, study: StudyLoops, definitions: Callable[[Loop], dg.Definitions]) -> None:
        """Makes the inputs that seeds share, before the seeds start in parallel."""
        for name in dict.fromkeys(loop.experiment.name for loop in study.loops):
            loop = next(loop for loop in study.loops if loop.experiment.name == name)
            if loop.shared:
                make_inputs(definitions(loop), self.instance, loop, self.console, where=Where(here=True))

    def _start(self, waiting: list[LoopTask], failed: list[LoopTask]) -> None:
        """Starts the tasks whose inputs are made, up to `jobs`; a task that depends on a failed one fails."""
        lost = {task.key for task in failed}
        open_keys = {task.key for task in waiting} | set(self.running)
        for task in list(waiting):
            if any(key in lost for key in task.after):
                waiting.remove(task)
                task.why = "what it reads was not made"
                failed.append(task)
            elif len(self.running) < self.jobs and not any(key in open_keys for key in task.after):
                waiting.remove(task)
                task.attempts += 1
                task.started = time.monotonic()
                task.gpu = self._free_gpu()
                self.running[task.key] = task, self._process(task)

    def _process(self, task: LoopTask) -> WarmProcess:
        log = self._log(task)
        log.parent.mkdir(parents=True, exist_ok=True)
        words = self._words(task)
        words.unlink(missing_ok=True)
        return WarmProcess(
            "coepg_dagster.cli",
            [*task.arguments, "--here", *self.place],  # its environment names the GPU
            env=job_environment(1) | {"COLUMNS": "120", LAST_WORDS: str(words)} | task.gpu,
            cwd=self.project.root,
            output=log,
            starts_jobs=True,
        )

    def _free_gpu(self) -> dict[str, str]:
        """Environment that selects the GPU with the fewest running iterations; empty without GPUs."""
        taken = [task.gpu.get(VISIBLE_GPUS) for task, _ in self.running.values()]
        return {VISIBLE_GPUS: min(self._gpus, key=taken.count)} if self._gpus else {}

    @cached_property
    def _gpus(self) -> tuple[str, ...]:
        if self.machine.spread or {
            self.machine.sft.device,
            self.machine.grpo_cdrem.device,
            self.machine.regeneration.device,
        } == {"cpu"}:
            return ()
        import torch

        visible = os.environ.get(VISIBLE_GPUS)
        return tuple(visible.split(",")) if visible else tuple(map(str, range(torch.cuda.device_count())))

    def _log(self, task: LoopTask) -> Path:
        name = f"{task.loop.experiment.name}-s{task.loop.seed}-{task.k}.log"
        return self.project.store / "reproduce" / name

    def _words(self, task: LoopTask) -> Path:
        return self._log(task).with_suffix(".why")

    def _why(self, task: LoopTask, code: int) -> str:
        """Why an iteration was not made, in one line."""
        why = words_left(self._words(task)).partition("\n\n")[0] or f"it {ended(code)}"
        return f"{' '.join(why.split())[:600]} (log: {self._log(task)})"

    def _ended(self) -> Iterator[tuple[LoopTask, int]]:
        for key, (task, process) in list(self.running.items()):
            code = process.poll()
            if code is not None:
                del self.running[key]
                yield task, code

    def _score(self, task: LoopTask) -> str:
        """The iteration's result on validation; test splits are shown by `collect` only."""
        experiment = task.loop.experiment
        record = task.loop.record(self.instance, Ref("evaluation", task.k))
        if record is None:
            return ""
        metrics = record.figures[experiment.benchmark.validation]["metrics"]
        name = headline(metrics)
        value = metrics[name]["macro"]
        return "" if value is None else f", validation {name} {value:.1f}"

    def _stop(self) -> None:
        """Ends the running processes; each ends its workers."""
        for _, process in self.running.values():
            process.send_signal(signal.SIGINT)
        try:
            for _, process in self.running.values():
                process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also after a second Ctrl-C
            for _, process in self.running.values():
                process.send_signal(signal.SIGKILL)


@contextmanager
def pool_slots(project: Project, instance: dg.DagsterInstance, pools: set[str], slots: int) -> Iterator[None]:
    """While open, at least `slots` steps of each pool may run at once, over all processes; restores the limits afterwards.

    Where this process is killed, the next command that makes something restores them (`end_dead_runs`).
    """
    restore_limits(instance, project.store)
    storage = instance.event_log_storage
    before = {pool.name: pool.limit for pool in storage.get_pool_limits() if not pool.from_default}
    keep_limits(project.store, {pool: before.get(pool) for pool in pools})
    for pool in pools:
        storage.set_concurrency_slots(pool, max(slots, before.get(pool, 1)))
    try:
        yield
    finally:
        restore_limits(instance, project.store)


def one_at_a_time(project: Project) -> AbstractContextManager[None]:
    """Locks the project: two reproductions would start the same iterations. Raises ExperimentError if one is running."""
    (project.store / REPRODUCING).parent.mkdir(parents=True, exist_ok=True)
    said = f"{project.root}: another `coepg reproduce` is running here; wait for it, or end it"
    return alone(project.store / REPRODUCING, ExperimentError(said))


def collect(project: Project, instance: dg.DagsterInstance, study: StudyLoops, out: Path) -> Path:
    """Writes results.json, results.md and figures of a study, as far as it is made, into `out`; returns the page's path.

    Stale results are shown too; the page and every finding on them name them with their root cause.
    """
    benchmark = study.root.benchmark
    runs, wanted = [], {}
    versions = archive(project, instance)
    for loop in study.loops:
        experiment = loop.experiment
        wanted[loop.name] = (
            experiment.table,
            experiment.variant,
            loop.seed,
            range(first_of(loop), experiment.iterations + 1),
        )
        runs.append(_measured(project, instance, versions, loop))
    numbers = Study(runs, study.root.name, benchmark.test, study.root.iterations, benchmark.reader == "miniwob")
    claims = findings(numbers)
    out.mkdir(parents=True, exist_ok=True)
    content = {"rows": [row.to_json() for row in numbers.rows()], "findings": [claim.to_json() for claim in claims]}
    compact = json.JSONEncoder(separators=(",", ":")).encode
    lists = [f'"{name}": [\n' + ",\n".join(map(compact, rows)) + "\n]" for name, rows in content.items()]
    (out / "results.json").write_text("{" + ",\n".join(lists) + "}\n")  # a row per line
    missing = missing_runs(numbers, wanted)
    docs = os.path.relpath(project.root / "docs", out)
    return write_page(
        numbers,
        claims,
        missing,
        study.left_out,
        out,
        docs="" if docs == os.curdir else f"{docs}/",
        into="" if out == results_folder(project, study.root.name) else f" --out {out}",
    )


def results_folder(project: Project, name: str) -> Path:
    """Where the page of a study is written unless another folder is named."""
    return project.store / "pages" / name / "results"


def pretrained_on(root: Path, model: str) -> list[str]:
    """The families of pages that a model was pretrained on, by the recipe in the folder of its checkpoint; else none."""
    checkpoint = root / model
    recipe = checkpoint.parent / "recipe.yaml"
    of_model = read_yaml(recipe).get("checkpoints", {}).get(checkpoint.name, {}) if recipe.exists() else {}
    return list(of_model.get("families") or [])


def _measured(project: Project, instance: dg.DagsterInstance, versions: Archive, loop: Loop) -> Run:
    """The measurements of one loop, from its current artifacts."""
    experiment = loop.experiment
    benchmark = experiment.benchmark
    run = Run(experiment.table, experiment.variant, loop.seed, loop.name)
    records = loop.records(instance)
    run.stale = {ref: str(why) for ref, why in loop.stale(records).items()}
    for ref in records:
        if ref.asset in READ:
            try:
                run.made_from[ref] = made_from(versions.lineage(records[ref]))
            except NotFound:  # a finding that needs it says so
                continue

    def folder(record: Record) -> Path:
        return project.store / record.folder

    in_store = records.keys() - records.lost.keys() if Ref("benchmark_steps") not in records.lost else set()
    mine = {ref: records[ref] for ref in in_store if ref.asset in loop.made}
    run.rows = list(rows_of(experiment, loop.seed, mine))
    known = pa.array(pretrained_on(project.root, experiment.models.base_planner), pa.string())
    for k in range(experiment.iterations + 1):
        made = {ref.asset: record for ref, record in mine.items() if ref.iteration == k}
        of = {"experiment": run.experiment, "variant": run.variant, "seed": run.seed, "k": k, "split": TRAIN}
        if (evaluation := made.get("evaluation")) is not None:
            predictions = pq.read_table(folder(evaluation) / PREDICTIONS)
            steps_file = project.store / evaluation.input("benchmark_steps").folder / STEPS
            answers = {STEP_SR: predictions}
            if of_pairs := ONE_ANSWER & evaluation.figures.get(PAIRS, {}).keys():
                pairs = pq.read_table(folder(evaluation) / PAIR_PREDICTIONS)
                answers |= {f"{STEP_SR}_{pair}": pairs.filter(pc.equal(pairs["pair"], pair)) for pair in of_pairs}
            # by the steps and the protocol of then: the file of a stale evaluation may name others now
            for split in (name for name in (benchmark.validation, *benchmark.test) if name in evaluation.figures):
                steps = steps_of(steps_file, split).drop_columns(["screenshot"])
                metric = headline(evaluation.figures[split]["metrics"])
                for measure, of_all in answers.items():
                    asked = steps.filter(pc.is_in(steps["step_id"], of_all["step_id"].combine_chunks()))
                    ids = asked["step_id"].combine_chunks()
                    if not len(ids):
                        continue
                    of_split = of_all.filter(pc.is_in(of_all["step_id"], ids))
                    judged = score_steps(evaluation.config["protocol"], asked, of_split).steps
                    run.success[k, split, measure] = success_by_episode(judged, metric)
                    new = ids.filter(pc.invert(pc.is_in(asked["family"].combine_chunks(), known)))
                    if split in benchmark.test and 0 < len(new) < len(ids):
                        of_new = judged.filter(pc.is_in(judged["step_id"], new))
                        run.success[k, split + DOMAIN, measure] = success_by_episode(of_new, metric)
            calls = _calls(made, folder, predictions.num_rows)
            run.rows.append(Row(**of, metric="model_calls", value=calls, protocol="samples and answers"))
        if {"verdicts", "candidate_plans", "dataset"} <= set(made):
            verdicts, candidates = made["verdicts"], pq.read_table(folder(made["candidate_plans"]) / CANDIDATES)
            # the steps that had candidates, and the open models of then, for the same reason
            steps_file = project.store / verdicts.input("benchmark_steps").folder / STEPS
            steps = steps_of(steps_file, benchmark.train).drop_columns(["screenshot"])
            steps = steps.filter(pc.is_in(steps["step_id"], candidates["step_id"].combine_chunks()))
            with suppress(NotFound):  # then the recorded number has no interval, and a finding says why
                open_models = versions.made_by(verdicts.input("open_models"))
                run.data[k] = by_episode(
                    Regenerated(
                        steps,
                        candidates,
                        pq.read_table(folder(verdicts) / VERDICTS),
                        pq.read_table(folder(made["dataset"]) / DATASET),
                        selected_by(made["dataset"]),
                        frozenset(open_models.config["verifiers"]),
                    )
                )
        planner = made.get("planner")
        if planner is not None and (folder(planner) / ROLLOUTS).exists():
            rollouts = pq.read_table(folder(planner) / ROLLOUTS)
            run.curves[k] = grpo_progress(rollouts, f"grounder_{k}")
            run.rows.append(Row(**of, metric="rollouts", value=rollouts.num_rows, protocol="rollouts"))
    _read_plays(project, loop, records, run)
    return run


def _read_plays(project: Project, loop: Loop, records: Mapping[Ref, Record], run: Run) -> None:
    """Live play by each iteration on each split: of the current models if they played, and there of the most episodes."""
    best: dict[tuple[int, str], tuple[bool, int]] = {}
    for file in sorted((project.store / loop.experiment.name / f"s{loop.seed}" / "play").glob("*/*/play.json")):
        about = json.loads(file.read_text())
        made = about["made_from"]
        k = int(made["iteration"])
        others = [
            f"{ref} is now {records[ref].data_version if ref in records else 'gone'}, {made[role]} played"
            for role, ref in (("planner", Ref("planner", k)), ("grounder", Ref(loop.experiment.phi, k)))
            if ref not in records or records[ref].data_version != made[role]
        ]
        rank, place = (not others, about["episodes"]), (k, made["families of"])
        if place not in best or rank > best[place]:
            best[place], run.live[place] = rank, about
            run.live_stale.pop(place, None)
            if others:
                run.live_stale[place] = "; ".join(others)


def _calls(made: Mapping[Asset, Record], folder: Callable[[Record], Path], evaluated: int) -> int:
    """Number of model calls in an iteration: samples of planners plus answers of grounders."""
    calls = evaluated * (1 if "end_to_end" in made else 2)
    pools: tuple[Asset, ...] = ("candidate_plans", "verdicts")
    trained: tuple[Asset, ...] = ("planner", "grounder_rl", "end_to_end")
    for asset in pools:
        if asset in made:
            calls += int(made[asset].figures["rows"])
    for asset in trained:
        if asset in made and (folder(made[asset]) / ROLLOUTS).exists():
            rollouts = pq.read_table(folder(made[asset]) / ROLLOUTS, columns=["graders"])
            calls += rollouts.num_rows + int(pc.sum(pc.list_value_length(rollouts["graders"])).as_py() or 0)
    return calls
