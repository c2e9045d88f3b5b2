"""Masks of packed documents: who may be masked, how much, with which weight, and always alike."""

import numpy as np
import pytest

from jaxtrain.batch import check_batch
from jaxtrain.data.packing.pack import Fields, build_batch, lay_out
from jaxtrain.data.packing.tree import Node, Tree, chain
from jaxtrain.data.sample import Dropped, Sample
from jaxtrain.errors import UserError
from jaxtrain.methods.diffusion.data import TruncatedAnswers
from jaxtrain.methods.diffusion.masks import RATIO, TARGET, Noise, mask, mask_held_out

MASK = 99
END = 7


def make_batch(rows, T, seed=0, share=0.7):
    """[1, B, T] of rows of documents, given by their lengths; padding behind them."""
    rng = np.random.default_rng(seed)

    def document(length):
        weights = (rng.random(length) < share).astype(np.float64)
        weights[-1] = 1.0
        return lay_out(chain(rng.integers(1, 90, length).astype(np.int32), {"nll": weights}))

    batch = build_batch([[document(n) for n in row] for row in rows], T, Fields(since=True))
    return batch._replace(
        **{f: getattr(batch, f)[None] for f in ("tokens", "positions", "prev", "until", "since")},
        owner=batch.owner[None],
        weights={"nll": batch.weights["nll"][None]},
    )


BATCH = make_batch([(9, 12), (20,), (5, 6, 7)], 24)
STARTS = [(0, 0, 9), (0, 9, 21), (1, 0, 20), (2, 0, 5), (2, 5, 11), (2, 11, 18)]


def ratios(batch):
    """p of each document, by the masked tokens in it; they must agree."""
    actual = []
    for row, start, stop in STARTS:
        local_result = batch.streams[RATIO][0, row, start:stop]
        values = np.unique(local_result[local_result > 0])
        assert len(values) <= 1, "one document, one p"
        actual.append(values[0] if len(values) else None)
    return actual


def test_only_trained_tokens_are_masked_each_document_by_its_own_p():
    seen = set()
    for step in range(20):
        drawn = mask(BATCH, Noise(MASK), [0, step]).batch
        masked = drawn.tokens == MASK
        assert not masked[BATCH.weights["nll"] == 0].any(), "context, first tokens and padding stay"
        np.testing.assert_array_equal(masked, drawn.streams[RATIO] > 0)
        np.testing.assert_array_equal(masked, drawn.weights["nll"] > 0)
        np.testing.assert_array_equal(drawn.streams[TARGET], BATCH.tokens)
        np.testing.assert_array_equal(np.where(masked, BATCH.tokens, drawn.tokens), BATCH.tokens)
        actual = [p for p in ratios(drawn) if p is not None]
        assert len(set(actual)) == len(actual), "t is a document's, not a row's or a batch's"
        seen |= set(actual)
        check_batch(drawn._replace(tokens=BATCH.tokens))
    assert len(seen) > 60


def test_since_lets_each_token_see_its_document_and_no_other():
    drawn = mask(BATCH, Noise(MASK), [0, 0]).batch
    for row, start, stop in STARTS:
        assert (drawn.since[0, row, start:stop] == start).all()
        assert (drawn.until[0, row, start:stop] == stop).all()
    index = np.arange(24)
    np.testing.assert_array_equal(drawn.since[0, 1, 20:], index[20:])  # padding: itself


