"""Prefetch target states: a stage that runs ahead of training, behind a bounded queue.

    source ─> stage.fill (thread "target")  ──queue──>  next(live) ─> prepare ─> step
              target on its own devices,      at most `queue` batches, their states already
              or the disk                     on the devices that train

The stage waits while the queue is full, the loop while it is empty. The cursor is that of the last
batch taken from the queue: batches in the queue are computed again after a resume.
"""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
from typing_extensions import override

from jaxtrain.batch import Batch
from jaxtrain.core.task import TrainingContext
from jaxtrain.errors import Interrupted
from jaxtrain.methods.offline import OfflineData, OfflineRounds

PATIENCE = 0.2
"""Seconds between two checks for a stop request."""

WARM = 2
"""Batches before times are counted: they compile and read weights."""


class CaptureStage(Protocol):
    """Adds the target's states to batches."""

    name: str
    """"the target" or "the disk", for people."""

    @property
    def streams(self) -> Mapping[str, Any]:
        """Dtypes of the added streams, as in pack.Fields."""
        ...

    def fill(self, batch: Batch) -> Batch:
        """Return the host batch with states as streams, which may still be in transfer to the
        training devices. Thread-safe."""
        ...

    def check(self, data: OfflineData) -> str:
        """Return a line for the start of a run, "" for none. Raises UserError if the states are not
        those of this target and data."""
        ...

    def describe(self, row_tokens: int) -> str:
        """Return a line for the dry run; row_tokens: of the longest row."""
        ...

    def advise(self, busy: float, waiting: float) -> str:
        """Return advice from the seconds of work per batch of the stage and of training; "" if
        there is none."""
        ...

    def close(self) -> None:
        """End a `fill` that waits for something outside of this process."""
        ...


@dataclass
class WaitingBatch:
    """A batch that waits for its step."""

    batches: list[Batch]
    cursor: dict[str, Any]
    """Cursor of the source behind it."""
    counters: dict[str, Any]
    started: float
    """Time at which the stage began to fill it."""

    @property
    def streams(self) -> list[Any]:
        """Streams that are computed on devices."""
        arrays = (value for batch in self.batches for value in batch.streams.values())
        return [value for value in arrays if isinstance(value, jax.Array)]

    @property
    def ready(self) -> bool:
        """True once its states are computed."""
        return all(value.is_ready() for value in self.streams)

    def block_until_ready(self) -> None:
        """Wait for its states."""
        jax.block_until_ready(self.streams)


@dataclass
class WaitTimes:
    """Times that the stage and training spent working or waiting for each other, in seconds."""

    began: float = field(default_factory=time.monotonic)
    batches: int = 0
    """Number of batches taken from the queue."""
    busy: float = 0.0
    """Working time of the stage, for the `finished` batches."""
    finished: int = 0
    blocked: float = 0.0
    """Time that the stage waited for room in the queue."""
    starved: float = 0.0
    """Time that the training devices idled for lack of states."""

    @property
    def total(self) -> float:
        """Seconds since the first batch was requested."""
        return max(time.monotonic() - self.began, 1e-9)

    def share(self, seconds: float) -> float:
        """Return `seconds` as a share of the total."""
        return min(seconds / self.total, 1.0)


