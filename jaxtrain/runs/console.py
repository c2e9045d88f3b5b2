"""Console output of a run: a progress bar, one line per step, messages; and log.txt.

On a terminal a bar stays below the lines. Elsewhere, in notebook cells and with log.console =
"plain", there are only lines. Everything that is shown also goes to log.txt. No jax here.
"""

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Literal

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text
from typing_extensions import override

from jaxtrain.errors import UserError
from jaxtrain.text_safety import escape_control_chars, redact_text

HIDDEN = {
    *("tokens", "trained_tokens", "step_seconds", "data_seconds", "time", "entropy", "num_tokens"),
    *("groups", "num_sampled_tokens", "policy_version", "trained_share", "prompt_tokens_saved"),
}
"""Metrics left out of the step's line; names with a slash are left out as well."""

SHOWN = {
    "completions/mean_length": "length",
    "sampling/mismatch_kl": "mismatch",
    "completions/clipped_ratio": "clipped",
    "lag/max": "lag",
    "draft/tau": "tau",
    "draft/loss": "draft loss",
    "draft/accept_len": "draft accept_len",
    "rollout/seconds": "rollout s",
    "sync/seconds": "sync s",
}
"""Metrics that the step's line shows under a shorter name, despite their slash."""


class SafeConsole(RichConsole):
    """Rich console for the output of CLI commands: samples, reasons and names from untrusted data,
    with control characters escaped, and brackets and colons as they are, not as rich's markup. Text
    objects that carry styles are printed unchanged."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Render text with control characters escaped, including cells of tables."""
        return super().render_str(escape_control_chars(text), **options)

    @override
    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*map(_without_control, objects), **options)


def _without_control(shown: Any) -> Any:
    plain = isinstance(shown, Text) and not shown.spans
    return Text(escape_control_chars(shown.plain), style=shown.style) if plain else shown


