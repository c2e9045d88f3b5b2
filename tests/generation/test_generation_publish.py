"""Weights on their way to servers: what arrives, what a failure leaves behind, what is refused."""

import contextlib
import json
import socket
import time
from types import SimpleNamespace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fake_vllm import STOP, FakeVllm
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generation_vllm import DRAW, ask
from tiny_models import RAW, SIZES
from tiny_vision import VISION

from jaxtrain.config.vllm import VllmConfig, find_vllm_conflicts
from jaxtrain.core.bundle import UNTRAINED
from jaxtrain.core.weights import abstract_params
from jaxtrain.distributed.mesh import make_mesh
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.vllm import factory
from jaxtrain.generation.vllm.engine import VllmEngine
from jaxtrain.generation.vllm.factory import list_published
from jaxtrain.generation.vllm.servers import Servers
from jaxtrain.generation.weight_sync.publish_weights import TensorSet, WeightPublisher, collect
from jaxtrain.huggingface.ops import SplitPiece, full_index
from jaxtrain.models import families
from jaxtrain.models.mtp import with_head
from jaxtrain_vllm import handshake, wire
from jaxtrain_vllm.weight_receiver import WeightReceiver, connect

SHAPES = {"model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,)}
HELD = {name: list(shape) for name, shape in SHAPES.items()}


def draw_params(seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def pieces(params):
    for name, array in params.items():
        yield SplitPiece(name, array.shape, full_index(array.shape), array)


@contextlib.contextmanager
def open_servers(fakes, adapters=False, **settings):
    output: list[str] = []
    defaults = {"health_seconds": 0.05, "wait_seconds": 3, "request_seconds": 5}
    config = VllmConfig(servers=[fake.url for fake in fakes], **{**defaults, **settings})
    servers = Servers(config, DRAW, output.append)
    try:
        servers.open()
        yield VllmEngine(servers, adapters=adapters, first_pause=0.01), servers, output
    finally:
        servers.close()
        for fake in fakes:
            if fake.thread.is_alive():
                fake.kill()


@contextlib.contextmanager
def open_weights(fakes, delta=False, shapes=None, **settings):
    with open_servers(fakes, **settings) as (engine, servers, output):
        publisher = WeightPublisher(servers, pieces, TensorSet(shapes or SHAPES), delta=delta)
        yield engine, publisher, output
        publisher.close()


def bits(params, dtype=ml_dtypes.bfloat16):
    return {name: array.astype(dtype).view(np.uint16).ravel() for name, array in params.items()}


def assert_holds(fake, params):
    for shelf in fake.shelves:
        assert set(shelf.tensors) == set(params)
        for name, expected in bits(params).items():
            np.testing.assert_array_equal(shelf.tensors[name].bits, expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_full_weights_arrive_on_every_worker_and_label_every_token(world_size):
    fakes = [FakeVllm(tensors=HELD, world_size=world_size) for _ in range(2)]
    with open_weights(fakes) as (engine, publisher, _):
        for version in (0, 1):
            params = draw_params(version)
            metrics = publisher.publish(version, params)
            for fake in fakes:
                assert_holds(fake, params)
            answers = ask(engine, 4)
            assert {v for answer in answers for v in answer.versions} == {version}
            assert metrics["sync/delta"] == 0
            assert metrics["sync/bytes"] == 2 * (16 * 8 + 8) * 2 * world_size


def test_the_order_of_calls_around_a_commit():
    """Without the pause the prefix cache would keep keys and values of the old weights."""
    fake = FakeVllm(tensors=HELD)
    with open_weights([fake]) as (_, publisher, _):
        publisher.publish(0, draw_params())
        expected = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update"]
        assert [path for path, _ in fake.log][-5:] == [*expected, "/resume"]
        assert dict(fake.log)["/pause"] == {"mode": "keep"}


def test_a_delta_is_what_changed_and_a_full_sync_comes_now_and_then():
    fake = FakeVllm(tensors=HELD)
    params = draw_params()
    sent = []
    with open_weights([fake], delta=True, full_every=3) as (_, publisher, _):
        for version in range(5):
            metrics = publisher.publish(version, params)
            assert_holds(fake, params)
            sent.append((metrics["sync/delta"], metrics["sync/bytes"]))
            params = {name: array.copy() for name, array in params.items()}
            params["model.norm.weight"][version] += 1.0
    whole_bytes = (16 * 8 + 8) * 2.0
    # One value of two bytes, and a bit for each of the 8 items of that tensor.
    assert sent == [(0, whole_bytes), (1, 3.0), (1, 3.0), (0, whole_bytes), (1, 3.0)]


def test_a_change_too_small_for_the_format_sends_nothing():
    fake = FakeVllm(tensors=HELD)
    params = draw_params()
    with open_weights([fake], delta=True) as (engine, publisher, _):
        publisher.publish(0, params)
        metrics = publisher.publish(1, {n: a * np.float32(1 + 1e-6) for n, a in params.items()})
        assert metrics["sync/bytes"] == 0 and ask(engine)[0].versions == [1] * 4


def test_a_delta_that_changes_nearly_everything_is_sent_in_full():
    fake = FakeVllm(tensors=HELD)
    with open_weights([fake], delta=True) as (_, publisher, _):
        publisher.publish(0, draw_params(0))
        assert publisher.publish(1, draw_params(1))["sync/delta"] == 0


def test_a_restarted_server_gets_everything_before_it_is_asked():
    fake = FakeVllm(tensors=HELD)
    params = draw_params()
    with open_weights([fake], delta=True, wait_seconds=10) as (engine, publisher, output):
        publisher.publish(0, params)
        params["model.norm.weight"][0] += 1
        publisher.publish(1, params)
        fake.kill()
        fake.start()
        assert ask(engine)[0].versions == [1] * 4
        assert_holds(fake, params)
    assert any("is back with version 1" in line for line in output)


def test_a_broken_link_is_made_again():
    fake = FakeVllm(tensors=HELD)
    params = draw_params()
    with open_weights([fake], delta=True) as (_, publisher, output):
        publisher.publish(0, params)
        fake.links[0].shutdown(socket.SHUT_RDWR)
        params["model.norm.weight"][0] += 1
        publisher.publish(1, params)
        assert_holds(fake, params)
    assert not any("dropped" in line for line in output)


def test_a_server_that_fails_the_sync_is_dropped_and_the_others_go_on():
    fakes = [FakeVllm(tensors=HELD), FakeVllm(tensors=HELD)]
    with open_weights(fakes) as (engine, publisher, output):
        publisher.publish(0, draw_params())
        fakes[0].refuse_stage = True
        publisher.publish(1, draw_params(1))
        answers = ask(engine, 4)
        assert {v for answer in answers for v in answer.versions} == {1}
        assert fakes[1].answered == 4
    assert any("weight sync" in line and "dropped" in line for line in output)


STEPS = ("/get_world_size", "links", "/pause", "/update_weights", "/finish_weight_update")


@pytest.mark.parametrize(
    "step, trouble",
    [
        *((step, "stall") for step in STEPS),
        pytest.param("/pause", "drip", marks=pytest.mark.slow),
        pytest.param("/finish_weight_update", "drip", marks=pytest.mark.slow),
    ],
)
def test_a_sync_waits_for_the_slowest_no_longer_than_it_may(step, trouble):
    """Any step may hang: sync_seconds bounds all of them together; then the others go on."""
    fakes = [FakeVllm(tensors=HELD), FakeVllm(tensors=HELD)]
    with open_weights(fakes, sync_seconds=0.5) as (engine, publisher, output):
        publisher.publish(0, draw_params())
        fakes[0].trouble[step] = trouble
        started = time.monotonic()
        publisher.publish(1, draw_params(1))
        assert time.monotonic() - started < 20
        assert {v for answer in ask(engine, 4) for v in answer.versions} == {1}
        assert fakes[1].answered == 4
        fakes[0].trouble.clear()
        publisher.publish(2, draw_params(2))
        deadline = time.monotonic() + 60
        while publisher.servers.all[0].version != 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert_holds(fakes[0], draw_params(2))
    assert any("weight sync" in line and "dropped" in line for line in output)


def test_when_no_server_takes_the_weights_the_run_stops():
    fake = FakeVllm(tensors=HELD)
    with open_weights([fake], wait_seconds=0.5) as (_, publisher, _):
        fake.refuse_stage = True
        with pytest.raises(RunStopped, match="did not take the weights: no"):
            publisher.publish(0, draw_params())


@pytest.mark.parametrize(
    "held, messages",
    [
        ({}, "missing there: model.embed_tokens.weight"),
        ({**HELD, "model.layers.9.bias": [4]}, "only there: model.layers.9.bias"),
        ({**HELD, "model.norm.weight": [9]}, r"is \(9,\) there, \(8,\) in the trainer"),
    ],
)
def test_another_model_is_refused_by_its_whole_list_of_tensors(held, messages):
    fake = FakeVllm(tensors=held)
    with open_weights([fake]) as (_, publisher, _), pytest.raises(UserError, match=messages):
        publisher.publish(0, draw_params())


def test_a_tied_head_may_be_listed_and_shapes_may_be_unknown():
    fake = FakeVllm(tensors={**dict.fromkeys(HELD), "lm_head.weight": None})
    with open_weights([fake]) as (_, publisher, _):
        publisher.publish(0, draw_params())
        assert_holds(fake, draw_params())


def test_answers_are_cut_and_continued_where_the_server_tells_no_versions():
    """/v1/completions: the tokens before the change keep their version."""
    fake = FakeVllm(tensors=HELD, scale_out=False)
    fake.token_seconds = 0.5
    with open_weights([fake]) as (engine, publisher, _):
        publisher.publish(0, draw_params())
        late = fake.after(2, publisher.publish, 1, draw_params(1))
        [answer] = ask(engine)
        late.join()
    assert answer.tokens == [100, 101, 102, STOP]
    assert set(answer.versions) == {0, 1} and list(answer.versions) == sorted(answer.versions)
    assert len(fake.asked) == 2 and fake.asked[1]["prompt"][:3] == [1, 2, 100]


def test_one_gpu_for_both_sleeps_while_training_and_wakes_in_parts():
    fake = FakeVllm(tensors=HELD)
    with open_weights([fake], sleep=True) as (engine, publisher, _):
        publisher.publish(0, draw_params())
        publisher.sleep()
        assert fake.asleep and engine.servers.acquire() is None
        publisher.publish(1, draw_params(1))
        assert not fake.asleep and ask(engine)[0].versions == [1] * 4
    order = [body.get("tags", path) for path, body in fake.log if path != "/version" and body]
    start = order.index("weights")
    assert "/update_weights" in order[start:] and order[-1] == "kv_cache"


def test_rounding_is_that_of_the_trainer():
    """Round to nearest, ties to even, as jax casts: else deltas would be dense."""
    values = np.array([1.0 + 2**-8, 1.0 + 3 * 2**-8, -1.0, 3e-40], np.float32)
    actual = collect([SplitPiece("a", (4,), full_index((4,)), values)], {"a": (4,)}, "bfloat16")
    np.testing.assert_array_equal(actual["a"].bits, [0x3F80, 0x3F82, 0xBF80, 0x0003])


def test_a_flipped_bit_on_the_way_is_noticed_and_rolled_back():
    shelf = WeightReceiver()
    first = collect(pieces(draw_params(0)), SHAPES, "bfloat16")
    described, payload = wire.pack_full(first)
    header = {"kind": "full", "version": 0, "checksum": wire.checksum(first), "tensors": described}
    assert shelf.answer(header, join(payload)) == {"staged": 0}
    shelf.commit(0, lambda tensors: None)
    second = {n: t._replace(bits=t.bits.copy()) for n, t in first.items()}
    second["model.norm.weight"].bits[3] ^= 1
    changes = {n: wire.find_changes(first[n].bits, second[n].bits) for n in first}
    described, payload = wire.pack_delta(changes)
    damaged = bytearray(join(payload))
    damaged[-1] ^= 4
    header = {"kind": "delta", "version": 1, "base": 0, "tensors": described}
    header["checksum"] = wire.checksum(second)
    answer = shelf.answer(header, memoryview(damaged))
    assert "checksum" in answer["error"] and shelf.version == 0
    assert wire.checksum(shelf.tensors) == wire.checksum(first)
    with pytest.raises(ValueError, match="not staged"):
        shelf.check(1, header["checksum"])
    assert shelf.answer(header, join(payload)) == {"staged": 1}
    # Staged twice without a commit: the first is taken out again before the second goes in.
    assert shelf.answer(header, join(payload)) == {"staged": 1}
    shelf.commit(1, lambda tensors: None)
    assert wire.checksum(shelf.tensors) == wire.checksum(second)
    assert "a delta on version 0" in shelf.answer(header, join(payload))["error"]


@pytest.mark.parametrize("size", [1, 7, 8, 1000])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.03, 0.5, 1.0])
def test_a_delta_comes_out_as_it_went_in(size, share):
    """Encode positions or a mask, whichever is shorter; neither is longer than announced."""
    rng = np.random.default_rng(size)
    old = wire.WireTensor((size,), "float32", rng.integers(0, 2**32, size, np.uint32))
    new = np.where(rng.random(size) < share, old.bits ^ 1, old.bits)
    changes = wire.find_changes(old.bits, new)
    described, payload = wire.pack_delta({"a": changes})
    assert sum(part.nbytes for part in payload) == changes.nbytes
    assert changes.nbytes <= changes.positions.nbytes + changes.values.nbytes
    actual = wire.unpack_delta(described, join(payload), {"a": old})
    for change in actual.values():
        undo = wire.apply_changes(old.bits, change)
        np.testing.assert_array_equal(old.bits, new)
        wire.apply_changes(old.bits, undo)
    assert bool(actual) == bool((old.bits != new).any())
    if described and not described[0]["index_bytes"]:
        described[0]["count"] += 1
        with pytest.raises(wire.WireError, match="places for"):
            wire.unpack_delta(described, join(payload), {"a": old})


def join(payload):
    return memoryview(b"".join(part.tobytes() for part in payload))


def test_a_stranger_who_knows_no_token_is_not_taken_for_a_worker():
    """Nor is one that does, of a server that was never asked, or that sends more than a hello."""
    fake = FakeVllm(tensors=HELD)
    with open_weights([fake]) as (_, publisher, _):
        links = publisher.links
        with socket.create_connection((links.host, links.port)) as stranger:
            wire.send_message(stranger, {"token": links.token, "server": fake.url})
            assert stranger.recv(1) == b""
        publisher.publish(0, draw_params())
        assert_holds(fake, draw_params())
        info = links.describe(fake.url)
        with connect({**info, "server": "http://other"}, 0, HELD) as second:
            assert second.recv(1) == b""
        with socket.create_connection((links.host, links.port)) as large:
            handshake.introduce(large, links.token.encode())
            header = json.dumps({"server": fake.url, "bytes": 2**30}).encode()
            large.sendall(wire.MAGIC + len(header).to_bytes(4, "little") + header)
            assert large.recv(1) == b""
        assert len(links.wait_for(fake.url, 1, 1.0)) == 1


ODD = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 2**70), st.floats(), st.text(max_size=4)),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["model.norm.weight", "x"]) | ODD,
        "shape": st.lists(st.integers(-2, 2**40), max_size=3) | ODD,
        "dtype": st.sampled_from(["bfloat16", "float32"]) | ODD,
        "count": st.integers(-2, 40) | ODD,
        "index_bytes": st.sampled_from([0, 1, 3, 4, 8]) | ODD,
    },
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "command": st.sampled_from(["stage", "status"]) | ODD,
        "kind": st.sampled_from(["full", "delta"]) | ODD,
        "version": st.integers(0, 3) | ODD,
        "base": st.just(0) | ODD,
        "checksum": ODD,
        "tensors": st.lists(ITEM | ODD, max_size=3) | ODD,
    },
)


