"""The session of a training run: task, models, optimizer, compiled functions, state."""

import functools
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain import plugins
from jaxtrain.batch import Batch
from jaxtrain.config import Config
from jaxtrain.config.model import ModelConfig, OptimConfig
from jaxtrain.config.policies import list_trained
from jaxtrain.core.bundle import ModelBundle, count_microsteps
from jaxtrain.core.losses.balance import Balance, move_biases, with_balance
from jaxtrain.core.optimizer import build_schedule
from jaxtrain.core.roles import ModelSnapshot, Roles, open_optimizer
from jaxtrain.core.scorer import Scorer
from jaxtrain.core.step import (
    State,
    StepNoise,
    TrainStep,
    abstract_state,
    init_state,
    make_eval,
    make_step,
)
from jaxtrain.core.task import Round, Rounds, Task, abstract_batch
from jaxtrain.distributed.broadcast import broadcast
from jaxtrain.distributed.compile_cache import CompileCounter
from jaxtrain.distributed.feed import place_of, row_shards
from jaxtrain.distributed.processes import stop_requested
from jaxtrain.errors import UserError
from jaxtrain.layers.noise import RowNoise
from jaxtrain.models.build import abstract
from jaxtrain.models.capabilities import find_biases
from jaxtrain.models.decoder import Decoder
from jaxtrain.models.parameters import Params
from jaxtrain.runs.checkpoint import Checkpoints


