"""From a member of a pool to the engine that answers for it, opened and closed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from coepg_dagster.experiment import Member
from coepg_dagster.inference.endpoint import endpoint_of
from coepg_dagster.inference.engine import Engine
from coepg_dagster.inference.openai_engine import OpenAIEngine
from coepg_dagster.inference.processing import load_processor
from coepg_dagster.inference.vllm_server import vllm_server
from coepg_dagster.inference.weights import local_folder, local_version
from coepg_dagster.jobs import Job


@contextmanager
def opened(member: Member, job: Job, *, logs: Path, share: int = 1, beside_training: bool = False) -> Iterator[Engine]:
    """The engine of a pool member, for a job; its settings read back, closed at the end with every process that it started.

    Args:
        logs: folder of the servers' logs.
        share: how many local models are open at once on the device.
        beside_training: this process trains, so that vLLM must be a server of its own.
    """
    kind = job.models.engine_of(member)
    if kind == "openai":
        engine = OpenAIEngine(endpoint_of(member), load_processor(member.checkpoint))
        with closing(engine):
            engine.check()
            yield engine
    elif kind == "transformers":
        from coepg_dagster.inference.transformers_engine import TransformersEngine

        yield TransformersEngine(member.model, dtype=job.models.dtype, device=job.device, batch_size=job.batch_size)
    else:
        # a folder, so that vLLM, perhaps another interpreter's, finds the very files that the version names
        folder, weights = str(local_folder(member.model)), local_version(member.model)
        common: Any = {"dtype": job.models.dtype, "device": job.device, "serving": job.serving}
        common |= {"share": share, "weights": weights}
        if beside_training or job.serving.python is not None:
            logs.mkdir(parents=True, exist_ok=True)
            log = logs / f"vllm-{os.getpid()}-{len(list(logs.glob('vllm-*')))}.log"
            with vllm_server(folder, log=log, **common) as served:
                yield served
        else:
            from coepg_dagster.inference.vllm_engine import VllmEngine

            with closing(VllmEngine(folder, **common)) as own:
                yield own
