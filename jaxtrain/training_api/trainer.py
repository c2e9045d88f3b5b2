"""Models that clients train on one base: adapters of any rank, or all of its weights.

    Base ── ModelKind (rank, targets) ── programs, shared by all models of the kind
                └─ TrainedModel: State, and the sums of gradients since its last step

All calls are made by one thread, the only one that launches work on the devices.
"""

import dataclasses
import functools
import hashlib
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import AdapterConfig, Config
from jaxtrain.core.adapter import make_adapter
from jaxtrain.core.roles import ModelSnapshot, Role, Roles
from jaxtrain.core.step import (
    EXTREMES,
    Backward,
    State,
    StepSums,
    init_state,
    join_metrics,
    make_update,
)
from jaxtrain.core.weights import start_adapter
from jaxtrain.data.packing.pack import pack_for_scoring
from jaxtrain.distributed.feed import feed, row_shards, to_host
from jaxtrain.errors import UserError
from jaxtrain.text_safety import show
from jaxtrain.training_api import wire
from jaxtrain.training_api.losses import TOTAL, find_loss, make_loss
from jaxtrain.training_api.optimizer import make_adam, set_numbers
from jaxtrain.training_api.requests import FIELDS, TrainingRequest, lay_out_data, read_datum

ALPHA = 32.0
"""Tinker's: the correction is scaled by ALPHA / rank."""
ROLE = "policy"
MAX_PROGRAMS = 64
"""Losses, with their numbers, whose programs are kept for a kind of models."""
MAX_KINDS = 8
"""Kinds of models whose programs stay in memory when no model needs them."""


class LoRASpec(NamedTuple):
    """Parameters that a model trains."""

    rank: int
    """0: all weights."""
    attention: bool = True
    mlp: bool = True

    @property
    def targets(self) -> list[str]:
        """Presets of section adapter."""
        if self.attention and self.mlp:
            return ["all-linear"]
        return [name for name in ("attention", "mlp") if getattr(self, name)]


class Base:
    """Model that adapters are trained on, with its weights on the devices."""

    def __init__(self, config: Config, snapshot: ModelSnapshot, longest: int):
        """snapshot: of a whole model, or of `without_new_adapter`. longest: tokens of a datum, its
        last target included. UserError for a model that has an adapter already."""
        self.config, self.longest = config, longest
        self.bundle = snapshot.roles.bundle
        adapter = self.bundle.adapter
        if adapter is not None and (adapter.slots or adapter.full or adapter.rows):
            cause = "this one is an adapter itself; make it whole first (jaxtrain merge)"
            if has_new_adapter(snapshot):
                cause = (
                    "section adapter begins one on this; remove it, or set only adapter.kind and"
                    " adapter.quantize"
                )
            raise UserError(f"--train trains adapters on a whole model, and {cause}")
        keys = config.adapter.model_dump(exclude_defaults=True).keys() - {"kind", "quantize"}
        if adapter is not None and adapter.source is None and keys:
            raise UserError(
                f"adapter.{min(keys)} has no effect with --train: clients say what their adapters"
                " are; remove it, or set only adapter.kind and adapter.quantize"
            )
        self.quantize: Any = "none" if adapter is None else adapter.quantize
        """Storage of the frozen kernels, as in adapter.quantize."""
        self.params = dict(snapshot.params())
        self.mesh = self.bundle.mesh
        self.follows_trees = snapshot.model().follows_trees
        self._kinds: weakref.WeakValueDictionary[LoRASpec, ModelKind] = (
            weakref.WeakValueDictionary()
        )
        self._recent: deque[ModelKind] = deque(maxlen=MAX_KINDS)

    def fingerprint(self) -> str:
        """Return the sha256 over name, dtype, shape, first and last vector of every parameter:
        training or merging changes a parameter nearly everywhere."""
        digest = hashlib.sha256()
        for path, value in sorted(self.params.items()):
            digest.update(repr((path, str(value.dtype), value.shape)).encode())
            for index in (0, -1):
                digest.update(to_host(value[(index,) * (value.ndim - 1)]).tobytes())
        return digest.hexdigest()

    def kind(self, lora: LoRASpec) -> "ModelKind":
        """Return the kind of models that train this; UserError where the model has no such
        part."""
        kind = self._kinds.get(lora)
        if kind is None:
            kind = self._kinds[lora] = ModelKind(self, lora)
        if kind in self._recent:
            self._recent.remove(kind)
        self._recent.append(kind)
        return kind


