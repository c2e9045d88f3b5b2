"""servers.json: what it tells, and when it is written."""

import json
import time

from jaxtrain.generation.vllm.pool import VllmServer
from jaxtrain.generation.vllm.servers import Listing


def test_the_file_follows_the_servers(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxtrain.generation.vllm.servers.LISTING_SECONDS", 0.01)
    path = tmp_path / "servers.json"
    servers = [VllmServer("http://me:hunter2@gpu7:8000", why="not asked yet", since=5.0)]

    def wait_for(**expected) -> dict:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            actual = json.loads(path.read_text()) if path.exists() else []
            if actual and expected.items() <= actual[0].items():
                return actual[0]
            time.sleep(0.01)
        raise AssertionError(actual)

    with Listing(path, lambda: servers):
        first = wait_for(state="new", version=None, why="not asked yet", since=5.0, in_flight=0)
        assert "hunter2" not in first["url"] and "gpu7:8000" in first["url"]
        servers[0].state, servers[0].version, servers[0].in_flight = "up", 3, 12
        wait_for(state="up", version=3, in_flight=12, why="")
        written = path.stat().st_mtime_ns
        time.sleep(0.05)
        assert path.stat().st_mtime_ns == written  # nothing is another
        servers[0].state, servers[0].why = "down", "/health: \x1b[2J refused"
    assert json.loads(path.read_text())[0]["why"] == "/health: \\x1b[2J refused"


def test_without_a_folder_nothing_is_written(tmp_path):
    with Listing(tmp_path / "gone" / "servers.json", lambda: [VllmServer("http://a:1")]):
        pass
    assert not (tmp_path / "gone").exists()
