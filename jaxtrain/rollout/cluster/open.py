"""What a trainer sends to its service and the workers, and what these make of it.

    trainer: settings(config, tokenizer, ...) ──> service ──> worker: open_worker(settings)
                                                              environment, rewards, engine: no jax
"""

import os
from contextlib import ExitStack
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from jaxtrain.config import Config, DataConfig, EnvConfig, RewardConfig, RolloutConfig
from jaxtrain.config import RunConfig
from jaxtrain.config.data import DatasetConfig
from jaxtrain.rewards import open_rewards
from jaxtrain.rollout.open import open_envs, seed_sampling
from jaxtrain.rollout.producer import GroupPlayer, Rules
from jaxtrain.rollout.types import Shared

WORKER = "jaxtrain.rollout.cluster.open:open_worker"


def worker_settings(
    config: Config, tokenizer: Any, shared: Shared, room: int, media: Any
) -> dict[str, Any]:
    """What `open_worker` reads. room: tokens of the longest episode. media: of open_envs."""
    dumped = config.model_dump(mode="json")
    sections = ("run", "env", "rewards", "sampling", "data", "rollout")
    return {
        **{name: dumped[name] for name in sections},
        "engine": (shared.opener, shared.settings),
        "tokenizer": tokenizer,
        "room": room,
        "media": dict(media or {}),
        "folder": os.getcwd(),
    }


class OpenedWorker:
    """`worker.Opened` of a run."""

    def __init__(self, settings: dict[str, Any]):
        enter(settings["folder"])
        config = read_sections(settings)
        opener, asked = settings["engine"]
        rollout, tokenizer = config.rollout, settings["tokenizer"]
        with ExitStack() as stack:
            self.rewards = open_rewards(config.rewards, rollout.reward_workers, rollout.retries)
            stack.callback(self.rewards.close)
            env, own = open_envs(
                config, tokenizer, self.rewards, settings["room"], stack, settings["media"]
            )
            self.engine = EntryPoint("engine", opener, "").load()(asked, name_worker())
            self.player = GroupPlayer(
                env,
                self.engine.engine,
                self.rewards,
                seed_sampling(config),
                Rules(rollout.group_size, self.rewards.weights, retries=rollout.retries),
                own=own,
            )
            self._closing = stack.pop_all()
        self.update = self.engine.update

    def report(self) -> dict[str, Any]:
        """See worker.Opened."""
        counters = {**self.rewards.counters, **self.engine.engine.counters()}
        return {"counters": counters, "reports": self.engine.reports()}

    def close(self) -> None:
        """See worker.Opened."""
        self._closing.close()


def open_worker(settings: dict[str, Any]) -> OpenedWorker:
    """What plays in a worker; UserError."""
    return OpenedWorker(settings)


def read_sections(settings: dict[str, Any]) -> Config:
    """A config of the sections that matter to episodes; the others are as by default, unchecked."""
    return Config.model_construct(
        run=RunConfig(**settings["run"]),
        env=EnvConfig(**settings["env"]),
        rewards=[RewardConfig(**one) for one in settings["rewards"]],
        sampling=settings["sampling"],
        data=DataConfig(**settings["data"]),
        rollout=RolloutConfig(**settings["rollout"]),
    )


def enter(folder: str) -> None:
    """Relative paths of the config mean what they meant where the run was started."""
    if Path(folder).is_dir():
        os.chdir(folder)


def name_worker() -> str:
    """A name that no other worker of the run has."""
    return f"{os.uname().nodename}-{os.getpid()}"
