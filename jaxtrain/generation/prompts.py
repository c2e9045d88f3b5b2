"""Which prompt is asked when: a seeded order with a cursor of what is done, second tries, and what
a curator leaves out."""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from jaxtrain.data.sources.order import Order
from jaxtrain.errors import UserError
from jaxtrain.generation.curators import Curator
from jaxtrain.generation.engine import PromptRequest
from jaxtrain.safe_io import UnreadableRow

MAX_ATTEMPTS = 4
"""Times that one prompt can be asked; episode numbers leave room for so many."""

MAX_SKIPS = 10_000
"""Prompts that a curator may leave out in a row, at most those of an epoch; then one is asked."""


class PromptOrder:
    """Endless order of prompts; `state` remembers which of them are done, in whatever order. May be
    used from two threads: by who plays them and by who trains them.

    A prompt counts as done when its group was handed to the trainer or dropped for a reason. What
    was asked but is not done when a run stops is asked again after a resume. What a curator leaves
    out is done, too; it comes up again in the next epoch.
    """

    def __init__(
        self,
        datasets: Sequence[Any],
        weights: Sequence[float | None] = (),
        *,
        seed: int = 0,
        shuffle: bool = True,
        curator: Curator | None = None,
    ):
        if not any(len(rows) for rows in datasets):
            raise UserError("data.datasets holds no prompt")
        self.datasets = datasets
        self.order = Order([len(rows) for rows in datasets], weights, seed=seed, shuffle=shuffle)
        self._lock = threading.Lock()
        self._next = 0
        self._low = 0
        self._beyond: set[int] = set()
        self._again: deque[tuple[int, int]] = deque()
        self._retried: list[tuple[int, int]] = []
        self._held: set[int] = set()
        """Draws beyond `_next` that were handed out before this object was made."""
        self.curator = curator
        self.skipped = 0
        """Prompts that the curator left out since the start."""

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return self.order.epoch_len

    def next(self, again: bool = False) -> PromptRequest:
        """The next prompt; with `again` one that waits for a second try, if there is any."""
        with self._lock:
            waiting = self._again.popleft() if again and self._again else None
            if waiting is not None:
                self._retried.append(waiting)
        if waiting is not None:
            return self._ask(*waiting)
        for _ in range(min(len(self), MAX_SKIPS)):
            ask = self._ask(self._take(), 0)
            if self.curator is None or isinstance(ask.row, UnreadableRow):
                return ask
            with self._lock:
                chosen = self.curator.choose(ask)
            if chosen:
                return ask
            self.skipped += 1
            self.mark_done(ask)
        return self._ask(self._take(), 0)

    def learn(self, ask: PromptRequest, rewards: Sequence[float]) -> None:
        """What the episodes of a prompt earned, for the curator; nothing where nobody judged."""
        if self.curator is not None and rewards:
            with self._lock:
                self.curator.learn(ask, rewards)

    def mark_done(self, ask: PromptRequest, *, again: bool = False) -> None:
        """A prompt is done; `again`: it shall be asked once more, later."""
        with self._lock:
            if ask.attempt == 0:
                self._held.discard(ask.draw)
                self._beyond.add(ask.draw)
                while self._low in self._beyond:
                    self._beyond.remove(self._low)
                    self._low += 1
            else:
                self._retried.remove((ask.draw, ask.attempt))
            if again and ask.attempt + 1 < MAX_ATTEMPTS:
                self._again.append((ask.draw, ask.attempt + 1))

    @property
    def done(self) -> int:
        """Prompts that were done, each counted once."""
        return self._low + len(self._beyond)

    @property
    def waiting(self) -> int:
        """Prompts that wait for a second try."""
        return len(self._again)

    def state(self) -> dict[str, Any]:
        """JSON-able: everything below `low` is done, and `beyond`; `again` waits."""
        with self._lock:
            return {
                "low": self._low,
                "beyond": sorted(self._beyond),
                "again": [list(pair) for pair in (*self._retried, *self._again)],
                "rows": [len(rows) for rows in self.datasets],
                **({} if self.curator is None else {"curator": self.curator.state()}),
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with what was not done; UserError if the data changed."""
        rows = [len(rows) for rows in self.datasets]
        if state["rows"] != rows:
            raise UserError(
                f"the prompts differ from those of the checkpoint (rows: {state['rows']} then,"
                f' {rows} now); restore the data or start with run.resume = "never"'
            )
        self._low = self._next = state["low"]
        self._beyond = set(state["beyond"])
        self._again = deque((draw, attempt) for draw, attempt in state["again"])
        self._retried = []
        if self.curator is not None and "curator" in state:
            self.curator.restore(state["curator"])

    def _take(self) -> int:
        """The next number of the order that is not done."""
        with self._lock:
            self._next = max(self._next, self._low)
            while self._next in self._beyond or self._next in self._held:
                self._next += 1
            self._next += 1
            return self._next - 1

    def hold(self, asks: Iterable[PromptRequest]) -> None:
        """After restore(): somebody has these and will mark them done; they are not asked again."""
        with self._lock:
            for ask in asks:
                if ask.attempt == 0:
                    self._held.add(ask.draw)
                else:
                    self._again.remove((ask.draw, ask.attempt))
                    self._retried.append((ask.draw, ask.attempt))

    def _ask(self, draw: int, attempt: int) -> PromptRequest:
        dataset, index = self.order[draw]
        return PromptRequest(draw, attempt, self.datasets[dataset][index], dataset, index)
