"""Each op against numpy: what it reads, what it writes, and that the two are inverse."""

import itertools

import numpy as np
import pytest

from jaxtrain.huggingface.ops import (
    Interleaved,
    SplitRows,
    StackedOps,
    TensorRef,
    Transpose,
    full_index,
)

STORE = {
    "a": np.arange(12.0).reshape(3, 4),
    "b": np.arange(12.0, 24.0).reshape(3, 4),
    "fused": np.arange(40.0).reshape(10, 4),
}
CASES = {
    "tensor": (TensorRef("a"), STORE["a"]),
    "transpose": (Transpose(TensorRef("a")), STORE["a"].T),
    "stack": (StackedOps((TensorRef("a"), TensorRef("b"))), np.stack([STORE["a"], STORE["b"]])),
    "stack_transposed": (
        StackedOps((Transpose(TensorRef("a")), Transpose(TensorRef("b")))),
        np.stack([STORE["a"].T, STORE["b"].T]),
    ),
    "turns": (Interleaved("a", -1, 1, 2), STORE["a"][:, 1::2]),
    "part": (SplitRows("fused", 0, 2, 10), STORE["fused"][2:5]),
}


def fetch(name, index):
    return STORE[name][index]


@pytest.mark.parametrize("case", CASES)
def test_read_any_slice_and_write_back(case):
    op, target = CASES[case]
    for name, shape in op.shapes(target.shape).items():
        assert STORE[name].shape == shape
    ranges = [[(0, n), (0, 1), (n // 2, n)] for n in target.shape]
    for bounds in itertools.product(*ranges):
        index = tuple(slice(*bound) for bound in bounds)
        np.testing.assert_array_equal(op.read(fetch, index), target[index])
    for piece in op.write(target, np.asarray):
        assert piece.shape == STORE[piece.name].shape
        np.testing.assert_array_equal(piece.array, STORE[piece.name][piece.index])


def test_split_entries_cover_the_tensor_once():
    parts = [
        SplitRows("fused", 0, 0, 10),
        SplitRows("fused", 0, 4, 10),
        SplitRows("fused", 0, 9, 10),
    ]
    seen = np.zeros((10, 4))
    for part, size in zip(parts, (4, 5, 1), strict=True):
        target = part.read(fetch, full_index((size, 4)))
        for piece in part.write(target, np.asarray):
            seen[piece.index] += 1
    assert (seen == 1).all()
