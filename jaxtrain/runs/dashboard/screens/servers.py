"""Screen 5: the servers that answer for a run, and how far their weights lag behind."""

import time
from fnmatch import fnmatchcase

from rich.text import Text

from jaxtrain.runs.dashboard.run_data import WatchedRun
from jaxtrain.runs.dashboard.screens.metrics import plain
from jaxtrain.runs.dashboard.status import ago, number
from jaxtrain.runs.dashboard.text import beside, box, cut_left, fit, flat
from jaxtrain.runs.dashboard.view import DashboardView, Frame

STATES = {"up": "green", "new": "cyan", "draining": "yellow", "down": "red"}
NUMBERS = ("lag/*", "policy_version", "sync/*", "rollout/*", "vllm/*", "dropped/*", "cancelled/*")


def draw(look: DashboardView, width: int, height: int) -> Frame:
    """The servers above, numbers about them below."""
    run = look.first
    servers = run.servers if run else []
    below = max(height // 2, height - len(servers) - 4) if height > 10 else 0
    top = height - below
    url_width = min(
        max([20, *(len(flat(server.get("url", ""))) for server in servers)]) + 1, width // 2
    )
    lines = [
        Text(
            f" {'url':<{url_width}}{'state':<10}{'version':>8}{'in flight':>11}{'for':>9}  why",
            style="bold",
        )
    ]
    timestamp = look.now or time.time()
    for server in servers:
        state = flat(server.get("state", "?"))[:9]
        line = Text(" ").append_text(
            fit(cut_left(flat(server.get("url", "")), url_width - 1), url_width)
        )
        line.append(f"{state:<10}", STATES.get(state, ""))
        for key, wide in (("version", 8), ("in_flight", 11)):
            value = server.get(key)
            line.append(f"{'-' if value is None else flat(value)[: wide - 1]:>{wide}}")
        since = number(server.get("since"))
        line.append(f"{ago(timestamp - since) if since else '-':>9}  ")
        lines.append(line.append(flat(server.get("why") or ""), "bright_black"))
    if not servers:
        lines = [Text(""), Text('  this run has no servers (rollout.engine = "vllm" has some)')]
    title = f"servers of {run.name}" if run else "servers"
    drawn = box(lines, width, top, title, f"{len(servers)} servers" if servers else "")
    if below:
        drawn += draw_numbers(run, width, below)
    return Frame(drawn, [])


def draw_numbers(run: WatchedRun | None, width: int, height: int) -> list[Text]:
    """Lag, synchronization and what was dropped, by reason, in two columns."""
    names = [n for p in NUMBERS for n in (run.metrics if run else ()) if fnmatchcase(n, p)]
    half, rows = width // 2, height - 2
    columns = []
    for part, wide in ((names[:rows], half), (names[rows : 2 * rows], width - half)):
        lines = []
        for name in part:
            value = plain(run.last(name)) if run else ""
            line = fit(" " + cut_left(flat(name), wide - 16), wide - 14)
            lines.append(line.append(f"{value:>11}", "cyan"))
        columns.append(box(lines, wide, height, "" if columns else "weights and answers"))
    return beside(*columns)
