"""Sets of problems: k answers each by any engine, avg@k and pass@k, and the answers to read.

    rows ─ env.run x k ─> episodes ─ rewards ─> Answered ─> {"eval/gsm8k/pass@4": 0.61, ...}

A game of several policies or agents is several episodes: the numbers are those of the first one of
each game, and behind its name those of everybody ("eval/sums/verifier/reward").

pass@j is the unbiased estimate from k answers of which c solve the problem (Chen et al. 2021,
"Evaluating Large Language Models Trained on Code"): 1 - C(k - c, j) / C(k, j).
"""

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from statistics import stdev
from typing import Any

from jaxtrain.config.evals import EvalSetConfig
from jaxtrain.environments.rewards.score import Rewards
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Engine, EpisodeFailed, Sampling
from jaxtrain.generation.episode_metrics import average_env_metrics, describe_sample
from jaxtrain.generation.episodes import Env, Episode
from jaxtrain.generation.failures import Failures
from jaxtrain.generation.group_player import list_episodes, score_policies
from jaxtrain.runs.samples import message_text
from jaxtrain.safe_io import UnreadableRow

FIRST_INDEX = 1 << 40
"""Episode numbers of evaluations start here, so that they draw other noise than training does."""


@dataclass
class AnsweredProblem:
    """A problem with its answers."""

    row: Mapping[str, Any]
    episodes: list[Episode] = field(default_factory=list)
    scores: list[dict[str, float | None]] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)
    """Weighted sum of the rewards of each answer; 0 where every function had nothing to say."""
    failed: int = 0
    """Failed answers; they count as unsolved, with reward 0."""
    unjudged: int = 0
    """Answers without a number from any function, or whose functions failed; also reward 0."""
    speakers: "dict[str, AnsweredProblem]" = field(default_factory=dict)
    """Results by named policy or agent. The fields above are those of the first episode of each
    game."""

    def add(self, episode: Episode, score: dict[str, float | None], total: float | None) -> None:
        """Add an answer; total: None if nothing judged it."""
        self.episodes.append(episode)
        self.scores.append(score)
        self.totals.append(total or 0.0)
        self.unjudged += total is None

    def of(self, speaker: str) -> "AnsweredProblem":
        """Return the answers of one speaker; if it did not play, the failed ones may have been its
        own."""
        return self.speakers.get(speaker) or AnsweredProblem(self.row, failed=self.failed)

    @property
    def everybody(self) -> "list[AnsweredProblem]":
        """The answers of each speaker, or of the only one."""
        return list(self.speakers.values()) or [self]


@dataclass(frozen=True)
class SetRules:
    """Number of answers to each row of a set, and their judges."""

    rewards: Rewards
    k: int
    """Answers of each row."""
    policies: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """See GroupRules.policies."""
    max_running: int = 256
    """Limit of episodes at once."""


async def answer_set(
    rows: Sequence[Mapping[str, Any]],
    env: Env,
    engine: Engine,
    sampling: Sampling,
    rules: SetRules,
    failures: Failures | None = None,
    on_answer: Callable[[Episode], None] = lambda episode: None,
) -> list[AnsweredProblem]:
    """Answer every row `rules.k` times.

    The same rows, weights and sampling.seed give the same
    answers, wherever in a run that happens. Episodes and judgments that fail are counted, and
    reported to `failures`; they do not end the run, unless a mistake must be corrected and nothing
    has worked yet. on_answer: called with each episode when it has ended, not yet judged.
    """
    gate, k = asyncio.Semaphore(rules.max_running), rules.k
    rewards, policies = rules.rewards, rules.policies
    failures = failures or Failures()

    async def play(row: Mapping[str, Any], index: int) -> Episode | None:
        async with gate:
            try:
                row = row if isinstance(row, UnreadableRow) else dict(row)
                episode = await env.run(row, engine, sampling, index)
            except EpisodeFailed as failure:
                failures.log_once(failure)
                failures.add(failure)
                return None
            failures.add(None)
            on_answer(episode)
            return episode

    async def judge(
        episodes: list[Episode], row: Mapping[str, Any]
    ) -> list[dict[str, float | None]]:
        try:
            return await score_policies(rewards, policies, episodes, dict(row))
        except EpisodeFailed as failure:
            if failure.mistake:
                raise UserError(failure.cause) from None
            failures.log_once(failure)
            return [
                dict.fromkeys(function.label for function in rewards.functions) for _ in episodes
            ]

    async def answer(number: int, row: Mapping[str, Any]) -> AnsweredProblem:
        first = FIRST_INDEX + number * k
        played = await asyncio.gather(*(play(row, first + i) for i in range(k)))
        games = [episode for episode in played if episode is not None]
        episodes = list_episodes(games, list(policies))
        scores = await judge(episodes, row) if episodes else []
        answered = AnsweredProblem(row, failed=k - len(games))
        firsts = {id(game) for game in games}
        for episode, score in zip(episodes, scores, strict=True):
            total = rewards.total(score)
            if id(episode) in firsts:
                answered.add(episode, score, total)
            if name := episode.policy or episode.agent:
                by_speaker = answered.speakers.setdefault(
                    name, AnsweredProblem(row, failed=answered.failed)
                )
                by_speaker.add(episode, score, total)
        return answered

    return list(await asyncio.gather(*(answer(i, row) for i, row in enumerate(rows))))


