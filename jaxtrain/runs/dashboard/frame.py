"""The whole screen: head, one of the five screens, keys."""

from rich.text import Text

from jaxtrain.runs.dashboard.screens import log, metrics, runs, samples, servers
from jaxtrain.runs.dashboard.status import (
    MARKS,
    current_step,
    describe,
    elapsed_and_left,
    read_state,
    total_steps,
)
from jaxtrain.runs.dashboard.text import beside, box, cut_left, fit, wrap
from jaxtrain.runs.dashboard.view import SCREENS, SMOOTH, X_AXES, ClickTarget, DashboardView, Frame

HEAD = 3
LEAST_WIDTH, LEAST_HEIGHT = 30, 8
SIDEBAR = 24

DRAW = {
    "metrics": metrics.draw,
    "samples": samples.draw,
    "log": log.draw,
    "runs": runs.draw,
    "servers": servers.draw,
}

KEYS = {
    "metrics": "/ filter  y log  s smooth  x x-axis  r runs  enter zoom  space pause  e export",
    "samples": "/ search  enter open  b best  w worst  m newest  e export",
    "log": "/ search  n N hits  w warnings  g G ends  e export",
    "runs": "enter choose  space hide  d compare  e export",
    "servers": "e export",
}
OPEN_KEYS = {
    "metrics": "esc back  ←→ cursor  + - 0 zoom  ↑↓ other chart  y log  s smooth  x x-axis",
    "samples": "esc back  ↑↓ scroll  ←→ other sample  t tool calls",
}

HELP = """\
1-5, tab, shift+tab   metrics, samples, log, runs, servers
q, ctrl+c             quit; the run is not touched
?                     this page
e                     write the screen as SVG and as text into the current folder
space                 hold the picture while reading goes on; on screen 4: show or hide a run

metrics               arrows choose a chart, PgUp PgDn turn pages, enter opens it, esc goes back
  /                   regular expression over metrics' names; empty: all
  y  s  x  c          log y; smoothing 0, 5 %, 20 %; x by step, time, tokens; columns of charts
  r                   list of runs on the left
  open chart          ← → cursor with the values of all runs, + - zoom, 0 all, ↑ ↓ other chart
samples               ↑ ↓ choose, enter opens, b w m: best, worst, newest first, / searches texts
  open sample         ↑ ↓ PgUp PgDn scroll, ← → other sample, t tool calls whole or folded
log                   ↑ ↓ PgUp PgDn, g G top and end (follows), / search, n N next hit, w warnings
runs                  ↑ ↓ choose: head line, samples, log and servers are about this run
                      d marks a run; its config is then compared with the chosen one's
"""


def draw_frame(look: DashboardView, width: int, height: int) -> Frame:
    """The screen as exactly `height` lines of `width` cells."""
    if width < LEAST_WIDTH or height < LEAST_HEIGHT:
        return Frame([fit("too small" if row == 0 else "", width) for row in range(height)], [])
    choice, body = look.choice, height - HEAD - 1
    lines, spots = draw_head(look, width)
    sidebar_width = SIDEBAR if choice.sidebar and choice.screen == "metrics" and width >= 80 else 0
    if choice.help:
        inside = Frame(box([f" {line}" for line in HELP.splitlines()], width, body, "keys"), [])
    elif not look.runs:
        inside = Frame(box(["", "  no run is there yet; waiting for one"], width, body), [])
    else:
        inside = DRAW[choice.screen](look, width - sidebar_width, body)
        if sidebar_width:
            inside = inside._replace(
                lines=beside(draw_sidebar(look, sidebar_width, body), inside.lines)
            )
    spots += [
        s._replace(
            x0=s.x0 + sidebar_width,
            x1=s.x1 + sidebar_width,
            y0=s.y0 + HEAD,
            y1=s.y1 + HEAD,
        )
        for s in inside.spots
    ]
    return Frame([*lines, *inside.lines, draw_foot(look, width)], spots)


