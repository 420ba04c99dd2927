"""How training is spread over the processes of one machine: `accelerate launch` with DDP, DeepSpeed ZeRO or FSDP.

The job is the same in every process; only environment variables differ. Dagster's worker starts `accelerate launch`. Signals
reach its whole process group, and it returns the exit code of the launcher.
`python -m coepg_dagster.training.launch` is `accelerate launch` that also leaves the reason when a process was killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from coepg_dagster.experiment import Grpo, Sft
from coepg_dagster.jobs import Placement
from coepg_dagster.processes import ended, leave_words, started_here
from coepg_dagster.progress import Ended


def is_rank() -> bool:
    """Whether this process was started by `accelerate launch`."""
    return "RANK" in os.environ


def is_main() -> bool:
    """Whether this process writes results, tables and logs, which exist only once."""
    return os.environ.get("RANK", "0") == "0"


def refuse_sharded(config: Sft | Grpo, placement: Placement) -> None:
    """Raises Ended if no process holds the whole model, and `config` has settings that need one."""
    if not placement.sharded:
        return
    if config.lora is not None:
        raise Ended(
            f"`lora` with strategy {placement.strategy}: adapters cannot be merged into weights that no process holds whole. "
            "Use `ddp` or `zero2`: with LoRA gradients and optimizer take little memory"
        )
    if isinstance(config, Grpo) and config.validate_every is not None:
        raise Ended(
            f"grpo.validate_every with strategy {placement.strategy}: no process can answer alone; use `ddp` or `zero2`"
        )


def see_one_gpu() -> None:
    """Makes only the first visible GPU visible to this process; with several, Trainer would spread a batch over them by threads.

    Must be called before CUDA is used.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def accumulation(rows: int, micro: int, what: str) -> int:
    """The number of passes of `micro` rows in each process for an optimizer step of `rows` rows over all processes.

    Raises Ended if `rows` cannot be divided so; `what` (`sft` or `grpo`) begins the message.
    """
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if rows % (micro * processes):
        raise Ended(
            f"{what}: {rows} rows per optimizer step cannot be shared by {processes} processes with micro_batch_size "
            f"{micro}: lower micro_batch_size, or change `training_processes`, so that their product divides {rows}"
        )
    return rows // (micro * processes)


def accelerate_config(placement: Placement, *, on_gpu: bool) -> dict[str, Any]:
    """The configuration file of `accelerate launch`."""
    kinds = {"ddp": "MULTI_GPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp": "FSDP"}
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": kinds[placement.strategy],
        "num_machines": 1,
        "num_processes": placement.processes,
        "machine_rank": 0,
        "main_process_port": 0,  # any free one, on this machine only
        "mixed_precision": "bf16" if on_gpu else "no",
        "debug": False,
    }
    if placement.strategy in ("zero2", "zero3"):
        stage = int(placement.strategy[-1])
        config["deepspeed_config"] = {
            "zero_stage": stage,
            "gradient_accumulation_steps": "auto",
            "offload_optimizer_device": "none",
            "offload_param_device": "none",
            "zero3_init_flag": False,
            **({"zero3_save_16bit_model": True} if stage == 3 else {}),
        }
    if placement.strategy == "fsdp":
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": False,
        }
    return config


def launch_ranks(placement: Placement, scratch: Path, module: str, arguments: list[str], *, on_gpu: bool) -> int:
    """Runs `module` in the processes of `placement`. Returns the exit code of `accelerate launch`."""
    if placement.strategy != "ddp" and not on_gpu:  # accelerate would silently ignore it
        raise Ended(f"strategy {placement.strategy} needs GPUs: use `ddp` on a CPU")
    config = scratch / "accelerate.yaml"
    config.write_text(yaml.safe_dump(accelerate_config(placement, on_gpu=on_gpu)))

    def wait_on(number: int, frame: Any) -> None:
        """Does nothing: `accelerate launch` got the signal too, passes it to the ranks and waits for them."""

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, wait_on)
    command = [sys.executable, "-m", "coepg_dagster.training.launch", "--config_file", str(config), "-m", module]
    return subprocess.Popen([*command, *arguments], env=os.environ | started_here()).wait()


def main() -> None:
    """Runs `accelerate launch`, and names a process that a signal killed: it leaves no reason, and others fail at its socket."""
    from accelerate.commands import launch as accelerate
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        accelerate.main()
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            how = f"process {rank} of the training {ended(failure.exitcode)}"
            print(how, file=sys.stderr)
            # SIGTERM is how the launcher ends the others
            if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
                leave_words(how, instead=True)
        sys.exit(1)  # the traceback is that of the failed process, in the log above


if __name__ == "__main__":
    main()
