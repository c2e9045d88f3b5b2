"""Which servers there are: sources that are asked again and again.

A `Source` is anything with `poll`. The config's own list, a launcher and a cluster are sources as
well as files, names and routers: the pool (`servers.py`) takes in what they list and lets go of
what they list no more.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from jaxtrain.config.vllm import VllmConfig


@dataclasses.dataclass(frozen=True)
class Found:
    """One server as a source tells of it."""

    url: str
    """Where its routes are, for requests and for administration."""
    capacity: float | None = None
    """How much it takes beside others, in any unit that they share; None: not told."""
    policy: str = ""
    """Name of the policy that it serves; empty: the run's own."""


class Source(Protocol):
    """Where servers are listed. Polled from one thread, each `rollout.vllm.health_seconds`."""

    name: str
    """What people know it by: a key of the config or a URL."""
    fixed: bool
    """Whether its list never changes, so that it is no reason to wait for more."""

    def poll(self) -> list[Found] | None:
        """The servers that are there now, or None when the source did not answer: the last list
        stays."""
        ...


class Named:
    """The servers that the config names: always these."""

    fixed = True

    def __init__(self, urls: Sequence[str], name: str = "rollout.vllm.servers"):
        self.name, self._found = name, [Found(url.rstrip("/")) for url in urls]

    def poll(self) -> list[Found]:
        """The same as ever."""
        return list(self._found)


def open_sources(config: VllmConfig) -> list[Source]:
    """Where a run's servers are listed."""
    return [Named(config.servers)]