def draw_head(look: DashboardView, width: int) -> tuple[list[Text], list[ClickTarget]]:
    """Draw the run's state and progress, and the tabs."""
    run = look.first
    if run is None:
        first, share = Text(" ? no run", style="bold"), None
    else:
        state, step, total = read_state(run, look.now), current_step(run), total_steps(run)
        share = step / total if total else None
        mark, word, color = MARKS[state.kind]
        first = Text().append(f" {mark} {word}  ", f"bold {color}")
        needed = len(word) + 40
        first.append(cut_left(str(run.name), max(width - needed, 10)), "bold")
        if width >= 100:
            first.append(f"  {describe(run)}", "")
        elif width >= 70:
            first.append(f"  {describe(run).partition(' · ')[0]}")
        first.append(f"  step {step:,}/{total:,}" if total else f"  step {step:,}")
        first.append(f"   {elapsed_and_left(run, state.live)}")
        if state.text:
            first.append(f"   {state.text}", color if not state.live else "bright_black")
    percent = "" if share is None else f" {min(share, 1):>4.0%} "
    length = max(width - len(percent) - 2, 1)
    filled = round(min(share or 0, 1) * length)
    second = Text(" ").append("━" * filled, "green").append("━" * (length - filled), "grey30")
    tabs, spots = Text(), []
    for number, name in enumerate(SCREENS, start=1):
        label = f" {number} {name.capitalize()} "
        spots.append(ClickTarget(len(tabs), 2, len(tabs) + len(label), 3, "screen", name))
        tabs.append(label, "reverse" if name == look.choice.screen else "")
    tabs.append_text(draw_legend(look, width - len(tabs)))
    return [fit(first, width), fit(second.append(percent), width), fit(tabs, width)], spots


def draw_legend(look: DashboardView, width: int) -> Text:
    """Draw the colors of the runs and the chart settings, right-aligned."""
    choice, text = look.choice, Text()
    if choice.screen == "metrics":
        if len(look.runs) > 1:
            for run in look.shown[:4]:
                text.append("● ", look.color(run)).append(f"{cut_left(run.name, 18)}  ")
        if choice.filters.get("metrics"):
            text.append(f"/{choice.filters['metrics']}  ", "yellow")
        text.append("log y  " if choice.log_y else "", "yellow")
        text.append(f"smooth {SMOOTH[choice.smooth]:.0%}  x: {X_AXES[choice.x]} ", "bright_black")
    if choice.paused:
        text.append(" paused ", "black on yellow")
    if text.cell_len > width - 1:
        text = Text(f"x: {X_AXES[choice.x]} " if choice.screen == "metrics" else "")
    return Text(" " * max(width - text.cell_len, 0)).append_text(text)


def draw_sidebar(look: DashboardView, width: int, height: int) -> list[Text]:
    """Draw the list of runs for screens that overlay them."""
    lines = []
    for run in look.runs:
        hidden = str(run.path) in look.choice.hidden
        mark, _, color = MARKS[read_state(run, look.now).kind]
        line = Text("○ " if hidden else "● ", style=look.color(run))
        lines.append(line.append_text(fit(run.name, width - 6)).append(mark, color))
    return box(lines, width, height, "runs")


def draw_foot(look: DashboardView, width: int) -> Text:
    """Draw the text being typed, a notice, or the keys."""
    choice = look.choice
    if choice.typed is not None:
        return fit(Text(f" /{choice.typed}▏  enter take  esc leave", style="yellow"), width)
    if choice.notice:
        return fit(Text(f" {choice.notice}", style="yellow"), width)
    keys = OPEN_KEYS.get(choice.screen, "") if choice.open else KEYS[choice.screen]
    line = wrap(f"q quit  1-5 screens  {keys}", max(width - 10, 10))[0]
    return fit(Text(f" {line.rstrip()}  ? help", style="bright_black"), width)
