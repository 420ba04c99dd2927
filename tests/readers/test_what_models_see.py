"""What models see of a step, from the raw record to the exact prompt, and that nothing else of the record is in any prompt.

Each source below plants marks (`zz…`, odd coordinates) into whatever a model must not see: label action and value, boxes and
points, elements, what comes later in the episode, and, at AndroidControl's high level, every step's own instruction.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from coepg_dagster.experiment.models import Models
from coepg_dagster.experiment.schema import Regeneration
from coepg_dagster.geometry import Space
from coepg_dagster.inference.agents import Grounder, Planner, planner_inputs
from coepg_dagster.inference.predict import predict, predict_end_to_end
from coepg_dagster.inference.screens import Screens
from coepg_dagster.pools.candidates import write_candidates
from coepg_dagster.pools.verdicts import give_verdicts
from coepg_dagster.prompts import Message, Style, planner_answer
from coepg_dagster.readers.importing import Options, load_benchmark
from coepg_dagster.sandbox.miniwob.reader import TARGETS_FILE, load_snapshot
from coepg_dagster.sandbox.miniwob.splits import SPLITS
from coepg_dagster.steps import STEP_SCHEMA
from coepg_dagster.training.examples import end_to_end_examples, grounder_examples, grpo_prompts, planner_examples
from coepg_dagster.training.validation import requests_of
from tests.inference.scripted import RESIZE, Scripted, generation
from tests.pools.tables import row, rows
from tests.project import REPOSITORY

from .samples import ACTIONS as ACTIONS_OF_AN_EPISODE
from .samples import (
    candidate,
    episode,
    forest,
    mind2web_row,
    picture,
    user_row,
    write_android_control,
    write_board,
    write_mind2web,
    write_user_rows,
)

STYLES: tuple[Style, ...] = get_args(Style)
PLAN = "the plan that the planner wrote"


@dataclass(frozen=True)
class Source:
    """A raw dataset, one step of it, and what a model sees of that step."""

    read: Callable[[Path], pa.Table]
    step_id: str
    goal: str
    history: tuple[str, ...] = ()
    instruction: str | None = None
    secrets: tuple[str, ...] = ()


def mind2web(folder: Path) -> pa.Table:
    secret = {
        "action_uid": "zzuid",
        "raw_html": "<p>zzhtml</p>",
        "cleaned_html": "<p>zzhtml</p>",
        "operation": json.dumps({"op": "SELECT", "original_op": "SELECT", "value": "zzvalue"}),
        "pos_candidates": [candidate(137, 1711, 219, 43, class_="zzelement")],
        "neg_candidates": [candidate(0, 0, 10, 10, class_="zzelement")],
        "website": "zzwebsite",
        "domain": "zzdomain",
        "subdomain": "zzdomain",
        "target_action_reprs": "zzlabel",
        "action_reprs": ["[textbox]  Search -> TYPE: wedding", "zzlabel", "zzlater"],
    }
    others = [mind2web_row(index=2, confirmed_task="zzgoal"), mind2web_row("t1", confirmed_task="zzgoal")]
    write_mind2web(folder / "data/test_task-0.parquet", [mind2web_row(index=1, **secret), *others])
    return load_benchmark("mind2web", folder / "data", folder / "out")[0]


def mind2web_blocks(folder: Path) -> pa.Table:
    line = {
        "annotation_id": "t",
        "action_uid": "zzuid",
        "task": "Rent a truck",
        "website": "zzwebsite",
        "operation": "SELECT",
        "value": "zzvalue",
        "bbox": [[137, 1711, 219, 43]],
        "previous_actions": ["[button]  Reservations -> HOVER"],
        "target_action_reprs": "zzlabel",
        "step": 1,
        "total_steps": 14,
        "split": "task",
        "blocks_path": "zzpath",
        "target_blocks": {"1": [[137, 911, 219, 43]]},
    }
    (folder / "data/zzpath").mkdir(parents=True)
    (folder / "data/zzpath/1.png").write_bytes(picture(1280, 1000))
    (folder / "data/zz_blocks.jsonl").write_text(json.dumps(line))
    return load_benchmark("mind2web_blocks", folder / "data", folder / "out")[0]


def android_control(level: Any) -> Callable[[Path], pa.Table]:
    def read(folder: Path) -> pa.Table:
        def tree(text: str) -> bytes:
            return forest(((137, 111, 219, 143), True, 2, text))

        place = {"x": 141, "y": 113}
        done = [
            {"action_type": "click", **place},
            {"action_type": "type", "text": "zzvalue", **place},
            {"action_type": "open_app", "app_name": "zzlater"},
            {"action_type": "click", **place},
        ]
        record = episode(
            3,
            done,
            accessibility_trees=[tree("Trash"), tree("zzelement"), tree("zzlater"), tree("zzlater"), tree("zzlater")],
            step_instructions=[b"zzearlier", b"Enter the name" if level == "low" else b"zzown", b"zzlater", b"zzlater"],
        )
        write_android_control(folder / "data", [record, episode(4, goal=[b"zzgoal"])])
        options = Options(level=level)
        return load_benchmark("android_control", folder / "data", folder / "out", options)[0]

    return read


def screenspot(folder: Path) -> pa.Table:
    (folder / "images").mkdir(parents=True)
    (folder / "images/zzfile.png").write_bytes(picture(400, 200))
    items = [
        {"img_filename": "zzfile.png", "instruction": instruction, "bbox": [137, 111, 219, 43], "data_type": "icon"}
        | {"data_source": "ios", "id": f"item{i}", "note": "zznote"}
        for i, instruction in enumerate(["close the window", "zzgoal"])
    ]
    (folder / "screenspot_mobile.json").write_text(json.dumps(items))
    source = folder / "screenspot_mobile.json"
    return load_benchmark("screenspot", source, folder / "out", Options(images=str(folder / "images")))[0]


def jsonl(instruction: str | None) -> Callable[[Path], pa.Table]:
    def read(folder: Path) -> pa.Table:
        label: dict[str, Any] = {
            "action_type": "TYPE",
            "value": "zzvalue",
            "point": [47, 19],
            "boxes": [[41, 17, 53, 23]],
        }
        mine = user_row(step_index=1, episode_steps=2, family="zzfamily", episode_id="zzepisode", **label)
        mine |= {"instruction": instruction} if instruction else {}
        later = user_row("s1", step_index=2, goal="zzgoal", history=["zzlater"], **label)
        write_user_rows(folder / "data", [mine, later])
        return load_benchmark("jsonl", folder / "data", folder / "out")[0]

    return read


def miniwob(folder: Path) -> pa.Table:
    snapshot = REPOSITORY / "data" / "miniwob"
    targets = pq.read_table(snapshot / TARGETS_FILE).to_pylist()
    for target in targets:
        if target["step_id"] == "miniwob/enter-password/2/1":
            target |= {"kind": "zzlabel", "name": "zzlabel", "names": ["zzlabel"]}
    pq.write_table(pa.Table.from_pylist(targets, pq.read_schema(snapshot / TARGETS_FILE)), folder / TARGETS_FILE)
    for split in SPLITS:
        table = pq.read_table(snapshot / f"{split}.parquet").cast(STEP_SCHEMA)
        wanted = "miniwob/enter-password/2" if split == "train" else table["episode_id"][0].as_py()
        some = table.filter(pc.equal(table["episode_id"], wanted)).to_pylist()
        if split == "train":
            some[1] |= {"value": "zzvalue", "boxes": [[37.0, 131.0, 119.0, 143.0]]}
            some[2] |= {"goal": "zzgoal"}
        pq.write_table(pa.Table.from_pylist(some, STEP_SCHEMA), folder / f"{split}.parquet")
    return load_snapshot(folder)


PHONE = {"step_id": "3_1", "goal": "Restore the report", "history": ("CLICK [Trash]",)}
SHOP: dict[str, Any] = {"step_id": "s0", "goal": "Buy a scarf", "history": ("CLICK [Scarves]",)}
SOURCES = {
    "mind2web": Source(
        mind2web,
        "t0_zzuid",
        "Find a photographer",
        ("[textbox]  Search -> TYPE: wedding",),
        secrets=("137", "1711", "911", "219"),
    ),
    "mind2web_blocks": Source(
        mind2web_blocks, "t_zzuid", "Rent a truck", ("[button]  Reservations -> HOVER",), secrets=("137", "911", "219")
    ),
    "android_control high": Source(android_control("high"), **PHONE, secrets=("137", "111", "141", "113")),
    "android_control low": Source(
        android_control("low"), **PHONE, instruction="Enter the name", secrets=("137", "111", "141", "113")
    ),
    "screenspot": Source(screenspot, "item0", "close the window", secrets=("137", "111", "219")),
    "ui_vision": Source(
        lambda folder: load_benchmark("ui_vision", write_board(folder / "data", "ui_vision"), folder / "out")[0],
        "element_grounding_basic_0",
        "close the window",
        secrets=("160", "240", "Button", "gimp"),
    ),
    "jsonl": Source(jsonl(None), **SHOP, secrets=("41", "47", "53")),
    "jsonl with instructions": Source(jsonl("Now press it"), **SHOP, instruction="Now press it", secrets=("41", "47")),
    "miniwob": Source(
        miniwob,
        "miniwob/enter-password/2/1",
        'Enter the password "bl3H" into both text fields and press submit.',
        ("[field] Password -> TYPE: bl3H",),
        secrets=("37", "131", "119", "143"),
    ),
}

TASK = {
    "mind2web": "Task: Find a photographer\nPrevious actions:\n1. [textbox]  Search -> TYPE: wedding\n",
    "mind2web_blocks": "Task: Rent a truck\nPrevious actions:\n1. [button]  Reservations -> HOVER\n",
    "android_control high": "Task: Restore the report\nPrevious actions:\n1. CLICK [Trash]\n",
    "android_control low": "Task: Restore the report\nInstruction for this step: Enter the name\n"
    "Previous actions:\n1. CLICK [Trash]\n",
    "screenspot": "Task: close the window\nPrevious actions:\nnone\n",
    "ui_vision": "Task: close the window\nPrevious actions:\nnone\n",
    "jsonl": "Task: Buy a scarf\nPrevious actions:\n1. CLICK [Scarves]\n",
    "jsonl with instructions": "Task: Buy a scarf\nInstruction for this step: Now press it\n"
    "Previous actions:\n1. CLICK [Scarves]\n",
    "miniwob": 'Task: Enter the password "bl3H" into both text fields and press submit.\n'
    "Previous actions:\n1. [field] Password -> TYPE: bl3H\n",
}
COMPACT = {
    "mind2web": "Task: Find a photographer\nDone: [textbox]  Search -> TYPE: wedding",
    "mind2web_blocks": "Task: Rent a truck\nDone: [button]  Reservations -> HOVER",
    "android_control high": "Task: Restore the report\nDone: CLICK [Trash]",
    "android_control low": "Task: Restore the report\nNow: Enter the name\nDone: CLICK [Trash]",
    "screenspot": "Task: close the window\nDone: none",
    "ui_vision": "Task: close the window\nDone: none",
    "jsonl": "Task: Buy a scarf\nDone: CLICK [Scarves]",
    "jsonl with instructions": "Task: Buy a scarf\nNow: Now press it\nDone: CLICK [Scarves]",
    "miniwob": 'Task: Enter the password "bl3H" into both text fields and press submit.\n'
    "Done: [field] Password -> TYPE: bl3H",
}
DEVICE = {"web": "web page", "mobile": "phone"}
ACTIONS = {
    "web": """- CLICK: click the element; no value
