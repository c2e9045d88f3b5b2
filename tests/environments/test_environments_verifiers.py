"""Tasksets of the verifiers package: what a run does with their verdicts; and (slow, where the
package is installed) the package itself, with a taskset of sums."""

import asyncio
import importlib.util
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from pydantic import ValidationError
from toy_run import MODEL

from jaxtrain.config import EnvConfig, SamplingConfig
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.environments.factory import open_env
from jaxtrain.environments.guarded import GuardedEnv
from jaxtrain.environments.scripted import ScriptedEngine
from jaxtrain.environments.verifiers import check_verdict
from jaxtrain.environments.verifiers_thread import import_part
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import EpisodeFailed
from jaxtrain.main import main

INSTALLED = importlib.util.find_spec("verifiers") is not None
SUMS = str(Path(__file__).parent / "verifiers_sums.py")
SAMPLING = SamplingConfig(max_new_tokens=50)


def trace(name, rewards, metrics=None, trainable=True, errors=()):
    rewards = {name: None if v is None else SimpleNamespace(value=v) for name, v in rewards.items()}
    agent = SimpleNamespace(name=name, trainable=trainable)
    actual = {"rewards": rewards, "metrics": metrics or {}, "agent": agent, "errors": list(errors)}
    return SimpleNamespace(id=f"{name}-{id(agent)}", **actual)


class FakeStage:
    """Plays the package's part: each trace asks once, with its id as the session's."""

    def __init__(self, policy, traces, roles, ok=True):
        self.policy, self.traces, self.roles = policy, traces, roles
        self.played = SimpleNamespace(ok=ok, traces=traces, errors=[])

    def open(self):
        self.policy.open()

    async def play(self, number, minted, is_full):
        headers = {"Authorization": f"Bearer {self.policy.token}"}
        async with aiohttp.ClientSession(headers=headers) as client:
            for entry in self.traces:
                await asyncio.to_thread(
                    minted, entry
                )  # as the package does: in a thread of its own
                if entry.metrics.get("silent"):
                    continue
                body = {"messages": [{"role": "user", "content": f"You are {entry.agent.name}."}]}
                url, session = (
                    f"{self.policy.base_url}/chat/completions",
                    {"X-Session-ID": entry.id},
                )
                async with client.post(url, json=body, headers=session) as answer:
                    assert answer.status == 200 or entry.errors, await answer.text()
        return self.played

    def close(self):
        pass


def play_fake(
    traces, texts, roles=("solver", "verifier", "judge"), peers=None, row=None, **section
):
    """(the episodes of a game, what it drew of) of a scripted package."""
    world, tokenizer = open_sums(**section), load_tokenizer("builtin")
    if row:
        world.policy.template.tokenizer.chat_template = (
            "{{ mood }}|" + world.policy.template.tokenizer.chat_template
        )
    world.stage = FakeStage(world.policy, traces, list(roles))
    engine = ScriptedEngine(tokenizer, texts, peers)
    try:
        row = {"task": 0, **(row or {})}
        game = asyncio.run(GuardedEnv(world, "env").run(row, engine, SAMPLING, 0))
        assert not world.policy._records, "games are forgotten when they have ended"
        return [game, *game.others]
    finally:
        world.close()


def test_each_agent_has_its_own_rewards_and_one_that_is_not_trained_only_draws():
    traces = [
        trace("solver", {"won": 1.0, "fair": None}, {"moves": 3.0, "odd": None}),
        trace("judge", {"judged": 9.0}, {"moves": 50.0}, trainable=False),
        trace("verifier", {"won": 0.0}, {"moves": 5.0}),
        trace("solver", {}),
        trace("solver", {"won": 1.0}, {"silent": 1.0}),
    ]
    games = play_fake(traces, ["five", "fair", "right", "six"])
    assert [game.agent for game in games] == ["solver", "verifier", "solver"]
    nothing = {"won": None, "fair": None}
    assert [game.rewards for game in games] == [{"won": 1.0, "fair": None}, {"won": 0.0}, nothing]
    assert [game.metrics.get("moves") for game in games] == [3.0, 5.0, None]
    decode = load_tokenizer("builtin").decode
    assert [decode(game.drawn_tokens) for game in games] == [
        "five<|im_end|>",
        "right<|im_end|>",
        "six<|im_end|>",
    ]
    (alone,) = play_fake([trace("agent", {"won": 1.0})], ["five"], roles=["agent"])
    assert alone.agent == "" and alone.rewards == {"won": 1.0}


def test_variables_of_the_chat_template_come_from_rows():
    traces, row = [trace("agent", {"won": 1.0})], {"chat_template_kwargs": {"mood": "bright"}}
    (alone,) = play_fake(traces, ["five"], roles=["agent"], row=row)
    assert load_tokenizer("builtin").decode(alone.tokens).startswith("bright|")


