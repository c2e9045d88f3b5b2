"""The benchmark of whole steps: its work is what it says, and PyTorch's side is the same model."""

import gzip
import json

import jax
import numpy as np
import pytest

from jaxtrain.batch import check_batch
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.layers.rope import frequencies
from jaxtrain.models import build, families
from jaxtrain.models.parameters import split_model


def test_the_works_are_those_of_the_recorded_peers(benchmarks):
    """7,889 and 31,972 packed tokens; 70,761 tokens when the branches of the first run alone."""
    works = benchmarks["step_work"].WORKS
    for name, tokens in (("tree8k", 7889), ("tree32k", 31972), ("docs8k", 8180)):
        batch = works[name].batch(1000)
        check_batch(jax.tree.map(lambda leaf: leaf[0], batch))
        real = (batch.prev >= 0) | (batch.until > np.arange(works[name].row) + 1)
        assert real.sum() == tokens, name
    alone = works["tree8k"].packed_branches(1000)
    real = (alone.prev >= 0) | (alone.until > np.arange(alone.until.shape[-1]) + 1)
    assert real.sum() == 70761
    # The same weight in all: branches are the baseline of the same objective.
    whole = works["tree8k"].batch(1000)
    np.testing.assert_allclose(alone.weights["nll"].sum(), whole.weights["nll"].sum(), rtol=1e-6)


def copy_weights(model, raw: dict, params: dict) -> None:
    """Put our parameters into the PyTorch model."""
    import torch

    def tensor(*arrays):
        return torch.from_numpy(np.concatenate([np.asarray(a).T for a in arrays]))

    with torch.no_grad():
        model.embed.copy_(torch.from_numpy(np.asarray(params["embed.embedding"])))
        model.norm.weight.copy_(torch.from_numpy(np.asarray(params["norm.scale"])))
        for layer, block in enumerate(model.blocks):

            def one(name, layer=layer):
                return params[f"stack.block.{name}"][layer]

            kernels = {
                block.qkv: [one(f"attention.{name}.kernel") for name in "qkv"],
                block.out: [one("attention.out.kernel")],
                block.gate_up: [one("mlp.gate.kernel"), one("mlp.up.kernel")],
                block.down: [one("mlp.down.kernel")],
            }
            for linear, arrays in kernels.items():
                linear.weight.copy_(tensor(*arrays))


def copy_hybrid_weights(model, params: dict) -> None:
    """Copy the weights of a hybrid; projections of one input stand side by side there, and the
    columns of q | k | v by key head here."""
    import torch

    def put(parameter, *arrays):
        value = np.concatenate([np.asarray(array).T for array in arrays])
        parameter.copy_(torch.from_numpy(value.reshape(parameter.shape)))

    with torch.no_grad():
        put(model.embed, params["embed.embedding"].T)
        put(model.norm.weight, params["norm.scale"])
        counts = {"linear": 0, "block": 0}
        for block in model.blocks:
            kind = "linear" if block.reads == "ends" else "block"
            index = counts[kind]
            counts[kind] += 1

            def one(name, kind=kind, index=index):
                return params[f"stack.{kind}.{name}"][index]

            put(block.attention_norm.weight, one("attention_norm.scale"))
            put(block.mlp.norm.weight, one("mlp_norm.scale"))
            put(block.mlp.gate_up.weight, one("mlp.gate.kernel"), one("mlp.up.kernel"))
            put(block.mlp.down.weight, one("mlp.down.kernel"))
            put(block.out.weight, one("attention.out.kernel"))
            if kind == "block":
                put(block.q.weight, one("attention.q.kernel"))
                put(block.kv.weight, one("attention.k.kernel"), one("attention.v.kernel"))
                put(block.q_norm.weight, one("attention.q_norm.scale"))
                put(block.k_norm.weight, one("attention.k_norm.scale"))
                continue
            H, K, width = block.H, block.K, block.N // block.H * block.V
            places = np.arange(block.sizes[0]).reshape(H, 2 * K + width)
            order = np.concatenate([places[:, a:b].ravel() for a, b in ((0, K), (K, 2 * K))])
            order = np.concatenate([order, places[:, 2 * K :].ravel()])
            into = [one("attention.qkv.kernel")[:, order]]
            put(block.into.weight, *into, *(one(f"attention.{n}.kernel") for n in "zba"))
            put(block.conv, one("attention.conv")[order, 0].T)
            for name in ("A_log", "dt_bias"):
                put(getattr(block, name), one(f"attention.{name}"))
            put(block.scale, one("attention.norm.scale"))


