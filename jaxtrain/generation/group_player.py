"""From one prompt to one judged group: G episodes, their rewards, retries.

    PromptRequest ─> G x Env.run(row, EpisodeEngine) ─> rewards ─> Group     (or a counted failure)

An episode that fails is played again; if it fails for good its group is dropped, and failures.py
ends the run where that persists.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.generation.dataset_envs import DatasetEnvs
from jaxtrain.generation.engine import Engine, EpisodeFailed, PromptRequest, Sampling, pause_before
from jaxtrain.generation.episode_engine import open_view
from jaxtrain.generation.episodes import Env, Episode, Group, RoundSlot
from jaxtrain.generation.failures import Failures
from jaxtrain.generation.prompts import MAX_ATTEMPTS
from jaxtrain.generation.reward_table import is_flat, reward_names, reward_table, turn_tables, weigh
from jaxtrain.safe_io import UnreadableRow


@dataclass(frozen=True)
class GroupRules:
    """Which groups a slot plays and which it drops."""

    group_size: int
    weights: dict[str, float]
    """Rewards that count, by name; those that only an environment gives count 1."""
    combine: str = "sum_then_normalize"
    clip: tuple[float, float] | None = None
    """Bounds of an episode's sum of rewards."""
    drop_flat: bool = True
    """Drop groups whose rewards are all equal."""
    max_prompts: int = 1
    """Prompts that a slot may use until a group is kept."""
    retries: int = 2
    datasets: tuple[str, ...] = ()
    """Names of the datasets, if there are several."""
    policies: dict[str, list[str]] = field(default_factory=dict)
    """Policies with names, in the config's order, and the reward functions that judge each."""


DrawnGroup = tuple[list[Episode], list[dict[str, float | None]]]
"""The episodes of a prompt, and one dict of rewards by name for each."""
OfflineSource = Callable[[PromptRequest], list[Episode] | None]
"""The data's own answers to a prompt; None: it is played. Raises EpisodeFailed for a row without a
usable answer."""


class GroundTruthSource(Protocol):
    """Source of the ground truths of prompts."""

    def __call__(self, request: PromptRequest) -> Episode:
        """Return the ground truth; raises EpisodeFailed for a row without one."""
        ...

    def limit(self, truth: Episode, sampling: Sampling) -> Sampling:
        """Return how answers to this prompt are drawn."""
        ...


@dataclass(frozen=True)
class AnswerOptions:
    """Data of a method beside prompts, and its need of rewards."""

    offline: OfflineSource | None = None
    """The data's own answers to some prompts, instead of drawn ones."""
    truths: GroundTruthSource | None = None
    """Ground truths that each group's answers are compared with."""
    need_reward: bool = True
    """True if the method learns from rewards that are available when answers are drawn; a group
    without any is then an error."""


