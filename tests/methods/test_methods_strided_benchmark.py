"""The benchmark of strided EBFT: PyTorch's side is the same work, to float32 rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.data.packing.pack import Fields, build_batch, lay_out, stack_batches
from jaxtrain.data.packing.tree import chain
from jaxtrain.methods.ebft.block_rewards import BlockRewardOptions, judge
from jaxtrain.methods.ebft.blocks import CE, RL, BlockStrides, lay_blocks
from jaxtrain.methods.ebft.strided_loss import ADVANTAGE, NUMBERS, StridedLossOptions, strided_loss
from jaxtrain.models import build, families
from jaxtrain.models.parameters import split_model

T, N, G = 40, 3, 4
STRIDES = BlockStrides(stride=5, context=6, length=G, samples=N)
LAYERS = (0, 2)


def fill(policy, model) -> None:
    """The peer with our weights."""
    import torch

    params = {path: np.asarray(x) for path, x in split_model(model)[0].items()}

    def put(tensor, *arrays):
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(np.concatenate(arrays)))

    put(policy.embed, params["embed.embedding"])
    put(policy.norm.weight, params["norm.scale"])
    for layer, block in enumerate(policy.blocks):

        def one(*names, layer=layer):
            actual = [params[f"stack.block.{name}"][layer] for name in names]
            return [x.T if x.ndim == 2 else x for x in actual]

        put(block.qkv.weight, *one(*(f"attention.{name}.kernel" for name in "qkv")))
        put(block.out.weight, *one("attention.out.kernel"))
        put(block.gate_up.weight, *one("mlp.gate.kernel", "mlp.up.kernel"))
        put(block.down.weight, *one("mlp.down.kernel"))
        put(block.attention_norm.weight, *one("attention_norm.scale"))
        put(block.mlp_norm.weight, *one("mlp_norm.scale"))
        put(block.q_norm.weight, *one("attention.q_norm.scale"))
        put(block.k_norm.weight, *one("attention.k_norm.scale"))


@pytest.mark.thorough
def test_pytorch_does_the_same_work(benchmarks):
    """Greedy draws both ways; rewards, advantages, loss and the embedding's gradient on the same
    random tokens in the blocks."""
    import torch

    peers = benchmarks["peers.strided"]
    raw = benchmarks["step_work"].MODELS["tiny"] | {"num_hidden_layers": 3}
    raw |= {"initializer_range": 0.2}
    model = build.init(families.config_from_hf(raw), 0)
    geometry = peers.Geometry(T, STRIDES.stride, STRIDES.context, G, N)
    step = peers.Step(raw, geometry, LAYERS, 0.0, peers.Options(torch.float32, "cpu"))
    fill(step.policy, model)
    fill(step.frozen, model)

    tokens = np.random.default_rng(3).integers(1, 500, T).astype(np.int32)
    ones = dict.fromkeys((CE, RL), np.ones(T))
    batch = stack_batches([build_batch([[lay_out(chain(tokens, ones))]], T, Fields((CE, RL)))])
    forest, spots = lay_blocks(batch, STRIDES)
    documents = torch.from_numpy(tokens[None]).long()
    again, retained = step.draw_again(documents), step.draw_kept(documents)
    assert (again == retained).all() and (again[0] == again[1]).all()

    blocks = geometry.blocks
    assert (spots.predictor[0, 0] < T).sum() == blocks
    drawn = np.random.default_rng(4).integers(1, 500, (N, G, blocks))
    full = torch.cat([documents.repeat(N, 1), torch.from_numpy(drawn).flatten(1)], 1)
    index = spots.start[0, 0, :blocks, None, None] + np.arange(N * G).reshape(N, G)
    forest.tokens[0, 0, index] = drawn.transpose(2, 0, 1)
    only = jax.tree.map(lambda x: jnp.asarray(x[0]), forest)
    truth = jnp.asarray(spots.truth[0]).reshape(1, -1, G)
    actual = judge(
        model, only, jnp.asarray(spots.start[0]), truth, BlockRewardOptions(LAYERS, N, G)
    )
    advantage, rewards = step.judge(full)
    actual_values = np.asarray(actual.advantage[0, :blocks]).T
    np.testing.assert_allclose(actual_values, advantage[0].numpy(), atol=1e-4)
    np.testing.assert_allclose(actual.reward[0, :blocks], rewards[0].mean(0).numpy(), atol=1e-4)

    stream = np.zeros(forest.tokens.shape[1:], np.float32)
    stream[0, index] = actual_values.T[:, :, None]
    numbers = np.zeros((*stream.shape, 6), np.float32)
    only = only._replace(streams={ADVANTAGE: jnp.asarray(stream), NUMBERS: jnp.asarray(numbers)})
    params, rebuild = split_model(model)
    scored = StridedLossOptions({stream.shape[1]: (T, STRIDES.most(T) * N * G)}, train_ce=False)

    def loss(params):
        sums, _ = strided_loss(rebuild(params), only, scored)
        return sums["rl"] / drawn.size

    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    reference = step.loss(full, advantage)
    reference.backward()
    assert np.isclose(value, reference.item(), atol=1e-5)
    expected = step.policy.embed.grad.numpy()
    np.testing.assert_allclose(
        gradients["embed.embedding"], expected, atol=1e-4 * np.abs(expected).max()
    )
