"""Sets of problems: pass@k against its definition, answers by scripted engines."""

import asyncio
import itertools
import json

import pytest

from jaxtrain.config import EvalSetConfig, SamplingConfig, validate_config
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import EpisodeFailed
from jaxtrain.generation.episodes import Episode
from jaxtrain.generation.evaluation.eval_sets import (
    FIRST_INDEX,
    AnsweredProblem,
    SetRules,
    answer_set,
    list_answers,
    pass_at,
    set_sampling,
    show_extremes,
    summarize,
)
from jaxtrain.runs.samples import SAMPLES, append_samples


@pytest.mark.parametrize("k, solved", [(1, 0), (1, 1), (4, 0), (4, 1), (4, 3), (4, 4), (6, 2)])
def test_pass_at_j_is_the_share_of_draws_with_a_solution(k, solved):
    answers = [True] * solved + [False] * (k - solved)
    for j in range(1, k + 1):
        draws = list(itertools.combinations(answers, j))
        assert pass_at(j, k, solved) == pytest.approx(sum(map(any, draws)) / len(draws))


def episode(text="", tokens=1, finish="stop", **rewards):
    return Episode(
        [0] * tokens, [True] * tokens, [0.0] * tokens, [-1] * tokens, finish, text, "q", rewards
    )


class Env:
    """Answers with the row's number and the episode's, or fails; counts who runs at once."""

    def __init__(self, failing=()):
        self.failing, self.running, self.most, self.seen = set(failing), 0, 0, []

    async def run(self, row, engine, sampling, index):
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        self.seen.append(index)
        number = index - FIRST_INDEX
        if number in self.failing:
            raise EpisodeFailed("gone")
        return episode(f"{row['n']}.{number}", tokens=number + 1, right=float(number % 2))


class Rewards:
    async def score(self, episodes, row):
        return [e.rewards for e in episodes]

    def total(self, scores):
        return sum(scores.values()) if None not in scores.values() else None


def test_every_row_is_answered_k_times_with_its_own_draws():
    env, rows = Env(), [{"n": 0}, {"n": 1}, {"n": 2}]
    found = asyncio.run(answer_set(rows, env, None, None, SetRules(Rewards(), 4, max_running=5)))
    assert sorted(env.seen) == [FIRST_INDEX + i for i in range(12)] and env.most <= 5
    assert [one.row["n"] for one in found] == [0, 1, 2]
    assert [e.completion for e in found[1].episodes] == ["1.4", "1.5", "1.6", "1.7"]
    found[0].episodes[0].metrics = {"accuracy": (1.0, 4.0)}
    found[2].episodes[1].metrics = {"accuracy": (1.0, 1.0)}
    numbers = summarize(found, 4, threshold=1.0)
    assert numbers["avg@4"] == 0.5 and numbers["reward"] == 0.5
    assert numbers["env/accuracy"] == 2 / 5, "pairs are sums and weights"
    assert numbers["pass@1"] == pytest.approx(0.5)
    assert numbers["pass@2"] == pytest.approx(1 - 1 / 6) and numbers["pass@4"] == 1.0
    assert numbers["mean_length"] == 6.5 and "failed" not in numbers


class Game(Env):
    """Two policies: b does not play in a row's first game, and twice in the second one."""

    async def run(self, row, engine, sampling, index):
        first = await super().run(row, engine, sampling, index)
        number = (index - FIRST_INDEX) % 4
        first.metrics = {"n": 1.0}
        first.others = [episode(tokens=9, right=float(number > 1)) for _ in range(min(number, 2))]
        for one in first.others:
            one.policy, one.metrics = "b", {"n": 2.0}
        return first


class Judges(Rewards):
    """Functions of names, each worth a quarter, beside what the environment says."""

    def __init__(self, names=("both",)):
        self.names = names

    def only(self, names):
        return Judges(names)

    async def score(self, episodes, row):
        return [{**e.rewards, **dict.fromkeys(self.names, 0.25)} for e in episodes]


def test_each_policy_of_a_game_is_judged_and_counted_by_itself():
    rows, policies = [{"n": 0}, {"n": 1}], {"a": ["both"], "b": ["both", "own"]}
    env = Game({4, 5, 6, 7})  # nothing of the second row
    found = asyncio.run(answer_set(rows, env, None, None, SetRules(Judges(), 4, policies)))
    numbers = summarize(found, 4, threshold=1.0)
    one = {key: value for key, value in numbers.items() if not key.startswith(("a/", "b/"))}
    assert {f"a/{key}": value for key, value in one.items()}.items() <= numbers.items()
    assert numbers["avg@4"] == 1 / 4 and numbers["failed"] == 4 and numbers["env/n"] == 1
    # b: five answers to the first problem, four of them solve it; the second one's all failed.
    assert numbers["b/avg@4"] == pytest.approx((4 / 5 + 0) / 2)
    assert numbers["b/pass@2"] == pytest.approx((1 + 0) / 2) and numbers["b/env/n"] == 2
    assert numbers["b/reward"] == pytest.approx((4 * 1.5 + 0.5) / (5 + 4))
    assert numbers["b/rewards/own"] == numbers["a/rewards/both"] == 0.25
    assert "a/rewards/own" not in numbers
    lines = list(list_answers("mine", found))
    assert [line["policy"] for line in lines] == ["a"] * 4 + ["b"] * 5
    assert show_extremes(found, 1)[0].startswith("best, b: reward 1.5, 9 tokens")


