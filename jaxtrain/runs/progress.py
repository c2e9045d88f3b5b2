"""Progress for people: nested phases, how far each is, and the seconds that they took.

    working thread     with phase("evaluating", detail): around whatever may take long
    watching thread    tick() about every second: announces what has lasted for PATIENCE seconds

Compiling is no phase of its own, since any first call may compile: the time is taken off the phase
around it. No jax.
"""

import contextlib
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import IO, Protocol

from jaxtrain.text_safety import escape_control_chars

LogFunction = Callable[[str], None]

PATIENCE = 2.0
"""Seconds after which a phase is announced for the first time."""
REPEAT = 30.0
"""Seconds after which it is announced again, and the first ones for a phase that came before; then
at doubling times."""
COMPILING = "compiling"
STARTING = "starting"
CLEAR = "\r\x1b[K"
"""Returns to the start of a terminal's line and deletes it."""


class Compiling(Protocol):
    """Source of facts about compilation: distributed.compile_cache.CompileCounter."""

    blocked: float
    """Seconds so far in which a thread waited for a program."""

    @property
    def current(self) -> str:
        """Name of a program that is being compiled now, or ""."""
        ...


class NothingCompiles:
    """Compiling of a process in which nothing is compiled."""

    blocked, current = 0.0, ""


class Progress:
    """Nested phases of the working thread, and what else is known of them."""

    def __init__(
        self,
        announce: LogFunction,
        compiling: Compiling | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.announce, self.clock = announce, clock
        self.compiling: Compiling = compiling or NothingCompiles()
        self._phases: list[Phase] = [Phase(STARTING, clock())]
        self._spent: dict[str, float] = defaultdict(float)
        self._since, self._blocked = clock(), self.compiling.blocked
        self._announced: set[str] = set()

    def rename(self, name: str) -> None:
        """Name what is done outside of all phases from now on."""
        self._spend()
        self._phases[0] = Phase(name, self.clock())

    @contextlib.contextmanager
    def phase(self, name: str, detail: Callable[[], str] | None = None) -> Iterator[None]:
        """Set what is done inside the context: "waiting for data", "saving a checkpoint". detail:
        how far it is, such as "120 of 512 answers"; called by another thread."""
        self._spend()
        self._phases.append(Phase(name, self.clock(), detail))
        try:
            yield
        finally:
            self._spend()
            self._phases.pop()
            if len(self._phases) == 1:
                self._phases[0].restart(self.clock())

    def describe(self) -> str:
        """Return the current phase with how far it is, and what lies within: "evaluating: 120 of
        1,319 answers, compiling fill"."""
        outer, *inner = self._phases[1:] or self._phases
        parts = [outer.detail() if outer.detail else ""]
        for phase in inner:
            parts += [phase.name, phase.detail() if phase.detail else ""]
        program = self.compiling.current
        shown = ", ".join(filter(None, [*parts, program and f"{COMPILING} {program}"]))
        return f"{outer.name}: {shown}" if shown else outer.name

    def tick(self) -> str:
        """Announce the current phase if it is time; return its text if it has lasted for PATIENCE
        seconds, else ""."""
        phase = (self._phases[1:] or self._phases)[0]
        age = self.clock() - phase.began
        if age < PATIENCE:
            return ""
        text = f"{self.describe()} ({age:.0f} s)"
        due = phase.due or (REPEAT if phase.name in self._announced else PATIENCE)
        if age >= due:
            phase.due = max(REPEAT, 2 * due)
            self._announced.add(phase.name)
            self.announce(text)
        return text

    def describe_times(self) -> str:
        """Return a line of the seconds spent in each phase so far, the longest first and none under
        half a second; time in an inner phase, and compiling, is not the outer's."""
        self._spend()
        longest = sorted(self._spent.items(), key=lambda entry: -entry[1])
        shown = [f"{name} {spent:.1f}" for name, spent in longest if spent > 0.5]
        return f"seconds: {', '.join(shown)}" if shown else ""

    def _spend(self) -> None:
        """Count the time since the last change of phase for the current one."""
        time_now, blocked = self.clock(), self.compiling.blocked
        elapsed = time_now - self._since
        # Several threads may have compiled at once.
        compiled = min(max(blocked - self._blocked, 0.0), elapsed)
        self._spent[COMPILING] += compiled
        self._spent[self._phases[-1].name] += elapsed - compiled
        self._since, self._blocked = time_now, blocked


class Phase:
    """A phase that has begun."""

    def __init__(self, name: str, began: float, detail: Callable[[], str] | None = None):
        self.name, self.detail = name, detail
        self.restart(began)

    def restart(self, began: float) -> None:
        """Count its age from now on."""
        self.began, self.due = began, 0.0
        """due: age of its next announcement; 0: not yet decided."""


class ProgressTicker:
    """Context of a command without a run: shows its progress, on a terminal in one line that
    changes, elsewhere in a line for each announcement."""

    def __init__(self, compiling: Compiling | None = None, stream: IO[str] | None = None):
        """stream: by default stderr."""
        self.stream = stream or sys.stderr
        self.live = self.stream.isatty()
        self.progress = Progress(self._announce, compiling)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self.progress

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.live:
            self._write(CLEAR)

    def _watch(self) -> None:
        while not self._stop.wait(1.0):
            self.show()

    def show(self) -> None:
        """Show what is done now, if that has lasted for some seconds."""
        text = self.progress.tick()
        if self.live:
            self._write(CLEAR + escape_control_chars(text))

    def _announce(self, text: str) -> None:
        if not self.live:
            self._write(f"{escape_control_chars(text)}\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a closed pipe costs the progress alone
            self.stream.write(text)
            self.stream.flush()
