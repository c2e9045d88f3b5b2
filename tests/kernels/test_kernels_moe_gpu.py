"""The fused Hopper kernels of the MoE layer, interpreted on a CPU: the 2x rule, no data races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import Adapters, moe_ffn, testing
from jaxtrain_kernels.grouped_matmul import gpu, mosaic_gpu
from jaxtrain_kernels.grouped_matmul.ffn import Biases, Clamped
from mosaic_interpreter import interpreted

T, TOP, E, R = 150, 2, 4, 5
EVEN, UNEVEN = (256, 128), (192, 320)
"""D and F: whole tiles; last tiles that begin within the ones before, on all sides."""


def problem(adapted: bool, sizes: tuple[int, int] = EVEN, biased: bool = False, seed: int = 0):
    """bfloat16 arguments by name and the choices; expert 2 gets nobody, expert 1 most."""
    rng, (D, F) = np.random.default_rng(seed), sizes
    experts = rng.choice([0, 1, 3], (T, TOP), p=[0.2, 0.7, 0.1]).astype(np.int32)
    shapes = {"w_gate": (E, D, F), "w_up": (E, D, F), "w_down": (E, F, D)}
    arrays = {n: rng.standard_normal(s) * s[1] ** -0.5 for n, s in shapes.items()}
    arrays |= {"x": rng.standard_normal((T, D)), "gates": rng.random((T, TOP))}
    if adapted:
        for name, (_, i, o) in [(n, s) for n, s in shapes.items()]:
            arrays[f"a_{name}"] = rng.standard_normal((E, i, R)) * i**-0.5
            arrays[f"b_{name}"] = rng.standard_normal((E, R, o)) * R**-0.5
    if biased:
        sizes = {"bias_gate": F, "bias_up": F, "bias_down": D}
        arrays |= {n: rng.standard_normal((E, size)) for n, size in sizes.items()}
    arrays["g"] = rng.standard_normal((T, D))
    return jnp.asarray(experts), {n: jnp.asarray(x, jnp.bfloat16) for n, x in arrays.items()}


def run(experts, arrays, dtype, activation, **options):
    """{name: output or gradient}."""
    arguments = {n: x.astype(dtype) for n, x in arrays.items() if n != "g"}
    adapted = "a_w_gate" in arguments

    def layer(arguments):
        pairs = [
            (arguments["a_" + n], arguments["b_" + n])
            for n in ("w_gate", "w_up", "w_down")
            if adapted
        ]
        return moe_ffn(
            arguments["x"],
            experts,
            arguments["gates"],
            *(arguments[n] for n in ("w_gate", "w_up", "w_down")),
            adapters=Adapters(*pairs),
            biases=Biases(*(arguments.get(f"bias_{n}") for n in Biases._fields)),
            activation=activation,
            block=gpu.BLOCK,
            **options,
        )

    out, pull = jax.vjp(layer, arguments)
    return {"out": out, **pull(arrays["g"].astype(dtype))[0]}


@pytest.fixture
def few_cores(monkeypatch):
    """A GPU of three cores, so that each has several tiles of every kernel."""
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda: None)
    monkeypatch.setattr(gpu, "num_cores", lambda: 3)


CASES = [
    ("silu", True, UNEVEN),
    pytest.param(Clamped(limit=1.0), False, UNEVEN, marks=pytest.mark.thorough),
    pytest.param(Clamped(limit=1.0), True, EVEN, marks=pytest.mark.slow),
    pytest.param("silu", True, EVEN, marks=pytest.mark.slow),
    pytest.param("gelu_pytorch_tanh", False, EVEN, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("activation", "adapted", "sizes"), CASES)
def test_the_layer_by_the_rule(activation, adapted, sizes, few_cores):
    experts, arrays = problem(adapted, sizes, biased=activation == Clamped(limit=1.0))
    with jax.enable_x64(True):
        exact = run(experts, arrays, jnp.float64, activation, impl="reference")
    plain = run(experts, arrays, jnp.bfloat16, activation, impl="reference")
    with interpreted(detect_races=True):
        actual = run(experts, arrays, jnp.bfloat16, activation, impl="mosaic_gpu")
    for name, expected in exact.items():
        testing.assert_accurate(actual[name], expected, plain[name], jnp.bfloat16, name)
    assert not np.asarray(actual["w_up"], np.float32)[2].any(), "nobody went there"


@pytest.mark.slow
def test_frozen_experts_and_inference(few_cores):
    experts, arrays = problem(False)
    with interpreted():
        frozen = run(experts, arrays, jnp.bfloat16, "silu", impl="mosaic_gpu", freeze_experts=True)
        names = ("x", "gates", "w_gate", "w_up", "w_down")
        x, *rest = (arrays[n] for n in names)
        alone = moe_ffn(x, experts, *rest, impl="mosaic_gpu")
    np.testing.assert_array_equal(alone, frozen["out"])
    assert np.asarray(frozen["x"], np.float32).any()
    for name in names[2:]:
        assert not np.asarray(frozen[name], np.float32).any()
