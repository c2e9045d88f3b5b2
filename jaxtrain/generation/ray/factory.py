"""Settings that a trainer sends to its service and workers, and how a worker opens them.

trainer: settings(config, tokenizer, ...) ──> service ──> worker: open_worker(settings)
                                                          environment, rewards, engine: no jax
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from jaxtrain.config import (
    Config,
    DataConfig,
    EnvConfig,
    PolicyConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
)
from jaxtrain.config.ray import service_name
from jaxtrain.environments.rewards.score import open_rewards
from jaxtrain.generation.dataset_envs import open_envs
from jaxtrain.generation.engine import SharedServers
from jaxtrain.generation.engines import seed_sampling
from jaxtrain.generation.episode_engine import with_policies
from jaxtrain.generation.frozen_policy import open_frozen
from jaxtrain.generation.group_player import GroupPlayer, GroupRules
from jaxtrain.generation.ray.actors import start_service
from jaxtrain.generation.ray.ray_cluster import join
from jaxtrain.generation.ray.remote_producer import RemoteProducer, ServiceRequest, SharedEngine

WORKER = "jaxtrain.generation.ray.factory:open_worker"


def worker_settings(
    config: Config, tokenizer: Any, shared: SharedServers, room: int, media: Any
) -> dict[str, Any]:
    """Return what `open_worker` reads. room: tokens of the longest episode. media: of open_envs."""
    dumped = config.model_dump(mode="json")
    rollout = ("group_size", "reward_workers", "retries")
    return {
        **{name: dumped[name] for name in ("env", "rewards", "sampling", "data", "policies")},
        "run": {name: dumped["run"][name] for name in ("output_dir", "seed")},
        "rollout": {name: dumped["rollout"][name] for name in rollout},
        "engine": (shared.opener, shared.settings),
        "tokenizer": tokenizer,
        "room": room,
        "media": dict(media or {}),
        "folder": os.getcwd(),
    }


def make_request(config: Config, opener: str, worker: dict[str, Any]) -> ServiceRequest:
    """Build the request to a service; worker: of `worker_settings`."""
    settings = {
        "service": {
            "config": config.model_dump(mode="json"),
            "tokenizer": worker["tokenizer"],
            "folder": os.getcwd(),
        },
        "worker": (WORKER, worker),
    }
    trainer = f"{config.run.output_dir} on {os.uname().nodename}, process {os.getpid()}"
    return ServiceRequest(trainer, opener, settings)


def open_remote(
    config: Config,
    request: ServiceRequest,
    rules: GroupRules,
    engine: SharedEngine,
    facts: Callable[[], dict[str, Any]],
    stack: ExitStack,
    log: Callable[[str], None],
) -> RemoteProducer:
    """Attach to the run's service on Ray: its own, or the one that rollout.service names.

    stack: leaves the cluster. Raises UserError, also while another run uses the service.
    """
    ray, name = config.rollout.ray, service_name(config.rollout.service)
    cluster = join(ray)
    stack.callback(cluster.close)
    service = start_service(cluster) if name is None else cluster.find(name)
    log(f"episodes are played by {ray.episode_workers} workers on Ray, {cluster.describe()}")
    return RemoteProducer(
        service, request, rules, engine=engine, facts=facts, wait_seconds=ray.wait_seconds, log=log
    )


class RunWorkerSetup:
    """`worker.WorkerSetup` of a run."""

    def __init__(self, settings: dict[str, Any]):
        enter(settings["folder"])
        config = read_sections(settings)
        opener, engine_settings = settings["engine"]
        rollout, tokenizer = config.rollout, settings["tokenizer"]
        with ExitStack() as stack:
            # Ray counts the CPUs of a worker, which those of the machine are not.
            workers = rollout.reward_workers or 1
            self.rewards = open_rewards(config.rewards, workers, rollout.retries)
            stack.callback(self.rewards.close)
            self.envs = open_envs(
                config, tokenizer, self.rewards, settings["room"], stack, settings["media"]
            )
            self.engine = EntryPoint("engine", opener, "").load()(engine_settings, name_worker())
            self.policies = with_policies(self.engine.engine, open_frozen(config))
            self.player = GroupPlayer(
                self.envs,
                self.policies,
                seed_sampling(config),
                GroupRules(rollout.group_size, self.rewards.weights, retries=rollout.retries),
            )
            self._closing = stack.pop_all()
        self.update = self.engine.update

    def report(self) -> dict[str, Any]:
        """Return counters, and what the trainer's engine must learn."""
        counters = {**self.rewards.counters, **self.policies.counters(), **self.envs.counters()}
        return {"counters": counters, "reports": self.engine.reports()}

    def close(self) -> None:
        """Close environments and rewards."""
        self._closing.close()


def open_worker(settings: dict[str, Any]) -> RunWorkerSetup:
    """Open what plays in a worker; raises UserError."""
    return RunWorkerSetup(settings)


def read_sections(settings: dict[str, Any]) -> Config:
    """Return a config of the sections that episodes need; the others are default and unchecked."""
    return Config.model_construct(
        run=RunConfig(**settings["run"]),
        env=EnvConfig(**settings["env"]),
        rewards=[RewardConfig(**reward) for reward in settings["rewards"]],
        sampling=SamplingConfig(**settings["sampling"]),
        data=DataConfig(**settings["data"]),
        policies={name: PolicyConfig(**policy) for name, policy in settings["policies"].items()},
        rollout=RolloutConfig(**settings["rollout"]),
    )


def enter(folder: str) -> None:
    """Make relative paths of the config mean what they mean where the run was started."""
    if Path(folder).is_dir():
        os.chdir(folder)


def name_worker() -> str:
    """Return a name that no other worker of the run has."""
    return f"{os.uname().nodename}-{os.getpid()}"
