"""A step's device output read into the numbers that people watch."""

import resource
import sys
import time
from collections.abc import Container
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxtrain.batch import Batch
from jaxtrain.core.metrics import Throughput, average, count_work, model_flops, peak_flops
from jaxtrain.core.optimizer import is_vector
from jaxtrain.core.session import Session
from jaxtrain.core.weights import count_weights
from jaxtrain.distributed.broadcast import mark_shared
from jaxtrain.distributed.mesh import is_main_process
from jaxtrain.errors import RunStopped
from jaxtrain.models.parameters import split_model


class NonFiniteStep(RunStopped):
    """A step's loss or gradient was not finite; every process reads that."""

    def __init__(self, text: str, step: int):
        super().__init__(text)
        self.step = step
        """Step that was not finite; the state is the one before it."""
        # All processes read the same output and raise at the same step: it must not be sent to them
        # as well.
        mark_shared(self)


class PendingStep(NamedTuple):
    """A dispatched step whose numbers were not read yet."""

    step: int
    """Count of this step, from 1."""
    output: Any
    """step.StepOutput on the devices."""
    batch: Batch
    """Host batch of the step."""
    counters: dict[str, Any]
    """Counters of the source right after it returned the batch."""
    round: dict[str, float] = {}
    """Metrics of the round that begins with the batch."""
    policy: str = ""
    """Name of the trained policy; "" if there is only one."""
    update: int = 0
    """Count of that policy's steps, from 1."""
    compiled: bool = False
    """Whether the call compiled the program, so that its time is no step time."""


class StepReader:
    """Reads a step's device output and turns it into metrics."""

    def __init__(self, session: Session):
        config = session.config
        device = jax.devices()[0]
        self.session = session
        # Computed step by step, a rate would wait for the next step, which the devices already run.
        steps = np.arange(session.rounds.total_steps)
        self.learning_rates = np.asarray(jax.jit(session.schedule)(steps))
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)  # noqa: E731
        roles, snapshot = session.roles, session.snapshot()
        self.model = roles.rebuild(roles.trained)(jax.tree.map(shape, snapshot.params()))
        self.draft_targets: list[tuple[Any, float]] = []
        """For a draft: layers of its target that the step runs, and their numbers of weights."""
        self.guesses = session.bundle.architecture.guesses
        """Whether a draft trains, whose steps may run its target, too."""
        if self.guesses:
            for name, role in roles.roles.items():
                model = roles.rebuild(name)(
                    jax.tree.map(shape, roles.params(name, snapshot.weights))
                )
                if role.in_loss and name != roles.trained and hasattr(model, "stack"):
                    self.draft_targets.append((model.stack, count_matmul_params(model.stack)))
        else:
            self.matmul_params = count_matmul_params(self.model, session.frozen)
        peak = peak_flops(device.device_kind, config.model.compute_dtype, config.log.peak_tflops)
        self.throughput = Throughput(session.bundle.mesh.size, peak)
        self.is_nll = session.task.coef == {"nll": 1.0} and not config.model.find_balancing()
        """Whether the loss is a mean over the weights of `nll` and nothing else."""

    def read(self, pending: PendingStep) -> dict[str, float]:
        """Wait for the step and return its values; raises NotFinite if it was not."""
        # Waits for this step while the devices already run the next one. The time is taken at once,
        # or the host's own work below would count as the step's.
        output = jax.device_get(pending.output)
        end_time = time.monotonic()
        if not output.finite:
            raise NonFiniteStep(self.explain(pending, output), pending.step)
        tokens, spans = count_work(pending.batch)
        flops = self.count_flops(pending.batch, tokens, spans)
        if pending.compiled:
            # The call compiled first, so the time at which it dispatched the step is unknown.
            self.throughput.last_time = None
        rates = self.throughput.read(end_time, tokens, flops)
        values = {
            **{name: float(v) for name, v in average(output.metrics).items()},
            "grad_norm": float(output.grad_norm),
            "learning_rate": float(self.learning_rates[pending.update - 1]),
            "trained_tokens": float(
                sum(np.count_nonzero(w) for w in pending.batch.weights.values())
            ),
        }
        if self.is_nll and "nll" not in pending.batch.denoms:
            # Apart, because what a mean is over differs between runs that are compared.
            count = float(pending.batch.weights["nll"].sum(dtype=np.float64))
            values |= {"loss/sum": values["loss"] * count, "loss/token_count": count}
        if pending.policy:
            values = {f"{pending.policy}/{name}": value for name, value in values.items()}
        return {**values, "tokens": float(tokens), **rates, "peak_memory_gib": peak_memory()}

    def count_flops(self, batch: Batch, tokens: int, spans: np.ndarray) -> float:
        """FLOPs of a step: of a draft and of its target's forward pass, or of the trained model."""
        if not self.guesses:
            mixing = self.model.stack.mixing_flops(spans)
            return model_flops(self.matmul_params, tokens, mixing) + self.count_image_flops(batch)
        total = self.model.step_flops(batch, tokens, spans)
        for stack, weights in self.draft_targets:
            total += 2.0 * weights * tokens + stack.mixing_flops(spans)
        return total

    def count_image_flops(self, batch: Batch) -> float:
        """FLOPs of a step's images: forward, and backward for what is trained."""
        if batch.images is None:
            return 0.0
        trained, total = self.session.roles.trained_shapes, 0.0
        for part, flops in self.model.vision.forward_flops(batch.images).items():
            kernels = any(path.startswith(f"vision.{part}.") for path in trained)
            adapters = self.session.bundle.adapter is not None
            total += flops * (1.0 if not kernels else 2.0 if adapters else 3.0)
        return total

    def restart(self) -> None:
        """Time the next step from now on: what went before was no training step."""
        self.throughput.last_time = time.monotonic()

    def explain(self, pending: PendingStep, output: Any) -> str:
        """Describe the step and batch that were not finite; save the batch to a file."""
        bad = [int(i) for i in np.flatnonzero(~np.isfinite(output.micro_loss))]
        path = self.session.folder / f"nonfinite_batch_step_{pending.step}.npz"
        fields = {f: v for f, v in pending.batch._asdict().items() if isinstance(v, np.ndarray)}
        weights = {f"weights.{name}": value for name, value in pending.batch.weights.items()}
        batch_note = f"Its batch is in {path}"
        try:
            if is_main_process():
                # All processes have the same host batch.
                np.savez(path, **fields, **weights)
        except OSError as error:
            batch_note = f"Its batch could not be written ({error.strerror or error})"
        where = f"the loss of microstep {bad[0]}" if bad else "a gradient (the loss was finite)"
        return (
            f"step {pending.step}: {where} is not finite (gradient norm {output.grad_norm:g}). The"
            f" weights were left as they were before it. {batch_note}. Lower optim.learning_rate,"
            " raise optim.warmup_steps, or look at the data"
        )


