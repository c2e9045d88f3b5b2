"""Requirements of jaxtrain on a machine: package versions by extra, drivers, optional packages; and
the form of a finding."""

import re
from typing import Any, Literal, NamedTuple

Facts = dict[str, Any]

JAX = {
    "cuda": "jax[cuda13]>=0.11.2,<0.12",
    "cuda12": "jax[cuda12]>=0.11.2,<0.12",
    "tpu": "jax[tpu]>=0.10.2",
}
"""The jax of our extras (pyproject.toml)."""
OLD_JAX = "jax[cuda12]>=0.10.2,<0.11"
"""For Python 3.11, which jax 0.11 no longer supports."""
NVML = "nvidia-ml-py>=12"

DRIVERS = {12: 525, 13: 580}
"""Oldest NVIDIA driver by major version of CUDA (NVIDIA's table of compatibility)."""
CAPABILITIES = {12: (5, 2), 13: (7, 5)}
"""Oldest compute capability that jax's wheels of each have code for."""
KERNELS_FOR = (0, 11)
"""jax series that the Hopper kernels are written for."""
VLLM = ((0, 32), (0, 33))
"""vLLM: from, and before."""

OPTIONAL = {
    "ray": 'rollouts on several machines: "ray[default]>=2.50,<3"',
    "vllm-router": 'rollout.vllm.discover = "router+...": "vllm-router>=0.1.17,<0.2"',
    "verifiers": 'env.kind = "verifiers": "verifiers>=0.4,<0.5" "uv>=0.8"',
    "math-verify": 'reward math: "math-verify>=0.8"',
    "jsonschema": 'reward json_schema: "jsonschema>=4.20"',
    "wandb": 'log.wandb_project: "wandb>=0.18"',
    "tensorboardX": 'log.tensorboard: "tensorboardX>=2.6"',
    "nvidia-ml-py": f'use and temperature of GPUs: "{NVML}"',
}
"""Packages that are used when a config asks for them: what for, and how pip knows them."""


class Finding(NamedTuple):
    """Line of the report."""

    name: str
    level: Literal["ok", "note", "error"]
    """note: works, with something to know. error: will not work."""
    text: str
    do: str = ""
    """What to do about it: a command, a key or a sentence."""


def numbers(version: str | None) -> tuple[int, ...]:
    """(0, 11, 2) of "0.11.2.dev3"; () of None and of what begins with no number."""
    match = re.match(r"\d+(?:\.\d+)*", version or "")
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def pip(facts: Facts, *requirements: str) -> str:
    """The command that installs requirements into the Python that the facts are of."""
    return f"{facts['python']['install']} " + " ".join(
        f'"{requirement}"' for requirement in requirements
    )


def choose_cuda(facts: Facts) -> int | None:
    """The major version of CUDA whose wheels of jax suit this machine's driver and GPUs: 13, 12, or
    None where the driver is too old for both."""
    driver = numbers(facts["nvidia"].get("driver"))
    oldest = min(
        (gpu["capability"] for gpu in facts["nvidia"]["gpus"] if gpu["capability"]), default=(99, 0)
    )
    for major in (13, 12):
        if driver[:1] >= (DRIVERS[major],) and tuple(oldest) >= CAPABILITIES[major]:
            return major
    return None


def install_cuda(facts: Facts) -> str:
    """The pip line of jax for this machine's NVIDIA GPUs."""
    major = choose_cuda(facts)
    if numbers(facts["python"]["version"])[:2] < (3, 12):
        return pip(facts, OLD_JAX, NVML) + "  # Python 3.12 would get jax 0.11"
    if major is None:
        return (
            f"an NVIDIA driver of {DRIVERS[12]} or newer (CUDA 13: {DRIVERS[13]}), then ask again"
        )
    extra, other_major = ("cuda", 12) if major == 13 else ("cuda12", 13)
    line = pip(facts, JAX[extra], NVML) + f"  # the extra {extra}"
    if facts["packages"]["versions"].get(f"jax-cuda{other_major}-plugin"):
        line = f"remove jax-cuda{other_major}-plugin and jax-cuda{other_major}-pjrt, then {line}"
    return line
