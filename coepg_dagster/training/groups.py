"""Passes of SFT whose rows of one step of the benchmark are one row of the model (`packing`).

The rows of D_{k-1} for a step are a group: several plans, one screenshot. A group is never cut. An epoch has as many optimizer
steps as without packing, ceil(rows / batch_size), and its groups in a random order are spread evenly over them, so that a step
has `batch_size` rows on average. Passes and processes share the groups of a step in the same way: they do not decide which
groups it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, TypeVar

import torch
from transformers.trainer_pt_utils import BatchRebalanceSampler

from coepg_dagster.experiment.training import Sft
from coepg_dagster.inference.visual import Screenshots, names
from coepg_dagster.progress import Ended
from coepg_dagster.training.packing import images_of

FIRST: Final = "first"
"""Entry of a batch: the first row of each group, (groups,)."""
Item = TypeVar("Item")


@dataclass(frozen=True)
class Groups:
    """The rows of each group, the optimizer steps of an epoch, and the passes of each process in an optimizer step."""

    rows: Sequence[Sequence[int]]
    steps: int
    passes: int

    @classmethod
    def of(cls, step_ids: Sequence[str], config: Sft, processes: int) -> Self:
        """The groups of rows of these steps; a pass has `micro_batch_size` rows on average, or a group if that is more.

        Raises Ended if an optimizer step has fewer groups than there are processes.
        """
        by_step: dict[str, list[int]] = {}
        for row, step_id in enumerate(step_ids):
            by_step.setdefault(step_id, []).append(row)
        n, rows = len(by_step), len(step_ids)
        steps = math.ceil(rows / config.batch_size)
        groups = n // steps  # of an optimizer step, at least
        if groups < processes:
            part = config.micro_batch_size * processes
            enough = part * math.ceil(rows / max(1, n // processes) / part)
            remedies = [f"`sft.batch_size: {enough}`"] if n >= processes else []
            remedies += ["fewer `training_processes` of sft"] if processes > 1 else []
            raise Ended(
                f"sft.packing: the {rows} rows are of {n} steps of the benchmark, so that an optimizer step of batch_size "
                f"{config.batch_size} has {groups} of these whole, and each of {processes} processes needs one: set "
                + ", or ".join([*remedies, "`sft.packing: false`"])
            )
        passes = math.ceil(rows / (steps * config.micro_batch_size * processes))
        return cls(list(by_step.values()), steps, min(passes, groups // processes))


def parts(items: Sequence[Item], n: int) -> list[Sequence[Item]]:
    """The items, in their order, in `n` parts whose lengths differ by one at most."""
    return [items[len(items) * i // n : len(items) * (i + 1) // n] for i in range(n)]


class GroupOrder(BatchRebalanceSampler):  # type: ignore[misc]
    """The rows of each pass of this process in an epoch. The order of an epoch depends on its number alone, so that a continued
    run has the same.

    transformers leaves passes as they are, and shares them with no other process, for samplers of this class alone.

    Args:
        step: returns the number of optimizer steps that are done.
        shuffle: whether groups are in a random order, by `seed` and epoch; else in that of their first rows.
    """

    def __init__(
        self, groups: Groups, *, step: Callable[[], int], shuffle: bool, seed: int, rank: int, processes: int
    ) -> None:
        self._groups, self._step, self._processes = groups, step, processes
        self.shuffle, self.seed, self.rank = shuffle, seed, rank

    def __len__(self) -> int:
        return self._groups.steps * self._groups.passes

    def __iter__(self) -> Iterator[list[int]]:
        groups = self._groups
        order = list(range(len(groups.rows)))
        if self.shuffle:
            epoch = self._step() // groups.steps
            order = torch.randperm(len(order), generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
        for of_step in parts(order, groups.steps):
            for of_pass in parts(of_step, groups.passes * self._processes)[self.rank :: self._processes]:
                yield [row for group in of_pass for row in groups.rows[group]]


def in_groups(collate: Callable[[list[Any]], Any], shown: Screenshots, *, pixels: bool) -> Callable[[list[Any]], Any]:
    """A collator whose batches have one screenshot for the rows of a step, which follow each other; FIRST says where they begin.

    Args:
        pixels: whether the batch holds pixels, prepared once for each screenshot; else it holds keys in place of them.
    """

    def collated(rows: list[Any]) -> Any:
        of_step = [row["step_id"] for row in rows]
        first = [i for i, step_id in enumerate(of_step) if not i or step_id != of_step[i - 1]]
        with shown.keys():
            batch = collate(rows)
        keys = images_of(batch["pixel_values"], batch["image_grid_thw"])
        batch["pixel_values"] = torch.cat([keys[i] for i in first])
        batch["image_grid_thw"] = batch["image_grid_thw"][first]
        batch[FIRST] = torch.tensor(first)
        if pixels:
            named = names(batch["pixel_values"], batch["image_grid_thw"])
            batch["pixel_values"] = torch.cat([shown.pixels(name)[0] for name in named])
            shown.forget()  # this process prepares batches and takes no steps
        return batch

    return collated
