"""The benchmark of experts in NF4: PyTorch's side computes the same loss and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_adapters_experts import open_model
from tiny_models import documents, pack

from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.models import build, families, saving

LENGTH = 40


@pytest.mark.thorough
def test_pytorchs_experts_in_nf4_have_our_loss_and_gradients(benchmarks, tmp_path):
    import torch
    import transformers

    raw = benchmarks["step_work"].MODELS["tiny-moe"]
    config = families.config_from_hf(raw)
    saving.save(build.init(config, seed=3), config, tmp_path / "base")
    mesh = make_mesh(jax.devices()[:1])
    _, _, trained, frozen, rebuild = open_model("nf4_fused", mesh, tmp_path / "base")
    rows = documents(4, LENGTH, LENGTH)
    batch = pack([[row] for row in rows], LENGTH)

    def loss(trained):
        model = rebuild({**frozen, **trained})
        logp = jax.nn.log_softmax(model.logits(model.hidden(batch).hidden))[:, :-1]
        return -jnp.take_along_axis(logp, batch.tokens[:, 1:, None], -1).mean()

    expected, grads = jax.jit(jax.value_and_grad(loss))(trained)

    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32, attn_implementation="sdpa"
    )
    model.requires_grad_(False)
    position = "stack.block.mlp.experts"
    for index, layer in enumerate(model.model.layers):
        benchmarks["peers.experts_nf4"].pack_layer(layer, 4, "all-linear")
        experts = layer.mlp.experts
        factors = {name: np.asarray(trained[name][index]) for name in trained}
        gate, up, down = (f"{position}.{part}.adapter" for part in ("gate", "up", "down"))
        for weight, value in [
            (experts.gate_up_lora.a, np.concatenate([factors[f"{p}.a"] for p in (gate, up)], -1)),
            (experts.gate_up_lora.b[0], factors[f"{gate}.b"]),
            (experts.gate_up_lora.b[1], factors[f"{up}.b"]),
            (experts.down_lora.a, factors[f"{down}.a"]),
            (experts.down_lora.b[0], factors[f"{down}.b"]),
        ]:
            weight.data = torch.from_numpy(value.copy())
    benchmarks["peers.experts"].checkpoint_blocks(model)
    tokens = torch.from_numpy(np.stack(rows).astype(np.int64))
    step = benchmarks["peers.experts"].Step(model, tokens, compile=False)
    actual = step.loss()
    actual.backward()
    # fp32 sums in another order.
    assert abs(actual.item() - float(expected)) < 1e-4
    for index, layer in enumerate(model.model.layers):
        lora = layer.mlp.experts.down_lora
        for name, reference in [("a", lora.a.grad), ("b", lora.b[0].grad)]:
            array = np.asarray(grads[f"{position}.down.adapter.{name}"][index])
            assert np.abs(reference.numpy() - array).max() < 1e-4 * np.abs(array).max(), (
                index,
                name,
            )
    step.optimizer.zero_grad()
    step.run()
    assert step.loss().item() < actual.item()
