"""Time variants of the kernels on one GPU: what the tuned tables hold comes from this.

python benchmarks/sweep.py --case tree8k tree32k_h16_8_d64 --out benchmarks/results/sweep.json
python benchmarks/sweep.py --save    # and put the winners into kernels/jaxtrain_kernels/tuned
python benchmarks/sweep.py --impl triton --kernel product --save

--impl mosaic_gpu is attention on Hopper, triton all kernels of other generations. One line per
kernel, case and variant; a variant that the device cannot hold says so and drops out.
"""

import argparse
import dataclasses
import functools
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
from jaxtrain_kernels.logp_gather import cases as logp_cases
from jaxtrain_kernels.logp_gather import triton_gpu as logp
from jaxtrain_kernels.tree_attention import (
    blocks,
    gpu_dkv,
    gpu_dq,
    gpu_fused,
    gpu_fwd,
    gpu_gather,
    gpu_tiles,
)
from jaxtrain_kernels.tree_attention import cases as attention_cases
from jaxtrain_kernels.tree_attention import triton_gpu as tree

GAIN = 0.99  # share of the heuristic's time that a variant must stay below to be saved

SHARED = {"programs": 0}  # thread blocks that go through many tiles, one per multiprocessor
MORE = {"compute_registers": 240, "memory_registers": 24}
LESS = {"compute_registers": 232, "memory_registers": 40}
HELD = {"in_registers": True}
AHEAD = {"ahead": True}  # a step's scores are queued before it begins
IN_TURN = {"ahead": False}
HOPPER = {
    "fwd": {
        64: [
            *({}, HELD, SHARED, {"stages": 3}, {"k_block": 256}, {"polynomial": 8}),
            *(AHEAD, AHEAD | {"stages": 4}, AHEAD | SHARED, AHEAD | {"polynomial": 8}),
            *(AHEAD | {"polynomial": 4}, AHEAD | HELD),
        ],
        128: [
            *({}, HELD, HELD | MORE, SHARED, {"q_stages": 1}, {"k_block": 64, "stages": 4}, MORE),
            AHEAD,
        ],
        192: [{}, HELD, SHARED, {"k_block": 64, "stages": 4}, MORE],
        256: [{}, SHARED, MORE],
    },
    "dkv": {
        64: [{}, {"q_stages": 4}, LESS],
        128: [{}, {"q_stages": 3}, LESS],
        192: [{}, {"q_stages": 3}],
        256: [{}, LESS],
    },
    "dq": {
        64: [{}, HELD, SHARED, {"k_stages": 2, "v_stages": 2}, {"k_block": 128}],
        128: [
            *({}, HELD, SHARED, {"tile_stages": 1}, {"k_stages": 3, "v_stages": 2}, LESS),
            *({"k_block": 128}, HELD | {"k_stages": 3, "v_stages": 3, "tile_stages": 1}),
        ],
        192: [{}, SHARED, {"k_stages": 3, "v_stages": 3}, LESS],
        256: [{}, SHARED, {"k_stages": 1}],
    },
    "fused": {
        64: [{}, HELD, IN_TURN, IN_TURN | HELD, IN_TURN | {"q_part": 128}],
        128: [{}, LESS],
        192: [],
        256: [],
    },
}
"""Changes of the heuristic by kernel and head dim."""

