"""Applies the data strategies of an experiment (`strategies.curation`) before a training, and measures what they ask for.

Measures are made before the model to train is loaded, by the first process; the others wait for its result. That is a file in the
scratch folder, so that a continued run trains on the same rows in the same order. CURATION lists what was left out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset
from PIL import Image

from coepg_dagster.artifacts import CURATION, whole, write_table
from coepg_dagster.experiment.models import Member
from coepg_dagster.experiment.training import Grpo
from coepg_dagster.geometry import Box, Point, Space
from coepg_dagster.inference.agents import Grounder, planner_inputs
from coepg_dagster.inference.attention import cache_argument, prefill
from coepg_dagster.inference.engine import Engine, Failure, Request, Sampling
from coepg_dagster.inference.opening import opened
from coepg_dagster.inference.screens import Screens, resize_of
from coepg_dagster.inference.transformers_engine import load_checkpoint
from coepg_dagster.jobs import GrounderRlJob, GrpoJob, SftJob, TrainingJob
from coepg_dagster.notations import locate
from coepg_dagster.progress import Ended
from coepg_dagster.prompts import box_messages
from coepg_dagster.steps import CURATION_SCHEMA
from coepg_dagster.strategies.curation import Curated, Floats, Items, Nothing, Prompts, Rows, attention_map, curate
from coepg_dagster.training.cdrem_reward import CdremReward
from coepg_dagster.training.examples import (
    NothingToTrainOn,
    end_to_end_examples,
    grounder_examples,
    planner_examples,
)
from coepg_dagster.training.launch import is_main
from coepg_dagster.training.point_reward import PointReward
from coepg_dagster.training.preflight import rendered
from coepg_dagster.training.validation import requests_of

BOX_TOKENS: Final = 64
"""The longest answer of a verifier that is asked for a box."""
AT_ONCE: Final = 64
"""Items whose screenshots are held at once."""
Value = TypeVar("Value")


def curated_rows(job: SftJob | GrounderRlJob, dataset: pa.Table, steps: pa.Table) -> tuple[pa.Table, Curated]:
    """(the rows of `dataset` that `job` trains on, what was chosen); with weights they are the column `weight`.

    Raises NothingToTrainOn if none stays, Ended if a strategy weighs the rows of GRPO, whose loss has no weights.
    """
    if not job.config.curation:
        return dataset, Curated(list(range(dataset.num_rows)), False, None, {}, {})
    if job.role == "grounder":  # rows without a target are none of its examples
        dataset = dataset.filter(pa.compute.is_valid(dataset["box"]))
    about = {row["step_id"]: row for row in steps.drop_columns(["screenshot"]).to_pylist()}
    rows = dataset.to_pylist()
    of_rows = [about[row["step_id"]] for row in rows]
    items = Rows(of_rows, range(len(rows)), RowMeasures(job, dataset, steps), rows)
    curated = _once(job, items, job.config.curation, [row["row_id"] for row in rows])
    kept = dataset.take(pa.array(curated.kept, pa.int64()))
    if curated.weights is not None and isinstance(job, GrounderRlJob):
        raise Ended(
            f"grounder_rl.curation: one of {', '.join(job.config.curation)} weighs rows, and GRPO has no weights: remove it"
        )
    if curated.weights is not None:
        kept = kept.append_column("weight", pa.array(curated.weights, pa.float64()))
    return kept, curated


def curated_prompts(
    job: GrpoJob, asked: Collection[str], steps: pa.Table, engines: Mapping[str, Engine]
) -> tuple[list[str], list[tuple[str, str]], Curated]:
    """(the steps that GRPO asks about, of `asked`, in the order of training; pairs of steps, as in Choice; what was chosen).

    `engines` are those of the graders, ϕ_k first; empty: the agent is end-to-end.
    """
    about = [row for row in steps.drop_columns(["screenshot"]).to_pylist() if row["step_id"] in asked]
    ids = [row["step_id"] for row in about]
    if not job.config.curation:
        return ids, [], Curated(list(range(len(ids))), False, None, {}, {})
    items = Prompts(about, range(len(ids)), PromptMeasures(job, ids, steps, engines))
    curated = _once(job, items, job.config.curation, [None] * len(ids))
    return [ids[i] for i in curated.kept], [(ids[i], ids[j]) for i, j in curated.pairs], curated


def _once(
    job: TrainingJob, items: Any, strategies: Mapping[str, Mapping[str, Any]], row_ids: Sequence[str | None]
) -> Curated:
    """What the strategies choose, from the scratch folder if it was chosen before; also writes the table of what was left out."""
    file = job.scratch / "curation.json"
    if is_main():
        if not file.exists():
            try:
                curated = curate(items, strategies)
            except Nothing as error:
                raise NothingToTrainOn(str(error)) from None
            file.parent.mkdir(parents=True, exist_ok=True)
            with whole(file) as draft:
                draft.write_text(json.dumps(asdict(curated)))
        _write(json.loads(file.read_text()), items, row_ids, job.out)
    while not file.exists():  # the launcher ends this process if the first one fails
        time.sleep(1)
    chosen = json.loads(file.read_text())
    chosen["left_out"] = {int(place): tuple(why) for place, why in chosen["left_out"].items()}
    return Curated(**chosen)


def _write(chosen: Mapping[str, Any], items: Items, row_ids: Sequence[str | None], out: Path) -> None:
    rows = [
        {"row_id": row_ids[int(place)], "step_id": items.steps[int(place)]["step_id"], "strategy": name, "reason": why}
        for place, (name, why) in chosen["left_out"].items()
    ]
    out.mkdir(parents=True, exist_ok=True)
    write_table(pa.Table.from_pylist(rows, CURATION_SCHEMA), out / CURATION)
    for name, figures in chosen["figures"].items():
        print(f"{name}: {figures['left_out']} of {figures['of']} left out {figures} (see {CURATION})", flush=True)


class _Kept:
    """Values that were measured, by measure and place."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], dict[int, Any]] = {}

    def of(
        self, key: tuple[Any, ...], places: Sequence[int], measure: Callable[[list[int]], list[Value]]
    ) -> list[Value]:
        known = self._known.setdefault(key, {})
        if new := [place for place in places if place not in known]:
            known |= dict(zip(new, measure(new), strict=True))
        return [known[place] for place in places]


