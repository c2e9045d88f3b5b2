"""EBFT inside of documents through the step and whole runs."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step_harness as harness
from step_harness import make_table, read_metrics, run_config, write_run

from jaxtrain.data.packing.pack import Fields, build_batch, lay_out, stack_batches
from jaxtrain.data.packing.tree import Node, Tree
from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.methods.ebft.block_rewards import BlockRewardOptions, advantages, judge
from jaxtrain.methods.ebft.blocks import CE, RL, BlockStrides, lay_blocks
from jaxtrain.methods.ebft.features import FEATURES
from jaxtrain.methods.ebft.strided_loss import ADVANTAGE, NUMBERS
from jaxtrain.models import build, families

STRIDED = {
    "kind": "ebft_strided",
    "stride": 4,
    "context_length": 4,
    "generate_max_len": 3,
    "n_samples": 3,
    "temperature": 1.0,
    "ce_coef": 0.1,
    "features": {"layers": [1, 2]},
}
TABLE = make_table(STRIDED, num_layers=2, sequence_len=32)
DOCUMENTS = [[(32, 0)], [(20, 6), (12, 0)], [(5, 0)], [(30, 12)]]
"""(tokens, of these the prompt's) of each row; one has no room for a block."""


def make(**task):
    """The task of TABLE with some keys of its section changed."""
    return harness.merge(TABLE, {"task": task})


def documents(rows=DOCUMENTS):
    """[1, B, 32]."""
    rng = np.random.default_rng(0)

    def make_document(length: int, prompt: int):
        weights = (np.arange(length) >= prompt).astype(np.float64)
        tokens = rng.integers(1, 300, length).astype(np.int32)
        return lay_out(Tree((Node(-1, tokens, {CE: weights, RL: weights}),)), "branch")

    packed = [[make_document(*document) for document in row] for row in rows]
    return stack_batches([build_batch(packed, 32, Fields((CE, RL)))])


def update(task, microsteps=1, rows=DOCUMENTS, **axes):
    return harness.update(task, documents(rows), microsteps, scored=True, **axes)


@pytest.fixture(scope="module")
def single_device():
    return update(make())


def check_same(actual, expected, most):
    """Draws, metrics and gradients."""
    assert (actual[2].tokens.reshape(-1) == expected[2].tokens.reshape(-1)).all()
    harness.check_same(actual, expected, most, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_microsteps_are_one_batch(single_device):
    """Rows with 8, 5, 0 and 4 blocks: the same draws, and every drawn token counts alike in
    whatever microstep. float32, the order of sums: 1e-5 of the largest gradient."""
    check_same(update(make(), 4), single_device, 1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "axes",
    [
        {"fsdp": 2, "tensor": 2},
        {"data": 2, "context": 2},
    ],
    ids="_".join,
)
def test_meshes_are_one_device(single_device, axes):
    """Meshes change nothing either; features of a copy in bfloat16 are rounded otherwise where sums
    are cut."""
    check_same(update(make(), **axes), single_device, 2e-2 if "tensor" in axes else 1e-4)


@pytest.mark.slow
def test_advantages_lie_on_the_tokens_of_their_own_draw(single_device):
    """Three tokens of a draw share a number; RLOO's add up to 0 over a block's draws; one of a
    block's numbers lies on its first token alone."""
    metrics, _, batch = single_device
    drawn = batch.weights[RL] > 0
    values = batch.streams[ADVANTAGE]
    assert not values[~drawn].any()
    for row in range(4):
        actual = values[0, row][drawn[0, row]].reshape(-1, 3, 3)  # blocks, draws, tokens
        assert (actual == actual[:, :, :1]).all()
        assert np.abs(actual[:, :, 0].sum(1)).max(initial=0.0) < 1e-5
    assert np.unique(np.abs(values[drawn])).size > 10
    blocks = drawn.sum() / 9
    assert batch.streams[NUMBERS][..., 0].sum() == blocks == metrics["ebft/reward"][1] == 16
    spread = metrics["ebft/advantages_std"][0] / blocks
    assert np.allclose(spread, values[drawn].std(), rtol=1e-4)


@pytest.mark.slow
def test_rows_without_blocks_change_nothing():
    """No denominator of 0, gradients of exactly 0 everywhere, nothing that is not finite."""
    short = [[(6, 0)], [(5, 3)]]
    metrics, gradients, batch = update(make(ce_coef=0.0), rows=short)
    assert not batch.weights[RL].any()
    assert all((gradient == 0).all() for gradient in gradients.values())
    assert metrics["loss"][0] == 0 and metrics["ebft/reward"] == (0, 0)


@pytest.mark.slow
def test_equal_draws_give_no_gradient():
    """Greedy draws of a block are one: every advantage is 0 (float32: 1e-6)."""
    _, gradients, batch = update(make(temperature=0.0, ce_coef=0.0))
    assert np.abs(batch.streams[ADVANTAGE]).max() < 1e-6
    assert max(np.abs(gradient).max() for gradient in gradients.values()) < 1e-6


@pytest.mark.slow
def test_noise_goes_by_seed_and_step():
    """So a run that goes on draws what it would have drawn; the same is in
    `test_microsteps_are_one_batch`."""
    first, second = (harness.prepare(make(), documents(), version)[0] for version in (3, 4))
    assert (second.tokens != first.tokens).any()


@pytest.mark.parametrize("whitening", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_truth_itself_is_worth_two(whitening):
    """Draws that are what the text has there: alignment 2 at every pooling, and cfm 0; as draws
    are alike, diversity is 2, too, or among three whitened ones 2/3 (their products are 1/3). One
    layer weighs the diversity as two do."""
    batch = documents([[(32, 0)]])
    forest, spots = lay_blocks(batch, BlockStrides(stride=4, context=4, length=3, samples=3))
    index = spots.start[0, 0][:, None, None] + np.arange(9).reshape(3, 3)
    forest.tokens[0, 0, index] = forest.tokens[0, 0, spots.truth.reshape(-1, 1, 3)]
    model = build.init(families.config_from_hf(TABLE["model"]["architecture"]), 0)
    only = jax.tree.map(lambda x: jnp.asarray(x[0]), forest)
    provided = (only, jnp.asarray(spots.start[0]), jnp.asarray(spots.truth[0]).reshape(1, -1, 3))
    ways = [((1,), "last_token"), ((0, 1), "mean_pooling"), ((0, 1), "concat")]
    judging = [BlockRewardOptions(layers, 3, 3, pooling, whitening) for layers, pooling in ways]
    for actual in jax.jit(lambda *provided: [judge(model, *provided, how) for how in judging])(
        *provided
    ):
        assert np.allclose(actual.alignment, 2.0, atol=1e-4)
        assert np.allclose(actual.diversity, 2 / 3 if whitening else 2.0, atol=1e-4)
        assert np.allclose(actual.cfm, 0.0, atol=1e-4)
        assert np.abs(actual.advantage).max() < 1e-4


def test_advantages():
    """Against loops; one draw alone keeps its reward."""
    rewards = np.random.default_rng(0).normal(size=(2, 3, 4))
    array = np.asarray(advantages(jnp.asarray(rewards), "rloo"))
    for index in np.ndindex(2, 3):
        for n in range(4):
            peers = [rewards[index][m] for m in range(4) if m != n]
            assert np.isclose(array[index][n], rewards[index][n] - np.mean(peers), atol=1e-6)
    grouped = np.asarray(advantages(jnp.asarray(rewards), "group_norm"))
    assert np.allclose(grouped.std(-1, ddof=1), 1, atol=1e-5)
    assert np.allclose(grouped.mean(-1), 0, atol=1e-6)
    for kind in ("rloo", "group_norm", "reinforce"):
        alone = jnp.asarray(rewards[..., :1])
        assert (advantages(alone, kind) == alone).all()


@pytest.mark.parametrize(
    ("changes", "output"),
    [
        ({"context_length": 30}, "no block has room"),
        ({"rl_coef": 0.0, "ce_coef": 0.0}, "nothing would train"),
        ({"temperature": 0.0, "tempered_logp": True}, "no meaning with task.temperature 0"),
        ({"n_samples": 1, "features": {"diversity_coef": 0.0}}, "compares the draws of a block"),
        ({"n_samples": 1, "advantage": "reinforce"}, "task.features.diversity_coef compares"),
        ({"features": {"layers": [3]}}, "the feature network has 2"),
        ({"n_samples": 60000, "generate_max_len": 6, "stride": 1}, "tokens of one forward pass"),
    ],
)
def test_what_is_refused(changes, output):
    with pytest.raises(UserError, match=output):
        make(**changes)


def test_the_network_is_a_copy_or_the_bare_model():
    assert make().roles[FEATURES].weights == "start"
    adapted = harness.merge(TABLE, {"adapter": {"kind": "lora", "rank": 2}})
    assert adapted.roles[FEATURES].weights == "bare"


TASK = """
[task]
kind = "ebft_strided"
generate_max_len = 2
stride = 3
context_length = 3
n_samples = 2
ce_coef = 0.1
"""


def read_lines(folder):
    return read_metrics(folder, "loss", "ebft/", "eval/", "grad")


@pytest.mark.slow
def test_a_run_goes_on_exactly(tmp_path):
    words = write_run(tmp_path, run_config(TASK, 2), " {0} and {1} end")
    assert main([*words, "--dry-run"]) == 0
    assert main(words) == 0
    first = read_lines(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    shutil.rmtree(tmp_path / "run" / "model")
    assert main(words) == 0
    again = read_lines(tmp_path / "run")
    assert again == first and (4, "eval/ebft/reward") in first and (4, "ebft/num_blocks") in first
