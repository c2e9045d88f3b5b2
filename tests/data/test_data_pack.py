"""Packing: golden layouts, the mask against its definition, rows that are full and never mixed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.batch import check_batch
from jaxtrain.data.packing.branches import list_branches
from jaxtrain.data.packing.pack import Fields, build_batch, fit_rows, lay_out, stack_batches
from jaxtrain.data.packing.tree import Node, Tree, build_tree
from jaxtrain.data.sample import Sample, to_tree


def caterpillar(turns):
    """user, think (side), response (trunk) per turn; thoughts and responses train."""
    parts, trunk = [], -1
    for user, think, response in turns:
        parts.append((trunk, user, [False] * len(user), "user"))
        context = len(parts) - 1
        parts.append((context, think, [True] * len(think), "think"))
        parts.append((context, response, [True] * len(response), "response"))
        trunk = len(parts) - 1
    return build_tree(parts)


@st.composite
def trees(draw, max_nodes=8):
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=max_nodes))
    parts = []
    for index, size in enumerate(sizes):
        parent = -1 if index == 0 else draw(st.integers(0, index - 1))
        mask = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        tokens = draw(st.lists(st.integers(1, 50), min_size=size, max_size=size))
        parts.append((parent, tokens, mask, ""))
    return build_tree(parts)


def test_golden_fork():
    """The Y tree of the specification, but for the weight of the very first token, which nothing
    predicts and which the specification's loss leaves out."""
    tree = build_tree(
        [
            (-1, [1, 2], [True, True], ""),
            (0, [3, 4], [True, False], ""),
            (0, [5], [True], ""),
        ]
    )
    packed = lay_out(tree)
    assert packed.tokens.tolist() == [1, 2, 3, 4, 5]
    assert packed.positions.tolist() == [0, 1, 2, 3, 2]
    assert packed.prev.tolist() == [-1, 0, 1, 2, 1]
    assert packed.until.tolist() == [5, 5, 4, 4, 5]
    assert packed.node.tolist() == [0, 0, 1, 1, 2]
    assert packed.owner.tolist() == [0, 0, 0, 0, 1]
    assert packed.weights["nll"].tolist() == [0, 1, 0.5, 0, 0.5]
    assert packed.num_branches == 2


def test_golden_caterpillars():
    tree = caterpillar([([1, 2], [3], [4, 5]), ([6], [7, 8], [9])])
    assert [node.parent for node in tree.nodes] == [-1, 0, 0, 2, 3, 3]
    assert tree.leaves() == (1, 4, 5) and tree.num_branches == 3
    assert tree.root_path(5) == (0, 2, 3, 5)
    weights = lay_out(tree).weights["nll"]
    assert (weights > 0).sum() == 6  # think 1, response 2, think 2, response 1
    np.testing.assert_allclose(weights.sum(), 8 / 3, rtol=1e-15)
    tree = caterpillar([([10, 11], [12, 13], [14]), ([15], [16], [17, 18])])
    assert lay_out(tree).prev.tolist() == [-1, 0, 1, 2, 1, 4, 5, 5, 7]


def test_a_chain_of_nodes_is_an_ordinary_sample():
    tree = build_tree([(-1, [1, 2], [False, True], ""), (0, [3, 4], [True, True], "")])
    flat = to_tree(Sample(np.array([1, 2, 3, 4]), np.array([0.0, 1, 1, 1])))
    for name in ("tokens", "positions", "prev", "until", "owner"):
        np.testing.assert_array_equal(getattr(lay_out(tree), name), getattr(lay_out(flat), name))
    assert lay_out(tree).weights["nll"].tolist() == [0, 1, 1, 1]


@settings(max_examples=200, deadline=None)
@given(trees())
def test_layout_equals_its_definition(tree):
    packed = lay_out(tree)
    ancestors = []
    for index, node in enumerate(tree.nodes):
        ancestors.append({index} | (ancestors[node.parent] if node.parent >= 0 else set()))
    total = tree.num_tokens
    starts = {n: int(np.flatnonzero(packed.node == n)[0]) for n in range(len(tree.nodes))}
    for q in range(total):
        for k in range(total):
            nq, nk = packed.node[q], packed.node[k]
            visible = (nk != nq and nk in ancestors[nq]) or (nk == nq and k <= q)
            assert visible == (k <= q < packed.until[k])
    for t in range(total):
        n = packed.node[t]
        offset = t - starts[n]
        assert packed.tokens[t] == tree.nodes[n].tokens[offset]
        assert packed.positions[t] == tree.depths[n] + offset
        if offset:
            assert packed.prev[t] == t - 1
        elif n:
            parent = tree.nodes[n].parent
            assert packed.prev[t] == starts[parent] + len(tree.nodes[parent].tokens) - 1
        assert n in tree.root_path(tree.ends[packed.owner[t]])
    assert packed.prev[0] == -1 and (packed.prev[1:] >= 0).all()


