"""Sampled data: rounds of answers to prompts, for all methods that train on samples.

Prompts, environment, rewards and engine are on process 0; the others receive its rounds, and take
part in gathering weights for the engine. With a rollout service (rollout.service), producer and
episodes run in its processes, which open them with `open_producer`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from jaxtrain.batch import Batch
from jaxtrain.config import Config, DatasetConfig, validate_config
from jaxtrain.config.policies import list_judges, list_trained
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.data.packing.pack import Fields
from jaxtrain.distributed.broadcast import broadcast
from jaxtrain.distributed.feed import row_shards
from jaxtrain.distributed.mesh import is_main_process
from jaxtrain.environments.rewards.score import Rewards, open_rewards
from jaxtrain.errors import UserError
from jaxtrain.generation.curators import Curator, open_curator
from jaxtrain.generation.dataset_envs import DatasetEnvs, open_envs
from jaxtrain.generation.engine import Engine
from jaxtrain.generation.engines import find_engine, seed_sampling, with_secrets
from jaxtrain.generation.episode_engine import with_policies
from jaxtrain.generation.failures import Failures
from jaxtrain.generation.frozen_policy import open_frozen
from jaxtrain.generation.group_player import AnswerOptions, GroupPlayer, GroupRules
from jaxtrain.generation.producer import Producer, ProducerOptions
from jaxtrain.generation.prompts import PromptOrder, PromptRows, open_prompts
from jaxtrain.generation.publisher import Publisher
from jaxtrain.generation.ray.factory import enter, make_request, open_remote, worker_settings
from jaxtrain.generation.ray.remote_producer import RemoteProducer
from jaxtrain.generation.ray.worker_pool import RemotePlayer, RolloutWorkers
from jaxtrain.methods.registry import find_method
from jaxtrain.methods.rl.advantages import AdvantageOptions
from jaxtrain.methods.rl.batch_builder import BatchBuilder
from jaxtrain.methods.rl.rehearsal import rehearse
from jaxtrain.methods.rl.replay import ReplayBuffer
from jaxtrain.methods.rl.round import EngineAccess, RolloutRounds, RoundOptions, RoundStages

OPENER = "jaxtrain.methods.rl.prompt_data:open_producer"
"""Opens the producer in a rollout service."""


@dataclass(frozen=True)
class RoundPlan:
    """A method's rounds: how they are played, compared and packed."""

    make_builder: Callable[[int], BatchBuilder]
    """Rows of a microstep -> how a round becomes batches."""
    advantages: AdvantageOptions
    updates: int
    """Optimizer steps under one version of the policy."""
    parts: int
    """Parts of a streamed round; 1: it comes as a whole."""
    fields: Fields
    answers: AnswerOptions = field(default_factory=AnswerOptions)


