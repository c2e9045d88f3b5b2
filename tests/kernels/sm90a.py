"""Compile Mosaic kernels to Hopper machine code without a GPU: what ptxas says about each.

Run by test_kernels_compile.py in a process of its own, because it needs jax's CUDA plugin where the
tests run on the CPU: `python sm90a.py` prints {case, kernel, spills, serialized} lines as JSON.
"""

import contextlib
import json
import os
import re
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

H200 = """gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 device_address_bits: 64 pcie_bandwidth: 34359738368
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 ecc_enabled: true
  device_vendor: "NVIDIA Corporation" platform_version: "Compute Capability 9.0a"
  name: "NVIDIA H200" driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0" }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def make_mesh() -> Mesh:
    """Build a mesh of one absent H200."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology="1x1x1", target_config=H200
    )
    return Mesh(np.array(topology.devices), ("x",))


def compile_for_h200(function, *shapes):
    """The compiled program for one H200 of a function of ShapeDtypeStructs."""
    mesh = make_mesh()
    full = NamedSharding(mesh, PartitionSpec())
    placed = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=full) for s in shapes]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(function).trace(*placed).lower().compile()


@contextlib.contextmanager
def captured_output():
    """Capture everything the process writes, C++ included: a list with one string after."""
    actual = []
    with tempfile.TemporaryFile("w+") as sink:
        saved = os.dup(1), os.dup(2)
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
        try:
            yield actual
        finally:
            for number, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            sink.seek(0)
            actual.append(sink.read())


def report(case, function, *shapes):
    with captured_output() as output:
        compiled = compile_for_h200(function, *shapes)
    names = re.findall(r"entry function '(\w+)_mosaic_gpu_kernel'", output[0])
    spills = [int(n) for n in re.findall(r"stack frame, (\d+) bytes spill stores", output[0])]
    serial = re.findall(r"wgmma.* are serialized .* '(\w+)_mosaic_gpu_kernel'", output[0])
    row = {"case": case, "temp": compiled.memory_analysis().temp_size_in_bytes}
    for name, spill in zip(names, spills, strict=True):
        actual = {"kernel": name, "spills": spill, "serialized": name in serial}
        print(json.dumps(row | actual), flush=True)


def attention_step(head_dim, impl="mosaic_gpu", v_dim=None, kv_heads=8, **settings):
    from jaxtrain_kernels import Context, attention

    def loss(q, k, v, until, positions):
        context = Context(until, positions=positions)
        out = attention(q, k, v, context, impl=impl, **settings)
        return out.astype(jnp.float32).sum()

    sizes = (16, head_dim), (kv_heads, head_dim), (kv_heads, v_dim or head_dim)
    heads = [jax.ShapeDtypeStruct((1, 8192, *size), jnp.bfloat16) for size in sizes]
    metadata = [jax.ShapeDtypeStruct((1, 8192), jnp.int32)] * 2
    return jax.grad(loss, (0, 1, 2)), *heads, *metadata


def weighted_logp_step(**settings):
    from jaxtrain_kernels import weighted_logp

    def loss(hidden, head, targets, weights):
        return weighted_logp(hidden, head, targets, weights, impl="mosaic_gpu", **settings)[0]

    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1024, 1024), (151936, 1024))]
    per_token = [jax.ShapeDtypeStruct((1024,), t) for t in (jnp.int32, jnp.float32)]
    return jax.grad(loss, (0, 1)), *arrays, *per_token


def logp_gather_step(**settings):
    from jaxtrain_kernels import logp_gather

    def loss(hidden, head, targets, temperature):
        if settings:
            settings["temperature"] = temperature
        out = logp_gather(hidden, head, targets, impl="mosaic_gpu", **settings)
        return (out.logp + out.entropy).sum()

    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8192, 1024), (151936, 1024))]
    targets = jax.ShapeDtypeStruct((8192,), jnp.int32)
    temperature = jax.ShapeDtypeStruct((8192,), jnp.float32)
    return jax.grad(loss, (0, 1)), *arrays, targets, temperature


