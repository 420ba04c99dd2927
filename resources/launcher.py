"""Runs a job in its own process and writes its progress into the run's log.

Dagster Pipes transports the messages. The process leads its own group: when the run is cancelled, the whole group gets a
signal, time to stop, and is killed, so that no grandchild keeps a GPU. If the run's process itself is killed, the worker
notices that its parent is gone and ends its group.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import dagster as dg
from coepg_dagster.resources import worker
from coepg_dagster.resources.messages import Messages
from coepg_dagster.resources.warm import WarmProcess

from coepg_dagster.jobs import Job
from coepg_dagster.processes import GRACE_SECONDS, LAST_WORDS, end_group, ended, started_here, tail, words_left

KEEP_MEMORY: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
"""For glibc: a step of training on a CPU frees its tensors, and allocates as much in the next one. Given back to the system in
between, memory costs a page fault for every 4 KiB: 3 to 11 % of the CPU of the sandbox's SFT, 11 % of its GRPO's."""


def job_environment(threads: int) -> dict[str, str]:
    """The environment of a job: this process's, plus variables that make it repeatable and quick.

    Args:
        threads: CPU threads of the process (for tiny models 1 is mostly fastest).
    """
    return {
        **KEEP_MEMORY,
        **os.environ,
        **started_here(),
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
    }


def run_process(
    context: dg.AssetExecutionContext,
    job: Job,
    root: Path,
    env: Mapping[str, str],
    *,
    timeout_minutes: float,
    grace_seconds: float = GRACE_SECONDS,
    module: str = worker.MODULE,
) -> dict[str, Any]:
    """Runs a job in its own process; returns {"figures", "device", "seconds"}.

    Raises dg.Failure: the reason in the first paragraph, then the end of the job's output.

    Args:
        root: the project, from which relative paths start.
        env: its environment (`job_environment`).
        timeout_minutes: a job that takes longer is ended.
        grace_seconds: how long its processes have after SIGINT, and again after SIGTERM.
        module: run by Python with two arguments, the files of the job and of its result.
    """
    file, result, log, words = (
        job.scratch / name for name in ("job.json", "result.json", "worker.log", "last_words.txt")
    )
    file.write_text(job.model_dump_json())
    for left in (result, words):
        left.unlink(missing_ok=True)
    written = log.stat().st_size if log.exists() else 0  # by earlier attempts
    with dg.open_pipes_session(
        context,
        context_injector=dg.PipesTempFileContextInjector(),
        message_reader=Messages(),
    ) as session:
        process = WarmProcess(
            module,
            [str(file), str(result)],
            env={**env, **session.get_bootstrap_env_vars(), LAST_WORDS: str(words)},
            cwd=root,
            output=log,
        )
        try:
            code: int | None = process.wait(timeout=60 * timeout_minutes)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process, grace_seconds)
    if code != 0:
        if code is None:
            why = (
                f"{context.asset_key.to_user_string()} took more than {timeout_minutes:g} minutes: raise `timeout_minutes` "
                f"of its resource, or see in {log} what hangs\n\n"
            )
        else:
            reason, how = words_left(words), f"the worker {ended(code)}"
            why = f"{reason}\n\n{how}. " if reason else f"{how}\n\n"
        raise dg.Failure(f"{why}The end of {log}:\n{tail(log, start=written)}", allow_retries=False)
    figures: dict[str, Any] = json.loads(result.read_text())
    return figures
