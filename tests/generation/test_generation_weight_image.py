"""The fast way of weights to servers gives the bits of the plain one, on every path."""

import socket
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_vllm import FakeVllm
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generation_publish import HELD, assert_holds, draw_params, open_weights
from test_generation_vllm import ask

from jaxtrain.errors import RunStopped
from jaxtrain.generation.weight_sync import host_image as image_module
from jaxtrain.generation.weight_sync import weight_links
from jaxtrain.generation.weight_sync.device_layout import PublishedCopy, list_pieces
from jaxtrain.generation.weight_sync.host_image import HostImage
from jaxtrain.generation.weight_sync.publish_weights import collect
from jaxtrain.huggingface.ops import (
    Interleaved,
    ParameterEntry,
    SplitPiece,
    SplitRows,
    StackedOps,
    TensorRef,
    Transpose,
    full_index,
)
from jaxtrain_vllm import wire
from jaxtrain_vllm.shared_memory import SharedMemorySegment
from jaxtrain_vllm.weight_receiver import WeightReceiver

ENTRIES = [
    ParameterEntry("embed", TensorRef("e")),
    ParameterEntry("up", StackedOps([Transpose(TensorRef(f"{i}.up")) for i in range(3)])),
    ParameterEntry("norm", StackedOps([TensorRef(f"{i}.norm") for i in range(3)])),
    ParameterEntry("q", StackedOps([Transpose(SplitRows(f"{i}.qk", 0, 0, 6)) for i in range(3)])),
    ParameterEntry("k", StackedOps([Transpose(SplitRows(f"{i}.qk", 0, 4, 6)) for i in range(3)])),
    ParameterEntry(
        "moe",
        StackedOps(
            [StackedOps([Transpose(TensorRef(f"{i}.{e}")) for e in "ab"]) for i in range(3)]
        ),
    ),
]
ALL = [
    *ENTRIES,
    ParameterEntry("even", StackedOps([Interleaved(f"{i}.turns", -1, 0, 2) for i in range(3)])),
    ParameterEntry("odd", StackedOps([Interleaved(f"{i}.turns", -1, 1, 2) for i in range(3)])),
]
"""Also columns in turns, which device memory is not lent for."""
SHAPES = {"embed": (9, 4), "up": (3, 4, 5), "norm": (3, 4), "q": (3, 4, 4), "k": (3, 4, 2)}
SHAPES |= {"even": (3, 3, 2, 4), "odd": (3, 3, 2, 4), "moe": (3, 2, 4, 3)}


