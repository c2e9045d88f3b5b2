"""The loss of masked diffusion against a plain formula, in float64; who sees whom."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import RAW

from jaxtrain.core.architecture import keep_task
from jaxtrain.data.packing.pack import Fields, build_batch, lay_out
from jaxtrain.data.packing.tree import chain
from jaxtrain.errors import UserError
from jaxtrain.huggingface.ops import GrownRows, TensorRef
from jaxtrain.layers.stack import StackOutput
from jaxtrain.methods.diffusion.loss import diffusion_loss
from jaxtrain.methods.diffusion.masks import Noise, mask
from jaxtrain.models import build, families, loading, saving
from jaxtrain.models.capabilities import require_both_sides

LENGTHS = [(11, 11), (20,)]
MASK = 96


def make_batch(seed=0, dtype=np.float64):
    """[2, 24]: three documents, the first tokens of each context, masked."""
    rng = np.random.default_rng(seed)

    def document(length):
        weights = np.where(np.arange(length) < 3, 0.0, rng.choice([0.5, 1.0], length))
        return lay_out(chain(rng.integers(1, 95, length).astype(np.int32), {"nll": weights}))

    rows = [[document(n) for n in row] for row in LENGTHS]
    batch = build_batch(rows, 24, Fields(since=True, dtype=dtype))
    stacked = jax.tree.map(lambda x: x[None], batch)
    drawn = mask(stacked, Noise(MASK), [seed, 1]).batch
    return stacked, drawn


def micro(batch):
    return jax.tree.map(lambda x: jnp.asarray(x[0]), batch._replace(denoms={}))


@pytest.mark.parametrize("shift", [True, False])
def test_the_loss_is_the_plain_formula(shift):
    """Every document alone, all its tokens seeing each other: sum of w CE / p over its masks, over
    its weights; in float64."""
    with jax.enable_x64(True):
        options = {"param_dtype": "float64", "dtype": "float64", "attention_impl": "reference"}
        model = build.init(families.config_from_hf(RAW["qwen3"]), 0, **options)
        plain, drawn = make_batch()
        loss = jax.jit(lambda batch: diffusion_loss(model, batch, shift, "reference"))
        read = jax.jit(lambda batch: model.logits(model.hidden(batch).hidden))
        sums, metrics = loss(micro(drawn))
        actual = float(sums["masked"]) / drawn.denoms["masked"][0]
        total, ces, right, inverse = 0.0, [], [], []
        for row, lengths in enumerate(LENGTHS):
            start = 0
            for length in lengths:
                local_result = (0, row, slice(start, start + length))
                alone = build_batch(
                    [[lay_out(chain(drawn.tokens[local_result], {"nll": np.zeros(length)}))]],
                    length,
                    Fields(since=True, dtype=np.float64),
                )
                alone = alone._replace(since=np.zeros((1, length), np.int32))
                logits = np.asarray(read(alone))[0]
                logits = logits[[0, *range(length - 1)]] if shift else logits
                logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
                target, masked = plain.tokens[local_result], drawn.tokens[local_result] == MASK
                ce = -logp[np.arange(length), target]
                weight, p = (
                    plain.weights["nll"][local_result],
                    drawn.streams["mask_ratio"][local_result],
                )
                if masked.any():
                    total += (weight * ce)[masked].sum() / p[masked][0] / weight.sum()
                ces += ce[masked].tolist()
                right += (logp.argmax(-1) == target)[masked].tolist()
                inverse += (1 / p[masked]).tolist()
                start += length
        assert abs(actual - total / 3) < 1e-7 * actual  # p is kept in float32
        means = {name: float(value / weight) for name, (value, weight) in metrics.items()}
        np.testing.assert_allclose(means["ce_loss"], np.mean(ces), rtol=1e-10)
        np.testing.assert_allclose(means["accuracy"], np.mean(right))
        np.testing.assert_allclose(means["bound"], np.average(ces, weights=inverse), rtol=1e-6)


def test_documents_of_a_row_do_not_see_each_other():
    """Another neighbor changes nothing; another later token of the same document does."""
    model = build.init(families.config_from_hf({**RAW["llama"], "num_hidden_layers": 1}), 0)
    batch = micro(make_batch(dtype=np.float32)[1])
    read = jax.jit(lambda batch: model.hidden(batch).hidden)
    hidden = np.asarray(read(batch))
    changed = batch._replace(tokens=batch.tokens.at[0, 21].add(1))
    array = np.asarray(read(changed))
    np.testing.assert_array_equal(hidden[0, :11], array[0, :11])
    assert (np.abs(hidden[0, 11:22] - array[0, 11:22]).max(-1) > 1e-6).all(), "both sides"


class Table:
    """A model whose hidden states are logits, whatever it reads."""

    logit_softcap = None

    def hidden(self, batch):
        return StackOutput(jnp.ones((*batch.tokens.shape, 97)), {}, {})

    def head(self):
        return jnp.eye(97)


def test_no_mask_no_loss():
    batch = micro(make_batch(dtype=np.float32)[1])
    zeros = jnp.zeros_like(batch.weights["nll"])
    streams = {**batch.streams, "mask_ratio": zeros}
    sums, metrics = diffusion_loss(Table(), batch._replace(weights={"nll": zeros}, streams=streams))
    assert float(sums["masked"]) == 0.0
    assert all(np.isfinite(value) and weight == 0 for value, weight in metrics.values())


def test_models_that_look_back_alone_are_refused():
    for name, output in (("qwen3_5", "run along the text"), ("mistral", "5 tokens back")):
        with pytest.raises(UserError, match=output):
            require_both_sides(families.config_from_hf(RAW[name]), "diffusion")
    require_both_sides(families.config_from_hf(RAW["qwen3_moe"]), "diffusion")


def test_rows_that_a_folder_does_not_have_begin_as_the_mean_of_the_others(tmp_path):
    """A tied table and one with a head of its own, whole and in slices of rows."""
    raw = {**RAW["qwen2"], "num_hidden_layers": 1, "tie_word_embeddings": False}
    config = families.config_from_hf(raw)
    model = build.init(config, 0)
    saving.save(model, config, tmp_path)
    larger = dataclasses.replace(config, vocab_size=99, grown=2)
    actual = dict(loading.read_params(tmp_path, None, larger))
    for name, table in (("embed", model.embed), ("lm_head", model.lm_head)):
        array = np.asarray(table.embedding[...])
        grown = np.asarray(actual[f"{name}.embedding"])
        np.testing.assert_array_equal(grown[:97], array)
        np.testing.assert_allclose(grown[97:], [array.mean(0)] * 2, atol=1e-6)
    op = GrownRows(TensorRef("t"), 4)
    stored = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    part = op.read(lambda _, index: stored[index], (slice(3, 6), slice(1, 2)))
    np.testing.assert_array_equal(part, [[7.0], [4.0], [4.0]])
    loading.check_folder(tmp_path, larger)
    with pytest.raises(UserError, match="config.json says"):
        loading.check_folder(tmp_path, dataclasses.replace(larger, grown=1))


def test_transformers_says_the_same_with_a_mask_of_zeros(tmp_path):
    """Check the advice of docs/diffusion.md for people who load an export."""
    import torch
    from transformers import AutoModelForCausalLM

    config = families.config_from_hf({**RAW["qwen3"], "num_hidden_layers": 1})
    config = keep_task(config, {"kind": "diffusion", "shift": True}, mask_token_id=96)
    model = build.init(config, 0)
    saving.save(model, config, tmp_path)
    second = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert second.config.mask_token_id == 96 and second.config.jaxtrain_task["shift"] is True
    tokens = np.array([[4, 9, 96, 11, 96, 3]])
    batch = build_batch([[lay_out(chain(tokens[0], {}))]], 6, Fields((), since=True))
    batch = batch._replace(since=np.zeros((1, 6), np.int32))
    actual = jax.jit(lambda batch: model.logits(model.hidden(batch).hidden))(batch)
    with torch.no_grad():
        zeros = torch.zeros(1, 1, 6, 6)
        expected = second(torch.tensor(tokens), attention_mask=zeros).logits.numpy()
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    assert dict(families.read_config(tmp_path).carried_attributes) == dict(
        config.carried_attributes
    )
