"""Evaluation by generation: the sets of section eval.sets, answered with the weights of a run.

    run(snapshot) ── deferred: some of the engine's servers answer while training goes on
                  └─ at once: the engine of the rounds, where it serves the current weights, or
                              else a sampler of process 0 on the trainer's own devices

Process 0 asks and judges; the other processes wait for its numbers.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxtrain.config import Config
from jaxtrain.core.roles import ModelSnapshot
from jaxtrain.core.session import Session
from jaxtrain.core.task import Task
from jaxtrain.data.chat.template import end_of_turn_ids
from jaxtrain.distributed.broadcast import broadcast, broadcast_or_raise
from jaxtrain.generation.engine import Engine, KeepsVersions
from jaxtrain.generation.episode_engine import combine_engines, with_policies
from jaxtrain.generation.evaluation.background import BackgroundEval, find_broken_off
from jaxtrain.generation.evaluation.problem_sets import ProblemSets, open_problem_sets
from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.generation.local.frozen_folder import FrozenFolder, open_folders
from jaxtrain.generation.local.requests import Requests
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.generation.local.weights import EvaluationWeights
from jaxtrain.models.parameters import Params, Rebuild

WriteSamples = Callable[[int, Iterable], Any]
"""Takes (step, lines for samples.jsonl)."""


class ServingEngine(NamedTuple):
    """The engine that answers, if it serves the current weights whenever an evaluation comes."""

    serves: bool = False
    """False: process 0 answers with a sampler of its own."""
    engine: Engine | None = None
    """On process 0."""


class SetAnswers:
    """Answers of a policy, or of several that talk to each other, to all sets."""

    def __init__(
        self,
        config: Config,
        task: Task,
        sets: ProblemSets | None,
        write_samples: WriteSamples,
        serving: ServingEngine,
        log: Callable[[str], None],
    ):
        """sets: on process 0."""
        self.config, self.task, self.sets, self.serving = config, task, sets, serving
        self.write_samples = write_samples
        self.bundle = next(r.bundle for r in task.roles.values() if r.weights == "trained")
        self.samplers: dict[str, Requests] = {}
        self.weights = EvaluationWeights(self.bundle)
        self.folders: dict[str, FrozenFolder] = {}
        if sets is not None and not serving.serves:
            devices = list(self.weights.mesh.devices.flat)
            self.folders = open_folders(config, self.bundle, devices, log)

    def measure(
        self,
        snapshot: ModelSnapshot,
        policies: Mapping[str, ModelSnapshot],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Return {"eval/gsm8k/avg@4": ...}. policies: by name, where several are trained, because
        environments talk to all of them. Raises Interrupted once should_stop()."""
        snapshots = policies or {"": snapshot}
        params = {
            name: policy.params() if self.serving.serves else self.weights(policy.params())
            for name, policy in snapshots.items()
        }
        rebuild = snapshot.roles.rebuild(snapshot.roles.trained)
        return broadcast_or_raise(
            "answers", lambda: self._answer(params, rebuild, snapshot.step, should_stop)
        )

    def _answer(
        self,
        params: Mapping[str, Params],
        rebuild: Rebuild,
        step: int,
        should_stop: Callable[[], bool],
    ) -> dict[str, float]:
        """Answer all sets on process 0. params: of each policy."""
        assert self.sets is not None, "process 0 holds the sets"
        engine = self.serving.engine if self.serving.serves else None
        with ThreadPoolExecutor(1, thread_name_prefix="sampler") as thread:
            if engine is None:
                engines = {}
                for name, policy_params in params.items():
                    model = rebuild(policy_params)
                    engines[name] = LocalEngine(self._sampler(model, name), thread)
                    engines[name].use(model, step)
                engine = (
                    combine_engines(engines) if len(engines) > 1 else next(iter(engines.values()))
                )
                frozen = {name: folder.speak(thread) for name, folder in self.folders.items()}
                engine = with_policies(engine, frozen)
            numbers = self.sets.run(engine, step, self.write_samples, should_stop)
        if self.weights.copies:
            # Copies of the weights take memory that training needs.
            for sampler in self.samplers.values():
                sampler.use(None)
        return numbers

    def _sampler(self, model: Any, policy: str) -> Requests:
        """Return the sampler of a policy with these weights. There is one for each policy, so that
        it compiles once."""
        if policy not in self.samplers:
            make: Callable[..., Requests] = self.task.sampler or LocalSampler
            self.samplers[policy] = make(
                model,
                end_of_turn_ids(self.bundle.tokenizer),
                max_len=self.bundle.architecture.longest,
                max_batch=self.config.rollout.max_batch,
                to_text=self.bundle.tokenizer.decode,
                tokenizer=self.bundle.tokenizer,
                mesh=self.weights.mesh,
            )
        self.samplers[policy].use(model)
        return self.samplers[policy]


