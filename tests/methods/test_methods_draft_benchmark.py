"""The benchmark of draft training: PyTorch's side is the same work, to float32 rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.batch import ANCHOR
from jaxtrain.data.packing.pack import build_batch, lay_out
from jaxtrain.data.packing.tree import chain
from jaxtrain.methods.drafts.anchors import lay_blocks
from jaxtrain.methods.drafts.dflash_loss import DFlashLossOptions, dflash_loss
from jaxtrain.methods.drafts.eagle3_loss import Unroll, eagle3_loss
from jaxtrain.methods.drafts.eagle3_method import label_guesses
from jaxtrain.models import build, dflash, eagle3, families
from jaxtrain.models.parameters import split_model

T, SLOTS, ANCHORS, CAPTURE = 48, 4, 6, (0, 3)


@pytest.fixture(scope="module")
def target(benchmarks):
    """(config.json, ours, PyTorch's) with the same weights."""
    raw = benchmarks["step_work"].MODELS["tiny"] | {"num_hidden_layers": 4}
    model = build.init(families.config_from_hf(raw), 0)
    peers = benchmarks["peers.drafts"]
    import torch

    peer = peers.Target(raw, 4, peers.Options(torch.float32, "cpu"))
    params, _ = split_model(model)
    fill(peer.embed, params["embed.embedding"], flip=False)
    fill(peer.norm.weight, params["norm.scale"])
    fill_blocks(peer.blocks, params)
    return raw, model, peer


def fill(tensor, *arrays, flip=True) -> None:
    """Put our arrays, turned where they are matrices and one behind the other, into a tensor."""
    import torch

    array = np.concatenate([np.asarray(a).T if flip else np.asarray(a) for a in arrays])
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(array))


def fill_blocks(blocks, params) -> None:
    for layer, block in enumerate(blocks):

        def one(name, layer=layer):
            return params[f"stack.block.{name}"][layer]

        fill(block.qkv.weight, *(one(f"attention.{name}.kernel") for name in "qkv"))
        fill(block.out.weight, one("attention.out.kernel"))
        fill(block.gate_up.weight, one("mlp.gate.kernel"), one("mlp.up.kernel"))
        fill(block.down.weight, one("mlp.down.kernel"))
        for actual_values, reference in (
            ("attention_norm", block.attention_norm),
            ("mlp_norm", block.mlp_norm),
            ("attention.q_norm", block.q_norm),
            ("attention.k_norm", block.k_norm),
        ):
            fill(reference.weight, one(f"{actual_values}.scale"))


def make_rows(vocabulary: int) -> np.ndarray:
    return np.random.default_rng(3).integers(1, vocabulary, (1, T)).astype(np.int32)


def same_gradient(actual_values, reference) -> None:
    """float32 sums in another order."""
    reference = reference.numpy()
    np.testing.assert_allclose(
        np.asarray(actual_values).T, reference, atol=1e-4 * np.abs(reference).max()
    )


@pytest.mark.thorough
def test_dflash_is_the_same_loss(benchmarks, target):
    """Sum, denominator and gradients from the same weights and anchors."""
    import torch

    raw, model, peer_target = target
    config = dflash.Config(
        **{name: raw[name] for name in SHARED},
        num_hidden_layers=2,
        tie_word_embeddings=False,
        rope=(("rope_theta", raw["rope_theta"]), ("rope_type", "default")),
        capture=CAPTURE,
        target_hidden_size=raw["hidden_size"],
        num_target_layers=4,
        mask_token_id=7,
        block_size=SLOTS,
    )
    params, rebuild = split_model(build.init(config, 1))
    tokens = make_rows(raw["vocab_size"])
    batch = build_batch([[lay_out(chain(tokens[0], {"nll": np.ones(T)}))]], T)
    batch = jax.tree.map(lambda x: x[None], batch)
    rng = np.random.default_rng(0)
    shape = {"num_anchors": ANCHORS, "block_size": SLOTS, "decay": 7.0}
    batch = lay_blocks(batch, rng, **shape, component="draft")
    micro = jax.tree.map(lambda x: jnp.asarray(x[0]), batch)
    numbers = DFlashLossOptions(ANCHORS, 7.0)

    @jax.jit
    @jax.value_and_grad
    def loss(values):
        return dflash_loss(rebuild(values), model, micro, numbers)[0]["draft"]

    value, grads = loss(params)
    peers = benchmarks["peers.drafts"]
    options = peers.Options(torch.float32, "cpu")
    draft = peers.DFlash(raw | {"num_hidden_layers": 2}, len(CAPTURE))
    fill(draft.fc.weight, params["fc.kernel"])
    fill(draft.hidden_norm.weight, params["hidden_norm.scale"])
    fill(draft.norm.weight, params["norm.scale"])
    fill_blocks(draft.blocks, params)
    work = {"layers": CAPTURE, "block_size": SLOTS, "mask_id": 7, "decay": 7.0}
    step = peers.DFlashStep(peer_target, draft, work | {"num_anchors": ANCHORS}, options)
    anchors = torch.from_numpy(np.flatnonzero(batch.streams[ANCHOR])[None])
    trained = torch.ones(1, T)
    trained[:, 0] = 0
    total, weight = step.loss(torch.from_numpy(tokens).long(), anchors, trained)
    total.backward()
    np.testing.assert_allclose(float(total.detach()), float(value), rtol=1e-5)
    np.testing.assert_allclose(float(weight), batch.denoms["draft"][0], rtol=1e-6)
    same_gradient(grads["fc.kernel"], draft.fc.weight.grad)
    for layer, block in enumerate(draft.blocks):
        same_gradient(grads["stack.block.mlp.down.kernel"][layer], block.down.weight.grad)
        q = grads["stack.block.attention.q.kernel"][layer]
        same_gradient(q, block.qkv.weight.grad[: q.shape[1]])
        kernels = [grads[f"stack.block.attention.{name}.kernel"][layer] for name in "kv"]
        array = np.concatenate([np.asarray(x) for x in kernels], axis=1)
        same_gradient(array, block.qkv.weight.grad[q.shape[1] :])


