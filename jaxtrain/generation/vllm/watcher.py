"""Threads that watch servers: drop one that is gone, admit one that joins or returns.

Checks /health every health_seconds, or at once after a failed request (`Pool.suspect`), and
progress every second. Whatever a server is waited for, a thread of its own names it before its time
limit ends: the watch itself may be waiting. A restarted server has none of the run's state, so it
is inspected, must draw a token, and receives the weights again before it gets requests.
"""

import math
import threading
from collections.abc import Callable

from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.vllm.control import ServerGone, ServerRefused, call
from jaxtrain.generation.vllm.inspector import PROBE_SECONDS, Inspector
from jaxtrain.generation.vllm.pool import Pool
from jaxtrain.generation.vllm.server import NAMED_FRACTION, VllmServer
from jaxtrain.generation.vllm.telemetry import Telemetry, read_telemetry

HEALTH_TIMEOUT_SECONDS = 20.0
NAMED_HEALTH_SECONDS = 10.0
"""Limit of a health check for its naming in the log, which is early: it may begin health_seconds
after the server began to hang."""
TELEMETRY_SECONDS = 1.0
"""Interval at which /metrics of a busy server is read."""
NAMING_SECONDS = 0.5
"""Interval at which servers that wait are looked for."""
PROBE_FRACTION = 0.25
"""Fraction of progress_seconds after which a server without counts is asked for a token."""


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

    def start_naming(self) -> None:
        """Name servers that are waited for, in a thread that ends with `close`."""

        def work() -> None:
            while not self.closed.wait(NAMING_SECONDS):
                for server in self.pool.all:
                    self._name_late(server)

        threading.Thread(target=work, name="naming", daemon=True).start()

    def _name_late(self, server: VllmServer) -> None:
        """Log once what a server has not answered for a good part of its time limit."""
        ending = ""
        if server.state in ("up", "draining"):
            limit = self.pool.config.progress_seconds
            ending = f"; dropped after {limit:g} s (rollout.vllm.progress_seconds) or a little more"
        for step, silent in server.steps.name_late():
            self.pool.log(f"vllm {server.url}: no answer to {step.name} for {silent:.0f} s{ending}")
        silent = self.pool.clock() - server.progressed
        draws = ending and self.pool.load(server) and server.telemetry.tokens
        if not draws or server.updating or self.pool.asleep or server.silent:
            return
        if silent > NAMED_FRACTION * self.pool.config.progress_seconds:
            server.silent = True
            self.pool.log(f"vllm {server.url}: no token for {silent:.0f} s{ending}")

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
        checked_at = -math.inf
        while not self.closed.is_set() and server.state != "gone":
            nudged = server.nudge.wait(min(pause, TELEMETRY_SECONDS))
            # Cleared before the checks, so that a request to check again during them is not lost.
            server.nudge.clear()
            if self.closed.is_set() or self.pool.end_drain(server):
                continue
            unread = False
            if server.state == "up" and (server.in_flight or self.pool.front is not None):
                unread = self._read(server) is None and bool(server.telemetry.tokens)
            if server.state in ("up", "draining"):
                self._check_progress(server)
            # /metrics is read more often than /health: routing needs fresh queue lengths. A server
            # that had counts and gives none any more may hang as a whole.
            if nudged or unread or self.pool.clock() - checked_at >= pause:
                self._check_health(server)
                checked_at = self.pool.clock()

    def _read(self, server: VllmServer) -> Telemetry | None:
        """Read and record a server's /metrics."""
        before, telemetry = server.telemetry, read_telemetry(server.url)
        self.pool.record_telemetry(server, telemetry)
        if telemetry is not None and telemetry.tokens != before.tokens:
            self.pool.note_progress(server)
        return telemetry

    def _check_health(self, server: VllmServer) -> None:
        limit = min(HEALTH_TIMEOUT_SECONDS, self.pool.config.progress_seconds)
        try:
            with server.steps.wait("/health", min(limit, NAMED_HEALTH_SECONDS)):
                call(server.url, "GET", "/health", timeout=limit)
        except (ServerGone, ServerRefused) as error:
            if not self.closed.is_set():
                self._note_failure(server, error)
            return
        if server.state == "new" and not server.model:
            self._inspect_joined(server)
        elif self._needs_weights(server) and self.push_weights is not None:
            self._readmit(server, self.push_weights)
        elif server.behind and not self.pool.publishing and self.push_weights is not None:
            self._catch_up(server, self.push_weights)

    def _needs_weights(self, server: VllmServer) -> bool:
        """Return True if a server waits for weights and no publish will push them. A new server
        that was present when a publish began gets them from that publish."""
        late = server.state == "new" and not self.pool.publishing
        return self.pool.version >= 0 and (server.state == "down" or late)

    def _note_failure(self, server: VllmServer, error: ServerGone | ServerRefused) -> None:
        if isinstance(error, ServerRefused) and announces_shutdown(error):
            return self.pool.leave(server, "it announced that it leaves", listed=server.listed)
        if server.state in ("up", "draining"):
            self.pool.drop(server, f"/health: {error}")
        elif not server.model:
            server.why = str(error)

    def _check_progress(self, server: VllmServer) -> None:
        """Drop a server that reports itself healthy but makes no progress on its requests."""
        pool = self.pool
        if not pool.load(server) or server.updating or pool.asleep:
            pool.note_progress(server)
            return
        # Read before the probe, which takes long: another thread may drop the server meanwhile.
        epoch, limit = server.epoch, pool.config.progress_seconds
        if self.pool.clock() - server.progressed < PROBE_FRACTION * limit:
            return
        telemetry = self._read(server)
        if telemetry is None or not telemetry.tokens:
            # It reports no counts: request one token, which queues behind its other requests.
            seconds = min(limit - (pool.clock() - server.progressed), PROBE_SECONDS)
            try:
                with server.steps.wait("a request for a token", seconds):
                    self.inspector.probe(server.route, server.url, server.model, seconds)
                return pool.note_progress(server)
            except (ServerGone, ServerRefused, UserError):
                pass
        silent = pool.clock() - server.progressed
        if silent < limit:
            return
        if server.epoch == epoch and pool.load(server):
            pool.count("servers_hung")
            pool.drop(
                server,
                f"hung: no token for {silent:.0f} s with {pool.load(server):.0f} requests under"
                " way, though /health says 200; rollout.vllm.progress_seconds",
            )
            # Requests through the router do not see the epoch of the server behind it.
            pool.cut_front()

    def _inspect_joined(self, server: VllmServer) -> None:
        """Inspect a server that has just joined; it receives the weights afterwards."""
        try:
            self.inspect(server)
        except (ServerGone, ServerRefused) as error:
            server.why = str(error)
        except UserError as error:
            self._log_unusable(server, error)
        else:
            server.why = "waits for weights"
            server.nudge.set()

    def _readmit(self, server: VllmServer, push_weights: Callable[[VllmServer], None]) -> None:
        try:
            # It may have been restarted with another model or other options.
            self.inspector.inspect(server)
            push_weights(server)
            while server.state == "up" and server.version < self.pool.version:
                push_weights(server)  # another version was published meanwhile
        except (ServerGone, ServerRefused) as error:
            server.why = str(error)
        except (UserError, RunStopped) as error:
            self._log_unusable(server, error)

    def _catch_up(self, server: VllmServer, push_weights: Callable[[VllmServer], None]) -> None:
        """Push the newest weights to a server that kept older ones and has stayed up."""
        try:
            push_weights(server)
        except (ServerGone, ServerRefused, RunStopped) as error:
            self.pool.drop(server, f"weight sync: {error}")

    def _log_unusable(self, server: VllmServer, error: Exception) -> None:
        """Log, once per reason, that a server is unusable; training continues with the others."""
        if str(error) != server.why:
            self.pool.log(f"vllm {server.url} is there but of no use: {error}")
        server.why = str(error)


def announces_shutdown(error: ServerRefused) -> bool:
    """Return True if a refused /health announces that the server is about to shut down."""
    return error.status == 503 and "draining" in error.message