class AnswerEvaluation:
    """The `AnswerEvaluator` of core/evaluation.py for a run with eval.sets."""

    def __init__(self, session: Session, log: Callable[[str], None]):
        """Read all sets, and open their environments and rewards; UserError."""
        self.session, self.log = session, log
        self.sets = open_problem_sets(session.config, session.bundle, log)
        self.background: BackgroundEval | None = None
        """On process 0, where some servers may answer while training goes on."""
        self.answers: SetAnswers | None = None
        self.defers = session.rounds.serves and bool(session.config.rollout.vllm.eval_servers)
        """True if some servers evaluate during training; equal on all processes."""
        self.write_samples: WriteSamples = lambda step, lines: None

    def start(self, write_samples: WriteSamples) -> int | None:
        """Open what answers, once the weights are there; see AnswerEvaluator."""
        session, self.write_samples = self.session, write_samples
        engine = session.rounds.engine
        serving = ServingEngine(session.rounds.serves, engine)
        if self.sets is not None and self.defers and isinstance(engine, KeepsVersions):
            self.background = BackgroundEval(
                engine, self.sets, session.folder, session.stop_requested
            )
        self.answers = SetAnswers(
            session.config, session.task, self.sets, write_samples, serving, self.log
        )
        return broadcast("broken off", lambda: find_broken_off(session.folder, session.start))

    def run(self, snapshot: ModelSnapshot, *, defer: bool) -> dict[str, float]:
        """Answer the sets, or begin to; see AnswerEvaluator."""
        assert self.answers is not None, "an evaluation comes after the start"
        if defer and self.defers and broadcast_or_raise("an evaluation", self._begin(snapshot)):
            return {}
        session = self.session
        policies = {name: session.snapshot(name) for name in session.policies}
        return self.answers.measure(snapshot, policies, session.stop_requested)

    def _begin(self, snapshot: ModelSnapshot) -> Callable[[], bool]:
        def begin() -> bool:
            assert self.background is not None, "process 0 has it"
            return self.background.begin(snapshot.step)

        return begin

    def collect(self, *, wait: bool) -> tuple[tuple[int, dict[str, float]] | None, bool]:
        """Return the numbers of a deferred evaluation; see AnswerEvaluator."""

        def take() -> tuple[tuple[int, dict[str, float]] | None, bool]:
            assert self.background is not None, "process 0 has it"
            collected, repeat = self.background.collect(wait=wait)
            if collected is None:
                return None, repeat
            self.write_samples(collected.step, collected.samples)
            return (collected.step, collected.numbers), repeat

        return broadcast_or_raise("evaluations", take) if self.defers else (None, False)

    def describe(self) -> str:
        """Return how far the sets are that are answered on process 0; see AnswerEvaluator."""
        return "" if self.sets is None else self.sets.progress

    def acknowledge(self) -> None:
        """Delete the note of the evaluation that was under way: its numbers are written."""
        if self.background is not None:
            self.background.written()

    def close(self) -> None:
        """Cancel what is under way; end reward workers and environments."""
        if self.background is not None:
            self.background.close()
        if self.sets is not None:
            self.sets.close()
