"""Tree training against its baselines through the step that trains, from the same trajectories.

What agrees with what: grouped is the tree's loss on any data. Per-branch is too where all trees of
a step have the same K; with other K it is the tree's loss under normalize "branch". Flat samples
and the whole transcript condition answers on thoughts: another objective.
"""

import contextlib
import functools
import math

import jax
import numpy as np
import optax
import pytest

from jaxtrain.config import DataConfig
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.core.step import init_state, make_step
from jaxtrain.data.packing.pack import Fields, build_batch, lay_out, stack_batches
from jaxtrain.data.packing.tree import TreeGroup
from jaxtrain.data.pipeline import open_source
from jaxtrain.data.sources.row_views import SyntheticTurns
from jaxtrain.distributed.feed import feed
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.methods.trees.config import TreeTask
from jaxtrain.methods.trees.data import Trees
from jaxtrain.methods.trees.modes import LengthLimits, build_units
from jaxtrain.methods.trees.turns import TrainedParts, make_turns
from jaxtrain.models import build, families
from jaxtrain.models.parameters import split_model

VOCABULARY, ROW_TOKENS = 256, 72
ARCHITECTURE = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}


@contextlib.contextmanager
def trainer(optimizer, dtype="float32", max_grad_norm=None, sizes=()):
    """Yield (first state, step, mesh) of one Qwen3 block on one device, or a mesh of `sizes`."""
    mesh = make_mesh(jax.devices()[: math.prod(n for _, n in sizes)], **dict(sizes))
    options = {"param_dtype": dtype, "dtype": dtype}
    with jax.enable_x64(dtype == "float64"), jax.set_mesh(mesh):
        model = build.init(families.config_from_hf(ARCHITECTURE), 0, mesh=mesh, **options)
        params, rebuild = split_model(model)
        step = make_step(rebuild, nll_loss, {"nll": 1.0}, optimizer, max_grad_norm)
        yield init_state(params, optimizer), step, mesh


def trajectories(turns_of_each: tuple[int, ...]):
    """Make a trajectory for each number of turns, so K = turns + 1."""
    for index, num_turns in enumerate(turns_of_each):
        options = {"user_len": (2, 6), "think_len": (2, 8), "response_len": (2, 8)}
        rows = SyntheticTurns(VOCABULARY, num_turns=num_turns, seed=17, **options)
        yield make_turns(rows[index]["turns"])


@functools.cache
def one_step(mode, turns_of_each, normalize="token", rows=1, sizes=()):
    """(loss, gradients) in float64 of one optimizer step, a unit a row, `rows` a microstep."""
    units = []
    for turns in trajectories(turns_of_each):
        limits = LengthLimits(ROW_TOKENS, ROW_TOKENS)
        for unit in build_units([turns], mode, TrainedParts(), limits):
            units += unit.trees if isinstance(unit, TreeGroup) else [unit]
    packed = [[lay_out(unit, normalize)] for unit in units]
    batch = stack_batches(
        [
            build_batch(packed[start : start + rows], ROW_TOKENS, Fields(dtype=np.float64))
            for start in range(0, len(packed), rows)
        ]
    )
    gradients = optax.trace(decay=0.0)  # its state is the last gradient
    with trainer(gradients, "float64", sizes=sizes) as (state, step, mesh):
        state, output = step(state, feed(batch, mesh))
        return float(output.metrics["loss"][0]), jax.device_get(state.opt_state.trace)


def assert_same_step(first, right, tolerance):
    """float64: the order of sums alone, 1e-15; weights g/K against K times 1/K as much."""
    assert abs(first[0] - right[0]) < tolerance
    for path, grad in right[1].items():
        assert np.abs(first[1][path] - grad).max() <= tolerance * np.abs(grad).max(), path


@pytest.mark.slow
@pytest.mark.parametrize(
    "turns_of_each",
    [pytest.param((2, 2), marks=pytest.mark.thorough), (1, 3)],
    ids=["same_k", "other_k"],
)
def test_grouped_branches_are_the_tree(turns_of_each):
    """K is 3 and 3, or 2 and 4; grouped accumulates branch by branch, so memory is one branch."""
    tree, grouped = one_step("tree", turns_of_each), one_step("grouped", turns_of_each)
    assert_same_step(tree, grouped, 1e-12)


