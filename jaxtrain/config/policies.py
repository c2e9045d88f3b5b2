"""Sections policies.NAME: participants of episodes besides the policy of section model."""

import re
from collections.abc import Iterator
from typing import Any

from pydantic import Field

from jaxtrain.config.base import Place, Section
from jaxtrain.config.limits import ROWS, SECONDS, TOKENS

NAME = re.compile(r"[a-z][a-z0-9_]{0,31}\Z")
TAKEN = ("policy", "reference", "draft", "teacher", "eval", "params", "opt_state", "step", "model")
"""Names that a run uses for other things."""


class PolicyConfig(Section):
    """Another participant of an episode: environments talk to it by its name, `chat.other("NAME")`.
    Frozen (a judge, a user, a rival), behind servers or a folder that the local engine draws: its
    words are context. Or trained: one of several adapters on the base of section model."""

    trained: bool = False
    """An adapter by section adapter that this run trains, as all that are trained, on one base; the
    first of them is who plays where an environment names none. Only path goes with it.
    """
    path: Place | None = None
    """Frozen: Hugging Face folder or Hub id of a chat model, of any family and with a tokenizer of
    its own, that the local engine draws beside the policy. trained: PEFT folder to start from, of
    the rank, alpha and targets of section adapter; unset: adapter.path, or as every adapter starts.
    """
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
    """Most requests under way; of a folder the answers that are drawn together."""
    seconds: float = Field(300.0, gt=0, le=SECONDS)
    """Longest wait for one answer; then it is asked for again."""
    retries: int = Field(3, ge=0, le=ROWS)
    """Times that a request which failed is made again, of another server where there is one; then
    the episode has failed (rollout.retries)."""


def find_policy_problems(config: Any) -> Iterator[str]:
    """Yield one sentence for each section policies.NAME that is impossible or unused."""
    yield from find_section_problems(config)
    for key, env in list_sections(config):
        for agent, name in env.verifiers.policies.items():
            if name not in list_trained(config):
                trained_names = ", ".join(list_trained(config)) or "none"
                yield (
                    f"{key}.verifiers.policies.{agent}: {name!r} is no trained policy of section"
                    f" policies, which has {trained_names}; a frozen one is a client of the"
                    f" agent's own,"
                    f" {key}.verifiers.agents.{agent}.client"
                )
    if list_trained(config):
        yield from find_trained_problems(config)
    if config.policies and "env" not in config.task.reads and not config.eval.sets:
        yield (
            "section policies has no effect without an environment that talks to them: task.kind"
            ' "rl", or [[eval.sets]]; remove it'
        )


def find_section_problems(config: Any) -> Iterator[str]:
    """Yield one sentence for each section policies.NAME that is impossible in every run."""
    for name, policy in config.policies.items():
        key = f"policies.{name}"
        if not NAME.match(name) or name in TAKEN:
            yield (
                f"{key}: a policy's name is small letters, digits and _, and none of"
                f" {', '.join(TAKEN)}"
            )
        if policy.trained:
            for key_name in policy.model_dump(exclude_defaults=True):
                if key_name not in ("trained", "path"):
                    yield f"{key}.{key_name} is for a frozen policy; remove it, or {key}.trained"
        elif policy.path is not None:
            yield from find_folder_problems(config, key, policy)
        elif not policy.servers:
            yield (
                f'{key}.servers is empty; name where it answers: ["http://host:8000"], or'
                f" {key}.path for a folder that the local engine draws, or set {key}.trained to"
                " train it"
            )
        for url in policy.servers:
            if not url.startswith(("http://", "https://")):
                yield f"{key}.servers: {url!r} is no URL; write http://host:port"
        for reserved in ("messages", "model", "max_tokens", "temperature", "n", "stream"):
            if reserved in policy.options:
                yield f"{key}.options.{reserved} is not to be set there; use the section's own keys"


def list_sections(config: Any) -> Iterator[tuple[str, Any]]:
    """(key, section) of all environments of a config."""
    yield "env", config.env
    for key, many in (("data.datasets", config.data.datasets), ("eval.sets", config.eval.sets)):
        for index, entry in enumerate(many):
            if entry.env is not None:
                yield f"{key}.{index}.env", entry.env


def find_folder_problems(config: Any, key: str, policy: PolicyConfig) -> Iterator[str]:
    """Yield one sentence for each key that conflicts with a frozen folder."""
    for key_name in ("servers", "model", "api_key", "options", "seconds", "retries"):
        if key_name in policy.model_dump(exclude_defaults=True):
            yield f"{key}.{key_name} is for a policy behind servers; remove it, or {key}.path"
    if config.rollout.engine != "local":
        yield (
            f'{key}.path is drawn by the local engine; set rollout.engine to "local", or serve it'
            f" and name {key}.servers instead"
        )
    if config.rollout.service != "process":
        yield (
            f'{key}.path is drawn in the trainer\'s process; set rollout.service to "process", or'
            f" serve it and name {key}.servers instead"
        )


def list_trained(config: Any) -> tuple[str, ...]:
    """Names of the policies that the run trains, in the config's order; none: it trains the one of
    section model, without a name."""
    return tuple(name for name, policy in config.policies.items() if policy.trained)


def list_judges(config: Any) -> dict[str, list[str]]:
    """Return, for each trained policy, the labels of the reward functions that judge it, in the
    config's order."""
    return {
        name: [reward.label for reward in config.rewards if reward.policy in (None, name)]
        for name in list_trained(config)
    }


def find_trained_problems(config: Any) -> Iterator[str]:
    """Yield one sentence for each key that conflicts with several adapters on one base."""
    key = f"policies.{list_trained(config)[0]}.trained"
    rollout, adapter, task = config.rollout, config.adapter, config.task
    if task.kind != "rl":
        yield f'{key} is for task.kind "rl", not {task.kind}'
        return
    if adapter.kind == "none":
        yield f'{key}: every policy is an adapter on one base; set adapter.kind to "lora"'
    for name in ("train_embeddings", "train_head"):
        if getattr(adapter, name):
            yield f"adapter.{name} trains a table of the base, which policies share; remove it"
    if rollout.engine == "vllm" and rollout.vllm.sync != "lora":
        yield (
            f"{key}: servers hold one base and an adapter for each policy; set rollout.vllm.sync to"
            ' "lora"'
        )
    if rollout.service != "process":
        yield f'{key} plays in the trainer\'s process; set rollout.service to "process"'
    if rollout.curator != "all":
        yield f'{key}: rollout.curator goes by the rewards of one policy; set it to "all"'
    if task.reference == "frozen":
        yield f'{key}: policies share the base as reference; set task.reference to "adapter_off"'
    off = {
        "rollout.streaming": rollout.streaming,
        "rollout.replay_size": rollout.replay_size,
        "rollout.draft": rollout.draft is not None,
        "rollout.draft_refresh": rollout.draft_refresh is not None,
        "rollout.vllm.eval_servers": bool(rollout.vllm.eval_servers),
        "rewards.model": any(reward.model is not None for reward in config.rewards),
    }
    for conflicting_key, is_set in off.items():
        if is_set:
            yield f"{conflicting_key} goes with one trained policy; remove it, or {key}"
