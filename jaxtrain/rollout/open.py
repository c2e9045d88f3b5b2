"""Engines, by rollout.engine: how one is opened, and what a run must know of it beforehand."""

from jaxtrain import plugins
from jaxtrain.config import Config
from jaxtrain.rollout.types import EngineKind, Sampling

ENGINES = {
    "local": "jaxtrain.rollout.local.open:Local",
    "vllm": "jaxtrain.rollout.vllm.open:Vllm",
}


def find_engine(config: Config) -> EngineKind:
    """The kind of engine that rollout.engine names: one of these, or one from outside."""
    return plugins.find("engines", config.rollout.engine, ENGINES, key="rollout.engine")()


def seed_sampling(config: Config) -> Sampling:
    """Section sampling with a seed that run.seed changes, too."""
    seed = (config.sampling.seed + 1_000_003 * config.run.seed) % 2**31
    return config.sampling.model_copy(update={"seed": seed})
