"""Blocks of packed rows: properties over random forests, and trees against their branches."""

import numpy as np
import pytest

from jaxtrain.batch import ANCHOR, NEXT, check_batch
from jaxtrain.data.packing.pack import build_batch, lay_out
from jaxtrain.data.packing.tree import Node, Tree
from jaxtrain.data.sample import Dropped, Sample
from jaxtrain.methods.drafts.anchors import block_weights, count_branches, decay_of, lay_blocks
from jaxtrain.methods.drafts.data import MinLengthTokenizer

T, K = 40, 5


def node(rng, length, parent=-1, share=0.7):
    weights = (rng.random(length) < share).astype(np.float64)
    return Node(parent, rng.integers(1, 99, length).astype(np.int32), {"nll": weights})


def random_tree(rng) -> Tree:
    nodes = [node(rng, int(rng.integers(2, 7)))]
    for _ in range(int(rng.integers(0, 5))):
        nodes.append(node(rng, int(rng.integers(1, 6)), int(rng.integers(0, len(nodes)))))
    return Tree(tuple(nodes))


def random_batch(rng, microsteps=2, rows=3):
    """[A, B, T]; every row one or two trees, and room left."""
    packed = []
    while len(packed) < microsteps * rows:
        trees = [random_tree(rng) for _ in range(int(rng.integers(0, 3)))]
        if sum(tree.num_tokens for tree in trees) <= T:
            packed.append([lay_out(tree) for tree in trees])
    batch = build_batch(packed, T)
    check_batch(batch)

    def apart(x):
        return x.reshape(microsteps, rows, T)

    fields = {name: apart(getattr(batch, name)) for name in ("tokens", "positions", "prev")}
    return batch._replace(
        **fields,
        until=apart(batch.until),
        owner=apart(batch.owner),
        weights={"nll": apart(batch.weights["nll"])},
    )


def lay(batch, seed=0, num_anchors=6, **options):
    provided = {"num_anchors": num_anchors, "block_size": K, "decay": 2.0, "component": "draft"}
    return lay_blocks(batch, np.random.default_rng(seed), **provided, **options)


@pytest.mark.parametrize("seed", range(6))
def test_properties_of_blocks(seed):
    """Successors are children; anchors train and so does what follows; never too many, all where
    there are few; the denominator is the sum of all weights; equal seeds draw equal blocks."""
    batch = random_batch(np.random.default_rng(seed))
    laid, again = lay(batch, 1), lay(batch, 1)
    prev, after = batch.prev.reshape(-1, T), laid.streams[NEXT].reshape(-1, T)
    anchor, weights = laid.streams[ANCHOR].reshape(-1, T), batch.weights["nll"].reshape(-1, T)
    for row in range(len(prev)):
        children = {t: set(np.flatnonzero(prev[row] == t)) for t in range(T)}
        for t in range(T):
            assert after[row, t] in (children[t] or {-1})
        fits = [
            t for t in range(T) if weights[row, t] and after[row, t] >= 0
            and weights[row, after[row, t]]
        ]  # fmt: skip
        chosen = np.flatnonzero(anchor[row])
        assert set(chosen) <= set(fits) and len(chosen) == min(6, len(fits))
    total = 0.0
    share = laid.weights["nll"].reshape(-1, T)
    for row, t in zip(*np.nonzero(anchor), strict=True):
        index = t
        for slot in range(1, K):
            index = after[row, index] if index >= 0 else -1
            total += (
                anchor[row, t] * share[row, index] * np.exp(-(slot - 1) / 2.0) if index >= 0 else 0
            )
    assert laid.denoms["draft"] == pytest.approx([total, total])
    assert laid.denoms["draft"].shape == (2,)
    by_block = lay(batch, 1, by_block=True).denoms["draft"][0]
    assert by_block == pytest.approx((anchor * share).sum())
    np.testing.assert_array_equal(laid.streams[ANCHOR], again.streams[ANCHOR])
    np.testing.assert_array_equal(laid.streams[NEXT], again.streams[NEXT])
    few = [lay(batch, draw, num_anchors=1).streams[ANCHOR] for draw in range(4)]
    assert any((entry != few[0]).any() for entry in few)


def test_branches_are_leaves_below():
    rng = np.random.default_rng(0)
    batch = build_batch([[lay_out(random_tree(rng)) for _ in range(2)] for _ in range(4)], 80)
    branches = count_branches(batch)
    for row in range(4):
        for t in range(80):
            leaves = [q for q in range(t, batch.until[row, t]) if not (batch.prev[row] == q).any()]
            assert branches[row, t] == len(leaves)


def test_a_tree_is_its_branches_on_average():
    """Over 4,000 draws with every anchor: the mean weight of each (anchor, guessed token) is the
    number of branches through both, over the number of branches. Standard error 0.016."""
    shape = ((3, -1, 3), (2, 0, 1), (3, 0, 2), (2, 2, 1), (2, 2, 1), (2, 1, 1))
    nodes = [
        Node(p, np.arange(1, n + 1, dtype=np.int32), {"nll": np.full(n, g)}) for n, p, g in shape
    ]
    batch = build_batch([[lay_out(Tree(tuple(nodes)))]], 20)
    prev = batch.prev[0]
    branches, draws = count_branches(batch)[0], 4000
    many = batch._replace(
        **{f: np.repeat(getattr(batch, f)[None], draws, 1) for f in ("tokens", "prev", "until")},
        weights={"nll": np.repeat(batch.weights["nll"][None].astype(np.float64), draws, 1)},
    )
    laid = lay(many, num_anchors=20)
    actual = np.zeros((20, 20))
    weights, (_, rows, position) = block_weights(laid, K), np.nonzero(laid.streams[ANCHOR])
    index = position.copy()
    for slot in range(1, K):
        index = np.where(index >= 0, laid.streams[NEXT][0][rows, np.maximum(index, 0)], -1)
        np.add.at(
            actual, (position[index >= 0], index[index >= 0]), weights[index >= 0, slot] / draws
        )
    expected = np.zeros((20, 20))
    for t in range(14):
        index, steps = t, 0
        while (index := int(prev[index])) >= 0 and (steps := steps + 1) < K:
            if index > 0:  # nothing predicts the first token, so it is no anchor
                expected[index, t] = branches[t] / 3
    np.testing.assert_allclose(actual, expected, atol=0.06)


def test_decay():
    np.testing.assert_allclose(decay_of(4, 7.0), [0, 1, np.exp(-1 / 7), np.exp(-2 / 7)])
    np.testing.assert_allclose(decay_of(4, None), [0, 1, 1, 1])


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ([0, 1, 1, 1, 1], None),
        ([0, 1, 1, 1, 0], "fewer than task.min_loss_tokens 4 trained"),
        ([0, 1, 0, 1, 0, 1, 0, 1, 0, 1], "no two trained tokens in a row"),
        ([1, 1, 0, 1, 0, 1, 0, 1], "no two trained tokens in a row"),
    ],
)
def test_what_is_left_out(weights, reason):
    sample = Sample(np.arange(1, len(weights) + 1), np.array(weights, np.float32), "row 3")
    (actual,) = MinLengthTokenizer(lambda row, origin: [sample], 4)({}, "row 3")
    assert actual is sample if reason is None else actual == Dropped(reason, "row 3")
