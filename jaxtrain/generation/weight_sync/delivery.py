"""Delivery of a version to all servers, shared by both publishers.

    loop thread   publish(v): keep v as the newest, then push it to every server that is up, in a
                  Delivery, which it need not wait for
    watchers      a server came back: push the newest to it

Both paths do the same work; `VllmServer.sync_lock` serializes them for each server.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.vllm.control import Deadline, ServerGone, ServerRefused
from jaxtrain.generation.vllm.server import VllmServer
from jaxtrain.generation.vllm.servers import Servers

CLOSE_SECONDS = 15.0
POLL_SECONDS = 0.25
"""Interval at which a publish checks whether a server that it waits for was dropped."""


def push_to_all(servers: Servers, push_weights: Callable[[VllmServer], None], version: int) -> None:
    """Push `version` to every server that is up or new and keeps no other version, in parallel.

    A server that fails, hangs in a step, or needs more than sync_seconds, is dropped. Returns as
    soon as the others hold the version, waits if there are none, and raises RunStopped when that
    takes too long. Raises UserError when a server reports a mistake in the run's setup.
    """
    limit = servers.config.sync_seconds
    reachable = [s for s in servers.all if s.state == "up" or (s.state == "new" and s.model)]
    pending = [server for server in reachable if not server.keeps]
    failures: queue.Queue[tuple[VllmServer, BaseException | None]] = queue.Queue()

    def try_one(server: VllmServer) -> None:
        try:
            push_weights(server)
        except BaseException as error:  # raised in the caller's thread
            failures.put((server, error))
        else:
            failures.put((server, None))

    deadline = Deadline(limit)
    for server in pending:
        # A daemon thread each: one that hangs must not delay the others or the exit.
        threading.Thread(target=try_one, args=(server,), daemon=True).start()
    while pending:
        try:
            server, error = failures.get(timeout=deadline.left(POLL_SECONDS))
        except queue.Empty:
            if not deadline.left():
                break
            # Dropped by its watcher, while a call to it still waits in a thread.
            pending = [server for server in pending if not server.lost]
            continue
        if server not in pending:
            continue
        pending.remove(server)
        if isinstance(error, ServerGone | ServerRefused | RunStopped):
            servers.drop(server, f"weight sync: {error}")
        elif error is not None:
            raise error
    for server in pending:
        servers.drop(
            server,
            f"weight sync: version {version} not taken within {limit:g} s"
            " (rollout.vllm.sync_seconds)",
        )
    servers.wait_for(version)


class Delivery:
    """A publish in progress, in a thread of its own."""

    def __init__(self, servers: Servers):
        self.servers = servers
        self._thread: threading.Thread | None = None
        self._metrics: dict[str, float] = {}
        self._error: BaseException | None = None

    def start(self, version: int, work: Callable[[], dict[str, float]], started: float) -> None:
        """Run `work`, which pushes `version` to the servers; requests wait for it from now on.

        started: beginning of the whole publish (perf_counter), for "sync/seconds".
        """
        assert self._thread is None, "one publish at a time"
        # In the caller's thread, so that its next requests wait for this version.
        self.servers.begin_publish(version)

        def run() -> None:
            try:
                self._metrics = {**work(), "sync/seconds": time.perf_counter() - started}
            except BaseException as error:  # raised by wait() and in waiting requests
                self._error = self.servers.error = error
            finally:
                self.servers.publishing = False

        self._thread = threading.Thread(target=run, name="publish", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> dict[str, float]:
        """Wait for the last delivery; return its metrics or raise its error."""
        if self._thread is not None:
            self._thread.join(seconds)
            if not self._thread.is_alive():
                self._thread = None
        if self._error is not None:
            raise self._error
        return self._metrics

    def close(self) -> None:
        """Wait a short time for the last delivery: ended midway, it would leave servers paused."""
        with contextlib.suppress(BaseException):
            self.wait(CLOSE_SECONDS)


def put_to_sleep(servers: Servers, seconds: float) -> None:
    """Make the servers release their GPU memory; they get no requests until `wake`. One that takes
    more than so many seconds is dropped."""
    servers.asleep = True  # before the calls, so that no request reaches a sleeping server
    up = servers.up()

    def sleep(server: VllmServer) -> None:
        try:
            server.call("POST", "/sleep", timeout=seconds, level="1")
        except ServerRefused as error:
            if error.status == 404:
                raise UserError(
                    f"rollout.vllm.sleep: {server.url} has no /sleep; start it with"
                    " --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1 in its environment"
                ) from None
            servers.drop(server, f"/sleep: {error}")
        except ServerGone as error:
            servers.drop(server, f"/sleep: {error}")

    with ThreadPoolExecutor(max(1, len(up)), thread_name_prefix="sleep") as pool:
        list(pool.map(sleep, up))


def wake(server: VllmServer, deadline: Deadline, seconds: float, *tags: str) -> None:
    """Restore memory: of "weights" before they are replaced, of "kv_cache" after. seconds: limit
    for each."""
    for tag in tags:
        server.call("POST", "/wake_up", timeout=deadline.left(seconds), tags=tag)
