"""Rates of their own and what is trained, by tensor names: against torch's AdamW with the same
groups, tensor by tensor."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny_models import RAW

from jaxtrain.adapters.attach import attach
from jaxtrain.config import AdapterConfig, OptimConfig
from jaxtrain.core.adapter import make_adapter
from jaxtrain.core.optimizer import build_optimizer, decays
from jaxtrain.core.parameter_groups import read_groups
from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import full_index
from jaxtrain.models import build, families
from jaxtrain.models.parameters import split_model

torch = pytest.importorskip("torch", reason="the reference is torch's optimizer")

CONFIG = families.config_from_hf(RAW["qwen3_moe_mixed"])
BUNDLE = SimpleNamespace(architecture=CONFIG, adapter=None)
ENTRIES = families.family(CONFIG).names(CONFIG)
SHAPES = split_model(build.abstract(CONFIG))[0]
SIZES = {
    name: (size, entry.param)
    for entry in ENTRIES
    for name, size in entry.op.shapes(SHAPES[entry.param].shape).items()
}
"""Shape and parameter of every tensor."""
LAST = CONFIG.num_hidden_layers - 1


def params_of(tensors):
    """Parameters of the model, made of tensors as a folder has them."""
    return {
        entry.param: jnp.asarray(
            entry.op.read(
                lambda name, index: tensors[name][index], full_index(SHAPES[entry.param].shape)
            )
        )
        for entry in ENTRIES
    }


def draw(rng):
    return {name: rng.standard_normal(size).astype(np.float32) for name, (size, _) in SIZES.items()}


@pytest.mark.slow
def test_steps_are_those_of_torch_with_the_same_groups():
    rng = np.random.default_rng(0)
    optim = OptimConfig(
        learning_rate=1e-3,
        weight_decay=0.1,
        decay_embeddings=True,
        embedding_lr=4e-3,
        lr_groups=[
            {"pattern": "self_attn", "learning_rate": 2e-3},
            {"pattern": rf"layers\.{LAST}\.self_attn\.[qk]_proj", "learning_rate": 5e-3},
        ],
        unfrozen_parameters=["self_attn", r"^model.embed_tokens.weight$[3:7]", "gate.weight"],
    )

    def rate_of(name):
        if "embed_tokens" in name or "lm_head" in name:
            return 4e-3
        if f"layers.{LAST}." in name and ("q_proj" in name or "k_proj" in name):
            return 5e-3
        return 2e-3 if "self_attn" in name else 1e-3

    def trained_rows(name):
        if "embed_tokens" in name:
            return slice(3, 7)
        return slice(None) if "self_attn" in name or "gate.weight" in name else slice(0, 0)

    start = draw(rng)
    tensors = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start.items()}
    theirs = torch.optim.AdamW(
        [
            {
                "params": [tensor],
                "lr": rate_of(name),
                "weight_decay": 0.1 if decays(SIZES[name][1], None, optim) else 0.0,
            }
            for name, tensor in tensors.items()
        ]
    )
    params = params_of(start)
    groups = read_groups(optim, BUNDLE, SHAPES)
    ours = build_optimizer(optim, optax.constant_schedule(1e-3), params, groups)
    state = ours.init(params)
    whole = {path for path in params if not groups.is_frozen(path)}
    slots = {str(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)}
    for path in params:
        assert any(f"'{path}'" in slot for slot in slots) == (path in whole), "frozen: no moments"
    for _ in range(3):
        grads = draw(rng)
        for name, tensor in tensors.items():
            tensor.grad = torch.zeros_like(tensor)
            tensor.grad[trained_rows(name)] = torch.tensor(grads[name][trained_rows(name)])
        theirs.step()
        for name, tensor in tensors.items():  # weight decay moves what has no gradient
            frozen = torch.ones(len(tensor), dtype=torch.bool)
            frozen[trained_rows(name)] = False
            tensor.data[frozen] = torch.tensor(start[name])[frozen]
        masked = {
            name: np.where(
                np.isin(np.arange(len(g)), np.arange(len(g))[trained_rows(name)]).reshape(
                    -1, *[1] * (g.ndim - 1)
                ),
                g,
                0,
            )
            for name, g in grads.items()
        }
        updates, state = ours.update(params_of(masked), state, params)
        params = optax.apply_updates(params, updates)
    expected = params_of({name: tensor.detach().numpy() for name, tensor in tensors.items()})
    for path, value in expected.items():
        # float32 square roots and quotients of two libraries.
        np.testing.assert_allclose(params[path], value, rtol=1e-5, atol=1e-6, err_msg=path)
    assert not np.allclose(params["embed.embedding"][3:7], params_of(start)["embed.embedding"][3:7])


def test_what_is_not_trained_has_no_gradient():
    optim = OptimConfig(unfrozen_parameters=[rf"layers\.{LAST}\.", r"embed_tokens.weight$[:2]"])
    groups = read_groups(optim, BUNDLE, SHAPES)
    params = params_of(draw(np.random.default_rng(1)))
    total = groups.stop(lambda weights: sum(jnp.sum(v**2) / 2 for v in weights.values()))
    grads = jax.grad(total)({**params, "teacher/embed.embedding": params["embed.embedding"]})
    tensors = {
        name: np.float32(f"layers.{LAST}." in name) * np.ones(size, np.float32)
        for name, (size, _) in SIZES.items()
    }
    tensors["model.embed_tokens.weight"][:2] = 1
    masks = params_of(tensors)
    for path, mask in masks.items():
        np.testing.assert_array_equal(grads[path], params[path] * mask, err_msg=path)
    assert groups.trained["embed.embedding"].shape == (CONFIG.vocab_size, 1)
    assert all(np.size(mask) <= CONFIG.vocab_size for mask in groups.trained.values())


def test_adapters_of_some_layers():
    config = families.config_from_hf(RAW["mistral"])
    section = AdapterConfig(kind="lora", rank=2, target=["q_proj", "up_proj"])
    adapter = make_adapter(section, config)
    bundle = SimpleNamespace(architecture=config, adapter=adapter)
    shapes = split_model(attach(build.abstract(config), adapter))[0]
    shapes = {path: shape for path, shape in shapes.items() if adapter.trains(path)}
    last = config.num_hidden_layers - 1
    groups = read_groups(
        OptimConfig(unfrozen_parameters=[rf"layers\.{last}\.mlp\.up_proj\.lora_"]), bundle, shapes
    )
    for path in shapes:
        if ".q." in path:
            assert groups.is_frozen(path)
        else:
            mask = groups.trained[path]
            assert mask.shape == (last + 1, 1, 1)
            assert mask[:, 0, 0].tolist() == [0] * last + [1]


def test_a_pattern_that_names_nothing_is_refused():
    with pytest.raises(UserError, match=r"optim.lr_groups: 'q_project' names no trained tensor"):
        optim = OptimConfig(lr_groups=[{"pattern": "q_project", "learning_rate": 1}])
        read_groups(optim, BUNDLE, SHAPES)
    with pytest.raises(ValueError, match="no regular expression"):
        OptimConfig(unfrozen_parameters=["layers.(3"])
