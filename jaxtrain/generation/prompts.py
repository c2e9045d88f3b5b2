"""Prompts of a run: the rows of its datasets, and which of them is played when.

PromptRows renames columns as a dataset's section says; a row that is unusable stays a row
(safe_io.UnreadableRow), whose episodes count as failed when it is played. Only what is wrong with
all rows is a UserError, before anything is sampled. PromptOrder is a seeded order with a cursor of
what is done, second tries, and what a curator leaves out.
"""

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxtrain.config import DatasetConfig
from jaxtrain.data.chat.messages import MalformedRow
from jaxtrain.data.chat.prompt import normalize_row
from jaxtrain.data.chat.rows import Row
from jaxtrain.data.chat.tokenize import open_images, open_row_images
from jaxtrain.data.sample import TOO_MANY_PATCHES
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.data.sources.order import Order
from jaxtrain.errors import UserError
from jaxtrain.generation.curators import Curator
from jaxtrain.generation.engine import PromptRequest
from jaxtrain.safe_io import UnreadableRow
from jaxtrain.text_safety import show

MAX_ATTEMPTS = 4
"""Times that one prompt can be played; episode numbers leave room for so many."""

MAX_SKIPS = 10_000
"""Prompts that a curator may leave out in a row, at most those of an epoch; then one is played."""


class PromptRows:
    """Rows with random access, each with its renamed columns beside the original ones, and with
    messages, tools and keywords of templates in one form."""

    def __init__(
        self,
        rows: Any,
        dataset: DatasetConfig,
        key: str,
        images: Any = None,
        row_patches: int | None = None,
        tokenizer: Any = None,
    ):
        """images: reader of the dataset's images; None refuses them. row_patches: limit of the
        patches of a row's images, beyond which it is unusable. tokenizer: as in open_prompts.
        Raises UserError if a renamed column is in none of the first rows."""
        self.rows, self.dataset, self.images = rows, dataset, images
        self.row_patches, self.tokenizer = row_patches, tokenizer
        columns = {name: column for name, column in dataset.fields.items() if "." not in name}
        check_columns(rows, columns, f"{key}.fields", dataset.path)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.read(index)[0]

    def read(self, index: int) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Return a row, and the keys of its messages that nothing reads."""
        row = self.rows[index]
        if isinstance(row, UnreadableRow):
            return UnreadableRow(f"malformed row: {row.reason}", self.origin(index)), ()
        try:
            columns = Row(row, **self.dataset.reading)
            columns.images = open_row_images(self.images, self.origin(index))
            columns.tokenizer = self.tokenizer
            normalized = normalize_row(columns)
            if self._has_too_many(columns.images):
                raise MalformedRow(TOO_MANY_PATCHES)
            if kwargs := self.dataset.chat_template_kwargs:
                kwargs = {**kwargs, **(normalized.get("chat_template_kwargs") or {})}
                normalized["chat_template_kwargs"] = kwargs
            return normalized, columns.unread_keys
        except MalformedRow as error:
            where = ", ".join(filter(None, (self.origin(index), error.location)))
            return UnreadableRow(f"malformed row: {error}", where), ()

    def _has_too_many(self, images: Any) -> bool:
        """Return True for images of a row that none of training has room for."""
        limit = self.row_patches
        return images is not None and limit is not None and images.num_patches > limit

    def origin(self, index: int) -> str:
        """Return the name of a row in messages."""
        named = getattr(self.rows, "origin", None)
        return named(index) if named else f"{self.dataset.path} row {index + 1}"


def open_prompts(
    dataset: DatasetConfig, key: str, tokenizer: Any = None, row_patches: int | None = None
) -> PromptRows:
    """Open the prompts of a dataset; `key` is its place in the config. tokenizer: with the chat
    template that writes them, and the format of its model's images, if they are read. row_patches:
    see PromptRows. Raises UserError."""
    images = open_images(dataset, tokenizer)
    return PromptRows(open_rows(dataset), dataset, key, images, row_patches, tokenizer)


def check_columns(rows: Any, columns: Mapping[str, str], key: str, path: str) -> None:
    """Raise UserError for a renamed column that the first rows do not have."""
    first = [row for row in (rows[i] for i in range(min(len(rows), 16))) if row]
    for name, column in columns.items():
        if first and not any(column in row for row in first):
            raise UserError(
                f"{key} names the column {column!r} (for {name}), but the columns of {path} are"
                f" {', '.join(map(show, first[0]))}"
            )


def rename(row: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the row with its renamed columns beside the original ones; missing ones stay
    missing."""
    return {**row, **{name: row[column] for name, column in fields.items() if column in row}}


