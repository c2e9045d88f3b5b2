"""The invertible map between jaxtrain's parameters and the tensors of a Hugging Face folder.

A `ParameterEntry` describes the tensors of a parameter as a small tree of ops. Each op knows both
directions and the shapes, so load, save, adapter export and weight publishing share one list:

    tensors = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(L)]
    op = StackedOps([Transpose(TensorRef(name)) for name in tensors])
    ParameterEntry("stack.block.mlp.up.kernel", op)

Reading is by index: a device that holds a slice of the parameter reads only those bytes.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from jaxtrain.errors import UserError

Index = tuple[slice, ...]
"""One slice(start, stop) per dim, without open ends; for stored tensors also with a step."""
Fetch = Callable[[str, Index], np.ndarray]
"""(tensor name, index) -> that part of it."""
TIED_COPY = "lm_head.weight"
"""The head; some folders store one that is tied to the embedding a second time."""
HEADS, HEAD_BIAS = (TIED_COPY, "embed_out.weight"), "lm_head.bias"
"""What heads are called, GPT-NeoX's last; and the bias of those that have one."""


class SplitPiece(NamedTuple):
    """A part of a tensor to be written."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    index: Index
    """Position of the part."""
    array: np.ndarray


class TensorOp(Protocol):
    """Target: the array that the op produces. Host: converts a device array to numpy."""

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Return {tensor: its whole shape} of the tensors needed for a target of `shape`."""
        ...

    def read(self, fetch: Fetch, index: Index) -> np.ndarray:
        """Return target[index]."""
        ...

    def write(self, array: Any, host: Callable[[Any], np.ndarray]) -> Iterator[SplitPiece]:
        """Yield the pieces that store a target with that content."""
        ...


@dataclasses.dataclass(frozen=True)
class TensorRef:
    """A tensor without changes (a rename)."""

    name: str

    def shapes(self, shape):
        return {self.name: shape}

    def read(self, fetch, index):
        return fetch(self.name, index)

    def write(self, array, host):
        array = host(array)
        yield SplitPiece(self.name, array.shape, full_index(array.shape), array)


@dataclasses.dataclass(frozen=True)
class FirstRow:
    """The only row of a tensor whose first axis is 1."""

    name: str

    def shapes(self, shape):
        return {self.name: (1, *shape)}

    def read(self, fetch, index):
        return fetch(self.name, (slice(0, 1), *index))[0]

    def write(self, array, host):
        array = host(array)[None]
        yield SplitPiece(self.name, array.shape, full_index(array.shape), array)


@dataclasses.dataclass(frozen=True)
class Flattened:
    """The last dims of a tensor, of sizes `dims`, as one: the kernel of a convolution whose patches
    do not overlap, [out, channels, p, p], is a matrix [out, channels p p]."""

    name: str
    dims: tuple[int, ...]

    def shapes(self, shape):
        return {self.name: (*shape[:-1], *self.dims)}

    def read(self, fetch, index):
        whole = fetch(self.name, (*index[:-1], *full_index(self.dims)))
        return whole.reshape(*whole.shape[: len(index) - 1], -1)[..., index[-1]]

    def write(self, array, host):
        array = host(array)
        array = array.reshape(*array.shape[:-1], *self.dims)
        yield SplitPiece(self.name, array.shape, full_index(array.shape), array)


@dataclasses.dataclass(frozen=True)
class SplitRows:
    """Rows [start, start + size) of `axis` of one tensor of `total`: a split; the other entries
    that name the tensor hold the other rows."""

    name: str
    axis: int
    start: int
    total: int

    def shapes(self, shape):
        return {self.name: (*shape[: self.axis], self.total, *shape[self.axis + 1 :])}

    def _shifted(self, index):
        moved = slice(index[self.axis].start + self.start, index[self.axis].stop + self.start)
        return (*index[: self.axis], moved, *index[self.axis + 1 :])

    def read(self, fetch, index):
        return fetch(self.name, self._shifted(index))

    def write(self, array, host):
        array = host(array)
        shape = self.shapes(array.shape)[self.name]
        yield SplitPiece(self.name, shape, self._shifted(full_index(array.shape)), array)


