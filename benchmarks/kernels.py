"""Kernels next to their PyTorch peers, in one run on one GPU.

python benchmarks/kernels.py --op attention --out benchmarks/results/attention.json
python benchmarks/kernels.py --op logp_gather --case t8192 --impl xla torch

Prints a line per measurement and writes them as JSON. `tflops` counts useful work: 4 (forward) and
10 (backward) x heads x head dim (its mean with that of values) x visible pairs; 2 or 6 x T x D x V;
6 or 18 x rows x D x F, two thirds of that without a gate. `tb_s` counts every number that must be
read or written once. `share` is of the measured rate of large bf16 matmuls, on an H200. `error` is
the largest error against float32 maths, `plain_error` that of the same maths in bf16 by XLA.

--repeats 8 runs every backend of all cases eight times more on the same arrays and counts the
results that differ in a bit: none may, and one that does is a race.

--impl sweep tries other sizes of the kernels of conv_heads, rotate_heads and decode_attention;
decode_attention also has gpu_int8, gpu_fp8 and sweep_int8, on caches of 8 bits.
"""

import functools

import jax.numpy as jnp
import numpy as np
from harness import DECLINED, Report, jax_ms, make_parser, shorten, torch_ms
from kernel_heads import ConvHeads, DecodeAttention, RotateHeads
from kernel_ops import Attention, GatedDelta, LogpGather, MoE, WeightedLogp

OPS = {
    "attention": Attention,
    "conv_heads": ConvHeads,
    "decode_attention": DecodeAttention,
    "gated_delta": GatedDelta,
    "logp_gather": LogpGather,
    "weighted_logp": WeightedLogp,
    "moe": MoE,
    "rotate_heads": RotateHeads,
}


def measure_times(op, impls: list[str], report: Report) -> None:
    """Add the times of every variant and step of an op, and of its PyTorch peers."""
    labels = {"op": op.label, "case": op.case.name}
    for variant, impl in op.variants(impls):
        for step, program in op.programs(impl).items():
            work, function, arguments, extra, repeats = program
            timing = functools.partial(jax_ms, function, *arguments, repeats=repeats)
            row = {**labels, **variant, **({"step": step} if step else {}), **extra}
            report.timed(work, timing, op.unit, **row)
    if "torch" not in impls:
        return
    op.free()
    for name, (build, steps, repeats) in op.peers().items():
        calls = report.attempt(build, **labels, impl=name)
        for step, work in steps.items() if calls else ():
            timing = functools.partial(torch_ms, calls[step], repeats=repeats)
            row = {**labels, "impl": name, **({"step": step} if step else {})}
            report.timed(work, timing, op.unit, **row)


def measure_errors(op, impls: list[str], report: Report) -> None:
    """Add the largest errors of every backend, next to those of plain bf16 maths."""
    op.reduce()
    for impl in impls:
        if impl in ("xla", "torch") or impl.startswith("sweep"):
            continue
        exact, plain = op.exact_and_plain(impl)
        actual = op.outputs(impl, jnp.bfloat16)
        labels = {"op": op.label, "case": op.case.name, "impl": impl}
        report.errors(op.names, actual, exact, plain, **labels)
    if "torch" in impls:
        op.peer_errors(report)


def measure_repeats(op, impls: list[str], count: int, report: Report) -> None:
    """Add, for every backend, how many of `count` runs after the first have other bits."""
    op.reduce()
    for impl in impls:
        labels = {"op": op.label, "case": op.case.name, "impl": impl}
        try:
            first, *repeats = (op.outputs(impl, jnp.bfloat16) for _ in range(count + 1))
            same = [all(map(np.array_equal, first, repeat)) for repeat in repeats]
            report.add(**labels, runs=count, differ=same.count(False))
        except DECLINED as reason:
            report.add(**labels, failed=shorten(reason, 100))


def main() -> None:
    parser = make_parser(__doc__, out="JSON file")
    parser.add_argument("--op", choices=OPS, nargs="+", required=True)
    parser.add_argument("--case", nargs="*", default=[""], help="parts of case names")
    parser.add_argument("--impl", nargs="+", default=["mosaic_gpu", "xla", "torch"])
    parser.add_argument("--errors", action="store_true", help="numerics instead of times")
    parser.add_argument("--repeats", type=int, help="repeat each call so often and compare bits")
    options = parser.parse_args()
    report = Report(options.out)
    measure = measure_errors if options.errors else measure_times
    for name in options.op:
        for case in OPS[name].cases:
            if not any(part in case.name for part in options.case):
                continue
            if options.repeats:
                measure_repeats(OPS[name](case), options.impl, options.repeats, report)
            elif "bench" in case.tags:
                measure(OPS[name](case), options.impl, report)


if __name__ == "__main__":
    main()
