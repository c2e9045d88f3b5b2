"""Publishers, which bring trained weights to an engine."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable


class Publisher(Protocol):
    """Brings weights to the engine; called on the loop thread between rounds."""

    def publish(self, version: int, params: Any, rebuild: Any) -> dict[str, float]:
        """Return when the engine samples from `version`, or once `params` may change where all
        requests made from then on wait for it; metrics such as {"sync/seconds": 0.4}.

        params and rebuild: parameters by path, and what makes a model of them. Raises RunStopped
        or UserError when the engine cannot be brought there.
        """
        ...

    def sleep(self) -> None:
        """A round was collected and is about to be trained: an engine on the trainer's own device
        may give back its memory until the next publish."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class AwaitedPublisher(Publisher, Protocol):
    """Publisher of an engine that starts while the run opens data and weights."""

    def wait(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Return once the engine answers, on every process; UserError if it cannot do what the run
        needs, Interrupted once should_stop() on process 0."""
        ...


@runtime_checkable
class DraftPublisher(Publisher, Protocol):
    """Publisher of an engine that guesses with a draft."""

    def use_draft(self, draft: Any) -> None:
        """Guess with this draft from the next publish on, a core.roles.Held whose weights may
        change after that; on every process."""
        ...
