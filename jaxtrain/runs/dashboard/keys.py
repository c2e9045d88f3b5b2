"""Key bindings of the dashboard: each key changes the view state and nothing else."""

from jaxtrain.runs.dashboard.screens import log, metrics
from jaxtrain.runs.dashboard.view import SCREENS, SMOOTH, X_AXES, DashboardView, ViewState, Window

PAGE = 10
"""Lines that PgUp and PgDn move in lists."""


def press(
    look: DashboardView, key: str, character: str | None = None, height: int = 24
) -> str | None:
    """Handle a key, given by Textual's name for it ("slash", "shift+tab", "pagedown"). Returns the
    action left to the caller: "quit", "export" or None."""
    choice = look.choice
    choice.notice = ""
    if choice.typed is not None:
        return type_key(choice, key, character)
    if key in ("q", "ctrl+c", "ctrl+q"):
        return "quit"
    if key == "e":
        return "export"
    if key == "question_mark" or (choice.help and key in ("escape", "enter")):
        choice.help = not choice.help
    elif key in ("1", "2", "3", "4", "5"):
        go(choice, SCREENS[int(key) - 1])
    elif key in ("tab", "shift+tab"):
        step = 1 if key == "tab" else -1
        go(choice, SCREENS[(SCREENS.index(choice.screen) + step) % len(SCREENS)])
    elif key == "slash" and choice.screen in ("metrics", "samples", "log"):
        choice.typed = choice.filters.get(choice.screen, "")
    elif key == "space" and choice.screen != "runs":
        choice.paused = not choice.paused
    else:
        {
            "metrics": press_metrics,
            "samples": press_samples,
            "log": press_log,
            "runs": press_runs,
            "servers": lambda *_: None,
        }[choice.screen](look, key, height)
    return None


def go(choice: ViewState, screen: str) -> None:
    """Show a screen from its start."""
    choice.screen, choice.open, choice.help, choice.scrolled = screen, False, False, 0


def type_key(choice: ViewState, key: str, character: str | None) -> None:
    """Handle a key while a search is being typed."""
    assert choice.typed is not None
    if key == "enter":
        choice.filters[choice.screen], choice.typed = choice.typed, None
        choice.selected[choice.screen] = 0
        choice.follow = choice.follow and choice.screen != "log"
    elif key in ("escape", "ctrl+c"):
        choice.typed = None
    elif key == "backspace":
        choice.typed = choice.typed[:-1]
    elif key == "ctrl+u":
        choice.typed = ""
    elif character and character.isprintable() and len(choice.typed) < 200:
        choice.typed += character


def move(choice: ViewState, screen: str, by: int) -> None:
    """Move the selection of a screen; drawing clamps it to the valid range."""
    choice.selected[screen] = max(choice.selected.get(screen, 0) + by, 0)


def press_metrics(look: DashboardView, key: str, height: int) -> None:
    """Handle keys of screen 1."""
    choice = look.choice
    if choice.open and key in ("left", "right", "plus", "minus", "0"):
        zoom(look, key)
    elif choice.open and key in ("up", "down"):
        move(choice, "metrics", 1 if key == "down" else -1)
        choice.window = choice.cursor = None
    elif key in ("left", "right"):
        move(choice, "metrics", 1 if key == "right" else -1)
    elif key in ("up", "down"):
        columns = look.grid[0]
        selected = choice.selected.get("metrics", 0)
        if key == "down" or selected >= columns:
            move(choice, "metrics", columns if key == "down" else -columns)
    elif key in ("pagedown", "pageup"):
        page_size = look.grid[0] * look.grid[1]
        move(choice, "metrics", page_size if key == "pagedown" else -page_size)
    elif key == "enter":
        choice.open = True
    elif key == "escape":
        if not choice.open:
            choice.filters.pop("metrics", None)
        choice.open, choice.cursor, choice.window = False, None, None
    elif key == "y":
        choice.log_y = not choice.log_y
    elif key == "s":
        choice.smooth = (choice.smooth + 1) % len(SMOOTH)
    elif key == "x":
        choice.x = (choice.x + 1) % len(X_AXES)
        choice.window = None
    elif key == "c":
        choice.columns = choice.columns % 3 + 1
    elif key == "r":
        choice.sidebar = not choice.sidebar


