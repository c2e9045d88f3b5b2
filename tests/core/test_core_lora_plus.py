"""LoRA+ against PEFT's own optimizer; other rates for tables."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("peft", reason="parity needs torch and peft, which this environment has not")

import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer

from jaxtrain.config import OptimConfig
from jaxtrain.core.optimizer import build_optimizer
from jaxtrain.errors import UserError

SLOW = pytest.mark.slow
NAMES = {"lora_A": "net.adapter.a", "lora_B": "net.adapter.b", "magnitude": "net.adapter.magnitude"}


def test_steps_are_those_of_pefts_optimizer():
    """Weight decay included, which goes with each parameter's own rate."""
    torch.manual_seed(0)
    linear = torch.nn.Sequential(torch.nn.Linear(6, 5, bias=False))
    config = LoraConfig(r=3, target_modules=["0"], use_dora=True, init_lora_weights=False)
    model = get_peft_model(linear, config)
    theirs = create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=16.0, loraplus_weight_decay=0.1
    )
    torch_params = {
        next(ours for key, ours in NAMES.items() if key in name): value
        for name, value in model.named_parameters()
        if value.requires_grad
    }
    assert set(torch_params) == set(NAMES.values())
    params = {path: jnp.asarray(value.detach().numpy()) for path, value in torch_params.items()}
    optim = OptimConfig(learning_rate=0.01, lora_plus_ratio=16.0, weight_decay=0.1)
    ours = build_optimizer(optim, optax.constant_schedule(0.01), params)
    state, rng = ours.init(params), np.random.default_rng(0)
    for _ in range(4):
        grads = {p: rng.standard_normal(v.shape).astype(np.float32) for p, v in params.items()}
        for path, grad in grads.items():
            torch_params[path].grad = torch.tensor(grad)
        theirs.step()
        updates, state = ours.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    for path in ("net.adapter.a", "net.adapter.b"):
        # float32 square roots and quotients of two libraries.
        found = torch_params[path].detach().numpy()
        np.testing.assert_allclose(params[path], found, rtol=1e-4, atol=1e-5)
    # PEFT decays the magnitude; here, as everywhere in jaxtrain, no vector is decayed.
    undecayed = params["net.adapter.magnitude"]
    decayed = torch_params["net.adapter.magnitude"].detach().numpy()
    np.testing.assert_allclose(undecayed, decayed / (1 - 0.16 * 0.1) ** 4, rtol=0.1)


@pytest.mark.parametrize(
    "name", ["lion", pytest.param("adamw", marks=SLOW), pytest.param("muon", marks=SLOW)]
)
def test_a_rate_of_its_own_is_the_same_as_another_learning_rate(name):
    params = {path: jnp.ones((3, 4)) for path in ("embed.embedding", "net.adapter.a")}
    params |= {"net.adapter.b": jnp.ones((4, 3))}
    grads = {path: jnp.linspace(0.1, 1, 12).reshape(v.shape) for path, v in params.items()}

    def update(rate, **keys):
        optim = OptimConfig(name=name, learning_rate=rate, weight_decay=0.1, **keys)
        made = build_optimizer(optim, optax.constant_schedule(rate), params)
        return made.update(grads, made.init(params), params)[0]

    found = update(0.01, lora_plus_ratio=4.0, embedding_lr=0.001)
    rates = {"net.adapter.a": 0.01, "net.adapter.b": 0.04, "embed.embedding": 0.001}
    for path, rate in rates.items():
        np.testing.assert_allclose(found[path], update(rate)[path], rtol=1e-5)


def test_a_rate_of_what_is_not_trained_is_refused():
    params = {"net.kernel": jnp.ones((3, 4))}
    for key in ("lora_plus_ratio", "embedding_lr"):
        with pytest.raises(UserError, match=f"optim.{key} .* not trained"):
            build_optimizer(OptimConfig(**{key: 1.0}), optax.constant_schedule(1.0), params)