@settings(max_examples=100, deadline=None)
@given(trees())
def test_weights_are_the_average_over_branches(tree):
    """Sum of weight x cost over the packed tree = mean over branches, for a cost of the prefix."""

    def cost(tokens, t):
        return 1 + np.cos(tokens[: t + 1] @ np.arange(1, t + 2))

    branches = [
        (branch.tokens, branch.weights["nll"] * 1.0, end)
        for branch, end in zip(list_branches(tree), tree.ends, strict=True)
    ]
    costs = {}  # by (node, offset)
    mean = total = 0.0
    for tokens, weights, end in branches:
        t = 0
        for n in tree.root_path(end):
            for offset in range(len(tree.nodes[n].tokens)):
                costs[n, offset] = cost(tokens, t)
                if t:
                    mean += weights[t] * costs[n, offset] / len(branches)
                    total += weights[t]
                t += 1
    packed = lay_out(tree)
    offsets = [t - int(np.flatnonzero(packed.node == n)[0]) for t, n in enumerate(packed.node)]
    tree_cost = [costs[n, offset] for n, offset in zip(packed.node, offsets, strict=True)]
    # fp64 sums in another order
    np.testing.assert_allclose(packed.weights["nll"] @ tree_cost, mean, rtol=1e-12, atol=1e-12)
    by_branch = lay_out(tree, "branch").weights["nll"]
    np.testing.assert_allclose(by_branch.sum(), total, rtol=1e-12)
    as_one = lay_out(tree, "tree").weights["nll"]
    np.testing.assert_allclose(as_one.sum(), 1.0 if total else 0.0, rtol=1e-12)
    np.testing.assert_allclose(as_one * total, by_branch, rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(trees(max_nodes=5), min_size=1, max_size=8))
def test_forests_hold_every_invariant_and_never_see_each_other(forest):
    row_tokens = 24
    sizes = [tree.num_tokens for tree in forest]
    rows = fit_rows(sizes, row_tokens)
    batch = build_batch([[lay_out(forest[i]) for i in row] for row in rows] + [[]], row_tokens)
    check_batch(batch)
    for b, row in enumerate(rows):
        start = branch = 0
        for index in row:
            alone, stop = lay_out(forest[index]), start + sizes[index]
            np.testing.assert_array_equal(batch.until[b, start:stop], alone.until + start)
            assert batch.until[b, start:stop].max() <= stop
            np.testing.assert_array_equal(batch.owner[b, start:stop], alone.owner + branch)
            weights = batch.weights["nll"][b, start:stop]
            np.testing.assert_array_equal(weights, alone.weights["nll"].astype(np.float32))
            start, branch = stop, branch + alone.num_branches
        assert (batch.prev[b, start:] == -1).all() and not batch.weights["nll"][b, start:].any()
        assert (batch.until[b, start:] == np.arange(start, row_tokens) + 1).all()
    assert (batch.owner >= 0).sum() == sum(sizes)


def first_fit_decreasing(sizes, capacity):
    rows = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        for row in rows:
            if sum(sizes[i] for i in row) + sizes[index] <= capacity:
                row.append(index)
                break
        else:
            rows.append([index])
    return rows


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 40), max_size=60))
def test_rows_are_those_of_first_fit_decreasing(sizes):
    assert fit_rows(sizes, 40) == first_fit_decreasing(sizes, 40)


def test_opened_trees_stay_in_the_first_row():
    assert fit_rows([3, 2, 8, 4, 1], 10, opened=[0, 1]) == [[0, 1, 3, 4], [2]]


def test_a_tree_longer_than_a_row_is_our_bug():
    with pytest.raises(AssertionError, match="41 tokens in a row of 40"):
        fit_rows([41], 40)


