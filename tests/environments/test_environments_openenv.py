"""Environments on OpenEnv servers: the protocol against a scripted WebSocket server, and (slow) the
real package's server."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
from aiohttp import web
from pydantic import ValidationError
from toy_run import MODEL

from jaxtrain.config import EnvConfig, SamplingConfig
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.environments.factory import open_env
from jaxtrain.environments.guarded import GuardedEnv
from jaxtrain.environments.openenv import make_socket_url, seed_of, show
from jaxtrain.environments.scripted import ScriptedEngine
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import EpisodeFailed
from jaxtrain.main import main

SAMPLING = SamplingConfig(max_new_tokens=200)
TOOLS = [
    {"name": "echo", "description": "Say it again.", "input_schema": {"type": "object"}},
    {"name": "guess", "description": "Guess.", "input_schema": {"type": "object"}},
]


class Server:
    """A guessing game: as openenv 0.10 answers, as far as the client is concerned."""

    def __init__(self, places=64, heartbeat=None):
        self.places, self.heartbeat = places, heartbeat
        self.open = self.most = self.refused = 0
        self.heard, self.tokens = [], set()

    async def answer(self, request):
        socket = web.WebSocketResponse(heartbeat=self.heartbeat)
        await socket.prepare(request)
        self.tokens.add(request.headers.get("Authorization"))
        if self.open >= self.places:
            self.refused += 1
            await self.log(socket, "error", message="full", code="CAPACITY_REACHED", max_sessions=1)
            await socket.close()
            return socket
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            await self.serve(socket)
        finally:
            self.open -= 1
        return socket

    async def log(self, socket, kind, **data):
        await socket.send_json({"type": kind, "data": data})

    async def serve(self, socket):
        number = 0
        async for message in socket:
            payload = json.loads(message.data)
            self.heard.append(payload)
            data, observe = payload.get("data", {}), self.observe(socket)
            match payload["type"]:
                case "close":
                    break
                case "reset" if data.get("broken"):
                    await self.log(socket, "error", message="no such map", code="EXECUTION_ERROR")
                case "reset":
                    number = data.get("number", data["seed"] % 10)
                    first = {} if data.get("silent") else {"prompt": "Guess from 0 to 9."}
                    await observe({**first, "metadata": {"secret": 1}}, None)
                case "step" if data.get("type") == "list_tools":
                    await observe({"tools": TOOLS}, None)
                case "step" if data.get("type") == "call_tool":
                    await self.call(observe, number, data)
                case "step" if not isinstance(data.get("guess"), int | str):
                    errors = [{"loc": ["guess"], "msg": "Field required"}]
                    await self.log(
                        socket, "error", message="Invalid", code="VALIDATION_ERROR", errors=errors
                    )
                case "step" if str(data["guess"]) == "crash":
                    await self.log(socket, "error", message="boom", code="EXECUTION_ERROR")
                case "step" if str(data["guess"]) == "leave":
                    break
                case "step":
                    right = str(data["guess"]) == str(number)
                    extra = "You win." if right else "Higher or lower."
                    await observe({"prompt": extra, "metadata": {}}, 1.0 if right else -0.25, right)
        await socket.close()

    def observe(self, socket):
        async def observe(seen, reward, done=False):
            await self.log(socket, "observation", observation=seen, reward=reward, done=done)

        return observe

    async def call(self, observe, number, data):
        name, arguments = data["tool_name"], data["arguments"]
        if name == "echo":
            content = [{"type": "text", "text": arguments["text"]}]
            result = {"content": content, "data": arguments["text"], "is_error": False}
            await observe({"tool_name": name, "result": result, "error": None}, None)
        elif name == "guess":
            right = arguments.get("number") == number
            await observe({"result": {"right": right}, "error": None}, float(right), right)
        else:
            error = {"error_type": "tool_not_found", "message": f"no tool {name}"}
            await observe({"result": None, "error": error}, None)


@contextlib.asynccontextmanager
async def serving(server):
    app = web.Application()
    app.router.add_get("/ws", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def make(url, env=None, row_tokens=2048, **section):
    config = EnvConfig(kind="openenv", openenv={"url": url, **section}, **(env or {}))
    return open_env(config, load_tokenizer("builtin"), row_tokens)


def play(texts, row=None, server=None, env=None, **section):
    """(episode, server) of one episode whose turns are `texts`."""
    server = server or Server()

    async def go():
        async with serving(server) as url:
            world = make([url], env, **section)
            engine = ScriptedEngine(world.template.tokenizer, texts)
            return await world.run(row or {}, engine, SAMPLING, 0)

    return asyncio.run(go()), server


def said(episode):
    return [(m["role"], m["content"]) for m in [*episode.prompt, *episode.completion]]


TEXT = {"action": "text", "text_field": "guess"}


def test_a_text_goes_into_one_field_and_rewards_add_up():
    row = {"reset": {"number": 7, "level": None}}
    episode, server = play(["3", "7"], row, env={"system": "Be quick."}, **TEXT)
    assert said(episode) == [
        ("system", "Be quick."),
        ("user", "Guess from 0 to 9."),
        ("assistant", "3"),
        ("user", "Higher or lower."),
        ("assistant", "7"),
    ]
    assert episode.rewards == {"openenv": 0.75} and episode.metrics == {"turns": 2.0}
    assert server.heard[0]["data"] == {"seed": seed_of(row), "number": 7}
    assert server.heard[-1]["type"] == "close" and server.open == 0
    drawn = load_tokenizer("builtin").decode(episode.drawn_tokens)
    assert drawn == "3<|im_end|>7<|im_end|>"  # what the world said is no target
    last, _ = play(["3", "7"], row, reward_of="last", **TEXT)
    assert last.rewards == {"openenv": 1.0}


def test_a_group_plays_one_game_whatever_the_row_says_of_its_seed():
    for row, section, seed in [
        ({"prompt": "Play."}, {}, seed_of({"prompt": "Play."})),
        ({"seed": 4}, {}, 4),
        ({"seed": 4}, {"reset": {"seed": 5}}, 5),
        ({"reset": {"seed": 6}}, {"reset": {"seed": 5}}, 6),
    ]:
        _, server = play(["x"], row, env={"max_turns": 1}, **TEXT, **section)
        assert server.heard[0]["data"]["seed"] == seed
    assert 0 <= seed_of({}) < 2**31 and seed_of({"a": 1}) != seed_of({"a": 2})


def test_json_actions_and_what_is_wrong_with_them():
    texts = ["what?", '{"number": 7}', '```json\n{"guess": 7}\n```']
    episode, server = play(texts, {"seed": 7}, action="json")
    assert said(episode)[2::2] == [
        ("user", "error: the answer must be one JSON object"),
        ("user", "error: guess: Field required"),
    ]
    assert episode.rewards == {"openenv": 1.0}
    assert episode.metrics == {"turns": 3.0, "invalid_actions": 2.0}


def test_a_text_that_was_cut_off_is_an_answer_and_other_actions_are_not():
    class Short(ScriptedEngine):
        async def generate(self, *provided, **named):
            actual = await super().generate(*provided, **named)
            return actual._replace(
                tokens=actual.tokens[:-1], logprobs=[-1.0], finish_reason="length"
            )

    async def go(text, **section):
        async with serving(Server()) as url:
            world = make([url], {"max_turns": 1}, **section)
            engine = Short(world.template.tokenizer, [text])
            return await world.run({"seed": 7}, engine, SAMPLING, 0)

    assert asyncio.run(go("7", **TEXT)).rewards == {"openenv": 1.0}
    assert asyncio.run(go("7", action="json")).rewards == {"openenv": 0.0}


def test_a_full_row_ends_the_game_with_what_it_earned():
    full, _ = play(["3", "4"], {"seed": 7}, env={"max_turns": 2}, **TEXT)
    cut, server = play(["3", "4"], {"seed": 7}, row_tokens=len(full.tokens) - 2, **TEXT)
    assert [entry["data"] for entry in server.heard if entry["type"] == "step"] == [{"guess": "3"}]
    assert (full.rewards["openenv"], cut.rewards["openenv"]) == (-0.5, -0.25)
    assert (cut.finish_reason, cut.metrics) == ("length", {"turns": 1.0})


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_tools_of_the_environment():
    texts = [call("echo", text="hi"), call("nope"), "<tool_call>{</tool_call>", "Done."]
    episode, server = play(texts, {"prompt": "Say hi.", "reset": {"silent": True}})
    assert said(episode)[0] == ("user", "Say hi.")
    assert [text for role, text in said(episode) if role == "tool"] == [
        "hi",
        "error: no tool nope",
        "error: tool call is not valid JSON",
    ]
    assert episode.rewards == {"openenv": 0.0}  # no step had one
    assert episode.metrics == {"turns": 4.0, "tool_calls": 3.0, "tool_errors": 2.0}
    shown = load_tokenizer("builtin").decode(episode.tokens)
    assert "Say it again." in shown and "secret" not in shown
    won, _ = play([call("guess", number=7) + call("echo", text="x")], {"seed": 7})
    assert won.rewards == {"openenv": 1.0}  # done: neither a second call nor a further turn
    assert won.metrics == {"turns": 1.0, "tool_calls": 1.0}


@pytest.mark.parametrize(
    ("texts", "row", "reason"),
    [
        (["crash"], {}, "OpenEnv server failed at a step"),
        (["leave"], {}, "OpenEnv server is gone"),
        ([], {"reset": {"broken": True}}, "OpenEnv server refuses the reset"),
    ],
)
def test_what_the_server_does_wrong_fails_the_episode(texts, row, reason):
    server = Server()
    with pytest.raises(EpisodeFailed, match=reason) as failed:
        play(texts, row, server, **TEXT)
    assert "http" not in str(failed.value) and "ws://127.0.0.1" in failed.value.cause
    assert failed.value.again and server.open == 0


def test_nobody_there_is_a_failed_episode_with_a_pause():
    world = make(["http://127.0.0.1:1"], **TEXT)
    with pytest.raises(EpisodeFailed, match="cannot be reached") as failed:
        asyncio.run(world.run({}, ScriptedEngine(world.template.tokenizer, []), SAMPLING, 0))
    assert failed.value.pause and failed.value.mistake


def test_nothing_to_say_is_the_rows_mistake():
    with pytest.raises(UserError, match="env.openenv.observation_field"):
        play([], {"reset": {"silent": True}}, **TEXT)
    with pytest.raises(UserError, match="an observation has only metadata, prompt"):
        play([], {}, observation_field="board", **TEXT)
    with pytest.raises(UserError, match="column reset is a table"):
        play([], {"reset": 3}, **TEXT)


def test_full_servers_are_waited_for_and_the_emptiest_is_asked(monkeypatch):
    monkeypatch.setattr("jaxtrain.environments.openenv.FULL_PAUSE", 0.01)
    entry, two = Server(places=1), Server(places=2)

    async def go():
        async with serving(entry) as first, serving(two) as second:
            world = make([first, second], **TEXT)
            tokenizer = world.template.tokenizer
            episodes = [
                world.run({"seed": 3}, ScriptedEngine(tokenizer, ["1", "2", "3"]), SAMPLING, index)
                for index in range(8)
            ]
            return await asyncio.gather(*episodes), world

    episodes, world = asyncio.run(go())
    assert [e.rewards["openenv"] for e in episodes] == [0.5] * 8
    assert (entry.most, two.most) == (1, 2) and entry.refused + two.refused > 0


def test_a_wait_for_a_place_is_no_step_of_the_environment(monkeypatch):
    monkeypatch.setattr("jaxtrain.environments.openenv.FULL_PAUSE", 0.2)

    class Slow(ScriptedEngine):
        async def generate(self, *provided, **named):
            await asyncio.sleep(0.3)
            return await super().generate(*provided, **named)

    async def go():
        async with serving(Server(places=1)) as url:
            world = make([url], **TEXT)
            guarded = GuardedEnv(world, "env", step_timeout=0.15)
            tokenizer = world.template.tokenizer
            return await asyncio.gather(
                *(guarded.run({"seed": 3}, Slow(tokenizer, ["3"]), SAMPLING, n) for n in range(2))
            )

    assert [episode.rewards["openenv"] for episode in asyncio.run(go())] == [1.0, 1.0]


def test_pings_are_answered_while_a_turn_is_drawn():
    """A server that hears no pong hangs up, and a turn may take minutes."""

    class Slow(ScriptedEngine):
        async def generate(self, *provided, **named):
            await asyncio.sleep(0.3)
            return await super().generate(*provided, **named)

    async def go():
        async with serving(Server(heartbeat=0.05)) as url:
            world = make([url], **TEXT)
            return await world.run({"seed": 3}, Slow(world.template.tokenizer, ["3"]), SAMPLING, 0)

    assert asyncio.run(go()).rewards == {"openenv": 1.0}


def test_an_episode_that_is_given_up_frees_its_place():
    server = Server()

    class Never(ScriptedEngine):
        async def generate(self, *provided, **named):
            await asyncio.Event().wait()

    async def go():
        async with serving(server) as url:
            world = make([url], **TEXT)
            guarded = GuardedEnv(world, "env", timeout=0.1)
            with pytest.raises(EpisodeFailed, match="timed out"):
                await guarded.run({}, Never(world.template.tokenizer, []), SAMPLING, 0)
            for _ in range(100):
                await asyncio.sleep(0.01)
                if not server.open:
                    return True

    assert asyncio.run(go())


def test_the_token_is_sent_and_kept_nowhere(monkeypatch):
    from jaxtrain.config.secrets import HIDDEN, redact

    monkeypatch.setenv("GAME_TOKEN", "swordfish")
    _, server = play(["1"], {"seed": 1}, token="$GAME_TOKEN", **TEXT)
    assert server.tokens == {"Bearer swordfish"}
    config = EnvConfig(kind="openenv", openenv={"url": ["http://a"], "token": "swordfish"})
    assert redact(config.model_dump())["openenv"]["token"] == HIDDEN


def test_what_is_shown_of_an_observation():
    assert show({"prompt": "Hi", "metadata": {"a": 1}, "hint": None}) == "Hi"
    assert show({"board": [0, 1], "legal": [2]}) == '{"board": [0, 1], "legal": [2]}'
    assert show({"metadata": {}, "text": ""}) == ""
    assert show({"a": {"b": "x"}}, "a.b") == "x"
    assert len(show({"text": "x" * 20_000})) < 10_100
    assert make_socket_url("https://host/games/") == "wss://host/games/ws"


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ({"kind": "openenv"}, "needs env.openenv.url"),
        ({"kind": "openenv", "openenv": {"url": ["host:80"]}}, "is no URL"),
        ({"kind": "tools", "openenv": {"url": ["http://a"]}}, "env.openenv has no effect"),
        ({"kind": "openenv", "openenv": {"url": ["http://a"], "text_field": "x"}}, "no effect"),
        ({"kind": "openenv", "openenv": {"url": ["http://a"]}, "raw": True}, "env.raw has no"),
    ],
)
def test_sections_that_cannot_work(section, match):
    with pytest.raises(ValidationError, match=match):
        EnvConfig(**section)


PYTHON = os.environ.get("JAXTRAIN_OPENENV_PYTHON", "")
real = pytest.mark.skipif(
    not PYTHON, reason="JAXTRAIN_OPENENV_PYTHON names no Python with openenv 0.10"
)


@pytest.fixture(scope="module")
def package():
    """{name: base URL} of environments served by the openenv package itself."""
    with socket.create_server(("127.0.0.1", 0)) as actual:
        port = actual.getsockname()[1]
    script = Path(__file__).parent / "openenv_worlds.py"
    child = subprocess.Popen([PYTHON, str(script), str(port)])
    try:
        for _ in range(240):
            assert child.poll() is None, "the server did not start"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/guess/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield {name: f"http://127.0.0.1:{port}/{name}" for name in ("guess", "tools", "even")}
    finally:
        child.terminate()
        child.wait()


@pytest.mark.slow
@real
def test_the_packages_own_server_plays_the_same_games(package):
    async def go():
        world = make([package["guess"]], **TEXT)
        tokenizer = world.template.tokenizer
        rows = [{"seed": n} for n in range(16)]
        episodes = [
            world.run(row, ScriptedEngine(tokenizer, ["3", "many", "7"]), SAMPLING, n)
            for n, row in enumerate(rows)
        ]
        tools = make([package["tools"]])
        texts = [call("add", a=3, b=4), call("nope"), call("add", a="x"), "7"]
        row = {"prompt": "3 + 4?"}
        return await asyncio.gather(
            *episodes, tools.run(row, ScriptedEngine(tokenizer, texts), SAMPLING, 0)
        )

    *games, tools = asyncio.run(go())
    for number, game in enumerate(games):
        tries = {3: 1, 7: 3}.get(number % 10, 3)
        assert len([m for m in game.completion if m["role"] == "assistant"]) == tries
        assert game.rewards == {"openenv": float(number % 10 in (3, 7))}
    messages = [m["content"] for m in tools.completion if m["role"] == "tool"]
    assert messages[0] == "7" and all(text.startswith("error: ") for text in messages[1:])
    assert tools.metrics == {"turns": 4.0, "tool_calls": 3.0, "tool_errors": 2.0}


@pytest.mark.slow
@real
def test_a_policy_learns_on_the_packages_own_server(package, tmp_path):
    """The reward is the share of characters with an even code: about half for random weights."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"seed": {n}}}\n' for n in range(8)))
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
kind = "openenv"
max_turns = 1
openenv = {{ url = ["{package["even"]}"], action = "text", text_field = "text" }}

[sampling]
temperature = 1.0
max_new_tokens = 8

[optim]
learning_rate = 0.02
lr_scheduler = "constant"

[run]
output_dir = "{tmp_path}/run"
max_steps = 20
export = false

[log]
plot = false
""")
    assert main(["--config", str(tmp_path / "run.toml")]) == 0
    lines = [json.loads(x) for x in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rewards = [line["rewards/openenv/mean"] for line in lines if "loss" in line]
    print([round(reward, 2) for reward in rewards])
    assert len(rewards) == 20 and sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.2
