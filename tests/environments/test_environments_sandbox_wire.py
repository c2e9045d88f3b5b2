"""Values over the wire: what goes out comes back equal, and no message breaks the reader."""

import json
import socket
import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.environments.sandbox.peer import (
    DATES,
    DICTS,
    MANY,
    NUMBERS,
    ConnectionClosed,
    SandboxPeer,
)
from jaxtrain.environments.sandbox.remote_handle import RemoteHandle
from jaxtrain.environments.sandbox.tester import TestPeer

BOUNDED = settings(max_examples=60, deadline=None)
KINDS = ["value", "error", "mine", "yours", "import", "type", "int", "slice", "timedelta", "call"]
KINDS += [*MANY, *DICTS, *NUMBERS, *DATES, "bytes", "Fraction", "...", "get"]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(KINDS),
)
values = st.recursive(
    st.one_of(scalars, st.binary(max_size=5), st.complex_numbers()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(scalars, inner)
    ),
    max_leaves=8,
)
messages = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4), max_leaves=10)


@BOUNDED
@given(values)
def test_plain_values_come_back(value):
    peer = SandboxPeer(socket.socket(), None, RemoteHandle)
    actual = peer.unpack(json.loads(json.dumps(peer.pack(value))))
    assert repr(actual) == repr(value)


@BOUNDED
@given(st.lists(messages, max_size=4), st.binary(max_size=20))
def test_a_foreign_reply_is_a_value_an_error_or_the_end(replies, rest):
    actual_values, reference = socket.socketpair()
    data = (
        b"".join(json.dumps(["value", reply]).encode() + b"\n" for reply in replies) + rest + b"\n"
    )

    def speak():
        reference.sendall(data)
        reference.shutdown(socket.SHUT_WR)
        while reference.recv(4096):
            pass

    speaker = threading.Thread(target=speak)
    speaker.start()
    with reference:
        with actual_values:
            peer = TestPeer(actual_values)
            for _ in range(len(replies) + 1):
                try:
                    peer.use("call", 0, (), {})
                except ConnectionClosed:
                    pass
        speaker.join()
