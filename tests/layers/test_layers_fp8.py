"""Products in FP8: scales, the three products and their gradients, which Linears take them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from models.tiny_models import pack

from jaxtrain.config.load import validate_config
from jaxtrain.errors import UserError
from jaxtrain.layers.fp8 import FORWARD, GRADIENTS, Fp8Product, quantize, use_fp8
from jaxtrain.layers.linear import ExpertLinear, Linear, PreciseLinear
from jaxtrain.models import build, families

RANDOM = np.random.default_rng(0)
TINY = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
    "intermediate_size": 32,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "norm_topk_prob": True,
}


def rounded(x: np.ndarray, dtype: str, axis: int | None) -> np.ndarray:
    """Expected result of `quantize` in float64: written with numpy's own logarithm."""
    kind = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2}[dtype]
    most = float(ml_dtypes.finfo(kind).max)
    largest = np.abs(x).max(axis=axis, keepdims=True).astype(np.float64)
    scale = 2.0 ** np.ceil(np.log2(largest / most))
    return (x / scale).astype(np.float32).astype(kind).astype(np.float64) * scale


@pytest.mark.parametrize("dtype", GRADIENTS.values())
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_values_are_rounded_to_the_nearest(dtype, axis):
    x = (RANDOM.normal(size=(6, 40)) * 10.0 ** RANDOM.integers(-6, 6, (6, 1))).astype(np.float32)
    values, scale = quantize(jnp.asarray(x), dtype, axis)
    assert values.dtype == dtype
    np.testing.assert_array_equal(np.frexp(scale)[0], 0.5)  # powers of two
    actual = np.asarray(values.astype(jnp.float32), np.float64) * np.asarray(scale, np.float64)
    np.testing.assert_array_equal(actual, rounded(x, dtype, axis))


def test_zeros_infinities_and_the_largest_value():
    most = float(jnp.finfo(FORWARD).max)
    for largest, expected in [(most, 1.0), (np.nextafter(most, 2e3, dtype="f4"), 2.0), (0.0, 1.0)]:
        values, scale = quantize(jnp.array([largest, -largest]), FORWARD)
        assert scale == expected
        assert np.isfinite(np.asarray(values, np.float32)).all()
    for odd in (np.nan, np.inf):  # a run must see that its numbers broke
        values, _ = quantize(jnp.array([odd, 1.0]), FORWARD)
        assert np.isnan(np.asarray(values, np.float32)[0])


@pytest.mark.parametrize("how", [Fp8Product(), Fp8Product("row", "e4m3")], ids=str)
def test_products_are_those_of_rounded_values(how):
    x, w, dy = (RANDOM.normal(size=s).astype(np.float32) for s in [(32, 48), (48, 16), (32, 16)])
    x[3] *= 100  # rows need scales of their own
    y, pull = jax.vjp(jax.jit(how), jnp.asarray(x), jnp.asarray(w))
    dx, dw = pull(jnp.asarray(dy))
    narrow, by_row = GRADIENTS[how.gradients], how.scale == "row"

    def of(a, dtype, axis):
        return rounded(a, dtype, axis if by_row else None)

    expected = {
        "y": of(x, FORWARD, 1) @ of(w, FORWARD, 0),
        "dx": of(dy, narrow, 1) @ of(w, FORWARD, 1).T,
        "dw": of(x, FORWARD, 0).T @ of(dy, narrow, 0),
    }
    exact = {"y": x @ w, "dx": dy @ w.T, "dw": x.T @ dy}
    for name, actual in {"y": y, "dx": dx, "dw": dw}.items():
        largest = np.abs(expected[name]).max()
        np.testing.assert_allclose(actual, expected[name], rtol=1e-5, atol=1e-6 * largest)
        off = np.linalg.norm(actual - exact[name]) / np.linalg.norm(exact[name])
        assert 0.005 < off < 0.1, name  # it was FP8, and it was the product


def test_by_row_a_token_does_not_depend_on_others():
    x, w = RANDOM.normal(size=(16, 32)).astype("f4"), RANDOM.normal(size=(32, 16)).astype("f4")
    loud = x.copy()
    loud[0] *= 1000
    for scale, same in [("row", True), ("tensor", False)]:
        product = jax.jit(Fp8Product(scale))
        assert np.array_equal(product(x, w)[1:], product(loud, w)[1:]) == same


def test_the_layers_linears_take_it_and_nothing_else_does():
    config = families.config_from_hf(TINY)
    model = use_fp8(build.abstract(config), Fp8Product())
    actual = {path: node for path, node in nnx.iter_graph(model) if isinstance(node, Linear)}
    taken = {path[-1] for path, node in actual.items() if node.product is not None}
    assert taken == {"q", "k", "v", "out", "gate", "up", "down"}
    for path, node in actual.items():
        precise = isinstance(node, PreciseLinear | ExpertLinear)
        assert (node.product is None) == precise, path
    assert any(isinstance(node, ExpertLinear) for node in actual.values())
    with pytest.raises(UserError, match="no matrix of its layers has widths that are multiples"):
        use_fp8(build.abstract(families.config_from_hf(TINY | {"hidden_size": 24})), Fp8Product())


@pytest.mark.slow
def test_on_a_mesh_and_in_decoding():
    """A run's own model: sharded it multiplies the same numbers; unstacked, as samplers have it, in
    its own dtype again."""
    config = families.config_from_hf(TINY | {"num_hidden_layers": 1})
    model = build.init(config, 0, dtype="float32")
    apart, params = nnx.split(use_fp8(model, Fp8Product()))
    rows = [[RANDOM.integers(0, 64, n) for n in (9, 7)], [RANDOM.integers(0, 64, 16)]]
    batch = pack(rows, 16)

    @jax.jit
    def loss(params, batch):
        return jnp.square(nnx.merge(apart, params).hidden(batch).hidden).mean()

    value, gradient = jax.value_and_grad(loss)(params, batch)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("fsdp", "tensor"))
    with jax.set_mesh(mesh):
        sharded, second = jax.value_and_grad(loss)(params, batch)
    np.testing.assert_allclose(value, sharded, rtol=1e-5)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient))
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(second), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * largest)
    model.stack.unstack()
    assert all(n.product is None for _, n in nnx.iter_graph(model) if isinstance(n, Linear))


def test_what_does_not_go_together_is_refused():
    table = {
        "model": {"path": "x", "matmul": "fp8"},
        "run": {"max_steps": 1},
        "data": {"datasets": [{"path": "x.jsonl"}]},
    }
    assert validate_config(table, "here").model.matmul_gradients == "e5m2"
    for section, keys, message in [
        ("adapter", {"kind": "lora", "quantize": "nf4"}, "model.matmul .fp8. .* adapter.quantize"),
        (
            "model",
            table["model"] | {"compute_dtype": "float64"},
            "matmul has no effect while .* float64",
        ),
    ]:
        with pytest.raises(UserError, match=message):
            validate_config(table | {section: keys}, "here")
