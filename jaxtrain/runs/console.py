"""What a person sees while a run goes on: a progress bar, one line a step, messages; and log.txt.

On a terminal a bar stays below the lines. Elsewhere, in cells of notebooks, or with log.console =
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

from jaxtrain.errors import UserError
from jaxtrain.text_safety import escape_control_chars

HIDDEN = {
    *("tokens", "trained_tokens", "step_seconds", "time", "entropy", "num_tokens", "groups"),
    *("num_sampled_tokens", "policy_version", "trained_share", "prompt_tokens_saved"),
}
"""In metrics.jsonl, but not on the step's line; neither are names with a slash."""

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
"""But these are, under a shorter name."""


class SafeConsole(RichConsole):
    """rich's console for what verbs print: samples, reasons and names of strangers, in which a
    terminal must find nothing to obey. Text with styles in it is left to whoever made it."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Text as it is shown, cells of tables included."""
        return super().render_str(escape_control_chars(text), **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """See rich."""
        super().print(*map(_without_control, objects), **options)


def _without_control(shown: Any) -> Any:
    plain = isinstance(shown, Text) and not shown.spans
    return Text(escape_control_chars(shown.plain), style=shown.style) if plain else shown


class Console:
    """The sink for people. `stream` defaults to stdout."""

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
                TextColumn("{task.percentage:>3.0f}%  {task.fields[times]}"),
                console=self._rich,
                expand=True,
            )
            self._task = self._bar.add_task("", total=total_steps, completed=start_step, times="")
            self._bar.start()

    def write(self, step: int, values: dict[str, float]) -> None:
        """One line for the step, and one for the evaluation after it, if there was one."""
        evals = {name: value for name, value in values.items() if name.startswith("eval/")}
        rest = {name: value for name, value in values.items() if name not in evals}
        if rest:
            self._clock.read(step)
            elapsed, left = self._clock.elapsed(), self._clock.left()
            self.log(format_step(step, self._clock.total_steps, rest, elapsed, left))
            if self._bar:
                times = f"{format_time(elapsed)} < {format_time(left)}"
                self._bar.update(self._task, completed=step, times=times)
        if evals:
            self.log(format_eval(step, evals))

    def log(self, text: str) -> None:
        """A message above the bar, and in log.txt."""
        text = escape_control_chars(text)
        with self._lock:  # the watchdog and the signal thread speak, too
            self.record(text)
            if self._rich:
                self._rich.print(text, markup=False, highlight=False, soft_wrap=True)
            elif not self._silent:
                self._stream.write(text + "\n")
                self._stream.flush()

    def record(self, text: str) -> None:
        """A message for log.txt alone, behind the time of day. A full disk costs the log, not what
        people see."""
        if self._log:
            try:
                self._log.write(f"{time.strftime('%H:%M:%S')} {escape_control_chars(text)}\n")
                self._log.flush()
            except OSError as error:
                log, self._log = self._log, None
                with contextlib.suppress(OSError):  # it would try to write the rest once more
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
    """Whether this is a command in a cell (`!jaxtrain ...`): its output is a terminal by name that
    cannot go back up, and would show every state of a bar below the last one.

    Told by what jupyter_client and ipykernel set for a kernel's processes."""
    pagers = {environment.get(name) for name in ("PAGER", "GIT_PAGER")}
    kernel = environment.get("TERM") == "xterm-color" and pagers == {"cat"}
    return kernel or "JPY_PARENT_PID" in environment


def open_log(path: Path) -> IO[str]:
    """log.txt, to be continued; UserError where it cannot be."""
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error


class Clock:
    """Time since the start, and the time left by the pace of the last steps."""

    def __init__(self):
        self.total_steps = 0
        self._readings: deque[tuple[int, float]] = deque(maxlen=50)
        self._began = time.monotonic()

    def start(self, total_steps: int, start_step: int) -> None:
        self.total_steps, self._began = total_steps, time.monotonic()

    def read(self, step: int, now: float | None = None) -> None:
        """Step `step` is done. The pace counts from the first reading: compilation is before it."""
        self._readings.append((step, time.monotonic() if now is None else now))

    def elapsed(self) -> float:
        return time.monotonic() - self._began

    def left(self) -> float | None:
        """Seconds to go; None before two steps were seen."""
        if len(self._readings) < 2 or self._readings[-1][0] <= self._readings[0][0]:
            return None
        (first, then), (last, now) = self._readings[0], self._readings[-1]
        return max(self.total_steps - last, 0) * (now - then) / (last - first)


def format_step(
    step: int, total: int, values: dict[str, float], elapsed: float, left: float | None
) -> str:
    """step 12/200  0:01:03  loss 2.3451  grad 1.20  lr 1.0e-04  12.3k tok/s/dev  ..."""
    known = {
        "loss": lambda v: f"loss {v:.4f}",
        "grad_norm": lambda v: f"grad {v:.3g}",
        "learning_rate": lambda v: f"lr {v:.2e}",
        "tokens_per_second_per_device": lambda v: f"{format_count(v)} tok/s/dev",
        "mfu": lambda v: f"MFU {100 * v:.1f}%",
        "packing_efficiency": lambda v: f"packed {100 * v:.0f}%",
        "peak_memory_gib": lambda v: f"mem {v:.1f} GiB",
    }
    parts = [f"step {step:>{len(str(total))}}/{total}", format_time(elapsed)]
    parts += [known[name](values[name]) for name in known if name in values]
    shown = {name: SHOWN.get(name, name) for name in values if name not in HIDDEN}
    # Of several policies each one's reward.
    plain = [name for name in shown if "/" not in shown[name] or name.endswith("/reward")]
    others = [name for name in plain if name not in known]
    parts += [f"{shown[name]} {format_number(values[name])}" for name in others]
    return "  ".join([*parts, f"ETA {format_time(left)}"])


def format_eval(step: int, values: dict[str, float]) -> str:
    """eval at step 12  loss 2.3451  accuracy 0.25"""
    shown = (f"{name[5:]} {format_number(value)}" for name, value in values.items())
    return "  ".join([f"eval at step {step}", *shown])


def format_number(value: float) -> str:
    """Four significant digits, without an exponent where that is readable; whole numbers whole."""
    if value == int(value) if abs(value) < 1e15 else False:
        return f"{int(value):,}"
    return f"{value:.4f}" if 0.01 <= abs(value) < 1000 else f"{value:.4g}"


def format_count(value: float) -> str:
    """950, 12.3k, 4.56M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def format_time(seconds: float | None) -> str:
    """1:02:03, or - when not known."""
    if seconds is None:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}"
