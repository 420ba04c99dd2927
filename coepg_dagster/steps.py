"""The tables that the loop passes on: labelled steps, candidate plans, verdicts and dataset rows, with their Arrow schemas.

Belongs here: what a row *is*. How rows are read (readers), made (pools), scored (rewards, evaluation) is elsewhere.
Coordinates in these tables are pixels of the stored screenshot ("original" space), boxes are (x1, y1, x2, y2), borders included.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

NO_VALUE: Final = ""
"""The one normal form of an empty action value ("None" and "no input text" in foreign data are read as this)."""

BOX: Final = pa.list_(pa.float32(), 4)

STEP_SCHEMA: Final = pa.schema(
    [
        pa.field("step_id", pa.string(), nullable=False),  # unique over the whole benchmark
        pa.field("split", pa.string(), nullable=False),
        pa.field("episode_id", pa.string(), nullable=False),  # the task of macro averages and of clustered intervals
        pa.field("step_index", pa.int32(), nullable=False),  # position in the episode, from 0
        pa.field("family", pa.string(), nullable=False),  # MiniWoB++ task, website, or app
        pa.field("seed", pa.int64()),  # of the episode, where the benchmark has one
        pa.field("goal", pa.string(), nullable=False),  # Q
        pa.field("history", pa.list_(pa.string()), nullable=False),  # h_t, oldest first
        pa.field("screenshot", pa.binary(), nullable=False),  # o_t, encoded PNG or JPEG
        pa.field("width", pa.int32(), nullable=False),  # of the screenshot, px
        pa.field("height", pa.int32(), nullable=False),
        pa.field("boxes", pa.list_(BOX), nullable=False),  # every target box; empty: the action has no target
        pa.field("action_type", pa.string(), nullable=False),  # a^type
        pa.field("value", pa.string(), nullable=False),  # a^value, NO_VALUE where the action takes none
    ]
)
"""One labelled step: observation, task, history and the label action (Eq. 1)."""
