"""Episodes for people: `generate --env` opens an environment with all policies that it talks to.

run of one policy        its sampler                          servers, folders of section
run of several           a sampler for each, on one base      policies, as in training
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxtrain.config import Config, EnvConfig, PolicyConfig, SamplingConfig
from jaxtrain.config.base import Section
from jaxtrain.config.load import apply_overrides, validate
from jaxtrain.config.policies import find_section_problems, list_trained
from jaxtrain.config.rollout import RolloutConfig
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.environments.factory import open_env
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import EpisodeFailed
from jaxtrain.generation.episode_engine import combine_engines, with_policies
from jaxtrain.generation.episodes import Episode, as_game
from jaxtrain.generation.frozen_policy import open_frozen
from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.generation.local.frozen_folder import open_folders
from jaxtrain.generation.local.requests import Requests

OWN = ("env.", "policies.")
"""Keys of the sections that the environment is opened by."""


class PlayConfig(Section):
    """Sections env and policies by themselves: the config of a run that has no use for them would
    refuse them."""

    env: EnvConfig
    policies: dict[str, PolicyConfig] = {}


def read_sections(config: Config, overrides: list[str], origin: str) -> Config:
    """The config with what `overrides` say of its sections env and policies; UserError."""
    table = {
        "env": config.env.model_dump(),
        "policies": {name: one.model_dump() for name, one in config.policies.items()},
    }
    found = validate(PlayConfig, apply_overrides(table, overrides), origin)
    update = {"env": found.env, "policies": found.policies, "rollout": RolloutConfig()}
    changed = config.model_copy(update=update)
    if problems := list(find_section_problems(changed)):
        raise UserError(f"{origin}:\n" + "\n".join(f"  {one}" for one in problems))
    if (now := list_trained(changed)) != (then := list_trained(config)):
        raise UserError(
            f"generate: {origin} has trained {', '.join(then) or 'one policy, without a name'}, and"
            f" policies.NAME.trained names {', '.join(now) or 'none'}; remove that override"
        )
    return changed


class PlaySession:
    """An environment, and everybody who speaks in it."""

    def __init__(self, config: Config, parts: ModelBundle, samplers: Mapping[str, Requests]):
        """config: of read_sections. samplers: of the trained policies by name, "" of the only one.
        UserError where a frozen policy cannot be had."""
        self.config, self.parts, self.samplers = config, parts, samplers
        self.folders = open_folders(config, parts, list(parts.mesh.devices.flat))
        self.frozen = open_frozen(config)

    def name_first(self, game: Episode) -> Episode:
        """What has no name is the first policy's."""
        for one in (game, *game.others):
            one.policy = one.policy or next(iter(self.samplers))
        return game

    def play(self, rows: list[dict[str, Any]], sampling: SamplingConfig) -> list[Episode]:
        """Episodes of rows, side by side; of a game the first one, which has the others."""
        room = next(iter(self.samplers.values())).max_len
        env = open_env(self.config.env, self.parts.tokenizer, room)

        async def run(thread: ThreadPoolExecutor) -> list[Episode]:
            engines = {name: LocalEngine(one, thread) for name, one in self.samplers.items()}
            engine = combine_engines(engines) if "" not in engines else engines[""]
            speakers = {name: one.speak(thread) for name, one in self.folders.items()}
            engine = with_policies(engine, {**speakers, **self.frozen})
            try:
                games = await asyncio.gather(
                    *(env.run(row, engine, sampling, i) for i, row in enumerate(rows))
                )
                return [self.name_first(as_game(game)) for game in games]
            except EpisodeFailed as failure:
                cause = f": {failure.cause}" if failure.cause else ""
                raise UserError(f"an episode came to nothing: {failure}{cause}") from None
            finally:
                await engine.close()
                if (close := getattr(env, "close", None)) is not None:
                    close()

        with ThreadPoolExecutor(1, thread_name_prefix="sampler") as thread:
            return asyncio.run(run(thread))
