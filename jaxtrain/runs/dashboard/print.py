"""A picture of the dashboard as text and as SVG. No Textual here."""

import io

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from jaxtrain.runs.dashboard.view import Frame


def render_text(frame: Frame) -> str:
    """A frame as plain text, without spaces at the ends of lines."""
    return "".join(line.plain.rstrip() + "\n" for line in frame.lines)


def render_svg(frame: Frame, width: int) -> str:
    """A frame as a picture of a terminal."""
    console = Console(
        width=width,
        file=io.StringIO(),
        record=True,
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
    )
    for line in frame.lines:
        shown = Text(line.plain, spans=list(line.spans), style=line.style, no_wrap=True, end="")
        console.print(shown, overflow="crop", crop=True)
    return console.export_svg(title="jaxtrain watch", theme=SVG_EXPORT_THEME)
