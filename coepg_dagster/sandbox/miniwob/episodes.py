"""One episode: an oracle acts in a browser, which gives labelled steps.

`splits` decides which episodes are kept, `collect` stores them.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from PIL import Image

from coepg_dagster.sandbox.miniwob.browser import Browser
from coepg_dagster.sandbox.miniwob.elements import Box, Element
from coepg_dagster.sandbox.miniwob.oracles import ORACLES, Move, OracleError, look

MAX_STEPS: Final = 16


@dataclass(frozen=True)
class EpisodeStep:
    """One labelled step: the screen, and the oracle's move."""

    image: Image.Image
    elements: tuple[Element, ...]
    history: tuple[str, ...]
    move: Move

    @property
    def boxes(self) -> list[Box]:
        """The boxes of all correct targets, px."""
        return [piece for target in self.move.targets for piece in target.pieces]

    @property
    def target(self) -> int:
        """Index in `elements` of the element that was acted on."""
        return self.elements.index(self.move.targets[0])


@dataclass(frozen=True)
class Episode:
    """A finished episode. `reason`: "" when the environment rewarded it, else why it is not kept."""

    family: str
    seed: int
    goal: str
    steps: tuple[EpisodeStep, ...]
    reason: str = ""

    @property
    def episode_id(self) -> str:
        return f"miniwob/{self.family}/{self.seed}"


def play(
    browser: Browser, family: str, seed: int, goal_wanted: Callable[[str], bool] | None = None, reload: bool = True
) -> Episode:
    """Lets the family's oracle play one episode (`reload`: see Browser.reset); ends at once on a goal that is not wanted.

    Raises KeyError for a family without an oracle.
    """
    oracle = ORACLES[family]
    goal = browser.reset(family, seed, reload)
    steps: list[EpisodeStep] = []
    if goal_wanted is not None and not goal_wanted(goal):
        return Episode(family, seed, goal, (), "words of another split")
    moves: list[Move] = []
    while len(steps) < MAX_STEPS:
        view = look(browser, goal, moves)
        try:
            move = oracle(view)
        except (OracleError, LookupError) as error:
            return Episode(family, seed, goal, tuple(steps), f"the oracle does not understand the page: {error}")
        if move is None:
            return Episode(family, seed, goal, tuple(steps), "the oracle knows no next move")
        history = tuple(m.history for m in moves)
        steps.append(EpisodeStep(browser.screenshot(), view.elements, history, move))
        browser.act(move.action_type, move.targets[0].centre, move.value)
        moves.append(move)
        done, reward = browser.outcome()
        if done:
            return Episode(family, seed, goal, tuple(steps), "" if reward > 0 else f"reward {reward:g}")
    return Episode(family, seed, goal, tuple(steps), f"not finished after {MAX_STEPS} steps")


def encode_png(image: Image.Image, level: int = 9) -> bytes:
    """A screenshot as palette PNG: lossless up to 256 colours, else reduced to 256 by median cut."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.uint32)
    packed = (pixels[..., 0] << 16) | (pixels[..., 1] << 8) | pixels[..., 2]
    colors, index = np.unique(packed, return_inverse=True)
    if len(colors) <= 256:
        small = Image.fromarray(index.reshape(packed.shape).astype(np.uint8), mode="P")
        small.putpalette(np.stack([colors >> 16, (colors >> 8) & 255, colors & 255], axis=1).astype(np.uint8).tobytes())
    else:
        small = image.convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    buffer = io.BytesIO()
    small.save(buffer, format="PNG", compress_level=level, optimize=level == 9)
    return buffer.getvalue()
