"""Everything that this package imports from Pallas Mosaic GPU, and when it can be used.

The Mosaic GPU interface changes between jax releases, so kernels take its names from here only.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxtrain_kernels.lowered_kernels import keep_lowered

try:
    import jax.experimental.pallas.mosaic_gpu as plgpu
except ImportError:  # a jax without Mosaic GPU: `require_hopper` declines
    plgpu = None

TESTED = (0, 11)  # the jax series that the kernels are written and tested for
if plgpu is not None and jax.__version_info__[:2] == TESTED:
    from jax._src.pallas.mosaic_gpu import lowering

    keep_lowered(lowering)
ZERO_BYTES = 32768  # of one copy in `zeros`
TARGETS = ("H100", "H200", "H800", "GH200", "H20")


def require_hopper() -> None:
    """Raise NotImplementedError with the reason unless Mosaic kernels for sm_90a can run here."""
    if plgpu is None or jax.__version_info__[:2] != TESTED:
        series = ".".join(map(str, TESTED))
        raise NotImplementedError(f"written for jax {series}, found {jax.__version__}")
    if not on_hopper():
        raise NotImplementedError(f"needs an NVIDIA Hopper GPU, the device is {device_kind()!r}")
    require_local()


def on_hopper() -> bool:
    """True if the program being traced is for Hopper GPUs."""
    return any(target in device_kind() for target in TARGETS)


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
    reductions: bool = True,
    onto: tuple[jax.Array, ...] = (),
):
    """`kernel` on arrays, over a grid of one named axis of thread blocks.

    `reductions`: some may be over all warps of a warpgroup, for which 2 KiB of shared memory are
    set aside; those along rows of scores are not.
    Each has `warpgroups` that compute and one more that moves memory: axis "group". `arrays` and
    `scratch` are lists of trees; the kernel gets references to the arrays, to the results and to
    the scratch memory in the same trees. Returns the tree of `out_type`; with `onto`, which is what
    the first results hold before (the others begin undefined), a list of these and those of
    `out_type`.
    """
    ((axis, size),) = grid.items()
    options = {} if reductions else {"reduction_scratch_bytes": 0}
    options |= {"lowering_semantics": plgpu.LoweringSemantics.Lane} if by_lane else {}
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
        compiler_params=plgpu.CompilerParams(approx_math=True, **options),
    )
    if not onto:
        return run(*arrays)
    # Refs are read and written in place: the kernel adds to arrays that already hold numbers.
    held = [jax.new_ref(x) for x in onto]
    outputs = run(*arrays, *held)
    return [*map(jax.freeze, held), *outputs]


def zeros(shape: tuple[int, ...], dtype) -> jax.Array:
    """jnp.zeros of whole pieces of 32 KiB, written by TMA."""
    size = math.prod(shape)
    lanes = ZERO_BYTES // jnp.dtype(dtype).itemsize
    assert size % lanes == 0, (shape, dtype)
    pieces = size // lanes
    # TMA writes are limited by memory; two thread blocks per multiprocessor keep it busy.
    programs = min(pieces, 2 * num_cores())

    def kernel(out, piece):
        piece[...] = jnp.zeros(lanes, dtype)
        plgpu.commit_smem()

        @pl.loop(0, pl.cdiv(pieces - lax.axis_index("program"), jnp.int32(programs)))
        def _(i):
            piece_index = lax.axis_index("program") + i * programs
            plgpu.copy_smem_to_gmem(piece, out.at[piece_index])

        plgpu.wait_smem_to_gmem(0)

    out_type, scratch = jax.ShapeDtypeStruct((pieces, lanes), dtype), plgpu.SMEM((lanes,), dtype)
    grid = {"program": programs}
    return launch(kernel, "zeros", out_type, [scratch], [], grid=grid, warpgroups=0).reshape(shape)


def tanh(x):
    """In float32 to 1e-6: the hardware's own instruction has only 11 bits."""
    return 1.0 - 2.0 / (1.0 + jnp.exp2(x * 2.885390081777927))  # 2 / ln 2


def nearest_int(x, layout):
    """int32 nearest to float32 in [-2^31, 2^31), for an array in `layout`: one instruction for the
    four of jnp.round and astype."""

    # Names what it does: tests interpret it.
    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.int32, layout=layout)
    )
    def nearest_int(context, array):
        from jaxlib.mlir import ir

        kind = ir.IntegerType.get_signless(32)
        instruction = kind, "cvt.rni.s32.f32 $0, $1;", "=r,f"
        return array._pointwise(lambda x: _each(x, *instruction), output_is_signed=True)

    return nearest_int(x)