@settings(max_examples=150, deadline=None)
@given(MESSAGE, st.binary(max_size=80))
def test_messages_that_make_no_sense_are_answered_and_change_nothing(header, payload):
    shelf, first = WeightReceiver(), collect(pieces(draw_params(0)), SHAPES, "bfloat16")
    shelf.tensors, shelf.version, shelf.checksum = first, 0, wire.checksum(first)
    answer = shelf.answer(header, memoryview(payload))
    assert "error" in answer or answer == {"version": 0, "checksum": shelf.checksum}
    assert len(json.dumps(answer)) < 2000
    assert shelf.staged is None and wire.checksum(shelf.tensors) == shelf.checksum


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([b"JXW1", b"JXW2"]),
    st.integers(0, 2**32 - 1) | st.none(),
    st.sampled_from(
        [b"[]", b"{}", b'{"bytes": -1}', b'{"bytes": 1e400}', b'{"bytes": 9}', b"[" * 5000]
    )
    | st.binary(max_size=30),
)
def test_a_damaged_message_is_no_message(magic, length, header):
    actual_values, reference = socket.socketpair()
    with actual_values:
        size = len(header) if length is None else length
        reference.sendall(magic + size.to_bytes(4, "little") + header)
        reference.close()
        with pytest.raises(wire.WireError):
            wire.receive_message(actual_values)


