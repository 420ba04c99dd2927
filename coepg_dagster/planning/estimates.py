"""Estimates for an experiment before it runs: memory per GPU and host, disk, steps, tokens, GPU-hours per asset.

Pure arithmetic over model sizes (inference/architecture.py), the experiment, and rates: those of the committed benchmarks
where they exist, else shares of the card's peak rates. Memory is the peak of the tensors; a CUDA context and fragmentation
come on top (`CONTEXT`). Activations are counted from what torch saves for the backward pass, see `language_activations`.
A training pass takes the time of its operations, plus the time in which the host launches each layer's kernels, see
`pass_seconds`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from coepg_dagster.experiment.models import Serving
from coepg_dagster.experiment.training import VISUAL_MEMORY, Grpo, PolicyTraining, Sft
from coepg_dagster.inference.architecture import BACKWARD, FORWARD, KNOWN, Architecture, Flops, flops
from coepg_dagster.jobs import Strategy
from coepg_dagster.refusal import Refusal

GB: Final = 1e9
GIB: Final = 2.0**30
"""What a card's name calls GB."""
DEFAULT_SERVING: Final = Serving()
CONTEXT: Final = 1.5 * GB
"""Bytes per process in addition to its tensors: CUDA context, libraries, fragmentation."""


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet: memory (bytes), rate (FLOP/s of dense bf16 matrix products), bandwidth (bytes/s)."""

    name: str
    memory: float
    rate: float
    bandwidth: float


CARDS: Final[dict[str, Card]] = {
    card.name: card
    for card in (
        Card("RTX-4090-24GB", 24 * GB, 165e12, 1.0e12),
        Card("L40S-48GB", 48 * GB, 362e12, 0.86e12),
        Card("A100-40GB", 42 * GB, 312e12, 1.55e12),
        Card("A100-80GB", 85 * GB, 312e12, 2.0e12),
        Card("H100-80GB", 85 * GB, 989e12, 3.35e12),
        Card("H200-141GB", 150 * GB, 989e12, 4.8e12),
    )
}


TRAIN_SHARE: Final = 0.54
"""Share of the data sheet's rate, measured on the H200 of sft_mfu. With the next three constants, it predicts every training
pass that was timed on an H200 (SFT and GRPO of a 3B, compiled or not, 2 to 8 rows, log-probabilities alone) within 10 %."""
EAGER: Final = 0.54
"""Rate of eager layers as a share of the compiled rate: norms, rotary embeddings and gates move more memory."""
EAGER_LAYER_SECONDS: Final = 1.47e-3
COMPILED_LAYER_SECONDS: Final = 0.95e-3
ADAPTED_LAYER_SECONDS: Final = 2.2e-3
"""Host seconds per layer, however few rows, in a training process on machines with an H200. ADAPTED is an eager layer with LoRA,
from one run of grpo_breakdown while other work used most of the host's cores."""
VLLM_LAYER_SECONDS: Final = 0.5e-3
"""Of a decoding step in vLLM with CUDA graphs, its default, fitted to grpo_breakdown on an H200: the estimate of that step is
1.07 times the measured time, of one without CUDA graphs 0.90 times."""
PREFILL_SHARE: Final = 0.35
DECODE_LAYER_SECONDS: Final = 0.9e-3
"""Measured: 0.87 to 0.93 ms in pools of plans and of points on an H200 (plan_estimates, pool_scaling)."""
IMAGE_SECONDS: Final = 0.04


@dataclass(frozen=True)
class Rates:
    """Rates of a card, or of a CPU, and their basis."""

    train: float  # FLOP/s of compiled layers' forward and backward passes, kernel launches not counted
    prefill: float  # FLOP/s of prompts in generation
    bandwidth: float  # bytes/s
    layer: float  # least seconds of one layer for one token, however few rows (kernel launches)
    image: float  # CPU seconds for one screenshot, in generation
    basis: str
    eager: float = EAGER  # rate of eager layers as a share of `train`
    eager_layer: float = EAGER_LAYER_SECONDS  # these three: seconds of the host for each layer in a training pass
    compiled_layer: float = COMPILED_LAYER_SECONDS
    adapted_layer: float = ADAPTED_LAYER_SECONDS


