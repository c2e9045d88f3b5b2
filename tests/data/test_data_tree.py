"""Trees: their checks, their counts, and prefix merging against the sequences that went in."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.data.packing.branches import list_branches
from jaxtrain.data.packing.prefixes import FlatSequence, measure_saving, merge_prefixes
from jaxtrain.data.packing.tree import Node, Tree, build_tree
from jaxtrain.data.sample import Dropped, Sample, to_tree, to_trees


def node(parent, *tokens):
    array = np.array(tokens, np.int32)
    return Node(parent, array, {"nll": np.ones(len(array))})


def test_a_node_without_tokens_or_with_another_number_of_weights_is_refused():
    with pytest.raises(ValueError, match="no tokens"):
        node(-1)
    with pytest.raises(ValueError, match="nll: 1 values for 2 tokens"):
        Node(-1, np.array([1, 2]), {"nll": np.ones(1)})


@pytest.mark.parametrize("parents", [[0], [-1, -1], [-1, 1], [-1, 2, 0], [-2]])
def test_nodes_that_are_not_one_tree_in_topological_order_are_refused(parents):
    with pytest.raises(ValueError, match="parent"):
        Tree(tuple(node(parent, 1) for parent in parents))


def test_an_empty_tree_is_refused():
    with pytest.raises(ValueError, match="at least one node"):
        Tree(())


@pytest.mark.parametrize("ends", [(1,), (1, 2, 5)])
def test_branches_must_end_at_nodes_and_cover_the_leaves(ends):
    with pytest.raises(ValueError, match="every leaf"):
        Tree((node(-1, 1), node(0, 2), node(0, 3)), ends)


def test_children_leaves_paths_and_counts():
    tree = Tree((node(-1, 1), node(0, 2, 3), node(0, 4), node(1, 5), node(1, 6, 7)))
    assert tree.children(0) == (1, 2) and tree.children(1) == (3, 4) and tree.children(3) == ()
    assert tree.leaves() == (2, 3, 4)
    assert tree.root_path(4) == (0, 1, 4)
    assert tree.branch_counts == (3, 2, 1, 1, 1)
    assert tree.depths == (0, 1, 1, 3, 3)
    assert tree.preorder() == [0, 1, 3, 4, 2]
    assert tree.num_branches == 3 and tree.num_tokens == 7
    with pytest.raises(ValueError, match="no branch ends at node 1"):
        tree.root_path(1)
    with pytest.raises(IndexError):
        tree.root_path(5)


def test_a_single_node_is_its_own_leaf():
    tree = to_tree(Sample(np.array([4, 5]), np.array([0, 1.0]), "here"))
    assert tree.leaves() == (0,) and tree.num_branches == 1 and tree.origin == "here"


def test_rows_that_cannot_train_are_dropped_with_the_reason():
    ones = np.ones(4, np.float32)
    items = to_trees(
        [
            Sample(np.arange(4), ones, "a"),
            Sample(np.arange(4), ones * 0, "b"),
            Sample(np.arange(4), ones * [1, 0, 0, 0], "c"),
            Sample(np.arange(0), ones[:0], "d"),
            Sample(np.arange(9), np.ones(9), "e"),
            Dropped("odd", "f"),
        ],
        row_tokens=8,
    )
    reasons = [getattr(item, "reason", None) for item in items]
    untrained = "no trained token"
    assert reasons == [None, untrained, untrained, "empty", "too long for a row", "odd"]


@st.composite
def groups(draw):
    """Sequences over few tokens, so that prefixes collide often."""
    sequences = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1))
    branches = []
    for tokens in sequences:
        size = len(tokens)
        weights = draw(
            st.lists(st.sampled_from([0.0, 0.0, 1.0, 0.25]), min_size=size, max_size=size)
        )
        branches.append(FlatSequence(np.array(tokens, np.int32), {"nll": np.array(weights)}))
    return branches


def path_of(tree, end, label):
    return np.concatenate([label(tree.nodes[i]) for i in tree.root_path(end)])


@settings(max_examples=150, deadline=None)
@given(groups(), st.sampled_from(["all", "context"]))
def test_merging_keeps_every_sequence_and_every_weight(branches, share):
    trees = merge_prefixes(branches, share=share)
    paths = [path_of(tree, end, lambda n: n.tokens).tolist() for tree in trees for end in tree.ends]
    assert sorted(paths) == sorted(branch.tokens.tolist() for branch in branches)

    # The loss of a tree is the sum over its tokens of weight x cost, where the cost depends on the
    # whole prefix; any cost function tells trees apart from sequences that lost or gained weight.
    def cost(prefix):
        return 1 + sum((i + 1) * 7 * t for i, t in enumerate(prefix)) % 11

    flat = sum(
        w * cost(b.tokens[: i + 1]) for b in branches for i, w in enumerate(b.weights["nll"])
    )
    merged = 0.0
    for tree in trees:
        for index, part in enumerate(tree.nodes):
            end = next(e for e in tree.ends if index in tree.root_path(e))
            prefix = path_of(tree, end, lambda n: n.tokens)
            start = tree.depths[index]
            for offset, weight in enumerate(part.weights["nll"]):
                merged += weight * cost(prefix[: start + offset + 1])
    np.testing.assert_allclose(merged, flat, rtol=1e-12)  # sums in another order

    saving = measure_saving(trees)
    assert saving.flat_tokens == sum(len(branch.tokens) for branch in branches)
    assert saving.packed_tokens == sum(tree.num_tokens for tree in trees)
    if share == "all":  # the smallest possible: one token per distinct prefix
        prefixes = {tuple(b.tokens[: i + 1]) for b in branches for i in range(len(b.tokens))}
        assert saving.packed_tokens == len(prefixes)
    else:
        for tree in trees:
            for index, part in enumerate(tree.nodes):
                assert tree.branch_counts[index] == 1 or not part.weights["nll"].any()


@settings(max_examples=50, deadline=None)
@given(groups())
def test_ends_are_in_the_order_of_the_group(branches):
    shared = [
        FlatSequence(np.r_[9, b.tokens], {"nll": np.r_[0, b.weights["nll"]]}) for b in branches
    ]
    (tree,) = merge_prefixes(shared)
    for end, branch in zip(tree.ends, shared, strict=True):
        assert path_of(tree, end, lambda n: n.tokens).tolist() == branch.tokens.tolist()


def test_streams_follow_their_branch_and_conflicts_are_refused():
    def branch(tokens, trained, value):
        return FlatSequence(
            np.array(tokens), {"pg": np.array(trained, float)}, {"old": np.full(len(tokens), value)}
        )

    (tree,) = merge_prefixes(
        [branch([1, 2, 3], [0, 0, 1], 0.5), branch([1, 2, 4], [0, 0, 1], 0.25)]
    )
    assert [n.streams["old"].tolist() for n in tree.nodes] == [[0.5, 0.5], [0.5], [0.25]]
    clash = [branch([1, 2, 3], [0, 1, 1], 0.5), branch([1, 2, 4], [0, 1, 1], 0.25)]
    with pytest.raises(ValueError, match='share="context"'):
        merge_prefixes(clash)
    (tree,) = merge_prefixes(clash, share="context")
    assert [n.tokens.tolist() for n in tree.nodes] == [[1], [2, 3], [2, 4]]


@pytest.mark.parametrize("group", [[], [FlatSequence(np.arange(0), {"nll": np.ones(0)})]])
def test_nothing_to_merge_is_refused(group):
    with pytest.raises(ValueError, match="at least one sequence"):
        merge_prefixes(group)


def test_branches_of_a_tree_share_out_its_weights():
    tree = build_tree([(-1, [1, 2], [True, True], ""), (0, [3], [True], ""), (0, [4], [False], "")])
    first, second = list_branches(tree)
    assert first.tokens.tolist() == [1, 2, 3] and second.tokens.tolist() == [1, 2, 4]
    assert first.weights["nll"].tolist() == [1, 1, 1]
    assert second.weights["nll"].tolist() == [1, 1, 0]
