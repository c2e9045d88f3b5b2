"""Eagle3 against its formulas in float64: loss, every gradient, metrics; documents, trees."""

import itertools

import eagle3_reference as plain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.tiny_models import SIZES, documents, pack

from jaxtrain.batch import Batch
from jaxtrain.methods.drafts.eagle3_loss import COMPONENT, Unroll, eagle3_loss
from jaxtrain.methods.drafts.eagle3_method import label_guesses
from jaxtrain.methods.drafts.soft_targets import SoftTargets
from jaxtrain.methods.drafts.target_states import read_target
from jaxtrain.models import build, eagle3, families
from jaxtrain.models.parameters import split_model

L, THETA, P = 3, 1e4, 23
RAW = {**SIZES, "model_type": "qwen3", "head_dim": 16, "num_hidden_layers": 3}
WIDE = {"param_dtype": "float64", "dtype": "float64"}
LENGTHS = (14, 9, 9)


def make_config(target, **changes):
    provided = {
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 128,
        "initializer_range": 0.15,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope": (("rope_theta", THETA), ("rope_type", "default")),
        "capture": (0, 2, 1),
        "draft_vocab_size": P,
        "length": L,
    }
    return eagle3.Config(**{**provided, **changes})


@pytest.fixture(scope="module")
def draft_pair():
    """(target, draft) in float64; norms away from 1, kept ids spread over the vocabulary."""
    with jax.enable_x64():
        architecture = families.config_from_hf(RAW)
        target = build.init(architecture, 0, **WIDE)
        draft = build.init(make_config(architecture), 1, **WIDE)
        rng = np.random.default_rng(5)
        for path in ("midlayer.embed_norm", "midlayer.hidden_norm", "midlayer.mlp_norm", "norm"):
            part = draft
            for name in path.split("."):
                part = getattr(part, name)
            part.scale[...] = jnp.asarray(rng.uniform(0.5, 1.5, part.scale[...].shape))
        ids = np.sort(rng.choice(target.embed.embedding[...].shape[0], P, replace=False))
        draft.kept[...] = jnp.asarray(ids, jnp.int32)
        # Both like the same few tokens, so that some guesses are right.
        for table, rows in ((target.lm_head, ids[:4]), (draft.lm_head, np.arange(4))):
            table.embedding[...] = table.embedding[...].at[rows].multiply(5.0)
        return target, draft


def label(batch, seed=0):
    host = jax.tree.map(lambda x: np.asarray(x)[None], batch)
    actual = label_guesses(host, np.random.default_rng(seed))
    return jax.tree.map(lambda x: jnp.asarray(x[0]), actual)


def wide(batch):
    return batch._replace(weights={"nll": batch.weights["nll"].astype(np.float64)})


def tensors(draft):
    """The draft's floats by the names of the export."""
    config = make_config(families.config_from_hf(RAW))
    params = split_model(draft)[0]
    entries = [entry for entry in eagle3.names(config) if entry.param != "kept"]
    return {
        piece.name: jnp.asarray(piece.array)
        for entry in entries
        for piece in entry.op.write(params[entry.param], np.asarray)
    }


def states_of(target, text):
    batch = wide(pack([[text]], len(text)))
    actual = read_target(target, batch, (0, 2, 1), last=True)
    return actual.captured[0], actual.last[0]


SOFT = SoftTargets()


def reference(target, retained, w, texts, weights, targets=SOFT):
    """(loss, (hits [L], weights [L], weighted run lengths)) over sequences."""
    sizes = {"heads": 4, "kv_heads": 2, "theta": THETA, "eps": 1e-6, "length": L}
    numbers = (targets.kind, targets.kl_scale, targets.kl_decay)
    total, hits, per_entry, runs = 0.0, 0.0, 0.0, 0.0
    for text, weight in zip(texts, weights, strict=True):
        captured, last = states_of(target, text)
        normed = plain.unroll(w, jnp.asarray(text), captured, target.embed.embedding[...], **sizes)
        loss, hit, sayable = plain.guesses(w, normed, last, target.head(), retained, *numbers)
        array = jnp.stack([plain.shift(jnp.asarray(weight), 2 + i) for i in range(L)])
        decay = 0.8 ** np.arange(L)[:, None]
        total += jnp.sum(decay * array * jnp.where(sayable, loss, 0.0))
        hits, per_entry = hits + (array * hit).sum(1), per_entry + array.sum(1)
        run = jnp.cumprod(hit & (array > 0), 0).sum(0)
        runs += jnp.sum(array[0] * (1 + run))
    return total, (hits, per_entry, runs)


