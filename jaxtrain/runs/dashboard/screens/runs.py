"""Screen 4: the runs side by side, and the config keys in which they differ."""

from typing import Any, ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding
from typing_extensions import override

from jaxtrain.runs.console import format_count
from jaxtrain.runs.dashboard.run_data import WatchedRun
from jaxtrain.runs.dashboard.screens.pane import Pane, TextTable
from jaxtrain.runs.dashboard.status import (
    MARKS,
    best,
    current_step,
    method,
    model,
    read_state,
    total_steps,
)
from jaxtrain.runs.dashboard.text import cut_middle, flat, plain
from jaxtrain.runs.records import differing_keys
from jaxtrain.text_safety import show

COLUMNS = ("", "name", "task", "model", "step", "last", "best", "of", "tok/s/dev", "MFU", "state")
WIDE_COLUMNS = ("model", "of", "tok/s/dev", "MFU")
MAX_COMPARED, MAX_KEYS = 8, 500
"""Runs and keys of the lower table."""


class RunsPane(Pane):
    """Screen 4."""

    NAME, MAIN = "runs", "#runs-table"
    DEFAULT_CSS = """
    RunsPane TextTable { border: round $surface-lighten-2; }
    RunsPane #runs-table { height: auto; max-height: 50%; }
    """
    BINDINGS: ClassVar = [
        Binding("d", "mark", "compare"),
        Binding("space", "hide", "hide"),
        Binding("escape", "unmark", "no comparison", show=False),
    ]

    def compose(self) -> ComposeResult:
        """Yield the table of runs and that of keys."""
        yield TextTable(id="runs-table")
        yield TextTable(id="keys-table", zebra_stripes=True)

    @override
    def draw(self) -> None:
        table = self.query_one("#runs-table", TextTable)
        wide = table.size.width >= 140
        columns = [name for name in COLUMNS if wide or name not in WIDE_COLUMNS]
        rows = [self.draw_run(run) for run in self.view.runs]
        shown = [[row[name] for name in columns] for row in rows]
        key = (tuple(columns), tuple(str(cell) for row in shown for cell in row))
        table.fill(key, [(name, 0) for name in columns], shown)
        table.border_title = "runs"
        table.border_subtitle = f"{self.view.chosen + 1} of {len(rows)}" if rows else ""
        self.draw_keys()

    def draw_run(self, run: WatchedRun) -> dict[str, Any]:
        """Return a run's cells by column."""
        view = self.view
        state, best_value = read_state(run, view.clock()), best(run)
        _, word, color = MARKS[state.kind]
        last = run.last(best_value[0]) if best_value else None
        speed, mfu = run.last("tokens_per_second_per_device"), run.last("mfu")
        sign = ("d" if run is view.marked else " ") + ("●" if run in view.shown else "○")
        return {
            "": Text(sign, view.color(run)),
            "name": cut_middle(run.name, 40),
            "task": method(run)[:12],
            "model": model(run),
            "step": f"{current_step(run)}/{total_steps(run) or '?'}",
            "last": Text(plain(last) or "-", "cyan"),
            "best": Text(plain(best_value[1]) if best_value else "-", "cyan"),
            "of": cut_middle(flat(best_value[0]), 22) if best_value else "",
            "tok/s/dev": format_count(speed) if speed else "-",
            "MFU": f"{mfu:.1%}" if mfu else "-",
            "state": Text(f"{word} {state.text}", color),
        }

    def draw_keys(self) -> None:
        """Config keys that differ: between the marked run and the chosen one, or between all."""
        view, table = self.view, self.query_one("#keys-table", TextTable)
        marked = view.marked is not None and view.first is not view.marked
        runs = [view.marked, view.first] if marked else view.shown[:MAX_COMPARED]
        runs = [run for run in runs if run is not None]
        keys = differing_keys([run.flat for run in runs]) if len(runs) > 1 else []
        width = max(table.size.width // (len(runs) + 1) - 2, 8)
        heading = [("key", width), *((run.name, width) for run in runs)]
        rows = [
            [cut_middle(flat(key), width), *(flat(show_value(run, key)) for run in runs)]
            for key in keys[:MAX_KEYS]
        ]
        table.fill((tuple(heading), tuple(map(tuple, rows))), heading, rows)
        same = "all keys are the same" if len(runs) > 1 else "give several runs to compare them"
        table.border_title = "config keys that differ"
        table.border_subtitle = f"{len(keys)} keys" if keys else same

    @on(TextTable.RowHighlighted, "#runs-table")
    def choose(self, event: TextTable.RowHighlighted) -> None:
        """Make a run the one that all screens show."""
        if event.cursor_row != self.view.chosen and self.view.runs:
            self.view.chosen = event.cursor_row
            self.dashboard.draw()

    @on(TextTable.RowSelected, "#runs-table")
    def leave(self) -> None:
        """Look at the metrics of the chosen run."""
        self.dashboard.action_show("metrics")

    def action_mark(self) -> None:
        """Compare the chosen run with others, or stop that."""
        self.view.marked = None if self.view.marked is self.view.first else self.view.first
        self.dashboard.draw()

    def action_unmark(self) -> None:
        """Compare all runs again."""
        self.view.marked = None
        self.dashboard.draw()

    def action_hide(self) -> None:
        """Hide the chosen run's curves, or draw them again."""
        if self.view.first is not None:
            self.view.hidden ^= {str(self.view.first.path)}
            if not self.view.shown:
                self.view.hidden.clear()
                self.notify("one run at least is shown")
            self.dashboard.draw()


def show_value(run: WatchedRun, key: str) -> str:
    """Return a config key's value; - where the run's config has no such key."""
    if key not in run.flat:
        return "-"
    value = run.flat[key]
    return value if isinstance(value, str) else "null" if value is None else show(value, 60)
