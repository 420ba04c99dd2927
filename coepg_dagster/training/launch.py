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

from coepg_dagster.experiment.training import GrounderRl, Grpo, PolicyTraining, Sft
from coepg_dagster.jobs import Placement
from coepg_dagster.processes import ended, leave_words, started_here
from coepg_dagster.progress import Ended


def is_rank() -> bool:
    """Whether this process was started by `accelerate launch`."""
    return "RANK" in os.environ


def is_main() -> bool:
    """Whether this process writes results, tables and logs, which exist only once."""
    return os.environ.get("RANK", "0") == "0"


def section_of(config: Sft | PolicyTraining) -> str:
    """The section of the experiment file that holds these settings."""
    return "sft" if isinstance(config, Sft) else "grounder_rl" if isinstance(config, GrounderRl) else "grpo"


def refusals(config: Sft | PolicyTraining, placement: Placement, resource: str) -> list[str]:
    """Why training with `config` cannot run in `placement`, each with the nearest settings that can; empty: it can.

    Needs no model and no GPU: `coepg plan`, `coepg evolve`, the steps of a run and the processes of training all ask here.

    Args:
        resource: of the placement, as messages name it: `sft` or `grpo_cdrem`.
    """
    part, why = section_of(config), list[str]()
    if placement.sharded and config.lora is not None:
        why.append(
            f"{part}: `lora` with strategy {placement.strategy}: adapters cannot be merged into weights that no process holds "
            f"whole. Use `ddp` or `zero2`: with LoRA gradients and optimizer take little memory (`strategy: zero2` of {resource})"
        )
    if placement.sharded and isinstance(config, Grpo) and config.validate_every is not None:
        why.append(
            f"grpo.validate_every with strategy {placement.strategy}: no process can answer alone; use `ddp` or `zero2` "
            f"(`strategy: zero2` of {resource})"
        )
    if isinstance(config, PolicyTraining) and placement.spread:
        again = {"max_num_gen_batches": config.max_num_gen_batches > 1, "replay": config.replay is not None}
        again["environment.episodes"] = isinstance(config, Grpo) and config.plays is not None
        for name in (name for name, chosen in again.items() if chosen):
            # passes of whole episodes may be empty, and DeepSpeed needs a row in each
            other = placement.strategy != "ddp" if name == "environment.episodes" else placement.sharded
            remedies = ["`training_processes: 1`"] * (placement.processes > 1) + ["`strategy: ddp`"] * other
            if remedies:
                why.append(
                    f"{part}.{name} decides by what was sampled first what is sampled next, in one process that holds the whole "
                    f"model: set {' and '.join(remedies)} of {resource}"
                )
    prompts = 0 if isinstance(config, Sft) or not config.terms else config.prompts_per_step
    if prompts % placement.processes:
        fewer = next(n for n in range(placement.processes - 1, 0, -1) if prompts % n == 0 and divides(config, n))
        why.append(
            f"{part}.terms: a term may compare the answers of a group, and {prompts} prompts are not shared whole by "
            f"{placement.processes} processes: set `training_processes: {fewer}` of {resource}, or another `prompts_per_step`"
        )
    if not divides(config, placement.processes):
        rows, of = _rows(config)
        why.append(
            f"{part}: the {rows} {of} of an optimizer step cannot be shared by {placement.processes} processes in passes of "
            f"micro_batch_size {config.micro_batch_size}: set {_nearest(config, placement.processes, resource)}"
        )
    return why


def refuse(config: Sft | PolicyTraining, placement: Placement) -> None:
    """Raises Ended with all `refusals`."""
    if why := refusals(config, placement, "sft" if isinstance(config, Sft) else "grpo_cdrem"):
        raise Ended("\n".join(why))


def _rows(config: Sft | PolicyTraining) -> tuple[int, str]:
    """The rows of an optimizer step over all processes, and what they are."""
    if isinstance(config, Sft):
        return config.batch_size, "rows (batch_size)"
    rollouts = config.prompts_per_step * config.group_size
    return rollouts, f"rollouts (prompts_per_step {config.prompts_per_step} x group_size {config.group_size})"


def divides(config: Sft | PolicyTraining, processes: int) -> bool:
    """Whether every process gets as many passes as each other, each of as many rows."""
    rows, _ = _rows(config)
    micro = config.micro_batch_size
    if isinstance(config, PolicyTraining):
        micro = config.pass_size(packs=config.attention != "flash_attention_2", processes=processes)
    return rows % (micro * processes) == 0


def _nearest(config: Sft | PolicyTraining, processes: int, resource: str) -> str:
    """The nearest settings with which `config` can be shared: of the processes, of the passes, of the batch."""
    part = section_of(config)
    # one process takes any batch: its passes divide it
    fewer = next(n for n in range(processes - 1, 0, -1) if divides(config, n))
    found = [f"`training_processes: {fewer}` of {resource} (the same batch)"]
    for name in ("micro_batch_size", "batch_size" if isinstance(config, Sft) else "prompts_per_step"):
        now: int = getattr(config, name)
        for value in sorted(
            range(1, 2 * max(now, processes * config.micro_batch_size) + 1), key=lambda n: abs(n - now)
        ):
            other = config.model_copy(update={name: value})
            rows, _ = _rows(other)
            if rows % other.micro_batch_size == 0 and divides(other, processes):
                found.append(f"`{part}.{name}: {value}` in the experiment file")
                break
    return ", or ".join(found)


def hardware_refusals(placement: Placement, gpus: int, resource: str) -> list[str]:
    """Why `placement` cannot run on a machine with so many GPUs (0: on its CPU); empty: it can."""
    if not gpus:
        needs_gpu = placement.strategy != "ddp"  # accelerate would silently ignore it
        return [f"strategy {placement.strategy} needs GPUs: use `ddp` on a CPU ({resource})"] if needs_gpu else []
    if placement.processes > gpus:
        return [
            f"{resource}: {placement.processes} processes need one GPU each, and there are {gpus}: set "
            f"`training_processes: {gpus}`"
        ]
    return []


def see_one_gpu() -> None:
    """Makes only the first visible GPU visible to this process; with several, Trainer would spread a batch over them by threads.

    Must be called before CUDA is used.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def accumulation(rows: int, micro: int, processes: int) -> int:
    """The number of passes of `micro` rows in each process for an optimizer step of `rows` rows, which `divides` allows."""
    passes, left = divmod(rows, micro * processes)
    if left:
        raise Ended(
            f"{rows} rows of an optimizer step cannot be shared by {processes} processes in passes of {micro}: the attention in "
            "use takes no groups of rollouts; set `attention: sdpa`"
        )
    return passes


def visible_gpus() -> int:
    """The GPUs that this process sees."""
    import torch

    return torch.cuda.device_count()


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
    if why := hardware_refusals(placement, visible_gpus() if on_gpu else 0, "this resource"):
        raise Ended("\n".join(why))
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
