"""What a training run works with: data, model, optimizer, compiled functions, in one place."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxtrain.adapters.attach import split_trained
from jaxtrain.assemble import Parts, abstract_params, open_frozen, open_params
from jaxtrain.checkpoint import Checkpoints
from jaxtrain.config import Config
from jaxtrain.data.pipeline import Source, count_steps, open_source
from jaxtrain.errors import UserError
from jaxtrain.optim import build_optimizer, build_schedule
from jaxtrain.parallel.feed import row_shards
from jaxtrain.parameters import Params, Rebuild
from jaxtrain.step import State, abstract_state, init_state, make_eval, make_step
from jaxtrain.tasks import build_task


@dataclass
class Session:
    """What the loop works with; only `state` changes."""

    config: Config
    parts: Parts
    source: Source
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
    start: int = 0
    """Steps that were done before this process."""

    @property
    def params(self) -> Params:
        """All parameters, for `rebuild` and `evaluate`."""
        return {**self.frozen, **self.state.params}


def open_session(config: Config, parts: Parts, say: Callable[[str], None]) -> Session:
    """Data, optimizer and step functions of a run; its weights are still shapes."""
    microsteps = count_microsteps(config, parts.mesh)
    source, total_steps = open_data(config, parts, microsteps, say)
    shapes, rebuild = abstract_params(parts)
    schedule = build_schedule(config.optim, total_steps)
    trained, frozen = split_trained(shapes, parts.adapter)
    optimizer = build_optimizer(config.optim, schedule, trained)
    task = build_task(config)
    return Session(
        config=config,
        parts=parts,
        source=source,
        total_steps=total_steps,
        rebuild=rebuild,
        optimizer=optimizer,
        schedule=schedule,
        step=make_step(rebuild, task.loss, task.coef, optimizer, config.optim.max_grad_norm),
        evaluate=make_eval(rebuild, task.loss),
        state=abstract_state(trained, optimizer),
        frozen=frozen,
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
    restored = checkpoints.restore(session.state)
    if restored is None:
        params = open_params(session.parts, session.config.run.seed)
        trained, session.frozen = split_trained(params, session.parts.adapter)
        session.state = init_state(trained, session.optimizer)
        return
    session.frozen = open_frozen(session.parts, session.config.run.seed)
    session.state, session.start = restored.arrays, restored.step
    session.source.restore(restored.cursor)
