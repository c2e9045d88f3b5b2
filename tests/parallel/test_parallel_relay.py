"""What process 0 tells the others, and parameters that it gathers, between real processes."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.parallel.hub import free_port
from jaxtrain.parallel.relay import Receiver, Sender

ROOT = Path(__file__).parents[2]


def test_values_and_parameters_reach_process_0_and_the_others():
    environ = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
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
    try:
        told = [process.communicate(timeout=200) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], told
    found = [json.loads(out.splitlines()[-1]) for out, _ in told]
    for one in found:
        assert (one["one"], one["two"], one["total"]) == (17, "xxx", pytest.approx(0, abs=1e-4))
        assert one["bytes"] > 50e6 and one["checksum"] == found[0]["checksum"]
        assert one["seconds"] < 10, "a second or so, unless the machine is busy"
    # Whole rows of what no axis cuts; 192 bytes of a layer are more than a piece of 100.
    expected = {"stack": [0, 1], "table": [1, 3], "all": [1, 3]}
    assert found[0]["pieces"] == {**expected, "cut": None, "norm": None, "scale": None}


def open_pair() -> tuple[Sender, Receiver]:
    sender = Sender(1)
    waiting = threading.Thread(target=sender.accept)
    waiting.start()
    receiver = Receiver("localhost", sender.port, sender.token, timeout=10)
    waiting.join()
    return sender, receiver


def test_a_stranger_is_hung_up_on_and_hears_nothing():
    sender = Sender(1)
    waiting = threading.Thread(target=sender.accept)
    waiting.start()
    stranger = socket.create_connection(("localhost", sender.port))
    stranger.sendall(bytes(32))
    assert stranger.recv(1) == b""
    receiver = Receiver("localhost", sender.port, sender.token, timeout=10)
    waiting.join()
    sender.tell("a", 1)
    assert receiver.hear("a") == 1


def test_arrays_arrive_as_they_are_and_may_be_written_to():
    sender, receiver = open_pair()
    strided = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::2]
    value = {"a": strided, "b": np.float32(2), "c": np.zeros((0, 3)), "d": None}
    sender.tell("arrays", value)
    heard = receiver.hear("arrays")
    np.testing.assert_array_equal(heard["a"], strided)
    assert heard["a"].dtype == np.int32 and heard["c"].shape == (0, 3) and heard["d"] is None
    heard["a"][0, 0] = 5


def test_processes_that_are_at_different_places_notice():
    sender, receiver = open_pair()
    sender.tell("a round", 1)
    with pytest.raises(AssertionError, match="shares 'a round', this process waits for 'answers'"):
        receiver.hear("answers")


def test_the_end_of_process_0_ends_the_wait():
    sender, receiver = open_pair()
    for connection in sender._connections:
        connection.close()
    with pytest.raises(ConnectionError):
        receiver.hear("a round")


def test_a_closed_port_is_explained():
    with pytest.raises(UserError, match="cannot be reached from .* refused"):
        Receiver("localhost", free_port(), bytes(32), timeout=5)
