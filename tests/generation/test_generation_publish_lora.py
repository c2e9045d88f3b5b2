"""Adapters on their way to servers: a new name and folder a version, what becomes of old ones."""

import asyncio
import contextlib
import errno
import json
import time

import pytest
from fake_vllm import STOP, FakeVllm
from test_generation_publish import open_servers
from test_generation_vllm import ask

from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.weight_sync.publish_lora import NOTE, LoraPublisher, reserve
from jaxtrain_vllm.adapter_store import FILES


def write_adapter(params, folder):
    (folder / "adapter_config.json").write_text(json.dumps({"r": params}))
    (folder / "adapter_model.safetensors").write_bytes(folder.name.encode() * 70_000)


@contextlib.contextmanager
def open_lora(fakes, folder, write=write_adapter, **settings):
    with open_servers(fakes, adapters=True, sync="lora", **settings) as (engine, servers, output):
        publisher = LoraPublisher(servers, folder, "/runs/a", write, lambda params: 1000)
        yield engine, publisher, output
        if any(fake.thread.is_alive() for fake in fakes):
            publisher.close()


def test_each_version_is_a_new_adapter_and_old_ones_go(tmp_path):
    fakes = [FakeVllm(), FakeVllm()]
    with open_lora(fakes, tmp_path, keep_adapters=2) as (engine, publisher, _):
        for version in range(4):
            publisher.publish(version, 8)
            assert {v for a in ask(engine, 4) for v in a.versions} == {version}
            names = sorted(path.name for path in tmp_path.iterdir())
            assert len(names) == min(version + 1, 2)
            assert all(sorted(fake.adapters) == names for fake in fakes)
            assert fakes[0].asked[-1]["model"] == names[-1]
    assert list(tmp_path.iterdir()) == [] and fakes[0].log[-1][1] is not None


def test_a_restarted_server_loads_the_newest_adapter_again(tmp_path):
    fake = FakeVllm()
    with open_lora([fake], tmp_path, wait_seconds=10) as (engine, publisher, output):
        publisher.publish(0, 8)
        publisher.publish(1, 8)
        fake.kill()
        fake.start()
        assert ask(engine)[0].versions == [1] * 4
        assert len(fake.adapters) == 1
        publisher.publish(2, 8)
        assert ask(engine)[0].versions == [2] * 4


def test_an_adapter_that_someone_took_away_is_loaded_again(tmp_path):
    fake = FakeVllm()
    with open_lora([fake], tmp_path) as (engine, publisher, output):
        publisher.publish(0, 8)
        fake.adapters.clear()
        assert ask(engine)[0].tokens == [100, 101, 102, STOP]
    assert any("does not serve" in line for line in output)


def test_a_load_that_fails_says_what_to_change(tmp_path):
    fake = FakeVllm()
    with open_lora([fake], tmp_path) as (_, publisher, _):
        with pytest.raises(UserError, match="--max-lora-rank of at least adapter.rank"):
            publisher.publish(0, 128)

    words = "rollout.vllm.adapter_dir to a folder that"
    for transport, answer in (("disk", None), ("auto", (404, {"detail": "Not Found"}))):
        fake = FakeVllm()
        fake.sees_disk = False
        fake.store.handle = refuse_with(answer)
        with open_lora([fake], tmp_path, adapter_transport=transport) as (_, publisher, _):
            with pytest.raises(UserError, match=words):
                publisher.publish(0, 8)


def refuse_with(answer):
    async def handle(*_):
        assert answer is not None, "nothing may be sent"
        return answer

    return handle


@pytest.mark.parametrize("transport", ["auto", "http"])
def test_a_server_that_does_not_see_the_disk_is_sent_the_files(tmp_path, transport):
    fakes = [FakeVllm(), FakeVllm()]
    fakes[0].sees_disk = False
    options = {"keep_adapters": 2, "adapter_transport": transport}
    with open_lora(fakes, tmp_path, **options) as (engine, publisher, output):
        for version in range(4):
            publisher.publish(version, 8)
            assert {v for a in ask(engine, 4) for v in a.versions} == {version}
            names = sorted(path.name for path in tmp_path.iterdir())
            remote_result = fakes[0].store.folder
            received = sorted(path.name for path in remote_result.iterdir())
            assert received == [".lock", *names]  # in use, so no other server removes the folder
            for name in names:
                for file in FILES:
                    sent = (remote_result / name / file).read_bytes()
                    assert sent == (tmp_path / name / file).read_bytes() and sent
            assert set(fakes[0].adapters.values()) == {str(remote_result / name) for name in names}
            assert all(sorted(fake.adapters) == names for fake in fakes)
    assert sum("over HTTP" in line for line in output) == (transport == "auto")
    assert [path.name for path in remote_result.iterdir()] == [".lock"]
    assert list(tmp_path.iterdir()) == []
    assert (fakes[1].store._folder is None) == (transport == "auto")


