"""Time variants of the Triton kernels on one GPU: what its tuned tables hold comes from this.

python benchmarks/sweep_triton.py --out benchmarks/results/sweep_triton.json
python benchmarks/sweep_triton.py --kernel product --save    # and into jaxtrain_kernels/tuned

One line per kernel, case and variant; a variant that the device cannot hold says so and drops out.
"""

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from harness import Report, jax_ms
from jaxtrain_kernels import Context, autotune, triton_call
from jaxtrain_kernels.grouped_matmul import cases as moe_cases
from jaxtrain_kernels.grouped_matmul import routing
from jaxtrain_kernels.grouped_matmul import triton_gpu as grouped
from jaxtrain_kernels.logp_gather import cases as gather_cases
from jaxtrain_kernels.logp_gather import triton_gpu as gather
from jaxtrain_kernels.tree_attention import cases as attention_cases
from jaxtrain_kernels.tree_attention import triton_gpu as tree
from jaxtrain_kernels.tree_attention.gpu_tiles import Settings

GAIN = 0.99  # share of the heuristic's time that a variant must stay below to be saved
TILES = [
    *({}, {"stages": 2}, {"stages": 3}, {"stages": 4}, {"walk": 4}, {"walk": 16}),
    *({"warps": 4}, {"warps": 4, "stages": 4}),
]
STEPS = [{"step": 32, "stages": 4}, {"step": 64, "stages": 3}, {"step": 64, "stages": 2}]
WIDE = [{"columns": 256, "step": 32, "stages": 3}, {"columns": 256, "step": 64, "stages": 3}]
NARROW = [{"columns": 64, "step": 64, "stages": 3, "warps": 4}]
GATHER = [
    *({"block_d": 32, "stages": 4}, {"block_d": 64, "stages": 3}, {"tile_v": 256}),
    *({"tile_t": 64, "warps": 4}, {"tile_t": 64, "tile_v": 256}),
]
ROWS = [
    *({}, {"tile": 2048}, {"tile": 8192}, {"tile": 2048, "warps": 4}, {"warps": 16}),
    *({"programs": 4}, {"programs": 64}, {"stages": 1}, {"stages": 3}),
]
BLOCKS = [
    {},
    *(
        {"q_block": q, "k_block": k, "warps": warps, "stages": stages}
        for q, k, warps in (
            *((128, 128, 8), (128, 64, 8), (128, 64, 4), (64, 128, 8), (64, 128, 4)),
            *((64, 64, 8), (64, 64, 4), (128, 32, 8), (32, 128, 8), (64, 32, 4), (32, 64, 4)),
            (32, 32, 4),
        )
        for stages in (2, 3)
    ),
]


class Work(NamedTuple):
    """A kernel on a case."""

    table: str
    case: str
    key: dict
    near: dict
    heuristic: Any
    changes: list[dict]
    amount: float
    """Operations, or bytes read."""
    unit: str
    run: Callable
    """(config, *arrays)."""
    arrays: Callable[[], tuple]


def experts(case) -> Iterator[Work]:
    """The product with W and with its transpose, and the weights' gradient."""
    block, D, F = routing.BLOCK, case.width, case.hidden
    rows = case.tokens * case.top
    flops = 2 * rows * D * F

    def arrays():
        inputs = case.inputs()
        routed = routing.route(jnp.asarray(inputs["experts"]), case.experts, block)
        x = jnp.asarray(inputs["x"], jnp.bfloat16)
        dy_TF = jax.random.normal(jax.random.key(0), (case.tokens, F), jnp.bfloat16)
        return (
            routing.gather_in(x, routed),
            routing.gather_in(dy_TF, routed),
            jnp.asarray(inputs["w_up"], jnp.bfloat16),
            routed.segments,
        )

    key, start = {"block": block}, grouped.heuristic(block)
    up, down = {"K": D, "N": F}, {"K": F, "N": D}

    def product(config, x, dy, w, segments):
        return grouped.product(x, w, segments, config=config)

    def transposed(config, x, dy, w, segments):
        return grouped.product(dy, w, segments, transpose=True, config=config)

    def gradient(config, x, dy, w, segments):
        return grouped.weight_gradient(x, dy, segments, jnp.float32, config=config)

    changes = TILES + STEPS + WIDE + NARROW
    of_case = (flops, "tflops")
    yield Work(grouped.PRODUCT, case.name, key, up, start, changes, *of_case, product, arrays)
    yield Work(grouped.PRODUCT, case.name, key, down, start, changes, *of_case, transposed, arrays)
    changes = TILES + STEPS + NARROW
    yield Work(grouped.GRADIENT, case.name, key, up, start, changes, *of_case, gradient, arrays)