TILES = [
    *({}, {"stages": 2}, {"stages": 3}, {"stages": 4}, {"walk": 4}, {"walk": 16}),
    *({"warps": 4}, {"warps": 4, "stages": 4}),
]
STEPS = [{"step": 32, "stages": 4}, {"step": 64, "stages": 3}, {"step": 64, "stages": 2}]
WIDE = [{"columns": 256, "step": 32, "stages": 3}, {"columns": 256, "step": 64, "stages": 3}]
NARROW = [{"columns": 64, "step": 64, "stages": 3, "warps": 4}]
LOGITS = [
    *({"block_d": 32, "stages": 4}, {"block_d": 64, "stages": 3}, {"tile_v": 256}),
    *({"tile_t": 64, "warps": 4}, {"tile_t": 64, "tile_v": 256}),
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
    flops: float
    run: Callable
    """(config, *arrays)."""
    load: Callable[[], Callable[[Any], tuple]]
    """() -> (config) -> the arrays."""


class HopperInputs:
    """An attention case with its keys in order, and what the backward needs of the forward."""

    def __init__(self, case):
        arrays = {n: jnp.asarray(x) for n, x in case.inputs().items()}
        self.q, self.k, self.v, self.d_out = (
            arrays[n].astype(jnp.bfloat16) for n in ("q", "k", "v", "d_out")
        )
        self.T, self.H = self.q.shape[1], case.head_dim
        self.settings = gpu_tiles.Settings(self.H**-0.5, case.softcap, None)
        self.unordered = blocks.normalize(Context(arrays["until"], arrays.get("since")))
        arrange = jax.jit(lambda context: blocks.arrange(context, self.T, None))
        self.context, self.arrangement = arrange(self.unordered)
        order, moved = self.arrangement.order, self.arrangement.moved
        self.moved = gpu_tiles.Moved(
            *jax.jit(gpu_gather.gather)(order, moved, self.k, self.v), moved
        )
        config = gpu_fwd.heuristic(self.H)
        forward = jax.jit(lambda q, keys: gpu_fwd.forward(q, keys, self.settings, config))
        out, lse = forward(*self.arrays("fwd", config))
        delta = jnp.einsum("BTNH,BTNH->BNT", self.d_out, out, preferred_element_type=jnp.float32)
        self.queries = gpu_tiles.Queries(self.q, self.d_out, lse, delta)

    def lists(self, context, q_block: int, k_block: int, transpose: bool = False):
        pair = blocks.meet(context, self.T, q_block, k_block, None)
        return blocks.lists(*(x.swapaxes(1, 2) if transpose else x for x in pair))

    def arrays(self, kernel: str, config) -> tuple:
        """Return queries and keys of a kernel, whose lists are made outside of what is timed."""
        if kernel in ("fwd", "dq"):
            lists = self.lists(self.context, gpu_tiles.TILE, config.k_block)
        else:
            lists = self.lists(self.context, config.q_block, gpu_dkv.key_tile(self.H), True)
        keys = gpu_tiles.describe_keys(self.k, self.v, self.context, lists, self.moved)
        return (self.q if kernel == "fwd" else self.queries), keys

    def around(self) -> dict[str, tuple]:
        """Return {name: (function, arguments)} of the work around the kernels."""

        def order(context):
            arranged, arrangement = blocks.arrange(context, self.T, None)
            return self.lists(arranged, gpu_tiles.TILE, 128), arrangement

        moved = (self.arrangement.order, self.arrangement.moved, self.k, self.v)
        return {
            "arrange + lists": (order, (self.unordered,)),
            "gather": (gpu_gather.gather, moved),
        }


def hopper_attention(case) -> Iterator[Work]:
    """Forward, dk and dv, dq, and the three gradients by one kernel."""
    H, settings = case.head_dim, gpu_tiles.Settings(case.head_dim**-0.5, case.softcap, None)
    key, near = {"head_dim": H, "window": case.window is not None}, {"tokens": case.tokens}
    kernels = {
        "fwd": (gpu_fwd, gpu_fwd.forward, 1.0),
        "dkv": (gpu_dkv, gpu_dkv.dkv, 2.0),
        "dq": (gpu_dq, gpu_dq.dq, 1.5),
        "fused": (gpu_fused, gpu_fused.backward, 2.5),
    }
    for kernel, (module, function, share) in kernels.items():

        def run(config, queries, keys, function=function):
            return function(queries, keys, settings, config)

        def load(kernel=kernel):
            return functools.partial(HopperInputs(case).arrays, kernel)

        first = (f"tree_attention_{kernel}", case.name, key, near, module.heuristic(H))
        yield Work(*first, HOPPER[kernel][H], share * case.flops(), run, load)


def for_all(*arrays) -> Callable[[Any], tuple]:
    """Return (config) -> arrays that are the same for every config."""
    return lambda config: arrays


def experts(case) -> Iterator[Work]:
    """The product with W and with its transpose, and the weights' gradient."""
    block, D, F = routing.BLOCK, case.width, case.hidden
    flops = 2 * case.tokens * case.top * D * F

    def load():
        inputs = case.inputs()
        routed = routing.route(jnp.asarray(inputs["experts"]), case.experts, block)
        x = jnp.asarray(inputs["x"], jnp.bfloat16)
        dy_TF = jax.random.normal(jax.random.key(0), (case.tokens, F), jnp.bfloat16)
        x, dy = (routing.gather_in(rows, routed) for rows in (x, dy_TF))
        return for_all(x, dy, jnp.asarray(inputs["w_up"], jnp.bfloat16), routed.segments)

    def product(config, x, dy, w, segments):
        return grouped.product(x, w, segments, config=config)

    def transposed(config, x, dy, w, segments):
        return grouped.product(dy, w, segments, transpose=True, config=config)

    def gradient(config, x, dy, w, segments):
        return grouped.weight_gradient(x, dy, segments, jnp.float32, config=config)

    few, many = TILES + STEPS + NARROW, TILES + STEPS + WIDE + NARROW
    up, down = {"K": D, "N": F}, {"K": F, "N": D}
    for table, near, changes, run in (
        (grouped.PRODUCT, up, many, product),
        (grouped.PRODUCT, down, many, transposed),
        (grouped.GRADIENT, up, few, gradient),
    ):
        first = (table, case.name, {"block": block}, near, grouped.heuristic(block))
        yield Work(*first, changes, flops, run, load)


def vocabulary(case) -> Iterator[Work]:
    """The logits and their statistics: the kernel that the other two are like."""
    T, D, V = case.tokens, case.width, case.vocabulary

    def load():
        inputs = case.inputs()
        hidden, head = (jnp.asarray(inputs[n], jnp.bfloat16) for n in ("hidden", "head"))
        return for_all(hidden, head, jnp.ones((T,), jnp.float32))

    def run(config, hidden, head, factor):
        return logp.statistics(hidden, head, factor, softcap=None, config=config)

    first = (logp.TABLE, case.name, {}, {"T": T, "D": D, "V": V}, logp.heuristic())
    yield Work(*first, TILES + LOGITS, 2 * T * D * V, run, load)


def triton_attention(case) -> Iterator[Work]:
    """Forward, dq, dk and dv of a packed row."""
    dim, settings = case.head_dim, tree.Settings(case.head_dim**-0.5, case.softcap, case.window)
    options = tree.Options(settings, tree.heuristic(triton_call.capability(), dim, 2))
    key, near = tree.key_of(dim, 2, case.window is not None), {"tokens": case.tokens}

    def load():
        inputs = {n: jnp.asarray(x) for n, x in case.inputs().items()}
        q, k, v, d_out = (inputs[n].astype(jnp.bfloat16) for n in ("q", "k", "v", "d_out"))
        context = Context(*map(inputs.get, ("until", "since", "positions", "key_positions")))
        context, order = tree.find_order(options, context, q.shape[1], k.shape[1])
        lse = delta = jnp.zeros((case.rows, case.heads, q.shape[1]))
        return for_all(q, k, v, d_out, lse, delta, context, order)

    kernels = {
        "forward": ("forward", 1.0),
        "dq": ("queries_gradient", 1.5),
        "dkv": ("keys_gradient", 2.0),
    }
    for table, (name, share) in kernels.items():

        def run(config, q, k, v, d_out, lse, delta, context, order, name=name):
            inputs = (q, k, v) if name == "forward" else (q, k, v, d_out, lse, delta)
            template = {"forward": (d_out, lse), "queries_gradient": (q,), "keys_gradient": (k, v)}
            shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in template[name]]
            return tree.launch_kernel(name, config, options, inputs, shapes, context, order)

        first = (tree.TABLE + table, case.name, key, near, getattr(options.configs, table))
        yield Work(*first, BLOCKS, share * case.flops(), run, load)