def has_new_adapter(snapshot: ModelSnapshot) -> bool:
    """Return True for a model with the adapter that section adapter has begun."""
    adapter = snapshot.roles.bundle.adapter
    return adapter is not None and adapter.source is None and not snapshot.step


def without_new_adapter(snapshot: ModelSnapshot) -> ModelSnapshot:
    """Return a model that was opened with adapter.quantize without the adapter that section adapter
    has begun over its quantized base: clients bring theirs. Other models are returned as they
    are."""
    roles, adapter = snapshot.roles, snapshot.roles.bundle.adapter
    if adapter is None or not has_new_adapter(snapshot):
        return snapshot
    if adapter.quantize == "none" or adapter.full or adapter.rows:
        return snapshot
    bundle = dataclasses.replace(roles.bundle, adapter=dataclasses.replace(adapter, slots={}))
    base, params = Roles({roles.trained: Role(bundle)}), snapshot.params()
    return ModelSnapshot(base, {path: params[path] for path in base.frozen_shapes}, 0)


class ModelKind:
    """Roles, optimizer and compiled programs of models that are alike."""

    def __init__(self, base: Base, lora: LoRASpec):
        self.base, self.lora = base, lora
        bundle = base.bundle
        if not lora.rank and base.quantize != "none":
            raise UserError(
                f"lora_config.rank 0 trains all weights, and those of the base are stored in fewer"
                f" bits (adapter.quantize {base.quantize}); give a rank of at least 1"
            )
        if lora.rank:
            section = AdapterConfig(
                kind="lora",
                rank=lora.rank,
                alpha=ALPHA,
                target=lora.targets,
                quantize=base.quantize,
            )
            adapter = make_adapter(section, bundle.architecture)
            bundle = dataclasses.replace(bundle, adapter=adapter)
        self.roles = Roles({ROLE: Role(bundle)})
        self.frozen = {path: base.params[path] for path in self.roles.frozen_shapes}
        self.optimizer = make_adam()
        self.update = jax.jit(make_update(self.optimizer, None), donate_argnums=0)
        self.backward = functools.lru_cache(MAX_PROGRAMS)(self._make_backward)

    def start(self, seed: int) -> State:
        """Return the state of a new model."""
        roles = self.roles
        with jax.set_mesh(self.base.mesh):
            if roles.bundle.adapter is None:
                # Copies, as updates donate them.
                trained = {path: jnp.copy(self.base.params[path]) for path in roles.trained_shapes}
                copies = {path: jnp.copy(self.base.params[path]) for path in roles.copy_shapes}
            else:
                trained = start_adapter(roles.bundle, roles.trained_shapes, self.base.params, seed)
                copies = {}
            return init_state(trained, self.optimizer, copies)

    def _make_backward(self, loss: str, settings: tuple) -> tuple[Any, Backward, Callable]:
        """Return (the loss, its backward pass, its forward pass)."""
        kind = find_loss(loss, dict(settings))
        function = make_loss(loss, kind, self.base.config)
        backward = Backward(self.roles.build, function, {TOTAL: 1.0}, apart=True)

        def forward(params: Any, frozen: Any, batch: Any) -> Any:
            micro = jax.tree.map(lambda leaf: leaf[0], batch)
            return backward.weigh(params, frozen, micro, {TOTAL: 1.0})

        return kind, backward, jax.jit(forward)