@pytest.mark.parametrize("normalize", ["document", "token"])
def test_the_mean_over_draws_is_the_full_cross_entropy(normalize):
    """A model that does not look at the text: E[sum of CE / p over masked] is the sum of CE."""
    ce = np.random.default_rng(3).random(BATCH.tokens.shape)
    weights = BATCH.weights["nll"]
    if normalize == "document":
        expected = np.mean(
            [(ce * weights)[0, r, a:b].sum() / weights[0, r, a:b].sum() for r, a, b in STARTS]
        )
    else:
        expected = (ce * weights).sum() / weights.sum()
    for schedule, low in (("linear", 1e-3), ("cosine", 0.3), ("quadratic", 0.1)):
        noise = Noise(MASK, schedule, low=low, normalize=normalize)
        values = []
        for step in range(1500 if low == 1e-3 else 300):
            drawn = mask(BATCH, noise, [1, step]).batch
            values.append((ce * drawn.weights["nll"]).sum() / drawn.denoms["masked"][0])
        error = np.std(values) / len(values) ** 0.5
        assert abs(np.mean(values) - expected) < 4 * error, schedule
        assert error < 0.08 * expected
    held = mask_held_out(BATCH, Noise(MASK, normalize=normalize), 0, 500)
    values = [(ce * entry.weights["nll"]).sum() / entry.denoms["masked"][0] for entry in held]
    assert abs(np.mean(values) - expected) < 0.05 * expected


def test_without_weights_every_masked_token_counts_alike():
    noise = Noise(MASK, weighted=False, normalize="token")
    drawn = mask(BATCH, noise, [0, 5]).batch
    assert set(np.unique(drawn.weights["nll"])) == {0.0, 1.0}
    assert drawn.denoms["masked"][0] == (drawn.tokens == MASK).sum()


def test_schedules_and_bounds_are_used():
    t = np.linspace(0, 1, 101)
    half = {}
    for schedule in ("linear", "cosine", "quadratic"):
        p = Noise(MASK, schedule, low=0.2, high=0.6).ratio(t)
        np.testing.assert_allclose([p[0], p[-1]], [0.2, 0.6])
        assert (np.diff(p) > 0).all()
        half[schedule] = p[50]
    np.testing.assert_allclose(half["linear"], 0.4)
    np.testing.assert_allclose(half["cosine"], 0.2 + 0.4 * np.sqrt(0.5))
    np.testing.assert_allclose(half["quadratic"], 0.3)
    actual = []
    for step in range(30):
        actual += ratios(mask(BATCH, Noise(MASK, low=0.2, high=0.6), [0, step]).batch)
    actual = [p for p in actual if p is not None]
    assert 0.2 <= min(actual) < 0.25 and 0.55 < max(actual) <= 0.6


def test_the_draw_does_not_depend_on_the_microsteps():
    """[1, 4, T] and [4, 1, T]: the same masks, weights and denominator."""
    batch = make_batch([(9, 12), (20,), (5, 6, 7), (11,)], 24)
    apart = batch._replace(
        **{f: getattr(batch, f).reshape(4, 1, 24) for f in ("tokens", "positions", "prev")},
        until=batch.until.reshape(4, 1, 24),
        since=batch.since.reshape(4, 1, 24),
        weights={"nll": batch.weights["nll"].reshape(4, 1, 24)},
    )
    entry, second = (mask(b, Noise(MASK), [0, 1]).batch for b in (batch, apart))
    np.testing.assert_array_equal(entry.tokens[0], second.tokens[:, 0])
    np.testing.assert_array_equal(entry.weights["nll"][0], second.weights["nll"][:, 0])
    assert set(entry.denoms["masked"]) == set(second.denoms["masked"]) == {6.0 + 1.0}


def test_times_are_spread_evenly():
    def spread(stratified):
        noise = Noise(MASK, low=1e-9, stratified=stratified)
        sets = [
            [p for p in ratios(mask(BATCH, noise, [0, s]).batch) if p is not None]
            for s in range(120)
        ]
        return np.var([np.mean(entry) for entry in sets if len(entry) == 6])

    assert spread(True) < 0.2 * spread(False)


