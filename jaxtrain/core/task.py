"""Task: all that a training method is, in one value that its file in `tasks/` makes.

    Method.open_data(config, tokenizer) ─> Data     what its data are, without any model
    Method.make(config) ─> Task                     models by role, loss, data, and what happens

    Rounds.next(live)                               batches, under one version of the weights
       └─ live.prepare = task.prepare(round, scorer)     log-probs, hidden states, of any role
    step(state, batch)                              task.loss, once a batch
    task.after_round(live, ...), Rounds.finish(live, ...)
    task.evaluate(held, scorer)                     the method's own numbers
    task.export(...)

The loop, the session, evaluation, the dry run and preprocess know these names and no method.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rich.console import Console

from jaxtrain.batch import Batch
from jaxtrain.config import Config, DatasetConfig
from jaxtrain.config.task import TaskSection
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.roles import Models, ModelSnapshot, Role
from jaxtrain.core.scorer import Scorer
from jaxtrain.data.packing.pack import Fields

POLICY = "policy"
"""What methods with one model call it."""
DRAFT = "draft"
"""What a model is called that guesses for another one, trained by itself or beside that one."""


class Round(NamedTuple):
    """What is trained under one version of the weights, or a part of it."""

    batches: list[Batch]
    """[A, B, T] each: one optimizer step a batch."""
    metrics: dict[str, float] = {}
    """Numbers about it, for the first step's line."""
    part: int = 0
    """Number of this part of the round, where a round comes in parts."""
    last: bool = True
    """Whether the round ends with this part."""
    version: int = 0
    """Rounds that were trained before this one, in all of the run's life."""
    samples: Sequence[Mapping[str, Any]] = ()
    """Answers of it to read, for samples.jsonl: see runs/samples.py; on process 0."""
    policy: str = ""
    """Name of the policy this round trains, which is the active one; "" if there is only one."""
    groups: Sequence[Any] = ()
    """The `episodes.Group`s that were judged for it; on process 0, with its last part."""
    published: Mapping[str, float] | None = None
    """Of the first part of a round behind new weights: what bringing them to the engine took."""
    held_out: bool = False
    """Whether it is judged and not trained: whatever is drawn for it is always the same."""


class TrainingContext(Protocol):
    """The running session, as rounds and methods see it."""

    step: int
    """Optimizer steps done."""
    auxiliary: Mapping[str, Any]
    """The `AuxiliaryModel`s of Task.auxiliary."""

    def snapshot(self, policy: str = "") -> ModelSnapshot:
        """The models with their current weights; policy: of that one, where several are trained."""
        ...

    def activate_policy(self, policy: str) -> None:
        """From now on this one of several trained policies is the one that is scored and updated;
        "": there is one alone."""
        ...

    def prepare(self, round: Round) -> Round:
        """`Task.prepare` with the session's scorer."""
        ...

    def mix(self, role: str, share: float) -> None:
        """Mix `share` of the trained parameters into a role that is a moving copy."""
        ...

    def phase(self, name: str, /) -> AbstractContextManager[object]:
        """What the loop does meanwhile, for the watchdog: "waiting for answers"."""
        ...

    def stop_requested(self) -> bool:
        """Whether a signal asks for the run's end."""
        ...


class Rounds(Protocol):
    """The source of what is trained, with a JSON-able cursor; opened by `Data.open`."""

    total_steps: int
    """Optimizer steps of the run."""
    pauses: bool
    """Whether training waits for a round to be made: no step is timed across that."""
    engine: Any
    """On process 0, what answers problems with the run's current weights; None: nothing does."""
    serves: bool
    """Whether that holds for evaluations, too: on all processes."""

    def ready(self, context: TrainingContext) -> None:
        """Before the first round, or an evaluation before it: bring weights where they serve."""
        ...

    def next(self, context: TrainingContext) -> Round:
        """The next round or part of one, prepared; raises Interrupted when the run is to stop."""
        ...

    def finish(self, context: TrainingContext, *, interrupted: bool) -> dict[str, float]:
        """A round was trained, or cut short by a stop: numbers that no step's line has yet."""
        ...

    def state(self) -> dict[str, Any]:
        """Cursor after what was trained."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go on with exactly what would have followed."""
        ...

    def counters(self) -> dict[str, Any]:
        """Totals so far; "packing_efficiency" among them."""
        ...

    def close(self) -> None: ...


