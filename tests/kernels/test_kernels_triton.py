"""Triton kernels of grouped_matmul and of log-probabilities, in Triton's interpreter on the CPU, by
the 2x rule against float64; and who declines."""

import importlib.util
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_kernels_weighted_logp as weighted_test
from jaxtrain_kernels import (
    Context,
    attention,
    autotune,
    grouped_matmul,
    logp_gather,
    testing,
    triton_call,
    weighted_logp,
)
from jaxtrain_kernels.grouped_matmul import routing
from jaxtrain_kernels.grouped_matmul import triton_gpu as grouped_triton
from jaxtrain_kernels.grouped_matmul.ffn import Adapters
from jaxtrain_kernels.grouped_matmul.moe import choose_block, moe_ffn
from jaxtrain_kernels.logp_gather import by_kernels
from jaxtrain_kernels.logp_gather import cases as logp_cases
from jaxtrain_kernels.logp_gather import triton_gpu as gather_triton
from other_devices import run_script
from test_kernels_grouped_matmul import NAMES as MOE_NAMES
from test_kernels_grouped_matmul import E, exact_moe, moe_inputs, run_moe
from test_kernels_logp_gather import NAMES, numpy_logp_gather, options_of
from test_kernels_logp_gather import run as run_gather

LOW = ["bfloat16", "float16"]


@pytest.mark.parametrize("block, D, F", [(128, 128, 192), (32, 192, 80), (16, 64, 64)])
@pytest.mark.parametrize("dtype", LOW)
def test_grouped_matmul(interpreter, dtype, block, D, F):
    """Forward, dx and dw; an expert without rows, unused blocks, widths that no tile divides."""
    rng = np.random.default_rng(1)
    choice = rng.choice([0, 2, 3], (120, 1), p=[0.7, 0.2, 0.1]).astype(np.int32)  # 1 is empty
    routed = routing.route(jnp.asarray(choice), 4, block)
    segments = routed.segments

    def low(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    x, dy = (routing.gather_in(low(120, n), routed) for n in (D, F))
    w = low(4, D, F)
    row, (sx, sw, sy) = np.arange(len(x)), (np.asarray(a, np.float64) for a in (x, w, dy))
    used = (row < int(segments.active[0]) * block)[:, None]
    of_row = sw[np.asarray(segments.group).repeat(block)]
    bounds = list(zip(np.asarray(segments.starts), np.asarray(segments.ends), strict=True))
    exact = (
        np.einsum("pd,pdf->pf", sx, of_row) * used,
        np.einsum("pf,pdf->pd", sy, of_row) * used,
        np.stack([sx[a:b].T @ sy[a:b] for a, b in bounds]),
    )

    def both(impl):
        out, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, segments, impl=impl), x, w)
        return out, *pull(dy)

    results = both("triton"), exact, both("reference")
    for name, a, e, p in zip(("y", "dx", "dw"), *results, strict=True):
        testing.assert_accurate(a, e, p, dtype, name)
    assert not np.asarray(results[0][2], np.float32)[1].any()


def test_a_float32_weight_has_a_float32_gradient(interpreter):
    routed = routing.route(jnp.asarray([[0], [2], [2]], jnp.int32), 3, 16)
    rng = np.random.default_rng(0)
    x = routing.gather_in(jnp.asarray(rng.standard_normal((3, 16)), jnp.bfloat16), routed)
    w = jnp.asarray(rng.standard_normal((3, 16, 32)), jnp.float32)

    def total(w, **options):
        y = grouped_matmul(x, w, routed.segments, impl="triton", **options)
        return y.astype(jnp.float32).sum()

    dw = jax.grad(total)(w)
    rows = np.asarray(x, np.float64).reshape(-1, 16, 16)
    groups, active = np.asarray(routed.segments.group), int(routed.segments.active[0])
    exact = np.stack([rows[:active][groups[:active] == e].sum((0, 1)) for e in range(3)])
    np.testing.assert_allclose(dw, np.broadcast_to(exact[:, :, None], dw.shape), rtol=1e-6)
    assert not jax.grad(lambda w: total(w, freeze_w=True))(w).any()


