"""The TPU kernels of tree attention without a TPU: interpreted numerics and lowering."""

import contextlib
import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jaxtrain_kernels import Context, attention, testing
from jaxtrain_kernels.tree_attention import tpu, tpu_kernels
from other_devices import run_script
from test_kernels_tree_attention import (
    CI_CASES,
    arguments,
    case_mask,
    compare,
    numpy_attention,
    run,
)


def dense_visible(since, until, T, positions, key_positions, window):
    rows = np.arange(T)[None, :, None]
    mask = (since[:, None] <= rows) & (rows < until[:, None])
    return mask & (positions[:, :, None] - key_positions[:, None] < window)


def options(H, window=None, softcap=None, q_block=128, k_block=128):
    return tpu.Options(window, softcap, H**-0.5, q_block, k_block)


@contextlib.contextmanager
def interpreted():
    """TPU memories simulated on the CPU: NaN where nothing was written; fails on a data race."""
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        yield
    assert not interpret_pallas_call.races.races_found


SLOW = {"tree_h2_2_d128", "documents_rows2_h2_1_d64", "tree_h4_1_d64_softcap"}
THOROUGH = {"tree_h2_1_d256", "unrolled_h2_1_d64", "blocks_h2_1_d64"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name,
            marks=[pytest.mark.slow] * (case.name in SLOW)
            + [pytest.mark.thorough] * (case.name in THOROUGH),
        )
        for case in CI_CASES
    ],
)
def test_interpreted_cases(case):
    """Output and gradients by the 2x rule, and no data race."""
    inputs = case.inputs()
    context, provided = arguments(case, inputs)
    setting = options(case.head_dim, case.window, case.softcap)

    def kernels(q, k, v):
        return tpu.run(setting, q, k, v, context)

    def plain(q, k, v):
        return attention(q, k, v, context, impl="reference", **provided)

    with interpreted():
        mask = case_mask(case, inputs)
        compare(inputs, mask, jnp.dtype("bfloat16"), kernels, plain, case.softcap)


