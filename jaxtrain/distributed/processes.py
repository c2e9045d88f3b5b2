"""The processes of a run: how they find each other, before any device is touched.

`find_launch` reads the launcher's variables, `join` brings everybody together. With one process
none of this does anything.
"""

import contextlib
import ipaddress
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax._src import distributed

from jaxtrain.config import ParallelConfig
from jaxtrain.distributed.hub import free_port
from jaxtrain.distributed.peers import Peers, leave
from jaxtrain.distributed.run_token import LOCAL, VARIABLE, RunToken
from jaxtrain.errors import UserError
from jaxtrain_vllm.listener import LOOPBACK


class Launch(NamedTuple):
    """What a launcher tells a process."""

    address: str
    """host:port on process 0's machine."""
    process: int
    size: int
    local_process: int = 0
    """Which of the processes on this machine."""
    local_size: int = 1


def find_launch(
    launcher: str,
    coordinator: str | None,
    num_processes: int | None,
    process_id: int | None,
    environ: Mapping[str, str],
) -> Launch | None:
    """Where the other processes are, by section `parallel` and the environment; None: there are
    none, or a TPU pod, which jax knows about. UserError where a named launcher left no trace."""
    if coordinator is not None:
        return Launch(coordinator, process_id or 0, num_processes or 1)
    if launcher in ("auto", "torchrun") and "WORLD_SIZE" in environ and "RANK" in environ:
        return read_torchrun(environ)
    if launcher in ("auto", "slurm") and int(environ.get("SLURM_STEP_NUM_TASKS", 0)):
        return read_slurm(environ)
    if launcher in ("torchrun", "slurm"):
        names = {"torchrun": "WORLD_SIZE and RANK", "slurm": "SLURM_STEP_NUM_TASKS (set by srun)"}
        raise UserError(
            f'parallel.launcher is "{launcher}" but {names[launcher]} is not in the environment;'
            " start the program by it, or set parallel.coordinator, num_processes, process_id"
        )
    return None


def read_torchrun(environ: Mapping[str, str]) -> Launch:
    """torchrun's variables. Its own store listens on MASTER_PORT, so ours takes the next one."""
    address, port = environ.get("MASTER_ADDR"), environ.get("MASTER_PORT", "29500")
    if not address:
        raise UserError("WORLD_SIZE and RANK are set but MASTER_ADDR is not: process 0's host name")
    return Launch(
        f"{address}:{int(port) + 1}",
        int(environ["RANK"]),
        int(environ["WORLD_SIZE"]),
        int(environ.get("LOCAL_RANK", 0)),
        int(environ.get("LOCAL_WORLD_SIZE", 1)),
    )


def read_slurm(environ: Mapping[str, str]) -> Launch:
    """The variables of a task under srun; the port follows from the job, so that two jobs on a
    machine do not meet."""
    size = int(environ["SLURM_STEP_NUM_TASKS"])
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_NTASKS_PER_NODE") or "1"
    counts = expand_counts(tasks)
    node = min(int(environ.get("SLURM_NODEID", 0)), len(counts) - 1)
    port = 61440 + int(environ.get("SLURM_JOB_ID", 0)) % 4096
    host = first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", ""))
    return Launch(
        f"{host}:{port}",
        int(environ["SLURM_PROCID"]),
        size,
        int(environ.get("SLURM_LOCALID", 0)),
        counts[node],
    )


def first_host(nodes: str) -> str:
    """ "gpu[03-05,9],x" -> "gpu03"."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    if not match:
        raise UserError(f"SLURM_STEP_NODELIST {nodes!r} names no machine")
    return match[1] + (match[2] or "")


def expand_counts(text: str) -> list[int]:
    """SLURM's "8(x2),4" -> [8, 8, 4]."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        found += [int(match[1])] * int(match[2] or 1) if match else [1]
    return found


def choose_devices(launch: Launch, environ: Mapping[str, str]) -> list[int] | None:
    """Which of the machine's GPUs are this process's; None: all that it sees.

    Processes that share a machine share its GPUs evenly. A launcher that shows each process its own
    (CUDA_VISIBLE_DEVICES with one entry) has done so already.
    """
    if launch.local_size == 1:
        return None
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [launch.local_process]
    count = len([entry for entry in visible.split(",") if entry.strip()])
    if count <= 1:
        return None
    if count % launch.local_size:
        raise UserError(
            f"CUDA_VISIBLE_DEVICES={visible} names {count} GPUs for {launch.local_size} processes"
            " on this machine; start as many processes as divide them"
        )
    share = count // launch.local_size
    return list(range(launch.local_process * share, (launch.local_process + 1) * share))


class Timeouts(NamedTuple):
    """Seconds; see section `parallel` of the config."""

    start: float = 300.0
    meet: float = 1800.0
    peer: float = 60.0


_peers: Peers | None = None


def peers() -> Peers | None:
    """The other processes, once this one has joined them; None where there are none."""
    return _peers


def stop_requested() -> str:
    """Name of the signal by which some process asked all to stop; empty while none did."""
    return _peers.stop_name if _peers is not None else ""


def join_by_config(parallel: ParallelConfig | None, folder: Path | None = None) -> None:
    """As section `parallel` and the environment say; without a section (the config could not be
    read) as the environment alone does. folder: run.output_dir where it is known."""
    known = parallel or ParallelConfig()
    timeouts = Timeouts(known.start_timeout, known.meet_timeout, known.peer_timeout)
    explicit = (known.coordinator, known.num_processes, known.process_id)
    launch = (
        None if known.launcher == "none" else find_launch(known.launcher, *explicit, os.environ)
    )
    if launch is None and is_tpu_pod(known.launcher, os.environ):
        join_tpu_pod(timeouts, os.environ)
    else:
        join(launch, os.environ, timeouts, folder)


