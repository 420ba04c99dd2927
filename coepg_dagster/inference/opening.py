"""Opens and closes the engine of a pool member."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from coepg_dagster.experiment.models import Member
from coepg_dagster.inference.endpoint import endpoint_of
from coepg_dagster.inference.engine import Engine
from coepg_dagster.inference.openai_engine import OpenAIEngine
from coepg_dagster.inference.processing import load_processor
from coepg_dagster.inference.vllm_server import vllm_server
from coepg_dagster.inference.weights import local_folder, local_version
from coepg_dagster.jobs import Job


@contextmanager
def opened(member: Member, job: Job, *, logs: Path, share: int = 1, beside_training: bool = False) -> Iterator[Engine]:
    """The engine of a pool member, for a job. Its settings are checked; at the end it is closed with all its processes.

    Raises EngineChanged where the model behind an endpoint was changed meanwhile.

    Args:
        logs: folder of the servers' logs.
        share: number of local models that are open at once on the device.
        beside_training: whether this process trains, so that vLLM must run in another process.
    """
    kind = job.models.engine_of(member)
    if kind == "openai":
        engine = OpenAIEngine(endpoint_of(member), load_processor(member.checkpoint))
        with closing(engine):
            engine.check()
            yield engine
            if not beside_training:  # there each rollout has the version that answered
                engine.check_again()
    elif kind == "transformers":
        from coepg_dagster.inference.transformers_engine import TransformersEngine

        yield TransformersEngine(member.model, dtype=job.models.dtype, device=job.device, batch_size=job.batch_size)
    else:
        # a folder, not a name, so that vLLM, perhaps of another interpreter, loads the files that the version stands for
        folder, weights = str(local_folder(member.model)), local_version(member.model)
        common: Any = {"dtype": job.models.dtype, "device": job.device, "serving": job.serving}
        common |= {"share": share, "weights": weights}
        if beside_training or job.serving.python is not None:
            logs.mkdir(parents=True, exist_ok=True)
            log = logs / f"vllm-{os.getpid()}-{len(list(logs.glob('vllm-*')))}.log"
            with vllm_server(folder, log=log, **common) as server_engine:
                yield server_engine
        else:
            from coepg_dagster.inference.vllm_engine import VllmEngine

            with closing(VllmEngine(folder, **common)) as local_engine:
                yield local_engine