CPU: Final = Rates(
    train=0.06e12,
    prefill=0.15e12,
    bandwidth=20e9,
    layer=0.3e-3,
    image=0.001,
    basis="measured in an iteration of the sandbox on two cores; slow or busy ones take up to four times as long",
    eager=1.0,
    eager_layer=0.3e-3,
    compiled_layer=0.3e-3,
    adapted_layer=0.4e-3,
)
"""Two quick cores of a CPU, fitted to an iteration of the sandbox. One of `sandbox_middle`, with twice the parameters, takes 1.2
times as long as estimated."""


def layer_passes(model: Architecture, *, recompute: float, freeze_vision: bool) -> float:
    """Layer passes of a training pass: forward, again for the share that is recomputed, backward (counted twice).

    A frozen vision tower counts its forward pass only.
    """
    each = FORWARD + recompute + BACKWARD
    return model.layers * each + model.vision.layers * (FORWARD if freeze_vision else each)


def sequence_flops(model: Architecture, config: Sft | PolicyTraining, example: Example, *, train: bool) -> Flops:
    """Operations of one sequence in training with `config`, or, with `train` False, of its forward pass alone."""
    return flops(
        model,
        image=example.image,
        text=example.text,
        scored=example.answer,
        train=train,
        freeze_vision=config.freeze_vision,
        fixed_weights=config.lora is not None,
    )


def recomputed(one: Flops, share: float, *, freeze_vision: bool, fixed_weights: bool) -> float:
    """Operations of the `share` of forward passes that the backward pass recomputes; `one`: a sequence in training."""
    passes = FORWARD + (1 if fixed_weights else BACKWARD)
    forward = (one.language + (0 if freeze_vision else one.vision)) / passes + one.attention / (FORWARD + BACKWARD)
    return share * forward


def pass_seconds(
    operations: float, layers: float, rates: Rates, *, compiled: bool = False, adapted: bool = False
) -> float:
    """Seconds of a training pass: `operations` (FLOP) on the GPU, and `layers` (see `layer_passes`) launched by the host.

    `adapted`: whether the layers have adapters of LoRA.
    """
    if compiled:
        return operations / rates.train + layers * rates.compiled_layer
    return operations / (rates.eager * rates.train) + layers * (rates.adapted_layer if adapted else rates.eager_layer)


def rates_of(card: Card | None, baselines: Path) -> Rates:
    """The rates of a card, of a CPU without one.

    The training rate of a card is that of sft_mfu.json in `baselines`, scaled to the card, else TRAIN_SHARE.
    """
    if card is None:
        return CPU
    arithmetic = Rates(
        TRAIN_SHARE * card.rate,
        PREFILL_SHARE * card.rate,
        card.bandwidth,
        DECODE_LAYER_SECONDS,
        IMAGE_SECONDS,
        f"arithmetic: {100 * TRAIN_SHARE:.0f} % of {card.name}'s data sheet",
    )
    file = baselines / "sft_mfu.json"
    if not file.exists():
        return arithmetic
    measured = json.loads(file.read_text())
    if measured.get("value") is None:
        return arithmetic
    same = next((c for c in CARDS.values() if c.name.split("-")[0] in measured["device"]), card)
    return replace(
        arithmetic,
        train=_train_rate(measured["configurations"][measured["fastest"]]) * card.rate / same.rate,
        basis=f"measured: {measured['ratio']:.0%} of the matrix rate of {measured['device']} in sft_mfu"
        + ("" if same == card else f", scaled to {card.name}"),
    )


def _train_rate(run: Mapping[str, Any]) -> float:
    """`Rates.train` from a run of sft_mfu: `pass_seconds` solved for the rate."""
    chosen, compiled = run["configuration"], run["configuration"]["kernels"] == "compiled"
    recompute, frozen = chosen["recompute"], chosen["freeze_vision"]
    one = Flops(**{part: 1e12 * of_part for part, of_part in run["tflop_per_sequence"].items()})
    operations = one.total + recomputed(one, recompute, freeze_vision=frozen, fixed_weights=False)
    model = Architecture.of(KNOWN[f"Qwen/Qwen2.5-VL-{chosen['size']}-Instruct"])
    layers = layer_passes(model, recompute=recompute, freeze_vision=frozen)
    launches = layers * (COMPILED_LAYER_SECONDS if compiled else EAGER_LAYER_SECONDS)
    seconds = sum(run["step_seconds"]) / (run["sequences"] / chosen["micro"]) - launches
    if seconds <= 0:
        raise Refusal(
            f"sft_mfu.json: a pass of {chosen['micro']} rows took less than the {launches:.2f} s that the launches of its "
            "kernels are taken to cost; measure with more rows, `python -m benchmarks.sft_mfu`"
        )
    return float(chosen["micro"] * operations / seconds / (1 if compiled else EAGER))


