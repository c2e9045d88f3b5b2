"""Objects in other processes, as their callers see them; Ray's actors are one kind."""

import asyncio
from concurrent.futures import Future
from typing import Any, Protocol

from jaxtrain.generation.ray.wire import unpack_error


class RemoteLost(Exception):
    """The process that should have answered is gone; its successor has not received the call."""


class RemoteObject(Protocol):
    """A process and the object in it."""

    @property
    def error(self) -> BaseException | None:
        """Reason why no call will ever be answered again; None while calls are."""
        ...

    def call(self, name: str, *arguments: Any) -> Future:
        """Call a method of the object. The future raises RemoteLost if the process ended before it
        answered, and RunStopped if the whole cluster is lost."""
        ...

    def end(self) -> None:
        """End the process at once; its supervisor starts another in its place."""
        ...


def read(reply: Any) -> Any:
    """Return what a method returned, or raise what it raised."""
    if isinstance(reply, dict) and "error" in reply:
        raise unpack_error(reply["error"])
    return reply


async def call(
    remote: RemoteObject, name: str, *arguments: Any, seconds: float | None = None
) -> Any:
    """Await a call; raises TimeoutError after so many seconds."""
    return read(await asyncio.wait_for(asyncio.wrap_future(remote.call(name, *arguments)), seconds))
