"""Trained parts of a model that reads images: text, projector, tower."""

import jax
import numpy as np
import pytest
from tiny_vision import VISION, make_batch

from jaxtrain.config import Config
from jaxtrain.core.bundle import ModelBundle, find_untrained
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.core.optimizer import build_schedule, decays, muon_dimensions, rate_factor
from jaxtrain.core.roles import Role, Roles, open_optimizer
from jaxtrain.core.step import init_state, make_step
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.errors import UserError
from jaxtrain.models import families

ARCHITECTURE = families.config_from_hf(VISION["smolvlm"])
OPTIONS = {"param_dtype": "float32", "dtype": "float32"}


def make_config(train="none", **sections):
    raw = {
        "model": {"path": "unused", "vision": {"train": train}},
        "data": {"datasets": [{"path": "unused.jsonl"}]},
        "run": {"max_steps": 1},
        "task": {"kind": "sft"},
        **sections,
    }
    return Config.model_validate(raw)


def make_roles(config):
    mesh = make_mesh(jax.devices()[:1])
    untrained = find_untrained(config.model, ARCHITECTURE)
    bundle = ModelBundle(None, ARCHITECTURE, mesh, None, OPTIONS, untrained=untrained)
    return Roles({"policy": Role(bundle), "reference": Role(bundle, "start", in_loss=False)})


@pytest.mark.slow
@pytest.mark.parametrize(
    "train",
    [pytest.param(train, marks=pytest.mark.thorough) for train in ("none", "projector")] + ["all"],
)
def test_only_what_is_asked_for_is_trained(train):
    config = make_config(train, optim={"learning_rate": 1e-2, "weight_decay": 0.1})
    roles = make_roles(config)
    optimizer, build = open_optimizer(config.optim, build_schedule(config.optim, 10), roles)
    start, frozen, copies = roles.open(0)
    state = init_state(start, optimizer, copies)
    stays = {"none": ("vision.",), "projector": ("vision.tower.",), "all": ("nothing",)}[train]
    assert all(path.startswith(stays) for path in copies) and (train == "all" or copies)
    assert not any(path.startswith(stays) for path in start)
    moments = {str(path) for path, _ in jax.tree_util.tree_leaves_with_path(state.opt_state)}
    assert not any(f"'{stays[0]}" in path for path in moments)
    assert {path for path in frozen if "/" in path} == {f"reference/{path}" for path in start}

    before = jax.device_get({**copies, **start})
    batch = jax.tree.map(lambda x: np.asarray(x)[None], make_batch(VISION["smolvlm"])[0])
    loss = lambda models, batch: nll_loss(models["policy"], batch)  # noqa: E731
    step = make_step(build, loss, {"nll": 1.0}, optimizer, 1.0)
    state, output = step(state, batch, frozen)
    assert output.finite
    after = jax.device_get({**state.copies, **state.params})
    assert before.keys() == after.keys()
    for path, value in before.items():
        assert np.array_equal(value, after[path]) == path.startswith(stays), path


def test_rates_and_decay_by_part():
    optim = make_config(
        "all", optim={"learning_rate": 1e-3, "tower_lr": 1e-4, "projector_lr": 5e-3}
    ).optim
    layer = "vision.tower.stack.block.attention.q"
    for path, factor in (
        (f"{layer}.kernel", 0.1),
        ("vision.tower.position_table", 0.1),
        ("vision.projector.kernel", 5.0),
        ("stack.block.attention.q.kernel", 1.0),
    ):
        assert rate_factor(path, optim) == pytest.approx(factor), path
    plus = optim.model_copy(update={"lora_plus_ratio": 16.0})
    assert rate_factor(f"{layer}.adapter.b", plus) == pytest.approx(1.6)
    shapes = make_roles(make_config("all")).trained_shapes
    vectors = {
        path for path in shapes if path.startswith("vision.") and not decays(path, None, optim)
    }
    assert vectors == {
        path
        for path in shapes
        if path.startswith("vision.") and path.endswith((".scale", ".bias", "position_table"))
    }
    assert (
        muon_dimensions("vision.tower.position_table", shapes["vision.tower.position_table"])
        is None
    )


def test_what_cannot_be_trained_is_refused():
    for key in ("tower_lr", "projector_lr"):
        config = make_config(optim={key: 1e-4})
        with pytest.raises(UserError, match=f"optim.{key} is the rate of what is not trained here"):
            open_optimizer(config.optim, build_schedule(config.optim, 10), make_roles(config))
    with pytest.raises(ValueError, match='name "tower", "projector" in adapter.target'):
        make_config("all", adapter={"kind": "lora"})
    text = families.config_from_hf(VISION["smolvlm"]["text_config"])
    with pytest.raises(UserError, match="LlamaForCausalLM has no tower here"):
        find_untrained(make_config("all").model, text)
