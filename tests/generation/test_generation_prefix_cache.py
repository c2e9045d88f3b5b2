"""Turns of a conversation: what an earlier one has read is not read again, with equal numbers."""

import jax
import numpy as np
import pytest

from jaxtrain.adapters.slotted import NO_ADAPTER, AdapterSlot
from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.local.prefill import Prompt
from jaxtrain.generation.local.prefix_cache import PrefixCache
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.generation.local.slots import unstack
from jaxtrain.models import build, families
from tests.toy_run import ARCHITECTURE

PROMPT = np.random.default_rng(0).integers(4, 500, 90).tolist()
GREEDY = Sampling(max_new_tokens=20, temperature=0.0)
MORE = [7, 8, 9]


def make_model(seed=0, **changes):
    changes = {"max_position_embeddings": 512, **changes}
    return unstack(build.init(families.config_from_hf(ARCHITECTURE | changes), seed))


def make_sampler(model, prefixes=2, **options):
    return LocalSampler(model, {2}, max_len=500, max_batch=4, prefixes=prefixes, **options)


def counts(sampler):
    return sampler.prefixes.queried, sampler.prefixes.hits


def check_same(answers, expected):
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    for answer, reference in zip(answers, expected, strict=True):
        # A key that was read with its chunk of a prompt, or alone: other sums, in float32.
        np.testing.assert_allclose(answer.logprobs, reference.logprobs, atol=2e-5)


@pytest.fixture(scope="module")
def model():
    return make_model()


def test_the_second_turn_reads_only_what_is_new(model):
    sampler, plain = make_sampler(model), make_sampler(model, 0)
    first = sampler.generate([PROMPT], GREEDY)
    check_same(first, plain.generate([PROMPT], GREEDY))
    assert counts(sampler) == (90, 0) and sampler.prefixes.slots == 256
    turn = [*PROMPT, *first[0].tokens, *MORE]
    second = sampler.generate([turn], GREEDY)
    check_same(second, plain.generate([turn], GREEDY))
    # All but the last token of the answer, which was drawn and not read.
    assert counts(sampler) == (90 + len(turn), 90 + len(first[0].tokens) - 1)
    # A turn that was written otherwise shares its beginning; two answers of one prompt read once.
    edited = [*PROMPT[:70], 5, *MORE]
    before = counts(sampler)
    check_same(sampler.generate([edited, edited], GREEDY), plain.generate([edited, edited], GREEDY))
    assert np.subtract(counts(sampler), before).tolist() == [len(edited), 70]
    assert counts(plain) == (0, 0) and plain.prefixes.stored is None


def test_new_weights_empty_it_and_answers_across_them_are_not_kept(model):
    sampler = make_sampler(model)
    sampler.generate([PROMPT], GREEDY)
    newer = make_model(1)
    sampler.use(newer)
    check_same(
        sampler.generate([PROMPT], GREEDY), make_sampler(newer, 0).generate([PROMPT], GREEDY)
    )
    assert counts(sampler)[1] == 0
    sampler.generate([PROMPT], GREEDY)
    assert counts(sampler)[1] == 89
    request = sampler.request([*PROMPT[:50], *MORE], Sampling(max_new_tokens=60, temperature=0.0))
    sampler.add(request)
    assert not sampler.step()  # begun with weights that are replaced
    sampler.use(model)
    while sampler.busy:
        sampler.step()
    hits = counts(sampler)[1]
    sampler.generate([[*PROMPT[:50], *MORE, 5]], GREEDY)
    assert counts(sampler)[1] == hits


def test_memory_is_that_of_a_few_rows_and_the_oldest_goes(model):
    sampler = make_sampler(model)
    prompts = [[first, *PROMPT] for first in (5, 6, 7)]
    for prompt in prompts:
        sampler.generate([prompt], GREEDY)
    assert {x.shape[0] for x in jax.tree.leaves(sampler.prefixes.stored)} == {2}
    prefixes = [sampler.prefixes.find(Prompt.of([*prompt, 5], None)) for prompt in prompts]
    assert prefixes[0] is None and [entry.count for entry in prefixes[1:]] == [91, 91]
    # Rows that grow make the kept ones grow, too.
    sampler.generate([[4, *PROMPT * 3]], GREEDY)
    assert sampler.prefixes.slots == 512 == sampler._size.slots
    before, turn = counts(sampler)[1], [*prompts[2], 5, 6]
    check_same(sampler.generate([turn], GREEDY), make_sampler(model, 0).generate([turn], GREEDY))
    assert counts(sampler)[1] - before == 91 and sampler._size.slots == 512


def test_a_stop_text_keeps_what_the_row_has_read(model):
    sampler = make_sampler(model, to_text=str)
    tokens = sampler.generate([PROMPT], GREEDY)[0].tokens
    stop = Sampling(max_new_tokens=20, temperature=0.0, stop=[str(tokens[5])])
    plain, sampler = make_sampler(model, 0, to_text=str), make_sampler(model, to_text=str)
    (first,) = sampler.generate([PROMPT], stop)
    assert len(first.tokens) < 20
    turn = [*PROMPT, *first.tokens, *MORE]
    check_same(sampler.generate([turn], GREEDY), plain.generate([turn], GREEDY))
    assert counts(sampler)[1] == 90 + len(first.tokens)


def test_a_call_that_failed_leaves_no_stored_rows(model):
    sampler = make_sampler(model)
    first = sampler.generate([PROMPT], GREEDY)
    for array in jax.tree.leaves(sampler.prefixes.stored):
        array.delete()  # as the arrays that a failed call was given
    sampler.drop_all()
    check_same(sampler.generate([PROMPT], GREEDY), first)
    assert counts(sampler)[1] == 0


WINDOW = {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 0}


@pytest.mark.slow
def test_a_ring_serves_only_prompts_that_go_on_behind_it():
    model = make_model(layer_types=["sliding_attention"], **WINDOW)
    sampler, plain = make_sampler(model), make_sampler(model, 0)
    (first,) = sampler.generate([PROMPT], GREEDY)
    edited, turn = [*PROMPT[:70], 5], [*PROMPT, *first.tokens, *MORE]
    check_same(sampler.generate([edited], GREEDY), plain.generate([edited], GREEDY))
    assert counts(sampler)[1] == 0
    check_same(sampler.generate([turn], GREEDY), plain.generate([turn], GREEDY))
    assert counts(sampler)[1] == 90 + len(first.tokens) - 1


def test_an_earlier_turn_is_replaced_by_the_later_one():
    cache = PrefixCache(3)
    other = AdapterSlot(1, 1)
    cache._tokens.update({0: (NO_ADAPTER, np.arange(5)), 2: (NO_ADAPTER, np.arange(9))})
    assert [cache._choose(NO_ADAPTER, np.arange(length)) for length in (7, 3)] == [0, 1]
    assert cache._choose(other, np.arange(7)) == 1
    cache._tokens[1] = other, np.arange(4) + 50
    assert cache._choose(NO_ADAPTER, np.arange(3)) == 0
