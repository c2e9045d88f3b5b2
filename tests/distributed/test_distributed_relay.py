"""Messages of process 0 to the others, and parameters that it gathers, between real processes."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from other_devices import set_cpus

from jaxtrain.distributed.hub import free_port
from jaxtrain.distributed.relay import Receiver, Sender
from jaxtrain.errors import UserError

TOKEN = b"token of the tests"
ROOT = Path(__file__).parents[2]


STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n",
    json.dumps({"process": 1, "of": 2, "host": "x"}).encode() + b"\n",
    b'{"process": 0, "of": 2, "host": "x"}\n{"end": 1, "text": "forged", "rank": 0}\n',
    b"",
    b"\x80\x05\x95" + bytes(2**20),
]


def pester(port: int, ended: threading.Event) -> int:
    """Strangers at the hub, some of whom stay, until the run has ended; how many came through."""
    connections, count = [], 0
    while not ended.wait(0.05):
        try:
            stranger = socket.create_connection(("127.0.0.1", port), timeout=1)
            stranger.sendall(STRANGERS[count % len(STRANGERS)])
        except OSError:
            continue
        count += 1
        connections.append(stranger)
    for stranger in connections:
        stranger.close()
    return count


@pytest.mark.slow
def test_values_and_parameters_are_shared_despite_strangers_at_the_hub(tmp_path):
    ended = threading.Event()
    environ = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}:{ROOT / 'tests/plain'}",
        **set_cpus(2),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    worker, port = Path(__file__).with_name("relay_worker.py"), str(free_port())
    running = [
        subprocess.Popen(
            [sys.executable, str(worker), port, "2", str(process)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    came = []
    strangers = threading.Thread(target=lambda: came.append(pester(int(port), ended)))
    strangers.start()
    try:
        outputs = [process.communicate(timeout=200) for process in running]
    finally:
        ended.set()
        strangers.join()
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], outputs
    assert came[0] > 10 and list(tmp_path.glob("**/*.token")) == []
    assert not any("Traceback" in err or "forged" in err for _, err in outputs)
    assert outputs[0][1].count("did not show this run's token") == 1
    reports = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
    for report in reports:
        assert (report["one"], report["two"], report["total"]) == (
            17,
            "xxx",
            pytest.approx(0, abs=1e-4),
        )
        assert report["bytes"] > 50e6 and report["checksum"] == reports[0]["checksum"]
        assert report["seconds"] < 60, "a second or so, unless the machine is busy"
    # Whole rows of what no axis cuts; 192 bytes of a layer are more than a piece of 100.
    expected = {"stack": [0, 1], "table": [1, 3], "all": [1, 3]}
    assert reports[0]["pieces"] == {**expected, "cut": None, "norm": None, "scale": None}


def open_pair() -> tuple[Sender, Receiver]:
    sender = Sender(1, TOKEN)
    return sender, Receiver("localhost", sender.port, TOKEN, timeout=60)


def test_a_stranger_is_disconnected_and_receives_nothing():
    sender = Sender(1, TOKEN)
    stranger = socket.create_connection(("localhost", sender.port))
    stranger.sendall(bytes(32))
    assert stranger.recv(1) == b""
    receiver = Receiver("localhost", sender.port, TOKEN, timeout=60)
    sender.send("a", 1)
    assert receiver.receive("a") == 1


def test_arrays_arrive_as_they_are_and_may_be_written_to():
    sender, receiver = open_pair()
    strided = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2]
    value = {"a": strided, "b": np.float32(2), "c": np.zeros((0, 3)), "d": None}
    sender.send("arrays", value)
    heard = receiver.receive("arrays")
    np.testing.assert_array_equal(heard["a"], strided)
    assert heard["a"].dtype == np.int32 and heard["c"].shape == (0, 3) and heard["d"] is None
    heard["a"][0, 0] = 5


def test_a_value_under_another_name_is_an_error():
    sender, receiver = open_pair()
    sender.send("a round", 1)
    with pytest.raises(AssertionError, match="shares 'a round', this process waits for 'answers'"):
        receiver.receive("answers")


def test_a_port_of_another_program_is_no_relay():
    with socket.create_server(("localhost", 0)) as impostor:
        threading.Thread(target=lambda: impostor.accept()[0].close()).start()
        with pytest.raises(UserError, match="is not process 0 of this run"):
            Receiver("localhost", impostor.getsockname()[1], bytes(32), timeout=5)


def test_the_end_of_process_0_ends_the_wait():
    sender, receiver = open_pair()
    sender.send("a", 1)
    assert receiver.receive("a") == 1
    for connection in sender._connections:
        connection.close()
    with pytest.raises(ConnectionError):
        receiver.receive("a round")


def test_a_closed_port_is_explained():
    with pytest.raises(UserError, match="cannot be reached from .* refused"):
        Receiver("localhost", free_port(), bytes(32), timeout=5)