@pytest.mark.thorough
def test_the_hybrid_torch_model_is_the_same_model(benchmarks):
    """Loss and gradients in float32 on packed documents, from the same weights."""
    torch_step, raw = benchmarks["peers.train_step"], benchmarks["step_work"].MODELS["tiny-hybrid"]
    architecture = families.config_from_hf(raw)
    batch = benchmarks["step_work"].WORKS["tiny-docs"].batch(architecture.vocab_size)
    params, rebuild = split_model(build.init(architecture, 0))
    micro = jax.tree.map(lambda leaf: leaf[0], batch)
    loss = jax.jit(jax.value_and_grad(lambda values: nll_loss(rebuild(values), micro)[0]["nll"]))
    value, grads = loss(params)

    import torch

    options = torch_step.Options(dtype=torch.float32, compile=False, device="cpu")
    frequency, _ = architecture.encodings()["default"]
    step = torch_step.build_step(raw, tuple(frequency), batch, options)
    copy_hybrid_weights(step.model, params)
    (rows,) = step.rows
    assert rows.ends.tolist() == [0, 100, 130, 190, 207, 256]
    peer = step.model.loss(rows)
    peer.backward()
    np.testing.assert_allclose(float(peer.detach()), float(value), rtol=1e-5)
    linear, full = step.model.blocks[0], step.model.blocks[3]
    for theirs, name, layer in (
        (step.model.embed, "embed.embedding", None),
        (linear.A_log, "stack.linear.attention.A_log", 0),
        (linear.out.weight, "stack.linear.attention.out.kernel", 0),
        (full.q.weight, "stack.block.attention.q.kernel", 0),
        (full.mlp.down.weight, "stack.block.mlp.down.kernel", 0),
    ):
        ours = grads[name] if layer is None else np.asarray(grads[name][layer]).T
        theirs = theirs.grad.numpy()
        np.testing.assert_allclose(theirs, ours, atol=2e-4 * np.abs(theirs).max(), err_msg=name)


@pytest.mark.thorough
def test_the_torch_model_is_the_same_model(benchmarks):
    """Loss and gradients in float32 on one tree, from the same weights."""
    torch_step, raw = benchmarks["peers.train_step"], benchmarks["step_work"].MODELS["tiny"]
    architecture = families.config_from_hf(raw)
    batch = benchmarks["step_work"].WORKS["tiny-tree"].batch(architecture.vocab_size)
    params, rebuild = split_model(build.init(architecture, 0))
    micro = jax.tree.map(lambda leaf: leaf[0], batch)
    loss = jax.value_and_grad(lambda values: nll_loss(rebuild(values), micro)[0]["nll"])
    value, grads = loss(params)

    import torch

    options = torch_step.Options(dtype=torch.float32, compile=False, device="cpu")
    frequency, _ = frequencies(architecture.head_size, dict(architecture.rope))
    step = torch_step.build_step(raw, tuple(frequency), batch, options)
    copy_weights(step.model, raw, params)
    (rows,) = step.rows
    peer = step.model.loss(rows)
    peer.backward()
    # float32 sums in another order; the scores are of size one and the loss a sum of 118 terms.
    np.testing.assert_allclose(float(peer.detach()), float(value), rtol=1e-5)
    embed = step.model.embed.grad.numpy()
    np.testing.assert_allclose(embed, grads["embed.embedding"], atol=1e-4 * np.abs(embed).max())
    for layer, block in enumerate(step.model.blocks):
        down = block.down.weight.grad.numpy().T
        ours = grads["stack.block.mlp.down.kernel"][layer]
        np.testing.assert_allclose(down, ours, atol=1e-4 * np.abs(down).max())
        q = block.qkv.weight.grad.numpy().T[:, : ours_width(grads)]
        ours = grads["stack.block.attention.q.kernel"][layer]
        np.testing.assert_allclose(q, ours, atol=1e-4 * np.abs(q).max())


