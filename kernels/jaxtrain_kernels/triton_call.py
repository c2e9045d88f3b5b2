"""Triton kernels called through jax-triton: THE way in, and when it can be used.

For NVIDIA GPUs without Mosaic kernels (A100, L4, RTX, B200). Triton is optional: an op's bodies are
in its `triton_kernels.py`, which imports it at the top and is itself imported by functions that
`require_triton` has let through.

Without a GPU: with TRITON_INTERPRET=1 set before Triton is imported, `launch` runs bodies on the
CPU (`triton_interpreter.py`), and `compile_for(80)` lowers a program for a GPU that is not there.
"""

import contextlib
import contextvars
import functools
import importlib.util
import os

import jax

from jaxtrain_kernels.mosaic import device_kind, require_local

PACKAGES = ("triton", "jax_triton")
INSTALL = "pip install 'jaxtrain[cuda,triton]'"
SHARED_MEMORY = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
"""KiB that a thread block may have, by compute capability x 10 (CUDA programming guide)."""

_target = contextvars.ContextVar("target", default=None)


def interpreted() -> bool:
    """Do kernels run on the CPU, in Triton's interpreter?"""
    return os.environ.get("TRITON_INTERPRET") == "1"


def require_triton() -> None:
    """Raise NotImplementedError with the reason unless Triton kernels can run here."""
    needed = PACKAGES[:1] if interpreted() else PACKAGES
    missing = [name for name in needed if not _installed(name)]
    if missing:
        raise NotImplementedError(f"needs {' and '.join(missing)}: {INSTALL}")
    if interpreted():
        return
    if _target.get() is None and "NVIDIA" not in device_kind():
        raise NotImplementedError(f"needs an NVIDIA GPU, the device is {device_kind()!r}")
    if capability() not in SHARED_MEMORY:
        number = capability() / 10
        raise NotImplementedError(f"written for compute capability 8.0 to 12.1, found {number}")
    require_local()


@functools.cache
def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@contextlib.contextmanager
def compile_for(number: int):
    """Programs lowered inside are for a GPU of this compute capability x 10."""
    token = _target.set(number)
    try:
        yield
    finally:
        _target.reset(token)


def capability() -> int:
    """Compute capability x 10 of the GPU that the program being traced is for; the interpreter's
    is 80."""
    if _target.get() is not None:
        return _target.get()
    if interpreted():
        return 80
    major, minor = jax.devices()[0].compute_capability.split(".")
    return 10 * int(major) + int(minor)


def launch(kernel, arrays, out_type, *, grid: int, warps: int, stages: int, **constants):
    """`kernel` over a grid of one axis; what it wrote, in the tree of `out_type`.

    Its parameters: a pointer for each of `arrays`, one for each leaf of `out_type`
    (ShapeDtypeStructs), then the `constants` by name. Of `arrays` a jax.Ref is read and written in
    place. What the kernel leaves out of its results is undefined.
    """
    if interpreted():
        from jaxtrain_kernels.triton_interpreter import run

        return run(kernel, arrays, out_type, grid, constants)
    import jax_triton

    return jax_triton.triton_call(
        *arrays,
        kernel=kernel,
        out_type=out_type,
        grid=grid,
        name=kernel.__name__,
        compute_capability=capability(),
        # PTX of a version that drivers of CUDA 13.0 read; newer Tritons would write a newer one.
        backend_options={"num_warps": warps, "num_stages": stages, "ptx_version": 90},
        **constants,
    )


def fitting(stages: int, stage_bytes: int) -> int:
    """Most stages up to `stages`, at least 2, of which the device's shared memory holds all."""
    return max(2, min(stages, SHARED_MEMORY[capability()] * 1024 // stage_bytes))
