"""`coepg plan`: a dry run of every stage of an iteration on given GPUs: what fits, and which settings save memory or time.

Sizes come from a checkpoint's config.json: in a local folder, in a small table of known hub models, in the hub's cache, or
from the hub; `broken` checks that its files are complete. Numbers of steps come from the imported benchmark, else from a
table of known benchmarks. The report names its assumptions (`assumptions`).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from coepg_dagster.benchmark import board_size
from coepg_dagster.experiment.models import Models, Serving
from coepg_dagster.experiment.schema import Experiment
from coepg_dagster.experiment.training import Lora, PolicyTraining, Sft
from coepg_dagster.inference.architecture import KNOWN, Architecture, UnknownModel, read
from coepg_dagster.inference.files import IncompleteCheckpoint, check, check_size
from coepg_dagster.inference.weights import is_local
from coepg_dagster.jobs import ALONE, Placement
from coepg_dagster.planning.estimates import (
    CARDS,
    CONTEXT,
    DEFAULT_SERVING,
    EPISODE_STEPS,
    GIB,
    Card,
    Example,
    Graders,
    Memory,
    Rates,
    Spread,
    StageEstimate,
    by_steps,
    generation_memory,
    generation_seconds,
    grpo_memory,
    grpo_seconds,
    look_seconds,
    page_seconds,
    probe_seconds,
    sft_memory,
    sft_row,
    sft_seconds,
    steps_played,
    validations,
)
from coepg_dagster.planning.machine import Machine
from coepg_dagster.training.launch import refusals
from coepg_dagster.training.learned import Exposure, exposure

STEPS: Final[dict[str, dict[str, int]]] = {
    "mind2web": {"train": 7775, "test_task": 1339, "test_website": 1019, "test_domain": 4060},
    "android_control": {"train": 74700, "test": 8400},
    "miniwob": {"train": 6373, "validation": 549, "test_seed": 465, "test_text": 302, "test_family": 338},
}
"""Steps of benchmarks that are not imported yet; AndroidControl's are approximate, from its paper."""
KEPT: Final = 0.5
"""Share of candidates that pass the gate and are verified."""
COVERED: Final = 0.9
"""Share of training steps that D_k covers (the paper's 6,862 of 7,775 are 0.88)."""
TOKENS: Final = {"web": (350, 80, 12), "mobile": (350, 80, 12), "compact": (90, 20, 12)}
"""Typical text tokens of a planner's prompt, of its answer, and of a grounder's answer; `compact`: means of the sandbox."""
CORES: Final = 2
ONE_MODEL_SFT, ONE_MODEL_GRPO = "end_to_end, SFT", "end_to_end, GRPO"
"""The two stages in which `end_to_end` is trained."""
SECTIONS: Final = {
    "planner_sft": "sft",
    "grounder": "sft",
    "grounder_rl": "grounder_rl",
    "planner": "grpo",
    ONE_MODEL_SFT: "sft",
    ONE_MODEL_GRPO: "grpo",
}
"""Stage that trains → its section of the experiment file."""
BY_SFT: Final = ("planner_sft", "grounder")
"""The stages that the resource `sft` runs; `grpo_cdrem` runs the others that train, both of `end_to_end` too."""
SCREENS: Final[dict[str, tuple[int, int]]] = {"web": (1288, 1008), "mobile": (1092, 2408), "compact": (168, 224)}
"""Typical screenshots as models see them, (width, height) px: a block of a web page, a phone, a MiniWoB++ page."""


