from __future__ import annotations

import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from coepg_dagster import prompts, yaml_files
from coepg_dagster.cli import app
from coepg_dagster.experiment.strict import ExperimentError
from coepg_dagster.sandbox.miniwob.splits import GENERAL_PAGE, KNOWN_FAMILIES, UNSEEN_FAMILIES
from coepg_dagster.sandbox.pretraining import batches, corpus, evaluate, model_cards, recipe, tiny_models, train
from coepg_dagster.sandbox.pretraining import tokenizer as tokens
from coepg_dagster.sandbox.pretraining.batches import IGNORED, Batches, Contents
from coepg_dagster.sandbox.pretraining.corpus import BadShards, Corpus
from coepg_dagster.sandbox.pretraining.tiny_models import SCREEN_HEIGHT, SCREEN_WIDTH
from coepg_dagster.sandbox.pretraining.wordings import WORDINGS
from tests.project import REPOSITORY as ROOT
from tests.sandbox.pretraining.conftest import SHARD_SCHEMA, page, write_shard

RECIPE = recipe.Recipe(
    vocabulary=800,
    towers={"t": recipe.TowerStage(preset="small", steps=25, batch=8, warm_up=5, learning_rate=3e-3)},
    checkpoints={
        "g": recipe.Checkpoint(
            role="grounder",
            tower="t",
            wordings={"A": 1},
            steps=20,
            batch=8,
            warm_up=5,
            dense_weight=0.1,
            text_tokens=64,
        ),
        "p": recipe.Checkpoint(
            role="planner", tower="t", wordings={"B": 1}, steps=3, batch=4, warm_up=1, text_tokens=120
        ),
    },
)


def task(role: str) -> Contents:
    return Contents(role, {"A": 1.0} if role == "grounder" else {"B": 1.0}, "test", text_tokens=160)


def test_other_splits_are_refused(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "x.parquet", 2, split="test_seed")
    with pytest.raises(BadShards, match="test_seed"):
        corpus.read([shard], work_dir=tmp_path)


def test_a_screenshot_of_another_size_than_its_row_says_is_not_decoded(tmp_path: Path) -> None:
    bomb = io.BytesIO()
    Image.new("1", (13000, 13000)).save(bomb, "PNG")
    wider = io.BytesIO()
    Image.new("RGB", (SCREEN_WIDTH + 1, SCREEN_HEIGHT)).save(wider, "PNG")
    for screenshot, why in (
        (bomb, "at most 50000000 are decoded"),
        (wider, "another size"),
        (io.BytesIO(b"x"), "cannot"),
    ):
        row = page(0) | {"screenshot": screenshot.getvalue()}
        pq.write_table(pa.Table.from_pylist([row], SHARD_SCHEMA), tmp_path / "x.parquet")
        with pytest.raises(BadShards, match=rf"x.parquet: .*{why}.* collect it again"):
            corpus.read([tmp_path / "x.parquet"], work_dir=tmp_path)


