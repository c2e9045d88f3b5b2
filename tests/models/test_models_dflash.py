"""DFlash against its formulas in float64, its folders, and guessing as it was trained."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dflash_reference import row_blocks, row_hidden
from flax import nnx
from tiny_models import SIZES

from jaxtrain.data.packing.pack import build_batch, lay_out
from jaxtrain.data.packing.tree import Node, Tree
from jaxtrain.errors import UserError
from jaxtrain.huggingface.copy import copy_folder
from jaxtrain.huggingface.safetensors import SafetensorsFolder
from jaxtrain.methods.drafts.anchors import block_weights, decay_of, lay_blocks
from jaxtrain.methods.drafts.dflash_loss import DFlashLossOptions, confidence, dflash_loss
from jaxtrain.methods.drafts.target_states import STATES
from jaxtrain.models import build, dflash, families, loading, saving
from jaxtrain.models.decoder import DecoderOptions
from jaxtrain.models.draft import TargetEmbeddingAndHead
from jaxtrain.models.parameters import split_model

VOCAB, WIDTH, T, K, A = SIZES["vocab_size"], 16, 44, 4, 9
CONFIG = dflash.Config(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    hidden_act="silu",
    max_position_embeddings=128,
    initializer_range=0.2,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    rope=(("rope_theta", 10000.0), ("rope_type", "default")),
    capture=(2, 0),
    target_hidden_size=WIDTH,
    num_target_layers=4,
    mask_token_id=96,
    block_size=K,
    attention_bias=True,
    layer_types=("full_attention", "full_attention", "sliding_attention"),
    use_sliding_window=True,
    sliding_window=6,
    max_window_layers=3,
)
NUMBERS = DFlashLossOptions(num_anchors=A, decay=3.0)
WIDE = {"param_dtype": "float64", "dtype": "float64"}


def chain(rng: np.random.Generator, length: int, parent: int = -1) -> Node:
    weights = (rng.random(length) < 0.8) * 1.0
    return Node(parent, rng.integers(1, 96, length).astype(np.int32), {"nll": weights})


def make_batch(seed: int = 0, num_anchors: int = A):
    """[1, 3, T]: two packed documents, a tree of four branches, a row with room left; float64."""
    rng = np.random.default_rng(seed)
    nodes = [chain(rng, 7), chain(rng, 6, 0), chain(rng, 5, 0), chain(rng, 4, 2), chain(rng, 7, 2)]
    tree = Tree((*nodes, chain(rng, 3, 1), chain(rng, 4, 1)))
    rows = [
        [lay_out(Tree((chain(rng, n),))) for n in (21, 19)],
        [lay_out(tree)],
        [lay_out(Tree((chain(rng, 13),)))],
    ]
    batch = build_batch(rows, T)
    batch = jax.tree.map(lambda x: x[None], batch)
    batch = batch._replace(weights={"nll": batch.weights["nll"].astype(np.float64)})
    batch = lay_blocks(
        batch, rng, num_anchors=num_anchors, block_size=K, decay=3.0, component="draft"
    )
    states = rng.standard_normal((1, 3, T, 2 * WIDTH))
    return batch._replace(streams={**batch.streams, STATES: states})


def make_models(**options):
    """(draft, target's ends) with random numbers in every parameter, norms and biases too."""
    ends = nnx.eval_shape(
        lambda: TargetEmbeddingAndHead(
            CONFIG, DecoderOptions(param_dtype="float64", dtype="float64"), nnx.Rngs(0)
        )
    )
    actual = []
    for seed, model in enumerate((build.abstract(CONFIG, **{**WIDE, **options}), ends)):
        params, rebuild = split_model(model)
        rng = np.random.default_rng(seed)
        drawn = {p: jnp.asarray(0.3 * rng.standard_normal(v.shape)) for p, v in params.items()}
        for path in drawn:
            if path.endswith("scale"):
                drawn[path] = 1 + drawn[path]
        actual.append((drawn, rebuild))
    return actual


def micro(batch):
    return jax.tree.map(lambda x: jnp.asarray(x[0]), batch)


def to_tensors(params) -> dict:
    """The draft's parameters as its folder names them."""
    actual = {}
    for entry in dflash.names(CONFIG):
        array = np.asarray(params[entry.param])
        for piece in entry.op.write(array, np.asarray):
            actual.setdefault(piece.name, np.zeros(piece.shape, np.float64))[piece.index] = (
                piece.array
            )
    return actual


def reference_loss(tensors, tables, batch):
    """(weighted sum, logits [blocks, K, V]) over all rows of a microstep."""
    total, all_logits = 0.0, []
    share = batch.weights["nll"]
    for row in range(len(share)):
        blocks = row_blocks(batch, row, K)
        row_of = (batch.tokens[row], batch.positions[row], batch.streams[STATES][row])
        hidden = row_hidden(tensors, CONFIG, tables["embed.embedding"], *row_of, blocks)
        logits = (hidden @ tables["lm_head.embedding"].T).reshape(len(blocks), K, -1)
        weight, label = np.zeros((len(blocks), K)), np.zeros((len(blocks), K), int)
        for number, (anchor, _, block) in enumerate(blocks):
            for position in range(1, K):
                if (t := block[position]) >= 0:
                    branches = batch.streams["anchor"][row, anchor]
                    weight[number, position] = (
                        branches * share[row, t] * np.exp(-(position - 1) / 3.0)
                    )
                    label[number, position] = batch.tokens[row, t]
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, :, None], -1)[:, :, 0]
        total -= jnp.sum(weight * logp)
        all_logits.append(logits)
    return total, jnp.concatenate(all_logits)


