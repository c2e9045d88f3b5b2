"""Eagle3 as a task: its vocabulary, exact steps, what is refused, whole runs and their exports."""

import dataclasses
import json

import jax
import numpy as np
import optax
import pytest
from toy_run import MODEL

from jaxtrain.config import load_config
from jaxtrain.core.roles import ModelSnapshot, Roles
from jaxtrain.core.step import init_state, make_step
from jaxtrain.data.packing.tree import Node, Tree
from jaxtrain.distributed.feed import feed
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.errors import UserError
from jaxtrain.huggingface.safetensors import SafetensorsFolder
from jaxtrain.main import main
from jaxtrain.methods.drafts.eagle3_method import label_guesses
from jaxtrain.methods.drafts.frequency import add_counts, keep_frequent
from jaxtrain.methods.registry import make_task
from jaxtrain.models import eagle3, families, loading, saving
from jaxtrain.models.parameters import split_model
from tests.docs.metric_names import require_rows

MODEL = MODEL.replace("num_hidden_layers = 1", "num_hidden_layers = 3")
RUN = """
[run]
max_steps = 4
[data]
sequence_len = 48
micro_batch_size = 1
[[data.datasets]]
path = "DATA"
[[data.eval_datasets]]
path = "DATA"
[optim]
learning_rate = 1e-2
lr_scheduler = "constant"
[checkpoint]
every = 2
[task]
kind = "eagle3"
length = 2
draft_vocab_size = 300
[task.draft]
target_layers = [0, 2, 1]
"""


def load(tmp_path, *overrides, text="the cat sat on the mat and the dog ate it all"):
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": f"{i} {text[i:]}"},
            ]
        }
        for i in range(12)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    path = tmp_path / "run.toml"
    path.write_text(MODEL + RUN.replace("DATA", str(data)))
    return path, load_config(path, [f"run.output_dir={tmp_path}/run", *overrides])


REFUSED = {
    "is more than the 512 tokens": ["task.draft_vocab_size=513"],
    "not three different ones for L = 3": ["task.draft.target_layers=none"],
    "names layer 1 twice": ["task.draft.target_layers=[0,1,1]"],
    "there is no layer 3": ["task.draft.target_layers=[0,1,3]"],
    "an Eagle3 draft has one": ["task.draft.num_layers=2"],
    "no meaning for an Eagle3": [
        "task.draft.sliding_window=8",
        'task.draft.layer_types=["sliding_attention"]',
    ],
    "task.kl_decay has no effect while task.loss is soft": ["task.kl_decay=1.0"],
}


@pytest.mark.parametrize("actual", REFUSED)
def test_what_cannot_be_is_refused(tmp_path, actual):
    provided = [word for word in REFUSED[actual] if not word.endswith("=none")]
    path, _ = load(tmp_path)
    if provided != REFUSED[actual]:
        path.write_text(path.read_text().replace("target_layers = [0, 2, 1]", ""))
    with pytest.raises(UserError, match=actual):
        make_task(load_config(path, provided))


def test_short_samples_leave_nothing(tmp_path):
    """Expect an error rather than a loss of 0."""
    _, config = load(tmp_path, "task.min_loss_tokens=500")
    task = make_task(config)
    with pytest.raises(UserError, match="min_loss_tokens 500"):
        list(task.data.check())
        rounds = task.data.open(Roles(task.roles).bundle, print)
        try:
            next(rounds.source)
        finally:
            rounds.close()


def test_the_vocabulary_is_what_is_trained_most():
    """Trained tokens alone, ties and unseen ids by number; the root is predicted by nobody."""

    def node(parent, tokens, weights):
        return Node(parent, np.array(tokens, np.int32), {"nll": np.array(weights, np.float32)})

    tree = Tree((node(-1, [7, 5, 5], [1, 1, 1]), node(0, [3, 9], [1, 0]), node(0, [8, 3], [2, 1])))
    counts = np.zeros(12, np.int64)
    add_counts(counts, [tree])
    assert counts.tolist() == [0, 0, 0, 2, 0, 2, 0, 0, 1, 0, 0, 0]
    assert keep_frequent(counts, 2).tolist() == [3, 5]
    assert keep_frequent(counts, 1).tolist() == [3]
    assert keep_frequent(counts, 5).tolist() == [0, 1, 3, 5, 8]


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """(task, roles, weights, kept ids, batches of 4 rows) of a config in float64."""
    tmp_path = tmp_path_factory.mktemp("eagle3")
    with jax.enable_x64():
        _, config = load(
            tmp_path,
            "model.param_dtype=float64",
            "model.compute_dtype=float64",
            "task.draft.param_dtype=float64",
        )
        task = make_task(config)
        roles = Roles(task.roles)
        weights = [{path: np.asarray(x) for path, x in part.items()} for part in roles.open(3)]
        source = task.data.open(roles.bundle, print)
        batch = next(source.source)[0]
        source.close()
        return task, roles, weights, label_guesses(batch, np.random.default_rng(0))