class GroupPlayer:
    """Plays one prompt G times and judges the answers."""

    def __init__(
        self,
        envs: DatasetEnvs,
        engine: Engine,
        sampling: Sampling,
        rules: GroupRules,
        failures: Failures | None = None,
        answers: AnswerOptions = AnswerOptions(),
    ):
        self.envs, self.engine, self.answers = envs, engine, answers
        self.sampling, self.rules = sampling, rules
        self.failures = Failures() if failures is None else failures

    async def play(self, request: PromptRequest, slot: RoundSlot) -> Group | None:
        """Return the group of a prompt; None if an episode or a judge failed too often."""
        size, draw = self.rules.group_size, request.draw
        if isinstance(request.row, UnreadableRow):
            reason = f"row: {request.row.reason}"
            cause = f"{request.row.origin or f'data.datasets, prompt {draw}'}: {request.row.reason}"
            # Counted like a failed episode; a start looks at the rows and refuses data of which
            # none can be used.
            return self._give_up(EpisodeFailed(reason, cause=cause, again=False), slot)
        truth, sampling = None, self.sampling
        try:
            if self.answers.offline is not None:
                episodes = self.answers.offline(request)
                if episodes is not None:
                    self.failures.add(None, size)
                    scores = [dict(episode.all_rewards) for episode in episodes]
                    return Group(draw, request.row, episodes, scores, dataset=request.dataset)
            if self.answers.truths is not None:
                truth = self.answers.truths(request)
                sampling = self.answers.truths.limit(truth, sampling)
        except EpisodeFailed as failure:
            return self._give_up(failure, slot)
        drawn = await self.draw(request, slot, sampling)
        if drawn is None:
            return None
        episodes, scores = drawn
        self.failures.add(None, size)
        if self.answers.need_reward and not all(scores):
            policy = episodes[scores.index({})].policy
            raise UserError(
                f"no reward judges the answers{f' of policy {policy}' if policy else ''}: add a"
                " [[rewards]] table with a function, or an env that gives rewards itself for rows"
                " such as these"
            )
        return Group(draw, request.row, episodes, scores, dataset=request.dataset, truth=truth)

    async def draw(
        self, request: PromptRequest, slot: RoundSlot, sampling: Sampling
    ) -> DrawnGroup | None:
        """Return the prompt's episodes and their rewards; None, counted, if they failed."""
        size = self.rules.group_size
        # Numbers that no other attempt has: seeds of requests are made of them, and a second try
        # with the same ones would draw the same answers.
        first = (request.draw * MAX_ATTEMPTS + request.attempt) * size
        env, rewards = self.envs.of(request.dataset)
        failed: list[EpisodeFailed] = []

        async def play(index: int) -> Episode | EpisodeFailed:
            episode = await self.play_one(env, request.row, index, slot, sampling)
            if isinstance(episode, EpisodeFailed):
                failed.append(episode)
            return episode

        try:
            played = await asyncio.gather(*(play(first + i) for i in range(size)))
        except asyncio.CancelledError:
            # The producer gave the group up as too old. What had failed for good by then still
            # counts, or a broken environment would never end the run while groups age.
            for failure in failed:
                self.failures.add(failure)
            raise
        games = [episode for episode in played if not isinstance(episode, EpisodeFailed)]
        # No partial groups: what fails is rarely a random part of the answers, and advantages of
        # the others would be biased.
        if failed:
            slot.dropped[f"failed: {failed[0]}"] += 1
            self.failures.add(None, len(games))
            for failure in failed:
                self.failures.add(failure)
            return None
        try:
            episodes = list_episodes(games, list(self.rules.policies))
            scores = await score_policies(rewards, self.rules.policies, episodes, request.row)
            return episodes, scores
        except EpisodeFailed as failure:
            return self._give_up(failure, slot)

    def _give_up(self, failure: EpisodeFailed, slot: RoundSlot) -> None:
        """Count all episodes of a group as failed."""
        self.failures.log_once(failure)
        slot.dropped[f"failed: {failure}"] += 1
        self.failures.add(failure, self.rules.group_size)

    async def play_one(
        self, env: Env, row: dict[str, Any], index: int, slot: RoundSlot, sampling: Sampling
    ) -> Episode | EpisodeFailed:
        """Play one episode, again if it fails, after a pause if that may help."""
        engine = open_view(self.engine, index=index, tracker=slot.tracker)
        failure = EpisodeFailed("never played")
        for attempt in range(self.rules.retries + 1):
            if attempt and failure.pause:
                await asyncio.sleep(pause_before(attempt))
            slot.redone += attempt > 0
            # Tokens of the failed attempt are lost, so they no longer make the group old.
            slot.tracker.forget(index)
            try:
                return await env.run(row, engine, sampling, index)
            except EpisodeFailed as error:
                failure = error
            self.failures.log_once(failure)
            if not failure.again:
                break
        return failure

    def is_flat(self, group: Group) -> bool:
        """Return whether all its rewards are equal; with several policies, those of each."""
        if not self.rules.policies:
            return has_equal_rewards(group, self.rules)
        parts = [group.of(policy) for policy in self.rules.policies]
        return all(has_equal_rewards(part, self.rules) for part in parts if part is not None)

    def totals(self, group: Group) -> list[float]:
        """Return the weighted sum of rewards of each episode that was judged."""
        names = reward_names([group])
        weights = [self.rules.weights.get(name, 1.0) for name in names]
        totals_N = weigh(reward_table([group], names), weights, self.rules.clip)
        return [float(total) for total in totals_N if not np.isnan(total)]


def list_episodes(games: Sequence[Episode], policies: Sequence[str]) -> list[Episode]:
    """Return all episodes of the games, sorted by policy if these have names, then by agent;
    raises UserError for an episode of an unknown policy."""
    episodes = [episode for game in games for episode in (game, *game.others)]
    for game in games:
        # Emptied, since they are members of the group now: a saved game would otherwise hold them
        # twice.
        game.others = []
    for episode in episodes:
        episode.policy = episode.policy or next(iter(policies), "")
        if episode.policy and episode.policy not in policies:
            raise UserError(
                f"the environment gave an episode of policy {episode.policy!r}; section policies"
                f" trains: {', '.join(policies) or 'none'}"
            )
    agents = list(dict.fromkeys(episode.agent for episode in episodes))
    ranks = {name: index for index, name in enumerate(policies)}
    # Group.sizes counts episodes of an agent as neighbors. The sort is stable, so games keep their
    # order.
    return sorted(episodes, key=lambda e: (ranks.get(e.policy, 0), agents.index(e.agent)))


async def score_policies(
    rewards: Any,
    policies: Mapping[str, Sequence[str]],
    episodes: list[Episode],
    row: dict[str, Any],
) -> list[dict[str, float | None]]:
    """Return the rewards of each of list_episodes' episodes. policies: the functions that judge
    each policy; without any, all functions judge every episode."""
    scores: list[dict[str, float | None]] = []
    for policy, functions in policies.items():
        played = [episode for episode in episodes if episode.policy == policy]
        if played:
            scores += await rewards.only(functions).score(played, row)
    return scores or await rewards.score(episodes, row)


def has_equal_rewards(group: Group, rules: GroupRules) -> bool:
    """Return whether all rewards of one policy's group are equal; with several agents, those of
    each."""
    names = reward_names([group])
    weights = [rules.weights.get(name, 1.0) for name in names]
    bounds = np.cumsum(group.sizes)[:-1]
    return all(
        is_flat(rewards_GK, weights, rules.combine, rules.clip)
        for table in turn_tables([group], names)
        for rewards_GK in np.split(table, bounds)
    )
