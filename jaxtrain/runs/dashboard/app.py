"""Terminal dashboard (Textual): head, a tab for each screen, search, keys.

Textual draws on stderr, so that stdout stays free. Nothing here ever writes into a run's folder.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, cast

from rich.text import Text
from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal
from textual.pilot import Pilot
from textual.widgets import Footer, Input, ProgressBar, Static, TabbedContent
from typing_extensions import override

from jaxtrain.errors import UserError
from jaxtrain.runs.dashboard.reader import RunReader
from jaxtrain.runs.dashboard.screens.log import LogPane
from jaxtrain.runs.dashboard.screens.metrics import MetricsPane
from jaxtrain.runs.dashboard.screens.pane import Pane
from jaxtrain.runs.dashboard.screens.runs import RunsPane
from jaxtrain.runs.dashboard.screens.samples import SamplesPane
from jaxtrain.runs.dashboard.screens.servers import ServersPane
from jaxtrain.runs.dashboard.status import (
    MARKS,
    current_step,
    describe,
    elapsed_and_left,
    read_state,
    total_steps,
)
from jaxtrain.runs.dashboard.text import cut_middle
from jaxtrain.runs.dashboard.view import SCREENS, DashboardView
from jaxtrain.runs.run_files import write_output

SEARCHED = ("metrics", "samples", "log")
"""Screens with a search."""
READ_SECONDS, DRAW_SECONDS = 0.5, 5.0
"""Between two readings; and between two pictures when nothing is new: times pass."""


class WatchApp(App[None]):
    """`jaxtrain watch` on a terminal."""

    TITLE = "jaxtrain watch"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS: ClassVar = [(0, "-narrow"), (100, "-normal")]
    VERTICAL_BREAKPOINTS: ClassVar = [(0, "-short"), (34, "-tall")]
    CSS = """
    Screen { overflow: hidden; }
    #head { height: 1; }
    #progress { height: 1; }
    ProgressBar { width: 1fr; padding: 0 1; }
    ProgressBar Bar { width: 1fr; }
    #legend { width: auto; max-width: 60%; }
    Input { display: none; height: 3; }
    TabbedContent, ContentSwitcher, TabPane { height: 1fr; padding: 0; }
    ContentTabs { height: 1; }
    ContentTabs Underline { display: none; }
    ContentTab.-active { text-style: reverse; }
    .-narrow #numbers, .-short #panels, .-tall #brief { display: none; }
    """
    BINDINGS: ClassVar = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
        Binding("question_mark", "help", "keys"),
        Binding("slash", "search", "search"),
        Binding("space", "hold", "hold"),
        Binding("e", "export", "export"),
        Binding("escape", "leave", "all", show=False),
        *(
            Binding(str(number), f"show('{name}')", f"screen {name}", show=False)
            for number, name in enumerate(SCREENS, start=1)
        ),
        Binding("tab", "turn(1)", "next screen", show=False, priority=True),
        Binding("shift+tab", "turn(-1)", "screen before", show=False, priority=True),
    ]

    def __init__(self, reading: RunReader, view: DashboardView, screen: str = "metrics"):
        super().__init__()
        self.reading, self.view, self.first_screen = reading, view, screen
        self.animation_level = "none"
        self.held = False
        self._drawn, self._legend = 0.0, Text()

    def compose(self) -> ComposeResult:
        """Yield head, tabs, search and keys."""
        yield Static(id="head")
        with Horizontal(id="progress"):
            yield ProgressBar(total=1, show_eta=False)
            yield Static(id="legend")
        with TabbedContent(initial=self.first_screen):
            for number, pane in enumerate(
                (MetricsPane, SamplesPane, LogPane, RunsPane, ServersPane), start=1
            ):
                yield pane(f"{number} {SCREENS[number - 1].capitalize()}", self.view)
        yield Input(placeholder="regular expression; empty: all")
        yield Footer()

    def on_mount(self) -> None:
        """Start reading."""
        self.set_interval(READ_SECONDS, self.tick)
        self.query_one("ContentTabs").can_focus = False
        self.call_after_refresh(self.draw)

    @property
    def tabs(self) -> TabbedContent:
        """The tabs."""
        return self.query_one(TabbedContent)

    @property
    def pane(self) -> Pane:
        """The screen that is shown."""
        return cast(Pane, self.tabs.get_pane(self.tabs.active or self.first_screen))

    def tick(self) -> None:
        """Read new data and draw it."""
        new = self.reading.read()
        new = self.reading.measure(self.view.first) or new
        if (new or time.monotonic() - self._drawn >= DRAW_SECONDS) and not self.held:
            self.draw()

    def draw(self) -> None:
        """Draw the head and the screen that is shown."""
        self._drawn = time.monotonic()
        head, share = draw_head(self.view, self.size.width)
        self.query_one("#head", Static).update(head, layout=False)
        self.query_one(ProgressBar).update(progress=share)
        legend = self.pane.legend()
        if self.held:
            legend.append(" paused ", "black on yellow")
        if legend != self._legend:
            self._legend = legend
            self.query_one("#legend", Static).update(legend)
        self.pane.draw()

    @on(TabbedContent.TabActivated)
    def enter_screen(self) -> None:
        """Draw a screen that was just chosen."""
        self.pane.focus_main()
        self.refresh_bindings()
        self.draw()

    def on_resize(self, event: events.Resize) -> None:
        """Draw again, once the widgets have their new sizes."""
        self.call_after_refresh(self.draw)

    def action_show(self, name: str) -> None:
        """Show a screen."""
        self.tabs.active = name

    def action_turn(self, by: int) -> None:
        """Show the next screen, or the one before."""
        index = SCREENS.index(self.tabs.active) + by
        self.tabs.active = SCREENS[index % len(SCREENS)]

    def action_help(self) -> None:
        """Show the keys of this screen beside it, or hide them."""
        if panels := self.screen.query("HelpPanel"):
            panels.remove()
        else:
            self.action_show_help_panel()

    def action_hold(self) -> None:
        """Hold the picture while reading goes on."""
        self.held = not self.held
        self.draw()

    @override
    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "search" or self.tabs.active in SEARCHED

    def action_search(self) -> None:
        """Type a regular expression."""
        search = self.query_one(Input)
        search.display = True
        search.value = self.view.filters.get(self.tabs.active, "")
        search.focus()

    @on(Input.Submitted)
    def search_for(self, event: Input.Submitted) -> None:
        """Take what was typed."""
        self.view.filters[self.tabs.active] = event.value
        self.close_search()

    def close_search(self) -> None:
        """Hide the search."""
        self.query_one(Input).display = False
        self.pane.focus_main()
        self.draw()

    def action_leave(self) -> None:
        """Leave the search; else drop it."""
        if not self.query_one(Input).display:
            self.view.filters.pop(self.tabs.active, None)
        self.close_search()

    def action_export(self) -> None:
        """Write the screen as SVG and as text to the current folder."""
        name = f"jaxtrain-watch-{time.strftime('%H%M%S')}"
        try:
            write_output(Path(f"{name}.svg"), self.export_screenshot().encode())
            write_output(Path(f"{name}.txt"), self.export_text().encode())
            self.notify(f"written: {name}.svg, {name}.txt")
        except UserError as error:
            self.notify(str(error), severity="error", markup=False)

    def export_text(self) -> str:
        """Return the screen as plain text, without spaces at the ends of lines."""
        # Textual has a public export as SVG only, which goes by the same method.
        strips = self.screen._compositor.render_strips()
        return "".join(f"{strip.text.rstrip()}\n" for strip in strips)


def draw_head(view: DashboardView, width: int) -> tuple[Text, float]:
    """Return the line about the chosen run, and the share of its steps that are done."""
    run = view.first
    if run is None:
        return Text(" ? no run is there yet; waiting for one", style="bold"), 0.0
    state, step, total = read_state(run, view.clock()), current_step(run), total_steps(run)
    mark, word, color = MARKS[state.kind]
    head = Text(f" {mark} {word}  ", f"bold {color}")
    head.append(cut_middle(run.name, max(width - len(word) - 40, 10)), "bold")
    if width >= 70:
        about = describe(run)
        head.append(f"  {about if width >= 100 else about.partition(' · ')[0]}")
    head.append(f"  step {step:,}/{total:,}" if total else f"  step {step:,}")
    head.append(f"   {elapsed_and_left(run, state.live)}")
    head.append(f"   {state.text}", "bright_black" if state.live else color)
    head.truncate(max(width, 1), overflow="ellipsis")
    return head, min(max(step / total, 0.0), 1.0) if total else 0.0


def take_picture(app: WatchApp, size: tuple[int, int]) -> tuple[str, str]:
    """Return the first screen as text and as SVG, drawn without a terminal."""
    picture = ("", "")

    async def draw(pilot: Pilot[object]) -> None:
        nonlocal picture
        await settle(pilot)
        picture = (app.export_text(), app.export_screenshot())
        app.exit()

    # In a thread, because a notebook's cell lies within an event loop, in which none can be run.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(app.run, headless=True, size=size, auto_pilot=draw).result()
    return picture


async def settle(pilot: Pilot[Any]) -> None:
    """Draw once more when all widgets know their sizes."""
    await pilot.pause()
    cast(WatchApp, pilot.app).draw()
    await pilot.pause()
