"""Screen 4: the runs side by side, and the config keys in which they differ."""

from rich.text import Text

from jaxtrain.runs.console import format_count
from jaxtrain.runs.dashboard.run_data import WatchedRun
from jaxtrain.runs.dashboard.screens.metrics import plain
from jaxtrain.runs.dashboard.status import (
    MARKS,
    best,
    current_step,
    method,
    model,
    read_state,
    total_steps,
)
from jaxtrain.runs.dashboard.text import box, cut_left, fit, flat
from jaxtrain.runs.dashboard.view import ClickTarget, DashboardView, Frame
from jaxtrain.runs.records import differing_keys
from jaxtrain.text_safety import show


def draw(look: DashboardView, width: int, height: int) -> Frame:
    """The table of runs above the table of keys."""
    selected = look.select("runs", len(look.runs))
    above = min(len(look.runs) + 3, max(height // 2, 4))
    space = above - 3
    first = max(0, min(selected - space // 2, len(look.runs) - space))
    name_width = min(max([12, *(len(run.name) for run in look.runs)]), max(width // 4, 12))
    narrow = width < 140
    lines = [Text("   " + head(name_width, narrow), style="bold")]
    spots = []
    for row, run in enumerate(look.runs[first : first + space]):
        line = draw_run(look, run, name_width, narrow)
        if first + row == selected:
            line = fit(line, width - 2)
            line.stylize("reverse")
        lines.append(line)
        spots.append(ClickTarget(0, row + 2, width, row + 3, "select", first + row))
    top = box(lines, width, above, "runs", f"{selected + 1} of {len(look.runs)}")
    return Frame([*top, *draw_keys(look, width, height - above)], spots)


def head(name_width: int, narrow: bool) -> str:
    """Titles of the columns."""
    text = f"{'name':<{name_width}} {'task':<10} "
    text += "" if narrow else f"{'model':<22} "
    text += f"{'step':>11} {'last':>9} {'best':>9} "
    text += "" if narrow else f"{'of':<22} {'tok/s/dev':>9} {'MFU':>6} "
    return text + "state"


def draw_run(look: DashboardView, run: WatchedRun, name_width: int, narrow: bool) -> Text:
    """A run's line."""
    state, best_value, total = read_state(run, look.now), best(run), total_steps(run)
    hidden = str(run.path) in look.choice.hidden
    marked = look.choice.marked == str(run.path)
    line = Text(f"{'d' if marked else ' '}{'○' if hidden else '●'} ", style=look.color(run))
    line.append_text(fit(run.name, name_width)).append(" ")
    line.append_text(fit(method(run), 10)).append(" ")
    if not narrow:
        line.append_text(fit(model(run), 22)).append(" ")
    line.append(f"{f'{current_step(run)}/{total or chr(63)}':>11} ")
    last = run.last(best_value[0]) if best_value else None
    line.append(
        f"{plain(last) or '-':>9} {plain(best_value[1]) if best_value else '-':>9} ", "cyan"
    )
    if not narrow:
        line.append_text(fit(cut_left(best_value[0], 22) if best_value else "", 22)).append(" ")
        speed, mfu = run.last("tokens_per_second_per_device"), run.last("mfu")
        line.append(f"{format_count(speed) if speed else '-':>9} ")
        line.append(f"{f'{mfu:.1%}' if mfu else '-':>6} ")
    _, word, color = MARKS[state.kind]
    return line.append(f"{word} {state.text}", color)


def draw_keys(look: DashboardView, width: int, height: int) -> list[Text]:
    """Config keys that differ: between the marked run and the chosen one, or between all shown."""
    if height < 3:
        return [fit("", width) for _ in range(height)]
    runs = look.shown
    marked = next((run for run in look.runs if str(run.path) == look.choice.marked), None)
    if marked is not None and look.first is not None and look.first is not marked:
        runs = [marked, look.first]
    keys = differing_keys([run.flat for run in runs]) if len(runs) > 1 else []
    if not keys:
        notice = "all keys are the same" if len(runs) > 1 else "give several runs to compare them"
        return box(["", f"  {notice}"], width, height, "config keys that differ")
    runs = runs[: max((width - 30) // 12, 1)]
    key_width = min(max(map(len, keys)) + 1, width // 3)
    column_width = max((width - 2 - key_width) // len(runs), 6)
    heading = fit("", key_width)
    for run in runs:
        heading.append_text(fit(run.name, column_width, look.color(run)))
    lines = [heading]
    for key in keys:
        line = fit(cut_left(flat(key), key_width - 1), key_width)
        for run in runs:
            line.append_text(fit(flat(tell(run, key)), column_width))
        lines.append(line)
    footer = f"{len(keys)} keys" + (
        f", {len(keys) - height + 3} not shown" if len(keys) > height - 3 else ""
    )
    return box(lines, width, height, "config keys that differ", footer)


def tell(run: WatchedRun, key: str) -> str:
    """A key's value; - where the run's config has no such key."""
    if key not in run.flat:
        return "-"
    value = run.flat[key]
    return value if isinstance(value, str) else "null" if value is None else show(value, 60)
