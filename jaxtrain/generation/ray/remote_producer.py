"""The trainer's end of a rollout service, in the place of a Producer.

    RolloutRounds ── next_slots, mark_done, state ──> RemoteProducer ──> service (another process)
    a thread, every POLL_SECONDS: sends the table of servers, renews the lease, fetches reports and
    log lines

It keeps what the service may lose: the cursor of what was marked done, and which prompts were
handed out and are not done yet. A service that was started again gets both and plays all other
prompts again, so nothing is lost and nothing is trained twice.
"""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jaxtrain.errors import Interrupted, RunStopped
from jaxtrain.generation.episodes import RoundSlot
from jaxtrain.generation.group_player import GroupRules
from jaxtrain.generation.ray.remote import RemoteLost, RemoteObject, read
from jaxtrain.generation.ray.wire import pack_request, pack_slot, slim, unpack_slot

POLL_SECONDS = 0.25
RENEW_SECONDS = 5.0
"""Between two calls that renew the lease."""
CALL_SECONDS = 60.0
"""Time limit of calls that wait for nothing."""


class SharedEngine(Protocol):
    """Part of the trainer's engine that lets other processes use its servers."""

    def table(self) -> tuple[int, Any]:
        """Return (number that grows with every change, plain data of the servers)."""
        ...

    def apply_reports(self, reports: Sequence[Any]) -> None:
        """Take in what happened to requests of other processes."""
        ...


class QuotedFailure(NamedTuple):
    """A failure as the explanation of idle rounds quotes it."""

    text: str
    cause: str

    def __str__(self) -> str:
        return self.text


class RemoteStatus:
    """Numbers of the service's prompts and failures, as of its last answer."""

    def __init__(self) -> None:
        self.done = self.waiting = self.skipped = 0
        self.cancelled: Counter[str] = Counter()
        self.newest: QuotedFailure | None = None

    @property
    def failures(self) -> "RemoteStatus":
        return self


class ServiceRequest(NamedTuple):
    """A trainer's request to its service: to make a producer."""

    trainer: str
    """Who asks, as messages name it."""
    opener: str
    """"package.module:function" that makes the producer; a name and no import, for only the service
    needs it."""
    settings: dict[str, Any]
    """Argument of the opener."""