@dataclasses.dataclass(frozen=True)
class Interleaved:
    """Every `step`-th row of `axis` of one tensor, starting at `start`; the other entries that name
    the tensor hold the other rows."""

    name: str
    axis: int
    start: int
    step: int

    def shapes(self, shape):
        axis = self.axis % len(shape)
        return {self.name: (*shape[:axis], shape[axis] * self.step, *shape[axis + 1 :])}

    def _spread(self, index):
        axis = self.axis % len(index)
        first, last = (
            self.start + row * self.step for row in (index[axis].start, index[axis].stop)
        )
        rows = slice(first, last - self.step + 1, self.step)
        return (*index[:axis], rows, *index[axis + 1 :])

    def read(self, fetch, index):
        return fetch(self.name, self._spread(index))

    def write(self, array, host):
        array = host(array)
        shape = self.shapes(array.shape)[self.name]
        yield SplitPiece(self.name, shape, self._spread(full_index(array.shape)), array)


@dataclasses.dataclass(frozen=True)
class PermutedRows:
    """Reordered rows of `axis` of one tensor of `total`: `runs` are (start, size) of consecutive
    rows of the tensor. Rows in no run belong to other entries."""

    name: str
    axis: int
    runs: tuple[tuple[int, int], ...]
    total: int

    def shapes(self, shape):
        assert shape[self.axis] == sum(size for _, size in self.runs), f"{self.name}: {shape}"
        return {self.name: (*shape[: self.axis], self.total, *shape[self.axis + 1 :])}

    def _pieces(self, rows: slice) -> Iterator[tuple[slice, slice]]:
        """Yield (rows of the target, the same rows of the tensor) within `rows`."""
        offset = 0
        for start, size in self.runs:
            first, stop = max(offset, rows.start), min(offset + size, rows.stop)
            if first < stop:
                shift = start - offset
                yield slice(first, stop), slice(first + shift, stop + shift)
            offset += size

    def _at(self, index, rows):
        return (*index[: self.axis], rows, *index[self.axis + 1 :])

    def read(self, fetch, index):
        parts = [
            fetch(self.name, self._at(index, rows)) for _, rows in self._pieces(index[self.axis])
        ]
        return np.concatenate(parts, self.axis)

    def write(self, array, host):
        array = host(array)
        shape, index = self.shapes(array.shape)[self.name], full_index(array.shape)
        for target_rows, tensor_rows in self._pieces(index[self.axis]):
            yield SplitPiece(
                self.name, shape, self._at(index, tensor_rows), array[self._at(index, target_rows)]
            )


@dataclasses.dataclass(frozen=True)
class MatrixBlock:
    """Rows `runs` (as in `PermutedRows`) and columns from `start` of a matrix of `total` rows and
    `columns` columns, whose other rows are 0 in these columns."""

    name: str
    runs: tuple[tuple[int, int], ...]
    total: int
    start: int
    columns: int

    def shapes(self, shape):
        assert shape[0] == sum(size for _, size in self.runs), f"{self.name}: {shape}"
        return {self.name: (self.total, self.columns)}

    def read(self, fetch, index):
        rows, columns = index
        moved = slice(columns.start + self.start, columns.stop + self.start)
        return PermutedRows(self.name, 0, self.runs, self.total).read(fetch, (rows, moved))

    def write(self, array, host):
        array = host(array)
        shape, width = (self.total, self.columns), array.shape[1]
        columns, offset = slice(self.start, self.start + width), 0
        unwritten = np.ones(self.total, bool)
        for first, size in self.runs:
            yield SplitPiece(
                self.name,
                shape,
                (slice(first, first + size), columns),
                array[offset : offset + size],
            )
            unwritten[first : first + size] = False
            offset += size
        edges = np.flatnonzero(np.diff(np.concatenate([[0], unwritten.astype(np.int8), [0]])))
        for first, stop in edges.reshape(-1, 2).tolist():
            zeros = np.zeros((stop - first, width), array.dtype)
            yield SplitPiece(self.name, shape, (slice(first, stop), columns), zeros)


