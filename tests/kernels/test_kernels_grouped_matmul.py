"""grouped_matmul and the MoE layer on it, against float64 loops over tokens and experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import testing
from jaxtrain_kernels.grouped_matmul import grouped_matmul, mosaic_gpu, routing
from jaxtrain_kernels.grouped_matmul.ffn import Adapters
from jaxtrain_kernels.grouped_matmul.moe import moe_ffn
from mosaic_interpreter import interpreted, require

T, K, E = 40, 2, 6

CHOICES = {
    "random": lambda rng: np.stack([rng.permutation(E)[:K] for _ in range(T)]),
    "all_to_one": lambda rng: np.full((T, K), 3),
    "two_empty": lambda rng: rng.integers(0, 3, (T, K)) * 2,
}


def chosen(name):
    return CHOICES[name](np.random.default_rng(0)).astype(np.int32)


@pytest.mark.parametrize("block", [1, 4, 128])
@pytest.mark.parametrize("name", CHOICES)
def test_route_places_every_choice_once(name, block):
    experts = chosen(name)
    segments, row_token, slot = jax.tree.map(np.asarray, routing.route(experts, E, block))
    assert len(np.unique(slot)) == T * K, "no two choices share a row"
    np.testing.assert_array_equal(row_token[slot], np.tile(np.arange(T)[:, None], K))
    assert (row_token < T).sum() == T * K, "the rest is padding"
    counts = np.bincount(experts.ravel(), minlength=E)
    np.testing.assert_array_equal(segments.ends - segments.starts, -(-counts // block) * block)
    assert (segments.starts[experts] <= slot).all() and (slot < segments.ends[experts]).all()
    for index in range(segments.active[0]):
        assert segments.starts[segments.group[index]] <= index * block
        assert (index + 1) * block <= segments.ends[segments.group[index]]


def numpy_moe(x, experts, gates, w_gate, w_up, w_down, g):
    """Output and gradients of x, gates and weights; float64, one token and choice at a time."""
    arrays = (x, gates, w_gate, w_up, w_down, g)
    x, gates, w_gate, w_up, w_down, g = (np.asarray(a, np.float64) for a in arrays)
    out = np.zeros_like(x)
    dx, d_gates, d_gate_w, d_up_w, d_down = (
        np.zeros_like(a) for a in (x, gates, w_gate, w_up, w_down)
    )
    for t in range(len(x)):
        for k, e in enumerate(experts[t]):
            gate, up = x[t] @ w_gate[e], x[t] @ w_up[e]
            sigmoid = 1 / (1 + np.exp(-gate))
            act = gate * sigmoid
            y = (act * up) @ w_down[e]
            out[t] += gates[t, k] * y
            d_gates[t, k] = g[t] @ y
            d_down[e] += np.outer(act * up, gates[t, k] * g[t])
            d_mid = w_down[e] @ (gates[t, k] * g[t])
            d_gate, d_up = d_mid * up * (sigmoid + act * (1 - sigmoid)), d_mid * act
            d_gate_w[e] += np.outer(x[t], d_gate)
            d_up_w[e] += np.outer(x[t], d_up)
            dx[t] += w_gate[e] @ d_gate + w_up[e] @ d_up
    return out, dx, d_gates, d_gate_w, d_up_w, d_down


def moe_inputs(D, F, name="random", seed=0):
    rng = np.random.default_rng(seed)
    arrays = {
        "x": rng.standard_normal((T, D)),
        "gates": rng.random((T, K)),
        "w_gate": rng.standard_normal((E, D, F)) * D**-0.5,
        "w_up": rng.standard_normal((E, D, F)) * D**-0.5,
        "w_down": rng.standard_normal((E, F, D)) * F**-0.5,
        "g": rng.standard_normal((T, D)),
    }
    return chosen(name), arrays


GIVEN = ("x", "gates", "w_gate", "w_up", "w_down")
NAMES = ("out", "dx", "d_gates", "d_w_gate", "d_w_up", "d_w_down")


def run_moe(experts, arrays, dtype, jit=True, **options):
    arguments = [jnp.asarray(arrays[n], dtype) for n in GIVEN]

    def layer(x, *rest):
        return moe_ffn(x, jnp.asarray(experts), *rest, **options)

    out, pull = jax.vjp(jax.jit(layer) if jit else layer, *arguments)
    return out, *pull(jnp.asarray(arrays["g"], dtype))


def exact_moe(experts, arrays):
    return numpy_moe(arrays["x"], experts, *(arrays[n] for n in (*GIVEN[1:], "g")))


@pytest.mark.parametrize("impl", ["reference", "xla"])
@pytest.mark.parametrize("name", CHOICES)
def test_moe_layer_matches_a_loop_over_tokens(name, impl):
    experts, arrays = moe_inputs(8, 5, name)
    exact = exact_moe(experts, arrays)
    actual = run_moe(experts, arrays, jnp.float32, block=4, impl=impl)
    for label, a, e in zip(NAMES, actual, exact, strict=True):
        # float32 sums of at most 80 terms of order 1
        np.testing.assert_allclose(np.asarray(a), e, rtol=0, atol=2e-5, err_msg=label)


@pytest.mark.parametrize("impl", ["reference", "xla"])
def test_experts_without_a_gate(impl):
    """Squared ReLU, against a loop over tokens."""
    experts, arrays = moe_inputs(8, 5)
    x, gates, _, w_up, w_down = (jnp.asarray(arrays[n], jnp.float32) for n in GIVEN)

    def loop(x, gates, w_up, w_down):
        rows = [
            sum(
                gates[t, k] * jnp.square(jax.nn.relu(x[t] @ w_up[e])) @ w_down[e]
                for k, e in enumerate(experts[t])
            )
            for t in range(len(x))
        ]
        return jnp.stack(rows)

    def layer(x, gates, w_up, w_down):
        options = {"activation": "relu2", "block": 4, "impl": impl}
        return moe_ffn(x, jnp.asarray(experts), gates, None, w_up, w_down, **options)

    arguments, g = (x[:6], gates[:6], w_up, w_down), jnp.asarray(arrays["g"][:6], jnp.float32)
    experts = experts[:6]
    expected, pull = jax.vjp(loop, *arguments)
    actual, push = jax.vjp(jax.jit(layer), *arguments)
    for a, b in zip((actual, *push(g)), (expected, *pull(g)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


def test_bfloat16_by_the_rule():
    experts, arrays = moe_inputs(16, 8)
    low = {n: np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64) for n, a in arrays.items()}
    exact = exact_moe(experts, low)
    actual = run_moe(experts, low, jnp.bfloat16, block=8, impl="xla")
    plain = run_moe(experts, low, jnp.bfloat16, block=8, impl="reference")
    for name, a, e, p in zip(NAMES, actual, exact, plain, strict=True):
        testing.assert_accurate(a, e, p, jnp.bfloat16, name)


def test_a_token_does_not_depend_on_its_neighbors():
    """Dropless: what a tree needs to equal its branches, however unbalanced the experts."""
    experts, arrays = moe_inputs(8, 5, "all_to_one")
    full = run_moe(experts, arrays, jnp.float32, block=8)[0]
    x, gates, *weights = (jnp.asarray(arrays[n], jnp.float32) for n in GIVEN)
    for t in (0, 17, T - 1):
        item = slice(t, t + 1)
        alone = moe_ffn(x[item], jnp.asarray(experts[item]), gates[item], *weights, block=8)
        # the same sums in blocks of other rows
        np.testing.assert_allclose(alone[0], full[t], rtol=0, atol=1e-6)


def test_choices_of_other_devices_add_nothing():
    """Each half of the experts on its own, numbers outside meaning nobody, adds up to the whole."""
    experts, arrays = moe_inputs(8, 5)
    full = run_moe(experts, arrays, jnp.float32, block=4)
    halves = []
    for first in (0, E // 2):
        local = {
            n: a[first : first + E // 2] if n.startswith("w_") else a for n, a in arrays.items()
        }
        halves.append(run_moe(experts - first, local, jnp.float32, block=4))
    for name, *parts, total in zip(NAMES, *halves, full, strict=True):
        joined = np.concatenate(parts) if name.startswith("d_w") else np.add(*parts)
        # float32 sums in another order
        np.testing.assert_allclose(joined, total, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("impl", ["reference", "xla"])
@pytest.mark.parametrize(
    "parts", [("gate", "up", "down"), pytest.param(("down",), marks=pytest.mark.thorough)]
)
def test_adapters_equal_merged_experts(parts, impl):
    """x W + (x a) b is x (W + a b), in output and in the gradients of x, a and b."""
    experts, arrays = moe_inputs(8, 5)
    rng = np.random.default_rng(7)
    R = 3
    shapes = {n: arrays["w_" + n].shape for n in parts}
    factors = {
        n: tuple(jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((E, i, R), (E, R, o)))
        for n, (_, i, o) in shapes.items()
    }
    x, gates, *weights = (jnp.asarray(arrays[n], jnp.float32) for n in GIVEN)
    options = {"block": 4, "impl": impl}
    chosen = jnp.asarray(experts)

    def adapted(x, factors):
        return moe_ffn(x, chosen, gates, *weights, adapters=Adapters(**factors), **options)

    def merged(x, factors):
        wide = {n: w + (factors[n][0] @ factors[n][1] if n in factors else 0) for n, w in named}
        return moe_ffn(x, chosen, gates, *wide.values(), **options)

    named = list(zip(("gate", "up", "down"), weights, strict=True))
    g = jnp.asarray(arrays["g"], jnp.float32)
    results = []
    for layer in (adapted, merged):
        out, pull = jax.vjp(jax.jit(layer), x, factors)
        results.append((out, *jax.tree.leaves(pull(g))))
    for a, b in zip(*results, strict=True):
        # float32 sums of at most 80 terms of order 10
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu"])
def test_other_activations(activation):
    """With one expert for all tokens, the layer is dense."""
    _, arrays = moe_inputs(8, 5)
    x, gates, *weights = (jnp.asarray(arrays[n], jnp.float32) for n in GIVEN)
    gate, up, down = (w[0] for w in weights)
    item = jnp.zeros((T, 1), jnp.int32)
    actual = moe_ffn(x, item, gates[:, :1], *weights, activation=activation)
    act = {"relu": jax.nn.relu}.get(activation)
    act = act or (lambda x: jax.nn.gelu(x, approximate=activation != "gelu"))
    np.testing.assert_allclose(
        actual, gates[:, :1] * ((act(x @ gate) * (x @ up)) @ down), atol=1e-5
    )


def test_frozen_experts_have_no_gradient():
    experts, arrays = moe_inputs(8, 5)
    frozen = run_moe(experts, arrays, jnp.float32, block=4, freeze_experts=True)
    trained = run_moe(experts, arrays, jnp.float32, block=4)
    np.testing.assert_array_equal(frozen[1], trained[1])
    for index in (3, 4, 5):
        assert not np.asarray(frozen[index]).any() and np.asarray(trained[index]).any()


def problem(D, F, experts=4, tokens=200):
    rng = np.random.default_rng(1)
    choice = rng.choice([0, 2, 3], (tokens, 1), p=[0.7, 0.2, 0.1]).astype(np.int32)  # 1 is empty
    routed = routing.route(jnp.asarray(choice), experts)
    rows = routing.gather_in(jnp.asarray(rng.standard_normal((tokens, D)), jnp.bfloat16), routed)
    w = jnp.asarray(rng.standard_normal((experts, D, F)) * D**-0.5, jnp.bfloat16)
    dy = routing.gather_in(jnp.asarray(rng.standard_normal((tokens, F)), jnp.bfloat16), routed)
    return routed.segments, rows, w, dy


def test_interpreted_kernels():
    """Forward, dx and dw by the rule, an expert without rows, unused blocks, no data race."""
    segments, x, w, dy = problem(128, 256)
    bounds = list(zip(np.asarray(segments.starts), np.asarray(segments.ends), strict=True))
    x64, w64, dy64 = (np.asarray(a, np.float64) for a in (x, w, dy))
    y, dx, dw = np.zeros((len(x), 256)), np.zeros(x.shape), np.zeros(w.shape)
    for e, (start, end) in enumerate(bounds):
        y[start:end] = x64[start:end] @ w64[e]
        dx[start:end] = dy64[start:end] @ w64[e].T
        dw[e] = x64[start:end].T @ dy64[start:end]

    def both(function):
        out, pull = jax.vjp(function, x, w)
        return out, *pull(dy)

    plain = both(lambda x, w: grouped_matmul(x, w, segments, impl="reference"))
    with interpreted(detect_races=True):
        actual = both(lambda x, w: mosaic_gpu.run(False, x, w, segments))
    for name, a, e, p in zip(("y", "dx", "dw"), actual, (y, dx, dw), plain, strict=True):
        testing.assert_accurate(a, e, p, jnp.bfloat16, name)
    assert not np.asarray(actual[2], np.float32)[1].any()


def test_lowers_for_a_hopper_gpu():
    require()
    from jax._src.mesh import AbstractDevice

    device = AbstractDevice("NVIDIA H200", 132, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)

    def loss(x, experts, gates, *weights):
        return moe_ffn(x, experts, gates, *weights, impl="mosaic_gpu").astype(jnp.float32).sum()

    shapes = [(256, 256), *[(8, 256, 256)] * 3]
    x, *weights = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)
    experts = jax.ShapeDtypeStruct((256, 2), jnp.int32)
    gates = jax.ShapeDtypeStruct((256, 2), jnp.float32)
    with jax.sharding.use_abstract_mesh(mesh):
        step = jax.jit(jax.grad(loss, (0, 2, 3, 4, 5)))
        text = step.trace(x, experts, gates, *weights).lower(lowering_platforms=("cuda",))
    for kernel in ("grouped_product", "grouped_weight_gradient"):
        assert kernel in text.as_text()


@pytest.mark.parametrize(
    "dtype, block, F, reason",
    [
        ("float32", 128, 128, "takes bfloat16 rows"),
        ("bfloat16", 64, 128, "takes blocks of 128 rows, got 64"),
        ("bfloat16", 128, 96, "128 and 96 columns must be multiples of 64, at least 128"),
    ],
)
def test_declines(monkeypatch, dtype, block, F, reason):
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda: None)
    routed = routing.route(jnp.zeros((8, 1), jnp.int32), 2, block)
    x, w = jnp.zeros((routed.row_token.shape[0], 128), dtype), jnp.zeros((2, 128, F), dtype)
    with pytest.raises(NotImplementedError, match=reason):
        grouped_matmul(x, w, routed.segments, impl="mosaic_gpu")
    assert grouped_matmul(x, w, routed.segments).shape == (x.shape[0], F)


def test_shapes_that_do_not_fit():
    routed = routing.route(jnp.zeros((8, 1), jnp.int32), 2, 4)
    with pytest.raises(ValueError, match="2 experts and 4 blocks of rows; want"):
        grouped_matmul(jnp.zeros((16, 8)), jnp.zeros((3, 8, 8)), routed.segments)
