"""Values between processes: they come out as they went in, and nothing received is ever run."""

import json
import pickle
import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from jaxtrain.batch import Batch
from jaxtrain.distributed import serialization

LIMIT = 2**22
"""Bytes that a garbled parcel of the tests may ask for before it is refused."""


def reader(data: bytes):
    """receive(n) of these bytes."""
    offset = 0

    def receive(size: int) -> bytearray:
        nonlocal offset
        assert size <= LIMIT, f"{size} bytes would be allocated"
        if offset + size > len(data):
            raise ConnectionError("hung up")
        offset += size
        return bytearray(data[offset - size : offset])

    return receive


ARRAYS = st.sampled_from([np.int32, np.float32, np.uint8, np.bool_, ml_dtypes.bfloat16]).flatmap(
    lambda dtype: arrays.array_shapes(min_dims=0, min_side=0, max_side=3).map(
        lambda shape: np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    )
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(a, b) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_values_come_out_as_they_went_in(value):
    data = b"".join(serialization.pack("a", value))
    name, unpacked = serialization.unpack(reader(data))
    assert name == "a" and same(value, unpacked)


def test_batches_and_numbers_of_numpy_keep_their_types():
    ints = [np.arange(4, dtype=np.int32)[::2]] * 4
    batch = Batch(*ints, weights={"pg": np.ones(2, np.float32)}, denoms={"pg": np.float32(3)})
    _, unpacked = serialization.unpack(reader(b"".join(serialization.pack("a", [batch]))))
    assert type(unpacked[0]) is Batch and unpacked[0].since is None
    assert type(unpacked[0].denoms["pg"]) is np.float32
    unpacked[0].tokens[0] = 7  # arrays may be written to


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array(["a"]), np.array([None]), b"bytes"])
def test_other_kinds_are_not_sent(value):
    with pytest.raises(TypeError, match="cannot be sent to other processes"):
        serialization.pack("a", value)


def test_a_shape_of_very_many_dims_is_refused_before_its_size_is_computed():
    header = json.dumps({"name": "a", "value": 1, "arrays": [["int8", [2**39] * 200_000]]}).encode()
    data = serialization.START.pack(serialization.MAGIC, len(header)) + header
    began = time.monotonic()
    with pytest.raises(serialization.MalformedValueError, match="an array of shape"):
        serialization.unpack(reader(data))
    assert time.monotonic() - began < 5


NODES = st.recursive(
    st.none() | st.integers() | st.sampled_from(["list", "array", "scalar", "batch", "dict"]),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.just("a") | NODES,
        "value": NODES,
        "arrays": NODES
        | st.lists(
            st.tuples(
                st.sampled_from(["int32", "bfloat16", "object", "O", "<V8"]),
                st.lists(st.integers(-2, 2**62), max_size=3),
            ),
            max_size=3,
        ),
    },
).map(lambda fields: json.dumps(fields).encode())
ODD = [b"[" * 100_000, b"\xff\xfe", b"", b"null", pickle.dumps({"a": 1})]


@settings(max_examples=150, deadline=None)
@given(
    HEADERS | st.sampled_from(ODD), st.integers(0, 2**64 - 1) | st.none(), st.binary(max_size=40)
)
def test_garbage_is_refused_before_memory_is_allocated(header, length, end):
    size = len(header) if length is None else length
    data = serialization.START.pack(serialization.MAGIC, size) + header + end
    try:
        serialization.unpack(reader(data))
    except (serialization.MalformedValueError, ConnectionError) as error:
        assert len(str(error)) < 500
    except AssertionError:
        # A header or arrays within the limits, which the sender then does not fill.
        assert size <= serialization.MAX_HEADER_BYTES
