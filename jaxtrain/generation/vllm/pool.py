"""State of a run's servers, and which of them get requests.

    join ──> new ──push weights──> up ──refused, dead, stalled──> down ──healthy, push──> up
                                   │                               │
                                 leave                           leave
                                   v                               v
                                draining ──nothing in flight─────> gone
                                           (or drain_seconds over)

Only `up` servers that hold the newest weights get requests. `watcher.py` and `servers.py` detect
that a server has gone or come; this is their table, which any thread may use.
"""

import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable

from jaxtrain.config.vllm import VllmConfig
from jaxtrain.errors import RunStopped
from jaxtrain.generation.vllm.control import ServerGone, ServerRefused, call
from jaxtrain.generation.vllm.routing import CandidateServer, choose, limit_load, weigh
from jaxtrain.generation.vllm.server import VllmServer
from jaxtrain.generation.vllm.sources import DiscoveredServer
from jaxtrain.generation.vllm.telemetry import Telemetry

BAD_WINDOW, MAX_BAD = 64, 32
"""The run ends when so many of the last answers could not be used."""
STEP_BYTES = 2**28
"""Bytes of weights that a server is allowed a second more for, in each step of a sync."""


class Pool:
    """The table of servers. Any thread may use it."""

    wait_key = " (rollout.vllm.wait_seconds)"
    """Key of the longest wait, in messages."""

    def __init__(self, config: VllmConfig, log: Callable[[str], None] = print):
        self.config, self.log = config, log
        self.session = secrets.token_hex(4)
        """Part of every version's label, so that another run's weights are recognized as
        foreign."""
        self.all: list[VllmServer] = []
        """All servers. Replaced, never mutated, so that iterating needs no lock."""
        self.version = -1
        """Newest published version. Advanced when a publish begins, so that requests wait for
        it."""
        self.publishing = False
        self.counters: Counter[str] = Counter()
        self.error: BaseException | None = None
        """An error that waiting cannot resolve; the next request raises it."""
        self.asleep = False
        self.front: VllmServer | None = None
        """The router that requests go through; up as long as it accepts them."""
        self.clock = time.monotonic
        self._bad: deque[bool] = deque(maxlen=BAD_WINDOW)
        """True for each of the last answers that could not be used."""
        self._lock = threading.RLock()
        self._turn = 0

    def label(self, version: int, policy: str = "") -> str:
        """Return the name of a version on the servers. policy: one of several."""
        return "-".join(["jaxtrain", self.session, *filter(None, [policy]), str(version)])

    def read_label(self, label: str) -> int | None:
        """Return the version of a label; None for weights that this run never sent."""
        start, _, number = label.rpartition("-")
        is_ours = start == f"jaxtrain-{self.session}" and number.isdigit()
        return int(number) if is_ours and int(number) <= self.version + 1 else None

    # -- membership

    def join(self, discovered: DiscoveredServer) -> VllmServer | None:
        """Admit a server that a source lists. None if it is known already; a draining one stays."""
        url = discovered.url.rstrip("/")
        with self._lock:
            for server in self.all:
                if server.url == url:
                    server.capacity = discovered.capacity
                    if not server.listed:
                        self._relist(server)
                    return None
            server = VllmServer(url, capacity=discovered.capacity)
            self.all = [*self.all, server]
            self.counters["servers_joined"] += 1
        self.changed()
        return server

    def leave(self, server: VllmServer, why: str, *, listed: bool = False) -> None:
        """Send it no more requests; those in flight may finish within drain_seconds, then it is
        forgotten.

        listed: its source still lists it, so that it may return.
        """
        with self._lock:
            server.listed = listed
            if server.state == "up":
                self._set(server, "draining", why)
                server.leaving = self.clock()
                self.counters["servers_drained"] += 1
            # A draining server is forgotten by end_drain(), once its requests have ended.
            elif server.state != "draining" and not listed:
                self._forget(server, why)
        server.nudge.set()
        self.changed()

    def end_drain(self, server: VllmServer, *, dead: bool = False) -> bool:
        """Release a draining server if nothing is in flight, drain_seconds are over, or it is dead.

        Returns True if it was released.
        """
        with self._lock:
            over = self.clock() - server.leaving >= self.config.drain_seconds
            if server.state != "draining" or (server.in_flight and not over and not dead):
                return False
            if server.in_flight:
                server.epoch += 1  # cut: the requests are repeated elsewhere
                self.counters["requests_cut"] += server.in_flight
            if server.listed:
                # It may return with other weights, so that its watcher must send them again.
                self._set(server, "down", server.why)
                server.version = -1
            else:
                self._forget(server, server.why)
        self.changed()
        return True

    def _relist(self, server: VllmServer) -> None:
        server.listed = True
        if server.state == "draining":
            # With older weights it counts as down, so that its watcher sends it the newest.
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
        """Hook, called without the lock after every state change."""

    # -- routing

    def up(self) -> list[VllmServer]:
        return [server for server in self.all if server.state == "up"]

    def ready(self) -> list[VllmServer]:
        """Return the servers that may get requests: up, with the newest weights, and not
        updating."""
        if self.asleep:
            return []
        return [
            server
            for server in self.all
            if server.state == "up" and not server.updating and server.version == self.version
            if server.kept_version is None
        ]

    def acquire(
        self,
        session: int | None = None,
        among: Callable[[], list[VllmServer]] | None = None,
        avoid: VllmServer | None = None,
    ) -> VllmServer | None:
        """Choose a server for a request and count its load; None if none may get it.

        session: requests that share a prefix prefer one server. among: candidates; by default
        `ready`. avoid: a server that failed the request, chosen only if there is no other.
        """
        with self._lock:
            ready = self.ready() if among is None else among()
            ready = [server for server in ready if server is not avoid] or ready
            self._turn += 1
            number = self._turn if session is None else session
            chosen = choose(number, self._weigh(ready), sticky=session is not None)
            if chosen is None:
                return None
            if session is not None:
                self.counters["sessions_asked"] += 1
                self.counters["sessions_at_first"] += chosen.first
            server = ready[chosen.index]
            # An idle server makes no progress; the time limit for a hung one starts with its first
            # request.
            if not server.in_flight:
                server.progressed, server.silent = self.clock(), False
            server.in_flight += 1
            return server

    def acquire_front(self) -> VllmServer | None:
        """Return the router as a server with the newest weights; None if there is none, it is down,
        or no server behind it is ready."""
        with self._lock:
            front, ready = self.front, self.ready()
            if front is None or front.state != "up" or not ready:
                return None
            front.version, front.model, front.route = self.version, ready[0].model, ready[0].route
            # The router may choose any of its servers, so that the smallest limit counts.
            front.max_model_len = min(server.max_model_len for server in ready)
            front.in_flight += 1
            return front

    def mark_front_down(self, why: str) -> None:
        """Send requests to the servers themselves until the router answers again."""
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
        """Send requests through the router again."""
        front = self.front
        if front is not None and front.state != "up":
            back = front.state == "down"
            self._set(front, "up", "")
            if back:
                self.log(f"router {front.url} answers again")
            self.changed()

    def cut_front(self) -> None:
        """Repeat requests in flight through the router directly: some hang behind it."""
        with self._lock:
            # Which of them hang is unknown: the router does not report where a request went.
            if self.front is not None:
                self.front.epoch += 1
                self.counters["requests_cut"] += self.front.in_flight

    def drop_strangers(self) -> None:
        """Drop every server with weights that this run never sent. Behind a router an answer does
        not reveal its server, so all are checked."""
        for server in self.up():
            try:
                info = call(server.url, "GET", "/weight_info", timeout=self.step_seconds())
                label = str(info["weight_version"])
            except (ServerGone, ServerRefused, KeyError, TypeError):
                continue
            if self.read_label(label) is None:
                self.drop(server, f"it holds weights {label!r}, which this run never sent")

    def load(self, server: VllmServer) -> float:
        """Return the requests in flight there: ours, or through a router what the server
        reports."""
        telemetry = server.telemetry
        return server.in_flight + (
            telemetry.running + telemetry.waiting if self.front is not None else 0
        )

    def _weigh(self, ready: list[VllmServer]) -> list[CandidateServer]:
        """Return the servers as candidates for `choose`."""
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
        """Undo the counting of `acquire`."""
        with self._lock:
            server.in_flight -= 1
            if server.state == "draining" and not server.in_flight:
                server.nudge.set()

    def add_load(self, server: VllmServer, change: int) -> None:
        """Add a change of the number of requests in flight from other processes."""
        with self._lock:
            # Starts the time limit for a hung server, as in acquire().
            if change > 0 and not server.in_flight:
                server.progressed, server.silent = self.clock(), False
            server.in_flight += change
            if server.state == "draining" and not server.in_flight:
                server.nudge.set()

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counters[name] += number

    def measure(self) -> dict[str, float]:
        """Return totals since the start, by name."""
        with self._lock:
            return {name: float(n) for name, n in sorted(self.counters.items())}

    def check_length(self, server: VllmServer, prompt: int, new: int) -> None:
        """Log once if a prompt and its answer exceed the server's limit."""

    def record_telemetry(self, server: VllmServer, telemetry: Telemetry | None) -> None:
        """Record a reading of /metrics; None: it could not be read."""
        if telemetry is not None:
            server.telemetry, server.telemetry_at = telemetry, self.clock()

    def note_progress(self, server: VllmServer) -> None:
        """Record that the server has made progress, or is not expected to."""
        server.progressed, server.silent = self.clock(), False

    def note_answer(self, server: VllmServer, problem: str = "") -> None:
        """Record an answer, and what makes it unusable; RunStopped if too many of the last ones
        were unusable."""
        with self._lock:
            self._bad.append(bool(problem))
            bad, count = sum(self._bad), len(self._bad)
            self.counters["bad_answers"] += bool(problem)
        if not problem:
            return
        if not server.garbled:
            server.garbled = True
            self.log(f"vllm {server.url} gave a bad answer, asked again elsewhere: {problem}")
        if bad >= MAX_BAD:
            raise RunStopped(
                f"{bad} of the last {count} answers of vLLM servers cannot be used; the last one,"
                f" of {server.url}{server.route}: {problem}. Is it a vLLM server, and is anything"
                " between it and here that changes answers?"
            )

    def step_seconds(self, weight_bytes: float = 0.0) -> float:
        """Return how long a server may take for one step of a sync, of a sleep or of waking."""
        return self.config.progress_seconds + weight_bytes / STEP_BYTES

    # -- weights

    def keep(self, selection: int | Collection[str]) -> list[VllmServer]:
        """Have servers keep the newest version until `release_kept`.

        selection: how many, the least loaded first, or their URLs. At least one server remains for
        training; returns [] if there are too few.
        """
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
            chosen = chosen[: max(0, len(free) - 1)]  # at least one continues with training
            for server in chosen:
                server.kept_version = self.version
        return chosen

    def release_kept(self, servers: Iterable[VllmServer]) -> None:
        """End the keeping; servers that are behind receive the newest version."""
        with self._lock:
            for server in servers:
                server.behind = server.kept_version is not None and server.version < self.version
                server.kept_version = None
                server.nudge.set()
        self.changed()

    def _release_last_kept(self) -> None:
        """Release kept servers if no others are up: training takes precedence."""
        up = self.up()
        if up and all(server.kept_version is not None for server in up):
            self.log("only servers that kept weights for an evaluation are left: they train now")
            self.release_kept(up)

    def begin_publish(self, version: int) -> None:
        """Stop sending requests to servers with older versions; those in flight continue."""
        with self._lock:
            self.version, self.publishing = max(self.version, version), True

    def mark_up(self, server: VllmServer, version: int, epoch: int | None = None) -> None:
        """Record that a server holds a version and may get requests.

        epoch: at the start of the sync; raises ServerGone if it was dropped or has left since.
        """
        with self._lock:
            # A drop during the sync wins: its cause may not have been seen by the sync.
            if epoch not in (None, server.epoch) or server.state == "gone":
                raise ServerGone("it was given up before it held the weights")
            returned = server.state == "down"
            if server.state != "draining":
                self._set(server, "up", "")
            server.progressed = self.clock()
            server.version = version
            self.version = max(self.version, version)
            server.behind = server.behind and version < self.version
        if returned:
            self.log(f"vllm {server.url} is back with version {version}")
        self.changed()

    def drop(self, server: VllmServer, why: str) -> None:
        """Send it no requests until it is readmitted; those in flight are repeated elsewhere."""
        with self._lock:
            if server.lost:
                return
            if server.state == "draining":
                server.why = why
                self.end_drain(server, dead=True)
                return
            self._set(server, "down", why)
            server.version, server.kept_version, server.behind = -1, None, False
            # Requests in flight compare the epoch and give up at once instead of timing out.
            server.epoch += 1
            num_up = len(self.up())
            self.counters["servers_lost"] += 1
            summary = f"{num_up} left" if num_up else f"none left: {self.describe_wait()}"
            # Logged before another thread can log a consequence.
            self.log(f"vllm {server.url} dropped ({why}); its requests are asked again; {summary}")
        self.changed()

    def describe_wait(self) -> str:
        """Return how long an empty pool is waited for."""
        return f"waiting up to {self.config.wait_seconds:g} s for one to come back"

    def suspect(self, server: VllmServer) -> None:
        """Check a server's health now, after a failed request."""
        server.nudge.set()

    def wait_for(self, version: int) -> list[VllmServer]:
        """Return the servers that hold a version, as soon as there is one; RunStopped on
        time-out."""
        deadline = self.clock() + self.config.wait_seconds
        while True:
            holders = [server for server in self.up() if server.version == version]
            if holders:
                return holders
            self.check(self.clock() > deadline)
            time.sleep(0.1)

    def check(self, too_late: bool) -> None:
        """Raise the error that ends the run: a watcher's, or RunStopped if no server came back."""
        if self.error is not None:
            raise self.error
        # Here, because every waiting request and every publish calls check().
        self._release_last_kept()
        if too_late:
            reasons = ", ".join(server.describe() for server in self.all) or "none is known"
            raise RunStopped(
                f"no vLLM server for {self.config.wait_seconds:g} s{self.wait_key}: " + reasons
            )