class RowMeasures:
    """Measures of rows of D_{k-1} (`strategies.curation.Measures`), by the model that training starts from and by verifiers.

    One model is loaded at a time.
    """

    def __init__(self, job: SftJob | GrounderRlJob, dataset: pa.Table, steps: pa.Table) -> None:
        self._job, self._dataset, self._steps, self._kept = job, dataset, steps, _Kept()

    def pass_rates(self, places: Sequence[int], samples: int) -> list[float]:
        raise Ended("rows of D_(k-1) have the pass rate of their verifiers: nothing is sampled for them")

    def perplexities(self, places: Sequence[int]) -> list[float]:
        return self._kept.of(("perplexity",), places, self._perplexities)

    def boxes(self, places: Sequence[int], by: str) -> list[Box | Point | None]:
        return self._kept.of(("box", by), places, lambda new: self._boxes(new, by))

    def attention(self, places: Sequence[int], layers: int) -> list[Floats | None]:
        return self._kept.of(("attention", layers), places, lambda new: self._attention(new, layers))

    def _examples(self, places: Sequence[int], screens: Screens) -> Dataset:
        """An example for each place, as SFT has it."""
        job, dataset = self._job, self._dataset.take(pa.array(places, pa.int64()))
        style, space = job.models.prompts, job.models.coordinates
        if job.role == "planner":
            return planner_examples(dataset, self._steps, screens, style)
        if job.role == "end_to_end":
            return end_to_end_examples(dataset, self._steps, screens, style, space)
        return grounder_examples(dataset, screens, style, space, job.target)

    @contextmanager
    def _loaded(self, attention: str) -> Iterator[tuple[Any, Any, Screens]]:
        models = self._job.models
        model, processor = load_checkpoint(self._job.init, models.dtype, self._job.device, attention)
        yield model, processor, Screens(self._steps, resize_of(processor))
        del model
        if self._job.on_gpu:
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def _perplexities(self, places: Sequence[int]) -> list[float]:
        measured: list[float] = []
        with self._loaded("sdpa") as (model, processor, screens):
            for example in self._examples(places, screens):
                prompt, answer = rendered(example, processor)
                inputs = _inputs(processor, prompt + answer, example["images"][0], model)
                tokens = len(processor.tokenizer(answer, add_special_tokens=False)["input_ids"])
                logits = model(**inputs, logits_to_keep=tokens + 1).logits[0, :-1].float()
                chosen = inputs["input_ids"][0, -tokens:, None]
                measured.append(float(torch.log_softmax(logits, -1).gather(1, chosen).mean().neg().exp()))
        return measured

    @torch.inference_mode()
    def _attention(self, places: Sequence[int], layers: int) -> list[Floats | None]:
        measured: list[Floats | None] = []
        with self._loaded("eager") as (model, processor, screens):
            stops = model.generation_config.eos_token_id
            for example in self._examples(places, screens):
                prompt, _ = rendered(example, processor)
                inputs = _inputs(processor, prompt, example["images"][0], model)
                steps = _attended(
                    model, inputs, self._job.answer_tokens, {stops} if isinstance(stops, int) else set(stops), layers
                )
                _, rows, columns = inputs["image_grid_thw"][0].tolist()
                merge = processor.image_processor.merge_size
                visual = (inputs["input_ids"][0] == processor.image_token_id).nonzero()[:, 0].cpu().numpy()
                measured.append(
                    attention_map(_filled(steps), visual, (rows // merge, columns // merge)) if steps else None
                )
        return measured

    def _boxes(self, places: Sequence[int], by: str) -> list[Box | Point | None]:
        job, rows = self._job, self._dataset.select(["step_id", "plan"]).take(pa.array(places, pa.int64())).to_pylist()
        measured: list[Box | Point | None] = []
        with opened(job.checkers[by], job, logs=job.scratch, beside_training=True) as engine:
            screens = Screens(self._steps, engine.resize)
            for start in range(0, len(rows), AT_ONCE):
                part = rows[start : start + AT_ONCE]
                requests = [
                    Request(screens.image(row["step_id"]), box_messages(row["plan"], job.models.prompts))
                    for row in part
                ]
                answers = engine.generate(requests, Sampling(BOX_TOKENS))
                for row, (answer,) in zip(part, answers, strict=True):
                    if isinstance(answer, Failure):
                        raise Ended(f"step {row['step_id']}: {by} gave no answer: {answer.reason}")
                    measured.append(self._place(answer.text, row["step_id"], screens))
        return measured

    def _place(self, text: str, step_id: str, screens: Screens) -> Box | Point | None:
        found, viewport, space = locate(text), screens.viewport(step_id), self._job.models.coordinates
        if found is None:
            return None
        if len(found.spans) == 2:
            return viewport.point(Point(found.x, found.y, space), Space.ORIGINAL)
        return viewport.box(Box(*found.corners, space), Space.ORIGINAL)


def _inputs(processor: Any, text: str, image: Image.Image, model: Any) -> Any:
    made = processor(text=[text], images=[[image]], return_tensors="pt", do_resize=False).to(model.device)
    made["pixel_values"] = made["pixel_values"].to(model.dtype)
    return made


def _attended(model: Any, inputs: Any, limit: int, stops: Collection[int], layers: int) -> list[Floats]:
    """Attention while each token of a greedy answer is generated, mean over heads: shape (layers, keys so far) for each.

    The prompt's own attention, which would need keys² numbers, is not kept: its last token is read once more.
    """
    head = {name: value for name, value in inputs.items() if name != "input_ids"}
    length = inputs["input_ids"].shape[1]
    for name in ("attention_mask", "mm_token_type_ids"):
        head[name] = inputs[name][:, : length - 1]
    _, cache, position = prefill(model, model, {"input_ids": inputs["input_ids"][:, : length - 1], **head})
    token, steps = inputs["input_ids"][:, -1:], []
    for _ in range(limit):
        output = model(
            input_ids=token,
            position_ids=position[None, :, None].expand(3, -1, -1),
            use_cache=True,
            output_attentions=True,
            **{cache_argument(type(model)): cache},  # type: ignore[arg-type]
        )
        token, position = output.logits[:, -1:].argmax(-1), position + 1
        if int(token) in stops:
            break
        steps.append(torch.stack([a[0].mean(0)[-1] for a in output.attentions[-layers:]]).float().cpu().numpy())
    return steps


def _filled(steps: Sequence[Floats]) -> Floats:
    """Shape (layers, tokens, keys), with 0 for keys that came later."""
    keys = steps[-1].shape[1]
    return np.stack([np.pad(step, ((0, 0), (0, keys - step.shape[1]))) for step in steps], axis=1)


class PromptMeasures:
    """Measures of GRPO's prompts: answers of π_k, sampled at the temperature of the rollouts, judged by ϕ_k alone."""

    def __init__(self, job: GrpoJob, ids: Sequence[str], steps: pa.Table, engines: Mapping[str, Engine]) -> None:
        self._job, self._ids, self._steps, self._engines, self._kept = job, ids, steps, engines, _Kept()

    def pass_rates(self, places: Sequence[int], samples: int) -> list[float]:
        return self._kept.of(("pass_rate", samples), places, lambda new: self._pass_rates(new, samples))

    def perplexities(self, places: Sequence[int]) -> list[float]:
        raise Ended("a prompt of GRPO has no answer whose perplexity could be measured")

    def boxes(self, places: Sequence[int], by: str) -> list[Box | Point | None]:
        raise Ended("a prompt of GRPO has no plan for which a box could be found")

    def attention(self, places: Sequence[int], layers: int) -> list[Floats | None]:
        raise Ended("a prompt of GRPO has no answer whose attention could be measured")

    def _pass_rates(self, places: Sequence[int], samples: int) -> list[float]:
        job, config, models = self._job, self._job.config, self._job.models
        agent: Any = "decoupled" if self._engines else "end_to_end"
        wanted = {self._ids[place] for place in places}
        steps = self._steps.filter(pa.compute.is_in(self._steps["step_id"], pa.array(sorted(wanted))))
        rates: dict[str, float] = {}
        # by transformers: vLLM's share of the GPU is the graders'
        policy_member = Member(model=job.init, engine="transformers")
        with opened(policy_member, job, logs=job.scratch, beside_training=True) as policy:
            screens = Screens(steps, policy.resize)
            judge = self._judge(steps, screens)
            requests = requests_of(steps, screens, models.prompts, agent)
            ids = [task.step_id for task in planner_inputs(steps)]
            for start in range(0, len(ids), AT_ONCE):
                part = ids[start : start + AT_ONCE]
                sampling = Sampling(config.max_plan_tokens, config.temperature, samples=samples, seed=job.seed + start)
                answers = policy.generate([requests[step_id](step_id) for step_id in part], sampling)
                texts = [
                    [_text(answer, step_id) for answer in of_step]
                    for step_id, of_step in zip(part, answers, strict=True)
                ]
                flat = judge.score([text for each in texts for text in each], [s for s in part for _ in range(samples)])
                right = (np.array(flat) > 0).reshape(len(part), samples)
                rates |= dict(zip(part, right.mean(1).tolist(), strict=True))
        return [rates[self._ids[place]] for place in places]

    def _judge(self, steps: pa.Table, screens: Screens) -> CdremReward | PointReward:
        job, models = self._job, self._job.models
        if not self._engines:
            return PointReward(steps, screens, models.coordinates, value_mode=job.config.value_mode)
        name, engine = next(iter(self._engines.items()))
        resized = Screens(steps, engine.resize)
        grounder = Grounder(engine, resized, models.prompts, models.coordinates, job.max_point_tokens)
        return CdremReward({name: grounder}, {name: 1.0}, steps, screens, Grpo(value_mode=job.config.value_mode))


def _text(answer: Any, step_id: str) -> str:
    if isinstance(answer, Failure):
        raise Ended(f"step {step_id}: the planner gave no answer: {answer.reason}")
    text: str = answer.text
    return text
