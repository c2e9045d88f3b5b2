"""Triton attention for machines whose own Triton is too old: compiled elsewhere, timed there.

python benchmarks/export_triton.py --to artifacts --target 80 --case tree8k    # any machine
python benchmarks/export_triton.py --run artifacts --out out.json              # the GPU's

The first needs jax-triton but no GPU: an artifact is a `jax.export` of forward and backward for one
compute capability (x 10), the kernels' PTX in it. The second needs jax alone, of the same minor
version, and prints times and the largest errors against the chunked XLA backend in float32.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jaxtrain_kernels import Context, attention, triton_call
from jaxtrain_kernels.tree_attention.cases import CASES

CHECKED = 8192  # tokens up to which errors are computed, too
NAMES = ("q", "k", "v", "d_out", "until", "since", "positions", "key_positions", "sinks")


def functions(case, impl: str):
    """(forward, forward and backward) of a dict of a case's arrays."""

    def forward(arrays):
        context = Context(*map(arrays.get, NAMES[4:8]))
        options = {"softcap": case.softcap, "window": case.window, "impl": impl}
        sinks = arrays.get("sinks")
        return lambda q, k, v: attention(q, k, v, context, sinks=sinks, **options)

    def alone(arrays):
        return forward(arrays)(arrays["q"], arrays["k"], arrays["v"])

    def both(arrays):
        out, pull = jax.vjp(forward(arrays), arrays["q"], arrays["k"], arrays["v"])
        return out, *pull(arrays["d_out"])

    return {"forward": alone, "both": both}


def inputs(case, dtype="bfloat16"):
    actual = {n: jnp.asarray(x) for n, x in case.inputs().items() if n in NAMES}
    return actual | {n: actual[n].astype(dtype) for n in NAMES[:4]}


def write(case, target: int, folder: Path) -> None:
    import jax_triton

    shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in inputs(case).items()}
    checks = [export.DisabledSafetyCheck.custom_call(jax_triton.CUSTOM_CALL_TARGET_NAME)]
    with triton_call.compile_for(target):
        for label, function in functions(case, "triton").items():
            created = export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)
            path = folder / f"{case.name}.{label}.sm_{target}.jaxexport"
            path.write_bytes(created(shapes).serialize())
            print(f"{path}: {path.stat().st_size:,} bytes", flush=True)


def run(folder: Path, out: Path | None, named: str) -> None:
    from harness import Report

    report = Report(out)
    for case in CASES:
        paths = sorted(folder.glob(f"{case.name}.*.jaxexport"))
        if paths and named in case.name:
            run_case(case, paths, report)


def run_case(case, paths: list[Path], report) -> None:
    from harness import jax_ms

    arrays = inputs(case)
    for path in paths:
        _, step, target, _ = path.name.split(".")
        call = export.deserialize(bytearray(path.read_bytes())).call
        labels = {"op": "attention", "case": case.name, "impl": f"triton {target}"}
        flops = case.flops() * (1 if step == "forward" else 3.5)
        report.timed(flops, lambda call=call: jax_ms(call, arrays), **labels, step=step)
        if step == "both" and case.tokens <= CHECKED:
            xla = jax.jit(functions(case, "xla")["both"])
            with jax.default_matmul_precision("highest"):
                wide = arrays | {n: arrays[n].astype(jnp.float32) for n in NAMES[:4]}
                exact = xla(wide)
            actual = [
                [np.asarray(x.astype(jnp.float32)) for x in subset]
                for subset in (call(arrays), exact, xla(arrays))
            ]
            report.errors(("out", "dq", "dk", "dv"), *actual, **labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    position = parser.add_mutually_exclusive_group(required=True)
    position.add_argument("--to", type=Path, help="folder to write artifacts to")
    position.add_argument("--run", type=Path, help="folder of artifacts to time")
    parser.add_argument("--target", type=int, nargs="+", default=[80], help="80, 89, 90, 100, 120")
    parser.add_argument("--case", default="tree8k_h16_8_d128", help="part of case names")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.run:
        run(options.run, options.out, options.case)
        return
    options.to.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        if "bench" in case.tags and options.case in case.name:
            for target in options.target:
                write(case, target, options.to)


if __name__ == "__main__":
    main()
