"""Evaluations during a run: held-out loss, the task's own numbers, and answers to problem sets.

The loss is measured here. Answers need an engine that generates: an `AnswerEvaluator`, which
`jaxtrain.generation.evaluation` has for configs with eval.sets, gives their numbers, at once or,
where it can spare servers for them, while training goes on.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, Protocol

import jax
from typing_extensions import override

from jaxtrain.batch import Batch
from jaxtrain.config import Config, DatasetConfig
from jaxtrain.core.hooks import Hook, is_due
from jaxtrain.core.metrics import add_pairs, average
from jaxtrain.core.roles import ModelSnapshot, Roles
from jaxtrain.core.scorer import Scorer
from jaxtrain.core.session import Session
from jaxtrain.core.step import make_eval
from jaxtrain.core.step_reports import StepReports
from jaxtrain.core.task import Round, Task
from jaxtrain.distributed.feed import feed
from jaxtrain.errors import Interrupted
from jaxtrain.models.parameters import Params


class AnswerEvaluator(Protocol):
    """Evaluates weights by the answers they generate; called on every process."""

    def start(self, write_samples: Callable[[int, Iterable], None]) -> int | None:
        """Get ready once the weights are there. Returns the step of an evaluation that the end of
        the last attempt has broken off, or None. write_samples: takes (step, answers)."""
        ...

    def run(self, snapshot: ModelSnapshot, *, defer: bool) -> dict[str, float]:
        """Return numbers of these weights. With `defer` they may be left to `collect`, so that
        training goes on meanwhile. Raises Interrupted when the run is to stop."""
        ...

    def collect(self, *, wait: bool) -> tuple[tuple[int, dict[str, float]] | None, bool]:
        """Return ((step, numbers) of a deferred evaluation that is complete, or None; whether it
        failed and must be repeated). Raises Interrupted when the run is to stop."""
        ...

    def describe(self) -> str:
        """Return how far the answers to the sets are; "": none are asked for. From any thread."""
        ...

    def acknowledge(self) -> None:
        """Note that the collected numbers are written."""
        ...

    def close(self) -> None:
        """Cancel a deferred evaluation and free what is held."""
        ...


class HeldOutEvaluation:
    """Held-out loss of all eval datasets, and the task's own numbers."""

    def __init__(self, config: Config, task: Task, roles: Roles, run_eval: Callable | None = None):
        """run_eval: the function of step.make_eval where it exists already."""
        self.config, self.task, self.bundle = config, task, roles.bundle
        self.run_eval = make_eval(roles.build, task.loss) if run_eval is None else run_eval
        self.progress = ""
        """How far it is."""

    def run(self, snapshot: ModelSnapshot, scorer: Scorer) -> dict[str, float]:
        """Return {"eval/loss": ..., "eval/1/loss": ..., ...}."""
        by_dataset, numbers = self.list_numbers(snapshot, scorer)
        for index, means in enumerate(by_dataset):
            prefix = "eval" if index == 0 else f"eval/{index}"
            numbers |= {f"{prefix}/{name}": value for name, value in means.items()}
        return numbers

    def list_numbers(
        self, snapshot: ModelSnapshot, scorer: Scorer
    ) -> tuple[list[dict[str, float]], dict[str, float]]:
        """Return (the numbers of each eval dataset, the task's own of none of them)."""
        by_dataset = [
            self.measure(snapshot, dataset, scorer) for dataset in self.config.data.eval_datasets
        ]
        numbers = dict(self.task.evaluate(snapshot, scorer))
        for index, means in enumerate(by_dataset):
            # A method may have a loss of its own for held-out data.
            prefix = "eval" if index == 0 else f"eval/{index}"
            for name in ("loss", "perplexity"):
                if f"{prefix}/{name}" in numbers:
                    means[name] = numbers.pop(f"{prefix}/{name}")
        return by_dataset, numbers

    def count(self, dataset: DatasetConfig, batches: Iterable[Batch]) -> Iterable[Batch]:
        """Yield the batches, counted in `progress`."""
        most = self.config.eval.max_batches
        for number, batch in enumerate(batches, 1):
            self.progress = f"batch {number:,}" + (f" of at most {most:,}" if most else "")
            self.progress += f" of {dataset.path}"
            yield batch
        self.progress = ""

    def measure(
        self, snapshot: ModelSnapshot, dataset: DatasetConfig, scorer: Scorer
    ) -> dict[str, float]:
        """Return weighted means over at most eval.max_batches batches: loss, its components where
        there are several, other metrics of the loss, perplexity of a likelihood. Each batch is
        prepared like one that trains. Data without trained tokens give an empty dict."""
        batches = self.task.data.eval_batches(dataset, self.bundle)
        batches = (
            prepared
            for batch in self.count(
                dataset, itertools.islice(batches, self.config.eval.max_batches)
            )
            for prepared in self.task.prepare(Round([batch], held_out=True), scorer).batches
        )
        means = average_batches(self.run_eval, snapshot.weights, batches, self.bundle.mesh)
        coef = self.task.coef
        # Data without a trained token of some component have no mean of it, and a sum without it
        # would be another loss.
        if not coef.keys() <= means.keys():
            return {}
        numbers = {"loss": sum(factor * means[name] for name, factor in coef.items())}
        if "nll" in coef:
            # Bounded, since JSON has no infinity.
            numbers["perplexity"] = math.exp(min(means["nll"], 80.0))
        if len(coef) == 1:  # the only component is the loss itself
            means = {name: value for name, value in means.items() if name not in coef}
        return {**numbers, **means}


