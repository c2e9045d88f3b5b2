"""Section env: the world that the policy acts in."""

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from jaxtrain.config.base import Section


class EnvConfig(Section):
    """How a row of data becomes an episode: one answer, or a loop of model and tools."""

    kind: Literal["single_turn", "calculator", "python"] = "single_turn"
    """single_turn: one answer to the row's prompt. calculator: the built-in agent, which calls its
    tool and is asked on, over rows of builtin:calculator. python: an own class, see path."""
    path: str | None = None
    """Of kind python: "package.module:Class" or "file.py:Class", made with (tokenizer, **options),
    whose `async run(row, engine, sampling, index)` plays an episode."""
    system: str | None = None
    """Of kind single_turn: a system message before prompts that have none."""
    max_turns: int = Field(8, ge=1)
    """Assistant turns of one episode, tool calls included."""
    options: dict[str, Any] = {}
    """Of kind python: further keyword arguments of the class."""


def find_env_conflicts(env: EnvConfig) -> Iterator[str]:
    """One sentence for each impossible combination within the section."""
    if (env.kind == "python") != (env.path is not None):
        yield (
            f"env.kind is {env.kind} and env.path is {env.path!r}; an own environment needs"
            ' env.kind "python" and env.path "package.module:Class", the built-in ones no path'
        )
    if env.options and env.kind != "python":
        yield f"env.options has no effect while env.kind is {env.kind}; remove it"
    if env.system is not None and env.kind != "single_turn":
        yield f"env.system has no effect while env.kind is {env.kind}; remove it"
