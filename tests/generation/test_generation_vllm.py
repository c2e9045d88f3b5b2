"""Sampling from servers that fail in every way there is: each ends in recovery or in one error,
and every question gets one answer."""

import asyncio
import contextlib
import threading
import time

import pytest
from fake_vllm import STOP, FakeVllm

from jaxtrain.config import SamplingConfig
from jaxtrain.config.vllm import VllmConfig
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.engine import Completion, EpisodeFailed
from jaxtrain.generation.episode_engine import open_view
from jaxtrain.generation.version_tracker import VersionTracker
from jaxtrain.generation.vllm.control import ServerGone, call
from jaxtrain.generation.vllm.engine import VllmEngine
from jaxtrain.generation.vllm.inspector import PROBE_TEXT
from jaxtrain.generation.vllm.servers import Servers

DRAW = SamplingConfig(temperature=1.0, max_new_tokens=8)
ANSWER = [100, 101, 102, STOP]


@contextlib.contextmanager
def opened(fakes, sampling=DRAW, ready=True, **settings):
    """(engine, servers, what they said) for fake servers that hold version 0."""
    output: list[str] = []
    defaults = {"health_seconds": 0.05, "wait_seconds": 3, "request_seconds": 5}
    config = VllmConfig(servers=[fake.url for fake in fakes], **{**defaults, **settings})
    servers = Servers(config, sampling, output.append)

    def push_weights(server):
        fake = next(fake for fake in fakes if fake.url == server.url)
        fake.label = servers.label(max(servers.version, 0))
        servers.mark_up(server, max(servers.version, 0))

    servers.push_weights = push_weights
    try:
        servers.open()
        if ready:
            for server in servers.all:
                push_weights(server)
        yield VllmEngine(servers, adapters=False, first_pause=0.01), servers, output
    finally:
        servers.close()
        for fake in fakes:
            if fake.thread.is_alive():
                fake.kill()


def ask(engine, count=1, sampling=DRAW, **settings):
    """Answers to `count` questions that are asked at once."""

    async def run():
        calls = [
            engine.generate([1, i + 2], sampling, (STOP,), i, **settings) for i in range(count)
        ]
        try:
            return await asyncio.gather(*calls)
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.mark.parametrize("scale_out", [True, False])
def test_an_answer_has_tokens_logprobs_and_versions(scale_out):
    fake = FakeVllm(scale_out=scale_out)
    with opened([fake]) as (engine, _, output):
        [answer] = ask(engine)
        assert engine.version == 0
    assert answer == Completion(ANSWER, [-0.5] * 4, "stop", [0] * 4)
    assert any("--enable-scale-out" in line for line in output) != scale_out


