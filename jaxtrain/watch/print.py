"""One picture instead of a dashboard: as text, as SVG, or its facts as JSON. No Textual here."""

import io
import json
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

from jaxtrain.errors import UserError
from jaxtrain.run.belongings import require_writable, write_output
from jaxtrain.watch.facts import facts
from jaxtrain.watch.frame import draw_frame
from jaxtrain.watch.look import Choice, Frame, Look
from jaxtrain.watch.reading import Reading, check_paths


def watch(
    paths: list[Path],
    size: tuple[int, int],
    *,
    screen: str = "metrics",
    once: bool = False,
    as_json: bool = False,
    svg: Path | None = None,
    overwrite: bool = False,
) -> None:
    """The verb. Without a terminal it prints one frame, as with `once`. size: (columns, rows)."""
    check_paths(paths)
    look = Look([], Choice(screen=screen))
    reading = Reading(paths, look)
    if not (once or as_json or svg) and sys.stdin.isatty() and sys.stderr.isatty():
        from jaxtrain.watch.app import WatchApp

        reading.read()
        WatchApp(reading, look).run()
        return
    reading.read_all()
    if not look.runs:
        listed = ", ".join(map(str, paths))
        raise UserError(
            f"no run in {listed}: a run's folder holds config.json and metrics.jsonl; give the"
            " run.output_dir of one that has started, or a folder above it"
        )
    if as_json:
        print(json.dumps([facts(run) for run in look.runs], indent=1, allow_nan=False))
        return
    frame = draw_frame(look, *size)
    if svg is not None:
        require_writable(svg, overwrite, "--svg")
        write_output(svg, render_svg(frame, size[0]).encode(), "--svg")
    if once or svg is None:
        sys.stdout.write(render_text(frame))


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
