"""What vLLM in process answers, as JSON: `VLLM_PYTHON -m tests.inference.vllm_answers CHECKPOINT`."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import asdict
from typing import Any

from PIL import Image

from coepg_dagster.experiment.models import Serving
from coepg_dagster.inference.engine import Engine, Failure, Request, Sampling
from coepg_dagster.prompts import grounder_messages

PLANS = ("click OK", "click Search", "é漢 <|image_pad|>", "click Name", "a long description of the Next button")


def requests() -> list[Request]:
    """Two screenshots, several plans each, those of a screenshot together."""
    images = [Image.linear_gradient("L").resize((84, 112)).convert("RGB"), Image.new("RGB", (224, 168), (200, 10, 10))]
    return [Request(image, grounder_messages(plan, "compact")) for image in images for plan in PLANS]


def answers(engine: Engine) -> dict[str, list[list[dict[str, Any]]]]:
    """Greedy and sampled answers of an engine."""
    queries = requests()
    generated = {
        "greedy": engine.generate(queries, Sampling(8)),
        "hot": engine.generate(queries[:1], Sampling(4, temperature=1.5, samples=3, seed=1)),
    }
    return {
        kind: [[{"failure": a.reason} if isinstance(a, Failure) else asdict(a) for a in row] for row in rows]
        for kind, rows in generated.items()
    }


if __name__ == "__main__":
    from coepg_dagster.inference.vllm_engine import VllmEngine

    with contextlib.closing(
        VllmEngine(
            sys.argv[1],
            dtype="float32",
            device="cpu",
            serving=Serving(),
            share=1,
            weights="w",
            enforce_eager=True,
            block_size=32,
        )
    ) as engine:
        print("ANSWERS" + json.dumps(answers(engine), default=lambda raw: list(raw)))
