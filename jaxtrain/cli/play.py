"""The work of `generate`: answers, and with --env episodes with all policies of an environment.

run of one policy        its sampler                          servers, folders of section
run of several           a sampler for each, on one base      policies, as in training
"""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jaxtrain.api import Model
from jaxtrain.config import Config, EnvConfig, PolicyConfig, SamplingConfig
from jaxtrain.config.base import Section
from jaxtrain.config.load import apply_overrides, validate
from jaxtrain.config.policies import find_section_problems, list_trained
from jaxtrain.config.rollout import RolloutConfig
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.data.chat.prompt import prompt_tokens
from jaxtrain.data.chat.template import TemplateFailed, decode_answer, encode
from jaxtrain.environments.factory import open_env
from jaxtrain.errors import UserError
from jaxtrain.generation.acceptance import Acceptance
from jaxtrain.generation.engine import Completion, EpisodeFailed
from jaxtrain.generation.episode_engine import combine_engines, with_policies
from jaxtrain.generation.episodes import Episode, as_game
from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.generation.local.frozen_folder import open_folders
from jaxtrain.generation.local.requests import Requests
from jaxtrain.huggingface.generation import describe_ignored

ENV_KEYS = ("env.", "policies.")
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
        "policies": {name: policy.model_dump() for name, policy in config.policies.items()},
    }
    sections = validate(PlayConfig, apply_overrides(table, overrides), origin)
    update = {"env": sections.env, "policies": sections.policies, "rollout": RolloutConfig()}
    changed = config.model_copy(update=update)
    if problems := list(find_section_problems(changed)):
        raise UserError(f"{origin}:\n" + "\n".join(f"  {policy}" for policy in problems))
    if (changed_names := list_trained(changed)) != (trained_names := list_trained(config)):
        raise UserError(
            f"generate: {origin} has trained"
            f" {', '.join(trained_names) or 'one policy, without a name'}, and"
            f" policies.NAME.trained names {', '.join(changed_names) or 'none'}; remove that"
            f" override"
        )
    return changed


class PlaySession:
    """An environment with all of its policies."""

    def __init__(self, config: Config, bundle: ModelBundle, samplers: Mapping[str, Requests]):
        """config: of read_sections. samplers: of the trained policies by name, "" of the only one.
        UserError where a frozen policy cannot be had."""
        from jaxtrain.generation.frozen_policy import open_frozen  # imports an HTTP client

        self.config, self.parts, self.samplers = config, bundle, samplers
        self.folders = open_folders(config, bundle, list(bundle.mesh.devices.flat))
        self.frozen = open_frozen(config)

    def name_first(self, game: Episode) -> Episode:
        """Attribute episodes without a policy name to the first policy."""
        for member in (game, *game.others):
            member.policy = member.policy or next(iter(self.samplers))
        return game

    def play(self, rows: list[dict[str, Any]], sampling: SamplingConfig) -> list[Episode]:
        """Episodes of rows, side by side; of a game the first one, which has the others."""
        room = next(iter(self.samplers.values())).max_len
        env = open_env(self.config.env, self.parts.tokenizer, room)

        async def run(thread: ThreadPoolExecutor) -> list[Episode]:
            engines = {
                name: LocalEngine(sampler, thread) for name, sampler in self.samplers.items()
            }
            engine = combine_engines(engines) if "" not in engines else engines[""]
            speakers = {name: sampler.speak(thread) for name, sampler in self.folders.items()}
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


def find_short(
    prompts: Sequence[Sequence[int]], numbers: Sequence[int], longest: int, owner: str
) -> list[int]:
    """Return the indices of the prompts that leave room for an answer; a note names the others by
    their numbers.

    longest: tokens of prompt and answer, 0 for no limit. owner: of the limit.
    """
    short = [i for i, prompt in enumerate(prompts) if longest <= 0 or len(prompt) < longest]
    if long := sorted(set(range(len(prompts))).difference(short)):
        named = ", ".join(str(numbers[i]) for i in long[:10]) + (", ..." if len(long) > 10 else "")
        print(
            f"note: {owner} takes {longest:,} tokens, prompt and answer, and {len(long)} of"
            f" {len(prompts)} prompts leave no room (number {named}): they get no answer",
            file=sys.stderr,
        )
    return short


