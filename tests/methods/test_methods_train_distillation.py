"""Distillation as a task: conflicts, teachers that are refused, exactness on trees, whole runs."""

import json

import jax
import numpy as np
import pytest
from toy_run import MODEL

from jaxtrain.config import load_config
from jaxtrain.core.evaluation import average_batches
from jaxtrain.core.roles import ModelSnapshot, Roles
from jaxtrain.core.step import make_eval
from jaxtrain.data.packing.pack import Fields, build_batch, lay_out
from jaxtrain.data.packing.tree import Node, Tree, chain
from jaxtrain.errors import UserError
from jaxtrain.main import main
from jaxtrain.methods.distillation.loss import COMPONENT, OWN
from jaxtrain.methods.registry import make_task
from tests.docs.metric_names import require_rows

MODEL = MODEL.replace("max_position_embeddings = 64", "max_position_embeddings = 512")
TEACHER = """
[task.teacher]
tokenizer = "builtin"
compute_dtype = "float32"
architecture = { architectures = ["Qwen3ForCausalLM"], model_type = "qwen3", vocab_size = 520, \
hidden_size = 24, intermediate_size = 32, num_hidden_layers = 1, num_attention_heads = 1, \
num_key_value_heads = 1, head_dim = 16, max_position_embeddings = 512 }
"""
DATA = """
[run]
max_steps = 2
[data]
sequence_len = 384
[[data.datasets]]
path = "builtin:calculator"
options = { num_rows = 64 }
"""
TASK = '[task]\nkind = "distillation"\n'


def load(tmp_path, *parts, overrides=()):
    path = tmp_path / "run.toml"
    path.write_text("\n".join([MODEL, DATA, *parts]))
    return load_config(path, [f"run.output_dir={tmp_path}/run", *overrides])


CONFLICTS = {
    "needs either path": (TASK,),
    "set task.top_k": (TASK, '[task.teacher]\nkind = "data"'),
    "needs task.teacher.url": (TASK, 'top_k = 5\n[task.teacher]\nkind = "server"'),
    "nothing would ever change": (TASK, '[task.teacher]\nkind = "start"'),
    "set adapter.kind": (TASK, 'ce_weight = 1.0\n[task.teacher]\nkind = "self"'),
    "rest is for|which is unset": (TASK, 'rest = "renormalize"', TEACHER),
    "would be infinite": (TASK, 'rest = "teacher"\ntop_k = 5\nbeta = 0.5', TEACHER),
    "does not know": (TASK, 'temperature = 2.0\ntop_k = 5\n[task.teacher]\nkind = "data"'),
    "leaves none": (TASK, "ce_weight = 1.0\non_policy_share = 1.0", TEACHER),
    "cannot judge": (TASK, 'on_policy_share = 0.5\ntop_k = 5\n[task.teacher]\nkind = "data"'),
    "draws answers at random": (TASK, "on_policy_share = 0.5", TEACHER),
    "has no effect while task.on_policy_share is 0": (TASK, TEACHER, "[rollout]\ngroup_size = 2"),
    "no effect with kind": (TASK, "ce_weight = 1.0", TEACHER, 'kind = "start"'),
}


@pytest.mark.parametrize("actual", CONFLICTS)
def test_conflicts_are_told(tmp_path, actual):
    with pytest.raises(UserError, match=actual):
        load(tmp_path, *CONFLICTS[actual])


def test_a_teacher_that_reads_other_tokens_is_refused(tmp_path, monkeypatch):
    """By the first id that differs; a shorter context than the rows' is refused as well."""
    from jaxtrain.methods.distillation import method as distillation

    config = load(tmp_path, TASK, TEACHER)
    make_task(config)
    real = distillation.find_tokenizer(config.task.teacher)

    class Other:
        def get_vocab(self):
            return {("odd" if i == 301 else token): i for token, i in real.get_vocab().items()}

    with monkeypatch.context() as patch:
        patch.setattr(distillation, "find_tokenizer", lambda model: Other())
        with pytest.raises(
            UserError, match=r"1 of 5?\d\d ids differ, the first of them 301.*'odd'"
        ):
            make_task(config)
    with pytest.raises(UserError, match="longer than the teacher's max_position_embeddings 256"):
        make_task(load(tmp_path, TASK, TEACHER.replace("embeddings = 512", "embeddings = 256")))