KERNELS = {
    "mosaic_gpu": {
        kernel: (hopper_attention, attention_cases, f"tree_attention_{kernel}") for kernel in HOPPER
    },
    "triton": {
        **{
            f"attention_{op}": (triton_attention, attention_cases, tree.TABLE + op)
            for op in ("forward", "dq", "dkv")
        },
        "product": (experts, moe_cases, grouped.PRODUCT),
        "gradient": (experts, moe_cases, grouped.GRADIENT),
        "logp_gather": (vocabulary, logp_cases, logp.TABLE),
    },
}
"""{implementation: {kernel: (its works on a case, cases, table)}}."""


def tuned_cases(cases, parts: list[str]) -> list:
    """Return the cases to tune whose names have one of the parts."""
    return [
        case
        for case in cases.CASES
        if "tune" in case.tags and any(part in case.name for part in parts)
    ]


def find_work(impl: str, kernels: list[str], parts: list[str]) -> list[Work]:
    """Return the chosen kernels on the chosen cases."""
    return [
        work
        for make, cases, table in (KERNELS[impl][name] for name in kernels)
        for case in tuned_cases(cases, parts)
        for work in make(case)
        if work.table == table
    ]


def measure(work: Work, report) -> dict:
    """Return the table's entry of a kernel and case, from times of all its variants; {} if none
    can run."""
    times, arrays = [], work.load()
    for change in work.changes:
        config = dataclasses.replace(work.heuristic, **change)
        if change and config == work.heuristic:
            continue

        def timed(config=config):
            run = functools.partial(work.run, config)
            return jax_ms(run, *arrays(config), budget_s=0.12)

        labels = {"kernel": work.table, "case": work.case, "near": work.near, "change": change}
        report.timed(work.flops, timed, **labels)
        if "ms" in report.rows[-1]:
            times.append((report.rows[-1]["ms"], change))
    if not times:
        return {}
    ms, change = min(times, key=lambda pair: pair[0])
    default = [ms for ms, change in times if not change]
    if default and ms > GAIN * default[0]:
        ms, change = default[0], {}
    return {"key": work.key, "near": work.near, "config": change, "ms": round(ms, 3)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--impl", choices=KERNELS, default="mosaic_gpu")
    parser.add_argument("--kernel", nargs="*", help="of the implementation; default: all")
    parser.add_argument("--case", nargs="*", default=[""], help="parts of names; default: all")
    parser.add_argument("--around", action="store_true", help="time Hopper's order and copies, too")
    parser.add_argument("--out", type=Path, help="all measurements as JSON")
    parser.add_argument("--save", action="store_true", help="winners go into the tuned tables")
    options = parser.parse_args()
    if options.impl == "triton":
        triton_call.require_triton()
    kernels = KERNELS[options.impl] if options.kernel is None else options.kernel
    if unknown := set(kernels) - set(KERNELS[options.impl]):
        parser.error(f"--kernel {' '.join(unknown)}: not among {', '.join(KERNELS[options.impl])}")
    report, entries = Report(options.out), {}
    for case in tuned_cases(attention_cases, options.case) if options.around else ():
        for name, (function, arguments) in HopperInputs(case).around().items():
            time = functools.partial(jax_ms, function, *arguments)
            report.timed(0, time, kernel=name, case=case.name)
    for work in find_work(options.impl, kernels, options.case):
        if entry := measure(work, report):
            entries.setdefault(work.table, []).append(entry)
    header = report.header
    source = f"{header['command']}, {header['hardware']}, jax {header['jax']}"
    for table, rows in entries.items() if options.save else ():
        print(autotune.save(table, autotune.device_kind(), source, rows))


if __name__ == "__main__":
    main()
