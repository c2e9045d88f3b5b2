"""LocalSampler: continuous batching in the training process, on its own devices.

    add(request) ─> queue ─> free rows ─┐ each distinct prompt is read once
                                        ├─ chunk of tokens ─> step() returns what has ended
                              busy rows ┘

Requests of all kinds share the rows, and a row that ends is refilled after the chunk. Every
(number of rows, slots) compiles a program, so both come in few sizes; they grow while there is work
and are freed when there is none. `slots.py` has the device's side. A model with a draft
(`DraftedModel`) draws the same tokens in fewer passes: `speculation.py`.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from jaxtrain.batch import RouteShape
from jaxtrain.generation.acceptance import Acceptance
from jaxtrain.generation.local.constraints import Constraint
from jaxtrain.generation.local.requests import Request, Requests
from jaxtrain.generation.local.slots import (
    CHUNK,
    RowInsert,
    SamplerRows,
    decode_chunk,
    empty_rows,
    fill,
    grow,
    insert,
    keep,
)
from jaxtrain.generation.local.speculation import DraftedModel, speculate_chunk
from jaxtrain.generation.local.token_sampling import find_kind, read_draws

PROMPT_TOKENS = 32768
"""Slots of prompts that are read at once, which bounds the memory of their activations."""
REFILL = 8
"""A chunk ends early once one in so many rows has ended in it."""


class LocalSampler(Requests):
    """Continues prompts with a model of `jaxtrain.models`.

    `use` swaps the weights, also while answers are in progress: their cached keys and values stay
    those of the old weights. `to_text` turns tokens into text, for stop texts. At most `max_batch`
    rows are decoded together, and no row exceeds `max_len` tokens.
    """

    def __init__(
        self,
        model: Any,
        eos_ids: Iterable[int],
        *,
        draft_rows: int = 0,
        routes: RouteShape | None = None,
        **options: Any,
    ):
        """draft_rows: a draft guesses only while at most so many rows are busy; 0: always. routes:
        record each token's experts; for a model without a draft. options: of Requests."""
        super().__init__(model, eos_ids, **options)
        self.draft_rows, self.routes = draft_rows, routes
        self._running: list[Request | None] = []
        self._rows: SamplerRows | None = None
        self._size = (0, 0, 0)
        """Rows, slots and ends of `_rows`."""

    @override
    def drop_all(self) -> None:
        self._waiting.clear()
        self._running, self._rows = [], None

    @property
    @override
    def busy(self) -> bool:
        return bool(self._waiting) or any(self._running)

    def step(self) -> list[Request]:
        """Start waiting requests and draw a chunk of tokens; return the requests that have ended.

        Blocks until the device has answered. Without further work the rows are freed.
        """
        with self.on_mesh():
            with self.phase("reading prompts"):
                self._begin()
            with self.phase("decoding"):
                ended = self._draw() if any(self._running) else []
                # Constrained rows come a token at a time; as many of them as a chunk are one step.
                for _ in range(CHUNK - 1):
                    if ended or not self._is_constrained():
                        break
                    ended = self._draw()
        if not self.busy:
            self._rows, self._running = None, []
        return ended

    def _begin(self) -> None:
        """Fill free rows from the queue."""
        busy = sum(running is not None for running in self._running)
        new: list[Request] = []
        while self._waiting and busy + len(new) < self.max_batch:
            request = self._waiting.popleft()  # the event loop may append meanwhile
            if not request.aborted:
                new.append(request)
        if not new:
            return
        self._make_room(busy + len(new), new)
        free = [row for row, running in enumerate(self._running) if running is None]
        start = 0
        while start < len(new):
            stop = find_end(new, start)
            self._fill(new[start:stop], free[start:stop])
            start = stop

    def _make_room(self, count: int, new: Sequence[Request]) -> None:
        """Ensure that there are rows for `count` requests and slots for the longest of the new
        ones."""
        model = self._weights[0]
        # A cycle writes all K guesses to the cache before it knows which are accepted, so a row
        # needs slots beyond its limit.
        spare = model.draft.num_drafted if isinstance(model, DraftedModel) else 0
        longest = max(len(request.prompt) + request.limit for request in new) + spare
        # Every (B, S, E) compiles decode_chunk, insert and grow anew, which takes longer than it
        # saves unless there are few of them: powers of two, and sizes that only grow until the rows
        # are freed.
        B = min(bucket(count, 1), self.max_batch)
        S = roomy(max(longest, *(bucket(len(request.prompt), 32) for request in new)))
        E = bucket(max(len(request.ends) for request in new), 1)
        old = self._size
        if self._rows is None:
            self._size = (B, S, E)
            self._rows = empty_rows(model, B=B, S=S, E=E)
        else:
            B, S, E = self._size = tuple(map(max, (B, S, E), old))
            if self._size != old:
                self._rows = grow(model, self._rows, B=B, S=S, E=E)
        self._running += [None] * (B - len(self._running))

    def _fill(self, new: Sequence[Request], rows: Sequence[int]) -> None:
        """Read the prompts of some requests, each distinct one once, into these rows."""
        model, version = self._weights
        prompts = list(dict.fromkeys(tuple(request.prompt) for request in new))
        # Powers of four for the number of prompts: padding rows cost less than programs.
        U, P = bucket(len(prompts), 1, 4), bucket(max(map(len, prompts)), 32)
        R = bucket(len(new), 1, 4)
        tokens_UP, lengths_U = np.zeros((U, P), np.int32), np.ones(U, np.int32)
        for index, prompt in enumerate(prompts):
            tokens_UP[index, : len(prompt)] = prompt
            lengths_U[index] = len(prompt)
        # Padding goes to a row beyond the last one, which `insert` drops.
        padding = R - len(new)
        places = {prompt: index for index, prompt in enumerate(prompts)}
        samplings = [request.sampling for request in new]
        ends_RE = np.full((R, self._rows.ends.shape[1]), -1, np.int32)
        for index, request in enumerate(new):
            ends_RE[index, : len(request.ends)] = request.ends

        def column(values: Iterable[int], pad: int) -> np.ndarray:
            return np.array([*values, *[pad] * padding], np.int64).astype(np.int32)

        entry = RowInsert(
            row=column(rows, len(self._running)),
            source=column((places[tuple(request.prompt)] for request in new), 0),
            limit=column((request.limit for request in new), 0),
            seed=column((request.sampling.seed for request in new), 0),
            number=column((request.number for request in new), 0),
            draw=read_draws([*samplings, *samplings[-1:] * padding]),
            ends=ends_RE,
            allowed=self._pack_bits([request.constraint for request in new], R),
        )
        filled = fill(model, tokens_UP, lengths_U, self.routes)
        if filled.routed is not None:
            routed_UPR = np.asarray(filled.routed)
            for request in new:
                request.routed.append(
                    routed_UPR[places[tuple(request.prompt)], : len(request.prompt)]
                )
            # `insert` does not read it; dropping it keeps one program for both cases.
            filled = filled._replace(routed=None)
        self._rows = insert(model, self._rows, filled, entry, find_kind(samplings))
        for request, row in zip(new, rows, strict=True):
            request.next_version = version
            self._running[row] = request

    def _draw(self) -> list[Request]:
        """Draw a chunk for all rows; return the requests that ended, whose rows are now free."""
        # Read once: `use` may replace the weights from another thread during the chunk.
        model, version = self._weights
        constrained = self._is_constrained()
        speculates = isinstance(model, DraftedModel) and not constrained and self._is_calm()
        busy = [(row, request) for row, request in enumerate(self._running) if request is not None]
        stop_B = np.array([request is None or request.aborted for request in self._running])
        patience = np.int32(max(1, len(self._running) // REFILL))
        kind = find_kind([request.sampling for _, request in busy])
        if speculates:
            start = time.perf_counter()
            self._rows, (*drawn, lengths) = speculate_chunk(
                model, self._rows, stop_B, patience, kind
            )
            lengths_BN, handed = np.asarray(lengths), int(np.asarray(drawn[2]).sum())
            seconds = time.perf_counter() - start
            self._count_cycles(busy, lengths_BN, model.draft.num_drafted, handed, seconds)
        else:
            allowed = self._follow(busy) if constrained else None
            self._rows, *drawn, routed = decode_chunk(
                model, self._rows, stop_B, patience, kind, self.routes, allowed
            )
            if routed is not None:
                routed_BCR, count_B = np.asarray(routed), np.asarray(drawn[2])
                for row, request in busy:
                    request.routed.append(routed_BCR[row, : count_B[row]].copy())
        tokens_BC, logprobs_BC, handed_B, done_B = map(np.asarray, (*drawn, self._rows.done))
        ended = []
        for row, request in busy:
            if request.aborted:
                self._running[row] = None
                continue
            seen, count = len(request.tokens), int(handed_B[row])
            request.tokens += tokens_BC[row, :count].tolist()
            request.logprobs += logprobs_BC[row, :count].tolist()
            # The first token handed out was drawn at the end of the previous chunk, perhaps by
            # older weights; the last one drawn now is handed out by the next chunk.
            request.versions += [request.next_version, *[version] * (count - 1)][:count]
            request.next_version = version if count else request.next_version
            over = bool(done_B[row])
            if over and request.tokens and request.tokens[-1] in request.ends:
                request.finish_reason = "stop"
            cut = self._find_stop(request.tokens, seen, request.sampling.stop)
            if cut is not None:
                del request.tokens[cut:], request.logprobs[cut:], request.versions[cut:]
                request.finish_reason, over = "stop", True
            if over:
                # The device does not see stop texts: the row runs until `stop_B` of the next chunk,
                # or until it is filled again.
                self._running[row] = None
                ended.append(request)
        return ended

    def _is_constrained(self) -> bool:
        """Return True if any answer in progress is constrained."""
        return any(request is not None and request.constraint for request in self._running)

    def _follow(self, busy: Sequence[tuple[int, Request]]) -> np.ndarray:
        """Hand each constraint its row's pending token; return the bits of what may follow, uint32
        [B, W]."""
        assert self._rows is not None, "rows are busy"
        tokens_B = np.asarray(self._rows.token)
        constraints: list[Constraint | None] = [None] * len(self._running)
        for row, request in busy:
            # Behind its last token a row draws once more, for nothing.
            last = tokens_B[row] in request.ends or len(request.tokens) + 1 >= request.limit
            if request.constraint is not None and not request.aborted and not last:
                request.constraint.accept(int(tokens_B[row]))
                constraints[row] = request.constraint
        bits = self._pack_bits(constraints, len(constraints))
        return self._all_bits(len(constraints)) if bits is None else bits

    def _pack_bits(self, constraints: Sequence[Constraint | None], rows: int) -> np.ndarray | None:
        """Return the bits of what each row may draw; None if every row may draw anything."""
        if not any(constraints):
            return None
        bits = self._all_bits(rows)
        for row, constraint in enumerate(constraints):
            if constraint is not None:
                bits[row] = constraint.allowed
        return bits

    def _all_bits(self, rows: int) -> np.ndarray:
        words = -(-self._weights[0].head().shape[0] // 32)
        return np.full((rows, words), 0xFFFFFFFF, np.uint32)

    def _is_calm(self) -> bool:
        """Return True if so few rows are busy that guesses pay off. Idle rows are then removed,
        because a cycle would read guesses for them, too."""
        most, busy = self.draft_rows, sum(request is not None for request in self._running)
        if not most:
            return True
        if busy > most:
            return False
        B = min(bucket(busy, 1, 4), most)
        if len(self._running) > B:
            busy_rows = [row for row, request in enumerate(self._running) if request is not None]
            busy_rows += [row for row, request in enumerate(self._running) if request is None]
            busy_rows = busy_rows[:B]  # padded with idle ones: B is a bucket
            self._rows = keep(self._rows, np.array(busy_rows, np.int32))
            self._running = [self._running[row] for row in busy_rows]
            self._size = (B, *self._size[1:])
        return True

    def _count_cycles(
        self,
        busy: Sequence[tuple[int, Request]],
        lengths_BN: np.ndarray,
        num_drafted: int,
        tokens: int,
        seconds: float,
    ) -> None:
        """Record the acceptance of a chunk's guesses, per request and in total."""
        if self.acceptance is None:
            self.acceptance = Acceptance(num_drafted)
        for row, request in busy:
            request.lengths += lengths_BN[row][lengths_BN[row] > 0].tolist()
        self.acceptance.add(lengths_BN.ravel(), tokens, seconds)


def find_end(requests: Sequence[Request], start: int) -> int:
    """Return the end of the requests from `start` on that can be read at once within PROMPT_TOKENS;
    at least one."""
    prompts: set[tuple[int, ...]] = set()
    longest = 0
    for index in range(start, len(requests)):
        prompts.add(tuple(requests[index].prompt))
        longest = max(longest, len(requests[index].prompt))
        if index > start and bucket(len(prompts), 1, 4) * bucket(longest, 32) > PROMPT_TOKENS:
            return index
    return len(requests)


def bucket(size: int, smallest: int, factor: int = 2) -> int:
    """Return the smallest `smallest * factor**n` that holds `size`, to limit the number of
    shapes."""
    while smallest < size:
        smallest *= factor
    return smallest


def roomy(size: int) -> int:
    """Round `size` up to eighths of a power of two and to whole chunks: at most an eighth is
    unused."""
    step = max(CHUNK, bucket(size, 1) // 8)
    return -(-size // step) * step