def test_held_out_masks_are_fixed_and_cover_all_numbers():
    held = mask_held_out(BATCH, Noise(MASK), 0, 4)
    again = mask_held_out(BATCH, Noise(MASK), 0, 4)
    for entry, second in zip(held, again, strict=True):
        np.testing.assert_array_equal(entry.tokens, second.tokens)
    assert any((a.tokens != b.tokens).any() for a, b in zip(held, held[1:], strict=False))
    for row, start, stop in STARTS:
        length = int((BATCH.weights["nll"][0, row, start:stop] > 0).sum())
        counts = [int((entry.tokens[0, row, start:stop] == MASK).sum()) for entry in held]
        assert 1 <= min(counts) and max(counts) <= length
        quarters = {min(3, (n - 1) * 4 // length) for n in counts}
        assert len(quarters) >= min(3, length), "numbers of masks lie evenly"
        for entry, count in zip(held, counts, strict=True):
            local_result = entry.streams[RATIO][0, row, start:stop]
            np.testing.assert_allclose(local_result[local_result > 0], count / length, rtol=1e-6)
            total = entry.weights["nll"][0, row, start:stop].sum()
            np.testing.assert_allclose(total, 1.0, rtol=1e-5)  # n / l times l of n
    second = mask_held_out(BATCH._replace(tokens=BATCH.tokens + 1), Noise(MASK), 0, 4)
    assert any(
        (a.tokens != b.tokens - 1)[a.tokens != MASK].any()
        for a, b in zip(held, second, strict=True)
    )


def test_a_batch_without_trained_tokens_and_one_that_holds_the_mask():
    nothing = BATCH._replace(weights={"nll": np.zeros_like(BATCH.weights["nll"])})
    drawn = mask(nothing, Noise(MASK), [0, 0]).batch
    assert drawn.denoms["masked"][0] == 1.0 and not drawn.weights["nll"].any()
    with pytest.raises(UserError, match="hold token"):
        mask(BATCH, Noise(int(BATCH.tokens[0, 0, 3])), [0, 0])


def test_trees_have_no_two_sides():
    tree = Tree(
        tuple(
            Node(parent, np.arange(1, 5, dtype=np.int32), {"nll": np.ones(4)})
            for parent in (-1, 0, 0)
        )
    )
    with pytest.raises(AssertionError, match="with a shared prefix"):
        mask(build_batch([[lay_out(tree)]], 12, Fields(since=True)), Noise(MASK), [0, 0])


def cut(tokens, weights, padding=0, split=True, room=64):
    sample = Sample(np.array(tokens, np.int32), np.array(weights, np.float32), "row 0", 2)
    return TruncatedAnswers(None, frozenset({END}), padding, room, split).split_up(sample)


def test_an_answer_does_not_see_what_was_said_after_it():
    tokens, weights = [1, 2, 3, END, 4, 5, END, 6], [0, 0, 1, 1, 0, 1, 1, 0]
    first, second = cut(tokens, weights)
    assert first.tokens.tolist() == tokens[:4] and first.weights.tolist() == [0, 0, 1, 1]
    assert second.tokens.tolist() == tokens[:7]
    assert second.weights.tolist() == [0, 0, 0, 0, 0, 1, 1], "the first answer is context now"
    assert (first.controls, second.controls) == (2, 0)
    (full,) = cut(tokens, weights, split=False)
    assert full.tokens.tolist() == tokens and full.weights.tolist() == weights


def test_end_tokens_behind_an_answer():
    lengths = set()
    for token in range(30):
        (entry,) = cut([token, 3, END], [0, 1, 1], padding=5)
        extra = len(entry.tokens) - 3
        assert (entry.tokens[2:] == END).all() and (entry.weights[1:] == 1).all()
        lengths.add(extra)
    assert lengths == set(range(6))
    again = cut([3, 3, END], [0, 1, 1], padding=5)[0].tokens
    assert again.tolist() == cut([3, 3, END], [0, 1, 1], padding=5)[0].tokens.tolist()
    assert len(cut([1, 3, 4], [0, 1, 1], padding=5)[0].tokens) == 3, "no end, nothing behind it"
    assert all(len(cut([t, 3, END], [0, 1, 1], 5, room=4)[0].tokens) <= 4 for t in range(9))
    dropped = Dropped("too long", "row 1")
    assert TruncatedAnswers(None, frozenset({END}), 5, 64, True).split_up(dropped) == [dropped]
