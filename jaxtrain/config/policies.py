"""Sections policies.NAME: who speaks in an episode beside the policy that section model trains."""

import re
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from jaxtrain.config.base import Section
from jaxtrain.config.bounds import ROWS, SECONDS, TOKENS

NAME = re.compile(r"[a-z][a-z0-9_]{0,31}\Z")
TAKEN = ("policy", "reference", "draft", "teacher", "eval", "params", "opt_state", "step", "model")
"""What a run calls other things."""


class PolicyConfig(Section):
    """A frozen model that environments talk to by its name, `chat.other("NAME")`: a judge, a user,
    a rival. It stands behind servers and is never updated; its words are context."""

    servers: list[str] = []
    """URLs of servers with POST /v1/chat/completions: vLLM, or anybody's of that shape. Each
    request goes to the least busy one."""
    model: str | None = None
    """The name that the servers know it by. Unset: the one that they list."""
    api_key: str | None = None
    """Sent with every request: "$NAME" is that environment variable. Unset: that of VLLM_API_KEY,
    where it is set."""
    max_tokens: int = Field(512, ge=1, le=TOKENS)
    """Longest answer."""
    temperature: float = Field(0.0, ge=0, le=100)
    """Of its answers."""
    options: dict[str, Any] = {}
    """Further keys of each request, such as {chat_template_kwargs = {enable_thinking = false}}."""
    concurrency: int = Field(64, ge=1, le=ROWS)
    """Most requests under way."""
    seconds: float = Field(300.0, gt=0, le=SECONDS)
    """Longest wait for one answer; then it is asked for again."""
    retries: int = Field(3, ge=0, le=ROWS)
    """Times that a request which failed is made again, of another server where there is one; then
    the episode has failed (rollout.retries)."""


def find_policy_problems(config: Any) -> Iterator[str]:
    """One sentence for each section policies.NAME that cannot be, or that nobody asks."""
    for name, policy in config.policies.items():
        key = f"policies.{name}"
        if not NAME.match(name) or name in TAKEN:
            yield (
                f"{key}: a policy's name is small letters, digits and _, and none of"
                f" {', '.join(TAKEN)}"
            )
        if not policy.servers:
            yield f'{key}.servers is empty; name where it answers: ["http://host:8000"]'
        for url in policy.servers:
            if not url.startswith(("http://", "https://")):
                yield f"{key}.servers: {url!r} is no URL; write http://host:port"
        for own in ("messages", "model", "max_tokens", "temperature", "n", "stream"):
            if own in policy.options:
                yield f"{key}.options.{own} is not to be set there; use the section's own keys"
    if config.policies and "env" not in config.task.reads and not config.eval.sets:
        yield (
            "section policies has no effect without an environment that talks to them: task.kind"
            ' "rl", or [[eval.sets]]; remove it'
        )