def pass_at(j: int, k: int, solved: int) -> float:
    """Return the probability that j of k answers, drawn without replacement, include one of the
    `solved`."""
    assert 1 <= j <= k and 0 <= solved <= k, f"pass@{j} of {solved} in {k}"
    return 1.0 - comb(k - solved, j) / comb(k, j)


def summarize(answered: Sequence[AnsweredProblem], k: int, threshold: float) -> dict[str, float]:
    """Return means over problems: reward, avg@k (share of solving answers) with its standard error
    over problems (answers to one are no independent draws), pass@j for powers of two up to k,
    length, share cut off, each reward function by name, and what the environment measured (over all
    episodes that did not fail); then those of each speaker behind its name."""
    numbers = summarize_one(answered, k, threshold)
    for name in dict.fromkeys(name for problem in answered for name in problem.speakers):
        of_speaker = summarize_one([problem.of(name) for problem in answered], k, threshold)
        numbers |= {f"{name}/{key}": value for key, value in of_speaker.items()}
    return numbers


def summarize_one(
    answered: Sequence[AnsweredProblem], k: int, threshold: float
) -> dict[str, float]:
    """Return the means of one speaker over the problems that it answered, and pass@j over those
    that it answered j times: it need not have played in each game."""
    num_answers = [len(problem.totals) + problem.failed for problem in answered]
    solved = [sum(total >= threshold for total in problem.totals) for problem in answered]
    counts = [(n, count) for n, count in zip(num_answers, solved, strict=True) if n]
    totals = [total for problem in answered for total in [*problem.totals, *[0.0] * problem.failed]]
    shares = [count / n for n, count in counts]
    metrics = {"reward": mean(totals), f"avg@{k}": mean(shares)}
    if len(shares) > 1:
        metrics["stderr"] = stdev(shares) / math.sqrt(len(shares))
    powers = [1 << power for power in range(k.bit_length()) if 1 << power <= k]
    for j in sorted({*powers, k}):
        if chances := [pass_at(j, n, count) for n, count in counts if n >= j]:
            metrics[f"pass@{j}"] = mean(chances)
    episodes = [episode for problem in answered for episode in problem.episodes]
    metrics["mean_length"] = mean([episode.num_sampled for episode in episodes])
    metrics["clipped_ratio"] = mean([episode.finish_reason == "length" for episode in episodes])
    scores = [score for problem in answered for score in problem.scores]
    for name in dict.fromkeys(name for score in scores for name in score):
        values = [value for score in scores if (value := score.get(name)) is not None]
        if values and len(scores[0]) > 1:
            metrics[f"rewards/{name}"] = mean(values)
    metrics |= average_env_metrics(episodes)
    for name in ("failed", "unjudged"):
        if count := sum(getattr(problem, name) for problem in answered):
            metrics[name] = float(count)
    return metrics


def mean(numbers: Sequence[float]) -> float:
    """Return the arithmetic mean; 0 of nothing."""
    return sum(numbers) / len(numbers) if numbers else 0.0


def list_answers(name: str, answered: Sequence[AnsweredProblem]) -> Iterator[dict[str, Any]]:
    """Yield a line for samples.jsonl for each answer to the set `name`."""
    for answers in (speaker for problem in answered for speaker in problem.everybody):
        for episode, score, total in zip(
            answers.episodes, answers.scores, answers.totals, strict=True
        ):
            yield {"set": name, **describe_sample(episode, total, score)}


def show_extremes(answered: Sequence[AnsweredProblem], count: int, width: int = 200) -> list[str]:
    """Return the best and the worst `count` answers, a few lines each; the first among equals."""
    pairs = [
        (total, episode)
        for problem in answered
        for answers in problem.everybody
        for total, episode in zip(answers.totals, answers.episodes, strict=True)
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
    """Return (role, text) of the last message before the policy's first, and of all later ones."""
    prompt, completion = episode.prompt, episode.completion
    prompt = [{"role": "prompt", "content": prompt}] if isinstance(prompt, str) else prompt
    completion = (
        [{"role": "completion", "content": completion}]
        if isinstance(completion, str)
        else completion
    )
    return [(str(turn.get("role")), message_text(turn)) for turn in [*prompt[-1:], *completion]]


def shorten(text: str, width: int) -> str:
    """Return a text on one line, without its middle if it is long: the end shows the outcome."""
    text = " ".join(text.split())
    half = (width - 5) // 2
    return text if len(text) <= width else f"{text[:half]} ... {text[-half:]}"


def set_sampling(sampling: Sampling, section: EvalSetConfig) -> Sampling:
    """Return the run's sampling with the changes of the set."""
    keys = ("temperature", "max_new_tokens", "structured_outputs")
    changes = {key: getattr(section, key) for key in keys}
    return sampling.model_copy(update={k: v for k, v in changes.items() if v is not None})