def test_an_agent_may_be_another_policy():
    tokenizer = load_tokenizer("builtin")
    traces = [trace("solver", {"won": 1.0}), trace("verifier", {"won": 0.0})]
    critic = ScriptedEngine(tokenizer, ["by the critic"])
    games = play_fake(traces, ["mine"], peers={"critic": critic}, policies={"verifier": "critic"})
    assert [game.policy for game in games] == ["", "critic"]
    assert tokenizer.decode(games[1].drawn_tokens) == "by the critic<|im_end|>"
    traces = [trace("verifier", {}, errors=["the package's own"])]
    with pytest.raises(EpisodeFailed) as failed:
        play_fake(traces, [], peers={"critic": critic}, policies={"verifier": "none"})
    assert "names 'none'; trained in section policies: critic" in failed.value.cause


def test_what_the_engine_raises_for_one_agent_ends_the_game():
    with pytest.raises(EpisodeFailed, match="the script has ended"):
        play_fake([trace("solver", {}), trace("verifier", {}, errors=["x"])], ["five"])


def test_what_is_no_result_fails_the_episode():
    error = SimpleNamespace(type="ProviderError", message="gone", traceback="x" * 9000)
    played = SimpleNamespace(ok=False, traces=[trace("a", {}, errors=[error])], errors=[])
    with pytest.raises(EpisodeFailed, match="verifiers: ProviderError") as failed:
        check_verdict(played)
    assert failed.value.cause == "env.verifiers: gone" and len(failed.value.trace) == 1500
    with pytest.raises(EpisodeFailed, match="verifiers: no result"):
        check_verdict(SimpleNamespace(ok=False, traces=[], errors=[]))
    with pytest.raises(EpisodeFailed, match="trainable"):
        play_fake([trace("judge", {}, trainable=False)], ["fair"])


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ({"kind": "verifiers"}, "needs env.verifiers.taskset"),
        ({"verifiers": {"taskset": "gsm8k"}}, "env.verifiers has no effect"),
        ({"kind": "verifiers", "verifiers": {"taskset": "a"}, "system": "x"}, "env.system has no"),
    ],
)
def test_sections_that_cannot_work(section, match):
    with pytest.raises(ValidationError, match=match):
        EnvConfig(**section)


def open_sums(row_tokens=2048, **section):
    config = EnvConfig(kind="verifiers", verifiers={"taskset": SUMS, **section})
    return open_env(config, load_tokenizer("builtin"), row_tokens)


@pytest.mark.skipif(INSTALLED, reason="the package is there")
def test_without_the_package_its_name_is_told():
    world = open_sums()
    with pytest.raises(UserError, match=r'env.verifiers needs .* pip install "jaxtrain\[verif'):
        asyncio.run(world.run({"task": 0}, None, SAMPLING, 0))
    world.close()


def test_a_row_names_a_task_and_a_file_its_module(tmp_path):
    for row in ({}, {"task": "3"}, {"task": -1}, {"task": True}):
        with pytest.raises(UserError, match="number of a task"):
            asyncio.run(open_sums().run(row, None, SAMPLING, 0))
    path = tmp_path / "json.py"
    path.write_text("")
    with pytest.raises(UserError, match="another module called json"):
        import_part(str(path), "env.verifiers.taskset")
    assert import_part("owner/name", "") == "owner/name"


real = pytest.mark.skipif(not INSTALLED, reason="verifiers is not installed (pip: the extra)")


def play(texts, tasks, **section):
    """The episode of each task, or why it failed; each drawn from a script of its own."""
    world = GuardedEnv(open_sums(**section), "env")
    tokenizer = load_tokenizer("builtin")

    async def one(index, number):
        try:
            return await world.run(
                {"task": number}, ScriptedEngine(tokenizer, texts), SAMPLING, index
            )
        except EpisodeFailed as failed:
            return failed

    async def go():
        return await asyncio.gather(*(one(i, number) for i, number in enumerate(tasks)))

    try:
        return asyncio.run(go())
    finally:
        world.close()


@pytest.mark.slow
@real
def test_the_package_plays_and_the_endpoint_has_the_tokens():
    failed, none, *games = play(["4", "5"], [1, 99, 3, 3, 4, *range(4, 8)] * 2, args={"count": 8})[
        :9
    ]
    assert str(failed) == "verifiers: TaskError" and "no answer to this" in failed.cause
    assert "has only 8" in none.cause and not none.again
    for game in games[:2]:
        assert game.rewards == {"right": 2.0, "even": 0.0}
        assert game.metrics == {"turns": 2.0, "branches": 1.0, "tool_calls": 0.0, "letters": 1.0}
    assert games[2].rewards["right"] == 0.0
    tokenizer = load_tokenizer("builtin")
    (sequence,) = games[0].sequences
    assert tokenizer.decode(sequence.tokens) == (
        "<|im_start|>user\nWhat is 3 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>"
    )
    assert tokenizer.decode(games[0].drawn_tokens) == "4<|im_end|>5<|im_end|>"


