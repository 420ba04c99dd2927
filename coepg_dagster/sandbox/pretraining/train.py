"""Pretraining from scratch, in three stages; experiments showed that each is necessary.

1. *Tower*: the vision model is warmed up with dense labels per visual token (which words and kinds are drawn here,
   where the element's centre is), classified through the tied word embeddings. Without it grounding stays at chance.
2. *Grounder*: from its tower, element descriptions to points, several questions a screen in one sequence.
3. *Planner*: from the same tower, goal and history to the JSON answer, with element questions beside it.

This is no part of Co-EPG: it makes the models that take the place of pretrained ones. So it has a separate training loop
over the batched forward pass of `fast`; on a GPU each step is one CUDA graph. It saves plain Hugging Face checkpoints.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from coepg_dagster.sandbox.pretraining import tiny_models
from coepg_dagster.sandbox.pretraining import tokenizer as tokens
from coepg_dagster.sandbox.pretraining.batches import (
    IGNORED,
    SHIFT_X,
    SHIFT_Y,
    UNSHIFTED,
    Batches,
    Contents,
    DenseLabels,
    dense_labels,
)
from coepg_dagster.sandbox.pretraining.corpus import Corpus
from coepg_dagster.sandbox.pretraining.fast import FastModel
from coepg_dagster.sandbox.pretraining.recipe import Checkpoint, PretrainingStage, Recipe, TowerStage
from coepg_dagster.sandbox.pretraining.tiny_models import CELL, GRID_HEIGHT, GRID_WIDTH, SCREEN_HEIGHT, SCREEN_WIDTH

Progress = Callable[[str, int, int, Mapping[str, float]], None]
"""Called with stage name, step, steps and metrics."""

_TOKEN_SHARE: Final = 0.3
"""A word belongs to a cell that covers this share of it, …"""
_TOKEN_PIXELS: Final = 150.0
"""… or this many px² of it."""
_ELEMENT_PIXELS: Final = 40.0
"""A cell points to the element that covers most of it, if it covers at least this many px²."""
_REPORT_EVERY: Final = 200


def silent(stage: str, step: int, steps: int, metrics: Mapping[str, float]) -> None:
    """A Progress that does nothing."""


class DenseHead(nn.Module):
    """Reads words, centre x and centre y off a visual token, through the model's own word embeddings."""

    numbers: Tensor

    def __init__(self, hidden: int, tokenizer: PreTrainedTokenizerFast) -> None:
        super().__init__()
        self.x = nn.Linear(hidden, hidden)
        self.y = nn.Linear(hidden, hidden)
        self.bias = nn.Parameter(torch.full((len(tokenizer),), -6.0))
        self.scale = nn.Parameter(torch.tensor(2.0))
        ids = tokenizer.get_vocab()
        self.register_buffer("numbers", torch.tensor([ids[str(n)] for n in range(tokens.NUMBERS)]), persistent=False)

    def forward(self, visual: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of words (…, vocabulary), x (…, SCREEN_WIDTH) and y (…, SCREEN_HEIGHT)."""
        normal = _unit_power(embeddings)
        features = _unit_power(visual)
        gain = 2 * self.scale.exp() / visual.shape[-1]
        numbers = normal[self.numbers]
        return (
            features @ normal.T * gain + self.bias,
            self.x(features) @ numbers[:SCREEN_WIDTH].T * gain,
            self.y(features) @ numbers[:SCREEN_HEIGHT].T * gain,
        )


def _unit_power(x: Tensor) -> Tensor:
    return x * (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt().to(x.dtype)


class Bank(nn.Module):
    """Screens and dense labels on one device; where screens do not fit (CPU) they are read from the mapped file."""

    def __init__(self, screens: Corpus, labels: DenseLabels, device: torch.device) -> None:
        super().__init__()
        images = torch.from_numpy(screens.images)
        self.images = images.to(device)
        self.rectangles = torch.from_numpy(labels.rectangles).to(device)
        self.tokens = torch.from_numpy(labels.tokens).to(device)
        self.elements = torch.from_numpy(labels.elements).to(device)
        cells = [
            (column * CELL, row * CELL, (column + 1) * CELL, (row + 1) * CELL)
            for row in range(GRID_HEIGHT)
            for column in range(GRID_WIDTH)
        ]
        self.cells = torch.tensor(cells, dtype=torch.float, device=device)
        self.limit = torch.tensor([SCREEN_WIDTH, SCREEN_HEIGHT], device=device)

    def pictures(self, image: Tensor, shift: Tensor) -> Tensor:
        """(B, SCREEN_HEIGHT, SCREEN_WIDTH, 3) uint8 screens moved right and down by `shift` (B, 2); white comes in."""
        picked = self.images[image]
        for dimension, amount, extent in ((1, shift[:, 1], SCREEN_HEIGHT), (2, shift[:, 0], SCREEN_WIDTH)):
            source = torch.arange(extent, device=picked.device) - amount[:, None]
            inside = (source >= 0) & (source < extent)
            shape = [len(image), 1, 1, 1]
            shape[dimension] = extent
            index = source.clamp(0, extent - 1).view(shape).expand(picked.shape)
            picked = picked.gather(dimension, index).masked_fill(~inside.view(shape), 255)
        return picked

    def _covered(self, boxes: Tensor) -> Tensor:
        """(B, cells, boxes) px² of each cell that each box covers."""
        low = torch.maximum(boxes[:, None, :, :2], self.cells[None, :, None, :2])
        high = torch.minimum(boxes[:, None, :, 2:], self.cells[None, :, None, 2:])
        return (high - low).clamp(min=0).prod(-1)

    def targets(self, image: Tensor, shift: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
        """Words (B, cells, vocabulary) in {0, 1}, and centres (B, cells, 2) in px or IGNORED."""
        move = torch.cat([shift, shift], dim=-1)[:, None]
        boxes = self.rectangles[image].float() + move
        covered = self._covered(boxes)
        area = (boxes[..., 2:] - boxes[..., :2]).prod(-1)[:, None]
        drawn = (covered >= _TOKEN_SHARE * area) & (area > 0) & (covered > 0) | (covered > _TOKEN_PIXELS)
        index = torch.where(drawn, self.tokens[image].long()[:, None], vocabulary)
        words = torch.zeros(len(image), len(self.cells), vocabulary + 1, device=image.device)
        words.scatter_(2, index, 1.0)
        elements = self.elements[image].float() + move
        low, high = elements[..., :2].clamp(min=0), elements[..., 2:]
        centres = ((low + torch.minimum(high, self.limit)) / 2).long()
        most, which = self._covered(elements).max(-1)
        centre = centres.gather(1, which[..., None].expand(-1, -1, 2))
        inside = (most > _ELEMENT_PIXELS)[..., None] & (centre >= 0) & (centre < self.limit)
        return words[..., :vocabulary], torch.where(inside, centre, IGNORED)


def dense_loss(outputs: tuple[Tensor, Tensor, Tensor], words: Tensor, centres: Tensor) -> Tensor:
    """Words' binary cross-entropy summed over the vocabulary, and half of each coordinate's cross-entropy."""
    word_logits, x_logits, y_logits = (output.float() for output in outputs)
    loss = F.binary_cross_entropy_with_logits(word_logits, words, reduction="none").sum(-1).mean()
    for logits, wanted in ((x_logits, centres[..., 0]), (y_logits, centres[..., 1])):
        loss = loss + 0.5 * F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED)
    return loss


class _Optimizer:
    """AdamW with clipped gradients; on CUDA the whole step is captured once and replayed."""

    def __init__(
        self, loss: Callable[[dict[str, Tensor]], Tensor], parameters: Sequence[nn.Parameter], device: torch.device
    ) -> None:
        self._loss = loss
        self._parameters = list(parameters)
        self._device = device
        self._cuda = device.type == "cuda"
        self._rate = torch.zeros((), device=device)
        self._adam = torch.optim.AdamW(
            self._parameters, lr=self._rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True, capturable=self._cuda
        )
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: dict[str, Tensor] = {}
        self._result = torch.zeros((), device=device)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False) if self._cuda else nullcontext()

    def _step(self, inputs: dict[str, Tensor]) -> Tensor:
        self._adam.zero_grad(set_to_none=True)
        with self._autocast():
            loss = self._loss(inputs)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parameters, 1.0, foreach=True)
        self._adam.step()
        return loss.detach()

    def step(self, batch: dict[str, Tensor], rate: float) -> Tensor:
        """One step; returns the loss, on the device."""
        if not self._cuda:
            self._rate.fill_(rate)
            return self._step(batch)
        graph = self._graph or self._capture(batch)
        for name, value in batch.items():
            self._inputs[name].copy_(value, non_blocking=True)
        self._rate.fill_(rate)
        graph.replay()
        return self._result

    def _capture(self, batch: dict[str, Tensor]) -> torch.cuda.CUDAGraph:
        self._inputs = {name: value.to(self._device) for name, value in batch.items()}
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # at learning rate 0: fills caches, changes no weight
                self._step(self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._adam.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._result = self._step(self._inputs)
        self._graph = graph
        return graph


def _rate(stage: PretrainingStage, step: int, elapsed: float) -> tuple[float, float]:
    """Learning rate of this step, and the share of the stage that is done."""
    done = step / stage.steps
    if stage.max_seconds is not None:
        done = max(done, elapsed / stage.max_seconds)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
    return stage.learning_rate * min(1.0, (step + 1) / stage.warm_up) * (0.03 + 0.97 * cosine), done


@dataclass(frozen=True)
class StageReport:
    """The result of one stage."""

    name: str
    steps: int
    seconds: float
    device: str
    losses: tuple[float, ...]


def _loop(
    name: str,
    stage: PretrainingStage,
    optimizer: _Optimizer,
    batches: Iterator[dict[str, Tensor]],
    device: torch.device,
    progress: Progress,
) -> StageReport:
    start = time.monotonic()
    losses: list[float] = []
    step = 0
    for step, batch in enumerate(batches):
        rate, done = _rate(stage, step, time.monotonic() - start)
        if done >= 1:
            break
        loss = optimizer.step(batch, rate)
        if step % _REPORT_EVERY == 0 or step == stage.steps - 1:
            losses.append(float(loss))
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(f"{name}: the loss is {losses[-1]} at step {step}; lower learning_rate")
            progress(name, step, stage.steps, {"loss": losses[-1], "seconds": time.monotonic() - start})
    seconds = time.monotonic() - start
    progress(name, stage.steps, stage.steps, {"loss": losses[-1], "seconds": seconds, "steps": float(step + 1)})
    return StageReport(name, step + 1, seconds, device_name(device), tuple(losses))


def device_name(device: torch.device) -> str:
    """The device, as the card names it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _dense_batches(pool: Sequence[int], stage: PretrainingStage) -> Iterator[dict[str, Tensor]]:
    for step in range(stage.steps):
        rng = np.random.default_rng([stage.seed, step])
        image = rng.choice(pool, size=stage.batch)
        shift = np.stack([rng.integers(low, high + 1, stage.batch) for low, high in (SHIFT_X, SHIFT_Y)], axis=1)
        shift[rng.random(stage.batch) < UNSHIFTED] = 0
        yield {"image": torch.from_numpy(image), "shift": torch.from_numpy(shift)}


def _tensors(loader: DataLoader[Any]) -> Iterator[dict[str, Tensor]]:
    for batch in loader:
        yield {name: torch.as_tensor(value) for name, value in batch.items()}


@dataclass(frozen=True)
class Inputs:
    """The inputs of a stage; `loaders`: number of processes that prepare batches."""

    screens: Corpus
    tokenizer: PreTrainedTokenizerFast
    device: torch.device
    progress: Progress
    loaders: int = 0


def warm_up(name: str, tower: TowerStage, inputs: Inputs) -> tuple[Any, DenseHead, StageReport]:
    """Stage 1: a new model with trained vision tower and embeddings, and its dense head."""
    screens, tokenizer, device = inputs.screens, inputs.tokenizer, inputs.device
    model: Any
    model, _ = tiny_models.build(tower.preset, tokenizer, tower.init_seed)
    model = model.to(device)
    fast = FastModel(model, tokenizer).to(device)
    torch.manual_seed(tower.init_seed)
    head = DenseHead(model.config.text_config.hidden_size, tokenizer).to(device)
    bank = Bank(screens, dense_labels(screens.steps, tokenizer), device)
    pool = screens.indices(held_out=False, families=tower.families)
    sample = torch.tensor(Random(0).sample(pool, min(512, len(pool))), device=device)
    words, _ = bank.targets(sample, torch.zeros(len(sample), 2, dtype=torch.long, device=device), len(tokenizer))
    head.bias.data.copy_(torch.logit(words.mean((0, 1)).clamp(1e-4, 0.5)))

    def loss(batch: dict[str, Tensor]) -> Tensor:
        image, shift = batch["image"], batch["shift"]
        outputs = head(fast.screens(bank.pictures(image, shift)), fast.embeddings)
        return dense_loss(outputs, *bank.targets(image, shift, len(tokenizer)))

    parameters = [*model.model.visual.parameters(), fast.embeddings, *head.parameters()]
    optimizer = _Optimizer(loss, [p for p in parameters if isinstance(p, nn.Parameter)], device)
    report = _loop(name, tower, optimizer, _dense_batches(pool, tower), device, inputs.progress)
    return model, head, report


def train_checkpoint(name: str, checkpoint: Checkpoint, model: Any, head: DenseHead, inputs: Inputs) -> StageReport:
    """Stages 2 and 3: train `model` in place to answer as `checkpoint` defines."""
    screens, tokenizer, device, loaders = inputs.screens, inputs.tokenizer, inputs.device, inputs.loaders
    fast = FastModel(model, tokenizer).to(device)
    head = head.to(device)
    bank = Bank(screens, dense_labels(screens.steps, tokenizer), device)
    task = Contents(
        checkpoint.role,
        checkpoint.wordings,
        name,
        checkpoint.vagueness.value(),
        checkpoint.text_tokens,
        checkpoint.label_tokens,
        checkpoint.swap,
    )
    pool = screens.indices(held_out=False, families=checkpoint.families)
    pool = sorted(Random(name).sample(pool, max(1, round(checkpoint.data_share * len(pool)))))
    dataset = Batches(
        screens.steps, pool, task, tokenizer, batch=checkpoint.batch, steps=checkpoint.steps, seed=checkpoint.seed
    )

    def loss(batch: dict[str, Tensor]) -> Tensor:
        image, shift = batch["image"], batch["shift"]
        visual = fast.screens(bank.pictures(image, shift))
        states = fast.states(visual, batch["text"], batch["positions"], batch["segments"])
        at = batch["label_at"][..., None].expand(-1, -1, states.shape[-1])
        logits = fast.logits(states.gather(1, at)).float()
        total = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)
        if checkpoint.dense_weight:
            outputs = head(visual, fast.embeddings)
            total = total + checkpoint.dense_weight * dense_loss(outputs, *bank.targets(image, shift, len(tokenizer)))
        return total

    parameters = list(model.parameters()) + (list(head.parameters()) if checkpoint.dense_weight else [])
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=None,
        num_workers=loaders,
        prefetch_factor=8 if loaders else None,
        multiprocessing_context="fork" if loaders and sys.platform == "linux" else None,
        pin_memory=device.type == "cuda",
    )
    return _loop(name, checkpoint, _Optimizer(loss, parameters, device), _tensors(loader), device, inputs.progress)


