"""Checkpoints of true size with random weights, for machines without downloads; and made screenshots and rows.

A size is `3B` or `7B` (the configurations of Qwen2.5-VL, from inference/architecture.py), `qwen3-4B` (that of Qwen3-VL),
`tiny` (a copy of the source) or `qwen3-tiny` (Qwen3-VL with the source's width); the tiny ones test a benchmark's code on a CPU.
Tokenizer and processor come from a local checkpoint: its tokens get the first ids, and the rest of the vocabulary is filled,
so that every id that a random model writes is a token.
"""

from __future__ import annotations

import fcntl
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from transformers import (
    AutoProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from coepg_dagster.artifacts import DATASET, STEPS, write_steps, write_table
from coepg_dagster.experiment.models import Models
from coepg_dagster.inference.architecture import KNOWN, Architecture
from coepg_dagster.prompts import planner_answer
from coepg_dagster.steps import DATASET_SCHEMA, STEP_SCHEMA, row_id, short_hash

Size = Literal["3B", "7B", "qwen3-4B", "tiny", "qwen3-tiny"]
SIZES: Final[tuple[Size, ...]] = get_args(Size)
TINY: Final[tuple[Size, ...]] = ("tiny", "qwen3-tiny")
SOURCE: Final = Path(__file__).parents[1] / "models" / "base-planner"
SCREENS: Final[dict[Size, tuple[int, int]]] = {
    "3B": (1288, 728),
    "7B": (1288, 728),
    "qwen3-4B": (1280, 704),
    "tiny": (168, 224),
    "qwen3-tiny": (160, 224),
}
"""Screenshots (width, height) that pass the image processor unresized, as it resizes 1280 x 720."""
MAX_VISUAL_TOKENS: Final = 1280
MODELS: Final[dict[str, tuple[Any, Any]]] = {
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
}


def config_of(size: Size, source: Path = SOURCE, layers: int | None = None) -> dict[str, Any]:
    """The config.json of a size, with the special tokens of `source`; with fewer `layers` of the language model if given."""
    small: dict[str, Any] = json.loads((source / "config.json").read_text())
    if size == "tiny":
        return small
    name = "Qwen/Qwen3-VL-4B-Instruct" if size.startswith("qwen3") else f"Qwen/Qwen2.5-VL-{size}-Instruct"
    known = json.loads(json.dumps(KNOWN[name]))
    ids = {key: value for key, value in small.items() if key.endswith("token_id")}
    known["text_config"] |= {k: small["text_config"][k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if size == "qwen3-tiny":
        same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        known["text_config"] |= {k: small["text_config"][k] for k in (*same, "vocab_size", "max_position_embeddings")}
        known["text_config"] |= {"head_dim": 32}
        known["text_config"]["rope_parameters"]["mrope_section"] = [6, 5, 5]
        known["vision_config"] |= {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4}
        known["vision_config"] |= {"out_hidden_size": small["text_config"]["hidden_size"]}
        known["vision_config"] |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    if layers is not None:
        known["text_config"]["num_hidden_layers"] = layers
    return {**known, **ids, "architectures": [MODELS[known["model_type"]][1].__name__]}


def architecture_of(size: Size) -> Architecture:
    return Architecture.of(config_of(size))


def make_model(
    size: Size, device: str, dtype: torch.dtype, source: Path = SOURCE, seed: int = 0, layers: int | None = None
) -> Any:
    """A model with random weights, made on the device itself: a few seconds for 3B on a GPU."""
    settings = config_of(size, source, layers)
    configured, kind = MODELS[settings.pop("model_type")]
    config = configured(**settings)
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = kind(config)
    finally:
        torch.set_default_dtype(before)
    stops, pad = config.text_config.eos_token_id, config.text_config.pad_token_id
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = stops, pad
    return model


def placed(size: Size) -> tuple[str, torch.dtype]:
    """Device and precision of a size: tiny ones run on one thread of a CPU, in float32, as all do without a GPU."""
    if size in TINY:
        torch.set_num_threads(1)
    return ("cuda", torch.bfloat16) if size not in TINY and torch.cuda.is_available() else ("cpu", torch.float32)


def write_processor(folder: Path, size: Size, source: Path = SOURCE) -> Any:
    """Tokenizer and processor of a size under `folder`, loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "processor_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder / name)
    if size != "tiny":
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        vocabulary = tokenizer["model"]["vocab"]
        for index in range(len(vocabulary), config_of(size, source)["text_config"]["vocab_size"]):
            vocabulary[f"<{index}>"] = index
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        (folder / "processor_config.json").write_text(json.dumps(_processor_settings(folder, size)))
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 128000}))
    processor = AutoProcessor.from_pretrained(folder)
    processor.tokenizer.padding_side = "left"
    return processor


def _processor_settings(folder: Path, size: Size) -> dict[str, Any]:
    """The processor's settings in `folder`, for the screenshots and the family of a size."""
    settings: dict[str, Any] = json.loads((folder / "processor_config.json").read_text())
    side = 28
    if size.startswith("qwen3"):
        side = 32
        settings["processor_class"] = "Qwen3VLProcessor"
        settings["video_processor"]["video_processor_type"] = "Qwen3VLVideoProcessor"
    for part in ("image_processor", "video_processor"):
        settings[part]["patch_size"] = side // settings[part]["merge_size"]
        settings[part]["size"] = {"shortest_edge": 4 * side**2, "longest_edge": MAX_VISUAL_TOKENS * side**2}
    return settings


def make_checkpoint(
    folder: Path,
    size: Size,
    *,
    device: str,
    source: Path = SOURCE,
    seed: int = 0,
    layers: int | None = None,
    sharp: bool = False,
) -> Path:
    """Writes a checkpoint of a size in bf16 (3B: 7.5 GB; a folder in memory, /dev/shm, is quickest); returns the folder.

    An existing folder is kept; several processes may call this at once.

    Args:
        sharp: peaked token distributions, as in a trained model; sampling from flat ones costs more.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=folder.parent))
    if size == "tiny":
        shutil.copytree(source, partial, dirs_exist_ok=True)
    else:
        write_processor(partial, size, source)
        model = make_model(size, device, torch.bfloat16, source, seed, layers)
        if sharp:
            model.model.language_model.norm.weight.data *= 8
        model.save_pretrained(partial, safe_serialization=True, max_shard_size="20GB")
    try:
        partial.rename(folder)
    except OSError:  # another process was first
        shutil.rmtree(partial)
    return folder


@contextmanager
def shared_checkpoint(size: Size, device: str) -> Iterator[Path]:
    """A checkpoint of a size, in memory if it has room there; the last of the processes that use it at once deletes it."""
    if size == "tiny":
        yield SOURCE
        return
    needed, memory = 2 * architecture_of(size).parameters, Path("/dev/shm")  # noqa: S108
    folder = memory / f"coepg-{size}"
    if not folder.exists() and (not memory.is_dir() or shutil.disk_usage(memory).free < 1.2 * needed):
        folder = Path(tempfile.gettempdir()) / f"coepg-{size}"
    with folder.with_suffix(".used").open("a") as used:
        fcntl.flock(used, fcntl.LOCK_SH)
        with folder.with_suffix(".made").open("a") as made:
            fcntl.flock(made, fcntl.LOCK_EX)
            make_checkpoint(folder, size, device=device)
            if device == "cuda":
                torch.cuda.empty_cache()
        try:
            yield folder
        finally:
            with suppress(BlockingIOError):  # another process uses it
                fcntl.flock(used, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)


_WORDS: Final = ("click", "press", "the", "blue", "button", "below", "field", "search", "second", "row", "menu", "near")


def plan_of(draw: np.random.Generator, words: int) -> str:
    """A made plan of `words` words from the tokenizer's vocabulary."""
    return " ".join(_WORDS[i] for i in draw.integers(len(_WORDS), size=words))


def made_answers(texts: Sequence[str], step_ids: Sequence[str]) -> list[str]:
    """Answers of a planner that pass the gate of made steps, in place of `texts`: the same for the same text and step."""
    draws = [np.random.default_rng(zlib.crc32(f"{pair}".encode())) for pair in zip(texts, step_ids, strict=True)]
    return [planner_answer(plan_of(draw, int(draw.integers(20, 60))), "CLICK", "") for draw in draws]


def models_of(checkpoint: str, **more: Any) -> Models:
    """The same checkpoint in every role; `more` replaces fields."""
    same: dict[str, Any] = {
        "base_planner": checkpoint,
        "base_grounder": checkpoint,
        "planners": {"open": checkpoint},
        "verifiers": {"open": checkpoint},
        "prompts": "compact",
    }
    return Models(**same | more)


def tables(size: Size, rows: int, *, seed: int = 0, screens: int = 64) -> tuple[pa.Table, pa.Table]:
    """(steps, dataset) of `rows` made training steps, one plan each, of 20 to 60 words; screenshots repeat.

    Goals, histories and plans differ in length, as real ones do.
    """
    draw = np.random.default_rng(seed)
    width, height = SCREENS[size]
    pictures = [_picture(draw, width, height) for _ in range(min(screens, rows))]
    steps, dataset = [], []
    for i in range(rows):
        x, y = float(draw.integers(width - 60)), float(draw.integers(height - 30))
        box = [x, y, x + 60, y + 30]
        steps.append(
            {
                "step_id": f"s{i:05}",
                "split": "train",
                "episode_id": f"e{i // 8}",
                "step_index": i % 8,
                "family": "made",
                "seed": None,
                "goal": plan_of(draw, int(draw.integers(10, 30))),
                "history": [plan_of(draw, 6) for _ in range(int(draw.integers(6)))],
                "screenshot": pictures[i % len(pictures)],
                "width": width,
                "height": height,
                "boxes": [box],
                "action_type": "CLICK",
                "value": "",
            }
        )
        plan, screen = plan_of(draw, int(draw.integers(20, 60))), short_hash(steps[-1]["screenshot"])
        dataset.append(
            {
                "step_id": f"s{i:05}",
                "plan": plan,
                "action_type": "CLICK",
                "value": "",
                "box": box,
                "candidate_id": f"s{i:05}#made#0",
                "planner": "made",
                "made_in": 0,
                "hits": 1,
                "answered": 1,
                "score": 1.0,
                "row_id": row_id(f"s{i:05}#made#0", plan, screen, 0),
                "screenshot_hash": screen,
            }
        )
    return pa.Table.from_pylist(steps, STEP_SCHEMA), pa.Table.from_pylist(dataset, DATASET_SCHEMA)


def inputs(folder: Path, steps: pa.Table, dataset: pa.Table) -> dict[str, Any]:
    """The fields of a training job that reads these tables and works in `folder`, without validation during training."""
    for name in ("out", "scratch"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    write_steps(steps, folder / STEPS, ["train"])
    write_table(dataset, folder / DATASET)
    places = {
        "out": folder / "out",
        "scratch": folder / "scratch",
        "steps": folder / STEPS,
        "dataset": folder / DATASET,
    }
    return {**places, "train_split": "train", "validation_split": "", "seed": 13}


def _picture(draw: np.random.Generator, width: int, height: int) -> bytes:
    """A PNG of coloured rectangles, about as hard to decode as a page."""
    import io

    pixels = np.full((height, width, 3), 245, np.uint8)
    for _ in range(120):
        x, y = int(draw.integers(width - 20)), int(draw.integers(height - 10))
        w, h = int(draw.integers(10, 200)), int(draw.integers(6, 60))
        pixels[y : y + h, x : x + w] = draw.integers(0, 256, 3)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()


def matmul_rate(device: str = "cuda", size: int = 8192, repetitions: int = 30) -> float:
    """Measured rate of bf16 matrix products of random data, FLOP/s: the median of `repetitions`.

    On a CPU: of small float32 ones, only to test a benchmark's code.
    """
    import statistics
    import time

    on_gpu = device.startswith("cuda")
    size, dtype = (size, torch.bfloat16) if on_gpu else (512, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(repetitions + 5):
        if on_gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            a @ b
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1000)
        else:
            started = time.perf_counter()
            a @ b
            times.append(time.perf_counter() - started)
    return 2.0 * size**3 / statistics.median(times[5:])
