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
        found = [name.strip() for name in visible.split(",")]
        # CUDA stops at the first that is none.
        bad = [place for place, name in enumerate(found) if not name or name.startswith("-")]
        return found[: bad[0]] if bad else found
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):  # some containers lack it
        return [str(place) for place, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    lines = [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [line for line in lines if line.isdigit()]


def split_gpus(vllm: VllmConfig, gpus: list[str]) -> tuple[list[str], list[str]]:
    """(the trainer's, the servers') of these GPUs; UserError where there are too few."""
    wanted = vllm.gpus
    if wanted is None:
        wanted = vllm.replicas if gpus else 0
    if wanted > len(gpus):
        raise UserError(
            f"rollout.vllm.gpus: the servers are to have {wanted} GPUs and there are {len(gpus)}"
            f" ({VISIBLE} and nvidia-smi); lower rollout.vllm.gpus (or replicas); 0: on the CPU"
        )
    if not wanted:
        return gpus, []
    if vllm.sleep:
        return gpus, gpus[-wanted:]
    return gpus[:-wanted], gpus[-wanted:]


def leave_gpus(config: Config) -> None:
    """`set_aside`, where the config has servers started on this machine."""
    if config.rollout.engine == "vllm" and config.rollout.vllm.launch == "local":
        set_aside(config.rollout.vllm)


def set_aside(vllm: VllmConfig, environ: MutableMapping[str, str] = os.environ) -> None:
    """Leave the servers' GPUs to them: this process does not see them from now on. Where they are
    shared, jax takes half of their memory, unless the environment says otherwise. UserError."""
    global _for_servers
    gpus = list_gpus(environ)
    own, theirs = split_gpus(vllm, gpus)
    if theirs and vllm.sleep:
        environ.setdefault(MEMORY, SHARED_FRACTION)
    elif theirs:
        if not own and environ.get("JAX_PLATFORMS") != "cpu":
            raise UserError(
                f"rollout.vllm.gpus: all of the {len(gpus)} GPUs would be the servers' and none the"
                " trainer's; lower it, or share them: rollout.vllm.sleep = true"
            )
        environ[VISIBLE] = ",".join(own)
    _for_servers = theirs


def find_theirs(vllm: VllmConfig, environ: MutableMapping[str, str] = os.environ) -> list[str]:
    """The servers' GPUs; none where they compute on the CPU."""
    return split_gpus(vllm, list_gpus(environ))[1] if _for_servers is None else _for_servers


def assign(vllm: VllmConfig, environ: MutableMapping[str, str] = os.environ) -> list[list[str]]:
    """The GPUs of each server; none where it computes on the CPU. UserError where there are some
    and nothing was set aside before jax took them all."""
    theirs = find_theirs(vllm, environ)
    if _for_servers is None and theirs and not vllm.sleep:
        raise UserError(
            "rollout.vllm.launch local: jax has all GPUs already. The command line leaves some to"
            " the servers; a program calls jaxtrain.distributed.gpus.set_aside("
            "config.rollout.vllm) before anything that uses jax"
        )
    each = len(theirs) // vllm.replicas
    return [theirs[place * each : (place + 1) * each] for place in range(vllm.replicas)]
