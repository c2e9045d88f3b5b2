"""Schedules against closed forms; optimizers against hand-written updates in float64 numpy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxtrain.config import OptimConfig
from jaxtrain.core.optimizer import build_optimizer, build_schedule, decays, muon_dimensions
from jaxtrain.errors import UserError


def rates(total=100, **keys):
    schedule = build_schedule(OptimConfig(learning_rate=1.0, **keys), total)
    return np.array([float(schedule(step)) for step in range(total)])


def test_warmup_is_linear_and_reaches_the_peak():
    found = rates(warmup_steps=10, lr_scheduler="constant")
    np.testing.assert_allclose(found[:10], np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(found[10:], 1.0, rtol=1e-6)
    np.testing.assert_allclose(rates(warmup_ratio=0.1, lr_scheduler="constant"), found)


def test_linear_and_cosine_end_at_min_lr():
    linear = rates(lr_scheduler="linear", min_lr_ratio=0.1)
    np.testing.assert_allclose(linear, 1.0 - 0.9 * np.arange(100) / 100, rtol=1e-5)
    cosine = rates(lr_scheduler="cosine", min_lr=0.1)
    expected = 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * np.arange(100) / 100))
    np.testing.assert_allclose(cosine, expected, rtol=1e-4)


def test_inverse_sqrt():
    found = rates(lr_scheduler="inverse_sqrt", warmup_steps=10)
    np.testing.assert_allclose(found[39], np.sqrt(10 / 40), rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "middle"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("exponential", (0.01**0.5 - 0.01) / 0.99),
        ("one_minus_sqrt", 1 - np.sqrt(0.5)),
    ],
)
def test_wsd(shape, middle):
    found = rates(100, lr_scheduler="wsd", wsd_decay=shape, decay_ratio=0.2, min_lr=0.0)
    np.testing.assert_allclose(found[:81], 1.0, rtol=1e-6)
    np.testing.assert_allclose(found[90], middle, atol=1e-5)
    assert 0 < found[99] < 0.06


PARAMS = {
    "layers.mlp.up.kernel": np.linspace(-1, 1, 12).reshape(1, 3, 4),
    "layers.norm.scale": np.ones((1, 3)),
    "embed.embedding": np.linspace(1, 2, 6).reshape(2, 3),
}


def one_update(**keys):
    """Parameters after one update with gradient = cos(parameter) at a rate of 0.1."""
    optim = OptimConfig(learning_rate=0.1, lr_scheduler="constant", **keys)
    params = {path: jnp.asarray(value, jnp.float32) for path, value in PARAMS.items()}
    optimizer = build_optimizer(optim, build_schedule(optim, 10), params)

    @jax.jit
    def update(params):
        grads = jax.tree.map(jnp.cos, params)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    return update(params)


def test_adamw_first_step_and_decay_mask():
    found = one_update(name="adamw", weight_decay=0.5)
    for path, value in PARAMS.items():
        grad = np.cos(value)
        decay = 0.5 * value if path == "layers.mlp.up.kernel" else 0.0
        # Bias-corrected first moments: m / sqrt(v) = sign(grad), up to eps.
        expected = value - 0.1 * (grad / (np.abs(grad) + 1e-8) + decay)
        np.testing.assert_allclose(found[path], expected, rtol=2e-5, atol=1e-6)


def test_decay_embeddings():
    assert not decays("embed.embedding", None, OptimConfig())
    assert decays("embed.embedding", None, OptimConfig(decay_embeddings=True))
    assert not decays("layers.norm.scale", None, OptimConfig(decay_embeddings=True))
    assert not decays("layers.attention.query.bias", None, OptimConfig(decay_embeddings=True))


def test_sgd_and_lion():
    for path, value in PARAMS.items():
        grad = np.cos(value)
        np.testing.assert_allclose(
            one_update(name="sgd", beta1=0.0)[path], value - 0.1 * grad, rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(
            one_update(name="lion")[path], value - 0.1 * np.sign(grad), rtol=1e-5, atol=1e-6
        )


def test_muon_orthogonalises_each_layer_alone():
    found = one_update(name="muon", beta1=0.0)
    path = "layers.mlp.up.kernel"
    update = (PARAMS[path] - np.asarray(found[path]))[0] / 0.1
    singular = np.linalg.svd(update, compute_uv=False)
    # Newton-Schulz with its fast coefficients leaves singular values near 1 (0.7 to 1.2), here
    # times 0.2 * sqrt(max side); the gradient has rank 2, the third stays near 0.
    scale = 0.2 * np.sqrt(4)
    assert (singular[:2] > 0.6 * scale).all() and (singular < 1.3 * scale).all()
    embedding = np.cos(PARAMS["embed.embedding"])
    np.testing.assert_allclose(
        found["embed.embedding"], PARAMS["embed.embedding"] - 0.1 * np.sign(embedding), rtol=1e-4
    )


@pytest.mark.parametrize(("source", "message"), [
    ("def make(rate):\n    def init(params): raise KeyError('no such layer')\n"
     "    return optax.GradientTransformation(init, None)", "without 'update'"),
    ("def make(rate):\n    def init(params): raise KeyError('no such layer')\n"
     "    return optax.GradientTransformation(init, optax.sgd(rate).update)",
     "fails in its init: KeyError: 'no such layer'"),
    ("def make(rate):\n    def update(*arguments): raise ValueError('no state')\n"
     "    return optax.GradientTransformation(lambda params: (), update)",
     "fails in its update: ValueError: no state"),
])  # fmt: skip
def test_errors_of_an_optimizer_from_outside_are_named(tmp_path, source, message):
    (tmp_path / "mine.py").write_text(f"import optax\n{source}\n")
    optim = OptimConfig(name=f"{tmp_path / 'mine.py'}:make", lr_scheduler="constant")
    params = {path: jnp.asarray(value, jnp.float32) for path, value in PARAMS.items()}
    with pytest.raises(UserError, match=re.escape(message)) as found:
        optimizer = build_optimizer(optim, build_schedule(optim, 10), params)
        optimizer.update(params, optimizer.init(params), params)
    assert "optim.name" in str(found.value) and "mine.py:make" in str(found.value)


@pytest.mark.parametrize("decayed", [False, True])
def test_muon_updates_all_but_matrices_as_adamw(decayed):
    """Twenty updates of embeddings, norms and biases equal torch's AdamW, those of matrices optax's
    Muon."""
    torch = pytest.importorskip("torch")
    optim = OptimConfig(
        name="muon", learning_rate=0.03, lr_scheduler="constant", beta2=0.99,
        weight_decay=0.5, decay_embeddings=decayed,
    )  # fmt: skip
    params = {path: jnp.asarray(value, jnp.float32) for path, value in PARAMS.items()}
    matrices = [path for path in PARAMS if muon_dimensions(path, PARAMS[path]) is not None]
    assert matrices == ["layers.mlp.up.kernel"]
    muon = optax.contrib.muon(
        0.03, beta=0.9, weight_decay=0.5, consistent_rms=0.2,
        muon_weight_dimension_numbers=optax.contrib.MuonDimensionNumbers((1,), (2,)),
    )  # fmt: skip
    twins = {path: torch.tensor(PARAMS[path], dtype=torch.float64) for path in PARAMS}
    groups = [
        {"params": [twin], "weight_decay": 0.5 if decayed and path == "embed.embedding" else 0.0}
        for path, twin in twins.items()
    ]
    adamw = torch.optim.AdamW(groups, lr=0.03, betas=(0.9, 0.99), eps=1e-8)
    alone = {path: params[path] for path in matrices}
    optimizer = build_optimizer(optim, build_schedule(optim, 20), params)
    ours, theirs = (params, optimizer.init(params)), (alone, muon.init(alone))

    @functools.partial(jax.jit, static_argnums=0)
    def move(update, params, state, step):
        grads = {path: jnp.cos(value + step) for path, value in params.items()}
        updates, state = update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for step in range(20):
        ours = move(optimizer.update, *ours, step)
        theirs = move(muon.update, *theirs, step)
        for twin in twins.values():
            twin.grad = torch.cos(twin + step)
        adamw.step()
    for path in PARAMS:
        expected = theirs[0][path] if path in matrices else twins[path].numpy()
        np.testing.assert_allclose(ours[0][path], expected, rtol=1e-4, atol=2e-6, err_msg=path)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "muon", "sgd"])
def test_every_optimizer_goes_downhill(name):
    optim = OptimConfig(name=name, learning_rate=0.05, lr_scheduler="constant")
    params = {path: jnp.asarray(value, jnp.float32) for path, value in PARAMS.items()}
    optimizer = build_optimizer(optim, build_schedule(optim, 10), params)
    state = optimizer.init(params)

    def loss(params):
        return sum(jnp.sum(value**2) for value in params.values())

    @jax.jit
    def move(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    before = loss(params)
    for _ in range(5):
        params, state = move(params, state)
    assert loss(params) < before
