"""The verb: a dashboard on a terminal; elsewhere, or when asked, one picture or the facts."""

import argparse
import json
import sys

from jaxtrain.arguments import Parser, expand_path
from jaxtrain.runs.dashboard.reader import RunReader
from jaxtrain.runs.dashboard.status import facts
from jaxtrain.runs.run_files import require_writable, write_output

SCREENS = ("metrics", "samples", "log", "runs", "servers")


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
    reading = RunReader(args.runs)
    live = not (args.once or args.json or args.svg) and sys.stdin.isatty() and sys.stderr.isatty()
    if live:
        reading.read()
    else:
        reading.read_all()
    if args.json:
        print(json.dumps([facts(run) for run in reading.runs], indent=1, allow_nan=False))
        return
    from jaxtrain.runs.dashboard.app import WatchApp, take_picture
    from jaxtrain.runs.dashboard.view import DashboardView

    app = WatchApp(reading, DashboardView(reading.runs), args.screen)
    if live:
        app.run()
        return
    reading.measure(app.view.first)
    text, svg = take_picture(app, args.size)
    if args.svg is not None:
        require_writable(args.svg, args.overwrite, "--svg")
        write_output(args.svg, svg.encode(), "--svg")
    if args.once or args.svg is None:
        sys.stdout.write(text)


def read_size(word: str) -> tuple[int, int]:
    """120x40."""
    columns, _, rows = word.partition("x")
    if all(n.isdigit() and 1 <= int(n) <= 1000 for n in (columns, rows)):
        return int(columns), int(rows)
    raise argparse.ArgumentTypeError(f"{word!r} is no size such as 120x40")