@pytest.mark.parametrize("dtype", LOW)
def test_moe_layer(interpreter, dtype):
    experts, arrays = moe_inputs(32, 48, "two_empty")
    low = {n: np.asarray(jnp.asarray(a, dtype), np.float64) for n, a in arrays.items()}
    actual, plain = (
        run_moe(experts, low, jnp.dtype(dtype), block=16, jit=False, impl=impl)
        for impl in ("triton", "reference")
    )
    for name, a, e, p in zip(MOE_NAMES, actual, exact_moe(experts, low), plain, strict=True):
        testing.assert_accurate(a, e, p, dtype, name)


def test_adapters_of_any_rank(interpreter):
    """A rank of 3 is filled with zeros; the same numbers as the reference to bfloat16."""
    experts, arrays = moe_inputs(16, 32)
    rng = np.random.default_rng(7)
    factors = tuple(
        jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((E, 16, 3), (E, 3, 32))
    )
    x, gates, *weights = (
        jnp.asarray(arrays[n], jnp.bfloat16) for n in ("x", "gates", "w_gate", "w_up", "w_down")
    )

    def both(impl):
        def layer(x, factors):
            options = {"adapters": Adapters(up=factors), "block": 16, "impl": impl}
            return moe_ffn(x, jnp.asarray(experts), gates, *weights, **options)

        out, pull = jax.vjp(layer, x, factors)
        return out, *jax.tree.leaves(pull(jnp.asarray(arrays["g"], jnp.bfloat16)))

    for a, b in zip(both("triton"), both("reference"), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=2**-6 * np.abs(b).max())


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    "case", [c for c in logp_cases.CASES if "ci" in c.tags], ids=lambda case: case.name
)
def test_logp_gather(interpreter, case, dtype):
    """Several chunks in the backward, tiles that neither tokens nor vocabulary divide."""
    inputs = case.inputs()
    dtype = jnp.dtype(dtype)
    for name in ("hidden", "head"):  # what both sides see is already rounded
        inputs[name] = np.asarray(jnp.asarray(inputs[name], dtype), np.float64)
    targets, options = jnp.asarray(inputs["targets"]), options_of(case, inputs)
    config = gather_triton.Config(tile_t=32, tile_v=64, block_d=32, walk=2)
    settings = by_kernels.Options(case.softcap, case.freeze_head, 320, config, gather_triton)

    def kernels(hidden, head):
        tau = options["temperature"]
        return by_kernels.run(settings, hidden, head, targets, tau)

    def plain(hidden, head):
        return logp_gather(hidden, head, targets, impl="reference", **options)

    exact = numpy_logp_gather(
        *(inputs[n] for n in ("hidden", "head", "targets", "g")),
        inputs.get("temperature"),
        case.softcap,
        case.freeze_head,
    )
    actual, bar = run_gather(inputs, dtype, kernels), run_gather(inputs, dtype, plain)
    names = NAMES[:5] if case.freeze_head else NAMES
    for name, a, e, b in zip(names, actual, exact, bar, strict=False):
        if name == "top":  # the target's own log-prob where they are as good as equal
            np.testing.assert_allclose(a, e, rtol=0, atol=2 * by_kernels.NEAR)
        else:
            testing.assert_accurate(a, e, b, a.dtype, name)


def test_logp_gather_by_name(interpreter):
    inputs = logp_cases.CASES[0].inputs()
    arrays = [jnp.asarray(inputs[n], jnp.bfloat16) for n in ("hidden", "head")]
    targets = jnp.asarray(inputs["targets"])
    actual, expected = (logp_gather(*arrays, targets, impl=i).logp for i in ("triton", "reference"))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)  # sums in another order


