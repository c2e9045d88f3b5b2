"""Publishing in a run of several processes: all gather weights, process 0 sends them."""

from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import override

from jaxtrain.distributed.broadcast import broadcast_or_raise
from jaxtrain.generation.publisher import Publisher
from jaxtrain.models.parameters import Params, Rebuild


class SharedPublisher(Publisher):
    """Publisher of every process, around the one that process 0 has."""

    def __init__(self, publisher: Publisher | None, gather: Callable[[Params], Mapping[str, Any]]):
        """publisher: on process 0. gather: a collective that makes what it publishes."""
        self.publisher, self.gather = publisher, gather

    @override
    def publish(self, version: int, params: Params, rebuild: Rebuild) -> dict[str, float]:
        gathered, publisher = self.gather(params), self.publisher

        def send() -> dict[str, float]:
            assert publisher is not None, "only process 0 publishes"
            return publisher.publish(version, gathered, rebuild)

        # The others wait, and raise what process 0 does: a round begins everywhere or nowhere.
        return broadcast_or_raise("the weights are out", send)

    @override
    def sleep(self) -> None:
        if self.publisher is not None:
            self.publisher.sleep()

    @override
    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
