"""Which host has a version from whom, where there are more hosts than the trainer sends it to.

    trainer ── fan_out hosts ── each of them to others, one after another ── these to others ...
       └─ whoever got none there: too late, another checksum, its host gone

Nothing is planned: who needs a version takes it from a host that has it and serves nobody now, or
waits for one. Those that have it double in the time of one transfer, each at the full speed of its
network, and it does not matter who fails, nor in which order hosts come.
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
"""From another host a version may take so many times what the trainer's own transfers took, and so
much longer; then the trainer sends it."""
PATIENCE = 1 / 3
"""Of the time that is left: for the first hosts to have it, or for one from another host."""
FAILURES = 2
"""After so many in a row a worker is sent everything by the trainer: others may not reach it."""


@dataclass(eq=False)
class RelaySource:
    """A worker that passes on what it has."""

    link: WorkerLink
    address: tuple[str, int]
    names: Collection[str]
    busy: bool = False
    """Whether one fetches from it."""


class Transfer(NamedTuple):
    """One transfer: from a source, or, with None, from the trainer."""

    version: int
    names: Collection[str]
    """What it brings."""
    source: RelaySource | None
    seconds: float
    started: float


class Relays:
    """The sources of the newest version. Used by a thread for each server."""

    def __init__(self, fan_out: int):
        """fan_out: hosts that the trainer sends a version to itself; 0: all of them."""
        self.fan_out, self.on = fan_out, False
        self._version = -1
        self._sources: list[RelaySource] = []
        self._coming: Counter[str] = Counter()
        """Transfers under way, by what they bring."""
        self._direct, self._longest = 0, 0.0
        self._changed = threading.Condition()

    def begin(self, version: int, hosts: int) -> None:
        """Nobody has this version yet, which so many hosts will want."""
        with self._changed:
            self.on = 0 < self.fan_out < hosts
            self._version, self._sources, self._coming = version, [], Counter()
            self._direct, self._longest = 0, 0.0

    def take(
        self, version: int, name: str, names: Collection[str], link: WorkerLink, deadline: Deadline
    ) -> Transfer:
        """Whom this link gets the payload `name` from; `done` is to be called. names: what it has
        to pass on then."""
        patience = Deadline(deadline.left() * PATIENCE)
        with self._changed:
            while True:
                available, source = self._find(version, name, link)
                if source is not None or not available or not patience.left():
                    break
                self._changed.wait(patience.left(1.0))
            seconds = deadline.left()
            if source is not None:
                source.busy = True
                longest = SLOWER * self._longest + MORE_SECONDS
                seconds = min(longest, seconds * PATIENCE)
            elif version == self._version:
                self._direct += 1
            self._coming.update(names)
            return Transfer(version, names, source, seconds, time.monotonic())

    def done(self, turn: Transfer, link: WorkerLink, answer: dict[str, Any] | None) -> bool:
        """It is over, with that answer of the worker, or none: it is gone itself. Whether the
        version is there."""
        arrived = answer is not None and "error" not in answer
        address = read_address(answer.get("place")) if answer is not None and arrived else None
        with self._changed:
            if turn.version != self._version:
                return arrived
            self._coming.subtract(turn.names)
            if turn.source is not None:
                turn.source.busy = False
                if answer is not None:
                    link.failures = 0 if arrived else link.failures + 1
                    if not arrived and turn.source in self._sources:
                        self._sources.remove(turn.source)
            elif arrived:
                self._longest = max(self._longest, time.monotonic() - turn.started)
            else:
                self._direct -= 1
            if address is not None and self.wants(link):
                self._sources.append(RelaySource(link, address, turn.names))
            self._changed.notify_all()
        return arrived

    def wants(self, link: WorkerLink) -> bool:
        """Whether this link shall pass on what it gets; nobody reaches the trainer's own host by
        its address there, which may be a loopback's."""
        return self.on and link.host != link.local_host

    def _find(self, version: int, name: str, link: WorkerLink) -> tuple[bool, RelaySource | None]:
        """(whether other hosts have it or are getting it, one that can serve this link now)."""
        if version != self._version or self._direct < self.fan_out:
            return False, None
        if not self.wants(link) or link.failures >= FAILURES:
            return False, None
        candidates = [
            source for source in self._sources if name in source.names and not source.link.closed
        ]
        coming = bool(candidates) or self._coming[name] > 0
        return coming, next((source for source in candidates if not source.busy), None)


def read_address(answer: Any) -> tuple[str, int] | None:
    """Where a worker says that it passes on what it has."""
    if isinstance(answer, list) and [type(part) for part in answer] == [str, int]:
        return answer[0], answer[1]
    return None
