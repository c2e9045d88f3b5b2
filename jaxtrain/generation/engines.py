"""What a run samples with, opened: its kind of engine by rollout.engine, its environments."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from jaxtrain import plugins
from jaxtrain.config import Config, EnvConfig
from jaxtrain.config.secrets import reveal, reveal_url
from jaxtrain.data.media_tokens import MediaTokens
from jaxtrain.environments.guarded import GuardedEnv, open_guarded
from jaxtrain.environments.rewards import Rewards
from jaxtrain.generation.engine import EngineKind, Sampling
from jaxtrain.generation.lengths import some_rows

MOST_INSPECTED = 4096
"""Rows of a dataset of which servers are asked whether they can play them."""
ENGINES = {
    "local": "jaxtrain.generation.local.factory:LocalKind",
    "vllm": "jaxtrain.generation.vllm.factory:VllmKind",
}


def find_engine(config: Config) -> EngineKind:
    """The kind of engine that rollout.engine names: one of these, or one from outside."""
    return plugins.find("engines", config.rollout.engine, ENGINES, key="rollout.engine")()


def with_secrets(config: Config) -> Config:
    """The config for an engine to open: what rollout names by environment variables, read."""
    rollout, key = config.rollout, "rollout.vllm.servers"
    servers = [reveal_url(url, f"{key}.{place}") for place, url in enumerate(rollout.vllm.servers)]
    discover = reveal_url(rollout.vllm.discover, "rollout.vllm.discover")
    found = {
        "options": reveal(rollout.options, "rollout.options"),
        "vllm": rollout.vllm.model_copy(update={"servers": servers, "discover": discover}),
    }
    return config.model_copy(update={"rollout": rollout.model_copy(update=found)})


def seed_sampling(config: Config) -> Sampling:
    """Section sampling with a seed that run.seed changes, too."""
    seed = (config.sampling.seed + 1_000_003 * config.run.seed) % 2**31
    return config.sampling.model_copy(update={"seed": seed})


def list_envs(env: GuardedEnv, own: Sequence[tuple[GuardedEnv, Rewards]]) -> list[GuardedEnv]:
    """Each once of what open_envs found."""
    return list(dict.fromkeys([env, *(one for one, _ in own)]))


def count_envs(envs: Sequence[GuardedEnv]) -> dict[str, float]:
    """What all of them have counted so far."""
    found: Counter[str] = Counter()
    for env in envs:
        found.update(env.counters())
    return dict(found)


def inspect_envs(
    env: GuardedEnv,
    own: Sequence[tuple[GuardedEnv, Rewards]],
    datasets: Sequence[Any],
    log: Callable[[str], None],
    wait: bool = True,
) -> None:
    """Ask servers that environments play in about the datasets' rows; see Guarded.inspect."""
    for index, rows in enumerate(datasets):
        played = own[index][0] if own else env
        played.inspect(some_rows(rows, MOST_INSPECTED), log, wait)


def open_envs(
    config: Config,
    tokenizer: Any,
    rewards: Rewards,
    row_tokens: int,
    stack: ExitStack,
    media: MediaTokens | None = None,
) -> tuple[GuardedEnv, list[tuple[GuardedEnv, Rewards]]]:
    """(the run's environment, environment and rewards of each dataset where one has its own).
    row_tokens: longest sequence that can be drawn and trained. stack: closes them. media: as for
    Guarded."""
    datasets = config.data.datasets

    def open_one(section: EnvConfig, key: str) -> GuardedEnv:
        folder = config.run.output_dir
        env = open_guarded(section, tokenizer, row_tokens, key, media, folder)
        stack.callback(env.close)
        return env

    env = open_one(config.env, "env")
    if all(dataset.env is None and dataset.rewards is None for dataset in datasets):
        return env, []
    return env, [
        (
            env if dataset.env is None else open_one(dataset.env, f"data.datasets.{index}.env"),
            rewards.only(dataset.rewards),
        )
        for index, dataset in enumerate(datasets)
    ]