@pytest.mark.thorough
def test_eagle3_is_the_same_loss(benchmarks, target):
    """Sum, denominator and gradients through an unroll of 4, with a third of the tokens kept."""
    import torch

    raw, model, peer_target = target
    length, retained = 4, np.arange(0, raw["vocab_size"], 3)
    config = eagle3.Config(
        **{name: raw[name] for name in SHARED},
        num_hidden_layers=1,
        tie_word_embeddings=False,
        rope=(("rope_theta", raw["rope_theta"]), ("rope_type", "default")),
        capture=CAPTURE,
        target_hidden_size=raw["hidden_size"],
        num_target_layers=4,
        draft_vocab_size=len(retained),
        length=length,
    )
    params, rebuild = split_model(build.init(config, 1))
    params |= {"kept": jnp.asarray(retained, jnp.int32)}
    tokens = make_rows(raw["vocab_size"])
    batch = build_batch([[lay_out(chain(tokens[0], {"nll": np.ones(T)}))]], T)
    batch = label_guesses(jax.tree.map(lambda x: x[None], batch), np.random.default_rng(0))
    micro = jax.tree.map(lambda x: jnp.asarray(x[0]), batch)

    @jax.jit
    @jax.value_and_grad
    def loss(values):
        draft = rebuild({**values, "kept": params["kept"]})
        return eagle3_loss(draft, model, micro, Unroll(length))[0]["draft"]

    value, grads = loss({path: x for path, x in params.items() if path != "kept"})
    peers = benchmarks["peers.drafts"]
    options = peers.Options(torch.float32, "cpu")
    draft = peers.Eagle3(raw, len(CAPTURE), len(retained))
    fill(draft.fc.weight, params["fc.kernel"])
    fill(draft.head, params["lm_head.embedding"], flip=False)
    for actual_values, reference in (
        ("norm", draft.norm),
        ("midlayer.embed_norm", draft.input_norm),
        ("midlayer.hidden_norm", draft.hidden_norm),
        ("midlayer.mlp_norm", draft.mlp_norm),
    ):
        fill(reference.weight, params[f"{actual_values}.scale"])
    inner = "midlayer.attention"
    fill(draft.qkv.weight, *(params[f"{inner}.{name}.kernel"] for name in "qkv"))
    fill(draft.out.weight, params[f"{inner}.out.kernel"])
    fill(draft.gate_up.weight, *(params[f"midlayer.mlp.{x}.kernel"] for x in ("gate", "up")))
    fill(draft.down.weight, params["midlayer.mlp.down.kernel"])
    work = {"layers": CAPTURE, "steps": length, "factor": 0.8, "kept": retained}
    step = peers.Eagle3Step(peer_target, draft, work, options)
    trained = torch.ones(1, T)
    trained[:, 0] = 0
    total, weight = step.loss(torch.from_numpy(tokens).long(), trained)
    total.backward()
    np.testing.assert_allclose(float(total.detach()), float(value), rtol=1e-5)
    np.testing.assert_allclose(float(weight), batch.denoms["draft"][0], rtol=1e-6)
    assert float(value) > 1, "some of the likeliest tokens are kept"
    same_gradient(grads["fc.kernel"], draft.fc.weight.grad)
    same_gradient(np.asarray(grads["lm_head.embedding"]).T, draft.head.grad)
    kernels = [grads[f"{inner}.{name}.kernel"] for name in "qkv"]
    same_gradient(np.concatenate(kernels, axis=1), draft.qkv.weight.grad)
    same_gradient(grads["midlayer.mlp.down.kernel"], draft.down.weight.grad)


SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
)


def test_operations_of_the_draft_are_counted(benchmarks):
    """By hand for 8B's shape at 8,192 tokens: 5 layers on 8,192 places, and the head's two
    products; the target to its 34th layer."""
    draft, options = benchmarks["draft"], type("Options", (), {"size": "full"})
    raw = draft.target_sizes(options)
    assert draft.captured("dflash", 36, 5) == (1, 9, 17, 25, 33)
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288
    target = 34 * (2 * layer * 8192 + 4 * 4096 * 8192 * 8193 // 2)
    assert draft.count_target("dflash", raw, 8192, (1, 9, 17, 25, 33)) == target
    pairs = 10**7
    body = 5 * (2 * layer * 8192 + 2 * 2 * 4096 * 1024 * 8192 + 4 * 4096 * pairs)
    rest = 2 * 2 * 5 * 4096 * 4096 * 8192 + 2 * 2 * 512 * 15 * 151936 * 4096
    assert draft.count_draft("dflash", options, 8192, pairs) == 3 * body + rest
    assert draft.unrolled_pairs(3) == 7 * 6 + 3 * 21