def test_agents_of_one_policy_have_their_numbers_too():
    class Agents(Game):
        async def run(self, row, engine, sampling, index):
            first = await super().run(row, engine, sampling, index)
            first.agent = "guest"
            for one in first.others:
                one.policy, one.agent = "", "host"
            return first

    found = asyncio.run(answer_set([{"n": 0}], Agents(), None, None, SetRules(Rewards(), 4)))
    numbers = summarize(found, 4, threshold=1.0)
    assert numbers["guest/avg@4"] == numbers["avg@4"] == 0.5
    assert numbers["host/avg@4"] == 4 / 5 and "host/failed" not in numbers


def test_failed_episodes_count_as_unsolved():
    found = asyncio.run(answer_set([{"n": 0}], Env({1, 3}), None, None, SetRules(Rewards(), 4)))
    numbers = summarize(found, 4, threshold=1.0)
    assert numbers["failed"] == 2 and numbers["avg@4"] == 0 and numbers["reward"] == 0
    nothing = asyncio.run(answer_set([{"n": 0}], Env({0}), None, None, SetRules(Rewards(), 1)))
    assert summarize(nothing, 1, 1.0)["reward"] == 0


def test_answers_without_a_verdict_are_counted():
    class Silent(Rewards):
        async def score(self, episodes, row):
            return [{"right": None if e.completion.endswith("1") else 1.0} for e in episodes]

    found = asyncio.run(answer_set([{"n": 0}], Env(), None, None, SetRules(Silent(), 4)))
    numbers = summarize(found, 4, threshold=1.0)
    assert numbers["unjudged"] == 1 and numbers["avg@4"] == 0.75 and numbers["reward"] == 0.75


def test_answers_can_be_read(tmp_path):
    one = AnsweredProblem(
        {}, [episode("bad " * 99, finish="length"), episode("good")], [{}, {}], [0, 1]
    )
    lines = show_extremes([one], 1, width=40)
    assert lines[0].startswith("best: reward 1, 1 tokens") and "good" in lines[2]
    assert lines[3].startswith("worst: reward 0") and "(length)" in lines[3]
    assert all(len(line) <= 40 + 12 for line in lines)
    assert len(show_extremes([one], 5)) == 6, "nothing is both best and worst"
    append_samples(tmp_path, 7, list_answers("mine", [one]))
    rows = [json.loads(line) for line in (tmp_path / SAMPLES).read_text().splitlines()]
    assert [(row["step"], row["set"], row["reward"]) for row in rows] == [
        (7, "mine", 0),
        (7, "mine", 1),
    ]


def test_a_set_changes_only_what_it_names():
    sampling = SamplingConfig(temperature=1.0, max_new_tokens=9)
    one = EvalSetConfig(path="a/gsm8k_test.jsonl", temperature=0.0)
    assert one.label == "gsm8k_test" and EvalSetConfig(path="builtin:calculator").label == (
        "calculator"
    )
    assert set_sampling(sampling, one) == sampling.model_copy(update={"temperature": 0.0})


def config(**sections):
    base = {"run": {"max_steps": 1}, "model": {"path": "m"}, "data": {"datasets": [{"path": "d"}]}}
    return validate_config({**base, **sections}, "test")


def test_impossible_sets_are_refused():
    env = {"kind": "calculator", "max_turns": 3}
    config(eval={"sets": [{"path": "a.jsonl"}]}, env=env)
    config(eval={"sets": [{"path": "a.jsonl"}]}, rewards=[{"function": "math"}])
    with pytest.raises(UserError, match=r"nothing judges the answers; add a \[\[rewards\]\]"):
        config(eval={"sets": [{"path": "a.jsonl"}]})
    with pytest.raises(UserError, match="temperature is 0"):
        config(eval={"sets": [{"path": "a.jsonl", "k": 2}]}, env=env)
    with pytest.raises(UserError, match="eval.sets.1.name"):
        config(eval={"sets": [{"path": "a.jsonl"}, {"path": "b/a.jsonl"}]}, env=env)
    with pytest.raises(UserError, match=r"env.max_turns has no effect.*eval.sets"):
        config(env={"max_turns": 3})
    own = {"sets": [{"path": "a.jsonl", "env": env}]}
    assert config(eval=own).eval.sets[0].env.max_turns == 3
    with pytest.raises(UserError, match=r"env.kind has no effect"):
        config(eval=own, env=env)
    with pytest.raises(UserError, match="eval.sets.0.env: env.raw has no effect while env.kind"):
        config(eval={"sets": [{"path": "a.jsonl", "env": {**env, "raw": True}}]})
