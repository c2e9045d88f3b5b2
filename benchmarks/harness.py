"""Shared parts of the benchmarks: arguments, timing, processes, error measures, tables, files."""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

GROUPS = 5  # timed groups of launches; their median counts
PEAK_TFLOPS = 790  # bf16 matmuls of random data, measured on one H200
DECLINED = (NotImplementedError, ValueError, RuntimeError)
"""Exceptions that are recorded as a failed measurement."""


def make_parser(doc: str, out: str = "path without suffix; .json and .txt are written"):
    """Return a parser with `--out`, described by the first line of a module's docstring."""
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--out", type=Path, help=out)
    return parser


def command_line(arguments: Sequence[str] | None = None, script: str | None = None) -> str:
    """Return the command to repeat a run, without its `--out`."""
    name = Path(script or sys.argv[0]).name
    provided = sys.argv[1:] if arguments is None else arguments
    return " ".join([f"python benchmarks/{name}", *provided]).split(" --out")[0]


def log(text: str) -> None:
    """Print a line of progress with the time."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def describe_devices() -> dict[str, str]:
    """Return "hardware" and "jax": what this process computes with."""
    import jax

    kind = jax.devices()[0].device_kind
    return {"hardware": f"{jax.device_count()} {kind}", "jax": jax.__version__}


def query_gpu(fields: str = "name,memory.total") -> str:
    """Return what nvidia-smi says of these fields, without opening the GPU; "CPU" without one."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "CPU"
    except OSError:
        return "CPU"


# Timing. Launches are asynchronous, so for kernels of 50 us and more the queue never runs dry and
# the time per launch is device time without dispatch overhead.


def jax_ms(function: Callable, *arguments, budget_s: float = 0.25, repeats: int = 1) -> dict:
    """Return {"ms", "compile_s", "temp_mib"} of a jitted function of arrays.

    repeats: how many times the function does what is timed, as a loop over layers does.
    """
    import jax

    start = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    compile_s = time.perf_counter() - start

    def launch(count):
        for _ in range(count):
            output = compiled(*arguments)
        jax.block_until_ready(output)

    memory = compiled.memory_analysis()
    assert memory is not None, "every backend here measures it"
    temp = memory.temp_size_in_bytes
    ms = _median_ms(launch, budget_s) / repeats
    return {"ms": ms, "compile_s": compile_s, "temp_mib": temp / 2**20}


def torch_ms(function: Callable, budget_s: float = 0.25, repeats: int = 1) -> dict:
    """Return {"ms", "compile_s", "temp_mib"} of a PyTorch callable without arguments."""
    import torch

    def launch(count):
        for _ in range(count):
            function()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    start = time.perf_counter()
    launch(1)
    compile_s = time.perf_counter() - start
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    launch(1)
    temp = torch.cuda.max_memory_allocated() - before
    ms = _median_ms(launch, budget_s) / repeats
    return {"ms": ms, "compile_s": compile_s, "temp_mib": temp / 2**20}


def _median_ms(launch: Callable[[int], None], budget_s: float) -> float:
    def seconds(count):
        start = time.perf_counter()
        launch(count)
        return (time.perf_counter() - start) / count

    seconds(2)  # warm up
    count = max(3, min(100, int(budget_s / GROUPS / max(seconds(2), 1e-6))))
    return statistics.median(seconds(count) for _ in range(GROUPS)) * 1e3


def time_queued(run: Callable[[], Any], count: int) -> list[float]:
    """Return the seconds between the ends of `count` steps.

    Two steps are in flight, as in training: one is waited for after the next one was queued.
    """
    import jax

    ends, pending = [], run()
    for _ in range(count + 1):
        output = run()
        jax.block_until_ready(pending)
        ends.append(time.perf_counter())
        pending = output
    jax.block_until_ready(pending)
    return [b - a for a, b in zip(ends, ends[1:], strict=False)]


def summarize_seconds(seconds: list[float]) -> dict[str, float]:
    """Return the median, the least and the most of the seconds of a step."""
    middle = statistics.median(seconds)
    return {"step_s": middle, "step_s_min": min(seconds), "step_s_max": max(seconds)}


def compile_step(step, state, batch, frozen=None, options=None):
    """Compile a `core.step.TrainStep` for a batch on the devices ahead of time.

    Returns (what makes the step, its largest program). Of several microsteps the programs of the
    step itself are compiled at its first call; the one that is returned is a copy of the largest.
    """
    if batch.tokens.shape[0] == 1:  # called with what it is lowered with: frozen, if there is any
        arguments = (state, batch) if frozen is None else (state, batch, frozen)
        program = step.single.lower(*arguments).compile(compiler_options=options)
        return program, program
    from jaxtrain.core.step import take_micro

    assert not options, "compiler options: for steps of one microstep"
    micro = take_micro(batch._replace(denoms={}), 0)
    frozen = frozen or {}
    start, add_micro = step.backward.open(state.params, frozen, micro, state.step)
    return step, add_micro.lower(start(), state.params, frozen, micro, state.step).compile()


