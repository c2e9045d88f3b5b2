"""Task: everything that defines a training method, in a value that its folder's `make` returns.

    Method.open_data(config, tokenizer) ─> Data     its data, without any model
    Method.make(config) ─> Task                     models by role, loss, data, and what happens

    Rounds.next(context)                            batches, under one version of the weights
       └─ context.prepare = task.prepare(round, scorer)  log-probs, hidden states, of any role
    step(state, batch)                              task.loss, once a batch
    task.after_round(context, ...), Rounds.finish(context, ...)
    task.evaluate(snapshot, scorer)                 the method's own numbers
    task.export(...)

The loop, the session, evaluation, the dry run and preprocess use these interfaces and no method.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from rich.console import Console

from jaxtrain.batch import Batch
from jaxtrain.config import Config, DatasetConfig
from jaxtrain.config.task import TaskSection
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.roles import Models, ModelSnapshot, Role
from jaxtrain.core.scorer import Scorer
from jaxtrain.data.packing.pack import Fields

POLICY = "policy"
"""Role of the model in methods with only one."""
DRAFT = "draft"
"""Role of a draft model, trained by itself or together with its target."""


class Round(NamedTuple):
    """Batches trained under one version of the weights, or a part of them."""

    batches: list[Batch]
    """[A, B, T] each, for one optimizer step."""
    metrics: dict[str, float] = {}
    """Metrics of the round, logged with its first step."""
    part: int = 0
    """Number of this part of the round, where a round comes in parts."""
    last: bool = True
    """Whether the round ends with this part."""
    version: int = 0
    """Rounds trained before this one, counted over all restarts of the run."""
    samples: Sequence[Mapping[str, Any]] = ()
    """Answers for samples.jsonl, see runs/samples.py; on process 0."""
    policy: str = ""
    """Name of the policy this round trains, which is the active one; "" if there is only one."""
    groups: Sequence[Any] = ()
    """The round's judged `episodes.Group`s; on process 0, with the last part."""
    published: Mapping[str, float] | None = None
    """Metrics of publishing the weights, on the first part of a round that follows it."""
    held_out: bool = False
    """Whether the round is only evaluated: random draws for it are then the same every time."""


class TrainingContext(Protocol):
    """The running session, as rounds and methods see it."""

    step: int
    """Optimizer steps done."""
    auxiliary: Mapping[str, Any]
    """The `AuxiliaryModel`s of Task.auxiliary."""

    def snapshot(self, policy: str = "") -> ModelSnapshot:
        """Return the models with their current weights; policy: those of this policy, where several
        are trained."""
        ...

    def activate_policy(self, policy: str) -> None:
        """Make this one of several trained policies the one to score and update; "": the only
        one."""
        ...

    def prepare(self, round: Round) -> Round:
        """Apply `Task.prepare` with the session's scorer."""
        ...

    def mix(self, role: str, share: float) -> None:
        """Mix `share` of the trained parameters into a role that is a moving copy."""
        ...

    def phase(
        self, name: str, detail: Callable[[], str] | None = None, /
    ) -> AbstractContextManager[object]:
        """Name what the loop is doing, such as "waiting for answers", for people and the watchdog.
        detail: how far it is; called by another thread."""
        ...

    def stop_requested(self) -> bool:
        """Return whether a signal requests the end of the run."""
        ...


class Rounds(Protocol):
    """Source of training rounds, with a JSON-able cursor; opened by `Data.open`."""

    total_steps: int
    """Optimizer steps of the run."""
    pauses: bool
    """Whether training waits for a round to be generated; step times exclude such waits."""
    engine: Any
    """On process 0, the engine that answers problems with the current weights; None without one."""
    serves: bool
    """Whether the engine serves evaluations, too; set on all processes."""

    def ready(self, context: TrainingContext) -> None:
        """Send weights to the engine before the first round, or before an evaluation that precedes
        it."""
        ...

    def next(self, context: TrainingContext) -> Round:
        """Return the next round or part of one, prepared; raises Interrupted if the run is to
        stop."""
        ...

    def finish(self, context: TrainingContext, *, interrupted: bool) -> dict[str, float]:
        """Complete a round that was trained, or cut short by a stop; return numbers that no step's
        line has yet."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the cursor after the trained rounds."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Continue exactly after the cursor `state`."""
        ...

    def counters(self) -> dict[str, Any]:
        """Return totals so far, "packing_efficiency" among them."""
        ...

    def close(self) -> None: ...


class Data(Protocol):
    """A method's data; opened without any model."""

    row_tokens: int
    """T, the longest row."""
    fields: Fields
    """Weights and other per-token arrays of every batch."""

    def check(self) -> Iterator[str]:
        """Probe every dataset and yield a line for each; UserError if it cannot be trained on."""
        ...

    def open(self, bundle: ModelBundle, log: Callable[[str], None]) -> Rounds:
        """Open for training with the trained model's parts."""
        ...

    def eval_batches(self, dataset: DatasetConfig, bundle: ModelBundle) -> Iterator[Batch]:
        """Yield batches [1, B, T] of a held-out dataset."""
        ...

    def show(self, console: Console, num_samples: int) -> None:
        """Print the processed data, for the verb preprocess."""
        ...

    def describe(self, console: Console) -> None:
        """Print a line for each dataset, how rows fill up, and an example, for the dry run."""
        ...