def test_a_process_that_read_screens_leaves_none_behind(tmp_path: Path) -> None:
    """Nor does it of those that it refuses, which end it here."""
    taken, refused = (write_shard(tmp_path / f"{split}.parquet", 2, split=split) for split in ("pretrain", "test_seed"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    program = f"""
from pathlib import Path
from {corpus.__name__} import read
read([Path({str(taken)!r})])
print(len(list(Path({str(temporary)!r}).iterdir())), flush=True)
read([Path({str(refused)!r})])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"TMPDIR": str(temporary)}, check=False, capture_output=True
    )
    assert (done.returncode, done.stdout) == (1, b"1\n") and b"BadShards" in done.stderr, done.stderr
    assert list(temporary.iterdir()) == []


def test_screens_are_read_back_from_their_directory(drawn: Corpus) -> None:
    again = Corpus.open(drawn.directory)
    assert list(again.steps) == list(drawn.steps)
    assert np.array_equal(again.images, drawn.images)
    assert drawn.indices(held_out=True) == [15, 31]


def test_a_stage_sees_the_screens_of_its_families_only(drawn: Corpus) -> None:
    steps = [replace(step, family="general-page" if i % 3 else "click-link") for i, step in enumerate(drawn.steps)]
    mixed = Corpus(steps, drawn.images, drawn.directory)
    chosen = mixed.indices(held_out=False, families=["click-link"])
    assert chosen == [i for i in mixed.indices(held_out=False) if i % 3 == 0]
    both = mixed.indices(held_out=False, families=["click-link", "general-page"])
    assert both == mixed.indices(held_out=False)
    with pytest.raises(BadShards, match=r"no screen of the family click-tab .* collect it, or leave it out"):
        mixed.indices(held_out=False, families=["click-link", "click-tab"])


def test_the_base_pair_of_the_recipe_knows_few_families_and_its_teachers_all() -> None:
    shipped = recipe.read(ROOT / "models" / "recipe.yaml")
    for name, checkpoint in shipped.checkpoints.items():
        tower = shipped.towers[checkpoint.tower]
        assert tower.families == checkpoint.families
        if name.startswith("base-"):
            assert GENERAL_PAGE in (checkpoint.families or ())
            assert len(set(checkpoint.families or ()) & set(KNOWN_FAMILIES)) == 9
            assert not set(checkpoint.families or ()) & set(UNSEEN_FAMILIES)
        else:
            assert checkpoint.families is None
        assert set(checkpoint.wordings) == set(WORDINGS), "nobody speaks a wording that another does not know"


@pytest.mark.parametrize("role", ["grounder", "planner"])
def test_sequences_hold_exactly_what_the_chat_template_gives(drawn: Corpus, role: str) -> None:
    tokenizer = tokens.fit(drawn.texts())
    batch = Batches(drawn.steps, drawn.indices(held_out=False), task(role), tokenizer, batch=6, steps=1, seed=0)[0]
    for row in range(6):
        first = batch["segments"][row] == 1
        wanted = batch["labels"][row][batch["labels"][row] != IGNORED]
        end = tokens.token_id(tokenizer, tokens.IM_END)
        answer = tokenizer.decode(wanted[: list(wanted).index(end)])
        plan = tokenizer.decode(batch["text"][row][first]).split(tokens.IM_END)[0]
        chat = prompts.grounder_messages(plan, "compact") + prompts.assistant(answer)
        whole = tokenizer.apply_chat_template(chat, tokenize=False).removesuffix(f"{tokens.IM_END}\n")
        expected = tokenizer.encode(whole.split(tokens.VISION_END)[1], add_special_tokens=False)
        assert batch["text"][row][first].tolist() == expected
        at = batch["label_at"][row][0]
        assert batch["text"][row][at + 1] == wanted[0]
        if role == "planner":
            assert prompts.parse_planner(answer) is not None


def test_batches_hang_on_seed_and_step_only(drawn: Corpus) -> None:
    tokenizer = tokens.fit(drawn.texts())
    made = [
        Batches(drawn.steps, [0, 1, 2], task("grounder"), tokenizer, batch=4, steps=9, seed=s)[5] for s in (1, 1, 2)
    ]
    assert all(np.array_equal(made[0][name], made[1][name]) for name in made[0])
    assert not np.array_equal(made[0]["text"], made[2]["text"])


def test_points_lie_in_the_shifted_boxes(drawn: Corpus) -> None:
    elements = drawn.steps[0].elements
    for shifted in batches.shifted(elements, 5, 9):
        assert shifted is not None
        point = prompts.parse_grounder(batches.centre_answer(shifted))
        assert evaluate.inside(point, [shifted.box])
    assert batches.shifted([replace(elements[0], box=(0, 60, 4, 64))], -3, 0) == [None]


def test_a_typed_value_is_replaced_in_goal_and_answer(drawn: Corpus) -> None:
    step = drawn.steps[2]
    other = batches.with_other_value(step, ["Other"], Random(0))
    assert other.value != step.value
    assert other.value in other.goal
    assert step.value not in other.goal


def test_shifting_moves_the_pixels_and_the_labels(drawn: Corpus) -> None:
    tokenizer = tokens.fit(drawn.texts())
    bank = train.Bank(drawn, batches.dense_labels(drawn.steps, tokenizer), torch.device("cpu"))
    image, shift = torch.tensor([3]), torch.tensor([[4, -6]])
    moved, still = bank.pictures(image, shift)[0], bank.images[3]
    assert torch.equal(moved[:-6, 4:], still[6:, :-4])
    assert (moved[-6:] == 255).all() and (moved[:, :4] == 255).all()
    words, centres = bank.targets(image, torch.zeros(1, 2, dtype=torch.long), len(tokenizer))
    element = drawn.steps[3].elements[0]
    x, y = (int(c) for c in element.centre)
    cell = y // 28 * 6 + x // 28
    assert words[0, cell, tokens.token_id(tokenizer, "button")] == 1
    assert centres[0, cell].tolist() == [x, y]
    assert (centres[0, -1] == IGNORED).all()


def test_a_short_run_learns_and_saves(drawn: Corpus, tmp_path: Path) -> None:
    seen: list[str] = []
    reports = train.run(RECIPE, drawn, tmp_path, train.Machine(), progress=lambda stage, *_: seen.append(stage))
    assert set(reports) == {"tower t", "g", "p"} == set(seen)
    assert reports["tower t"].losses[-1] < reports["tower t"].losses[0]
    assert reports["g"].losses[-1] < 0.7 * reports["g"].losses[0]
    model, processor = tiny_models.load(tmp_path / "g")
    scores = evaluate.grounding(model, processor, drawn, drawn.indices(held_out=True), "A", 4)
    assert scores["all"].count == 4
    planner = tiny_models.load(tmp_path / "p")
    rates = evaluate.pair(planner, (model, processor), drawn, drawn.indices(held_out=True))
    assert {name: rate.count for name, rate in rates.items()} == {"element": 2, "operation": 2, "step": 2}
    (mine := tmp_path / "mine.yaml").write_text(yaml_files.dump(RECIPE.model_dump(mode="json")))
    model_cards.write(tmp_path, mine, drawn, ROOT / "data" / "miniwob", cases=4)
    for name, steps in (("g", "20 x 8"), ("p", "3 x 4")):
        card = (tmp_path / name / "README.md").read_text()
        assert "trained from scratch by `coepg pretrain sandbox` with `mine.yaml`" in card
        assert f"| {steps} screens |" in card


def test_the_shipped_recipe_is_valid_and_a_wrong_one_is_not(tmp_path: Path) -> None:
    for name in ("recipe.yaml", "recipe-middle.yaml", "recipe-large.yaml"):
        assert {"base-planner", "base-grounder"} <= set(recipe.read(ROOT / "models" / name).checkpoints)
    wrong = tmp_path / "recipe.yaml"
    wrong.write_text("towers: {}\ncheckpoints: {a: {role: planner, tower: nowhere, wordings: {A: 1}, steps: 1}}\n")
    with pytest.raises(ExperimentError, match="nowhere"):
        recipe.read(wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "wrong"], "key `towers`: the key is missing; add it"),
        (["--recipe", "twice"], "the key `towers` stands twice"),
        (["--only", "nothing"], "has base-grounder, base-planner"),
        (["--screens", "nothing", "--out", "out"], "holds no screens: `coepg collect miniwob"),
        (["--out", "wrong"], "File exists"),
    ],
)
def test_mistyped_arguments_of_pretrain(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong").write_text("vocabulary: true\n")
    (tmp_path / "twice").write_text("towers: {}\ncheckpoints: {}\ntowers: {}\n")
    shipped = ["--recipe", str(ROOT / "models" / "recipe.yaml"), "--snapshot", str(ROOT / "data" / "miniwob")]
    refused = CliRunner().invoke(app, ["pretrain", "sandbox", *shipped, *arguments])
    assert refused.exit_code == 1 and message in refused.stderr, refused.stderr
