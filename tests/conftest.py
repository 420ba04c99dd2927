"""Fixtures that several folders share: labelled steps, and tiny checkpoints of the real classes."""

from __future__ import annotations

import gc
import io
import json
import os
import runpy
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads slow tiny models, and wait for each other on few cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pyarrow as pa
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings
from PIL import Image, ImageDraw

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.training import Sft
from coepg_dagster.steps import DATASET_SCHEMA, STEP_SCHEMA, short_hash
from tests.jobs import quiet, sft_job

# The same examples on every machine, and no failure because a machine is busy.
settings.register_profile("coepg", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("coepg")

STARTUP = Path(__file__).parent / "startup"
if str(STARTUP) not in os.environ.get("PYTHONPATH", ""):  # else it is a process of xdist, and was started with it
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(STARTUP), os.environ.get("PYTHONPATH")]))
    runpy.run_path(str(STARTUP / "sitecustomize.py"))

gc.disable()  # until all tests are imported and collected: that stays to the end
# A script that runs `make test` in the background has interrupts ignored: what tests start, to interrupt it, would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes files stay whole; one process has the deployment, one the server that loops fork from."""
    from xdist.scheduler import LoadScopeScheduling

    signs = {"deployment: Deployment": "deployment", "Forked(": "loops", "import MAKERS": "loops"}
    together = {
        file: group
        for file in Path(__file__).parent.rglob("test_*.py")
        for sign, group in signs.items()
        if sign in file.read_text()
    }

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return together.get(config.rootpath / file, file)

    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests start first."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """What was collected stays to the end: the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """`folder`, made by the first test of any worker that asks for it."""
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            draft = folder.with_name(f"{folder.name}-draft")
            make(draft)
            draft.rename(folder)
    return folder


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run of pytest have in common."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


WIDTH, HEIGHT = 84, 112
"""Small screens that the tiny models see as they are: 12 visual tokens."""

WORDS = ("OK", "Cancel", "Search", "Next", "Name", "Colour")


def png(colour: tuple[int, int, int] = (255, 255, 255), box: tuple[int, int, int, int] | None = None) -> bytes:
    """A screen of one colour with one dark rectangle."""
    image = Image.new("RGB", (WIDTH, HEIGHT), colour)
    if box:
        ImageDraw.Draw(image).rectangle(box, fill=(20, 20, 120))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def step(step_id: str, **change: Any) -> dict[str, Any]:
    """A row of STEP_SCHEMA."""
    return {
        "step_id": step_id,
        "split": "train",
        "episode_id": step_id,
        "step_index": 0,
        "family": "click-button",
        "seed": 1,
        "goal": "Click OK",
        "history": [],
        "screenshot": b"",
        "width": WIDTH,
        "height": HEIGHT,
        "boxes": [[10.0, 10.0, 20.0, 20.0]],
        "action_type": "CLICK",
        "value": "",
    } | change


def step_table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), STEP_SCHEMA)