@dataclasses.dataclass(frozen=True)
class Transpose:
    """Swap of the last two dims: Hugging Face stores kernels as [out, in], jaxtrain as [in,
    out]."""

    op: TensorOp

    def shapes(self, shape):
        return self.op.shapes((*shape[:-2], shape[-1], shape[-2]))

    def read(self, fetch, index):
        swapped = (*index[:-2], index[-1], index[-2])
        return self.op.read(fetch, swapped).swapaxes(-1, -2)

    def write(self, array, host):
        yield from self.op.write(host(array).swapaxes(-1, -2), host)


@dataclasses.dataclass(frozen=True)
class StackedOps:
    """Equal ops stacked on a new leading axis (layers, experts)."""

    ops: Sequence[TensorOp]

    def shapes(self, shape):
        assert shape[0] == len(self.ops), f"{len(self.ops)} ops for a leading axis of {shape[0]}"
        return {k: v for op in self.ops for k, v in op.shapes(shape[1:]).items()}

    def read(self, fetch, index):
        chosen = self.ops[index[0]]
        first = chosen[0].read(fetch, index[1:])
        out = np.empty((len(chosen), *first.shape), first.dtype)
        out[0] = first
        for i, op in enumerate(chosen[1:], 1):
            out[i] = op.read(fetch, index[1:])
        return out

    def write(self, array, host):
        for i, op in enumerate(self.ops):
            yield from op.write(array[i], host)


@dataclasses.dataclass(frozen=True)
class GrownRows:
    """`op` extended beyond its first `stored` rows by their mean."""

    op: TensorOp
    stored: int

    def shapes(self, shape):
        return self.op.shapes((self.stored, *shape[1:]))

    def read(self, fetch, index):
        rows, rest = index[0], index[1:]
        parts, stop = [], min(rows.stop, self.stored)
        if rows.start < stop:
            parts.append(self.op.read(fetch, (slice(rows.start, stop), *rest)))
        missing = rows.stop - max(rows.start, self.stored)
        if missing > 0:
            everything = self.op.read(fetch, (slice(0, self.stored), *rest))
            mean = everything.astype(np.float32).mean(0, keepdims=True)
            parts.append(np.repeat(mean, missing, 0).astype(everything.dtype))
        return np.concatenate(parts)

    def write(self, array, host):
        raise NotImplementedError("grown rows are written as a part of the whole table")


@dataclasses.dataclass(frozen=True)
class DraftVocabulary:
    """Ascending ids [P] below `total` of a draft's vocabulary: `d2t` int64 [P], the id minus its
    index, and `t2d` bool [total], whether the draft has the id."""

    total: int

    dtypes: ClassVar[Mapping[str, Any]] = {"d2t": np.dtype(np.int64), "t2d": np.dtype(bool)}
    """Dtypes of the tensors, whatever the dtype of the weights."""

    def shapes(self, shape):
        return {"d2t": shape, "t2d": (self.total,)}

    def read(self, fetch, index):
        ids = fetch("d2t", index) + np.arange(index[0].start, index[0].stop)
        if (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= self.total:
            raise UserError(
                f"the tensor d2t does not hold ascending ids below {self.total}: the draft belongs"
                " to another vocabulary, or the file is damaged"
            )
        return ids

    def write(self, array, host):
        ids = host(array).astype(np.int64)
        yield SplitPiece("d2t", ids.shape, full_index(ids.shape), ids - np.arange(len(ids)))
        in_draft = np.zeros(self.total, bool)
        in_draft[ids] = True
        yield SplitPiece("t2d", in_draft.shape, full_index(in_draft.shape), in_draft)


class ParameterEntry(NamedTuple):
    """A parameter's dotted path in the model, and the op that builds it from tensors."""

    param: str
    op: TensorOp


def full_index(shape: Sequence[int]) -> Index:
    """Return the index of a whole array."""
    return tuple(slice(0, size) for size in shape)