def keep_round(round: Round, scorer: Scorer) -> Round:
    """Return the round unchanged: `Task.prepare` of a method that needs no weights."""
    return round


def keep_length(tokens: int) -> int:
    """Return `tokens`: `Task.prepared_length` of a method whose rows keep their length."""
    return tokens


def keep_weights(context: TrainingContext, before: int) -> dict[str, float]:
    """Do nothing: `Task.after_round` of a method that changes nothing between rounds."""
    return {}


def no_numbers(snapshot: ModelSnapshot, scorer: Scorer) -> dict[str, float]:
    """Return no metrics: `Task.evaluate` of a method with only its held-out loss and metrics."""
    return {}


def export_trained(snapshot: ModelSnapshot, *args: Any, **options: Any) -> None:
    """Export the trained model as it is: the default `Task.export`."""
    from jaxtrain.core.export import export_model

    export_model(snapshot, *args, **options)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A complete training method."""

    roles: Mapping[str, Role]
    """The models it works with; exactly one of them trains."""
    loss: Callable[[Models, Batch], tuple[dict[str, Any], dict[str, Any]]]
    """(models of the roles in the loss, batch [B, T]) -> ({component: sum}, {metric: (sum,
    weight)}); pure."""
    coef: Mapping[str, float]
    """Factor of each component in the total loss, after division by its denominator."""
    data: Data
    prepare: Callable[[Round, Scorer], Round] = keep_round
    """Compute what needs the current weights, before the round's first update or before a held-out
    batch is evaluated; on every process."""
    prepared: Mapping[str, Any] = field(default_factory=dict)
    """Dtypes of the streams that `prepare` adds to those of data.fields; np.dtype((kind, (n,))) is
    a vector of n a token."""
    trained_streams: tuple[str, ...] | None = None
    """Streams that `prepare` leaves for the step; None: all."""
    compiles_ahead: bool = False
    """True if `abstract_batch` has exactly the fields of every batch that the step gets."""
    prepared_length: Callable[[int], int] = keep_length
    """Map the length of a row of data to its length after `prepare`."""
    varying_microsteps: bool = False
    """Whether steps differ in their number of microsteps. Then a step of one is no program of its
    own."""
    after_round: Callable[[TrainingContext, int], dict[str, float]] = keep_weights
    """(context, steps done before the round) -> metrics of the round: called after its last step,
    before its weights go to an engine."""
    auxiliary: Mapping[str, Any] = field(default_factory=dict)
    """`AuxiliaryObjective`s by name: separate models that `after_round` trains. They are no roles:
    the step does not see them."""
    evaluate: Callable[[ModelSnapshot, Scorer], dict[str, float]] = no_numbers
    """Metrics besides the held-out loss, {"eval/...": ...}; called on every process."""
    sampler: Callable[..., Any] | None = None
    """Sampler class for the trained model, with the interface of generation.local's LocalSampler,
    which None selects. A method with another sampler has a model that predicts no next token:
    whatever relies on next tokens (log-probs of texts, drafts, other methods starting from it) is
    refused."""
    export: Callable[..., None] = export_trained
    """(snapshot, config, folder, dtype): write the trained model; see export.export_model."""

    @property
    def mesh(self) -> Any:
        """The devices that train."""
        return next(role.bundle.mesh for role in self.roles.values() if role.weights == "trained")


def abstract_batch(task: Task, shape: tuple[int, int, int]) -> Batch:
    """Return the shapes of a batch [A, B, T] as the step gets it, prepared."""
    fields = task.data.fields

    def array(dtype: Any) -> Any:
        kind = np.dtype(dtype)
        return jax.ShapeDtypeStruct((*shape, *kind.shape), kind.base)

    streams = {**fields.streams, **task.prepared}
    ints = array(np.int32)
    return Batch(
        tokens=ints,
        positions=ints,
        prev=ints,
        until=ints,
        weights={name: array(fields.dtype) for name in fields.components},
        since=ints if fields.since else None,
        owner=ints,
        streams={
            name: array(dtype)
            for name, dtype in streams.items()
            if task.trained_streams is None or name in task.trained_streams
        },
    )


class Method(Protocol):
    """Interface of a method's module, or of the module or class that an entry point of the group
    `jaxtrain.tasks` names."""

    Section: type[TaskSection]
    """Config class of section `task`; its `kind` is the method's name."""

    @staticmethod
    def open_data(config: Config, tokenizer: Any) -> Data:
        """Return the method's data."""
        ...

    @staticmethod
    def make(config: Config) -> Task:
        """Run all checks that need no weights, then build the task."""
        ...


def of_policy(loss: Callable) -> Callable:
    """Apply a loss of a single model to the role POLICY."""
    return lambda models, batch: loss(models[POLICY], batch)
