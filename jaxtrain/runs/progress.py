"""Progress for people: nested phases, how far each is, and the seconds that they took.

    working thread     with phase("evaluating", detail): around whatever may take long
    watching thread    tick() about every second: announces what has lasted for PATIENCE seconds

Compiling is no phase of its own, since any first call may compile: the time is taken off the phase
around it. No jax.
"""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

LogFunction = Callable[[str], None]

PATIENCE = 2.0
"""Seconds after which a phase is announced for the first time."""
REPEAT = 30.0
"""Seconds after which it is announced again, and the first ones for a phase that came before; then
at doubling times."""
COMPILING = "compiling"
STARTING = "starting"


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

    def describe(self) -> str:
        """Return the current phase with how far it is: "evaluating: 120 of 1,319 answers"."""
        phase = self._phases[-1]
        program = self.compiling.current
        parts = [phase.detail() if phase.detail else "", program and f"{COMPILING} {program}"]
        shown = ", ".join(filter(None, parts))
        return f"{phase.name}: {shown}" if shown else phase.name

    def tick(self) -> str:
        """Announce the current phase if it is time; return its text if it has lasted for PATIENCE
        seconds, else ""."""
        phase = self._phases[-1]
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
        now, blocked = self.clock(), self.compiling.blocked
        elapsed = now - self._since
        # Several threads may have compiled at once.
        compiled = min(max(blocked - self._blocked, 0.0), elapsed)
        self._spent[COMPILING] += compiled
        self._spent[self._phases[-1].name] += elapsed - compiled
        self._since, self._blocked = now, blocked


class Phase:
    """A phase that has begun."""

    def __init__(self, name: str, began: float, detail: Callable[[], str] | None = None):
        self.name, self.began, self.detail = name, began, detail
        self.due = 0.0
        """Age of its next announcement; 0: not yet decided."""


class ProgressTicker:
    """Context that calls tick() every second, where no watchdog does."""

    def __init__(self, progress: Progress, seconds: float = 1.0):
        self.progress, self.seconds = progress, seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def _watch(self) -> None:
        while not self._stop.wait(self.seconds):
            self.progress.tick()

    def __enter__(self) -> Progress:
        self._thread.start()
        return self.progress

    def __exit__(self, *exc_info: Any) -> None:
        self._stop.set()
        self._thread.join()
