"""Which of this machine's NVIDIA GPUs are the trainer's, and which its own servers'. No jax here:
`set_aside` must come before jax looks for devices, which the command line sees to.
"""

import os
import subprocess
from collections.abc import MutableMapping
from pathlib import Path

from jaxtrain.config import Config
from jaxtrain.config.vllm import VllmConfig
from jaxtrain.errors import UserError

VISIBLE = "CUDA_VISIBLE_DEVICES"
MEMORY = "XLA_PYTHON_CLIENT_MEM_FRACTION"
SHARED_FRACTION = "0.5"
"""Of a GPU's memory, for a trainer that shares it with a server."""
ASK_SECONDS = 30.0

_for_servers: list[str] | None = None
"""What `set_aside` took."""


def list_gpus(environ: MutableMapping[str, str]) -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    visible = environ.get(VISIBLE)
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA stops at the first that is none.
        bad = [
            bad_index for bad_index, name in enumerate(names) if not name or name.startswith("-")
        ]
        return names[: bad[0]] if bad else names
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):  # some containers lack it
        return [str(bad_index) for bad_index, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    lines = [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [line for line in lines if line.isdigit()]


def split_gpus(vllm: VllmConfig, gpus: list[str]) -> tuple[list[str], list[str]]:
    """(the trainer's, the servers') of these GPUs; UserError where there are too few."""
    num_gpus = vllm.gpus
    if num_gpus is None:
        num_gpus = vllm.replicas if gpus else 0
    if num_gpus > len(gpus):
        raise UserError(
            f"rollout.vllm.gpus: the servers are to have {num_gpus} GPUs and there are {len(gpus)}"
            f" ({VISIBLE} and nvidia-smi); lower rollout.vllm.gpus (or replicas); 0: on the CPU"
        )
    if not num_gpus:
        return gpus, []
    if vllm.sleep:
        return gpus, gpus[-num_gpus:]
    return gpus[:-num_gpus], gpus[-num_gpus:]


def leave_gpus(config: Config) -> None:
    """`set_aside`, where the config has servers started on this machine."""
    if config.rollout.engine == "vllm" and config.rollout.vllm.launch == "local":
        set_aside(config.rollout.vllm)


def set_aside(vllm: VllmConfig, environ: MutableMapping[str, str] = os.environ) -> None:
    """Leave the servers' GPUs to them: this process does not see them from now on. Where they are
    shared, jax takes half of their memory, unless the environment says otherwise. UserError."""
    global _for_servers
    gpus = list_gpus(environ)
    trainer_gpus, server_gpus = split_gpus(vllm, gpus)
    if server_gpus and vllm.sleep:
        environ.setdefault(MEMORY, SHARED_FRACTION)
    elif server_gpus:
        if not trainer_gpus and environ.get("JAX_PLATFORMS") != "cpu":
            raise UserError(
                f"rollout.vllm.gpus: all of the {len(gpus)} GPUs would be the servers' and none the"
                " trainer's; lower it, or share them: rollout.vllm.sleep = true"
            )
        environ[VISIBLE] = ",".join(trainer_gpus)
    _for_servers = server_gpus


def find_theirs(vllm: VllmConfig, environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """The servers' GPUs; none where they compute on the CPU."""
    return split_gpus(vllm, list_gpus(environ))[1] if _for_servers is None else _for_servers


def assign(vllm: VllmConfig, environ: MutableMapping[str, str] = os.environ) -> list[list[str]]:
    """The GPUs of each server; none where it computes on the CPU. UserError where there are some
    and nothing was set aside before jax took them all."""
    server_gpus = find_theirs(vllm, environ)
    if _for_servers is None and server_gpus and not vllm.sleep:
        raise UserError(
            "rollout.vllm.launch local: jax has all GPUs already. The command line leaves some to"
            " the servers; a program calls jaxtrain.distributed.gpus.set_aside("
            "config.rollout.vllm) before anything that uses jax"
        )
    per_server = len(server_gpus) // vllm.replicas
    return [
        server_gpus[server * per_server : (server + 1) * per_server]
        for server in range(vllm.replicas)
    ]
