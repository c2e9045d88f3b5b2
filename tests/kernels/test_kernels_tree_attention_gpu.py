"""The Hopper kernels of tree attention without a GPU: interpreted numerics, lowering, compiling."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import Context, attention, mosaic, testing
from jaxtrain_kernels.tree_attention import (
    blocks,
    gpu_dkv,
    gpu_dq,
    gpu_fused,
    gpu_fwd,
    gpu_tiles,
    gpu_wide,
    mosaic_gpu,
    reference,
)
from jaxtrain_kernels.tree_attention.cases import CASES
from mosaic_interpreter import interpreted, require
from test_kernels_tree_attention import ancestor_mask, arguments, case_mask, compare


def options(head_dim, window=None, softcap=None, programs=2):
    """Few thread blocks, so that each goes through several tiles."""
    forward = dataclasses.replace(gpu_fwd.heuristic(head_dim), programs=programs)
    if gpu_wide.takes(head_dim):
        settings = gpu_tiles.Settings(head_dim**-0.5, softcap, window)
        return mosaic_gpu.Options(settings, forward, None, None)
    dq = dataclasses.replace(gpu_dq.heuristic(head_dim, window is not None), programs=programs)
    settings = gpu_tiles.Settings(head_dim**-0.5, softcap, window)
    fused = gpu_fused.heuristic(head_dim) if gpu_fused.takes(head_dim, window) else None
    return mosaic_gpu.Options(settings, forward, gpu_dkv.heuristic(head_dim), dq, fused=fused)


def dense_visible(since, until, T, positions=None, key_positions=None, window=None):
    rows = np.arange(T)[None, :, None]
    mask = (since[:, None] <= rows) & (rows < until[:, None])
    if window is not None:
        mask &= positions[:, :, None] - key_positions[:, None] < window
    return mask


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("seed", range(20))
def test_lists_never_drop_a_visible_pair(seed, window):
    """Brute force over random intervals, trees and windows; every block marked whole is whole."""
    rng = np.random.default_rng(seed)
    B, T, S, q_block, k_block = 2, 96, 64, 16, 8
    if seed % 2:
        S = T
        rows = [testing.pack(testing.random_forest(rng, T - 9, mean=6), T) for _ in range(B)]
        until = np.stack([row["until"] for row in rows])
        since = np.tile(np.arange(T, dtype=np.int32), (B, 1))
        positions = np.stack([row["positions"] for row in rows])
        key_positions = positions
    else:
        since = rng.integers(0, T, (B, S)).astype(np.int32)
        until = (since + rng.integers(-4, 30, (B, S))).clip(0, T).astype(np.int32)
        positions = rng.integers(0, 40, (B, T)).astype(np.int32)
        key_positions = rng.integers(0, 40, (B, S)).astype(np.int32)
    mask = dense_visible(since, until, T, positions, key_positions, window)
    tiled = mask.reshape(B, T // q_block, q_block, S // k_block, k_block)
    context = Context(*map(jnp.asarray, (until, since, positions, key_positions)))
    any_visible, every = blocks.meet(blocks.normalize(context), T, q_block, k_block, window)
    assert not (tiled.any((2, 4)) & ~np.asarray(any_visible)).any()
    assert not (np.asarray(every) & ~tiled.all((2, 4))).any()

    order, counts, codes = map(np.asarray, blocks.lists(any_visible, every))
    assert sorted(order) == list(range(B * T // q_block))
    assert (np.diff(counts[order]) <= 0).all(), "longest work first"
    for tile, (count, code) in enumerate(zip(counts, codes, strict=True)):
        row, block = divmod(tile, T // q_block)
        expected = np.flatnonzero(any_visible[row, block])
        np.testing.assert_array_equal(code[:count] // 2, expected)
        np.testing.assert_array_equal(
            code[:count] % 2 == 0, np.asarray(every)[row, block, expected]
        )


def test_lists_of_a_tree_skip_what_is_far():
    """Eight documents of a tile each: every query tile lists one key block, and masks it."""
    until = jnp.asarray(testing.pack(testing.documents([128] * 8), 1024)["until"])[None]
    context = blocks.normalize(Context(until))
    lists = blocks.lists(*blocks.meet(context, 1024, 128, 128, None))
    np.testing.assert_array_equal(lists.counts, np.ones(8))
    np.testing.assert_array_equal(lists.codes[:, 0], 2 * np.arange(8) + 1)


def arranged(nodes, T):
    """The order of a forest's keys, and the visible blocks of 128 before and after."""
    base = blocks.normalize(Context(jnp.asarray(testing.pack(nodes, T)["until"])[None]))
    new, arrangement = blocks.arrange(base, T, None)
    for before, after in zip(base[:2], new[:2], strict=True):
        np.testing.assert_array_equal(before[0, arrangement.order[0]], after[0])
    np.testing.assert_array_equal(arrangement.order[0, arrangement.back[0]], np.arange(T))
    visits = [int(blocks.meet(c, T, 128, 128, None)[0].sum()) for c in (base, new)]
    return int(arrangement.moved[0]), *visits


