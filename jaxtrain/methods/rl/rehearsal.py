"""Dry run of a method that samples: tries everything around the model once, without a model.

    row ─> environment, with an engine that says what it is told to ─> episode ─> all rewards

So a reward that cannot be imported, a column that is missing, a prompt that does not fit and an
environment that raises are told before any weight is read. Nothing is trained or written.
"""

import asyncio
from collections.abc import Callable
from typing import Any

from jaxtrain.config import Config
from jaxtrain.environments.scripted import ScriptedEngine, ScriptedSpeaker
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import EpisodeFailed
from jaxtrain.generation.episode_metrics import excerpt
from jaxtrain.generation.episodes import Env, Episode
from jaxtrain.safe_io import UnreadableRow
from jaxtrain.text_safety import shorten

SCRIPTED_ANSWER = "I do not know."
SECONDS = 60.0
"""Time limit of a rehearsed episode, regardless of env.timeout."""


def rehearse(
    config: Config,
    tokenizer: Any,
    parts: list[tuple[str, Any, Env, Any]],
    log: Callable[[str], None],
    *,
    need_reward: bool = True,
) -> None:
    """Play and judge one row of each dataset with a scripted model.

    parts: (its key and path, rows, environment, rewards or None) of each dataset. need_reward:
    whether there must be a reward. Raises UserError with what went wrong.
    """
    for name, rows, env, rewards in parts:
        if getattr(env, "remote", False):
            log(f"{name}: its environment plays in servers, where a dry run plays nothing")
            continue
        row = next(
            (candidate for candidate in (rows[i] for i in range(len(rows))) if candidate),
            UnreadableRow(""),
        )
        try:
            episode, scores = asyncio.run(
                asyncio.wait_for(play(config, tokenizer, row, env, rewards), SECONDS)
            )
        except TimeoutError:
            raise UserError(
                f"{name}: one episode with a scripted model took longer than {SECONDS:g} s; look"
                " for what waits in the environment or the rewards"
            ) from None
        except EpisodeFailed as failure:
            trace = f"\n{failure.trace}" if failure.trace else ""
            raise UserError(
                shorten(f"{name}: a first episode failed ({failure}): {failure.cause}{trace}")
            ) from None
        if need_reward and not scores:
            raise UserError(
                f"{name}: no reward judges the answers: add a [[rewards]] table with a function, or"
                " an env that gives rewards itself for rows such as these"
            )
        log(
            f"{name}: played one episode of {episode.num_tokens} tokens with a scripted model:"
            f" prompt {excerpt(episode.prompt)}, answer {excerpt(episode.completion)}"
            + (f", rewards {scores}" if scores else "")
        )


async def play(
    config: Config, tokenizer: Any, row: dict[str, Any], env: Env, rewards: Any
) -> tuple[Episode, dict[str, float | None]]:
    """Return a row's episode by an engine that always answers the same, and its rewards."""
    policies = {
        name: ScriptedEngine(tokenizer, [SCRIPTED_ANSWER] * 1000)
        if policy.trained
        else ScriptedSpeaker([SCRIPTED_ANSWER] * 1000)
        for name, policy in config.policies.items()
    }
    engine = ScriptedEngine(tokenizer, [SCRIPTED_ANSWER] * 1000, policies)
    episode = await env.run(dict(row), engine, config.sampling, 0)
    if rewards is None:
        return episode, dict(episode.all_rewards)
    scores = await rewards.score([episode], row)
    return episode, scores[0]
