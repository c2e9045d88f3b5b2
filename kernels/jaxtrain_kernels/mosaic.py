"""Everything that this package imports from Pallas Mosaic GPU, and when it can be used.

The Mosaic GPU interface changes between jax releases, so kernels take its names from here only.
"""

import jax
import jax.numpy as jnp
from jax import lax

try:
    import jax.experimental.pallas.mosaic_gpu as plgpu
except ImportError:  # a jax without Mosaic GPU: `require_hopper` declines
    plgpu = None

TESTED = (0, 11)  # the jax series that the kernels are written and tested for
TARGETS = ("H100", "H200", "H800", "GH200", "H20")


def require_hopper() -> None:
    """Raise NotImplementedError with the reason unless Mosaic kernels for sm_90a can run here."""
    if plgpu is None or jax.__version_info__[:2] != TESTED:
        series = ".".join(map(str, TESTED))
        raise NotImplementedError(f"written for jax {series}, found {jax.__version__}")
    kind = device_kind()
    if not any(target in kind for target in TARGETS):
        raise NotImplementedError(f"needs an NVIDIA Hopper GPU, the device is {kind!r}")
    require_local()


def require_local() -> None:
    """Raise NotImplementedError if arrays here may be spread over devices of a mesh axis."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = jax.sharding.AxisType.Manual
    shared = [
        name
        for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
        if size > 1 and kind != manual
    ]
    if shared:
        raise NotImplementedError(
            f"the mesh axes {shared} have several devices: call it inside shard_map"
        )


def num_cores() -> int:
    """Streaming multiprocessors of the device that the program being traced is for."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is not None:
        return device.num_cores or 132
    return getattr(jax.devices()[0], "core_count", None) or 132


def launch(
    kernel,
    name: str,
    out_type,
    scratch,
    arrays,
    *,
    grid: dict[str, int],
    warpgroups: int,
    by_lane: bool = False,
):
    """`kernel` on arrays, over a grid of one named axis of thread blocks.

    Each has `warpgroups` that compute and one more that moves memory: axis "group". `arrays` and
    `scratch` are lists of trees; the kernel gets references to the arrays, to the results and to
    the scratch memory in the same trees.
    """
    ((axis, size),) = grid.items()
    semantics = {"lowering_semantics": plgpu.LoweringSemantics.Lane} if by_lane else {}
    run = plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch,
        grid=(size,),
        grid_names=(axis,),
        num_threads=warpgroups + 1,
        thread_name="group",
        kernel_name=name,
        # exp2, log and divisions are the hardware's own approximations.
        compiler_params=plgpu.CompilerParams(approx_math=True, **semantics),
    )
    return run(*arrays)


def tanh(x):
    """In float32 to 1e-6: the hardware's own instruction has only 11 bits."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * 2.885390081777927))  # 2 / ln 2


def opaque(number):
    """The same int32, but the compiler does not know: what follows from it is computed where it is
    used, instead of ahead of a loop into registers that then spill."""
    return lax.optimization_barrier(number)


def swizzled(shape, dtype):
    """Shared memory in the 128-byte-swizzled layout of TMA and wgmma."""
    return plgpu.SMEM(shape, dtype, transforms=swizzle(dtype))


def swizzle(dtype):
    """The transforms of that layout."""
    lanes = 128 // jnp.dtype(dtype).itemsize
    return (plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(128))


def device_kind() -> str:
    """Of the device that the program being traced is for: the mesh's, else the default one."""
    mesh = jax.sharding.get_abstract_mesh()
    if getattr(mesh, "abstract_device", None) is not None:
        return mesh.abstract_device.device_kind
    default = jax.config.jax_default_device
    if isinstance(default, jax.Device):
        return default.device_kind
    return jax.devices()[0].device_kind