def join(
    launch: Launch | None,
    environ: Mapping[str, str],
    timeouts: Timeouts,
    folder: Path | None = None,
) -> None:
    """Meet the other processes and initialize jax.distributed; nothing with one process.

    To be called before anything asks jax for devices. folder: where the run's token may lie beside,
    if no launcher gave one. Raises UserError where the others cannot be found.
    """
    global _peers
    if launch is None or launch.size == 1 or _peers is not None:
        return
    host, _, port = launch.address.rpartition(":")
    hosts = choose_addresses(launch)
    secret = RunToken(launch.address, folder, environ)
    if launch.process == 0:
        start_hub(port, launch.size, hosts, secret.make(), timeouts)
    if launch.process == 0 or hosts == [*LOOPBACK]:
        host = "localhost"
    _peers = Peers(
        f"{host}:{port}",
        launch.process,
        launch.size,
        timeouts.start,
        timeouts.peer,
        secret,
        hosts,
    )
    if launch.process == 0:
        secret.remove()
    jax.distributed.initialize(
        f"{host}:{_peers.service_port}",
        launch.size,
        launch.process,
        choose_devices(launch, environ),
        # The hub runs the service; process 0's own, which jax insists on, is for nobody.
        coordinator_bind_address="localhost:0",
        initialization_timeout=int(timeouts.start) + 1,
        heartbeat_timeout_seconds=600,
    )


def choose_addresses(launch: Launch) -> list[str]:
    """Where process 0 listens: as narrow as the launcher's words allow, "" being everywhere.

    A name may stand for other addresses elsewhere than on process 0's machine.
    """
    host = launch.address.rpartition(":")[0].strip("[]")
    if host in LOCAL or launch.local_size == launch.size:
        return [*LOOPBACK]
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return [""]
    return [host, *LOOPBACK]


def start_hub(port: str, size: int, hosts: list[str], token: bytes, timeouts: Timeouts) -> None:
    """The hub beside process 0; it ends by itself. The token goes where no other user can look."""
    command = [sys.executable, "-m", "jaxtrain.distributed.hub", port, str(size), json.dumps(hosts)]
    command += map(str, timeouts)
    hub = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert hub.stdin is not None and hub.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        hub.stdin.write(token.hex())
        hub.stdin.close()
    answer = hub.stdout.readline().strip()
    if answer != "ready":
        raise UserError(
            f"process 0 cannot listen on port {port} ({answer or 'the hub ended'}); name another"
            " one in parallel.coordinator, or MASTER_PORT"
        )


def is_tpu_pod(launcher: str, environ: Mapping[str, str]) -> bool:
    """Whether jax should be asked to find the other machines of a TPU slice."""
    if launcher == "auto":
        devices = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev").glob("vfio/[0-9]*")]
        named = "," in environ.get("TPU_WORKER_HOSTNAMES", "")
        on_tpu = environ.get("JAX_PLATFORMS", "tpu").startswith("tpu")
        return on_tpu and find_spec("libtpu") is not None and (named or bool(devices))
    return launcher == "tpu"


def join_tpu_pod(timeouts: Timeouts, environ: Mapping[str, str]) -> None:
    """As `join`, where jax knows by itself who takes part: the hub's address goes through jax, and
    so does the token, unless the launcher gave one."""
    global _peers
    jax.distributed.initialize(initialization_timeout=int(timeouts.start))
    if jax.process_count() > 1:
        store = key_value_store()
        if jax.process_index() == 0:
            port, token = str(free_port()), environ.get(VARIABLE) or secrets.token_hex(32)
            start_hub(port, jax.process_count(), [""], token.encode(), timeouts)
            told = "" if VARIABLE in environ else token
            store.key_value_set("jaxtrain_hub", f"{socket.gethostname()}:{port} {told}")
        found = store.blocking_key_value_get("jaxtrain_hub", int(timeouts.start * 1000))
        address, _, told = found.partition(" ")
        secret = RunToken(address, None, {VARIABLE: told} if told else environ)
        _peers = Peers(
            address,
            jax.process_index(),
            jax.process_count(),
            timeouts.start,
            timeouts.peer,
            secret,
        )


def key_value_store() -> Any:
    """jax's store of short texts that every process reads; jax has no public name for it."""
    client = distributed.global_state.client
    assert client is not None, "jax.distributed was initialized"
    return client


def shutdown() -> None:
    """The run is over here: wait for the others, then nobody misses this process."""
    if _peers is not None:
        _peers.meet("the end of the run")
        _peers.shutdown()


def report(error: BaseException, code: int) -> None:
    """An error ends this process: one line for all processes that share its cause, and the end.

    code 0: not meant for people; the process where it began shows its traceback. Returns, for the
    caller to go on with the error, where there is one process.
    """
    if _peers is None:
        return
    text = str(error).strip()
    if code:
        _peers.end(code, text)
        return
    first = text.splitlines()[0][:300] if text else ""
    _peers.end(1, f"{type(error).__name__}: {first}", stumbled=True)
    traceback.print_exception(error)
    leave(1, "")  # Python's own end would wait for the others in jax's shutdown, for minutes
