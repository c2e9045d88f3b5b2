"""Chat templates, rendered by transformers: untrusted ones in a process with limits.

Templates that ship with jaxtrain are rendered in this process. All others go to `template_worker`,
which is started with the first of them and shared by all threads.
"""

import atexit
import functools
import os
import pickle
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.errors import UserError
from jaxtrain.huggingface.plain_template import MARK, Prefixes, split_marked
from jaxtrain.text_safety import escape_control_chars

if TYPE_CHECKING:
    from jaxtrain.huggingface.template_worker import RenderReply, RenderRequest

MAX_LENGTH = 2**18
"""Characters of a template; published ones have up to about 20,000."""
SECONDS = 3.0
"""CPU time of one rendering, so that a busy machine changes nothing."""
WALL_SECONDS = 120
"""Longest wait for a reply, the start of the process included."""


class TemplateFailed(Exception):
    """The chat template refuses these messages."""


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Any, generation: bool
) -> str:
    """Render messages with the tokenizer's chat template.

    Raises TemplateFailed with the template's reason, UserError for a template that cannot be
    compiled or that takes more time or memory than any conversation needs.
    """
    reply = _request(tokenizer, messages, tools, generation)
    source = f"the chat template of {tokenizer.name_or_path} (model.chat_template)"
    match reply.kind:
        case "text":
            return reply.text
        case "failed":
            raise TemplateFailed(f"chat template: {reply.text}")
        case "unreadable":
            raise UserError(f"{source} cannot be read: {reply.text}")
        case "time":
            reason = f"it takes longer than {SECONDS:g} s"
        case "memory":
            reason = "it needs too much memory"
        case _:
            reason = reply.text
    from jaxtrain.huggingface.template_worker import MEMORY_BYTES

    raise UserError(
        f"{source} is stopped: {reason}; a rendering gets {SECONDS:g} s and"
        f" {MEMORY_BYTES >> 20} MiB. Name another one as model.chat_template"
    )


def render_prefixes(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Any
) -> Prefixes | None:
    """Render all beginnings of a conversation at once; None if each has to be rendered alone."""
    if not messages:
        return None
    mark = secrets.token_hex(16)
    try:
        reply = _request(tokenizer, messages, tools, False, mark)
    except UserError:
        return None  # rendering a beginning alone raises it again
    return split_marked(reply.text, mark, len(messages)) if reply.kind == "text" else None


def _request(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Any,
    generation: bool,
    mark: str | None = None,
) -> "RenderReply":
    """Render here or in the worker; with a mark, the marked program of the template."""
    from jaxtrain.huggingface.template_worker import RenderRequest, answer  # slow to import

    source = f"the chat template of {tokenizer.name_or_path} (model.chat_template)"
    try:
        template = tokenizer.get_chat_template(tools=tools or None)
    except ValueError as error:
        raise UserError(f"{source}: {escape_control_chars(str(error))[:200]}") from None
    if not isinstance(template, str) or len(template) > MAX_LENGTH:
        kind = type(template).__name__
        size = f"{len(template)} characters" if isinstance(template, str) else kind
        raise UserError(
            f"{source}: it must be a text of at most {MAX_LENGTH} characters, found {size}"
        )
    variables = tokenizer.special_tokens_map | ({} if mark is None else {MARK: mark})
    request = RenderRequest(template, messages, tools, generation, variables, mark is not None)
    return answer(request) if template in shipped_templates() else _worker.request(request)


@functools.cache
def shipped_templates() -> frozenset[str]:
    """Return the texts of the templates in jaxtrain's assets."""
    import json

    assets = Path(__file__).parents[1] / "assets"
    builtin = json.loads((assets / "tokenizer" / "tokenizer_config.json").read_text("utf-8"))
    named = [file.read_text("utf-8") for file in (assets / "chat_templates").glob("*.jinja")]
    return frozenset([builtin["chat_template"], *(text.removesuffix("\n") for text in named)])


class TemplateWorker:
    """A process of `template_worker`, started with the first request."""

    def __init__(self) -> None:
        # Replies come in the order of requests, so one thread at a time sends and receives.
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None

    def request(self, request: "RenderRequest") -> "RenderReply":
        """Have a template rendered. Raises UserError if the process does not answer."""
        from jaxtrain.huggingface.template_worker import decode_reply

        data = pickle.dumps((SECONDS, tuple(request)), protocol=5)
        with self._lock:
            try:
                connection = self._connection or self._start()
                connection.send_bytes(data)
                return decode_reply(connection.recv_bytes())
            except BaseException as error:
                # Also after Ctrl-C: the next request would read the reply to this one.
                self.close()
                if not isinstance(error, EOFError | OSError):  # EAGAIN after WALL_SECONDS
                    raise
                raise UserError(
                    "the process that renders chat templates (python -m"
                    " jaxtrain.huggingface.template_worker) ended or does not answer:"
                    f" {error or type(error).__name__}"
                ) from None

    def _start(self) -> Connection:
        parent, child = socket.socketpair()
        # The socket's own time-out: polling before each read would double the cost of a reply.
        timeout = struct.pack("ll", WALL_SECONDS, 0)
        parent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        paths = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
        with child:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jaxtrain.huggingface.template_worker", str(child.fileno())],
                pass_fds=[child.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
                start_new_session=True,
            )
        self._connection = Connection(parent.detach())
        return self._connection

    def close(self) -> None:
        """End the process; the next request starts another."""
        if self._connection is not None and self._process is not None:
            self._connection.close()
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it ended before
                pass
            self._process.wait()
        self._connection = self._process = None


_worker = TemplateWorker()


def _forget() -> None:
    """Start another process in a fork: two processes that read one socket mix up their replies."""
    global _worker
    _worker = TemplateWorker()


os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: _worker.close())