@dataclass(frozen=True)
class Memory:
    """Bytes per GPU."""

    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    cache: float = 0.0  # keys and values
    vllm: float = 0.0  # the vLLM engine that shares the GPU with training

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations + self.cache + self.vllm


@dataclass(frozen=True)
class Example:
    """A typical sequence: the screenshot as the model sees it (px), text tokens of the prompt, tokens of the answer."""

    image: tuple[int, int]
    prompt: int
    answer: int

    @property
    def text(self) -> int:
        return self.prompt + self.answer

    def tokens(self, model: Architecture) -> int:
        """All tokens, the image's included."""
        return model.image_tokens(*self.image) + self.text


@dataclass(frozen=True)
class StageEstimate:
    """The estimate for one asset."""

    asset: str
    memory: Memory
    host: float  # bytes of main memory
    disk: float  # bytes that are stored
    steps: int  # optimizer steps, or forward batches
    tokens: float
    gpu_seconds: float


def language_activations(model: Architecture, *, compiled: bool, residual: int = 4) -> float:
    """Bytes that the backward pass of one layer needs for each token, under autocast to bf16.

    Eager: two norms keep their input and output in the residual stream's precision; five linear layers keep a bf16 copy of
    their input; rotary embeddings keep queries and keys twice; attention keeps its inputs and output; the gated MLP keeps
    four tensors. Compiled: what norms, rotary embeddings and gates can compute again from their inputs is not kept.
    """
    hidden, mlp = model.hidden, model.mlp
    queries, keys = model.heads * model.head, model.key_value_heads * model.head
    if compiled:
        return (2 * residual + 4) * hidden + 6 * mlp + 4 * queries + 4 * keys
    return (4 * residual + 10) * hidden + 8 * mlp + 8 * queries + 8 * keys


def vision_activations(model: Architecture, *, compiled: bool) -> float:
    """Like `language_activations`, for each patch in one layer of the vision tower; its rotary embedding is float32."""
    hidden, mlp = model.vision.hidden, model.vision.mlp
    if compiled:
        return 26 * hidden + 6 * mlp
    return 52 * hidden + 8 * mlp


@dataclass(frozen=True)
class Spread:
    """The GPUs of a training run, and its strategy. `memory`: bytes of each GPU, of which vLLM takes a share."""

    strategy: Strategy = "ddp"
    gpus: int = 1
    memory: float = 0.0

    @property
    def sharded(self) -> bool:
        """Whether the weights are sharded."""
        return self.gpus > 1 and self.strategy in ("zero3", "fsdp")


ONE_GPU: Final = Spread()
SUB_GROUP: Final = 1e9
"""Parameters that DeepSpeed's ZeRO-3 updates at a time (`sub_group_size`)."""


