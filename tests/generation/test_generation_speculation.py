"""Speculative decoding draws what plain decoding draws, whatever the draft guesses."""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from test_generation_continuous import RAW, run
from test_generation_local import make_batch
from toy_draft import ToyDraft

from jaxtrain.generation.acceptance import Acceptance
from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.local import slots
from jaxtrain.generation.local.prefill import Block, Prompt, read_by
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.generation.local.speculation import DraftedModel, draw_all, speculate_chunk
from jaxtrain.generation.local.token_sampling import DrawKind, read_draws, sample
from jaxtrain.models import ARCHITECTURES, build, families

sys.path.append(str(Path(__file__).parents[1] / "models"))
TOY = {
    **RAW,
    "max_position_embeddings": 128,
    "architectures": ["ToyForCausalLM"],
    "num_hidden_layers": 3,
    "sliding_window": 9,
}
TOY.pop("model_type")
K = 3
KINDS = [
    Sampling(max_new_tokens=66),
    Sampling(max_new_tokens=23, temperature=0.9, top_k=20, seed=5),
    Sampling(max_new_tokens=1, temperature=0.9),
    Sampling(max_new_tokens=37, temperature=1.3, top_k=7, top_p=0.9, seed=6),
    Sampling(max_new_tokens=50, temperature=0.7, min_p=0.05),
    Sampling(max_new_tokens=29),
]
LENGTHS = (3, 17, 9, 30, 1, 12)
PATTERN = np.array([1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1], bool)


