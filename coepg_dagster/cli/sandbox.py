"""The commands of the embedded benchmark: its pages, its tiny models, and live play."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import typer

from coepg_dagster import yaml_files
from coepg_dagster.cli.common import Device, echo, log_line, open_iteration, print_table, refuse, require_device, say
from coepg_dagster.progress import Pace

app = typer.Typer()


@app.command()
def collect(
    benchmark: Annotated[Literal["miniwob"], typer.Argument(help="the benchmark to collect")],
    out: Annotated[Path, typer.Option(help="folder of the shards")] = Path("cache/miniwob"),
    screens_per_family: Annotated[int, typer.Option(help="training screens for pretraining, approximately", min=0)] = 0,
    snapshot: Annotated[Path | None, typer.Option(help="folder of the snapshot to write")] = None,
    processes: Annotated[int, typer.Option(help="browsers at the same time", min=1, max=256)] = 2,
) -> None:
    """Renders MiniWoB++ episodes in headless Chromium, solved by DOM oracles with real mouse and key events.

    Only episodes that the environment rewards are kept. What is there is not collected again, so a killed run resumes.
    Needs Chromium, ChromeDriver and the extra `miniwob`.
    """
    from coepg_dagster.sandbox.miniwob.browser import find_pages, find_programs
    from coepg_dagster.sandbox.miniwob.collect import GENERAL_BLOCKS, STEPS_PER_SHARD, Progress, benchmark_plan, plan
    from coepg_dagster.sandbox.miniwob.collect import collect as collect_shards
    from coepg_dagster.sandbox.miniwob.snapshot import build_snapshot
    from coepg_dagster.sandbox.miniwob.splits import GENERAL_PAGE

    find_programs()
    find_pages()
    out.mkdir(parents=True, exist_ok=True)
    shards = benchmark_plan()
    if screens_per_family:
        blocks = -(-screens_per_family // STEPS_PER_SHARD["pretrain"])
        shards += plan("pretrain", blocks) + plan("pretrain", GENERAL_BLOCKS * blocks, [GENERAL_PAGE])

    pace = Pace()

    def show(state: Progress) -> None:
        done = state.skipped + state.shards
        log_line(f"shards: {pace.text(done, state.of_shards, time.time())}, {state.steps} steps")

    collect_shards(out, shards, processes, show)
    if snapshot is not None:
        echo(yaml_files.dump(build_snapshot(out, snapshot)))


@app.command()
def pretrain(
    benchmark: Annotated[Literal["sandbox"], typer.Argument(help="the benchmark whose models are made")],
    recipe: Annotated[
        Path, typer.Option(help="towers, checkpoints and their settings", exists=True, dir_okay=False)
    ] = Path("models/recipe.yaml"),
    screens: Annotated[Path, typer.Option(help="folder of `coepg collect`")] = Path("cache/miniwob"),
    out: Annotated[Path, typer.Option(help="folder of the checkpoints")] = Path("models"),
    only: Annotated[list[str] | None, typer.Option(help="name of a checkpoint; may be repeated")] = None,
    device: Annotated[Device, typer.Option(help="device for training")] = "cpu",
    parallel: Annotated[int, typer.Option(help="models trained at the same time", min=1, max=256)] = 1,
    loaders: Annotated[
        int, typer.Option(help="processes that prepare batches, per model; 2 to 4 on a GPU", min=0, max=256)
    ] = 0,
    snapshot: Annotated[Path, typer.Option(help="the benchmark, for the model cards", exists=True)] = Path(
        "data/miniwob"
    ),
) -> None:
    """Trains the tiny models of the embedded benchmark from scratch: vision warm-up, grounders, planners.

    Writes a model card for each, with results per split. The full recipe wants a GPU (minutes); a CPU takes many hours.
    """
    require_device(device)
    from coepg_dagster.sandbox.pretraining import corpus, model_cards
    from coepg_dagster.sandbox.pretraining import recipe as recipes
    from coepg_dagster.sandbox.pretraining.train import Machine, run

    paces: defaultdict[str, Pace] = defaultdict(Pace)

    def show(stage: str, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        numbers = " ".join(f"{name}={value:.4g}" for name, value in metrics.items())
        log_line(f"{stage}: {paces[stage].text(step, steps, time.time())}, {numbers}")

    settings = recipes.read(recipe)
    if unknown := sorted(set(only or ()) - settings.checkpoints.keys()):
        refuse(f"--only {unknown[0]}: {recipe} has {', '.join(settings.checkpoints)}")
    out.mkdir(parents=True, exist_ok=True)
    shards = sorted((screens / "pretrain").glob("*/*.parquet"))
    if not shards:
        refuse(f"{screens}/pretrain holds no screens: `coepg collect miniwob --screens-per-family 600` makes them")
    pictures = corpus.read(shards)
    run(settings, pictures, out, Machine(device, parallel, loaders), show, only=only)
    model_cards.write(out, recipe, pictures, snapshot, only=only, device=device)


@app.command()
def play(
    agent: Annotated[str, typer.Argument(metavar="EXPERIMENT@k", help="planner and grounder of iteration k")],
    split: Annotated[str, typer.Option(help="whose episodes are played")] = "test_seed",
    episodes: Annotated[int, typer.Option(help="episodes of each family", min=1)] = 3,
    family: Annotated[list[str] | None, typer.Option(help="only this family; may be repeated")] = None,
    first_seed: Annotated[int | None, typer.Option(help="fresh episodes, from this seed on", min=0)] = None,
    max_steps: Annotated[int, typer.Option(help="most steps of an episode", min=1)] = 16,
    shown: Annotated[int, typer.Option(help="episodes of each family on the page", min=0)] = 2,
    device: Annotated[Device, typer.Option(help="of planner and grounder")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads; more than one slow tiny models", min=1, max=1024)] = 1,
    out: Annotated[Path | None, typer.Option(help="folder to write to instead of the store")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Lets the agent of iteration k act on MiniWoB++ pages in headless Chromium; the page says whether it succeeded.

    Plays the first episodes of a split that is scored offline, or fresh ones of the same families, which need not be
    solvable. Prints success rates; stores every frame, plan and point, and a page that shows them. Needs Chromium, ChromeDriver
    and the extra `miniwob`.
    """
    project, experiment, seed, k = open_iteration(agent)
    require_device(device)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    from coepg_dagster.assets.ledger import Loop, open_instance
    from coepg_dagster.assets.live import Games, play_iteration
    from coepg_dagster.sandbox.miniwob.play_page import rate, why

    pace = Pace()

    def show(done: int, of: int, figures: Mapping[str, float]) -> None:
        if done % 10 == 0 or done == of:
            log_line(f"episodes: {pace.text(done, of, time.time())}, {figures['solved']:g} solved")

    games = Games(split, episodes, family, first_seed, max_steps, shown, device, threads)
    about = play_iteration(Loop(experiment, seed, project.root), open_instance(project), k, games, out, show)
    for ref, reason in about["stale"].items():
        say(f"stale: {ref}: {reason}", "yellow")
    if as_json:
        echo(json.dumps(about))
        return
    rows = [
        [name, *(str(row[key]) for key in ("solved", "episodes", "steps")), why(row["failures"])]
        for name, row in about["families"].items()
    ]
    print_table(f"{agent}, live on MiniWoB++", ("family", "solved", "episodes", "steps", "why not"), rows)
    echo(f"solved: {about['solved']} of {about['episodes']}, {rate(about['success'])} (95 % over episodes)")
    echo(f"macro over families: {rate(about['macro'])} (95 % over families)")
    echo(f"page: {about['page']}")