class PromptData:
    """`core.task.Data` of methods that draw what they train on."""

    def __init__(self, config: Config, tokenizer: Any, plan: RoundPlan):
        self.config, self.tokenizer, self.plan = config, tokenizer, plan
        self.row_tokens = config.data.sequence_len
        self.fields = plan.fields
        self.rounds: RolloutRounds | None = None
        """None until `open`."""
        self.log: Callable[[str], None] = print

    def check(self) -> Iterator[str]:
        """Yield nothing: opening the data logs whatever there is to report."""
        return iter(())

    def open(self, bundle: ModelBundle, log: Callable[[str], None]) -> RolloutRounds:
        """Open the rounds; raises UserError before anything is sampled."""
        self.log, kind, steps, stages = log, find_engine(self.config), 0, None
        if (trained := list_trained(self.config)) and not kind.several:
            raise UserError(
                f"policies.{trained[0]}.trained: rollout.engine {self.config.rollout.engine!r}"
                ' draws with one policy; set it to "local" or "vllm"'
            )
        with ExitStack() as stack:
            second_tries, options = SecondTries.of(self.config), self._round_options(0)
            if is_main_process():
                prompts = self.make_prompts()
                options = self._round_options(len(prompts))
                steps = self._count_steps(prompts, options)
                engine, publisher, stages = self._open_stages(bundle, prompts, second_tries, stack)
            else:
                engine, publisher = kind.open(with_secrets(self.config), bundle, log)
                stack.callback(publisher.close)
            self.rounds = second_tries.rounds = RolloutRounds(
                stages,
                options,
                EngineAccess(engine, publisher, kind.serves, trained),
                total_steps=broadcast("number of steps", lambda: steps),
                closing=stack.pop_all(),
            )
            return self.rounds

    def _count_steps(self, prompts: PromptOrder, options: RoundOptions) -> int:
        """Return the optimizer steps of the run, and log what they follow from."""
        config, rounds = self.config, math.inf
        if options.max_prompts:
            rounds = math.ceil(
                options.max_prompts / (options.prompts_per_round - options.num_replayed)
            )
        updates = self.plan.updates * max(1, len(list_trained(config)))
        # In epochs these are the most: a round that lost groups may have fewer minibatches.
        total_steps = int(config.run.max_steps or rounds * updates)
        fewer = updates > 1 or options.num_replayed or prompts.curator is not None
        most = "at most " if options.max_prompts and fewer else ""
        self.log(f"{len(prompts)} prompts, {most}{total_steps} steps, {updates} a round")
        return total_steps

    def _round_options(self, num_prompts: int) -> RoundOptions:
        rollout, epochs = self.config.rollout, self.config.run.epochs
        return RoundOptions(
            prompts_per_round=rollout.prompts_per_step,
            parts=self.plan.parts,
            max_lag=rollout.max_lag if rollout.mode == "async" else None,
            num_replayed=round(rollout.replay_share * rollout.prompts_per_step),
            num_samples=None if rollout.samples == "all" else rollout.samples,
            max_idle=rollout.max_idle_rounds,
            max_prompts=epochs * num_prompts if epochs else None,
        )

    def _open_stages(
        self,
        bundle: ModelBundle,
        prompts: PromptOrder,
        second_tries: "SecondTries",
        stack: ExitStack,
    ) -> tuple[Engine, Publisher, RoundStages]:
        """Return (engine, its publisher, the stages of a round) of process 0; `stack` closes
        them."""
        config, log = self.config, self.log
        data, rollout = config.data, config.rollout
        rewards = open_rewards(config.rewards, rollout.reward_workers, rollout.retries)
        stack.callback(rewards.close)
        architecture = bundle.architecture
        room, media = min(data.sequence_len, architecture.longest), architecture.media_tokens
        envs = open_envs(config, bundle.tokenizer, rewards, room, stack, media, self._row_patches)
        envs.check_lengths(config, prompts.datasets, architecture.longest, log)
        envs.inspect(prompts.datasets, log, wait=rollout.service == "process")
        kind = find_engine(config)
        engine, publisher = kind.open(with_secrets(config), bundle, log)
        assert engine is not None, "process 0 samples"
        stack.callback(publisher.close)
        playing = engine
        if rollout.service == "process":
            playing = with_policies(engine, open_frozen(config))
            player = GroupPlayer(
                envs,
                playing,
                seed_sampling(config),
                self.make_rules(),
                self.make_failures(log),
                self.plan.answers,
            )
            producer = self.make_producer(prompts, player, second_tries, log)
        else:
            shared = kind.share(engine, rollout.ray.episode_workers)
            worker = worker_settings(config, bundle.tokenizer, shared, room, media)
            request = make_request(config, OPENER, worker)
            rules, facts = self.make_rules(), second_tries.facts
            producer = open_remote(config, request, rules, shared.sender, facts, stack, log)
        stack.callback(producer.close)
        stages = RoundStages(
            producer,
            self.plan.make_builder(data.micro_batch_size * row_shards(bundle.mesh)),
            self.plan.advantages,
            ReplayBuffer(rollout.replay_size, rollout.replay_max_lag, config.run.seed),
            lambda: count_all(rewards, playing, producer, envs),
            self.log,
        )
        return engine, publisher, stages

    def make_prompts(self) -> PromptOrder:
        """Open the rows of the prompts, and return their order."""
        config = self.config
        return PromptOrder(
            self._open_prompts(),
            [dataset.weight for dataset in config.data.datasets],
            seed=config.run.seed,
            shuffle=config.data.shuffle,
            curator=self._open_curator(),
        )

    def make_rules(self) -> GroupRules:
        """Return which groups are played and dropped."""
        rollout, advantages = self.config.rollout, self.plan.advantages
        compares = advantages.baseline in ("group", "leave_one_out")
        return GroupRules(
            rollout.group_size,
            {reward.label: reward.weight for reward in self.config.rewards if reward.model is None},
            advantages.combine,
            advantages.clip,
            drop_flat=self.plan.answers.need_reward
            and compares
            and rollout.zero_advantage != "keep",
            max_prompts=rollout.max_refill if rollout.zero_advantage == "refill" else 1,
            retries=rollout.retries,
            datasets=label_datasets(self.config.data.datasets),
            policies=list_judges(self.config),
        )

    def make_failures(self, log: Callable[[str], None]) -> Failures:
        """Return how many failures end a run."""
        rollout = self.config.rollout
        # Failing takes longer than succeeding: the window covers everything that is under way, or
        # it would fill with the fast successes.
        window = (2 + self._rounds_ahead) * rollout.prompts_per_step * rollout.group_size
        return Failures(rollout.max_failures, window, log)

    def make_producer(
        self,
        prompts: PromptOrder,
        player: GroupPlayer,
        second_tries: Callable[[], bool],
        log: Callable[[str], None],
    ) -> Producer:
        """Return the producer of the config's rollout.mode."""
        rollout = self.config.rollout
        options = ProducerOptions(
            ahead=self._rounds_ahead * rollout.prompts_per_step,
            ordered=rollout.mode != "async",
            streaming=rollout.streaming,
            patience=self.config.env.step_timeout,
        )
        return Producer(prompts, player, options, take_retry=second_tries, log=log)

    @property
    def _row_patches(self) -> int | None:
        return None if self.fields.images is None else self.fields.images.row_patches

    @property
    def _rounds_ahead(self) -> int:
        rollout = self.config.rollout
        return {"sync": 0, "prefetch": 1, "async": rollout.max_lag}[rollout.mode]

    def eval_batches(self, dataset: DatasetConfig, bundle: ModelBundle) -> Iterator[Batch]:
        """Yield nothing: the config refuses data.eval_datasets."""
        return iter(())

    def show(self, console: Console, num_samples: int) -> None:
        """Raise UserError: answers are drawn while a run goes on, and there is nothing to show."""
        raise UserError(
            f'preprocess shows training examples, which task.kind "{self.config.task.kind}" draws'
            " while it runs; use --dry-run, and look at samples.jsonl of a short run"
        )

    def describe(self, console: Console) -> None:
        """Log how many prompts there are, and play and judge one episode with a scripted model:
        environment, rewards, columns and lengths are checked without any weights."""

        def log(text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        config, datasets = self.config, self._open_prompts()
        self._open_curator()
        with ExitStack() as stack:
            rewards = open_rewards(config.rewards, config.rollout.reward_workers)
            stack.callback(rewards.close)
            room = config.data.sequence_len
            envs = open_envs(
                config, self.tokenizer, rewards, room, stack, row_patches=self._row_patches
            )
            parts = []
            for index, rows in enumerate(datasets):
                name = f"data.datasets.{index} ({rows.dataset.path})"
                log(f"{rows.dataset.path}: {len(rows):,} prompts")
                parts.append((name, rows, *envs.of(index)))
            need_reward = self.plan.answers.need_reward
            rehearse(config, self.tokenizer, parts, log, need_reward=need_reward)
            envs.check_lengths(config, datasets, room, log)
            envs.inspect(datasets, log, wait=False)

    def _open_curator(self) -> Curator | None:
        """Open what rollout.curator names; raises UserError."""
        rollout = self.config.rollout
        if rollout.curator != "all" and not self.plan.answers.need_reward:
            raise UserError(
                f"rollout.curator {rollout.curator!r} goes by rewards, which task.kind"
                f" {self.config.task.kind} does not learn from; remove it"
            )
        return open_curator(rollout.curator, rollout.curator_options, self.config.run.seed)

    def _open_prompts(self) -> list[PromptRows]:
        """Open the rows of each dataset; raises UserError."""
        return [
            open_prompts(dataset, f"data.datasets.{index}", self.tokenizer, self._row_patches)
            for index, dataset in enumerate(self.config.data.datasets)
        ]


def open_producer(
    settings: dict[str, Any], workers: RolloutWorkers, facts: Any, log: Callable[[str], None]
) -> Producer:
    """Open a run's producer in the process of its rollout service, where `workers` play.

    Called by `RolloutService.attach`. facts: the trainer's side, as SecondTries reads it. Raises
    UserError, as for data that are not on this machine.
    """
    enter(settings["folder"])
    config = validate_config(settings["config"], "the config of the run")
    data = find_method(config).open_data(config, settings["tokenizer"])
    assert isinstance(data, PromptData), "the method draws its answers"
    player = RemotePlayer(
        workers,
        seed_sampling(config),
        data.make_rules(),
        data.make_failures(log),
        data.plan.answers,
    )
    second_tries = SecondTries.of(config)
    second_tries.rounds = facts
    return data.make_producer(data.make_prompts(), player, second_tries, log)


def label_datasets(datasets: Sequence[DatasetConfig]) -> tuple[str, ...]:
    """Return the names of the datasets in metrics; empty if there is only one."""
    labels = [dataset.label(datasets[:index]) for index, dataset in enumerate(datasets)]
    return tuple(labels) if len(labels) > 1 else ()


def count_all(
    rewards: Rewards, engine: Engine, producer: Any, envs: DatasetEnvs
) -> dict[str, float]:
    """Return the counters of reward functions, engines and environments, wherever they work."""
    remote = producer.counters() if isinstance(producer, RemoteProducer) else {}
    counters: dict[str, float] = {}
    for numbers in (rewards.counters, engine.counters(), remote, envs.counters()):
        for name, number in numbers.items():
            if not name.endswith("/calls"):
                counters[name] = counters.get(name, 0.0) + number
    if sessions := counters.pop("vllm/sessions_asked", 0.0):
        counters["vllm/affinity"] = counters.pop("vllm/sessions_at_first", 0.0) / sessions
    return counters


class SecondTries:
    """Decides whether the next prompt may be a retry of one whose answers earned nothing: after a
    share of the run, and at most so many a round."""

    def __init__(self, start: float, per_round: int):
        self.start, self.per_round = start, per_round
        self.rounds: Any = None
        """RolloutRounds, or a service's view of them: `progress`, `rounds_begun`, `producer`."""
        self._round, self._count = -1, 0

    @classmethod
    def of(cls, config: Config) -> "SecondTries":
        """Return those of a config."""
        return cls(config.rollout.reroll_start, config.rollout.reroll_max_groups)

    def __call__(self) -> bool:
        rounds = self.rounds
        if rounds.progress < self.start or not rounds.producer.prompts.waiting:
            return False
        if rounds.rounds_begun != self._round:
            self._round, self._count = rounds.rounds_begun, 0
        self._count += 1
        return self._count <= self.per_round

    def facts(self) -> dict[str, Any]:
        """Return what a process without the rounds needs to decide the same."""
        return {"progress": self.rounds.progress, "rounds_begun": self.rounds.rounds_begun}
