"""Triton kernels on a CPU, in numpy: Triton's own interpreter, its bfloat16 put right.

That interpreter (3.9) multiplies the bit patterns of bfloat16 in tl.dot and cuts float32 off where
it has to round. Arithmetic on bfloat16 elsewhere stays wrong there: kernels widen first, as they do
on a GPU. Results start as NaN (integers -1), so that what a kernel does not write shows. For tests:
programs run one after the other, so races are not seen.
"""

import functools

import jax
import ml_dtypes
import numpy as np


def run(kernel, arrays, out_type, grid: int, constants: dict):
    """Run a kernel as `triton_call.launch` does."""
    _extend()
    values = [x[...] if isinstance(x, jax.Ref) else x for x in arrays]
    refs = [i for i, x in enumerate(arrays) if isinstance(x, jax.Ref)]
    leaves, tree = jax.tree.flatten(out_type)
    changed = [jax.ShapeDtypeStruct(values[i].shape, values[i].dtype) for i in refs]

    def call(*arguments):
        inputs = [_Memory(np.array(x, order="C")) for x in arguments]
        # NaN and -1 show what a kernel does not write.
        results = [_Memory(_unwritten(leaf)) for leaf in leaves]
        kernel[(grid,)](*inputs, *results, **constants)
        return [m.array for m in (*results, *(inputs[i] for i in refs))]

    outputs = jax.pure_callback(call, [*leaves, *changed], *values)
    for i, value in zip(refs, outputs[len(leaves) :], strict=True):
        arrays[i][...] = value
    return tree.unflatten(outputs[: len(leaves)])


def _unwritten(leaf):
    dtype = np.dtype(leaf.dtype)
    return np.full(leaf.shape, -1 if np.issubdtype(dtype, np.integer) else np.nan, dtype)


class _Memory:
    """An array as the interpreter wants to see a tensor."""

    def __init__(self, array: np.ndarray):
        self.array = array

    @property
    def dtype(self):
        return self.array.dtype.name

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *_, **__):
        return _Memory(self.array)

    def set_(self, storage, *_):
        self.array = storage.array
        return self

    def storage_offset(self):
        return 0

    def size(self):
        return self.array.shape

    def stride(self):
        return self.array.strides

    def copy_(self, source):
        """Do nothing: results were written to the array itself."""


@functools.cache
def _extend() -> None:
    """bfloat16 in dots and conversions, once."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    original = builder.cast_impl

    def wide(x):
        if x.dtype.scalar != tl.bfloat16:
            return x.data
        return x.data.view(ml_dtypes.bfloat16).astype(np.float32)

    def cast(self, source, target):
        old, new = source.dtype.scalar, target.scalar
        if old == new or tl.bfloat16 not in (old, new):
            return original(self, source, target)
        data = wide(source)
        if new == tl.bfloat16:
            return handle(data.astype(ml_dtypes.bfloat16).view(np.uint16), new)
        return handle(data.astype(interpreter._get_np_dtype(new)), new)

    def dot(self, a, b, c, *_):
        # The accumulator's dtype, as on the hardware: bfloat16 products are exact in float32.
        product = np.matmul(wide(a), wide(b), dtype=c.data.dtype)
        return handle(product + c.data, c.dtype.scalar)

    builder.cast_impl, builder.create_dot = cast, dot