@pytest.mark.slow
def test_a_tree_has_the_loss_and_gradients_of_its_branches(tmp_path):
    """A prompt with two answers packed once against two flat rows, in float64, with tables padded
    to different sizes; metrics tell own tokens from given ones."""
    overrides = [
        "model.compute_dtype=float64",
        "model.param_dtype=float64",
        "task.teacher.param_dtype=float64",
        "task.teacher.compute_dtype=float64",
        "task.beta=0.3",
        "task.ce_weight=0.5",
    ]
    with jax.enable_x64(True):
        task = make_task(load(tmp_path, TASK, TEACHER, overrides=overrides))
        roles = Roles(task.roles)
        with jax.set_mesh(task.mesh):
            params, frozen, _ = roles.open(0)
            fields = Fields((COMPONENT,), {OWN: np.float64}, dtype=np.float64)

            def node(parent, tokens, trains, local_value):
                n = len(tokens)
                return Node(
                    parent,
                    np.array(tokens, np.int32),
                    {COMPONENT: np.full(n, float(trains))},
                    {OWN: np.full(n, float(local_value))},
                )

            prompt, answers = [5, 6, 7], ([8, 9], [10, 11, 12])
            root = node(-1, prompt, 0, 0)
            tree = Tree((root, *(node(0, a, 1, i) for i, a in enumerate(answers))))
            flat = []
            for i, answer in enumerate(answers):
                weights = np.array([0.0] * 3 + [1.0] * len(answer))
                entry = chain(np.array(prompt + answer, np.int32), {COMPONENT: weights})
                local_value = {OWN: np.full(len(weights), float(i))}
                flat.append(
                    Tree((Node(-1, entry.nodes[0].tokens, entry.nodes[0].weights, local_value),))
                )
            packed = build_batch([[lay_out(tree, "branch")], []], 16, fields)
            apart = build_batch([[lay_out(entry, "branch")] for entry in flat], 16, fields)

            @jax.jit
            def run(params, batch):
                def total(params):
                    sums, metrics = task.loss(roles.build({**frozen, **params}), batch)
                    return sums[COMPONENT], metrics

                return jax.value_and_grad(total, has_aux=True)(params)

            (loss, metrics), grads = run(params, packed)
            (expected, peers), flat_grads = run(params, apart)
        np.testing.assert_allclose(loss, expected, rtol=1e-10)
        assert metrics["jsd/own"][1] == 3 and metrics["jsd/data"][1] == 2
        for name, (value, weight) in metrics.items():
            np.testing.assert_allclose(value, peers[name][0], rtol=1e-9, err_msg=name)
            np.testing.assert_allclose(weight, peers[name][1], err_msg=name)
        for path, grad in grads.items():
            np.testing.assert_allclose(grad, flat_grads[path], rtol=1e-8, atol=1e-12, err_msg=path)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.thorough
def test_half_own_answers(tmp_path):
    """A whole run without any reward: own and given answers, held-out rows, a resumable cursor."""
    config = tmp_path / "run.toml"
    draws = """
[rollout]
prompts_per_step = 6
group_size = 2
max_batch = 8
[sampling]
temperature = 1.0
max_new_tokens = 8
[[data.eval_datasets]]
path = "builtin:calculator"
split = "test"
options = { num_rows = 8 }
[optim]
learning_rate = 1e-2
"""
    config.write_text("\n".join([MODEL, DATA, TASK, "on_policy_share = 0.5", TEACHER, draws]))
    main(["--config", str(config), f"run.output_dir={tmp_path}/run", "eval.at_start=true"])
    require_rows(tmp_path / "run")
    lines = read(tmp_path / "run/metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    evals = [line for line in lines if "eval/kl" in line]
    assert len(steps) == 2 and evals[-1]["eval/kl"] < evals[0]["eval/kl"]
    assert all(0 < line["own_token_share"] < 1 for line in steps)
    assert all(line["kl/own"] > 0 and line["kl/data"] > 0 for line in steps)
    assert all("reward" not in line for line in steps)


@pytest.mark.slow
def test_scored_rows_teach_as_their_model_does(tmp_path):
    """`score --top-k` writes what teacher.kind "data" reads; over all ids the loss on it is that of
    the model itself, but for the digits that are written."""
    rows = [{"prompt": f"{n} and ", "completion": f"{n + 1}"} for n in range(12)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    teacher = tmp_path / "teacher.toml"
    source = f'[data]\nsequence_len = 64\n[[data.datasets]]\npath = "{data}"\n'
    end = "[run]\nmax_steps = 1\n[optim]\nlearning_rate = 1e-2\n"
    teacher.write_text("\n".join([MODEL, source, end]))
    created = make_task(config := load_config(teacher))
    roles = Roles(created.roles)
    model, taught = tmp_path / "model", tmp_path / "taught.jsonl"
    model.mkdir()
    with jax.set_mesh(created.mesh):
        created.export(ModelSnapshot(roles, roles.open(0)[0], 0), config, model)
    main(["score", str(model), str(data), "--top-k", "512", "--output", str(taught)])
    first = read(taught)[0]
    assert len(first["target_logprobs"]) == len(first["target_token_ids"]) < len(first["input_ids"])
    losses = []
    for kind, task, path in (
        ("model", f'path = "{model}"\nparam_dtype = "float32"\ncompute_dtype = "float32"', data),
        ("data", 'kind = "data"', taught),
    ):
        top = 'top_k = 512\nrest = "renormalize"' if kind == "data" else ""
        held = f'[[data.eval_datasets]]\npath = "{path}"\n'
        created = tmp_path / f"{kind}.toml"
        created.write_text("\n".join([MODEL, source, held, end, TASK, top, "[task.teacher]", task]))
        actual = make_task(config := load_config(created))
        roles = Roles(actual.roles)
        with jax.set_mesh(actual.mesh):
            trained, frozen, _ = roles.open(1)
            batches = actual.data.eval_batches(config.data.eval_datasets[0], roles.bundle)
            run = make_eval(roles.build, actual.loss)
            losses.append(average_batches(run, {**frozen, **trained}, batches, actual.mesh)["kl"])
    assert losses[0] > 0.01
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-3)