- TYPE: type the value into the element
- SELECT: choose the value in the drop-down list
""",
    "mobile": """- CLICK: tap the element; no value
- LONG_PRESS: press and hold the element; no value
- TYPE: type the value into the field that has the focus
- SCROLL: move the content on; the value is up, down, left or right, the direction in which the view moves
- OPEN_APP: open an app; the value is its name
- BACK: go back; no value
- HOME: go to the home screen; no value
- WAIT: wait for the screen to change; no value
""",
}
PLANNER = (
    "You operate a {device} to complete a task.\n{task}Decide on the single next action. "
    'Describe in "plan" which element to act on, so precisely that somebody who sees only the screenshot and your '
    "description finds it.\nAction types:\n{actions}Answer with one JSON object and nothing else: "
    '{{"plan": "...", "action_type": "...", "value": "..."}}'
)
END_TO_END = (
    "You operate a {device} to complete a task.\n{task}Decide on the single next action, and where it acts.\n"
    "Action types:\n{actions}Answer with one JSON object and nothing else, the point being the pixel coordinates of the "
    'element\'s centre, or empty where the action has no target: {{"action_type": "...", "value": "...", "point": "(x,y)"}}'
)
GROUNDER = (
    f"Locate the element that this instruction refers to, precisely.\nInstruction: {PLAN}\n"
    "Answer with the pixel coordinates of its centre as (x,y) and nothing else."
)


def expected(name: str, style: Style) -> tuple[str, str, str]:
    """The prompts of planner, end-to-end agent and grounder."""
    if style == "compact":
        return COMPACT[name], COMPACT[name], PLAN
    parts = {"device": DEVICE[style], "task": TASK[name], "actions": ACTIONS[style]}
    return PLANNER.format(**parts), END_TO_END.format(**parts), GROUNDER


@pytest.fixture(scope="module", params=list(SOURCES))
def read(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, pa.Table]:
    return request.param, SOURCES[request.param].read(tmp_path_factory.mktemp("source"))


def text_of(messages: list[Message]) -> str:
    [message] = messages
    image, text = message["content"]
    assert (message["role"], image["type"], text["type"]) == ("user", "image", "text")
    return str(text["text"])


Prompts = tuple[set[str], set[str], set[str]]
"""The prompts of planners, end-to-end agents and grounders."""


def prompts_in_the_loop(step: pa.Table, style: Style) -> Prompts:
    """All prompts about one step, when an agent acts and when plans are written and verified."""
    models = Models(base_planner="m", base_grounder="m", planners={"p": "m"}, verifiers={"v": "m"}, prompts=style)  # type: ignore[dict-item]
    [label] = step.to_pylist()
    answer = planner_answer(PLAN, label["action_type"], label["value"])
    planner, agent = Scripted(lambda _: generation(answer)), Scripted(lambda _: generation("{}"))
    grounder = Scripted(lambda _: generation("(1,1)"))
    predict(planner, grounder, step, models, 8, 8)
    predict_end_to_end(agent, step, models, 8)
    screens = Screens(step, RESIZE)
    plans = write_candidates(Planner(planner, screens, style), "p", step, Regeneration(plans_per_planner=1), 0)
    give_verdicts(Grounder(grounder, screens, style, Space.RESIZED, 8), "v", plans, screens)
    planners, agents, grounders = (
        {text_of(request.messages) for request in engine.requests} for engine in (planner, agent, grounder)
    )
    return planners, agents, grounders


def learnt(step: pa.Table, style: Style) -> Prompts:
    """The prompts about one step that SFT and GRPO learn from, and that GRPO chooses weights by."""
    [label] = step.to_pylist()
    data, screens = rows(row(label["step_id"], PLAN, box=label["boxes"][0])), Screens(step, RESIZE)
    planners, agents = (
        {
            text_of(example["prompt"])
            for example in (*examples, *grpo_prompts(data["step_id"].to_pylist(), step, screens, style, agent))
        }
        | {text_of(ask(name).messages) for name, ask in requests_of(step, screens, style, agent).items()}
        for agent, examples in (
            ("decoupled", planner_examples(data, step, screens, style)),
            ("end_to_end", end_to_end_examples(data, step, screens, style, Space.RESIZED)),
        )
    )
    grounders = grounder_examples(data, screens, style, Space.RESIZED)
    return planners, agents, {text_of(example["prompt"]) for example in grounders}


def test_models_see_what_they_may_and_nothing_else(read: tuple[str, pa.Table]) -> None:
    name, steps = read
    source = SOURCES[name]
    step = steps.filter(pc.equal(steps["step_id"], source.step_id))
    [seen] = step.to_pylist()
    assert (seen["goal"], tuple(seen["history"]), seen.get("instruction")) == (
        source.goal,
        source.history,
        source.instruction,
    )
    for style in STYLES:
        prompts = expected(name, style)
        for shown in (prompts_in_the_loop(step, style), learnt(step, style)):
            assert shown == tuple({text} for text in prompts)
        for text in prompts:
            assert not [secret for secret in ("zz", *source.secrets) if secret in text]


def test_the_record_did_hold_what_was_planted(read: tuple[str, pa.Table]) -> None:
    name, steps = read
    [step] = [step for step in steps.to_pylist() if step["step_id"] == SOURCES[name].step_id]
    assert step["boxes"] and (step["value"] == "zzvalue" or name in ("screenspot", "ui_vision"))
    assert "zzgoal" in steps["goal"].to_pylist() or name in ("mind2web_blocks", "ui_vision")


@pytest.mark.parametrize("level", ["high", "low"])
def test_a_step_shows_its_instruction_at_the_low_level_only(tmp_path: Path, level: Any) -> None:
    write_android_control(tmp_path / "data", [episode(0), episode(3)])
    steps, _ = load_benchmark("android_control", tmp_path / "data", tmp_path / "out", Options(level=level))
    assert steps.num_rows == 2 * len(ACTIONS_OF_AN_EPISODE)
    for task in planner_inputs(steps):
        mine = f"do step {task.step_id.rsplit('_')[-1]}\n"
        for style in STYLES:
            for text in (text_of(task.messages(style)), text_of(task.end_to_end_messages(style))):
                assert text.count("do step") == text.count(mine) == (1 if level == "low" else 0)
