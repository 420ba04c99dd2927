"""A job on an existing Ray cluster: pool work chunk by chunk on as many workers as there are, everything else on one.

The process that calls `run_on_cluster` is the driver: when it ends, however it ends, Ray ends the actors that it started.
Every node sees the project, its store and its checkpoints under the same paths (a shared file system) and has this package
installed. Ray hands each actor its GPU (CUDA_VISIBLE_DEVICES), so that jobs and other users of the cluster share it.
"""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

from coepg_dagster.jobs import ChunkedJob, Job, parse_job
from coepg_dagster.progress import Report
from coepg_dagster.refusal import Refusal
from coepg_dagster.running import Chunk, Chunked, chunked, next_chunk, run, taker

POLL_SECONDS: Final = 1.0
LOST_AT_MOST: Final = 3
"""Actors that may be lost with their node, in one job; their chunks are made again."""


class ClusterUnusable(Refusal, RuntimeError):
    """No Ray, no cluster at the address, or nothing on it for this job; the message says what to do."""


def _job_here(job: str, root: str) -> Job:
    """A job that this process of a worker does, in the project's folder, with the embeddings that its jobs share."""
    from coepg_dagster.inference.visual import keep_in

    os.chdir(root)
    parsed = parse_job(job)
    keep_in(parsed.visual)
    return parsed


class StageFunction:
    """One worker of pool work: holds one member at a time, and makes the chunks that it is given."""

    def __init__(self, job: str, root: str) -> None:
        parsed = _job_here(job, root)
        assert isinstance(parsed, ChunkedJob)  # run_on_cluster starts makers for nothing else
        self._chunked = chunked(parsed)
        self._member: str | None = None
        self._open = ExitStack()
        self._keep: Any = None

    def ready(self) -> None:
        """Answers once this worker runs."""

    def make(self, member: str, start: int) -> None:
        """Leaves the chunk's file in the job's scratch folder."""
        if member != self._member:
            self.end()  # the model before it goes before the next one comes
            self._keep = self._open.enter_context(self._chunked.holding(member, self._chunked.job.device))
            self._member = member
        self._keep(Chunk(member, start))

    def end(self) -> None:
        """Closes what it holds. Raises EngineChanged where a model behind an endpoint was changed meanwhile."""
        self._member = None
        self._open.close()


class Whole:
    """One worker that does a job as it is, and says how far it is when it is asked."""

    def __init__(self, job: str, root: str) -> None:
        self._job = _job_here(job, root)
        self._state: tuple[int, int, dict[str, float]] = (0, 1, {})

    def run(self) -> tuple[dict[str, Any], str]:
        """(figures, device)."""
        return run(self._job, self._tell), self._job.device_name()

    def _tell(self, done: int, of: int, figures: Any) -> None:
        self._state = (done, of, dict(figures))

    def state(self) -> tuple[int, int, dict[str, float]]:
        """(done, of, figures) as the work said last."""
        return self._state


def run_on_cluster(job: Job, root: Path, address: str, threads: int, report: Report) -> tuple[dict[str, Any], str]:
    """(figures, device) of a job, done on the cluster at `address` (`host:port`, `auto`, or `ray://host:10001`).

    Raises ClusterUnusable, or what the job raised.
    """
    try:
        import ray
    except ModuleNotFoundError:
        raise ClusterUnusable("the package ray is not installed: pip install 'coepg-dagster[ray]'") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    env = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "0"}
    _expect_answer(address)
    try:
        ray.init(address, log_to_driver=True, logging_level="ERROR", runtime_env={"env_vars": env})
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ClusterUnusable(
            f"no Ray cluster answers at {address!r} ({error}): start one, or correct the address"
        ) from None
    try:
        gpus = int(ray.cluster_resources().get("GPU", 0))
        if job.device == "cuda" and not gpus:
            raise ClusterUnusable("`device: cuda`, but the cluster has no GPU: add a node with one, or use `auto`")
        on_gpu = gpus > 0 and job.device != "cpu"
        job = job.model_copy(update={"device": "cuda" if on_gpu else "cpu"})
        resources = {"num_gpus": 1, "num_cpus": 1} if on_gpu else {"num_cpus": 1}
        if isinstance(job, ChunkedJob):
            most = gpus if on_gpu else min(job.processes, int(ray.cluster_resources().get("CPU", 1)))
            return _spread(
                ray, chunked(job), root, most, resources, report
            ), f"{most} × {'cuda' if on_gpu else 'cpu'} on Ray"
        actor = ray.remote(Whole).options(max_concurrency=2, **resources).remote(job.model_dump_json(), str(root))
        result = actor.run.remote()
        while not ray.wait([result], timeout=POLL_SECONDS)[0]:
            report(*ray.get(actor.state.remote()))
        figures, device = ray.get(result)
        report(*ray.get(actor.state.remote()))
        return figures, f"{device} on Ray"
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from error
        raise
    finally:
        ray.shutdown()


def _expect_answer(address: str) -> None:
    """Raises ClusterUnusable where nothing listens at `host:port`; Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon:
        return  # `auto`: Ray says at once that there is none
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ClusterUnusable(
            f"no Ray cluster answers at {address!r} ({error}): start one, or correct the address"
        ) from None


def _spread(ray: Any, work: Chunked[Any], root: Path, most: int, resources: dict[str, int], report: Report) -> Any:
    """Makes the missing chunks on at most `most` actors and returns the figures.

    An actor is given a chunk once it runs: Ray may have no place for it, least of all for the one that replaces a lost one.
    """
    chunks = work.chunks()
    left = work.missing(chunks)
    done, lost = len(chunks) - len(left), 0
    job = work.job.model_dump_json()
    maker = ray.remote(StageFunction).options(**resources)
    holds: dict[Any, str | None] = {}
    idle: list[Any] = []
    awaited: dict[Any, tuple[Any, Chunk | None]] = {}  # result → the actor, and its chunk; None: it starts

    def start() -> None:
        actor = maker.remote(job, str(root))
        holds[actor] = None
        awaited[actor.ready.remote()] = actor, None

    def hand_out(actor: Any) -> None:
        if not left:
            idle.append(actor)
            return
        chunk = next_chunk(left, holds[actor])
        left.remove(chunk)
        holds[actor] = chunk.member
        awaited[actor.make.remote(chunk.member, chunk.start)] = actor, chunk

    for _ in range(min(most, len(left))):
        start()
    while done < len(chunks):
        for result in ray.wait(list(awaited), timeout=POLL_SECONDS)[0]:
            actor, chunk = awaited.pop(result)
            try:
                ray.get(result)
            except ray.exceptions.RayActorError:  # it died, or does not answer: its node may be gone
                lost += 1
                if lost > LOST_AT_MOST:
                    raise
                del holds[actor]
                ray.kill(actor)  # should it come back
                start()
                if chunk is not None:
                    left.append(chunk)
                    if idle:
                        free = taker(chunk, idle, holds)
                        idle.remove(free)
                        hand_out(free)
                continue
            done += chunk is not None
            hand_out(actor)
        report(done, len(chunks), {})
    # actors that hold no member may never have run
    ends = [actor.end.remote() for actor, member in holds.items() if member is not None]
    for end in ends:
        with suppress(ray.exceptions.RayActorError):  # it was lost when everything was made
            ray.get(end)
    for actor in holds:
        ray.kill(actor)
    return work.figures()
