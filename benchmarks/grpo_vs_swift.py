"""GRPO with a three-grounder reward on the tiny planner: optimizer steps per second, against MS-SWIFT.

The paper trained with MS-SWIFT. It needs other versions of transformers and TRL than ours, and so a separate environment, whose
Python is given (`pip install ms-swift qwen-vl-utils decord msgspec`, and what this package needs):

    python -m benchmarks.grpo_vs_swift --python /tmp/swift/bin/python

Both train on the same prompts with the same batch, optimizer, length and number of steps, without vLLM, on one thread, in
turns. The reward in MS-SWIFT is written the obvious way (`benchmarks.plain`); sampled rollouts differ, so the rewards do too.
A step is the time from one batch of rewards to the next; loading and the first step are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pyarrow as pa

from benchmarks import baseline, tiny
from benchmarks.grpo_vs_trl import CONFIG, SEED, conclude, ours
from coepg_dagster.inference.agents import planner_inputs

NAME = "grpo_vs_swift"
REPETITIONS = 2


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


def swift(python: Path, steps: pa.Table, log: baseline.Log) -> list[dict[str, float]]:
    """Runs MS-SWIFT; one entry per optimizer step: when its rewards were done, and their mean."""
    folder = Path(tempfile.mkdtemp(prefix="coepg-bench-"))
    settings = {
        "rlhf_type": "grpo",
        "model": tiny.PLANNER,
        "model_type": "qwen2_5_vl",
        "template": "qwen2_5_vl",
        "system": "",
        "external_plugins": str(tiny.ROOT / "benchmarks" / "swift_reward.py"),
        "reward_funcs": "three_grounders",
        "dataset": str(write_data(steps, folder)),
        "load_from_cache_file": "false",
        "split_dataset_ratio": 0,
        "use_vllm": "false",
        "num_generations": CONFIG.group_size,
        "per_device_train_batch_size": CONFIG.micro_batch_size,
        "gradient_accumulation_steps": CONFIG.prompts_per_step * CONFIG.group_size // CONFIG.micro_batch_size,
        "max_steps": CONFIG.max_steps,
        "learning_rate": CONFIG.learning_rate,
        "beta": CONFIG.kl_beta,
        "epsilon": CONFIG.clip_epsilon,
        "max_completion_length": CONFIG.max_plan_tokens,
        "temperature": CONFIG.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "torch_dtype": "float32",
        "attn_impl": "sdpa",
        "tuner_type": "full",
        "freeze_vit": "true",
        "gradient_checkpointing": "false",
        "max_length": 2048,
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": "none",
        "seed": SEED,
        "output_dir": str(folder / "out"),
    }
    times = folder / "times.jsonl"
    env = os.environ | {
        "PYTHONPATH": str(tiny.ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "USE_HF": "1",
        tiny.TIMES: str(times),
        tiny.PROMPTS: str(steps.num_rows),
    }
    arguments = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    try:
        done = subprocess.run(
            [str(python), "-m", "swift.cli.main", "rlhf", *arguments],
            env=env,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=1800,
        )
        if done.returncode:
            log(done.stderr[-3000:])
            raise RuntimeError(f"MS-SWIFT ended with code {done.returncode}; the end of its output is in {log.path}")
        return [json.loads(line) for line in times.read_text().splitlines()]
    finally:
        shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, required=True, help="Python of an environment with ms-swift")
    python = parser.parse_args().python
    tiny.one_thread()
    log = baseline.Log(NAME)
    packages = ("ms-swift", "trl", "transformers")
    script = f"import importlib.metadata as m; print(*(m.version(p) for p in {packages}))"
    printed = subprocess.run([str(python), "-c", script], capture_output=True, text=True, check=True)
    theirs = dict(zip(packages, printed.stdout.split(), strict=True))
    log(f"MS-SWIFT's environment: {theirs}")
    steps = tiny.train_steps(CONFIG.prompts_per_step * (CONFIG.max_steps or 1))
    rates: dict[str, list[float]] = {"ours": [], "ms-swift": []}
    for repetition in range(REPETITIONS):
        fast, slow = ours(steps), swift(python, steps, log)
        if {step["rollouts"] for step in slow} != {CONFIG.prompts_per_step * CONFIG.group_size}:
            raise AssertionError(f"MS-SWIFT scored other batches than ours: {slow}")
        rates["ours"].append(fast.steps_per_second)
        rates["ms-swift"].append((len(slow) - 1) / (slow[-1]["time"] - slow[0]["time"]))
        log(json.dumps({"repetition": repetition} | {name: round(r[-1], 4) for name, r in rates.items()}))
        log(f"  mean rewards: ours {fast.rewards}, ms-swift {[step['reward'] for step in slow]}")
    against = "MS-SWIFT's GRPO with the same reward, one call of transformers' generate per completion and grounder"
    conclude(NAME, log, rates, against, versions_of_swift=theirs)


if __name__ == "__main__":
    main()
