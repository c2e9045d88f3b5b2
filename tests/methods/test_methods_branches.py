"""Blocks drawn inside of documents, held to decoding each block alone, in float64."""

import functools
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.batch import Batch
from jaxtrain.core.losses.logp import token_logp
from jaxtrain.data.packing.pack import Fields, build_batch, lay_out
from jaxtrain.data.packing.tree import Node, Tree
from jaxtrain.methods.ebft import branch_sampler as branches
from jaxtrain.methods.ebft.blocks import CE, RL, BlockPositions, BlockStrides, lay_blocks
from jaxtrain.methods.ebft.branch_sampler import SamplingOptions, draw_blocks
from jaxtrain.methods.ebft.strided_loss import ADVANTAGE, NUMBERS, StridedLossOptions, strided_loss
from jaxtrain.models import build, families

sys.path.append(str(Path(__file__).parents[1] / "models"))
from families_gemma import FAMILIES
from tiny_models import RAW, SIZES

T, N, G = 36, 2, 4
STRIDES = BlockStrides(stride=3, context=4, length=G, samples=N)


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


@functools.cache
def rows() -> tuple[Batch, Batch, BlockPositions]:
    """Documents [2, 36] with and without prompts, their forest, and the spots."""
    rng = np.random.default_rng(0)

    def document(length: int, prompt: int):
        weights = (np.arange(length) >= prompt).astype(np.float64)
        tokens = rng.integers(1, 97, length).astype(np.int32)
        return lay_out(Tree((Node(-1, tokens, {CE: weights, RL: weights}),)), "branch")

    packed = [[document(20, 0), document(9, 5), document(3, 1)], [document(32, 7)]]
    batch = build_batch(packed, T, Fields((CE, RL), dtype=np.float64))
    return batch, *lay_blocks(batch, STRIDES)


@functools.cache
def make(name: str):
    config = families.config_from_hf(RAW.get(name) or {**SIZES, **FAMILIES[name]})
    return build.init(config, 0, param_dtype="float64", dtype="float64")


def compiled(name: str, function):
    """function(model, ...) under jit; the weights are an argument, not part of the program."""
    graphdef, state = nnx.split(make(name))
    run = jax.jit(lambda state, *provided: function(nnx.merge(graphdef, state), *provided))
    return functools.partial(run, state)


def on_device(tree):
    return jax.tree.map(jnp.asarray, tree)


def draw(name: str, how: SamplingOptions, function=draw_blocks):
    """[2, A, N, G] on the host."""
    documents, forest, spots = on_device(rows())
    if function is branches._draw_behind:
        provided = (documents, spots)
    elif function is branches._draw_again:
        provided = (forest, spots)
    else:
        provided = (documents, forest, spots)

    def run(model, *provided):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(3), jnp.arange(2))
        return function(model, *provided, keys, how)

    return np.asarray(compiled(name, run)(*provided))


def fill(drawn) -> Batch:
    """The forest with the drawn tokens."""
    _, forest, spots = rows()
    tokens = forest.tokens.copy()
    for row, block in zip(*np.nonzero(spots.predictor < T), strict=True):
        first = spots.start[row, block]
        tokens[row, first : first + N * G] = drawn[row, block].reshape(-1)
    return forest._replace(tokens=tokens)


def alone(name: str, drawn) -> dict[tuple[int, int, int], np.ndarray]:
    """{(row, block, sample): log-probs [G, V]}: each block as one sequence behind its document's
    beginning, by a plain causal model."""
    documents, _, spots = rows()
    places = [
        (row, block, sample)
        for row, block in zip(*np.nonzero(spots.predictor < T), strict=True)
        for sample in range(N)
    ]
    sequences, lengths = np.zeros((len(places), T + G), np.int32), []
    for number, (row, block, sample) in enumerate(places):
        last = spots.predictor[row, block]
        root = last - documents.positions[row, last]
        before = documents.tokens[row, root : last + 1]
        lengths.append(len(before))
        sequences[number, : len(before) + G] = np.r_[before, drawn[row, block, sample]]
    index = np.broadcast_to(np.arange(T + G, dtype=np.int32), sequences.shape)
    batch = Batch(sequences, index, index - 1, np.full_like(index, T + G), {})
    run = compiled(name, lambda model, b: jax.nn.log_softmax(model.logits(model.hidden(b).hidden)))
    logp = np.asarray(run(on_device(batch)))
    return {
        position: logp[number, length - 1 : length - 1 + G]
        for number, (position, length) in enumerate(zip(places, lengths, strict=True))
    }