class PrefetchedRounds(OfflineRounds):
    """A `core.task.Rounds` whose batches come with states, computed ahead of their step."""

    def __init__(
        self, rounds: OfflineRounds, stage: CaptureStage, depth: int, log: Callable[[str], None]
    ):
        """rounds: unused ones without states. depth: of the queue."""
        super().__init__(rounds.source, rounds.total_steps, rounds.report)
        self.stage, self.log = stage, log
        self.times = WaitTimes()
        self._room = threading.Semaphore(depth)
        self._items: queue.SimpleQueue[WaitingBatch | BaseException] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._last: WaitingBatch | None = None

    def draw(self, live: TrainingContext) -> list[Batch]:
        """Return the next batch with its states. Raises StopIteration when the epochs end."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="target", daemon=True)
            self._thread.start()
        item = self._take(live)
        self._last = item
        self._room.release()
        self.times.batches += 1
        if self.times.batches == WARM:  # what came before was compiling and reading weights
            self.times = WaitTimes(batches=WARM)
        return item.batches

    def finish(self, live: TrainingContext, *, interrupted: bool) -> dict[str, float]:
        """Log the wait times at the end of the run."""
        if live.step >= self.total_steps and self.times.batches > WARM + 1:
            self.log(self.summary())
        return {}

    def summary(self) -> str:
        """Summarize how busy the stage was and how long training waited, with advice."""
        times = self.times
        work = times.busy / max(times.finished, 1)
        step = (times.total - times.starved) / max(times.batches - WARM, 1)
        text = (
            f"{self.stage.name}: busy {times.share(times.busy):.0%} of the time, waited"
            f" {times.blocked:.1f} s for training; training waited {times.starved:.1f} s of"
            f" {times.total:.1f} s for states"
        )
        advice = self.stage.advise(work, step)
        return f"{text}. {advice}" if advice else text

    def _take(self, live: TrainingContext) -> WaitingBatch:
        """Return the next item, adding the time that the training devices idled for it."""
        item = self._peek()
        starved = not isinstance(item, WaitingBatch) or not item.ready
        with live.phase("waiting for target states"):
            if starved:
                # The devices are busy with the step dispatched last; only the wait after it counts.
                jax.block_until_ready(next(iter(live.snapshot().params().values())))
            started = time.monotonic()
            while item is None:
                item = self._peek(PATIENCE)
                # With several processes, only the loop may stop: all of them, between two steps.
                if item is None and jax.process_count() == 1 and live.stop_requested():
                    raise Interrupted
            if isinstance(item, BaseException):
                self._items.put(item)  # a later call raises it again
                raise item
            item.block_until_ready()
        if starved:
            self.times.starved += time.monotonic() - started
        return item

    def _peek(self, timeout: float = 0.0) -> "WaitingBatch | BaseException | None":
        try:
            return self._items.get(timeout=timeout) if timeout else self._items.get_nowait()
        except queue.Empty:
            return None

    def _work(self) -> None:
        """Draw, fill and enqueue batches in the thread; an exception is enqueued, too, and ends
        it."""
        pending: WaitingBatch | None = None
        done = 0.0

        def finish_pending() -> None:
            nonlocal pending, done
            if pending is not None:
                pending.block_until_ready()
                finished = time.monotonic()
                self.times.busy += finished - max(done, pending.started, self.times.began)
                self.times.finished += 1
                pending, done = None, finished

        try:
            while not self._stopped.is_set():
                if not self._room.acquire(blocking=False):
                    finish_pending()
                    started = time.monotonic()
                    while not self._room.acquire(timeout=PATIENCE):
                        if self._stopped.is_set():
                            return
                    self.times.blocked += time.monotonic() - max(started, self.times.began)
                batches = next(self.source)
                cursor, counters = self.source.state(), self.source.counters()
                started = time.monotonic()
                filled = [self.stage.fill(batch) for batch in batches]
                item = WaitingBatch(filled, cursor, counters, started)
                self._items.put(item)
                finish_pending()  # waits for the batch before, while the devices compute this one
                pending = item
        except BaseException as error:  # the loop's thread raises it
            self._items.put(error)

    def state(self) -> dict[str, Any]:
        """Return the cursor of the batch that was returned last."""
        return self.source.state() if self._last is None else self._last.cursor

    @override
    def restore(self, state: dict[str, Any]) -> None:
        assert self._thread is None, "a run is restored before its first batch"
        self.source.restore(state)

    def counters(self) -> dict[str, Any]:
        """Return the source's counters as of the batch returned last, and the wait shares."""
        if self._last is None:
            return self.source.counters()
        times, counters = self.times, self._last.counters
        shares = {
            "target/busy": times.share(times.busy),
            "target/starved": times.share(times.starved),
        }
        return {**counters, "metrics": {**counters.get("metrics", {}), **shares}}

    def close(self) -> None:
        """Stop both threads."""
        self._stopped.set()
        self.stage.close()
        if self._thread is not None:
            self._thread.join(timeout=60)
        self.source.close()
