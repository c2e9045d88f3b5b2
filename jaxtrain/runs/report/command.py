"""The verb, and the page that a run writes of itself at its end."""

from pathlib import Path

from jaxtrain.arguments import Parser, expand_path
from jaxtrain.runs.dashboard.reader import RunReader
from jaxtrain.runs.dashboard.run_data import WatchedRun
from jaxtrain.runs.report.collect import collect
from jaxtrain.runs.report.page import render
from jaxtrain.runs.run_files import read_names, record_output, require_writable, write_output


def report_command(argv: list[str]) -> None:
    """Write one HTML file about runs: charts, samples, configs and their differences, versions,
    warnings. It opens in any browser, without a network."""
    parser = Parser("jaxtrain report", description=report_command.__doc__)
    parser.add_argument(
        "runs", nargs="+", type=expand_path, help="output_dirs, or folders with runs in them"
    )
    parser.add_argument(
        "-o", "--output", type=expand_path, help="default: report.html in the first run"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the file --output if it is there"
    )
    args = parser.parse_intermixed_args(argv)
    runs = read_runs(args.runs)
    output = args.output or runs[0].path / "report.html"
    if args.output is None and read_names(output.parent) is not None:
        record_output(output)
    else:
        require_writable(output, args.overwrite)
    write_output(output, render(collect(runs)).encode())
    print(output)


def read_runs(paths: list[Path]) -> list[WatchedRun]:
    """Read everything that the runs have written; raise UserError if there is no run."""
    reading = RunReader(paths)
    reading.read_all()
    return reading.runs


def write_report(folder: Path) -> Path:
    """The page of a run that has just finished, into its own folder."""
    output = folder / "report.html"
    runs = read_runs([folder])
    write_output(output, render(collect(runs, ended="finished")).encode())
    return output
