"""Continuous batching: rows are filled again, kinds of requests mix, weights change on the way."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generation_local import next_logits

from jaxtrain.api import choose_rows
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.generation.engine import EpisodeFailed, Sampling
from jaxtrain.generation.episode_engine import open_view
from jaxtrain.generation.local import prefill, slots
from jaxtrain.generation.local import sampler as local
from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.generation.local.prefill import Block, assign
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.generation.version_tracker import VersionTracker
from jaxtrain.models import build, families

RAW = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def models():
    return [build.init(families.config_from_hf(RAW), seed) for seed in (0, 1)]


def open_sampler(model, **options):
    return LocalSampler(model, eos_ids=(3,), max_len=128, **options)


def run(sampler, requests):
    """(the requests in the order in which they ended, steps taken)."""
    for request in requests:
        sampler.add(request)
    ended, steps = [], 0
    while sampler.busy:
        ended += sampler.step()
        steps += 1
    return ended, steps


@pytest.mark.slow
def test_rows_are_filled_again_and_answers_do_not_know(models):
    rng = np.random.default_rng(0)
    alone, together = open_sampler(models[0], max_batch=1), open_sampler(models[0], max_batch=4)
    limits = [5, 70, 6, 7, 40, 5, 9, 33, 8]
    prompts = [rng.integers(4, 61, rng.integers(1, 30)).tolist() for _ in limits]

    def make(sampler):
        return [
            sampler.request(prompt, Sampling(temperature=0.9, max_new_tokens=limit), number=i)
            for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
        ]

    local_copy, reference = make(together), make(alone)
    ended, steps = run(together, local_copy)
    run(alone, reference)
    assert {id(entry) for entry in ended} == {id(entry) for entry in local_copy}
    for entry, second in zip(local_copy, reference, strict=True):
        assert entry.tokens == second.tokens and entry.finish_reason == second.finish_reason
        # float32 in batches of four and of one.
        np.testing.assert_allclose(entry.logprobs, second.logprobs, atol=1e-4)
    # The long answer runs through while the others pass by it.
    assert ended.index(local_copy[1]) == len(ended) - 1 or len(local_copy[1].tokens) < 70
    assert steps < sum(-(-limit // slots.CHUNK) for limit in limits)
    assert together._rows is None, "an idle sampler holds no memory"


@pytest.mark.slow
def test_kinds_of_requests_share_a_batch(models):
    kinds = [
        Sampling(max_new_tokens=20),
        Sampling(max_new_tokens=12, temperature=1.0, seed=5),
        Sampling(max_new_tokens=9, temperature=1.3, top_k=4, seed=6),
    ]
    sampler = open_sampler(models[0])
    mixed = [sampler.request([7, 8], kind, number=i) for i, kind in enumerate(kinds)]
    run(sampler, mixed)
    for i, (request, kind) in enumerate(zip(mixed, kinds, strict=True)):
        (single,) = open_sampler(models[0]).generate([[7, 8]], kind, draws=[i])
        assert request.tokens == single.tokens
        np.testing.assert_allclose(request.logprobs, single.logprobs, atol=1e-4)


@pytest.mark.slow
def test_a_prompt_is_read_once_for_its_whole_group(models, monkeypatch):
    counts = []

    def watch(model, filled, tokens, counts_U, *rest):
        counts.append(counts_U.tolist())
        return fill(model, filled, tokens, counts_U, *rest)

    fill = prefill.fill
    monkeypatch.setattr(prefill, "fill", watch)
    sampling = Sampling(temperature=1.0, max_new_tokens=4)
    answers = open_sampler(models[0]).generate([[5, 6, 7]] * 8, sampling)
    assert counts == [[3]]
    assert len({tuple(answer.tokens) for answer in answers}) > 1


@pytest.mark.slow
def test_new_weights_take_over_between_chunks(models):
    """Tokens name the weights that drew them, and their log-probs are of those weights, given
    what the old weights had made of the earlier tokens."""
    sampler = open_sampler(None)
    sampler.use(models[0], 4)
    request = sampler.request([9, 10, 11], Sampling(max_new_tokens=50))
    sampler.add(request)
    assert sampler.step() == []
    sampler.use(models[1], 5)
    assert sampler.step() == [request]
    # The first token of the second chunk was drawn with the old weights already.
    first = slots.CHUNK + 1
    assert request.versions == [4] * first + [5] * (50 - first)
    tokens = [9, 10, 11, *request.tokens]
    cache = models[0].init_cache(1, 64)
    decode = jax.jit(type(models[0]).decode)
    hidden, cache, *_ = decode(models[0], jnp.array([tokens[: 3 + slots.CHUNK]]), cache)
    old = models[0].logits(hidden)[0, 2:]
    new = []
    for token in tokens[3 + slots.CHUNK : -1]:
        hidden, cache, *_ = decode(models[1], jnp.array([[token]]), cache)
        new.append(hidden[0, 0])
    logp = jax.nn.log_softmax(jnp.stack([*old, *models[1].logits(jnp.stack(new))]))
    expected = logp[jnp.arange(50), jnp.array(request.tokens)]
    np.testing.assert_allclose(request.logprobs, expected, atol=1e-4)


@pytest.mark.slow
def test_rows_and_slots_grow_while_others_run(models):
    sampler = open_sampler(models[0])
    first = sampler.request([9, 10], Sampling(max_new_tokens=60))
    sampler.add(first)
    sampler.step()
    extra = [sampler.request([i] * 40, Sampling(max_new_tokens=70), number=i) for i in (5, 6, 7)]
    run(sampler, extra)
    for request in (first, *extra):
        kind, prompt = request.sampling, request.prompt
        (single,) = open_sampler(models[0]).generate([prompt], kind, draws=[request.number])
        assert request.tokens == single.tokens


class Roomy:
    """A device with free memory for so many bytes of rows."""

    platform = "gpu"

    def __init__(self, rows_bytes):
        self.limit = 10 + rows_bytes * local.AMPLE

    def memory_stats(self):
        return {"bytes_limit": self.limit, "bytes_in_use": 10}


@pytest.mark.slow
def test_rows_get_all_slots_at_once_where_memory_is_ample(models, monkeypatch):
    # Keys and values of two layers in float32, 4 rows of 128 slots, and the rows' lengths.
    cache = 2 * 2 * 4 * 128 * 2 * 8 * 4 + 4 * 4
    for free, slots_ in ((cache, 128), (cache - 1, 128 // 2)):
        monkeypatch.setattr(local, "SLOTS", 16)
        monkeypatch.setattr(jax, "local_devices", lambda free=free: [Roomy(free)])
        sampler = open_sampler(models[0], max_batch=4)
        sampler.add(sampler.request([7] * 20, Sampling(max_new_tokens=32)))
        sampler.step()
        assert sampler._size.slots == slots_


def test_an_aborted_request_frees_its_row(models):
    sampler = open_sampler(models[0], max_batch=1)
    sampling = Sampling(max_new_tokens=100)
    first, second, third = (sampler.request([i], sampling) for i in (7, 8, 9))
    for request in (first, second, third):
        sampler.add(request)
    sampler.step()
    sampler.abort(first)
    sampler.abort(second)
    ended, _ = run(sampler, [])
    assert ended == [third]


def test_prompts_are_assigned_to_the_cheaper_block():
    long, wide = Block(1, 64, 64), Block(8, 64, 64)
    short, tall = [(i,) * 10 for i in range(24)], (9,) * 640
    assert assign(short[:2], long, wide) == (short[:2], [])
    assert assign(short, long, wide) == ([], short)
    assert assign([*short, tall], long, wide) == ([tall], short)
    # Side by side several long prompts take as many calls as one.
    assert assign([tall] * 8, long, wide) == ([], [tall] * 8)


@pytest.mark.slow
def test_three_rounds_read_prompts_with_two_programs_and_draw_with_two(models):
    """Short and long prompts share them, also once there are more than at first; the answers are
    those of a full forward pass."""
    programs = (prefill.fill, slots.insert, slots.decode_chunk)
    before = [program.count() for program in programs]
    sampler = LocalSampler(models[0], (), max_len=500, max_batch=24)
    rng = np.random.default_rng(0)
    rounds = [[3, 190, 7], [5, 250, 1, 64, 65, 11, 130, *[9] * 20], [30, 1, 200, *[70] * 9]]
    for lengths in rounds:
        prompts = [rng.integers(4, 61, length).tolist() for length in lengths]
        sampling = Sampling(max_new_tokens=12)
        for prompt, answer in zip(prompts, sampler.generate(prompts, sampling), strict=True):
            text = np.zeros((1, 512), np.int32)
            text[0, : len(prompt) + 12] = [*prompt, *answer.tokens]
            logits = np.asarray(next_logits(models[0], text))[0, len(prompt) - 1 :][:12]
            assert answer.tokens == logits.argmax(-1).tolist()
    compiled = [program.count() for program in programs]
    # Two blocks of prompts, and two sizes of rows: for few requests and for all.
    fills, inserts, decodes = np.subtract(compiled, before).tolist()
    assert fills == 2 and decodes == 2 and inserts <= 4


def test_rows_of_a_sampler_follow_from_memory(models):
    # Keys and values of two layers, and the row's length.
    row = 2 * 2 * 2048 * 2 * 8 * 4 + 4
    rows = [choose_rows(models[0], 4 * row * count) for count in (0, 63, 100, 1000)]
    assert rows == [64, 64, 100, 256]


@pytest.mark.slow
def test_turns_meet_and_a_cancelled_coroutine_lets_go(models):
    """Coroutines of several turns through the engine, one of them cancelled on the way."""
    engine = LocalEngine(open_sampler(None, mesh=make_mesh(jax.devices()[:1])))
    engine.use(models[0], 7)

    async def talk(index):
        tokens = [4 + index]
        for _ in range(3):
            answer = await engine.generate(tokens, Sampling(max_new_tokens=6), index=index)
            assert set(answer.versions) == {7}
            tokens = [*tokens, *answer.tokens, 5]
        return tokens

    async def play():
        tasks = [asyncio.create_task(talk(i)) for i in range(5)]
        await asyncio.sleep(0)
        tasks[4].cancel()
        completed = await asyncio.gather(*tasks[:4])
        with pytest.raises(asyncio.CancelledError):
            await tasks[4]
        late = asyncio.create_task(talk(5))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EpisodeFailed, match="closed"):
            await late
        return completed

    completed = asyncio.run(play())
    assert completed == asyncio.run(play()), "the engine works again in another event loop"
    for index, tokens in enumerate(completed):
        (answer,) = open_sampler(models[0]).generate([[4 + index]], Sampling(max_new_tokens=6))
        assert tokens[1 : 1 + len(answer.tokens)] == answer.tokens


def test_what_is_given_up_had_told_its_version_and_leaves_no_row(models):
    """The version of the first chunk, once; the coroutine is cancelled behind it."""
    engine = LocalEngine(LocalSampler(None, (), max_len=128))
    engine.use(models[0], 7)
    ages, messages = VersionTracker(), []
    ages.on_change = lambda: messages.append(ages.oldest)
    sampling = Sampling(max_new_tokens=120)

    async def play():
        old = asyncio.create_task(open_view(engine, tracker=ages, index=0).generate([7], sampling))
        while not messages:
            await asyncio.sleep(0.001)
        engine.use(models[0], 8)
        old.cancel()
        with pytest.raises(asyncio.CancelledError):
            await old
        await open_view(engine, tracker=ages, index=1).generate([8], Sampling(max_new_tokens=4))
        await engine.close()

    asyncio.run(play())
    assert messages == [7, 7, 7] and ages._versions == {(0, 1): 7, (1, 2): 8}
    assert not engine._unbegun and not engine._futures and not engine.sampler.busy


@pytest.mark.slow
def test_an_error_of_the_device_reaches_all_who_wait(models, monkeypatch):
    engine = LocalEngine(open_sampler(models[0]))
    monkeypatch.setattr(local, "decode_chunk", lambda *_: 1 / 0)

    async def ask():
        asks = [engine.generate([5], Sampling(max_new_tokens=4), index=i) for i in range(3)]
        return await asyncio.gather(*asks, return_exceptions=True)

    assert [type(error) for error in asyncio.run(ask())] == [ZeroDivisionError] * 3
    monkeypatch.undo()
    assert len(asyncio.run(engine.generate([5], Sampling(max_new_tokens=4))).tokens) > 0


@pytest.mark.slow
def test_an_answer_that_is_watched_comes_token_by_token_and_is_the_same(models):
    sampling, prompt = Sampling(max_new_tokens=40, temperature=1.0), [5, 6, 7]

    async def draw(watch):
        engine = LocalEngine(open_sampler(models[0]))
        try:
            return await engine.generate(prompt, sampling, (), 4, watch=watch)
        finally:
            await engine.close()

    seen = []
    watched = asyncio.run(draw(lambda answer: seen.append(list(answer.tokens))))
    alone = asyncio.run(draw(None))
    assert watched == alone and watched.tokens == seen[-1]
    assert [len(tokens) for tokens in seen] == list(range(1, len(seen) + 1))
    assert all(seen[-1][: len(tokens)] == tokens for tokens in seen)
