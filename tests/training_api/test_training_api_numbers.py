"""The numbers of the training API against a run's own step, closed forms and torch."""

import jax
import numpy as np
import optax
import pytest
from api_toy import as_data, draw_documents, open_base, read_output, write_request

from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.core.roles import Role, Roles
from jaxtrain.core.step import init_state, make_step
from jaxtrain.core.task import of_policy
from jaxtrain.core.weights import start_adapter
from jaxtrain.data.packing.pack import build_batch, lay_out, stack_batches
from jaxtrain.data.packing.tree import chain
from jaxtrain.errors import UserError
from jaxtrain.training_api.optimizer import read_numbers
from jaxtrain.training_api.requests import read_request
from jaxtrain.training_api.trainer import LoRA, TrainedModel

ADAM = {"learning_rate": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


@pytest.fixture(scope="module")
def base():
    return open_base()


def train(model, data, loss="cross_entropy", settings=None, **adam):
    raw = write_request("m", 1, data, loss, settings)
    output = read_output(model.forward_backward(read_request(raw)))
    metrics = model.optim_step(read_numbers({"adam_params": {**ADAM, **adam}}))
    return *output, metrics


def run_steps(base, lora, seed, batches):
    """Losses of a run's own step on rows of documents, with its Adam, which decays nothing."""
    roles = Roles({"policy": Role(base.kind(lora).roles.bundle)})
    optimizer = optax.adamw(ADAM["learning_rate"], 0.9, 0.95, ADAM["eps"], weight_decay=0.0)
    step = make_step(roles.build, of_policy(nll_loss), {"nll": 1.0}, optimizer, None)
    losses = []
    with jax.set_mesh(base.mesh):
        if lora.rank:
            trained = start_adapter(roles.bundle, roles.trained_shapes, base.params, seed)
        else:
            trained = {path: base.params[path] + 0 for path in roles.trained_shapes}
        state = init_state(trained, optimizer)
        for documents in batches:
            rows = []
            for ids, weights in documents:
                total = sum(float(w.sum()) for _, w in documents)
                tree = chain(ids, {"nll": np.append(0, weights / total)})
                rows.append([lay_out(tree)])
            batch = stack_batches([build_batch(rows, 128)])
            batch = batch._replace(denoms={"nll": np.ones(1, np.float32)})
            state, output = step(state, batch, base.kind(lora).frozen)
            losses.append(float(output.metrics["loss"][0]))
    return np.array(losses)


@pytest.mark.parametrize("rank", [4, 0])
def test_twenty_steps_equal_a_run_of_the_same_batches(base, rank):
    lora = LoRA(rank)
    batches = [draw_documents(4, seed) for seed in range(4)] * 5
    model = TrainedModel(base.kind(lora), base.kind(lora).start(7))
    losses = []
    for documents in batches:
        total = sum(float(w.sum()) for _, w in documents)
        data = as_data([(ids, w / total) for ids, w in documents])
        losses.append(train(model, data)[1]["loss:sum"])
    np.testing.assert_allclose(losses, run_steps(base, lora, 7, batches), rtol=1e-6)
    assert losses[-1] < losses[0] - 0.01
