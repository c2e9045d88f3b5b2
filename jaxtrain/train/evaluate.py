"""Held-out loss, and sets of problems that the model answers."""

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax

from jaxtrain.batch import Batch
from jaxtrain.config import Config
from jaxtrain.core.assemble import Parts
from jaxtrain.core.metrics import add_pairs, average
from jaxtrain.data.pipeline import eval_batches
from jaxtrain.data.template import end_of_turn_ids
from jaxtrain.models.parameters import Params, Rebuild
from jaxtrain.parallel.feed import feed, row_shards
from jaxtrain.parallel.relay import share
from jaxtrain.rollout.local.engine import LocalEngine
from jaxtrain.rollout.local.sampler import LocalSampler
from jaxtrain.rollout.local.weights import EvaluationWeights
from jaxtrain.rollout.problem_sets import ProblemSets
from jaxtrain.rollout.types import Engine
from jaxtrain.train.session import Session


class Evaluation:
    """What section `eval` asks for; remembers the first and the last result."""

    def __init__(
        self,
        config: Config,
        parts: Parts,
        say: Callable[[str], None],
        samples: Path,
        sets: ProblemSets | None = None,
        engine: Engine | None = None,
    ):
        """samples: jsonl file for answers. sets: on process 0. engine: servers that hold the
        current weights whenever an evaluation comes; None: process 0 answers the sets itself."""
        self.config, self.parts, self.say = config, parts, say
        self.samples, self.sets, self.engine = samples, sets, engine
        self.history: list[dict[str, float]] = []
        self.sampler: LocalSampler | None = None
        self.weights = EvaluationWeights(parts)

    def run(self, session: Session, step: int) -> dict[str, float]:
        """Evaluate the current weights; {"eval/loss": ..., "eval/gsm8k/avg@4": ...}."""
        found: dict[str, float] = {}
        datasets = self.config.data.eval_datasets if self.config.task.kind != "rl" else []
        for index, dataset in enumerate(datasets):
            means = held_out_loss(
                session.evaluate,
                session.params,
                open_eval(self.config, self.parts, dataset),
                self.parts.mesh,
            )
            name = "eval" if index == 0 else f"eval/{index}"
            found.update({f"{name}/{key}": value for key, value in means.items()})
        found.update(self.generate(session.params, session.rebuild, step))
        self.history.append(found)
        return found

    def generate(self, params: Params, rebuild: Rebuild, step: int) -> dict[str, float]:
        """What the weights answer to the sets: {"eval/gsm8k/avg@4": ...}.

        Process 0 asks and judges, the others wait for its numbers.
        """
        if not self.config.eval.sets:
            return {}
        here = params if self.config.rollout.engine == "vllm" else self.weights(params)
        return share("answers", lambda: self.answer(here, rebuild, step))

    def answer(self, params: Params, rebuild: Rebuild, step: int) -> dict[str, float]:
        """As `generate`, on process 0."""
        assert self.sets is not None, "process 0 holds the sets"
        engine = self.engine
        if engine is None:
            model = rebuild(params)
            engine = LocalEngine(self.open_sampler(model))
            engine.use(model, step)
        found = self.sets.run(engine, step, self.samples)
        if self.sampler is not None and self.weights.copies:
            self.sampler.use(None)
        return found

    def open_sampler(self, model: Any) -> LocalSampler:
        """The run's one sampler, with these weights: it compiles once."""
        if self.sampler is None:
            self.sampler = LocalSampler(
                model,
                end_of_turn_ids(self.parts.tokenizer),
                max_len=self.parts.architecture.max_position_embeddings,
                max_batch=self.config.rollout.max_batch,
                to_text=self.parts.tokenizer.decode,
                mesh=self.weights.mesh,
            )
        self.sampler.use(model)
        return self.sampler

    def summary(self) -> str:
        """Before and after, in a line or two."""
        if not self.history:
            return ""
        first, last = self.history[0], self.history[-1]
        lines = []
        for key, value in last.items():
            if key == "eval/loss" or "/avg@" in key or key.endswith("/accuracy"):
                before = f"{first[key]:.4g} -> " if len(self.history) > 1 and key in first else ""
                lines.append(f"held-out {key[5:]}: {before}{value:.4g}")
        return "\n".join(lines)


def open_eval(config: Config, parts: Parts, dataset: Any) -> Iterable[Batch]:
    """Batches [1, B, T] of one held-out dataset, at most eval.max_batches of them."""
    rows = config.data.micro_batch_size * row_shards(parts.mesh)
    batches = eval_batches(dataset, config.data, parts.tokenizer, rows, config.task)
    for index, batch in enumerate(batches):
        if config.eval.max_batches is not None and index >= config.eval.max_batches:
            return
        yield batch


def held_out_loss(
    evaluate: Callable, params: Params, batches: Iterable[Batch], mesh: Any
) -> dict[str, float]:
    """Weighted means over all batches [1, B, T]: loss, perplexity and the loss's other metrics.

    evaluate: the function of `step.make_eval`. Data without trained tokens gives an empty dict.
    """
    total: dict[str, tuple[float, float]] = {}
    for batch in batches:
        micro = jax.tree.map(lambda leaf: leaf[0], feed(batch, mesh))
        found = jax.device_get(evaluate(params, micro))
        total = add_pairs(total, {name: (float(s), float(w)) for name, (s, w) in found.items()})
    means = average(total)
    if "nll" not in means:
        return {}
    loss = means.pop("nll")
    return {"loss": loss, "perplexity": math.exp(min(loss, 80.0)), **means}
