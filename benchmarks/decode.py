"""decode_attention's part of kernels.py: times, errors and variants.

A call is timed inside a scan over the layers of a cache, as the sampler makes it. `tb_s` counts one
read of the keys and values that are seen; `read` is how fast XLA sums one layer's keys after the
other. The peers get one layer's cache in the order that they like best: PyTorch's attention
with a mask, which reads all slots, and compiled FlexAttention, which skips blocks.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtrain_kernels import decode_attention
from jaxtrain_kernels.decode_attention import gpu
from timing import jax_ms, torch_ms

SWEEP = [
    *((64, part, 4, stages) for part in (128, 256, 512) for stages in (3, 4)),
    *((64, 256, 4, 2), (64, 256, 8, 3), (32, 256, 4, 3)),
    *((128, 256, 4, 3), (128, 256, 8, 3), (128, 512, 8, 3)),
]
"""(keys, part, warps, stages)."""


def make_arrays(case):
    """q, k, v in bfloat16, drawn on the device; until and since."""
    cache = (case.layers, case.rows, case.slots, case.kv_heads, case.head_dim)
    shapes = ((case.rows, case.heads, case.head_dim), cache, cache)
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = [jax.random.normal(key, s, jnp.bfloat16) for key, s in zip(keys, shapes, strict=True)]
    until, since = (jnp.asarray(x) for x in case.interval())
    return *arrays, until, None if case.window is None else since


def time_layers(case, attend, q, k, v, until, since) -> dict:
    """What jax_ms finds, for one of 4 passes over all layers."""

    def layers(q, k, v, until, since):
        def step(q, layer):
            return attend(q, k, v, layer, until, since), None

        return lax.scan(step, q, jnp.arange(4 * case.layers, dtype=jnp.int32) % case.layers)[0]

    found = jax_ms(layers, q, k, v, until, since)
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
    for impl in (impl for impl in impls if impl not in ("torch", "sweep")):
        attend = functools.partial(decode_attention, softcap=case.softcap, impl=impl)
        timing = functools.partial(time_layers, case, attend, *arrays)
        report.timed(case.read_bytes(), timing, "tb_s", **labels, impl=impl)
    if "sweep" in impls:
        sweep(case, arrays, labels, report)
    del arrays
    if "torch" in impls:
        import torch_peers

        for name, make in {
            "torch_sdpa": torch_peers.decode_sdpa,
            "torch_flex": torch_peers.decode_flex,
        }.items():
            timing = functools.partial(lambda make: torch_ms(make(case)), make)
            report.timed(case.read_bytes(), timing, "tb_s", **labels, impl=name)


def sweep(case, arrays, labels, report):
    for keys, part, warps, stages in SWEEP:
        config = gpu.Config(keys, part, warps, stages)

        def attend(q, k, v, layer, until, since, config=config):
            options = {"scale": case.head_dim**-0.5, "softcap": case.softcap}
            of_one = (x[:, None] for x in (until, since))
            return gpu.run(config, q[:, None], k, v, layer, *of_one, **options)

        timing = functools.partial(time_layers, case, attend, *arrays)
        name = f"keys{keys}_part{part}_warps{warps}_stages{stages}"
        report.timed(case.read_bytes(), timing, "tb_s", **labels, impl="gpu", config=name)


def decode_attention_errors(case, impls, report):
    """Largest errors over the layers; the plain maths runs in bfloat16."""
    q, k, v, until, since = make_arrays(case)

    def results(impl, dtype):
        @jax.jit
        def one(q, k, v, layer):
            k, v = (lax.dynamic_index_in_dim(x, layer).astype(dtype) for x in (k, v))
            options = {"softcap": case.softcap, "impl": impl}
            return decode_attention(q.astype(dtype), k, v, 0, until, since, **options)

        return jnp.stack([one(q, k, v, i).astype(jnp.float32) for i in range(case.layers)])

    with jax.default_matmul_precision("highest"):
        exact = results("reference", jnp.float32)
    plain = results("xla", jnp.bfloat16)
    for impl in (impl for impl in impls if impl not in ("xla", "torch", "sweep")):
        found = results(impl, jnp.bfloat16)
        labels = {"op": "decode_attention", "case": case.name, "impl": impl}
        report.errors(["out"], [found], [exact], [plain], **labels)
