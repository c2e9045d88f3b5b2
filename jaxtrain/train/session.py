"""What a training run works with: data, model, optimizer, compiled functions, in one place."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.adapters.attach import split_trained
from jaxtrain.adapters.spec import Adapter
from jaxtrain.config import Config, RLTask
from jaxtrain.core.assemble import Parts, abstract_params, open_frozen, open_params
from jaxtrain.core.optim import build_optimizer, build_schedule
from jaxtrain.core.scorer import Scorer
from jaxtrain.core.step import State, abstract_state, init_state, make_eval, make_step
from jaxtrain.data.pipeline import Source, count_steps, open_source
from jaxtrain.errors import UserError
from jaxtrain.models.parameters import Params, Rebuild
from jaxtrain.parallel.feed import row_shards
from jaxtrain.rollout.open import Rollouts, open_rollouts
from jaxtrain.run.checkpoint import Checkpoints
from jaxtrain.tasks import build_task
from jaxtrain.tasks.balance import add_balance
from jaxtrain.tasks.rl import scores_reference


@dataclass
class Session:
    """What the loop works with; only `state` changes."""

    config: Config
    parts: Parts
    source: Any
    """Iterator of rounds: data.pipeline.Source or rollout.rounds.RoundSource."""
    total_steps: int
    rebuild: Rebuild
    optimizer: Any
    schedule: Callable[[int], Any]
    step: Callable[..., tuple[State, Any]]
    evaluate: Callable
    state: State
    """Shapes until `start_state` has filled it."""
    frozen: Params
    """What adapters leave as it is; shapes until then, too. Empty where everything is trained."""
    closing: ExitStack
    """Closes the source and, in reinforcement learning, all that the rollouts opened."""
    start: int = 0
    """Steps that were done before this process."""
    rollouts: Rollouts | None = None
    """Engine, publisher and preparation of reinforcement learning."""
    reference: Params = field(default_factory=dict)
    """Starting weights that a reference policy keeps; empty where none does."""

    @property
    def params(self) -> Params:
        """All parameters, for `rebuild` and `evaluate`."""
        return {**self.frozen, **self.state.params}

    def close(self) -> None:
        """Close what gives the rounds: the source, engines and reward workers."""
        self.closing.close()


def open_session(config: Config, parts: Parts, say: Callable[[str], None]) -> Session:
    """Data, optimizer and step functions of a run; its weights are still shapes.

    What was opened is closed again when anything raises; afterwards `Session.close` does it.
    """
    reference = keeps_reference(config, parts.adapter)
    shapes, rebuild = abstract_params(parts)
    trained, frozen = split_trained(shapes, parts.adapter)
    task = build_task(config)
    train_task = add_balance(task, config.model.router_aux_loss_coef)
    with ExitStack() as closing:
        rollouts = None
        if isinstance(config.task, RLTask):
            rollouts = open_rollouts(config, parts, say)
            closing.callback(rollouts.close)
            source, total_steps = rollouts.source, rollouts.total_steps
        else:
            microsteps = count_microsteps(config, parts.mesh)
            source, total_steps = open_data(config, parts, microsteps, say)
            closing.callback(source.close)
        schedule = build_schedule(config.optim, total_steps)
        optimizer = build_optimizer(config.optim, schedule, trained)
        return Session(
            config=config,
            parts=parts,
            source=source,
            total_steps=total_steps,
            rebuild=rebuild,
            optimizer=optimizer,
            schedule=schedule,
            step=make_step(
                rebuild, train_task.loss, train_task.coef, optimizer, config.optim.max_grad_norm
            ),
            evaluate=make_eval(rebuild, task.loss),
            state=abstract_state(trained, optimizer, keep_reference=reference == "mixed"),
            frozen=frozen,
            closing=closing.pop_all(),
            rollouts=rollouts,
        )


def keeps_reference(config: Config, adapter: Adapter | None) -> str | None:
    """What kind of reference policy a run needs: adapter_off, frozen or mixed; None needs none.

    Raises UserError where the adapter of adapter.path trains tables in full: without it the model
    is not the base.
    """
    task = config.task
    if not isinstance(task, RLTask) or not scores_reference(task):
        return None
    full = () if adapter is None else adapter.full
    if task.reference == "adapter_off" and full:
        raise UserError(
            f"task.reference adapter_off: the adapter of adapter.path trains {', '.join(full)} in"
            ' full, which stays when the adapter is off; set task.reference to "frozen"'
        )
    if task.reference != "auto":
        return task.reference
    return "frozen" if adapter is None or full else "adapter_off"


def open_scorer(session: Session) -> Scorer:
    """Log-probs of the session's policy and reference, as they are when asked."""
    config = session.config
    kind = keeps_reference(config, session.parts.adapter)
    held = {"frozen": lambda: session.reference, "mixed": lambda: session.state.reference}
    reference = None
    if kind in held:
        reference = lambda: {**session.frozen, **held[kind]()}  # noqa: E731
    heat = config.sampling.temperature
    return Scorer(
        session.rebuild,
        session.parts.mesh,
        lambda: session.params,
        reference,
        impl=config.model.logp,
        temperature=None if heat == 1.0 else heat,
    )


