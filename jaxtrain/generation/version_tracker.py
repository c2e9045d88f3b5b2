"""Age of a group while it is still played: the versions that have drawn tokens of its episodes.

    GroupPlayer ── env.run(row, EpisodeEngine) ── generate ──> engine ── note_version(3) ──┐
    Producer <── VersionTracker.oldest <───────────────────────────────────────────────────┘

An engine that reports the version when it begins an answer lets the producer cancel a group while
its tokens are drawn, as soon as they are too old to be trained; with any other engine only finished
turns say how old a group is. Episodes that another process plays are tracked there, and its reports
carry their ages.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_LISTENER: ContextVar[Callable[[int], None] | None] = ContextVar("listener", default=None)


def find_listener() -> Callable[[int], None] | None:
    """Return the callback for the version that draws the first token of the current request; for
    engines, within `generate`, that begin the answer in another context."""
    return _LISTENER.get()


def note_version(version: int) -> None:
    """Report the version that draws the first token of the current request; for engines, within
    `generate`. A repeated call, after the answer was begun anew, replaces the version."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(version)


@contextmanager
def listen(listener: Callable[[int], None]) -> Iterator[None]:
    """Send what engines report within this context to `listener`."""
    # A context variable and no argument: engines of plugins have the signature of Engine.generate,
    # and many requests of one event loop are under way at once.
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


class VersionTracker:
    """Oldest version that drew a token of each answer in a group's episodes."""

    def __init__(self) -> None:
        self._versions: dict[tuple[int, int], int] = {}
        self._calls = 0
        self.on_change: Callable[[], None] = lambda: None
        """Called after every new version."""

    @property
    def oldest(self) -> int | None:
        """Oldest version of all answers; None if none is known to have begun."""
        return min(self._versions.values(), default=None)

    def add(self, index: int) -> Callable[[int], None]:
        """Return the callback for the version of another answer of episode `index`; it ignores -1,
        an unknown version."""
        self._calls += 1
        key = (index, self._calls)

        def note(version: int) -> None:
            if version >= 0:
                self._versions[key] = version
                self.on_change()

        return note

    def replace(self, oldest: int) -> None:
        """Set the oldest version as another process reports it, which plays all of the episodes."""
        self._versions = {(-1, 0): oldest}
        self.on_change()

    def forget(self, index: int) -> None:
        """Drop the versions of episode `index`, which is played again from its beginning."""
        self._versions = {
            key: version for key, version in self._versions.items() if key[0] != index
        }