class RemoteProducer:
    """A Producer in another process; see the module's docstring."""

    def __init__(
        self,
        service: RemoteObject,
        request: ServiceRequest,
        rules: GroupRules,
        *,
        engine: SharedEngine | None = None,
        facts: Callable[[], dict[str, Any]] = lambda: {"progress": 0.0, "rounds_begun": 0},
        wait_seconds: float = 600.0,
        log: Callable[[str], None] = print,
    ):
        """Attach at once; raises UserError while another run uses the service.

        facts: returns the service's `TrainerStatus`. wait_seconds: time that a lost service may
        take to come back.
        """
        self.service, self.request, self.rules = service, request, rules
        self.engine, self.facts, self.log = engine, facts, log
        self.wait_seconds = wait_seconds
        self.token = secrets.token_hex(8)
        self.prompts = self.player = RemoteStatus()
        self.restarts = 0
        self._counters: Counter[str] = Counter()
        self._lost_counters: Counter[str] = Counter()
        """Counters of services that were lost."""
        self._state: dict[str, Any] | None = None
        self._in_hand: dict[int, RoundSlot] = {}
        self._requested = self._taken = 0
        self._sent = -1
        self._should_stop: Callable[[], bool] = lambda: False
        self._closed = threading.Event()
        self._lock = threading.RLock()
        """Locked while it attaches again to the service."""
        self._newest_answer = 0
        """Number of the service's answer whose numbers are kept."""
        self._status_lock = threading.Lock()
        self._attach()
        self._thread = threading.Thread(target=self._poll, name="rollout service", daemon=True)
        self._thread.start()

    def describe(self) -> str:
        """Return how many groups were requested and did not come; from any thread."""
        return f"{self._requested - self._taken} groups to come"

    def stop_when(self, should_stop: Callable[[], bool]) -> None:
        """Stop waiting for slots once `should_stop` returns True; it is polled."""
        self._should_stop = should_stop

    def next_slots(self, count: int, requesting: int | None = None) -> list[RoundSlot]:
        """Wait for the next `count` slots; see Producer.next_slots."""
        fresh = count if requesting is None else requesting
        self._requested += fresh
        while True:
            table = self._table()
            try:
                future = self.service.call("take", self.token, count, fresh, self.facts(), table)
                reply = self._take_in(self._wait(future))
                break
            except RemoteLost:
                self._reattach()
                # The new service must begin all slots that were requested of the old one.
                fresh = self._requested - self._taken
        self._sent = max(self._sent, table[0])
        self._taken += count
        slots = [unpack_slot(slot) for slot in reply["slots"]]
        self._in_hand |= {id(slot): slot for slot in slots}
        return slots

    def mark_done(self, slots: Sequence[RoundSlot]) -> None:
        """Mark slots as done; see Producer.mark_done."""
        packed = [pack_slot(slim(slot)) for slot in slots]
        while True:
            try:
                reply = self._take_in(self._call("mark_done", self.token, packed))
                break
            except RemoteLost:
                self._reattach()
        self._state = reply["state"]
        for slot in slots:
            self._in_hand.pop(id(slot), None)

    def state(self) -> dict[str, Any]:
        """Return the cursor of what was marked done."""
        if self._state is None:
            self.mark_done([])
        assert self._state is not None, "the service's answer has it"
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a cursor; before the first next_slots()."""
        assert not self._requested, "restore() comes before next_slots()"
        self._take_in(self._call("restore", self.token, state, []))
        self._state = state

    def drop_older(self, version: int) -> None:
        """Cancel groups with older tokens; see Producer.drop_older. A lost service has none."""
        # The newest table goes first, or prompts would be played again by the last weights.
        table = self._table()
        try:
            self._take_in(self._call("drop_older", self.token, version, table))
        except RemoteLost:
            return
        self._sent = max(self._sent, table[0])

    @property
    def cancelled(self) -> Counter[str]:
        """Groups given up while they were played, by reason."""
        return self.prompts.cancelled

    def counters(self) -> dict[str, float]:
        """Return what workers counted in all, and how often the service was lost."""
        total = self._lost_counters + self._counters
        return {
            **{name: float(n) for name, n in sorted(total.items())},
            "ray/service_restarts": float(self.restarts),
        }

    def close(self) -> None:
        """Leave the service."""
        if self._closed.is_set():
            return
        self._closed.set()
        try:
            self._call("leave", self.token)
        except (RemoteLost, RunStopped, TimeoutError):
            pass  # gone already
        self._thread.join(timeout=5.0)

    def _table(self) -> tuple[int, Any]:
        return (0, None) if self.engine is None else self.engine.table()

    def _call(self, name: str, *arguments: Any) -> Any:
        return read(self.service.call(name, *arguments).result(CALL_SECONDS))

    def _wait(self, future: Any) -> Any:
        """Return the answer to a call that may wait for long."""
        while True:
            try:
                return read(future.result(timeout=POLL_SECONDS))
            except TimeoutError:
                if future.done():
                    return read(future.result())
            if self.service.error is not None:
                raise self.service.error
            if self._should_stop():
                self.service.call("interrupt", self.token)
                raise Interrupted

    def _take_in(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Note what comes with every answer; RemoteLost if the service was started again."""
        if reply.get("gone"):
            raise RemoteLost("the service was started anew")
        for line in reply["said"]:
            self.log(line)
        with self._status_lock:
            # The poll thread may read its answer after that of a later call, whose numbers are
            # newer: older ones would undo them, and a run in epochs would draw another round.
            if reply["number"] > self._newest_answer:
                self._newest_answer = reply["number"]
                self._take_numbers(reply)
        if self.engine is not None and reply.get("reports"):
            self.engine.apply_reports(reply["reports"])
        return reply

    def _take_numbers(self, reply: dict[str, Any]) -> None:
        status = self.prompts
        status.done, status.waiting = reply["done"], reply["waiting"]
        status.skipped, status.cancelled = reply["skipped"], Counter(reply["cancelled"])
        if reply["newest"] is not None:
            status.newest = QuotedFailure(*reply["newest"])
        self._counters = Counter(reply["counters"])

    def _attach(self) -> None:
        # Opening a producer reads data sets: it may take long.
        arguments = (self.token, *self.request)
        reply = self._wait(self.service.call("attach", *arguments))
        self._newest_answer = 0  # a service counts its answers from the start
        self._take_in(reply)

    def _reattach(self) -> None:
        """Attach to the service's successor, with what is done and what the trainer has."""
        with self._lock:
            self.restarts += 1
            self._lost_counters, self._counters = self._lost_counters + self._counters, Counter()
            self.log("the rollout service was lost: what it had under way is asked again")
            deadline = time.monotonic() + self.wait_seconds
            while True:
                try:
                    self._attach()
                    slots = map(slim, self._in_hand.values())
                    requests = [pack_request(r) for slot in slots for r in slot.requests]
                    if self._state is not None or requests:
                        self._take_in(self._call("restore", self.token, self._state, requests))
                    return
                except (RemoteLost, TimeoutError) as error:
                    if time.monotonic() > deadline:
                        raise RunStopped(
                            f"the rollout service did not come back within {self.wait_seconds:g} s"
                            " (rollout.ray.wait_seconds); look at `ray status` and start the run"
                            " again"
                        ) from error
                if self._should_stop():
                    raise Interrupted
                time.sleep(POLL_SECONDS)

    def _poll(self) -> None:
        """Run the thread: see the module's docstring."""
        renewed = time.monotonic()
        while not self._closed.wait(POLL_SECONDS):
            table = self._table()
            sent, time_now = table[0] <= self._sent, time.monotonic()
            if sent and time_now - renewed < RENEW_SECONDS:
                continue
            try:
                with self._lock:
                    reply = self._call("tick", self.token, None if sent else table)
                    self._take_in(reply)
            except (RemoteLost, RunStopped, TimeoutError):
                continue  # the call that waits for slots raises it, too
            self._sent, renewed = max(self._sent, table[0]), time_now