def zoom(look: DashboardView, key: str) -> None:
    """Move the cursor or change the window of an open chart."""
    choice, names = look.choice, metrics.chart_names(look)
    if not names:
        return
    name = names[look.select("metrics", len(names))]
    curves = [c for run in look.shown if (c := metrics.read_curve(look, run, name))]
    low, high = metrics.extent(curves, choice.window)
    cursor = choice.cursor
    if key in ("left", "right"):
        cursor = (1.0 if key == "left" else 0.0) if cursor is None else cursor
        choice.cursor = min(max(cursor + (0.02 if key == "right" else -0.02), 0.0), 1.0)
    elif key == "0":
        choice.window = choice.cursor = None
    else:
        full = metrics.extent(curves, None)
        middle = low + (0.5 if cursor is None else cursor) * (high - low)
        half = (high - low) * (0.25 if key == "plus" else 1.0)
        if half < 1e-9 * max(abs(full.high), 1.0):
            return
        window = Window(max(middle - half, full.low), min(middle + half, full.high))
        choice.window = None if window == full else window
        if cursor is not None:
            choice.cursor = (middle - window.low) / (window.high - window.low)


def press_samples(look: DashboardView, key: str, height: int) -> None:
    """Handle keys of screen 2."""
    choice = look.choice
    down = {"down": 1, "up": -1, "pagedown": PAGE, "pageup": -PAGE}
    if choice.open and key in down:
        pages = (height - 6) if "page" in key else 1
        choice.scrolled = max(choice.scrolled + (pages if down[key] > 0 else -pages), 0)
    elif choice.open and key in ("left", "right", "n", "N"):
        move(choice, "samples", 1 if key in ("right", "n") else -1)
        choice.scrolled = 0
    elif key in down:
        move(choice, "samples", down[key])
    elif key in ("g", "G"):
        choice.selected["samples"] = 0 if key == "g" else 10**9
        choice.scrolled = 0 if key == "g" else 10**9
    elif key == "enter":
        choice.open, choice.scrolled = True, 0
    elif key == "escape":
        if not choice.open:
            choice.filters.pop("samples", None)
        choice.open = False
    elif key == "t":
        choice.unfolded = not choice.unfolded
    elif key in ("b", "w", "m"):
        choice.order = {"b": "best", "w": "worst", "m": "newest"}[key]
        choice.selected["samples"], choice.open = 0, False


def press_log(look: DashboardView, key: str, height: int) -> None:
    """Handle keys of screen 3."""
    choice = look.choice
    steps = {"down": 1, "up": -1, "pagedown": height - 6, "pageup": 6 - height}
    if key in steps:
        lines = len(log.listed(look))
        line = choice.selected.get("log", 0) + steps[key]
        choice.follow = steps[key] > 0 and line >= lines - 1
        choice.selected["log"] = max(line, 0)
    elif key in ("g", "home"):
        choice.follow, choice.selected["log"] = False, 0
    elif key in ("G", "shift+g", "end"):
        choice.follow = True
    elif key in ("n", "N"):
        log.next_hit(look, key == "n")
    elif key == "w":
        choice.warnings, choice.follow = not choice.warnings, True
    elif key == "escape":
        choice.filters.pop("log", None)


def press_runs(look: DashboardView, key: str, height: int) -> None:
    """Handle keys of screen 4."""
    choice, run = look.choice, look.first
    if key in ("up", "down", "pageup", "pagedown"):
        move(choice, "runs", {"up": -1, "down": 1, "pageup": -PAGE, "pagedown": PAGE}[key])
    elif key == "enter":
        go(choice, "metrics")
    elif key == "escape":
        choice.marked = None
    elif run is not None and key == "space":
        choice.hidden ^= {str(run.path)}
        if not look.shown:
            choice.hidden.clear()
            choice.notice = "one run at least is shown"
    elif run is not None and key == "d":
        choice.marked = None if choice.marked == str(run.path) else str(run.path)