@functools.cache
def cases():
    batch = make_batch()
    (params, rebuild), (tables, rebuild_ends) = make_models()
    return batch, params, rebuild, tables, rebuild_ends


@pytest.mark.slow
def test_logits_loss_and_gradients_are_those_of_the_formulas():
    """float64, both sides differ by the order of sums: a few 1e-15 of numbers around 1."""
    with jax.enable_x64(True):
        batch, params, rebuild, tables, rebuild_ends = cases()
        small, target = micro(batch), rebuild_ends(tables)

        @jax.jit
        def ours(params):
            def loss(params):
                draft = rebuild(params)
                sums, metrics = dflash_loss(draft, target, small, NUMBERS)
                return sums["draft"], metrics

            return jax.value_and_grad(loss, has_aux=True)(params)

        (value, metrics), grads = ours(params)
        blocks = jax.jit(lambda p: rebuild(p).hidden(target, small, small.streams[STATES], A))(
            params
        )
        tensors = to_tensors(params)
        (expected, logits), wanted_grads = jax.jit(
            jax.value_and_grad(lambda t: reference_loss(t, tables, batch_of(batch)), has_aux=True)
        )(tensors)
        real = np.asarray(blocks.index[:, :, 0] >= 0)
        assert real.sum() == len(logits) > 15 and not real.all()
        np.testing.assert_allclose(target.logits(blocks.hidden)[real], logits, atol=1e-11)
        assert float(value) == pytest.approx(float(expected), rel=1e-12)
        got = to_tensors(grads)
        assert got.keys() == wanted_grads.keys()
        for name, gradient in wanted_grads.items():
            scale = float(jnp.abs(gradient).max())
            assert scale > 1e-6, name
            np.testing.assert_allclose(got[name], gradient, atol=1e-10 * scale, err_msg=name)
        denominator = batch.denoms["draft"][0]
        weights = block_weights(batch, K) * decay_of(K, 3.0)
        assert denominator == pytest.approx(weights.sum())
        check_metrics(metrics, logits, batch_of(batch))


def batch_of(batch):
    """The first microstep, on the host."""
    return jax.tree.map(lambda x: np.asarray(x[0]), batch)


def check_metrics(metrics, logits, batch):
    """Accuracy by place and the simulated acceptance length, block by block."""
    guesses = np.asarray(logits).argmax(-1)
    hits, totals, lengths, blocks = np.zeros(K), np.zeros(K), 0.0, 0.0
    number, share = 0, batch.weights["nll"]
    for row in range(len(share)):
        for anchor, _, block in row_blocks(batch, row, K):
            branches, length, alive = batch.streams["anchor"][row, anchor], 1.0, True
            for position in range(1, K):
                weight = branches * share[row, block[position]] if block[position] >= 0 else 0.0
                right = guesses[number, position] == batch.tokens[row, block[position]]
                hits[position] += weight * right
                totals[position] += weight
                if weight > 0:
                    alive &= bool(right)
                    length += alive
            lengths += branches * share[row, anchor] * length
            blocks += branches * share[row, anchor]
            number += 1
    assert np.allclose(metrics["accept_len"], (lengths, blocks))
    for position in range(1, K):
        assert np.allclose(metrics[f"acc/{position}"], (hits[position], totals[position]))


