"""Rounds of several policies: groups, advantages, numbers and weights of each are its own."""

import asyncio

import jax.numpy as jnp
import numpy as np
import pytest
from fake_vllm import FakeVllm
from known_policy import GROUP, KnownPolicy, draw, make, make_rounds, wait_until
from test_generation_publish import open_servers
from test_generation_vllm import ask

from jaxtrain.config import validate_config
from jaxtrain.config.policies import list_trained
from jaxtrain.environments.guarded import GuardedEnv
from jaxtrain.errors import UserError
from jaxtrain.generation.episode_engine import combine_engines, with_policies
from jaxtrain.generation.episodes import Episode
from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.generation.local.publishers import AdaptersPublisher
from jaxtrain.generation.vllm.engine import VllmEngine
from jaxtrain.generation.vllm.launch import build_command
from jaxtrain.generation.weight_sync.publish_lora import LoraPublisher

BOTH = {"a": [], "b": []}


class Game:
    """Policy a draws once, policy b twice; rewards by functions of (row, place)."""

    def __init__(
        self, a=lambda row, position: position, b=lambda row, position: -position, name="b"
    ):
        self.a, self.b, self.name = a, b, name

    async def run(self, row, engine, sampling, index):
        second, position = engine.others["b"], index % GROUP
        turns = [(engine, "", self.a), (second, self.name, self.b), (second, self.name, self.b)]
        return [await self.play(row, position, index, *turn) for turn in turns]

    async def play(self, row, position, index, engine, policy, earn):
        answer = await engine.generate([row["id"] % 5], None, (), index)
        return Episode(
            tokens=[row["id"] % 5, *answer.tokens],
            sampled=[False, True],
            logprobs=[0.0, -0.5],
            versions=[-1, *answer.versions],
            finish_reason="stop",
            rewards={f"r_{policy or 'a'}": float(earn(row, position))},
            policy=policy,
        )


class Given:
    """The environment's rewards; a function `f` on top, of whom it judges."""

    def __init__(self, names=()):
        self.names = names

    def only(self, names):
        return Given(names)

    async def score(self, episodes, row):
        return [{**episode.all_rewards, **dict.fromkeys(self.names, 1.0)} for episode in episodes]


def open_source(game=None, policies=BOTH, engines=None, per_round=2, source=None, **options):
    engines = engines or {"a": KnownPolicy(), "b": KnownPolicy()}
    env = GuardedEnv(game or Game(), "env")
    rules = {"policies": policies}
    producer = make(combine_engines(engines), env, Given(), rules=rules, **options)
    return make_rounds(producer, per_round, **(source or {}))


def test_a_round_comes_out_policy_by_policy():
    source = open_source()
    try:
        (first,) = draw(source)
        assert (source.policy, source.part, source.last_part) == ("a", 0, False)
        assert [len(group.episodes) for group in source.groups] == [GROUP, GROUP]
        (second,) = draw(source)
        assert (source.policy, source.part, source.last_part) == ("b", 1, True)
        # Both of a game's episodes are compared with those of the other games of its prompt.
        assert [len(group.episodes) for group in source.groups] == [2 * GROUP, 2 * GROUP]
        advantages = source.groups[0].advantages[:, 0]
        places = -np.repeat(np.arange(GROUP), 2).astype(float)
        expected = (places - places.mean()) / (places.std(ddof=1) + 1e-4)
        np.testing.assert_allclose(np.sort(advantages), np.sort(expected), atol=1e-9)
        assert (first.weights["pg"] != 0).sum() == 2 * GROUP
        assert (second.weights["pg"] != 0).sum() == 4 * GROUP
        actual = source.metrics
        assert actual["a/reward"] == 1.5 and actual["b/reward"] == -1.5
        assert actual["a/groups"] == actual["b/groups"] == 2 and "b/rewards/r_a/mean" not in actual
        assert {sample["policy"] for sample in source.samples} <= {"a", "b"}
        draw(source)
        assert (source.policy, source.part) == ("a", 0)
        assert source.rounds_begun == 2
    finally:
        source.close()


class Duel(Game):
    """Game of one policy as two agents that earn differently: what an attacker wins is 10 less what
    the defender does, who plays twice."""

    async def run(self, row, engine, sampling, index):
        position = index % GROUP
        turns = [("defender", self.a), ("attacker", self.b), ("defender", self.a)]
        games = [await self.play(row, position, index, engine, "", earn) for _, earn in turns]
        for game, (agent, _) in zip(games, turns, strict=True):
            game.agent = agent
        return games


