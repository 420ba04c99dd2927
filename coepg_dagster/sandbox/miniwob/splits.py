"""The split rule of the embedded benchmark. It was fixed before any model was scored.

1. Families. UNSEEN_FAMILIES are played in test_family only. All others, KNOWN_FAMILIES, make up the rest.
2. Seeds. Each split draws from its own range of seeds (SEEDS), pretraining included; no range meets another.
3. Words. A word is a run of letters and digits, lower-cased, of three characters or more, that is not INTERFACE
   vocabulary (the fixed wording of the pages: "submit", "password", colours, ordinals). It is held out when the
   SHA-256 of its UTF-8 bytes, as a number, is divisible by HELD_OUT_ONE_IN. An episode is in test_text if the name of
   a target or a value of one of its steps has a held-out word. In pretraining, train, validation and test_seed no
   goal, target name, history or value has one. Held-out words may still be visible on those pages, but no step
   asks for them. test_family has no such limit.
4. Pages. No episode of validation or a test split begins with the goal and the screenshot of a train episode or of
   another evaluated one (pages with few variants repeat themselves under new seeds).

`assert_disjoint` checks 1–4 on finished steps.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from coepg_dagster.experiment.schema import MINIWOB_SPLITS

Split = Literal["pretrain", "train", "validation", "test_seed", "test_text", "test_family"]

SEEDS: Final[dict[Split, range]] = {
    "train": range(0, 100_000),
    "validation": range(100_000, 200_000),
    "test_seed": range(200_000, 300_000),
    "test_text": range(300_000, 400_000),
    "test_family": range(400_000, 500_000),
    "pretrain": range(1_000_000, 1_000_000_000),
}
SPLITS: Final[tuple[Split, ...]] = MINIWOB_SPLITS
"""The splits of the shipped snapshot, which are those that an experiment with the reader `miniwob` may name."""

UNSEEN_FAMILIES: Final = (
    "choose-date-easy",
    "click-button-sequence",
    "click-checkboxes-large",
    "click-menu-2",
    "click-tab-2-hard",
    "form-sequence-3",
    "login-user-popup",
    "multi-layouts",
    "read-table-2",
)
KNOWN_FAMILIES: Final = (
    "choose-list",
    "click-button",
    "click-checkboxes",
    "click-collapsible-2-nodelay",
    "click-collapsible-nodelay",
    "click-color",
    "click-dialog",
    "click-dialog-2",
    "click-link",
    "click-menu",
    "click-option",
    "click-shades",
    "click-shape",
    "click-tab",
    "click-tab-2",
    "click-test-2",
    "click-widget",
    "email-inbox-noscroll",
    "enter-password",
    "enter-text",
    "enter-text-2",
    "find-word",
    "focus-text-2",
    "form-sequence-2",
    "identify-shape",
    "login-user",
    "multi-orderings",
    "navigate-tree",
    "odd-or-even",
    "phone-book",
    "read-table",
    "search-engine",
    "social-media",
    "use-autocomplete-nodelay",
)

GENERAL_PAGE: Final = "general-page"
"""The one page that is not MiniWoB++'s, for pretraining only: widgets in random order, and plain requests about them."""

HELD_OUT_ONE_IN: Final = 8

_INTERFACE_TEXT: Final = """
    10in 10th 11in 11th 12th 13th 14th 15th 1in 1st 2016 2in 2nd 3rd 4th 5ft 5th 6ft 6th 7th 8th 9in 9th address
    all amp and appetizer aqua area back below best between birth black block blue book both box button cancel
    case check checkbox checkboxes choose circle click clicking close collapsible color colored contact copy
    corresponds country cyan date delete describes dialog digit directed director done dropdown each email embed
    ends enter even expand field fields figure file find first focus folder for form forward from gender genre
    green grey hit icon important input into item items label labeled language large last letter letters like
    lime link links list login lower magenta mark maybe menu more movie movies mute name named navigate next
    nothing number numbers odd okay olive one option orange out paragraph password phone pink play playback post
    press prev previous purple radio rectangle red released religion reply report result retweet save search
    section sections select send shades shape share small star starts stop submit switch tab tabs tags text
    textarea textbox that the their them then through trash tree triangle tweet two type upper use user username
    value verify via when white widget with word words year yellow yes zoom
"""
INTERFACE: Final = frozenset(_INTERFACE_TEXT.split())
"""The fixed wording of the pages: never held out."""


