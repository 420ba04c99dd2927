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

from benchmarks import ms_swift, tiny
from benchmarks.plain import PlainGrounder, PlainReward

ms_swift.use_ids(tiny.PLANNER)


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
