"""Masked diffusion through the step and whole runs: meshes, going on, folders, what is refused."""

import json
import math
import shutil
from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from toy_run import MODEL

from jaxtrain.config.load import validate_config
from jaxtrain.core.roles import Roles
from jaxtrain.core.step import init_state, make_step
from jaxtrain.core.task import Round
from jaxtrain.data.packing.pack import Fields, build_batch, lay_out
from jaxtrain.data.packing.tree import chain
from jaxtrain.distributed.feed import feed
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.methods.registry import make_task
from tests.docs.metric_names import require_rows

ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
TABLE = {
    "run": {"max_steps": 4, "output_dir": "unused"},
    "model": {"architecture": ARCHITECTURE, "tokenizer": "builtin", "compute_dtype": "float32"},
    "parallel": {"data": 1, "fsdp": -1},
    "data": {"sequence_len": 40, "datasets": [{"path": "builtin:calculator"}]},
    "task": {"kind": "diffusion"},
}


def make(**changes):
    """The task of TABLE with changes to some of its sections."""
    merged = {name: {**TABLE.get(name, {}), **changes.get(name, {})} for name in {*TABLE, *changes}}
    return make_task(validate_config(merged, "test"))


def make_batch(task):
    """[1, 4, 40]: packed documents, masked for step 3."""
    rng = np.random.default_rng(0)

    def document(length):
        weights = (rng.random(length) < 0.8).astype(np.float64)
        return lay_out(chain(rng.integers(1, 200, length).astype(np.int32), {"nll": weights}))

    lengths = [(21, 15), (30,), (9, 9, 9), (40,)]
    batch = build_batch([[document(n) for n in row] for row in lengths], 40, Fields(since=True))
    batch = jax.tree.map(lambda x: x[None], batch)
    (batch,) = task.prepare(Round([batch], version=3), None).batches
    return batch


def update(task, microsteps: int = 1, **axes: int):
    """(metrics, gradient by path) of one step on a mesh of these axes, by default one device."""
    devices = jax.devices()[: math.prod(axes.values())]
    mesh = make_mesh(devices, **axes)
    batch = make_batch(task)
    wide = batch.denoms
    batch = jax.tree.map(
        lambda x: x.reshape(microsteps, -1, *x.shape[2:]), batch._replace(denoms={})
    )
    batch = batch._replace(denoms={k: np.repeat(v, microsteps) for k, v in wide.items()})
    roles = Roles(
        {n: replace(r, bundle=replace(r.bundle, mesh=mesh)) for n, r in task.roles.items()}
    )
    keep = optax.GradientTransformation(
        lambda params: jax.tree.map(jax.numpy.zeros_like, params),
        lambda grads, state, params: (jax.tree.map(jax.numpy.zeros_like, params), grads),
    )
    with jax.set_mesh(mesh):
        trained, frozen, _ = roles.open(0)
        step = make_step(roles.build, task.loss, task.coef, keep, None)
        state, output = step(init_state(trained, keep), feed(batch, mesh), frozen)
    return jax.device_get((output.metrics, state.opt_state))


@pytest.mark.slow
def test_microsteps_and_meshes_are_one_batch_on_one_device():
    """float32, the order of sums: 1e-5 of the largest gradient. (That the masks are the same for
    any microsteps: test_data_masks.)"""
    task = make()
    expected = update(task)
    for actual in (update(task, 2), update(task, fsdp=2, context=2)):
        for name, (total, weight) in expected[0].items():
            assert np.allclose(actual[0][name], (total, weight), rtol=1e-5), name
        for path, gradient in expected[1].items():
            scale = np.abs(gradient).max()
            assert scale > 0, path
            assert np.abs(actual[1][path] - gradient).max() < 1e-5 * scale, path


