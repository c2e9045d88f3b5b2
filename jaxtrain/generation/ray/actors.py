"""Ray actors: the service and its episode workers."""

import os
from collections.abc import Sequence
from typing import Any

from jaxtrain.config.ray import RayConfig
from jaxtrain.generation.ray.ray_cluster import RayCluster, RayRemote
from jaxtrain.generation.ray.remote import RemoteObject
from jaxtrain.generation.ray.service import RolloutService
from jaxtrain.generation.ray.worker import EpisodeWorker

CALLS = 16
"""Calls that the service serves at once; one may wait for slots."""
EPISODES = 100_000
"""Prompts that a worker may play at once: as many as the service sends it."""


class RayService(RolloutService):
    """A service whose workers are actors of its own: they end with it."""

    def __init__(self, config: dict[str, Any]):
        # It is a process without a GPU, whatever the trainer computes on.
        os.environ["JAX_PLATFORMS"] = "cpu"
        self.config = RayConfig(**config)
        self._workers: list[RayRemote] = []
        super().__init__(
            self._find_workers,
            lease_seconds=self.config.lease_seconds,
            episode_seconds=self.config.episode_seconds,
        )

    def _find_workers(self) -> Sequence[RemoteObject]:
        cluster = RayCluster(self.config)
        while len(self._workers) < self.config.episode_workers:
            worker = cluster.start(
                EpisodeWorker,
                (),
                num_cpus=self.config.worker_cpus,
                max_concurrency=EPISODES,
                scheduling_strategy="SPREAD",
                runtime_env=cluster.environment(self.config.runtime_env),
            )
            self._workers.append(worker)
        return self._workers


def start_service(cluster: RayCluster, name: str | None = None) -> RayRemote:
    """Start a service on this node, or wherever there is room once it is lost. name: that of a
    service that outlives this process."""
    node = cluster.ray.get_runtime_context().get_node_id()
    near = cluster.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=True)
    detached = {} if name is None else {"name": name, "lifetime": "detached"}
    return cluster.start(
        RayService,
        (cluster.config.model_dump(mode="json"),),
        num_cpus=1,
        max_concurrency=CALLS,
        scheduling_strategy=near,
        runtime_env=cluster.environment(),
        **detached,
    )