def draw(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def tensor_shapes(entries=ENTRIES):
    shapes = {}
    for entry in entries:
        shapes |= entry.op.shapes(SHAPES[entry.param])
    return shapes


WIDE = {f"{i}.norm" for i in range(3)}


def plain(params, dtype, wide=(), entries=ENTRIES):
    pieces = (p for entry in entries for p in entry.op.write(params[entry.param], np.asarray))
    return collect(pieces, tensor_shapes(entries), dtype, wide)


def assert_same(actual, expected):
    assert list(actual) == list(expected) and wire.checksum(actual) == wire.checksum(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(actual[name].bits, tensor.bits)


@pytest.mark.parametrize(
    "dtype, small, base, room, wide",
    [
        ("bfloat16", 0, "host", 1, WIDE),  # some tensors are float32 all the same
        ("float16", 2**26, "device", 1000, ()),
        ("bfloat16", 0, "device", 5, WIDE),  # some pieces change more than there is room for
    ],
)
def test_the_device_lays_out_what_the_host_does(dtype, small, base, room, wide, monkeypatch):
    """Layer by layer and at once, rounded alike; chunks of a few items; then what changed, found by
    the host or by the device."""
    monkeypatch.setattr("jaxtrain.generation.weight_sync.device_layout.LEAST_ROOM", room)
    monkeypatch.setattr("jaxtrain.generation.weight_sync.device_layout.SMALL_BYTES", small)
    monkeypatch.setattr("jaxtrain.generation.weight_sync.device_layout.BLOCK_BYTES", 50)
    monkeypatch.setattr(image_module, "CHUNK_ITEMS", 7)
    monkeypatch.setattr(image_module, "AHEAD_BYTES", 100)
    first, second = draw(0), draw(1)
    second = {n: np.where(second[n] > 0.5, second[n], first[n]) for n in first}
    held = HostImage(tensor_shapes(ALL), dtype, wide)
    retained = PublishedCopy() if base == "device" else None
    for params, old in ((first, None), (second, plain(first, dtype, wide, ALL))):
        provided, compare = {n: jnp.asarray(a) for n, a in params.items()}, old is not None
        pieces = list_pieces(provided, ALL, dtype, retained, compare=compare, wide=wide)
        changes = held.take(pieces, compare=compare)
        expected = plain(params, dtype, wide, ALL)
        assert_same(held.tensors, expected)
        for name, tensor in held.tensors.items():
            assert tensor.dtype == ("float32" if name in wide else dtype)
            assert tensor.bits.flags.aligned
        if old is None:
            continue
        assert changes is not None
        for name, tensor in expected.items():
            same = wire.find_changes(old[name].bits, tensor.bits)
            np.testing.assert_array_equal(changes[name].positions, same.positions)
            np.testing.assert_array_equal(changes[name].values, same.values)


@pytest.mark.parametrize("base", ["host", pytest.param("device", marks=pytest.mark.slow)])
def test_sharded_parameters_come_a_shard_at_a_time(base):
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    position = {"up": (None, "a", None), "embed": (None, "b"), "q": (None, None, "a")}
    position |= {"even": (None, None, "a", None), "odd": (None, None, None, "b")}
    held, retained = (
        HostImage(tensor_shapes(ALL), "bfloat16"),
        PublishedCopy() if base == "device" else None,
    )
    params = draw(3)
    for compare in (False, True):
        spread = {
            name: jax.device_put(
                array, jax.NamedSharding(mesh, jax.P(*position.get(name, (None,) * array.ndim)))
            )
            for name, array in params.items()
        }
        pieces = list_pieces(spread, ALL, "bfloat16", retained, compare=compare)
        changes = held.take(pieces, compare=compare)
        assert_same(held.tensors, plain(params, "bfloat16", (), ALL))
        if not compare:
            for array in params.values():
                array[..., 1] += 1
            old = plain(draw(3), "bfloat16", (), ALL)
    for name, tensor in held.tensors.items():
        same = wire.find_changes(old[name].bits, tensor.bits)
        np.testing.assert_array_equal(changes[name].positions, same.positions)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 2**32 - 1), st.floats(0, 1))
def test_any_split_of_a_tensor_gives_the_changes_of_the_whole(rows, columns, seed, share):
    rng = np.random.default_rng(seed)
    old = rng.normal(size=(rows, columns)).astype(np.float32)
    new = np.where(rng.random(old.shape) < share, old + 1, old)
    held = HostImage({"a": old.shape}, "float32")
    held.take([SplitPiece("a", old.shape, full_index(old.shape), old)], compare=False)
    index = [sorted({0, size, int(rng.integers(0, size + 1))}) for size in old.shape]
    parts = [
        (slice(r, r_end), slice(c, c_end))
        for r, r_end in zip(index[0], index[0][1:], strict=False)
        for c, c_end in zip(index[1], index[1][1:], strict=False)
    ]
    rng.shuffle(parts)
    changes = held.take((SplitPiece("a", old.shape, p, new[p]) for p in parts), compare=True)
    assert changes is not None
    expected = wire.find_changes(old.reshape(-1).view(np.uint32), new.reshape(-1).view(np.uint32))
    np.testing.assert_array_equal(changes["a"].positions, expected.positions)
    np.testing.assert_array_equal(changes["a"].values, expected.values)


