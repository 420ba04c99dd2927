"""Which engine can do what, so that an impossible combination is refused where it is written, with what to write instead.

Only what was tried stands as possible. Light: the experiment file is read with it, before any model library is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

EngineName = Literal["transformers", "vllm", "openai"]
Need = Literal["training", "own checkpoints", "an open model", "rewards in training"]

TABLE: Final[Mapping[Need, Mapping[EngineName, str | None]]] = {
    # the base models are the start of every π_k and ϕ_k
    "training": {
        "transformers": None,
        "vllm": "vLLM does not train: write the checkpoint as plain text, its answers still come from `models.engine`",
        "openai": "an endpoint hands out no weights: give a local folder or a hub name, and list the endpoint in a pool",
    },
    # π'_k and ϕ_k in pools and evaluation
    "own checkpoints": {
        "transformers": None,
        "vllm": None,
        "openai": "an endpoint cannot serve weights that a run has just made: use `vllm`, which serves them locally, or "
        "`transformers`",
    },
    "an open model": {"transformers": None, "vllm": None, "openai": None},
    "rewards in training": {"transformers": None, "vllm": None, "openai": None},  # vLLM as a server of its own
}
"""Need → engine → None where it works, or else why not and what to do."""


def require(engine: EngineName, need: Need) -> None:
    """Raises ValueError with the reason and the alternative where `engine` cannot do what is needed."""
    why = TABLE[need][engine]
    if why is not None:
        raise ValueError(f"engine `{engine}` and {need}: {why}")
