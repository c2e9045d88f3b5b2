"""How old a group is while it is still played: which versions have drawn tokens of its episodes.

    GroupPlayer ── env.run(row, Dated(engine)) ── generate ──> engine ── note_version(3) ──┐
    Producer <── Ages.oldest <─────────────────────────────────────────────────────────────┘

An engine that tells when it begins an answer lets the producer give up what can no longer be
trained while it is drawn; of any other, the turns that are over tell it. Episodes that another
process plays are dated there, and its reports say how old they are.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from jaxtrain.generation.engine import Completion, Engine, FrozenPolicy, Sampling

_LISTENER: ContextVar[Callable[[int], None] | None] = ContextVar("listener", default=None)


def find_listener() -> Callable[[int], None] | None:
    """Who wants to know which version draws the first token of the answer that is asked for here;
    for engines, within `generate`."""
    return _LISTENER.get()


def note_version(version: int) -> None:
    """The first token of the answer that is asked for here is drawn by that version; for engines,
    within `generate`. Said again, where the answer is drawn anew, it replaces what was said."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(version)


class VersionTracker:
    """The oldest version that drew a token of each answer in a group's episodes."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, int], int] = {}
        self._calls = 0
        self.told: Callable[[], None] = lambda: None
        """Called after every news."""

    @property
    def oldest(self) -> int | None:
        """None: nothing is known to be drawn."""
        return min(self._found.values(), default=None)

    def add(self, index: int) -> Callable[[int], None]:
        """What takes the version of one more answer of episode `index`; -1: it is not known."""
        self._calls += 1
        key = (index, self._calls)

        def note(version: int) -> None:
            if version >= 0:
                self._found[key] = version
                self.told()

        return note

    def replace(self, oldest: int) -> None:
        """What another process, which plays all of them, knows by now."""
        self._found = {(-1, 0): oldest}
        self.told()

    def forget(self, index: int) -> None:
        """Episode `index` begins anew."""
        self._found = {key: found for key, found in self._found.items() if key[0] != index}


class VersionedEngine:
    """An engine for one episode, whose versions are noted."""

    def __init__(self, engine: Engine, ages: VersionTracker, index: int):
        self._engine, self._ages, self._index = engine, ages, index

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int] = (),
        index: int = 0,
    ) -> Completion:
        """See engine.Engine."""
        note = self._ages.add(self._index)
        token = _LISTENER.set(note)
        try:
            found = await self._engine.generate(prompt, sampling, stop_ids, index)
        finally:
            _LISTENER.reset(token)
        note(min((v for v in found.versions if v >= 0), default=-1))
        return found

    @property
    def others(self) -> dict[str, Any]:
        """The run's other policies, by name."""
        found = getattr(self._engine, "others", {})
        return {
            name: one
            if isinstance(one, FrozenPolicy)
            else VersionedEngine(one, self._ages, self._index)
            for name, one in found.items()
        }

    @property
    def version(self) -> int:
        """See engine.Engine."""
        return self._engine.version

    def counters(self) -> dict[str, float]:
        """See engine.Engine."""
        return self._engine.counters()

    async def close(self) -> None:
        """Nothing: the engine is others', too."""