def states(model: Architecture, config: Sft | PolicyTraining, spread: Spread, *, bytes_each: int = 2) -> Memory:
    """Weights, gradients and optimizer states per GPU, without activations.

    One GPU and ddp: float32 weights, gradients and AdamW, and the bf16 copies of trained weights that autocast keeps from the
    forward to the backward pass; a frozen vision tower is bf16. ZeRO: bf16 weights and gradients, float32 master weights and
    AdamW over all GPUs, and float32 copies of a GPU's gradients for the optimizer (ZeRO-3: of SUB_GROUP at a time); ZeRO-3
    and FSDP spread the weights too and gather two layers at a time. Within 5 % of sft_strategies_2gpu_3B and _7B.
    LoRA: the weights as they are stored (`bytes_each`; float32 where vLLM is given merged ones), and all of the above for the
    adapters alone.
    """
    strategy, gpus = spread.strategy, spread.gpus
    if config.lora is not None:
        trained = model.adapters(config.lora.rank, vision=not config.freeze_vision)
        shards = gpus if strategy == "zero2" else 1
        merged = isinstance(config, PolicyTraining) and config.rollouts == "vllm"
        held = model.language * (4 if merged else bytes_each) + model.vision.parameters * bytes_each
        return Memory(float(held + 6 * trained), 4.0 * trained, 8.0 * trained / shards)
    trained = model.language + (0 if config.freeze_vision else model.vision.parameters)
    if gpus == 1 or strategy == "ddp":
        half = 2 * model.vision.parameters if config.freeze_vision and bytes_each == 2 else 0
        return Memory(4.0 * model.parameters - half + 2 * trained, 4.0 * trained, 8.0 * trained)
    gathered = 2 * 2.0 * max(model.block, model.embedding)
    if strategy == "zero2":
        return Memory(2.0 * model.parameters, 6.0 * trained / gpus, 12.0 * trained / gpus)
    if strategy == "zero3":
        gradients = 2.0 * trained / gpus + 4.0 * min(trained / gpus, SUB_GROUP)
        return Memory(2.0 * model.parameters / gpus + gathered, gradients, 12.0 * trained / gpus)
    return Memory(4.0 * model.parameters / gpus + gathered, 4.0 * trained / gpus, 8.0 * trained / gpus)