@pytest.fixture(scope="session")
def steps() -> pa.Table:
    """Six training steps: four clicks, one value, and one step without a target."""
    rows = []
    for i, word in enumerate(WORDS):
        x, y = 10 + 20 * (i % 3), 20 + 40 * (i // 3)
        kind, value = [("CLICK", ""), ("CLICK", ""), ("TYPE", "red"), ("CLICK", ""), ("CLICK", ""), ("CLICK", "")][i]
        rows.append(
            step(
                f"s{i}",
                goal=f"Click {word}" if kind == "CLICK" else f"Enter red into {word}",
                screenshot=png((255, 255 - 20 * i, 200), (x, y, x + 16, y + 16)),
                boxes=[] if i == 5 else [[float(x), float(y), float(x + 16), float(y + 16)]],
                action_type=kind,
                value=value,
            )
        )
    return step_table(*rows)


@pytest.fixture(scope="session")
def dataset(steps: pa.Table) -> pa.Table:
    """D_0 of `steps`: one plan each."""
    rows = []
    for row in steps.to_pylist():
        rows.append(
            {
                "step_id": row["step_id"],
                "plan": f"click {row['goal'].split()[-1]}",
                "action_type": row["action_type"],
                "value": row["value"],
                "box": row["boxes"][0] if row["boxes"] else None,
                "candidate_id": f"{row['step_id']}#open#0",
                "planner": "open",
                "made_in": 0,
                "hits": 1,
                "answered": 1,
                "score": 1.0,
                "row_id": f"r-{row['step_id']}",
                "screenshot_hash": short_hash(row["screenshot"]),
            }
        )
    return pa.Table.from_pylist(rows, DATASET_SCHEMA)


CORPUS = [f"Click {word}. Enter red into {word}." for word in WORDS]


@pytest.fixture(scope="session")
def random_checkpoint(shared: Path) -> Callable[[int], Path]:
    """Checkpoints with random weights, by seed; made once each."""

    def checkpoint(seed: int) -> Path:
        def make(folder: Path) -> None:
            import torch

            from coepg_dagster.sandbox.pretraining import tiny_models, tokenizer

            tiny_models.save(*tiny_models.build("small", tokenizer.fit(CORPUS), seed), folder, torch.float32)

        return made_once(shared / f"random-{seed}", make)

    return checkpoint


@pytest.fixture(scope="session")
def qwen3_checkpoint(random_checkpoint: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-VL with random weights, over the same vocabulary."""
    import torch
    from transformers import (
        AutoTokenizer,
        Qwen2VLImageProcessor,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    tokenizer = AutoTokenizer.from_pretrained(random_checkpoint(0))
    small = json.loads((random_checkpoint(0) / "config.json").read_text())
    text, size = small["text_config"], {"shortest_edge": 4 * 32 * 32, "longest_edge": 64 * 32 * 32}
    patches: dict[str, Any] = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "size": size}
    config = Qwen3VLConfig(
        text_config={
            **{name: text[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")},
            **{name: text[name] for name in ("num_key_value_heads", "eos_token_id", "bos_token_id", "pad_token_id")},
            "num_hidden_layers": 3,
            "head_dim": 24,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]},
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "out_hidden_size": text["hidden_size"],
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        **{name: small[name] for name in ("image_token_id", "video_token_id", "vision_start_token_id")},
        vision_end_token_id=small["vision_end_token_id"],
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("random") / "qwen3"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = text["eos_token_id"]
    model.generation_config.pad_token_id = text["pad_token_id"]
    model.save_pretrained(folder)
    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**patches),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**patches),
        chat_template=(random_checkpoint(0) / "chat_template.jinja").read_text(),
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", params=["Qwen2.5-VL", "Qwen3-VL"])
def either_checkpoint(
    request: pytest.FixtureRequest, random_checkpoint: Callable[[int], Path], qwen3_checkpoint: Path
) -> Path:
    """One of each family."""
    return qwen3_checkpoint if request.param == "Qwen3-VL" else random_checkpoint(0)


@pytest.fixture(scope="session")
def models(random_checkpoint: Callable[[int], Path]) -> Models:
    """The part of an experiment that says how checkpoints are asked; its paths are random checkpoints."""
    one = str(random_checkpoint(0))
    return Models(
        base_planner=one,
        base_grounder=one,
        planners={"open": one},
        verifiers={"open": one},
        prompts="compact",
        dtype="float32",
    )


@pytest.fixture(scope="session")
def trained(
    random_checkpoint: Callable[[int], Path],
    models: Models,
    steps: pa.Table,
    dataset: pa.Table,
    shared: Path,
) -> Callable[[str, int], Path]:
    """A planner or grounder that learnt the answers of `dataset` by heart, by role and seed; made once each."""

    def checkpoint(role: Any, seed: int) -> Path:
        def make(out: Path) -> None:
            from coepg_dagster.training.sft import train_sft

            config = Sft(epochs=LESSONS, batch_size=6, micro_batch_size=6, learning_rate=4e-3, freeze_vision=False)
            data = (dataset, steps, models)
            train_sft(sft_job(out, data, role, random_checkpoint(seed), config, seed=seed), quiet)

        return made_once(shared / f"{role}-{seed}", make)

    return checkpoint


LESSONS = 30
