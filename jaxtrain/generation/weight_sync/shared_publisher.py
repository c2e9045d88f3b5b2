"""Publishing in a run of several processes: all gather weights, process 0 sends them."""

from collections.abc import Callable, Mapping
from typing import Any

from typing_extensions import override

from jaxtrain.distributed.broadcast import broadcast_or_raise
from jaxtrain.generation.publisher import AwaitedPublisher, Publisher
from jaxtrain.models.parameters import Params, Rebuild


class SharedPublisher(AwaitedPublisher):
    """Publisher of every process, around the one that process 0 has."""

    def __init__(
        self,
        publisher: Publisher | None,
        gather: Callable[[Params], Mapping[str, Any]],
        open_engine: Callable[[Callable[[], bool]], None] = lambda should_stop: None,
    ):
        """publisher: on process 0. gather: a collective that makes what it publishes. open_engine:
        returns once the engine of process 0 answers, or raises Interrupted once its argument is
        true."""
        self.publisher, self.gather = publisher, gather
        self._open_engine = open_engine

    @override
    def wait(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        broadcast_or_raise("the engine answers", lambda: self._open(should_stop))

    def _open(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        self._open_engine(should_stop)
        self._open_engine = lambda should_stop: None

    @override
    def publish(self, version: int, params: Params, rebuild: Rebuild) -> dict[str, float]:
        gathered, publisher = self.gather(params), self.publisher

        def send() -> dict[str, float]:
            assert publisher is not None, "only process 0 publishes"
            self._open()
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