@dataclass(frozen=True)
class _Plant:
    """The inputs of a job's process."""

    recipe: Recipe
    screens: Path
    work: Path
    out: Path
    loaders: int

    def inputs(self, device: torch.device, progress: Progress) -> Inputs:
        tokenizer = tokens.load(self.work / "tokenizer")
        return Inputs(Corpus.open(self.screens), tokenizer, device, progress, self.loaders)


def _make_tower(plant: _Plant, name: str, device: torch.device, progress: Progress) -> StageReport:
    model, head, report = warm_up(f"tower {name}", plant.recipe.towers[name], plant.inputs(device, progress))
    state = {f"model.{key}": value for key, value in model.state_dict().items() if key != "lm_head.weight"}
    state |= {f"head.{key}": value for key, value in head.state_dict().items()}
    save_file({key: value.cpu().contiguous() for key, value in state.items()}, plant.work / f"tower-{name}.safetensors")
    return report


def _make_checkpoint(plant: _Plant, name: str, device: torch.device, progress: Progress) -> StageReport:
    checkpoint = plant.recipe.checkpoints[name]
    tower = plant.recipe.towers[checkpoint.tower]
    inputs = plant.inputs(device, progress)
    model: Any
    model, processor = tiny_models.build(tower.preset, inputs.tokenizer, tower.init_seed)
    head = DenseHead(model.config.text_config.hidden_size, inputs.tokenizer)
    state = load_file(plant.work / f"tower-{checkpoint.tower}.safetensors")
    model.load_state_dict(
        {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")}, strict=False
    )
    head.load_state_dict({k.removeprefix("head."): v for k, v in state.items() if k.startswith("head.")})
    model = model.to(device)
    report = train_checkpoint(name, checkpoint, model, head, inputs)
    tiny_models.save(model.cpu(), processor, plant.out / name)
    return report


@dataclass(frozen=True)
class Machine:
    """Where models are trained.

    Attributes:
        device: "cpu" or "cuda"; models are dealt out to all CUDA devices in turn.
        parallel: models trained at the same time, each in its own process.
        loaders: processes that prepare batches, per model.
    """

    device: str = "cpu"
    parallel: int = 1
    loaders: int = 0

    @property
    def devices(self) -> list[str]:
        return [f"cuda:{n}" for n in range(torch.cuda.device_count())] if self.device == "cuda" else [self.device]


def run(
    recipe: Recipe,
    screens: Corpus,
    out: Path,
    machine: Machine,
    progress: Progress = silent,
    *,
    only: Sequence[str] | None = None,
) -> dict[str, StageReport]:
    """Make the recipe's checkpoints under `out`, one directory each; what `coepg pretrain sandbox` calls.

    Args:
        recipe: towers and checkpoints.
        screens: from `corpus.read`.
        out: where `<name>/` goes; `out/work` keeps tokenizer, towers and the reports of the stages.
        progress: called from this process.
        only: names of checkpoints; all by default. Only the towers they need are made.

    Returns the report of each stage by name. The same recipe, screens and device give the same weights, unless a stage
    was cut short by its `max_seconds`. Raises KeyError for an unknown name.
    """
    wanted = {name: recipe.checkpoints[name] for name in (only or recipe.checkpoints)}
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    tokens.fit(screens.texts(), recipe.vocabulary, recipe.least_screens).save_pretrained(work / "tokenizer")
    plant = _Plant(recipe, screens.directory, work, out, machine.loaders)
    towers = [name for name in recipe.towers if any(c.tower == name for c in wanted.values())]
    reports: dict[str, StageReport] = {}
    for make, names in ((_make_tower, towers), (_make_checkpoint, list(wanted))):
        reports |= _all(make, plant, names, machine, progress)
    summary = {"data": screens.summary(), "stages": {name: asdict(report) for name, report in reports.items()}}
    (work / "reports.json").write_text(json.dumps(summary, indent=1), "utf-8")
    return reports


_Make = Callable[[_Plant, str, torch.device, Progress], StageReport]


def _all(
    make: _Make,
    plant: _Plant,
    names: Sequence[str],
    machine: Machine,
    progress: Progress,
) -> dict[str, StageReport]:
    """Run one job per name, `machine.parallel` at a time; this process reports the progress of all."""
    prefix = "tower " if make is _make_tower else ""
    dealt = list(zip(names, itertools.cycle(machine.devices), strict=False))
    if machine.parallel == 1:
        return {prefix + name: make(plant, name, _ready(device), progress) for name, device in dealt}
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        messages = manager.Queue()
        listener = threading.Thread(target=_listen, args=(messages, progress), daemon=True)
        listener.start()
        with ProcessPoolExecutor(max_workers=machine.parallel, mp_context=context) as pool:
            jobs = {prefix + name: pool.submit(_job, make, plant, name, device, messages) for name, device in dealt}
            reports = {name: job.result() for name, job in jobs.items()}
        messages.put(None)
        listener.join()
    return reports


def _listen(messages: Any, progress: Progress) -> None:
    while (message := messages.get()) is not None:
        progress(*message)


def _job(make: _Make, plant: _Plant, name: str, device: str, messages: Any) -> StageReport:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    torch.set_num_threads(1)
    return make(plant, name, _ready(device), lambda *message: messages.put(message))


def _ready(device: str) -> torch.device:
    """The device, made the current one: CUDA graphs are captured there."""
    chosen = torch.device(device)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    return chosen
