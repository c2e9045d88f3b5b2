"""Families with experts: any mesh computes what one device does; config.json in both spellings."""

import jax
import numpy as np
import pytest
from flax import nnx
from test_models_build import value_and_grads as value_and_grads_of
from tiny_models import RAW

from jaxtrain.core.step_metrics import count_matmul_params
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.errors import UserError
from jaxtrain.models import build, families

MESHES = [
    pytest.param({"expert": 2, "tensor": 2}, marks=pytest.mark.slow),
    pytest.param({"fsdp": 2, "expert": 2}, marks=pytest.mark.thorough),
    pytest.param({"expert": 4}, marks=pytest.mark.thorough),
]


@pytest.fixture(scope="module")
def one_device():
    return value_and_grads_of(None, "qwen3_moe_mixed")


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_sharded_gradients_equal_one_device(sizes, one_device):
    value, grads = one_device
    mesh = make_mesh(**sizes)
    with jax.set_mesh(mesh):
        actual, found_grads = value_and_grads_of(mesh, "qwen3_moe_mixed")
    # float32 sums split over devices.
    np.testing.assert_allclose(actual, value, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(found_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * float(np.abs(b).max()))


@pytest.mark.slow
def test_experts_are_spread_over_their_axis():
    model = build.init(
        families.config_from_hf(RAW["qwen3_moe"]), 0, mesh=make_mesh(expert=2, fsdp=2)
    )
    for name in ("gate", "up", "down"):
        kernel = getattr(model.stack.block.mlp.experts, name).kernel[...]
        assert kernel.addressable_shards[0].data.size * 4 == kernel.size
        assert kernel.addressable_shards[0].data.shape[1] == 4  # of 8 experts


def test_layers_of_each_kind():
    config = families.config_from_hf({**RAW["qwen3_moe_mixed"], "decoder_sparse_step": 2})
    assert config.layers_by_kind() == {"block": [3], "dense": [0, 1, 2]}  # 1: mlp_only_layers
    shapes = dict(nnx.to_flat_state(nnx.state(build.abstract(config))))
    assert shapes["stack", "dense", "mlp", "up", "kernel"].get_value().shape == (3, 32, 48)
    experts = shapes["stack", "block", "mlp", "experts", "down", "kernel"].get_value()
    assert experts.shape == (1, 4, 24, 32)


def test_both_spellings_of_the_number_of_experts():
    new = RAW["qwen3_moe"]
    old = {("num_experts" if k == "num_local_experts" else k): v for k, v in new.items()}
    config = families.config_from_hf(new)
    assert families.config_from_hf(old) == config
    written = config.to_hf()
    assert written["num_experts"] == written["num_local_experts"] == 8
    assert families.config_from_hf(written) == config
    with pytest.raises(UserError, match="two names of one number"):
        families.config_from_hf({**new, "num_experts": 7})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok=9 must be from 1 to the 8 experts"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 must be at least 1"),
    ],
)
def test_impossible_numbers_are_refused(change, words):
    with pytest.raises(UserError, match=words):
        families.config_from_hf({**RAW["qwen3_moe"], **change})


def test_flops_count_the_chosen_experts_only():
    """qwen3_moe: attention 32*(64+32+32)+64*32, router 32*8, 3 experts of 3*32*24; head 97*32."""
    config = families.config_from_hf(RAW["qwen3_moe"])
    layer = 32 * (64 + 32 + 32) + 64 * 32 + 32 * 8 + 3 * 3 * 32 * 24
    assert count_matmul_params(build.abstract(config)) == pytest.approx(2 * layer + 97 * 32)
