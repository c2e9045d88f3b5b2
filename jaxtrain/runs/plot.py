"""Curves of one or more runs, from their metrics.jsonl into one PNG. No jax here."""

import io
from fnmatch import filter as matching
from pathlib import Path
from typing import TypeGuard

from jaxtrain.arguments import Parser, expand_path
from jaxtrain.errors import UserError
from jaxtrain.runs.records import read_records
from jaxtrain.runs.run_files import read_names, record_output, require_writable, write_output
from jaxtrain.text_safety import escape_control_chars, shorten, show

PANELS = (
    ("loss", ("loss", "eval/loss")),
    ("accuracy", ("eval/*accuracy", "accuracy", "reward")),
    ("learning rate", ("learning_rate",)),
    ("gradient norm", ("grad_norm",)),
    ("tokens/s per device", ("tokens_per_second_per_device",)),
    ("MFU", ("mfu",)),
)
"""Title and metrics of each panel, * for any text; panels without data are left out."""

LABELS = {"loss": "training", "eval/loss": "held-out"}
FROM_ZERO = {"gradient norm", "tokens/s per device", "MFU"}


def plot_command(argv: list[str]) -> None:
    """Draw the curves of one or more runs into a PNG."""
    parser = Parser("jaxtrain plot", description=plot_command.__doc__)
    parser.add_argument("runs", nargs="+", type=expand_path, help="output_dirs")
    parser.add_argument("--output", type=expand_path, help="default: curves.png in the first run")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the file --output if it is there"
    )
    args = parser.parse_intermixed_args(argv)
    output = args.output or args.runs[0] / "curves.png"
    if args.output is None and read_names(output.parent) is not None:
        record_output(output)
    else:
        require_writable(output, args.overwrite)
    plot_runs(args.runs, output)
    print(output)


def plot_runs(runs: list[Path], output: Path) -> None:
    """Draw the runs' curves over steps into `output` (PNG); several runs share the panels.

    Raises UserError when a run has no metrics.jsonl, a broken one or nothing in it to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    curves = {str(run): read_metrics(run) for run in runs}
    panels = [
        (title, names)
        for title, names in PANELS
        if any(matching(curve, name) for name in names for curve in curves.values())
    ]
    if not panels:
        raise UserError(f"nothing to draw in {', '.join(curves)}: no step was logged yet")
    last = max(max(steps) for curve in curves.values() for steps, _ in curve.values())
    rows = (len(panels) + 1) // 2
    figure = Figure(figsize=(12, 3.4 * rows), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for panel_number, (title, names) in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, min(2, len(panels)), panel_number)
        for color, (run, curve) in enumerate(curves.items()):
            for metric in [metric for name in names for metric in matching(curve, name)]:
                draw(axes, *curve[metric], metric, run if len(curves) > 1 else "", f"C{color}")
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.set_xlim(-0.02 * last, 1.02 * last)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.ticklabel_format(axis="y", scilimits=(-3, 5))
        if title in FROM_ZERO:
            axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
        elif title == "accuracy" and axes.get_ylim()[1] <= 1.05:
            axes.set_ylim(-0.03, 1.05)
        if len(curves) > 1 or len(axes.lines) > 1:
            axes.legend(fontsize=8)
    figure.suptitle(plain(" | ".join(Path(run).name for run in curves)), fontsize=12)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    write_output(output, drawn.getvalue())


def draw(axes, steps: list[int], values: list[float], name: str, run: str, color: str) -> None:
    """Draw one curve: held-out numbers as dots on a line, a noisy training loss with its
    average."""
    held_out = name.startswith("eval/")
    label = plain(f"{run} {LABELS.get(name, name[5:] if held_out else '')}".strip() or name)
    if held_out:
        color = color if run else "C3"
        axes.plot(steps, values, "o--", color=color, label=label, markersize=4, zorder=3)
    elif name == "loss" and len(values) >= 20:
        axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.8)
        axes.plot(steps, smooth(values), color=color, label=label)
    else:
        marker = "." if len(values) == 1 else ""
        axes.plot(steps, values, color=color, label=label, marker=marker)


def smooth(values: list[float], share: float = 0.05) -> list[float]:
    """Return an exponential average over about `share` of the curve, with the bias of the start
    value removed."""
    decay = 1 - 1 / max(share * len(values), 1)
    total = weight = 0.0
    result = []
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        result.append(total / weight)
    return result


def read_metrics(run: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Return {metric: (steps, values)} of a run folder or a metrics.jsonl; nulls are left out."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise UserError(
            f"{path.absolute()} does not exist; give the output_dir of a run that has started"
        )
    curves: dict[str, tuple[list[int], list[float]]] = {}
    try:
        for record in read_records(path):
            if record.step is None:
                if not record.terminated and record.raw.startswith(b"{"):
                    continue  # the last line of a run that is writing or was killed
                excerpt = show(record.raw.decode(errors="replace"), 60)
                raise UserError(f"{path}, line {record.number} is not a line of metrics: {excerpt}")
            for name, value in (record.value or {}).items():
                if name != "step" and is_number(value) and abs(record.step) < 2**53:
                    steps, values = curves.setdefault(name, ([], []))
                    steps.append(record.step)
                    values.append(float(value))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    return curves


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True if a value can be drawn: finite, and within the range of a matplotlib axis."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -1e300 < value < 1e300


def plain(text: str) -> str:
    """Escape a name for matplotlib: "$" must not begin a formula, nor a leading "_" hide the
    label."""
    text = shorten(escape_control_chars(text), 80).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
