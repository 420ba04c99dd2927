"""A plugin of MS-SWIFT for `benchmarks.grpo_vs_swift`: the three-grounder reward written the obvious way.

Runs in MS-SWIFT's environment. Records when each batch of rewards was done, so that the steps can be timed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swift.rewards import ORM, orms
from swift.template.templates.qwen import Qwen2VLTemplate

from benchmarks import tiny
from benchmarks.plain import PlainGrounder, PlainReward

# MS-SWIFT has the ids of Qwen's published vocabulary only; the tiny models have others, in their config.json
IDS = json.loads((tiny.MODELS / "base-planner" / "config.json").read_text())
Qwen2VLTemplate.image_token_id, Qwen2VLTemplate.video_token_id = IDS["image_token_id"], IDS["video_token_id"]


class ThreeGrounders(ORM):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tiny.one_thread()
        grounders = {name: PlainGrounder(path, tiny.MAX_POINT_TOKENS) for name, path in tiny.GROUNDERS.items()}
        self._reward = PlainReward(grounders, tiny.PRIORS, tiny.train_steps(int(os.environ[tiny.PROMPTS])))

    def __call__(self, completions: Sequence[str], step_id: Sequence[str], **_: Any) -> list[float]:
        rewards = self._reward.score(completions, step_id)
        with Path(os.environ[tiny.TIMES]).open("a") as file:
            mean = sum(rewards) / len(rewards)
            file.write(json.dumps({"time": time.perf_counter(), "rollouts": len(rewards), "reward": mean}) + "\n")
        return rewards


orms["three_grounders"] = ThreeGrounders
