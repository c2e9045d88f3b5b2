"""Ranked answers as trees and flat rows: slots that find their branches wherever they lie."""

import pickle

import numpy as np
import pytest

from jaxtrain.batch import check_batch
from jaxtrain.data.comparisons.pairs import NO_SIDE, PairTrees
from jaxtrain.data.comparisons.ranked import Ranked, RankedAnswer, RankedPair
from jaxtrain.data.packing.branches import list_branches
from jaxtrain.data.packing.pack import Fields, build_batch, lay_out
from jaxtrain.data.packing.tree import Forest, build_tree
from jaxtrain.data.packing.window import WindowPacker
from jaxtrain.data.sample import Dropped, to_trees

STREAMS = {"chosen": np.int32, "rejected": np.int32, "margin": np.float32, "share": np.float32}


def ranked(*answers, prompt=(1, 2, 3), pairs=(), labels=(), untrained=()):
    created = [
        RankedAnswer(np.array(a), np.array([t not in untrained for t in a], float)) for a in answers
    ]
    return Ranked(
        np.array(prompt), tuple(created), tuple(RankedPair(*p) for p in pairs), labels, "row 0"
    )


def read_slots(batch):
    """[(chosen tokens, rejected tokens, weight, margin)] of a batch [B, T], through `owner`."""
    actual = []
    for b, t in zip(*np.nonzero(batch.weights["preference"]), strict=True):
        sides = []
        for name in ("chosen", "rejected"):
            distance = batch.streams[name][b, t]
            local_copy = batch.owner[b] == batch.owner[b, t + max(distance, -t)]
            local_copy &= batch.weights["score"][b] != 0
            sides.append(None if distance == NO_SIDE else batch.tokens[b][local_copy].tolist())
        actual.append((*sides, float(batch.weights["preference"][b, t]),
                      float(batch.streams["margin"][b, t])))  # fmt: skip
    return actual


def pack(*items, row_tokens=40, nll=False):
    components = ("preference", "score", *(["nll"] if nll else []))
    fields = Fields(components, STREAMS, dtype=np.float64)
    batch = build_batch([[lay_out(item, "branch") for item in items]], row_tokens, fields)
    check_batch(batch)
    return batch


def test_golden_pair():
    tree = PairTrees()(ranked([11, 12, 13], [21, 22], pairs=[(1, 0, 0.5)]))
    packed = lay_out(tree, "branch")
    assert packed.tokens.tolist() == [1, 2, 3, 11, 12, 13, 21, 22]
    assert packed.owner.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert packed.weights["preference"].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert packed.weights["score"].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert (packed.streams["chosen"][1], packed.streams["rejected"][1]) == (6, 4)
    assert [node.role for node in tree.nodes] == ["prompt", "rejected", "chosen"]
    pickle.loads(pickle.dumps(PairTrees(nll="answer")))


@pytest.mark.parametrize("share", [True, False])
def test_slots_find_their_answers_wherever_the_tree_lies(share):
    """Several pairs of one prompt, an answer in two of them, one in none, single labels."""
    rule = PairTrees(share_prompts=share)
    items = [
        rule(
            ranked([11, 12], [21], [31, 39, 32], [41], pairs=[(0, 1), (2, 1, 2.0)], untrained=(39,))
        ),  # fmt: skip
        rule(ranked([51, 52], [61], prompt=(5,), labels=(False, True))),
    ]
    assert all(isinstance(item, Forest) != share for item in items)
    batch = pack(items[1], *items)
    single = [(None, [51, 52], 1, 0), ([61], None, 1, 0)]
    pairs = [([11, 12], [21], 1, 0), ([31, 32], [21], 1, 2)]
    assert read_slots(batch) == single + pairs + single
    assert 41 not in batch.tokens


def test_prompts_count_once_and_likelihood_counts_as_its_pairs_do():
    entry = ranked([11, 12], [21], [31, 39], pairs=[(0, 1), (0, 2)], untrained=(39,))
    for average, per_entry in (("pairs", 1.0), ("prompts", 0.5)):
        for share in (True, False):
            rule = PairTrees(share_prompts=share, nll="sequence", average=average)
            batch = pack(rule(entry), nll=True)
            assert [slot[2] for slot in read_slots(batch)] == [per_entry, per_entry]
            real = batch.tokens[0] > 0
            assert batch.weights["nll"][0][real].sum() == 2 * per_entry * 4  # 2, 3, 11, 12
        answer = pack(PairTrees(nll="answer", average=average)(entry), nll=True)
        assert answer.weights["nll"][0].sum() == 2 * per_entry * 2


def test_tails_are_those_of_each_pair():
    entry = ranked([11, 12, 19, 13], [21], [31, 32], pairs=[(0, 1), (0, 2)], untrained=(19,))
    batch = pack(PairTrees(tail=0.25)(entry))
    assert batch.tokens[0][batch.tokens[0] > 0].tolist() == [
        *(1, 2, 3), *(11, 12, 19, 13), 21, *(11, 12, 19, 13), 31, 32,
    ]  # fmt: skip
    share = batch.streams["share"][0]
    np.testing.assert_array_equal(share[3:7], [1, 0.25, 0.25, 0.25])
    np.testing.assert_array_equal(share[8:12], [1, 1, 1, 0.25])
    assert [slot[:2] for slot in read_slots(batch)] == [
        ([11, 12, 13], [21]),
        ([11, 12, 13], [31, 32]),
    ]


def test_what_cannot_train_is_dropped():
    nothing = PairTrees()(ranked([11], [21], pairs=[(0, 1)], untrained=(21,)))
    assert isinstance(nothing, Dropped) and nothing.reason == "no trained token"
    every = [(i, j) for i in range(3) for j in range(3) if i != j]
    crowded = PairTrees()(ranked([11], [21], [31], prompt=(1,), pairs=every))
    assert isinstance(crowded, Dropped) and crowded.reason == "more pairs than tokens"


def test_a_forest_packs_as_its_trees_do():
    """Laid out it is what its trees are, side by side; one item of a row for whoever fills rows."""
    fork = build_tree([(-1, [1, 2], [0, 1], ""), (0, [3], [1], ""), (0, [4], [1], "")])
    line = build_tree([(-1, [5, 6], [1, 1], "")])
    forest = Forest((fork, line, fork))
    apart = build_batch([[lay_out(tree) for tree in forest.trees]], 12)
    batch = build_batch([[lay_out(forest)]], 12)
    check_batch(batch)
    for name in ("tokens", "positions", "prev", "until", "owner"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(apart, name))
    np.testing.assert_array_equal(batch.weights["nll"], apart.weights["nll"])
    assert (forest.num_tokens, forest.flat_tokens, forest.num_branches) == (10, 14, 5)
    assert len(list_branches(forest)) == 5
    assert lay_out(forest).node.tolist() == [0, 0, 1, 2, 3, 3, 4, 4, 5, 6]
    [retained, dropped] = to_trees([forest, Forest((line,) * 9)], row_tokens=12)
    assert retained is forest and dropped.reason == "too long for a row"

    class Reader:
        pass_len = None
        repeated = False

        def __init__(self):
            self.left = [[forest], [line], [forest], [line]]

        def __next__(self):
            if not self.left:
                raise StopIteration
            return self.left.pop(0)

        def state(self):
            return {}

        restore = close = state

    packer = WindowPacker(Reader(), row_tokens=12, window=4, shuffle=False)
    rows = list(iter(lambda: next(packer, None), None))
    assert [sum(item.num_tokens for item in row) for row in rows] == [12, 12]