def check_scores(name: str, drawn) -> None:
    """The forest's log-probs are those of each block alone: 1e-10."""
    _, _, spots = rows()
    forest = fill(drawn)
    array = np.asarray(
        compiled(name, lambda model, b: token_logp(model, b).logp)(on_device(forest))
    )
    for (row, block, sample), logp in alone(name, drawn).items():
        first = spots.start[row, block] + sample * G
        expected = np.take_along_axis(logp, drawn[row, block, sample][:, None], axis=1)[:, 0]
        assert np.abs(array[row, first : first + G] - expected).max() < 1e-10


def check_greedy(name: str, drawn) -> None:
    """Every token is the likeliest where it was drawn."""
    for (row, block, sample), logp in alone(name, drawn).items():
        assert (logp.argmax(-1) == drawn[row, block, sample]).all()


@pytest.mark.slow
def test_greedy_blocks_are_each_decoded_alone():
    check_greedy("qwen3", draw("qwen3", SamplingOptions(N, G, 0.0)))


@pytest.mark.slow
def test_keys_kept_draw_what_whole_forests_draw():
    """With sampled tokens, so that blocks and samples differ; of the draws some share no token."""
    how = SamplingOptions(N, G, 0.9, 0.8)
    retained = draw("qwen3", how, branches._draw_behind)
    again = draw("qwen3", how, branches._draw_again)
    real = rows()[2].predictor < T
    assert (retained[real] == again[real]).all()
    assert (retained[real][:, 0] != retained[real][:, 1]).any()
    check_scores("qwen3", retained)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "mistral",
        *(
            pytest.param(n, marks=pytest.mark.thorough)
            for n in ("qwen3_5", "mixtral", "gemma4_per_layer")
        ),
    ],
)
def test_other_families(name):
    """Windows, recurrent layers (which read the forest anew), experts, keys of other layers."""
    assert make(name).keeps_packed == (name != "qwen3_5")
    check_greedy(name, draw(name, SamplingOptions(N, G, 0.0)))


@pytest.mark.slow
def test_draws_follow_the_distribution():
    """First tokens of 512 draws of one block against its probabilities at temperature 0.5, by
    chi-square: below 40 for 20 degrees of freedom with p = 0.995. A row's noise is its key's."""
    documents, forest, spots = on_device(rows())
    how = SamplingOptions(512, 1, 0.5)
    model = make("qwen3")
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(0), jnp.arange(2))
    first = BlockPositions(*(x[:, :1] for x in spots[:2]), *spots[2:])
    run = compiled("qwen3", lambda model, *provided: draw_blocks(model, *provided, how))
    drawn = np.asarray(run(documents, forest, first, keys))[0, 0, :, 0]
    hidden = model.hidden(documents).hidden[0, int(first.predictor[0, 0])]
    probs = np.asarray(jax.nn.softmax(model.logits(hidden) / 0.5))
    common = np.argsort(-probs)[:20]
    counts = np.array([(drawn == token).sum() for token in common])
    counts, expected = (
        np.r_[counts, 512 - counts.sum()],
        512 * np.r_[probs[common], 1 - probs[common].sum()],
    )
    assert ((counts - expected) ** 2 / expected).sum() < 40


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_of_images_are_never_drawn(temperature):
    """The likeliest token is one of them, and is left out."""
    model = SimpleNamespace(
        head=lambda: jnp.zeros((5, 3)),
        logits=lambda hidden: jnp.broadcast_to(
            jnp.array([0.0, 0, 9, 1, 0]), (*hidden.shape[:-1], 5)
        ),
        never_drawn=(2,),
    )
    keys = jax.random.split(jax.random.key(0), 2)
    how = SamplingOptions(1, 1, temperature)
    drawn = np.asarray(branches._draw(model, jnp.zeros((2, 4, 3)), 8, keys, how))
    assert drawn.shape == (2, 32) and 2 not in drawn
    assert set(drawn.ravel()) == {3} if temperature == 0 else len(set(drawn.ravel())) > 1


