"""Sources of a draft's target states other than the training step (see config.py).

ahead   its own devices ── move, device to device ──┐
server  remote_states.py ── fed like any batch ─────┼─> streams on the devices that train
disk    stored_states.py ── fed like any batch ─────┘
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from jaxtrain.batch import Batch
from jaxtrain.config import Config
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.core.weights import abstract_params
from jaxtrain.distributed.feed import place_of
from jaxtrain.distributed.reshard import move
from jaxtrain.methods.drafts.capture import FrozenTarget
from jaxtrain.methods.drafts.config import DraftTask
from jaxtrain.methods.drafts.draft_model import move_target
from jaxtrain.methods.drafts.prefetch import CaptureStage
from jaxtrain.methods.drafts.remote_states import RemoteStates
from jaxtrain.methods.drafts.stored_states import StoredStates
from jaxtrain.methods.offline import OfflineData
from jaxtrain.models.draft import BaseDraftConfig

WORTH = 1.05
"""Smallest speedup for which another split is suggested."""


@dataclasses.dataclass
class OtherDevices:
    """A `prefetch.CaptureStage` that runs the target on devices of its own."""

    target: FrozenTarget
    mesh: Mesh
    """Of the training."""
    name: str = "the target"

    @property
    def streams(self) -> Mapping[str, Any]:
        """Dtypes of the target's states."""
        return self.target.streams

    def fill(self, batch: Batch) -> Batch:
        """Run the target and move its states to the training devices."""
        moved = {}
        for name, states in self.target(batch).items():
            shape = (*batch.tokens.shape, states.shape[-1])
            moved[name] = move(states, place_of(shape, self.mesh), shape)
        return batch._replace(streams={**batch.streams, **moved})

    def check(self, data: OfflineData) -> str:
        """Return "": the target is that of this process."""
        return ""

    def describe(self, row_tokens: int) -> str:
        """Describe the memory of weights and states."""
        shapes = abstract_params(self.target.bundle)[0].values()
        weight_bytes = sum(
            math.prod(shape.sharding.shard_shape(shape.shape)) * shape.dtype.itemsize
            for shape in shapes
        )
        row = row_tokens * sum(dtype.itemsize for dtype in self.streams.values())
        return (
            f"target on {self.target.bundle.mesh.size} devices of its own:"
            f" {weight_bytes / 2**30:.3f} GiB of"
            f" weights on each; states of a row of {row_tokens} tokens: {row / 2**20:,.1f} MiB"
        )

    def advise(self, busy: float, waiting: float) -> str:
        """Return the split of devices at which neither side would wait, if both scale."""
        num_target, num_training = self.target.bundle.mesh.size, self.mesh.size
        best, gain = find_split(num_target, num_training, busy, waiting)
        if gain < WORTH:
            total = num_target + num_training
            return f"task.target.devices {num_target} is the best split of these {total}"
        return (
            f"By these times task.target.devices {best} of {num_target + num_training} would be"
            " about"
            f" {gain:.1f}x as fast"
        )

    def close(self) -> None:
        """Do nothing: no other process is waited for."""


def find_split(num_target: int, num_training: int, busy: float, step: float) -> tuple[int, float]:
    """Return (devices for the target, speedup) of the best split, for a target that takes `busy`
    seconds a batch on `num_target` devices and training that takes `step` on `num_training`; both
    are assumed to scale with devices."""
    total = num_target + num_training

    def pace(devices: int) -> float:
        return max(busy * num_target / devices, step * num_training / (total - devices))

    best = min(range(1, total), key=lambda devices: (pace(devices), abs(devices - num_target)))
    return best, pace(num_target) / max(pace(best), 1e-12) if math.isfinite(
        pace(num_target)
    ) else 1.0


def open_stage(
    config: Config, target: ModelBundle, draft: ModelBundle, *, last: bool
) -> CaptureStage | None:
    """Return the stage that computes the states that the draft reads; None: the step itself does.
    last: whether the final-normed states are needed, too."""
    task, architecture = config.task, draft.architecture
    assert isinstance(task, DraftTask) and isinstance(architecture, BaseDraftConfig)
    if task.target.source == "step":
        return None
    bundle = move_target(config, target)
    runs = FrozenTarget(bundle, architecture.capture, last=last, seed=config.run.seed)
    if task.target.source == "ahead":
        return OtherDevices(runs, draft.mesh)
    if task.target.source == "server":
        return RemoteStates(task.target, runs)
    return StoredStates(config, runs)