def test_stacked_batches_keep_every_field():
    packed = lay_out(to_tree(Sample(np.arange(1, 4), np.ones(3))))
    micro = [build_batch([[packed], []], 4), build_batch([[], [packed]], 4)]
    batch = stack_batches([b._replace(denoms={"nll": np.float32(3)}) for b in micro])
    check_batch(batch)
    assert batch.tokens.tolist() == [[[1, 2, 3, 0], [0] * 4], [[0] * 4, [1, 2, 3, 0]]]
    assert batch.weights["nll"].shape == batch.owner.shape == (2, 2, 4)
    assert batch.since is None and batch.denoms["nll"].tolist() == [3, 3]
    with pytest.raises(ValueError, match="one denominator"):
        stack_batches([b._replace(denoms={"nll": np.float32(i)}) for i, b in enumerate(micro)])


TYPED = Fields(
    ("pg",),
    {"old": np.float32, "target": np.int32, "top": np.dtype((np.int32, (2,))), "seen": np.bool_},
    since=True,
)


def test_streams_of_any_dtype_are_laid_out_with_their_tokens():
    nodes = (
        Node(-1, np.array([1, 2]), {"pg": np.zeros(2)}, {"old": np.zeros(2)}),
        Node(0, np.array([3]), {"pg": np.ones(1)}, {"old": np.array([-1.5])}),
        Node(0, np.array([4]), {"pg": np.ones(1)}, {"old": np.array([-2.5])}),
    )
    first = build_batch([[lay_out(Tree(nodes), "branch")]], 5, TYPED)
    target, top = np.array([2**31 - 1, 7]), np.array([[1, 2], [3, 4]])
    streams = {"target": target, "top": top, "seen": np.ones(2, bool)}
    tree = Tree((Node(-1, np.array([5, 6]), {"pg": np.ones(2)}, streams),))
    batch = stack_batches([first, build_batch([[lay_out(tree)]], 5, TYPED)])
    check_batch(batch)
    assert batch.streams["old"].tolist() == [[[0, 0, -1.5, -2.5, 0]], [[0] * 5]]
    assert batch.weights["pg"].tolist() == [[[0, 0, 1, 1, 0]], [[0, 1, 0, 0, 0]]]
    assert batch.streams["target"].tolist() == [[[0] * 5], [[2**31 - 1, 7, 0, 0, 0]]]
    assert batch.streams["top"].tolist()[1] == [[[1, 2], [3, 4], [0, 0], [0, 0], [0, 0]]]
    assert [stream.dtype.name for stream in batch.streams.values()] == [
        "float32", "int32", "int32", "bool",
    ]  # fmt: skip
    with pytest.raises(TypeError, match="float64.*int32"):
        streams["target"] = target / 2
        build_batch([[lay_out(Tree((Node(-1, target, {}, streams),)))]], 5, TYPED)


def test_since_says_who_sees_later_tokens():
    """A prompt that sees itself, a causal answer, and a leaf of two blocks."""
    tree = Tree(
        (
            Node(-1, np.arange(3), {}, since=np.zeros(3, np.int32)),
            Node(0, np.arange(3), {}),
            Node(0, np.arange(4), {}, since=np.arange(4) // 2 * 2),
        )
    )
    chain = Tree((Node(-1, np.ones(2), {}),))
    batch = build_batch([[lay_out(chain), lay_out(tree)]], 13, TYPED)
    check_batch(batch)
    q = np.arange(13)[:, None]
    seen = (batch.since[0] <= q) & (q < batch.until[0])
    assert ["".join(".x"[int(x)] for x in row) for row in seen] == [
        "x............",
        "xx...........",
        "..xxx........",
        "..xxx........",
        "..xxx........",
        "..xxxx.......",
        "..xxxxx......",
        "..xxxxxx.....",
        "..xxx...xx...",
        "..xxx...xx...",
        "..xxx...xxxx.",
        "..xxx...xxxx.",
        "............x",
    ]
    for since, message in [(0, "another tree"), (4, "skips other branches"), (9, "see itself")]:
        bad = batch.since.copy()
        bad[0, 8] = since
        with pytest.raises(AssertionError, match=message):
            check_batch(batch._replace(since=bad))
    with pytest.raises(ValueError, match="from 0 to the token's own"):
        Node(-1, np.arange(2), {}, since=np.array([0, 2]))