class TrainedModel:
    """Model of a client."""

    def __init__(self, kind: ModelKind, state: State):
        self.kind, self.state = kind, state
        self.sums: StepSums | None = None
        """Gradients since the last step; None: there are none."""
        self.failed = ""
        """Reason why these gradients are not whole; empty: they are."""

    def forward_backward(self, request: TrainingRequest) -> bytes:
        """Run a request; returns a ForwardBackwardOutput. UserError for one that cannot be run."""
        base, frozen = self.kind.base, {**self.kind.frozen, **self.state.copies}
        settings = dict(request.settings)
        trees = settings.pop("trees", "on")
        if trees not in ("on", "off"):
            raise UserError(f"loss_fn_config.trees must be on or off, not {show(trees, 60)}")
        share = base.follows_trees and trees == "on"
        kind, backward, forward = self.kind.backward(request.loss, tuple(sorted(settings.items())))
        vocab_size = base.bundle.architecture.vocab_size
        data = [
            read_datum(message, index, kind, vocab_size, base.longest)
            for index, message in enumerate(request.data)
        ]
        if not data:
            raise UserError("data is empty: there is nothing to train")
        packed = lay_out_data(data, kind, share, base.longest)
        rows = base.config.data.micro_batch_size * row_shards(base.mesh)
        scored: list[Any] = [None] * len(packed.trees)
        total, metrics = 0.0, {}
        with jax.set_mesh(base.mesh):
            for batch, spans in pack_for_scoring(
                packed.trees, rows=rows, share_rows=base.follows_trees, fields=FIELDS
            ):
                batch = batch._replace(denoms={TOTAL: np.ones(1, np.float32)})
                micro = feed(batch, base.mesh)
                if request.forward_only:
                    loss, apart = forward(self.state.params, frozen, micro)
                else:
                    arguments = self.state.params, frozen, micro, self.state.step
                    start, add_micro = backward.open(*arguments)
                    sums = start() if self.sums is None else self.sums
                    self.sums, loss, apart = add_micro(sums, *arguments)
                host = jax.tree.map(lambda x: np.asarray(to_host(x)), apart)
                logp = host.pop("logp")
                total += float(loss)
                metrics = join_metrics(metrics, host) if metrics else host
                for index, row, first in spans:
                    scored[index] = logp[row, first : first + len(packed.trees[index].tokens)]
        logprobs = [scored[tree][places] for tree, places in packed.places]
        return write_output(logprobs, {"loss:sum": total, **name_metrics(metrics)})

    def optim_step(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Make an update with the gradients so far, which are gone afterwards; returns metrics.
        UserError, with the weights as they were, where there are none or they are not finite."""
        sums, failed = self.sums, self.failed
        self.sums, self.failed = None, ""
        if failed:
            raise UserError(f"optim_step: the gradients were dropped, because {failed}")
        if sums is None:
            raise UserError("optim_step: no forward_backward came before it")
        with jax.set_mesh(self.kind.base.mesh):
            state = set_numbers(self.state, numbers)
            self.state, output = self.kind.update(state, sums, True)
        if not bool(output.finite):
            raise UserError(
                "optim_step: loss or gradients are not finite; the weights are unchanged and the"
                " gradients dropped"
            )
        return {"grad_norm": float(output.grad_norm)}

    def drop(self, reason: str) -> None:
        """Note that a part of the gradients is missing, so that the next step must not be made."""
        self.failed = self.failed or reason

    def renew_optimizer(self) -> None:
        """Forget the optimizer's moments and the number of steps."""
        with jax.set_mesh(self.kind.base.mesh):
            state = self.state
            self.state = init_state(state.params, self.kind.optimizer, state.copies)

    def copy_params(self) -> dict[str, Any]:
        """Return copies of what a sampler needs: updates donate the state's own arrays."""
        state = self.state
        return {path: jnp.copy(value) for path, value in {**state.copies, **state.params}.items()}


def draw_seed(model_id: str) -> int:
    """Return the seed of a model whose client gave none: the same for the same id."""
    return zlib.crc32(model_id.encode()) & 0x7FFFFFFF


def name_metrics(metrics: Mapping[str, tuple[Any, Any]]) -> dict[str, float]:
    """Return metrics under names by which the client joins several requests: ":mean", ":max"."""
    named = {}
    for name, (value, weight) in metrics.items():
        join, _ = EXTREMES.get(name.rpartition("/")[2], (None, None))
        reduction = "max" if join is jnp.maximum else "min" if join is jnp.minimum else "mean"
        if weight > 0:
            divided = value / weight if reduction == "mean" else value
            named[f"{name}:{reduction}"] = float(divided)
    return named


def write_output(logprobs: list[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Return a ForwardBackwardOutput: log-probs by datum, [N] or [N, K], and metrics."""
    output = wire.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    runs: list[list[np.ndarray]] = []
    for values in logprobs:
        if not runs or runs[-1][-1].shape[1:] != values.shape[1:]:
            runs.append([])
        runs[-1].append(values)
    for run in runs:
        record = output.loss_fn_outputs.add(num_datums=len(run))
        tensor = record.fields.add(key="logprobs").value
        tensor.data = b"".join(values.astype(np.float32).tobytes() for values in run)
        tensor.offsets = np.cumsum(
            [0, *(4 * values.size for values in run)], dtype=np.int64
        ).tobytes()
        tensor.dtype = wire.FLOAT32
        tensor.trailing_shape.extend(run[0].shape[1:])
    for name, value in sorted(metrics.items()):
        output.metrics.add(key=name, value=value)
    return output.SerializeToString()
