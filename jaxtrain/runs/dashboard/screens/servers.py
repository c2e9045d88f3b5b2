"""Screen 5: the servers that answer for a run, and how far their weights lag behind."""

from fnmatch import fnmatchcase
from typing import Any

from rich.text import Text
from textual.app import ComposeResult
from typing_extensions import override

from jaxtrain.runs.dashboard.screens.pane import Pane, TextTable
from jaxtrain.runs.dashboard.status import ago, number
from jaxtrain.runs.dashboard.text import cut_middle, flat, plain

STATES = {"up": "green", "new": "cyan", "draining": "yellow", "down": "red"}
NUMBERS = ("lag/*", "policy_version", "sync/*", "rollout/*", "vllm/*", "dropped/*", "cancelled/*")
COLUMNS = ("url", "state", "version", "in flight", "for", "why")
MAX_SERVERS, MAX_NUMBERS = 500, 300
"""Rows of the two tables."""


class ServersPane(Pane):
    """Screen 5."""

    NAME, MAIN = "servers", "#servers-table"
    DEFAULT_CSS = """
    ServersPane TextTable { border: round $surface-lighten-2; height: 1fr; }
    ServersPane #servers-table { height: auto; max-height: 50%; }
    """

    def compose(self) -> ComposeResult:
        """Yield the table of servers and that of numbers about them."""
        yield TextTable(id="servers-table")
        yield TextTable(id="lag-table", show_header=False)

    @override
    def draw(self) -> None:
        run, table = self.view.first, self.query_one("#servers-table", TextTable)
        rows = [self.draw_server(server) for server in (run.servers if run else [])[:MAX_SERVERS]]
        table.fill(
            tuple(str(cell) for row in rows for cell in row), [(c, 0) for c in COLUMNS], rows
        )
        table.border_title = Text(f"servers of {run.name}" if run else "servers")
        none = 'this run has no servers (rollout.engine = "vllm" has some)'
        table.border_subtitle = Text(f"{len(rows)} servers" if rows else none)
        names = [n for p in NUMBERS for n in (run.metrics if run else ()) if fnmatchcase(n, p)]
        values = [
            [cut_middle(flat(name), 50), Text(plain(run.last(name)), "cyan", justify="right")]
            for name in names[:MAX_NUMBERS]
            if run
        ]
        numbers = self.query_one("#lag-table", TextTable)
        numbers.fill(
            tuple(str(cell) for row in values for cell in row), [("", 50), ("", 12)], values
        )
        numbers.border_title = "weights and answers"

    def draw_server(self, server: dict[str, Any]) -> list[Text | str]:
        """Return the cells of a server."""
        state, since = flat(server.get("state", "?"))[:9], number(server.get("since"))
        counts = [server.get(key) for key in ("version", "in_flight")]
        return [
            cut_middle(flat(server.get("url", "")), 60),
            Text(state, STATES.get(state, "")),
            *("-" if count is None else flat(count)[:12] for count in counts),
            ago(self.view.clock() - since) if since else "-",
            Text(flat(server.get("why") or ""), "bright_black"),
        ]
