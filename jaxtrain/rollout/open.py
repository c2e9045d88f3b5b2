"""Engines, by rollout.engine: how one is opened, and what a run must know of it beforehand."""

from jaxtrain import plugins
from jaxtrain.config import Config
from jaxtrain.config.secrets import reveal, reveal_url
from jaxtrain.rollout.types import EngineKind, Sampling

ENGINES = {
    "local": "jaxtrain.rollout.local.open:Local",
    "vllm": "jaxtrain.rollout.vllm.open:Vllm",
}


def find_engine(config: Config) -> EngineKind:
    """The kind of engine that rollout.engine names: one of these, or one from outside."""
    return plugins.find("engines", config.rollout.engine, ENGINES, key="rollout.engine")()


def with_secrets(config: Config) -> Config:
    """The config for an engine to open: what rollout names by environment variables, read."""
    rollout, key = config.rollout, "rollout.vllm.servers"
    servers = [reveal_url(url, f"{key}.{place}") for place, url in enumerate(rollout.vllm.servers)]
    found = {
        "options": reveal(rollout.options, "rollout.options"),
        "vllm": rollout.vllm.model_copy(update={"servers": servers}),
    }
    return config.model_copy(update={"rollout": rollout.model_copy(update=found)})


def seed_sampling(config: Config) -> Sampling:
    """Section sampling with a seed that run.seed changes, too."""
    seed = (config.sampling.seed + 1_000_003 * config.run.seed) % 2**31
    return config.sampling.model_copy(update={"seed": seed})
