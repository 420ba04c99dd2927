"""Grounder calls per second of a Qwen2.5-VL-3B-sized model in vLLM: screenshots first and grouped, against plans first.

    python -m benchmarks.verifier_gpu              # one H100 or H200, 2 to 4 minutes, most of them vLLM's start
    python -m benchmarks.verifier_gpu --as-engines # vLLM's own settings, as in the loop: the language model compiled
    python -m benchmarks.verifier_gpu --compiled   # language model and vision tower compiled: a minute or two more
    python -m benchmarks.verifier_gpu --kept       # screenshots as embeddings too, made before, not by the tower
    python -m benchmarks.verifier_gpu --quick      # a tiny model on the CPU, to test the code; writes nothing

The baseline is written anew after each repetition, so that a run that is cut short leaves a partial result. It holds what each
of these commands measured on such a device, by name, under `variants`; its value is that of the fastest.

Each screenshot (1288 × 728) gets 8 plans, with answers of 12 tokens, as in GRPO and the verifier pool. Both ways run in
one engine, with the same flags, number of requests in flight and prefix caching, in turns:

- ours: image before plan, the plans of a screenshot one after another (`inference/order.py`), and the screenshot named by a
  hash that is computed once, so that it is preprocessed once, ahead of the GPU's work (the first pass below, whose time is
  given: images per second of one front end), and encoded and prefilled once;
- against: plan before image, requests in any order, images handed over as they are. vLLM's own cache still spares it
  preprocessing an image twice.

With `--kept`, at the end, also ours with the embeddings of each screenshot in place of its pixels, as if its tower's had been
kept: the rate without the vision tower. They are random here.

Before each repetition the prefix cache and the GPU's cache of encoded images are emptied; preprocessed images stay.

The arithmetic (`of_arithmetic` = ours / that): a screenshot costs one pass of its patches through the vision tower, one
prefill of the tokens up to its end, and for each plan the prefill of the plan's tokens and of the answer's; 2 FLOP for each
weight of a matrix and token, plus attention, at the rate at which this card multiplies bfloat16 matrices of the model's own
shapes, measured in this process.

Needs vLLM and torch. Weights are random: the cost is real, the answers mean nothing.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import baseline
from coepg_dagster.experiment.models import Serving
from coepg_dagster.inference.order import grouped
from coepg_dagster.inference.vllm_server import vllm_settings

MODEL = Path(__file__).parents[1] / "models" / "base-grounder"
"""Its tokenizer and processor files; the weights are not read."""
NAME = "verifier_gpu"


@dataclass(frozen=True)
class Workload:
    width: int
    height: int
    screenshots: int
    plans: int = 8
    plan_tokens: int = 30  # the plan and the template around it
    answer_tokens: int = 12


@dataclass(frozen=True)
class Shape:
    """The sizes that decide a model's cost; by default those of Qwen2.5-VL-3B."""

    hidden: int = 2048
    layers: int = 36
    heads: int = 16
    kv_heads: int = 2
    inner: int = 11008
    vocabulary: int = 151936
    vision_hidden: int = 1280
    vision_layers: int = 32
    vision_inner: int = 3420
    full_attention: tuple[int, ...] = (7, 15, 23, 31)
    window: int = 112  # pixels

    def write(self, folder: Path) -> None:
        """A checkpoint folder without weights."""
        for file in MODEL.iterdir():
            if file.name != "model.safetensors" and file.suffix in (".json", ".jinja"):
                shutil.copy(file, folder)
        config = json.loads((MODEL / "config.json").read_text())
        half = self.hidden // self.heads // 2
        config["text_config"] |= {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "layer_types": ["full_attention"] * self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.inner,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 32768,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "mrope_section": [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8],
            },
        }
        config["vision_config"] |= {
            "hidden_size": self.vision_hidden,
            "depth": self.vision_layers,
            "num_heads": 16,
            "intermediate_size": self.vision_inner,
            "out_hidden_size": self.hidden,
            "fullatt_block_indexes": list(self.full_attention),
            "window_size": self.window,
        }
        (folder / "config.json").write_text(json.dumps(config))
        processor = json.loads((MODEL / "processor_config.json").read_text())
        for part in ("image_processor", "video_processor"):
            processor[part]["size"] = {"shortest_edge": 3136, "longest_edge": 1280 * 28 * 28}
        (folder / "processor_config.json").write_text(json.dumps(processor))

    def flop(self, work: Workload) -> dict[str, float]:
        """FLOP of one screenshot and its plans, by part."""
        visual = work.width * work.height // 28**2
        patches, prefix = 4 * visual, visual + 5
        suffix = work.plans * (work.plan_tokens + work.answer_tokens)
        head = self.hidden // self.heads
        attention_weights = self.hidden * head * (2 * self.heads + 2 * self.kv_heads)
        weights = self.layers * (attention_weights + 3 * self.hidden * self.inner)
        tower = self.vision_layers * (4 * self.vision_hidden**2 + 3 * self.vision_hidden * self.vision_inner)
        merger = 4 * self.vision_hidden * (4 * self.vision_hidden + self.hidden)
        per_window = (self.window // 14) ** 2
        full = len(self.full_attention)
        seen = [patches] * full + [per_window] * (self.vision_layers - full)
        return {
            "vision": 2 * tower * patches
            + 2 * merger * visual
            + sum(4 * patches * n * self.vision_hidden for n in seen),
            "prefix": 2 * weights * prefix + self.layers * 2 * prefix**2 * self.hidden,
            "plans": 2 * weights * suffix + self.layers * 4 * suffix * prefix * self.hidden,
            "vocabulary": 2 * self.hidden * self.vocabulary * work.plans * work.answer_tokens,
        }


_SIZES = [64, 128, 256, 384, 512]
COMPILATION: dict[str, dict[str, Any]] = {
    "graphs": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": _SIZES},
    "as the engines": {},
    "compiled": {
        "mode": 3,
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "compile_mm_encoder": True,
        "cudagraph_capture_sizes": _SIZES,
    },
}
"""How vLLM is set up: CUDA graphs alone; as it decides itself, the vision tower not compiled; all compiled."""

TINY = Shape(128, 2, 4, 2, 256, 1400, 64, 2, 128, (1,))


class Bench:
    """One engine and one workload in two orders."""

    def __init__(
        self, shape: Shape, work: Workload, *, quick: bool, compiled: str, kept: bool, log: Callable[[str], None]
    ) -> None:
        from transformers import AutoTokenizer

        self.work, self.log = work, log
        folder = Path(tempfile.mkdtemp(prefix="verifier-"))
        # until the process ends: vLLM's front end loads the processor with the first request, not with the engine
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        shape.write(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.vision = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"])
        self.start, self.end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
        self._width = shape.hidden
        self.llm = self._engine(folder, quick, compiled, kept)
        draw = random.Random(0)
        self.images = [_noise(work.width, work.height, seed) for seed in range(work.screenshots)]
        # not measured: in the loop this is done once per screenshot, when it is stored
        self.names = [hashlib.sha256(image.tobytes()).hexdigest()[:32] for image in self.images]
        texts = [[draw.randrange(300, 1300) for _ in range(work.plan_tokens - 3)] for _ in range(2000)]
        self.requests = [(s, texts[draw.randrange(2000)]) for s in range(work.screenshots) for _ in range(work.plans)]
        self.shuffled = draw.sample(self.requests, len(self.requests))

    def _engine(self, folder: Path, quick: bool, compiled: str, kept: bool) -> Any:
        from vllm import LLM

        serving = Serving(memory=0.75, context=4096)
        settings = vllm_settings(str(folder), "float32" if quick else "bfloat16", serving, share=1)
        settings |= {"load_format": "dummy", "max_num_seqs": 64 if quick else 512}
        if kept:
            settings |= {"enable_mm_embeds": True}
        if quick:
            return LLM(**settings, enforce_eager=True)
        # what a first start would spend a minute on: a largest image to guess memory, and trying out kernels
        settings |= {"skip_mm_profiling": True, "enable_flashinfer_autotune": False}
        self.flags = settings | ({"compilation_config": COMPILATION[compiled]} if COMPILATION[compiled] else {})
        return LLM(**self.flags)

    def run(self, prompts: list[dict[str, Any]], tokens: int) -> dict[str, float]:
        """Sends all prompts at once; returns seconds (of which `adding` to add the requests), calls/s and hit rate."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0,
            min_tokens=tokens,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=0,
            logit_bias=dict.fromkeys(self.vision, -100.0),
            detokenize=False,
        )
        self.llm.reset_prefix_cache()
        self.llm.llm_engine.engine_core.reset_encoder_cache()
        cpu, began = time.process_time(), time.perf_counter()
        self.llm.enqueue(prompts, sampling, use_tqdm=False)
        added = time.perf_counter() - began
        outputs = self.llm.wait_for_completion(use_tqdm=False)
        seconds = time.perf_counter() - began
        cpu = time.process_time() - cpu
        assert len(outputs) == len(prompts)
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
        queried = sum(len(output.prompt_token_ids) for output in outputs)
        return {
            "seconds": round(seconds, 4),
            "adding": round(added, 4),
            "cpu": round(cpu, 4),
            "calls_per_second": round(len(prompts) / seconds, 3),
            "hit_rate": round(sum(output.num_cached_tokens or 0 for output in outputs) / queried, 4),
        }

    def ours(self) -> dict[str, float]:
        order = grouped([s for s, _ in self.requests])
        return self.run([self._image_first(*self.requests[i]) for i in order], self.work.answer_tokens)

    def kept(self) -> dict[str, float]:
        """Ours with embeddings in place of pixels."""
        order = grouped([s for s, _ in self.requests])
        prompts = []
        for s, plan in (self.requests[i] for i in order):
            image = {"image_embeds": self._embeddings[s], "image_grid_thw": self._grid}
            more = {"multi_modal_data": {"image": image}, "multi_modal_uuids": {"image": [f"kept-{self.names[s]}"]}}
            prompts.append(self._image_first(s, plan) | more)
        return self.run(prompts, self.work.answer_tokens)

    @functools.cached_property
    def _grid(self) -> Any:
        import torch

        return torch.tensor([[1, self.work.height // 14, self.work.width // 14]])

    @functools.cached_property
    def _embeddings(self) -> list[Any]:
        """Of each screenshot, (visual tokens, width)."""
        import torch

        tokens = self.work.width * self.work.height // 28**2
        return [0.02 * torch.randn(tokens, self._width, dtype=torch.bfloat16) for _ in self.images]

    def against(self) -> dict[str, float]:
        return self.run([self._plan_first(s, plan) for s, plan in self.shuffled], self.work.answer_tokens)

    def images_only(self) -> dict[str, float]:
        """Vision tower and prefix alone: one call per screenshot, one token."""
        return self.run([self._image_first(s, self.requests[0][1][:1]) for s in range(self.work.screenshots)], 1)

    def text_only(self) -> dict[str, float]:
        """The prefix alone, as text of the same length."""
        length = self.work.width * self.work.height // 28**2 + 5
        draw = random.Random(1)
        prompts = [
            {"prompt_token_ids": [draw.randrange(300, 1300) for _ in range(length)]}
            for _ in range(self.work.screenshots)
        ]
        return self.run(prompts, 1)

    def _image_first(self, s: int, plan: list[int]) -> dict[str, Any]:
        return {
            "prompt_token_ids": [self.start, *self.vision, *plan, self.end, self.start],
            "multi_modal_data": {"image": [self.images[s]]},
            "multi_modal_uuids": {"image": [self.names[s]]},
        }

    def _plan_first(self, s: int, plan: list[int]) -> dict[str, Any]:
        return {
            "prompt_token_ids": [self.start, *plan, *self.vision, self.end, self.start],
            "multi_modal_data": {"image": [self.images[s]]},
        }


def _noise(width: int, height: int, seed: int) -> Any:
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def measured_rate(shapes: list[tuple[int, int, int]], seconds: float) -> float:
    """FLOP/s at which this device multiplies matrices (m × k) (k × n), one after another, for `seconds`."""
    import torch

    gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    pairs = [
        (torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype))
        for m, k, n in shapes
    ]
    wait = torch.cuda.synchronize if gpu else (lambda: None)
    flop = sum(2 * m * k * n for m, k, n in shapes)

    def rounds() -> Iterator[float]:
        while True:
            wait()
            began = time.perf_counter()
            for _ in range(4):
                for a, b in pairs:
                    a @ b
            wait()
            yield 4 * flop / (time.perf_counter() - began)

    measured, end = [], time.perf_counter() + seconds
    for rate in rounds():
        measured.append(rate)
        if time.perf_counter() > end and len(measured) > 2:
            return baseline.median(measured[1:])
    raise AssertionError("the rounds never end by themselves")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model on the CPU; writes nothing")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--as-engines", action="store_true", help="vLLM's own settings: the language model compiled")
    how.add_argument("--compiled", action="store_true", help="torch.compile, the vision tower's layers too")
    parser.add_argument("--kept", action="store_true", help="screenshots as embeddings too, without the vision tower")
    parser.add_argument("--screenshots", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING" if arguments.quick else "INFO")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # greedy: nothing to compile a kernel for
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if arguments.quick:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        # else a C++ compiler builds small functions of vLLM's sampler
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    folder = Path(tempfile.mkdtemp()) if arguments.quick else baseline.FOLDER
    log = baseline.Log(NAME, folder, keep=True)
    compiled = "compiled" if arguments.compiled else "as the engines" if arguments.as_engines else "graphs"
    variant = compiled + ", with embeddings" * arguments.kept
    log(f"{baseline.command_line()}: {variant}")
    shape, work = Shape(), Workload(1288, 728, arguments.screenshots)
    if arguments.quick:
        shape, work = TINY, Workload(672, 448, 4)  # over 128 tokens, the size of a block on a CPU
    began = time.perf_counter()
    bench = Bench(shape, work, quick=arguments.quick, compiled=compiled, kept=arguments.kept, log=log)
    log(f"engine ready after {time.perf_counter() - began:.0f} s")

    first = bench.images_only()
    log(f"first pass, each screenshot preprocessed, encoded and prefilled once: {first}")
    bench.against()  # preprocesses the images in its form too, and warms every kernel
    warm = bench.ours()
    log(f"warm-up of both, not counted: {warm}")
    profile = {"images_only": bench.images_only(), "text_only": bench.text_only(), "first_pass": first}
    log(f"parts of ours: {profile}")
    rates = measured_rates(shape, quick=arguments.quick)
    runs: dict[str, list[dict[str, float]]] = {"ours": [], "against": []}
    for repetition in range(arguments.repetitions):
        for name, run in (("ours", bench.ours), ("against", bench.against)):
            runs[name].append(run())
            log(f"repetition {repetition}, {name}: {runs[name][-1]}")
        report(bench, shape, runs, rates, profile | {"warm_up": warm}, log, "" if arguments.quick else variant)
    if arguments.kept:
        log(f"warm-up of kept embeddings, not counted: {bench.kept()}")
        runs["kept"] = []
        for repetition in range(arguments.repetitions):
            runs["kept"].append(bench.kept())
            log(f"repetition {repetition}, kept embeddings: {runs['kept'][-1]}")
        report(bench, shape, runs, rates, profile | {"warm_up": warm}, log, "" if arguments.quick else variant)
    if arguments.quick:
        assert _median(runs, "ours", "hit_rate") > 0.5 > _median(runs, "against", "hit_rate")
        log("quick: nothing written")
        return
    log(f"written: {baseline.FOLDER / NAME}.json, {time.perf_counter() - began:.0f} s in all")


def measured_rates(shape: Shape, *, quick: bool) -> dict[str, float]:
    """FLOP/s of this device, for matrices of the model's shapes and for squares of 8192."""
    rows = 2048 if quick else 16384
    of_model = [
        (rows, shape.hidden, 2 * shape.inner),
        (rows, shape.inner, shape.hidden),
        (rows, shape.vision_hidden, 2 * shape.vision_inner),
        (rows, shape.vision_inner, shape.vision_hidden),
    ]
    return {
        "model": measured_rate(of_model, 0.2 if quick else 2.0),
        "square": measured_rate([(8192 >> 4 * quick,) * 3], 0.2 if quick else 1.0),
    }


def report(
    bench: Bench,
    shape: Shape,
    runs: dict[str, list[dict[str, float]]],
    rates: dict[str, float],
    profile: dict[str, dict[str, float]],
    log: baseline.Log,
    variant: str,
) -> None:
    """Logs the results of the repetitions so far, and writes them to the baseline as `variant`; empty: writes nothing."""
    work, flop = bench.work, shape.flop(bench.work)
    possible = rates["model"] / sum(flop.values()) * work.plans
    middle = functools.partial(_median, runs)
    value, against = middle("ours", "calls_per_second"), middle("against", "calls_per_second")
    log(
        f"ours {value:.1f} calls/s, hit rate {middle('ours', 'hit_rate'):.3f}; against {against:.1f} calls/s, hit rate "
        f"{middle('against', 'hit_rate'):.3f}; ratio {value / against:.2f}"
    )
    log(
        f"arithmetic: {sum(flop.values()) / 1e12:.2f} TFLOP a screenshot ({ {k: round(v / 1e12, 2) for k, v in flop.items()} }), "
        f"{rates['model'] / 1e12:.0f} TFLOP/s in the model's shapes, {rates['square'] / 1e12:.0f} in squares of 8192: "
        f"{possible:.1f} calls/s are possible, ours is {value / possible:.2f} of that"
    )
    if kept := runs.get("kept"):
        log(f"kept embeddings: {middle('kept', 'calls_per_second'):.1f} calls/s, {len(kept)} repetitions")
    if not variant:
        return
    parts = {
        "adding requests (CPU, overlaps)": middle("ours", "adding"),
        "vision tower and prefix": profile["images_only"]["seconds"],
        "prefix as text": profile["text_only"]["seconds"],
        "all": middle("ours", "seconds"),
    }
    facts: dict[str, Any] = {
        "command": baseline.command_line(),
        "commit": baseline.commit(),
        "value": value,
        "against": against,
        "ratio": round(value / against, 3),
        "repetitions": runs,
        **({"kept_embeddings": middle("kept", "calls_per_second")} if kept else {}),
        "hit_rate": middle("ours", "hit_rate"),
        "hit_rate_against": middle("against", "hit_rate"),
        "of_arithmetic": round(value / possible, 4),
        "of_arithmetic_at_square_rate": round(value / (rates["square"] / sum(flop.values()) * work.plans), 4),
        "arithmetic": {
            "TFLOP per screenshot": {name: round(part / 1e12, 4) for name, part in flop.items()},
            "TFLOP/s, matrices of the model's shapes": round(rates["model"] / 1e12, 1),
            "TFLOP/s, squares of 8192": round(rates["square"] / 1e12, 1),
            "calls per second possible": round(possible, 2),
        },
        "seconds_of_parts": parts,
        "profile": profile,
        "workload": vars(work),
        "flags": {name: setting for name, setting in bench.flags.items() if name != "model"},
    }
    add(facts, variant, baseline.FOLDER, baseline.device_name(), log.path)


def add(facts: dict[str, Any], variant: str, folder: Path, device: str, log: Path) -> None:
    """Puts the facts of a variant into the baseline, beside the others of this device; its value is that of the fastest."""
    with baseline.alone(folder):
        variants = baseline.earlier(NAME, folder, device).get("variants", {}) | {variant: facts}
        fastest = max(variants, key=lambda name: float(variants[name]["value"]))
        of_run = {"log": log, "folder": folder, "device": device, "unit": "grounder calls per second"}
        baseline.write(NAME, **of_run, fastest=fastest, variants=variants, **variants[fastest])


def _median(runs: dict[str, list[dict[str, float]]], name: str, figure: str) -> float:
    return baseline.median([run[figure] for run in runs[name]])


if __name__ == "__main__":
    main()