def planned_gib(compiled) -> float:
    """Return what a compiled program allocates per device: arguments, outputs and temporaries."""
    memory = compiled.memory_analysis()
    size = memory.temp_size_in_bytes + memory.argument_size_in_bytes
    return (size + memory.output_size_in_bytes - memory.alias_size_in_bytes) / 2**30


def allocated_gib() -> float:
    """Return the allocator's peak on the first device since the process began; 0 on a CPU."""
    import jax

    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0) / 2**30


# Processes of their own, so that sides share no memory and no compiler.


def run_limited(
    command: list[str],
    seconds: float,
    done: Callable[[], bool] = lambda: False,
    env: dict[str, str] | None = None,
) -> tuple[str, str | None]:
    """Run a process and return (the end of its output, why it failed or None).

    The process and all it started are killed after `seconds`, or once `done()` is true.
    """
    defaults = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", "HF_HUB_OFFLINE": "1"}
    environment, deadline = {**os.environ, **defaults, **(env or {})}, time.monotonic() + seconds
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env=environment
        )
        failed = None
        while process.poll() is None and not done():
            if time.monotonic() > deadline:
                failed = f"cut off after {seconds:.0f} s"
                break
            time.sleep(0.25)
        if process.poll():
            failed = f"exit {process.returncode}"
        with contextlib.suppress(ProcessLookupError):  # what it started may outlive it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        return output.read()[-1500:], failed


def run_child(script: str, words: Sequence[str], seconds: float) -> tuple[list[dict], str | None]:
    """Run a script again with `--child *words PATH` and return (rows of PATH, why it failed)."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        command = [sys.executable, script, *sys.argv[1:], "--child", *words, str(path)]
        process = subprocess.Popen(command, start_new_session=True, env=environment)
        try:
            code = process.wait(seconds)
            failed = f"exit {code}; see above" if code else None
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            failed = f"cut off after {seconds:.0f} s"
        return read_lines(path), failed


def measure_children(
    script: str,
    table: "Table",
    cases: dict[tuple[str, ...], dict],
    seconds: float,
    derive: Callable[[dict], dict] = dict,
    budget: float = float("inf"),
) -> None:
    """Add the rows of every case, each measured by `run_child` within `seconds`.

    cases: {words of the child: cells of its rows}. derive: further cells of a row that was
    measured. A case that fails, or for which the budget leaves no 20 s, has a row with "failed".
    """
    deadline = time.monotonic() + budget
    for words, labels in cases.items():
        log(" ".join(words))
        limit, rows, failed = min(seconds, deadline - time.monotonic()), [], "no time left"
        start = time.monotonic()
        if limit >= 20 or budget == float("inf"):
            rows, failed = run_child(script, words, limit)
        for row in rows:
            row = {**labels, **row, "wall_s": time.monotonic() - start}
            table.add(row if "failed" in row else derive(row))
        if failed:
            table.add({**labels, "failed": failed})


def append_line(path: str | Path, row: dict) -> None:
    """Add a row to a file of JSON lines."""
    with Path(path).open("a") as file:
        file.write(json.dumps(row) + "\n")


def read_lines(path: Path) -> list[dict]:
    """Return the complete lines of a file of JSON lines; [] if it does not exist yet."""
    text = path.read_text().rpartition("\n")[0] if path.exists() else ""
    # Strings may hold U+2028, at which splitlines cuts.
    return [json.loads(line) for line in text.split("\n") if line]


def shorten(reason: object, length: int = 300) -> str:
    """Return an error's text in one line."""
    return " ".join(str(reason).split())[:length]


# Reports.