def ours_width(grads: dict) -> int:
    return grads["stack.block.attention.q.kernel"].shape[-1]


@pytest.mark.thorough
def test_a_small_run_writes_table_json_and_plot(benchmarks, tmp_path, monkeypatch):
    for module in ("train_step", "peers.train_step"):
        monkeypatch.setattr(benchmarks[module], "WARM_UP", 2)
        monkeypatch.setattr(benchmarks[module], "TIMED", 2)
    out = tmp_path / "result"
    arguments = "--model tiny --work tiny-tree --dtype float32 --remat elementwise"
    arguments += (
        f" --layers scan unroll --mesh data=2 fsdp=2 --peer torch torch-branches --out {out}"
    )
    benchmarks["train_step"].main(arguments.split())
    report = json.loads(out.with_suffix(".json").read_text())
    ours = [row for row in report["rows"] if row["by"] == "jaxtrain"]
    torch_row, branches = (row for row in report["rows"] if row["by"] == "PyTorch")
    assert len(ours) == 2 and not any("failed" in row for row in report["rows"])
    for row in ours:
        # However it is run, it is the same step: float32 rounding.
        np.testing.assert_allclose(row["loss"], ours[0]["loss"], rtol=1e-5)
        np.testing.assert_allclose(row["loss_after"], ours[0]["loss_after"], rtol=1e-5)
        assert row["loss_after"] < row["loss"] and row["step_s"] > 0
    np.testing.assert_allclose(branches["loss"], torch_row["loss"], rtol=1e-5)
    assert "elementwise" in out.with_suffix(".txt").read_text()
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_a_small_run_shows_the_kernels_beside_the_reference(benchmarks, tmp_path):
    """On a CPU "auto" is the reference path, so the runs are equal; another order only rounds."""
    out = tmp_path / "parity"
    arguments = f"--model tiny --depth 1 --length 256 --steps 12 --rate 3e-3 --out {out}"
    losses = benchmarks["loss_parity"].main(arguments.split())["losses"]
    assert set(losses) == {"kernels", "xla", "reordered"}
    assert losses["kernels"] == losses["xla"] != losses["reordered"]
    assert losses["xla"][-1] < losses["xla"][0] - 0.1
    # bfloat16 rounds to 4e-3 of a number; a loss of about 6 averages a hundred of them.
    np.testing.assert_allclose(losses["reordered"], losses["xla"], atol=5e-3)
    assert "reordered" in out.with_suffix(".txt").read_text()


def test_a_profile_is_summed_by_kind(benchmarks, tmp_path):
    """A trace of two steps with a kernel of each kind, and one of the host that does not count."""
    events = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 1, "tid": 7, "name": "thread_name", "args": {"name": "Stream #7"}},
        {"ph": "X", "pid": 2, "tid": 7, "name": "nvjet_host", "ts": 0, "dur": 900},
    ]
    names = ("tree_attention_fwd_kernel", "nvjet_sm90", "logp_statistics", "MemcpyD2D", "loop_add")
    for index, name in enumerate(2 * names):
        events.append({"ph": "X", "pid": 1, "tid": 7, "name": name, "ts": index, "dur": 1000})
    with gzip.open(tmp_path / "x.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    table = benchmarks["gpu_profile"].summarize(tmp_path, 2, 3)
    for kind in ("attention forward", "gemm", "head", "copies"):
        assert f"1.00 ms       1 calls  {kind}" in table, table
    assert "5.00 ms in all" in table


@pytest.mark.thorough
def test_lora_and_accumulation_run(benchmarks, monkeypatch):
    monkeypatch.setattr(benchmarks["train_step"], "TIMED", 1)
    arguments = "--model tiny --work tiny-docs --dtype float32 --lora 4 --microsteps 2 --rows 2"
    (row,) = benchmarks["train_step"].main(arguments.split())["rows"]
    assert "failed" not in row and row["loss_after"] < row["loss"]
    assert row["tokens"] == 4 * 207
