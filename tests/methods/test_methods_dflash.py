"""Drafts through the step and whole runs: microsteps, meshes, going on, what is refused."""

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
from jaxtrain.data.packing.pack import build_batch, lay_out
from jaxtrain.data.packing.tree import Node, Tree
from jaxtrain.distributed.feed import feed
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.errors import UserError
from jaxtrain.huggingface.safetensors import SafetensorsFolder
from jaxtrain.main import main
from jaxtrain.methods.registry import make_task
from tests.docs.metric_names import require_rows

ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
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
    "task": {
        "kind": "dflash",
        "block_size": 4,
        "num_anchors": 6,
        "min_loss_tokens": 2,
        "draft": {"num_layers": 2, "target_layers": [2, 0]},
    },
}


def make(**changes):
    """The task of TABLE with changes to some of its sections."""
    merged = {name: {**table, **changes.get(name, {})} for name, table in TABLE.items()}
    return make_task(validate_config(merged, "test"))


def make_batch(task):
    """[1, 4, 40]: packed documents and a tree, prepared for step 3."""
    rng = np.random.default_rng(0)

    def node(length, parent=-1):
        weights = (rng.random(length) < 0.8).astype(np.float64)
        return Node(parent, rng.integers(1, 200, length).astype(np.int32), {"nll": weights})

    tree = Tree((node(8), node(7, 0), node(9, 0), node(5, 2), node(6, 2)))
    lengths = [(21, 15), (30,), (9, 9, 9)]
    rows = [[lay_out(Tree((node(n),))) for n in row] for row in lengths]
    batch = jax.tree.map(lambda x: x[None], build_batch([[lay_out(tree)], *rows], 40))
    (batch,) = task.prepare(Round([batch], version=3), None).batches
    return batch


def update(task, microsteps: int = 1, **axes: int):
    """(metrics, gradient by path) of one step on a mesh of these axes, by default one device."""
    devices = jax.devices()[: math.prod(axes.values())]
    mesh = make_mesh(devices, **axes)
    batch = make_batch(task)
    if microsteps > 1:
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


@pytest.fixture(scope="module")
def single_device():
    return update(make())


def check_same(actual, expected, most: float):
    """Metrics and gradients, relative to the largest of each parameter."""
    for name, (total, weight) in expected[0].items():
        assert np.allclose(actual[0][name], (total, weight), rtol=1e-5), name
    assert actual[1].keys() == expected[1].keys() and len(expected[1]) == 14
    for path, gradient in expected[1].items():
        scale = np.abs(gradient).max()
        assert scale > 0, path
        assert np.abs(actual[1][path] - gradient).max() < most * scale, path


def test_microsteps_are_one_batch(single_device):
    """float32, the order of sums: 3e-6 of the largest gradient."""
    check_same(update(make(), 2), single_device, 3e-6)


@pytest.mark.parametrize(
    "axes",
    [
        {"fsdp": 2, "tensor": 2},
        pytest.param({"fsdp": 2, "context": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "tensor": 2}, marks=pytest.mark.slow),
    ],
    ids="_".join,
)
def test_meshes_are_one_device(single_device, axes):
    """Meshes change nothing either."""
    check_same(update(make(), **axes), single_device, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("weighting", ["dpace", "continuation-value-only"])
def test_other_weightings_are_exact_under_microsteps(weighting):
    task = {**TABLE["task"], "weighting": weighting}
    check_same(update(make(task=task), 2), update(make(task=task)), 3e-6)


CONFIG = (
    MODEL.replace("num_hidden_layers = 1", "num_hidden_layers = 3")
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
kind = "dflash"
block_size = 4
num_anchors = 8
min_loss_tokens = 2

[task.draft]
num_layers = 1
target_layers = [0, 2]

[optim]
learning_rate = 1e-2

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
    return {
        (line["step"], name): value
        for line in lines
        for name, value in line.items()
        if name.startswith(("loss", "acc", "eval/", "grad"))
    }


@pytest.mark.slow
def test_a_run_goes_on_exactly_and_writes_a_draft(tmp_path, capsys):
    rows, config = tmp_path / "rows.jsonl", tmp_path / "config.toml"
    pairs = [{"prompt": f"{n} and", "completion": f" {n + 1} and {n + 2} end"} for n in range(40)]
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    config.write_text(CONFIG.replace("ROWS", str(rows)))
    words = ["--config", str(config), f"run.output_dir={tmp_path / 'run'}"]
    assert main(words) == 0
    first = read_lines(tmp_path / "run")
    written = {n: t.shape for n, t in SafetensorsFolder(tmp_path / "run" / "model").tensors.items()}
    assert written["fc.weight"] == (32, 64) and "embed_tokens.weight" not in written
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    shutil.rmtree(tmp_path / "run" / "model")
    assert main(words) == 0
    again = read_lines(tmp_path / "run")
    assert again.keys() == first.keys() and (4, "eval/accept_len") in first
    assert again == first
    # On from its own folder.
    on = [f"task.draft.path={tmp_path / 'run' / 'model'}", f"run.output_dir={tmp_path / 'on'}"]
    text = config.read_text().replace("num_layers = 1\ntarget_layers = [0, 2]\n", "")
    config.write_text(text)
    assert main(["--config", str(config), *on, "run.max_steps=1"]) == 0
    # A draft is no model.
    for name in ("run/model", "run"):
        assert main(["generate", str(tmp_path / name), "--prompt", "1 + 1"]) == 2
        assert "writes nothing alone" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("changes", "output"),
    [
        ({"draft": {"num_layers": 3}}, "task.draft.target_layers .* names layer . twice"),
        ({"draft": {"target_layers": [0, 3]}}, "3 layers, which count from 0, .* no layer 3"),
        ({"draft": {"target_layers": []}}, "is empty"),
        ({"draft": {"target_layers": [0], "mask_token_id": 512}}, "outside of the target's"),
        ({"draft": {"target_layers": [0], "num_attention_heads": 3}}, "must be a multiple of"),
        (
            {
                "draft": {
                    "target_layers": [0],
                    "layer_types": ["sliding_attention"],
                    "sliding_window": 8,
                }
            },
            "layer_types has 1 entries, the draft 5",
        ),
        ({"draft": {"sliding_window": 8}}, "has no effect without a sliding_attention layer"),
        ({"draft": {"path": "x", "num_layers": 2}}, "is fixed by task.draft.path"),
        ({"draft": {"path": "no/such/draft"}}, "task.draft.path 'no/such/draft'"),
        ({"weighting": "dpace", "decay": 3.0}, "task.decay has no effect"),
        ({"alpha": 0.3}, "task.alpha has no effect"),
    ],
)
def test_what_is_refused(changes, output):
    with pytest.raises(UserError, match=output):
        make(task={**TABLE["task"], "draft": {}, **changes})


def test_an_adapter_that_would_be_trained_is_refused():
    with pytest.raises(UserError, match="the target of a draft is not trained"):
        merged = {**TABLE, "adapter": {"kind": "lora"}}
        validate_config(merged, "test")
