"""Sections eval.sets of a run, opened: rows, environments and rewards, for any engine to answer.

rows, env, rewards, seed ─> eval_sets.answer_set ─> {"eval/gsm8k/pass@4": 0.61}, samples.jsonl,
                                                    the best and the worst answers for people
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from jaxtrain.config import Config, EvalSetConfig
from jaxtrain.config.policies import list_judges
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.data.sources.prompt_sets import read_answer, read_prompt_set
from jaxtrain.distributed.mesh import is_main_process
from jaxtrain.environments.guarded import GuardedEnv, open_guarded
from jaxtrain.environments.rewards.score import Rewards, open_rewards
from jaxtrain.errors import UserError
from jaxtrain.generation.dataset_envs import measure_prompts
from jaxtrain.generation.engine import Engine
from jaxtrain.generation.engines import seed_sampling
from jaxtrain.generation.episode_engine import with_policies
from jaxtrain.generation.episodes import Env, Episode
from jaxtrain.generation.evaluation.benchmark_metrics import average_sets, measure_benchmark
from jaxtrain.generation.evaluation.eval_sets import (
    AnsweredProblem,
    SetRules,
    answer_set,
    list_answers,
    set_sampling,
    show_extremes,
    summarize,
)
from jaxtrain.generation.event_loop import EventLoop
from jaxtrain.generation.failures import Failures
from jaxtrain.generation.frozen_policy import open_frozen
from jaxtrain.generation.prompts import check_columns, open_prompts, rename


class ProblemSets:
    """Problem sets with environments and reward workers of their own, so that training can go on
    with its own at the same time."""

    def __init__(
        self,
        config: Config,
        envs: Sequence[Env],
        rewards: Rewards,
        log: Callable[[str], None] = print,
        tokenizer: Any = None,
    ):
        """Read all rows; envs: one for each of `eval.sets`. tokenizer: as in `open_prompts`. Raises
        UserError for a set that cannot be read."""
        sets = list(enumerate(config.eval.sets))
        self.sets = [(section, read_problems(i, section, tokenizer)) for i, section in sets]
        self.envs, self.rewards, self.sampling = envs, rewards, seed_sampling(config)
        self.show, self.patience, self.log = config.eval.show, config.env.step_timeout, log
        self.frozen, self.policies = open_frozen(config), list_judges(config)
        self.progress, self.num_drawn = "", 0
        """How far the set is that is being answered; tokens of all answers so far."""

    def run(
        self,
        engine: Engine,
        step: int,
        sampled: Callable[[int, Iterable], Any],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Answer all sets with an engine; `sampled` receives every answer's line.

        Blocks; the answers are drawn in an event loop's own thread. Raises UserError for answers
        that nothing judges, RunStopped if no engine is left, and Interrupted once should_stop()
        returns True.
        """
        metrics: dict[str, float] = {}
        engine = with_policies(engine, self.frozen)
        for index, (section, rows) in enumerate(self.sets):
            loop = EventLoop("evaluation", self.patience, self.log)
            loop.should_stop = should_stop
            try:
                answered = loop.run(self.answer(index, section, rows, engine))
            finally:
                self.progress = ""
                loop.close(engine.close)
            numbers = summarize(answered, section.k, section.threshold)
            numbers |= measure_benchmark(section, answered)
            metrics |= {f"eval/{section.label}/{name}": value for name, value in numbers.items()}
            sampled(step, list_answers(section.label, answered))
            if self.show:
                lines = show_extremes(answered, self.show)
                self.log(
                    "\n".join([f"{section.label}, {len(rows)} problems at step {step}", *lines])
                )
        return metrics | average_sets(metrics, [section for section, _ in self.sets])

    async def answer(
        self, index: int, section: EvalSetConfig, rows: Sequence[Mapping[str, Any]], engine: Engine
    ) -> list[AnsweredProblem]:
        """Return one set's answers, judged."""
        ended, count = 0, len(rows) * section.k

        def note(episode: Episode) -> None:
            nonlocal ended
            ended, self.num_drawn = ended + 1, self.num_drawn + episode.num_sampled
            self.progress = f"{ended:,} of {count:,} answers to {section.label}"

        rewards = self.rewards.only(section.rewards)
        if section.graders:
            rewards = self.rewards.using(section.graders, f"eval.sets.{index}.benchmark")
        try:
            answered = await answer_set(
                rows,
                self.envs[index],
                engine,
                set_sampling(self.sampling, section),
                SetRules(rewards, section.k, {} if section.graders else self.policies),
                Failures(log=self.log),
                note,
            )
        except UserError as error:
            raise UserError(f"eval.sets.{index} ({section.source}): {error}") from None
        scores = [score for problem in answered for score in problem.scores]
        if scores and not any(scores):
            raise UserError(
                f"eval.sets.{index} ({section.source}): no reward judges the answers: add a"
                " [[rewards]] table with a function, or an env that gives rewards itself for rows"
                " such as these"
            )
        return answered

    def close(self) -> None:
        """Close the reward workers and the environments."""
        self.rewards.close()
        for env in self.envs:
            if (close := getattr(env, "close", None)) is not None:
                close()


def open_problem_sets(
    config: Config, bundle: ModelBundle, log: Callable[[str], None]
) -> ProblemSets | None:
    """Open section eval.sets on process 0, which answers for all; returns None if it is empty, and
    raises UserError before anything runs."""
    if not config.eval.sets or not is_main_process():
        return None
    with ExitStack() as stack:
        rewards = open_rewards(
            config.rewards, config.rollout.reward_workers, config.rollout.retries
        )
        stack.callback(rewards.close)
        tokenizer, media = bundle.tokenizer, bundle.architecture.media_tokens
        room = min(config.data.sequence_len, bundle.architecture.longest)
        envs: list[GuardedEnv] = []
        for index, eval_set in enumerate(config.eval.sets):
            section, key = config.env, "env"
            if eval_set.env is not None:
                section, key = eval_set.env, f"eval.sets.{index}.env"
            folder = config.run.output_dir
            envs.append(open_guarded(section, tokenizer, room, key, media, folder))
            stack.callback(envs[-1].close)
        sets = ProblemSets(config, envs, rewards, log, tokenizer)
        for index, (env, (section, rows)) in enumerate(zip(envs, sets.sets, strict=True)):
            measure_prompts(rows, env.env, f"eval.sets.{index} ({section.source})", log)
            env.inspect(rows, log)
        stack.pop_all()
        return sets


def read_problems(
    index: int, section: EvalSetConfig, tokenizer: Any = None
) -> list[dict[str, Any]]:
    """Return all rows of eval.sets.`index`, with columns renamed by its `fields`. tokenizer: as in
    `open_prompts`. UserError."""
    key = f"eval.sets.{index}"
    if section.benchmark:
        benchmark = read_prompt_set(
            section.benchmark,
            section.path,
            f"{key}.path",
            section.max_rows or sys.maxsize,
            examples=section.examples,
        )
        check_columns(benchmark.rows, section.fields, f"{key}.fields", section.source)
        rows = zip(benchmark.rows, benchmark.turns, benchmark.origins, strict=True)
        name = section.benchmark if section.graders and "answer" not in section.fields else None
        return [
            {**rename(row, section.fields), **read_answer(name, row, origin), "prompt": turns[0]}
            for row, turns, origin in rows
        ]
    try:
        rows = open_prompts(section.dataset(), key, tokenizer)
    except UserError as error:
        text = str(error).replace("data.datasets[]", key)
        raise UserError(text if key in text else f"{key}: {text}") from None
    return [rows[i] for i in range(len(rows))]
