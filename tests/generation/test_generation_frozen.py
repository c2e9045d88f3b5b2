"""Frozen policies: a judge behind scripted servers speaks in episodes; its words train nobody."""

import asyncio
import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from jaxtrain.config import EnvConfig, PolicyConfig, SamplingConfig, validate_config
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.environments.conversation import PolicyConversation
from jaxtrain.environments.guarded import open_guarded
from jaxtrain.environments.scripted import ScriptedEngine
from jaxtrain.errors import UserError
from jaxtrain.generation.dataset_envs import DatasetEnvs
from jaxtrain.generation.engine import EpisodeFailed, PromptRequest
from jaxtrain.generation.episode_engine import with_policies
from jaxtrain.generation.episodes import RoundSlot
from jaxtrain.generation.frozen_policy import ServedPolicy, open_frozen
from jaxtrain.generation.group_player import GroupPlayer, GroupRules

JUDGED = """
async def judged(row, chat):
    chat.say(row["question"])
    answer = await chat.draw()
    judge = chat.other("judge")
    judge.say(f"{row['question']} {answer}", "system")
    verdict = await judge.draw()
    chat.say(verdict)
    await chat.draw()
    return chat.finish(reward=float(verdict == "yes"), seen=len(judge.messages))
"""


class Judge(ThreadingHTTPServer):
    """Says yes; `script` says what becomes of the next requests: a status, or bytes to answer."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.asked, self.keys = [], [], []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def do_GET(self):
        self.send(200, {"data": [{"id": "qwen"}, {"id": "llama"}]})

    def do_POST(self):
        server = self.server
        server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        server.keys.append(self.headers["Authorization"])
        actual = server.script.pop(0) if server.script else 200
        output = {"message": {"content": "<think>Hm.</think>yes"}, "finish_reason": "stop"}
        if isinstance(actual, int):
            self.send(actual, {"choices": [output]} if actual == 200 else {"error": "no"})
        else:
            self.send(200, actual)

    def send(self, status, actual):
        raw = actual if isinstance(actual, bytes) else json.dumps(actual).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.fixture
def judges():
    actual = Judge(), Judge()
    yield actual
    for judge in actual:
        judge.shutdown()
        judge.server_close()


@pytest.fixture
def env(tmp_path):
    (tmp_path / "judged.py").write_text(JUDGED)
    config = EnvConfig(kind=f"{tmp_path}/judged.py:judged", history="tokens")
    return open_guarded(config, load_tokenizer("builtin"))


def make(judges, **keys):
    """A frozen policy, and the pauses that it makes."""
    pauses = []

    async def sleep(seconds):
        pauses.append(seconds)

    section = PolicyConfig(servers=[judge.url for judge in judges], **keys)
    return ServedPolicy("judge", section, sleep=sleep), pauses


def play(env, judge, row=None):
    async def run():
        engine = ScriptedEngine(load_tokenizer("builtin"), ["2", "Good."])
        pair = with_policies(engine, {"judge": judge})
        try:
            return await env.run(row or {"question": "1 + 1?"}, pair, SamplingConfig(), 0)
        finally:
            await pair.close()

    return asyncio.run(run())


def test_words_of_a_judge_are_context(judges, env):
    judge, _ = make(judges[:1], model="llama", api_key="k", options={"seed": 3}, max_tokens=9)
    judge.check()
    episode = play(env, judge)
    assert episode.all_rewards == {"judged": 1.0} and episode.metrics["seen"] == 2
    tokenizer = load_tokenizer("builtin")
    output = tokenizer.decode(
        [t for t, d in zip(episode.tokens, episode.sampled, strict=True) if not d]
    )
    assert "yes" in output and "Hm." not in output
    assert tokenizer.decode(episode.drawn_tokens, skip_special_tokens=True) == "2Good."
    assert judges[0].asked == [
        {
            "model": "llama",
            "messages": [{"role": "system", "content": "1 + 1? 2"}],
            "max_tokens": 9,
            "temperature": 0.0,
            "seed": 3,
        }
    ]
    assert judges[0].keys == ["Bearer k"]


def test_what_passes_is_asked_again_of_another_server(judges, env):
    judge, pauses = make(judges)
    judge.check()
    assert judge.model == "qwen"
    judges[0].script = [503]
    judges[1].script = [b"<html>"]
    assert play(env, judge).all_rewards == {"judged": 1.0}
    assert [len(entry.asked) for entry in judges] == [2, 1] and pauses == [1.0, 2.0]
    assert judge.counters() == {"judge/requests": 3.0, "judge/retries": 2.0, "judge/failed": 0.0}


def test_a_judge_that_fails_drops_the_group_under_its_reason(judges, env):
    judge, _ = make(judges[:1], retries=1)
    judges[0].script = [500] * 100
    with pytest.raises(EpisodeFailed, match="policies.judge does not answer") as failed:
        play(env, judge)
    assert failed.value.pause and failed.value.again
    judges[0].script = [400] * 100

    async def ask():
        engine = with_policies(
            ScriptedEngine(load_tokenizer("builtin"), ["2"] * 9), {"judge": judge}
        )
        player = GroupPlayer(DatasetEnvs(env, None), engine, SamplingConfig(), GroupRules(2, {}))
        slot = RoundSlot(None, [])
        player.failures.add(None)  # it has worked before
        assert await player.play(PromptRequest(0, 0, {"question": "1 + 1?"}), slot) is None
        await engine.close()
        return slot, player.failures.newest

    slot, newest = asyncio.run(ask())
    assert slot.dropped == Counter({"failed: policies.judge refuses: HTTP 400": 1})
    assert slot.redone == 0 and newest.mistake, "a refusal is not asked for again"


def test_a_judge_is_looked_for_at_the_start(judges):
    with pytest.raises(UserError, match="policies.judge.model 'gpt' is not what"):
        make(judges, model="gpt")[0].check()
    judges[1].shutdown()
    judges[1].server_close()
    with pytest.raises(UserError, match="policies.judge.servers: .* does not answer"):
        make(judges)[0].check(sleep=lambda seconds: None)


def test_sections_that_cannot_be(judges, monkeypatch):
    base = {
        "model": {"path": "m"},
        "data": {"datasets": [{"path": "d.jsonl"}], "sequence_len": 512},
        "run": {"max_steps": 1},
        "rewards": [{"function": "math"}],
    }
    rl = {"task": {"kind": "rl"}, "sampling": {"temperature": 1.0, "max_new_tokens": 64}}
    remote_result = {"servers": [judges[0].url], "api_key": "$JUDGE_KEY"}
    with pytest.raises(UserError, match="policies has no effect without an environment"):
        validate_config({**base, "rewards": [], "policies": {"judge": remote_result}}, "c")
    for name, section, messages in (
        ("Judge", remote_result, "policies.Judge: a policy's name is small letters"),
        ("judge", {}, "policies.judge.servers is empty"),
        ("judge", {"servers": ["host:1"]}, "'host:1' is no URL"),
        (
            "judge",
            {**remote_result, "options": {"n": 2}},
            "policies.judge.options.n is not to be set",
        ),
        ("judge", {**remote_result, "server": "x"}, "policies.judge.server: unknown key 'server'"),
    ):
        with pytest.raises(UserError, match=messages):
            validate_config({**base, **rl, "policies": {name: section}}, "c")
    config = validate_config({**base, **rl, "policies": {"judge": remote_result}}, "c")
    with pytest.raises(UserError, match="JUDGE_KEY is not set"):
        open_frozen(config)
    monkeypatch.setenv("JUDGE_KEY", "k")
    assert open_frozen(config)["judge"].section.api_key == "k"


def test_a_frozen_policy_takes_images_by_url():
    chat = PolicyConversation(None, 0)
    with pytest.raises(UserError, match="image_url"):
        chat.say([{"type": "text", "text": "What is it?"}, {"type": "image", "image": b"png"}])
    assert not chat.messages
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    chat.say([part])
    assert chat.messages == [{"role": "user", "content": [part]}]