@dataclass
class Session:
    """State of a run that the loop works on; to rounds and methods it is a `TrainingContext`."""

    config: Config
    task: Task
    roles: Roles
    rounds: Rounds
    optimizer: Any
    schedule: Callable[[int], Any]
    run_step: TrainStep
    run_eval: Callable
    state: State
    """Shapes until `start_state` has filled it."""
    frozen: Params
    """Parameters of all roles that no step changes; also shapes until then."""
    auxiliary: Mapping[str, Any] = field(default_factory=dict)
    """`AuxiliaryModel`s by name; also shapes until then."""
    policies: tuple[str, ...] = ()
    """Names of the trained adapters if there are several, else empty."""
    policy: str = ""
    """The policy that `state` belongs to."""
    waiting: dict[str, State] = field(default_factory=dict)
    """States of the policies that are not active."""
    updates: Counter[str] = field(default_factory=Counter)
    """Optimizer steps of each policy."""
    start: int = 0
    """Steps done before this process started."""
    step: int = 0
    fine: Any = None
    """True if the last step was finite, as a device array; set together with the state."""
    folder: Path = Path()
    phase: Callable[..., AbstractContextManager[object]] = lambda name, detail=None: nullcontext()
    signals: Any = None
    ended: bool = False
    """True once an observer has ended the run."""

    def __post_init__(self) -> None:
        self.scorer = Scorer(self.snapshot, impl=self.config.model.logp)
        self._ahead: threading.Thread | None = None
        self._compiles_ahead = False
        self._ending = threading.Event()
        self.ahead_error: BaseException | None = None
        """Error that ended compiling ahead before all programs were compiled."""

    @property
    def row_lengths(self) -> list[int]:
        """Tokens T of the rows that steps may have, ascending: a program for each."""
        task, buckets = self.task, self.config.data.length_buckets
        longest = task.data.row_tokens
        lengths = {n for n in buckets if n < longest} | {longest}
        return sorted(map(task.prepared_length, lengths))

    @property
    def bundle(self) -> Any:
        """The bundle of the trained role."""
        return self.roles.bundle

    def snapshot(self, policy: str = "") -> ModelSnapshot:
        """Return the models with their current weights; policy: with those of this policy."""
        # The active policy is not among those that wait, so its name and "" mean the same.
        state = self.waiting.get(policy, self.state)
        return ModelSnapshot(self.roles, {**self.frozen, **state.copies, **state.params}, self.step)

    def activate_policy(self, policy: str) -> None:
        """Activate one of several trained policies: steps and scores use it from then on."""
        if policy and policy != self.policy:
            self.waiting[self.policy] = self.state
            self.policy, self.state = policy, self.waiting.pop(policy)

    def tree(self) -> dict[str, Any]:
        """Return all arrays of a checkpoint: the trained state, and auxiliary models under their
        names; with several policies, the state of each under its name."""
        if self.policies:
            return {name: self.waiting.get(name, self.state).tree() for name in self.policies}
        auxiliary_states = {
            name: auxiliary.state.tree() for name, auxiliary in self.auxiliary.items()
        }
        return {**self.state.tree(), **auxiliary_states}

    def prepare(self, round: Round) -> Round:
        """Apply `Task.prepare` with the session's scorer."""
        return self.task.prepare(round, self.scorer)

    def update(self, batch: Any) -> Any:
        """Run one optimizer step on a host batch and return its step.StepOutput, which the devices
        may still be computing."""
        self.wait_for_programs()
        if self.bundle.architecture.mtp is not None:
            from jaxtrain.core.losses.mtp import add_weights

            batch = add_weights(batch)
        # The call donates the old state: the arrays of an earlier snapshot are gone. `fine` stays
        # on the device, so a step behind one that was not finite changes nothing although nobody
        # has read that yet.
        self.state, output = self.run_step(self.state, batch, self.frozen, self.fine)
        self.step += 1
        self.updates[self.policy] += 1
        self.fine = output.finite
        return output

    def compile_ahead(self, compiling: CompileCounter, log: Callable[[str], None]) -> None:
        """Begin to compile the step's programs in a thread, the longest rows first; `update` waits
        for it. A program that the run then does not need costs the time alone.

        An error is logged and ends the thread: the step compiles what is missing, and raises it."""
        if not self.task.compiles_ahead or self.task.data.fields.images is not None:
            return
        microsteps = count_microsteps(self.config, self.bundle.mesh)
        fine = jax.ShapeDtypeStruct((), bool, sharding=self.state.step.sharding)
        # Shapes now; `start_state` puts arrays in their places meanwhile.
        state, frozen = self.state, self.frozen

        def compile_all() -> None:
            compiling.ahead.add(threading.get_ident())
            with jax.set_mesh(self.task.mesh):
                for length in reversed(self.row_lengths):
                    if not self.ended and not self._ending.is_set():
                        batch = self.batch_shapes(length)
                        compile_step(self.run_step, state, batch, frozen, fine, microsteps)

        def log_failure() -> None:
            try:
                compile_all()
            except plugins.FAILURES as error:
                self.ahead_error = error
                log(f"note: compiling ahead ended: {plugins.describe(error)}")

        self._compiles_ahead = True
        self._ahead = threading.Thread(target=log_failure, name="compiling ahead")
        self._ahead.start()

    @property
    def compiled_ahead(self) -> bool:
        """True if all step programs are compiled in a thread, or have been, and none failed."""
        return self._compiles_ahead and self.ahead_error is None

    def batch_shapes(self, length: int) -> Batch:
        """Return the shapes of a microstep [1, B, T], prepared and placed as the step gets it."""
        mesh, task = self.bundle.mesh, self.task
        rows = self.config.data.micro_batch_size * row_shards(mesh)

        def add_sharding(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding: jax.sharding.Sharding = jax.sharding.SingleDeviceSharding(
                mesh.devices.flat[0]
            )
            if mesh.size > 1:
                sharding = place_of(x.shape, mesh)
            dtype = jax.dtypes.canonicalize_dtype(x.dtype)
            return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)

        batch = abstract_batch(task, (1, rows, length))
        if self.bundle.architecture.mtp is not None:
            from jaxtrain.core.losses.mtp import COMPONENT

            weights = {**batch.weights, COMPONENT: next(iter(batch.weights.values()))}
            batch = batch._replace(weights=weights)
        return jax.tree.map(add_sharding, batch)

    def end_compiling(self) -> None:
        """Wait for the program that compiles ahead, and begin no other."""
        self._ending.set()
        self.wait_for_programs()

    def wait_for_programs(self) -> None:
        """Wait until nothing compiles ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            with self.phase("compiling"):
                ahead.join()

    def mix(self, role: str, share: float) -> None:
        """Mix `share` of the trained parameters into a role that is a moving copy."""
        self.state = mix_copies(self.state, role, share)

    def accept_stop(self) -> None:
        """End the run: a wait was interrupted by a stop request, possibly from another process."""
        # Marked here as well: all processes must leave the loop at the same step, whichever of them
        # got the signal.
        self.signals.stop = True
        self.signals.name = self.signals.name or stop_requested()

    def stop_requested(self) -> bool:
        """Return whether a signal, here or elsewhere, asks for the end of the run."""
        return bool(self.signals and self.signals.stop) or bool(stop_requested())

    def stops_everywhere(self) -> bool:
        """Return on every process whether the run is to stop, as process 0 has heard: for a branch
        with collectives, for a signal reaches one process before another."""
        return broadcast("whether to stop", self.stop_requested)


def compile_step(
    step: TrainStep, state: State, batch: Batch, frozen: Params, fine: Any, count: int
) -> None:
    """Compile what steps of `count` microsteps need, from shapes alone; their first call then
    compiles nothing. batch: shapes of a microstep [1, B, T], placed as `feed` does."""
    if count == 1 and step.prefers_single:
        step.single.lower(state, batch, frozen, fine).compile()
        return
    # A place that differs, be it by its kind alone, makes another program.
    sharding = batch.tokens.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        sharding = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
    denom = jax.ShapeDtypeStruct((1,), jnp.float32, sharding=sharding)
    batch = batch._replace(denoms=dict.fromkeys(step.backward.coef, denom))
    arguments = state.params, {**frozen, **state.copies}, batch, state.step
    start, add_micro = step.backward.open(*arguments)
    compiled = start.lower().compile()
    sums = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.eval_shape(start),
        compiled.output_shardings,
    )
    add_micro.lower(sums, *arguments).compile()
    step.update.lower(state, sums, fine).compile()


def open_session(config: Config, task: Task, log: Callable[[str], None]) -> Session:
    """Open the data, optimizer and step functions of a run; its weights are still shapes.

    The data are closed if an error occurs here; later `Session.rounds.close` closes them.
    """
    roles = Roles(task.roles)
    loss, coef = add_balance(task, roles.trained, config.model)
    if roles.bundle.architecture.mtp is not None:
        loss, coef = add_head_loss(task, loss, coef, roles.trained, config.model)
    update_biases = make_bias_update(roles, config.model.router_bias_update_rate)
    noise = make_step_noise(roles, config.model.neftune_alpha, config.run.seed)
    rounds = task.data.open(roles.bundle, log)
    try:
        policies = list_trained(config)
        # Each policy makes its share of the steps.
        steps = math.ceil(rounds.total_steps / max(1, len(policies)))
        optim = cut_warmup(config, steps, log)
        schedule = build_schedule(optim, steps)
        optimizer, build = open_optimizer(optim, schedule, roles)
        state = abstract_state(
            roles.trained_shapes, optimizer, roles.copy_shapes, config.optim.offload
        )
        run_step = make_step(
            build, loss, coef, optimizer, config.optim.max_grad_norm, update_biases, noise
        )
        run_step.prefers_single = not task.varying_microsteps
        return Session(
            config=config,
            task=task,
            roles=roles,
            rounds=rounds,
            optimizer=optimizer,
            schedule=schedule,
            run_step=run_step,
            # Without balance and noise: held-out numbers are those of the task alone.
            run_eval=make_eval(roles.build, task.loss),
            state=state,
            frozen=roles.frozen_shapes,
            auxiliary=open_auxiliary(task, roles.bundle),
            policies=policies,
            policy=next(iter(policies), ""),
            # Policies have equal shapes, so one abstract state stands for each.
            waiting=dict.fromkeys(policies[1:], state),
        )
    except BaseException:
        # Also after an interrupt: the data may have started workers and servers.
        rounds.close()
        raise


def cut_warmup(config: Config, steps: int, log: Callable[[str], None]) -> OptimConfig:
    """Return section optim with a warm-up that ends within run.max_steps, as of a short trial of a
    config; a cut is logged."""
    warmup = config.optim.warmup_steps
    if warmup is None or warmup <= steps or not config.run.max_steps:
        return config.optim
    log(f"note: optim.warmup_steps {warmup:,} is cut to the run's {steps:,} steps")
    return config.optim.model_copy(update={"warmup_steps": steps})


def open_auxiliary(task: Task, trained: ModelBundle) -> dict[str, Any]:
    """Return the models that the task trains between rounds; weights are shapes."""
    if not task.auxiliary:
        return {}
    from jaxtrain.core.auxiliary import AuxiliaryModel

    return {name: AuxiliaryModel(objective, trained) for name, objective in task.auxiliary.items()}


def make_step_noise(roles: Roles, alpha: float, seed: int) -> StepNoise | None:
    """Return the noise that training steps draw, dropout on adapters and NEFTune's `alpha` on
    embeddings; None where there is none. UserError for a model that cannot.

    Only the trained model draws, and only in its steps: never a reference or a teacher.
    """
    adapter, role = roles.bundle.adapter, roles.trained
    dropout = 0.0 if adapter is None else adapter.dropout
    if not dropout and not alpha:
        return None
    if not isinstance(abstract(roles.bundle.architecture, **roles.bundle.options), Decoder):
        key = f"adapter.dropout {dropout}" if dropout else f"model.neftune_alpha {alpha}"
        raise UserError(f"{key}: what is trained here is no language model but a draft; remove it")

    def apply(models: Any, rng_bits_B: jax.Array) -> Any:
        models[role].noise = RowNoise(rng_bits_B, alpha)
        return models

    return StepNoise(seed, apply)


def add_balance(task: Task, role: str, model: ModelConfig) -> tuple[Callable, dict[str, float]]:
    """Return the task's loss with router metrics and the load losses that section model asks for,
    and the coefficients of all components.

    Changes nothing for a dense model.
    """
    balance = Balance(
        model.router_aux_loss_coef,
        model.router_aux_loss_scope,
        model.router_sequence_loss_coef,
        model.router_z_loss_coef,
    )
    loads = model.router_bias_update_rate > 0

    def loss(models, batch):
        def of_trained(model, batch):
            return task.loss({**models, role: model}, batch)

        return with_balance(of_trained, balance, loads)(models[role], batch)

    return loss, {**task.coef, **balance.coef}


def add_head_loss(
    task: Task, loss: Callable, coef: dict[str, float], role: str, model: ModelConfig
) -> tuple[Callable, dict[str, float]]:
    """Return the loss and the coefficients with those of the multi-token prediction head of the
    trained model. UserError for a task that has no next tokens, and for images."""
    from jaxtrain.core.losses.mtp import COMPONENT, HeadLoss

    key = f'model.mtp.train "{model.mtp.train}"'
    if task.sampler is not None:
        raise UserError(f"{key}: the model of this task predicts no next token; remove it")
    if task.data.fields.images is not None:
        raise UserError(
            f"{key} trains on text alone, and these rows have images; remove it, and the head stays"
            " as in the folder"
        )
    head = HeadLoss(model.mtp.weight, model.mtp.train == "joint", model.logp)

    def with_head(models, batch):
        def of_trained(model, batch):
            return loss({**models, role: model}, batch)

        return head.wrap(of_trained)(models[role], batch)

    return with_head, {**coef, COMPONENT: head.weight}


def make_bias_update(roles: Roles, rate: float) -> Callable | None:
    """Return the function that moves the trained routers' correction biases after each step; None
    at rate 0.

    Raises UserError where there is none, or where it is not trained.
    """
    if rate == 0:
        return None
    bundle = roles.bundle
    places = find_biases(abstract(bundle.architecture, **bundle.options))
    missing = sorted(set(places) - set(roles.trained_shapes))
    if not places or missing:
        reason = f"{missing[0]} is not trained here" if missing else "this model's have none"
        raise UserError(
            f"model.router_bias_update_rate {rate} moves correction biases of routers, but {reason}"
            "; remove it, or train a family that has them in full (without an adapter)"
        )
    return functools.partial(move_biases, places=places, rate=rate)


def mix_copies(state: State, role: str, share: float) -> State:
    """Mix `share` of the parameters into a role's copy (arXiv 2404.09656)."""
    mixed = {
        f"{role}/{path}": ((1.0 - share) * copy + share * value).astype(copy.dtype)
        for path, value in state.params.items()
        for copy in [state.copies[f"{role}/{path}"]]
    }
    return state._replace(copies={**state.copies, **mixed})


