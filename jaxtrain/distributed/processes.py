"""The processes of a run: joined before any device is touched, and ended together.

    find_launch (`launch.py`) ──> process 0 starts the hub ──> Peers: every process connects
        ──> jax.distributed.initialize, with the coordination service that the hub runs

With one process none of this does anything.
"""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

import jax
from jax._src import distributed

from jaxtrain.config.run import ParallelConfig
from jaxtrain.distributed.hub import free_port
from jaxtrain.distributed.launch import (
    Launch,
    choose_addresses,
    choose_devices,
    find_launch,
    is_tpu_pod,
)
from jaxtrain.distributed.peers import Peers, exit_now
from jaxtrain.distributed.relay import Sender, relay_token
from jaxtrain.distributed.run_token import VARIABLE, RunToken
from jaxtrain.errors import UserError
from jaxtrain_vllm.listener import LOOPBACK

_peers: Peers | None = None


def peers() -> Peers | None:
    """Return the connection to the other processes; None if there are none."""
    return _peers


def stop_requested() -> str:
    """Return the name of the signal by which a process asked all to stop; "" if none did."""
    return _peers.stop_name if _peers is not None else ""


def join_by_config(parallel: ParallelConfig | None, folder: Path | None = None) -> None:
    """Join the processes that section `parallel` and the environment describe.

    parallel: None if the config could not be read; then the environment decides alone. folder:
    run.output_dir if it is known.
    """
    parallel = parallel or ParallelConfig()
    launch = find_launch(parallel, os.environ)
    if launch is None and is_tpu_pod(parallel.launcher, os.environ):
        join_tpu_pod(parallel, os.environ)
    else:
        join(launch, os.environ, parallel, folder)


def join(
    launch: Launch | None,
    environ: Mapping[str, str],
    timeouts: ParallelConfig,
    folder: Path | None = None,
) -> None:
    """Meet the other processes and initialize jax.distributed; does nothing with one process.

    Must be called before jax looks for devices. folder: the run's token may lie beside it, if no
    launcher gave one. Raises UserError if the others cannot be found.
    """
    global _peers
    if launch is None or launch.size == 1 or _peers is not None:
        return
    host, _, port = launch.address.rpartition(":")
    addresses = choose_addresses(launch)
    token, sender = RunToken(launch.address, folder, environ), None
    if launch.process == 0:
        sender = start_hub(port, launch.size, addresses, token.create(), timeouts)
    if launch.process == 0 or addresses == [*LOOPBACK]:
        host = "localhost"
    _peers = Peers(launch._replace(address=f"{host}:{port}"), timeouts, token, sender)
    if launch.process == 0:
        token.remove()
    jax.distributed.initialize(
        f"{host}:{_peers.service_port}",
        launch.size,
        launch.process,
        choose_devices(launch, environ),
        # jax insists on starting a service in process 0; the hub's is the one in use.
        coordinator_bind_address="localhost:0",
        initialization_timeout=int(timeouts.start_timeout) + 1,
        heartbeat_timeout_seconds=600,
    )


def start_hub(
    port: str, size: int, addresses: list[str], token: bytes, timeouts: ParallelConfig
) -> Sender:
    """Start the hub beside process 0, and return process 0's end of the relay."""
    command = [sys.executable, "-m", "jaxtrain.distributed.hub", port, str(size)]
    command += [json.dumps(addresses), str(timeouts.start_timeout)]
    command += [str(timeouts.meet_timeout), str(timeouts.peer_timeout)]
    hub = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert hub.stdin is not None and hub.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        hub.stdin.write(token.hex())  # not an argument: other users can read command lines
        hub.stdin.close()
    answer = hub.stdout.readline().strip()
    if answer != "ready":
        raise UserError(
            f"process 0 cannot listen on port {port} ({answer or 'the hub ended'}); name another"
            " one in parallel.coordinator, or MASTER_PORT"
        )
    return Sender(size - 1, relay_token(token), addresses)


def join_tpu_pod(timeouts: ParallelConfig, environ: Mapping[str, str]) -> None:
    """Join the machines of a TPU slice, which jax knows: it carries the hub's address and, unless
    the launcher gave one, the token."""
    global _peers
    jax.distributed.initialize(initialization_timeout=int(timeouts.start_timeout))
    size, process, sender = jax.process_count(), jax.process_index(), None
    if size == 1:
        return
    store = distributed.global_state.client  # jax's key-value store has no public name
    assert store is not None, "jax.distributed was initialized"
    if process == 0:
        port, token = str(free_port()), environ.get(VARIABLE) or secrets.token_hex(32)
        sender = start_hub(port, size, [""], token.encode(), timeouts)
        shared = "" if VARIABLE in environ else token
        store.key_value_set("jaxtrain_hub", f"{socket.gethostname()}:{port} {shared}")
    entry = store.blocking_key_value_get("jaxtrain_hub", int(timeouts.start_timeout * 1000))
    address, _, shared = entry.partition(" ")
    run_token = RunToken(address, None, {VARIABLE: shared} if shared else environ)
    _peers = Peers(Launch(address, process, size), timeouts, run_token, sender)


def shutdown() -> None:
    """Wait for all processes at the end of the run, so that none is counted as lost."""
    if _peers is not None:
        _peers.meet("the end of the run")
        _peers.shutdown()


def report(error: BaseException, code: int) -> None:
    """End this process with an error, which is printed once for all processes that share it.

    code 0: an error that is not meant for users; the process where it began shows its traceback.
    With one process, returns, and the caller raises the error.
    """
    if _peers is None:
        return
    text = str(error).strip()
    if code:
        _peers.end(code, text)
        return
    first_line = text.splitlines()[0][:300] if text else ""
    _peers.end(1, f"{type(error).__name__}: {first_line}", secondary=True)
    traceback.print_exception(error)
    exit_now(1, "")  # a regular exit would wait for the others in jax's shutdown, for minutes