@pytest.mark.parametrize(
    "case", [c for c in logp_cases.CASES if "ci" in c.tags], ids=lambda case: case.name
)
def test_weighted_logp(interpreter, case):
    weighted_test.check(
        case,
        "bfloat16",
        lambda *args, **options: weighted_logp(*args, **options, impl="triton"),
        bar="xla",
        near=2 * by_kernels.NEAR,
    )


def test_a_failed_guess_is_repaired(interpreter):
    """Put one logit 600 above all others in a row of the head outside the sample."""
    T, D, V = 32, 16, 1024
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((T, D), np.float32)
    head = rng.standard_normal((V, D), np.float32) * 0.1
    hidden[::2, 0], hidden[1::2, 0] = 30.0, 0.0
    head[257], head[:, 0] = 0.0, 0.0
    head[257, 0] = 20.0
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (hidden, head)]
    targets, weights = jnp.full((T,), 3, jnp.int32), jnp.ones((T,))

    def run(impl):
        total, pull = jax.vjp(lambda *a: weighted_logp(*a, targets, weights, impl=impl)[0], *arrays)
        return total, *pull(jnp.ones(()))

    for a, e in zip(run("triton"), run("reference"), strict=True):
        # Both round p to bfloat16: 2^-8 of the largest.
        a, e = np.asarray(a, np.float32), np.asarray(e, np.float32)
        np.testing.assert_allclose(a, e, rtol=0, atol=2**-7 * np.abs(e).max())


def call_of(op, dtype="bfloat16", width=64, block=16):
    """A call of an op by name, as small as it gets."""
    x, head = (np.zeros((n, width), jnp.dtype(dtype)) for n in (32, 64))
    y, ones = np.zeros((32,), np.int32), np.ones((32,), np.float32)
    if op == "attention":
        return lambda: attention(*[x[None, :, None]] * 3, Context(y[None]), impl="triton")
    if op == "grouped_matmul":
        segments = routing.Segments(*(np.zeros(n, np.int32) for n in (2, 1, 2, 2)))
        rows, w = np.zeros((2 * block, width), jnp.dtype(dtype)), np.zeros((2, width, 64))
        return lambda: grouped_matmul(rows, w, segments, impl="triton")
    return {
        "logp_gather": lambda: logp_gather(x, head, y, impl="triton"),
        "weighted_logp": lambda: weighted_logp(x, head, y, ones, impl="triton"),
    }[op]


OPS = ("attention", "grouped_matmul", "logp_gather", "weighted_logp")


@pytest.mark.parametrize("op", OPS)
def test_declines_without_triton(monkeypatch, op):
    monkeypatch.setattr(triton_call, "_installed", lambda name: name != "jax_triton")
    reason = r"needs jax_triton: pip install 'jaxtrain\[cuda,triton\]'"
    with pytest.raises(NotImplementedError, match=reason):
        call_of(op)()


@pytest.mark.parametrize("op", OPS)
def test_declines_without_a_gpu(monkeypatch, op):
    monkeypatch.setattr(triton_call, "_installed", lambda name: True)
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        call_of(op)()
    monkeypatch.setattr(triton_call, "device_kind", lambda: "NVIDIA T4")
    monkeypatch.setattr(triton_call, "capability", lambda: 75)
    with pytest.raises(NotImplementedError, match="capability 8.0 to 12.1, found 7.5"):
        call_of(op)()


@pytest.mark.parametrize(
    "op, options, reason",
    [
        ("attention", {"dtype": "float64"}, "takes bfloat16, float16 or float32, got float64"),
        ("attention", {"width": 320}, "head dim 320 is above 256"),
        ("grouped_matmul", {"dtype": "float32"}, "takes bfloat16 or float16 rows, got float32"),
        ("grouped_matmul", {"block": 8}, "rows, got 8"),
        ("grouped_matmul", {"width": 24}, "must be multiples of 16"),
        ("logp_gather", {"dtype": "float32"}, "takes bfloat16 or float16 hidden states"),
        ("logp_gather", {"width": 24}, "width 24 must be a multiple of 16"),
        ("weighted_logp", {"dtype": "float16"}, "takes bfloat16 hidden states, got float16"),
    ],
)
def test_declines(monkeypatch, op, options, reason):
    monkeypatch.setattr(triton_call, "_installed", lambda name: True)
    monkeypatch.setattr(triton_call, "interpreted", lambda: True)
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match=reason):
        call_of(op, **options)()


