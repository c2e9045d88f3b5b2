"""Heartbeat of a run, reports of stalls, and clean stopping on signals.

    loop thread       beat(step) after each step; with phase("waiting for data"): around what blocks
    watchdog thread   writes heartbeat.json; warns and dumps all stacks when nothing has moved
    signal thread     counts SIGTERM/SIGINT as they arrive, even while the loop thread compiles

No thread here ever waits for another. No jax.
"""

import contextlib
import faulthandler
import json
import math
import os
import platform
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.runs.manifest import write_atomically
from jaxtrain.runs.progress import Compiling, LogFunction, Progress
from jaxtrain.text_safety import escape_control_chars, shorten

HEARTBEAT = "heartbeat.json"
BEAT_SECONDS = 10.0
"""Longest time between two writes of heartbeat.json while the process is alive."""


class Watchdog:
    """Context that writes heartbeat.json at most once a second, and reports when the run stalls.

    heartbeat.json: `state` ("running"; at the end "finished", "stopped" or "failed", with a
    `message`), `step` of `total_steps`, `phase`, `time` of writing and `moved`, the time of the
    last sign of progress (both Unix seconds), `started`, `start_step`, `attempt`, `pid`, `host`.
    """

    def __init__(
        self,
        folder: str | Path,
        seconds: float,
        log: LogFunction,
        *,
        attempt: int = 1,
        primary: bool = True,
        compiling: Compiling | None = None,
        show: LogFunction = lambda text: None,
    ):
        """show: gets what has lasted for some seconds, and "", about every second."""
        self.folder, self.seconds, self.log, self.primary = Path(folder), seconds, log, primary
        self._facts: dict[str, Any] = {
            "state": "running",
            "message": "",
            "total_steps": None,
            "start_step": None,
            "attempt": attempt,
            "started": round(time.time(), 3),
            "pid": os.getpid(),
            "host": platform.node(),
        }
        self._step = 0
        self.progress, self.show = Progress(log, compiling), show
        self._shown = ""
        self._written = -math.inf
        self._move()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def beat(self, step: int) -> None:
        """Record that step `step` is done."""
        self._step = step
        self._move()

    def start(self, total_steps: int, start_step: int) -> None:
        """Record that training goes from `start_step` (steps already done) to `total_steps`."""
        self._facts |= {"total_steps": total_steps, "start_step": start_step}
        self.progress.rename("training")
        self._step = max(self._step, start_step)
        self._move()

    def stopped(self, reason: str) -> None:
        """Record that a signal ends training before its last step."""
        self._facts |= {"state": "stopped", "message": reason}

    @contextlib.contextmanager
    def phase(self, name: str, detail: Callable[[], str] | None = None) -> Iterator[None]:
        """Set what the loop does inside the context; see Progress.phase."""
        with self.progress.phase(name, detail):
            self._move()
            try:
                yield
            finally:
                self._move()

    def __enter__(self) -> "Watchdog":
        self._move()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *traceback: object
    ) -> None:
        self._stop.set()
        self._thread.join()
        stopped = (self._facts["message"] or "signal") if self._facts["state"] == "stopped" else ""
        self._facts |= dict(zip(("state", "message"), describe_end(error, stopped), strict=True))
        self._write_heartbeat()

    def _move(self) -> None:
        self._moved, self._reports, self._changed = time.monotonic(), 0, True
        self._moved_at = time.time()

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.seconds / 4)):
            self.show(self.progress.tick())
            if (shown := self.progress.describe()) != self._shown:
                # An answer that ended, or another program: the phase goes on.
                self._shown = shown
                self._move()
            if self._changed or time.monotonic() - self._written >= BEAT_SECONDS:
                self._write_heartbeat()
            idle = time.monotonic() - self._moved
            if idle >= self.seconds * 2**self._reports:
                self._reports += 1
                self._report(idle)

    def _write_heartbeat(self) -> None:
        self._changed, self._written = False, time.monotonic()
        beat = {
            **self._facts,
            "step": self._step,
            "phase": self.progress.describe(),
            "time": round(time.time(), 3),
            "moved": round(self._moved_at, 3),
        }
        if self.primary:
            with contextlib.suppress(OSError):  # a full disk is the checkpoint's to report
                write_atomically(self.folder / HEARTBEAT, json.dumps(beat), durable=False)

    def _report(self, idle: float) -> None:
        path, stacks = self.folder / "stacks.txt", ""
        with contextlib.suppress(OSError), path.open("a") as file:
            file.write(f"\n=== {time.ctime()}: {self.progress.describe()}, {idle:.0f} s\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            stacks = f"; the stacks of all threads are in {path}"
        self.log(
            f"warning: nothing has moved for {idle:.0f} s after step {self._step}:"
            f" {self.progress.describe()}{stacks}"
        )


def describe_end(error: BaseException | None, signal_name: str = "") -> tuple[str, str]:
    """Return how a run ended and why: "finished", "stopped" by a signal, or "failed"."""
    if isinstance(error, KeyboardInterrupt):
        return "stopped", "SIGINT"
    if error is not None:
        text = escape_control_chars(f"{type(error).__name__}: {error}")
        return "failed", shorten(text, 500)
    return ("stopped", signal_name) if signal_name else ("finished", "")


def describe_silent_end(folder: Path, outside: Sequence[str] = ()) -> str:
    """Describe the attempt that has ended in `folder` without writing how; "" if there is none.

    The caller holds the folder's lock: whoever wrote "running" is gone. outside: code of others
    that the attempt ran."""
    try:
        beat = json.loads((folder / HEARTBEAT).read_text())
        if beat["state"] != "running":
            return ""
        where = f"after step {beat['step']:d}, in {shorten(str(beat['phase']), 60)!r}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    names = f", such as {', '.join(outside)}" if outside else ""
    return escape_control_chars(
        f"the last attempt ended {where}, without a word: it was killed, by the system if memory"
        f" ran out, or code that it called ended the process{names}"
    )


class Signals:
    """Context: the first SIGTERM or SIGINT sets `stop`, the second ends the process at once.

    With several processes the first is passed on instead, and `stop` is set where all of them do
    so: one that alone left out a collective would have the others wait for it.

    Python runs signal handlers between two bytecodes of the main thread, which a compilation keeps
    busy for minutes; the C handler's wake-up socket is read by a thread of its own instead.
    """

    WATCHED = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, log: LogFunction, on_signal: LogFunction | None = None):
        """on_signal: called with the first signal's name, in the signal thread, in place of setting
        `stop`."""
        self.log, self.on_signal = log, on_signal
        self.stop = self._received = False
        self.name = ""

    def __enter__(self) -> "Signals":
        assert threading.current_thread() is threading.main_thread()
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._old = {number: signal.signal(number, _ignore) for number in self.WATCHED}
        self._old_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._writer.close()

    def _listen(self) -> None:
        while received := self._reader.recv(1):
            if received[0] not in self.WATCHED:
                continue
            if self._received or self.stop:
                os.write(2, b"\n\x1b[?25h" if os.isatty(2) else b"\n")
                os._exit(128 + received[0])
            self.name, self._received = signal.Signals(received[0]).name, True
            if self.on_signal is None:
                self.stop = True
            else:
                self.on_signal(self.name)
            self.log(f"{self.name}: stopping after this step; once more to exit at once")
        self._reader.close()


def _ignore(number: int, frame: object) -> None:
    """Do nothing: Python writes to the wake-up socket only for signals that have a handler."""
