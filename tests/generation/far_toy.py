"""Toy services that the processes of a cluster open in tests: known answers to numbered prompts, no
model."""

import asyncio
import os
import time

from jaxtrain.config import SamplingConfig
from jaxtrain.generation.dataset_envs import DatasetEnvs
from jaxtrain.generation.engine import Completion, EpisodeFailed
from jaxtrain.generation.episodes import Episode
from jaxtrain.generation.failures import Failures
from jaxtrain.generation.group_player import GroupPlayer, GroupRules
from jaxtrain.generation.producer import Producer, ProducerOptions
from jaxtrain.generation.prompts import PromptOrder
from jaxtrain.generation.ray.worker_pool import RemotePlayer

GROUP = 3
SAMPLING = SamplingConfig(temperature=1.0, max_new_tokens=4)
OPENER = "tests.generation.far_toy:open_producer"


def settings(rows=30, worker=None, **producer):
    """Settings for RolloutService.attach."""
    return {
        "service": {"rows": rows, **producer},
        "worker": ("tests.generation.far_toy:open_worker", worker or {}),
    }


def rules(**options):
    return GroupRules(GROUP, {"r": 1.0}, **{"retries": 1, **options})


def make_prompts(rows):
    return PromptOrder([[{"id": i, "name": f"row {i}"} for i in range(rows)]], seed=3)


def open_producer(options, workers, facts, log):
    options = dict(options)
    prompts, group_rules = make_prompts(options.pop("rows")), rules(**options.pop("rules", {}))
    player = RemotePlayer(workers, SAMPLING, group_rules, Failures(log=log))
    return Producer(prompts, player, ProducerOptions(**options), log=log)


def make_player(engine, **worker):
    """What plays in a worker."""
    return GroupPlayer(DatasetEnvs(World(worker), Judge()), engine, SAMPLING, rules())


class Table:
    """An engine that stamps its answers with the version of the table of servers."""

    def __init__(self, version=0):
        self.version, self.asked, self.closed = version, 0, False

    async def generate(self, prompt, sampling, stop_ids=(), index=0):
        self.asked += 1
        await asyncio.sleep(0.001 * (index % 3))
        tokens = [(prompt[0] * 7 + index * 13) % 50, 2]
        return Completion(tokens, [-0.5, -0.25], "stop", [self.version] * 2)

    def counters(self):
        return {"vllm/requests": float(self.asked)}

    async def close(self):
        self.closed = True


def claim(mark):
    """Return whether this process is the first to get here."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class World:
    """Single-turn environment; a row may name a failure."""

    def __init__(self, requests):
        self.asked, self.failed = requests, 0

    async def run(self, row, engine, sampling, index):
        if row["id"] == self.asked.get("fails"):
            raise EpisodeFailed("no such world", cause="env.kind 'toy': no such world", again=False)
        if (mark := self.asked.get("dies")) and claim(mark):
            os._exit(1)
        if (mark := self.asked.get("blocks")) and claim(mark):
            time.sleep(1000)
        if row["id"] in self.asked.get("holds", ()):
            await asyncio.sleep(1000)
        actual = await engine.generate([row["id"] % 50], sampling, (), index)
        if row["id"] in self.asked.get("lingers", ()):
            if index % GROUP == 1:
                self.failed += 1
                raise EpisodeFailed("no such world", again=False)
            if actual.versions[0] == 0:
                await asyncio.sleep(1000)
        return Episode(
            [row["id"] % 50, *actual.tokens],
            [False, True, True],
            [0.0, *actual.logprobs],
            [-1, *actual.versions],
            "stop",
            completion=row["name"],
            metrics={"accuracy": (1, 3)},
        )


class Judge:
    async def score(self, episodes, row):
        return [{"r": float(episode.tokens[1]), "none": None} for episode in episodes]


class Opened:
    def __init__(self, requests):
        self.engine, self.reported = Table(), list(requests.get("reports", ()))
        self.player = make_player(self.engine, **requests)

    def update(self, table):
        self.engine.version = table["version"] if table else 0

    def report(self):
        reports, self.reported = self.reported, []
        return {"counters": self.engine.counters(), "reports": reports}

    def close(self):
        pass


def open_worker(requests):
    return Opened(requests)
