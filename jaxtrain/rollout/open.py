"""What reinforcement learning has beside the trainer: prompts, env, rewards, engine, publisher."""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from jaxtrain.config import Config, RLTask
from jaxtrain.core.assemble import Parts
from jaxtrain.data.sources import open_rows
from jaxtrain.data.template import end_of_turn_ids
from jaxtrain.envs.open import open_env
from jaxtrain.errors import UserError
from jaxtrain.parallel.feed import row_shards
from jaxtrain.parallel.mesh import is_main_process, split_devices
from jaxtrain.parallel.relay import share
from jaxtrain.rewards import open_rewards
from jaxtrain.rollout.local.engine import LocalEngine, LocalPublisher
from jaxtrain.rollout.local.sampler import LocalSampler
from jaxtrain.rollout.local.weights import make_copier, make_sampler_mesh, sampling_devices
from jaxtrain.rollout.mismatch import RoundComparison
from jaxtrain.rollout.producer import GroupPlayer, Producer, Rules
from jaxtrain.rollout.prompts import Prompts
from jaxtrain.rollout.replay import ReplayBuffer
from jaxtrain.rollout.rounds import Estimator, RoundSource
from jaxtrain.rollout.shared_rounds import SharedRounds
from jaxtrain.rollout.types import Engine, Publisher, Sampling
from jaxtrain.tasks.rl import Preparation, read_labels, updates_per_round


@dataclass
class Rollouts:
    """The rounds of a run and what brings its weights to the engine."""

    source: SharedRounds
    publisher: Publisher
    prepare: Preparation
    engine: Engine | None
    """On process 0; the others never sample."""
    total_steps: int
    """Optimizer steps of the run."""
    closing: ExitStack

    def close(self) -> None:
        """Stop the producer first, then what it works with."""
        self.closing.close()


def open_rollouts(config: Config, parts: Parts, say: Callable[[str], None]) -> Rollouts:
    """Open all of it; raises UserError before anything is sampled.

    Prompts, environment, rewards and engine are process 0's alone; the others get its rounds and
    take part where weights are gathered for the engine.
    """
    with ExitStack() as stack:
        own, steps = None, 0
        if is_main_process():
            engine, publisher, own, steps = open_rounds(config, parts, say, stack)
        else:
            engine, publisher = open_engine(config, parts, say)
            stack.callback(publisher.close)
        total_steps = share("number of steps", lambda: steps)
        comparison = RoundComparison(config.sampling.temperature, say)
        prepare = Preparation(config.task, own, comparison, streaming=config.rollout.streaming)
        source = SharedRounds(own)
        return Rollouts(source, publisher, prepare, engine, total_steps, stack.pop_all())


def open_rounds(
    config: Config, parts: Parts, say: Callable[[str], None], stack: ExitStack
) -> tuple[Engine, Publisher, RoundSource, int]:
    """(engine, its publisher, the source of rounds, optimizer steps of the run) of process 0;
    `stack` closes what was opened."""
    task, rollout, data = config.task, config.rollout, config.data
    datasets = [open_rows(dataset) for dataset in data.datasets]
    prompts = Prompts(
        datasets,
        [dataset.weight for dataset in data.datasets],
        seed=config.run.seed,
        shuffle=data.shuffle,
    )
    per_round = updates_per_round(task)
    rounds = math.inf
    if config.run.num_epochs:
        rounds = math.ceil(config.run.num_epochs * len(prompts) / rollout.prompts_per_step)
    total_steps = int(config.run.max_steps or rounds * per_round)
    say(f"{len(prompts)} prompts, {total_steps} steps, {per_round} a round")
    rewards = open_rewards(config.rewards, rollout.reward_workers, say)
    stack.callback(rewards.close)
    env = open_env(config.env, parts.tokenizer)
    engine, publisher = open_engine(config, parts, say)
    assert engine is not None, "process 0 samples"
    stack.callback(publisher.close)
    combine = task.knob("combine_rewards")
    compares = task.knob("baseline") in ("group", "leave_one_out")
    refills = rollout.zero_advantage == "refill"
    rules = Rules(
        rollout.group_size,
        rewards.weights,
        combine,
        task.reward_clip_range,
        drop_flat=compares and rollout.zero_advantage != "keep",
        max_asks=rollout.max_refill if refills else 1,
        retries=rollout.retries,
    )
    ahead = {"sync": 0, "prefetch": 1, "async": rollout.max_lag}[rollout.mode]
    second_tries = SecondTries(
        math.ceil(rollout.reroll_start * total_steps / per_round), rollout.reroll_max_groups
    )
    player = GroupPlayer(env, engine, rewards, draw_sampling(config), rules)
    producer = Producer(
        prompts,
        player,
        ahead=ahead * rollout.prompts_per_step,
        ordered=rollout.mode != "async",
        streaming=rollout.streaming,
        threaded=works_ahead(config),
        choose_again=second_tries,
    )
    rows = data.micro_batch_size * row_shards(parts.mesh)
    source = RoundSource(
        producer,
        read_labels(config, rows),
        Estimator(
            task.knob("baseline"),
            task.knob("scale_rewards"),
            combine,
            task.reward_clip_range,
            task.normalise_advantages,
        ),
        prompts_per_round=rollout.prompts_per_step,
        parts=task.num_minibatches if rollout.streaming else 1,
        max_lag=rollout.max_lag if rollout.mode == "async" else None,
        replay=ReplayBuffer(rollout.replay_size, rollout.replay_max_lag, config.run.seed),
        num_samples=rollout.samples,
        counters=lambda: {**count_failures(rewards.counters), **engine.counters()},
    )
    second_tries.source = source
    stack.callback(source.close)
    return engine, publisher, source, total_steps


