"""The servers of a run: what state each is in, and which may be asked now.

    join ──> new ──bring(weights)──> up ──refused, dead, stalled──> down ──healthy, bring──> up
                                     │                                │
                                   leave                            leave
                                     v                                v
                                  draining ──nothing under way──────> gone
                                             (or drain_seconds over)

Only `up` servers that hold the newest weights get requests. Who notices that a server is gone or
has come stands in `watch.py` and `servers.py`; this is their table, which any thread may use.
"""

import contextlib
import dataclasses
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator

from jaxtrain.config.vllm import VllmConfig
from jaxtrain.errors import RunStopped
from jaxtrain.generation.vllm.control import Deadline, ServerGone, ServerRefused, call
from jaxtrain.generation.vllm.messages import GENERATE
from jaxtrain.generation.vllm.routing import CandidateServer, choose, limit_load, weigh
from jaxtrain.generation.vllm.sources import DiscoveredServer
from jaxtrain.generation.vllm.telemetry import Telemetry


@dataclasses.dataclass(eq=False)
class VllmServer:
    """One server; its fields change under the lock of Pool."""

    url: str
    state: str = "new"
    """new, up, draining, down or gone."""
    version: int = -1
    """Newest policy version that it holds; -1: none of this run's."""
    in_flight: int = 0
    epoch: int = 0
    """Counts how often it was dropped: a request of an older epoch will not be answered."""
    why: str = "not asked yet"
    """Why it is not up."""
    since: float = dataclasses.field(default_factory=time.time)
    """When its state last changed (unix time)."""
    capacity: float | None = None
    """What its source says that it takes beside the others."""
    leaving: float = 0.0
    """When it began to drain (monotonic)."""
    listed: bool = True
    """Whether a source still lists it: what drains is forgotten, or waited for."""
    updating: bool = False
    """It gets no new requests."""
    kept_version: int | None = None
    """The version that it keeps for an evaluation, which alone may ask it; None: it keeps none."""
    behind: bool = False
    """Whether it kept a version and has not been given the newest since."""
    strikes: int = 0
    model: str = ""
    """Name of the base model there."""
    route: str = GENERATE
    max_model_len: int = 0
    processed: bool = False
    """Whether its log-probs are of the distribution after temperature and truncation."""
    progressed: float = 0.0
    """When it was last seen to work on its requests (monotonic)."""
    telemetry: Telemetry = Telemetry()
    """What it said last of its work."""
    telemetry_at: float = -math.inf
    """When that was (monotonic)."""
    short: bool = False
    """Whether it was told that max_model_len is short."""
    sync_lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    """Held while weights are brought to it."""
    nudge: threading.Event = dataclasses.field(default_factory=threading.Event)

    @property
    def lost(self) -> bool:
        """Whether nothing that it held counts any more."""
        return self.state in ("down", "gone")

    @property
    def keeps(self) -> bool:
        """Whether its weights must stay as they are."""
        return self.kept_version is not None and self.version == self.kept_version

    def describe(self) -> str:
        """The URL and why it is not up."""
        return f"{self.url} ({self.why})"

    @contextlib.contextmanager
    def alone(self, deadline: Deadline) -> Iterator[None]:
        """Hold sync_lock; ServerGone when another sync keeps it for too long."""
        if not self.sync_lock.acquire(timeout=deadline.left()):
            raise ServerGone(f"an earlier sync is not over after {deadline.seconds:g} s")
        try:
            yield
        finally:
            self.sync_lock.release()


