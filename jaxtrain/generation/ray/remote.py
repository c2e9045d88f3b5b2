"""An object in another process, as those who call it see it; Ray's actors are one kind of it."""

import asyncio
from concurrent.futures import Future
from typing import Any, Protocol

from jaxtrain.generation.ray.wire import unpack_error


class RemoteLost(Exception):
    """The process that should have answered is gone; its successor knows nothing of the call."""


class RemoteObject(Protocol):
    """One process and the object in it."""

    @property
    def error(self) -> BaseException | None:
        """Why no call will ever be answered again."""
        ...

    def call(self, name: str, *arguments: Any) -> Future:
        """Call a method there. The future raises Lost where the process went before it answered,
        and RunStopped where the whole cluster did."""
        ...

    def end(self) -> None:
        """End the process at once; whoever keeps it starts another in its place."""
        ...


def read(reply: Any) -> Any:
    """What a method answered, or what it raised."""
    if isinstance(reply, dict) and "error" in reply:
        raise unpack_error(reply["error"])
    return reply


async def ask(far: RemoteObject, name: str, *arguments: Any, seconds: float | None = None) -> Any:
    """`call`, awaited; TimeoutError after so many seconds."""
    return read(await asyncio.wait_for(asyncio.wrap_future(far.call(name, *arguments)), seconds))
