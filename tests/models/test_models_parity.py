"""Every family against transformers in torch: logits, every gradient, and the export."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="parity needs torch, which this environment has not")

import jax
import jax.numpy as jnp
import torch
import transformers
from flax import nnx
from tiny_models import HYBRID, MAMBA, RAW, documents, pack

from jaxtrain.models import build
from jaxtrain.models.build import family


def make_torch(raw, seed=0):
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**raw)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():  # norms and biases start at 1 and 0, which would hide a mix-up
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # as drawn, heads forget within a token or two
                parameter.uniform_(-4.6, 0.4)
            elif parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.1)
    return model.float().eval()


GRANITE = {
    "router.weight": "router.layer.weight",
    "experts.gate_up_proj": "input_linear.weight",
    "experts.down_proj": "output_linear.weight",
}


def stored_grads(theirs):
    """{tensor name in a folder: gradient}: experts are one tensor in memory, one each on disk."""
    found = {}
    for name, parameter in theirs.named_parameters():
        grad = parameter.grad.numpy()
        mixtral = theirs.config.model_type == "mixtral"
        if mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        if theirs.config.model_type == "nemotron_h":
            name = name.replace("model.", "backbone.", 1)
        granite = theirs.config.model_type == "granitemoehybrid"
        for ours, stored in GRANITE.items() if granite else ():
            name = name.replace(f"block_sparse_moe.{ours}", f"block_sparse_moe.{stored}")
        module, _, leaf = name.rpartition(".")
        if not module.endswith(".experts"):
            found[name] = grad
            continue
        parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        for index, matrix in enumerate(grad):
            split = {"gate_up_proj": ("gate_proj", "up_proj")}.get(leaf, (leaf,))
            for part, piece in zip(split, np.split(matrix, len(split)), strict=True):
                found[f"{module}.{index}.{parts[part] if mixtral else part}.weight"] = piece
    return found


def relative_error(ours, theirs):
    scale = np.abs(theirs).max()
    return np.abs(np.asarray(ours) - theirs).max() / scale


# What the first two have beside qwen3_5 is another layout of folders; nemotron_h_moe has most of
# what the other families with Mamba-2 have.
SLOW = {"qwen3_5_moe", "qwen3_next", *MAMBA} - {"nemotron_h_moe"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in RAW]
)
def test_parity_with_transformers(name, tmp_path):
    theirs = make_torch(RAW[name])
    theirs.save_pretrained(tmp_path / "theirs")
    model = build.load(tmp_path / "theirs")
    config = build.read_config(tmp_path / "theirs")
    length = 80 if name in HYBRID | MAMBA else 40  # more than a chunk of linear attention
    tokens = np.stack(documents(1, length, length))
    batch = pack([[row] for row in tokens], length)

    # The loss is a random linear function of the logits: no direction of theirs can go unseen.
    probe = np.random.default_rng(2).standard_normal((*tokens.shape, 97)).astype(np.float32)
    graphdef, state = nnx.split(model)

    def loss(state):
        model = nnx.merge(graphdef, state)
        logits = model.logits(model.hidden(batch).hidden)
        return (logits * probe).sum() / probe.size, logits

    (_, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(state)
    their_logits = theirs(torch.from_numpy(tokens).long()).logits
    (their_logits * torch.from_numpy(probe)).sum().div(probe.size).backward()

    # 1e-4 of the largest value: float32 sums in another order, through two layers and back.
    assert relative_error(logits, their_logits.detach().numpy()) < 1e-4
    flat = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(grads)}
    ours: dict[str, np.ndarray] = {}
    for entry in family(config).names(config):
        for piece in entry.op.write(flat[entry.param], np.asarray):
            ours.setdefault(piece.name, np.zeros(piece.shape))[piece.index] = piece.array
    for tensor in [name for name in ours if name.endswith("e_score_correction_bias")]:
        assert not ours.pop(tensor).any(), "moves the choice alone"
    wanted = stored_grads(theirs)
    assert set(ours) == set(wanted)
    scale = max(np.abs(grad).max() for grad in wanted.values())
    for tensor, grad in wanted.items():
        if np.abs(grad).max() < 1e-6 * scale:
            # A bias on keys shifts all scores of a query alike: its gradient is rounding noise.
            assert tensor.endswith("k_proj.bias")
            assert np.abs(ours[tensor]).max() < 1e-5 * scale
        else:
            assert relative_error(ours[tensor], grad) < 1e-4, tensor


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in HYBRID | MAMBA else n for n in RAW]
)
def test_export_loads_in_transformers(name, tmp_path):
    config = build.config_from_hf(RAW[name])
    model = build.init(config, seed=3)
    build.save(model, config, tmp_path)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert build.read_config(tmp_path) == config
    tokens = np.stack(documents(4, 30, 30))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(tokens).long()).logits.numpy()
    logits = model.logits(model.hidden(pack([[row] for row in tokens], 30)).hidden)
    assert relative_error(logits, expected) < 1e-4  # float32 sums in another order
    assert theirs.config.to_dict().get("rope_parameters", {}) == dict(config.rope)
    assert jnp.isfinite(logits).all()
