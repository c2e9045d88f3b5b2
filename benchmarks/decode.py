"""decode_attention's part of kernels.py: times, errors and variants.

A call is timed inside a scan over the layers of a cache, as the sampler makes it. `tb_s` counts one
read of the keys and values that are seen; `read` is how fast XLA sums one layer's keys after the
other. `--impl gpu_int8 gpu_fp8` are the op on caches of 8 bits, of which codes and scales are
counted; `sweep` and `sweep_int8` try other sizes of its tiles. The peers get one layer's cache in
the order that they like best: PyTorch's attention with a mask, which reads all slots, and compiled
FlexAttention, which skips blocks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtrain_kernels import decode_attention
from jaxtrain_kernels.decode_attention import gpu
from timing import jax_ms, torch_ms

from jaxtrain.layers.kv_cache import store

STORED = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
SWEEP = [
    *((64, part, 4, stages) for part in (128, 256, 512) for stages in (3, 4)),
    *((64, 256, 4, 2), (64, 256, 8, 3), (32, 256, 4, 3)),
    *((128, 256, 4, 3), (128, 256, 8, 3), (128, 512, 8, 3)),
]
"""(keys, part, warps, stages)."""
SWEEP_CODES = [
    *((128, part, 4, stages) for part in (128, 256) for stages in (3, 4)),
    *((64, 256, 4, stages) for stages in (3, 4)),
]


def make_arrays(case):
    """q, k, v in bfloat16, drawn on the device, alike where rows share slots; until and since."""
    cache = (case.layers, case.rows, case.slots, case.kv_heads, case.head_dim)
    shapes = ((case.rows, case.heads, case.head_dim), cache, cache)
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True)]
    if sharing := case.sharing():
        mine_BS = np.arange(case.slots) >= sharing["shared"][:, None]
        arrays[1:] = (
            jnp.where(mine_BS[:, :, None, None], x, x[:, sharing["leader"]]) for x in arrays[1:]
        )
    until, since = (jnp.asarray(x) for x in case.interval())
    return *arrays, until, None if case.window is None else since


def store_arrays(arrays, stored: str):
    """The same with k and v in 8 bits as the sampler keeps them, and their scales behind."""
    q, k, v, until, since = arrays
    (k, k_scale), (v, v_scale) = (
        jax.jit(store, static_argnums=1)(x, STORED[stored]) for x in (k, v)
    )
    return q, k, v, until, since, k_scale, v_scale


def time_layers(case, attend, q, k, v, until, since, *scales) -> dict:
    """What jax_ms finds, for one of 4 passes over all layers."""

    def layers(q, k, v, until, since, *scales):
        named = dict(zip(("k_scale", "v_scale"), scales, strict=bool(scales)))

        def step(q, layer):
            return attend(q, k, v, layer, until, since, **named), None

        return lax.scan(step, q, jnp.arange(4 * case.layers, dtype=jnp.int32) % case.layers)[0]

    found = jax_ms(layers, q, k, v, until, since, *scales)
    return found | {"ms": found["ms"] / (4 * case.layers)}


def time_reading(case, k) -> dict:
    def total(k):
        def step(sums, layer):
            one = lax.dynamic_index_in_dim(k, layer, keepdims=False)
            return sums + one.astype(jnp.float32).sum((1, 2, 3)), None

        layers = jnp.arange(case.layers, dtype=jnp.int32)
        return lax.scan(step, jnp.zeros(case.rows), layers)[0]

    found = jax_ms(total, k)
    return found | {"ms": found["ms"] / case.layers}


def run_decode_attention(case, impls, report):
    arrays = make_arrays(case)
    labels = {"op": "decode_attention", "case": case.name}
    one_layer = arrays[1].nbytes / case.layers
    timing = functools.partial(time_reading, case, arrays[1])
    report.timed(one_layer, timing, "tb_s", **labels, impl="read")
    for impl in (impl for impl in impls if impl != "torch"):
        name, _, stored = impl.partition("_")
        given = store_arrays(arrays, stored) if stored else arrays
        read = case.read_bytes(1) * (1 + 4 / case.head_dim) if stored else case.read_bytes()
        if name == "sweep":
            sweep(case, given, read, labels, report)
            continue
        options = {n: jnp.asarray(x) for n, x in case.sharing().items()}
        attend = functools.partial(decode_attention, softcap=case.softcap, impl=name, **options)
        timing = functools.partial(time_layers, case, attend, *given)
        report.timed(read, timing, "tb_s", **labels, impl=impl)
    del arrays, given
    if "torch" in impls and case.group == 1:
        import torch_peers

        for name, make in {
            "torch_sdpa": torch_peers.decode_sdpa,
            "torch_flex": torch_peers.decode_flex,
        }.items():
            timing = functools.partial(lambda make: torch_ms(make(case)), make)
            report.timed(case.read_bytes(), timing, "tb_s", **labels, impl=name)


def sweep(case, arrays, read, labels, report):
    k = arrays[1]
    for keys, part, warps, stages in SWEEP_CODES if k.dtype.itemsize == 1 else SWEEP:
        config = gpu.Config(keys, part, warps, stages)

        def attend(q, k, v, layer, until, since, config=config, **scales):
            options = {"scale": case.head_dim**-0.5, "softcap": case.softcap} | scales
            of_one = (None if x is None else x[:, None] for x in (until, since))
            return gpu.run(config, q[:, None], k, v, layer, *of_one, **options)[:, 0]

        timing = functools.partial(time_layers, case, attend, *arrays)
        name = f"{k.dtype}_keys{keys}_part{part}_warps{warps}_stages{stages}"
        report.timed(read, timing, "tb_s", **labels, impl="gpu", config=name)


def decode_attention_errors(case, impls, report):
    """Largest errors over the layers; the plain maths runs in bfloat16. What codes stand for is
    exact."""
    arrays = make_arrays(case)
    sharing = {n: jnp.asarray(x) for n, x in case.sharing().items()}

    def results(impl, dtype, stored, widen=False):
        given = store_arrays(arrays, stored) if stored else arrays

        @jax.jit
        def one(q, k, v, until, since, *scales, layer):
            k, v, *scales = (lax.dynamic_index_in_dim(x, layer) for x in (k, v, *scales))
            if widen and stored:
                pairs = zip((k, v), scales, strict=True)
                k, v = (codes.astype(jnp.float32) * scale[..., None] for codes, scale in pairs)
                scales = []
            if not scales:
                k, v = k.astype(dtype), v.astype(dtype)
            options = dict(zip(("k_scale", "v_scale"), scales, strict=bool(scales)))
            options |= sharing | {"softcap": case.softcap, "impl": impl}
            return decode_attention(q.astype(dtype), k, v, 0, until, since, **options)

        layers = [one(*given, layer=i).astype(jnp.float32) for i in range(case.layers)]
        return jnp.stack(layers)

    for impl in (impl for impl in impls if impl.partition("_")[0] not in ("torch", "sweep")):
        name, _, stored = impl.partition("_")
        with jax.default_matmul_precision("highest"):
            exact = results("reference", jnp.float32, stored, widen=True)
        plain = results("xla", jnp.bfloat16, stored, widen=True)
        found = results(name, jnp.bfloat16, stored)
        labels = {"op": "decode_attention", "case": case.name, "impl": impl}
        report.errors(["out"], [found], [exact], [plain], **labels)
