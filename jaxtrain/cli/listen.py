"""Shared by the verbs that answer over HTTP: their key, their address, and how they end."""

import argparse
import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from jaxtrain.arguments import expand_path
from jaxtrain.errors import UserError
from jaxtrain.safe_io import read_text

if TYPE_CHECKING:
    from jaxtrain.environments.endpoint_app import EndpointApp

KEY_VARIABLE = "JAXTRAIN_API_KEY"
MAX_KEY = 4096
HOST = "127.0.0.1"


def add_key_file(parser: argparse.ArgumentParser) -> None:
    """Add the option of the key."""
    parser.add_argument(
        "--api-key-file",
        type=expand_path,
        help=f"file of the key that requests must carry; or the variable {KEY_VARIABLE}",
    )


def read_key(file: Path | None) -> str | None:
    """Return the key that requests must carry; None: none. UserError for an empty file."""
    if file is None:
        return os.environ.get(KEY_VARIABLE) or None
    try:
        key = read_text(file, MAX_KEY).strip()
    except (OSError, ValueError) as error:
        raise UserError(f"--api-key-file {file} cannot be read: {error}") from None
    if not key:
        raise UserError(f"--api-key-file {file} is empty")
    return key


def require_key(host: str, key: str | None) -> None:
    """Raise UserError where other machines could ask without a key."""
    from jaxtrain.environments.endpoint_app import LOOPBACK

    if host not in LOOPBACK and key is None:
        raise UserError(
            f"--host {host} lets other machines ask, so requests need a key: set"
            f" {KEY_VARIABLE}, or name a file with --api-key-file"
        )


@contextlib.asynccontextmanager
async def listening(
    app: "EndpointApp", host: str, port: int
) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Listen until the context ends; yield the address and an event that a signal to end sets."""
    try:
        port = await app.listen(host, port)
    except OSError as error:
        raise UserError(
            f"{host}:{port} cannot be listened on: {error.strerror or error}; give another --port,"
            " or 0 for any free one"
        ) from None
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}", ended
    finally:
        await app.close()