def test_the_embedding_grows_for_a_new_mask_and_exports_say_so():
    task = make()
    parts = task.roles["policy"].bundle
    assert parts.architecture.vocab_size == 513 and parts.architecture.grown == 1
    raw = parts.architecture.to_hf()
    assert raw["mask_token_id"] == 512 and raw["vocab_size"] == 513
    assert raw["jaxtrain_task"] == {"kind": "diffusion", "shift": True, "mask_token_id": 512}
    assert "grows from 512 to 513" in task.data.note
    larger = make(model={"architecture": {**ARCHITECTURE, "vocab_size": 520}})
    assert larger.roles["policy"].bundle.architecture.vocab_size == 520
    with pytest.raises(UserError, match="adapter"):
        make(adapter={"kind": "lora"})


def test_what_cannot_work_is_refused():
    for changes, output in (
        (
            {"task": {"kind": "diffusion", "min_mask_ratio": 0.5, "max_mask_ratio": 0.4}},
            "not above",
        ),
        ({"task": {"kind": "diffusion", "mask_token_id": 1, "mask_token": "a"}}, "keep one"),
        ({"task": {"kind": "diffusion", "padding": 40}}, "not below"),
        ({"sampling": {"top_p": 0.9}}, "sampling.top_p"),
    ):
        with pytest.raises(UserError, match=output):
            make(**changes)


CONFIG = (
    MODEL
    + """
[run]
seed = 3
max_steps = 4

[data]
sequence_len = 64
micro_batch_size = 2
cache = false

[[data.datasets]]
path = "ROWS"

[[data.eval_datasets]]
path = "ROWS"

[task]
kind = "diffusion"
block_length = 4
padding = 3

[sampling]
max_new_tokens = 8

[optim]
learning_rate = 1e-2
lr_scheduler = "constant"

[checkpoint]
every = 2

[log]
every = 1
plot = false
"""
)


def read_lines(folder):
    require_rows(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    retained = ("loss", "accuracy", "bound", "mask", "eval/", "grad")
    return {
        (line["step"], name): value
        for line in lines
        for name, value in line.items()
        if name.startswith(retained)
    }


@pytest.mark.slow
def test_a_run_goes_on_exactly_and_its_folder_says_what_it_is(tmp_path, capsys):
    rows, config = tmp_path / "rows.jsonl", tmp_path / "config.toml"
    pairs = [{"prompt": f"{n} and", "completion": f" {n + 1}"} for n in range(40)]
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config.write_text(CONFIG.replace("ROWS", str(rows)))
    words = ["--config", str(config), f"run.output_dir={tmp_path / 'run'}"]
    assert main(words) == 0
    lines = read_lines(tmp_path / "run")
    assert {name for _, name in lines} >= {"loss", "accuracy", "bound", "mask_ratio", "eval/loss"}
    shutil.rmtree(tmp_path / "run")
    assert main([*words, "run.max_steps=2"]) == 0 and main(words) == 0
    again = read_lines(tmp_path / "run")
    for key in [key for key in lines if key[0] > 2]:
        assert again[key] == lines[key], key

    folder = tmp_path / "run" / "model"
    assert json.loads((folder / "config.json").read_text())["mask_token_id"] == 512
    capsys.readouterr()
    actual = []
    for name in (tmp_path / "run", folder):
        output = tmp_path / "answers.jsonl"
        provided = ["--prompt", "[3, 4, 5]", "--ids", "--output", str(output), "--overwrite"]
        assert main(["generate", str(name), "sampling.max_new_tokens=8", *provided]) == 0
        actual.append(json.loads(output.read_text())["completion_ids"])
    assert actual[0] == actual[1] and 0 < len(actual[0]) <= 8

    causal = tmp_path / "causal.toml"
    rest = CONFIG.split("[run]")[1].split("[task]")[0].replace("ROWS", str(rows))
    causal.write_text(f'[model]\npath = "{folder}"\n[run]\noutput_dir = "x"\n{rest}')
    refused = {"predicts no next token; set task.kind to it": ["--config", str(causal)]}
    refused["texts have no log-probs"] = ["score", str(folder), str(rows), "--top-k", "2"]
    refused["texts have no log-probs"] += ["--output", str(tmp_path / "scores.jsonl")]
    for printed, bad in refused.items():
        assert main(bad) == 2
        assert printed in capsys.readouterr().err