@dataclass(frozen=True)
class Hardware:
    """The GPUs of one machine, and how training is spread over them. No card: a CPU, where memory is not checked."""

    card: Card | None
    gpus: int = 1
    sft: Placement = ALONE
    grpo: Placement = ALONE
    serving: Serving = DEFAULT_SERVING

    @classmethod
    def of(cls, machine: Machine) -> Hardware:
        """The hardware that a profile describes."""
        placements = machine.sft.placement, machine.grpo_cdrem.placement
        return cls(CARDS[machine.card] if machine.card else None, machine.gpus or 1, *placements, machine.vllm)

    def spread(self, placement: Placement) -> Spread:
        """How training in `placement` is spread over the GPUs; on a CPU: one process."""
        if self.card is None:
            return Spread(placement.strategy)
        return Spread(placement.strategy, placement.processes, self.card.memory)

    def placement(self, asset: str) -> Placement:
        """Where a stage that trains runs."""
        return self.sft if asset in BY_SFT else self.grpo

    def processes(self, asset: str) -> int:
        """The GPUs that work on a stage at a time; on a CPU its time is that of two cores, however many processes."""
        if self.card is None:
            return 1
        return self.placement(asset).processes if asset in SECTIONS else self.gpus

    def browsers(self, experiment: Experiment) -> int:
        """How many browsers work at a time: a GPU's machine has a core for each."""
        asked = experiment.grpo.environment.processes if experiment.grpo.environment else 1
        return asked if self.card else min(asked, CORES)

    def text(self) -> str:
        if self.card is None:
            return "CPU"
        parts = ((self.sft, "SFT"), (self.grpo, "GRPO"))
        spread = (f"{name} in {of.processes} × {of.strategy}" for of, name in parts if of.spread)
        return ", ".join([f"{self.gpus} × {self.card.name}", *spread])


@dataclass(frozen=True)
class Sized:
    """The architecture of a model of the experiment, and its source."""

    architecture: Architecture
    source: str


@dataclass(frozen=True)
class FoundGpus:
    """The GPUs of this machine as nvidia-smi names them; `memory`: bytes of each."""

    name: str
    memory: float
    number: int

    @property
    def card(self) -> Card | None:
        """What they are in CARDS; None for others, and for one of less memory under the same name, as in a laptop."""
        kinds = [card for card in CARDS.values() if card.name.rsplit("-", 1)[0].replace("-", " ") in self.name]
        nearest = min(kinds, key=lambda card: abs(card.memory - self.memory), default=None)
        return nearest if nearest and abs(nearest.memory - self.memory) < 0.2 * nearest.memory else None


def find_gpus() -> FoundGpus | None:
    """This machine's GPUs that CUDA_VISIBLE_DEVICES leaves, from nvidia-smi; None without GPUs."""
    try:
        out = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = [[cell.strip() for cell in line.split(",")] for line in out.splitlines()]
    gpus = [gpu for gpu in found if len(gpu) == 4 and gpu[3].isdecimal()]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and "MIG-" not in chosen:  # a slice of a card is no line of nvidia-smi's
        gpus = list(_chosen(gpus, chosen))
    return FoundGpus(gpus[0][2], float(gpus[0][3]) * 2**20, len(gpus)) if gpus else None


def _chosen(gpus: Sequence[list[str]], chosen: str) -> Iterator[list[str]]:
    """Those of `gpus` (number, id, …) that CUDA_VISIBLE_DEVICES names; as for CUDA, the first unknown name ends the list."""
    for name in map(str.strip, chosen.split(",")):
        one = next((gpu for gpu in gpus if name == gpu[0] or (name and gpu[1].startswith(name))), None)
        if one is None:
            return
        yield one


def size_of(model: str, root: Path) -> Sized:
    """The size of a checkpoint. Raises UnknownModel with what to do."""
    if is_local(root, model):
        return Sized(read(root / model), "config.json")
    from coepg_dagster.inference.hub import described, split  # a third of a second, needed for models of the hub alone

    name, _ = split(model)
    if name in KNOWN:
        return Sized(Architecture.of(KNOWN[name]), "built-in table")
    try:
        return Sized(read(described(model)), "hub")
    except IncompleteCheckpoint as error:
        raise UnknownModel(str(error)) from None


def broken(models: Models, root: Path) -> list[str]:
    """The faults of the checkpoints' files that `open_models` would report, one line each.

    For a hub model that is not in the built-in table, this downloads its configuration files, but no weights.
    """
    wrong: dict[str, list[str]] = {}
    for name, member in models.named().items():
        checkpoint, weights = member.checkpoint, member.engine != "openai"
        try:
            if is_local(root, checkpoint):
                check(root / checkpoint, weights=weights)
                if weights:
                    check_size(root / checkpoint)
            else:
                from coepg_dagster.inference.hub import described, split  # as above

                if split(checkpoint)[0] not in KNOWN:
                    described(checkpoint, weights=weights)
        except IncompleteCheckpoint as error:
            wrong.setdefault(str(error), []).append(name)
    return [f"models: {', '.join(names)}: {why}" for why, names in wrong.items()]


