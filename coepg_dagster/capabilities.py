"""Which engine can do what, so that an impossible combination is refused where it is written, with what to write instead.

Only what was tried stands as possible. Light: the experiment file is read with it, before any model library is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

EngineName = Literal["transformers", "vllm", "openai"]
Need = Literal["training", "own checkpoints"]

REFUSED: Final[Mapping[tuple[EngineName, Need], str]] = {
    # the base models are the start of every π_k and ϕ_k
    ("vllm", "training"): "vLLM does not train: write the checkpoint as plain text, its answers still come from "
    "`models.engine`",
    (
        "openai",
        "training",
    ): "an endpoint gives no weights: give a local folder or a hub name, and list the endpoint in a pool",
    # π'_k and ϕ_k in pools and evaluation
    (
        "openai",
        "own checkpoints",
    ): "an endpoint cannot serve weights that a run has just made: use `vllm`, which serves them "
    "locally, or `transformers`",
}
"""Why not, and what to do. All else works: open models of pools and grounders that reward may be of any engine."""


def require(engine: EngineName, need: Need) -> None:
    """Raises ValueError with the reason and the alternative where `engine` cannot do what is needed."""
    if (engine, need) in REFUSED:
        raise ValueError(f"engine `{engine}` and {need}: {REFUSED[engine, need]}")
