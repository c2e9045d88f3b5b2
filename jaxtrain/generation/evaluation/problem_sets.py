"""Sections eval.sets of a run, opened: rows, environments and rewards, for any engine to answer.

rows, env, rewards, seed ─> eval_sets.answer_set ─> {"eval/gsm8k/pass@4": 0.61}, samples.jsonl,
                                                    the best and the worst answers for people
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from jaxtrain.config import Config, EvalSetConfig
from jaxtrain.config.policies import list_judges
from jaxtrain.core.bundle import ModelBundle
from jaxtrain.data.sources.dataset import open_rows
from jaxtrain.data.sources.prompt_sets import read_prompt_set
from jaxtrain.distributed.mesh import is_main_process
from jaxtrain.environments.guarded import GuardedEnv, open_guarded
from jaxtrain.environments.rewards import Rewards, open_rewards
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Engine, Sampling
from jaxtrain.generation.engines import seed_sampling
from jaxtrain.generation.episode_engine import with_policies
from jaxtrain.generation.episodes import Env
from jaxtrain.generation.evaluation.eval_sets import (
    AnsweredProblem,
    answer_set,
    list_answers,
    set_sampling,
    show_extremes,
    summarize,
)
from jaxtrain.generation.event_loop import EventLoop
from jaxtrain.generation.failures import Failures
from jaxtrain.generation.frozen_policy import open_frozen
from jaxtrain.generation.prompts import check_columns, rename


class ProblemSets:
    """All sets with what plays and judges them; their environments and reward workers are their
    own, so that training may go on with its own beside them."""

    def __init__(
        self,
        sets: Sequence[EvalSetConfig],
        envs: Sequence[Env],
        rewards: Rewards,
        sampling: Sampling,
        *,
        show: int = 0,
        patience: float | None = None,
        log: Callable[[str], None] = print,
        others: Mapping[str, Any] | None = None,
        policies: Mapping[str, Sequence[str]] | None = None,
    ):
        """Reads all rows. envs: one for each set. others: the frozen policies. policies: the
        trained ones, where they have names, as GroupRules.policies. show: best and
        worst answers of each set to tell; UserError for a set that cannot be read."""
        self.sets = [(one, read_problems(i, one)) for i, one in enumerate(sets)]
        self.envs, self.rewards, self.sampling = envs, rewards, sampling
        self.show, self.patience, self.log = show, patience, log
        self.others, self.policies = dict(others or {}), policies

    def run(
        self,
        engine: Engine,
        step: int,
        sampled: Callable[[int, Iterable], Any],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> dict[str, float]:
        """Let the engine answer all sets; `sampled` gets every answer's line.

        Blocks; the answers are drawn in an event loop's own thread. Raises UserError for answers
        that nothing judges, RunStopped where no engine is left, and Interrupted once should_stop()
        says so.
        """
        found: dict[str, float] = {}
        engine = with_policies(engine, self.others)
        for index, (one, rows) in enumerate(self.sets):
            loop = EventLoop("evaluation", self.patience, self.log)
            loop.should_stop = should_stop
            try:
                answered = loop.run(self.answer(index, one, rows, engine))
            finally:
                loop.close(engine.close)
            numbers = summarize(answered, one.k, one.threshold)
            found |= {f"eval/{one.label}/{name}": value for name, value in numbers.items()}
            sampled(step, list_answers(one.label, answered))
            if self.show:
                lines = show_extremes(answered, self.show)
                self.log("\n".join([f"{one.label}, {len(rows)} problems at step {step}", *lines]))
        return found

    async def answer(
        self, index: int, one: EvalSetConfig, rows: Sequence[Mapping[str, Any]], engine: Engine
    ) -> list[AnsweredProblem]:
        """One set's answers, judged."""
        try:
            answered = await answer_set(
                rows,
                self.envs[index],
                engine,
                self.rewards.only(one.rewards),
                set_sampling(self.sampling, one),
                one.k,
                failures=Failures(log=self.log),
                policies=self.policies,
            )
        except UserError as error:
            raise UserError(f"eval.sets.{index} ({one.path}): {error}") from None
        scores = [score for problem in answered for score in problem.scores]
        if scores and not any(scores):
            raise UserError(
                f"eval.sets.{index} ({one.path}): no reward judges the answers: add a [[rewards]]"
                " table with a function, or an env that gives rewards itself for rows such as these"
            )
        return answered

    def close(self) -> None:
        """End the reward workers and what environments hold."""
        self.rewards.close()
        for env in self.envs:
            if (close := getattr(env, "close", None)) is not None:
                close()


def open_problem_sets(
    config: Config, parts: ModelBundle, log: Callable[[str], None]
) -> ProblemSets | None:
    """What section eval.sets asks for, on process 0, which answers for all; None where it is empty.
    UserError before anything runs."""
    if not config.eval.sets or not is_main_process():
        return None
    with ExitStack() as stack:
        rewards = open_rewards(
            config.rewards, config.rollout.reward_workers, config.rollout.retries
        )
        stack.callback(rewards.close)
        tokenizer, media = parts.tokenizer, parts.architecture.media_tokens
        room = min(config.data.sequence_len, parts.architecture.longest)
        envs: list[GuardedEnv] = []
        for index, one in enumerate(config.eval.sets):
            section, key = config.env, "env"
            if one.env is not None:
                section, key = one.env, f"eval.sets.{index}.env"
            folder = config.run.output_dir
            envs.append(open_guarded(section, tokenizer, room, key, media, folder))
            stack.callback(envs[-1].close)
        made = ProblemSets(
            config.eval.sets,
            envs,
            rewards,
            seed_sampling(config),
            show=config.eval.show,
            patience=config.env.step_timeout,
            log=log,
            others=open_frozen(config),
            policies=list_judges(config),
        )
        for env, (_, rows) in zip(envs, made.sets, strict=True):
            env.inspect(rows, log)
        stack.pop_all()
        return made


def read_problems(index: int, one: EvalSetConfig) -> list[dict[str, Any]]:
    """All rows of eval.sets.`index`, columns renamed as its `fields` say; UserError."""
    key = f"eval.sets.{index}"
    if one.benchmark:
        found = read_prompt_set(one.benchmark, one.path, f"{key}.path", one.max_rows)
        check_columns(found.rows, one.fields, f"{key}.fields", one.path)
        return [
            {**rename(row, one.fields), "prompt": turns[0]}
            for row, turns in zip(found.rows, found.turns, strict=True)
        ]
    try:
        rows = open_rows(one.dataset())
    except UserError as error:
        text = str(error).replace("data.datasets[]", key)
        raise UserError(text if key in text else f"{key}: {text}") from None
    check_columns(rows, one.fields, f"{key}.fields", one.path)
    return [rename(rows[i], one.fields) for i in range(len(rows))]