@pytest.mark.parametrize(
    "settings, adapter, mode, messages",
    [
        ({"servers": []}, "none", "sync", "needs rollout.vllm.servers"),
        ({"servers": ["localhost:8000"]}, "none", "sync", "is no URL"),
        ({"servers": ["http://a", "http://a/"]}, "none", "sync", "names a server twice"),
        ({"sync": "lora"}, "none", "sync", "needs adapter.kind lora"),
        ({"sync": "lora"}, "dora", "sync", "needs adapter.kind lora, which is dora"),
        ({"sync": "delta"}, "lora", "sync", "sends whole weights, but adapter.kind lora"),
        ({"sleep": True}, "none", "async", "stops the servers while training"),
        ({"listen": "0.0.0.0"}, "none", "sync", "not where servers can connect"),
        ({"servers": ["http://far:1"]}, "none", "sync", "cannot be reached from http://far:1"),
    ],
)
def test_settings_that_cannot_work_together(settings, adapter, mode, messages):
    config = VllmConfig(**{"servers": ["http://a"], **settings})
    assert any(messages in problem for problem in find_vllm_conflicts(config, adapter, mode))


def test_settings_that_can():
    for sync, adapter in (("lora", "lora"), ("full", "none"), ("delta", "none")):
        config = VllmConfig(servers=["http://a", "http://b"], sync=sync, listen="10.0.0.7")
        assert not list(find_vllm_conflicts(config, adapter, "async"))