def trained(lengths, seed=3):
    rng = np.random.default_rng(seed)
    actual = [np.where(rng.random(n) < 0.7, rng.uniform(0.5, 2.0, n), 0.0) for n in lengths]
    for weight in actual:
        weight[0] = 0.0
    return actual


KINDS = [
    SoftTargets(chunk=7),
    pytest.param(SoftTargets("alpha", chunk=7), marks=pytest.mark.thorough),
    pytest.param(SoftTargets("lambda", 0.8, 2.0, chunk=7), marks=pytest.mark.thorough),
]


@pytest.mark.slow
@pytest.mark.parametrize("targets", KINDS, ids=lambda t: t.kind)
def test_loss_and_gradients_equal_the_formulas(draft_pair, targets):
    """Three documents in two padded rows, against each alone; 1e-9 in float64."""
    target, draft = draft_pair
    with jax.enable_x64():
        texts, weights = documents(0, *LENGTHS), trained(LENGTHS)
        batch = wide(pack([texts[:2], texts[2:]], 24))
        placed = np.zeros(batch.tokens.shape)
        placed[0, :14], placed[0, 14:23], placed[1, :9] = weights
        batch = label(batch._replace(weights={"nll": placed}))
        params, rebuild = split_model(draft)
        floats = {path: x for path, x in params.items() if path != "kept"}

        @jax.jit
        def ours(floats, target):
            def loss(floats):
                model = rebuild({**floats, "kept": params["kept"]})
                sums, metrics = eagle3_loss(model, target, batch, Unroll(L, 0.8, targets))
                return sums[COMPONENT], metrics

            return jax.value_and_grad(loss, has_aux=True)(floats)

        @jax.jit
        def theirs(w, target):
            def loss(w):
                return reference(target, params["kept"], w, texts, weights, targets)

            return jax.value_and_grad(loss, has_aux=True)(w)

        (total, metrics), grads = ours(floats, target)
        (expected, (hits, per_entry, runs)), expectation = theirs(tensors(draft), target)
        np.testing.assert_allclose(total, expected, rtol=1e-10)
        assert float(total) > 1
        actual = tensors(rebuild({**grads, "kept": params["kept"]}))
        assert actual.keys() == expectation.keys() and len(actual) == 13
        for name, grad in expectation.items():
            scale = np.abs(grad).max()
            assert scale > 1e-6, name
            np.testing.assert_allclose(actual[name], grad, rtol=1e-7, atol=1e-9 * scale)
        for i in range(L):
            np.testing.assert_allclose(metrics[f"acc/{i + 1}"], (hits[i], per_entry[i]), rtol=1e-12)
        np.testing.assert_allclose(metrics["accept_len"], (runs, per_entry[0]), rtol=1e-12)
        assert 0 < float(hits.sum()) and 0 < float(metrics["kept"][0]) < float(metrics["kept"][1])
        assert batch.denoms[COMPONENT] == pytest.approx(sum(w.sum() for w in weights))


def make_tree(seed=7):
    """Tokens of a trunk of 6 and three branches of it, two of which share 3 more: (batch [1, T],
    {end: indices of its branch})."""
    sizes, parents = [6, 3, 4, 2, 5], [-1, 0, 1, 1, 0]
    starts = np.cumsum([0, *sizes[:-1]])
    length, T = sum(sizes), 24
    tokens, prev = documents(seed, T)[0], np.full(T, -1, np.int32)
    positions, until = np.zeros(T, np.int32), np.arange(1, T + 1, dtype=np.int32)
    ends = {0: 20, 1: 15, 2: 13, 3: 15, 4: 20}
    for node, (start, size, parent) in enumerate(zip(starts, sizes, parents, strict=True)):
        for k in range(size):
            local_result = start + k
            above = (
                local_result - 1
                if k
                else (starts[parent] + sizes[parent] - 1 if parent >= 0 else -1)
            )
            prev[local_result] = above
            positions[local_result] = positions[above] + 1 if above >= 0 else 0
            until[local_result] = ends[node]
    branches = {}
    for leaf in (2, 3, 4):
        path, node = [], leaf
        while node >= 0:
            path = [*range(starts[node], starts[node] + sizes[node]), *path]
            node = parents[node]
        branches[leaf] = np.array(path)
    through = np.zeros(T)
    for path in branches.values():
        through[path] += 1
    weights = {"nll": np.where(prev >= 0, through, 0.0)[None]}
    assert length == 20
    fields = (jnp.asarray(field[None]) for field in (tokens, positions, prev, until))
    return Batch(*fields, weights=weights), branches


