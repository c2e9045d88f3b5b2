"""The dashboard driven by keys, without a terminal."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from folders import START
from rich.cells import cell_len
from textual.pilot import Pilot

from jaxtrain.runs.dashboard.app import WatchApp, settle
from jaxtrain.runs.dashboard.reader import RunReader
from jaxtrain.runs.dashboard.view import DashboardView

NOW = START + 1.5 * 60 + 2


class Watching:
    """A dashboard that runs; `press` returns the screen as people see it."""

    def __init__(self, app: WatchApp, pilot: Pilot):
        self.app, self.pilot = app, pilot

    async def press(self, keys: str = "", size: tuple[int, int] | None = None) -> str:
        """Press keys, named as Textual does and separated by spaces; return the screen."""
        if size is not None:
            await self.pilot.resize_terminal(*size)
        for key in keys.split():
            await self.pilot.press(key)
        await settle(self.pilot)
        shown = self.app.export_text()
        lines = shown.splitlines()
        assert len(lines) == self.app.size.height
        assert all(cell_len(line) <= self.app.size.width for line in lines)
        return shown


def watch(
    paths: list[Path],
    script: Callable[[Watching], Awaitable[None]],
    size: tuple[int, int] = (120, 40),
    now: float | None = NOW,
) -> WatchApp:
    """Run a script of key presses on the dashboard of runs. now: the clock, if it stands still."""
    reading = RunReader(paths)
    reading.read()
    view = DashboardView(reading.runs)
    if now is not None:
        view.clock = lambda: now
    app = WatchApp(reading, view)

    async def play() -> None:
        async with app.run_test(size=size) as pilot:
            await script(Watching(app, pilot))

    asyncio.run(play())
    return app