@pytest.mark.slow
def test_tokens_of_images_have_no_share_of_drawn_ones():
    """Reference: the log-softmax without them, and its gradients; documents have the whole one."""
    _, forest, spots = rows()
    rng, U, never = np.random.default_rng(5), forest.tokens.shape[1], [5, 9]
    allowed = np.setdiff1d(np.arange(97), never)
    drawn = rng.choice(allowed, (2, spots.predictor.shape[1], N, G)).astype(np.int32)
    zeros = {ADVANTAGE: rng.normal(size=forest.tokens.shape), NUMBERS: np.zeros((2, U, 6))}
    batch = on_device(fill(drawn)._replace(streams=zeros))
    numbers = StridedLossOptions({U: (T, STRIDES.most(T) * N * G)}, temperature=0.7)

    def ours(hidden, head):
        model = SimpleNamespace(
            hidden=lambda batch: SimpleNamespace(hidden=hidden),
            head=lambda: head,
            logits_of=lambda rows, hidden: 9 * jnp.tanh(hidden @ rows.T / 9),
            logit_softcap=9.0,
            never_drawn=tuple(never),
        )
        sums = strided_loss(model, batch, numbers)[0]
        return sums["rl"], sums["nll"]

    def theirs(hidden, head):
        before = jnp.take_along_axis(hidden, jnp.maximum(batch.prev, 0)[..., None], axis=1)
        logits = 9 * jnp.tanh(before @ head.T / 9)

        def total(logits, weight):
            logp = jax.nn.log_softmax(logits)
            return -(jnp.take_along_axis(logp, batch.tokens[..., None], 2)[..., 0] * weight).sum()

        masked = jnp.where(np.isin(np.arange(97), never), -1e30, logits / 0.7)
        rl = total(masked, batch.weights[RL] * batch.streams[ADVANTAGE])
        return rl, total(logits, batch.weights[CE])

    def run(losses):
        """Return the losses, and the gradients of one number of both."""

        def total(arrays):
            rl, nll = losses(*arrays)
            return rl + 2 * nll, (rl, nll)

        return jax.tree.leaves(jax.jit(jax.value_and_grad(total, has_aux=True))(arrays))

    arrays = rng.normal(size=(2, U, 8)), rng.normal(size=(97, 8))
    for actual, expected in zip(run(ours), run(theirs), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_the_loss_is_that_of_blocks_decoded_alone():
    """REINFORCE over every drawn token with its own block's advantage and its own predecessor, and
    the documents' likelihood counted once, whatever the number of samples; the gradient reaches
    both. Wrong predictors (the token before in the row) or advantages dealt out of turn differ."""
    documents, forest, spots = rows()
    drawn = draw("qwen3", SamplingOptions(N, G, 0.9))
    rng = np.random.default_rng(5)
    advantage = rng.normal(size=drawn.shape[:3])
    stream = np.zeros(forest.tokens.shape)
    for row, block in zip(*np.nonzero(spots.predictor < T), strict=True):
        first = spots.start[row, block]
        stream[row, first : first + N * G] = np.repeat(advantage[row, block], G)
    numbers = np.zeros((*forest.tokens.shape, 6))
    batch = fill(drawn)._replace(streams={ADVANTAGE: stream, NUMBERS: numbers})
    model, U = make("qwen3"), forest.tokens.shape[1]
    scored = StridedLossOptions({U: (T, STRIDES.most(T) * N * G)})
    run = compiled("qwen3", lambda model, b: strided_loss(model, b, scored))
    sums, metrics = run(on_device(batch))
    expected = 0.0
    for (row, block, sample), logp in alone("qwen3", drawn).items():
        local_value = np.take_along_axis(logp, drawn[row, block, sample][:, None], axis=1)
        expected -= advantage[row, block, sample] * local_value.sum()
    assert np.allclose(sums["rl"], expected, rtol=1e-10)
    plain = token_logp(model, on_device(documents)).logp
    assert np.allclose(sums["nll"], -(plain * documents.weights[CE]).sum(), rtol=1e-10)
    assert metrics["ebft/ce_loss"][1] == documents.weights[CE].sum()
