"""State of one vLLM server, and what a run waits for there."""

import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

from jaxtrain.generation.vllm.control import Deadline, ServerGone, call
from jaxtrain.generation.vllm.messages import GENERATE
from jaxtrain.generation.vllm.telemetry import Telemetry

NAMED_FRACTION = 0.4
"""Fraction of its time limit after which a step that waits is named in the log."""


@dataclasses.dataclass(eq=False)
class ServerStep:
    """A step that a server has not finished."""

    name: str
    seconds: float
    """Time limit without progress."""
    progressed: float
    """Time of its begin or its last progress (monotonic)."""
    named: bool = False

    def renew(self) -> None:
        """Record progress."""
        self.progressed = time.monotonic()


class PendingSteps:
    """Steps of one server that have not finished; used by the threads that wait and by the one that
    names them."""

    def __init__(self) -> None:
        self._steps: list[ServerStep] = []

    @contextlib.contextmanager
    def wait(self, name: str, seconds: float) -> Iterator[ServerStep]:
        """Record a step while the block lasts. seconds: its time limit without progress."""
        step = ServerStep(name, seconds, time.monotonic())
        self._steps.append(step)
        try:
            yield step
        finally:
            self._steps.remove(step)

    def name_late(self) -> list[tuple[ServerStep, float]]:
        """Return steps that have become late since the last call, with the seconds without
        progress."""
        late = []
        for step in list(self._steps):
            silent = time.monotonic() - step.progressed
            if not step.named and silent > NAMED_FRACTION * step.seconds:
                step.named = True
                late.append((step, silent))
        return late


@dataclasses.dataclass(eq=False)
class VllmServer:
    """State of a server; its fields change under the lock of Pool."""

    url: str
    state: str = "new"
    """new, up, draining, down or gone."""
    version: int = -1
    """Newest policy version on it; -1: weights that are not this run's."""
    in_flight: int = 0
    epoch: int = 0
    """Incremented with every drop: a request of an older epoch will not be answered."""
    why: str = "not asked yet"
    """Reason why it is not up."""
    since: float = dataclasses.field(default_factory=time.time)
    """Time of its last state change (unix time)."""
    capacity: float | None = None
    """Capacity that its source lists, relative to the others."""
    leaving: float = 0.0
    """Start of draining (monotonic)."""
    listed: bool = True
    """True while a source lists it. A drained server that is no longer listed is forgotten; a
    listed one may return."""
    updating: bool = False
    """True while its weights change; it gets no new requests."""
    kept_version: int | None = None
    """Version that it keeps for an evaluation, which has it exclusively; None: it keeps none."""
    behind: bool = False
    """True if it kept a version and has not received the newest since."""
    garbled: bool = False
    """True once a bad answer of it was logged."""
    model: str = ""
    """Name of the base model on the server."""
    route: str = GENERATE
    max_model_len: int = 0
    processed: bool = False
    """True if its log-probs are those after temperature and truncation."""
    progressed: float = 0.0
    """Time of its last observed progress (monotonic)."""
    silent: bool = False
    """True once the log named it as drawing nothing; progress resets it."""
    telemetry: Telemetry = Telemetry()
    """Last reading of its /metrics."""
    telemetry_at: float = -math.inf
    """Time of that reading (monotonic)."""
    short: bool = False
    """True once the warning about its max_model_len was logged."""
    sync_lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    """Serializes weight syncs of this server."""
    nudge: threading.Event = dataclasses.field(default_factory=threading.Event)
    steps: PendingSteps = dataclasses.field(default_factory=PendingSteps)
    """Calls that it has not answered yet."""

    @property
    def lost(self) -> bool:
        """Return True if its weights and its requests are lost."""
        return self.state in ("down", "gone")

    @property
    def keeps(self) -> bool:
        """Return True if its weights must not change."""
        return self.kept_version is not None and self.version == self.kept_version

    def describe(self) -> str:
        """Return the URL and why it is not up."""
        return f"{self.url} ({self.why})"

    @contextlib.contextmanager
    def alone(self, deadline: Deadline) -> Iterator[None]:
        """Hold sync_lock; raises ServerGone if an earlier sync does not release it in time."""
        if not self.sync_lock.acquire(timeout=deadline.left()):
            raise ServerGone(f"an earlier sync is not over after {deadline.seconds:g} s")
        try:
            yield
        finally:
            self.sync_lock.release()

    def call(
        self, method: str, path: str, body: Any = None, *, timeout: float, **query: str
    ) -> Any:
        """Make a control call that the log names while it waits; see `control.call`."""
        with self.steps.wait(path, timeout):
            return call(self.url, method, path, body, timeout=timeout, **query)
