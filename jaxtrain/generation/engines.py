"""Engine of a run by rollout.engine, and the config that it is opened with."""

from jaxtrain import plugins
from jaxtrain.config import Config
from jaxtrain.config.secrets import reveal, reveal_url
from jaxtrain.generation.engine import EngineKind, Sampling

ENGINES = {
    "local": "jaxtrain.generation.local.factory:LocalKind",
    "sglang": "jaxtrain.generation.sglang.factory:SglangKind",
    "vllm": "jaxtrain.generation.vllm.factory:VllmKind",
}


def find_engine(config: Config) -> EngineKind:
    """Return the kind of engine that rollout.engine names: a built-in one or a plugin's."""
    return plugins.find("engines", config.rollout.engine, ENGINES, key="rollout.engine")()


def with_secrets(config: Config) -> Config:
    """Return the config for an engine to open, with the environment variables in rollout read."""
    rollout, key = config.rollout, "rollout.vllm.servers"
    servers = [reveal_url(url, f"{key}.{index}") for index, url in enumerate(rollout.vllm.servers)]
    discover = reveal_url(rollout.vllm.discover, "rollout.vllm.discover")
    revealed = {
        "options": reveal(rollout.options, "rollout.options"),
        "vllm": rollout.vllm.model_copy(update={"servers": servers, "discover": discover}),
    }
    return config.model_copy(update={"rollout": rollout.model_copy(update=revealed)})


def seed_sampling(config: Config) -> Sampling:
    """Return section sampling with a seed that run.seed changes, too."""
    seed = (config.sampling.seed + 1_000_003 * config.run.seed) % 2**31
    return config.sampling.model_copy(update={"seed": seed})
