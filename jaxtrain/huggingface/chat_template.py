"""Chat templates, rendered by transformers: untrusted ones in a process with limits.

Templates that ship with jaxtrain are rendered in this process. All others go to `template_worker`,
shared by all threads, which takes a second or two to start.
"""

import atexit
import functools
import json
import os
import pickle
import re
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxtrain.errors import UserError
from jaxtrain.huggingface.plain_template import MARK, Prefixes, split_marked, write_literal
from jaxtrain.safe_io import read_text
from jaxtrain.text_safety import escape_control_chars, name_type, show

if TYPE_CHECKING:
    from jaxtrain.huggingface.template_worker import RenderReply, RenderRequest

MAX_LENGTH = 2**18
"""Characters of a template; published ones have up to about 20,000."""
SECONDS = 3.0
"""CPU time of one rendering, so that a busy machine changes nothing."""
WALL_SECONDS = 120
"""Longest wait for a reply, the start of the process included."""
MAX_MESSAGES = 64
"""Limit of a conversation whose shape is kept."""
RESERVED = ("messages", "tools", "add_generation_prompt", MARK)
"""Variables of a template that chat_template_kwargs do not set."""


class TemplateFailed(Exception):
    """The chat template refuses these messages."""


def render(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Any = None,
    generation: bool = False,
    kwargs: Mapping[str, Any] | None = None,
) -> str:
    """Render messages with the tokenizer's chat template.

    kwargs: chat_template_kwargs, further variables of the template. Raises TemplateFailed with the
    template's reason, UserError for a template that cannot be compiled or that takes more time or
    memory than any conversation needs.
    """
    if (pictures := _find_pictures(tokenizer, messages)) is not None:
        return pictures.render(
            messages, lambda shown: render(tokenizer, shown, tools, generation, kwargs)
        )
    if (frame := _find_frame(tokenizer, messages, tools, generation, kwargs)) is not None:
        return frame.fill(messages)
    reply = _request(tokenizer, messages, tools, generation, kwargs)
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


