"""The whole training step for TPUs, on a machine without one: lowered, and compiled with libtpu."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from other_devices import run_script

from jaxtrain.batch import Batch
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.core.step import State, make_step
from jaxtrain.distributed.mesh import AXES
from jaxtrain.models import build, families
from jaxtrain.models.parameters import split_model

ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}

EXPERTS = ARCHITECTURE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}


def make_arguments(architecture=ARCHITECTURE, rows=4, length=256):
    """(step, state, batch) on shapes; bfloat16 activations."""
    model = build.abstract(
        families.config_from_hf(architecture), dtype="bfloat16", remat="save_attention"
    )
    params, rebuild = split_model(model)
    params = {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in params.items()}
    optimizer = optax.adamw(1e-3)
    step = make_step(rebuild, nll_loss, {"nll": 1.0}, optimizer, 1.0).single
    number = jax.ShapeDtypeStruct((), jnp.int32)
    state = State(number, params, jax.eval_shape(optimizer.init, params))
    ints = jax.ShapeDtypeStruct((1, rows, length), jnp.int32)
    weights = {"nll": jax.ShapeDtypeStruct(ints.shape, jnp.float32)}
    return step, state, Batch(ints, ints, ints, ints, weights)


@pytest.mark.parametrize(
    "architecture, sizes",
    [
        (ARCHITECTURE, {}),
        pytest.param(ARCHITECTURE, {"data": 2, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param(ARCHITECTURE, {"context": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param(EXPERTS, {"fsdp": 2}, marks=pytest.mark.slow),
    ],
    ids=["one", "rows", "context_tensor", "experts"],
)
def test_step_lowers_for_tpus(architecture, sizes):
    """Forward, backward and update, one device and meshes; attention by the TPU kernels."""
    from jax._src.mesh import AbstractDevice

    mesh = jax.sharding.AbstractMesh(
        tuple(sizes.get(axis, 1) for axis in AXES),
        AXES,
        axis_types=(jax.sharding.AxisType.Auto,) * len(AXES),
        abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        step, *arguments = make_arguments(architecture)
        traced = jax.jit(step, donate_argnums=0).trace(*arguments)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    for kernel in ("tree_attention_fwd", "tree_attention_dkv", "tree_attention_dq"):
        assert kernel in text


@pytest.mark.slow
def test_step_compiles_for_tpus():
    """The TPU compiler takes the whole step, dense and with experts, for one v5e and several."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the wheel libtpu")
    printed = run_script(Path(__file__).with_name("tpu_step.py"))
    assert printed.count("compiled") == 3, printed
