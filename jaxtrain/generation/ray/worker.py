"""EpisodeWorker: the process that plays and judges a prompt's answers; no jax in it.

    service ── draw(ask) ──> env.run x G ── engine ──> servers
            <── episodes, rewards, failures ──┘
    service ── beat(table) ──> which servers there are     (no answer: the service ends the worker)
            <── reports ──     servers that failed a request, tokens' ages, counters,
                               failures of what was given up

Everything runs in the actor's one event loop, as in the trainer's process, so a world that blocks
it also holds up the beat.
"""

import asyncio
import copy
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any, Protocol

from jaxtrain.config import SamplingConfig
from jaxtrain.errors import Interrupted, RunStopped, UserError
from jaxtrain.generation.engine import EpisodeFailed
from jaxtrain.generation.producer import GroupPlayer, RoundSlot
from jaxtrain.generation.ray.wire import (
    pack_all,
    pack_error,
    pack_failure,
    unpack_ask,
)


class WorkerSetup(Protocol):
    """What plays, once opened."""

    player: GroupPlayer

    def update(self, table: Any) -> None:
        """The servers, as the trainer's process sees them now."""
        ...

    def report(self) -> dict[str, Any]:
        """{"counters": numbers since it was opened, "reports": what the trainer's engine must
        hear}."""
        ...

    def close(self) -> None: ...


Added = tuple[dict[str, Any] | None, int]
"""What `Failures.add` gets, packed."""


class FailureReport:
    """`Failures` of one call: what is told and counted there, to be told and counted elsewhere."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.added: list[Added] = []

    def tell(self, failure: EpisodeFailed) -> None:
        self.told.append(pack_failure(failure))

    def add(self, failure: EpisodeFailed | None, count: int = 1) -> None:
        self.added.append((None if failure is None else pack_failure(failure), count))


class EpisodeWorker:
    """Opened by whoever uses it first; a process that was started again is opened again."""

    def __init__(self) -> None:
        self._key = ""
        self._opened: WorkerSetup | None = None
        self._running: dict[int, tuple[asyncio.Task, RoundSlot]] = {}
        self._late: list[Added] = []
        """Failures for good in prompts that were given up, which no reply told."""
        self._epoch = -1
        """Of the newest table that came: messages may overtake each other."""

    async def open(self, key: str, opener: str, settings: dict[str, Any]) -> dict[str, Any]:
        """Be what `opener` ("package.module:function") makes of the settings; `key` names that."""
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
        ask: dict[str, Any],
        sampling: dict[str, Any],
        table: tuple[int, Any],
    ) -> dict[str, Any]:
        """One prompt's episodes and rewards, packed; {"closed"} where it must be opened first."""
        if self._opened is None or self._key != key:
            return {"closed": True}
        opened = self._opened
        self._update(opened, table)
        player, slot, notes = copy.copy(opened.player), RoundSlot(None, []), FailureReport()
        player.failures = notes  # type: ignore[assignment]
        work = player.draw(unpack_ask(ask), slot, SamplingConfig(**sampling))
        task = asyncio.ensure_future(work)
        self._running[number] = (task, slot)
        try:
            drawn = await task
        except asyncio.CancelledError:
            self._late += notes.added
            return {"cancelled": True}
        except (UserError, RunStopped, Interrupted) as error:
            return {"error": pack_error(error)}
        finally:
            self._running.pop(number, None)
        return {
            "drawn": pack_all(drawn),
            "dropped": dict(slot.dropped),
            "redone": slot.redone,
            "told": notes.told,
            "added": notes.added,
            "report": opened.report(),
        }

    async def cancel(self, number: int) -> dict[str, Any]:
        """Give up a prompt."""
        if number in self._running:
            self._running[number][0].cancel()
        return {}

    async def beat(self, key: str, table: tuple[int, Any]) -> dict[str, Any]:
        """That the event loop turns; takes the newest table, gives what there is to report."""
        if self._opened is None or self._key != key:
            return {}
        self._update(self._opened, table)
        late, self._late = self._late, []
        ages = {number: slot.ages.oldest for number, (_, slot) in self._running.items()}
        return {**self._opened.report(), "ages": ages, "late": late}

    async def close(self) -> dict[str, Any]:
        """Give up everything; it may be opened again."""
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
