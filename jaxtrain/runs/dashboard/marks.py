"""Events of a run on the x axis of its charts: evaluations, checkpoints and restarts."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.runs.dashboard.run_data import WatchedRun

SIGNS = {"evaluation": "╵", "checkpoint": "▴", "restart": "↻"}
"""Characters of one cell; a later kind covers an earlier one."""


class Mark(NamedTuple):
    """Event on a chart."""

    kind: str
    """A key of SIGNS."""
    step: float


def list_marks(run: WatchedRun) -> list[Mark]:
    """Return the events of a run in the order of SIGNS; checkpoints are those on the disk."""
    rows = sorted(
        {row for name, series in run.metrics.items() if name[:5] == "eval/" for row in series.rows}
    )
    evaluations = dict.fromkeys(run.steps[row] for row in rows)
    return [
        *(Mark("evaluation", step) for step in evaluations),
        *(Mark("checkpoint", step) for step in run.checkpoints),
        *(Mark("restart", step) for step in find_restarts(run)),
    ]


def find_restarts(run: WatchedRun) -> list[float]:
    """Return the first logged step of each start after the first."""
    clock = np.array(run.clock)
    places = [clock.searchsorted(t) for a in run.attempts[1:] if (t := parse_time(a.get("time")))]
    return list(dict.fromkeys(run.steps[index] for index in places if 0 < index < len(clock)))


def parse_time(text: Any) -> float | None:
    """Return the Unix time of a start; None for a damaged line."""
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None


def place_marks(run: WatchedRun, x: str) -> Sequence[tuple[float, str]]:
    """Return (place, sign) of each event on an x axis: "step", "time" or "tokens"."""
    steps, places = np.array(run.steps), np.array(run.along(x))
    if not len(steps):
        return []
    return [
        (float(np.interp(mark.step, steps, places)), SIGNS[mark.kind]) for mark in list_marks(run)
    ]
