"""Section rollout.vllm: servers that sample over HTTP."""

from jaxtrain.config.base import Section


class VllmConfig(Section):
    """vLLM servers; only rollout.engine vllm reads it."""

    servers: list[str] = []
    """Base URLs such as "http://127.0.0.1:8000"."""
