"""Checks of loaded weights for NaN and infinity.

Devices check large arrays where they are placed, which costs them one read and the host nothing
until the end, but a program for each shape; numpy checks small ones and small models, which
compiles nothing. Files are read again only after a failure, to name the tensor.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.huggingface.files import shorten
from jaxtrain.huggingface.ops import ParameterEntry, full_index
from jaxtrain.huggingface.safetensors import SafetensorsFolder

SMALL = 2**22
"""Arrays up to this many bytes are checked by numpy."""
SMALL_MODEL = 2**29
"""Bytes of larger arrays that it checks, too: a fraction of a second."""


class FiniteCheck:
    """Checks each parameter read from a folder; call `close` after the last."""

    def __init__(self, files: SafetensorsFolder):
        self.files = files
        self._left = SMALL_MODEL
        self._found: list[tuple[ParameterEntry, bool | jax.Array, jax.ShapeDtypeStruct]] = []

    def takes(self, size: int) -> bool:
        """Return True if numpy is to check an array of `size` bytes on its way to the devices."""
        if size > SMALL:
            self._left -= size
        return size <= SMALL or self._left >= 0

    def add(self, entry: ParameterEntry, value: jax.Array, finite: bool | None = None) -> None:
        """Note whether `value`, the parameter of `entry`, is finite; None has its devices check,
        without waiting for them."""
        checked = _is_finite(value) if finite is None else finite
        spec = jax.ShapeDtypeStruct(value.shape, value.dtype)
        self._found.append((entry, checked, spec))

    def close(self) -> None:
        """Raise UserError with the first tensor that holds NaN or an infinite number."""
        for entry, finite, spec in self._found:
            if not bool(finite):
                raise UserError(describe_bad(self.files, entry, spec))


@jax.jit
def _is_finite(value: jax.Array) -> jax.Array:
    return jnp.isfinite(value).all()


def describe_bad(
    files: SafetensorsFolder, entry: ParameterEntry, spec: jax.ShapeDtypeStruct
) -> str:
    """Describe the entry's tensor that is not finite: its file, name and first bad index."""
    for name, shape in entry.op.shapes(spec.shape).items():
        stored, array = files.tensors[name], files.fetch(name, full_index(shape))
        where = f"{stored.file}: tensor {shorten(name, 200)} {shape}"
        bad = ~np.isfinite(array)
        count = int(bad.sum())
        if count:
            first = np.unravel_index(int(bad.argmax()), shape) if shape else ()
            value = array[first]
            return (
                f"{where} holds {count:,} value{'s' * (count > 1)} of NaN or infinity, the first"
                f" {float(value)} at {[int(i) for i in first]}: the file is damaged, or of training"
                " that went astray; download it again, or take an earlier checkpoint"
            )
        if not np.isfinite(np.asarray(array).astype(spec.dtype)).all():
            return (
                f"{where} of {stored.dtype} holds values that {np.dtype(spec.dtype)} cannot; choose"
                " another model.param_dtype"
            )
    return f"{Path(files.path)}: {entry.param} is not finite"