def test_the_checksum_is_that_of_one_thread(monkeypatch):
    tensors = plain(draw(0), "float32")
    alone = wire.checksum(tensors)
    monkeypatch.setattr(wire, "in_threads", lambda work, items, size: [work(i) for i in items])
    assert wire.checksum(dict(reversed(tensors.items()))) == alone
    tensors["e"].bits[3] ^= 1
    assert wire.checksum(tensors) != alone


def test_workers_of_this_host_read_the_trainers_memory():
    """No bytes travel; a delta is visible immediately, too."""
    fakes = [FakeVllm(tensors=HELD, world_size=2) for _ in range(2)]
    params = draw_params()
    with open_weights(fakes, delta=True) as (_, publisher, _):
        for version in range(3):
            params["model.norm.weight"][version] += 1
            assert publisher.publish(version, params)["sync/tcp_bytes"] == 0
            for fake in fakes:
                assert_holds(fake, params)


def test_the_trainer_goes_on_while_servers_take_the_weights():
    """From a copy: what it does to its parameters then changes nothing. Requests wait."""
    fake = FakeVllm(tensors=HELD)
    with open_weights([fake]) as (engine, publisher, _):
        publisher.ahead = True
        publisher.publish(0, draw_params())  # the first one waits: nothing may be asked before
        assert ask(engine)[0].versions == [0] * 4
        fake.trouble["links"] = "stall"
        params, expected = draw_params(1), draw_params(1)
        publisher.publish(1, params)  # ends, though the server takes nothing before it is let go
        started = time.monotonic()
        params["model.norm.weight"][:] = 0
        threading.Timer(0.4, fake.trouble.clear).start()
        assert ask(engine)[0].versions == [1] * 4 and time.monotonic() - started >= 0.4
        assert publisher.publish(2, params)["sync/seconds"] >= 0.4  # of the one before
        publisher.delivery.wait()
        assert_holds(fake, params)
        assert not np.array_equal(expected["model.norm.weight"], params["model.norm.weight"])


def test_what_goes_wrong_meanwhile_ends_requests_and_the_next_publish():
    fake = FakeVllm(tensors=HELD)
    with open_weights([fake], wait_seconds=0.3) as (engine, publisher, _):
        publisher.ahead = True
        publisher.publish(0, draw_params())
        fake.refuse_stage = True
        publisher.publish(1, draw_params(1))
        for act in (lambda: ask(engine), lambda: publisher.publish(2, draw_params(2))):
            with pytest.raises(RunStopped, match="did not take the weights: no"):
                act()


def test_workers_elsewhere_are_sent_bytes_once_a_server(monkeypatch):
    """The first worker of a server receives them; the others read its memory."""

    class Far(weight_links.WorkerLink):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.local_host = "elsewhere"

    monkeypatch.setattr(weight_links, "WorkerLink", Far)
    fake = FakeVllm(tensors=HELD, world_size=3)
    params = draw_params()
    with open_weights([fake], delta=True) as (_, publisher, _):
        sent = publisher.publish(0, params)
        assert sent["sync/tcp_bytes"] == (16 * 8 + 8) * 2 == sent["sync/bytes"] / 3
        params["model.norm.weight"][0] += 1
        sent = publisher.publish(1, params)
        assert sent["sync/delta"] == 1 and sent["sync/tcp_bytes"] == 3
        assert_holds(fake, params)


def test_hosts_pass_weights_on_to_each_other(monkeypatch):
    """Each server is on a host of its own; the trainer sends a version to one of the three."""

    class Far(weight_links.WorkerLink):
        def __init__(self, connection, hello):
            super().__init__(connection, hello)
            self.host, self.local_host = hello["server"], "elsewhere"

    monkeypatch.setattr(weight_links, "WorkerLink", Far)
    fakes = [FakeVllm(tensors=HELD) for _ in range(3)]
    fakes[0].name = "localhost"  # as many hosts as names
    params = draw_params()
    with open_weights(fakes, delta=True, fan_out=1) as (_, publisher, _):
        for version, size in enumerate([(16 * 8 + 8) * 2, 3]):
            params["model.norm.weight"][0] += version
            sent = publisher.publish(version, params)
            assert sent["sync/tcp_bytes"] == size
            assert sent["sync/relayed_bytes"] == 2 * size
            assert sent["sync/relay_failures"] == 0
            for fake in fakes:
                assert_holds(fake, params)


