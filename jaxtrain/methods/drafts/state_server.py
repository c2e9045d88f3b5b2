"""The target of drafts that train in other processes: batches come in, states go out, over HTTP.

    GET  /target    what the states depend on, as JSON
    POST /states    a packed request ─> the target, one batch at a time ─> packed states

A request says which target it means, so that a server that was started again with other weights is
refused. Its client is remote_states.py.
"""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from aiohttp import web

from jaxtrain.batch import Batch, check_batch
from jaxtrain.distributed.feed import to_host
from jaxtrain.distributed.serialization import MalformedValueError, pack, unpack
from jaxtrain.environments.endpoint_app import Route, read_body
from jaxtrain.environments.request_fields import RequestRefused
from jaxtrain.errors import UserError
from jaxtrain.methods.drafts.capture import FrozenTarget, digest

FORMAT = 1
"""Version of the requests and answers."""
ABOUT_ROUTE, STATES_ROUTE = "/target", "/states"
MAX_STATE_BYTES = 2**34
"""Largest size of the states of an answer."""
AT_ONCE = 2
"""Answers in memory: one is sent while the next is computed."""
MAX_WAITING = 64
"""Most requests that wait for their turn, each with a body in memory; further ones come again."""
SEND_SECONDS = 600.0
"""Longest time to send an answer, after which its client does not hold up the others."""
PIECE_BYTES = 2**22


class StateServer:
    """Routes that answer with the states of a target, whose weights are in memory."""

    def __init__(self, target: FrozenTarget):
        """target: opened; its own layers are ignored."""
        self.target = target
        self.about = describe_target(target)
        self._room = asyncio.Semaphore(AT_ONCE)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="target")
        self._waiting = 0

    def routes(self) -> list[Route]:
        """Return the routes for an EndpointApp."""
        return [
            Route("GET", ABOUT_ROUTE, self.describe),
            Route("POST", STATES_ROUTE, self.answer),
        ]

    async def describe(self, request: web.Request) -> web.StreamResponse:
        """Answer with what the states depend on."""
        return web.json_response(self.about)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer with the states of a batch."""
        if self._waiting >= MAX_WAITING:
            raise RequestRefused(503, f"{MAX_WAITING} requests wait already")
        self._waiting += 1
        try:
            body = await read_body(request)
            async with self._room:
                loop = asyncio.get_running_loop()
                parts = await loop.run_in_executor(self._thread, self.capture, body)
                size = sum(part.nbytes for part in parts)
                response = web.StreamResponse(headers={"Content-Length": str(size)})
                response.content_type = "application/octet-stream"
                async with asyncio.timeout(SEND_SECONDS):
                    await response.prepare(request)
                    for piece in cut(parts):
                        await response.write(piece)
                    await response.write_eof()
                return response
        except TimeoutError:
            raise ConnectionResetError("the client does not read its answer") from None
        finally:
            self._waiting -= 1

    def capture(self, body: bytes) -> list[memoryview]:
        """Return the states that a packed request asks for; RequestRefused."""
        batch, layers, last = self.read(body)
        try:
            states = self.target.capture(batch, layers, last=last)
        except UserError as error:  # tokens that do not divide among this server's devices
            raise RequestRefused(400, str(error)) from None
        rows = batch.tokens.shape[1]
        return pack("states", {name: to_host(value)[:, :rows] for name, value in states.items()})

    def read(self, body: bytes) -> tuple[Batch, tuple[int, ...], bool]:
        """Return (batch [A, B, T], layers, whether the last states are wanted); RequestRefused."""
        view, start = memoryview(body), 0

        def receive(size: int) -> bytearray:
            nonlocal start
            if size > len(view) - start:
                raise MalformedValueError("the body is too short")
            start += size
            return bytearray(view[start - size : start])

        try:
            value = unpack(receive)[1]
        except MalformedValueError as error:
            raise RequestRefused(400, f"the body is no request for states: {error}") from None
        match value:
            case {"target": target, "layers": list(layers), "last": bool(last), "batch": batch}:
                pass
            case _:
                raise RequestRefused(
                    400,
                    "the body is no request for states: it has a target, a list of layers, a batch,"
                    " and whether the last states are wanted",
                )
        if not isinstance(target, str) or target != self.about["target"]:
            raise RequestRefused(409, "this server runs another target than the request is for")
        architecture = self.target.bundle.architecture
        depth = architecture.num_hidden_layers
        if not all(type(layer) is int and 0 <= layer < depth for layer in layers):
            raise RequestRefused(400, f"layers are whole numbers from 0 to {depth - 1}")
        if not layers or len(set(layers)) < len(layers):
            raise RequestRefused(400, "layers are to be named, each once")
        check_request(batch, architecture.vocab_size)
        width = (len(layers) + last) * architecture.hidden_size
        itemsize = next(iter(self.target.streams.values())).base.itemsize
        if (size := batch.tokens.size * width * itemsize) > MAX_STATE_BYTES:
            raise RequestRefused(
                413, f"the states are {size:,} bytes, an answer at most {MAX_STATE_BYTES:,}"
            )
        return batch, tuple(layers), last


def describe_target(target: FrozenTarget) -> dict[str, Any]:
    """Return what the states of a target depend on, with a digest of it all."""
    about = {"format": FORMAT, **target.identify()}
    return {**about, "target": digest(about)}


def check_request(batch: Any, vocab_size: int) -> None:
    """Raise RequestRefused unless the value is a batch [A, B, T] of tokens alone."""
    if not isinstance(batch, Batch):
        raise RequestRefused(400, "batch is no packed batch")
    arrays = [batch.tokens, batch.positions, batch.prev, batch.until]
    arrays += [] if batch.since is None else [batch.since]
    if (
        not all(isinstance(array, np.ndarray) and array.ndim == 3 for array in arrays)
        or any(array.dtype != np.int32 or not array.size for array in arrays)
        # By their types first: arrays in their places have no truth value.
        or any(type(more) is not dict or more for more in (batch.weights, batch.streams))
        or type(batch.denoms) is not dict
        or batch.denoms
        or batch.owner is not None
        or batch.images is not None
    ):
        raise RequestRefused(400, "batch is to have int32 arrays [A, B, T] of tokens, and no more")
    try:
        check_batch(batch)
    except AssertionError as error:
        raise RequestRefused(400, f"batch is inconsistent: {error}") from None
    if batch.tokens.min() < 0 or batch.tokens.max() >= vocab_size:
        raise RequestRefused(400, f"tokens are whole numbers from 0 to {vocab_size - 1}")


def cut(parts: list[memoryview]) -> Iterator[memoryview]:
    """Yield small pieces, so that a socket's buffer holds little of an answer."""
    for part in parts:
        for start in range(0, part.nbytes, PIECE_BYTES):
            yield part[start : start + PIECE_BYTES]
