"""Screen 3: log.txt, with search and warnings only."""

from rich.text import Text

from jaxtrain.runs.dashboard.status import is_warning
from jaxtrain.runs.dashboard.text import box, fit
from jaxtrain.runs.dashboard.view import DashboardView, Frame


def draw(look: DashboardView, width: int, height: int) -> Frame:
    """Lines of the chosen run's log; the end while it is followed."""
    run, choice = look.first, look.choice
    lines, space = listed(look), height - 2
    if choice.follow:
        choice.selected["log"] = max(len(lines) - 1, 0)
    selected = look.select("log", len(lines))
    first = max(
        0, min(selected - space + 1 if choice.follow else selected - space // 2, len(lines) - space)
    )
    pattern, shown = look.pattern("log"), []
    for row, text in enumerate(lines[first : first + space], start=first):
        line = fit(text.replace("\t", "    ")[: 4 * width], width - 2)
        if is_warning(text):
            line.stylize("yellow")
        if pattern is not None:
            for match in pattern.finditer(line.plain):
                line.stylize("black on yellow", *match.span())
        if row == selected and not choice.follow:
            line.stylize("bold")
        shown.append(line)
    if not lines:
        shown = [Text(""), Text("  no line yet" if not choice.warnings else "  no warning")]
    parts = ["following" if choice.follow else f"line {selected + 1} of {len(lines)}"]
    if choice.warnings:
        parts.append("warnings only")
    if pattern is not None:
        parts.append(f"{len(hits(look))} hits")
    head = f"log of {run.name}" if run else "log"
    return Frame(box(shown, width, height, head, ", ".join(parts)), [])


def listed(look: DashboardView) -> list[str]:
    """The lines that are shown."""
    run, choice = look.first, look.choice
    if run is None:
        return []
    key = ("log", str(run.path), run.version, choice.warnings)
    return look.remember(
        key, lambda: [line for line in run.log if not choice.warnings or is_warning(line)]
    )


def hits(look: DashboardView) -> list[int]:
    """Lines in which the searched text stands."""
    pattern = look.pattern("log")
    if pattern is None:
        return []
    return [row for row, line in enumerate(listed(look)) if pattern.search(line)]


def next_hit(look: DashboardView, forward: bool) -> None:
    """Go to the next line with the searched text, or the one before; around the end."""
    rows = hits(look)
    if not rows:
        look.choice.notice = "nothing found"
        return
    current_row = look.choice.selected.get("log", 0)
    ahead = [row for row in rows if row > current_row] or rows
    behind = [row for row in rows if row < current_row] or rows
    look.choice.follow = False
    look.choice.selected["log"] = ahead[0] if forward else behind[-1]