def vocabulary(case) -> Iterator[Work]:
    """The logits and their statistics: the kernel that the other two are like."""
    T, D, V = case.tokens, case.width, case.vocabulary

    def arrays():
        inputs = case.inputs()
        hidden, head = (jnp.asarray(inputs[n], jnp.bfloat16) for n in ("hidden", "head"))
        return hidden, head, jnp.ones((T,), jnp.float32)

    def run(config, hidden, head, factor):
        return gather.statistics(hidden, head, factor, softcap=None, config=config)

    start, near = gather.heuristic(), {"T": T, "D": D, "V": V}
    of_case = (2 * T * D * V, "tflops")
    yield Work(gather.TABLE, case.name, {}, near, start, TILES + GATHER, *of_case, run, arrays)


def attention(case) -> Iterator[Work]:
    """Forward, dq, dk and dv of a packed row."""
    dim, settings = case.head_dim, Settings(case.head_dim**-0.5, case.softcap, case.window)
    options = tree.Options(settings, tree.heuristic(triton_call.capability(), dim, 2))
    key, near = tree.key_of(dim, 2, case.window is not None), {"tokens": case.tokens}
    kernels = {"forward": "forward", "dq": "queries_gradient", "dkv": "keys_gradient"}

    def arrays():
        inputs = {n: jnp.asarray(x) for n, x in case.inputs().items()}
        q, k, v, d_out = (inputs[n].astype(jnp.bfloat16) for n in ("q", "k", "v", "d_out"))
        context = Context(*map(inputs.get, ("until", "since", "positions", "key_positions")))
        context, order = tree.find_order(options, context, q.shape[1], k.shape[1])
        lse = delta = jnp.zeros((case.rows, case.heads, q.shape[1]))
        return q, k, v, d_out, lse, delta, context, order

    for table, name in kernels.items():

        def run(config, q, k, v, d_out, lse, delta, context, order, name=name):
            inputs = (q, k, v) if name == "forward" else (q, k, v, d_out, lse, delta)
            template = {"forward": (d_out, lse), "queries_gradient": (q,), "keys_gradient": (k, v)}
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in template[name]]
            return tree.launch_kernel(name, config, options, inputs, shapes, context, order)

        amount = case.flops() * {"forward": 1.0, "dq": 1.5, "dkv": 2.0}[table]
        start = getattr(options.configs, table)
        of_case = (amount, "tflops", run, arrays)
        yield Work(tree.TABLE + table, case.name, key, near, start, BLOCKS, *of_case)


KERNELS = {
    **{
        f"attention_{op}": (attention, attention_cases, tree.TABLE + op)
        for op in ("forward", "dq", "dkv")
    },
    "product": (experts, moe_cases, grouped.PRODUCT),
    "gradient": (experts, moe_cases, grouped.GRADIENT),
    "logp_gather": (vocabulary, gather_cases, gather.TABLE),
}


def find_work(kernels, parts) -> list[Work]:
    return [
        work
        for make, cases, table in (KERNELS[name] for name in kernels)
        for case in cases.CASES
        if "tune" in case.tags and any(part in case.name for part in parts)
        for work in make(case)
        if work.table == table
    ]


def measure(work: Work, report) -> dict:
    """The table's entry of a kernel and case, from times of all its variants."""
    arrays, times = work.arrays(), []
    for change in work.changes:
        config = dataclasses.replace(work.heuristic, **change)
        if change and config == work.heuristic:
            continue

        def timed(config=config):
            return jax_ms(lambda *arrays: work.run(config, *arrays), *arrays, budget_s=0.12)

        labels = {"kernel": work.table, "case": work.case, "near": work.near, "change": change}
        report.timed(work.amount, timed, work.unit, **labels)
        if "ms" in report.rows[-1]:
            times.append((report.rows[-1]["ms"], change))
    if not times:
        return {}
    ms, change = min(times, key=lambda pair: pair[0])
    default = [per_entry for per_entry, chosen in times if not chosen]
    if default and ms > GAIN * default[0]:
        ms, change = default[0], {}
    return {"key": work.key, "near": work.near, "config": change, "ms": round(ms, 3)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kernel", nargs="*", choices=[*KERNELS], default=[*KERNELS])
    parser.add_argument("--case", nargs="*", default=[""], help="parts of names; default: all")
    parser.add_argument("--out", type=Path, help="all measurements as JSON")
    parser.add_argument("--save", action="store_true", help="winners go into the tuned tables")
    options = parser.parse_args()
    triton_call.require_triton()
    report, actual = Report(options.out), {}
    for work in find_work(options.kernel, options.case):
        if entry := measure(work, report):
            actual.setdefault(work.table, []).append(entry)
    header = report.header
    source = f"{header['command']}, {header['hardware']}, jax {header['jax']}"
    if options.save:
        for table, entries in actual.items():
            print(autotune.save(table, autotune.device_kind(), source, entries))


if __name__ == "__main__":
    main()