def sft_memory(
    model: Architecture,
    config: Sft,
    example: Example,
    spread: Spread = ONE_GPU,
    *,
    bytes_each: int = 2,
    together: int = 1,
) -> Memory:
    """Memory of fine-tuning computed in bf16.

    Args:
        bytes_each: bytes per stored weight.
        together: rows of D_{k-1} in `example`, see `sft_row`.
    """
    held = states(model, config, spread, bytes_each=bytes_each)
    rows = -(-config.micro_batch_size // together)
    activations = training_activations(
        model,
        example,
        rows,
        recompute=config.recompute,
        compiled=config.compile,
        freeze_vision=config.freeze_vision,
        residual=2,
    )
    if together > 1:
        activations += mask_bytes(rows, example.tokens(model))
    return replace(held, activations=activations)


def mask_bytes(rows: int, tokens: int) -> float:
    """Bytes of the attention mask of packed rows, as booleans and as numbers that are added to the scores."""
    return float(rows * tokens**2 * (1 + 2))


def sft_row(config: Sft, example: Example, rows: int, own: int) -> tuple[Example, int]:
    """(one row of SFT's passes, the rows of D_{k-1} in it): with `packing` the `rows` of a step share one.

    Args:
        example: a row of D_{k-1} alone.
        own: text tokens of the prompt that are repeated for each of them: the last one, or all from the plan on.
    """
    if not config.packing or rows == 1:
        return example, 1
    return replace(example, prompt=example.prompt + (rows - 1) * own, answer=rows * example.answer), rows


def training_activations(
    model: Architecture,
    example: Example,
    rows: int,
    *,
    recompute: float,
    compiled: bool,
    freeze_vision: bool,
    residual: int = 4,
) -> float:
    """Peak bytes of activations of a training step on `rows` sequences.

    `residual`: bytes per number in the residual stream of the language model.
    """
    visual = model.image_tokens(*example.image)
    tokens = rows * (visual + example.text)
    patches = rows * visual * model.vision.merge**2
    layer = language_activations(model, compiled=compiled, residual=residual)
    tower = vision_activations(model, compiled=compiled)
    kept = recompute * residual * model.hidden + (1 - recompute) * layer
    # the layer at work: its own activations and their gradients; embeddings before the first and norm after the last
    language = tokens * (model.layers * kept + layer + 20 * model.hidden)
    head = min(rows * example.answer, 1024) * model.vocabulary * 6
    pixels = patches * 3 * model.vision.temporal * model.vision.patch**2 * 6
    if freeze_vision:
        return max(language + head, patches * tower) + pixels
    kept_patch = recompute * 4 * model.vision.hidden + (1 - recompute) * tower
    return language + head + pixels + patches * (model.vision.layers * kept_patch + tower)


def sft_seconds(
    model: Architecture, config: Sft, example: Example, rows: int, rates: Rates, *, together: int = 1
) -> float:
    """GPU-seconds of one pass over `rows` rows of D_{k-1}, recomputed layers included; `together`: as of `sft_memory`."""
    frozen, fixed = config.freeze_vision, config.lora is not None
    one = sequence_flops(model, config, example, train=True)
    operations = one.total + recomputed(one, config.recompute, freeze_vision=frozen, fixed_weights=fixed)
    layers = layer_passes(model, recompute=config.recompute, freeze_vision=frozen)
    at_once = max(1.0, config.micro_batch_size / together)
    one_pass = pass_seconds(at_once * operations, layers, rates, compiled=config.compile, adapted=fixed)
    return rows / together / at_once * one_pass


def generation_memory(
    model: Architecture, example: Example, batch: int, samples: int, *, bytes_each: int = 2
) -> Memory:
    """Memory of generation by transformers: `samples` answers for each screenshot, `batch` sequences at a time."""
    rows = max(1, batch // samples)
    sequences = rows * samples
    visual = model.image_tokens(*example.image)
    context = visual + example.text
    half = bytes_each / 2
    cache = sequences * context * model.key_value_bytes * half
    # keys and values of one layer, repeated for every head while a mask is read, and the copy that grows by one token
    groups = model.heads // model.key_value_heads
    at_work = cache / model.layers * (groups + 1)
    logits = sequences * model.vocabulary * 4 * 4
    # before there are answers: the screenshots, and what is computed once for each
    tower = rows * visual * model.vision.merge**2 * (20 * model.vision.hidden + 6 * model.vision.mlp) * half
    prefill = rows * context * (6 * model.mlp + 10 * model.hidden) * half + rows * visual * model.key_value_bytes * half
    return Memory(
        weights=float(bytes_each * model.parameters),
        activations=max(at_work + logits, tower - cache, prefill - cache),
        cache=cache,
    )


def _token_seconds(model: Architecture, example: Example, sequences: int, layer: float, rates: Rates) -> float:
    """Seconds of one decoding step of transformers for `sequences`; `layer`: host seconds per layer."""
    groups = model.heads // model.key_value_heads
    moved = 2.0 * model.language + sequences * example.tokens(model) * model.key_value_bytes * (3 + 2 * groups)
    return max(model.layers * layer, moved / rates.bandwidth)


def generation_seconds(
    model: Architecture, example: Example, batch: int, samples: int, screenshots: int, rates: Rates
) -> float:
    """GPU-seconds of `samples` answers for each of `screenshots`, by transformers' generation."""
    rows = max(1, batch // samples)
    prompt = flops(model, image=example.image, text=example.prompt, scored=1, train=False).total
    token = _token_seconds(model, example, rows * samples, rates.layer, rates)
    batches = -(-screenshots // rows)
    return screenshots * (prompt / rates.prefill + rates.image) + batches * example.answer * token


def vllm_seconds(model: Architecture, example: Example, batch: int, samples: int, rollouts: int, rates: Rates) -> float:
    """GPU-seconds of `rollouts` by vLLM, `batch` at a time; the rollouts of a prompt share its prefill."""
    prompt = flops(model, image=example.image, text=example.prompt, scored=1, train=False).total
    moved = 2.0 * model.language + batch * example.tokens(model) * model.key_value_bytes
    token = max(model.layers * VLLM_LAYER_SECONDS, moved / rates.bandwidth)
    batches = -(-rollouts // batch)
    return rollouts / samples * (prompt / rates.prefill + rates.image) + batches * example.answer * token


def policy_seconds(
    model: Architecture, example: Example, prompts: int, samples: int, steps: float, rates: Rates
) -> float:
    """GPU-seconds of rollouts by the policy in the training process: in each of `steps`, `samples` for each of `prompts`.

    The rollouts of a prompt share its prefill. Layers run as in training, eager, under autocast, but without adapters.
    """
    prompt = flops(model, image=example.image, text=example.prompt, scored=1, train=False).total
    prefill = pass_seconds(prompts * prompt, model.layers + model.vision.layers, rates)
    token = _token_seconds(model, example, prompts * samples, rates.eager_layer, rates)
    return steps * (prefill + example.answer * token)


def grpo_memory(
    model: Architecture,
    graders: Sequence[Architecture],
    config: PolicyTraining,
    example: Example,
    spread: Spread = ONE_GPU,
    *,
    bytes_each: int = 2,
    serving: Serving = DEFAULT_SERVING,
) -> Memory:
    """Memory of GRPO; every GPU also holds the reference policy and every grounder of the ensemble that is loaded here.

    With rollouts from vLLM, the engine's share of the GPU is added; where the engine sleeps during the update, only the part
    that exceeds the update's activations.
    """
    held, gpus = states(model, config, spread, bytes_each=bytes_each), spread.gpus
    # with LoRA the reference is the model without its adapters
    reference = float((bytes_each if config.freeze_vision else 4) * model.parameters)
    if not config.kl_beta or config.lora is not None:
        reference = 0.0
    shared = config.freeze_vision and not spread.sharded  # one vision tower for the policy and the reference
    if spread.sharded:
        reference /= gpus
    elif reference and shared:
        reference -= bytes_each * model.vision.parameters
    graded = float(sum(bytes_each * grader.parameters for grader in graders))
    rollouts = -(-config.prompts_per_step * config.group_size // gpus)
    row, together, rows = update_row(config, example, gpus)
    update = training_activations(model, row, rows, recompute=1.0, compiled=False, freeze_vision=config.freeze_vision)
    if together > 1:
        update += mask_bytes(rows, row.tokens(model))
    if config.freeze_vision:  # embeddings of the screenshots of a step
        visual = model.image_tokens(*example.image) * model.vision.merge**2
        made = bytes_each * visual * (model.vision.hidden + model.hidden / model.vision.merge**2)
        update += min(float(VISUAL_MEMORY), config.prompts_per_step / gpus * made * (1 + len(graders)))
    held = replace(held, weights=held.weights + reference + graded, activations=update)
    if config.rollouts == "vllm":
        engine = 0.0 if serving.rollout_server else serving.rollout_memory * spread.memory
        return replace(held, vllm=max(0.0, engine - held.activations) if serving.rollout_sleep else engine)
    # rollouts are generated before activations are kept: the larger of the two counts
    cache = float(rollouts * example.tokens(model) * model.key_value_bytes)
    if config.lora is not None:  # beside the merged weights of the layers (see `training.adapters`)
        cache += bytes_each * (model.layers * model.block + (0 if config.freeze_vision else model.vision.parameters))
    return replace(held, cache=max(0.0, cache - update))


@dataclass(frozen=True)
class Graders:
    """Grounders that judge plans, their typical sequence, and their batch size in sequences."""

    models: Sequence[Architecture]
    point: Example
    batch: int

    def seconds(self, plans: int, screenshots: int, rates: Rates) -> float:
        """GPU-seconds in which all grounders judge `plans` plans on each of `screenshots`."""
        return sum(generation_seconds(one, self.point, self.batch, plans, screenshots, rates) for one in self.models)


def grpo_seconds(
    model: Architecture, graders: Graders, config: PolicyTraining, example: Example, prompts: int, rates: Rates
) -> float:
    """GPU-seconds of GRPO over `prompts`: rollouts, rewards (as if every rollout passed the gate), update."""
    size, frozen, fixed = config.group_size, config.freeze_vision, config.lora is not None
    rollouts, step = prompts * size, config.prompts_per_step * size
    if config.rollouts == "vllm":
        generate = vllm_seconds(model, example, step, size, rollouts, rates)
    else:
        generate = policy_seconds(model, example, config.prompts_per_step, size, rollouts / step, rates)
    reward = graders.seconds(size, prompts, rates)

    row, together, rows = update_row(config, example)
    passes = rollouts / (rows * together)

    def operations(screenshots: float, train: bool) -> Flops:
        """Operations of one row, where a pass of `rows` rows encodes `screenshots` screenshots."""
        one = sequence_flops(model, config, row, train=train)
        return replace(one, vision=one.vision * screenshots / rows)

    tower = 0 if frozen else model.vision.layers
    # a frozen tower encodes a screenshot once, while its policy samples or before the first pass that needs it; a trained
    # tower encodes the screenshots of each pass
    encode = pass_seconds(config.prompts_per_step * operations(rows, train=False).vision, model.vision.layers, rates)
    encoding = rollouts / step * encode if frozen and config.rollouts == "vllm" else 0.0
    shown = 0 if frozen else -(-rows * together // size)
    scored = operations(shown, train=False)
    scoring = pass_seconds(rows * scored.total, model.layers + tower, rates)
    trained = operations(shown, train=True)
    again = recomputed(trained, 1.0, freeze_vision=frozen, fixed_weights=fixed)
    layers = layer_passes(model, recompute=1.0, freeze_vision=frozen) - (model.vision.layers if frozen else 0)
    update = pass_seconds(rows * (trained.total + again), layers, rates, adapted=fixed)
    # one by the reference, and one by the policy where another engine sampled; without KL, groups without spread need no
    # update, but their number is not known
    scorings = bool(config.kl_beta) + (config.rollouts == "vllm")
    return generate + reward + prompts * rates.image + encoding + passes * (scorings * scoring + update)


def update_row(config: PolicyTraining, example: Example, processes: int = 1) -> tuple[Example, int, int]:
    """(one row of GRPO's passes, the rollouts in it, the rows of a pass).

    Where attention takes a mask, a row is a group, [prompt][last token, c_1] … [last token, c_G] (see `training.packing`);
    else it is one rollout, as `example`.
    """
    if config.attention == "flash_attention_2":
        return example, 1, config.micro_batch_size
    size = config.group_size
    rows = max(1, config.pass_size(packs=True, processes=processes) // size)
    return replace(example, prompt=example.prompt + size - 1, answer=size * example.answer), size, rows


LOAD_SECONDS: Final = 0.3
RESET_SECONDS: Final = 0.055
ACTION_SECONDS: Final = 0.1
SCREEN_SECONDS: Final = 0.08
"""Seconds of a CPU core in which Chromium and its environment load a MiniWoB++ page, begin an episode on a loaded one, perform
an action (with a look at the elements), and give a screenshot: means of 68 episodes of 34 families, process times of the whole
tree, on two busy cores."""
STEPS_LEFT: Final = 2.2
"""Actions with which a recorded step is reached, tried and played on: the mean length of its episode, in the shipped snapshot."""
STEPS_PLAYED: Final = 2.3
"""Steps of a whole episode: those of π'_1 of the sandbox in `coepg play` (102 episodes)."""
EPISODE_STEPS: Final = 1.6
"""Recorded steps of an episode, in the shipped snapshot."""


def steps_played(config: Grpo) -> float:
    """Answers of π in a rollout: the steps of a whole episode on live pages, else 1."""
    return min(STEPS_PLAYED, config.plays.max_steps) if config.plays else 1.0


def page_seconds(config: Grpo) -> float:
    """Seconds of a CPU core that live pages take for one rollout of GRPO, if no other did the same; 0 without them.

    A whole episode is played again from its first page at each step.
    """
    if config.environment is None:
        return 0.0
    if config.plays is None:
        return LOAD_SECONDS + STEPS_LEFT * ACTION_SECONDS
    n = steps_played(config)
    return (n + 1) * RESET_SECONDS + n * (n + 1) / 2 * ACTION_SECONDS + n * SCREEN_SECONDS


def by_steps(config: Grpo) -> Grpo:
    """The settings of GRPO for estimates: the answers at a step of whole episodes, as rollouts that share no prompt."""
    if config.plays is None:
        return config
    prompts = config.prompts_per_step * config.group_size
    return config.model_copy(update={"environment": None, "group_size": 1, "prompts_per_step": prompts})


def validations(config: Grpo, steps: int) -> int:
    """How often GRPO validates in `steps` steps: before the first, every `validate_every` steps, after the last."""
    return 1 + -(-steps // config.validate_every) if config.validate_every else 0


def look_seconds(
    model: Architecture, graders: Graders, config: Grpo, example: Example, steps: int, rates: Rates
) -> float:
    """GPU-seconds of one validation on `steps` steps: one plan each by the policy, then judged."""
    return generation_seconds(model, example, config.micro_batch_size, 1, steps, rates) + graders.seconds(
        1, steps, rates
    )


def probe_seconds(
    model: Architecture, graders: Graders, example: Example, steps: int, repeats: int, rates: Rates
) -> float:
    """GPU-seconds of `repeats` answers to each of `steps`, and one pass of the graders over all plans of a step."""
    answers = generation_seconds(model, example, graders.batch, 1, steps, rates)
    return repeats * answers + replace(graders, batch=max(graders.batch, repeats)).seconds(repeats, steps, rates)