class Pool:
    """The table of servers."""

    def __init__(self, config: VllmConfig, log: Callable[[str], None] = print):
        self.config, self.log = config, log
        self.session = secrets.token_hex(4)
        """Part of every version's label: no other run's weights pass for ours."""
        self.all: list[VllmServer] = []
        """Replaced, never changed: who goes through it needs no lock."""
        self.version = -1
        """Newest published version; of one under way already that, so that requests wait for it."""
        self.publishing = False
        self.counters: Counter[str] = Counter()
        self.error: BaseException | None = None
        """What a watcher found that no waiting will mend."""
        self.asleep = False
        self.front: VllmServer | None = None
        """The router that requests go through; up as long as it takes them."""
        self.clock = time.monotonic
        self._lock = threading.RLock()
        self._turn = 0

    def label(self, version: int, policy: str = "") -> str:
        """The name of a version on the servers; policy: of one of several."""
        return "-".join(["jaxtrain", self.session, *filter(None, [policy]), str(version)])

    def read_label(self, label: str) -> int | None:
        """The version of a label; None for weights that this run never sent."""
        start, _, number = label.rpartition("-")
        is_ours = start == f"jaxtrain-{self.session}" and number.isdigit()
        return int(number) if is_ours and int(number) <= self.version + 1 else None

    # -- who is there

    def join(self, discovered: DiscoveredServer) -> VllmServer | None:
        """Take in a server that a source lists. None where it is known already; one that was about
        to leave stays."""
        url = discovered.url.rstrip("/")
        with self._lock:
            for server in self.all:
                if server.url == url:
                    server.capacity = discovered.capacity
                    if not server.listed:
                        self._stay(server)
                    return None
            server = VllmServer(url, capacity=discovered.capacity)
            self.all = [*self.all, server]
            self.counters["servers_joined"] += 1
        self.changed()
        return server

    def leave(self, server: VllmServer, why: str, *, listed: bool = False) -> None:
        """Ask it no more; what is under way there may end within drain_seconds, then it is
        forgotten. listed: its source still has it, so that it may come back."""
        with self._lock:
            server.listed = listed
            if server.state == "up":
                self._set(server, "draining", why)
                server.leaving = self.clock()
                self.counters["servers_drained"] += 1
            elif server.state != "draining" and not listed:
                self._forget(server, why)
        server.nudge.set()
        self.changed()

    def end_drain(self, server: VllmServer, *, dead: bool = False) -> bool:
        """Let go of a draining server once nothing is under way there, drain_seconds are over, or
        at once where it is `dead` known to be dead; whether that was so."""
        with self._lock:
            over = self.clock() - server.leaving >= self.config.drain_seconds
            if server.state != "draining" or (server.in_flight and not over and not dead):
                return False
            if server.in_flight:
                server.epoch += 1  # cut: the requests are asked again elsewhere
                self.counters["requests_cut"] += server.in_flight
            if server.listed:
                self._set(server, "down", server.why)
                server.version = -1
            else:
                self._forget(server, server.why)
        self.changed()
        return True

    def _stay(self, server: VllmServer) -> None:
        server.listed = True
        if server.state == "draining":
            # With older weights it is given the newest as one that has come back.
            state = "up" if server.version == self.version else "down"
            self._set(server, state, "listed again")

    def _forget(self, server: VllmServer, why: str) -> None:
        self._set(server, "gone", why)
        server.version = -1
        self.all = [entry for entry in self.all if entry is not server]
        self.counters["servers_left"] += 1

    def _set(self, server: VllmServer, state: str, why: str) -> None:
        if server.state != state:
            server.since = time.time()
        server.state, server.why = state, why

    def changed(self) -> None:
        """Called without the lock after every change of who is there, in what state."""

    # -- who may be asked

    def up(self) -> list[VllmServer]:
        return [server for server in self.all if server.state == "up"]

    def ready(self) -> list[VllmServer]:
        """Those that may be asked now: up, with the newest weights, none of them on the way."""
        if self.asleep:
            return []
        return [
            server
            for server in self.all
            if server.state == "up" and not server.updating and server.version == self.version
            if server.kept_version is None
        ]

    def acquire(
        self, session: int | None = None, among: Callable[[], list[VllmServer]] | None = None
    ) -> VllmServer | None:
        """A server that may be asked now, its load counted; None: none may.

        session: what shares a prefix, so that it goes to one server as long as that can be. among:
        those that may be asked; by default `ready`.
        """
        with self._lock:
            ready = self.ready() if among is None else among()
            self._turn += 1
            number = self._turn if session is None else session
            chosen = choose(number, self._weigh(ready), sticky=session is not None)
            if chosen is None:
                return None
            if session is not None:
                self.counters["sessions_asked"] += 1
                self.counters["sessions_at_first"] += chosen.first
            server = ready[chosen.index]
            if not server.in_flight:
                server.progressed = self.clock()
            server.in_flight += 1
            return server

    def acquire_front(self) -> VllmServer | None:
        """The router, as a server with the newest weights; None where there is none that works, or
        nothing behind it may be asked."""
        with self._lock:
            front, ready = self.front, self.ready()
            if front is None or front.state != "up" or not ready:
                return None
            front.version, front.model, front.route = self.version, ready[0].model, ready[0].route
            front.max_model_len = min(server.max_model_len for server in ready)
            front.in_flight += 1
            return front

    def mark_front_down(self, why: str) -> None:
        """The router takes no requests: they go to the servers themselves until it answers."""
        front = self.front
        assert front is not None, "there was one"
        with self._lock:
            if front.state != "up":
                return
            self._set(front, "down", why)
            self.counters["router_lost"] += 1
        self.log(f"router {front.url}: {why}; requests go to its servers directly")
        self.changed()

    def mark_front_up(self) -> None:
        """The router answers."""
        front = self.front
        if front is not None and front.state != "up":
            back = front.state == "down"
            self._set(front, "up", "")
            if back:
                self.log(f"router {front.url} answers again")
            self.changed()

    def cut_front(self) -> None:
        """Ask again, directly, what is under way through the router: some of it hangs behind it."""
        with self._lock:
            if self.front is not None:
                self.front.epoch += 1
                self.counters["requests_cut"] += self.front.in_flight

    def drop_strangers(self) -> None:
        """Drop every server that holds weights which this run never sent: behind a router an answer
        does not say whose it is."""
        for server in self.up():
            try:
                info = call(server.url, "GET", "/weight_info", timeout=30)
                label = str(info["weight_version"])
            except (ServerGone, ServerRefused, KeyError, TypeError):
                continue
            if self.read_label(label) is None:
                self.drop(server, f"it holds weights {label!r}, which this run never sent")

    def load(self, server: VllmServer) -> float:
        """Requests under way there: ours, or through a router what the server itself tells."""
        telemetry = server.telemetry
        return server.in_flight + (
            telemetry.running + telemetry.waiting if self.front is not None else 0
        )

    def _weigh(self, ready: list[VllmServer]) -> list[CandidateServer]:
        """The servers as `choose` sees them."""
        weights = weigh([server.capacity or server.telemetry.ranks for server in ready])
        time_now, total = self.clock(), self.config.concurrency / max(1, len(ready))
        return [
            CandidateServer(
                server.url,
                weight,
                server.in_flight,
                limit_load(
                    total * weight,
                    running=server.telemetry.running,
                    waiting=server.telemetry.waiting,
                    ranks=server.telemetry.ranks,
                    age=time_now - server.telemetry_at,
                    in_flight=server.in_flight,
                ),
            )
            for server, weight in zip(ready, weights, strict=True)
        ]

    def release(self, server: VllmServer) -> None:
        """Give back what `acquire` counted."""
        with self._lock:
            server.in_flight -= 1
            if server.state == "draining" and not server.in_flight:
                server.nudge.set()

    def add_load(self, server: VllmServer, change: int) -> None:
        """So many requests more, or fewer, are under way there from elsewhere."""
        with self._lock:
            if change > 0 and not server.in_flight:
                server.progressed = self.clock()
            server.in_flight += change
            if server.state == "draining" and not server.in_flight:
                server.nudge.set()

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counters[name] += number

    def measure(self) -> dict[str, float]:
        """Totals since the start, by name."""
        with self._lock:
            return {name: float(n) for name, n in sorted(self.counters.items())}

    def check_length(self, server: VllmServer, prompt: int, new: int) -> None:
        """Say once when a prompt and its answer are longer than what the server takes."""

    def record_telemetry(self, server: VllmServer, telemetry: Telemetry | None) -> None:
        """What the server said of its work now; None: nothing that can be read."""
        if telemetry is not None:
            server.telemetry, server.telemetry_at = telemetry, self.clock()

    def note_progress(self, server: VllmServer) -> None:
        """The server has answered, or is not expected to."""
        server.progressed = self.clock()

    # -- weights

    def keep(self, selection: int | Collection[str]) -> list[VllmServer]:
        """Have servers keep the newest version until `release_kept`: so many, the least loaded ones, or
        those of these URLs. Others are left to be asked; empty: there are too few."""
        with self._lock:
            free = [
                candidate
                for candidate in self.up()
                if candidate.kept_version is None and not candidate.behind
            ]
            chosen = sorted(
                free, key=lambda candidate: candidate.in_flight / (candidate.capacity or 1.0)
            )
            if isinstance(selection, int):
                chosen = chosen[:selection]
            else:
                urls = {url.rstrip("/") for url in selection}
                chosen = [candidate for candidate in free if candidate.url in urls]
            chosen = chosen[: max(0, len(free) - 1)]
            for server in chosen:
                server.kept_version = self.version
        return chosen

    def release_kept(self, servers: Iterable[VllmServer]) -> None:
        """What they kept is not needed any more; those that are behind are given the newest."""
        with self._lock:
            for server in servers:
                server.behind = server.kept_version is not None and server.version < self.version
                server.kept_version = None
                server.nudge.set()
        self.changed()

    def _let_go_of_last(self) -> None:
        """Training comes first: where all other servers are gone, none keeps anything."""
        up = self.up()
        if up and all(server.kept_version is not None for server in up):
            self.log("only servers that kept weights for an evaluation are left: they train now")
            self.release_kept(up)

    def begin_publish(self, version: int) -> None:
        """No server that holds an older version is asked any more; what is under way goes on."""
        with self._lock:
            self.version, self.publishing = max(self.version, version), True

    def mark_up(self, server: VllmServer, version: int, epoch: int | None = None) -> None:
        """The server holds that version now and may be asked. epoch: when that was begun;
        ServerGone where it was dropped or has left since."""
        with self._lock:
            if epoch not in (None, server.epoch) or server.state == "gone":
                raise ServerGone("it was given up before it held the weights")
            returned = server.state == "down"
            if server.state != "draining":
                self._set(server, "up", "")
            server.progressed = self.clock()
            server.version, server.strikes = version, 0
            self.version = max(self.version, version)
            server.behind = server.behind and version < self.version
        if returned:
            self.log(f"vllm {server.url} is back with version {version}")
        self.changed()

    def drop(self, server: VllmServer, why: str) -> None:
        """Ask it no more until it has been taken back; its requests are redone elsewhere."""
        with self._lock:
            if server.lost:
                return
            if server.state == "draining":
                server.why = why
                self.end_drain(server, dead=True)
                return
            self._set(server, "down", why)
            server.version, server.kept_version, server.behind = -1, None, False
            server.epoch += 1
            num_up = len(self.up())
            self.counters["servers_lost"] += 1
            summary = f"{num_up} left" if num_up else f"none left: {self.describe_wait()}"
            # Said before anybody can see the consequences.
            self.log(f"vllm {server.url} dropped ({why}); its requests are asked again; {summary}")
        self.changed()

    def describe_wait(self) -> str:
        """How long an empty pool is waited for."""
        return f"waiting up to {self.config.wait_seconds:g} s for one to come back"

    def suspect(self, server: VllmServer) -> None:
        """A request to it failed: look at its health now."""
        server.nudge.set()

    def wait_for(self, version: int) -> list[VllmServer]:
        """The servers that hold a version, as soon as there is one; RunStopped after too long."""
        deadline = self.clock() + self.config.wait_seconds
        while True:
            holders = [server for server in self.up() if server.version == version]
            if holders:
                return holders
            self.check(self.clock() > deadline)
            time.sleep(0.1)

    def check(self, too_late: bool) -> None:
        """Raise what ends the run: a watcher's error, or that no server came back in time."""
        if self.error is not None:
            raise self.error
        self._let_go_of_last()
        if too_late:
            reasons = ", ".join(server.describe() for server in self.all) or "none is known"
            raise RunStopped(
                f"no vLLM server for {self.config.wait_seconds:g} s (rollout.vllm.wait_seconds): "
                + reasons
            )
