"""Sources of servers, which are polled repeatedly.

A `ServerSource` is anything with `poll`: the config's own list, files, DNS names and routers, as
well as a launcher or a cluster. The pool (`servers.py`) admits the servers that they list and
removes those that they no longer list.
"""

import dataclasses
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from typing_extensions import override

from jaxtrain.config.vllm import VllmConfig
from jaxtrain.generation.vllm.control import ServerGone, ServerRefused, call
from jaxtrain.safe_io import read_text

LIST_SECONDS = 10.0
MAX_FILE_BYTES = 2**20
RANK = re.compile(r"@\d+$")
"""Suffix that vllm-router adds to a server's URL for each data-parallel rank."""


@dataclasses.dataclass(frozen=True)
class DiscoveredServer:
    """Server as a source lists it."""

    url: str
    """Base URL of its routes, for requests and for administration."""
    capacity: float | None = None
    """Capacity relative to other servers, in any common unit; None: not listed."""
    policy: str = ""
    """Name of the policy that it serves; empty: the run's own."""


class ServerSource(Protocol):
    """A list of servers. Polled from one thread, every `rollout.vllm.health_seconds`."""

    name: str
    """Name for log lines: a config key or a URL."""
    fixed: bool
    """True if the list never changes, so that waiting for further servers is pointless."""

    def poll(self) -> list[DiscoveredServer] | None:
        """Return the servers listed now. None: the source did not answer; the last list stays
        valid."""
        ...


class NamedServers(ServerSource):
    """The servers that the config names."""

    fixed = True

    def __init__(self, urls: Sequence[str], name: str = "rollout.vllm.servers"):
        self.name, self._found = name, [DiscoveredServer(url.rstrip("/")) for url in urls]

    @override
    def poll(self) -> list[DiscoveredServer]:
        return list(self._found)


class FileServers(ServerSource):
    """file:///PATH: one server per line, its URL and optionally its capacity; `#` begins a comment.

    An empty file, as while it is being rewritten, counts as no answer; a file with only a comment
    lists no servers.
    """

    fixed = False

    def __init__(self, address: str):
        self.name, self.path = address, Path(urlsplit(address).path)

    @override
    def poll(self) -> list[DiscoveredServer] | None:
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


class DnsServers(ServerSource):
    """dns://NAME:PORT: one server at each address of a name (a headless service, a job's hosts)."""

    fixed = False

    def __init__(self, address: str):
        self.name, parts = address, urlsplit(address)
        self.host, self.port = parts.hostname or "", parts.port or 8000

    @override
    def poll(self) -> list[DiscoveredServer] | None:
        try:
            listed = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError:
            return None
        hosts = dict.fromkeys(str(address[0]) for *_, address in listed)
        named = [f"[{host}]" if ":" in host else host for host in hosts]
        return [DiscoveredServer(f"http://{host}:{self.port}") for host in named]


class RouterServers(ServerSource):
    """router+http://HOST:PORT: the workers of a vllm-router. The number of ranks listed for a
    server counts as its capacity."""

    fixed = False

    def __init__(self, address: str):
        self.name, self.url = address, address.removeprefix("router+").rstrip("/")

    @override
    def poll(self) -> list[DiscoveredServer] | None:
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


class DynamoServers(ServerSource):
    """dynamo+http://HOST:PORT: the workers that NVIDIA Dynamo lists for reinforcement learning.
    Requests go to them directly, so each must have vLLM's own routes at its `system_url`."""

    fixed = False

    def __init__(self, address: str):
        self.name, self.url = address, address.removeprefix("dynamo+").rstrip("/")

    @override
    def poll(self) -> list[DiscoveredServer] | None:
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
"""{scheme of rollout.vllm.discover: its source class}"""


def open_sources(config: VllmConfig) -> list[ServerSource]:
    """Return the sources of a run's servers."""
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
    """Return True if a text is the address of a server."""
    return text.startswith(("http://", "https://")) and bool(urlsplit(text).hostname)
