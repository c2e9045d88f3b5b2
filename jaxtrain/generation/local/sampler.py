"""LocalSampler: continuous batching in the training process, on its own devices.

    add(request) ─> queue ─> free rows ─┐ each distinct prompt is read once
                                        ├─ chunk of tokens ─> step() returns what has ended
                              busy rows ┘

Requests of all kinds share the rows, and a row that ends is refilled after the chunk. Every size
of the rows compiles programs, so there are few: one for the requests that come first, with all
slots if memory is ample, then one of all rows. They are freed when there is no work. `slots.py` has
the device's side, `prefill.py` reads prompts. A model with a draft (`DraftedModel`) draws the same
tokens in fewer passes: `speculation.py`.
"""

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from typing_extensions import override

from jaxtrain.batch import RouteShape
from jaxtrain.generation.acceptance import Acceptance
from jaxtrain.generation.local.constraints import Constraint
from jaxtrain.generation.local.prefill import Prompt, choose_blocks, read_prompts
from jaxtrain.generation.local.prefix_cache import PrefixCache
from jaxtrain.generation.local.requests import Request, Requests
from jaxtrain.generation.local.slots import (
    CHUNK,
    ChunkEnd,
    RowInsert,
    SamplerRows,
    decode_chunk,
    empty_rows,
    grow,
    insert,
    keep,
)
from jaxtrain.generation.local.speculation import DraftedModel, speculate_chunk
from jaxtrain.generation.local.token_sampling import find_kind, read_draws

READING = "reading prompts"
"""Name of the phase that ends once the rows of new prompts are dispatched."""
SLOTS = 128
"""Rows have a multiple of so many slots."""
ENDS = 8
"""Smallest number of tokens that may end a row."""
AMPLE = 4
"""Rows get all slots at once where that takes at most one part in so many of the free memory."""
REFILL = 8
"""A chunk ends early once one in so many rows has ended in it."""
STREAMS = 4
"""Rows for each token of a chunk while an answer is read as it is drawn: a program's start costs
the same for any number of rows."""


class RowsSize(NamedTuple):
    """Size of the rows on the device."""

    rows: int
    slots: int
    ends: int
    """Tokens that may end a row."""

    def fits(self, room: "RowsSize") -> bool:
        """Return True if `room` is at least as large."""
        return all(need <= size for need, size in zip(self, room, strict=True))


