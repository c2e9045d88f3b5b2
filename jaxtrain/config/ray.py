"""Section rollout.ray: rollouts on the machines of a Ray cluster."""

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from jaxtrain.config.base import Section
from jaxtrain.config.limits import ROWS, SECONDS, WORKERS

SCHEME = "ray://"
DEFAULT_NAME = "rollouts"


class RayConfig(Section):
    """A Ray cluster (docs/cluster.md); only rollout.service ray and rollout.vllm.launch ray read
    it."""

    address: str | None = None
    """Of the cluster's head: "auto" (the cluster that this machine is part of) or HOST:PORT, as
    ray start prints it. Unset: a Ray of this machine alone is started with the run and ends with
    it."""
    namespace: str = "jaxtrain"
    """Where the names of services are looked up."""
    episode_workers: int = Field(2, ge=1, le=WORKERS)
    """Processes that play and judge episodes."""
    worker_cpus: float = Field(1.0, ge=0, le=ROWS)
    """CPUs that Ray sets aside for each of them; their reward_workers run within that."""
    runtime_env: dict[str, Any] = {}
    """Ray's runtime_env of the episode workers, such as {pip = ["textarena"]}: what only the
    environments need."""
    pass_env: list[str] = ["VLLM_API_KEY", "HF_HOME", "HF_TOKEN"]
    """Environment variables of this process that the workers and servers get, where they are set.
    """
    episode_seconds: float = Field(300.0, gt=0, le=SECONDS)
    """A worker that answers nothing for so long, because an episode blocks its event loop, is
    ended; another takes its place and its prompts are asked again."""
    lease_seconds: float = Field(60.0, gt=0, le=SECONDS)
    """How long a service keeps out other runs after it last heard of its own."""
    wait_seconds: float = Field(600.0, gt=0, le=SECONDS)
    """How long to wait for room in the cluster, and for a service that was lost."""


def service_name(service: str) -> str | None:
    """NAME of ray://NAME; None where a run has a service of its own, or none."""
    return service.removeprefix(SCHEME) if service.startswith(SCHEME) else None


def find_ray_conflicts(rollout: Any) -> Iterator[str]:
    """Yield one sentence for each impossible combination of section rollout."""
    service = rollout.service
    if service not in ("process", "ray") and not service_name(service):
        yield (
            f'rollout.service {service!r} is none of "process", "ray" and "ray://NAME" (a service'
            " that jaxtrain serve-rollouts has started)"
        )
    elif service != "process" and rollout.engine == "local":
        yield (
            f"rollout.service {service} plays episodes in other processes, which cannot use the"
            ' local engine: set rollout.engine to "vllm" or rollout.service to "process"'
        )
    changed = rollout.ray.model_dump(exclude_defaults=True)
    if service == "process" and rollout.vllm.launch != "ray" and changed:
        yield (
            f"rollout.ray.{next(iter(changed))} has no effect without rollout.service ray or"
            " rollout.vllm.launch ray; remove it or set one of them"
        )
