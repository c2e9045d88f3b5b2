"""Relaying of a version from host to host, if there are more hosts than the trainer serves itself.

    trainer ── fan_out hosts ── each to others, one after another ── these to others ...
       └─ any host that failed to get it there: too late, wrong checksum, source gone

There is no plan: a host that needs a version takes it from an idle host that has it, or waits for
one. The number of holders doubles in the time of one transfer, each at the full speed of its
network, whatever fails and in whatever order hosts come.
"""

import threading
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxtrain.generation.vllm.control import Deadline
from jaxtrain.generation.weight_sync.weight_links import WorkerLink

SLOWER, MORE_SECONDS = 4.0, 10.0
"""A transfer between hosts may take SLOWER times as long as the trainer's own, plus MORE_SECONDS;
then the trainer sends the version itself."""
PATIENCE = 1 / 3
"""Fraction of the remaining time to wait for the first holders, or for one relayed transfer."""
MAX_FAILURES = 2
"""After so many failures in a row the trainer serves a worker itself: it may not reach the
others."""


@dataclass(eq=False)
class RelaySource:
    """Worker that serves its payloads to other hosts."""

    link: WorkerLink
    address: tuple[str, int]
    names: Collection[str]
    busy: bool = False
    """True while a host fetches from it."""


class Transfer(NamedTuple):
    """A transfer from a source or, if that is None, from the trainer."""

    version: int
    names: Collection[str]
    """Payloads that the receiver can pass on afterwards."""
    source: RelaySource | None
    seconds: float
    started: float


class Relays:
    """The sources of the newest version. Used by one thread per server."""

    def __init__(self, fan_out: int):
        """fan_out: hosts that the trainer serves itself; 0: all of them."""
        self.fan_out, self.on = fan_out, False
        self._version = -1
        self._sources: list[RelaySource] = []
        self._coming: Counter[str] = Counter()
        """Number of transfers in progress, by payload."""
        self._direct, self._longest = 0, 0.0
        self._changed = threading.Condition()

    def begin(self, version: int, hosts: int) -> None:
        """Start a version that no host has yet and `hosts` hosts will receive."""
        with self._changed:
            self.on = 0 < self.fan_out < hosts
            self._version, self._sources, self._coming = version, [], Counter()
            self._direct, self._longest = 0, 0.0

    def take(
        self, version: int, name: str, names: Collection[str], link: WorkerLink, deadline: Deadline
    ) -> Transfer:
        """Choose the source of the payload `name` for a link; `done` must be called afterwards.

        names: payloads that the link can pass on then.
        """
        patience = Deadline(deadline.left() * PATIENCE)
        with self._changed:
            while True:
                available, source = self._find(version, name, link)
                # If no host has it or is receiving it, waiting is pointless.
                if source is not None or not available or not patience.left():
                    break
                self._changed.wait(patience.left(1.0))
            seconds = deadline.left()
            if source is not None:
                source.busy = True
                # Early enough that the trainer can still send the version itself.
                longest = SLOWER * self._longest + MORE_SECONDS
                seconds = min(longest, seconds * PATIENCE)
            elif version == self._version:
                self._direct += 1
            self._coming.update(names)
            return Transfer(version, names, source, seconds, time.monotonic())

    def done(self, transfer: Transfer, link: WorkerLink, answer: dict[str, Any] | None) -> bool:
        """Record the end of a transfer; return True if the version arrived.

        answer: the worker's, or None if it is gone.
        """
        arrived = answer is not None and "error" not in answer
        address = read_address(answer.get("place")) if answer is not None and arrived else None
        with self._changed:
            if transfer.version != self._version:  # a newer version has reset the counts
                return arrived
            self._coming.subtract(transfer.names)
            if transfer.source is not None:
                transfer.source.busy = False
                # Without an answer the receiver is gone, which is no fault of the source.
                if answer is not None:
                    link.failures = 0 if arrived else link.failures + 1
                    if not arrived and transfer.source in self._sources:
                        self._sources.remove(transfer.source)
            elif arrived:
                self._longest = max(self._longest, time.monotonic() - transfer.started)
            else:
                # Frees the trainer's place: another host may be served directly instead.
                self._direct -= 1
            if address is not None and self.wants(link):
                self._sources.append(RelaySource(link, address, transfer.names))
            self._changed.notify_all()
        return arrived

    def wants(self, link: WorkerLink) -> bool:
        """Return True if this link should pass on what it receives. Never from the trainer's own
        host: its address there may be a loopback address, which other hosts cannot reach."""
        return self.on and link.host != link.local_host

    def _find(self, version: int, name: str, link: WorkerLink) -> tuple[bool, RelaySource | None]:
        """Return (True if other hosts have it or are getting it, an idle source for this link)."""
        if version != self._version or self._direct < self.fan_out:
            return False, None
        if not self.wants(link) or link.failures >= MAX_FAILURES:
            return False, None
        candidates = [
            source for source in self._sources if name in source.names and not source.link.closed
        ]
        coming = bool(candidates) or self._coming[name] > 0
        return coming, next((source for source in candidates if not source.busy), None)


def read_address(answer: Any) -> tuple[str, int] | None:
    """Parse the address where a worker serves its payloads."""
    if isinstance(answer, list) and [type(part) for part in answer] == [str, int]:
        return answer[0], answer[1]
    return None
