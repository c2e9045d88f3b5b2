"""The verb: a dashboard on a terminal; elsewhere, or when asked, one picture or the facts."""

import argparse
import json
import sys
from pathlib import Path

from jaxtrain.arguments import Parser, expand_path
from jaxtrain.errors import UserError
from jaxtrain.runs.dashboard.frame import draw_frame
from jaxtrain.runs.dashboard.print import render_svg, render_text
from jaxtrain.runs.dashboard.reader import RunReader, check_paths
from jaxtrain.runs.dashboard.status import facts
from jaxtrain.runs.dashboard.view import SCREENS, DashboardView, ViewState
from jaxtrain.runs.run_files import require_writable, write_output


def watch_command(argv: list[str]) -> None:
    """Runs on a dashboard in the terminal, live or finished: metrics, samples, log, servers."""
    parser = Parser("jaxtrain watch", description=watch_command.__doc__)
    parser.add_argument(
        "runs", nargs="+", type=expand_path, help="output_dirs, or folders with runs in them"
    )
    parser.add_argument("--once", action="store_true", help="print one picture as text and end")
    parser.add_argument("--json", action="store_true", help="print the facts as JSON and end")
    parser.add_argument("--svg", type=expand_path, help="write one picture to this file and end")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the file --svg if it is there"
    )
    parser.add_argument(
        "--screen", choices=SCREENS, default="metrics", help="shown first (default metrics)"
    )
    parser.add_argument(
        "--size",
        type=read_size,
        default=(120, 40),
        metavar="COLUMNSxROWS",
        help="of one picture (default 120x40)",
    )
    args = parser.parse_intermixed_args(argv)
    watch(
        args.runs,
        args.size,
        screen=args.screen,
        once=args.once,
        as_json=args.json,
        svg=args.svg,
        overwrite=args.overwrite,
    )


def read_size(word: str) -> tuple[int, int]:
    """120x40."""
    columns, _, rows = word.partition("x")
    if columns.isdigit() and rows.isdigit() and int(columns) <= 1000 and int(rows) <= 1000:
        return int(columns), int(rows)
    raise argparse.ArgumentTypeError(f"{word!r} is no size such as 120x40")


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
    """Show runs. Without a terminal one frame is printed, as with `once`. size: (columns, rows)."""
    check_paths(paths)
    look = DashboardView([], ViewState(screen=screen))
    reading = RunReader(paths, look)
    if not (once or as_json or svg) and sys.stdin.isatty() and sys.stderr.isatty():
        from jaxtrain.runs.dashboard.app import WatchApp

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