def _each(register, kind, text: str, constraints: str):
    """PTX for every number of a register of an array."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm, vector

    shape = ir.VectorType(register.type).shape
    out = llvm.mlir_undef(ir.VectorType.get(shape, kind))
    for i in range(*shape):
        position = {"dynamic_position": [], "static_position": [i]}
        number = vector.extract(register, **position)
        number = llvm.inline_asm(kind, [number], text, constraints, has_side_effects=False)
        out = vector.insert(number, out, **position)
    return out


EXP2 = (0.6931241750717163, 0.24024099111557007, 0.055906426161527634, 0.009582852944731712)
"""1 + f (EXP2[0] + f (EXP2[1] + ...)) is 2^f within 3e-6 of it for |f| <= 1/2."""
NEAREST = 1.5 * 2.0**23  # adding it rounds to an integer, which is in the last bits then


def polynomial_exp2(x):
    """2^x of float32 x < 128 by additions and multiplications, within 3e-6 of it; 0 from -127 on
    downwards, as of -inf."""
    x = jnp.maximum(x, -127.0)
    integer = jnp.round(x)
    f = x - integer
    value = jnp.full_like(f, EXP2[-1])
    for factor in (*EXP2[-2::-1], 1.0):
        value = value * f + factor
    # Adding to the exponent bits multiplies by 2^integer, exactly for normal numbers.
    bits = lax.bitcast_convert_type(value, jnp.int32) + (integer.astype(jnp.int32) << 23)
    return lax.bitcast_convert_type(bits, jnp.float32)


def exp2_partly(x, layout, every: int):
    """2^x of float32 x < 128 in `layout`: each `every`-th register as `polynomial_exp2`, for of
    the hardware's own a multiprocessor makes 16 while it does 128 additions. NaN gives either NaN
    or the largest float32, which is infinite in bfloat16."""
    steps = [
        "max.NaN.f32 x, $1, 0fC2FE0000;",
        f"add.rn.f32 t, x, {_hexadecimal(NEAREST)};",
        f"sub.rn.f32 f, t, {_hexadecimal(NEAREST)};",
        "sub.rn.f32 f, x, f;",
        f"mov.f32 x, {_hexadecimal(EXP2[-1])};",
        *(f"fma.rn.f32 x, x, f, {_hexadecimal(c)};" for c in (*EXP2[-2::-1], 1.0)),
        "mov.b32 a, t; shl.b32 a, a, 23; mov.b32 b, x; add.s32 a, a, b; mov.b32 $0, a;",
    ]
    polynomial = "{ .reg .f32 x, t, f; .reg .b32 a, b; " + " ".join(steps) + " }"

    @plgpu.inline_mgpu(
        arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout)
    )
    def exp2_partly(context, array):
        from jaxlib.mlir import ir

        count = itertools.count(1)

        def power(register):
            text = "ex2.approx.ftz.f32 $0, $1;" if next(count) % every else polynomial
            return _each(register, ir.F32Type.get(), text, "=f,f")

        return array._pointwise(power)

    return exp2_partly(x)


def _hexadecimal(number: float) -> str:
    """A float32 as PTX writes it."""
    return f"0f{np.float32(number).view(np.uint32):08X}"


def opaque(number):
    """Return int32 `number` as a value the compiler cannot see through: results are computed where
    it is used, instead of ahead of a loop into registers that then spill."""
    return lax.optimization_barrier(number)


def swizzled(shape, dtype, columns: int | None = None):
    """Shared memory in the swizzled layout of TMA and wgmma, whose rows are 128 bytes; or fewer,
    where pieces of `columns` are read."""
    return plgpu.SMEM(shape, dtype, transforms=swizzle(dtype, columns))


def swizzle(dtype, columns: int | None = None):
    """The transforms of that layout."""
    itemsize = jnp.dtype(dtype).itemsize
    lanes = 128 // itemsize if columns is None else columns
    return (plgpu.TilingTransform((8, lanes)), plgpu.SwizzleTransform(lanes * itemsize))


def device_kind() -> str:
    """Kind of the device that the program being traced is for: the mesh's, else the default one."""
    mesh = jax.sharding.get_abstract_mesh()
    if getattr(mesh, "abstract_device", None) is not None:
        return mesh.abstract_device.device_kind
    default = jax.config.jax_default_device
    if isinstance(default, jax.Device):
        return default.device_kind
    return jax.devices()[0].device_kind
