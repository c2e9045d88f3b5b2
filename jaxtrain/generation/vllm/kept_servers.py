"""Servers that keep a version for an evaluation, while the others go on with training.

    loop thread   Pool.keep ─> Kept ──────────── a publish passes them by ──────────────> release
    evaluation         engine of these servers alone: every token is of that version        │
    watchers           behind by some versions: given the newest at once, whole or what  <──┘
                       has changed since, and asked for the round again

A server that is dropped keeps nothing. Where none is left that does, KeepLost ends the evaluation,
which is then asked anew; where all others are gone, training gets these.
"""

import asyncio
from collections.abc import Sequence

from jaxtrain.generation.engine import KeepLost
from jaxtrain.generation.vllm.pool import Pool, VllmServer

PAUSE = 0.05


class KeptServers:
    """The servers of one evaluation."""

    def __init__(self, pool: Pool, servers: Sequence[VllmServer]):
        """servers: as Pool.keep returned them; those that hold the version only soon are waited
        for."""
        self.pool, self.servers, self.version = pool, servers, pool.version
        self.share = len(servers) / max(1, len(pool.up()))
        """Of all servers."""

    def ready(self) -> list[VllmServer]:
        """Those that may be asked now."""
        return [
            server
            for server in self.servers
            if server.state == "up" and server.keeps and server.kept == self.version
            if not server.updating
        ]

    async def take(self, session: int | None) -> VllmServer:
        """One of them, its load counted, waited for; KeepLost where none keeps the version."""
        while True:
            server = self.pool.acquire(session, self.ready)
            if server is not None:
                return server
            if not any(self._may_come(server) for server in self.servers):
                told = ", ".join(server.tell() for server in self.servers)
                raise KeepLost(f"no server holds version {self.version} any more: {told}")
            await asyncio.sleep(PAUSE)

    def release(self) -> None:
        """Give them back."""
        self.pool.let_go(one for one in self.servers if one.kept == self.version)

    def _may_come(self, server: VllmServer) -> bool:
        kept = server.state == "up" and server.kept == self.version
        return kept and server.version <= self.version
