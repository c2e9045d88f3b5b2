"""Section env: the world that a policy acts in."""

from pydantic import Field

from jaxtrain.config.base import Section


class EnvConfig(Section):
    """What an episode is; only task.kind rl reads it."""

    kind: str = "single_turn"
    """single_turn: one answer to each prompt. calculator: the built-in agent with its tool. Or an
    import path "package.module:Class"."""
    max_turns: int = Field(8, ge=1)
    """Assistant turns of an episode."""