def examples_of(experiment: Experiment) -> tuple[Example, Example]:
    """A typical sequence of the planner, and one of a grounder."""
    prompt, plan, point = TOKENS[experiment.models.prompts]
    image, limits = SCREENS[experiment.models.prompts], experiment.regeneration
    return (
        Example(image, prompt, min(plan, limits.max_plan_tokens)),
        Example(image, prompt // 2, min(point, limits.max_point_tokens)),
    )


def assumptions(experiment: Experiment) -> str:
    """What the estimates take for granted, in a line."""
    plan, point = examples_of(experiment)
    return (
        f"assumed: {KEPT:.0%} of candidates pass the gate and the verifiers, D_k covers {COVERED:.0%} of the steps; a prompt "
        f"has {plan.prompt} text tokens, a plan {plan.answer}, a point {point.answer}"
    )


def stored_bytes(experiment: Experiment) -> int:
    """Bytes per weight of a checkpoint that is loaded for inference."""
    return 4 if experiment.models.dtype == "float32" else 2


class DryRun:
    """The stages of one iteration of an experiment.

    Args:
        root: the project, from which relative paths start.
        steps: steps of each split, where the benchmark is imported.
    """

    def __init__(self, experiment: Experiment, root: Path, steps: Mapping[str, int] | None = None) -> None:
        self.experiment = experiment
        models = experiment.models
        self.models = {
            name: size_of(name, root) for name in dict.fromkeys([*models.checkpoints(), *self._loaded(experiment)])
        }
        benchmark = experiment.benchmark
        self.steps_from = "the imported benchmark" if steps else f"the table of known benchmarks ({benchmark.reader})"
        known = dict(steps or STEPS.get(benchmark.reader, {}))
        self.all_train_steps = known.get(benchmark.train, 0)
        self.train_steps = min(self.all_train_steps, benchmark.max_train_steps or 10**9)
        most = benchmark.max_eval_steps or 10**9
        self.eval_steps = sum(min(known.get(split, 0), most) for split in (benchmark.validation, *benchmark.test))
        self.validation_steps = known.get(benchmark.validation, 0)
        alone = {} if experiment.agent == "end_to_end" else experiment.evaluation.boards
        self.boards = {name: board_size(board, root) for name, board in alone.items()}

    def knows(self, asset: str) -> bool:
        """Whether the number of rows that `asset` handles is known."""
        return (self.eval_steps if asset == "evaluation" else self.train_steps) > 0

    @staticmethod
    def _loaded(experiment: Experiment) -> list[str]:
        return [experiment.models.base_planner, experiment.models.base_grounder]

    def _pool(self, members: Mapping[str, Any]) -> dict[str, Architecture]:
        """The pool members that this machine loads; members behind an endpoint are left out."""
        return {
            name: self.models[member.model].architecture
            for name, member in members.items()
            if self.experiment.models.engine_of(member) != "openai"
        }

    def stages(self, hardware: Hardware, rates: Rates, experiment: Experiment | None = None) -> list[StageEstimate]:
        """The estimate of each heavy stage of an iteration k ≥ 1 that the experiment makes itself, in order.

        What it takes from its parent costs nothing. `experiment`: one with changed settings.
        """
        changed = experiment or self.experiment
        planner, grounder = (self.models[name].architecture for name in self._loaded(changed))
        plan, point = examples_of(changed)
        pools, models = changed.regeneration, changed.models
        planners, verifiers = self._pool(models.planners), self._pool(models.verifiers)
        planners |= {f"planner_k{i}": planner for i in range(pools.trained_members)}
        verifiers |= {f"grounder_k{i}": grounder for i in range(pools.trained_members)}
        rows = round(COVERED * self.train_steps) * self._rows_per_step(changed)
        verified = self.train_steps * max(1, round(KEPT * self._written(changed)))
        if changed.agent == "end_to_end":
            stages = [self._sft(ONE_MODEL_SFT, planner, plan, rows, changed, hardware, rates)]
            if changed.grpo.enabled:
                stages.append(self._grpo(ONE_MODEL_GRPO, planner, [], [], changed, hardware, rates))
            return [*stages, self._evaluation(changed, hardware, rates)]
        stages = [
            self._sft("planner_sft", planner, plan, rows, changed, hardware, rates),
            self._sft("grounder", grounder, point, rows, changed, hardware, rates),
        ]
        if changed.grounder_rl.enabled:
            stages.append(self._grounder_rl(grounder, point, rows, changed, hardware, rates))
        if changed.grpo.enabled:
            alone = not changed.grpo.ensemble or changed.grpo.plays is not None
            graders = [grounder, *(() if alone else self._pool(models.verifiers).values())]
            stages.append(self._grpo("planner", planner, graders, [grounder], changed, hardware, rates))
        stages.append(
            self._pool_stage("candidate_plans", planners, plan, pools.plans_per_planner, changed, hardware, rates)
        )
        per_screen = max(1, verified // max(1, self.train_steps))
        stages.append(self._pool_stage("verdicts", verifiers, point, per_screen, changed, hardware, rates))
        stages.append(self._evaluation(changed, hardware, rates))
        return [stage for stage in stages if stage.asset in changed.made]

    def _grpo(
        self,
        asset: str,
        model: Architecture,
        graders: Sequence[Architecture],
        judge: Sequence[Architecture],
        experiment: Experiment,
        hardware: Hardware,
        rates: Rates,
    ) -> StageEstimate:
        """GRPO of π; `graders` reward it, and `judge` tells how good it is before, meanwhile and after."""
        plan, point = examples_of(experiment)
        seen_by, config = self.exposure(experiment), experiment.grpo
        grpo, steps, batch = by_steps(config), seen_by.steps, experiment.batch_size
        prompts = round(steps * grpo.prompts_per_step * steps_played(config))
        validated = min(self.validation_steps, config.validation_steps)
        seen, looks = validations(config, steps), Graders(judge, point, batch)
        memory = grpo_memory(
            model,
            graders,
            grpo,
            plan,
            hardware.spread(hardware.grpo),
            bytes_each=stored_bytes(experiment),
            serving=hardware.serving,
        )
        seconds = grpo_seconds(model, Graders(graders, point, batch), grpo, plan, prompts, rates)
        seconds += self.page_seconds(experiment) / hardware.browsers(experiment)
        seconds += seen * look_seconds(model, looks, config, plan, validated, rates)
        probed, asked = self._probed(config.probe_steps), 2 * (2 + config.probe_between)  # greedy and sampled
        seconds += probe_seconds(model, replace(looks, batch=config.micro_batch_size), plan, probed, asked, rates)
        return StageEstimate(
            asset,
            memory,
            host=hardware.processes(asset) * 4.0 * model.parameters,
            disk=float(stored_bytes(experiment) * model.parameters),
            steps=steps,
            tokens=float((prompts * grpo.group_size + seen * validated) * plan.tokens(model)),
            gpu_seconds=seconds,
        )

    @staticmethod
    def _written(experiment: Experiment) -> int:
        """The plans that the pool writes for a step."""
        pools = experiment.regeneration
        return pools.plans_per_planner * (len(experiment.models.planners) + pools.trained_members)

    def _rows_per_step(self, experiment: Experiment) -> int:
        """The rows of D_k for a step that it covers."""
        return max(1, round(min(experiment.regeneration.max_plans_per_step, KEPT * self._written(experiment))))

    def page_seconds(self, experiment: Experiment) -> float:
        """Seconds of CPU cores in which live pages perform the actions of GRPO in one iteration, if no two are alike."""
        return self.exposure(experiment).rollouts * page_seconds(experiment.grpo)

    def _grounder_rl(
        self,
        model: Architecture,
        example: Example,
        rows: int,
        experiment: Experiment,
        hardware: Hardware,
        rates: Rates,
    ) -> StageEstimate:
        config, nobody = experiment.grounder_rl, Graders([], example, 1)
        steps = exposure(config, rows).steps
        prompts, spread = steps * config.prompts_per_step, hardware.spread(hardware.grpo)
        return StageEstimate(
            "grounder_rl",
            grpo_memory(
                model, [], config, example, spread, bytes_each=stored_bytes(experiment), serving=hardware.serving
            ),
            host=hardware.processes("grounder_rl") * 4.0 * model.parameters,
            disk=float(stored_bytes(experiment) * model.parameters),
            steps=steps,
            tokens=float(prompts * config.group_size * example.tokens(model)),
            gpu_seconds=grpo_seconds(model, nobody, config, example, prompts, rates),
        )

    def exposure(self, experiment: Experiment) -> Exposure:
        """The prompts and rollouts of GRPO in one iteration."""
        covered = round(COVERED * self.train_steps)
        unseen = experiment.grpo.prompts == "unseen"
        prompts = self.all_train_steps - covered if unseen else covered
        prompts = min(prompts, experiment.grpo.max_prompts or prompts)
        return exposure(experiment.grpo, round(prompts / EPISODE_STEPS) if experiment.grpo.plays else prompts)

    def _probed(self, limit: int) -> int:
        """Training and validation steps on which a model is compared before and after training."""
        return min(limit, self.train_steps) + min(limit, self.validation_steps)

    def _sft(
        self,
        asset: str,
        model: Architecture,
        example: Example,
        rows: int,
        experiment: Experiment,
        hardware: Hardware,
        rates: Rates,
    ) -> StageEstimate:
        config, batch = experiment.sft, experiment.batch_size
        answers = Graders([model], example, batch)
        steps = config.max_steps or round(rows * config.epochs / config.batch_size)
        times = 1 + (config.folds or 0 if asset == "grounder" else 0)
        seen = steps * config.batch_size
        # a grounder's plan is in its prompt
        own = example.prompt if asset == "grounder" else 1
        row, together = sft_row(config, example, self._rows_per_step(experiment), own)
        spread, bytes_each = hardware.spread(hardware.placement(asset)), stored_bytes(experiment)
        probed = 0 if asset == ONE_MODEL_SFT else self._probed(config.probe_steps)
        kept = not (asset == ONE_MODEL_SFT and experiment.grpo.enabled)  # GRPO's model takes its place
        return StageEstimate(
            asset,
            sft_memory(model, config, row, spread, bytes_each=bytes_each, together=together),
            host=hardware.processes(asset) * 4.0 * model.parameters,
            disk=float(kept * times * bytes_each * model.parameters),
            steps=times * steps,
            tokens=times * seen / together * row.tokens(model),
            gpu_seconds=times * sft_seconds(model, config, row, seen, rates, together=together)
            + probe_seconds(model, answers, example, probed, 2, rates),
        )

    def _pool_stage(
        self,
        asset: str,
        members: Mapping[str, Architecture],
        example: Example,
        samples: int,
        experiment: Experiment,
        hardware: Hardware,
        rates: Rates,
    ) -> StageEstimate:
        """A pool whose members run one after the other, each with one process per GPU."""
        batch, screenshots, bytes_each = experiment.batch_size, self.train_steps, stored_bytes(experiment)
        needs = [generation_memory(m, example, batch, samples, bytes_each=bytes_each) for m in members.values()]
        largest = max(members.values(), key=lambda m: m.parameters)
        return StageEstimate(
            asset,
            max(needs, key=lambda need: need.total),
            host=hardware.gpus * float(bytes_each * largest.parameters),
            disk=0.0,
            steps=sum(-(-screenshots // max(1, batch // samples)) for _ in members),
            tokens=float(sum(screenshots * samples * example.tokens(m) for m in members.values())),
            gpu_seconds=sum(
                generation_seconds(m, example, batch, samples, screenshots, rates) for m in members.values()
            ),
        )

    def _evaluation(self, experiment: Experiment, hardware: Hardware, rates: Rates) -> StageEstimate:
        """Planner, grounder and judge in one process; then the other pairs of `evaluation`, on validation; then boards.

        An end-to-end agent answers alone.
        """
        planner, grounder = (self.models[name].architecture for name in self._loaded(experiment))
        decoupled, evaluated = experiment.agent == "decoupled", experiment.evaluation
        judge = {"judge": experiment.models.judge} if decoupled and experiment.models.judge else {}
        pointing = [grounder, *self._pool(judge).values()] if decoupled else []
        plan, point = examples_of(experiment)
        batch, steps, bytes_each = experiment.batch_size, self.eval_steps, stored_bytes(experiment)
        validation = min(self.validation_steps, experiment.benchmark.max_eval_steps or self.validation_steps)
        work = [(planner, plan, 1, steps), *((one, point, 1, steps) for one in pointing)]
        if decoupled:
            if evaluated.base_planner:
                work += [(planner, plan, 1, validation), (grounder, point, 1, validation)]
            if n := evaluated.attempts:
                work += [(planner, plan, n, validation), (grounder, point, n, validation)]
            for settings in evaluated.inference.values():  # about: a way may ask more than once
                asked = max(2, settings.get("samples", 1), settings.get("plans", 1), 1 + settings.get("retries", 0))
                work += [
                    (planner, plan, asked if "samples" not in settings else 1, validation),
                    (grounder, point, asked, validation),
                ]
            if experiment.oracle_plan:
                work += [(grounder, point, 1, validation)]
        for board in self.boards.values():
            work.append((grounder, replace(point, image=board.screen or point.image), 1, board.items))
        memory = [
            generation_memory(model, example, batch, samples, bytes_each=bytes_each)
            for model, example, samples, _ in work
        ]
        return StageEstimate(
            "evaluation",
            Memory(
                sum(of.weights for of in memory[: 1 + len(pointing)]),
                activations=max(of.activations for of in memory),
                cache=max(of.cache for of in memory),
            ),
            host=hardware.gpus * float(bytes_each * max(model.parameters for model, *_ in work)),
            disk=0.0,
            steps=sum(-(-count // max(1, batch // samples)) for _, _, samples, count in work),
            tokens=float(sum(count * samples * example.tokens(model) for model, example, samples, count in work)),
            gpu_seconds=sum(
                generation_seconds(model, example, batch, samples, count, rates)
                for model, example, samples, count in work
            ),
        )

    def too_large(self, hardware: Hardware, stages: list[StageEstimate]) -> list[StageEstimate]:
        """The stages that do not fit into the card's memory, the largest first."""
        if hardware.card is None:
            return []
        room = hardware.card.memory - CONTEXT
        return sorted((s for s in stages if s.memory.total > room), key=lambda s: -s.memory.total)

    def remedies(self, asset: str, hardware: Hardware, rates: Rates) -> list[tuple[str, float]]:
        """The three settings that help most: (setting, bytes per GPU that `asset` needs with it)."""
        changes: dict[str, Callable[[], tuple[Experiment, Hardware]]] = {}
        experiment = self.experiment
        card = hardware.card
        assert card is not None  # on a CPU nothing is refused

        def with_(section: str, **values: Any) -> Callable[[], tuple[Experiment, Hardware]]:
            part = getattr(experiment, section).model_copy(update=values)
            return lambda: (experiment.model_copy(update={section: part}), hardware)

        part = SECTIONS.get(asset)
        if part == "sft":
            changes["sft.freeze_vision: true"] = with_("sft", freeze_vision=True)
            changes["sft.recompute: 1"] = with_("sft", recompute=1.0)
            changes["sft.micro_batch_size: 1"] = with_("sft", micro_batch_size=1)
            changes["sft.lora: {rank: 64}"] = with_("sft", lora=Lora())
        elif part is not None:
            changes[f"{part}.kl_beta: 0 (no reference policy in memory)"] = with_(part, kl_beta=0.0)
            changes[f"{part}.micro_batch_size: 1"] = with_(part, micro_batch_size=1)
            changes[f"{part}.lora: {{rank: 64}}"] = with_(part, lora=Lora())
            changes[f"{part}.prompts_per_step: 8"] = with_(part, prompts_per_step=8)
        if asset == "planner":
            changes["grpo.ensemble: false (ϕ_k rewards alone)"] = with_("grpo", ensemble=False)
        if part is not None:
            config: Sft | PolicyTraining = getattr(experiment, part)
            # as many of eight as can share a batch
            wide = (Placement(processes=n, strategy="zero3") for n in range(max(8, hardware.gpus), 0, -1))
            placed = next((one for one in wide if not refusals(config, one, "")), None)
            if placed is not None and placed.processes > 1:
                cards = replace(hardware, gpus=max(hardware.gpus, placed.processes))
                more = replace(cards, sft=placed) if asset in BY_SFT else replace(cards, grpo=placed)
                changes[f"strategy zero3 over {placed.processes} GPUs"] = lambda: (experiment, more)
        else:
            changes["batch_size: 8"] = lambda: (experiment.model_copy(update={"batch_size": 8}), hardware)
        pool = {"candidate_plans": "planners", "verdicts": "verifiers", "planner": "verifiers"}.get(asset, "")
        members = getattr(experiment.models, pool) if pool else {}
        loaded = sorted(
            (name for name, m in members.items() if experiment.models.engine_of(m) != "openai"),
            key=lambda name: -self.models[members[name].model].architecture.parameters,
        )
        for served in ([loaded[:1]] if loaded else []) + ([loaded] if len(loaded) > 1 else []):
            pools = {n: m.model_copy(update={"engine": "openai"}) if n in served else m for n, m in members.items()}
            models = experiment.models.model_copy(update={pool: pools})
            changes[f"models.{pool}: serve {' and '.join(served)} from an endpoint (`engine: openai`)"] = (
                lambda models=models: (experiment.model_copy(update={"models": models}), hardware)  # type: ignore[misc]
            )
        needs = []
        for text, change in changes.items():
            other, place = change()
            # a remedy that would itself be refused
            if part is not None and refusals(getattr(other, part), place.placement(asset), ""):
                continue
            stage = next(s for s in self.stages(place, rates, other) if s.asset == asset)
            needs.append((text, stage.memory.total))
        now = next(s for s in self.stages(hardware, rates) if s.asset == asset).memory.total
        return sorted((n for n in needs if n[1] < now), key=lambda n: n[1])[:3]

    def faster(self, hardware: Hardware, rates: Rates) -> list[tuple[str, float]]:
        """Settings of SFT that save time and fit: (settings, GPU-hours of an iteration with them).

        First each one alone that saves a twentieth or more, then the fastest combination. None of them is another method, but
        `packing` changes which rows meet in an optimizer step. Empty if nothing saves as much, or times are not known.
        """
        experiment, sft = self.experiment, self.experiment.sft
        if hardware.card is None or not self.train_steps:
            return []
        values: dict[str, bool | int] = {"compile": True, "recompute": 0, "packing": True}
        if hardware.placement("planner_sft" if experiment.agent == "decoupled" else ONE_MODEL_SFT).sharded:
            del values["compile"]  # was not measured
        if sft.attention == "flash_attention_2":
            del values["packing"]  # it takes no mask
        values = {name: value for name, value in values.items() if getattr(sft, name) != value}
        hours: dict[tuple[str, ...], float] = {}
        for n in range(len(values) + 1):
            for names in combinations(values, n):
                changed = sft.model_copy(update={name: values[name] for name in names})
                stages = self.stages(hardware, rates, experiment.model_copy(update={"sft": changed}))
                if not names or not self.too_large(hardware, stages):
                    hours[names] = sum(stage.gpu_seconds for stage in stages) / 3600
        most = 0.95 * hours.pop(())
        found: list[tuple[str, ...]] = [names for names in hours if len(names) == 1 and hours[names] <= most]
        if hours and len(best := min(hours, key=lambda names: hours[names])) > 1 and hours[best] <= most:
            found.append(best)
        return [
            (", ".join(f"sft.{name}: {str(values[name]).lower()}" for name in names), hours[names]) for names in found
        ]


@dataclass(frozen=True)
class Report:
    """What `coepg plan` prints of the dry run."""

    summary: str  # how long and how large, in one line
    lines: list[str]  # the table and what it is computed from
    refused: list[str]  # why the experiment does not fit; empty: it fits


UNKNOWN: Final = "unknown"


def report(dry: DryRun, hardware: Hardware, rates: Rates) -> Report:
    """The dry run on `hardware`, with the three settings that would help the largest stage that does not fit."""
    experiment = dry.experiment
    lines = [f"on {hardware.text()}; rates {rates.basis}", assumptions(experiment)]
    for name, sized in dry.models.items():
        model = sized.architecture
        lines.append(f"model {name}: {model.parameters / 1e6:,.1f} million parameters ({sized.source})")
    if dry.train_steps:
        lines.append(f"{dry.train_steps} training steps, {dry.eval_steps} to evaluate, from {dry.steps_from}")
    else:
        lines.append(
            "the benchmark is not imported and its size is not known: steps, tokens and hours are not estimated"
        )
    for name, board in dry.boards.items():
        width, height = board.screen or examples_of(experiment)[1].image
        lines.append(
            f"board {name}: ϕ_k alone on {board.items:,} items of {width} x {height} px as models see them; its import takes "
            f"{board.images / GIB:.1f} GiB once"
        )
    stages = dry.stages(hardware, rates)
    memory, time = ("GiB per GPU", "GPU-hours") if hardware.card else ("GiB", "minutes")
    head = ("asset", memory, "weights", "grad.", "optim.", "activ.", "KV", "vLLM", "host GiB", "disk GiB")
    rows: list[tuple[str, ...]] = [(*head, "steps", "M tokens", time)]
    for stage in stages:
        need = stage.memory
        parts = (need.total, need.weights, need.gradients, need.optimizer, need.activations, need.cache, need.vllm)
        sizes = [f"{part / GIB:.1f}" for part in (*parts, stage.host, stage.disk)]
        duration = f"{stage.gpu_seconds / 3600:.2f}" if hardware.card else f"{stage.gpu_seconds / 60:.1f}"
        work = (str(stage.steps), f"{stage.tokens / 1e6:.1f}", duration)
        rows.append((stage.asset, *sizes, *(work if dry.knows(stage.asset) else (UNKNOWN,) * 3)))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    if experiment.grpo.enabled and dry.train_steps:
        seen = dry.exposure(experiment)
        unseen = f"; its prompts are the {seen.of:,} of {dry.all_train_steps:,} training steps that D_k does not cover"
        if experiment.grpo.plays:
            unseen = "; its prompts are the first steps of episodes that D_k does not cover"
        lines.append(seen.text() + (unseen if experiment.grpo.prompts == "unseen" else ""))
        if experiment.grpo.environment:
            each, cores = page_seconds(experiment.grpo), dry.page_seconds(experiment) / 3600
            what = "episode" if experiment.grpo.plays else "rollout"
            lines.append(
                f"live pages: {cores:.1f} core-hours of browsers, {each:.2f} seconds for each {what}, if no two are alike; "
                f"{hardware.browsers(experiment)} of them work at a time"
            )
        few = seen.warning(experiment.grpo)
        lines += [f"warning: {few}"] if few else []
    refused = _refusal(dry, hardware, rates, stages)
    if not refused and (faster := dry.faster(hardware, rates)):
        lines.append("faster, and fits (docs/scaling.md says what they do); GPU-hours of an iteration:")
        lines += [f"  {hours:.1f} with {settings}" for settings, hours in faster]
    return Report(_summary(dry, hardware, stages), lines, refused)


def _summary(dry: DryRun, hardware: Hardware, stages: list[StageEstimate]) -> str:
    experiment = dry.experiment
    gpu_hours = sum(stage.gpu_seconds for stage in stages) / 3600
    hours = sum(stage.gpu_seconds / hardware.processes(stage.asset) for stage in stages) / 3600
    disk = sum(stage.disk for stage in stages) / GIB
    imports = sum(board.images for board in dry.boards.values()) / GIB
    times = experiment.iterations * len(experiment.seeds)
    whole = f"{experiment.iterations} iterations and {len(experiment.seeds)} seeds"
    if not all(dry.knows(stage.asset) for stage in stages):
        return f"time unknown, {disk:.1f} GiB an iteration; {whole}: time unknown, {times * disk + imports:.0f} GiB"

    def text(n: int, once: float) -> str:
        gpu = f" ({n * gpu_hours:,.1f} GPU-hours)" if hardware.card else ""
        needed = n * hours
        if needed < 1:
            time = f"{60 * needed:.0f} minutes"
        else:
            time = f"{needed:.1f} hours" if needed < 1000 else f"{needed / 24:,.0f} days"
        return f"{time}{gpu}, {n * disk + once:,.1f} GiB"

    return f"an iteration {text(1, 0)}; {whole} {text(times, imports)}"


def _refusal(dry: DryRun, hardware: Hardware, rates: Rates, stages: list[StageEstimate]) -> list[str]:
    too_large = dry.too_large(hardware, stages)
    if not too_large:
        return []
    card = hardware.card
    assert card is not None  # on a CPU nothing is too large
    room = card.memory - CONTEXT
    lines = []
    for stage in too_large:
        lines.append(
            f"{stage.asset} cannot fit: it needs {stage.memory.total / GIB:.1f} GiB per GPU, {card.name} has "
            f"{card.memory / GIB:.1f} GiB, {room / GIB:.1f} of them beside CUDA. What would help most:"
        )
        for setting, need in dry.remedies(stage.asset, hardware, rates):
            fits = "fits" if need <= room else "still too much, together with others it helps"
            lines.append(f"  {setting}: {need / GIB:.1f} GiB, {fits}")
    return lines
