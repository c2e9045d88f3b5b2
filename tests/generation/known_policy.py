"""An engine whose policy is known, and a producer and rounds made with it."""

import asyncio
import collections
import threading
import time

from jaxtrain.config import SamplingConfig
from jaxtrain.data.packing.steps import StepShape
from jaxtrain.generation.engine import Completion, EpisodeFailed
from jaxtrain.generation.episodes import Episode
from jaxtrain.generation.producer import GroupPlayer, GroupRules, Producer
from jaxtrain.generation.prompts import MAX_ATTEMPTS, PromptOrder
from jaxtrain.methods.rl.batch_builder import BatchBuilder
from jaxtrain.methods.rl.round import AdvantageOptions, RoundSource

SAMPLING = SamplingConfig(temperature=1.0, max_new_tokens=4)
GROUP = 4


class KnownPolicy:
    """Answers token 10 + (index mod group size) with log-prob -0.5, stamped with its version.

    held: draws whose answers wait until they are let go. answered: a draw for each answer."""

    def __init__(self, delay=lambda index: 0.0, held=()):
        self.version, self.delay, self.held = 0, delay, set(held)
        self.running = self.most = 0
        self.calls: list[int] = []
        self.answered: list[int] = []
        self.closed = False
        self.threads: set[str] = set()

    async def generate(self, prompt, sampling, stop_ids=(), index=0):
        self.calls.append(index)
        self.threads.add(threading.current_thread().name)
        while index // (MAX_ATTEMPTS * GROUP) in self.held:
            await asyncio.sleep(0.002)
        self.running += 1
        self.most = max(self.most, self.running)
        version = self.version
        try:
            await asyncio.sleep(self.delay(index))
        finally:
            self.running -= 1
        self.answered.append(index // (MAX_ATTEMPTS * GROUP))
        return Completion([10 + index % GROUP], [-0.5], "stop", [version])

    def counters(self):
        return {}

    async def close(self):
        self.closed = True


class OneToken:
    """An env of one turn; `failures` says how often an episode fails before it succeeds."""

    def __init__(self, failures=None):
        self.failures = collections.Counter(failures or {})

    async def run(self, row, engine, sampling, index):
        if self.failures[index] > 0:
            self.failures[index] -= 1
            raise EpisodeFailed("server gone")
        answer = await engine.generate([row["id"] % 5], sampling, (), index)
        return Episode(
            tokens=[row["id"] % 5, *answer.tokens],
            sampled=[False, True],
            logprobs=[0.0, *answer.logprobs],
            versions=[-1, *answer.versions],
            finish_reason=answer.finish_reason,
            completion=str(answer.tokens[0]),
        )


class Judge:
    """Rewards by a function of (row, place in the group)."""

    def __init__(self, reward=lambda row, place: float(place)):
        self.reward = reward

    async def score(self, episodes, row):
        return [{"r": self.reward(row, i)} for i, _ in enumerate(episodes)]


def make(engine=None, env=None, judge=None, rows=100, rules=None, curator=None, **options):
    rows = [{"id": i} for i in range(rows)]
    prompts = PromptOrder([rows], seed=0, shuffle=False, curator=curator)
    rules = GroupRules(GROUP, {"r": 1.0}, **(rules or {}))
    player = GroupPlayer(
        env or OneToken(), engine or KnownPolicy(), judge or Judge(), SAMPLING, rules
    )
    return Producer(prompts, player, **options)


def make_source(producer, per_round=2, **options):
    labels = BatchBuilder(StepShape(1, 1, 32, units=1), "token")
    return RoundSource(producer, labels, AdvantageOptions(), prompts_per_round=per_round, **options)


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
