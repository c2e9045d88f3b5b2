"""Threads that watch servers: drop one when it is gone, admit it when it comes or returns.

Checks /health every health_seconds, or at once after a failed request (`Pool.suspect`). A restarted
server has none of the run's state, so it is inspected, must draw a token, and receives the weights
again before it gets work.
"""

import math
import threading
from collections.abc import Callable

from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.vllm.control import ServerGone, ServerRefused, call
from jaxtrain.generation.vllm.inspector import PROBE_SECONDS, Inspector
from jaxtrain.generation.vllm.pool import Pool, VllmServer
from jaxtrain.generation.vllm.telemetry import Telemetry, read_telemetry

HEALTH_TIMEOUT_SECONDS = 20.0
MAX_STRIKES = 3
"""Unanswered health checks in a row before a server counts as stalled."""
TELEMETRY_SECONDS = 1.0
"""Interval at which /metrics of a busy server is read."""


class Watcher:
    """Watches the servers of a pool.

    push_weights: the publisher's function that gives a server the newest weights; it raises
    ServerGone, ServerRefused, UserError or RunStopped.
    """

    def __init__(self, pool: Pool, inspector: Inspector):
        self.pool, self.inspector = pool, inspector
        self.push_weights: Callable[[VllmServer], None] | None = None
        self.closed = threading.Event()

    def start(self, server: VllmServer) -> None:
        """Watch a server from now on, in a thread that ends with it."""
        threading.Thread(target=self._watch, args=(server,), daemon=True).start()

    def close(self) -> None:
        """End all threads soon."""
        self.closed.set()
        for server in self.pool.all:
            server.nudge.set()

    def inspect(self, server: VllmServer) -> None:
        """Check a server's health and inspect it; ServerGone, ServerRefused or UserError."""
        self.inspector.refuse_router(server.url)
        call(server.url, "GET", "/health", timeout=HEALTH_TIMEOUT_SECONDS)
        self.inspector.inspect(server)

    def _watch(self, server: VllmServer) -> None:
        pause = self.pool.config.health_seconds
        looked = -math.inf
        while not self.closed.is_set() and server.state != "gone":
            nudged = server.nudge.wait(min(pause, TELEMETRY_SECONDS))
            server.nudge.clear()
            if self.closed.is_set() or self.pool.end_drain(server):
                continue
            if server.state == "up" and (server.in_flight or self.pool.front is not None):
                self._read(server)
            # /metrics is read more often than /health: routing needs fresh queue lengths.
            if nudged or self.pool.clock() - looked >= pause:
                self._check_health(server)
                looked = self.pool.clock()

    def _read(self, server: VllmServer) -> Telemetry | None:
        """Read and record a server's /metrics."""
        before, telemetry = server.telemetry, read_telemetry(server.url)
        self.pool.record_telemetry(server, telemetry)
        if telemetry is not None and telemetry.tokens != before.tokens:
            self.pool.note_progress(server)
        return telemetry

    def _check_health(self, server: VllmServer) -> None:
        try:
            call(server.url, "GET", "/health", timeout=HEALTH_TIMEOUT_SECONDS)
        except (ServerGone, ServerRefused) as error:
            if not self.closed.is_set():
                self._note_failure(server, error)
            return
        server.strikes = 0
        if server.state == "new" and not server.model:
            self._take_in(server)
        elif self._wants_weights(server) and self.push_weights is not None:
            self._take_back(server, self.push_weights)
        elif server.behind and not self.pool.publishing and self.push_weights is not None:
            self._catch_up(server, self.push_weights)
        elif server.state in ("up", "draining"):
            self._check_progress(server)

    def _wants_weights(self, server: VllmServer) -> bool:
        """Return True if a server waits for weights that no publish will bring it. A new server
        that was present when a publish began gets them from that publish."""
        late = server.state == "new" and not self.pool.publishing
        return self.pool.version >= 0 and (server.state == "down" or late)

    def _note_failure(self, server: VllmServer, error: ServerGone | ServerRefused) -> None:
        # A time-out may be a busy event loop; only several in a row count. A refused or broken
        # connection is final.
        server.strikes += 1
        late = isinstance(error, ServerGone) and "not answered" in str(error)
        if isinstance(error, ServerRefused) and says_draining(error):
            return self.pool.leave(server, "it announced that it leaves", listed=server.listed)
        if server.state in ("up", "draining") and (not late or server.strikes >= MAX_STRIKES):
            self.pool.drop(server, f"/health: {error}")
        elif late:
            server.nudge.set()
        elif not server.model:
            server.why = str(error)

    def _check_progress(self, server: VllmServer) -> None:
        """Drop a server that reports itself healthy but makes no progress on its requests."""
        pool = self.pool
        if not pool.load(server) or server.updating or pool.asleep:
            pool.note_progress(server)
            return
        epoch, limit = server.epoch, pool.config.progress_seconds
        if self.pool.clock() - server.progressed < limit / 4:
            return
        telemetry = self._read(server)
        silent = self.pool.clock() - server.progressed
        if silent < limit:
            return
        if telemetry is None or not telemetry.tokens:
            # It does not tell what it does: ask for one token, behind what waits there.
            try:
                seconds = min(limit, PROBE_SECONDS)
                self.inspector.probe(server.route, server.url, server.model, seconds)
                return pool.note_progress(server)
            except (ServerGone, ServerRefused, UserError):
                if self.pool.clock() - server.progressed < limit:
                    return
        if server.epoch == epoch and pool.load(server):
            pool.count("servers_hung")
            pool.drop(
                server,
                f"hung: no token for {silent:.0f} s with {pool.load(server):.0f} requests under"
                " way, though /health says 200; rollout.vllm.progress_seconds",
            )
            pool.cut_front()

    def _take_in(self, server: VllmServer) -> None:
        """Inspect one that has just joined; the weights come afterwards."""
        try:
            self.inspect(server)
        except (ServerGone, ServerRefused) as error:
            server.why = str(error)
        except UserError as error:
            self._tell_useless(server, error)
        else:
            server.why = "waits for weights"
            server.nudge.set()

    def _take_back(self, server: VllmServer, bring: Callable[[VllmServer], None]) -> None:
        try:
            self.inspector.inspect(server)
            bring(server)
            while server.state == "up" and server.version < self.pool.version:
                bring(server)  # another version was published meanwhile
        except (ServerGone, ServerRefused) as error:
            server.why = str(error)
        except (UserError, RunStopped) as error:
            self._tell_useless(server, error)

    def _catch_up(self, server: VllmServer, bring: Callable[[VllmServer], None]) -> None:
        """It kept older weights for an evaluation, and works all the while."""
        try:
            bring(server)
        except (ServerGone, ServerRefused, RunStopped) as error:
            self.pool.drop(server, f"weight sync: {error}")

    def _tell_useless(self, server: VllmServer, error: Exception) -> None:
        """It came as something that this run cannot use; the others may do without it."""
        if str(error) != server.why:
            self.pool.log(f"vllm {server.url} is there but of no use: {error}")
        server.why = str(error)


def says_draining(error: ServerRefused) -> bool:
    """Return True if a refused /health announces that the server is about to shut down."""
    return error.status == 503 and "draining" in error.message
