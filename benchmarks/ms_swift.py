"""Runs GRPO of MS-SWIFT, in an environment of its own, with the settings of ours: its data, its command line, its process.

The reward and the clock are plug-ins, which run in that environment: `benchmarks.swift_reward`, `benchmarks.swift_samples`.
Imported there too, so with other versions of transformers and TRL: nothing of theirs is imported here.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from coepg_dagster.experiment.training import Grpo
from coepg_dagster.inference.agents import planner_inputs

ROOT: Final = Path(__file__).parents[1]
RUN: Final = "COEPG_BENCH_RUN"
"""Environment variable by which `grpo_samples` tells its plug-in, as JSON, what to measure."""
_PACKAGES: Final = ("ms-swift", "trl", "transformers", "torch")


def versions(python: Path) -> dict[str, str]:
    """The packages of MS-SWIFT's environment."""
    script = f"import importlib.metadata as m; print(*(m.version(p) for p in {_PACKAGES}))"
    printed = subprocess.run(
        [str(python), "-c", script], env=_environment(), capture_output=True, text=True, check=True
    )
    return dict(zip(_PACKAGES, printed.stdout.split(), strict=True))


def write_data(steps: pa.Table, folder: Path) -> Path:
    """Writes the prompts as MS-SWIFT reads them: chats with an image tag, and the step's id for the reward."""
    file = folder / "train.jsonl"
    with file.open("w") as out:
        for i, (task, screenshot) in enumerate(
            zip(planner_inputs(steps), steps["screenshot"].to_pylist(), strict=True)
        ):
            image = folder / f"{i}.png"
            image.write_bytes(screenshot)
            text = task.messages("compact")[0]["content"][1]["text"]
            row = {
                "messages": [{"role": "user", "content": f"<image>{text}"}],
                "images": [str(image)],
                "step_id": task.step_id,
            }
            out.write(json.dumps(row) + "\n")
    return file


def settings_of(planner: str, config: Grpo, seed: int, *, on_gpu: bool) -> dict[str, Any]:
    """MS-SWIFT's settings for ours, those of `grpo_vs_trl.train_plain`: full fine-tuning without vision tower, no vLLM."""
    return {
        "rlhf_type": "grpo",
        "model": planner,
        "model_type": "qwen2_5_vl",
        "template": "qwen2_5_vl",
        "system": "",
        "load_from_cache_file": "false",
        "split_dataset_ratio": 0,
        "use_vllm": "false",
        "num_generations": config.group_size,
        "per_device_train_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.prompts_per_step * config.group_size // config.micro_batch_size,
        "max_steps": config.max_steps,
        "learning_rate": config.learning_rate,
        "beta": config.kl_beta,
        "epsilon": config.clip_epsilon,
        "max_completion_length": config.max_plan_tokens,
        "temperature": config.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "torch_dtype": "float32",
        # for float32 weights MS-SWIFT would choose fp16 passes
        "fp16": "false",
        "bf16": str(on_gpu).lower(),
        "attn_impl": "sdpa",
        "tuner_type": "full",
        "freeze_vit": "true",
        "gradient_checkpointing": str(on_gpu).lower(),
        "max_length": 4096,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "seed": seed,
    }


def train(
    python: Path,
    settings: Mapping[str, Any],
    steps: pa.Table,
    folder: Path,
    plugin: str,
    environment: Mapping[str, str],
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Trains on `steps` in `folder`, with the plug-in benchmarks/PLUGIN.py; `options` are those of `subprocess.run`."""
    places = {
        "dataset": write_data(steps, folder),
        "external_plugins": ROOT / "benchmarks" / f"{plugin}.py",
        "output_dir": folder / "out",
    }
    arguments = [text for name, value in {**settings, **places}.items() for text in (f"--{name}", str(value))]
    command: Sequence[str] = [str(python), "-m", "swift.cli.main", "rlhf", *arguments]
    return subprocess.run(command, env={**_environment(), **environment}, cwd=folder, check=False, **options)


def use_ids(checkpoint: Path | str) -> None:
    """In MS-SWIFT's process: takes ids of vision tokens from a checkpoint. It knows those of Qwen's published vocabulary only."""
    from swift.template.templates.qwen import Qwen2VLTemplate

    ids = json.loads((Path(checkpoint) / "config.json").read_text())
    Qwen2VLTemplate.image_token_id, Qwen2VLTemplate.video_token_id = ids["image_token_id"], ids["video_token_id"]


def _environment() -> dict[str, str]:
    """This process's without its packages: those of MS-SWIFT come with its Python."""
    return os.environ | {"PYTHONPATH": str(ROOT), "USE_HF": "1"}