def test_agents_of_one_policy_are_compared_with_their_like():
    source = open_source(Duel(b=lambda row, position: 10 - position), {}, {"": KnownPolicy()})
    try:
        (batch,) = draw(source)
        group = source.groups[0]
        assert [entry.agent for entry in group.episodes] == ["defender"] * 2 * GROUP + [
            "attacker"
        ] * GROUP
        places = np.arange(GROUP).astype(float)
        template = [np.repeat(places, 2), -places]
        expected = [(part - part.mean()) / (part.std(ddof=1) + 1e-4) for part in template]
        np.testing.assert_allclose(group.advantages[:, 0], np.concatenate(expected), atol=1e-9)
        assert (batch.weights["pg"] != 0).sum() == 2 * 3 * GROUP and source.policy == ""
        actual = source.metrics
        assert actual["defender/reward"] == 1.5 and actual["attacker/reward"] == 8.5
        assert actual["reward_std"] == np.mean([part.std(ddof=1) for part in template])
        assert {entry["agent"] for entry in source.samples} <= {"defender", "attacker"}
    finally:
        source.close()
    flat = Duel(
        a=lambda row, position: 0, b=lambda row, position: 10 if row["id"] < 2 else position
    )
    source = open_source(flat, {}, {"": KnownPolicy()})
    try:
        assert draw(source) == [] and source.metrics["dropped/zero_advantage"] == 2
        draw(source)
        assert [group.draw for group in source.groups] == [2, 3]
    finally:
        source.close()


def test_groups_without_a_difference_are_left_out_for_that_policy_alone():
    flat = Game(
        a=lambda row, position: 1.0 if row["id"] < 3 else position, b=lambda row, position: position
    )
    source = open_source(flat)
    try:
        draw(source)
        assert source.policy == "b" and source.last_part, "a has nothing to learn from"
        assert source.metrics["a/frac_reward_zero_std"] == 1 and source.metrics["groups"] == 2
        draw(source)
        assert source.policy == "a" and [group.draw for group in source.groups] == [3]
        draw(source)
        assert [group.draw for group in source.groups] == [2, 3]
        assert "dropped/zero_advantage" not in source.metrics
    finally:
        source.close()
    source = open_source(Game(a=lambda row, position: 0, b=lambda row, position: 0))
    try:
        assert draw(source) == [] and source.last_part
        assert source.metrics["dropped/zero_advantage"] == 2
    finally:
        source.close()


def test_the_lag_of_each_policy_is_bounded():
    """Stale tokens of one policy make the group stale, regardless of the other's."""
    new, old = KnownPolicy(), KnownPolicy()
    source = open_source(
        engines={"a": new, "b": old}, source={"max_lag": 1}, ahead=4, ordered=False
    )
    try:
        draw(source), draw(source)
        wait_until(lambda: len(old.answered) == 6 * 2 * GROUP)
        new.version = source.version = 1
        draw(source), draw(source)
        assert source.metrics["b/lag/max"] == 1
        wait_until(lambda: len(old.answered) == 8 * 2 * GROUP)
        new.version = old.version = source.version = 2
        draw(source), draw(source)
        assert source.metrics["dropped/stale"] > 0
        assert source.metrics["a/lag/max"] <= 1 and source.metrics["b/lag/max"] <= 1
    finally:
        source.close()


def test_reward_functions_judge_the_policies_that_they_are_for():
    source = open_source(policies={"a": ["f"], "b": []})
    try:
        draw(source), draw(source)
        assert source.metrics["rewards/f/mean"] == 1 and "b/rewards/f/mean" not in source.metrics
    finally:
        source.close()


def test_an_episode_of_a_policy_that_is_not_trained_is_named():
    source = open_source(Game(name="c"))
    try:
        with pytest.raises(UserError, match="policy 'c'; section policies trains: a, b"):
            draw(source)
    finally:
        source.close()


def test_a_server_has_a_version_once_it_has_the_adapters_of_all(tmp_path):
    fakes = [FakeVllm(), FakeVllm()]

    def write(params, folder):
        (folder / "adapter_config.json").write_text(f'{{"r": {params}}}')

    with open_servers(fakes, adapters=True, sync="lora") as (_, servers, _):
        publisher = LoraPublisher(servers, tmp_path, "/runs/a", write, int, ("a", "b"))
        engines = {
            name: VllmEngine(servers, adapters=True, first_pause=0.01, policy=name)
            for name in ("a", "b")
        }
        for version in range(3):
            actual = publisher.publish(version, {"a": 4, "b": 8})
            assert actual["sync/bytes"] == 12
            for name, engine in engines.items():
                assert {v for entry in ask(engine, 3) for v in entry.versions} == {version}
                requests = {fake.asked[-1]["model"] for fake in fakes if fake.asked}
                expected = f"jaxtrain-{servers.session}-{name}-{version}"
                assert expected in requests
            retained = sorted(path.name for path in tmp_path.iterdir())
            assert len(retained) == 2 * min(version + 1, 2) and expected in retained
            assert all(sorted(fake.adapters) == retained for fake in fakes)
        # One policy's adapter is gone: the server is brought both again.
        for fake in fakes:
            fake.adapters.pop(servers.label(2, "b"))
        assert ask(engines["b"])[0].versions == [2] * 4
        assert ask(engines["a"])[0].versions == [2] * 4
        publisher.close()
    assert not list(tmp_path.iterdir())


