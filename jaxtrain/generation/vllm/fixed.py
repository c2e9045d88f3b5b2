"""Servers that keep their weights: answers to prompts, without a trainer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from typing_extensions import override

from jaxtrain.config.vllm import VllmConfig
from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.vllm.engine import VllmEngine
from jaxtrain.generation.vllm.servers import Servers
from jaxtrain.generation.vllm.sources import NamedServers


class FixedServers(Servers):
    """Servers that are up with the weights that they have, under any name: version 0."""

    wait_key = ""

    @override
    def read_label(self, label: str) -> int | None:
        return 0


@contextmanager
def open_fixed(
    urls: Sequence[str],
    sampling: Sampling,
    log: Callable[[str], None],
    tokenize: Callable[[str], list[int]] | None = None,
    *,
    option: str,
    wait_seconds: float = 600.0,
) -> Iterator[VllmEngine]:
    """Open an engine on the servers, which are watched until the block ends: one that dies loses
    its requests to the others, and comes back when it answers.

    option: of the command that names the servers. wait_seconds: longest wait for any server. Raises
    UserError if none answers.
    """
    config = VllmConfig(servers=list(urls), any_version=True, wait_seconds=wait_seconds)
    servers = FixedServers(config, sampling, log, tokenize, [NamedServers(config.servers, option)])
    servers.version = 0
    servers.push_weights = lambda server: servers.mark_up(server, 0)
    try:
        servers.open()
        for server in servers.all:
            if server.model:
                servers.mark_up(server, 0)
        yield VllmEngine(servers, adapters=False)
    finally:
        servers.close()