class PromptOrder:
    """Endless order of prompts; `state` remembers which of them are done, in whatever order.

    May be used from two threads: that of the episodes and that of the trainer. A prompt counts as
    done when its group was given to the trainer or dropped for a reason. A prompt that was handed
    out but is not done when a run stops is played again after a resume. What a curator leaves out
    is done, too; it comes up again in the next epoch.
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
        """All draws below are done."""
        self._beyond: set[int] = set()
        """Draws from `_low` on that are done."""
        self._again: deque[tuple[int, int]] = deque()
        """(draw, attempt) of prompts that wait for another try."""
        self._retried: list[tuple[int, int]] = []
        """Those that were handed out again and are not done."""
        self._reserved: set[int] = set()
        """Draws beyond `_next` that were handed out before this object was made."""
        self.curator = curator
        self.skipped = 0
        """Prompts that the curator left out since the start."""

    def __len__(self) -> int:
        """Return the number of prompts in an epoch."""
        return self.order.epoch_len

    def next(self, again: bool = False) -> PromptRequest:
        """Return the next prompt; with `again` one that waits for a second try, if there is any."""
        with self._lock:
            waiting = self._again.popleft() if again and self._again else None
            if waiting is not None:
                self._retried.append(waiting)
        if waiting is not None:
            return self._request(*waiting)
        for _ in range(min(len(self), MAX_SKIPS)):
            request = self._request(self._take(), 0)
            if self.curator is None or isinstance(request.row, UnreadableRow):
                return request
            with self._lock:
                chosen = self.curator.choose(request)
            if chosen:
                return request
            self.skipped += 1
            self.mark_done(request)
        return self._request(self._take(), 0)

    def learn(self, request: PromptRequest, rewards: Sequence[float]) -> None:
        """Report to the curator what the episodes of a prompt earned, if anything judged them."""
        if self.curator is not None and rewards:
            with self._lock:
                self.curator.learn(request, rewards)

    def mark_done(self, request: PromptRequest, *, again: bool = False) -> None:
        """Mark a prompt as done; `again`: it will be played once more, later."""
        with self._lock:
            if request.attempt == 0:
                self._reserved.discard(request.draw)
                self._beyond.add(request.draw)
                while self._low in self._beyond:
                    self._beyond.remove(self._low)
                    self._low += 1
            else:
                self._retried.remove((request.draw, request.attempt))
            if again and request.attempt + 1 < MAX_ATTEMPTS:
                self._again.append((request.draw, request.attempt + 1))

    @property
    def done(self) -> int:
        """Prompts that are done, each counted once."""
        return self._low + len(self._beyond)

    @property
    def waiting(self) -> int:
        """Prompts that wait for a second try."""
        return len(self._again)

    def state(self) -> dict[str, Any]:
        """Return a JSON-able cursor: all below `low` and in `beyond` is done; `again` waits."""
        with self._lock:
            return {
                "low": self._low,
                "beyond": sorted(self._beyond),
                "again": [list(pair) for pair in (*self._retried, *self._again)],
                "rows": [len(rows) for rows in self.datasets],
                **({} if self.curator is None else {"curator": self.curator.state()}),
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue with what was not done; raises UserError if the data changed."""
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

    def reserve(self, requests: Iterable[PromptRequest]) -> None:
        """After restore(): do not hand these out, which the trainer has and will mark done."""
        with self._lock:
            for request in requests:
                if request.attempt == 0:
                    self._reserved.add(request.draw)
                else:
                    self._again.remove((request.draw, request.attempt))
                    self._retried.append((request.draw, request.attempt))

    def _take(self) -> int:
        """Return the next number of the order that is not done."""
        with self._lock:
            self._next = max(self._next, self._low)
            while self._next in self._beyond or self._next in self._reserved:
                self._next += 1
            self._next += 1
            return self._next - 1

    def _request(self, draw: int, attempt: int) -> PromptRequest:
        dataset, index = self.order[draw]
        return PromptRequest(draw, attempt, self.datasets[dataset][index], dataset, index)