def start_state(session: Session, checkpoints: Checkpoints) -> None:
    """Fill the session's state from the newest valid checkpoint, or else initialize it.

    Weights that are trained are not even read when there is a checkpoint, so that resuming needs
    no more memory than training.
    """
    seed, offload = session.config.run.seed, session.config.optim.offload
    session.fine = jax.device_put(True, session.state.step.sharding)
    restored = checkpoints.restore(session.tree())
    if restored is None:
        trained, session.frozen, copies = session.roles.open(seed)
        session.state = init_state(trained, session.optimizer, copies, offload)
        for number, name in enumerate(session.policies):
            folder = session.config.policies[name].path
            if name == session.policy and folder is None:
                continue
            weights = {**session.frozen, **trained}
            key = f"policies.{name}.path"
            adapter = session.roles.draw_again(weights, seed + number, folder, key)
            session.waiting[name] = init_state(adapter, session.optimizer, offload=offload)
        session.state = session.waiting.pop(session.policy, session.state)
        for auxiliary in session.auxiliary.values():
            auxiliary.open(seed)
        return
    _, session.frozen, _ = session.roles.open(seed, trained=False)
    tree = dict(restored.arrays)
    for name, auxiliary in session.auxiliary.items():
        auxiliary.state = State.of_tree(tree.pop(name))
    for name in session.policies:
        state = State.of_tree(tree.pop(name))
        session.updates[name] = int(state.step)
        if name == session.policy:
            session.state = state
        else:
            session.waiting[name] = state
    if not session.policies:
        session.state, session.updates[""] = State.of_tree(tree), restored.step
    session.start = session.step = restored.step
    session.rounds.restore(restored.cursor)