class Data(Protocol):
    """What a method's data are; made without any model."""

    row_tokens: int
    """T, the longest row."""
    fields: Fields
    """Weights and other per-token arrays of every batch."""

    def check(self) -> Iterator[str]:
        """A first look at every dataset, a line each; UserError when it would not train."""
        ...

    def open(self, bundle: ModelBundle, log: Callable[[str], None]) -> Rounds:
        """Open for training with the trained model's parts."""
        ...

    def eval_batches(self, dataset: DatasetConfig, bundle: ModelBundle) -> Iterator[Batch]:
        """Batches [1, B, T] of a held-out dataset."""
        ...

    def show(self, console: Console, num_samples: int) -> None:
        """The verb preprocess: what the data become."""
        ...

    def describe(self, console: Console) -> None:
        """The dry run: a line for each dataset, how rows fill up, an example."""
        ...


def keep_round(round: Round, scorer: Scorer) -> Round:
    """`Task.prepare` of a method that needs no weights before the update."""
    return round


def keep_length(tokens: int) -> int:
    """`Task.prepared_length` of a method whose rows stay as long as they are."""
    return tokens


def keep_weights(context: TrainingContext, before: int) -> dict[str, float]:
    """`Task.after_round` of a method that changes nothing between rounds."""
    return {}


def no_numbers(snapshot: ModelSnapshot, scorer: Scorer) -> dict[str, float]:
    """`Task.evaluate` of a method whose loss and metrics on held-out data say it all."""
    return {}


def export_trained(snapshot: ModelSnapshot, *args: Any, **options: Any) -> None:
    """`Task.export` of a method whose trained model is exported as it is: export.export_model."""
    from jaxtrain.core.export import export_model

    export_model(snapshot, *args, **options)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A training method, whole."""

    roles: Mapping[str, Role]
    """The models it works with; exactly one of them trains."""
    loss: Callable[[Models, Batch], tuple[dict[str, Any], dict[str, Any]]]
    """(models of the roles in the loss, batch [B, T]) -> ({component: sum}, {metric: (sum,
    weight)}); pure."""
    coef: Mapping[str, float]
    """Factor of each component in the total loss, after division by its denominator."""
    data: Data
    prepare: Callable[[Round, Scorer], Round] = keep_round
    """What needs current weights before the round's first update, or before a held-out batch is
    judged; on every process."""
    prepared: Mapping[str, Any] = field(default_factory=dict)
    """Dtypes of the streams that `prepare` adds to those of data.fields; np.dtype((kind, (n,))) is
    a vector of n a token."""
    prepared_length: Callable[[int], int] = keep_length
    """Tokens of a row once it is prepared, from those of a row of data."""
    after_round: Callable[[TrainingContext, int], dict[str, float]] = keep_weights
    """(live, steps done before the round) -> numbers about it: once its last step was made, before
    its weights go to an engine."""
    auxiliary: Mapping[str, Any] = field(default_factory=dict)
    """`AuxiliaryObjective`s by name: separate models that `after_round` trains. They are no roles:
    the step does not see them."""
    evaluate: Callable[[ModelSnapshot, Scorer], dict[str, float]] = no_numbers
    """Numbers of its own besides the held-out loss: {"eval/...": ...}; on every process."""
    sampler: Callable[..., Any] | None = None
    """Who writes answers with the trained model: made and used as rollout.local's LocalSampler, for
    which None stands. A method with another one has a model that predicts no next token: whatever
    goes by next tokens (log-probs of texts, drafts, other methods beginning with it) is refused."""
    export: Callable[..., None] = export_trained
    """(held, config, folder, dtype): write what the run gives; see export.export_model."""

    @property
    def mesh(self) -> Any:
        """The devices that train."""
        return next(role.bundle.mesh for role in self.roles.values() if role.weights == "trained")


class Method(Protocol):
    """What a file in `tasks/` holds, or the module or class that an entry point of the group
    `jaxtrain.tasks` names."""

    Section: type[TaskSection]
    """Its section `task` of the config; `kind` is its name."""

    @staticmethod
    def open_data(config: Config, tokenizer: Any) -> Data:
        """What its data are."""
        ...

    @staticmethod
    def make(config: Config) -> Task:
        """All checks that need no weights, then the method."""
        ...


def of_policy(loss: Callable) -> Callable:
    """A loss of one model, for the role POLICY."""
    return lambda models, batch: loss(models[POLICY], batch)