def one_step(task, roles, weights, batch):
    """({metric: mean}, {path: gradient}) of a step of plain descent."""
    trained, frozen, copies = (
        {path: jax.device_put(np.asarray(x), shapes[path].sharding) for path, x in part.items()}
        for part, shapes in zip(
            weights, (roles.trained_shapes, roles.frozen_shapes, roles.copy_shapes), strict=True
        )
    )
    optimizer = optax.sgd(1.0)
    step = make_step(roles.build, task.loss, task.coef, optimizer, None)
    with jax.set_mesh(roles.bundle.mesh):
        state, output = step(
            init_state(trained, optimizer, copies), feed(batch, roles.bundle.mesh), frozen
        )
    np.testing.assert_array_equal(state.copies["kept"], weights[2]["kept"])
    grads = {path: weights[0][path] - np.asarray(x) for path, x in state.params.items()}
    return {name: np.asarray(s) / np.asarray(w) for name, (s, w) in output.metrics.items()}, grads


def same(entry, second, rtol):
    for name in entry[0]:
        np.testing.assert_allclose(entry[0][name], second[0][name], rtol=rtol, err_msg=name)
    for path, grad in entry[1].items():
        scale = np.abs(grad).max()
        assert scale > 0, path
        np.testing.assert_allclose(grad, second[1][path], atol=rtol * scale, err_msg=path)


def on_mesh(task, count, **sizes):
    """The task's roles on so many devices."""
    mesh = make_mesh(jax.devices()[:count], **sizes)
    return Roles(
        {
            name: dataclasses.replace(role, bundle=dataclasses.replace(role.bundle, mesh=mesh))
            for name, role in task.roles.items()
        }
    )


@pytest.mark.thorough
def test_microsteps_and_meshes_change_nothing(opened):
    """A step of 4 rows on one device, 4 times 1 row, 4 devices: the same loss and gradients."""
    task, _, weights, batch = opened
    with jax.enable_x64():
        entry = on_mesh(task, 1)
        full = one_step(task, entry, weights, batch)
        assert full[0]["loss"] > 0 and full[0]["kept"] > 0
        parts = jax.tree.map(lambda x: x.reshape(4, 1, *x.shape[2:]), batch._replace(denoms={}))
        parts = parts._replace(denoms={k: np.repeat(v, 4) for k, v in batch.denoms.items()})
        same(full, one_step(task, entry, weights, parts), 1e-9)
        for sizes in ({"fsdp": 2, "tensor": 2}, {"context": 2, "fsdp": 2}):
            same(full, one_step(task, on_mesh(task, 4, **sizes), weights, batch), 1e-9)


@pytest.mark.slow
def test_kept_tables_are_saved_and_never_trained(opened, tmp_path):
    """d2t, t2d and every name and dtype of the export; loading it gives the same model."""
    task, roles, weights, _ = opened
    with jax.enable_x64():
        array = np.asarray(weights[2]["kept"])
        assert array.dtype == np.int32 and (np.diff(array) > 0).all() and len(array) == 300
        assert "kept" not in weights[0]
        held = ModelSnapshot(roles, {**weights[1], **weights[2], **weights[0]}, 0)
        config = roles.bundle.architecture
        saving.save(held.model(), config, tmp_path, dtype="bfloat16")
    stored = SafetensorsFolder(tmp_path).tensors
    D, P = 32, 300
    shapes = {
        "fc.weight": (D, 3 * D), "norm.weight": (D,), "lm_head.weight": (P, D),
        "d2t": (P,), "t2d": (512,),
        "midlayer.hidden_norm.weight": (D,), "midlayer.input_layernorm.weight": (D,),
        "midlayer.post_attention_layernorm.weight": (D,),
        "midlayer.self_attn.q_proj.weight": (32, 2 * D),
        "midlayer.self_attn.k_proj.weight": (16, 2 * D),
        "midlayer.self_attn.v_proj.weight": (16, 2 * D),
        "midlayer.self_attn.o_proj.weight": (D, 32),
        "midlayer.mlp.gate_proj.weight": (64, D), "midlayer.mlp.up_proj.weight": (64, D),
        "midlayer.mlp.down_proj.weight": (D, 64),
    }  # fmt: skip
    assert {name: entry.shape for name, entry in stored.items()} == shapes
    files = SafetensorsFolder(tmp_path)
    read = lambda name: files.fetch(name, tuple(slice(0, n) for n in shapes[name]))  # noqa: E731
    d2t, t2d = read("d2t"), read("t2d")
    assert d2t.dtype == np.int64 and t2d.dtype == bool
    np.testing.assert_array_equal(np.arange(P) + d2t, array)
    np.testing.assert_array_equal(np.flatnonzero(t2d), array)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"] and raw["draft_vocab_size"] == P
    assert raw["eagle_aux_hidden_state_layer_ids"] == [1, 3, 2]  # vLLM: what comes before them
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 1]  # SGLang: output
    assert raw["torch_dtype"] == "bfloat16"
    again = loading.load(tmp_path)
    np.testing.assert_array_equal(again.kept[...], array)
    for path, value in split_model(again)[0].items():
        expected = np.asarray(split_model(held.model())[0][path])
        np.testing.assert_allclose(value, expected, rtol=2**-8, err_msg=path)
    assert families.read_config(tmp_path) == config


