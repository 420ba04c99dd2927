"""Plans of a pool on several GPUs: candidates per second of a 3B-sized planner on four, against four times those on one.

The work is the loop's own (workers.CandidatesWork): cut into chunks, a process for each GPU, each chunk kept as it is done.
Rates are those after the first chunk of each process, since loading a model is paid once per run; the seconds with it are
reported too. Weights are random, so answers never end before their limit. `--quick` runs the tiny model in two processes
on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import sized
from benchmarks.baseline import Log, write_none, write_scaling
from coepg_dagster import workers

NAME: Final = "pool_scaling_4gpu"
CHUNK: Final = "COEPG_BENCHMARK_CHUNK"
if CHUNK in os.environ:  # here, so that processes that the work starts anew read it too
    workers.CHUNK = int(os.environ[CHUNK])


def one_run(options: argparse.Namespace) -> dict[str, Any]:
    """Runs the work on the visible devices; returns candidates and when each chunk was done."""
    from coepg_dagster.experiment import Models, Regeneration

    # smaller chunks than in a real run: a minute's work is enough for several per process
    workers.CHUNK = options.chunk
    os.environ[CHUNK] = str(options.chunk)
    checkpoint, folder = str(options.checkpoint), Path(tempfile.mkdtemp(prefix="pool-run-"))
    processes = torch.cuda.device_count() or options.processes
    steps, _ = sized.tables(options.size, options.chunk * options.chunks * processes, screens=64)
    workers.write_steps(steps, folder / "steps.arrow", ["train"])
    (folder / "scratch").mkdir()
    (folder / "out").mkdir()
    started = time.time()
    work = workers.CandidatesWork(
        out=folder / "out",
        scratch=folder / "scratch",
        steps=folder / "steps.arrow",
        models=Models(
            base_planner=checkpoint,
            base_grounder=checkpoint,
            planners={"open": checkpoint},
            verifiers={"open": checkpoint},
            prompts="compact",
        ),
        device="cuda" if torch.cuda.is_available() else "cpu",
        batch_size=options.batch,
        seed=13,
        processes=processes,
        members={"open": checkpoint},
        train_split="train",
        max_steps=None,
        config=Regeneration(plans_per_planner=options.plans, max_plan_tokens=options.tokens),
    )
    figures = work.run(lambda done, of, _: print(f"step {done} of {of} chunks", flush=True))
    done = {chunk.start: work.file_of(chunk).stat().st_mtime - started for chunk in work.chunks()}
    shutil.rmtree(folder)
    # process i makes every processes-th chunk, from chunk i on
    ends = [[done[start] for start in sorted(done)[i::processes]] for i in range(processes)]
    per_chunk = options.chunk * options.plans
    rate = sum(per_chunk * (len(times) - 1) / (times[-1] - times[0]) for times in ends)
    return {
        "processes": processes,
        "candidates": figures["rows"],
        "candidates_per_second": rate,
        "seconds_with_loading": max(map(max, ends)),
        # with one process the work is done in this one
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else 0.0,
        "chunk_seconds": [[b - a for a, b in pairwise(times)] for times in ends],
    }


def measure(settings: list[str], processes: int, checkpoint: Path, say: Log, *, timeout: float) -> dict[str, Any]:
    """One run in a process of its own that sees so many GPUs; `settings` are this module's own arguments."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        command = [sys.executable, "-m", f"benchmarks.{NAME}", *settings, "--run", str(out)]
        command += ["--processes", str(processes), "--checkpoint", str(checkpoint)]
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
        if torch.cuda.is_available():
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(processes)))
        with (Path(folder) / "log").open("w+") as log:
            # a session of its own, so that its processes on other GPUs end with it
            run = subprocess.Popen(command, env=environment, stderr=log, stdout=log, start_new_session=True)
            try:
                code: int | None = run.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if run.poll() is None:
                    os.killpg(run.pid, signal.SIGKILL)
                    run.wait()
            log.seek(0)
            printed = log.read()
        say("\n".join(f"  {line}" for line in printed.splitlines()[-8:]))
        if code is None:
            raise RuntimeError(f"the run on {processes} had not ended after {timeout:.0f} s")
        if code:
            raise RuntimeError(f"the run on {processes} failed:\n{printed[-3000:]}")
        figures: dict[str, Any] = json.loads(out.read_text())
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the tiny model; proves the code path")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--size", choices=("3B", "7B", "tiny"), default="3B")
    parser.add_argument("--batch", type=int, default=192, help="sequences per forward pass")
    parser.add_argument("--plans", type=int, default=4, help="plans per screenshot")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each plan")
    parser.add_argument("--chunk", type=int, default=48, help="screenshots per chunk")
    parser.add_argument("--chunks", type=int, default=4, help="chunks per process")
    parser.add_argument("--checkpoint", type=Path, help="made if it is not there; default: in memory, /dev/shm")
    parser.add_argument("--timeout", type=float, default=150, help="seconds for each of the two runs")
    parser.add_argument("--processes", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.size, options.chunk, options.chunks, options.tokens, options.plans = "tiny", 8, 3, 8, 2
    if options.run:
        options.run.write_text(json.dumps(one_run(options)))
        return
    cuda = torch.cuda.device_count()
    if not options.quick and cuda < options.gpus:
        reason = (
            f"{cuda} GPUs here, {options.gpus} are needed; `--quick` proves the code path in two processes on a CPU"
        )
        write_none(NAME, "candidates/s", reason)
        raise SystemExit(reason)
    say = Log(NAME, Path(tempfile.mkdtemp(prefix="quick-"))) if options.quick else Log(NAME)
    many = (cuda or 2) if options.quick else options.gpus
    options.checkpoint = options.checkpoint or Path("/dev/shm") / f"coepg-{options.size}-sharp"  # noqa: S108
    started = time.perf_counter()
    sized.make_checkpoint(options.checkpoint, options.size, device="cuda" if cuda else "cpu", sharp=True)
    say(f"checkpoint {options.checkpoint} after {time.perf_counter() - started:.0f} s")
    work = {name: getattr(options, name) for name in ("size", "batch", "plans", "tokens", "chunk", "chunks")}
    settings = [part for name, value in work.items() for part in (f"--{name}", str(value))]
    found: dict[int, dict[str, Any]] = {}
    for n in (1, many):
        try:
            found[n] = measure(settings, n, options.checkpoint, say, timeout=options.timeout)
        except RuntimeError as error:
            if options.quick:
                raise
            say(str(error))
            write_none(
                NAME,
                "candidates/s",
                f"{str(error).splitlines()[0]}; the log has the rest",
                log=say.path,
                runs={str(processes): figures for processes, figures in found.items()},
            )
            raise SystemExit(1) from None
        say(f"{n}: {found[n]['candidates_per_second']:.2f} candidates/s after each process's first chunk")
    one, together = (found[n]["candidates_per_second"] for n in (1, many))
    say(f"{together:.2f} candidates/s on {many}, {one:.2f} on one: {100 * together / (many * one):.1f} %")
    say(
        f"with loading: {found[many]['seconds_with_loading']:.1f} s on {many}, {found[1]['seconds_with_loading']:.1f} on one"
    )
    if options.quick:
        return
    write_scaling(
        NAME,
        one,
        together,
        many,
        unit="candidates/s",
        repetitions={str(processes): figures["chunk_seconds"] for processes, figures in found.items()},
        log=say.path,
        what=f"Candidates per second on {many} GPUs against {many} times those on one, after each process's first chunk.",
        runs={str(processes): figures for processes, figures in found.items()},
    )


if __name__ == "__main__":
    main()