def test_a_request_says_everything_that_changes_the_distribution():
    """Omitted fields would come from the model's generation_config.json."""
    fake = FakeVllm()
    with opened([fake]) as (engine, *_):
        ask(engine, 2)
    sent = [body["sampling_params"] for body in fake.asked]
    assert {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"} <= set(sent[0])
    assert sent[0]["max_tokens"] == 8 and sent[0]["stop_token_ids"] == [STOP]
    assert sent[0]["seed"] != sent[1]["seed"]
    assert sent[0]["detokenize"] is False


def test_a_server_makes_text_where_strings_end_an_answer():
    fake = FakeVllm()
    with opened([fake]) as (engine, *_):
        ask(engine, sampling=DRAW.model_copy(update={"stop": ["x"]}))
    (params,) = [body["sampling_params"] for body in fake.asked]
    assert params["stop"] == ["x"] and "detokenize" not in params


def test_work_is_shared_and_bounded():
    fakes = [FakeVllm(), FakeVllm()]
    for fake in fakes:
        fake.token_seconds = 0.02
    with opened(fakes, concurrency=6) as (engine, servers, _):
        most = 0

        def inspect():
            nonlocal most
            while not done.is_set():
                most = max(most, sum(server.in_flight for server in servers.all))
                time.sleep(0.002)

        done = threading.Event()
        watcher = threading.Thread(target=inspect)
        watcher.start()
        answers = ask(engine, 24)
        done.set()
        watcher.join()
    assert [answer.tokens for answer in answers] == [ANSWER] * 24
    # Half each, but for what the quicker one was given meanwhile.
    assert sum(fake.answered for fake in fakes) == 24 and min(fake.answered for fake in fakes) > 5
    assert most == 6


def test_errors_that_pass_are_asked_again():
    fake = FakeVllm()
    fake.script.extend([500, "cut", 503, "ok"])
    with opened([fake], retries=3) as (engine, servers, _):
        [answer] = ask(engine)
    assert answer.tokens == ANSWER and servers.counters["retries"] == 3


def test_an_error_that_stays_fails_the_episode_not_the_run():
    fake = FakeVllm()
    fake.script.extend([500] * 3)
    with opened([fake], retries=2) as (engine, _, output):
        with pytest.raises(EpisodeFailed, match="vllm: HTTP 500$"):
            ask(engine)
        assert "EngineCore" in output[-1] and "failed 3 times" in output[-1]
        assert ask(engine)[0].tokens == ANSWER


def test_a_refusal_is_told_as_it_is():
    fake = FakeVllm()
    fake.script.append(400)
    with opened([fake]) as (engine, *_), pytest.raises(UserError, match="refuses a prompt of 2"):
        ask(engine)


def test_a_server_killed_on_the_way_is_dropped_and_its_work_redone():
    fakes = [FakeVllm(), FakeVllm()]
    fakes[0].token_seconds = 60.0
    with opened(fakes) as (engine, servers, output):
        killer = fakes[0].after(1, fakes[0].kill)
        answers = ask(engine, 10)
        killer.join()
        assert [answer.tokens for answer in answers] == [ANSWER] * 10
        assert fakes[0].answered == 0 and fakes[1].answered == 10
        assert servers.counters["servers_lost"] == 1
    dropped = [line for line in output if "dropped" in line]
    assert len(dropped) == 1 and "its requests are asked again; 1 left" in dropped[0]


def test_the_only_server_is_waited_for_and_given_the_weights_again():
    fake = FakeVllm()
    fake.token_seconds = 60.0
    with opened([fake], wait_seconds=60) as (engine, servers, output):

        def begin_anew():
            fake.kill()
            time.sleep(0.3)
            fake.token_seconds = 0.0
            fake.start()

        restart = fake.after(1, begin_anew)
        answers = ask(engine, 4)
        restart.join()
        assert [answer.tokens for answer in answers] == [ANSWER] * 4
        assert {v for answer in answers for v in answer.versions} == {0}
    assert any("none left: waiting up to 60 s" in line for line in output)
    assert any("is back with version 0" in line for line in output)


def test_a_server_that_never_comes_back_ends_the_run_with_its_reason():
    fake = FakeVllm()
    with opened([fake], wait_seconds=0.4) as (engine, *_):
        fake.kill()
        with pytest.raises(RunStopped, match="no vLLM server for 0.4 s.*refused"):
            ask(engine)


def test_a_stalled_request_is_asked_again_after_its_time():
    fake = FakeVllm()
    fake.script.append("stall")
    with opened([fake], request_seconds=0.3) as (engine, servers, _):
        [answer] = ask(engine)
    assert answer.tokens == ANSWER and servers.counters["retries"] >= 1


def test_a_server_that_reports_ill_loses_its_requests_at_once():
    """Not after request_seconds: /health says 503 while the request hangs."""
    fakes = [FakeVllm(), FakeVllm()]
    fakes[0].script.extend(["stall"] * 4)
    with opened(fakes, request_seconds=60) as (engine, *_):
        threading.Timer(0.1, setattr, (fakes[0], "healthy", False)).start()
        started = time.monotonic()
        answers = ask(engine, 4)
    assert [answer.tokens for answer in answers] == [ANSWER] * 4
    assert time.monotonic() - started < 30


def test_a_server_that_says_it_leaves_ends_what_it_began_and_may_come_back():
    fakes = [FakeVllm(), FakeVllm()]
    fakes[0].token_seconds = 0.1
    with opened(fakes) as (engine, servers, _):
        leaving = fakes[0].after(1, setattr, fakes[0], "healthy", "draining")
        answers = ask(engine, 8)
        leaving.join()
        began = fakes[0].answered
        assert [answer.tokens for answer in answers] == [ANSWER] * 8 and began > 0
        assert servers.counters["servers_drained"] == 1 and not servers.counters["retries"]
        assert len(ask(engine, 4)) == 4 and fakes[0].answered == began
        fakes[0].healthy = True
        deadline = time.monotonic() + 60
        while len(servers.ready()) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(servers.ready()) == 2 and not servers.counters["servers_lost"]


def test_a_server_that_does_not_answer_health_is_stalled(monkeypatch):
    monkeypatch.setattr("jaxtrain.generation.vllm.watcher.HEALTH_TIMEOUT_SECONDS", 0.5)
    fakes = [FakeVllm(), FakeVllm()]
    with opened(fakes) as (engine, servers, output):
        fakes[0].healthy = "stalled"
        deadline = time.monotonic() + 60
        while servers.all[0].state == "up" and time.monotonic() < deadline:
            time.sleep(0.02)
        assert ask(engine, 4)[0].tokens == ANSWER and fakes[1].answered == 4
    assert any("was not answered within 0.5 s" in line for line in output)


@pytest.mark.parametrize("tells", [True, False])
def test_an_engine_that_hangs_behind_a_healthy_server_is_found_and_taken_back(tells):
    """By the tokens that it counts, or where it tells none, by not drawing one that is asked."""
    fakes = [FakeVllm(), FakeVllm()]
    for fake in fakes:
        fake.tells = tells
    with opened(fakes, request_seconds=60, progress_seconds=0.8) as (engine, servers, output):
        fakes[0].hangs = True
        started = time.monotonic()
        answers = ask(engine, 6)
        assert [answer.tokens for answer in answers] == [ANSWER] * 6
        assert time.monotonic() - started < 30 and servers.counters["servers_hung"] == 1
        assert servers.all[0].state == "down" and fakes[0].answered == 0
        fakes[0].hangs = False
        deadline = time.monotonic() + 60
        while servers.all[0].state == "down" and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(ask(engine, 6)) == 6 and fakes[0].answered > 0
    assert any("hung: no token for" in line and "progress_seconds" in line for line in output)
    assert any("is back with version 0" in line for line in output)


@pytest.mark.parametrize("tells", [True, False])
def test_a_slow_engine_is_not_a_hung_one(tells):
    fake = FakeVllm()
    fake.token_seconds, fake.tells = 0.3, tells
    with opened([fake], progress_seconds=0.8) as (engine, servers, _):
        assert ask(engine, 2)[0].tokens == ANSWER
        assert not servers.counters["servers_lost"] and not servers.counters["retries"]


def test_an_idle_server_is_not_a_hung_one():
    fake = FakeVllm()
    with opened([fake], progress_seconds=0.4) as (engine, servers, _):
        ask(engine)
        time.sleep(0.8)
        assert ask(engine)[0].tokens == ANSWER and not servers.counters["servers_lost"]


@pytest.mark.parametrize("trouble", ["stall", "drip"])
def test_a_control_call_ends_in_time_however_slowly_bytes_come(trouble):
    fake = FakeVllm()
    fake.trouble["/version"] = trouble
    started = time.monotonic()
    with pytest.raises(ServerGone, match="was not answered within 0.3 s"):
        call(fake.url, "GET", "/version", timeout=0.3)
    assert time.monotonic() - started < 20
    fake.kill()


def test_what_the_server_cuts_off_is_said_once_with_numbers():
    """The fake server reports a max_model_len of 512."""
    fake = FakeVllm()
    with opened([fake], SamplingConfig(temperature=1.0, max_new_tokens=511)) as (engine, _, output):
        assert not any("max_model_len" in line for line in output)
        for _ in range(2):
            ask(engine, sampling=SamplingConfig(temperature=1.0, max_new_tokens=511))
    messages = [line for line in output if "max_model_len" in line]
    assert len(messages) == 1 and "takes 512 tokens" in messages[0] and "are 513" in messages[0]


def test_another_tokenizer_is_told_with_the_first_difference():
    actual_values = [ord(letter) for letter in PROBE_TEXT]
    fakes = [FakeVllm(), FakeVllm(), FakeVllm()]
    fakes[0].tokenize = lambda text: [ord(letter) for letter in text]
    fakes[1].tokenize = lambda text: [*actual_values[:7], 5, 6]
    config = VllmConfig(servers=[fake.url for fake in fakes])
    output: list[str] = []
    servers = Servers(config, DRAW, output.append, lambda text: [ord(letter) for letter in text])
    servers.open()
    servers.close()
    messages = [line for line in output if "tokenizer" in line]
    assert (
        len(messages) == 1 and fakes[1].url in messages[0] and "differ from place 7" in messages[0]
    )
    for fake in fakes:
        fake.kill()


def test_an_answer_that_spans_a_change_of_weights_says_so():
    fake = FakeVllm()
    fake.token_seconds = 0.1
    with opened([fake]) as (engine, servers, _):

        def change():
            fake.label = servers.label(1)
            servers.mark_up(servers.all[0], 1)

        late = fake.after(2, change)
        [answer] = ask(engine)
        late.join()
    assert answer.tokens == ANSWER
    assert list(answer.versions) == sorted(answer.versions) and set(answer.versions) == {0, 1}


def test_a_request_tells_who_begins_it_and_lets_go_when_it_is_given_up():
    """Asked again after the connection broke, it is begun by newer weights."""
    fake = FakeVllm()
    fake.token_seconds = 0.05
    fake.script.append("cut")
    ages, messages = VersionTracker(), []
    ages.on_change = lambda: messages.append(ages.oldest)
    with opened([fake]) as (engine, servers, _):
        engine.first_pause = 0.2

        async def play():
            task = asyncio.create_task(
                open_view(engine, tracker=ages, index=0).generate([1, 2], DRAW, (STOP,))
            )
            while servers.counters["retries"] == 0:
                await asyncio.sleep(0.005)
            fake.label = servers.label(1)
            servers.mark_up(servers.all[0], 1)
            while not fake.drawn:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert servers.all[0].in_flight == 0
            await engine.close()

        asyncio.run(play())
    assert messages == [0, 1] and ages.oldest == 1 and fake.answered == 0


def test_weights_that_this_run_never_sent_are_refused_and_replaced():
    """A server restarted behind our back answers, but from other weights."""
    fake = FakeVllm()
    with opened([fake]) as (engine, servers, output):
        fake.label = "default"
        [answer] = ask(engine)
    assert answer.versions == [0] * 4 and servers.counters["unknown_version"] == 1
    assert any("samples from weights 'default', which this run never" in line for line in output)


def test_labels_of_other_runs_and_of_the_future_are_unknown():
    servers = Servers(VllmConfig(servers=["http://x"]), DRAW)
    servers.version = 4
    assert [servers.read_label(servers.label(v)) for v in (0, 4, 5, 6)] == [0, 4, 5, None]
    second = Servers(VllmConfig(servers=["http://x"]), DRAW)
    assert servers.read_label(second.label(1)) is None
    assert servers.read_label("default") is None


@pytest.mark.parametrize(
    "settings, sampling, messages",
    [
        ({"version": "0.31.4"}, DRAW, "runs vLLM 0.31.4; tested are versions from 0.32 before"),
        ({"version": "dev"}, DRAW, "any_version"),
        ({"processed": False}, SamplingConfig(temperature=0.7), "processed_logprobs"),
        ({}, SamplingConfig(temperature=1.0, top_p=0.9), "raw_logprobs"),
    ],
)
def test_a_server_that_cannot_do_what_the_run_needs_is_refused_at_once(
    settings, sampling, messages
):
    with pytest.raises(UserError, match=messages):
        with opened([FakeVllm(**settings)], sampling):
            pass


def test_servers_that_do_not_come_are_named():
    dead = FakeVllm()
    dead.kill()
    with pytest.raises(UserError, match="none answered within 0.2 s.*refused"):
        with opened([dead], wait_seconds=0.2):
            pass


def test_the_run_begins_with_the_servers_that_are_there():
    dead, alive = FakeVllm(), FakeVllm()
    dead.kill()
    with opened([dead, alive], wait_seconds=0.3, ready=False) as (engine, servers, output):
        alive.label = servers.label(0)
        servers.mark_up(servers.all[1], 0)
        assert len(ask(engine, 3)) == 3
    assert any(line.startswith(f"going on without {dead.url}") for line in output)
