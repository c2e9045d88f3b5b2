"""Strangers at a port: their bytes are not read, they cost no thread, and nobody waits for them."""

import queue
import secrets
import socket
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain_vllm import handshake
from jaxtrain_vllm import listener as gates
from jaxtrain_vllm.listener import LOOPBACK, AuthenticatedListener, open_listeners

TOKEN = b"right"


@pytest.fixture
def gate():
    admitted, log_lines = queue.Queue(), []
    opened = AuthenticatedListener(
        "test", open_listeners(LOOPBACK, 0), TOKEN, admitted.put, log_lines.append
    )
    opened.admitted, opened.said = admitted, log_lines
    yield opened
    opened.close()


def knock(gate) -> socket.socket:
    return socket.create_connection(("127.0.0.1", gate.port), timeout=60)


def is_hung_up_on(stranger: socket.socket) -> bool:
    """Return whether the listener has closed its end of the connection, ignoring what it still
    sends."""
    try:
        while stranger.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def enter(gate) -> None:
    """Connect as one of the run's processes."""
    with knock(gate) as visitor:
        handshake.introduce(visitor, TOKEN)
        inner = gate.admitted.get(timeout=60)
        visitor.sendall(b"payload")
        assert inner.recv(7, socket.MSG_WAITALL) == b"payload"
        inner.close()


@pytest.fixture(scope="module")
def crowded():
    """Listener shared by all examples of the fuzz test, with its memory."""
    admitted = queue.Queue()
    opened = AuthenticatedListener(
        "crowded", open_listeners(LOOPBACK, 0), TOKEN, admitted.put, lambda text: None
    )
    opened.admitted = admitted
    yield opened
    opened.close()


REQUESTS = st.sampled_from([b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\xff" * 500, b"{}\n"])
GARBAGE = st.one_of(
    st.binary(min_size=1, max_size=300),
    REQUESTS,
    st.binary(max_size=300).map(lambda end: handshake.MAGIC + bytes(32) + end),
    st.just(b"JXW1" + b"\xff" * 8),
)


@settings(max_examples=40, deadline=None)
@given(GARBAGE, st.booleans())
def test_garbage_closes_the_connection(crowded, garbage, ends):
    """Not at the time limit, but as soon as it is known to be garbage or its end has come."""
    with knock(crowded) as stranger:
        try:
            stranger.sendall(garbage)
            if ends or len(garbage) < handshake.GREETING_BYTES + handshake.PROOF_BYTES:
                stranger.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # hung up on already
        assert is_hung_up_on(stranger)
    assert crowded.admitted.empty()
    enter(crowded)


def test_silent_and_slow_strangers_cost_no_thread_and_are_disconnected(gate, monkeypatch):
    monkeypatch.setattr(handshake, "SECONDS", 0.7)
    before = threading.active_count()
    silent = [knock(gate) for _ in range(20)]
    slow = knock(gate)
    stop = threading.Event()

    def drip():
        for byte in handshake.MAGIC + bytes(28):
            try:
                slow.sendall(bytes([byte]))
            except OSError:
                return
            if stop.wait(0.2):
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    assert threading.active_count() <= before + 1, "the one that drips"
    enter(gate)
    start = time.monotonic()
    assert all(is_hung_up_on(stranger) for stranger in (*silent, slow))
    assert time.monotonic() - start < 60
    stop.set()
    dripping.join()
    while gate.refused < 21 and time.monotonic() - start < 60:
        time.sleep(0.01)  # it hangs up first and counts then
    assert gate.refused == 21
    assert len(gate.said) == 1 and "127.0.0.1" in gate.said[0]


def test_many_strangers_do_not_block_authenticated_connections(gate):
    strangers = [knock(gate) for _ in range(3 * gates.MAX_WAITING)]
    enter(gate)
    assert len(gate._waiting) <= gates.MAX_WAITING
    assert gate.refused >= 2 * gates.MAX_WAITING
    assert len(gate.said) == 1, "one line, however many they are"
    for stranger in strangers:
        stranger.close()


def test_another_token_is_noticed_on_both_sides(gate):
    with knock(gate) as stranger:
        stranger.sendall(handshake.MAGIC + bytes(32))
        reply = stranger.recv(handshake.REPLY_BYTES, socket.MSG_WAITALL)
        stranger.sendall(reply[handshake.NONCE_BYTES :])  # the listener's own proof, sent back
        assert is_hung_up_on(stranger)
    with knock(gate) as visitor, pytest.raises(handshake.HandshakeRefused, match="another token"):
        handshake.introduce(visitor, b"wrong")
    assert gate.admitted.empty()


@pytest.mark.parametrize("answer", [b"", b"x" * handshake.REPLY_BYTES, None])
def test_an_impostor_listener_is_detected(answer):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend():
            connection, _ = listener.accept()
            with connection:
                if answer is None:
                    time.sleep(1)
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=pretend)
        thread.start()
        with socket.create_connection(listener.getsockname()) as visitor:
            with pytest.raises(handshake.HandshakeRefused):
                handshake.introduce(visitor, secrets.token_bytes(8), seconds=0.5)
        thread.join()


def test_only_addresses_of_this_machine_are_listened_at():
    with pytest.raises(OSError):
        open_listeners(["203.0.113.7"], 0)
    (opened,) = open_listeners(["203.0.113.7", "127.0.0.1"], 0)
    with pytest.raises(OSError, match="in use"):
        open_listeners(LOOPBACK, opened.getsockname()[1])
    opened.close()
