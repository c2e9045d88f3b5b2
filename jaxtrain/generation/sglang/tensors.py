"""Weights in the body of a request: SGLang's /update_weights_from_tensor, without PyTorch here.

SGLang reads base64 of a pickle that holds [(name, torch.Tensor), ...], by an unpickler which admits
torch and functools. Each tensor is written as the calls that rebuild it from its bytes:

    torch.reshape(functools.partial(torch.frombuffer, dtype=torch.bfloat16)(bytearray), shape)

so that values travel in the request, and the server may be on another machine.
"""

import base64
import pickle
import struct
from collections.abc import Iterator, Sequence

import numpy as np

from jaxtrain.huggingface.ops import full_index
from jaxtrain.huggingface.safetensors import SafetensorsFolder

MOST_BYTES = 2**26
"""Bytes of tensors in one request; a larger tensor has a request of its own."""


def pickle_tensors(tensors: Sequence[tuple[str, np.ndarray]]) -> bytes:
    """Return a pickle that SGLang reads as [(name, torch.Tensor), ...]."""
    parts = [pickle.PROTO, b"\x05", pickle.EMPTY_LIST]
    for name, array in tensors:
        buffer = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        parts += [_write_text(name), *_write_global("torch", "reshape")]
        # functools.partial.__new__(partial, torch.frombuffer, dtype=...)
        parts += [*_write_global("functools", "partial"), *_write_global("torch", "frombuffer")]
        parts += [pickle.TUPLE1, pickle.EMPTY_DICT, _write_text("dtype")]
        parts += [*_write_global("torch", array.dtype.name), pickle.SETITEM, pickle.NEWOBJ_EX]
        parts += [pickle.BYTEARRAY8, struct.pack("<Q", buffer.nbytes), buffer.data]
        parts += [pickle.TUPLE1, pickle.REDUCE, pickle.MARK]
        parts += [pickle.BININT + struct.pack("<i", size) for size in array.shape]
        parts += [pickle.TUPLE, pickle.TUPLE2, pickle.REDUCE, pickle.TUPLE2, pickle.APPEND]
    return b"".join([*parts, pickle.STOP])


def _write_text(text: str) -> bytes:
    encoded = text.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(encoded)) + encoded


def _write_global(module: str, name: str) -> tuple[bytes, ...]:
    return _write_text(module), _write_text(name), pickle.STACK_GLOBAL


def read_requests(folder: SafetensorsFolder) -> Iterator[str]:
    """Yield the tensors of a folder as base64 of pickles, in order, for one request each."""
    batch: list[tuple[str, np.ndarray]] = []
    size = 0
    for name, stored in folder.tensors.items():
        array = folder.fetch(name, full_index(stored.shape))
        if batch and size + array.nbytes > MOST_BYTES:
            yield base64.b64encode(pickle_tensors(batch)).decode()
            batch, size = [], 0
        batch.append((name, array))
        size += array.nbytes
    yield base64.b64encode(pickle_tensors(batch)).decode()
