"""NeMo Gym as a world, against a scripted Gym: tokens, rewards, failures, servers, config."""

import asyncio
import json
from pathlib import Path

import pytest
from fake_gym import FakeGym

from jaxtrain.config import EnvConfig, SamplingConfig, validate_config
from jaxtrain.config.gym import GymConfig
from jaxtrain.environments import gym_servers
from jaxtrain.environments.guarded import GuardedEnv, open_guarded
from jaxtrain.environments.gym_config import (
    find_free_port,
    link_environments,
    list_own,
    make_config,
)
from jaxtrain.environments.gym_roster import reach
from jaxtrain.environments.policy_server import PolicyServer
from jaxtrain.environments.scripted import ScriptedEngine
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.dataset_envs import DatasetEnvs
from jaxtrain.generation.engine import EpisodeFailed
from jaxtrain.runs.folder import find_changes, list_names

SAMPLING = SamplingConfig(max_new_tokens=64, temperature=0.7)
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2 + 2"}}</tool_call>'
TOOL = {
    "type": "function",
    "name": "calculator",
    "strict": True,
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
HEAD = {"agent": "calc_agent", "api_key": "of the test"}
OTHER_TOKENS = {"response": {"output": [{"generation_token_ids": [1, 2]}]}}
ROW = {
    "responses_create_params": {
        "input": [{"role": "user", "content": "What is 2 + 2?"}],
        "tools": [TOOL],
        "temperature": 0.1,
        "metadata": {"own": "kept"},
    },
    "answer": "4",
    "difficulty": 3,
}


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(gym_servers, "POLL_SECONDS", 0.01)


def open_env(fake, tokenizer, row_tokens=400, **env):
    """The world of a fake Gym's agent, whose policy it asks."""
    gym = {**HEAD, "head": fake.url, "port": find_free_port()}
    opened = open_guarded(EnvConfig(kind="nemo_gym", gym=gym, **env), tokenizer, row_tokens)
    policy = opened.env.servers.policy
    fake.policy_url, fake.token = policy.base_url, policy.token
    return opened


def play(tokenizer, texts, fake=None, row=ROW, times=1, row_tokens=400, sampling=SAMPLING, **gym):
    """(episodes or what they raised, the fake Gym) of one row, played as in a run."""

    async def work():
        async with fake or FakeGym() as actual:
            section = {**HEAD, "head": actual.url, "port": find_free_port(), **gym}
            if callable(servers := section.get("servers")):
                section |= {"servers": servers(actual), "head": None}
            env = open_guarded(EnvConfig(kind="nemo_gym", gym=section), tokenizer, row_tokens)
            try:
                policy = env.env.servers.policy
                actual.policy_url, actual.token = policy.base_url, policy.token
                engines = [ScriptedEngine(tokenizer, texts) for _ in range(times)]
                episodes = await asyncio.gather(
                    *(env.run(row, engine, sampling, i) for i, engine in enumerate(engines)),
                    return_exceptions=True,
                )
                assert not policy._records, "episodes are forgotten when they have ended"
                return episodes, actual
            finally:
                env.close()

    return asyncio.run(work())


def test_an_agents_turns_are_one_sequence_with_gyms_verdict(tokenizer):
    (episode,), fake = play(tokenizer, [CALL, "It is 4."], FakeGym({"reward": 0.5, "called": True}))
    assert episode.rewards == {"gym": 0.5} and not episode.earlier
    assert episode.metrics == {"turns": 2, "branches": 1, "tool_calls": 1, "called": 1}
    end = tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"]
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"] + end  # noqa: E731
    assert episode.drawn_tokens == [*encode(CALL), *encode("It is 4.")]
    assert (
        "<tool_response>4" in tokenizer.decode(episode.tokens) and episode.finish_reason == "stop"
    )
    ((path, body),) = fake.runs
    params = body["responses_create_params"]
    assert path == "/0/env/run", "agents are reached through their environment server"
    assert params["temperature"] == 0.7 and params["max_output_tokens"] == 64
    assert params["metadata"]["own"] == "kept" and params["tools"] == [TOOL]
    assert body["difficulty"] == 3 and "temperature" in ROW["responses_create_params"]


def test_many_at_once_each_with_its_own_turns(tokenizer):
    """The agent may also come from the row; an answer cut short counts as such."""
    row = ROW | {"agent_ref": {"name": "calc_agent"}}
    row["responses_create_params"] = row["responses_create_params"] | {"max_output_tokens": 32}
    fake = FakeGym()
    episodes, _ = play(tokenizer, [CALL, "It is 4."], fake, row, 8, agent=None, concurrency=3)
    assert fake.most == 3
    assert [episode.metrics["turns"] for episode in episodes] == [2] * 8 and len(fake.runs) == 8
    assert fake.runs[0][1]["responses_create_params"]["max_output_tokens"] == 32


def test_one_answer_and_its_verdict(tokenizer):
    """No agent, no endpoint; each episode in a session of its own."""
    texts = [f"<think>hm</think>It is 4. {CALL}"]
    episodes, fake = play(tokenizer, texts, times=3, mode="verify", port=0)
    assert [episode.rewards for episode in episodes] == [{"gym": 1.0}] * 3
    assert sorted(fake.sessions) == ["1", "2", "3"] and fake.seeded[0]["answer"] == "4"
    episodes, _ = play(tokenizer, ["It is 5."], mode="verify", agent="calc", port=0)
    assert episodes[0].rewards == {"gym": 0.0} and episodes[0].num_sampled > 3


def test_rewards_by_name_and_factor(tokenizer):
    verdict = {"reward": 0.25, "reward_components": {"form": 1.0, "fact": 0.5}, "other": 2}
    rewards = {"reward": 2.0, "form": 0.1}
    (episode,), _ = play(tokenizer, ["4"], FakeGym(verdict), rewards=rewards)
    assert episode.rewards == {"gym": 0.5, "form": 0.1}
    assert {"form": 1.0, "fact": 0.5, "other": 2.0}.items() <= episode.metrics.items()
    (failed,), _ = play(tokenizer, ["4"], FakeGym(verdict), rewards={"none": 1.0})
    assert isinstance(failed, EpisodeFailed) and "none" in failed.cause


@pytest.mark.parametrize(
    ("instead", "reason", "again", "mistake"),
    [
        ({"mask_sample": True}, "gym: masked", True, False),
        ({"failure_kind": "sandbox_died"}, "gym: sandbox_died", True, False),
        ({"reward": None}, "gym: no reward", True, False),
        ({"reward": float("nan")}, "reward gym is NaN", True, False),
        (500, "gym: HTTP 500", True, False),
        (422, "gym: HTTP 422", False, True),
        (OTHER_TOKENS, "gym: tokens differ", True, False),
    ],
)
def test_what_fails_an_episode(tokenizer, instead, reason, again, mistake):
    (failed,), _ = play(tokenizer, ["4"], FakeGym(behave=lambda body: instead))
    assert isinstance(failed, EpisodeFailed), failed
    assert (str(failed), failed.again, failed.mistake) == (reason, again, mistake)
    assert failed.cause.startswith(("NeMo Gym: ", "env.kind 'nemo_gym'"))


def test_a_failure_says_what_the_endpoint_refused(tokenizer):
    """Gym itself only reports that some inner server answered with an error."""
    params = {**ROW["responses_create_params"], "tool_choice": "required"}
    (failed,), _ = play(tokenizer, ["4"], row={**ROW, "responses_create_params": params})
    assert str(failed) == "gym: HTTP 500" and "forced tool_choice" in failed.cause


def test_what_the_engine_raises_is_no_failure_of_gym(tokenizer):
    (failed,), _ = play(tokenizer, [])
    assert str(failed) == "the script has ended"


def test_a_full_row_ends_the_episode_with_what_there_is(tokenizer):
    """Gym makes an empty turn of it; a prompt that fills the row by itself is of no use."""
    (episode,), _ = play(tokenizer, [CALL] * 9, FakeGym(max_steps=9), row_tokens=200)
    assert episode.finish_reason == "length" and len(episode.tokens) < 200 + 32
    assert 1 < episode.metrics["turns"] < 9
    (failed,), _ = play(tokenizer, ["4"], row_tokens=20)
    assert "data.sequence_len" in str(failed) and not failed.again


def test_a_client_that_gives_up_frees_gym_and_the_engine(tokenizer):
    """An episode's time-out cancels the /run, which cancels the model's request."""
    freed = []

    class Slow(ScriptedEngine):
        async def generate(self, *_, **__):
            try:
                await asyncio.sleep(60)
            finally:
                freed.append(True)

    async def work():
        async with FakeGym() as fake:
            env = open_env(fake, tokenizer, timeout=0.3)
            with pytest.raises(EpisodeFailed, match="timed out"):
                await env.run(ROW, Slow(tokenizer, []), SAMPLING, 0)
            return env

    asyncio.run(work()).close()
    assert freed == [True]


@pytest.mark.parametrize(
    ("row", "gym", "text"),
    [
        ({"prompt": "Hi"}, {}, "responses_create_params"),
        (ROW, {"agent": "nobody"}, "calc_agent"),
        (ROW, {"agent": None}, "agent_ref"),
        (ROW, {"head": "http://127.0.0.1:9", "start_seconds": 1e-3}, "env.gym.head"),
        (ROW, {"agent": "calc_agent", "mode": "verify"}, ""),
    ],
)
def test_mistakes_are_named(tokenizer, row, gym, text):
    (actual,), _ = play(tokenizer, ["4"], row=row, **gym)
    if not text:
        assert actual.rewards == {"gym": 1.0}
        return
    assert isinstance(actual, EpisodeFailed) and actual.mistake and text in actual.cause


def inspect(tokenizer, fake=None, rows=(ROW,), wait=True, **gym):
    """Report of a Gym before a run."""

    async def work():
        async with fake or FakeGym() as actual:
            section = {"head": actual.url, "mode": "verify", "agent": "calc_agent", **gym}
            if callable(servers := section.get("servers")):
                section |= {"servers": servers(actual), "head": None}
            env = open_guarded(EnvConfig(kind="nemo_gym", gym=section), tokenizer, 400)
            output = []
            try:
                await asyncio.to_thread(env.inspect, iter(rows), output.append, wait)
                await asyncio.to_thread(env.inspect, iter(rows), output.append, wait)
            finally:
                env.close()
            return [text.replace(actual.url, "URL") for text in output]

    return asyncio.run(work())


def test_a_gym_that_runs_is_inspected_before_the_run(tokenizer):
    actual = ["NeMo Gym at URL: resources servers calc"]
    assert inspect(tokenizer) == actual, "said once for all sets that share it"
    agent = {"mode": "agent", "api_key": "x", "port": find_free_port()}
    assert inspect(tokenizer, **agent) == ["NeMo Gym at URL: agents calc_agent"]
    assert inspect(tokenizer, FakeGym(want="abc"), token="abc") == actual
    row = {**ROW, "agent_ref": {"name": "calc_agent"}}
    assert inspect(tokenizer, rows=[row] * 3, agent=None) == actual
    provided = {"servers": lambda fake: {"mine": fake.place("res")}, "agent": "mine"}
    assert inspect(tokenizer, **provided) == ["NeMo Gym at URL/0/res: resources servers mine"]
    nobody = {"head": "http://127.0.0.1:9", "start_seconds": 1e-3}
    (text, _) = inspect(tokenizer, wait=False, **nobody)
    assert text.startswith("warning: env.gym: NeMo Gym at http://127.0.0.1:9 does not answer now")


@pytest.mark.parametrize(
    ("provided", "text"),
    [
        (
            {"agent": "nobody", "rows": []},
            "env.gym.agent: this Gym has no 'nobody'; it must be .* calc_agent",
        ),
        ({"agent": None}, "a row's agent_ref.name: this Gym has no 'a' or 'b'"),
        ({"servers": lambda fake: {"calc_agent": fake.place("env")}}, "it is an agent"),
        (
            {
                "servers": lambda fake: {"calc_agent": fake.place("res")},
                "mode": "agent",
                "api_key": "x",
                "port": find_free_port(),
            },
            'env.gym.mode "agent" needs an agent, with the route /run; .* it is a resources server',
        ),
        ({"servers": {"calc_agent": "http://127.0.0.1:9"}, "head": None}, "GET /openapi.json"),
        ({"head": "http://127.0.0.1:9", "start_seconds": 1e-3}, "does not answer .*start_seconds"),
        ({"token": "wrong", "start_seconds": 1e-3}, "does not answer .*401"),
    ],
)
def test_what_is_not_there_is_said_before_the_run(tokenizer, provided, text):
    rows = [{**ROW, "agent_ref": {"name": name}} for name in ("b", "calc", "a")]
    fake = FakeGym(want="abc" if "token" in provided else "")
    with pytest.raises(UserError, match=text):
        inspect(tokenizer, fake, **{"rows": rows, **provided})


def test_each_dataset_is_asked_for_in_its_own_gym(tokenizer):
    """Like a dry run, this does not wait for servers."""
    gyms = [
        {"head": f"http://127.0.0.1:{port}", "mode": "verify", "agent": "calc"} for port in (9, 7)
    ]
    envs = [open_guarded(EnvConfig(kind="nemo_gym", gym=entry), tokenizer, 400) for entry in gyms]
    plain, output = open_guarded(EnvConfig(), tokenizer), []
    by_dataset = [(env, None) for env in envs]
    DatasetEnvs(plain, None, by_dataset).inspect([[ROW], []], output.append, wait=False)
    DatasetEnvs(plain, None).inspect([[ROW]], output.append)
    for env, text, gym in zip(envs, output, gyms, strict=True):
        assert text.startswith(f"warning: env.gym: NeMo Gym at {gym['head']} does not answer now")
        env.close()


def test_servers_by_their_own_urls(tokenizer):
    """Without any head server: an agent, or who judges."""
    agent = {"servers": lambda fake: {"mine": fake.place("agent")}, "agent": "mine"}
    (episode,), fake = play(tokenizer, [CALL, "It is 4."], **agent)
    assert episode.rewards == {"gym": 1.0} and fake.runs[0][0] == "/0/agent/run"
    judge = {"servers": lambda fake: {"mine": fake.place("res")}, "mode": "verify", "port": 0}
    (episode,), _ = play(tokenizer, ["It is 4."], agent="mine", **judge)
    assert episode.rewards == {"gym": 1.0}
    assert reach("http://127.0.0.1:7/x/", "http://gpu3:1") == "http://gpu3:7/x"
    assert reach("http://gpu4:7", "http://gpu3:1") == "http://gpu4:7"


def test_a_gym_that_comes_back_elsewhere_is_found_again(tokenizer):
    """Episodes that lost their Gym wait together and are replayed at its new addresses."""
    fake = FakeGym(behave=lambda body: "die" if not fake.life else None, away=3, crowd=3)

    async def work():
        async with fake:
            env = open_env(fake, tokenizer, None, step_timeout=9.0)
            run = lambda: env.run(ROW, ScriptedEngine(tokenizer, ["It is 4."]), SAMPLING, 0)  # noqa: E731
            try:
                lost = await asyncio.gather(*(run() for _ in range(3)), return_exceptions=True)
                assert {str(entry) for entry in lost} == {"gym: connection lost"}
                assert all(entry.again for entry in lost) and not fake.away
                assert DatasetEnvs(env, None).counters() == {"gym/restarts": 1.0}
                episode = await run()
                assert episode.rewards == {"gym": 1.0} and fake.runs[-1][0] == "/1/env/run"
                fake.behave = lambda body: 500
                with pytest.raises(EpisodeFailed, match="HTTP 500"):
                    await run()
                assert env.counters() == {"gym/restarts": 1.0}, "nobody had gone"
                fake.behave, fake.away, gym = lambda body: "die", 99, env.env.servers
                gym.config = gym.config.model_copy(update={"start_seconds": 0.02})
                for _ in range(2):
                    with pytest.raises(RunStopped, match="does not answer .*503"):
                        await run()
            finally:
                env.close()

    asyncio.run(work())


def test_nulls_that_a_parquet_reader_added_are_left_out(tokenizer):
    tool = {**TOOL, "description": None}
    params = {**ROW["responses_create_params"], "tools": [tool], "top_logprobs": None}
    _, fake = play(
        tokenizer, ["4"], row={**ROW, "responses_create_params": params}, drop_nulls=True
    )
    sent = fake.runs[0][1]["responses_create_params"]
    assert sent["tools"] == [TOOL] and "top_logprobs" not in sent


@pytest.mark.parametrize(
    ("gym", "text"),
    [
        ({}, "needs either env.gym.head"),
        ({"start": True}, "env.gym.python"),
        ({"start": True, "python": "py"}, "env.gym.directory with servers"),
        ({"start": True, "python": "py", "configs": ["a"], "token": "x"}, "env.gym.token goes"),
        ({"servers": {"a": "127.0.0.1:3"}, **HEAD, "port": 7}, "env.gym.servers.a must be a URL"),
        ({"servers": {"a": "http://x:1"}}, "env.gym.port"),
        ({"head": "http://x:1", "start": True}, "needs either"),
        ({"head": "http://x:1"}, "env.gym.port"),
        ({"head": "http://x:1", "port": 7}, "env.gym.api_key"),
        ({"head": "http://x:1", **HEAD, "port": 7, "configs": ["a.yaml"]}, "env.gym.configs"),
    ],
)
def test_keys_that_do_not_go_together(gym, text):
    with pytest.raises(ValueError, match=text):
        EnvConfig(kind="nemo_gym", gym=gym)
    with pytest.raises(ValueError, match=r"env\.gym has no effect"):
        EnvConfig(gym={"head": "http://x:1", "port": 7})


def test_the_config_for_a_gym_that_is_started(tmp_path, tokenizer):
    """Own files before the package's, overrides last; each server in the one environment."""
    sources, packages = tmp_path / "own", tmp_path / "lib"
    (sources / "resources_servers" / "calc").mkdir(parents=True)
    (packages / "responses_api_agents" / "simple").mkdir(parents=True)
    (tmp_path / "gym").mkdir()
    (sources / "calc.yaml").write_text("")
    overrides = {"policy_model": {"responses_api_models": {"vllm_model": {"num_workers": 2}}}}
    config = GymConfig(
        start=True,
        python="py",
        configs=["calc.yaml", "other.yaml"],
        directory=str(sources),
        overrides=overrides,
    )
    policy = PolicyServer(tokenizer, max_model_len=9, port=7, token="secret")
    created = make_config(config, policy, 11, tmp_path, packages)
    assert created["config_paths"][:2] == [
        str(sources / "calc.yaml"),
        str(packages / "other.yaml"),
    ]
    credentials = ("http://127.0.0.1:7/v1", "secret")
    assert (created["policy_base_url"], created["policy_api_key"]) == credentials
    block = created["policy_model"]["responses_api_models"]["vllm_model"]
    assert block["num_workers"] == 2 and block["request_prompt_and_generation_token_ids"]
    for _ in range(2):  # a run that goes on finds the links of the last one
        link_environments(tmp_path / "venvs", tmp_path / "gym/bin/python", (packages, sources))
    links = sorted(str(p.relative_to(tmp_path / "venvs")) for p in tmp_path.glob("venvs/*/*/.venv"))
    assert links == ["resources_servers/calc/.venv", "responses_api_agents/simple/.venv"]
    assert json.dumps(created) and list_own(sources) == []
    for position in ("resources_servers/calc", "responses_api_agents/mine"):
        (sources / position / "configs").mkdir(parents=True)
        (sources / position / "configs" / "a.yaml").write_text("")
    all_own = config.model_copy(update={"configs": []})
    created = make_config(all_own, policy, 11, tmp_path, packages)
    paths = [str(Path(path).relative_to(sources)) for path in created["config_paths"][:-1]]
    assert paths == [
        "resources_servers/calc/configs/a.yaml",
        "responses_api_agents/mine/configs/a.yaml",
    ]


def test_a_run_knows_what_a_gym_of_its_own_leaves_in_its_folder():
    """So that run.overwrite deletes it, and another address is no other run."""
    config = {
        "task": {"kind": "rl"},
        "run": {"max_steps": 1},
        "model": {"path": "m"},
        "data": {"datasets": [{"path": "a.jsonl"}]},
        "sampling": {"temperature": 1.0},
        "rewards": [{"function": "length"}],
    }
    gym = {"start": True, "python": "py", "configs": ["a.yaml"], "mode": "verify"}
    entry = validate_config(config | {"env": {"kind": "nemo_gym", "gym": gym}}, "test")
    assert {"gym", "gym.log"} <= set(list_names(entry))
    assert "gym" not in list_names(validate_config(config, "test"))
    second = {"kind": "nemo_gym", "gym": {"head": "http://x:1", "mode": "verify", "port": 7}}
    saved, current_time = entry.saved(), validate_config(config | {"env": second}, "test").saved()
    assert find_changes(saved, current_time, None, 1, ["env"])[1] == [
        "env.gym.configs: ['a.yaml'] -> []"
    ]


FAKE_PROGRAM = """#!{python}
import http.server, json, os, sys
config = json.load(open(sys.argv[-1]))
if config.get("broken"):
    sys.exit("ValueError: no such server")
class Head(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Head.asked += 1
        if self.path == "/die":
            os._exit(3)
        starting = self.path == "/health" and Head.asked < 2
        found = {{"/server_instances": [], "/global_config_dict_yaml": "{{}}"}}.get(self.path, {{}})
        self.send_response(503 if starting else 200)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())
http.server.HTTPServer(("127.0.0.1", config["head_server"]["port"]), Head).serve_forever()
"""


def test_a_gym_of_the_run_is_started_once_and_ended_with_it(tmp_path, tokenizer):
    import sys

    root = tmp_path / "gym"
    (root / "lib/python3.13/site-packages/nemo_gym").mkdir(parents=True)
    (root / "bin").mkdir()
    program = root / "bin" / "gym"
    program.write_text(FAKE_PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    section = {"start": True, "configs": ["a.yaml"], "agent": "x"}
    section["python"] = str(root / "bin/python")

    def open_one(**extra):
        config = EnvConfig(kind="nemo_gym", gym=section | extra)
        return open_guarded(config, tokenizer, 400, "env", None, str(tmp_path / "run"))

    train, held_out = open_one(), open_one(mode="verify")
    servers = train.env.servers
    assert isinstance(train, GuardedEnv) and servers is held_out.env.servers
    servers.ready()
    process = servers._process
    (config,) = (tmp_path / "run/gym").glob("gym_*.yaml")
    assert process.status() is None and config.stat().st_mode & 0o77 == 0
    assert not servers.revive(1), "it is there"
    with pytest.raises(OSError):
        servers.roster.ask(f"{servers.roster.head}/die")
    assert servers.revive(1) and not servers.revive(1) and servers.found == 2
    held_out.close()
    assert process.status() is None, "somebody still needs it"
    train.close()
    assert process.status() is not None and not gym_servers._SHARED
    broken = open_one(overrides={"broken": True})
    try:
        for _ in range(2):
            with pytest.raises(UserError, match="no such server"):
                broken.env.servers.ready()
    finally:
        broken.close()
