"""Sets of problems: k answers each by any engine, avg@k and pass@k, and the answers to read.

    rows ─ env.run x k ─> episodes ─ rewards ─> Answered ─> {"eval/gsm8k/pass@4": 0.61, ...}

A game of several policies or agents is several episodes: the numbers are those of the first one of
each game, and behind its name those of everybody ("eval/sums/verifier/reward").

pass@j is the unbiased estimate from k answers of which c solve the problem (Chen et al. 2021,
"Evaluating Large Language Models Trained on Code"): 1 - C(k - c, j) / C(k, j).
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import Any

from jaxtrain.config.evals import EvalSetConfig
from jaxtrain.environments.rewards import Rewards
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Engine, EpisodeFailed, Sampling
from jaxtrain.generation.episode_metrics import average_env_metrics, describe_sample
from jaxtrain.generation.episodes import Env, Episode
from jaxtrain.generation.failures import Failures
from jaxtrain.generation.group_player import list_episodes, score_policies

FIRST_INDEX = 1 << 40
"""Episode numbers of evaluations start here, so that they draw other noise than training does."""


@dataclass
class AnsweredProblem:
    """One problem with its answers."""

    row: Mapping[str, Any]
    episodes: list[Episode] = field(default_factory=list)
    scores: list[dict[str, float | None]] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    """Weighted sum of the rewards of each answer; 0 where every function had nothing to say."""
    failed: int = 0
    """Answers that came to nothing: they count as unsolved, with reward 0."""
    unjudged: int = 0
    """Answers that no function had a number for, be it that it failed: reward 0, too."""
    speakers: "dict[str, AnsweredProblem]" = field(default_factory=dict)
    """Where policies or agents have names: the same of each who played. The fields above are those
    of the first episode of each game."""

    def add(self, episode: Episode, score: dict[str, float | None], total: float | None) -> None:
        """One more answer; total: None where nothing judged it."""
        self.episodes.append(episode)
        self.scores.append(score)
        self.totals.append(total or 0.0)
        self.unjudged += total is None

    def of(self, speaker: str) -> "AnsweredProblem":
        """Of one speaker; where it did not play, what failed may have been its answers."""
        return self.speakers.get(speaker) or AnsweredProblem(self.row, failed=self.failed)

    @property
    def everybody(self) -> "list[AnsweredProblem]":
        """Of each speaker, or of the only one."""
        return list(self.speakers.values()) or [self]


async def answer_set(
    rows: Sequence[Mapping[str, Any]],
    env: Env,
    engine: Engine,
    rewards: Rewards,
    sampling: Sampling,
    k: int,
    max_running: int = 256,
    failures: Failures | None = None,
    policies: Mapping[str, Sequence[str]] | None = None,
) -> list[AnsweredProblem]:
    """Let the engine answer every row k times, at most `max_running` episodes at once. policies: as
    GroupRules.policies.

    The same rows, weights and sampling.seed give the same answers, wherever in a run it happens.
    Episodes and judgments that fail are counted, and told to `failures`; they end nothing, unless
    it is a mistake that a person must mend and nothing has worked yet.
    """
    gate = asyncio.Semaphore(max_running)
    failures = failures or Failures()

    async def play(row: Mapping[str, Any], index: int) -> Episode | None:
        async with gate:
            try:
                episode = await env.run(dict(row), engine, sampling, index)
            except EpisodeFailed as failure:
                failures.log_once(failure)
                failures.add(failure)
                return None
            failures.add(None)
            return episode

    async def judge(found: list[Episode], row: Mapping[str, Any]) -> list[dict[str, float | None]]:
        try:
            return await score_policies(rewards, policies or {}, found, dict(row))
        except EpisodeFailed as failure:
            if failure.mistake:
                raise UserError(failure.cause) from None
            failures.log_once(failure)
            return [dict.fromkeys(one.label for one in rewards.functions) for _ in found]

    async def answer(number: int, row: Mapping[str, Any]) -> AnsweredProblem:
        first = FIRST_INDEX + number * k
        played = await asyncio.gather(*(play(row, first + i) for i in range(k)))
        games = [episode for episode in played if episode is not None]
        found = list_episodes(games, list(policies or {}))
        scores = await judge(found, row) if found else []
        answered = AnsweredProblem(row, failed=k - len(games))
        firsts = {id(game) for game in games}
        for episode, score in zip(found, scores, strict=True):
            total = rewards.total(score)
            if id(episode) in firsts:
                answered.add(episode, score, total)
            if name := episode.policy or episode.agent:
                own = answered.speakers.setdefault(
                    name, AnsweredProblem(row, failed=answered.failed)
                )
                own.add(episode, score, total)
        return answered

    return list(await asyncio.gather(*(answer(i, row) for i, row in enumerate(rows))))


def pass_at(j: int, k: int, solved: int) -> float:
    """Chance that j of k answers, drawn without replacement, hold one of the `solved`."""
    assert 1 <= j <= k and 0 <= solved <= k, f"pass@{j} of {solved} in {k}"
    return 1.0 - comb(k - solved, j) / comb(k, j)


def summarize(answered: Sequence[AnsweredProblem], k: int, threshold: float) -> dict[str, float]:
    """Means over problems: reward, avg@k (share of solving answers), pass@j for powers of two up
    to k, length, share cut off, each reward function by name, and what the environment measured
    (over all episodes that did not fail). Then the same of each speaker behind its name."""
    found = summarize_one(answered, k, threshold)
    for name in dict.fromkeys(name for one in answered for name in one.speakers):
        own = summarize_one([one.of(name) for one in answered], k, threshold)
        found |= {f"{name}/{key}": value for key, value in own.items()}
    return found


def summarize_one(
    answered: Sequence[AnsweredProblem], k: int, threshold: float
) -> dict[str, float]:
    """As summarize, of one speaker: over the problems of which it has an answer, and pass@j over
    those of which it has j, for it need not have played in each game."""
    numbers = [len(one.totals) + one.failed for one in answered]
    solved = [sum(total >= threshold for total in one.totals) for one in answered]
    counts = [(n, count) for n, count in zip(numbers, solved, strict=True) if n]
    totals = [total for one in answered for total in [*one.totals, *[0.0] * one.failed]]
    found = {"reward": mean(totals), f"avg@{k}": mean([count / n for n, count in counts])}
    wanted = [1 << power for power in range(k.bit_length()) if 1 << power <= k]
    for j in sorted({*wanted, k}):
        if there := [pass_at(j, n, count) for n, count in counts if n >= j]:
            found[f"pass@{j}"] = mean(there)
    episodes = [episode for one in answered for episode in one.episodes]
    found["mean_length"] = mean([episode.num_sampled for episode in episodes])
    found["clipped_ratio"] = mean([episode.finish_reason == "length" for episode in episodes])
    scores = [score for one in answered for score in one.scores]
    for name in dict.fromkeys(name for score in scores for name in score):
        there = [value for score in scores if (value := score.get(name)) is not None]
        if there and len(scores[0]) > 1:
            found[f"rewards/{name}"] = mean(there)
    found |= average_env_metrics(episodes)
    for name in ("failed", "unjudged"):
        if count := sum(getattr(one, name) for one in answered):
            found[name] = float(count)
    return found


def mean(numbers: Sequence[float]) -> float:
    """Arithmetic mean; 0 of nothing."""
    return sum(numbers) / len(numbers) if numbers else 0.0


def list_answers(name: str, answered: Sequence[AnsweredProblem]) -> Iterator[dict[str, Any]]:
    """A line for samples.jsonl for each answer to the set `name`."""
    for one in (own for problem in answered for own in problem.everybody):
        for episode, score, total in zip(one.episodes, one.scores, one.totals, strict=True):
            yield {"set": name, **describe_sample(episode, total, score)}


def show_extremes(answered: Sequence[AnsweredProblem], count: int, width: int = 200) -> list[str]:
    """The best and the worst `count` answers, a few lines each; the first of equals."""
    pairs = [
        (total, episode)
        for problem in answered
        for one in problem.everybody
        for total, episode in zip(one.totals, one.episodes, strict=True)
    ]
    order = sorted(range(len(pairs)), key=lambda i: (-pairs[i][0], i))
    best, worst = order[:count], [i for i in order[::-1] if i not in order[:count]][:count]
    lines = []
    for title, chosen in (("best", best), ("worst", worst)):
        for i in chosen:
            total, episode = pairs[i]
            name = episode.policy or episode.agent
            lines += [
                f"{title}{name and f', {name}'}: reward {total:g}, {episode.num_sampled} tokens"
                f" ({episode.finish_reason})",
                *(f"{role:>10}: {shorten(text, width)}" for role, text in list_turns(episode)),
            ]
    return lines


def list_turns(episode: Episode) -> list[tuple[str, str]]:
    """(role, text) of the last message before the policy spoke and of all that follow it."""
    asked, said = episode.prompt, episode.completion
    asked = [{"role": "prompt", "content": asked}] if isinstance(asked, str) else asked
    said = [{"role": "completion", "content": said}] if isinstance(said, str) else said
    return [(str(turn.get("role")), turn.get("content") or "") for turn in [*asked[-1:], *said]]


def shorten(text: str, width: int) -> str:
    """One line; the middle of a long text is left out, for its end says how it came out."""
    text = " ".join(text.split())
    half = (width - 5) // 2
    return text if len(text) <= width else f"{text[:half]} ... {text[-half:]}"


def set_sampling(sampling: Sampling, one: EvalSetConfig) -> Sampling:
    """The run's sampling with what the set changes."""
    given = {"temperature": one.temperature, "max_new_tokens": one.max_new_tokens}
    return sampling.model_copy(update={k: v for k, v in given.items() if v is not None})
