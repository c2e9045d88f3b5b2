"""The balance of experts: transformers' number for one row, and the same step however it is cut."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.layers.moe import note_balance
from jaxtrain.layers.router import Routing, choose
from jaxtrain.losses.balance import measure_balance, with_balance
from jaxtrain.losses.nll import nll_loss
from jaxtrain.models import build

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from tiny_models import RAW, documents, pack

L, T, E, TOP = 3, 40, 6, 2


def notes(logits_LBTE, real_BT):
    layers = [note_balance(choose(layer, Routing(top=TOP)), real_BT) for layer in logits_LBTE]
    return jax.tree.map(lambda *parts: jnp.stack(parts), *layers)


@pytest.mark.parametrize("padding", [0, 9])
def test_one_row_gives_the_number_of_transformers(padding):
    torch = pytest.importorskip("torch", reason="torch is not installed on this Python")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = np.random.default_rng(0).standard_normal((L, 1, T, E)).astype(np.float32)
    real = np.arange(T)[None] < T - padding
    aux, metrics = measure_balance(notes(jnp.asarray(logits), jnp.asarray(real)), TOP)
    layers = tuple(torch.from_numpy(layer[0]) for layer in logits)
    mask = torch.from_numpy(real.astype(np.int64))
    expected = load_balancing_loss_func(layers, E, TOP, attention_mask=mask)
    # float32 sums of at most 120 terms
    np.testing.assert_allclose(aux / (T - padding), float(expected), rtol=1e-5)
    assert float(metrics["balance"][1]) == T - padding


def test_metrics_by_hand():
    """Two layers of two tokens, three experts, one chosen: loads (2, 0, 0) and (1, 1, 0)."""
    sure = np.log(np.array([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1]], np.float32))
    logits = jnp.asarray(np.stack([sure[[0, 0]], sure[[0, 1]]])[:, None])
    layers = [
        note_balance(choose(layer, Routing(top=1)), jnp.ones((1, 2), bool)) for layer in logits
    ]
    aux, metrics = measure_balance(jax.tree.map(lambda *parts: jnp.stack(parts), *layers), 1)
    means = {name: float(total / weight) for name, (total, weight) in metrics.items()}
    share, prob = np.array([3, 1, 0]) / 4, np.array([0.8 * 3 + 0.1, 0.8 + 0.3, 0.4]) / 4
    entropy = -(0.8 * np.log(0.8) + 0.2 * np.log(0.1))
    assert means == pytest.approx(
        {
            "balance": 3 * share @ prob,
            "expert_load_max": (3 + 1.5) / 2,
            "expert_unused": 3 / 6,
            "router_entropy": entropy,
        },
        rel=1e-5,
    )


def test_rows_and_padding_add_up():
    """The sums of rows are those of each row alone, so accumulation and devices change nothing."""
    model = build.init(build.config_from_hf(RAW["qwen3_moe"]), 0)
    loss = jax.jit(with_balance(nll_loss, train=True))
    rows = [documents(0, 11, 6), documents(1, 19)]
    together, metrics = loss(model, pack(rows, 24))
    apart = [loss(model, pack([row], 24)) for row in rows]
    for name in ("nll", "balance"):
        # float32 sums in another order
        alone = sum(float(sums[name]) for sums, _ in apart)
        np.testing.assert_allclose(together[name], alone, rtol=1e-5)
    assert float(metrics["balance"][1]) == 11 + 6 + 19
    exact = sum(float(sums["balance"]) for sums, _ in [loss(model, pack(rows, 36))])
    np.testing.assert_allclose(together["balance"], exact, rtol=1e-5)  # padding counts nothing


def test_the_loss_spreads_the_experts():
    """Its gradient takes probability from the busy expert."""
    logits = jnp.zeros((1, 1, 8, 4)).at[..., 0].set(1.0)
    real = jnp.ones((1, 8), bool)
    grad = jax.grad(lambda x: measure_balance(notes(x, real), TOP)[0])(logits)
    assert (grad[..., 0] > 0).all() and (grad[..., 2:] < 0).all()


def test_a_dense_model_is_left_alone():
    model = build.init(build.config_from_hf(RAW["qwen3"]), 0)
    batch = pack([documents(0, 11)], 12)
    plain, balanced = nll_loss(model, batch), with_balance(nll_loss, train=True)(model, batch)
    assert jax.tree.structure(plain) == jax.tree.structure(balanced)
