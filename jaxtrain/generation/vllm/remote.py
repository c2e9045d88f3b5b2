"""The trainer's servers for engines in other processes: a table goes out, reports come back.

    trainer: Servers ── TableSender.table() ──> {"session", "version", "servers": [...]}
                                                      │ a service passes it to its workers
    worker:  RemotePool.update(table) <───────────────┘
             VllmEngine(RemotePool) sends requests; failures ──> RemotePool.reports()
                                                      │
    trainer: TableSender.apply_reports(reports) <─────┘ suspect, drop, requests in flight

There is one writer, the trainer's `Servers`: it alone watches, inspects and pushes weights. A
worker chooses servers itself (`routing.py`), by its own requests alone.
"""

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import override

from jaxtrain.batch import RouteShape
from jaxtrain.config.vllm import VllmConfig
from jaxtrain.generation.engine import Sampling, SharedServers
from jaxtrain.generation.vllm.engine import VllmEngine
from jaxtrain.generation.vllm.images import PromptImages
from jaxtrain.generation.vllm.inspector import Inspector
from jaxtrain.generation.vllm.pool import Pool
from jaxtrain.generation.vllm.server import VllmServer

SHARED_FIELDS = (
    "url",
    "state",
    "version",
    "epoch",
    "capacity",
    "updating",
    "kept_version",
    "model",
    "route",
)
SHARED_FIELDS += ("max_model_len", "processed")
"""Fields of a server that are sent."""


class TableSender:
    """The trainer's side."""

    def __init__(self, pool: Pool):
        self.pool = pool
        self._epoch, self._last = 0, None
        self._lock = threading.Lock()
        self._elsewhere: Counter[tuple[str, str]] = Counter()

    def table(self) -> tuple[int, Any]:
        """(a number that grows with each change, the table)."""
        pool = self.pool
        table = {
            "session": pool.session,
            "version": pool.version,
            "publishing": pool.publishing,
            "asleep": pool.asleep,
            "servers": [
                {name: getattr(server, name) for name in SHARED_FIELDS} for server in pool.all
            ],
        }
        with self._lock:
            # The number grows with changes alone, so workers get the table only when there is news.
            if table != self._last:
                self._epoch, self._last = self._epoch + 1, table
            return self._epoch, table

    def apply_reports(self, reports: Sequence[dict[str, Any]]) -> None:
        """Apply the workers' reports; those about servers that were dropped since are stale."""
        servers = {server.url: server for server in self.pool.all}
        for report in reports:
            server = servers.get(report["url"])
            if server is None:
                continue
            match report["what"]:
                case "suspect":
                    self.pool.suspect(server)
                # A server that was dropped and taken in again has another epoch: the report is
                # about its earlier life.
                case "drop" if report["epoch"] == server.epoch:
                    self.pool.drop(server, report["why"])
                case "answered":
                    self.pool.note_progress(server)
                case "load":
                    self._count_load(server, report["worker"], report["count"])

    def _count_load(self, server: VllmServer, worker: str, count: int) -> None:
        """Count a worker's requests as the trainer's, so that a hanging server is noticed by them,
        and a draining one is not released while there are any."""
        # Workers send their current count, not a change: a report that is lost or sent twice leaves
        # no error behind.
        change = count - self._elsewhere[server.url, worker]
        self._elsewhere[server.url, worker] = count
        self.pool.add_load(server, change)


