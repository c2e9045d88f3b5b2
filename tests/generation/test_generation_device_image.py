"""Weights that servers read in the trainer's GPU memory: the bits, the protocol, and every way back
to the host's memory. The GPU's memory is shared memory of the host here (`host_cuda.py`)."""

import contextlib
import ctypes
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_vllm import FakeVllm
from host_cuda import HostCuda
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generation_publish import HELD, SHAPES, assert_holds, bits, draw_params, open_servers
from test_generation_vllm import ask
from test_generation_weight_image import ENTRIES, WIDE, draw, plain, tensor_shapes

from jaxtrain.errors import RunStopped
from jaxtrain.generation.vllm.factory import open_device_image
from jaxtrain.generation.weight_sync.device_image import DeviceImage, list_devices, spread
from jaxtrain.generation.weight_sync.device_layout import list_pieces, list_rows
from jaxtrain.generation.weight_sync.publish_weights import TensorSet, WeightPublisher
from jaxtrain.huggingface.ops import ParameterEntry, SplitRows, TensorRef, Transpose
from jaxtrain_vllm import cuda_ipc, wire
from jaxtrain_vllm.cuda_driver import HANDLE_BYTES, Cuda, CudaError
from jaxtrain_vllm.weight_receiver import WeightReceiver

torch = pytest.importorskip("torch", reason="a worker's side needs torch")
from jaxtrain_vllm.cuda_ipc import CudaIpcMemory  # noqa: E402

NAMED = [ParameterEntry(name, TensorRef(name)) for name in SHAPES]


def open_image(entries, shapes, dtype, cuda, wide=()):
    def rows(params, homes):
        return list_rows(params, entries, dtype, homes, wide)

    return DeviceImage(shapes, dtype, rows, cuda, wide)


def read(image, cuda):
    """Bytes that a worker reads, and their checksum."""
    described = image.describe()
    memory = CudaIpcMemory(described["memory"], "cpu", cuda)
    tensors = memory.read(described["tensors"])
    integers = {n: t.bits.to_torch(t.shape, t.dtype) for n, t in tensors.items()}
    kinds = {2: torch.int16, 4: torch.int32}
    actual = {n: t.view(kinds[t.itemsize]).numpy().ravel() for n, t in integers.items()}
    checksum = memory.checksum(tensors)
    memory.close()
    return actual, checksum


def add_up(tensors):
    """`wire.combine_sums` in plain steps."""
    sums = {}
    for name, (shape, _, raw) in tensors.items():
        signed = raw.view("<i2" if raw.itemsize == 2 else "<i4").astype(int)
        rows = signed.reshape(shape[0] if shape else 1, -1).sum(1).tolist()
        sums[name] = sum((i + 1) * row for i, row in enumerate(rows))
    return wire.combine_sums(tensors, sums)


@pytest.mark.parametrize(
    "dtype, sharded", [pytest.param("bfloat16", True, marks=pytest.mark.slow), ("float32", False)]
)
def test_a_worker_reads_what_was_laid_out(dtype, sharded, monkeypatch):
    """Transposed, in parts of other parameters, gathered from devices that shard them and spread
    over their memory; the sum of pieces is that of plain steps."""
    monkeypatch.setattr(cuda_ipc, "CHUNK_BYTES", 24)
    monkeypatch.setattr("jaxtrain.generation.weight_sync.device_layout.SMALL_BYTES", 0)
    cuda, wide = HostCuda(), WIDE if dtype == "bfloat16" else ()
    image = open_image(ENTRIES, tensor_shapes(), dtype, cuda, wide)
    for seed in (0, 1):
        params, provided = draw(seed), {}
        mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        position = {"up": (None, "a", None), "embed": (None, "b"), "q": (None, None, "a")}
        for name, array in params.items():
            axes = jax.P(*position.get(name, (None,) * array.ndim))
            spot = jax.NamedSharding(mesh, axes) if sharded else jax.devices()[0]
            provided[name] = jax.device_put(array, spot)
        image.take(provided)
        assert image.state.state() == (-1, 0)
        checksum = image.seal(seed)
        assert image.state.state() == (seed, checksum)
        expected = plain(params, dtype, wide)
        actual, same = read(image, cuda)
        assert set(actual) == set(expected) and checksum == same == add_up(expected)
        assert checksum == wire.combine_sums(
            expected, {n: wire.add_up(t) for n, t in expected.items()}
        )
        for name, tensor in expected.items():
            np.testing.assert_array_equal(actual[name].view(tensor.bits.dtype), tensor.bits)
    blocks = {spot.block for spot in image._spots.values()}
    assert blocks == set(range(4 if sharded else 1)) and not cuda.opened
    image.free()
    assert len(cuda.freed) == len(blocks)