def test_configs_from_elsewhere():
    """SpecForge's, whose head is said to be tied; another's d2t; drafts that are not supported."""
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 32,
        "vocab_size": 60, "draft_vocab_size": 20, "num_hidden_layers": 1, "intermediate_size": 48,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu",
        "tie_word_embeddings": True, "max_window_layers": 36, "use_sliding_window": False,
        "rope_theta": 1e6, "rope_scaling": None, "rms_norm_eps": 1e-6,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
    }  # fmt: skip
    config = families.config_from_hf(raw)
    assert (config.capture, config.length, config.prunes) == ((1, 3, 5), 7, True)
    behind = {**raw, "eagle_config": None, "eagle_aux_hidden_state_layer_ids": [2, 4, 6]}
    assert families.config_from_hf(behind).capture == (1, 3, 5)
    for change, actual in (
        ({"eagle_config": {}}, "does not list the layers"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"num_hidden_layers": 2}, "has one"),
        ({"target_hidden_size": 64}, "reads the target's embedding"),
        ({"draft_vocab_size": 61}, "at most all 60"),
        ({"eagle_config": {**raw["eagle_config"], "ttt_length": "x"}}, "ttt_length"),
    ):
        with pytest.raises(UserError, match=actual):
            families.config_from_hf({**raw, **change})
    full = eagle3.names(families.config_from_hf({**raw, "draft_vocab_size": 60}))
    assert "kept" not in {entry.param for entry in full}


@pytest.mark.slow
def test_runs_resume_exactly_and_go_on_from_an_export(tmp_path, capsys):
    """Steps 1 to 4 against 1 to 2 and, in a second start, 3 to 4: the same bytes; the vocabulary
    is counted once. The export is a start of its own."""
    path, _ = load(tmp_path)
    assert main(["--config", str(path), f"run.output_dir={tmp_path}/whole"]) == 0
    cut = ["--config", str(path), f"run.output_dir={tmp_path}/cut"]
    assert main([*cut, "run.max_steps=2"]) == 0
    assert "the draft can say 300 of 512 tokens" in capsys.readouterr().out
    assert main(cut) == 0
    assert "the draft can say" not in capsys.readouterr().out
    full, resumed = (tmp_path / name / "model" / "model.safetensors" for name in ("whole", "cut"))
    assert full.read_bytes() == resumed.read_bytes()
    fixed = ("draft_vocab_size = 300", "target_layers = [0, 2, 1]")
    text = path.read_text()
    for line in fixed:
        text = text.replace(line, "")
    path.write_text(text)
    again = ["--config", str(path), f"run.output_dir={tmp_path}/again", "run.max_steps=1"]
    assert main([*again, f"task.draft.path={tmp_path}/whole/model"]) == 0
    again, first = (tmp_path / name / "model" / "config.json" for name in ("again", "whole"))
    assert json.loads(again.read_text()) == json.loads(first.read_text())
    require_rows(tmp_path / "whole")
    lines = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    steps = [actual for line in lines if "loss" in (actual := json.loads(line))]
    assert {"acc/1", "acc/2", "accept_len", "kept", "overlap"} <= set(steps[-1])