class Report:
    """Measurements of kernels: a printed line each, and all of them as JSON."""

    def __init__(self, path: Path | None):
        self.path, self.rows = path, []
        self.header = {"command": command_line(), **describe_devices()}

    def add(self, **row):
        self.rows.append(row)
        print(format_cells(row), flush=True)
        if self.path:
            write_json(self.path, self.header | {"rows": self.rows})

    def errors(self, names, actual, exact, plain=None, **row):
        """Add the distance of `actual`, and of the plain bf16 computation, from `exact`."""
        for index, name in enumerate(names):
            cells = {"error": largest_error(actual[index], exact[index])}
            if plain is not None:
                cells["plain_error"] = largest_error(plain[index], exact[index])
            cells["relative"] = relative_error(actual[index], exact[index])
            if plain is not None:
                cells["plain_relative"] = relative_error(plain[index], exact[index])
            self.add(**row, what=name, **cells)

    def attempt(self, build: Callable, **row):
        """Return `build()`; None, after a row with the reason, if it declines."""
        try:
            return build()
        except DECLINED as reason:
            self.add(**row, failed=shorten(reason, 200))
            return None

    def timed(self, work: float, measure: Callable, unit: str = "tflops", **row):
        """Add the cells of `measure()` and its rate; work: operations or bytes."""
        cells = self.attempt(measure, **row)
        if cells is None:
            return
        rate = work / cells["ms"] / 1e9
        comparable = unit == "tflops" and "H200" in self.header["hardware"]
        share = {"share": rate / PEAK_TFLOPS} if comparable else {}
        self.add(**row, **cells, **{unit: rate}, **share)


def largest_error(actual, exact) -> float:
    """Return the largest absolute difference."""
    import jax.numpy as jnp

    return float(jnp.abs(actual - exact).max())


def relative_error(actual, exact) -> float:
    """Return the norm of the difference over that of `exact`."""
    import jax.numpy as jnp

    return float(jnp.linalg.norm(actual - exact) / jnp.linalg.norm(exact))


def format_cells(row: dict, digits: str = ".4g") -> str:
    """Return a row as `name=value` cells."""
    return "  ".join(
        f"{k}={v:{digits}}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()
    )


def write_json(path: Path, value) -> None:
    """Write a value as indented JSON; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


class Table:
    """Rows of a benchmark: a printed table, OUT.json and OUT.txt, written after every row.

    columns: (title, key, format, as ">9.4f" or "<12") each; missing values are "-". A row with
    "failed" shows its left-aligned cells and the reason. Every line ends in the row's "how".
    """

    def __init__(self, columns: Sequence[tuple], out: Path | None, command: str, **header):
        self.columns, self.out, self.rows = columns, out, []
        self.header = {"command": command, **header}
        self.extra: dict = {}

    @property
    def report(self) -> dict:
        """The content of OUT.json."""
        return {**self.header, **self.extra, "rows": self.rows}

    def head(self) -> str:
        """Return the line of titles."""
        cells = (f"{title:{_width(style)}}" for title, _, style in self.columns)
        return "".join(cells) + "  how"

    def line(self, row: dict) -> str:
        """Return one row as text."""
        cells, failed = [], "failed" in row
        for _, key, style in self.columns:
            value = row.get(key)
            if failed and not style.startswith("<"):
                continue
            cells.append(f"{'-':{_width(style)}}" if value is None else f"{value:{style}}")
        reason = f"failed: {row['failed']}; " if failed else ""
        return "".join(cells) + f"  {reason}{row.get('how', '')}"

    def text(self) -> str:
        """Return the report as text."""
        versions = [v for k, v in self.header.items() if k != "command" and isinstance(v, str)]
        lines = [self.header["command"], "; ".join(versions), "", self.head()]
        return "\n".join([*lines, *map(self.line, self.rows)]) + "\n"

    def add(self, row: dict, draw: Callable[[dict, Path], None] | None = None) -> dict:
        """Add a row, print it, write the files; draw: writer of OUT.png. Return the row."""
        if not self.rows:
            print(self.head())
        self.rows.append(row)
        print(self.line(row), flush=True)
        if self.out is not None:
            write_json(self.out.with_suffix(".json"), self.report)
            self.out.with_suffix(".txt").write_text(self.text())
            if draw is not None:
                draw(self.report, self.out.with_suffix(".png"))
        return row


def _width(style: str) -> str:
    """Return the alignment and the width of a format."""
    (width,) = re.findall(r"^[<>]\d+", style)
    return width


def make_figure(size: tuple[float, float], title: str | None = None):
    """Return (figure, two axes side by side) for OUT.png."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def draw_bars(path: Path, title: str, names: list[str], colors: list[str], panels) -> None:
    """Draw horizontal bars in two panels; panels: (title, values, format) each."""
    figure = make_figure((11, 0.55 * len(names) + 1.6), title)
    for axes, (name, values, style) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        bars = axes.barh(range(len(names)), values, color=colors)
        axes.bar_label(bars, [style.format(value) for value in values], padding=3, fontsize=8)
        axes.set_title(name, loc="left")
        axes.set_xlim(0, 1.15 * max(values, default=1))
        axes.spines[["top", "right"]].set_visible(False)
    first = figure.axes[0]
    first.set_yticks(range(len(names)), names, fontsize=7)
    first.invert_yaxis()
    figure.savefig(path)
