"""RemoteProducer: the trainer's end of a rollout service, in the place of a Producer.

    RoundSource ── next_slots, mark_done, state ──> here ──> service (another process)
    a thread, every LOOK seconds: table of servers there, reports and lines back, lease renewed

It keeps what the service may lose: the cursor of what was marked done, and which prompts were
handed out and are not done yet. A service that was started again gets both and asks for the rest
anew, so nothing is lost and nothing is trained twice.
"""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from jaxtrain.errors import Interrupted, RunStopped
from jaxtrain.generation.producer import GroupRules, RoundSlot
from jaxtrain.generation.ray.remote import RemoteLost, RemoteObject, read
from jaxtrain.generation.ray.wire import pack_ask, pack_slot, slim, unpack_slot

LOOK = 0.25
RENEW = 5.0
"""Seconds between two calls that renew the lease."""
CALL_SECONDS = 60.0
"""Of calls that wait for nothing."""


class SharedEngine(Protocol):
    """What the trainer's engine offers those that ask its servers from elsewhere."""

    def table(self) -> tuple[int, Any]:
        """(number that grows with every change, plain data): which servers there are."""
        ...

    def apply_reports(self, reports: Sequence[Any]) -> None:
        """What happened to requests made elsewhere."""
        ...


class QuotedFailure(NamedTuple):
    """A failure as RoundSource quotes it."""

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


class RemoteProducer:
    """See the module's docstring; the interface is Producer's."""

    def __init__(
        self,
        service: RemoteObject,
        who: str,
        opener: str,
        settings: dict[str, Any],
        rules: GroupRules,
        *,
        engine: SharedEngine | None = None,
        facts: Callable[[], dict[str, Any]] = lambda: {"progress": 0.0, "rounds_begun": 0},
        wait_seconds: float = 600.0,
        log: Callable[[str], None] = print,
    ):
        """Attaches at once; raises UserError where another run holds the service. facts: what the
        service's `Facts` are now. wait_seconds: how long a lost service may take to come back."""
        self.service, self.who, self.opener, self.settings = service, who, opener, settings
        self.rules, self.engine, self.facts, self.log = rules, engine, facts, log
        self.wait_seconds = wait_seconds
        self.token = secrets.token_hex(8)
        self.prompts = self.player = RemoteStatus()
        self.restarts = 0
        self._counters: Counter[str] = Counter()
        self._before: Counter[str] = Counter()
        """Counters of services that were lost."""
        self._state: dict[str, Any] | None = None
        self._in_hand: dict[int, RoundSlot] = {}
        self._asked = self._taken = 0
        self._sent = -1
        self._should_stop: Callable[[], bool] = lambda: False
        self._closed = threading.Event()
        self._lock = threading.RLock()
        """Held while the service is attached to anew."""
        self._attach()
        self._thread = threading.Thread(target=self._keep, name="rollout service", daemon=True)
        self._thread.start()

    def stop_when(self, should_stop: Callable[[], bool]) -> None:
        """See Producer."""
        self._should_stop = should_stop

    def next_slots(self, count: int, asking: int | None = None) -> list[RoundSlot]:
        """See Producer."""
        self._asked += count if asking is None else asking
        fresh = count if asking is None else asking
        while True:
            table = self._table()
            try:
                future = self.service.call("take", self.token, count, fresh, self.facts(), table)
                reply = self._hear(self._wait(future))
                break
            except RemoteLost:
                self._come_back()
                # Of the new one nothing was asked yet.
                fresh = self._asked - self._taken
        self._sent = max(self._sent, table[0])
        self._taken += count
        slots = [unpack_slot(slot) for slot in reply["slots"]]
        self._in_hand |= {id(slot): slot for slot in slots}
        return slots

    def mark_done(self, slots: Sequence[RoundSlot]) -> None:
        """See Producer."""
        packed = [pack_slot(slim(slot)) for slot in slots]
        while True:
            try:
                reply = self._hear(self._call("mark_done", self.token, packed))
                break
            except RemoteLost:
                self._come_back()
        self._state = reply["state"]
        for slot in slots:
            self._in_hand.pop(id(slot), None)

    def state(self) -> dict[str, Any]:
        """See Producer."""
        if self._state is None:
            self.mark_done([])
        assert self._state is not None, "the service's answer has it"
        return self._state

    def restore(self, state: dict[str, Any]) -> None:
        """See Producer."""
        assert not self._asked, "restore() comes before take()"
        self._hear(self._call("restore", self.token, state, []))
        self._state = state

    def drop_older(self, version: int) -> None:
        """See Producer; the newest table goes there first, or prompts would be asked anew of the
        last weights. A service that is lost has nothing to give up."""
        table = self._table()
        try:
            self._hear(self._call("drop_older", self.token, version, table))
        except RemoteLost:
            return
        self._sent = max(self._sent, table[0])

    @property
    def cancelled(self) -> Counter[str]:
        """See Producer."""
        return self.prompts.cancelled

    def counters(self) -> dict[str, float]:
        """What workers counted in all, and how often the service was lost."""
        found = {name: float(n) for name, n in sorted((self._before + self._counters).items())}
        return {**found, "ray/service_restarts": float(self.restarts)}

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
        """The answer to a `take`."""
        while True:
            try:
                return read(future.result(timeout=LOOK))
            except TimeoutError:
                if future.done():
                    return read(future.result())
            if self.service.error is not None:
                raise self.service.error
            if self._should_stop():
                self.service.call("interrupt", self.token)
                raise Interrupted

    def _hear(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Note what comes with every answer; Lost where the service knows this run no more."""
        if reply.get("gone"):
            raise RemoteLost("the service was started anew")
        for line in reply["said"]:
            self.log(line)
        standing = self.prompts
        standing.done, standing.waiting = reply["done"], reply["waiting"]
        standing.skipped, standing.cancelled = reply["skipped"], Counter(reply["cancelled"])
        if reply["newest"] is not None:
            self.prompts.newest = QuotedFailure(*reply["newest"])
        self._counters = Counter(reply["counters"])
        if self.engine is not None and reply.get("reports"):
            self.engine.apply_reports(reply["reports"])
        return reply

    def _attach(self) -> None:
        found = self.service.call("attach", self.token, self.who, self.opener, self.settings)
        self._hear(self._wait(found))

    def _come_back(self) -> None:
        """Attach to the service's successor and tell it what is done and what is in hand."""
        with self._lock:
            self.restarts += 1
            self._before, self._counters = self._before + self._counters, Counter()
            self.log("the rollout service was lost: what it had under way is asked again")
            deadline = time.monotonic() + self.wait_seconds
            while True:
                try:
                    self._attach()
                    asks = [pack_ask(ask) for s in self._in_hand.values() for ask in slim(s).asks]
                    if self._state is not None or asks:
                        self._hear(self._call("restore", self.token, self._state, asks))
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
                time.sleep(LOOK)

    def _keep(self) -> None:
        """The thread: see the module's docstring."""
        renewed = time.monotonic()
        while not self._closed.wait(LOOK):
            table = self._table()
            known, now = table[0] <= self._sent, time.monotonic()
            if known and now - renewed < RENEW:
                continue
            try:
                with self._lock:
                    reply = self._call("tick", self.token, None if known else table)
                    self._hear(reply)
            except (RemoteLost, RunStopped, TimeoutError):
                continue  # whoever waits for slots finds it, too
            self._sent, renewed = max(self._sent, table[0]), now
