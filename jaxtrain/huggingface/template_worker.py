"""The process that renders untrusted chat templates (`python -m` this module, with a socket's fd).

    jaxtrain ── socket ── this process: imports transformers once, then only forks and waits
                   └───── its fork: renders, one request at a time

A template is a program: it may loop, recurse and multiply without end, also inside one call of a C
function that no Python code can interrupt. So the kernel stops it: the fork's address space is
limited, and a timer of its CPU time ends it. A new fork takes the place of one that was ended.
"""

import os
import pickle
import resource
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jinja2
import jinja2.meta

from jaxtrain import light_transformers
from jaxtrain.huggingface.plain_template import mark_template, only_writes_contents, parse
from jaxtrain.text_safety import escape_control_chars

MEMORY_BYTES = 2**29
"""Address space that a rendering may take beyond that of the idle process."""
OUTPUT_LENGTH, OUTPUT_RATIO = 2**20, 20
"""Output limit: a fixed number of characters plus a multiple of the request's bytes."""
OUT_OF_MEMORY = 3
"""Exit status of a fork."""


class RenderRequest(NamedTuple):
    """A conversation to render with a template."""

    template: str
    messages: Sequence[Mapping[str, Any]]
    tools: Any
    generation: bool
    variables: Mapping[str, Any]
    """Special tokens by name, chat_template_kwargs, and the mark between messages."""
    mode: Literal["text", "marked", "names", "only_writes"] = "text"
    """text: render; marked: with a mark between messages, see `plain_template.py`; names: return
    the variables that the template reads;
    only_writes: return "yes" if it `only_writes_contents`."""


class RenderReply(NamedTuple):
    """The outcome of a request."""

    kind: str
    """text, not_plain (cannot be marked), unreadable (no template), failed (the template raised),
    length, time, memory or crash (it was stopped)."""
    text: str
    """The rendering, or the reason."""


def answer(request: RenderRequest) -> RenderReply:
    """Render a template in this process. Raises MemoryError only."""
    from transformers.utils import chat_template_utils  # slow to import

    template: Any = request.template
    try:
        if request.mode == "names":
            return RenderReply(
                "text", " ".join(jinja2.meta.find_undeclared_variables(parse(template)))
            )
        if request.mode == "only_writes":
            return RenderReply("text", "yes" if only_writes_contents(template) else "")
        if request.mode == "marked":
            template = mark_template(template)
            if template is None:
                return RenderReply("not_plain", "")
        # Cached there: compile errors apart from the template's.
        chat_template_utils._compile_jinja_template(template)
    except (jinja2.TemplateSyntaxError, SyntaxError, RecursionError, ValueError) as error:
        return RenderReply("unreadable", describe(error))
    variables = dict(request.variables)
    documents = variables.pop("documents", None)
    if not request.messages:
        return RenderReply("failed", "the conversation is empty")
    try:
        # Not tokenizer.apply_chat_template: it hides a content of None, which templates ask for.
        (text,), _ = chat_template_utils.render_jinja_template(
            [list(map(dict, request.messages))],  # pyright: ignore
            request.tools or None,
            documents,
            template,
            add_generation_prompt=request.generation,
            **variables,
        )
    except MemoryError:
        raise
    except Exception as error:  # an untrusted program: it may raise anything
        return RenderReply("failed", describe(error))
    return RenderReply("text", str(text))


def describe(error: BaseException) -> str:
    """Return the message of an exception as one short, printable line."""
    message = " ".join(str(error).split()) or type(error).__name__
    return escape_control_chars(message)[:200]


def serve(connection: Connection) -> None:
    """Answer requests, each within its CPU time, until the socket is closed."""
    while True:
        try:
            data = connection.recv_bytes()
        except EOFError:
            return
        seconds, request = pickle.loads(data)
        # The default action of SIGPROF ends the process, wherever it is.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            reply = answer(RenderRequest(*request))
            limit = OUTPUT_LENGTH + OUTPUT_RATIO * len(data)
            if len(reply.text) > limit:
                length = f"it writes {len(reply.text)} characters; {limit} are allowed here"
                reply = RenderReply("length", length)
            data = encode_reply(reply)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(data)


def encode_reply(reply: RenderReply) -> bytes:
    # Not pickled: a template that escapes the sandbox must not reach the other process.
    return "\n".join(reply).encode("utf-8", "surrogatepass")


def decode_reply(data: bytes) -> RenderReply:
    kind, _, text = data.decode("utf-8", "surrogatepass").partition("\n")
    return RenderReply(kind, text)


def supervise(connection: Connection) -> None:
    """Fork processes that serve, a new one whenever the last was stopped, which is reported."""

    while child := os.fork():
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            return
        kind = {-signal.SIGPROF: "time", OUT_OF_MEMORY: "memory"}.get(code, "crash")
        connection.send_bytes(encode_reply(RenderReply(kind, f"its process ends with {code}")))
    limit_memory()
    serve(connection)


def limit_memory() -> None:
    """Limit the address space to MEMORY_BYTES more than at present."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")  # Linux only: elsewhere time alone is limited
    if statm.exists():
        size = int(statm.read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


if __name__ == "__main__":
    light_transformers.install()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # an ignored signal stays ignored after exec
    try:
        supervise(Connection(int(sys.argv[1])))
    except OSError:  # the other process has ended
        sys.exit(1)