class Console:
    """Sink for the terminal and log.txt. `stream` defaults to stdout."""

    name = "console"

    def __init__(
        self,
        mode: Literal["auto", "rich", "plain", "off"],
        log_path: Path | None = None,
        stream: IO[str] | None = None,
    ):
        self._stream = stream or sys.stdout
        rich = mode == "rich" or (
            mode == "auto" and self._stream.isatty() and not in_notebook(os.environ)
        )
        self._silent = mode == "off"
        self._rich = RichConsole(file=self._stream, force_terminal=True) if rich else None
        self._bar: Progress | None = None
        self._log = open_log(log_path) if log_path else None
        self._clock = Clock()
        self._lock = threading.RLock()

    def start(self, total_steps: int, start_step: int) -> None:
        """Show the bar and start the clock."""
        self._clock.start(total_steps, start_step)
        if self._rich:
            self._bar = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=None),
                TextColumn("{task.percentage:>3.0f}%  {task.fields[times]}{task.fields[doing]}"),
                console=self._rich,
                expand=True,
            )
            self._task = self._bar.add_task(
                "", total=total_steps, completed=start_step, times="", doing=""
            )
            self._bar.start()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Print one line for the step, and one for the evaluation after it if there was one."""
        evals = {name: value for name, value in values.items() if name.startswith("eval/")}
        rest = {name: value for name, value in values.items() if name not in evals}
        if rest:
            self._clock.read(step)
            elapsed, remaining = self._clock.elapsed(), self._clock.remaining()
            self.log(format_step(step, self._clock.total_steps, rest, elapsed, remaining))
            if self._bar:
                times = f"{format_time(elapsed)} < {format_time(remaining)}"
                self._bar.update(self._task, completed=step, times=times)
        if evals:
            self.log(format_eval(step, evals))

    def show(self, text: str) -> None:
        """Show a text behind the bar, in place of the last one."""
        if (bar := self._bar) is not None:
            bar.update(self._task, doing=f"  {escape_control_chars(text)}" if text else "")

    def log(self, text: str) -> None:
        """Print a message above the bar and append it to log.txt."""
        text = redact_text(escape_control_chars(text))
        with self._lock:  # the watchdog and the signal thread log, too
            self.record(text)
            if self._rich:
                self._rich.print(text, markup=False, highlight=False, soft_wrap=True)
            elif not self._silent:
                self._stream.write(text + "\n")
                self._stream.flush()

    def record(self, text: str) -> None:
        """Append a message to log.txt only, with the time of day. A full disk ends the log file,
        but not the terminal output."""
        if self._log:
            try:
                self._log.write(f"{time.strftime('%H:%M:%S')} {escape_control_chars(text)}\n")
                self._log.flush()
            except OSError as error:
                log, self._log = self._log, None
                with contextlib.suppress(OSError):  # close() tries to write the buffered rest again
                    log.close()
                name = log.name
                self.log(f"warning: {name} is no longer written: {error.strerror}")

    def close(self, summary: str | None) -> None:
        """Take the bar down and show the summary."""
        if self._bar:
            self._bar.stop()
            self._bar = None
        if summary:
            self.log(summary)
        if self._log:
            self._log.close()
            self._log = None


def in_notebook(environment: Mapping[str, str]) -> bool:
    """Return True if this process is a notebook command (`!jaxtrain ...`). Its output claims to be
    a terminal but cannot move the cursor up, so that every state of a bar would appear below the
    last one.

    Detected by the environment variables that jupyter_client and ipykernel set for kernels."""
    pagers = {environment.get(name) for name in ("PAGER", "GIT_PAGER")}
    kernel = environment.get("TERM") == "xterm-color" and pagers == {"cat"}
    return kernel or "JPY_PARENT_PID" in environment


def open_log(path: Path) -> IO[str]:
    """Open log.txt for appending; raise UserError if that is not possible."""
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


class Clock:
    """Elapsed time, and the remaining time estimated from the pace of the last steps."""

    def __init__(self):
        self.total_steps = 0
        self._readings: deque[tuple[int, float]] = deque(maxlen=50)
        self._began = time.monotonic()

    def start(self, total_steps: int, start_step: int) -> None:
        self.total_steps, self._began = total_steps, time.monotonic()

    def read(self, step: int, timestamp: float | None = None) -> None:
        """Record that step `step` is done. The pace counts from the first reading, which excludes
        compilation."""
        self._readings.append((step, time.monotonic() if timestamp is None else timestamp))

    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def remaining(self) -> float | None:
        """Return the estimated remaining seconds; None before two steps are done."""
        if len(self._readings) < 2 or self._readings[-1][0] <= self._readings[0][0]:
            return None
        (first, first_time), (last, last_time) = self._readings[0], self._readings[-1]
        return max(self.total_steps - last, 0) * (last_time - first_time) / (last - first)


def format_step(
    step: int, total: int, values: dict[str, float], elapsed: float, remaining: float | None
) -> str:
    """Return "step 12/200  0:01:03  loss 2.3451  grad 1.20  lr 1.0e-04  12.3k tok/s/dev  ..."."""
    formatters = {
        "loss": lambda v: f"loss {v:.4f}",
        "grad_norm": lambda v: f"grad {v:.3g}",
        "learning_rate": lambda v: f"lr {v:.2e}",
        "tokens_per_second_per_device": lambda v: f"{format_count(v)} tok/s/dev",
        "mfu": lambda v: f"MFU {100 * v:.1f}%",
        "packing_efficiency": lambda v: f"packed {100 * v:.0f}%",
        "peak_memory_gib": lambda v: f"mem {v:.1f} GiB",
    }
    parts = [f"step {step:>{len(str(total))}}/{total}", format_time(elapsed)]
    parts += [formatters[name](values[name]) for name in formatters if name in values]
    shown = {name: SHOWN.get(name, name) for name in values if name not in HIDDEN}
    # With several policies, show the reward of each.
    plain = [name for name in shown if "/" not in shown[name] or name.endswith("/reward")]
    extra_names = [name for name in plain if name not in formatters]
    parts += [f"{shown[name]} {format_number(values[name])}" for name in extra_names]
    return "  ".join([*parts, f"ETA {format_time(remaining)}"])


def format_eval(step: int, values: dict[str, float]) -> str:
    """Return "eval at step 12  loss 2.3451  accuracy 0.25"."""
    shown = (f"{name[5:]} {format_number(value)}" for name, value in values.items())
    return "  ".join([f"eval at step {step}", *shown])


def format_number(value: float) -> str:
    """Format with four significant digits, without an exponent where that is readable; integers
    without a fraction."""
    if value == int(value) if abs(value) < 1e15 else False:
        return f"{int(value):,}"
    return f"{value:.4f}" if 0.01 <= abs(value) < 1000 else f"{value:.4g}"


def format_count(value: float) -> str:
    """Format as 950, 12.3k or 4.56M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def format_time(seconds: float | None) -> str:
    """Format as 1:02:03, or "-" if unknown."""
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