def test_the_sum_tells_rows_in_another_order_and_names():
    tensors = plain(draw(0), "bfloat16")
    swapped = {**tensors, "e": tensors["e"]._replace(bits=np.roll(tensors["e"].bits, 4))}
    assert add_up(swapped) != add_up(tensors) == add_up(dict(reversed(tensors.items())))


def test_tensors_share_the_devices_evenly():
    spots, room = spread({"a": 1000, "b": 10, "c": 10, "d": 0, "e": 600}, 2)
    assert room == [2048, 1024] and [tuple(spot) for spot in spots.values()] == [
        (0, 0), (1, 0), (1, 512), (0, 1024), (0, 1024),
    ]  # fmt: skip


def test_columns_of_a_tensor_are_not_taken():
    entries = [ParameterEntry("q", Transpose(SplitRows("w", 1, 0, 6)))]
    image = open_image(entries, {"w": (4, 6)}, "bfloat16", HostCuda())
    with pytest.raises(CudaError, match="w is put together from columns"):
        image.take({"q": jnp.zeros((2, 4))})


class Setting:
    """Servers that read the trainer's memory, their trainer, and the driver of each."""

    def __init__(self, count=1, world_size=1):
        self.trainer, self.worker = HostCuda(), HostCuda()
        self.fakes = [
            FakeVllm(tensors=HELD, world_size=world_size, open_ipc_memory=self.open)
            for _ in range(count)
        ]
        self.refuses_rank: int | None = None
        self._asked = 0

    def open(self, described):
        self._asked += 1
        if self.refuses_rank == self._asked - 1:
            raise OSError("cuIpcOpenMemHandle_v2: CUDA_ERROR_OF_A_TEST (999)")
        return CudaIpcMemory(described, "cpu", self.worker)

    @contextlib.contextmanager
    def publish(self, delta=False, **options):
        with open_servers(self.fakes, **options) as (engine, servers, self.said):
            self.image = open_image(NAMED, SHAPES, "bfloat16", self.trainer)
            publisher = WeightPublisher(
                servers,
                lambda params: list_pieces(params, NAMED, "bfloat16"),
                TensorSet(SHAPES),
                delta=delta,
                device=self.image,
            )
            yield engine, publisher
            publisher.close()


def place(params):
    return {name: jnp.asarray(array) for name, array in params.items()}


def assert_loaded(fake, params):
    for rank, loaded in enumerate(fake.loaded):
        assert fake.shelves[rank].version >= 0 and set(loaded) == set(params)
        for name, expected in bits(params).items():
            actual = loaded[name]
            if not isinstance(actual, np.ndarray):
                actual = actual.view(torch.int16).numpy().view(np.uint16)
            np.testing.assert_array_equal(actual, expected)


def test_weights_go_from_device_to_device_and_none_through_the_host():
    """Two servers of two ranks each, three versions; a delta needs nothing more."""
    setting = Setting(count=2, world_size=2)
    with setting.publish(delta=True) as (engine, publisher):
        for version in range(3):
            params = draw_params(version)
            metrics = publisher.publish(version, place(params))
            assert metrics["sync/tcp_bytes"] == 0 and metrics["sync/delta"] == 0
            assert metrics["sync/bytes"] == 4 * (16 * 8 + 8) * 2
            for fake in setting.fakes:
                assert_loaded(fake, params)
            assert ask(engine)[0].versions == [version] * 4
        assert publisher.image is None and not setting.said
        assert len(setting.worker.opened) == 4, "opened once by each worker"
    wait_until(lambda: not setting.worker.opened)
    assert len(setting.trainer.freed) == 1