class RemotePool(Pool):
    """A worker's copy of the table. It waits for servers as long as the trainer does."""

    def __init__(self, config: VllmConfig, name: str, log: Callable[[str], None]):
        super().__init__(config, log)
        self.inspector = Inspector(config, Sampling(), log)
        self.name = name
        self._epochs: dict[str, int] = {}
        """Epoch of each server in the last table."""
        self._reports: list[dict[str, Any]] = []
        self._loads: dict[str, int] = {}
        self._answered: set[str] = set()

    def update(self, table: Any) -> None:
        """Replace the table by the trainer's."""
        if table is None:
            return
        with self._lock:
            by_url = {server.url: server for server in self.all}
            self.session, self.version = table["session"], table["version"]
            self.publishing, self.asleep = table["publishing"], table["asleep"]
            servers = []
            for row in table["servers"]:
                # The same object as before, since requests under way hold it.
                server = by_url.pop(row["url"], None) or VllmServer(row["url"])
                for name in SHARED_FIELDS:
                    if name != "epoch":
                        setattr(server, name, row[name])
                if self._epochs.get(server.url, row["epoch"]) != row["epoch"]:
                    server.epoch += 1  # dropped: what is under way will not be answered
                self._epochs[server.url] = row["epoch"]
                servers.append(server)
            for server in by_url.values():
                server.state = "gone"
                server.epoch += 1
                self._epochs.pop(server.url, None)
            self.all = servers

    def reports(self) -> list[dict[str, Any]]:
        """Return what the trainer has not received yet."""
        with self._lock:
            # Taken and cleared at once: what is reported meanwhile goes with the next call.
            reports, self._reports = self._reports, []
            reports += [{"what": "answered", "url": url} for url in sorted(self._answered)]
            self._answered.clear()
            loads = {server.url: server.in_flight for server in self.all}
            for url, count in loads.items():
                if self._loads.get(url, 0) != count:
                    reports.append(
                        {"what": "load", "url": url, "worker": self.name, "count": count}
                    )
            self._loads = loads
            return reports

    def read_label(self, label: str) -> int | None:
        """Like Pool.read_label, but versions that the table does not have yet also count as the
        run's."""
        start, _, number = label.rpartition("-")
        return int(number) if start == f"jaxtrain-{self.session}" and number.isdigit() else None

    def suspect(self, server: VllmServer) -> None:
        """Report a failed request; the trainer checks the server."""
        self._report("suspect", server)

    def drop(self, server: VllmServer, why: str) -> None:
        """Drop a server here at once and report it; the next table has the trainer's verdict."""
        with self._lock:
            if not server.lost:
                # The epoch of the trainer's table, not the worker's own count, which only says
                # whether requests of its own still matter.
                self._report("drop", server, why=why, epoch=self._epochs.get(server.url, 0))
                self._set(server, "down", why)
                server.epoch += 1

    @override
    def note_progress(self, server: VllmServer) -> None:
        self._answered.add(server.url)

    def check(self, too_late: bool) -> None:
        """Do nothing: the trainer decides when waiting is too long."""

    @override
    def check_length(self, server: VllmServer, prompt: int, new: int) -> None:
        self.inspector.check_length(server, prompt, new)

    def _report(self, event: str, server: VllmServer, **fields: Any) -> None:
        with self._lock:
            self._reports.append({"what": event, "url": server.url, **fields})


class RemoteVllm:
    """A worker's engine with its pool."""

    def __init__(self, settings: dict[str, Any], name: str, log: Callable[[str], None] = print):
        """settings: from `share`. name: the worker's."""
        config = VllmConfig(**settings["config"])
        routes = settings["routes"]
        self.pool = RemotePool(config, name, log)
        self.engine = VllmEngine(
            self.pool,
            adapters=settings["adapters"],
            routes=None if routes is None else RouteShape(**routes),
            group_size=settings["group_size"],
        )
        self.engine.images = PromptImages(never=tuple(settings["never"]))
        self.update, self.reports = self.pool.update, self.pool.reports


def share(engine: VllmEngine, workers: int) -> SharedServers:
    """Return the means by which `workers` processes use the servers of this engine."""
    config = engine.servers.config
    fair = math.ceil(config.concurrency / workers)
    settings = {
        "config": config.model_copy(update={"concurrency": fair, "servers": []}).model_dump(),
        "adapters": engine.adapters,
        "routes": None if engine.routes is None else engine.routes._asdict(),
        "group_size": engine.group_size,
        "never": list(engine.images.never),
    }
    return SharedServers(
        TableSender(engine.servers), "jaxtrain.generation.vllm.remote:RemoteVllm", settings
    )
