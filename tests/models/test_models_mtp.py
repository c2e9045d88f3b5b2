"""Multi-token prediction heads against the published formula in torch, around layers of
transformers; packed trees; folders."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="parity needs torch, which this environment has not")

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file
from test_models_families import FAMILIES as FAMILY_SIZES
from test_models_families import make_batch, make_torch
from tiny_models import RAW, SIZES

from jaxtrain.core.losses.mtp import COMPONENT, HeadLoss, add_weights
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.huggingface.packed import open_folder
from jaxtrain.models import build, families, loading, saving
from jaxtrain.models.mtp import with_head

QWEN = {
    "fc": "mtp.fc.weight",
    "enorm": "mtp.pre_fc_norm_embedding.weight",
    "hnorm": "mtp.pre_fc_norm_hidden.weight",
    "norm": "mtp.norm.weight",
    "block": "mtp.layers.{k}.",
}
NEMOTRON = {
    "fc": "mtp.layers.0.eh_proj.weight",
    "enorm": "mtp.layers.0.enorm.weight",
    "hnorm": "mtp.layers.0.hnorm.weight",
    "norm": "mtp.layers.1.final_layernorm.weight",
    "block": "mtp.layers.{k}.",
}
MIMO = {
    "fc": "model.mtp.layers.0.eh_proj.weight",
    "enorm": "model.mtp.layers.0.enorm.weight",
    "hnorm": "model.mtp.layers.0.hnorm.weight",
    "norm": "model.mtp.layers.0.final_layernorm.weight",
    "block": "model.mtp.layers.{k}.",
}
LAYER = {
    "fc": "model.layers.{n}.eh_proj.weight",
    "enorm": "model.layers.{n}.enorm.weight",
    "hnorm": "model.layers.{n}.hnorm.weight",
    "norm": "model.layers.{n}.shared_head.norm.weight",
    "block": "model.layers.{n}.",
    "copies": {
        "model.layers.{n}.embed_tokens.weight": "model.embed_tokens.weight",
        "model.layers.{n}.shared_head.head.weight": "lm_head.weight",
    },
}
ONE_FULL = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
ONE_SPARSE = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
TWO_FULL = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
HEADS = {
    "qwen3_5": ({**RAW["qwen3_5"], **TWO_FULL}, QWEN, ONE_FULL),
    "qwen3_5_moe": (RAW["qwen3_5_moe"], QWEN, ONE_FULL),
    "qwen3_next": (RAW["qwen3_next"], QWEN, {**ONE_FULL, "mlp_only_layers": []}),
    "deepseek_v3": (FAMILY_SIZES["deepseek_v3"], LAYER, ONE_SPARSE),
    "glm4_moe": (FAMILY_SIZES["glm4_moe"], LAYER, ONE_SPARSE),
    "glm4_moe_lite": (
        FAMILY_SIZES["glm4_moe_lite"],
        LAYER,
        {"num_hidden_layers": 1, "mlp_layer_types": ["sparse"]},
    ),
    "nemotron_h": (
        FAMILY_SIZES["nemotron_h_moe"],
        NEMOTRON,
        {"num_hidden_layers": 2, "hybrid_override_pattern": "*E"},
    ),
    "mimo_v2_flash": (
        FAMILY_SIZES["mimo_v2_flash"],
        MIMO,
        {
            "num_hidden_layers": 1,
            "layer_types": ["sliding_attention"],
            "mlp_layer_types": ["dense"],
        },
    ),
}
"""(sizes, tensors as vLLM's loaders name them, what makes the model's config that of a model whose
layers are the head's blocks)."""
COUNT_KEYS = {
    name: "mtp_num_hidden_layers" if name.startswith("qwen") else "num_nextn_predict_layers"
    for name in HEADS
    if name != "mimo_v2_flash"
}
"""Attribute of config.json that states one head; MiMo has none."""
FURTHER = "model.mtp.layers.1.enorm.weight"
"""A tensor of MiMo's second head, which is carried along."""


def families_of(*names):
    """The first family in the quick tests, all others in the thorough ones."""
    first, *remaining = names or HEADS
    return [first, *(pytest.param(name, marks=pytest.mark.thorough) for name in remaining)]


class Reference:
    """The model and its head in torch; `folder` holds both."""

    def __init__(self, name: str, folder: Path):
        raw, tensors, change = HEADS[name]
        raw = {**SIZES, **raw}
        if name in COUNT_KEYS:
            raw[COUNT_KEYS[name]] = 1
        self.tensors = {
            key: value.format(n=raw["num_hidden_layers"], k="{k}")
            for key, value in tensors.items()
            if isinstance(value, str)
        }
        self.model = make_torch(raw)
        self.block = make_torch({**raw, **change}, seed=1)
        width = raw["hidden_size"]
        self.norm_name = "norm_f" if name == "nemotron_h" else "norm"
        norm = getattr(self.model.model, self.norm_name)
        self.norms = {key: type(norm)(width, eps=1e-6) for key in ("enorm", "hnorm", "norm")}
        self.eps = getattr(norm, "variance_epsilon", None) or norm.eps
        for layer in self.norms.values():
            torch.nn.init.normal_(layer.weight, 0.9, 0.2)
            for key in ("eps", "variance_epsilon"):
                if hasattr(layer, key):
                    setattr(layer, key, self.eps)
        setattr(self.block.model, self.norm_name, self.norms["norm"])
        self.fc = torch.nn.Linear(2 * width, width, bias=False)
        self.model.save_pretrained(folder)
        self.block.save_pretrained(folder / "block")
        stored = load_file(folder / "model.safetensors")
        inner = load_file(folder / "block" / "model.safetensors")
        for key, value in inner.items():
            if ".layers." in key:
                number, ending = key.split(".layers.")[1].split(".", 1)
                block = self.tensors["block"].format(k=number)
                if name == "mimo_v2_flash":
                    ending = ending.replace("post_attention_layernorm", "pre_mlp_layernorm")
                stored[block + ending] = value
        stored |= {
            self.tensors[key]: layer.weight.detach().numpy()
            for key, layer in {**self.norms, "fc": self.fc}.items()
        }
        for copy, source in tensors.get("copies", {}).items():
            table = source if source in stored else "model.embed_tokens.weight"
            stored[copy.format(n=raw["num_hidden_layers"])] = stored[table]
        if name == "mimo_v2_flash":
            stored[FURTHER] = np.ones(3, np.float32)
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        self.stored, self.folder = stored, folder

    def states(self, tokens: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Final states [T, D] of the model, and [T - 1, D] of the pairs."""
        ids = torch.tensor(tokens)[None].long()
        hidden = self.model.model(input_ids=ids).last_hidden_state
        embedded = self.model.get_input_embeddings()(ids)
        pair = [self.norms["enorm"](embedded[:, 1:]), self.norms["hnorm"](hidden[:, :-1])]
        out = self.block.model(inputs_embeds=self.fc(torch.cat(pair, -1))).last_hidden_state
        return hidden[0], out[0]

    def logits(self, tokens: np.ndarray) -> torch.Tensor:
        """[T - 1, V] of what follows each token but the first."""
        return self.model.lm_head(self.states(tokens)[1])


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    opened = {}

    def open_reference(name):
        if name not in opened:
            opened[name] = Reference(name, tmp_path_factory.mktemp(name))
        return opened[name]

    return open_reference


def open_model(folder, **options):
    config = with_head(families.read_config(folder), open_folder(folder).tensors)
    graph, state = nnx.split(build.abstract(config, **options))
    flat = dict(nnx.to_flat_state(state))
    for name, value in loading.read_params(folder, None, config, **options):
        path = tuple(int(part) if part.isdigit() else part for part in name.split("."))
        flat[path] = flat[path].replace(value)
    return loading.remember(nnx.merge(graph, nnx.from_flat_state(flat)), folder), config


@pytest.mark.parametrize("name", families_of())
def test_a_head_guesses_what_the_published_formula_guesses(references, name):
    """A document, and a tree whose branches torch reads alone: both children of the fork have pairs
    of their own."""
    reference = references(name)
    model, _ = open_model(reference.folder)
    batch, sequences = make_batch(name)
    hidden = model.hidden(batch).hidden
    logits = np.asarray(model.logits(model.mtp.read_rows(model, hidden, batch)))
    for row, places, _ in sequences:
        with torch.no_grad():
            expected = reference.logits(np.asarray(batch.tokens)[row, places])
        np.testing.assert_allclose(logits[row, places[1:]], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", families_of())
def test_the_folder_is_written_bit_for_bit(references, name, tmp_path):
    reference = references(name)
    model, config = open_model(reference.folder)
    assert saving.count_stale(model, config) == (FURTHER in reference.stored)
    saving.save(model, config, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == reference.stored.keys()
    for key, value in reference.stored.items():
        assert written[key].tobytes() == value.tobytes(), key
    raw = json.loads((tmp_path / "config.json").read_text())
    if name in COUNT_KEYS:
        assert raw[COUNT_KEYS[name]] == 1
    if name == "nemotron_h":  # vLLM's loader has no default
        assert raw["mtp_hybrid_override_pattern"] == "*E"


def grads_of(model, batch, head=None):
    """Sums of the losses, and all gradients of nll / 10 and a tenth of the head's by path."""
    graph, params = nnx.split(model, nnx.Param)
    loss = nll_loss if head is None else head.wrap(nll_loss)

    @jax.jit
    def run(params):
        def total(params):
            sums, _ = loss(nnx.merge(graph, params), batch)
            return sums["nll"] / 10 + sums.get(COMPONENT, 0.0) / 100, sums

        return jax.value_and_grad(total, has_aux=True)(params)

    (_, sums), grads = run(params)
    flat = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(grads)}
    return sums, {path: np.asarray(leaf.get_value()) for path, leaf in flat.items()}


@pytest.fixture
def as_users_compile():
    """Compile with all optimizations: XLA rounds a model's sum of losses in another order beside
    Nemotron 3's head without them."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.thorough
@pytest.mark.parametrize("name", families_of())
@pytest.mark.usefixtures("as_users_compile")
def test_a_decoupled_head_leaves_every_gradient_bit_of_the_model_as_it_is(references, name):
    model, config = open_model(references(name).folder)
    batch = jax.tree.map(jnp.asarray, add_weights(make_batch(name)[0]))
    sums, alone = grads_of(build_without(config, model), batch)
    head_sums, beside = grads_of(model, batch, HeadLoss(0.1))
    assert head_sums["nll"].view(jnp.uint32) == sums["nll"].view(jnp.uint32)
    for path, grad in alone.items():
        assert (grad.view(np.uint32) == beside[path].view(np.uint32)).all(), path
    heads = beside.keys() - alone.keys()
    assert heads and all(path.startswith("mtp.") for path in heads)
    dead = {path for path in heads if not beside[path].any()}
    assert all(path.endswith(("choice_bias",)) for path in dead), dead


def build_without(config, model):
    """The model without its head, of the same arrays."""
    plain = build.abstract(dataclasses.replace(config, mtp=None))
    graph, state = nnx.split(plain)
    values = dict(nnx.to_flat_state(nnx.state(model)))
    flat = [
        (path, leaf.replace(values[path].get_value())) for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(flat))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", families_of("qwen3_5", "deepseek_v3", "nemotron_h", "mimo_v2_flash")
)
def test_a_joint_head_has_the_gradients_of_torch(references, name):
    """The document alone: loss of the head, through the states, the embedding and the output
    projection."""
    reference = references(name)
    model, config = open_model(reference.folder)
    batch, [(row, places, _), *_] = make_batch(name)
    batch = jax.tree.map(lambda x: x[row : row + 1], batch)
    batch = jax.tree.map(jnp.asarray, add_weights(batch))
    sums, grads = grads_of(model, batch, HeadLoss(0.1, joint=True))
    tokens = np.asarray(batch.tokens)[0, places]
    hidden, pairs = reference.states(tokens)
    head = reference.model.lm_head
    ids = torch.tensor(tokens).long()
    losses = [
        torch.nn.functional.cross_entropy(head(x), y, reduction="sum")
        for x, y in ((hidden[:-1], ids[1:]), (pairs[:-1], ids[2:]))
    ]
    (losses[0] / 10 + losses[1] / 100).backward()
    np.testing.assert_allclose(sums[COMPONENT], losses[1].item(), rtol=1e-4)
    embedding = reference.model.get_input_embeddings().weight.grad
    norm = getattr(reference.model.model, reference.norm_name).weight.grad
    expected = {
        "embed.embedding": embedding,
        "norm.scale": norm,
        "mtp.fc.kernel": reference.fc.weight.grad.T,
        "mtp.norm.scale": reference.norms["norm"].weight.grad,
        "mtp.hidden_norm.scale": reference.norms["hnorm"].weight.grad,
    }
    for path, grad in expected.items():
        np.testing.assert_allclose(grads[path], grad, rtol=2e-3, atol=2e-4, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", families_of("qwen3_5", "deepseek_v3", "nemotron_h", "mimo_v2_flash")
)
def test_a_tree_trains_the_head_as_its_branches_alone(references, name):
    """Loss and every gradient, joint; tokens that two branches share count twice in the tree."""
    model, _ = open_model(references(name).folder)
    batch, sequences = make_batch(name)
    prefix = sequences[2][2]
    tree = jax.tree.map(lambda x: np.array(x)[1:], batch)
    tree.weights["nll"][0, :prefix] *= 2
    T = tree.tokens.shape[1]
    rows = []
    for _, places, _ in sequences[1:]:
        n = len(places)
        index = np.arange(T, dtype=np.int32)
        inside = index < n
        tokens = np.zeros(T, np.int32)
        tokens[:n] = tree.tokens[0, places]
        rows.append(
            batch._replace(
                tokens=tokens,
                positions=np.where(inside, index, 0),
                prev=np.where(inside, index - 1, -1),
                until=np.where(inside, n, index + 1).astype(np.int32),
                weights={"nll": (inside & (index > 0)).astype(np.float32)},
            )
        )
    flat = jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *map(add_weights, rows))
    tree = jax.tree.map(jnp.asarray, add_weights(tree))
    joint = HeadLoss(0.1, joint=True)
    (sums, grads), (flat_sums, flat_grads) = (grads_of(model, b, joint) for b in (tree, flat))
    np.testing.assert_allclose(sums[COMPONENT], flat_sums[COMPONENT], rtol=1e-5)
    for path, grad in flat_grads.items():
        np.testing.assert_allclose(grads[path], grad, rtol=1e-3, atol=1e-4, err_msg=path)