@dataclass(frozen=True)
class StepKey:
    """The fields of a step that the split rule checks. `names`: of every target; `page`: a hash of goal and screenshot."""

    step_id: str
    split: str
    episode_id: str
    family: str
    seed: int
    step_index: int
    goal: str
    history: tuple[str, ...]
    names: tuple[str, ...]
    value: str
    page: str

    @classmethod
    def of(cls, row: Mapping[str, Any], names: Iterable[str]) -> StepKey:
        """The key of a step (STEP_SCHEMA) whose targets have these names."""
        return cls(
            step_id=row["step_id"],
            split=row["split"],
            episode_id=row["episode_id"],
            family=row["family"],
            seed=row["seed"],
            step_index=row["step_index"],
            goal=row["goal"],
            history=tuple(row["history"]),
            names=tuple(names),
            value=row["value"],
            page=page_hash(row["goal"], row["screenshot"]),
        )


class SplitError(ValueError):
    """A step lies in a split where the rule does not allow it."""


def words(text: str) -> list[str]:
    """The words of a text to which the rule applies, lower-cased."""
    return [w for w in re.findall(r"[^\W_]+", text.casefold()) if len(w) >= 3 and w not in INTERFACE]


def is_held_out_word(word: str) -> bool:
    """Whether a (lower-cased) word belongs to the held-out class."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest(), "big") % HELD_OUT_ONE_IN == 0


def held_out(text: str) -> list[str]:
    """The held-out words of a text."""
    return [w for w in words(text) if is_held_out_word(w)]


def families_of(split: Split) -> tuple[str, ...]:
    """The families that are played for a split."""
    return UNSEEN_FAMILIES if split == "test_family" else KNOWN_FAMILIES


def goal_wanted(split: Split, goal: str) -> bool:
    """Whether an episode with this goal can be in a split (`episode_wanted` checks its targets)."""
    return split in ("test_text", "test_family") or not held_out(goal)


def episode_wanted(split: Split, targets: Iterable[str]) -> bool:
    """Whether an episode belongs to a split, by the names and values of its targets."""
    if split == "test_family":
        return True
    return any(held_out(text) for text in targets) == (split == "test_text")


def page_hash(goal: str, screenshot: bytes) -> str:
    """The identity of a page: goal and pixels as stored."""
    return hashlib.sha256(goal.encode() + b"\0" + screenshot).hexdigest()[:32]


def assert_disjoint(steps: Iterable[StepKey]) -> dict[str, dict[str, int]]:
    """Checks the rule on steps of any splits and returns {split: {"steps", "episodes", "families"}}.

    Raises SplitError naming the first offending step.
    """
    rows = list(steps)
    home: dict[str, str] = {}
    pages: dict[str, StepKey] = {}
    has_held_out: dict[str, bool] = {}
    seen_ids: set[str] = set()
    for row in rows:
        if row.split not in SEEDS:
            raise SplitError(f"{row.step_id}: unknown split {row.split!r}")
        if row.step_id in seen_ids:
            raise SplitError(f"{row.step_id}: this step_id occurs twice")
        seen_ids.add(row.step_id)
        if home.setdefault(row.episode_id, row.split) != row.split:
            raise SplitError(f"{row.step_id}: its episode is in {home[row.episode_id]} and in {row.split}")
        if row.family not in families_of(row.split):
            raise SplitError(f"{row.step_id}: the family {row.family} does not belong in {row.split}")
        if row.seed not in SEEDS[row.split]:
            raise SplitError(f"{row.step_id}: the seed {row.seed} is not one of {row.split}")
        in_targets = [w for text in (*row.names, row.value) for w in held_out(text)]
        has_held_out[row.episode_id] = has_held_out.get(row.episode_id, False) or bool(in_targets)
        if row.split not in ("test_text", "test_family"):
            offending = in_targets + [w for text in (row.goal, *row.history) for w in held_out(text)]
            if offending:
                raise SplitError(f"{row.step_id}: the held-out word {offending[0]!r} is in a step of {row.split}")
        if row.step_index == 0 and row.split != "pretrain":
            other = pages.setdefault(row.page, row)
            if other is not row and not row.split == other.split == "train":
                raise SplitError(f"{row.step_id}: the same goal and screenshot begin {other.step_id} ({other.split})")
    for row in rows:
        if row.split == "test_text" and not has_held_out[row.episode_id]:
            raise SplitError(f"{row.step_id}: no step of this test_text episode asks for a held-out word")
    return _counts(rows)


def _counts(rows: list[StepKey]) -> dict[str, dict[str, int]]:
    steps = Counter(row.split for row in rows)
    return {
        split: {
            "steps": n,
            "episodes": len({row.episode_id for row in rows if row.split == split}),
            "families": len({row.family for row in rows if row.split == split}),
        }
        for split, n in steps.items()
    }
