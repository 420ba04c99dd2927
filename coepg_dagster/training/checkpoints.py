"""Checkpoints of a training run: saved at intervals and on a signal, and read by the run that continues it.

A re-run with the same inputs and settings continues from the last complete checkpoint: same step, learning rate, order of the
data, random numbers, optimizer. On a CPU it ends with the same bytes as a run that was never killed. GRPO keeps its rollouts
in memory until they are used up, so checkpoints are made only after that. A checkpoint of which a file was damaged since, its
own or one that the job kept beside it (rollouts, answers, the best weights), is not continued: the one before it is.

Weights are safetensors. transformers writes the states of optimizer, scheduler and random generators with torch, and reads
them with `weights_only`, only from the scratch folder of this job. (DeepSpeed reads its states without `weights_only`: anybody
who can write to the store can run code in a job that continues with ZeRO.)
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, Final

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from coepg_dagster.artifacts import SEAL, checksum, intact, seal, whole
from coepg_dagster.inference.transformers_engine import load_checkpoint
from coepg_dagster.jobs import Placement
from coepg_dagster.progress import Ended

WHOLE: Final = "whole.json"
KEPT: Final = 2
"""Number of checkpoints that are kept: the newest may be incomplete if the machine fails while it is written."""


class Checkpoints(TrainerCallback):  # type: ignore[misc]
    """Saves a trainer's state under `folder` every `save_every` steps (0: never), and on SIGINT or SIGTERM.

    A checkpoint is complete once it holds `whole.json`, which is written after every process has written its part.

    Args:
        every: a checkpoint is possible only after a multiple of this number of steps, which share rollouts in memory.
        beside: folders of sealed files, each named by its step, that the job keeps for itself; and the checkpoint, from 0 on,
            that is the first to need the file of step 0.
    """

    def __init__(
        self, folder: Path, placement: Placement, *, every: int = 1, beside: Mapping[Path, int] = MappingProxyType({})
    ) -> None:
        self.folder, self._strategy, self._between, self._beside = folder, placement.strategy, every, beside
        self._every = -(-placement.save_every // every) * every
        self._signal: int | None = None
        self._stopped_by: str | None = None

    def last(self) -> Path | None:
        """The newest complete checkpoint with the present number of processes and strategy. Removes unsuitable ones."""
        processes = PartialState()
        usable: dict[int, Path] = {}
        if processes.is_main_process:
            until = self._usable_until()
            for folder in self.folder.glob("checkpoint-*"):
                about = _about(folder)
                if (about.get("processes"), about.get("strategy")) == (processes.num_processes, self._strategy):
                    if about["step"] < until:
                        usable[about["step"]] = folder
                    else:
                        print(f"{folder.name} needs a file beside it that is damaged: it is not continued", flush=True)
        [usable] = broadcast_object_list([usable])
        if processes.is_main_process:
            for folder in set(self.folder.glob("checkpoint-*")) - set(usable.values()):
                shutil.rmtree(folder)
        processes.wait_for_everyone()
        return usable[max(usable)] if usable else None

    def _usable_until(self) -> float:
        """The first checkpoint that needs a damaged file of the folders `beside`; infinite if there is none."""
        files = ((file, first) for folder, first in self._beside.items() for file in folder.glob("[0-9]*"))
        damaged = (int(file.stem) + first for file, first in files if file.suffix != SEAL and not intact(file))
        return min(damaged, default=math.inf)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        done = state.global_step >= state.max_steps
        if state.global_step % self._between:
            return control
        if self._every and state.global_step % self._every == 0 and not done:
            control.should_save = True
        number = largest(self._signal or 0, args.device)  # all processes stop at the same step, or none
        if number and not done:
            self._stopped_by = signal.Signals(number).name
            control.should_save = control.should_training_stop = True
        return control

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        processes = PartialState()
        processes.wait_for_everyone()
        if processes.is_main_process:
            folder = self.folder / f"checkpoint-{state.global_step}"
            of = {"processes": processes.num_processes, "strategy": self._strategy}
            with whole(folder / WHOLE) as draft:
                draft.write_text(json.dumps({"step": state.global_step, **of, "files": _checksums(folder)}))
            seal(folder / WHOLE)

    def train(self, trainer: Any) -> None:
        """Trains to the end, from the last checkpoint if there is one. Raises Ended if a signal stops it."""
        last = self.last()
        if last is not None:
            print(f"continues from {last.name}", flush=True)
        with self._listening():
            trainer.train(resume_from_checkpoint=last and str(last))
        if self._stopped_by is not None:
            raise Ended(
                f"{self._stopped_by}: saved at step {trainer.state.global_step} of {trainer.state.max_steps}. "
                "Run the same step again to continue from there"
            )

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """A context in which SIGINT and SIGTERM take effect after the current step; a second signal changes nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def remember(number: int, frame: FrameType | None) -> None:
            self._signal = number

        before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _checksums(folder: Path) -> dict[str, str]:
    """Relative name → checksum of every file of a checkpoint but WHOLE, which names them."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and not file.name.startswith(WHOLE))
    return {str(file.relative_to(folder)): checksum(file) for file in files}


def _about(folder: Path) -> dict[str, Any]:
    """What WHOLE says of a checkpoint; empty where the checkpoint is incomplete or damaged."""
    if not (folder / WHOLE).exists():
        return {}
    if intact(folder / WHOLE):
        about: dict[str, Any] = json.loads((folder / WHOLE).read_text())
        if about["files"] == _checksums(folder):
            return about
    print(f"{folder.name} is damaged: it is not continued", flush=True)
    return {}


class Continues:
    """A mix-in for trainers that loads the weights of a checkpoint by their names in the file, or fails.

    transformers saves a Qwen2.5-VL under other names than the model has in memory. Its Trainer does not find them when it
    continues: it warns, and keeps the weights that training started from.
    """

    model: Any
    is_deepspeed_enabled: bool
    is_fsdp_enabled: bool

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if hasattr(self.model, "peft_config") or self.is_deepspeed_enabled or self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
            return
        stored, _ = load_checkpoint(resume_from_checkpoint, "float32", "cpu")
        self.model.load_state_dict(stored.state_dict())


def largest(number: int, device: torch.device) -> int:
    """The largest of the numbers of all training processes."""
    if PartialState().num_processes == 1:
        return number
    shared = torch.tensor(number, device=device)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
    return int(shared)
