"""Starts of blocks, the forest of documents and blocks, and rows that have room for them."""

import numpy as np
import pytest

from jaxtrain.batch import check_batch
from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.packing.pack import Fields, build_batch, lay_out, stack_batches
from jaxtrain.data.packing.tree import Node, Tree
from jaxtrain.data.sample import Dropped, Sample
from jaxtrain.errors import UserError
from jaxtrain.methods.ebft.blocks import CE, RL, BlockStrides, count_documents, lay_blocks
from jaxtrain.methods.ebft.strided_data import NO_ROOM, BlockSequences, PaddedTokenizer, between

T = 40


def document(rng, length: int, prompt: int = 0):
    weights = (np.arange(length) >= prompt).astype(np.float64)
    tokens = rng.integers(1, 97, length).astype(np.int32)
    return lay_out(Tree((Node(-1, tokens, {CE: weights, RL: weights}),)), "branch")


def pack(*rows):
    """[1, B, T] of documents (tokens, of these the prompt's)."""
    rng = np.random.default_rng(0)
    packed = [[document(rng, *entry) for entry in row] for row in rows]
    return stack_batches([build_batch(packed, T, Fields((CE, RL)))])


def branch(batch, index: int, row: int = 0) -> list[int]:
    """The tokens from the root to a place of a row."""
    actual = []
    while index >= 0:
        actual.append(int(batch.tokens[0, row, index]))
        index = batch.prev[0, row, index]
    return actual[::-1]


@pytest.mark.parametrize("stride, length", [(3, 4), (4, 4), (7, 2), (1, 1), (9, 3)])
def test_blocks_are_branches_of_their_own_document(stride, length):
    """Each block follows the document's tokens up to its anchor, whatever lies beside it in the
    row, and stands for what comes there."""
    strides = BlockStrides(stride=stride, context=4, length=length, samples=2)
    batch = pack([(20, 0), (9, 5), (3, 1)], [(40, 7)], [(33, 1)])
    forest, spots = lay_blocks(batch, strides)
    check_batch(forest)
    total = 0
    for row, lengths in enumerate(
        [[(0, 20, 4), (20, 9, 5), (29, 3, 4)], [(0, 40, 7)], [(0, 33, 4)]]
    ):
        expected = [
            (root, root + a)
            for root, n, first in lengths
            for a in range(first, n - length + 1, stride)
        ]
        predictors = spots.predictor[0, row]
        assert predictors[predictors < T].tolist() == [a - 1 for _, a in expected]
        assert len(expected) <= strides.most(T)
        for index, (root, anchor) in enumerate(expected):
            before = batch.tokens[0, row, root:anchor].tolist()
            truth = spots.truth[0, row].reshape(-1, length)[index]
            window = batch.tokens[0, row, anchor : anchor + length].tolist()
            assert branch(forest, truth[-1], row) == before + window
            for sample in range(2):
                first = spots.start[0, row, index] + sample * length
                assert branch(forest, first + length - 1, row) == before + [0] * length
                assert forest.positions[0, row, first] == anchor - root
                assert (forest.until[0, row, first : first + length] == first + length).all()
        total += len(expected)
    assert forest.weights[RL].sum() == total * 2 * length
    assert forest.weights[CE].sum() == batch.weights[CE].sum()
    assert count_documents(batch, spots)[0] == total


def test_a_row_of_any_documents_has_room_for_its_blocks():
    """The most blocks that any split of a row into documents gives, by trying all of two kinds."""
    for stride, context, length in [(1, 1, 1), (5, 2, 1), (8, 3, 4), (2, 7, 3)]:
        strides = BlockStrides(stride=stride, context=context, length=length, samples=1)
        for n in range(1, 24):
            splits = [[m] * (T // m) + ([T % m] if T % m else []) for m in (n, T - n, T)]
            counts = [sum(len(strides.find(np.ones(m))) for m in split) for split in splits]
            assert max(counts) <= strides.most(T)


def test_every_document_has_its_own_offset():
    """A long prompt takes no anchors from another document; the prefix counts from the answer; a
    document without a prompt goes by the context alone."""
    strides = BlockStrides(stride=4, context=3, length=2, samples=1, prefix=2)
    answers = [np.arange(20) >= prompt for prompt in (0, 1, 2, 9, 17, 20)]
    actual = [strides.find(answer.astype(float)).tolist() for answer in answers]
    assert actual == [[3, 7, 11, 15], [3, 7, 11, 15], [4, 8, 12, 16], [11, 15], [], []]
    _, spots = lay_blocks(pack([(20, 9), (20, 2)]), strides)
    assert spots.predictor[0, 0, :6].tolist() == [10, 14, 23, 27, 31, 35]


def test_padding_and_short_documents_have_no_block():
    strides = BlockStrides(stride=2, context=6, length=4, samples=3)
    batch = pack([(9, 0), (8, 0)], [])
    forest, spots = lay_blocks(batch, strides)
    check_batch(forest)
    assert (spots.predictor == T).all() and not forest.weights[RL].any()
    assert count_documents(batch, spots) == (0, 2, 2)
    assert forest.weights[CE].sum() == batch.weights[CE].sum() > 0


def test_blocks_may_keep_to_trained_tokens():
    answer = np.array([0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1])
    strides = BlockStrides(stride=1, context=1, length=3, samples=1)
    assert strides.find(answer).tolist() == list(range(2, 11))
    block_strides = BlockStrides(stride=1, context=1, length=3, samples=1, trained_only=True)
    assert block_strides.find(answer).tolist() == [2, 3, 8, 9, 10]


def test_thoughts_have_no_likelihood_but_blocks():
    """The tags with what stands between them; one that is not closed goes to the end."""
    tokens = np.array([5, 7, 8, 1, 2, 9, 3, 7, 8, 4])
    inside = between(tokens, (7, 8), (9,))
    assert inside.tolist() == [False, True, True, True, True, True, False, True, True, True]
    strides = BlockStrides(stride=1, context=1, length=2, samples=1)
    judge = PaddedTokenizer(None, strides, False, ((7, 8), (9,))).judge
    tree = judge(Sample(tokens, np.r_[0, np.ones(9)].astype(np.float32)))
    (node,) = tree.nodes
    assert node.weights[CE].tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 0, 0]
    assert node.weights[RL].sum() == 9


def test_what_has_no_room_is_left_out_or_trains_alone():
    strides = BlockStrides(stride=1, context=6, length=4, samples=1)
    short = Sample(np.arange(1, 9), np.r_[np.zeros(3), np.ones(5)].astype(np.float32))
    assert PaddedTokenizer(None, strides, False, None).judge(short) == Dropped(NO_ROOM)
    assert PaddedTokenizer(None, strides, True, None).judge(short).num_tokens == 8
    long = Sample(np.arange(1, 12), np.r_[np.zeros(3), np.ones(8)].astype(np.float32))
    assert PaddedTokenizer(None, strides, False, None).judge(long).num_tokens == 11


def test_data_without_any_room_are_refused(tmp_path):
    path = tmp_path / "short.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n' * 20)

    dataset = DatasetConfig(path=str(path))
    data = DataConfig(sequence_len=32, datasets=[dataset])
    strides = BlockStrides(stride=1, context=6, length=4, samples=1)
    recipe = BlockSequences(
        data, load_tokenizer("builtin"), strides, keep_short=True, mask_thinking=False
    )
    with pytest.raises(UserError, match=r"no row has room for a block; the longest has \d tokens"):
        recipe.probe(dataset)