def _find_pictures(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> Any:
    """Return the format of the tokenizer's images (data/images/format.py) if messages hold any."""
    form = getattr(tokenizer, "image_format", None)
    return form if form is not None and form.has_pictures(messages) else None


class Frame(NamedTuple):
    """Texts that a template writes around the contents of messages, for all of one shape."""

    texts: tuple[str, ...]
    """Texts between contents, one more than these."""
    contents: tuple[tuple[int, bool], ...]
    """(index of a message, True if its content is trimmed)."""

    def fill(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the rendering of messages of the shape."""
        parts = [self.texts[0]]
        for (index, trimmed), text in zip(self.contents, self.texts[1:], strict=True):
            content = messages[index]["content"]
            parts += (content.strip() if trimmed else content, text)
        return "".join(parts)


MAX_FRAMES = 1024
_FRAMES: dict[Any, Frame | None] = {}
PLAIN = frozenset({"role", "content"})


def _find_frame(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Any,
    generation: bool,
    kwargs: Mapping[str, Any] | None,
) -> Frame | None:
    """Return the frame of the shape of messages, built with its first conversation; None unless the
    template `only_writes_contents` and the messages are plain."""
    template = tokenizer.chat_template
    if tools or not isinstance(template, str) or not 0 < len(messages) <= MAX_MESSAGES:
        return None
    shape = []
    for message in messages:
        content = message.get("content")
        if message.keys() != PLAIN or not isinstance(content, str):
            return None
        # Templates may ask for a content that is blank.
        shape.append((message["role"], None if content and not content.isspace() else content))
    special = tokenizer.special_tokens_map
    key = (template, tuple(shape), generation, repr(special), repr(kwargs or None))
    if key not in _FRAMES:
        if len(_FRAMES) >= MAX_FRAMES:
            _FRAMES.clear()
        if template not in _ONLY_WRITES:
            reply = _run(template, (), None, False, {}, "only_writes")
            _ONLY_WRITES[template] = reply.text == "yes"
        writes = _ONLY_WRITES[template]
        _FRAMES[key] = _build_frame(tokenizer, messages, generation, kwargs) if writes else None
    return _FRAMES[key]


_ONLY_WRITES: dict[str, bool] = {}
EDGE = "\x1f"
"""A white space that no template writes."""


def _build_frame(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    generation: bool,
    kwargs: Mapping[str, Any] | None,
) -> Frame | None:
    """Render messages with a number in place of each content that is not blank."""
    nonce = secrets.token_hex(16)
    numbered = [
        {**message, "content": f"{EDGE}{nonce}.{index}.{EDGE}"}
        if message["content"].strip()
        else message
        for index, message in enumerate(messages)
    ]
    reply = _request(tokenizer, numbered, None, generation, kwargs)
    if reply.kind != "text":
        return None
    texts, contents = [], []
    for number, part in enumerate(re.split(f"({EDGE}?{nonce}\\.\\d+\\.{EDGE}?)", reply.text)):
        if number % 2 == 0:
            texts.append(part)
            continue
        edges = part.count(EDGE)
        contents.append((int(part.split(".")[1]), edges == 0))
        if edges == 1:
            return None
    return Frame(tuple(texts), tuple(contents)) if len(contents) <= 4 * len(messages) else None


def render_prefixes(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Any,
    kwargs: Mapping[str, Any] | None = None,
) -> Prefixes | None:
    """Render all beginnings of a conversation at once; None if each has to be rendered alone."""
    if not messages or _find_pictures(tokenizer, messages) is not None:
        return None
    mark = secrets.token_hex(16)
    try:
        reply = _request(tokenizer, messages, tools, False, kwargs, mark)
    except UserError:
        return None  # rendering a beginning alone raises it again
    return split_marked(reply.text, mark, len(messages)) if reply.kind == "text" else None


def check_kwargs(kwargs: Any, source: str) -> None:
    """Raise TemplateFailed unless `kwargs` are variables that a template may be given."""
    if not isinstance(kwargs, Mapping):
        raise TemplateFailed(f"{source} is {name_type(kwargs)}; it must be a table")
    for name in kwargs:
        if not (isinstance(name, str) and name.isidentifier()) or name in RESERVED:
            raise TemplateFailed(f"{source}: {show(name, 40)} is no variable that can be set")


def add_defaults(tokenizer: Any, kwargs: Mapping[str, Any], source: str) -> list[str]:
    """Write variables as defaults into the tokenizer's templates, in place, so that every rendering
    and every export has them. Return the names that no template reads; UserError for a name or
    value that cannot be written. source: the config key."""
    try:
        check_kwargs(kwargs, source)
    except TemplateFailed as error:
        raise UserError(f"{error}; templates get {', '.join(RESERVED[:2])} from the rows") from None
    templates = tokenizer.chat_template
    if not templates:
        raise UserError(f"{source}: the tokenizer {tokenizer.name_or_path} has no chat template")
    named = {"": templates} if isinstance(templates, str) else dict(templates)
    read = set()
    for template in named.values():
        names = find_variables(template)
        read |= set(kwargs) if names is None else names
    defaults = "".join(
        # The + keeps a line break with which the template begins.
        f"{{%- if {name} is not defined %}}{{%- set {name} = {write_literal(value, source)} %}}"
        "{%- endif +%}"
        for name, value in kwargs.items()
        if name in read
    )
    named = {name: defaults + template for name, template in named.items()}
    tokenizer.chat_template = named[""] if isinstance(templates, str) else named
    return sorted(set(kwargs) - read)


def _request(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Any,
    generation: bool,
    kwargs: Mapping[str, Any] | None = None,
    mark: str | None = None,
) -> "RenderReply":
    """Render here or in the worker; with a mark, the marked program of the template."""
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
    if kwargs:
        check_kwargs(kwargs, "chat_template_kwargs")
        if unread := sorted(kwargs.keys() - _READ.setdefault(template, set())):
            _note_unread(template, unread)
    special = tokenizer.special_tokens_map
    # As transformers does: templates test whether a key is there.
    messages = [{k: v for k, v in message.items() if v is not None} for message in messages]
    if template not in _READS_PARTS:
        _READS_PARTS[template] = _reads_only_parts(template, special)
    if _READS_PARTS[template]:
        messages = [_write_parts(message) for message in messages]
    if any(message.get("role") == "developer" for message in messages):
        if template not in _WRITES_DEVELOPERS:
            _WRITES_DEVELOPERS[template] = _writes_developers(template, special)
        if not _WRITES_DEVELOPERS[template]:
            messages = [
                {**m, "role": "system"} if m.get("role") == "developer" else m for m in messages
            ]
    if any(message.get("tool_calls") for message in messages):
        form = _CALL_FORMS.get(template)
        if form is None:
            form = _CALL_FORMS[template] = _find_call_form(template, special)
        messages = [_write_calls(message, *form) for message in messages]
    variables = special | dict(kwargs or {}) | ({} if mark is None else {MARK: mark})
    mode = "text" if mark is None else "marked"
    return _run(template, messages, tools, generation, variables, mode)


def _run(template: str, *fields: Any) -> "RenderReply":
    """Render a template in this process if it is shipped, else in the worker. fields: the remaining
    fields of a RenderRequest."""
    from jaxtrain.huggingface.template_worker import RenderRequest, answer  # slow to import

    request = RenderRequest(template, *fields)
    return answer(request) if template in shipped_templates() else _worker.request(request)


_READ: dict[str, set[str]] = {}
"""Variables of each template that it reads, or that were reported because it does not."""


def find_variables(template: str) -> set[str] | None:
    """Return the variables that a template reads; None for a template that cannot be compiled."""
    reply = _run(template, (), None, False, {}, "names")
    return set(reply.text.split()) if reply.kind == "text" else None


def _note_unread(template: str, names: list[str]) -> None:
    """Report variables that a template never reads, each once."""
    read = find_variables(template)
    if read is not None and (unread := [name for name in names if name not in read]):
        print(
            f"note: chat_template_kwargs: the chat template never reads {', '.join(unread)}",
            file=sys.stderr,
            flush=True,
        )
    _READ[template] |= {*names}


CallForm = tuple[bool, bool]
"""Form of tool calls that a template needs: (arguments as JSON text, None for an empty content)."""
_CALL_FORMS: dict[str, CallForm] = {}


def _find_call_form(template: str, special: Mapping[str, Any]) -> CallForm:
    """Find the first form of which a template writes the arguments as JSON or in a form of its own.

    Templates that write JSON themselves need objects. Those that join strings, as DeepSeek's, need
    text, fail with objects or write them as Python does, and may look for a content of None.
    """
    function = {"name": "probe_name", "arguments": {"probe_key": "probe_value"}}
    call = {"type": "function", "id": "probecall", "function": function}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    forms: list[CallForm] = [(False, False), (False, True), (True, False), (True, True)]
    for form in forms:
        messages = [{"role": "user", "content": "Q"}, _write_calls(turn, *form)]
        reply = _run(template, messages, None, False, special, "text")
        text = reply.text if reply.kind == "text" else ""
        misread = "{'probe_key'" in text or '\\"probe_key' in text
        if not misread and all(f"probe_{part}" in text for part in ("name", "key", "value")):
            return form
    return False, False


_READS_PARTS: dict[str, bool] = {}
"""True for templates that leave out contents that are texts, and write parts of type text."""


def _reads_only_parts(template: str, special: Mapping[str, Any]) -> bool:
    """Try a content of both forms."""
    return not _write_probe(template, special, dict) and bool(
        _write_probe(template, special, _write_parts)
    )


def _write_probe(
    template: str, special: Mapping[str, Any], form: Callable[[Any], Any], role: str = "user"
) -> str:
    """Return the rendering of a message with the name of its role as "role"; "" without its text.
    form: writes the message as the template reads it."""
    turns = [(role, "probe_content"), *([] if role == "user" else [("user", "Q")])]
    messages = [form({"role": name, "content": text}) for name, text in turns]
    reply = _run(template, messages, None, False, special, "text")
    written = reply.kind == "text" and "probe_content" in reply.text
    return reply.text.replace(role, "role") if written else ""


_WRITES_DEVELOPERS: dict[str, bool] = {}
"""False for templates that do not know the role developer, which older ones call system."""


def _writes_developers(template: str, special: Mapping[str, Any]) -> bool:
    """Try such a message. False if a template leaves it out or refuses it, or writes it like one of
    an unknown role, but the system message otherwise (instead of a default one, say)."""
    form = _write_parts if _READS_PARTS[template] else dict
    roles = ("developer", "probe_role", "system")
    text, unknown, system = (_write_probe(template, special, form, role) for role in roles)
    return bool(text) and (text != unknown or system == unknown)


def _write_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose content is a list of parts."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _write_calls(message: Mapping[str, Any], text: bool, none: bool) -> Mapping[str, Any]:
    """Return a message with its tool calls in a template's form."""
    if not message.get("tool_calls") or not (text or none):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        if text and not isinstance(function["arguments"], str):
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            function = {**function, "arguments": arguments}
        calls.append({**call, "function": function})
    content = None if none and not message.get("content") else message.get("content")
    return {**message, "content": content, "tool_calls": calls}


@functools.cache
def shipped_templates() -> frozenset[str]:
    """Return the texts of the templates in jaxtrain's assets."""
    assets = Path(__file__).parents[1] / "assets"
    builtin = json.loads((assets / "tokenizer" / "tokenizer_config.json").read_text("utf-8"))
    named = [file.read_text("utf-8") for file in (assets / "chat_templates").glob("*.jinja")]
    return frozenset([builtin["chat_template"], *(text.removesuffix("\n") for text in named)])


class TemplateWorker:
    """A process of `template_worker`, started with the first request unless before."""

    def __init__(self) -> None:
        # Replies come in the order of requests, so one thread at a time sends and receives.
        self._lock = threading.RLock()
        self._process: subprocess.Popen | None = None
        self._connection: Connection | None = None

    def request(self, request: "RenderRequest") -> "RenderReply":
        """Have a template rendered. Raises UserError if the process does not answer."""
        from jaxtrain.huggingface.template_worker import decode_reply

        data = pickle.dumps((SECONDS, tuple(request)), protocol=5)
        with self._lock:
            try:
                connection = self.start()
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

    def start(self) -> Connection:
        """Return the connection to the process, started here if there is none."""
        with self._lock:
            self._connection = self._connection or self._open()
            return self._connection

    def _open(self) -> Connection:
        parent, child = socket.socketpair()
        # The socket's own time-out: polling before each read would double the cost of a reply.
        parent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", WALL_SECONDS, 0))
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
        return Connection(parent.detach())

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


def start_worker(folder: Path) -> None:
    """Start the process before its first request if a tokenizer's folder has a template for it."""
    keys = {"chat_template.jinja": "", "tokenizer_config.json": '"chat_template":'}
    with suppress(OSError, ValueError):  # reported when the tokenizer is read
        name = next((name for name in keys if (folder / name).is_file()), None)
        text = read_text(folder / name, 2**24) if name else ""
        if name and keys[name] in text and text not in shipped_templates():
            _worker.start()


def _forget() -> None:
    """Start another process in a fork: two processes that read one socket mix up their replies."""
    global _worker
    _worker = TemplateWorker()


os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: _worker.close())