def moe_step(
    rank: int | None = None, sizes: tuple[int, ...] = (2048, 768, 128), clamped: bool = False
):
    from jaxtrain_kernels import Adapters, moe_ffn
    from jaxtrain_kernels.grouped_matmul.ffn import Biases, Clamped

    T, (D, F, E) = 8192, sizes
    sizes = [(D, F), (D, F), (F, D)]
    x, *weights = (
        jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((T, D), *((E, *size) for size in sizes))
    )
    gates, experts = (jax.ShapeDtypeStruct((T, 8), t) for t in (jnp.float32, jnp.int32))
    shapes = [s for i, o in sizes for s in ((E, i, rank), (E, rank, o))] if rank else []
    factors = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]

    def loss(x, experts, gates, *rest):
        adapters = Adapters(*zip(rest[3::2], rest[4::2], strict=True))
        options = {"adapters": adapters, "freeze_experts": bool(rank), "impl": "mosaic_gpu"}
        if clamped:
            ones = jnp.ones((E, F), jnp.float32)
            options |= {"activation": Clamped(), "biases": Biases(ones, ones)}
        return moe_ffn(x, experts, gates, *rest[:3], **options).astype(jnp.float32).sum()

    trained = (0, 2, *range(6, 12)) if rank else (0, 2, 3, 4, 5)
    return jax.grad(loss, trained), x, experts, gates, *weights, *factors


def gated_delta_step(packed: bool = False):
    from jaxtrain_kernels import gated_delta

    def loss(q, k, v, g, beta, until, prev):
        rows = (until, prev if packed else None)
        out, _ = gated_delta(q, k, v, g, beta, *rows, impl="mosaic_gpu")
        return out.astype(jnp.float32).sum()

    heads = [jax.ShapeDtypeStruct((1, 8192, n, 128), jnp.bfloat16) for n in (16, 16, 32)]
    gates = [jax.ShapeDtypeStruct((1, 8192, 32), jnp.float32)] * 2
    return (
        jax.value_and_grad(loss, range(5)),
        *heads,
        *gates,
        *[jax.ShapeDtypeStruct((1, 8192), jnp.int32)] * 2,
    )


def rotate_heads_step(head_dim=128, rotated=None, normed=True):
    from jaxtrain_kernels import rotate_heads

    N, K = 16, 8

    def loss(x, cos, sin, *scales):
        parts = rotate_heads(x, cos, sin, (N, K), head_dim, scales or None, impl="mosaic_gpu")
        return sum(part.astype(jnp.float32).sum() for part in parts)

    x = jax.ShapeDtypeStruct((1, 8192, (N + 2 * K) * head_dim), jnp.bfloat16)
    angles = [jax.ShapeDtypeStruct((1, 8192, (rotated or head_dim) // 2), jnp.float32)] * 2
    scales = [jax.ShapeDtypeStruct((head_dim,), jnp.float32)] * (2 if normed else 0)
    trained = (0, 3, 4) if normed else 0
    return jax.value_and_grad(loss, trained), x, *angles, *scales


def main():
    for head_dim in (64, 128):
        report(f"rotate_heads d{head_dim}", *rotate_heads_step(head_dim))
        report(f"rotate_heads d{head_dim} bare", *rotate_heads_step(head_dim, normed=False))
    report("rotate_heads d128 partial", *rotate_heads_step(rotated=64))
    report("gated_delta", *gated_delta_step())
    report("gated_delta packed", *gated_delta_step(packed=True))
    report("moe", *moe_step())
    report("moe lora", *moe_step(rank=16))
    report("moe uneven", *moe_step(sizes=(2880, 2880, 32)))
    report("moe clamped", *moe_step(sizes=(2880, 2880, 32), clamped=True))
    report("logp_gather", *logp_gather_step())
    report("logp_gather softcap temperature", *logp_gather_step(softcap=30.0))
    report("weighted_logp", *weighted_logp_step())
    report("weighted_logp softcap", *weighted_logp_step(softcap=30.0))
    for head_dim, v_dim in ((64, 64), (128, 128), (192, 128), (256, 256), (512, 512)):
        for name, settings in {
            "": {},
            "softcap": {"softcap": 30.0},
            "window": {"window": 64},
        }.items():
            report(
                f"attention d{head_dim} {name}".strip(),
                *attention_step(head_dim, v_dim=v_dim, **settings),
            )
    # Its query heads are shared by several thread blocks, whose gradients are parts of a sum.
    report("attention d512 few keys", *attention_step(512, kv_heads=2))


if __name__ == "__main__":
    main()
