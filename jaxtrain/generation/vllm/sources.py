"""Which servers there are: sources that are asked again and again.

A `ServerSource` is anything with `poll`. The config's own list, a launcher and a cluster are sources as
well as files, names and routers: the pool (`servers.py`) takes in what they list and lets go of
what they list no more.
"""

import dataclasses
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from jaxtrain.config.vllm import VllmConfig
from jaxtrain.generation.vllm.control import ServerGone, ServerRefused, call
from jaxtrain.safe_io import read_text

LIST_SECONDS = 10.0
MAX_FILE_BYTES = 2**20
RANK = re.compile(r"@\d+$")
"""What vllm-router adds to the URL of a server for each data-parallel rank."""


@dataclasses.dataclass(frozen=True)
class DiscoveredServer:
    """One server as a source tells of it."""

    url: str
    """Where its routes are, for requests and for administration."""
    capacity: float | None = None
    """How much it takes beside others, in any unit that they share; None: not told."""
    policy: str = ""
    """Name of the policy that it serves; empty: the run's own."""


class ServerSource(Protocol):
    """Where servers are listed. Polled from one thread, each `rollout.vllm.health_seconds`."""

    name: str
    """What people know it by: a key of the config or a URL."""
    fixed: bool
    """Whether its list never changes, so that it is no reason to wait for more."""

    def poll(self) -> list[DiscoveredServer] | None:
        """The servers that are there now, or None when the source did not answer: the last list
        stays."""
        ...


class NamedServers:
    """The servers that the config names: always these."""

    fixed = True

    def __init__(self, urls: Sequence[str], name: str = "rollout.vllm.servers"):
        self.name, self._found = name, [DiscoveredServer(url.rstrip("/")) for url in urls]

    def poll(self) -> list[DiscoveredServer]:
        """The same as ever."""
        return list(self._found)


class FileServers:
    """file:///PATH: a server a line, its URL and, if known, its capacity; `#` begins a comment.

    A file without any line, as while it is written anew, counts as no answer; one with a comment
    alone lists no servers.
    """

    fixed = False

    def __init__(self, address: str):
        self.name, self.path = address, Path(urlsplit(address).path)

    def poll(self) -> list[DiscoveredServer] | None:
        """See Source."""
        try:
            text = read_text(self.path, MAX_FILE_BYTES)
            lines = [line.partition("#")[0].split() for line in text.splitlines()]
            servers = [
                DiscoveredServer(url, float(rest[0]) if rest else None)
                for url, *rest in filter(None, lines)
            ]
        except (OSError, ValueError):
            return None
        return servers if text.strip() and all(is_url(server.url) for server in servers) else None


class DnsServers:
    """dns://NAME:PORT: a server at each address of a name (a headless service, a job's hosts)."""

    fixed = False

    def __init__(self, address: str):
        self.name, parts = address, urlsplit(address)
        self.host, self.port = parts.hostname or "", parts.port or 8000

    def poll(self) -> list[DiscoveredServer] | None:
        """See Source."""
        try:
            listed = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError:
            return None
        hosts = dict.fromkeys(str(address[0]) for *_, address in listed)
        named = [f"[{host}]" if ":" in host else host for host in hosts]
        return [DiscoveredServer(f"http://{host}:{self.port}") for host in named]


class RouterServers:
    """router+http://HOST:PORT: the workers of a vllm-router. What each rank of a server is listed
    for counts as its capacity."""

    fixed = False

    def __init__(self, address: str):
        self.name, self.url = address, address.removeprefix("router+").rstrip("/")

    def poll(self) -> list[DiscoveredServer] | None:
        """See Source."""
        urls = list_workers(self.url)
        if urls is None:
            return None
        ranks: dict[str, int] = {}
        for url in urls:
            bare = RANK.sub("", url).rstrip("/")
            ranks[bare] = ranks.get(bare, 0) + 1
        several = max(ranks.values(), default=1) > 1
        return [
            DiscoveredServer(url, float(count) if several else None) for url, count in ranks.items()
        ]


class DynamoServers:
    """dynamo+http://HOST:PORT: the workers that NVIDIA Dynamo lists for reinforcement learning.
    Requests go to them directly, so each must have vLLM's own routes at its `system_url`."""

    fixed = False

    def __init__(self, address: str):
        self.name, self.url = address, address.removeprefix("dynamo+").rstrip("/")

    def poll(self) -> list[DiscoveredServer] | None:
        """See Source."""
        answer = ask(self.url, "/v1/rl/workers")
        listed = answer.get("workers") if isinstance(answer, dict) else answer
        if not isinstance(listed, list):
            return None
        urls = [worker.get("system_url") for worker in listed if isinstance(worker, dict)]
        if not all(isinstance(url, str) and is_url(url) for url in urls):
            return None
        return [DiscoveredServer(str(url).rstrip("/")) for url in dict.fromkeys(urls)]


KINDS = {
    "file": FileServers,
    "dns": DnsServers,
    "router+http": RouterServers,
    "router+https": RouterServers,
    "dynamo+http": DynamoServers,
    "dynamo+https": DynamoServers,
}
"""{scheme of rollout.vllm.discover: the source that it names}"""


def open_sources(config: VllmConfig) -> list[ServerSource]:
    """Where a run's servers are listed."""
    sources: list[ServerSource] = [NamedServers(config.servers)] if config.servers else []
    if config.discover:
        sources.append(KINDS[urlsplit(config.discover).scheme](config.discover))
    return sources


def list_workers(url: str) -> list[str] | None:
    """The URLs behind a vllm-router; None for what is none, or does not answer."""
    answer = ask(url, "/list_workers")
    urls = answer.get("urls") if isinstance(answer, dict) else None
    is_list = isinstance(urls, list) and all(isinstance(entry, str) for entry in urls)
    return urls if is_list else None


def ask(url: str, path: str) -> Any:
    """The JSON of a GET; None where there is none."""
    try:
        return call(url, "GET", path, timeout=LIST_SECONDS)
    except (ServerGone, ServerRefused):
        return None


def is_url(text: str) -> bool:
    """Whether a text is the address of a server."""
    return text.startswith(("http://", "https://")) and bool(urlsplit(text).hostname)
