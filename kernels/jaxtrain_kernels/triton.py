"""Everything that this package imports from Pallas' Triton backend, and when it can be used.

For kernels that wait for memory: Triton's loads and small matmuls are enough there, and it takes
every NVIDIA GPU from Ampere on.
"""

import jax

from jaxtrain_kernels.mosaic import device_kind, require_local

try:
    import jax.experimental.pallas.triton as plt
except ImportError:  # a jax without it: `require_nvidia` declines
    plt = None

TESTED = ((0, 10), (0, 11))  # the jax series that the kernels are written and tested for


def require_nvidia() -> None:
    """Raise NotImplementedError with the reason unless Triton kernels can run here."""
    if plt is None or jax.__version_info__[:2] not in TESTED:
        series = " and ".join(".".join(map(str, version)) for version in TESTED)
        raise NotImplementedError(f"written for jax {series}, found {jax.__version__}")
    kind = device_kind()
    if "NVIDIA" not in kind:
        raise NotImplementedError(f"needs an NVIDIA GPU, the device is {kind!r}")
    require_local()


def require_fp8() -> None:
    """Raise NotImplementedError where Triton cannot widen float8_e4m3fn: GPUs before Ada."""
    version = getattr(jax.devices()[0], "compute_capability", "9.0")
    if float(version) < 8.9:
        raise NotImplementedError(f"float8_e4m3fn needs compute capability 8.9, found {version}")
