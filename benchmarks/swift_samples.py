"""A plug-in of MS-SWIFT for `benchmarks.grpo_samples`: the obvious reward of made plans, and the seconds of each step.

Runs in MS-SWIFT's environment. Steps are measured by the same callback of the trainer as in the other ways, from one step's end
to the next one's. Vision tokens are suppressed in completions, as in the other ways: a random model writes them, and MS-SWIFT
would take them for images.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swift.callbacks import callbacks_map
from swift.rewards import ORM, orms

from benchmarks import ms_swift, plain
from benchmarks.made_rewards import Steps, made_reward, rows_of
from coepg_dagster.inference.processing import vision_token_ids

ASKED = json.loads(os.environ[ms_swift.RUN])
ms_swift.use_ids(ASKED["checkpoint"])


class Clock(Steps):
    def on_train_begin(self, *args: Any, **more: Any) -> None:
        tokens = more["processing_class"]
        suppressed = vision_token_ids(getattr(tokens, "tokenizer", tokens))
        more["model"].generation_config.suppress_tokens = suppressed
        super().on_train_begin(*args, **more)


CLOCK = Clock(Path(ASKED["file"]), ASKED["about"])


class MadePlans(ORM):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        steps, _ = rows_of(ASKED["size"], ASKED["rows"])
        self._made = made_reward(plain.PlainReward, ASKED["checkpoint"], ASKED["graders"], ASKED["size"], steps, CLOCK)

    def __call__(self, completions: Sequence[str], step_id: Sequence[str], **_: Any) -> list[float]:
        return self._made.score(completions, step_id)


orms["made_plans"] = MadePlans
callbacks_map["clock"] = lambda args, trainer: CLOCK