def count_microsteps(config: Config, mesh: jax.sharding.Mesh) -> int:
    """Microsteps per optimizer step, from the accumulation or the global batch size."""
    rows = config.data.micro_batch_size * row_shards(mesh)
    wanted = config.data.global_batch_size
    if wanted is None:
        return config.optim.gradient_accumulation_steps
    if wanted % rows:
        raise UserError(
            f"data.global_batch_size {wanted} is not a multiple of {rows}, the rows of one forward"
            f" pass (data.micro_batch_size {config.data.micro_batch_size} on {row_shards(mesh)}"
            " row shards); change one of them"
        )
    return wanted // rows


def open_data(
    config: Config, parts: Parts, microsteps: int, say: Callable[[str], None]
) -> tuple[Source, int]:
    """The training source and the number of optimizer steps of the run."""
    shape = {
        "seed": config.run.seed,
        "rows_per_microstep": config.data.micro_batch_size * row_shards(parts.mesh),
        "microsteps": microsteps,
        "task": config.task,
    }
    epochs, total_steps = config.run.num_epochs, config.run.max_steps
    if total_steps is None:
        say("counting steps: tokenising and packing the data once")
        total_steps = count_steps(config.data, parts.tokenizer, **shape, num_epochs=epochs)
        say(f"{total_steps} steps in {epochs:g} epochs")
    return open_source(config.data, parts.tokenizer, **shape, num_epochs=epochs), total_steps


def start_state(session: Session, checkpoints: Checkpoints) -> None:
    """Fill the session's state: from the newest good checkpoint, or else from the start.

    Weights that are trained are not even read when there is a checkpoint, so that resuming needs
    no more memory than training.
    """
    kind = keeps_reference(session.config, session.parts.adapter)
    restored = checkpoints.restore(session.state)
    if restored is None:
        params = open_params(session.parts, session.config.run.seed)
        trained, session.frozen = split_trained(params, session.parts.adapter)
        # Copies: the step donates what it trains.
        copy = jax.tree.map(jnp.copy, trained) if kind in ("frozen", "mixed") else {}
        session.reference = copy if kind == "frozen" else {}
        session.state = init_state(trained, session.optimizer)
        if kind == "mixed":
            session.state = session.state._replace(reference=copy)
        return
    if kind == "frozen":
        params = open_params(session.parts, session.config.run.seed)
        session.reference, _ = split_trained(params, session.parts.adapter)
    session.frozen = open_frozen(session.parts, session.config.run.seed)
    session.state, session.start = restored.arrays, restored.step
    session.source.restore(restored.cursor)