@pytest.mark.parametrize(
    "weighting", ["dpace", "cumulative-confidence-only", "continuation-value-only"]
)
def test_weights_by_confidence(weighting):
    """Against the formulas on random probabilities, some places without weight."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        logp, valid = np.log(rng.random((2, 5, 3))), rng.random((2, 5, 3)) < 0.7
        got = confidence(jnp.asarray(logp), jnp.asarray(valid), weighting, 0.5)
        for index in np.ndindex(2, 5):
            smooth = np.where(valid[index], 0.5 * np.exp(logp[index]) + 0.5, 1.0)
            prefix = [np.prod(smooth[: j + 1]) for j in range(3)]
            rest = [sum(prefix[m] * valid[index][m] for m in range(j, 3)) for j in range(3)]
            expected = {
                "cumulative-confidence-only": prefix,
                "dpace": rest,
                "continuation-value-only": [r / p for r, p in zip(rest, prefix, strict=True)],
            }[weighting]
            np.testing.assert_allclose(got[index], expected, rtol=1e-12)


def test_guessing_is_what_was_trained():
    """A document read in pieces, some places of which do not count: each proposal is the training
    forward's likeliest tokens for the same anchor, and reading leaves the rest of the cache be."""
    with jax.enable_x64(True):
        (params, rebuild), (tables, rebuild_ends) = make_models()
        target, rng = rebuild_ends(tables), np.random.default_rng(3)
        rows = [[lay_out(Tree((chain(rng, n),)))] for n in (20, 17, 20)]
        batch = build_batch(rows, 20)
        batch = jax.tree.map(lambda x: x[None], batch)
        batch = batch._replace(weights={"nll": 1.0 * (batch.prev >= 0)})
        batch = lay_blocks(batch, rng, num_anchors=20, block_size=K, decay=None, component="draft")
        states = rng.standard_normal((3, 20, 2 * WIDTH))
        small = micro(batch)
        draft = jax.jit(lambda p: rebuild(p).unstack())(params)
        blocks = jax.jit(lambda p: rebuild(p).hidden(target, small, states, 20))(params)
        guesses = np.asarray(target.logits(blocks.hidden).argmax(-1))
        read, propose = jax.jit(type(draft).read), jax.jit(type(draft).propose)
        # Slots beyond the window: its layer keeps a ring.
        cache = draft.init_cache(3, 24)
        width, seen, checked = 6, np.zeros(3, int), 0
        assert np.asarray(propose(draft, cache, target, small.tokens[:, 0])).max() < VOCAB
        for counts in ([6, 1, 0], [2, 6, 3], [0, 5, 6], [5, 0, 4], [6, 2, 6]):
            tokens = rng.integers(1, 96, (3, width)).astype(np.int32)
            provided = rng.standard_normal((3, width, 2 * WIDTH))
            for row, count in enumerate(counts):
                position = slice(seen[row], seen[row] + count)
                tokens[row, :count] = batch.tokens[0, row, position]
                provided[row, :count] = states[row, position]
            cache = read(draft, cache, target, tokens, provided, jnp.asarray(counts, jnp.int32))
            seen += counts
            assert cache.length.tolist() == seen.tolist()
            drawn = batch.tokens[0, np.arange(3), np.minimum(seen, 19)]
            array = np.asarray(propose(draft, cache, target, drawn))
            for row in range(3):
                anchors = np.asarray(blocks.index[row, :, 0])
                for number in np.flatnonzero(anchors == seen[row]) if seen[row] < 20 else ():
                    assert array[row].tolist() == guesses[row, number, 1:].tolist()
                    checked += 1
        assert checked > 8


