"""Mutual proof that both ends of a connection know one secret, before anything else is read.

    the connecting side                           the listening side
    b"JXH1" + 32 random bytes  ---------------->
        <-----------  32 random bytes + HMAC-SHA256(token, "listener" + both)
    HMAC-SHA256(token, "visitor" + both)  ------>    only now the first payload

The token itself never travels, a recorded answer is useless, and an impostor that listens in place
of the real program is detected as well. All lengths are fixed. What follows is neither encrypted
nor signed.
"""

import hashlib
import hmac
import secrets
import socket
import time

MAGIC = b"JXH1"
NONCE_BYTES = 32
PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
REPLY_BYTES = NONCE_BYTES + PROOF_BYTES
SECONDS = 10.0
"""Time limit for a whole handshake."""


class HandshakeRefused(OSError):
    """Raised when the other side does not know the token, or speaks another protocol."""


class HandshakeListener:
    """The listener's half for one connection, as bytes in and out."""

    def __init__(self, token: bytes):
        self._token = token
        self._expected: bytes | None = None

    @property
    def num_expected(self) -> int:
        """Return the number of bytes of the next message."""
        return GREETING_BYTES if self._expected is None else PROOF_BYTES

    def handle(self, message: bytes) -> bytes | None:
        """Return the reply to the next message, of `num_expected` bytes; None: the handshake is
        complete.

        Raises HandshakeRefused.
        """
        if self._expected is None:
            if not message.startswith(MAGIC):
                raise HandshakeRefused("no greeting of this protocol")
            nonces = message[len(MAGIC) :] + secrets.token_bytes(NONCE_BYTES)
            self._expected = _prove(self._token, b"visitor", nonces)
            return nonces[NONCE_BYTES:] + _prove(self._token, b"listener", nonces)
        if not hmac.compare_digest(message, self._expected):
            raise HandshakeRefused("another token")
        return None


def introduce(connection: socket.socket, token: bytes, seconds: float = SECONDS) -> None:
    """Run the visitor's half over a connected socket, within `seconds`; leaves its time-out at
    None.

    Raises HandshakeRefused if the listener closes the connection or does not know the token.
    """
    deadline = time.monotonic() + seconds
    nonce = secrets.token_bytes(NONCE_BYTES)
    try:
        connection.settimeout(seconds)
        connection.sendall(MAGIC + nonce)
        reply = b""
        while len(reply) < REPLY_BYTES:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            received = connection.recv(REPLY_BYTES - len(reply))
            if not received:
                raise HandshakeRefused("the listener hung up on the greeting")
            reply += received
        nonces = nonce + reply[:NONCE_BYTES]
        if not hmac.compare_digest(reply[NONCE_BYTES:], _prove(token, b"listener", nonces)):
            raise HandshakeRefused("the listener has another token")
        connection.sendall(_prove(token, b"visitor", nonces))
        connection.settimeout(None)
    except TimeoutError:
        raise HandshakeRefused(f"no answer to the greeting within {seconds:g} s") from None
    except HandshakeRefused:
        raise
    except OSError as error:
        raise HandshakeRefused(f"the listener hung up on the greeting: {error}") from None


def _prove(token: bytes, role: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token, role + nonces, hashlib.sha256)