def test_the_local_engines_share_the_base():
    """Only adapters are copied for the second policy."""

    class Sampler:
        def __init__(self):
            self.used = []

        def on_mesh(self):
            from contextlib import nullcontext

            return nullcontext()

        def use(self, model, version):
            self.used.append((model, version))

    copied = []

    class Copier:
        def __call__(self, params):
            copied.append(sorted(params))
            return {path: value + 0 for path, value in params.items()}

        def build(self, copies, rebuild):
            return rebuild(copies)

    base, first, second = (jnp.full(2, float(i)) for i in range(3))
    engines = {name: LocalEngine(Sampler()) for name in ("a", "b")}
    publisher = AdaptersPublisher(("a", "b"), engines, Copier(), rests=True)
    params = {"a": {"w": base, "l": first}, "b": {"w": base, "l": second}}
    publisher.publish(3, params, dict)
    (a, version), (b, _) = (engines[name].sampler.used[0] for name in ("a", "b"))
    assert copied == [["l", "w"], ["l"]] and version == 3
    assert a["w"] is b["w"] and a["w"] is not base
    assert float(a["l"][0]) == 1 and float(b["l"][0]) == 2
    # Processes that get no copies, and have no engine, take part in the same ones.
    elsewhere = AdaptersPublisher(
        ("a", "b"), {}, lambda params: copied.append(sorted(params)) or {}, rests=True
    )
    assert elsewhere.publish(3, params, dict) == {} and copied[2:] == copied[:2]


def test_engines_of_several_policies_are_closed_once():
    engines = {"a": KnownPolicy(), "b": KnownPolicy()}
    company = with_policies(combine_engines(engines), {})
    assert list(company.others) == ["a", "b"]
    asyncio.run(company.close())
    assert engines["a"].closed and engines["b"].closed


def test_what_does_not_go_together_is_named():
    base = {
        "model": {"path": "m"},
        "data": {"datasets": [{"path": "d.jsonl"}], "sequence_len": 512},
        "run": {"max_steps": 1},
        "task": {"kind": "rl"},
        "adapter": {"kind": "lora"},
        "sampling": {"temperature": 1.0, "max_new_tokens": 64},
        "env": {"kind": "calculator"},
        "policies": {"b": {"trained": True}, "a": {"trained": True}},
    }
    assert list_trained(validate_config(base, "c")) == ("b", "a")
    launched = {"engine": "vllm", "vllm": {"launch": "local", "gpus": 0, "sync": "lora"}}
    command = build_command(validate_config({**base, "rollout": launched}, "c"), 8000)
    assert command[command.index("--max-loras") + 1] == "4", "two versions of two policies"
    vllm = {"engine": "vllm", "vllm": {"servers": ["http://h:1"]}}
    for section, messages in (
        ({"adapter": {"kind": "none"}}, "every policy is an adapter"),
        ({"adapter": {"kind": "lora", "train_head": True}}, "which policies share"),
        ({"rollout": vllm}, 'set rollout.vllm.sync to "lora"'),
        ({"rollout": {"replay_size": 4}}, "rollout.replay_size goes with one trained policy"),
        ({"rollout": {"streaming": True}, "task": {"kind": "rl", "num_minibatches": 2}}, "streami"),
        (
            {"rollout": {**vllm, "vllm": {**vllm["vllm"], "eval_servers": 1}}},
            "rollout.vllm.eval_servers goes with one trained policy",
        ),
        ({"rollout": {"draft": "d"}}, "rollout.draft goes with one trained policy"),
        ({"rollout": {"curator": "greso"}}, "rollout.curator goes by the rewards of one policy"),
        ({"rollout": {"service": "ray"}}, 'set rollout.service to "process"'),
        ({"task": {"kind": "rl", "reference": "frozen"}}, "policies share the base as reference"),
        ({"policies": {"a": {"trained": True, "model": "x"}}}, "policies.a.model is for a frozen"),
        (
            {"policies": {"a": {"path": "x", "servers": ["http://h:1"]}}},
            "is for a policy behind servers",
        ),
        ({"rewards": [{"function": "math", "policy": "x"}]}, "rewards.0.policy 'x' is no trained"),
        (
            {"env": {"kind": "verifiers", "verifiers": {"taskset": "t", "policies": {"one": "x"}}}},
            "env.verifiers.policies.one: 'x' is no trained policy .* which has b, a",
        ),
    ):
        with pytest.raises(UserError, match=messages):
            validate_config({**base, **section}, "c")