@pytest.mark.parametrize("train", UNTRAINED)
def test_a_tower_that_is_not_trained_stays_with_the_servers(train):
    architecture = families.config_from_hf(VISION["qwen3_5"])
    bundle = SimpleNamespace(architecture=architecture, untrained=UNTRAINED[train])
    params = {entry.param for entry in list_published(bundle)}
    assert "embed.embedding" in params
    assert any(param.startswith("vision.tower.") for param in params) == (train == "all")
    assert any(param.startswith("vision.projector.") for param in params) == (train != "none")


@pytest.mark.slow
def test_a_head_stays_with_the_trainer():
    """A server without the head's tensors is none of another model, gets all others, and a line
    says so; those of one that has them stay."""
    raw = {**SIZES, **RAW["qwen3_5"], "vocab_size": 61}
    architecture = with_head(families.config_from_hf(raw), None)
    bundle = SimpleNamespace(
        **{
            "architecture": architecture,
            "untrained": (),
            "options": {},
            "mesh": make_mesh(fsdp=-1),
        },
        **dict.fromkeys(("product", "folder", "adapter")),
    )
    params = {
        path: jnp.full(shape.shape, 0.5) for path, shape in abstract_params(bundle)[0].items()
    }
    published = {
        name: list(shape)
        for entry in list_published(bundle)
        for name, shape in entry.op.shapes(params[entry.param].shape).items()
    }
    assert published and not any(name.startswith("mtp.") for name in published)
    assert any(path.startswith("mtp.") for path in params)
    # The second name is that of a copy, as GLM's folders have.
    drafting = {**published, **dict.fromkeys(("mtp.fc.weight", "mtp.embed_tokens.weight"))}
    fakes = [FakeVllm(tensors=published), FakeVllm(tensors=drafting)]
    with open_servers(fakes) as (_, servers, output):
        publisher = factory.open_weights(servers, bundle, delta=False)
        publisher.publish(0, params)
        assert set(fakes[0].shelves[0].tensors) == set(published)
        publisher.close()
    assert any("multi-token prediction head (mtp.*)" in line for line in output)