class AnswerWriter:
    """A model that answers messages, continues text or ids, or acts in an environment."""

    def __init__(
        self,
        name: str,
        overrides: list[str],
        raw: bool,
        draft: str | None = None,
        *,
        acts: bool = False,
    ):
        """raw: texts or ids are continued as they stand. draft: folder of a draft model. acts: in
        section env's environment, with all policies."""
        env_overrides = [word for word in overrides if word.startswith(ENV_KEYS)]
        model_overrides = [word for word in overrides if word not in env_overrides]
        self.model = Model(name, model_overrides, several=acts, own_dtype=True)
        config = self.model.config
        sections = read_sections(config, env_overrides, name)
        self.tokenizer = self.model.tokenizer
        self.raw = raw
        self.require_template(name)
        self.vocab_size = self.model.vocab_size
        self.sampling: SamplingConfig = config.sampling
        policies = self.model.policies
        if len(policies) > 1 and draft is not None:
            raise UserError(f"{name} has trained several policies, for which no draft guesses")
        self.sampler = self.model.sampler(raw, draft)
        samplers = {policy: self.model.sampler(raw, policy=policy) for policy in policies}
        parts = self.model.snapshot.roles.bundle
        self.stage = PlaySession(sections, parts, samplers or {"": self.sampler}) if acts else None
        folder = self.model.snapshot.roles.bundle.folder
        if folder is not None and (ignored := describe_ignored(folder)):
            print(f"note: {ignored}", file=sys.stderr)
        print(
            f"note: computing in {config.model.compute_dtype}; model.compute_dtype=... changes it",
            file=sys.stderr,
        )

    def require_template(self, name: str) -> None:
        """Raise UserError for conversations without a chat template."""
        if not self.raw and not self.tokenizer.chat_template:
            raise UserError(
                f"{name} has no chat template: continue plain text with --raw, or name one with"
                " model.chat_template=FILE"
            )

    @property
    def acceptance(self) -> Acceptance | None:
        """Totals of a draft's guesses; None without one."""
        return self.sampler.acceptance

    def announce(self, phase: Callable[..., Any]) -> None:
        """Report phases of sampling to `phase` (runs.progress.Progress)."""
        self.sampler.phase = phase

    def tokenize(
        self, prompt: Any, tools: Any = None, keywords: Any = None, origin: str = "the prompt"
    ) -> list[int]:
        """Return the tokens of a prompt: a string with --raw, else messages. keywords: for the
        chat template. origin: its name in errors."""
        try:
            if self.raw:
                return encode(self.tokenizer, prompt)
            return prompt_tokens(self.tokenizer, prompt, tools, kwargs=keywords)
        except TemplateFailed as error:
            raise UserError(f"{origin} cannot be written: {error}") from None

    def decode(self, answer: Completion) -> str:
        """Text of an answer."""
        return decode_answer(self.tokenizer, answer.tokens, self.raw)

    def complete(
        self,
        tokens: list[list[int]],
        *,
        draws: Sequence[int] | None = None,
        images: Sequence[Any] = (),
        **options: Any,
    ) -> list[Completion | None]:
        """Answers to prompts of ids, side by side; None for those that leave no room. draws,
        images: of each prompt. options: of the sampler."""
        self.require_tokens(tokens)
        draws, images = draws or range(len(tokens)), images or [None] * len(tokens)
        short = find_short(tokens, draws, self.sampler.max_len, "the model")
        options |= {"draws": [draws[i] for i in short], "images": [images[i] for i in short]}
        answers = self.sampler.generate([tokens[i] for i in short], self.sampling, **options)
        by_index = dict(zip(short, answers, strict=True))
        return [by_index.get(index) for index in range(len(tokens))]

    def require_tokens(self, prompts: list[list[int]]) -> None:
        """Raise UserError for an empty prompt."""
        empty = next((index for index, ids in enumerate(prompts) if not ids), None)
        if empty is not None:
            raise UserError(f"prompt {empty} is empty; give at least one token")

    def play(self, rows: list[dict[str, Any]]) -> list[Episode]:
        """Episodes of rows in section env's environment, side by side."""
        assert self.stage is not None, "it was opened to act"
        return self.stage.play(rows, self.sampling)