class RowStart(NamedTuple):
    """A request about to begin."""

    request: Request
    row: int
    leader: int
    """First of the rows that begin with the same prompt."""


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
        prefixes: int = 0,
        **options: Any,
    ):
        """draft_rows: a draft guesses only while at most so many rows are busy; 0: always. routes:
        record each token's experts; for a model without a draft. prefixes: number of ended
        answers whose states stay for prompts that begin like them; without effect with a draft or
        routes. options: of Requests."""
        super().__init__(model, eos_ids, **options)
        self.draft_rows, self.routes = draft_rows, routes
        self.prefixes = PrefixCache(prefixes)
        platform = self.mesh.devices.flat[0].platform if self.mesh else jax.default_backend()
        self.blocks = choose_blocks(self.max_batch // REFILL, platform)
        self._running: list[Request | None] = []
        self._rows: SamplerRows | None = None
        self._size = RowsSize(0, 0, 0)
        """Size of `_rows`."""
        self._sizes: list[RowsSize] = []
        """All sizes so far, each at least as large as the one before."""

    @override
    def drop_all(self) -> None:
        self._waiting.clear()
        self._running, self._rows = [], None
        self.prefixes.clear()  # a call that failed may have taken its arrays

    @property
    @override
    def busy(self) -> bool:
        return bool(self._waiting) or any(self._running)

    def wait(self) -> None:
        """Block until the device has read the prompts of all rows."""
        jax.block_until_ready(self._rows)

    def step(self) -> list[Request]:
        """Start waiting requests and draw a chunk of tokens; return the requests that have ended.

        Blocks until the device has answered. Without further work the rows are freed.
        """
        with self.on_mesh():
            with self.phase(READING):
                self._begin()
            with self.phase("decoding"):
                ended = self._draw() if any(self._running) else []
                # Constrained rows come a token at a time; as many of them as a chunk are one step.
                for _ in range(self._count_steps() - 1):
                    if ended or not self._is_constrained():
                        break
                    ended = self._draw()
        if not self.busy:
            self._rows, self._running = None, []
        return ended

    def _begin(self) -> None:
        """Fill free rows from the queue: read each distinct prompt once, for all of its rows."""
        busy = sum(running is not None for running in self._running)
        new: list[Request] = []
        while self._waiting and busy + len(new) < self.max_batch:
            request = self._waiting.popleft()  # the event loop may append meanwhile
            if not request.aborted:
                new.append(request)
        if not new:
            return
        model, version, identity = self._weights
        if keeps := self._keeps_prefixes():
            self.prefixes.follow(identity, model)
        self._make_room(busy, new)
        free = (row for row, running in enumerate(self._running) if running is None)
        starts: dict[Prompt, list[RowStart]] = {}
        for request in new:
            request.begun_with = identity
            prompt = Prompt.of(request.prompt, request.images, request.adapter)
            if keeps and prompt not in starts and not prompt.images:
                prompt = replace(prompt, stored=self.prefixes.find(prompt))
            entries = starts.setdefault(prompt, [])
            row = next(free)
            entries.append(RowStart(request, row, entries[0].row if entries else row))
        kind = find_kind([request.sampling for request in new])
        slots = self._size.slots
        options = slots, self.routes, self.packer, self.prefixes.stored
        for call in read_prompts(model, list(starts), self.blocks, *options):
            if call.routed is not None:
                routed_UCE = np.asarray(call.routed)
                for chunk in call.chunks:
                    for entry in starts[chunk.prompt]:
                        entry.request.routed.append(routed_UCE[chunk.row, : chunk.count])
            ended = [
                (chunk.row, entry)
                for chunk in call.chunks
                if chunk.ended
                for entry in starts[chunk.prompt]
            ]
            # Insertions have the block's number of rows, so that they share its few programs.
            R = len(call.filled.length)
            for start in range(0, len(ended), R):
                entry = self._pack_entry(ended[start : start + R], R)
                self._rows = insert(model, self._rows, call.filled, entry, kind)
        for entry in itertools.chain.from_iterable(starts.values()):
            entry.request.next_version = version
            self._running[entry.row] = entry.request

    def _make_room(self, busy: int, new: Sequence[Request]) -> None:
        """Ensure that there are rows for the new requests besides `busy` ones, and slots for the
        longest."""
        model = self.model
        # A cycle writes all K guesses to the cache before it knows which are accepted, so a row
        # needs slots beyond its limit.
        spare = model.draft.num_drafted if isinstance(model, DraftedModel) else 0
        # Those that wait count, too: rows that are enough for all of them are compiled once.
        requests = [*new, *list(self._waiting)]
        needed = RowsSize(
            min(busy + len(requests), self.max_batch),
            max(
                max(len(request.prompt) + request.limit for request in requests) + spare,
                self.prefixes.slots,
            ),
            max(len(request.ends) for request in requests),
        )
        if self._rows is not None and needed.fits(self._size):
            return
        size = next((size for size in self._sizes if needed.fits(size)), None)
        if size is None:
            size = self._choose_size(needed, requests, spare)
            self._sizes.append(size)
        if self._rows is None:
            self._rows = empty_rows(model, B=size.rows, S=size.slots, E=size.ends)
        else:
            size = RowsSize(*map(max, size, self._size))
            self._rows = grow(model, self._rows, B=size.rows, S=size.slots, E=size.ends)
        self._size = size
        self._running += [None] * (size.rows - len(self._running))

    def _choose_size(self, needed: RowsSize, requests: Sequence[Request], spare: int) -> RowsSize:
        """Return a size for requests that no earlier one has room for.

        Every size compiles `decode_chunk` and `insert` anew, which takes longer than larger rows
        cost: the first suits the first requests, unless memory is ample; the next has all rows and
        twice the slots.
        """
        longest = round_up(self.max_len + spare)
        E = bucket(needed.ends, ENDS)
        if not self._sizes:
            prompt = bucket(max(len(request.prompt) for request in requests), SLOTS)
            limit = max(request.limit for request in requests)
            S = min(max(needed.slots, prompt + limit + spare), longest)
            if self._affords(longest):
                S = longest
            return RowsSize(min(bucket(needed.rows, 1), self.max_batch), round_up(S), E)
        _, S, ends = self._sizes[-1]
        if needed.slots > S:
            S = max(round_up(needed.slots), min(2 * S, longest))
        return RowsSize(self.max_batch, S, max(E, ends))

    def _affords(self, slots: int) -> bool:
        """Return True if all rows of so many slots take at most one part in AMPLE of the memory
        that is free: then no longer prompt has to compile anything. Only on GPUs, whose attention
        reads no slot that is not filled; elsewhere each token would cost more."""
        device = next(iter(self.mesh.local_devices)) if self.mesh else jax.local_devices()[0]
        if device.platform != "gpu":
            return False
        stats = device.memory_stats() or {}
        free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
        cache = jax.eval_shape(lambda: self.model.init_cache(self.max_batch, slots))
        return AMPLE * sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) <= free

    def _pack_entry(self, started: Sequence[tuple[int, RowStart]], R: int) -> RowInsert:
        """Return the arrays of R rows to be started from rows of a prefill block."""
        requests = [entry.request for _, entry in started]
        # Padding goes to a row beyond the last one, which `insert` drops.
        padding = R - len(started)
        samplings = [request.sampling for request in requests]
        ends_RE = np.full((R, self._size.ends), -1, np.int32)
        for index, request in enumerate(requests):
            ends_RE[index, : len(request.ends)] = request.ends

        def column(values: Iterable[int], pad: int) -> np.ndarray:
            return np.array([*values, *[pad] * padding], np.int64).astype(np.int32)

        return RowInsert(
            row=column((entry.row for _, entry in started), len(self._running)),
            source=column((source for source, _ in started), 0),
            leader=column((entry.leader for _, entry in started), 0),
            limit=column((request.limit for request in requests), 0),
            seed=column((request.sampling.seed for request in requests), 0),
            number=column((request.number for request in requests), 0),
            draw=read_draws([*samplings, *samplings[-1:] * padding]),
            ends=ends_RE,
            allowed=self._pack_bits([request.constraint for request in requests], R),
        )

    def _draw(self) -> list[Request]:
        """Draw a chunk for all rows; return the requests that ended, whose rows are now free."""
        # Read once: `use` may replace the weights from another thread during the chunk.
        model, version, identity = self._weights
        constrained = self._is_constrained()
        speculates = isinstance(model, DraftedModel) and not constrained and self._is_calm()
        busy = [(row, request) for row, request in enumerate(self._running) if request is not None]
        stop_B = np.array([request is None or request.aborted for request in self._running])
        over = ChunkEnd(np.int32(max(1, len(self._running) // REFILL)), self._count_steps())
        kind = find_kind([request.sampling for _, request in busy])
        if speculates:
            start = time.perf_counter()
            self._rows, (*drawn, lengths) = speculate_chunk(model, self._rows, stop_B, over, kind)
            lengths_BN, handed = np.asarray(lengths), int(np.asarray(drawn[2]).sum())
            seconds = time.perf_counter() - start
            self._count_cycles(busy, lengths_BN, model.draft.num_drafted, handed, seconds)
        else:
            allowed = self._follow(busy) if constrained else None
            self._rows, *drawn, routed = decode_chunk(
                model, self._rows, stop_B, over, kind, self.routes, allowed
            )
            if routed is not None:
                routed_BCR, count_B = np.asarray(routed), np.asarray(drawn[2])
                for row, request in busy:
                    request.routed.append(routed_BCR[row, : count_B[row]].copy())
        tokens_BC, logprobs_BC, handed_B, done_B = map(np.asarray, (*drawn, self._rows.done))
        keeps, ended = self._keeps_prefixes(), []
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
            read = [*request.prompt, *request.tokens] if over or request.sampling.stop else []
            cut = self._find_stop(request.tokens, seen, request.sampling.stop)
            if cut is not None:
                del request.tokens[cut:], request.logprobs[cut:], request.versions[cut:]
                request.finish_reason, over = "stop", True
            if over:
                # The device does not see stop texts: the row runs until `stop_B` of the next chunk,
                # or until it is filled again.
                self._running[row] = None
                ended.append(request)
                if keeps and request.begun_with is identity and request.images is None:
                    # The last token that a row draws is not read, but those behind a stop text are.
                    read = read[: int(np.asarray(self._rows.cache.length)[row])]
                    prompt = Prompt.of(read, None, request.adapter)
                    self.prefixes.store(model, self._rows.cache, row, prompt, self._size.slots)
        return ended

    @override
    def prefix_tokens(self) -> tuple[int, int]:
        return self.prefixes.queried, self.prefixes.hits

    def _keeps_prefixes(self) -> bool:
        """Return True if states of ended answers are stored and read."""
        return (
            bool(self.prefixes.rows)
            and self.routes is None
            and not isinstance(self.model, DraftedModel)
        )

    def _count_steps(self) -> np.int32:
        """Return the tokens of a chunk: few while someone reads along, one if the rows are few."""
        busy = [request for request in self._running if request is not None]
        streamed = any(request.streamed for request in busy)
        return np.int32(max(1, min(CHUNK, len(busy) // STREAMS)) if streamed else CHUNK)

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
        words = -(-self.model.head().shape[0] // 32)
        return np.full((rows, words), 0xFFFFFFFF, np.uint32)

    def _is_calm(self) -> bool:
        """Return True if so few rows are busy that guesses pay off. Idle rows are then removed,
        because a cycle would read guesses for them, too."""
        most, busy = self.draft_rows, sum(request is not None for request in self._running)
        if not most:
            return True
        if busy > most:
            return False
        if len(self._running) > most:
            busy_rows = [row for row, request in enumerate(self._running) if request is not None]
            busy_rows += [row for row, request in enumerate(self._running) if request is None]
            busy_rows = busy_rows[:most]  # padded with idle ones, so that one program serves
            self._rows = keep(self._rows, np.array(busy_rows, np.int32))
            self._running = [self._running[row] for row in busy_rows]
            self._size = self._size._replace(rows=most)
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


def bucket(size: int, smallest: int) -> int:
    """Return the smallest `smallest * 2**n` that holds `size`."""
    while smallest < size:
        smallest *= 2
    return smallest


def round_up(slots: int) -> int:
    """Round up to a multiple of SLOTS."""
    return -(-slots // SLOTS) * SLOTS
