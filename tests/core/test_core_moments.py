"""Moments in fewer bits: against float64 that quantizes by search, on meshes, and their bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.batch import Batch
from jaxtrain.cli.estimate import bytes_per_device
from jaxtrain.config import OptimConfig
from jaxtrain.core.moments import QuantizedBlocks, dequantize, levels, quantize, store_moments
from jaxtrain.core.optimizer import build_optimizer
from jaxtrain.core.step import State, abstract_state, init_state, make_step
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.runs.checkpoint import Checkpoints

SHAPE, BLOCK = (2, 16, 256), 128
OPTIONS = {"b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


QMAP_SIGNED = [
    *(-0.8875, -0.6625, -0.4375, -0.2125, -0.0775, -0.0325, -0.0055, 0.0),
    *(0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0),
]
"""What torchao.optim's get_qmap_signed returns (create_dynamic_map(True, 3, 4))."""
QMAP_UNSIGNED = np.linspace(0, 1, 17)[1:]
"""What its get_qmap_unsigned returns."""


def search(x, signed, block=BLOCK, bits=8):
    """(codes, scales, values) in float64: the nearest level, but a second moment is not 0."""
    table = levels(signed).astype(np.float64)
    if bits == 4:
        table = np.asarray(QMAP_SIGNED if signed else QMAP_UNSIGNED)
    blocks = x.reshape(*x.shape[:-1], -1, block)
    scales = np.abs(blocks).max(-1)
    unit = blocks / np.where(scales > 0, scales, 1)[..., None]
    codes = np.abs(unit[..., None] - table).argmin(-1)
    codes = codes if signed or bits == 4 else np.maximum(codes, unit > 0)
    return codes.reshape(x.shape), scales, (table[codes] * scales[..., None]).reshape(x.shape)