def test_memory_that_cannot_be_opened_is_sent(monkeypatch):
    def refuse(described):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(SharedMemorySegment, "attach", refuse)
    fake = FakeVllm(tensors=HELD, world_size=2)
    params = draw_params()
    with open_weights([fake], delta=True) as (_, publisher, output):
        assert publisher.publish(0, params)["sync/tcp_bytes"] == 2 * (16 * 8 + 8) * 2
        params["model.norm.weight"][0] += 1
        assert publisher.publish(1, params)["sync/tcp_bytes"] == 6
        assert_holds(fake, params)
    assert not output


def test_shared_memory_that_was_written_meanwhile_is_not_served():
    segment = SharedMemorySegment.create(8)
    segment.room.view("<u2")[:] = [1, 2, 3, 4]
    segment.seal(7, 99)
    described = [{"name": "a", "shape": [4], "dtype": "bfloat16"}]
    header = {"kind": "shared", "version": 7, "checksum": 99, "tensors": described}
    header["segment"] = segment.described
    shelf = WeightReceiver()
    assert shelf.answer(header, memoryview(b"")) == {"staged": 7}
    with pytest.raises(wire.WireError, match="written meanwhile"):
        shelf.commit(7, lambda tensors: segment.begin())
    assert shelf.version == -1
    assert "holds version -1, not 7" in shelf.answer(header, memoryview(b""))["error"]
    segment.seal(7, 99)
    assert shelf.answer(header, memoryview(b"")) == {"staged": 7}
    shelf.commit(7, lambda tensors: None)
    delta = {"kind": "delta", "version": 8, "base": 7, "checksum": 0, "tensors": []}
    assert "another process's memory" in shelf.answer(delta, memoryview(b""))["error"]


@settings(max_examples=30, deadline=None)
@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=30),
        lambda inner: st.dictionaries(st.sampled_from(["path", "nonce", "bytes"]), inner),
        max_leaves=4,
    )
    | st.fixed_dictionaries(
        {
            "path": st.sampled_from(
                ["/proc/1/fd/0", "/dev/zero", "/proc/self/fd/0", "/etc/passwd"]
            ),
            "nonce": st.text(max_size=4),
            "bytes": st.integers(-5, 2**70),
        }
    )
)
def test_a_segment_that_is_none_is_refused(described):
    header = {"kind": "shared", "version": 1, "checksum": 0, "tensors": [], "segment": described}
    answer = WeightReceiver().answer(header, memoryview(b""))
    assert set(answer) == {"error"} and len(answer["error"]) <= 500


def test_whole_tensors_arrive_where_the_last_ones_were():
    """A link of its own, as of another host: no second copy of the model is held."""
    actual_values, reference = socket.socketpair()
    shelf = WeightReceiver()
    threading.Thread(target=shelf.listen, args=(reference,), daemon=True).start()
    rooms = []
    for version in range(2):
        tensors = plain(draw(version), "bfloat16")
        described, payload = wire.pack_full(tensors)
        header = {"command": "stage", "kind": "full", "version": version, "tensors": described}
        wire.send_message(actual_values, {**header, "checksum": wire.checksum(tensors)}, payload)
        answer, _ = wire.receive_message(actual_values)
        assert answer["staged"] == version
        assert SharedMemorySegment.attach(answer["segment"]).state() == (
            version,
            wire.checksum(tensors),
        )
        shelf.commit(version, lambda tensors: None)
        assert_same(shelf.tensors, tensors)
        rooms.append(shelf.tensors["e"].bits.ctypes.data)
    assert rooms[0] == rooms[1]
    actual_values.close()
