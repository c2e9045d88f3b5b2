"""A whole method from outside: a student that follows a frozen teacher where the teacher's layers
say much, on rows of its own. Tests name it `toy_method` or `toy_method.py` in task.kind."""

import functools
import json

import jax.numpy as jnp
import numpy as np

from jaxtrain.config import ModelConfig
from jaxtrain.config.task import TaskSection
from jaxtrain.core.bundle import build_auxiliary_bundle, build_model_bundle
from jaxtrain.core.export import export_model
from jaxtrain.core.losses.logp import token_logp
from jaxtrain.core.roles import Role
from jaxtrain.core.task import Task
from jaxtrain.data.sample import Sample
from jaxtrain.data.sequences import Sequences
from jaxtrain.data.sources.readers import MixturePart
from jaxtrain.methods.offline import OfflineData


class Section(TaskSection):
    """Section task of this method."""

    teacher: ModelConfig
    """The model that is followed."""
    layers: tuple[int, int] = (0, 1)
    """What lies between these two of the teacher's layers makes a token matter."""
    pull: float = 0.5
    """Weight of the distance from the teacher's log-probs."""

    def find_conflicts(self, config):
        """Yield a sentence for each impossible combination."""
        if self.pull == 0:
            yield "task.pull is 0, so the teacher would teach nothing; raise it"


class Counting(Sequences):
    """Rows that count: 5, 6, 7, ...; dataset.path is how many rows there are."""

    streams = {"distance": np.int32}

    def open(self, dataset):
        rows = list(range(int(dataset.path)))
        return MixturePart(dataset.path, rows, count_from, dataset.weight)

    open_held_out = open

    def probe(self, dataset):
        return f"{dataset.path} rows that count"

    def show_example(self, actual, console):
        console.print(count_from(0, actual)[0].tokens)


def count_from(row, origin):
    tokens = (np.arange(5 + row % 7, 21 + row % 5) * (1 + row % 3)) % 400
    return [Sample(tokens.astype(np.int32), np.ones(len(tokens), np.float32), origin)]


def open_data(config, tokenizer):
    return OfflineData(config, Counting(config.data, tokenizer))


def make(config):
    parts = build_model_bundle(config)
    teacher = Role(build_auxiliary_bundle(config.task.teacher, parts, "task.teacher"), "own")
    data = open_data(config, parts.tokenizer)
    return Task(
        roles={"student": Role(parts), "teacher": teacher},
        loss=follow,
        coef={"nll": 1.0, "pull": config.task.pull},
        data=data,
        prepare=functools.partial(weigh, config.task.layers),
        evaluate=functools.partial(agree, config, data, parts),
        export=export,
    )


def follow(models, batch):
    """Likelihood where weights say, and the squared distance from the teacher's log-probs."""
    actual_values, reference = (
        token_logp(models[role], batch).logp for role in ("student", "teacher")
    )
    real = batch.prev >= 0
    distance = jnp.sum(jnp.where(real, (actual_values - reference) ** 2, 0.0))
    nll = -jnp.sum(batch.weights["nll"] * actual_values)
    return {"nll": nll, "pull": distance}, {"distance": (distance, jnp.sum(real))}


def weigh(layers, round, scorer):
    """Tokens weigh as the teacher's states move between two of its layers."""
    batches = []
    for batch in round.batches:
        states = scorer.hidden(batch, "teacher", layers)
        moved = np.linalg.norm(states[layers[1]] - states[layers[0]], axis=-1)
        weights = {"nll": np.where(batch.prev >= 0, moved, 0).astype(np.float32)}
        full = {"distance": (1000 * moved).astype(np.int32)}
        batches.append(batch._replace(weights=weights, streams=full))
    return round._replace(batches=batches, metrics={"moved": float(moved.mean())})


def agree(config, data, parts, held, scorer):
    """Distance between student and teacher on the held-out rows."""
    apart = [
        np.abs(scorer.logp(batch, "student") - scorer.logp(batch, "teacher"))[batch.prev >= 0]
        for dataset in config.data.eval_datasets
        for batch in data.eval_batches(dataset, parts)
    ]
    return {"eval/apart": float(np.concatenate(apart).mean())} if apart else {}


def export(held, config, folder, dtype=None):
    """The student, and a note on whom it followed."""
    export_model(held, config, folder, dtype)
    teacher = held.roles.roles.get("teacher")
    note = {
        "layers": config.task.layers,
        "teacher": teacher and teacher.bundle.architecture.to_hf(),
    }
    (folder / "followed.json").write_text(json.dumps(note))