def wait_until(done, seconds=60.0):
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("case", ["no GPU", "one rank", "open", "spoiled", "allocate", "copy"])
def test_what_does_not_work_goes_through_the_host(case):
    """With one line that says why; the same publish ends well, and so do those after it."""
    setting = Setting(count=2, world_size=2)
    if case == "no GPU":
        for shelf in setting.fakes[0].shelves:
            shelf.open_ipc_memory = None
    elif case == "one rank":
        setting.refuses_rank = 3
    elif case == "open":
        setting.worker.refuses = {"open"}
    elif case == "spoiled":
        setting.worker.spoils = True
    else:
        setting.trainer.refuses = {case}
    messages = {
        "no GPU": "a server cannot read it: WireError: this server does not run on an NVIDIA GPU",
        "spoiled": "after the transfer, the trainer has",
        "allocate": "CUDA_ERROR_OF_A_TEST (999), for 0.0 GiB beside jax's pool",
    }.get(case, "CUDA_ERROR_OF_A_TEST (999)")
    with setting.publish(delta=True) as (engine, publisher):
        params = draw_params()
        for version in range(3):
            metrics = publisher.publish(version, place(params))
            for fake in setting.fakes:
                assert_loaded(fake, params)
            assert ask(engine)[0].versions == [version] * 4 and metrics["sync/tcp_bytes"] == 0
            params["model.norm.weight"][version] += 1
        assert metrics["sync/delta"] == 1, "against what went through the host before"
        assert publisher.device is None and not setting.worker.opened
        [line] = setting.said
        assert line.startswith("rollout.vllm.transport device: ") and messages in line
        assert line.endswith("weights go through the host's memory from now on")
        assert len(setting.trainer.freed) == (case != "allocate")


def test_memory_that_holds_something_else_is_not_served():
    """Neither from the device nor through the host; the next version goes through the host."""
    setting = Setting()
    with setting.publish(wait_seconds=0.3) as (_, publisher):
        publisher.publish(0, place(draw_params()))
        setting.trainer.spoils = True
        with pytest.raises(RunStopped, match="does not hold what was written there"):
            publisher.publish(1, place(draw_params(1)))
        assert publisher.device is None
        for name, expected in bits(draw_params()).items():
            actual = setting.fakes[0].loaded[0][name].view(torch.int16).numpy()
            np.testing.assert_array_equal(actual.view(np.uint16), expected)


def test_a_server_elsewhere_sends_all_through_the_host(monkeypatch):
    setting = Setting()
    with setting.publish() as (_, publisher):
        publisher.publish(0, place(draw_params()))
        for link in publisher.links.wait_for(setting.fakes[0].url, 1, 1.0):
            link.local_host = "elsewhere"
        publisher.publish(1, place(draw_params(1)))
        assert_holds(setting.fakes[0], draw_params(1))
        assert "a server is on another host (127.0.0.1)" in setting.said[0]


def test_a_server_that_dies_while_it_loads_costs_the_others_nothing():
    """And is given the newest from the device once it is back."""
    setting = Setting(count=2)
    first, second = setting.fakes
    with setting.publish() as (_, publisher):
        publisher.publish(0, place(draw_params()))

        def die():
            threading.Thread(target=first.kill).start()
            time.sleep(0.3)

        first.while_loading = die
        publisher.publish(1, place(draw_params(1)))
        assert_loaded(second, draw_params(1))
        assert "dropped" in setting.said[0] and publisher.device is not None
        first.while_loading = None
        wait_until(lambda: not first.thread.is_alive())
        first.start()
        wait_until(lambda: any("is back with version 1" in line for line in setting.said))
        assert_loaded(first, draw_params(1))
        assert publisher.image is None


def test_a_worker_that_hangs_has_sync_seconds():
    setting = Setting(count=2)
    with setting.publish(sync_seconds=0.5) as (_, publisher):
        publisher.publish(0, place(draw_params()))
        setting.fakes[0].trouble["links"] = "stall"
        started = time.monotonic()
        publisher.publish(1, place(draw_params(1)))
        assert time.monotonic() - started < 3
        assert_loaded(setting.fakes[1], draw_params(1))
        assert "dropped" in setting.said[0] and publisher.device is not None
        setting.fakes[0].trouble.clear()


def test_memory_that_is_written_meanwhile_is_not_served():
    """Simulate a trainer that no longer waits for this server."""
    setting = Setting()
    with setting.publish(wait_seconds=0.3, sync_seconds=2) as (_, publisher):
        publisher.publish(0, place(draw_params()))
        setting.fakes[0].while_loading = setting.image.state.begin
        with pytest.raises(RunStopped):
            publisher.publish(1, place(draw_params(1)))
        assert setting.fakes[0].shelves[0].version == -1


