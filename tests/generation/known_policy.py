"""An engine whose policy is known, and a producer and rounds made with it."""

import asyncio
import collections
import threading
import time

from jaxtrain.config import SamplingConfig
from jaxtrain.data.packing.steps import StepShape
from jaxtrain.generation.dataset_envs import DatasetEnvs
from jaxtrain.generation.engine import Completion, EpisodeFailed
from jaxtrain.generation.episodes import Episode
from jaxtrain.generation.group_player import GroupPlayer, GroupRules
from jaxtrain.generation.producer import Producer, ProducerOptions
from jaxtrain.generation.prompts import MAX_ATTEMPTS, PromptOrder
from jaxtrain.methods.rl.advantages import AdvantageOptions
from jaxtrain.methods.rl.batch_builder import BatchBuilder
from jaxtrain.methods.rl.replay import ReplayBuffer
from jaxtrain.methods.rl.round import EngineAccess, RolloutRounds, RoundOptions, RoundStages

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

    def __init__(self, reward=lambda row, position: float(position)):
        self.reward = reward

    async def score(self, episodes, row):
        return [{"r": self.reward(row, i)} for i, _ in enumerate(episodes)]


def make(engine=None, env=None, judge=None, rows=100, rules=None, curator=None, **options):
    rows = [{"id": i} for i in range(rows)]
    prompts = PromptOrder([rows], seed=0, shuffle=False, curator=curator)
    rules = GroupRules(GROUP, {"r": 1.0}, **(rules or {}))
    envs = DatasetEnvs(env or OneToken(), judge or Judge())
    player = GroupPlayer(envs, engine or KnownPolicy(), SAMPLING, rules)
    take_retry = options.pop("take_retry", lambda: False)
    return Producer(prompts, player, ProducerOptions(**options), take_retry=take_retry)


def make_rounds(producer, per_round=2, *, row_tokens=32, replay=None, publisher=None, **options):
    """Rounds that are drawn without a trainer: see `draw`."""
    builder = BatchBuilder(StepShape(1, None, row_tokens), "token")
    replay = ReplayBuffer(0, 1) if replay is None else replay
    stages = RoundStages(producer, builder, AdvantageOptions(), replay)
    rounds = RolloutRounds(
        stages,
        RoundOptions(per_round, **options),
        EngineAccess(None, publisher, serves=True),
        total_steps=9,
    )
    rounds.closing.callback(producer.close)
    return rounds


def draw(rounds):
    """Batches of the next part."""
    return rounds.draw().batches


def wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)