@pytest.mark.thorough
def test_per_branch_is_the_tree_where_every_tree_has_the_same_k():
    assert_same_step(one_step("tree", (2, 2)), one_step("per_branch", (2, 2)), 1e-12)


@pytest.mark.slow
def test_with_other_k_per_branch_is_the_tree_under_normalize_branch():
    branch = one_step("per_branch", (1, 3))
    assert_same_step(one_step("tree", (1, 3), "branch"), branch, 1e-12)
    loss, gradients = one_step("tree", (1, 3))
    assert abs(loss - branch[0]) > 1e-4
    differs = [np.abs(gradients[p] - g).max() / np.abs(g).max() for p, g in branch[1].items()]
    assert min(differs) > 1e-2


@pytest.mark.slow
def test_trees_on_a_mesh_are_the_trees_of_one_device():
    """Also where the row, and so a tree and the slots that `prev` names, is cut over devices."""
    sizes = (("data", 2), ("context", 2))
    assert_same_step(one_step("tree", (1, 3), rows=2, sizes=sizes), one_step("tree", (1, 3)), 1e-12)


def test_a_trajectory_without_thoughts_is_the_same_in_every_mode():
    turns = make_turns([([1, 2, 3], [], [4, 5]), ([6, 7], [], [8, 9, 10])])
    rows = []
    for mode in ("tree", "per_branch", "grouped", "current_rl", "flat"):
        (unit,) = build_units([turns], mode, TrainedParts(), LengthLimits(ROW_TOKENS, ROW_TOKENS))
        tree = unit.trees[0] if isinstance(unit, TreeGroup) else unit
        rows.append(build_batch([[lay_out(tree)]], 16))
    for row in rows[1:]:
        jax.tree.map(np.testing.assert_array_equal, row, rows[0])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["current_rl", "flat"])
def test_flat_samples_are_another_objective(mode):
    """Their answers follow their own thoughts, and each turn trains once, not in g branches."""
    tree, flat = one_step("tree", (2, 2)), one_step(mode, (2, 2))
    assert abs(tree[0] - flat[0]) > 1e-4
    differs = [np.abs(tree[1][p] - g).max() / np.abs(g).max() for p, g in flat[1].items()]
    assert min(differs) > 1e-2


UNITS = {"tree": 2, "grouped": 2, "per_branch": 8, "current_rl": 6, "flat": 2}
"""Two trajectories a step in every mode: K = 4, three turns."""


@functools.cache
def train(mode: str, steps: int, num_rows: int) -> np.ndarray:
    """Loss of each step, float32, AdamW, the data as a run reads them."""
    dataset = {
        "path": "builtin:caterpillar",
        "options": {
            "vocab_size": VOCABULARY,
            "num_rows": num_rows,
            "user_len": [4, 4],
            "think_len": [8, 8],
            "response_len": [10, 10],
        },
    }
    data = DataConfig(sequence_len=96, packing=False, datasets=[dataset])
    task = TreeTask(mode=mode, units_per_step=UNITS[mode])
    source = open_source(data, Trees(task, data, None), seed=0, rows_per_microstep=2, microsteps=1)
    adamw = optax.adamw(1e-3, weight_decay=0.01)
    losses = []
    with trainer(adamw, max_grad_norm=1.0) as (state, step, mesh):
        for _ in range(steps):
            (batch,) = next(source)
            state, output = step(state, feed(batch, mesh))
            losses.append(output.metrics["loss"][0])
    source.close()
    return np.array(losses, np.float64)


@pytest.mark.thorough
def test_100_steps_of_the_tree_and_of_its_branches_stay_together():
    """float32: a mean of about 170 losses rounds to 1e-7; 1e-6 allows the drift of 100 updates."""
    tree, branches = train("tree", 100, 1000), train("per_branch", 100, 1000)
    assert (np.abs(tree - branches) / branches).max() <= 1e-6


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["current_rl", "flat"])
def test_flat_baselines_train_on_the_same_data_and_differ(mode):
    """Four trajectories seen over and over: every mode learns them, by its own objective."""
    tree, flat = train("tree", 40, 4), train(mode, 40, 4)
    assert tree[-1] < 0.9 * tree[0] and flat[-1] < 0.9 * flat[0]
    assert (np.abs(tree - flat) / tree).max() > 1e-3
