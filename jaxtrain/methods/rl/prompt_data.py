"""Data that are drawn: rounds of answers to prompts, what methods on rollouts have in common.

Prompts, environment, rewards and engine are process 0's alone; the others get its rounds and take
part where weights are gathered for the engine.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from jaxtrain.batch import Batch
from jaxtrain.config import Config, DatasetConfig
from jaxtrain.config.policies import list_judges, list_trained
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.data.packing.pack import Fields
from jaxtrain.distributed.broadcast import broadcast
from jaxtrain.distributed.feed import row_shards
from jaxtrain.distributed.mesh import is_main_process
from jaxtrain.environments.guarded import GuardedEnv
from jaxtrain.environments.rewards import open_rewards
from jaxtrain.errors import UserError
from jaxtrain.generation.curators import Curator, open_curator
from jaxtrain.generation.engine import Engine
from jaxtrain.generation.engines import (
    count_envs,
    find_engine,
    inspect_envs,
    list_envs,
    open_envs,
    seed_sampling,
    with_secrets,
)
from jaxtrain.generation.failures import Failures
from jaxtrain.generation.frozen_policy import open_frozen
from jaxtrain.generation.lengths import explain_lengths, measure_prompts
from jaxtrain.generation.multi_policy import with_policies
from jaxtrain.generation.producer import Given, GroundTruthSource, GroupPlayer, GroupRules, Producer
from jaxtrain.generation.prompt_rows import PromptRows, open_prompts
from jaxtrain.generation.prompts import PromptOrder
from jaxtrain.generation.publisher import Publisher
from jaxtrain.generation.ray.factory import open_remote
from jaxtrain.generation.ray.remote_producer import RemoteProducer
from jaxtrain.methods.rl.batch_builder import BatchBuilder
from jaxtrain.methods.rl.on_policy import OnPolicy
from jaxtrain.methods.rl.rehearsal import rehearse
from jaxtrain.methods.rl.replay import ReplayBuffer
from jaxtrain.methods.rl.round import AdvantageOptions, RoundSource
from jaxtrain.methods.rl.shared_rounds import SharedRounds

OPENER = "jaxtrain.methods.rl.remote_producer:open_producer"
"""What makes the producer in a rollout service."""


@dataclass(frozen=True)
class RoundPlan:
    """What a method makes of a round."""

    labels: Callable[[int], BatchBuilder]
    """Rows of a microstep -> how a round becomes batches."""
    estimator: AdvantageOptions
    updates: int
    """Optimizer steps under one version of the policy."""
    parts: int
    """Parts that a streamed round comes in; 1: as a whole."""
    fields: Fields
    judged: bool = True
    """Whether the method learns from rewards that are known when answers are drawn."""
    given: Given | None = None
    """The data's own answers to some prompts, instead of drawn ones."""
    truths: GroundTruthSource | None = None
    """What the data say that answers should be."""


