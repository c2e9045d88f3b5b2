"""The balance of experts: transformers' number for one row, and the same step however it is cut."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtrain_kernels import Context
from tiny_models import RAW, documents, pack

from jaxtrain.core.losses.balance import Balance, measure_balance, move_biases, with_balance
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.layers.router import RoutingOptions, choose
from jaxtrain.layers.router_notes import note_choice
from jaxtrain.models import build, families

L, T, E, TOP = 3, 40, 6, 2
ALL = Balance(aux=0.1, sequence=0.1, z=0.1)
measure = jax.jit(measure_balance, static_argnums=(1, 2))


@functools.partial(jax.jit, static_argnames="top")
def notes(logits_LBTE, context=None, top=TOP):
    """Router notes of one document a row, unless `context` is given."""
    _, B, T, _ = logits_LBTE.shape
    positions = jnp.tile(jnp.arange(T, dtype=jnp.int32), (B, 1))
    context = context or Context(jnp.full((B, T), T, jnp.int32), positions=positions)
    layers = [note_choice(choose(layer, RoutingOptions(top=top)), context) for layer in logits_LBTE]
    return jax.tree.map(lambda *parts: jnp.stack(parts), *layers)


def pack_context(*lengths, padding=0):
    """Context of a row of documents with padding behind them."""
    lengths = [*lengths, *[1] * padding]
    ends = np.cumsum(lengths)
    starts = np.repeat(ends - lengths, lengths)
    index = np.arange(ends[-1])
    prev = np.where(index == starts, -1, index - 1)
    fields = (np.repeat(ends, lengths), index - starts, prev)
    until, positions, prev = (jnp.asarray(x[None], jnp.int32) for x in fields)
    return Context(until, positions=positions, prev=prev)


@pytest.mark.parametrize("padding", [0, 9])
def test_one_row_gives_the_number_of_transformers(padding):
    torch = pytest.importorskip("torch", reason="torch is not installed on this Python")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = np.random.default_rng(0).standard_normal((L, 1, T, E)).astype(np.float32)
    real = np.arange(T)[None] < T - padding
    context = pack_context(T - padding, padding=padding)
    losses, metrics = measure(notes(jnp.asarray(logits), context), TOP)
    layers = tuple(torch.from_numpy(layer[0]) for layer in logits)
    mask = torch.from_numpy(real.astype(np.int64))
    expected = load_balancing_loss_func(layers, E, TOP, attention_mask=mask)
    # float32 sums of at most 120 terms
    np.testing.assert_allclose(losses["balance"] / (T - padding), float(expected), rtol=1e-5)
    assert float(metrics["balance"][1]) == T - padding


def test_metrics_by_hand():
    """Two layers of two tokens, three experts, one chosen: loads (2, 0, 0) and (1, 1, 0)."""
    sure = np.log(np.array([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1]], np.float32))
    logits = jnp.asarray(np.stack([sure[[0, 0]], sure[[0, 1]]])[:, None])
    _, metrics = measure(notes(logits, top=1), 1)
    means = {name: float(total / weight) for name, (total, weight) in metrics.items()}
    share, prob = np.array([3, 1, 0]) / 4, np.array([0.8 * 3 + 0.1, 0.8 + 0.3, 0.4]) / 4
    entropy = -(0.8 * np.log(0.8) + 0.2 * np.log(0.1))
    assert means == pytest.approx(
        {
            "balance": 3 * share @ prob,
            # One document; its layers for themselves: loads (1, 0, 0) and (1/2, 1/2, 0).
            "sequence_balance": (3 * 0.8 + 3 * 0.5 * (0.9 + 0.9) / 2) / 2,
            "router_z": 0.0,  # the logits are log-probabilities
            "expert_load_max": (3 + 1.5) / 2,
            "expert_unused": 3 / 6,
            "router_entropy": entropy,
        },
        rel=1e-5,
        abs=1e-6,
    )


@pytest.mark.slow
def test_rows_and_padding_add_up():
    """The sums of rows are those of each row alone, so accumulation and devices change nothing."""
    model = build.init(families.config_from_hf(RAW["qwen3_moe"]), 0)
    loss = jax.jit(with_balance(nll_loss, ALL))
    rows = [documents(0, 11, 6), documents(1, 19)]
    together, metrics = loss(model, pack(rows, 24))
    apart = [loss(model, pack([row], 24)) for row in rows]
    for name in ("nll", "balance", "sequence_balance", "router_z"):
        # float32 sums in another order
        alone = sum(float(sums[name]) for sums, _ in apart)
        np.testing.assert_allclose(together[name], alone, rtol=1e-5)
    assert float(metrics["balance"][1]) == 11 + 6 + 19
    exact = sum(float(sums["balance"]) for sums, _ in [loss(model, pack(rows, 36))])
    np.testing.assert_allclose(together["balance"], exact, rtol=1e-5)  # padding counts nothing


def test_the_loss_spreads_the_experts():
    """Its gradient takes probability from the busy expert."""
    logits = jnp.zeros((1, 1, 8, 4)).at[..., 0].set(1.0)
    for name in ("balance", "sequence_balance"):
        grad = jax.grad(lambda x, name=name: measure(notes(x), TOP)[0][name])(logits)
        assert (grad[..., 0] > 0).all() and (grad[..., 2:] < 0).all()


@pytest.mark.parametrize(
    "raw",
    [RAW["qwen3"], {**RAW["qwen3_moe"], "mlp_only_layers": [0, 1]}],
    ids=["dense", "no experts"],
)
def test_a_dense_model_is_left_alone(raw):
    """Also one of a family with experts whose layers are all dense."""
    model = build.abstract(families.config_from_hf(raw))
    batch = pack([documents(0, 11)], 12)
    plain, balanced = (
        jax.eval_shape(loss, model, batch) for loss in (nll_loss, with_balance(nll_loss, ALL))
    )
    assert jax.tree.structure(plain) == jax.tree.structure(balanced)


def test_sequences_count_each_by_itself():
    """Documents and a tree against DeepSeek's formula, computed for each of them alone."""
    lengths, logits = (7, 1, 12), np.random.default_rng(1).standard_normal((1, 1, 24, E))
    noted = notes(jnp.asarray(logits, jnp.float32), pack_context(*lengths, padding=4))
    expected, start = 0.0, 0
    for length in lengths:
        if length > 1:  # a document of one token counts as padding
            probs = np.exp(logits[0, 0, start : start + length])
            probs /= probs.sum(-1, keepdims=True)
            chosen = np.argsort(-probs, -1)[:, :TOP]
            counts = np.bincount(chosen.ravel(), minlength=E)
            expected += length * (E / (TOP * length) * counts) @ probs.mean(0)
        start += length
    found = measure(noted, TOP)[0]["sequence_balance"]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    # A tree is one document, whatever its branches.
    tree = pack_context(7, 13, padding=4)
    tree = tree._replace(prev=tree.prev.at[0, 12].set(8), until=tree.until.at[0, 9:12].set(12))
    whole = notes(jnp.asarray(logits, jnp.float32), pack_context(7, 13, padding=4))
    found = notes(jnp.asarray(logits, jnp.float32), tree)
    np.testing.assert_array_equal(found["sequence_balance"], whole["sequence_balance"])


def test_the_scope_of_a_batch_is_transformers_batch():
    torch = pytest.importorskip("torch", reason="torch is not installed on this Python")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = np.random.default_rng(3).standard_normal((L, 2, T, E)).astype(np.float32)
    losses, _ = measure(notes(jnp.asarray(logits)), TOP, "batch")
    layers = tuple(torch.from_numpy(layer.reshape(2 * T, E)) for layer in logits)
    expected = load_balancing_loss_func(layers, E, TOP)
    np.testing.assert_allclose(losses["balance"] / (2 * T), float(expected), rtol=1e-5)


def test_biases_move_towards_an_even_load():
    """Layers 0 and 2 of three; the loads of layer 1 are another kind's."""
    params = {"a.bias": jnp.zeros((2, 3)), "other": jnp.ones(2)}
    loads = jnp.array([[4.0, 1.0, 1.0], [9.0, 0.0, 0.0], [2.0, 2.0, 2.0]])
    moved = move_biases(params, loads, {"a.bias": [0, 2]}, 0.5)
    np.testing.assert_array_equal(moved["a.bias"], [[-0.5, 0.5, 0.5], [0, 0, 0]])
    assert moved["other"] is params["other"]