def test_a_version_is_sent_once_though_a_watcher_waits_to_bring_it_too(tmp_path):
    fakes = [FakeVllm(), FakeVllm()]
    take, sent = fakes[0].store.handle, []

    async def take_slowly(method, name, *rest):
        sent.append((method, name))
        await asyncio.sleep(0.5)  # the other server is up by then, and a watcher looks at this one
        return await take(method, name, *rest)

    fakes[0].store.handle = take_slowly
    with open_lora(fakes, tmp_path, adapter_transport="http") as (engine, publisher, _):
        publisher.publish(0, 8)
        time.sleep(0.5)
        assert sent == [("PUT", next(tmp_path.iterdir()).name)]


def test_a_server_that_dies_while_it_is_sent_an_adapter_is_dropped(tmp_path):
    fakes = [FakeVllm(), FakeVllm()]
    with open_lora(fakes, tmp_path, adapter_transport="http") as (engine, publisher, output):
        publisher.publish(0, 8)
        retained = fakes[0].store.handle
        fakes[0].store.handle = refuse_with((400, {"error": "another checksum"}))
        publisher.publish(1, 8)
        assert ask(engine)[0].versions == [1] * 4 and fakes[0].answered == 0
        assert any("not taken: another checksum" in line for line in output)
        fakes[0].store.handle = retained  # and comes back with the newest
        deadline = time.monotonic() + 30
        while len(engine.servers.ready()) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(engine.servers.ready()) == 2


def test_a_full_disk_costs_old_versions_then_the_run_but_never_a_half_adapter(tmp_path):
    full = [False]

    def write(params, folder):
        (folder / "adapter_model.safetensors").write_bytes(b"half")
        if full[0] and len(list(tmp_path.glob("jaxtrain-*"))) >= full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_adapter(params, folder)

    fake = FakeVllm()
    with open_lora([fake], tmp_path, write, keep_adapters=4) as (engine, publisher, output):
        for version in range(3):
            publisher.publish(version, 8)
        full[0] = 3
        publisher.publish(3, 8)
        assert ask(engine)[0].versions == [3] * 4
        assert len(list(tmp_path.iterdir())) == 2 and len(fake.adapters) == 2
        assert any("is full: deleting all versions but the newest" in line for line in output), (
            output
        )
        full[0] = 1
        with pytest.raises(RunStopped, match="version 4 cannot be written: No space left"):
            publisher.publish(4, 8)
        assert ask(engine)[0].versions == [3] * 4  # what was there still serves
        assert not list(tmp_path.glob(".*"))


def test_room_is_reserved_before_memory_maps_are_written(tmp_path):
    """A write to a mapped page that finds no room is a signal, not an exception."""
    reserve(tmp_path, 10**6)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError):
        reserve(tmp_path, 2**60)


def test_leftovers_of_an_earlier_process_are_unloaded_and_deleted(tmp_path):
    """And no other: another run's, one that somebody copied to keep it, one without a note."""
    fake = FakeVllm()

    def leave(name, note):
        path = tmp_path / name
        path.mkdir()
        if note is not None:
            (path / NOTE).write_text(note if isinstance(note, str) else json.dumps(note))
        return path

    old = leave("jaxtrain-00000000-7", {"run": "/runs/a", "name": "jaxtrain-00000000-7"})
    half = leave(
        ".jaxtrain-00000000-8.unfinished", {"run": "/runs/a", "name": "jaxtrain-00000000-8"}
    )
    retained = [
        leave("jaxtrain-11111111-7", {"run": "/runs/b", "name": "jaxtrain-11111111-7"}),
        leave("jaxtrain-best", {"run": "/runs/a", "name": "jaxtrain-00000000-7"}),
        leave("jaxtrain-mine", None),
        leave("jaxtrain-odd", "[[["),
        leave("jaxtrain-list", "[1]"),
        leave("notes", {"run": "/runs/a", "name": "notes"}),
    ]
    fake.adapters = {path.name: str(path) for path in (old, *retained)}
    fake.adapters["someone-else"] = "/other/place"
    with open_lora([fake], tmp_path) as (_, publisher, _):
        assert set(fake.adapters) == {path.name for path in retained} | {"someone-else"}
        assert not old.exists() and not half.exists()
        for version in range(4):
            publisher.publish(version, 8)
    assert set(tmp_path.iterdir()) == set(retained)
    assert set(fake.adapters) == {path.name for path in retained} | {"someone-else"}
