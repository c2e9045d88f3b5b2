"""Source of batches of offline training: trees -> rows -> rounds of one Batch [A, B, T].

    grain workers (num_workers)          one background thread (prefetch)          the loop
    row -> tokenize -> trees    ──>   window -> rows -> Batch [A,B,T]    ──>   next(source)

Both queues are bounded: the workers wait for the thread, and the thread for the loop. The batches
depend only on the data, the seed and the draw number, not on workers, threads or resumes.
"""

import copy
import queue
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtrain.batch import Batch
from jaxtrain.data.counts import Counts, count_metrics, drops_of
from jaxtrain.data.packing.pack import (
    NLL,
    Fields,
    Normalize,
    PackedTree,
    build_batch,
    join_row_images,
    lay_out,
    stack_batches,
)
from jaxtrain.data.packing.tree import Forest, Tree
from jaxtrain.data.packing.window import UnitPacker, WindowPacker
from jaxtrain.errors import UserError


@dataclass(frozen=True)
class StepShape:
    """Shape of the batches of an optimizer step."""

    rows: int
    """B, rows of a microstep."""
    microsteps: int | None
    """A; None: as many as the rows of a step fill."""
    row_tokens: int
    """T, the longest row."""
    buckets: tuple[int, ...] = ()
    """Shorter T to which a step may be cut; each T that occurs costs a compilation."""
    normalize: Normalize = "token"
    fields: Fields = NLL
    """Weights and streams of every batch."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Possible T, ascending."""
        return tuple(sorted({*(n for n in self.buckets if n < self.row_tokens), self.row_tokens}))

    def build(self, rows: Sequence[Sequence[PackedTree]]) -> Batch:
        """Build a batch [A, B, T] of packed rows with the shortest T that fits; pads with rows."""
        used = max(sum(len(tree.tokens) for tree in row) for row in rows)
        length = next(n for n in self.lengths if n >= used)
        microsteps = self.microsteps or -(-len(rows) // self.rows)
        rows = [*rows, *[[]] * (self.rows * microsteps - len(rows))]
        packer = self.fields.images
        patches = packer.bucket(join_row_images(rows)) if packer is not None else None
        return stack_batches(
            [
                build_batch(rows[start : start + self.rows], length, self.fields, patches)
                for start in range(0, len(rows), self.rows)
            ]
        )


class StepIterator:
    """Batches [A, B, T] from packed rows; its state is JSON-able."""

    def __init__(self, packer: WindowPacker | UnitPacker, shape: StepShape):
        self._packer, self._shape = packer, shape
        self._totals: dict[str, Any] = {
            "batches": 0,
            "rows": 0,
            "tokens": 0,
            "slots": 0,
            "trained_tokens": 0,
            "shapes": [],
        }

    def __iter__(self) -> "StepIterator":
        return self

    def __next__(self) -> Batch:
        shape = self._shape
        rows = self._next_rows()
        if not rows:
            raise StopIteration
        batch = shape.build([[lay_out(tree, shape.normalize) for tree in row] for row in rows])
        shapes, compiled = self._totals["shapes"], list(batch.tokens.shape[1:])
        if batch.images is not None:
            compiled.append(batch.images.since.shape[-1])
        if compiled not in shapes:
            self._totals["shapes"] = [*shapes, compiled]
        self._totals["batches"] += 1
        self._totals["rows"] += len(rows)
        self._totals["tokens"] += sum(tree.num_tokens for row in rows for tree in row)
        self._totals["slots"] += batch.tokens.size
        trained = np.any([weight != 0 for weight in batch.weights.values()], axis=0)
        self._totals["trained_tokens"] += int(np.count_nonzero(trained))
        if batch.images is not None:
            counted = count_images(rows)
            counted["patch_slots"] = int(np.prod(batch.images.since.shape))
            sums = {name: self._totals.get(name, 0) + n for name, n in counted.items()}
            self._totals.update(sums)
        return batch

    def _next_rows(self) -> list[list]:
        rows: list[list] = []
        try:
            if isinstance(self._packer, UnitPacker):
                return next(self._packer)
            assert self._shape.microsteps is not None, "steps of units have a UnitPacker"
            for _ in range(self._shape.rows * self._shape.microsteps):
                rows.append(next(self._packer))
        except StopIteration:
            pass
        return rows

    def get_state(self) -> dict:
        return {"packer": self._packer.state(), "totals": dict(self._totals)}

    def set_state(self, state: dict) -> None:
        self._packer.restore(state["packer"])
        self._totals = dict(state["totals"])

    def close(self) -> None:
        self._packer.close()


IMAGE_COUNTS = ("images", "images_shared", "image_tokens", "patches", "patch_slots")
"""Totals of batches with images: see count_images; and the patches that rows have room for."""


def count_images(rows: Sequence[Sequence[Tree | Forest]]) -> dict[str, int]:
    """Count the images of rows that are embedded, and those that are not because other branches or
    trees of the row have them, too; the tokens that stand for embedded ones, and their patches."""
    places, embedded = 0, []
    for row in rows:
        trees = [t for tree in row for t in (tree.trees if isinstance(tree, Forest) else (tree,))]
        for tree in trees:
            for node, branches in zip(tree.nodes, tree.branch_counts, strict=True):
                places += branches * len(node.images.images) if node.images is not None else 0
        embedded += dict.fromkeys(image for tree in trees for image in tree.images)
    return {
        "images": len(embedded),
        "images_shared": places - len(embedded),
        "image_tokens": sum(image.num_features for image in embedded),
        "patches": sum(image.num_patches for image in embedded),
    }


class _ReadAhead:
    """StepIterator read by a thread, at most `size` batches ahead; its state is that after the
    batch that was returned last. An error, or the end, comes again each time."""

    def __init__(self, steps: StepIterator, size: int):
        self._steps, self._state = steps, steps.get_state()
        self._items: queue.Queue = queue.Queue(size)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._end: BaseException | None = None

    def __next__(self) -> Batch:
        if self._end is not None:
            raise self._end
        if self._thread is None:
            self._stop.clear()
            # The thread holds no reference to self, which is closed by its owner's finalizer.
            arguments = (self._steps, self._items, self._stop)
            self._thread = threading.Thread(
                target=_read_steps, args=arguments, name="pack-batches", daemon=True
            )
            self._thread.start()
        batch, state, self._end = self._items.get()
        if self._end is not None:
            self._halt()
            raise self._end
        self._state = state
        return batch

    def get_state(self) -> dict:
        return self._state

    def set_state(self, state: dict) -> None:
        self._halt()
        self._end = None
        self._steps.set_state(state)
        self._state = self._steps.get_state()

    def close(self) -> None:
        if threading.current_thread() is self._thread:
            # The garbage collector runs this on the thread that reads, which cannot wait for itself
            # and may hold the lock of the queue.
            threading.Thread(target=self.close, name="close-batches").start()
            return
        self._halt()
        self._steps.close()

    def _halt(self) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._drain()  # a thread that waits for room puts one more batch and ends
        self._thread.join()
        self._thread = None
        self._drain()

    def _drain(self) -> None:
        while not self._items.empty():
            self._items.get_nowait()


def _read_steps(steps: StepIterator, items: queue.Queue, stop: threading.Event) -> None:
    try:
        while not stop.is_set():
            batch = next(steps)
            items.put((batch, copy.deepcopy(steps.get_state()), None))
    # StopIteration and SystemExit, too: raised where the batch is asked for, which waits for it.
    except BaseException as error:
        items.put((None, None, error))


class BatchSource:
    """Iterator of rounds (lists of one Batch [A, B, T]) with an exact, JSON-able cursor."""

    def __init__(
        self,
        packer: WindowPacker | UnitPacker,
        shape: StepShape,
        *,
        prefetch: int = 2,
        layout: dict[str, Any],
        left_out: int = 0,
    ):
        """layout: part of the cursor; `restore` refuses a cursor whose layout differs. left_out:
        number of rows that a selection removed, for the metrics."""
        self._left_out = {"data/left_out_rows": float(left_out)} if left_out else {}
        self.lengths = shape.lengths
        """Possible T of a batch, the upper bound of compilations."""
        self._layout = layout
        iterator = _ReadAhead(StepIterator(packer, shape), prefetch)
        # The finalizer also runs at the exit of Python, before its modules are torn down. The list
        # lets it drop the last reference to the iterator.
        self._open_iterators = [iterator]
        self._finalizer = weakref.finalize(self, _close, self._open_iterators)

    @property
    def _iterator(self) -> _ReadAhead:
        if not self._open_iterators:
            raise ValueError("the data source is closed")
        return self._open_iterators[0]

    def __iter__(self) -> "BatchSource":
        return self

    def __next__(self) -> list[Batch]:
        return [next(self._iterator)]

    def state(self) -> dict:
        """Return the cursor after the last round, for `restore`."""
        return {"layout": self._layout, **self._iterator.get_state()}

    def restore(self, state: dict) -> None:
        """Continue with exactly the round that would have followed; UserError if the data
        changed."""
        changed = [
            f"{key}: {state['layout'].get(key)} then, {value} now"
            for key, value in self._layout.items()
            if state["layout"].get(key) != value
        ]
        if changed:
            raise UserError(
                f"the data differ from those of the checkpoint ({'; '.join(changed)}), so its place"
                ' in them means nothing; restore the data or start with run.resume = "never"'
            )
        self._iterator.set_state({key: state[key] for key in ("packer", "totals")})

    def counters(self) -> dict:
        """Return totals: rows_read (once each), samples, dropped by reason, counts and metrics (see
        counts.py), tokens, trained_tokens, packing_efficiency, and batch_shapes, each compiled
        once."""
        state = self._iterator.get_state()
        counts, totals = Counts.restore(state["packer"]), state["totals"]
        return {
            "rows_read": counts.get("rows", 0),
            "samples": counts.get("trees", 0),
            "dropped": drops_of(counts),
            "counts": counts,
            "metrics": {**count_metrics(counts), **self._left_out},
            "tokens": totals["tokens"],
            "trained_tokens": totals["trained_tokens"],
            "batch_shapes": len(totals["shapes"]),
            "packing_efficiency": totals["tokens"] / max(totals["slots"], 1),
            **{name: totals[name] for name in IMAGE_COUNTS if name in totals},
        }

    def close(self) -> None:
        """Stop the thread and the workers."""
        self._finalizer()


def _close(iterators: list) -> None:
    while iterators:
        iterators.pop().close()