@settings(max_examples=25, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "blocks": st.lists(
                st.fixed_dictionaries(
                    {
                        "handle": st.sampled_from(["00" * 64, "zz", "ab", None]),
                        "bytes": st.sampled_from([-1, 2**80, 64, None, True]),
                    }
                )
                | st.none(),
                max_size=2,
            ),
            "state": st.sampled_from([None, {}, {"path": "/etc/passwd"}, "own"]),
        },
    )
    | st.none(),
    st.lists(
        st.fixed_dictionaries(
            {
                "name": st.sampled_from(["a", None, "b"]),
                "shape": st.sampled_from([[2, 2], [2**30, 2**9], None, []]),
                "dtype": st.sampled_from(["bfloat16", "int8"]),
            },
            optional={
                "block": st.sampled_from([0, -1, 1, "0"]),
                "start": st.sampled_from([0, -4, 60, 2**70, None]),
            },
        ),
        max_size=2,
    ),
)
def test_lent_memory_that_is_none_is_refused(memory, tensors):
    cuda = HostCuda()
    image = open_image(NAMED, SHAPES, "bfloat16", cuda)
    image._allocate(list_devices(place(draw_params())))
    image.state.seal(1, 5)
    if isinstance(memory, dict) and memory.get("state") == "own":
        memory = {**image.describe()["memory"], **memory, "state": image.state.described}
    header = {"kind": "lent", "version": 1, "checksum": 6, "tensors": tensors, "memory": memory}
    shelf = WeightReceiver(lambda described: CudaIpcMemory(described, "cpu", cuda))
    answer = shelf.answer(header, memoryview(b""))
    assert set(answer) == {"error"} and len(answer["error"]) <= 500 and shelf.staged is None


class Driver:
    """libcuda's calls, noted; `fails` names one that does not work."""

    def __init__(self, fails=None):
        self.fails, self.calls = fails, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, *arguments))
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"
                return 0
            if name in ("cuMemAlloc_v2", "cuIpcOpenMemHandle_v2", "cuStreamCreate"):
                arguments[0]._obj.value = 4096
            if name == "cuPointerGetAttribute":
                ctypes.c_int.from_address(arguments[0]).value = 3
            if name == "cuIpcGetMemHandle":
                arguments[0]._obj.reserved[:] = range(HANDLE_BYTES)
            return 217 if name == self.fails else 0

        self.__dict__[name] = call
        return call


def test_the_driver_is_called_in_the_context_of_a_device():
    driver = Driver()
    cuda = Cuda(driver)
    assert cuda.locate(77) == 3 and cuda.allocate(3, 100) == 4096
    assert cuda.export(3, 4096) == bytes(range(HANDLE_BYTES))
    assert cuda.open(3, bytes(range(HANDLE_BYTES))) == 4096
    cuda.copy(3, 1, 2, 50)
    cuda.copy(3, 1, 2, 50, stream=0)
    cuda.wait(3)
    cuda.finish(3)
    cuda.close(3, 4096)
    cuda.free(3, 4096)
    names = [call[0] for call in driver.calls]
    assert names.count("cuCtxPushCurrent_v2") == names.count("cuCtxPopCurrent_v2") == 9
    assert names.count("cuStreamCreate") == names.count("cuDevicePrimaryCtxRetain") == 1
    copies = [call[1:4] for call in driver.calls if call[0] == "cuMemcpyAsync"]
    assert copies == [(1, 2, 50)] * 2
    assert [call[2] for call in driver.calls if call[0] == "cuMemAlloc_v2"] == [2**21]


def test_what_the_driver_refuses_is_told_by_its_name():
    driver = Driver(fails="cuIpcOpenMemHandle_v2")
    with pytest.raises(CudaError) as error:
        Cuda(driver).open(0, bytes(HANDLE_BYTES))
    messages = "cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)"
    assert str(error.value) == messages and driver.calls[-2][0] == "cuGetErrorName"
    assert driver.calls[-1][0] == "cuCtxPopCurrent_v2"
    with pytest.raises(CudaError, match="64 bytes, not 3"):
        Cuda(driver).open(0, b"abc")


def test_a_trainer_without_gpus_says_so_once():
    output = []
    assert open_device_image(SHAPES, "bfloat16", NAMED, output.append) is None
    assert output == [
        "rollout.vllm.transport device: the run trains on cpu, not on NVIDIA GPUs; weights go"
        " through the host's memory"
    ]
