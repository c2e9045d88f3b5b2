"""Processes find each other and exchange messages: without jax, over local sockets."""

import asyncio
import contextlib
import json

import pytest

from jaxtrain.config import ParallelConfig
from jaxtrain.distributed.hub import CoordinationHub
from jaxtrain.distributed.launch import (
    Launch,
    choose_devices,
    expand_counts,
    find_launch,
    first_host,
    is_tpu_pod,
)
from jaxtrain.errors import UserError

SLURM = {
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_STEP_TASKS_PER_NODE": "8,4",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_PROCID": "9",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "4097",
}
TORCHRUN = {
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "1234",
    "WORLD_SIZE": "16",
    "RANK": "11",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
}


def find(environ, launcher="auto", **explicit):
    return find_launch(ParallelConfig(launcher=launcher, **explicit), environ)


def test_launchers_variables_are_read():
    assert find(SLURM) == Launch("gpu03:61441", 9, 12, 1, 4)
    assert find(TORCHRUN) == Launch("host0:1235", 11, 16, 3, 8)
    assert find({**SLURM, **TORCHRUN}, "slurm").size == 12
    assert find(SLURM, coordinator="here:99", num_processes=2, process_id=1) == Launch(
        "here:99", 1, 2
    )
    assert find({}) is None
    # sbatch without srun: the batch script itself is no task of a step.
    assert find({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize(
    ("launcher", "environ", "words"),
    [
        ("slurm", TORCHRUN, "SLURM_STEP_NUM_TASKS"),
        ("torchrun", SLURM, "WORLD_SIZE and RANK"),
        ("auto", {"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR is not"),
    ],
)
def test_a_launcher_without_its_variables_is_named(launcher, environ, words):
    with pytest.raises(UserError, match=words):
        find(environ, launcher)


def test_names_and_counts_of_slurm():
    assert first_host("gpu[03-05,9],x") == "gpu03"
    assert first_host("a-1,b") == "a-1"
    assert first_host("n[7,9-11]") == "n7"
    assert expand_counts("8(x2),4") == [8, 8, 4]


@pytest.mark.parametrize(
    ("local", "visible", "expected"),
    [
        ((0, 1), "0,1,2,3", None),
        ((1, 4), None, [1]),
        ((1, 4), "2", None),
        ((1, 2), "0,1,2,3", [2, 3]),
    ],
)
def test_processes_of_a_machine_share_its_gpus(local, visible, expected):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert choose_devices(Launch("a:1", 0, 8, *local), environ) == expected


def test_gpus_that_cannot_be_shared_are_refused():
    with pytest.raises(UserError, match="names 3 GPUs for 2 processes"):
        choose_devices(Launch("a:1", 0, 8, 0, 2), {"CUDA_VISIBLE_DEVICES": "0,1,2"})


def test_a_machine_without_tpus_is_no_pod():
    assert not is_tpu_pod("auto", {"JAX_PLATFORMS": "cpu"})
    assert is_tpu_pod("tpu", {})


class Client:
    """A process as the hub sees it."""

    def __init__(self, process: int, size: int):
        self.process, self.size = process, size

    async def join(self, port: int) -> "Client":
        self.reader, self.writer = await asyncio.open_connection("localhost", port)
        self.log({"process": self.process, "of": self.size, "host": f"h{self.process}"})
        return self

    def log(self, message: dict) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def receive(self) -> dict:
        return json.loads(await asyncio.wait_for(self.reader.readline(), 60))


def play(scene, size=3, timeouts=(30.0, 30.0, 30.0)):
    """Run `scene(hub, clients)` with all clients joined and told to start."""

    async def stage():
        hub = CoordinationHub(size, *timeouts)
        server = await asyncio.start_server(hub.serve, "localhost", 0)
        port = server.sockets[0].getsockname()[1]
        clients = [await Client(i, size).join(port) for i in range(size)]
        for client in clients:
            assert "start" in await client.receive()
        async with server:
            result = await scene(hub, clients, port)
            for client in clients:
                client.writer.close()
        return result

    return asyncio.run(stage())


@pytest.mark.slow
def test_a_lost_process_is_reported_once_as_the_cause_of_other_failures():
    async def scene(hub, clients, port):
        clients[1].log({"end": 1, "text": "ValueError: all-reduce failed", "rank": 2})
        clients[2].writer.close()
        return [await client.receive() for client in clients[:2]]

    first, second = play(scene)
    assert first["tell"].startswith("process 2 on h2: ended without a word")
    assert first["quit"] == 1
    assert second["tell"] == "" and second["quit"] == 1 and not second["blamed"]


@pytest.mark.slow
def test_an_error_of_all_processes_is_printed_once():
    async def scene(hub, clients, port):
        for client in clients:
            client.log({"end": 2, "text": "data.x: no such file", "rank": 1})
        return [await client.receive() for client in clients]

    first, *rest = play(scene)
    assert first["tell"] == "data.x: no such file" and first["quit"] == 2
    assert all(message["tell"] == "" and message["quit"] == 2 for message in rest)


def test_an_error_of_one_process_names_it():
    async def scene(hub, clients, port):
        clients[1].log({"end": 2, "text": "no such file", "rank": 1})
        return [await client.receive() for client in clients]

    messages = play(scene)
    assert [line["tell"] for line in messages] == ["process 1 on h1: no such file", "", ""]
    assert [line["quit"] for line in messages] == [1, 2, 1]


@pytest.mark.slow
def test_silent_processes_and_those_missing_at_a_barrier_are_named():
    async def scene(hub, clients, port):
        for client in clients[:2]:
            client.log({"barrier": "saving"})
        return await clients[0].receive()

    line = play(scene, timeouts=(30.0, 0.3, 30.0))["tell"]
    assert line == 'process 2 on h2: did not come to "saving" within 0.3 s of the first'

    async def silent(hub, clients, port):
        for _ in range(16):
            clients[0].log({"beat": True})
            clients[1].log({"beat": True})
            await asyncio.sleep(0.25)
        return await clients[0].receive()

    line = play(silent, timeouts=(30.0, 30.0, 2.0))["tell"]
    assert line == "process 2 on h2: gave no sign of life for 2 s"


def test_all_stop_after_the_latest_step_that_any_process_began():
    async def scene(hub, clients, port):
        clients[2].log({"stop": "SIGTERM"})
        clients[0].log({"stop": "SIGINT"})
        for client, step in zip(clients, (7, 8, 7), strict=True):
            assert await client.receive() == {"halt": "SIGTERM"}
            client.log({"at": step})
        return [await client.receive() for client in clients]

    assert play(scene) == [{"stop_at": 8, "name": "SIGTERM"}] * 3


ODD = [
    None,
    [],
    7,
    {"end": "x"},
    {"barrier": ["x"]},
    {"at": None},
    {"stop": 1},
]


def test_malformed_lines_are_ignored():
    """Senders know the token but speak, for example, another version of the protocol."""

    async def scene(hub, clients, port):
        for hello in (b"[]\n", b'{"process": 1}\n', b"\xff\n", b"[" * 5000 + b"\n", b"x" * 2**17):
            reader, writer = await asyncio.open_connection("localhost", port)
            writer.write(hello)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()
        for message in ODD:
            clients[1].log(message)
        clients[2].log({"stop": "SIGTERM"})
        return [await client.receive() for client in clients]

    assert play(scene) == [{"halt": "SIGTERM"}] * 3


def test_duplicate_processes_and_wrong_sizes_are_refused():
    async def scene(hub, clients, port):
        twice = await Client(1, 3).join(port)
        wrong_size = await Client(0, 5).join(port)
        return (await twice.receive())["tell"], (await wrong_size.receive())["tell"]

    twice, wrong_size = play(scene)
    assert "process 1 is here twice" in twice
    assert "of 5 processes, process 0 of 3" in wrong_size


@pytest.mark.slow
def test_processes_that_never_join_are_named():
    async def scene():
        hub = CoordinationHub(3, 0.5, 30.0, 30.0)
        server = await asyncio.start_server(hub.serve, "localhost", 0)
        async with server:
            client = await Client(0, 3).join(server.sockets[0].getsockname()[1])
            watch = asyncio.create_task(hub.watch_start())
            message = await client.receive()
            await watch
            client.writer.close()
            return message

    line = asyncio.run(scene())["tell"]
    assert "process 1 on an unknown machine: did not come within 0.5 s" in line
    assert "process 2" in line