def draw_sampling(config: Config) -> Sampling:
    """Section sampling with a seed that run.seed changes, too."""
    seed = (config.sampling.seed + 1_000_003 * config.run.seed) % 2**31
    return config.sampling.model_copy(update={"seed": seed})


def open_engine(
    config: Config, parts: Parts, say: Callable[[str], None]
) -> tuple[Engine | None, Publisher]:
    """The engine of section rollout and what brings weights to it; nothing is published yet.

    On all but process 0 there is no engine, and the publisher only takes part in gathering.
    """
    if config.rollout.engine == "vllm":
        # Imported here: it needs aiohttp, which nothing else does.
        from jaxtrain.rollout.vllm.open import open_vllm

        return open_vllm(config, parts, say)
    devices = split_devices(reserved_devices(config))[1] or sampling_devices(parts)
    ahead = works_ahead(config)
    if ahead and not config.rollout.devices and len(devices) > 1:
        raise UserError(
            f"rollout.mode {config.rollout.mode!r}, streaming {config.rollout.streaming}: the local"
            f" engine would sample on {len(devices)} devices that the trainer uses at the same"
            " time; set rollout.devices to how many of them sample, or rollout.mode to"
            ' "sync" and streaming to false'
        )
    mesh = make_sampler_mesh(devices, parts.mesh)
    copy = make_copier(parts, mesh)
    if not is_main_process():
        return None, LocalPublisher(None, copy, rests=not ahead)
    tokenizer = parts.tokenizer
    sampler = LocalSampler(
        None,
        end_of_turn_ids(tokenizer),
        max_len=min(parts.architecture.max_position_embeddings, config.data.sequence_len),
        max_batch=config.rollout.max_batch,
        to_text=tokenizer.decode,
        mesh=mesh,
    )
    engine = LocalEngine(sampler)
    return engine, LocalPublisher(engine, copy, rests=not ahead)


def reserved_devices(config: Config) -> int:
    """Devices that a run sets aside for sampling."""
    local = isinstance(config.task, RLTask) and config.rollout.engine == "local"
    return config.rollout.devices if local else 0


def works_ahead(config: Config) -> bool:
    """Whether answers are drawn while the trainer trains."""
    rollout = config.rollout
    return rollout.engine != "local" or rollout.mode != "sync" or rollout.streaming


def count_failures(counters: Mapping[str, int]) -> dict[str, float]:
    """What went wrong in reward functions so far; nothing while all is well."""
    return {name: float(n) for name, n in counters.items() if not name.endswith("/calls")}


class SecondTries:
    """Whether the next prompt may be one that nobody earned anything on: from a round on, and only
    so many a round."""

    def __init__(self, first_round: int, per_round: int):
        self.first_round, self.per_round = first_round, per_round
        self.source: Any = None
        self._round, self._count = -1, 0

    def __call__(self) -> bool:
        version = self.source.version
        if version < self.first_round or not self.source.producer.prompts.waiting:
            return False
        if version != self._round:
            self._round, self._count = version, 0
        self._count += 1
        return self._count <= self.per_round
