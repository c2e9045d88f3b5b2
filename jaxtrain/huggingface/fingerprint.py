"""Fingerprint of a folder of weights, without reading all of it."""

import hashlib
import math
from pathlib import Path

from jaxtrain.huggingface.packed import StoredFolder

BLOCK = 4096
"""Bytes that are read at the beginning, the middle and the end of each tensor."""


def fingerprint(folder: Path) -> str:
    """Return the sha256 over name, dtype, shape and three blocks of bytes of every tensor: training
    or merging changes a tensor nearly everywhere. Raises UserError as SafetensorsFolder does."""
    tensors = StoredFolder(folder).tensors
    digest = hashlib.sha256()
    for name, stored in sorted(tensors.items()):
        digest.update(repr((name, str(stored.dtype), stored.shape)).encode())
        size = math.prod(stored.shape) * stored.dtype.itemsize
        with stored.file.open("rb") as file:
            for offset in sorted({0, max(size - BLOCK, 0) // 2, max(size - BLOCK, 0)}):
                file.seek(stored.offset + offset)
                digest.update(file.read(min(BLOCK, size)))
    return digest.hexdigest()
