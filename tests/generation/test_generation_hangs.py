"""Servers that hang, wherever it is: named, dropped, done without, and back by themselves."""

import threading
import time

import pytest
from fake_vllm import FakeVllm
from test_generation_publish import HELD, draw_params, open_servers, open_weights
from test_generation_publish_lora import open_lora
from test_generation_vllm import ANSWER, ask

from jaxtrain.config.vllm import VllmConfig
from jaxtrain.generation.vllm.server import NAMED_FRACTION
from jaxtrain.generation.vllm.watcher import (
    HEALTH_TIMEOUT_SECONDS,
    NAMED_HEALTH_SECONDS,
    NAMING_SECONDS,
    TELEMETRY_SECONDS,
)
from jaxtrain.generation.weight_sync.publish_weights import RESUME_SECONDS

LIMIT = {"progress_seconds": 2.0, "wait_seconds": 60}


def test_defaults_name_within_10_seconds_and_drop_within_30():
    config = VllmConfig()
    named = [
        config.health_seconds + NAMED_FRACTION * NAMED_HEALTH_SECONDS,
        TELEMETRY_SECONDS + NAMED_FRACTION * config.progress_seconds,
    ]
    assert max(named) + NAMING_SECONDS < 10
    dropped = [
        config.health_seconds + min(HEALTH_TIMEOUT_SECONDS, config.progress_seconds),
        RESUME_SECONDS + config.progress_seconds,
    ]
    assert max(dropped) + TELEMETRY_SECONDS < 30


def wait_until_back(servers, count=2):
    deadline = time.monotonic() + 60
    while len(servers.ready()) < count:
        assert time.monotonic() < deadline, [server.describe() for server in servers.all]
        time.sleep(0.02)


def require_named_and_dropped(output, fake, step, why):
    lines = [line for line in output if fake.url in line]
    named = next(i for i, line in enumerate(lines) if f"no answer to {step} for" in line)
    dropped = next(i for i, line in enumerate(lines) if "dropped (" in line)
    assert named < dropped and why in lines[dropped] and "progress_seconds" in lines[named]


@pytest.mark.parametrize(
    "trouble, step",
    [
        pytest.param("/get_world_size", "/get_world_size", marks=pytest.mark.slow),
        pytest.param("links", "new weights", marks=pytest.mark.slow),
        ("/pause", "/pause"),
        pytest.param("/finish_weight_update", "/finish_weight_update", marks=pytest.mark.slow),
        pytest.param("/resume", "/resume", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_hangs_in_a_sync(trouble, step):
    """Long before sync_seconds, which are 600."""
    fakes = [FakeVllm(tensors=HELD), FakeVllm(tensors=HELD)]
    with open_weights(fakes, **LIMIT) as (engine, publisher, output):
        publisher.publish(0, draw_params())
        fakes[0].trouble[trouble] = "stall"
        started = time.monotonic()
        publisher.publish(1, draw_params(1))
        assert time.monotonic() - started < 50
        assert {v for answer in ask(engine, 4) for v in answer.versions} == {1}
        fakes[0].trouble.clear()
        wait_until_back(engine.servers)
    require_named_and_dropped(output, fakes[0], step, "weight sync: ")


@pytest.mark.slow
@pytest.mark.parametrize("slept", [False, True])
def test_a_server_that_hangs_going_to_sleep(slept):
    """slept: it does so all the same, when nobody wakes it any more."""
    fakes = [FakeVllm(tensors=HELD), FakeVllm(tensors=HELD)]
    with open_weights(fakes, sleep=True, **LIMIT) as (engine, publisher, output):
        publisher.publish(0, draw_params())
        fakes[0].trouble["/sleep"] = "stall"
        fakes[0].asleep = slept
        publisher.sleep()
        publisher.publish(1, draw_params(1))
        fakes[0].trouble.clear()
        wait_until_back(engine.servers)
        assert len(ask(engine, 4)) == 4 and not fakes[0].asleep
    require_named_and_dropped(output, fakes[0], "/sleep", "/sleep: ")


@pytest.mark.slow
def test_a_server_that_hangs_waking():
    fakes = [FakeVllm(tensors=HELD), FakeVllm(tensors=HELD)]
    with open_weights(fakes, sleep=True, **LIMIT) as (engine, publisher, output):
        publisher.publish(0, draw_params())
        publisher.sleep()
        fakes[0].trouble["/wake_up"] = "stall"
        publisher.publish(1, draw_params(1))
        fakes[0].trouble.clear()
        wait_until_back(engine.servers)
    require_named_and_dropped(output, fakes[0], "/wake_up", "weight sync: ")


@pytest.mark.slow
@pytest.mark.parametrize("step", ["/v1/load_lora_adapter", "/v1/unload_lora_adapter"])
def test_a_server_that_hangs_over_an_adapter(step, tmp_path):
    fakes = [FakeVllm(), FakeVllm()]
    with open_lora(fakes, tmp_path, keep_adapters=2, **LIMIT) as (engine, publisher, output):
        publisher.publish(0, 8)
        publisher.publish(1, 8)
        fakes[0].trouble[step] = "stall"
        publisher.publish(2, 8)
        assert {v for answer in ask(engine, 4) for v in answer.versions} == {2}
        fakes[0].trouble.clear()
        wait_until_back(engine.servers)
    require_named_and_dropped(output, fakes[0], step, step if "unload" in step else "weight sync")


@pytest.mark.slow
def test_a_server_that_hangs_as_a_whole_while_it_draws():
    """No route answers any more, as in a stopped process."""
    fakes = [FakeVllm(), FakeVllm()]
    with open_servers(fakes, request_seconds=60, **LIMIT) as (engine, servers, output):
        for server in servers.all:
            servers.mark_up(server, 0)
        for fake in fakes:
            fake.label = servers.label(0)
        servers.push_weights = lambda server: servers.mark_up(server, 0)

        def stop():
            fakes[0].hangs, fakes[0].healthy = True, "stalled"
            fakes[0].trouble["/metrics"] = "stall"

        fakes[0].token_seconds = 0.5
        stopping = threading.Thread(target=lambda: fakes[0].after(1, stop).join())
        stopping.start()
        assert [answer.tokens for answer in ask(engine, 4)] == [ANSWER] * 4
        stopping.join()
        fakes[0].hangs, fakes[0].healthy = False, True
        fakes[0].trouble.clear()
        wait_until_back(servers)
    lines = [line for line in output if fakes[0].url in line]
    assert any("no answer to" in line or "s; dropped after" in line for line in lines), lines
    assert any("dropped (" in line for line in lines)
