"""Terminal dashboard: Textual delivers keys and clicks and displays the lines of frame.py.

Textual draws on stderr, so that stdout stays free. Nothing here ever writes into a run's folder.
"""

import time
from pathlib import Path

from rich.segment import Segment
from textual import events
from textual.app import App, ComposeResult
from textual.strip import Strip
from textual.widget import Widget
from typing_extensions import override

from jaxtrain.errors import UserError
from jaxtrain.runs.dashboard.frame import draw_frame
from jaxtrain.runs.dashboard.keys import go, press
from jaxtrain.runs.dashboard.print import render_svg, render_text
from jaxtrain.runs.dashboard.reader import RunReader
from jaxtrain.runs.dashboard.view import DashboardView, Frame
from jaxtrain.runs.run_files import write_output

READ_SECONDS, DRAW_SECONDS = 0.5, 5.0
"""Between two readings; and between two pictures when nothing is new: times pass."""


class FrameWidget(Widget):
    """The lines of a frame."""

    DEFAULT_CSS = "Canvas { width: 100%; height: 100%; }"

    def __init__(self, look: DashboardView):
        super().__init__()
        self.look = look
        self.frame = Frame([], [])

    def draw(self) -> None:
        """Redraw the frame."""
        width, height = self.size
        if width and height:
            self.frame = draw_frame(self.look, width, height)
            self.refresh()

    def on_resize(self) -> None:
        """Redraw for the new terminal size."""
        self.draw()

    @override
    def render_line(self, y: int) -> Strip:
        if y >= len(self.frame.lines):
            return Strip.blank(self.size.width)
        line = self.frame.lines[y]
        segments = [s for s in line.render(self.app.console, end="") if isinstance(s, Segment)]
        return Strip(segments, line.cell_len)


class WatchApp(App[None]):
    """`jaxtrain watch` on a terminal."""

    ENABLE_COMMAND_PALETTE = False
    CSS = "Screen { background: $background; overflow: hidden; }"

    def __init__(self, reading: RunReader, look: DashboardView):
        super().__init__()
        self.reading, self.look = reading, look
        self.canvas = FrameWidget(look)
        self._drawn = 0.0

    def compose(self) -> ComposeResult:
        """Yield the only widget, which fills the screen."""
        yield self.canvas

    def on_mount(self) -> None:
        """Start reading."""
        self.set_interval(READ_SECONDS, self.tick)

    def tick(self) -> None:
        """Read new data and draw it."""
        new = self.reading.read()
        passed = time.monotonic() - self._drawn
        if (new or passed >= DRAW_SECONDS) and not self.look.choice.paused:
            self.draw()

    def draw(self) -> None:
        """Redraw the screen."""
        self._drawn = time.monotonic()
        self.canvas.draw()

    async def on_event(self, event: events.Event) -> None:
        """Handle every key here, including Tab, which Textual would use to move its focus."""
        if isinstance(event, events.Key):
            self.take(event.key, event.character)
        elif isinstance(event, events.Paste) and self.look.choice.typed is not None:
            for character in event.text[:200]:
                press(self.look, character, character)
            self.draw()
        else:
            await super().on_event(event)

    def take(self, key: str, character: str | None) -> None:
        """Handle a key press."""
        if key == "upper_n" or character in ("N", "G"):
            key = character or key
        action = press(self.look, key, character, self.size.height)
        if action == "quit":
            self.exit()
        elif action == "export":
            self.look.choice.notice = export(self.look, *self.size)
        self.draw()

    def on_click(self, event: events.Click) -> None:
        """Select the clicked tab, chart or row; a second click opens it."""
        choice = self.look.choice
        for spot in self.canvas.frame.spots:
            if spot.x0 <= event.x < spot.x1 and spot.y0 <= event.y < spot.y1:
                if spot.action == "screen":
                    go(choice, spot.value)
                elif choice.selected.get(choice.screen) == spot.value and choice.screen != "runs":
                    choice.open = True
                else:
                    choice.selected[choice.screen] = spot.value
                self.draw()
                return

    def on_mouse_scroll_down(self) -> None:
        """Scroll down, as the key does."""
        self.take("down", None)

    def on_mouse_scroll_up(self) -> None:
        """Scroll up, as the key does."""
        self.take("up", None)


def export(look: DashboardView, width: int, height: int) -> str:
    """Write the screen as SVG and as text to the current folder; return the message to display."""
    name = f"jaxtrain-watch-{time.strftime('%H%M%S')}"
    frame = draw_frame(look, width, height)
    try:
        write_output(Path(f"{name}.svg"), render_svg(frame, width).encode())
        write_output(Path(f"{name}.txt"), render_text(frame).encode())
    except UserError as error:
        return str(error)
    return f"written: {name}.svg, {name}.txt"