def test_auto_takes_them_before_xla():
    """ "auto" picks Triton where it is installed and Mosaic declines."""
    for package in (attention, grouped_matmul, moe_ffn, weighted_logp, logp_gather):
        names = list(sys.modules[package.__module__].BACKENDS)
        assert names.index("mosaic_gpu") < names.index("triton") < names.index("xla")


def test_blocks_of_a_small_layer():
    x, w = jnp.zeros((4, 64), jnp.bfloat16), jnp.zeros((8, 64, 64))
    assert choose_block(x, 8, w, "triton") == 16
    assert choose_block(x, 8 * 90, w, "triton") == 128


@pytest.mark.parametrize("number", [80, 89, 90, 100, 120])
def test_tiles_fit_shared_memory(number):
    with triton_call.compile_for(number):
        for block in grouped_triton.BLOCKS:
            config = grouped_triton.choose(grouped_triton.PRODUCT, block)
            used = 2 * config.stages * config.step * (block + config.columns)
            assert used <= 1024 * triton_call.SHARED_MEMORY[number]


@pytest.mark.slow
def test_kernels_compile_for_five_generations(tmp_path):
    for name in ("triton", "jax_triton", "jax_cuda13_plugin"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs the package {name}")
    script = Path(__file__).parent / "triton_compile.py"
    if not Path("/usr/local/cuda/bin/ptxas").exists():
        pytest.skip("needs ptxas")
    environment = {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "JAX_PLATFORMS": "cpu"}
    printed = run_script(
        script, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0", **environment
    )
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert {row["target"] for row in rows} == {80, 89, 90, 100, 120}
    for row in rows:
        assert row["shared_kib"] <= triton_call.SHARED_MEMORY[row["target"]], row
    assert not [row for row in rows if row["spills"]]
    matmuls = [row for row in rows if row["kernel"] != "row_statistics"]
    assert all(row["tensor_cores"] and row["in_flight"] for row in matmuls)


def test_a_sweep_fills_the_table(monkeypatch, tmp_path):
    """benchmarks/sweep.py --impl triton with times by formula instead of by a GPU."""
    folder = Path(__file__).parents[2] / "benchmarks"
    before = set(sys.modules)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(autotune, "TABLES", tmp_path)
    autotune.table.cache_clear()
    try:
        import sweep

        def milliseconds(run, budget_s):
            config = run()
            if config.columns == 256:
                raise RuntimeError("out of resource: shared memory")
            return {"ms": 1.0 if config.warps == 4 and config.columns == 128 else 2.0}

        monkeypatch.setattr(sweep, "jax_ms", milliseconds)
        report = sweep.Report(None)
        with triton_call.compile_for(89):
            work = sweep.find_work("triton", ["product"], ["t8192"])
            assert [w.near for w in work] == [{"K": 2048, "N": 768}, {"K": 768, "N": 2048}]
            work = work[0]._replace(run=lambda config: config, load=sweep.for_all)
            entry = sweep.measure(work, report)
            autotune.save(work.table, autotune.device_kind(), "here", [entry])
            actual = grouped_triton.choose(grouped_triton.PRODUCT, 128, K=2048, N=768)
            second = grouped_triton.choose(grouped_triton.PRODUCT, 64, K=2048, N=768)
            assert second == grouped_triton.heuristic(64), "an entry is for its block alone"
        assert entry["config"] == {"warps": 4} and actual.warps == 4
        assert sum("failed" in row for row in report.rows) == 2
    finally:
        autotune.table.cache_clear()
        for name in set(sys.modules) - before:
            if str(folder) in (getattr(sys.modules[name], "__file__", None) or ""):
                del sys.modules[name]
