"""Episode workers: processes that play and judge a prompt's answers, without jax.

    service ── draw(request) ──> env.run x G ── engine ──> servers
            <── episodes, rewards, failures ──┘
    service ── beat(table) ──> which servers there are     (no answer: the service ends the worker)
            <── reports ──     servers that failed a request, tokens' ages, counters,
                               failures of what was given up

Everything runs in the actor's one event loop, as in the trainer's process, so an environment that
blocks it also delays the beat.
"""

import asyncio
import copy
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any, Protocol

from jaxtrain.config import SamplingConfig
from jaxtrain.errors import Interrupted, RunStopped, UserError
from jaxtrain.generation.engine import EpisodeFailed
from jaxtrain.generation.episodes import RoundSlot
from jaxtrain.generation.group_player import GroupPlayer
from jaxtrain.generation.ray.wire import pack_all, pack_error, pack_failure, unpack_request


class WorkerSetup(Protocol):
    """Everything that plays in a worker, once opened."""

    player: GroupPlayer

    def update(self, table: Any) -> None:
        """Take the servers as the trainer's process sees them now."""
        ...

    def report(self) -> dict[str, Any]:
        """Return {"counters": numbers since it was opened, "reports": what the trainer's engine
        must learn}."""
        ...

    def close(self) -> None: ...


CountedFailure = tuple[dict[str, Any] | None, int]
"""Arguments of `Failures.add`, packed."""


class FailureReport:
    """`Failures` of one call: what it logs and counts is logged and counted by the service."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.added: list[CountedFailure] = []

    def log_once(self, failure: EpisodeFailed) -> None:
        self.logged.append(pack_failure(failure))

    def add(self, failure: EpisodeFailed | None, count: int = 1) -> None:
        self.added.append((None if failure is None else pack_failure(failure), count))


class EpisodeWorker:
    """The worker of a service, which opens it before its first prompt; a process that was started
    again is opened again."""

    def __init__(self) -> None:
        self._key = ""
        self._opened: WorkerSetup | None = None
        self._running: dict[int, tuple[asyncio.Task, RoundSlot]] = {}
        self._late: list[CountedFailure] = []
        """Failures for good in prompts that were given up, which no reply has reported."""
        self._epoch = -1
        """Number of the newest table so far: messages may overtake each other."""

    async def open(self, key: str, opener: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Open what `opener` ("package.module:function") makes of the settings; `key` names it."""
        if self._key == key:
            return {}
        await self._close()
        try:
            make: Callable[[dict], WorkerSetup] = EntryPoint("opener", opener, "").load()
            # Tokenizers are read there and processes started, which takes seconds.
            self._opened = await asyncio.to_thread(make, settings)
        except (UserError, RunStopped) as error:
            return {"error": pack_error(error)}
        self._key = key
        return {}

    async def draw(
        self,
        key: str,
        number: int,
        request: dict[str, Any],
        sampling: dict[str, Any],
        table: tuple[int, Any],
    ) -> dict[str, Any]:
        """Return one prompt's episodes and rewards, packed; {"closed"} if not opened yet."""
        if self._opened is None or self._key != key:
            return {"closed": True}
        opened = self._opened
        self._update(opened, table)
        # A copy: many prompts are played at once, and each reports its own failures.
        player, slot, report = copy.copy(opened.player), RoundSlot(None, []), FailureReport()
        player.failures = report  # type: ignore[assignment]
        work = player.draw(unpack_request(request), slot, SamplingConfig(**sampling))
        task = asyncio.ensure_future(work)
        self._running[number] = (task, slot)
        try:
            drawn = await task
        except asyncio.CancelledError:
            # The service has cancelled this call and reads no reply: the next beat reports them.
            self._late += report.added
            return {"cancelled": True}
        except (UserError, RunStopped, Interrupted) as error:
            return {"error": pack_error(error)}
        finally:
            self._running.pop(number, None)
        return {
            "drawn": pack_all(drawn),
            "dropped": dict(slot.dropped),
            "redone": slot.redone,
            "told": report.logged,
            "added": report.added,
            "report": opened.report(),
        }

    async def cancel(self, number: int) -> dict[str, Any]:
        """Stop playing a prompt."""
        if number in self._running:
            self._running[number][0].cancel()
        return {}

    async def beat(self, key: str, table: tuple[int, Any]) -> dict[str, Any]:
        """Prove that the event loop runs: store the newest table, return pending reports."""
        if self._opened is None or self._key != key:
            return {}
        self._update(self._opened, table)
        late, self._late = self._late, []
        ages = {number: slot.tracker.oldest for number, (_, slot) in self._running.items()}
        return {**self._opened.report(), "ages": ages, "late": late}

    async def close(self) -> dict[str, Any]:
        """Stop playing everything; it may be opened again."""
        await self._close()
        return {}

    def _update(self, opened: WorkerSetup, table: tuple[int, Any]) -> None:
        if table[0] > self._epoch:
            self._epoch = table[0]
            opened.update(table[1])

    async def _close(self) -> None:
        for task, _ in self._running.values():
            task.cancel()
        opened, self._opened, self._key, self._epoch = self._opened, None, "", -1
        if opened is not None:
            await opened.player.engine.close()
            await asyncio.to_thread(opened.close)
