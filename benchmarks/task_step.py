"""The training step of a config, as the loop runs it, on rows of random tokens."""

import time
from pathlib import Path

import jax
import numpy as np
from harness import compile_step

from jaxtrain.batch import Batch
from jaxtrain.config.load import validate_config
from jaxtrain.core.optimizer import build_optimizer, build_schedule
from jaxtrain.core.roles import ModelSnapshot, Roles
from jaxtrain.core.scorer import Scorer
from jaxtrain.core.step import init_state, make_step
from jaxtrain.core.task import Round
from jaxtrain.data.packing.pack import build_batch, lay_out, stack_batches
from jaxtrain.data.packing.tree import chain
from jaxtrain.distributed.feed import feed
from jaxtrain.methods.registry import make_task


class TaskStep:
    """A task with its models, optimizer state and step on the devices."""

    def __init__(self, table: dict, script: str):
        config = validate_config(table, Path(script).name)
        self.task = make_task(config)
        self.roles, self.mesh = Roles(self.task.roles), self.task.mesh
        with jax.set_mesh(self.mesh):
            trained, self.frozen, copies = self.roles.open(0)
            optimizer = build_optimizer(config.optim, build_schedule(config.optim, 1000), trained)
            self.state = init_state(trained, optimizer, copies)
        coef, grad_norm = self.task.coef, config.optim.max_grad_norm
        self.step = make_step(self.roles.build, self.task.loss, coef, optimizer, grad_norm)
        self.compile_s = 0.0

    @property
    def params(self) -> dict:
        """Parameters by path, frozen ones included."""
        return {**self.frozen, **self.state.copies, **self.state.params}

    def make_batch(self, tokens: np.ndarray) -> Batch:
        """Return the batch of rows [B, T] of one document each, of which every token trains."""
        fields, length = self.task.data.fields, tokens.shape[-1]
        ones = {name: np.ones(length) for name in fields.components}
        rows = [[lay_out(chain(row, ones), "branch")] for row in tokens]
        return stack_batches([build_batch(rows, length, fields)])

    def prepare(self, batch: Batch, version: int = 0) -> Batch:
        """The batch as the task prepares it for a step."""
        scorer = Scorer(lambda: ModelSnapshot(self.roles, self.params, 0))
        (ready,) = self.task.prepare(Round([batch], version=version), scorer).batches
        return ready

    def compile(self, ready: Batch):
        """Compile the step for a batch and return (the program, the batch on the devices)."""
        with jax.set_mesh(self.mesh):
            placed, start = feed(ready, self.mesh), time.perf_counter()
            compiled, _ = compile_step(self.step, self.state, placed, self.frozen)
        self.compile_s = time.perf_counter() - start
        return compiled, placed

    def run(self, compiled, placed: Batch):
        """Run a step and return its output; compiled: `step`, or what `compile` returned."""
        with jax.set_mesh(self.mesh):
            self.state, output = compiled(self.state, placed, self.frozen)
        return output


def describe_side() -> dict[str, str]:
    """Return "hardware" and "version" of a row."""
    return {"hardware": jax.devices()[0].device_kind, "version": f"jax {jax.__version__}"}
