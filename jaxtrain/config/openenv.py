"""Section env.openenv: servers of the OpenEnv protocol, and what their actions are."""

from collections.abc import Iterator
from typing import Any, Literal

from jaxtrain.config.base import Section

SCHEMES = ("http://", "https://", "ws://", "wss://")


class OpenEnvConfig(Section):
    """Environments that run as OpenEnv servers; only env.kind openenv reads it."""

    url: list[str] = []
    """Base URLs such as "http://127.0.0.1:8000"; with several, an episode goes to the one with the
    fewest."""
    action: Literal["tools", "text", "json"] = "tools"
    """What a turn of the model does. tools: it calls the environment's tools (MCP), and the episode
    ends with a turn that calls none. text: its text goes into one field of the action. json: it
    writes the action as a JSON object, bare or as its last fenced block; a mistake is told to it.
    """
    text_field: str = "message"
    """Of action text: the field that gets it."""
    observation_field: str | None = None
    """The field of an observation that the model is shown, "a.b" for one within another. Unset: a
    field prompt, text, message or content that is the only one, else all of it as JSON, metadata
    and empty fields aside."""
    reset: dict[str, Any] = {}
    """What each reset is given; a row's column `reset` (a table) is put on top. Without a seed in
    either, or in a column `seed`, the seed is made of the row: a group plays one and the same game.
    """
    reward_of: Literal["sum", "last"] = "sum"
    """The episode's reward: those of its steps added up, or the last one that there was."""
    token: str | None = None
    """Sent as `Authorization: Bearer`; "$NAME" is that environment variable."""


def find_openenv_conflicts(config: OpenEnvConfig, kind: str) -> Iterator[str]:
    """Yield one sentence for each impossible combination, of a section env of this kind."""
    if kind != "openenv":
        return
    if not config.url:
        yield 'env.kind openenv needs env.openenv.url, such as ["http://127.0.0.1:8000"]'
    for url in config.url:
        if not url.startswith(SCHEMES):
            yield f"env.openenv.url {url!r} is no URL; write http://HOST:PORT"
