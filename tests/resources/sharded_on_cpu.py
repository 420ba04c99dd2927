"""A training worker whose ranks use FSDP or DeepSpeed on a CPU: `python -m tests.resources.sharded_on_cpu JOB.json RESULT.json`.

accelerate leaves both out where there is no GPU, so its state is told otherwise. All else is what a worker runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from accelerate import state
from accelerate.utils import DistributedType
from coepg_dagster.resources import worker

from coepg_dagster.jobs import TrainingJob, read_job
from coepg_dagster.training.launch import accelerate_config, is_rank


def use_plugins() -> None:
    """From now on accelerate's state takes the plugins that its launcher asked for."""
    partial, whole = state.PartialState.__init__, state.AcceleratorState.__init__

    def begin(self: Any, *args: Any, **settings: Any) -> None:
        partial(self, *args, **settings)
        if "ACCELERATE_USE_DEEPSPEED" in os.environ:
            import deepspeed

            if not deepspeed.comm.is_initialized():
                deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)

    def take(self: Any, *args: Any, fsdp_plugin: Any = None, deepspeed_plugin: Any = None, **settings: Any) -> None:
        new = not state.AcceleratorState._shared_state
        whole(self, *args, fsdp_plugin=fsdp_plugin, deepspeed_plugin=deepspeed_plugin, **settings)
        if not new:
            return
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        if deepspeed_plugin is not None:
            self.distributed_type, self.deepspeed_plugins = DistributedType.DEEPSPEED, deepspeed_plugin
            deepspeed_plugin.set_mixed_precision("no")
            deepspeed_plugin.select(_from_accelerator_state=True)
        state.PartialState._shared_state["distributed_type"] = self.distributed_type

    state.PartialState.__init__, state.AcceleratorState.__init__ = begin, take


def main(job_file: str, result_file: str) -> None:
    if is_rank():
        use_plugins()
        worker.main(Path(job_file), Path(result_file))
        print(f"spread by {state.PartialState().distributed_type.name}")
        return
    job = read_job(Path(job_file))
    assert isinstance(job, TrainingJob)
    config = job.scratch / "accelerate.yaml"
    config.write_text(yaml.safe_dump(accelerate_config(job.placement, on_gpu=False)))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    arguments = ["-m", "tests.resources.sharded_on_cpu", job_file, result_file]
    sys.exit(subprocess.run([*command, *arguments], env=environment).returncode)


if __name__ == "__main__":
    main(*sys.argv[1:])
