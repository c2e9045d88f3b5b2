"""Images of URLs: which hosts are asked, and for how long."""

import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from smolvlm_text import ANSWER, draw, make_reader, open_tokenizer

from jaxtrain.data.chat.messages import MalformedRow
from jaxtrain.data.images import fetch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return open_tokenizer(folder)


def ask(url):
    """Return a row whose one image is at a URL."""
    question = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    return {"messages": [question, ANSWER], "image": url}


class Pictures(BaseHTTPRequestHandler):
    """Server of wide.png, and of a redirection to what follows ?to=."""

    def do_GET(self):
        path, _, target = self.path.partition("?to=")
        if target:
            self.send_response(302)
            self.send_header("Location", target)
            self.end_headers()
        elif path == "/wide.png":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(draw(20, 10))
        else:
            self.send_error(404)

    def log_message(self, *_):
        pass


def test_a_url_is_fetched_of_an_allowed_host_alone(folder, tokenizer):
    with ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        read = make_reader(folder, tokenizer, image_hosts=["127.0.0.1", "Some.Example"])
        host = f"127.0.0.1:{server.server_port}"
        for url in (f"http://{host}/wide.png", f"http://{host}/?to=http://{host}/wide.png"):
            [sample] = read(ask(url))
            assert [image.size for image in sample.images.images] == [(20, 10)]
        for url, reason in (
            (f"http://{host}/no.png", "an image cannot be fetched: Not Found"),
            (f"http://{host}/a b.png", "an image cannot be fetched: URL can't contain control"),
            ("https://other.example/a.png", "a URL of 'other.example', not in image_hosts"),
            (f"http://{host}/?to=http://localhost/a.png", "a URL of 'localhost', not in image"),
            (f"http://{host}/?to=ftp://127.0.0.1/a.png", "a URL of scheme 'ftp'"),
        ):
            [drop] = read(ask(url))
            assert reason in drop.reason, (url, drop.reason)
        server.shutdown()
    for host in ("some.example", "SOME.Example"):
        fetch.check_host(f"https://{host}/a.png", read.images.hosts)


@pytest.mark.parametrize("headers", [True, False])
def test_a_slow_server_holds_no_reader(headers, folder, tokenizer, monkeypatch):
    """A byte now and then keeps a socket's timeout from ever running out."""
    monkeypatch.setattr(fetch, "SECONDS", 0.4)
    done = threading.Event()

    class Slow(Pictures):
        def do_GET(self):
            if headers:
                self.send_response(200)
                self.send_header("Content-Length", "1000000")
                self.end_headers()
            try:
                while not done.wait(0.02):
                    self.wfile.write(b"H")
                    self.wfile.flush()
            except OSError:
                pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        read = make_reader(folder, tokenizer, image_hosts=["127.0.0.1"])
        start = time.monotonic()
        [drop] = read(ask(f"http://127.0.0.1:{server.server_port}/a.png"))
        seconds = time.monotonic() - start
        done.set()
        server.shutdown()
    assert "it takes more than 0.4 seconds" in drop.reason and seconds < 5


def test_dead_addresses_of_a_host_share_the_time_of_a_fetch(monkeypatch):
    """Each would get all of it from socket.create_connection."""
    monkeypatch.setattr(fetch, "SECONDS", 0.4)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        for _ in range(4):  # a full queue answers no further connection
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        stream = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        addresses = [(*stream, full.getsockname())] * 20
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: addresses)
        start = time.monotonic()
        with pytest.raises(MalformedRow, match="it takes more than 0.4 seconds"):
            fetch.fetch("http://some.example/a.png", ("some.example",))
        assert time.monotonic() - start < 2
        # A dead one does not keep a living one behind it from its turn.
        monkeypatch.setattr(fetch, "SECONDS", 2.0)
        with ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            addresses[1:] = [(999, *stream[1:], ()), (*stream, server.server_address)]
            assert fetch.fetch("http://some.example/wide.png", ("some.example",))
            server.shutdown()
