"""The servers of a run: their sources are polled, and every listed server is watched.

sources ──poll every health_seconds──> join / leave ──> Pool (which servers get requests)
                                                          ^
                     one Watcher thread per server ───────┘ health, weights
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from typing_extensions import override

from jaxtrain.config.secrets import redact_text
from jaxtrain.config.vllm import VllmConfig
from jaxtrain.errors import Interrupted, UserError
from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.vllm.control import ServerGone, ServerRefused
from jaxtrain.generation.vllm.inspector import Inspector
from jaxtrain.generation.vllm.pool import Pool
from jaxtrain.generation.vllm.server import VllmServer
from jaxtrain.generation.vllm.sources import NamedServers, ServerSource
from jaxtrain.generation.vllm.watcher import Watcher
from jaxtrain.runs.manifest import write_atomically
from jaxtrain.text_safety import escape_control_chars, shorten

__all__ = ["VllmServer", "Servers"]


class Servers(Pool):
    """A pool with its sources and watchers."""

    inspector_kind: type[Inspector] = Inspector

    def __init__(
        self,
        config: VllmConfig,
        sampling: Sampling,
        log: Callable[[str], None] = print,
        tokenize: Callable[[str], list[int]] | None = None,
        sources: Sequence[ServerSource] | None = None,
    ):
        """tokenize: the trainer's token ids of a text, to be compared with the servers'. sources:
        where servers are listed; by default config.servers."""
        super().__init__(config, log)
        self.inspector = self.inspector_kind(config, sampling, log, tokenize)
        self.watcher = Watcher(self, self.inspector)
        self.sources = list(sources) if sources is not None else [NamedServers(config.servers)]
        self.silent: set[int] = set()
        """Indices of the sources that did not answer the last poll."""
        self._known: dict[int, set[str]] = {}
        """{index of a source: URLs that it listed last}"""
        self.fixed = all(source.fixed for source in self.sources)
        """True if no further servers can join."""
        self.closing = ExitStack()
        """Resources that are closed with the servers."""
        self._opened, self._opening = False, False
        if config.routed:
            self.front = VllmServer(config.discover.removeprefix("router+").rstrip("/"))
        self.poll()

    @property
    def push_weights(self) -> Callable[[VllmServer], None] | None:
        """The publisher's function that gives a server the newest weights; see Watcher."""
        return self.watcher.push_weights

    @push_weights.setter
    def push_weights(self, push_weights: Callable[[VllmServer], None]) -> None:
        self.watcher.push_weights = push_weights

    def open(self, wait: bool = True, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the servers, inspect them and start to watch them; return True once that is
        done.

        wait: False to return, with False, where a server does not answer yet; a later call
        goes on. Continues without a server that does not answer in time. Raises UserError if none
        does, and for a server that cannot do what this run needs; Interrupted once should_stop().
        """
        if self._opened:
            return True
        deadline = time.monotonic() + self.config.wait_seconds
        if not self._opening:
            self._opening = True
            self.watcher.start_naming()
        logged = False
        while True:
            # A server without `model` was not inspected yet: those that answered stay inspected
            # while the others are awaited.
            for server in [server for server in self.all if not server.model]:
                try:
                    with server.steps.wait("the inspection", self.step_seconds()):
                        self.watcher.inspect(server)
                except (ServerGone, ServerRefused) as error:
                    server.why = str(error)
            waiting = [server for server in self.all if not server.model]
            if self.all and not waiting or time.monotonic() > deadline:
                break
            if not wait:
                return False
            if should_stop():
                raise Interrupted
            if not logged:
                self.log(f"waiting for {self._describe_awaited(waiting)}")
                logged = True
            time.sleep(min(1.0, self.config.health_seconds))
            self.poll()
        if len(waiting) == len(self.all):
            names = " and ".join(source.name for source in self.sources)
            raise UserError(
                f"{names}: none answered within {self.config.wait_seconds:g} s"
                f"{self.wait_key}: {self._describe_awaited(waiting)}"
            )
        for server in waiting:
            self.give_up_at_start(server)
        with self._lock:
            self._opened = True
            for server in self.all:
                self.watcher.start(server)
        if not self.fixed:
            threading.Thread(target=self._poll_on, name="discover", daemon=True).start()
        return True

    def close(self) -> None:
        self.watcher.close()
        self.closing.close()

    def fail(self, error: BaseException) -> None:
        """End the run with this error, as soon as it requests a server."""
        self.error = error

    def report_ended(self, url: str, why: str) -> None:
        """Drop a server whose process is known to have ended."""
        self.count("processes_ended")
        for server in self.all:
            if server.url == url:
                self.drop(server, why)

    def give_up_at_start(self, server: VllmServer) -> None:
        """Start without a server that did not answer."""
        self._set(server, "down", server.why)
        self.log(f"going on without {server.describe()}; it is taken in when it answers")

    def poll(self) -> None:
        """Poll every source once; admit new servers, release those no longer listed."""
        listed = []
        for number, source in enumerate(self.sources):
            # None: the source did not answer. Its last list stays, for a registry that restarts
            # must not take all servers from a run.
            entries = source.poll()
            if entries is None:
                if number not in self.silent:
                    self.counters["sources_lost"] += 1
                    self.log(f"{source.name} does not answer; the last list of servers stays")
                    if self.front is not None and self.front.url in source.name:
                        self.mark_front_down("it does not list its servers")
                        self.cut_front()
                self.silent.add(number)
                continue
            if number in self.silent:
                self.log(f"{source.name} answers again")
            self.silent.discard(number)
            if self.front is not None and self.front.url in source.name:
                self.mark_front_up()
            self._known[number] = {entry.url.rstrip("/") for entry in entries}
            listed += entries
        for entry in listed:
            server = self.join(entry)
            if server is not None and self._opened:
                self.log(f"vllm {server.url} joins; it is inspected and given the newest weights")
                self.watcher.start(server)
                server.nudge.set()
        listed_urls = set().union(*self._known.values())
        for server in self.all:
            # `listed` is false for one that drains for this reason already.
            if server.url not in listed_urls and server.listed:
                self.log(f"vllm {server.url} leaves: listed no more")
                self.leave(server, "listed no more")

    def waits_on(self) -> bool:
        """Return True if a source that may list further servers answers, so that an empty pool may
        fill."""
        return any(
            not source.fixed and number not in self.silent
            for number, source in enumerate(self.sources)
        )

    @override
    def check(self, too_late: bool) -> None:
        # While a source can still list servers an empty pool is no failure, however long it lasts.
        super().check(too_late and not self.waits_on())

    @override
    def describe_wait(self) -> str:
        return "waiting for one to be listed" if self.waits_on() else super().describe_wait()

    def measure(self) -> dict[str, float]:
        """Return totals since the start and current numbers, by name."""
        totals = super().measure()
        requests, first = totals.pop("sessions_asked", 0.0), totals.pop("sessions_at_first", 0.0)
        if requests:
            totals["affinity"] = first / requests
        totals["servers_up"] = float(len(self.up()))
        if self.config.eval_servers:
            totals["servers_kept"] = float(
                sum(server.kept_version is not None for server in self.all)
            )
        if not self.fixed:
            draining = sum(server.state == "draining" for server in self.all)
            totals |= {
                "servers_draining": float(draining),
                "sources_silent": float(len(self.silent)),
            }
        return dict(sorted(totals.items()))

    @override
    def check_length(self, server: VllmServer, prompt: int, new: int) -> None:
        self.inspector.check_length(server, prompt, new)

    def _poll_on(self) -> None:
        """Poll the sources until closed; runs in a thread."""
        while not self.watcher.closed.wait(self.config.health_seconds):
            self.poll()

    def _describe_awaited(self, waiting: list[VllmServer]) -> str:
        if not self.all:
            return "servers: " + ", ".join(f"{source.name} lists none" for source in self.sources)
        return ", ".join(server.describe() for server in waiting)


LISTING_SECONDS = 1.0
"""Interval between two checks for changes."""


class Listing:
    """Context that keeps servers.json in the run's folder up to date: [{"url", "state", "version",
    "in_flight", "why", "since"}], states as in pool.py, times in unix seconds.

    Replaced when something changed, at most once per second. A full disk or a lost folder costs the
    file, never the run.
    """

    def __init__(self, path: Path, servers: Callable[[], Sequence[VllmServer]]):
        self.path, self.servers = path, servers
        self._written = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="listing", daemon=True)

    def __enter__(self) -> "Listing":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()
        self._write()

    def _watch(self) -> None:
        self._write()
        while not self._stop.wait(LISTING_SECONDS):
            self._write()

    def _write(self) -> None:
        text = json.dumps([describe(server) for server in self.servers()], indent=1)
        if text != self._written and self.path.parent.is_dir():
            with contextlib.suppress(OSError):
                write_atomically(self.path, text, durable=False)
                self._written = text


def describe(server: VllmServer) -> dict[str, Any]:
    """Return a server's row of servers.json, without the password of its URL."""
    why = "" if server.state == "up" else server.why
    if server.keeps:
        why = f"keeps version {server.kept_version} for an evaluation"
    return {
        "url": redact_text(server.url),
        "state": server.state,
        "version": server.version if server.version >= 0 else None,
        "in_flight": server.in_flight,
        "why": shorten(redact_text(escape_control_chars(why)), 300),
        "since": round(server.since, 3),
    }