class EvaluationHook(Hook):
    """Evaluate on the schedule of section `eval`, and record the first and the last numbers."""

    def __init__(self, session: Session, answers: AnswerEvaluator | None, reports: StepReports):
        self.session, self.answers, self.reports = session, answers, reports
        self.held_out = HeldOutEvaluation(
            session.config, session.task, session.roles, session.run_eval
        )
        self.history: list[dict[str, float]] = []
        self.evaluated_step = -1
        """Last step whose weights an evaluation was started on."""
        self.recorded = self.recorded_before = 0
        """Evaluations with written numbers: all, and those before the current round ended."""

    @property
    def recorded_this_round(self) -> bool:
        """Return whether numbers were written since the current round ended."""
        return self.recorded > self.recorded_before

    @override
    def on_start(self) -> None:
        session = self.session
        interrupted = None
        if self.answers is not None:
            interrupted = self.answers.start(self.reports.write_samples)
        if interrupted is not None:
            self.reports.sinks.log(
                f"the evaluation of step {interrupted} was broken off: it is asked again"
            )
        at_start = session.config.eval.at_start and session.step == 0
        if (interrupted is not None or at_start) and not session.stops_everywhere():
            session.rounds.ready(session)
            self.evaluate()

    @override
    def on_round_end(self, before: int) -> None:
        session, options = self.session, self.session.config.eval
        step, total = session.step, session.rounds.total_steps
        # Collect before the checkpoint hook saves: numbers belong to the state they were made of.
        repeat = self.collect()
        self.recorded_before = self.recorded
        times = (options.per_epoch or 0) * (session.config.run.num_epochs or 0)
        due = options.every != "never" and (
            (step == total and self.evaluated_step < step)
            or is_due(step, before, options.every, times, total)
        )
        if due or repeat:
            self.evaluate()

    @override
    def on_end(self) -> None:
        if not self.session.stops_everywhere() and self.collect(wait=True):
            self.evaluate(defer=False)

    def evaluate(self, *, defer: bool = True) -> None:
        """Evaluate the current weights; writes nothing if the run is to stop meanwhile. defer:
        answers to problem sets may come later, but not after the last step."""
        session = self.session
        self.reports.flush()
        # Before it runs: one that is broken off by a stop is not begun again on the way out.
        self.evaluated_step = session.step
        # Servers keep one earlier version, so one deferred evaluation is in flight at most.
        defer = defer and session.step < session.rounds.total_steps
        self.collect(wait=True)
        if session.stops_everywhere():
            return
        try:
            with session.phase("evaluating", self.describe):
                snapshot = session.snapshot()
                numbers = self.held_out.run(snapshot, session.scorer)
                if self.answers is not None:
                    numbers.update(self.answers.run(snapshot, defer=defer))
        except Interrupted:
            session.accept_stop()
            return
        self.reports.restart_clock()
        self.record(session.step, numbers)

    def describe(self) -> str:
        """Return how far an evaluation is; from any thread."""
        answers = "" if self.answers is None else self.answers.describe()
        return answers or self.held_out.progress

    def collect(self, *, wait: bool = False) -> bool:
        """Write the numbers of a deferred evaluation that is complete. Returns whether it failed
        and must be repeated."""
        if self.answers is None:
            return False
        waiting = "waiting for an evaluation"
        try:
            with self.session.phase(waiting, self.describe) if wait else nullcontext():
                collected, repeat = self.answers.collect(wait=wait)
        except Interrupted:
            self.session.accept_stop()
            return False
        if collected is not None:
            self.reports.flush()
            self.record(*collected)
            self.answers.acknowledge()
        return repeat

    def record(self, step: int, numbers: dict[str, float]) -> None:
        """Write the numbers of the weights after `step`."""
        if numbers:
            self.history.append(numbers)
            self.recorded += 1
            self.reports.write_evaluation(step, numbers)

    def summarize(self) -> str:
        """Describe the first and the last numbers, one line each."""
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
    """Weighted means over batches [1, B, T] of what step.make_eval's function returns."""
    total: dict[str, tuple[float, float]] = {}
    for batch in batches:
        micro = jax.tree.map(lambda leaf: leaf[0], feed(batch, mesh))
        pairs = jax.device_get(run_eval(weights, micro))
        # Added as Python floats: float32 sums over many batches would lose the last ones.
        total = add_pairs(total, {name: (float(s), float(w)) for name, (s, w) in pairs.items()})
    return average(total)