@pytest.mark.slow
def test_tree_equals_its_branches(draft_pair):
    """Over both choices at both forks, by their odds: the sum over the three branches alone."""
    target, draft = draft_pair
    with jax.enable_x64():
        batch, branches = make_tree()
        tokens = np.asarray(batch.tokens[0])
        texts = [tokens[path] for path in branches.values()]
        weights = [np.r_[0.0, np.ones(len(text) - 1)] for text in texts]
        retained = draft.kept[...]
        expected, (_, _, runs) = jax.jit(lambda w: reference(target, retained, w, texts, weights))(
            tensors(draft)
        )
        labeled = label(batch)

        @jax.jit
        def ours(follows):
            remote_result = labeled._replace(streams={**labeled.streams, "next": follows})
            sums, metrics = eagle3_loss(draft, target, remote_result, Unroll(L))
            return sums[COMPONENT], metrics["accept_len"][0]

        total = ran = 0.0
        odds = {5: {6: 2 / 3, 15: 1 / 3}, 8: {9: 1 / 2, 13: 1 / 2}}
        drawn = np.asarray(labeled.streams["next"][0])
        for first, second in itertools.product(odds[5], odds[8]):
            follows = drawn.copy()
            follows[[5, 8]] = first, second
            share = odds[5][first] * odds[8][second]
            loss, run = ours(jnp.asarray(follows[None]))
            total, ran = total + share * loss, ran + share * run
        assert drawn[5] in odds[5] and drawn[8] in odds[8]
        np.testing.assert_allclose(total, expected, rtol=1e-10)
        np.testing.assert_allclose(ran, runs, rtol=1e-10)
        assert labeled.denoms[COMPONENT] == sum(map(np.sum, weights))


@pytest.mark.slow
def test_proposals_are_the_training_forward(draft_pair):
    """Rows of different length, read in two pieces: each guess is the likeliest token of the
    unroll's row, over a text that goes on with the guesses before it."""
    target, draft = draft_pair
    with jax.enable_x64():
        lengths, S = (11, 5, 8), 16
        texts = documents(9, *lengths)
        batch = wide(pack([[text] for text in texts], S))
        captured = jax.jit(lambda target: read_target(target, batch, (0, 2, 1)).captured)(target)

        @jax.jit
        def decode(first, second, states, counts, extra, token):
            cache = draft.init_cache(3, S)
            cache = draft.read(cache, target, first, states[0], counts)
            cache = draft.read(cache, target, second, states[1], extra)
            grown = draft.grow_cache(cache, 4, S + 3)
            swapped = draft.insert(grown, jnp.array([3, 9]), cache, jnp.array([1, 0]))
            again = draft.propose(swapped, target, jnp.append(token, token[1]))
            return draft.propose(cache, target, token), again, cache.length

        # All but the last token are read; row 1 gets nothing in the second piece.
        counts = np.array([6, 4, 6])
        extra = np.array(lengths) - 1 - counts
        first, second = np.ones((3, 6), np.int32), np.ones((3, 5), np.int32)
        states = np.zeros((2, 3, 6, captured.shape[-1]))
        for row, text in enumerate(texts):
            first[row, : counts[row]] = text[: counts[row]]
            second[row, : extra[row]] = text[counts[row] : counts[row] + extra[row]]
            states[0, row, : counts[row]] = captured[row, : counts[row]]
            states[1, row, : extra[row]] = captured[row, counts[row] : counts[row] + extra[row]]
        token = np.array([text[-1] for text in texts], np.int32)
        actual, again, length = decode(
            first, second, (states[0], states[1][:, :5]), counts, extra, token
        )
        assert length.tolist() == [n - 1 for n in lengths]
        np.testing.assert_array_equal(again[:3], actual)
        np.testing.assert_array_equal(again[3], actual[1])

        # The unroll over the text with what was guessed behind it.
        longer = [np.append(text, row) for text, row in zip(texts, np.asarray(actual), strict=True)]
        full = label(wide(pack([[text] for text in longer], S)))
        rows = jax.jit(lambda c: draft.unroll(target, c, full, full.streams["next"], L))(captured)
        for i, row_BTD in enumerate(rows):
            for row, size in enumerate(lengths):
                best = draft.kept[...][draft.logits(row_BTD[row, size - 1]).argmax()]
                assert best == actual[row, i]
        assert len(set(np.asarray(actual).ravel().tolist())) > 3
