"""Builders: golden trees and samples of the specification, and every mode on the same turns."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_trajectory import AGENT, Characters

from jaxtrain.data.chat.rows import Row
from jaxtrain.data.packing.pack import lay_out
from jaxtrain.data.packing.tree import TreeGroup
from jaxtrain.data.sample import Dropped
from jaxtrain.data.sources.row_views import GroupedRows, SyntheticTurns
from jaxtrain.errors import UserError
from jaxtrain.methods.trees.modes import LengthLimits, TreeBuilder, build_units
from jaxtrain.methods.trees.turns import AssistantTurn, TrainedParts, build_caterpillar, make_turns

WIDE = LengthLimits(1000, 1000)
BOTH = TrainedParts()


def units(turns, mode, trained=BOTH, limits=WIDE):
    return build_units([turns], mode, trained, limits)


def conversation(*thoughts):
    messages = []
    for number, thought in enumerate(thoughts):
        messages.append({"role": "user", "content": f"Question {number}"})
        spoken = {"role": "assistant", "content": f"Answer {number}"}
        messages.append({**spoken, "reasoning_content": thought} if thought else spoken)
    return {"messages": messages}


def builder(mode="tree", **changes):
    options = {
        "split": "trajectory",
        "rendering": "chatml",
        "trained": BOTH,
        "limits": WIDE,
        "reading": {},
        **changes,
    }
    return TreeBuilder(Characters(), mode=mode, **options)


def test_a_caterpillar_has_its_thoughts_on_the_side():
    turns = make_turns([([1, 2], [3], [4, 5]), ([6], [7, 8], [9])])
    (tree,) = units(turns, "tree")
    assert [node.parent for node in tree.nodes] == [-1, 0, 0, 2, 3, 3]
    assert tree.leaves() == (1, 4, 5)
    assert [node.role for node in tree.nodes] == ["context", "think", "response"] * 2
    assert lay_out(tree).tokens.tolist() == list(range(1, 10))  # preorder is the order of events


@pytest.mark.parametrize(
    ("thoughts", "expected"), [(["a", "b"], 2), ([None, None], 1), (["a", None], 2)]
)
def test_current_rl_merges_turns_without_thoughts(thoughts, expected):
    samples = builder("current_rl")(conversation(*thoughts), "")
    assert len(samples) == expected
    trained = sum(int((tree.nodes[0].weights["nll"] > 0).sum()) for tree in samples)
    turns = builder().read_turns(Row(conversation(*thoughts)))
    assert trained == sum(len(turn.reasoning) + len(turn.response) for turn in turns)


def test_current_rl_conditions_a_response_on_its_thought():
    turns = make_turns([([1], [2], [3]), ([4], [5], [6]), ([7], [], [8])])
    samples = units(turns, "current_rl")
    assert [s.nodes[0].tokens.tolist() for s in samples] == [
        [1, 2, 3],
        [1, 3, 4, 5, 6],
        [1, 3, 4, 6, 7, 8],
    ]
    assert [s.nodes[0].weights["nll"].tolist() for s in samples] == [
        [0, 1, 1],
        [0, 0, 0, 1, 1],
        [0, 0, 0, 0, 0, 1],
    ]


def test_flat_keeps_every_thought_in_place():
    turns = make_turns([([1], [2], [3]), ([4], [5], [6])])
    (sample,) = units(turns, "flat", TrainedParts(reasoning=False))
    assert sample.nodes[0].tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert sample.nodes[0].weights["nll"].tolist() == [0, 0, 1, 0, 0, 1]


@pytest.mark.parametrize(
    ("path", "packed", "fits"), [(4, 6, True), (4, 5, False), (3, 6, False), (6, 6, True)]
)
def test_limits_on_paths_and_on_the_packed_tree(path, packed, fits):
    turns = make_turns([([1, 2], [3, 4], [5, 6])])
    (unit,) = units(turns, "tree", limits=LengthLimits(path, packed))
    assert isinstance(unit, Dropped) != fits


@pytest.mark.parametrize(
    ("mode", "retained"), [("per_branch", 2), ("grouped", 0), ("current_rl", 0)]
)
def test_limits_of_the_baselines(mode, retained):
    turns = make_turns([([1, 2], [3], [4]), ([5], [6], [7, 8, 9])])  # branches of 3, 5 and 7
    actual = units(turns, mode, limits=LengthLimits(5, 100))
    assert sum(not isinstance(unit, Dropped) for unit in actual) == retained
    assert {unit.reason for unit in actual if isinstance(unit, Dropped)} == {"too long"}


def test_two_assistants_in_a_row_are_no_tree_but_flat_samples():
    messages = [
        *AGENT[:2],
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    (unit,) = builder()({"messages": messages}, "here")
    assert unit.reason.startswith("no tree: two assistant turns in a row") and unit.origin == "here"
    assert len(builder("current_rl")({"messages": messages}, "")) == 1


def test_malformed_rows_are_dropped_with_the_reason():
    (unit,) = builder()({"messages": [7]}, "here")
    assert unit == Dropped("malformed row: a message is a number, not an object", "here, message 1")


def test_too_long_can_be_an_error_that_names_the_row():
    strict = builder(limits=LengthLimits(8, 9), too_long="error")
    with pytest.raises(UserError, match=r"^x row 3: a path is longer than data.sequence_len 8"):
        strict(conversation("a"), "x row 3")


@st.composite
def trajectories(draw):
    def tokens(low):
        return draw(st.lists(st.integers(0, 3), min_size=low, max_size=3))

    count = draw(st.integers(1, 4))
    return make_turns([(tokens(1), tokens(0), tokens(1)) for _ in range(count)])


def loss_of(tree, cost):
    """Sum of weight x cost of the prefix over a packed tree: what nll computes."""
    packed = lay_out(tree)
    total = 0.0
    for t, weight in enumerate(packed.weights["nll"]):
        prefix, index = [], t
        while index >= 0:
            prefix.append(int(packed.tokens[index]))
            index = packed.prev[index]
        total += weight * cost(tuple(prefix[::-1]))
    return total, packed.weights["nll"].sum()


def cost(prefix):
    return 1 + hash(prefix) % 97 / 10


@settings(max_examples=100, deadline=None)
@given(trajectories())
def test_grouped_branches_have_the_loss_of_the_tree(turns):
    (tree,) = units(turns, "tree")
    assert tree.num_branches == 1 + sum(len(turn.reasoning) > 0 for turn in turns)
    (group,) = units(turns, "grouped")
    assert isinstance(group, TreeGroup) and len(group.trees) == tree.num_branches
    branches = units(turns, "per_branch")
    expected = loss_of(tree, cost)
    summed = np.sum([loss_of(branch, cost) for branch in group.trees], 0)
    np.testing.assert_allclose(summed, expected, rtol=1e-12)  # fp64 sums in another order
    mean = np.mean([loss_of(branch, cost) for branch in branches], 0)
    np.testing.assert_allclose(mean, expected, rtol=1e-12)
    assert group.num_tokens == sum(tree.branch_lengths())


@settings(max_examples=60, deadline=None)
@given(st.lists(trajectories(), min_size=2, max_size=3))
def test_a_group_of_trials_is_one_tree_of_all_their_branches(group):
    shared = [
        [AssistantTurn(np.r_[9, t.prompt].astype(np.int32), t.reasoning, t.response) for t in turns]
        for turns in group
    ]
    (tree,) = build_units(shared, "tree", BOTH, WIDE)
    apart = [build_caterpillar(turns, BOTH) for turns in shared]
    count = sum(entry.num_branches for entry in apart)
    assert tree.num_branches == count
    losses = [np.array(loss_of(entry, cost)) * entry.num_branches for entry in apart]
    np.testing.assert_allclose(loss_of(tree, cost), np.sum(losses, 0) / count, rtol=1e-12)
    assert tree.num_tokens <= sum(entry.num_tokens for entry in apart) - (len(group) - 1)


@settings(max_examples=60, deadline=None)
@given(trajectories())
def test_a_template_that_rewrites_history_is_merged_from_what_was_seen(turns):
    # Each response is shown with a mark in its own turn and without it later.
    marked = [
        AssistantTurn(t.prompt, t.reasoning, np.r_[8, t.response].astype(np.int32)) for t in turns
    ]
    tree = build_caterpillar(marked, BOTH)
    paths = {
        tuple(np.concatenate([tree.nodes[i].tokens for i in tree.root_path(end)]).tolist())
        for end in tree.ends
    }
    for turn in marked:
        assert tuple([*turn.prompt.tolist(), *turn.response.tolist()]) in paths
        if len(turn.reasoning):
            assert tuple([*turn.prompt.tolist(), *turn.reasoning.tolist()]) in paths
    assert tree.num_branches == sum(1 + (len(turn.reasoning) > 0) for turn in turns)


def test_synthetic_rows_are_their_seed_and_keep_their_bounds():
    options = {"vocab_size": 50, "num_rows": 5, "user_len": (2, 3), "response_len": (1, 9)}
    rows = SyntheticTurns(**options, seed=10)
    again = SyntheticTurns(**options, seed=12)
    assert len(rows) == 5
    for first, right in zip(rows[3]["turns"], again[1]["turns"], strict=True):
        for a, b in zip(first, right, strict=True):
            np.testing.assert_array_equal(a, b)
    rng = np.random.default_rng(10)
    user, think, response = rows[0]["turns"][0]
    assert len(user) == rng.integers(2, 4)
    np.testing.assert_array_equal(user, rng.integers(0, 50, len(user)))
    assert len(think) == rng.integers(6, 7) == 6
    with pytest.raises(IndexError):
        rows[5]
    (tree,) = builder(split="turns")(rows[0], "")
    assert tree.num_branches == 4


def test_rows_are_grouped_by_a_column_in_order():
    rows = [{"task": 1, "x": 0}, {"task": 0, "x": 1}, {"task": 1, "x": 2}]
    grouped = GroupedRows(rows, "task")
    assert [[row["x"] for row in g["group"]] for g in map(grouped.__getitem__, range(2))] == [
        [0, 2],
        [1],
    ]