def test_a_folder_gives_the_same_logits_and_the_names_that_others_read(tmp_path):
    """save -> load, and the tensors that z-lab's code, SGLang and vLLM ask for."""
    with jax.enable_x64(True):
        (params, rebuild), _ = make_models()
        saving.save(rebuild(params), CONFIG, tmp_path)
        loaded = loading.load(tmp_path, **WIDE)
        for path, value in split_model(loaded)[0].items():
            np.testing.assert_array_equal(value, params[path], err_msg=path)
    assert families.read_config(tmp_path) == CONFIG
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["dflash_config"] == {"mask_token_id": 96, "target_layer_ids": [2, 0]}
    assert raw["auto_map"] == {"AutoModel": "dflash.DFlashDraftModel"}
    assert (raw["architectures"], raw["model_type"]) == (["DFlashDraftModel"], "qwen3")
    assert (raw["block_size"], raw["num_target_layers"], raw["dtype"]) == (4, 4, "float64")
    assert raw["layer_types"][2] == "sliding_attention" and raw["sliding_window"] == 6
    assert "capture" not in raw and "target_hidden_size" not in raw
    shapes = {name: stored.shape for name, stored in SafetensorsFolder(tmp_path).tensors.items()}
    assert shapes["fc.weight"] == (WIDTH, 2 * WIDTH)
    assert shapes["layers.2.self_attn.k_proj.weight"] == (16, WIDTH)


def test_copies_of_drafts_have_the_module_that_their_config_names(tmp_path):
    """Copy as `export --max-shard-size` does; a module of another folder is not passed on."""
    with jax.enable_x64(True):
        (params, rebuild), _ = make_models()
        saving.save(rebuild(params), CONFIG, tmp_path / "draft")
    copy_folder(tmp_path / "draft", tmp_path / "copy", "bfloat16")
    modules = [(tmp_path / name / "dflash.py").read_text() for name in ("draft", "copy")]
    assert modules[0] == modules[1] and "class DFlashDraftModel(" in modules[0]
    config = json.loads((tmp_path / "draft/config.json").read_text())
    (tmp_path / "draft/dflash.py").write_text("raise SystemExit")
    for number, place in enumerate(("dflash.Other", "../dflash.DFlashDraftModel", 7, None)):
        config["auto_map"] = {"AutoModel": place}
        (tmp_path / "draft/config.json").write_text(json.dumps(config))
        copy_folder(tmp_path / "draft", tmp_path / f"copy{number}")
        assert not list((tmp_path / f"copy{number}").glob("*.py"))


ZLAB = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "bos_token_id": 151643,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
"""config.json of a published draft for Qwen3-8B."""


def test_the_published_draft_of_an_8b_model():
    """Names and shapes of its 58 tensors, and its config.json there and back."""
    config = families.config_from_hf(ZLAB)
    shapes = {p: v.shape for p, v in split_model(build.abstract(config))[0].items()}
    tensors = {}
    for entry in dflash.names(config):
        tensors |= entry.op.shapes(shapes[entry.param])
    H, Q, KV, F = 4096, 4096, 1024, 12288
    expected = {"fc.weight": (H, 5 * H), "hidden_norm.weight": (H,), "norm.weight": (H,)}
    for layer in range(5):
        expected |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (H,),
                "post_attention_layernorm": (H,),
                "self_attn.q_proj": (Q, H),
                "self_attn.k_proj": (KV, H),
                "self_attn.v_proj": (KV, H),
                "self_attn.o_proj": (H, Q),
                "self_attn.q_norm": (128,),
                "self_attn.k_norm": (128,),
                "mlp.gate_proj": (F, H),
                "mlp.up_proj": (F, H),
                "mlp.down_proj": (H, F),
            }.items()
        }
    assert tensors == expected and len(expected) == 58
    raw = config.to_hf()
    different = {key for key, value in ZLAB.items() if raw[key] != value}
    assert different == {"dtype"}, "which is that of the tensors when they are written"
    assert dflash.spread_layers(36, 5) == config.capture


@pytest.mark.parametrize(
    ("change", "output"),
    [
        ({"dflash_config": None}, "dflash_config is null"),
        ({"dflash_config": {"mask_token_id": 3}}, "target_layer_ids is null"),
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1], "use_swa": True}},
            "use_swa",
        ),
        ({"block_size": 1}, "at least 2"),
        ({"block_size": "16"}, "block_size"),
    ],
)
def test_a_draft_folder_that_is_none(change, output):
    with pytest.raises(UserError, match=output):
        families.config_from_hf({**ZLAB, **change})
