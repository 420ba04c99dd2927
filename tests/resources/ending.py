"""A job that ends as its last argument says: by itself, in a process that it forked, or in one of `accelerate launch`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from coepg_dagster.resources.ray_worker import main as run_on_ray

from coepg_dagster.processes import last_words
from coepg_dagster.progress import Ended
from coepg_dagster.training.launch import Placement, is_rank, launch
from coepg_dagster.workers import Chunk, EvaluationWork, parse_work


class Dying(EvaluationWork):
    """Work of two chunks, of which the second ends its process."""

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
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            os.abort()
        case "code":
            os._exit(3)
        case "hangs":
            time.sleep(60)


def main(work_file: Path, result_file: Path, where: str, how: str) -> None:
    if where == "ray":
        run_on_ray(work_file, result_file)
    elif where == "child":
        work: dict[str, Any] = parse_work(work_file.read_text()).model_dump()
        Dying(**work | {"processes": 2, "how": how}).run(lambda done, of, figures: None)
    elif where == "rank" and not is_rank():
        arguments = [str(work_file), str(result_file), where, how]
        sys.exit(launch(Placement(processes=2), result_file.parent, "tests.resources.ending", arguments, on_gpu=False))
    elif where == "rank" and os.environ["RANK"] == "0":
        time.sleep(60)
    else:
        end(how)


if __name__ == "__main__":
    with last_words():
        main(Path(sys.argv[1]), Path(sys.argv[2]), *os.environ["ENDS"].split())