@pytest.mark.slow
@real
def test_a_conversation_that_outgrows_its_row_is_judged_as_far_as_it_came():
    full, _ = play(["5", "5"], [3, 3])
    (cut,) = play(["5", "5"], [3], row_tokens=len(full.tokens) - 8)
    assert cut.rewards["right"] == 2.0 and cut.metrics["turns"] == 1.0
    assert (full.finish_reason, cut.finish_reason) == ("stop", "length")
    (never,) = play(["5"], [3], row_tokens=4)
    assert isinstance(never, EpisodeFailed)


@pytest.mark.slow
@real
def test_two_agents_train_in_one_episode_and_a_third_only_draws():
    one_turn = {"harness": {"id": "verifiers_sums", "turns": 1}}
    agents = dict.fromkeys(("solver", "verifier", "judge"), one_turn)
    duel = str(Path(SUMS).with_name("verifiers_duel.py"))
    (game,) = play(["5", "right", "yes"], [3], environment=duel, agents=agents)
    tokenizer = load_tokenizer("builtin")
    games = [game, *game.others]
    assert [entry.agent for entry in games] == ["solver", "verifier"]
    shown = [tokenizer.decode(entry.tokens) for entry in games]
    assert [text.split("\n")[1:] for text in shown] == [
        ["What is 3 + 2?<|im_end|>", "<|im_start|>assistant", "5<|im_end|>"],
        ["Is 5 right?<|im_end|>", "<|im_start|>assistant", "right<|im_end|>"],
    ]
    assert [tokenizer.decode(entry.drawn_tokens) for entry in games] == [
        "5<|im_end|>",
        "right<|im_end|>",
    ]
    assert games[0].rewards == {"right": 2.0, "even": 0.0, "won": 1.0}
    assert games[1].rewards == {"right": 0.0, "even": 0.6, "won": 0.0}
    assert [entry.metrics["turns"] for entry in games] == [1.0, 1.0]


@pytest.mark.slow
@real
@pytest.mark.skipif(shutil.which("uv") is None, reason="the package's harnesses need uv")
def test_the_packages_own_program_plays():
    (game,) = play(["5"], [3], harness="null")
    assert game.rewards == {"right": 2.0, "even": 0.0} and game.metrics["turns"] == 1.0


def train(tmp_path, keys, rounds):
    """Numbers of each round of a toy run in section env.verifiers."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"task": {n}}}\n' for n in range(2, 8)))
    (tmp_path / "run.toml").write_text(f"""{MODEL}
[[data.datasets]]
path = "{tmp_path}/rows.jsonl"

[data]
sequence_len = 64
micro_batch_size = 8

[task]
kind = "rl"

[rollout]
prompts_per_step = 4
group_size = 8

[env]
kind = "verifiers"

[env.verifiers]
taskset = "{SUMS}"
args = {{ question = "{{a}}{{b}}" }}
{keys}

[sampling]
temperature = 1.0
max_new_tokens = 8

[optim]
learning_rate = 0.02
lr_scheduler = "constant"

[run]
output_dir = "{tmp_path}/run"
max_steps = {rounds}
export = false

[log]
plot = false
""")
    assert main(["--config", str(tmp_path / "run.toml")]) == 0
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


def rise(lines, name):
    """Mean of the last three rounds less that of the first three."""
    values = [line[name] for line in lines]
    print(name, [round(value, 2) for value in values])
    return (sum(values[-3:]) - sum(values[:3])) / 3


ONE_TURN = '{ harness = { id = "verifiers_sums", turns = 1 } }'


@pytest.mark.slow
@real
def test_a_policy_learns_from_the_packages_rewards(tmp_path):
    """The share of letters with an even code: below a half for random weights."""
    lines = train(tmp_path, f"agents = {{ agent = {ONE_TURN} }}", 20)
    assert len(lines) == 20 and rise(lines, "rewards/even/mean") > 0.2


@pytest.mark.slow
@real
def test_one_policy_learns_to_be_two_agents_that_earn_the_opposite(tmp_path):
    """Their rewards together say nothing of either."""
    world = Path(SUMS).with_name("verifiers_opposites.py")
    agents = f"agents = {{ even = {ONE_TURN}, odd = {ONE_TURN} }}"
    lines = train(tmp_path, f'environment = "{world}"\n{agents}', 30)
    assert rise(lines, "even/rewards/even/mean") > 0.15
    assert rise(lines, "odd/rewards/odd/mean") > 0.3
