"""A server that is killed again and again: a client that repeats lost requests sees nothing."""

import http.client
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from api_toy import Client, Server, as_data, draw_documents
from toy_run import save_model

from jaxtrain.errors import UserError
from jaxtrain.training_api.journal import Journal, Record

ROOT = Path(__file__).parents[2]


class KilledServer(Server):
    """`jaxtrain serve --train` as a process, which is started again whenever it has died."""

    def __init__(self, model, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        words = ["serve", str(model), "--served-model-name", "toy", "--train", str(folder)]
        self.command = [sys.executable, "-m", "jaxtrain.main", *words, "--port", str(self.port)]
        self.starts = 0
        self._start()

    def _start(self):
        paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        env = {**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            self.command,
            env={**env, "JAXTRAIN_API_KEY": "tml-key"},
            stdout=subprocess.PIPE,
            text=True,
        )
        self.starts += 1
        assert self.process.stdout.readline().startswith("serving toy")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)

    def stop(self):
        self.process.kill()
        self.process.communicate()

    def send(self, path, body, **options):
        while True:
            try:
                return super().send(path, body, **options)
            except (ConnectionError, http.client.HTTPException):
                if self.process.poll() is not None:
                    self.process.communicate()
                    self._start()
                time.sleep(0.05)


def run_client(model, folder, steps, kills=()):
    """(losses, arrays of the saved state, starts of the server); kills: seconds after the beginning
    of a step, by step."""
    server = KilledServer(model, folder)
    try:
        client = Client(server)
        losses = []
        for step in range(steps):
            timer = threading.Timer(kills[step], server.kill) if step in kills else None
            if timer is not None:
                timer.start()
            losses.append(client.step(as_data(draw_documents(3, seed=step % 3))))
            if timer is not None:
                timer.join()
                server.send("client/config", {})  # it runs again before the next kill
        saved = server.result(client.post("save_weights", path="end"))
        assert saved["path"].endswith("weights/end")
    finally:
        server.stop()
    (state_folder,) = folder.glob("models/*/weights/end/0/state")
    arrays = ocp.PyTreeCheckpointer().restore(state_folder)
    return losses, arrays, server.starts


@pytest.mark.parametrize(
    "steps, count",
    [pytest.param(10, 4, marks=pytest.mark.slow), pytest.param(24, 20, marks=pytest.mark.thorough)],
)
def test_kills_at_random_moments_change_neither_losses_nor_weights(tmp_path, steps, count):
    save_model(tmp_path / "model")
    losses, arrays, _ = run_client(tmp_path / "model", tmp_path / "calm", steps)
    rng = random.Random(0)
    kills = {step: rng.uniform(0.0, 0.1) for step in rng.sample(range(steps), count)}
    again, same, starts = run_client(tmp_path / "model", tmp_path / "killed", steps, kills)
    assert starts == 1 + count and again == losses
    assert arrays.keys() == same.keys()
    for name, value in arrays.items():
        assert np.array_equal(value, same[name]), name


@pytest.mark.parametrize("cut", [1, 5, 11, 12, 13, 30])
def test_a_torn_record_is_cut_off(tmp_path, cut):
    journal = Journal(tmp_path / "log")
    records = [Record({"number": 1}, b"one"), Record({"number": 2}), Record({"n": "ü"}, b"\0" * 40)]
    journal.append(*records)
    journal.close()
    complete_log = (tmp_path / "log").read_bytes()
    (tmp_path / "log").write_bytes(complete_log[:-cut])
    journal = Journal(tmp_path / "log")
    assert journal.read() == records[:2]
    journal.append(records[2])
    assert journal.read() == records and journal.size == len(complete_log)
    journal.rewrite(records[1:])
    journal.append(records[0])
    journal.close()
    assert Journal(tmp_path / "log").read() == [*records[1:], records[0]]


def test_a_record_that_a_full_disk_refused_spoils_no_later_one(tmp_path):
    journal = Journal(tmp_path / "log")
    records = [Record({"number": number}, bytes([number]) * 50) for number in range(3)]
    journal.append(records[0])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (journal.size + 20, limits[1]))
    try:
        with pytest.raises(OSError):
            journal.append(records[1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    journal.append(records[2])
    assert journal.read() == [records[0], records[2]]


def test_a_flipped_byte_is_cut_off_at_the_end_alone(tmp_path):
    records = [Record({"number": number}, b'{"a": 1}' * 3) for number in range(3)]
    (tmp_path / "log").write_bytes(b"")
    journal = Journal(tmp_path / "log")
    sizes = [0]
    for record in records:
        journal.append(record)
        sizes.append(journal.size)
    journal.close()
    raw = (tmp_path / "log").read_bytes()
    for place in range(len(raw)):
        flipped = bytearray(raw)
        flipped[place] ^= 1
        (tmp_path / "log").write_bytes(flipped)
        number = sum(place >= size for size in sizes)
        journal = Journal(tmp_path / "log")
        if number == 3:
            assert journal.read() == records[:2]
        else:
            with pytest.raises(UserError, match=rf"record {number}, at byte {sizes[number - 1]},"):
                journal.read()
            assert (tmp_path / "log").read_bytes() == flipped
        journal.close()
