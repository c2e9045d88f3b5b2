"""Long work on the rows of a dataset says how far it is: share, rows a second, time left."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
EVERY_SECONDS = 10.0


class Progress:
    """Counts rows and says so every ten seconds; nothing about work that is done before."""

    def __init__(self, what: str, total: int | None, log: Callable[[str], None]):
        """what: "tokenizing x.jsonl"; total: None where nobody knows."""
        self.what, self.total, self.log = what, total, log
        self.done = 0
        self._began = self._said = time.monotonic()

    def count(self) -> None:
        """One row more."""
        self.done += 1
        now = time.monotonic()
        if now - self._said >= EVERY_SECONDS:
            self._said = now
            self.log(self.describe(now - self._began))

    def each(self, rows: Iterable[T]) -> Iterator[T]:
        """The rows, counted."""
        for row in rows:
            yield row
            self.count()

    def describe(self, seconds: float) -> str:
        """ "tokenizing x.jsonl: 12,000 of 100,000 rows (12%), 1,900 rows/s, 46 s left"."""
        speed = self.done / max(seconds, 1e-9)
        if self.total is None:
            return f"{self.what}: {self.done:,} rows, {speed:,.0f} rows/s"
        left = (self.total - self.done) / max(speed, 1e-9)
        return (
            f"{self.what}: {self.done:,} of {self.total:,} rows ({self.done / self.total:.0%}),"
            f" {speed:,.0f} rows/s, {left:,.0f} s left"
        )