@pytest.mark.parametrize(
    "q_block, k_block", [(128, 256), pytest.param(256, 128, marks=pytest.mark.slow)]
)
def test_interpreted_intervals_with_empty_rows_and_fewer_queries(q_block, k_block):
    """`since` blocks, T != S, two rows, a window with own key positions; queries and keys that
    meet nobody are zeros, never NaN."""
    rng = np.random.default_rng(8)
    B, T, S, H, window = 2, 200, 300, 64, 25
    since = np.minimum(np.arange(S) // 2 * 2, T) * np.ones((B, 1))
    until = np.minimum(since + rng.integers(0, 40, (B, S)), [[90], [170]])
    positions, key_positions = np.arange(T) * np.ones((B, 1)), rng.integers(0, T, (B, S))
    mask = dense_visible(since, until, T, positions, key_positions, window)
    empty_rows, empty_keys = ~mask.any(2), ~mask.any(1)
    assert empty_rows[:, 170:].all() and empty_keys.any()
    shapes = {"q": (B, T, 2, H), "k": (B, S, 1, H), "v": (B, S, 1, H), "d_out": (B, T, 2, H)}
    inputs = {n: rng.standard_normal(shape) for n, shape in shapes.items()}
    metadata = [jnp.asarray(x, jnp.int32) for x in (until, since, positions, key_positions)]
    context = Context(*metadata)
    setting = options(H, window, q_block=q_block, k_block=k_block)
    kernels = functools.partial(tpu.run, setting, context=context)
    plain = functools.partial(attention, context=context, window=window, impl="reference")
    low = [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in inputs.values()]
    exact = numpy_attention(*low, mask)
    bar = run(*low, jnp.bfloat16, plain)
    with interpreted():
        actual = run(*low, jnp.bfloat16, kernels)
    empty = (empty_rows, empty_rows, empty_keys, empty_keys)
    for name, a, e, b, none in zip(
        ("out", "dq", "dk", "dv"), actual, exact, bar, empty, strict=True
    ):
        testing.assert_accurate(a, e, b, jnp.bfloat16, name)
        assert not np.asarray(a, np.float32)[none].any()


@pytest.mark.parametrize("seed", range(10))
def test_pairs_are_those_that_meet(seed):
    rng = np.random.default_rng(seed)
    B, tiles, other_blocks = 2, 5, 7
    any_visible = rng.random((B, tiles, other_blocks)) < 0.3
    any_visible[0, 2] = False
    every = any_visible & (rng.random(any_visible.shape) < 0.5)
    count, tile, code = map(
        np.asarray, tpu.list_pairs(jnp.asarray(any_visible), jnp.asarray(every))
    )
    actual = np.zeros((B * tiles, B * other_blocks), int)
    flags = code[:count] & (2**tpu_kernels.FLAG_BITS - 1)
    meets = flags & tpu_kernels.MEETS != 0
    for t, c, f in zip(tile, code, flags, strict=False):
        if f & tpu_kernels.MEETS:
            actual[t, c >> tpu_kernels.FLAG_BITS] = 2 if f & tpu_kernels.MASKED else 1
    expected = np.zeros((B, tiles, B, other_blocks), int)
    for b in range(B):
        expected[b, :, b] = np.where(every[b], 1, 2) * any_visible[b]
    np.testing.assert_array_equal(actual, expected.reshape(actual.shape))
    assert meets.sum() == any_visible.sum()
    # Entries of a tile follow each other; its first and last say so; every tile is there.
    change = np.diff(tile[:count]) != 0
    np.testing.assert_array_equal(flags & tpu_kernels.FIRST != 0, np.r_[True, change])
    np.testing.assert_array_equal(flags & tpu_kernels.LAST != 0, np.r_[change, True])
    np.testing.assert_array_equal(np.unique(tile[:count]), np.arange(B * tiles))


def tpu_mesh(size=1, kind="TPU v5 lite"):
    from jax._src.mesh import AbstractDevice

    return jax.sharding.AbstractMesh(
        (size,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        abstract_device=AbstractDevice(kind, 1, "tpu"),
    )


def loss(q, k, v, until, positions, **settings):
    out = attention(q, k, v, Context(until, positions=positions), **settings)
    return out.astype(jnp.float32).sum()


def shapes(H, T=1024, N=4, K=2):
    heads = [jax.ShapeDtypeStruct((1, T, n, H), jnp.bfloat16) for n in (N, K, K)]
    return (*heads, *[jax.ShapeDtypeStruct((1, T), jnp.int32)] * 2)


@pytest.mark.parametrize("settings", [{}, {"softcap": 30.0, "window": 100}], ids=["plain", "all"])
@pytest.mark.parametrize("H", [64, 128, 256])
def test_auto_lowers_to_these_kernels_for_a_tpu(H, settings):
    """On a machine without one: shapes of blocks and what Mosaic can express are checked here."""
    with jax.sharding.use_abstract_mesh(tpu_mesh()):
        step = jax.jit(jax.grad(functools.partial(loss, **settings), (0, 1, 2)))
        text = step.trace(*shapes(H)).lower(lowering_platforms=("tpu",)).as_text()
    for kernel in ("tree_attention_fwd", "tree_attention_dkv", "tree_attention_dq"):
        assert kernel in text


@pytest.mark.parametrize("names", [("attention_out", "attention_lse"), ()])
def test_remat_can_save_the_residuals(names):
    """With their names saved, nothing in the backward reads a second forward: XLA drops it."""
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    with jax.sharding.use_abstract_mesh(tpu_mesh()):
        step = jax.grad(jax.checkpoint(loss, policy=policy), (0, 1, 2))
        traced = jax.make_jaxpr(step)(*shapes(128))
    (remat,) = (e for e in traced.jaxpr.eqns if e.primitive.name == "remat2")
    equations = remat.params["jaxpr"].eqns
    (again,) = (e for e in equations if e.params.get("name") == "tree_attention_fwd")
    read = {id(x) for e in equations for x in e.invars}
    assert any(id(x) in read for x in again.outvars) == (not names)


def test_several_devices_need_shard_map():
    with jax.sharding.use_abstract_mesh(tpu_mesh(size=2)):
        with pytest.raises(NotImplementedError, match=r"\['data'\] have several devices"):
            jax.eval_shape(functools.partial(loss, impl="tpu"), *shapes(64))


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": "float32"}, "takes bfloat16"),
        ({"H": 264}, "head dim 264 is above 256"),
        ({"T": 512 * 260}, "67600 pairs of blocks"),
    ],
)
def test_declines_on_a_tpu(change, reason):
    case = {"dtype": "bfloat16", "H": 64, "T": 128} | change
    x = jax.ShapeDtypeStruct((1, case["T"], 1, case["H"]), case["dtype"])
    context = Context(jax.ShapeDtypeStruct((1, case["T"]), jnp.int32))
    with jax.sharding.use_abstract_mesh(tpu_mesh()):
        with pytest.raises(NotImplementedError, match=reason):
            jax.eval_shape(functools.partial(attention, impl="tpu"), x, x, x, context)


def test_declines_elsewhere():
    if "TPU" in jax.devices()[0].device_kind:
        pytest.skip("this machine has a TPU")
    x, until = jnp.zeros((1, 128, 1, 64), jnp.bfloat16), jnp.full((1, 128), 128, jnp.int32)
    with pytest.raises(NotImplementedError, match="needs a TPU, the device is"):
        attention(x, x, x, Context(until), impl="tpu")


@pytest.mark.slow
def test_compiles_for_a_tpu():
    """The TPU compiler takes the kernels: layouts, alignment and VMEM of every head dim."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the wheel libtpu")
    printed = run_script(Path(__file__).with_name("tpu_topology.py"))
    assert printed.count("compiled") == 9, printed
