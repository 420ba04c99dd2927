"""A job that ends as its last argument says: by itself, in a process that it forked, or in one of `accelerate launch`."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pyarrow as pa
from coepg_dagster.resources.ray_worker import main as run_on_ray

from coepg_dagster.jobs import EvaluationJob, Placement, parse_job
from coepg_dagster.processes import last_words
from coepg_dagster.progress import Ended
from coepg_dagster.running import Chunk, Evaluation
from coepg_dagster.training.launch import is_rank, launch_ranks


class Dying(Evaluation):
    """Two chunks, of which the second ends its process."""

    how: str

    def chunks(self) -> list[Chunk]:
        return [Chunk("agent", 0), Chunk("agent", 1)]

    @contextmanager
    def open(self, member: str, device: str) -> Iterator[Callable[[int], pa.Table]]:
        def make(start: int) -> pa.Table:
            if start == 1:
                end(self.how)
            time.sleep(30)
            return pa.table({})

        yield make


def end(how: str) -> None:
    """Ends this process."""
    print("working", flush=True)
    match how:
        case "text":
            sys.exit("loss is nan: lower learning_rate")
        case "refused":
            raise Ended("strategy zero3 needs GPUs: use `ddp` on a CPU")
        case "exception":
            try:
                raise KeyError("first")
            except KeyError:
                raise ValueError("rows 3 and 4 differ\nin two lines") from None
        case "memory" | "tensors":
            import torch  # a fork of the server has it; ranks start from nothing, and need none

            limit = psutil.Process().memory_info().vms + (1 << 28)
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
            bytes(1 << 32) if how == "memory" else torch.zeros(1 << 30)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            os.abort()
        case "code":
            os._exit(3)
        case "hangs":
            time.sleep(60)


def main(job_file: Path, result_file: Path, where: str, how: str) -> None:
    if where == "ray":
        run_on_ray(job_file, result_file)
    elif where == "child":
        job = parse_job(job_file.read_text())
        assert isinstance(job, EvaluationJob)
        dying = Dying(job.model_copy(update={"processes": 2}))
        dying.how = how
        dying.run(lambda done, of, figures: None)
    elif where == "rank" and not is_rank():
        arguments = [str(job_file), str(result_file), where, how]
        sys.exit(
            launch_ranks(Placement(processes=2), result_file.parent, "tests.resources.ending", arguments, on_gpu=False)
        )
    elif where == "rank" and os.environ["RANK"] == "0":
        time.sleep(60)
    else:
        end(how)


if __name__ == "__main__":
    with last_words():
        main(Path(sys.argv[1]), Path(sys.argv[2]), *os.environ["ENDS"].split())
