"""Held-out loss, and sets of problems that the model answers."""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax

from jaxtrain.batch import Batch
from jaxtrain.config import Config, DatasetConfig
from jaxtrain.core.metrics import add_pairs, average
from jaxtrain.core.roles import ModelSnapshot, Roles
from jaxtrain.core.scorer import Scorer
from jaxtrain.core.step import make_eval
from jaxtrain.core.task import Round, Task
from jaxtrain.data.chat.template import end_of_turn_ids
from jaxtrain.distributed.broadcast import broadcast_or_raise
from jaxtrain.distributed.feed import feed
from jaxtrain.generation.engine import Engine
from jaxtrain.generation.evaluation.background import BackgroundEval
from jaxtrain.generation.evaluation.problem_sets import ProblemSets
from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.generation.local.frozen_folder import FrozenFolder, open_folders
from jaxtrain.generation.local.requests import Requests
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.generation.local.weights import EvaluationWeights
from jaxtrain.generation.multi_policy import gather, with_policies
from jaxtrain.models.parameters import Params, Rebuild


class Evaluation:
    """What section `eval` and the task ask for; remembers the first and the last result."""

    def __init__(
        self,
        config: Config,
        task: Task,
        roles: Roles,
        log: Callable[[str], None],
        sampled: Callable[[int, Iterable], Any],
        sets: ProblemSets | None = None,
        engine: Engine | None = None,
        *,
        served: bool = False,
        run_eval: Callable | None = None,
        should_stop: Callable[[], bool] = lambda: False,
        beside: BackgroundEval | None = None,
        policies: Callable[[], Mapping[str, ModelSnapshot]] = dict,
    ):
        """sampled: gets (step, lines for samples.jsonl). sets: on process 0. engine: on process 0,
        if `served`: it holds the current weights whenever an evaluation comes; else process 0
        answers the sets itself. run_eval: of step.make_eval, where there is one already.
        should_stop: asked while problems are answered, which then ends by Interrupted. beside: on
        process 0, where servers may answer the sets while training goes on. policies: by name,
        where several are trained: environments talk to all of them."""
        self.policies = policies
        self.config, self.task, self.bundle, self.log = config, task, roles.bundle, log
        self.sampled, self.sets, self.served = sampled, sets, served
        self.engine = engine if served else None
        self.should_stop, self.beside = should_stop, beside
        self.run_eval = make_eval(roles.build, task.loss) if run_eval is None else run_eval
        self.history: list[dict[str, float]] = []
        self.samplers: dict[str, Requests] = {}
        self.weights = EvaluationWeights(self.bundle)
        self.folders: dict[str, FrozenFolder] = {}
        if sets is not None and not served:
            devices = list(self.weights.mesh.devices.flat)
            self.folders = open_folders(config, self.bundle, devices, log)

    def run(
        self, snapshot: ModelSnapshot, scorer: Scorer, *, aside: bool = False
    ) -> dict[str, float]:
        """Evaluate weights; {"eval/loss": ..., "eval/gsm8k/avg@4": ...}. aside: the sets may be
        answered while training goes on, if the config says so; `collect` gives their numbers."""
        found: dict[str, float] = {}
        for index, dataset in enumerate(self.config.data.eval_datasets):
            name = "eval" if index == 0 else f"eval/{index}"
            means = self.held_out(snapshot, dataset, scorer)
            found.update({f"{name}/{key}": value for key, value in means.items()})
        found.update(self.task.evaluate(snapshot, scorer))
        begin = partial(self.begin, snapshot.step)
        if not (aside and self.goes_aside and broadcast_or_raise("an evaluation", begin)):
            found.update(self.generate(snapshot))
        if found:
            self.history.append(found)
        return found

    @property
    def goes_aside(self) -> bool:
        """Whether some servers answer the sets while training goes on; on all processes alike."""
        rollout = self.config.rollout
        return self.served and bool(self.config.eval.sets) and bool(rollout.vllm.eval_servers)

    def begin(self, step: int) -> bool:
        """See Beside; on process 0."""
        assert self.beside is not None, "it is process 0's"
        return self.beside.begin(step)

    def collect(self, *, wait: bool = False) -> tuple[tuple[int, dict[str, float]] | None, bool]:
        """((step, numbers) of an evaluation that went on beside training and is over, whether one
        is to be asked again); see Beside.collect."""

        def take() -> tuple[tuple[int, dict[str, float]] | None, bool]:
            assert self.beside is not None, "it is process 0's"
            found, again = self.beside.collect(wait=wait)
            if found is None:
                return None, again
            self.sampled(found.step, found.samples)
            return (found.step, found.numbers), again

        if not self.goes_aside:
            return None, False
        found, again = broadcast_or_raise("evaluations", take)
        if found is not None:
            self.history.append(found[1])
        return found, again

    def close(self) -> None:
        """Break off what is under way."""
        if self.beside is not None:
            self.beside.close()

    def held_out(
        self, snapshot: ModelSnapshot, dataset: DatasetConfig, scorer: Scorer
    ) -> dict[str, float]:
        """Weighted means over all batches, at most eval.max_batches: loss, its components where
        there are several, the loss's other metrics, perplexity of a likelihood. Each batch is
        prepared as one that trains. Data without trained tokens give an empty dict."""
        batches = self.task.data.eval_batches(dataset, self.bundle)
        batches = (
            ready
            for batch in itertools.islice(batches, self.config.eval.max_batches)
            for ready in self.task.prepare(Round([batch], held_out=True), scorer).batches
        )
        means = average_batches(self.run_eval, snapshot.weights, batches, self.bundle.mesh)
        coef = self.task.coef
        if not coef.keys() <= means.keys():
            return {}
        found = {"loss": sum(factor * means[name] for name, factor in coef.items())}
        if "nll" in coef:
            found["perplexity"] = math.exp(min(means["nll"], 80.0))
        if len(coef) == 1:  # it is the loss
            means = {name: value for name, value in means.items() if name not in coef}
        return {**found, **means}

    def generate(self, snapshot: ModelSnapshot) -> dict[str, float]:
        """What the weights answer to the sets: {"eval/gsm8k/avg@4": ...}.

        Process 0 asks and judges, the others wait for its numbers.
        """
        if not self.config.eval.sets:
            return {}
        snapshots = self.policies() or {"": snapshot}
        here = {
            name: one.params() if self.served else self.weights(one.params())
            for name, one in snapshots.items()
        }
        rebuild = snapshot.roles.rebuild(snapshot.roles.trained)
        return broadcast_or_raise("answers", lambda: self.answer(here, rebuild, snapshot.step))

    def answer(self, params: Mapping[str, Params], rebuild: Rebuild, step: int) -> dict[str, float]:
        """As `generate`, on process 0. params: of each policy."""
        assert self.sets is not None, "process 0 holds the sets"
        engine = self.engine
        with ThreadPoolExecutor(1, thread_name_prefix="sampler") as thread:
            if engine is None:
                engines = {}
                for name, own in params.items():
                    model = rebuild(own)
                    engines[name] = LocalEngine(self.open_sampler(model, name), thread)
                    engines[name].use(model, step)
                engine = gather(engines) if len(engines) > 1 else next(iter(engines.values()))
                speakers = {name: one.speak(thread) for name, one in self.folders.items()}
                engine = with_policies(engine, speakers)
            found = self.sets.run(engine, step, self.sampled, self.should_stop)
        if self.weights.copies:
            for sampler in self.samplers.values():
                sampler.use(None)
        return found

    def open_sampler(self, model: Any, policy: str = "") -> Requests:
        """A policy's one sampler, with these weights: it compiles once."""
        if policy not in self.samplers:
            make: Callable[..., Requests] = self.task.sampler or LocalSampler
            self.samplers[policy] = make(
                model,
                end_of_turn_ids(self.bundle.tokenizer),
                max_len=self.bundle.architecture.longest,
                max_batch=self.config.rollout.max_batch,
                to_text=self.bundle.tokenizer.decode,
                mesh=self.weights.mesh,
            )
        self.samplers[policy].use(model)
        return self.samplers[policy]

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


def average_batches(
    run_eval: Callable, weights: Params, batches: Iterable[Batch], mesh: Any
) -> dict[str, float]:
    """Weighted means over batches [1, B, T] of what step.make_eval's function gives."""
    total: dict[str, tuple[float, float]] = {}
    for batch in batches:
        micro = jax.tree.map(lambda leaf: leaf[0], feed(batch, mesh))
        found = jax.device_get(run_eval(weights, micro))
        total = add_pairs(total, {name: (float(s), float(w)) for name, (s, w) in found.items()})
    return average(total)