def test_short_branches_are_taken_out_of_the_trunk():
    """At least 8% fewer blocks for the 8k agent tree of the benchmarks (its figures: 9 to 12%)."""
    moved, before, after = arranged(testing.agent_tree(20, 330, 70), 8192)
    assert moved and after < 0.92 * before


def test_documents_keep_their_order():
    moved, before, after = arranged(testing.documents([700, 100, 1500, 60, 900]), 4096)
    assert not moved and after == before


SETTINGS = {
    "d64_grouped": {"H": 64, "N": 2, "K": 1},
    "d128_grouped": {"H": 128, "N": 2, "K": 1},
    "d192_v128": {"H": 192, "V": 128, "N": 1, "K": 1, "T": 128, "used": 120},
    "d256": {"H": 256, "N": 1, "K": 1},
    "d512_shared": {"H": 512, "N": 2, "K": 1, "T": 80, "used": 70},
    "d512_grouped": {"H": 512, "N": 2, "K": 1, "enough": 0},
    "d64_softcap": {"H": 64, "N": 1, "K": 1, "softcap": 2.0},
    "d128_softcap": {"H": 128, "N": 1, "K": 1, "softcap": 2.0},
    "d192_v128_softcap": {"H": 192, "V": 128, "N": 1, "K": 1, "softcap": 2.0},
    "d256_softcap": {"H": 256, "N": 2, "K": 1, "softcap": 2.0, "T": 130, "used": 128},
    "d64_window": {"H": 64, "N": 1, "K": 1, "window": 21},
    "d128_window_softcap": {"H": 128, "N": 1, "K": 1, "window": 21, "softcap": 2.0},
    "d192_v128_grouped_window": {"H": 192, "V": 128, "N": 2, "K": 1, "window": 21},
    "d512_softcap": {"H": 512, "N": 2, "K": 1, "softcap": 2.0},
    "d512_window": {"H": 512, "N": 2, "K": 2, "B": 2, "T": 80, "used": 70, "window": 21},
    "d64_two_rows": {"H": 64, "N": 1, "K": 1, "B": 2, "T": 130, "used": 120},
}
QUICK = ("d64_grouped", "d256", "d128_grouped", "d192_v128", "d512_shared")
SLOW = [name for name in SETTINGS if name not in QUICK]