@pytest.fixture(scope="module", autouse=True)
def family():
    ARCHITECTURES["ToyForCausalLM"] = "toy_recurrent"
    yield
    del ARCHITECTURES["ToyForCausalLM"]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(RAW, id="attention"),
        pytest.param(TOY, id="recurrent", marks=pytest.mark.thorough),
    ],
)
def models(request):
    return [build.init(families.config_from_hf(request.param), seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def plain(models):
    """(prompts, their plain answers)."""
    rng = np.random.default_rng(0)
    prompts = [[10 + i, *rng.integers(4, 61, n - 1).tolist()] for i, n in enumerate(LENGTHS)]
    requests = ask(open_sampler(models[0]), prompts)
    return prompts, requests


def open_sampler(model, **options):
    options = {"max_len": 100, "max_batch": 4, "eos_ids": (3,)} | options
    return LocalSampler(model, to_text=lambda tokens: "".join(f"<{t}>" for t in tokens), **options)


def ask(sampler, prompts, kinds=KINDS, **options):
    """Requests after all have ended; the last three come while the first run."""
    requests = [
        sampler.request(prompt, kind, number=i, **options)
        for i, (prompt, kind) in enumerate(zip(prompts, kinds, strict=True))
    ]
    for request in requests[:-3]:
        sampler.add(request)
    sampler.step()
    run(sampler, requests[-3:])
    return requests


def make_draft(plain, right=PATTERN):
    prompts, answers = plain
    texts = {p[0]: [*p, *a.tokens] for p, a in zip(prompts, answers, strict=True)}
    return ToyDraft(texts, right)


def check_same(actual, expected):
    for entry, second in zip(actual, expected, strict=True):
        assert entry.tokens == second.tokens and entry.finish_reason == second.finish_reason
        assert entry.versions == second.versions
        # float32, read together and one by one.
        np.testing.assert_allclose(entry.logprobs, second.logprobs, atol=1e-5)


@pytest.mark.slow
def test_answers_are_those_of_plain_decoding(models, plain):
    """Greedy and sampled rows share batches of which rows end within cycles and are filled again;
    a guess is right now and then."""
    prompts, answers = plain
    assert {a.finish_reason for a in answers} == {"stop", "length"}
    sampler = open_sampler(DraftedModel(models[0], make_draft(plain)))
    actual = ask(sampler, prompts)
    check_same(actual, answers)
    assert sampler.acceptance.cycles == sum(len(entry.lengths) for entry in actual)
    # No guess, some and all accepted.
    assert {1, K + 1} < {length for entry in actual for length in entry.lengths}
    assert 1.5 < sampler.acceptance.mean < 3.5
    for entry in actual:
        # Every token but the first is a guess that was accepted, or what a cycle drew behind them.
        rest = sum(entry.lengths) - len(entry.tokens) + 1
        assert rest in (0, 1), "the last cycle of a row may end with a guess"


@pytest.mark.parametrize("right", [True, False])
def test_cycles_of_a_draft_that_is_always_right_or_wrong(models, plain, right):
    prompts, answers = plain
    actual = ask(open_sampler(DraftedModel(models[0], make_draft(plain, [right]))), prompts)
    check_same(actual, answers)
    for entry in actual:
        drawn = len(entry.tokens) - 1
        assert len(entry.lengths) == (-(-drawn // (K + 1)) if right else drawn)


@pytest.mark.slow
def test_the_draft_is_told_what_the_target_has_read(models, plain):
    """After chunks of both kinds the draft holds the tokens and captured states of the full forward
    pass, and nothing of guesses that were turned down."""
    prompts, answers = plain
    model = DraftedModel(models[0], make_draft(plain))
    chosen, B = [0, 4, 5], 4
    samplings = [KINDS[i] for i in (*chosen, chosen[-1])]
    kind, ends = DrawKind(random=True, truncate=True), np.full((B, 1), -1, np.int32)
    entry = slots.RowInsert(
        row=np.array([0, 1, 2, B], np.int32),
        source=np.arange(B, dtype=np.int32),
        leader=np.arange(B, dtype=np.int32),
        limit=np.full(B, 200, np.int32),
        seed=np.array([sampling.seed for sampling in samplings], np.int32),
        number=np.array([*chosen, 0], np.int32),
        draw=read_draws(samplings),
        ends=ends,
    )
    rows = slots.empty_rows(model, B=B, S=96, E=1)
    texts = [Prompt(tuple(prompts[i])) for i in chosen]
    (call,) = read_by(Block(B, 64, 0), model, texts, 96, None)
    rows = slots.insert(model, rows, call.filled, entry, kind)
    stop, over = np.zeros(B, bool), slots.ChunkEnd(np.int32(B), np.int32(slots.CHUNK))
    output = [[] for _ in chosen]
    for chunk in (slots.decode_chunk, speculate_chunk):
        rows, *actual = chunk(model, rows, stop, over, kind)
        tokens_BC, _, handed_B, *_ = actual[0] if chunk is speculate_chunk else actual
        for row, local_value in enumerate(output):
            local_value += np.asarray(tokens_BC[row, : handed_B[row]]).tolist()
        check_read(models[0], rows.cache, [prompts[i] for i in chosen], output)
    for i, local_value in zip(chosen, output, strict=True):
        recorded = min(len(local_value), len(answers[i].tokens))
        assert local_value[:recorded] == answers[i].tokens[:recorded] and recorded > 3


def check_read(model, cache, prompts, output):
    for row, (prompt, local_value) in enumerate(zip(prompts, output, strict=True)):
        text = [*prompt, *local_value]
        assert len(text) == cache.target.length[row] == cache.draft.length[row]
        assert cache.draft.tokens[row, : len(text)].tolist() == text
        assert not cache.draft.tokens[row, len(text) :].any()
        padded = np.zeros((1, 96), np.int32)
        padded[0, : len(text)] = text
        hidden = capture(model, padded)
        array = np.concatenate([hidden[layer][0] for layer in ToyDraft.capture], axis=-1)
        # float32 through another kernel: numbers up to ten.
        actual = cache.draft.states[row, : len(text)]
        np.testing.assert_allclose(actual, array[: len(text)], atol=5e-5)


@jax.jit
def capture(model, tokens_BT):
    return model.hidden(make_batch(tokens_BT), capture=ToyDraft.capture).captured


@pytest.mark.slow
def test_noise_is_that_of_plain_draws(models):
    """With equal logits the token is determined by the noise alone."""
    rows = slots.empty_rows(models[0], B=2, S=8, E=1)
    draws = read_draws([Sampling(temperature=1.0), Sampling(temperature=0.5)])
    keys = jax.random.split(jax.random.key(3), 2)
    rows = rows._replace(keys=keys, count=np.array([4, 9], np.int32), draw=draws)
    kind = DrawKind(True, False)
    hidden = np.zeros((2, 3, models[0].head().shape[1]), np.float32)
    tokens, _ = draw_all(models[0], hidden, rows, kind)
    for row, count in enumerate(rows.count):
        draw = read_draws([Sampling(temperature=float(draws.temperature[row]))])
        for position in range(3):
            key = jax.random.fold_in(keys[row], count + position)
            alone, _ = sample(np.zeros((1, 61), np.float32), key[None], draw, kind)
            assert tokens[row, position] == alone[0]


@pytest.mark.slow
def test_stop_texts_aborts_growth_and_new_weights(models, plain):
    """Events between chunks: a text that ends an answer, a request that is given up, longer ones
    that need more slots, other weights."""
    prompts, answers = plain
    word = "".join(f"<{t}>" for t in answers[0].tokens[20:22])
    kinds = [KINDS[0].model_copy(update={"stop": [word]}), *KINDS[1:]]
    alike = []
    for model in (models[0], DraftedModel(models[0], make_draft(plain))):
        sampler = open_sampler(model)
        alike.append(ask(sampler, prompts, kinds)[0])
        aborted = sampler.request(prompts[3], Sampling(max_new_tokens=60))
        grown = sampler.request(prompts[0], Sampling(max_new_tokens=70), number=9)
        sampler.add(aborted)
        sampler.add(sampler.request(prompts[4], KINDS[4], number=4))
        sampler.step()
        sampler.abort(aborted)
        ended, _ = run(sampler, [grown])
        assert aborted not in ended
        alike[-1] = [alike[-1], grown]
    check_same(alike[1], alike[0])
    assert alike[0][0].finish_reason == "stop"


@pytest.mark.slow
def test_few_rows_are_guessed_for_and_many_are_not(models, plain):
    """Plain chunks while more rows are busy than a draft is to guess for, then cycles of the rows
    that are left, which move together; answers stay what they are."""
    prompts, answers = plain
    sampler = open_sampler(DraftedModel(models[0], make_draft(plain, [True])), draft_rows=2)
    actual = ask(sampler, prompts)
    check_same(actual, answers)
    cycles = sum(len(entry.lengths) for entry in actual)
    assert 0 < cycles == sampler.acceptance.cycles
    assert (
        sum(sum(entry.lengths) for entry in actual)
        < sum(len(entry.tokens) for entry in actual) * 0.8
    )


@pytest.mark.slow
def test_new_weights_draw_behind_what_the_old_ones_read(models, plain):
    prompts, _ = plain
    actual = []
    for draft in (None, make_draft(plain, [False])):
        sampler = open_sampler(None)
        local_value = models if draft is None else [DraftedModel(model, draft) for model in models]
        sampler.use(local_value[0], 4)
        request = sampler.request(prompts[0], Sampling(max_new_tokens=60))
        sampler.add(request)
        sampler.step()
        first = len(request.tokens)
        sampler.use(local_value[1], 5)
        while sampler.busy:
            sampler.step()
        # The token that waited when the weights came was drawn by the old ones.
        assert request.versions == [4] * (first + 1) + [5] * (len(request.tokens) - first - 1)
        actual.append((first, request))
    assert actual[0][0] == slots.CHUNK and actual[1][0] == 16, "of a draft that is always wrong"
    assert actual[0][1].tokens[:17] == actual[1][1].tokens[:17]


def test_acceptance_counts():
    counted = Acceptance(3)
    counted.add([1, 4, 0, 2, 2, 0], tokens=9, seconds=2.0)
    assert counted.cycles == 4 and counted.accepted == 5 and counted.mean == 9 / 4
    assert counted.by_position == [3 / 4, 1 / 4, 1 / 4]
    before = counted.since(None)
    counted.add([4, 4], tokens=8, seconds=1.0)
    new = counted.since(before)
    assert new.metrics() == {
        "draft/tau": 4.0,
        "draft/acceptance": 1.0,
        "draft/cycles": 2.0,
        "draft/tokens_per_second": 8.0,
    }
    assert counted.since(counted.since(None)).metrics() == {}