def draw(seed, shape=SHAPE):
    """Numbers of very different sizes, as gradients are."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 10 ** rng.uniform(-6, 0, shape)).astype(np.float32)


def unpack(codes):
    """Return one code per number: torchao packs two into a byte, the first in the upper half."""
    return np.stack([np.asarray(codes) >> 4, np.asarray(codes) & 15], -1).reshape(SHAPE)


@pytest.fixture(scope="module")
def adam8():
    """(optimizer, its compiled update)."""
    optimizer = store_moments(optax.adamw(1e-2, **OPTIONS), "int8", block=BLOCK)
    return optimizer, jax.jit(optimizer.update)


@pytest.mark.parametrize("signed", [True, False])
def test_every_number_takes_the_nearest_level(signed):
    table = levels(signed)
    assert len(table) == len(set(table)) == 256 and (np.diff(table) > 0).all()
    # What bitsandbytes' create_dynamic_map returns: its ends, and the levels next to zero.
    assert table[-1] == 1 and table[int(np.abs(table).argmin())] == 0
    np.testing.assert_allclose(table[-2], 1 - 0.45 / (64 if signed else 128), rtol=1e-6)
    np.testing.assert_allclose(table[table > 0][0], 5.5e-7 if signed else 3.25e-7, rtol=1e-6)
    x = draw(0)
    x[0, 0], x[0, 1, ::3] = 0, 0  # a block of zeros, zeros within others
    # Just beside where one level ends and the next begins; 1 makes it the block's scale.
    middles = (table[:-1].astype(np.float64) + table[1:]) / 2
    x[0, 2:4] = np.resize(np.concatenate([middles - 2e-7, middles + 2e-7]), (2, 256))
    x[0, 2:4, ::BLOCK] = 1
    x = x if signed else np.abs(x)
    found = jax.jit(quantize, static_argnums=(1, 2))(x, signed, BLOCK)
    codes, scales, values = search(x.astype(np.float64), signed)
    np.testing.assert_array_equal(found.scales, scales.astype(np.float32))
    # Only a number within rounding of a middle may fall to the other side.
    differs = np.asarray(found.codes) != codes
    assert differs.mean() < 1e-3 and np.abs(found.codes - codes.astype(int)).max() <= 1
    np.testing.assert_allclose(
        np.asarray(dequantize(found, signed))[~differs], values[~differs], rtol=1e-6
    )
    np.testing.assert_array_equal(dequantize(found, signed)[0, 0], 0)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_of_4_bits_are_those_of_torchao(signed):
    np.testing.assert_allclose(
        levels(signed, 4), QMAP_SIGNED if signed else QMAP_UNSIGNED, rtol=1e-6, atol=1e-9
    )
    x = draw(0)
    x[0, 0], x[0, 1, ::3] = 0, 0
    x = x if signed else np.abs(x)
    found = jax.jit(quantize, static_argnums=(1, 2, 3))(x, signed, BLOCK, 4)
    assert found.codes.shape == (2, 16, 128) and found.codes.dtype == jnp.uint8
    codes, scales, values = search(x.astype(np.float64), signed, bits=4)
    np.testing.assert_array_equal(found.scales, scales.astype(np.float32))
    differs = unpack(found.codes) != codes  # only at a middle, within rounding
    assert differs.mean() < 1e-3 and np.abs(unpack(found.codes) - codes.astype(int)).max() <= 1
    read = np.asarray(dequantize(found, signed, 4))
    np.testing.assert_allclose(read[~differs], values[~differs], rtol=1e-6)
    np.testing.assert_array_equal(read[0, 0], 0)


@pytest.mark.parametrize("bits", [8, 4])
def test_adamw_with_moments_in_8_or_4_bits_is_that_of_float64(adam8, bits):
    optimizer, update = adam8
    if bits == 4:
        optimizer = store_moments(optax.adamw(1e-2, **OPTIONS), "int4", block=BLOCK)
        update = jax.jit(optimizer.update)
    params = {"w": jnp.asarray(draw(1))}
    state, exact = optimizer.init(params), draw(1).astype(np.float64)
    m = v = np.zeros(SHAPE)
    for step in range(1, 5):
        grad = draw(10 + step)
        updates, state = update({"w": grad}, state, params)
        params = optax.apply_updates(params, updates)
        m, v = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad.astype(np.float64) ** 2
        rate = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8)
        exact = exact - 1e-2 * (rate + 0.1 * exact)
        (m_codes, _, m), (v_codes, _, v) = search(m, True, bits=bits), search(v, False, bits=bits)
    own = state.inner[0]
    for stored, codes in ((own.mu["w"], m_codes), (own.nu["w"], v_codes)):
        assert isinstance(stored, QuantizedBlocks) and stored.codes.dtype == jnp.uint8
        # A number at a middle may take either level, and carries that on.
        read = np.asarray(stored.codes) if bits == 8 else unpack(stored.codes)
        assert (read != codes).mean() < 2e-3
    # In float32; a step is long where a second moment is far below its block's largest.
    moved = np.abs(exact - draw(1)) + 1e-2
    assert (np.abs(np.asarray(params["w"]) - exact) / moved).max() < 1e-4


def test_a_bfloat16_second_moment_does_not_stall():
    """Gradients of 1: the second moment is 1 - 0.999^n. To the nearest it stops at a half, where
    what comes is below half a unit in the last place."""
    count, shape = 2000, (32, 128)

    def run(optimizer, dtype):
        params = {"w": jnp.ones(shape, dtype)}

        def body(_, state):
            return optimizer.update(params, state, params)[1]

        return jax.jit(lambda start: jax.lax.fori_loop(0, count, body, start))(
            optimizer.init(params)
        )

    nearest = run(optax.scale_by_adam(0.9, 0.999), jnp.bfloat16).nu["w"]
    state = run(store_moments(optax.scale_by_adam(0.9, 0.999), "bfloat16"), jnp.float32)
    ours = state.inner.nu["w"]
    assert nearest.dtype == ours.dtype == state.inner.mu["w"].dtype == jnp.bfloat16
    assert float(nearest.astype(jnp.float32).mean()) == 0.5
    ours = np.asarray(ours, np.float64)
    # 4,096 numbers with a spread of 0.02: the mean is off by 3e-4.
    assert abs(ours.mean() - (1 - 0.999**count)) < 2e-3 and 0 < ours.std() < 0.05


CUT = (2, 32, 128)
"""An axis that tensor parallelism cuts finer than a block: devices agree on its scale."""


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("int8", SHAPE)]
    + [
        pytest.param(*one, marks=pytest.mark.slow)
        for one in [("int8", CUT), ("int4", SHAPE), ("int4", CUT), ("bfloat16", SHAPE)]
    ],
)
def test_a_mesh_stores_the_very_bits_of_one_device(kind, shape, adam8):
    mesh = make_mesh(fsdp=2, tensor=2)
    optimizer = store_moments(optax.adamw(1e-2, **OPTIONS), kind, block=BLOCK)
    alone = adam8[1] if kind == "int8" else jax.jit(optimizer.update)
    place = NamedSharding(mesh, PartitionSpec(None, "fsdp", "tensor"))
    values = {"w": jnp.asarray(draw(1, shape))}
    spread = jax.device_put(values, {"w": place})
    many, one = init_state(spread, optimizer).opt_state, optimizer.init(values)
    update = jax.jit(optimizer.update)
    for step in range(2):
        grads = {"w": jnp.asarray(draw(step, shape))}
        _, many = update(jax.device_put(grads, {"w": place}), many, spread)
        _, one = alone(grads, one, values)
    for left, right in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
    if kind.startswith("int"):
        codes, scales = many.inner[0].nu["w"]
        assert codes.sharding.spec == place.spec
        held = 2 if shape == SHAPE else 1
        assert scales.sharding.shard_shape(scales.shape)[-1] * held == scales.shape[-1]


PARAMS = {
    "embed.embedding": (512, 64),
    "stack.block.mlp.up.kernel": (2, 64, 256),
    "stack.block.mlp.down.kernel": (2, 256, 64),
    "stack.block.norm.scale": (2, 64),
    "stack.block.small.kernel": (2, 16, 16),
    "lm_head.embedding": (512, 64),
}
"""Of these up (blocks of 128), down and the head (of 64) are stored in 8 bits."""


@pytest.mark.parametrize(
    ("name", "kind", "bytes_each"),
    [("adamw", "params", 8), ("adamw", "float32", 8), ("adamw", "bfloat16", 4)]
    + [("adamw", "int8", None), ("lion", "int8", None), ("muon", "bfloat16", None)]
    + [("adamw", "int4", None), ("schedule_free_adamw", "int4", None)],
)
def test_bytes_of_the_state_are_what_the_config_says(name, kind, bytes_each):
    place = NamedSharding(make_mesh(fsdp=2, tensor=2), PartitionSpec())
    shapes = {
        path: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)
        for path, shape in PARAMS.items()
    }
    optim = OptimConfig(name=name, moments=kind)
    optimizer = build_optimizer(optim, optax.constant_schedule(1.0), shapes)
    found = bytes_per_device(abstract_state(shapes, optimizer).opt_state)
    sizes = {path: int(np.prod(shape)) for path, shape in PARAMS.items()}
    total, matrices = sum(sizes.values()), 2 * 2 * 64 * 256
    if bytes_each is None:
        packed = matrices + sizes["lm_head.embedding"]
        scales = matrices // 2 // 128 + (packed - matrices // 2) // 64
        codes = packed // 2 if kind == "int4" else packed
        expected = codes + 4 * scales + 4 * (total - packed)
        expected *= 2 if name == "adamw" else 1
        if name == "schedule_free_adamw":  # one moment, and z in float32
            expected += 4 * total
        if name == "muon":  # matrices have one moment, all else adamw's two
            one = matrices + sizes["stack.block.small.kernel"]
            expected = 2 * one + 4 * (total - one)
    else:
        expected = bytes_each * total
    # Counters of steps come on top.
    assert expected < found <= expected + 64


def test_moments_of_weights_in_bfloat16_may_be_float32():
    params = {"up.kernel": jnp.ones((64, 64), jnp.bfloat16)}
    optim = OptimConfig(learning_rate=0.5, lr_scheduler="constant", moments="float32")
    optimizer = build_optimizer(optim, optax.constant_schedule(0.5), params)
    updates, state = optimizer.update(params, optimizer.init(params), params)
    assert updates["up.kernel"].dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(updates["up.kernel"], np.float32), -0.5)
    assert state.inner[0].nu["up.kernel"].dtype == jnp.float32


def test_moments_on_the_host_take_the_same_steps(tmp_path):
    """They are there between steps, in checkpoints and after one is read, and the numbers are those
    of moments on the devices; a step that is not finite leaves them as they were."""
    place = NamedSharding(make_mesh(fsdp=2, tensor=2), PartitionSpec(None, "fsdp", "tensor"))
    start = jnp.asarray(draw(1))
    optimizer = store_moments(optax.adamw(1e-2, **OPTIONS), "int8", block=BLOCK)
    tokens = jnp.zeros((1, 4, 2), jnp.int32)
    batch = Batch(tokens, tokens, tokens, tokens, {"nll": jnp.ones((1, 4, 2))})

    def loss(params, micro):
        return {"nll": jnp.sum(jnp.cos(params["w"])) * jnp.sum(micro.weights["nll"])}, {}

    step = make_step(lambda params: params, loss, {"nll": 1.0}, optimizer, 1.0)
    ends = {}
    for offload in (False, True):
        params = {"w": jax.device_put(start, place)}
        state = init_state(params, optimizer, offload=offload)
        for fine in (True, True, False):
            state, _ = step(state, batch, {}, fine)
        ends[offload] = state
    for left, right in zip(*map(jax.tree.leaves, ends.values()), strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))
    found = ends[True]
    assert int(found.step) == 2 and found.params["w"].sharding.memory_kind == "device"

    def check(opt_state):
        stored = opt_state.inner[0].nu["w"]
        for part in stored:
            assert part.sharding.memory_kind == "pinned_host"
            assert part.sharding.spec == place.spec

    check(found.opt_state)
    store = Checkpoints(tmp_path)
    store.save(2, found.tree(), {})
    shapes = abstract_state(found.params, optimizer, offload=True)
    read = State.of_tree(store.restore(shapes.tree()).arrays)
    store.close()
    check(read.opt_state)
    read, _ = step(read, batch, {}, True)
    check(read.opt_state)
    assert bytes_per_device(shapes.opt_state) == bytes_per_device(found.opt_state)


@pytest.mark.slow
def test_torchao_adamw4bit_takes_the_same_steps():
    torch = pytest.importorskip("torch")
    torchao = pytest.importorskip("torchao.optim", reason="torchao is not installed")
    rng = np.random.default_rng(0)
    start = rng.standard_normal((64, 1024)).astype(np.float32)
    theirs = torch.nn.Parameter(torch.tensor(start))
    other = torchao.AdamW4bit([theirs], lr=1e-2, weight_decay=0.1, block_size=128)
    optimizer = store_moments(optax.adamw(1e-2, **OPTIONS), "int4", block=128)
    ours = {"w": jnp.asarray(start)}
    state, update = optimizer.init(ours), jax.jit(optimizer.update)
    for _ in range(20):
        grad = rng.standard_normal(start.shape).astype(np.float32)
        theirs.grad = torch.tensor(grad)
        other.step()
        updates, state = update({"w": grad}, state, ours)
        ours = optax.apply_updates(ours, updates)
    moved = np.abs(start - np.asarray(ours["w"])).mean()
    apart = np.abs(theirs.detach().numpy() - np.asarray(ours["w"])).mean()
    assert apart < 2e-3 * moved


@pytest.mark.slow
def test_bitsandbytes_adamw8bit_takes_the_same_steps():
    torch = pytest.importorskip("torch")
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    rng = np.random.default_rng(0)
    start = rng.standard_normal((64, 1024)).astype(np.float32)
    theirs = torch.nn.Parameter(torch.tensor(start))
    other = bitsandbytes.optim.AdamW8bit([theirs], lr=1e-2, weight_decay=0.1)
    optimizer = store_moments(optax.adamw(1e-2, **OPTIONS), "int8", block=256)
    ours = {"w": jnp.asarray(start)}
    state, update = optimizer.init(ours), jax.jit(optimizer.update)
    for _ in range(20):
        grad = rng.standard_normal(start.shape).astype(np.float32)
        theirs.grad = torch.tensor(grad)
        other.step()
        updates, state = update({"w": grad}, state, ours)
        ours = optax.apply_updates(ours, updates)
    moved = np.abs(start - np.asarray(ours["w"])).mean()
    apart = np.abs(theirs.detach().numpy() - np.asarray(ours["w"])).mean()
    # Its CPU code finds levels by an approximate search: 2 % of the codes are a neighbor's.
    assert apart < 2e-3 * moved
