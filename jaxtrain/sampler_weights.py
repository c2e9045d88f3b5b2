"""A run's parameters where the local sampler reads them: the trainer's own, or process 0's copy."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxtrain.assemble import Parts, abstract_params
from jaxtrain.parallel.gather import gather_params
from jaxtrain.parallel.mesh import is_main_process, make_mesh
from jaxtrain.parameters import Params, Rebuild
from jaxtrain.rollout.types import Publisher


class SamplerWeights:
    """Brings parameters to the devices that sample.

    One process samples on the trainer's mesh, without a copy. Of several, process 0 samples alone,
    on its own devices: all gather the parameters there.
    """

    def __init__(self, parts: Parts):
        self.copies = jax.process_count() > 1
        self.mesh, self.places = parts.mesh, {}
        """Where process 0 samples."""
        if self.copies and is_main_process():
            self.mesh = make_mesh(jax.local_devices(), fsdp=-1)
            shapes, _ = abstract_params(dataclasses.replace(parts, mesh=self.mesh))
            self.places = {path: shape.sharding for path, shape in shapes.items()}

    def __call__(self, params: Params) -> Params:
        """To be called by every process; {} on all but process 0."""
        return gather_params(params, self.places) if self.copies else params


class SharedPublisher:
    """`rollout.types.Publisher` of a run of several processes: all gather, process 0 publishes."""

    def __init__(
        self,
        own: Publisher | None,
        gather: Callable[[Params], Any],
        forget: Callable[[], None] | None = None,
    ):
        """own: on process 0. gather: makes what it publishes. forget: lets go of that once a round
        was drawn."""
        self.own, self.gather, self.forget = own, gather, forget

    def publish(self, version: int, params: Params, rebuild: Rebuild) -> dict[str, float]:
        """As the own one; the others return as soon as their part is gathered."""
        gathered = self.gather(params)
        return {} if self.own is None else self.own.publish(version, gathered, rebuild)

    def sleep(self) -> None:
        """See types.Publisher."""
        if self.own is not None:
            self.own.sleep()
            if self.forget is not None:
                self.forget()

    def close(self) -> None:
        """See types.Publisher."""
        if self.own is not None:
            self.own.close()