class ZeroGradientWarning:
    """Says once that gradients have been zero for many steps, so that nothing trains."""

    STEPS = 10
    """Steps in a row."""

    def __init__(self) -> None:
        self.zeros: dict[str, int] = {}
        """Steps in a row with zero gradients, by metric: with several policies each has one."""

    def check(self, values: dict[str, float]) -> str | None:
        """Return a warning the first time that gradients were zero over the last steps."""
        for name, value in values.items():
            if name.rpartition("/")[2] != "grad_norm":
                continue
            self.zeros[name] = self.zeros.get(name, 0) + 1 if value == 0 else 0
            if self.zeros[name] == self.STEPS:
                return (
                    f"warning: {name} has been 0 for {self.STEPS} steps in a row, so nothing is"
                    " learned: the loss has no weight anywhere (rewards that are all equal, masks"
                    " that leave out every token), or what is trained takes no part in it"
                )
        return None


class ExpertOverflowWarning:
    """Says once that experts on other devices get more tokens than fit into a round."""

    MAX_ROUNDS = 1.5
    STEPS = 10
    """Steps that are averaged."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def check(self, values: dict[str, float]) -> str | None:
        """Return a warning the first time that layers took too many rounds over the last steps."""
        if "expert_rounds" not in values or len(self.seen) > self.STEPS:
            return None
        self.seen = [*self.seen[1 - self.STEPS :], values["expert_rounds"]]
        rounds = sum(self.seen) / len(self.seen)
        if len(self.seen) < self.STEPS or rounds <= self.MAX_ROUNDS:
            return None
        self.seen = [rounds] * (self.STEPS + 1)
        return (
            f"warning: experts took {rounds:.2f} rounds a layer over the last {self.STEPS} steps,"
            " for some devices get far more tokens than others: balance the router"
            " (model.router_aux_loss_coef, model.router_bias_update_rate), or raise"
            " parallel.expert_buffer, which takes memory"
        )


def count_matmul_params(model: Any, frozen: Container[str] = ()) -> float:
    """Count the weights that multiply a token: those of the layers, by their token_share, and of
    the output head.

    Of a model of arrays or shapes. The parameters whose paths are in `frozen` count 2/3: forward
    and the input's gradient, but not their own.
    """
    total = 0.0
    for node_path, node in nnx.iter_graph(model):
        if node_path[:1] == ("vision",):
            continue  # multiplies patches
        share = (
            1.0 if node is getattr(model, "head_table", None) else getattr(node, "token_share", 0.0)
        )
        params = split_model(node)[0] if share else {}
        for name, value in params.items():
            path = ".".join(map(str, (*node_path, name)))
            if not is_vector(path):
                weights = share * count_weights(path, value)
                total += weights * 2 / 3 if path in frozen else weights
    return total


def peak_memory() -> float:
    """Most memory in use so far, in GiB: of the first device, or of this process on a CPU."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"] / 2**30
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
