"""The ops that have no TPU kernel of their own run there by XLA: "auto" takes it, and it lowers."""

import jax
import jax.numpy as jnp
import pytest
from jaxtrain_kernels import logp_gather, moe_ffn
from test_kernels_tree_attention_tpu import tpu_mesh


def shape(*size, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(size, dtype)


def log_probs(hidden, head, targets):
    return logp_gather(hidden, head, targets, softcap=30.0).logp.sum()


def experts(x, chosen, gates, w_gate, w_up, w_down):
    return moe_ffn(x, chosen, gates, w_gate, w_up, w_down).astype(jnp.float32).sum()


CALLS = {
    "logp_gather": (
        log_probs,
        (0, 1),
        [shape(256, 128), shape(50_000, 128), shape(256, dtype=jnp.int32)],
    ),
    "moe_ffn": (
        experts,
        (0, 2, 3, 4, 5),
        [
            shape(256, 128),
            shape(256, 2, dtype=jnp.int32),
            shape(256, 2, dtype=jnp.float32),
            *[shape(8, 128, 128)] * 3,
        ],
    ),
}


@pytest.mark.parametrize("op", CALLS)
def test_gradients_lower_for_a_tpu(op):
    function, expected, arrays = CALLS[op]
    with jax.sharding.use_abstract_mesh(tpu_mesh()):
        traced = jax.jit(jax.grad(function, expected)).trace(*arrays)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "dot_general" in text and "custom_call @tpu" not in text