@pytest.mark.parametrize(
    "name",
    [
        *("d128_grouped", "d512_shared"),
        *(
            pytest.param(n, marks=pytest.mark.thorough)
            for n in ("d64_grouped", "d256", "d192_v128")
        ),
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_interpreted_kernels(name, monkeypatch):
    check_kernels(name, monkeypatch)


VARIANTS = {
    "in_turn": {"fused": {"ahead": False, "in_registers": True}, "forward": {"polynomial": 4}},
    "ahead": {"fused": {"ahead": False, "q_part": 128}, "forward": {"ahead": True}},
    "two_kernels": {"fused": None},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_interpreted_variants_of_d64(variant, monkeypatch):
    """Variants that the sweep times next to the heuristics."""
    check_kernels("d64_grouped", monkeypatch, **VARIANTS[variant])


def check_kernels(name, monkeypatch, **changes):
    """Output and gradients by the 2x rule on a padded random forest, and no data race.

    changes: of the kernels' configs; None: without that kernel. Not under jit: interpreted kernels
    that run side by side starve a small thread pool.
    """
    monkeypatch.setattr(blocks, "WORTH", 2.0)  # keys are always put into another order
    defaults = {"B": 1, "T": 200, "used": 180, "softcap": None, "window": None}
    case = defaults | SETTINGS[name]
    monkeypatch.setattr(gpu_wide, "ENOUGH", case.get("enough", gpu_wide.ENOUGH))
    B, T, N, K, H = (case[n] for n in "BTNKH")
    V = case.get("V", H)
    rng = np.random.default_rng(7)
    rows = [testing.pack(testing.random_forest(rng, case["used"], 25), T) for _ in range(B)]
    shapes = {"q": (B, T, N, H), "k": (B, T, K, H), "v": (B, T, K, V), "d_out": (B, T, N, V)}
    inputs = {n: rng.standard_normal(shape) for n, shape in shapes.items()}
    mask = np.stack([ancestor_mask(row["prev"], case["used"]) for row in rows])
    depth = np.stack([row["positions"] for row in rows])
    if case["window"] is not None:
        mask &= depth[:, :, None] - depth[:, None] < case["window"]
    until = jnp.asarray(np.stack([row["until"] for row in rows]))
    positions = None if case["window"] is None else jnp.asarray(depth)
    context = Context(until, None, positions, positions)
    setting = options(H, case["window"], case["softcap"])
    for kernel, change in changes.items():
        config = change and dataclasses.replace(getattr(setting, kernel), **change)
        setting = setting._replace(**{kernel: config})

    def kernels(q, k, v):
        return mosaic_gpu.run(setting, q, k, v, context)

    def plain(q, k, v):
        options = {"window": case["window"], "softcap": case["softcap"]}
        return attention(q, k, v, context, impl="reference", **options)

    with interpreted(detect_races=True):
        compare(inputs, mask, jnp.dtype("bfloat16"), kernels, plain, case["softcap"], jit=False)


@pytest.mark.parametrize("compiled", [False, True])
def test_polynomial_exponentials(compiled):
    """The bound on their error; masked scores weigh nothing, and NaN is not hidden."""
    x = jnp.linspace(-126, 1, 10_001, dtype=jnp.float32)
    function = jax.jit(mosaic.polynomial_exp2) if compiled else mosaic.polynomial_exp2
    exact = np.exp2(np.asarray(x, np.float64))
    assert np.abs(np.asarray(function(x)) / exact - 1).max() < 3e-6
    zeros = function(jnp.asarray([-jnp.inf, -1e9, -128, -127], jnp.float32))
    np.testing.assert_array_equal(zeros, np.zeros(4))
    assert not np.isfinite(function(jnp.asarray([jnp.nan], jnp.float32)).astype(jnp.bfloat16)).any()


@pytest.mark.slow
def test_interpreted_padding_does_not_block_a_thread_block(monkeypatch):
    """Five tiles of padding after one of tokens, all in one thread block."""
    monkeypatch.setattr(blocks, "WORTH", 2.0)
    rng = np.random.default_rng(9)
    T, used, H = 768, 100, 64
    row = testing.pack(testing.random_forest(rng, used, 25), T)
    inputs = {n: rng.standard_normal((1, T, 1, H)) for n in ("q", "k", "v", "d_out")}
    context = Context(jnp.asarray(row["until"])[None])
    kernels = functools.partial(mosaic_gpu.run, options(H, programs=1), context=context)
    plain = functools.partial(attention, context=context, impl="reference")
    mask = ancestor_mask(row["prev"], used)[None]
    with interpreted(detect_races=True):
        compare(inputs, mask, jnp.dtype("bfloat16"), kernels, plain, jit=False)


@pytest.mark.parametrize("H", [64, pytest.param(512, marks=pytest.mark.slow)])
def test_interpreted_intervals_with_empty_rows_and_fewer_queries(H):
    """`since` blocks, T != S, keys and queries that meet nobody: zeros there, never NaN."""
    rng = np.random.default_rng(8)
    T, S = 130, 200
    since = np.minimum(np.arange(S) // 2 * 2, T)[None].astype(np.int32)
    until = np.minimum(since + rng.integers(0, 40, (1, S)), 100).astype(np.int32)
    mask = dense_visible(since, until, T)
    empty_rows, empty_keys = ~mask.any(2)[0], ~mask.any(1)[0]
    assert empty_rows[100:].all() and empty_keys.any()
    shapes = {"q": (1, T, 1, H), "k": (1, S, 1, H), "v": (1, S, 1, H), "d_out": (1, T, 1, H)}
    inputs = {n: rng.standard_normal(shape) for n, shape in shapes.items()}
    context = Context(jnp.asarray(until), jnp.asarray(since))
    kernels = functools.partial(mosaic_gpu.run, options(H), context=context)
    plain = functools.partial(attention, context=context, impl="reference")
    with interpreted():
        compare(inputs, mask, jnp.dtype("bfloat16"), kernels, plain, jit=False)
        q, k, v, d_out = (jnp.asarray(inputs[n], jnp.bfloat16) for n in shapes)
        out, pull = jax.vjp(kernels, q, k, v)
        dq, dk, dv = pull(d_out)
    for array, empty in ((out, empty_rows), (dq, empty_rows), (dk, empty_keys), (dv, empty_keys)):
        assert not np.asarray(array, np.float32)[0, empty].any()


@pytest.mark.parametrize(
    "name", ["blocks_h2_1_d64", pytest.param("unrolled_h2_1_d64", marks=pytest.mark.thorough)]
)
def test_interpreted_drafts(name, monkeypatch):
    """Blocks and unrolled steps over a tree, whose keys are moved; no data race."""
    monkeypatch.setattr(blocks, "WORTH", 2.0)
    (case,) = (case for case in CASES if case.name == name)
    inputs = case.inputs()
    context, _ = arguments(case, inputs)
    kernels = functools.partial(mosaic_gpu.run, options(case.head_dim), context=context)
    plain = functools.partial(attention, context=context, impl="reference")
    mask = case_mask(case, inputs)
    with interpreted(detect_races=True):
        compare(inputs, mask, jnp.dtype("bfloat16"), kernels, plain, jit=False)


def loss(q, k, v, until, positions, impl="mosaic_gpu", **settings):
    out = attention(q, k, v, Context(until, positions=positions), impl=impl, **settings)
    return out.astype(jnp.float32).sum()


def shapes(H, V=None, T=1024, N=4, K=2):
    sizes = (N, H), (K, H), (K, V or H)
    heads = [jax.ShapeDtypeStruct((1, T, *size), jnp.bfloat16) for size in sizes]
    return (*heads, *[jax.ShapeDtypeStruct((1, T), jnp.int32)] * 2)


def backward_kernels(H, window):
    if gpu_wide.takes(H):
        return "dk", "dv", "dq"
    return ("bwd",) if gpu_fused.takes(H, window) else ("dkv", "dq")


@pytest.mark.parametrize("H, V", mosaic_gpu.WIDTHS)
def test_lowers_for_a_hopper_gpu(H, V):
    """On a machine without one: layouts, shared memory and the interface are checked here."""
    require()
    from jax._src.mesh import AbstractDevice

    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    every = {}, {"softcap": 30.0}, {"window": 100}
    strict = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with jax.sharding.use_abstract_mesh(mesh), strict[0], strict[1]:
        for settings in every if H not in (192, 512) else every[2:]:
            backward = backward_kernels(H, settings.get("window"))
            step = jax.grad(functools.partial(loss, **settings), (0, 1, 2))
            traced = jax.jit(step).trace(*shapes(H, V, T=1000))
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            for kernel in ("fwd", "gather", *backward):
                assert f"tree_attention_{kernel}" in text


def test_several_devices_need_shard_map():
    """Inside it the kernels see local arrays; outside they decline rather than gather."""
    require()
    from jax._src.mesh import AbstractDevice

    mesh = jax.sharding.AbstractMesh(
        (2,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        abstract_device=AbstractDevice("NVIDIA H200", 132, "gpu"),
    )
    rows = jax.sharding.PartitionSpec("data")
    x = jax.ShapeDtypeStruct((2, 256, 2, 64), jnp.bfloat16)
    until = jax.ShapeDtypeStruct((2, 256), jnp.int32)

    def local(x, until):
        return attention(x, x, x, Context(until), impl="mosaic_gpu")

    def step(x, until):
        mapped = jax.shard_map(local, in_specs=(rows, rows), out_specs=rows, check_vma=False)
        return mapped(x, until).astype(jnp.float32).sum()

    with jax.sharding.use_abstract_mesh(mesh):
        with pytest.raises(NotImplementedError, match=r"\['data'\] have several devices"):
            jax.eval_shape(local, x, until)
        lowered = jax.jit(jax.grad(step)).trace(x, until).lower(lowering_platforms=("cuda",))
    assert "tree_attention_bwd" in lowered.as_text()


@pytest.mark.parametrize(
    "dtype, H, reason",
    [("float32", 64, "takes bfloat16"), ("bfloat16", 520, "head dim 520 is above 512")],
)
def test_declines_on_hopper(monkeypatch, dtype, H, reason):
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda: None)
    x = jnp.zeros((1, 128, 1, H), dtype)
    context = Context(jnp.full((1, 128), 128, jnp.int32))
    with pytest.raises(NotImplementedError, match=reason):
        attention(x, x, x, context, impl="mosaic_gpu")
    assert attention(x, x, x, context).shape == x.shape  # "auto" goes on to the next backend


def test_other_dims_are_filled_with_zeros(monkeypatch):
    """The kernels get dims that they have, the caller its own output."""
    seen = []

    def run(options, q, k, v, context, sinks):
        seen.append((q.shape[-1], k.shape[-1], v.shape[-1]))
        return reference.attention(q, k, v, context, scale=options.settings.scale, sinks=sinks)

    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda: None)
    monkeypatch.setattr(mosaic_gpu, "run", run)
    rng, until = np.random.default_rng(3), jnp.full((1, 20), 20, jnp.int32)
    for H, V in ((160, 96), (192, 192), (96, 96), (32, 64), (260, 64)):
        dims = (H, H, V)
        q, k, v = (jnp.asarray(rng.standard_normal((1, 20, 2, d)), jnp.bfloat16) for d in dims)
        actual, expected = (
            attention(q, k, v, Context(until), impl=impl) for impl in ("mosaic_gpu", "reference")
        )
        # Of bfloat16: sums of more terms may be rounded elsewhere.
        compared = [np.asarray(x, np.float32) for x in (actual, expected)]
        np.testing.assert_allclose(*compared, rtol=2**-7, atol=2**-7)
    assert seen == [(192, 192, 128), (256,) * 3, (128,) * 3, (64,) * 3, (512,) * 3]


def test_declines_without_a_hopper_gpu():
    if jax.default_backend() != "cpu":
        pytest.skip("this machine has an accelerator")
    x, until = jnp.zeros((1, 128, 1, 64), jnp.bfloat16), jnp.full((1, 128), 128, jnp.int32)
    with pytest.raises(NotImplementedError, match="needs an NVIDIA Hopper GPU|written for jax"):
        attention(x, x, x, Context(until), impl="mosaic_gpu")
