"""Place of this process among those of a run, read from the config and launcher variables."""

import ipaddress
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from jaxtrain.config.run import ParallelConfig
from jaxtrain.distributed.run_token import LOCAL
from jaxtrain.errors import UserError
from jaxtrain_vllm.listener import LOOPBACK


class Launch(NamedTuple):
    """Place of a process in the run."""

    address: str
    """host:port on process 0's machine."""
    process: int
    size: int
    local_process: int = 0
    """Number among the processes on this machine."""
    local_size: int = 1


def find_launch(parallel: ParallelConfig, environ: Mapping[str, str]) -> Launch | None:
    """Return the place that section `parallel` and the environment describe.

    None: there are no other processes, or this is a TPU pod, which jax handles itself. Raises
    UserError if the variables of a named launcher are missing.
    """
    launcher = parallel.launcher
    if launcher == "none":
        return None
    if parallel.coordinator is not None:
        return Launch(parallel.coordinator, parallel.process_id or 0, parallel.num_processes or 1)
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
    """Read torchrun's variables. Its own store listens on MASTER_PORT, so the hub uses the next."""
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
    """Read the variables of a task under srun. The port is derived from the job's number, so that
    two jobs on one machine do not collide."""
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_NTASKS_PER_NODE") or "1"
    counts = expand_counts(tasks)
    node = min(int(environ.get("SLURM_NODEID", 0)), len(counts) - 1)
    port = 61440 + int(environ.get("SLURM_JOB_ID", 0)) % 4096
    host = first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", ""))
    return Launch(
        f"{host}:{port}",
        int(environ["SLURM_PROCID"]),
        int(environ["SLURM_STEP_NUM_TASKS"]),
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
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        counts += [int(match[1])] * int(match[2] or 1) if match else [1]
    return counts


def choose_devices(launch: Launch, environ: Mapping[str, str]) -> list[int] | None:
    """Return the machine's GPUs that belong to this process; None for all visible ones.

    Processes on one machine share its GPUs evenly, unless the launcher already shows each process
    its own (CUDA_VISIBLE_DEVICES with one entry).
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


def choose_addresses(launch: Launch) -> list[str]:
    """Return the addresses on which process 0 listens, as few as possible; "" stands for all."""
    host = launch.address.rpartition(":")[0].strip("[]")
    if host in LOCAL or launch.local_size == launch.size:
        return [*LOOPBACK]
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return [""]  # a name may resolve differently on other machines
    return [host, *LOOPBACK]


def is_tpu_pod(launcher: str, environ: Mapping[str, str]) -> bool:
    """Return True if jax should find the other machines of a TPU slice itself."""
    if launcher == "auto":
        devices = [*Path("/dev").glob("accel[0-9]*"), *Path("/dev").glob("vfio/[0-9]*")]
        named = "," in environ.get("TPU_WORKER_HOSTNAMES", "")
        on_tpu = environ.get("JAX_PLATFORMS", "tpu").startswith("tpu")
        return on_tpu and find_spec("libtpu") is not None and (named or bool(devices))
    return launcher == "tpu"