class PromptData:
    """`core.task.Data` of methods that draw what they train on."""

    def __init__(self, config: Config, tokenizer: Any, plan: RoundPlan):
        self.config, self.tokenizer, self.plan = config, tokenizer, plan
        self.row_tokens = config.data.sequence_len
        self.fields = plan.fields
        self.source: RoundSource | None = None
        """On process 0, once opened."""
        self.log: Callable[[str], None] = print

    def check(self) -> Iterator[str]:
        """Whatever is to be said is said when it opens."""
        return iter(())

    def open(self, parts: ModelBundle, log: Callable[[str], None]) -> OnPolicy:
        """Raises UserError before anything is sampled."""
        self.log, kind, steps = log, find_engine(self.config), 0
        if (named := list_trained(self.config)) and not kind.several:
            raise UserError(
                f"policies.{named[0]}.trained: rollout.engine {self.config.rollout.engine!r} draws"
                ' with one policy; set it to "local" or "vllm"'
            )
        with ExitStack() as stack:
            if is_main_process():
                engine, publisher, self.source, steps = self._open_rounds(parts, stack)
            else:
                engine, publisher = kind.open(with_secrets(self.config), parts, log)
                stack.callback(publisher.close)
            return OnPolicy(
                SharedRounds(self.source),
                publisher,
                engine,
                stack.pop_all(),
                serves=kind.serves,
                total_steps=broadcast("number of steps", lambda: steps),
                policies=list_trained(self.config),
            )

    def _open_rounds(
        self, parts: ModelBundle, stack: ExitStack
    ) -> tuple[Engine, Publisher, RoundSource, int]:
        """(engine, its publisher, the source of rounds, optimizer steps of the run) of process 0;
        `stack` closes what was opened."""
        config, plan, log = self.config, self.plan, self.log
        data, rollout, estimator = config.data, config.rollout, plan.estimator
        prompts = self.make_prompts()
        replayed = round(rollout.replay_share * rollout.prompts_per_step)
        max_prompts, rounds = None, math.inf
        if config.run.num_epochs:
            max_prompts = config.run.num_epochs * len(prompts)
            rounds = math.ceil(max_prompts / (rollout.prompts_per_step - replayed))
        policies = list_trained(config)
        updates = plan.updates * max(1, len(policies))
        # In epochs these are the most: a round that lost groups may have fewer minibatches.
        total_steps = int(config.run.max_steps or rounds * updates)
        fewer = updates > 1 or replayed or prompts.curator is not None
        most = "at most " if max_prompts and fewer else ""
        log(f"{len(prompts)} prompts, {most}{total_steps} steps, {updates} a round")
        rewards = open_rewards(config.rewards, rollout.reward_workers, rollout.retries)
        stack.callback(rewards.close)
        room = min(data.sequence_len, parts.architecture.longest)
        media = parts.architecture.media_tokens
        env, own = open_envs(config, parts.tokenizer, rewards, room, stack, media)
        self._check_lengths(env, own, prompts.datasets, parts.architecture, log)
        inspect_envs(env, own, prompts.datasets, log, wait=rollout.service == "process")
        envs = list_envs(env, own)
        kind = find_engine(config)
        engine, publisher = kind.open(with_secrets(config), parts, log)
        assert engine is not None, "process 0 samples"
        stack.callback(publisher.close)
        second_tries = SecondTries(rollout.reroll_start, rollout.reroll_max_groups)
        rules = self.make_rules()
        asked = engine
        if rollout.service == "process":
            asked = with_policies(engine, open_frozen(config))
            player = GroupPlayer(
                env,
                asked,
                rewards,
                seed_sampling(config),
                rules,
                self.make_failures(log),
                own,
                given=plan.given,
                judged=plan.judged,
                truths=plan.truths,
            )
            producer = self.make_producer(prompts, player, second_tries, log)
        else:
            producer = open_remote(
                config,
                parts.tokenizer,
                kind.share(engine, rollout.ray.episode_workers),
                OPENER,
                rules,
                room=room,
                media=media,
                facts=second_tries.tell_facts,
                stack=stack,
                log=log,
            )
        source = RoundSource(
            producer,
            plan.labels(data.micro_batch_size * row_shards(parts.mesh)),
            estimator,
            prompts_per_round=rollout.prompts_per_step,
            parts=plan.parts,
            max_lag=rollout.max_lag if rollout.mode == "async" else None,
            replay=ReplayBuffer(rollout.replay_size, rollout.replay_max_lag, config.run.seed),
            num_replayed=replayed,
            num_samples=None if rollout.samples == "all" else rollout.samples,
            counters=lambda: count_all(rewards.counters, asked, producer, envs),
            max_idle=rollout.max_idle_rounds,
            max_prompts=max_prompts,
        )
        second_tries.source = source
        stack.callback(source.close)
        return engine, publisher, source, total_steps

    def make_prompts(self) -> PromptOrder:
        """The order of the prompts, whose rows are opened."""
        config = self.config
        return PromptOrder(
            self._open_prompts(),
            [dataset.weight for dataset in config.data.datasets],
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            curator=self._open_curator(),
        )

    def make_rules(self) -> GroupRules:
        """What becomes of a group."""
        rollout, estimator = self.config.rollout, self.plan.estimator
        compares = estimator.baseline in ("group", "leave_one_out")
        return GroupRules(
            rollout.group_size,
            {one.label: one.weight for one in self.config.rewards if one.model is None},
            estimator.combine,
            estimator.clip,
            drop_flat=self.plan.judged and compares and rollout.zero_advantage != "keep",
            max_asks=rollout.max_refill if rollout.zero_advantage == "refill" else 1,
            retries=rollout.retries,
            datasets=label_datasets(self.config.data.datasets),
            policies=list_judges(self.config),
        )

    def make_failures(self, log: Callable[[str], None]) -> Failures:
        """How many failures end a run. What fails takes longer than what does not: the window
        holds all that is under way."""
        rollout = self.config.rollout
        window = (2 + self._rounds_ahead) * rollout.prompts_per_step * rollout.group_size
        return Failures(rollout.max_failures, window, log)

    def make_producer(
        self,
        prompts: PromptOrder,
        player: GroupPlayer,
        second_tries: Callable[[], bool],
        log: Callable[[str], None],
    ) -> Producer:
        """The producer of the config's rollout.mode."""
        rollout = self.config.rollout
        return Producer(
            prompts,
            player,
            ahead=self._rounds_ahead * rollout.prompts_per_step,
            ordered=rollout.mode != "async",
            streaming=rollout.streaming,
            choose_again=second_tries,
            patience=self.config.env.step_timeout,
            log=log,
        )

    @property
    def _rounds_ahead(self) -> int:
        rollout = self.config.rollout
        return {"sync": 0, "prefetch": 1, "async": rollout.max_lag}[rollout.mode]

    def eval_batches(self, dataset: DatasetConfig, parts: ModelBundle) -> Iterator[Batch]:
        """There are none: the config refuses data.eval_datasets."""
        return iter(())

    def show(self, console: Console, num_samples: int) -> None:
        """Answers are drawn while a run goes on, so that there is nothing to show before."""
        raise UserError(
            f'preprocess shows training examples, which task.kind "{self.config.task.kind}" draws'
            " while it runs; use --dry-run, and look at samples.jsonl of a short run"
        )

    def describe(self, console: Console) -> None:
        """How many prompts there are, what one episode with a scripted model comes to, and what it
        is worth: environment, rewards, columns and lengths are tried without any weights."""

        def log(text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        config, datasets = self.config, self._open_prompts()
        self._open_curator()
        with ExitStack() as stack:
            rewards = open_rewards(config.rewards, config.rollout.reward_workers)
            stack.callback(rewards.close)
            room = config.data.sequence_len
            env, own = open_envs(config, self.tokenizer, rewards, room, stack)
            parts = []
            for index, rows in enumerate(datasets):
                name = f"data.datasets.{index} ({rows.dataset.path})"
                log(f"{rows.dataset.path}: {len(rows):,} prompts")
                played, judged = own[index] if own else (env, rewards)
                parts.append((name, rows, played, judged))
            rehearse(config, self.tokenizer, parts, log, judged=self.plan.judged)
            self._check_lengths(env, own, datasets, None, log)
            inspect_envs(env, own, datasets, log, wait=False)

    def _open_curator(self) -> Curator | None:
        """What rollout.curator names; UserError."""
        rollout = self.config.rollout
        if rollout.curator != "all" and not self.plan.judged:
            raise UserError(
                f"rollout.curator {rollout.curator!r} goes by rewards, which task.kind"
                f" {self.config.task.kind} does not learn from; remove it"
            )
        return open_curator(rollout.curator, rollout.curator_options, self.config.run.seed)

    def _open_prompts(self) -> list[PromptRows]:
        """The rows of each dataset; UserError."""
        return [
            open_prompts(dataset, f"data.datasets.{index}")
            for index, dataset in enumerate(self.config.data.datasets)
        ]

    def _check_lengths(
        self, env: Any, own: Sequence[tuple[Any, Any]], datasets: Any, model: Any, log: Callable
    ) -> None:
        """Say where prompts leave too little room for answers; UserError where none is left."""
        row = self.config.data.sequence_len
        window = row if model is None else model.longest
        new = self.config.sampling.max_new_tokens
        for index, rows in enumerate(datasets):
            guarded = own[index][0] if own else env
            name = f"data.datasets.{index} ({rows.dataset.path})"
            found = measure_prompts(rows, guarded.env)
            if found and (text := explain_lengths(found, new, row, window, name)):
                log(text)


def label_datasets(datasets: Sequence[DatasetConfig]) -> tuple[str, ...]:
    """What metrics call the datasets; nothing where there is one."""
    labels = [dataset.label(datasets[:index]) for index, dataset in enumerate(datasets)]
    return tuple(labels) if len(labels) > 1 else ()


def count_failures(counters: Mapping[str, int]) -> dict[str, float]:
    """What went wrong in reward functions so far; nothing while all is well."""
    return {name: float(n) for name, n in counters.items() if not name.endswith("/calls")}


def count_all(
    rewards: Mapping[str, int], engine: Engine, producer: Any, envs: Sequence[GuardedEnv]
) -> dict[str, float]:
    """Numbers of reward functions, engines and environments so far, wherever they work."""
    found: dict[str, float] = dict(count_failures(rewards))
    elsewhere = producer.counters() if isinstance(producer, RemoteProducer) else {}
    for numbers in (engine.counters(), elsewhere, count_envs(envs)):
        for name, number in numbers.items():
            if not name.endswith("/calls"):
                found[name] = found.get(name, 0.0) + number
    if asked := found.pop("vllm/sessions_asked", 0.0):
        found["vllm/affinity"] = found.pop("vllm/sessions_at_first", 0.0) / asked
    return found


class SecondTries:
    """Whether the next prompt may be one whose answers earned nothing: from a share of the run on,
    and only so many a round."""

    def __init__(self, start: float, per_round: int):
        self.start, self.per_round = start, per_round
        self.source: Any = None
        self._round, self._count = -1, 0

    def __call__(self) -> bool:
        source = self.source
        if source.progress < self.start or not source.producer.prompts.waiting:
            return False
        if source.rounds_begun != self._round:
            self._round, self._count = source.rounds_begun, 0
        self._count += 1
        return self._count <= self.per_round

    def tell_facts(self) -> dict[str, Any]:
        """What the source says, for a process that has none."""
        return {"progress": self.source.progress, "rounds_begun": self.source.rounds_begun}
