"""Plans of a pool on n GPUs: candidates per second of a 3B-sized planner, against n times those on one.

Runs the loop's CandidatesJob: cut into chunks, one process per GPU, each chunk saved when it is done. Rates are those after
the first chunk of each process, since loading a model is paid once per run; the seconds with it are reported too. Weights
are random, so answers never end before their limit. The baseline is `pool_scaling_4gpu`, with `--gpus 2`
it is `pool_scaling_2gpu`. A run that is ended after `--timeout` seconds counts with the chunks that it made. `--quick` runs
the tiny model in two processes on a CPU.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import limited, sized
from benchmarks.baseline import Log
from benchmarks.scaling import Figures, compare, need_gpus
from coepg_dagster import running
from coepg_dagster.artifacts import write_steps
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.jobs import CandidatesJob
from coepg_dagster.running import Chunked, chunked

CHUNK: Final = "COEPG_BENCHMARK_CHUNK"
if CHUNK in os.environ:  # at import, so that the processes that the job spawns read it too
    running.CHUNK = int(os.environ[CHUNK])


def work_of(options: argparse.Namespace) -> Chunked[CandidatesJob]:
    """The job in `options.folder`, whose input files are written if they do not exist."""
    # smaller chunks than in a real run: a minute's work is enough for several per process
    running.CHUNK = options.chunk
    os.environ[CHUNK] = str(options.chunk)
    checkpoint, folder = str(options.checkpoint), options.folder
    if not (folder / "steps.arrow").exists():
        steps, _ = sized.tables(options.size, options.chunk * options.chunks * options.processes, screens=64)
        write_steps(steps, folder / "steps.arrow", ["train"])
        (folder / "scratch").mkdir()
        (folder / "out").mkdir()
    job = CandidatesJob(
        out=folder / "out",
        scratch=folder / "scratch",
        steps=folder / "steps.arrow",
        models=sized.models_of(checkpoint),
        device="cuda" if torch.cuda.is_available() else "cpu",
        batch_size=options.batch,
        seed=13,
        processes=options.processes,
        members={"open": checkpoint},
        train_split="train",
        max_steps=None,
        config=Regeneration(plans_per_planner=options.plans, max_plan_tokens=options.tokens),
    )
    return chunked(job)


def one_run(options: argparse.Namespace) -> None:
    """Runs the job on the visible devices; writes its chunks and its peak memory."""
    work = work_of(options)
    (options.folder / "started").touch()
    work.run(lambda done, of, _: print(f"step {done} of {of} chunks", flush=True))
    # with one process the work is done in this one
    memory = torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0
    (options.folder / "memory").write_text(str(memory))


def figures_of(options: argparse.Namespace) -> dict[str, Any]:
    """The figures of the finished chunks. Raises RuntimeError if a process has made fewer than two."""
    folder, work = options.folder, work_of(options)
    started = (folder / "started").stat().st_mtime
    # process i makes every processes-th chunk, from chunk i on
    files = [work.file_of(chunk) for chunk in sorted(work.chunks(), key=lambda chunk: chunk.start)]
    ends = [
        [file.stat().st_mtime - started for file in files[i :: options.processes] if file.exists()]
        for i in range(options.processes)
    ]
    if min(map(len, ends)) < 2:
        raise RuntimeError(f"too few chunks to tell a rate: {[len(times) for times in ends]} of {options.chunks} each")
    per_chunk = options.chunk * options.plans
    memory = folder / "memory"
    return {
        "processes": options.processes,
        "candidates": per_chunk * sum(map(len, ends)),
        "candidates_per_second": sum(per_chunk * (len(times) - 1) / (times[-1] - times[0]) for times in ends),
        "seconds_with_loading": max(map(max, ends)),
        "memory_gb": float(memory.read_text()) if memory.exists() else None,
        "chunk_seconds": [[b - a for a, b in pairwise(times)] for times in ends],
    }


def measure(settings: list[str], processes: int, checkpoint: Path, say: Log, *, timeout: float) -> dict[str, Any]:
    """One run in a separate process that sees `processes` GPUs; `settings` are arguments of this module."""
    with tempfile.TemporaryDirectory(prefix="pool-run-") as folder:
        given = [*settings, "--processes", str(processes), "--checkpoint", str(checkpoint), "--folder", folder]
        environment, log = {}, Path(folder) / "log"
        if torch.cuda.is_available():
            seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(seen.split(",")[:processes])
        code = limited.run(["benchmarks.pool_scaling", *given], log, timeout, **environment)
        printed = log.read_text(errors="replace")
        say("\n".join(f"  {line}" for line in printed.splitlines()[-8 if code == 0 else -80 :]))
        if code:
            raise RuntimeError(f"the run on {processes} failed:\n{printed[-3000:]}")
        if code is None:
            say(f"the run on {processes} had not ended after {timeout:.0f} s; the chunks that it made count")
        return figures_of(arguments(given))


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the tiny model; proves the code path")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--size", choices=sized.SIZES, default="3B")
    parser.add_argument("--batch", type=int, default=128, help="sequences per forward pass")
    parser.add_argument("--plans", type=int, default=4, help="plans per screenshot")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each plan")
    parser.add_argument("--chunk", type=int, default=32, help="screenshots per chunk")
    parser.add_argument("--chunks", type=int, default=6, help="chunks per process")
    parser.add_argument("--checkpoint", type=Path, help="made if it is not there; default: in memory, /dev/shm")
    parser.add_argument("--timeout", type=float, default=90, help="seconds for each of the two runs")
    parser.add_argument("--processes", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # one run, in this process
    options = parser.parse_args(given)
    if options.quick:
        options.size, options.chunk, options.chunks, options.tokens, options.plans = "tiny", 8, 3, 8, 2
    return options


def main() -> None:
    options = arguments()
    if options.folder:
        one_run(options)
        return
    cuda, name, unit = torch.cuda.device_count(), f"pool_scaling_{options.gpus}gpu", "candidates/s"
    if not options.quick:
        need_gpus(name, unit, options.gpus, "in two processes on a CPU")
    say = Log(name, Path(tempfile.mkdtemp(prefix="quick-"))) if options.quick else Log(name)
    many = (cuda or 2) if options.quick else options.gpus
    options.checkpoint = options.checkpoint or Path("/dev/shm") / f"coepg-{options.size}-sharp"  # noqa: S108
    started = time.perf_counter()
    sized.make_checkpoint(options.checkpoint, options.size, device="cuda" if cuda else "cpu", sharp=True)
    say(f"checkpoint {options.checkpoint} after {time.perf_counter() - started:.0f} s")
    work = {key: getattr(options, key) for key in ("size", "batch", "plans", "tokens", "chunk", "chunks")}
    settings = [part for key, value in work.items() for part in (f"--{key}", str(value))]

    def measured(processes: int) -> Figures:
        figures = measure(settings, processes, options.checkpoint, say, timeout=options.timeout)
        say(f"{processes}: {figures['candidates_per_second']:.2f} candidates/s after each process's first chunk")
        return figures

    runs = compare(
        name,
        many,
        say,
        measured,
        lambda figures, _: float(figures["candidates_per_second"]),
        unit=unit,
        seconds="chunk_seconds",
        what=f"Candidates per second on {many} GPUs against {many} times those on one, after each process's first chunk.",
        quick=options.quick,
    )
    say(
        f"with loading: {runs[many]['seconds_with_loading']:.1f} s on {many}, {runs[1]['seconds_with_loading']:.1f} on one"
    )


if __name__ == "__main__":
    main()
