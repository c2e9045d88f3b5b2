"""Steps and whole runs of a method's task: one batch on any mesh, metrics of runs that go on."""

import json
import math
from dataclasses import replace

import jax
import numpy as np
import optax
from toy_run import MODEL

from jaxtrain.config.load import validate_config
from jaxtrain.core.roles import ModelSnapshot, Roles
from jaxtrain.core.scorer import Scorer
from jaxtrain.core.step import init_state, make_step
from jaxtrain.core.task import Round
from jaxtrain.distributed.feed import feed
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.methods.registry import make_task
from tests.docs.metric_names import require_rows

ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
KEEP_GRADIENTS = optax.GradientTransformation(
    lambda params: jax.tree.map(jax.numpy.zeros_like, params),
    lambda grads, state, params: (jax.tree.map(jax.numpy.zeros_like, params), grads),
)
"""An optimizer that changes nothing and whose state is the last gradient."""


def make_table(task: dict, num_layers: int, sequence_len: int) -> dict:
    """A config's table for steps of a method."""
    architecture = ARCHITECTURE | {"num_hidden_layers": num_layers}
    return {
        "run": {"max_steps": 4, "output_dir": "unused"},
        "model": {"architecture": architecture, "tokenizer": "builtin", "compute_dtype": "float32"},
        "parallel": {"data": 1, "fsdp": -1},
        "data": {"sequence_len": sequence_len, "datasets": [{"path": "builtin:calculator"}]},
        "task": task,
    }


def merge(table: dict, changes: dict):
    """The task of a table with changes to some of its sections."""
    names = {*table, *changes}
    merged = {name: {**table.get(name, {}), **changes.get(name, {})} for name in names}
    return make_task(validate_config(merged, "test"))


def update(task, batch, microsteps: int = 1, version: int = 3, scored: bool = False, **axes: int):
    """(metrics, gradient by path, the prepared batch) of one step on a mesh of these axes, by
    default one device. scored: the batch is cut into microsteps before it is prepared, by a scorer.
    """
    mesh = make_mesh(jax.devices()[: math.prod(axes.values())], **axes)
    if scored:
        batch = cut(batch, microsteps)
    ready, roles, trained, frozen = prepare(task, batch, version, mesh)
    if not scored:
        ready = cut(ready, microsteps)
    with jax.set_mesh(mesh):
        step = make_step(roles.build, task.loss, task.coef, KEEP_GRADIENTS, None)
        state, output = step(init_state(trained, KEEP_GRADIENTS), feed(ready, mesh), frozen)
    return *jax.device_get((output.metrics, state.opt_state)), jax.device_get(ready)


def prepare(task, batch, version: int = 3, mesh=None):
    """(the batch as the task prepares it, roles, their trained and frozen parameters)."""
    mesh = mesh or make_mesh(jax.devices()[:1])
    bundles = {name: replace(role.bundle, mesh=mesh) for name, role in task.roles.items()}
    roles = Roles({n: replace(role, bundle=bundles[n]) for n, role in task.roles.items()})
    with jax.set_mesh(mesh):
        trained, frozen, _ = roles.open(0)
        scorer = Scorer(lambda: ModelSnapshot(roles, {**frozen, **trained}, 0))
        (ready,) = task.prepare(Round([batch], version=version), scorer).batches
    return ready, roles, trained, frozen


def cut(batch, microsteps: int):
    """[1, B, T] -> [microsteps, B / microsteps, T], with denominators of the whole."""
    denoms = {name: np.repeat(value, microsteps) for name, value in batch.denoms.items()}
    parts = jax.tree.map(
        lambda x: x.reshape(microsteps, -1, *x.shape[2:]), batch._replace(denoms={})
    )
    return parts._replace(denoms=denoms)


def check_same(actual, expected, most: float, rtol: float = 1e-5, atol: float = 1e-8):
    """Metrics, and gradients relative to the largest of each parameter."""
    for name, (total, weight) in expected[0].items():
        assert np.allclose(actual[0][name], (total, weight), rtol=rtol, atol=atol), name
    assert actual[1].keys() == expected[1].keys()
    for path, gradient in expected[1].items():
        scale = np.abs(gradient).max()
        assert scale > 0, path
        assert np.abs(actual[1][path] - gradient).max() < most * scale, path


def run_config(task: str, num_layers: int, data: str = "") -> str:
    """The config of a whole run; ROWS stands for the path of its rows, which are held out, too."""
    return f"""{MODEL.replace("num_hidden_layers = 1", f"num_hidden_layers = {num_layers}")}
[run]
seed = 3
max_steps = 4
[data]
sequence_len = 64
micro_batch_size = 2
{data}
[[data.datasets]]
path = "ROWS"
[[data.eval_datasets]]
path = "ROWS"
{task}
[optim]
learning_rate = 1e-2
[checkpoint]
every = 2
[log]
every = 1
plot = false
"""


def write_run(folder, config: str, completion: str) -> list[str]:
    """Write rows and config, and return the command's words; completion: of a number's successors,
    as " {0} and {1} end"."""
    rows, path = folder / "rows.jsonl", folder / "config.toml"
    pairs = [
        {"prompt": f"{n} and", "completion": completion.format(n + 1, n + 2)} for n in range(40)
    ]
    rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    path.write_text(config.replace("ROWS", str(rows)))
    return ["--config", str(path), f"run.output_dir={folder / 'run'}"]


def read_metrics(folder, *prefixes: str) -> dict[tuple[int, str], float]:
    """{(step, name): value} of a run's metrics whose names begin so."""
    require_rows(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {
        (line["step"], name): value
        for line in lines
        for name, value in line.items()
        if name.startswith(prefixes)
    }
