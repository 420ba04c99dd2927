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
import shutil
import tempfile
from pathlib import Path

import pyarrow as pa

from benchmarks import baseline, ms_swift, tiny
from benchmarks.grpo_vs_trl import CONFIG, SEED, conclude, ours

NAME = "grpo_vs_swift"
REPETITIONS = 2


def swift(python: Path, steps: pa.Table, log: baseline.Log) -> list[dict[str, float]]:
    """Runs MS-SWIFT; one entry per optimizer step: when its rewards were done, and their mean."""
    folder = Path(tempfile.mkdtemp(prefix="coepg-bench-"))
    settings = ms_swift.settings_of(tiny.PLANNER, CONFIG, SEED, on_gpu=False) | {"reward_funcs": "three_grounders"}
    times = folder / "times.jsonl"
    environment = {"CUDA_VISIBLE_DEVICES": "", tiny.TIMES: str(times), tiny.PROMPTS: str(steps.num_rows)}
    try:
        done = ms_swift.train(
            python, settings, steps, folder, "swift_reward", environment, capture_output=True, text=True, timeout=1800
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
    theirs = ms_swift.versions(python)
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
