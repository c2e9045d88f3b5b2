"""Messages of rows and requests in one form, whatever framework wrote them.

| key of a message    | keys of the data that are read as it                                    |
|---------------------|-------------------------------------------------------------------------|
| `role`              | `role`, `from` (ShareGPT); names of roles: `ROLES`                      |
| `content`           | `content`, `value` (ShareGPT), `refusal`: a text, or its parts          |
| `reasoning_content` | `reasoning_content`, `reasoning`, `thinking`, parts of these types      |
| `tool_calls`        | `tool_calls`, `function_call`; a message of the role `function_call`    |
| `tool_call_id`      | `tool_call_id`                                                          |
| `name`              | `name`                                                                  |
| `train`             | `train`, `training`, `trainable`, `weight` (0 or 1), `loss`, `loss_mask` |
| `train_detail`      | `train_detail`, `training_detail`, where a reader can apply them        |

Two keys of a line that say different things, media, and masks of parts of a message make a row
malformed; every other key is reported as not read.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtrain.safe_io import (
    DEPTH,
    InvalidValue,
    UnreadableRow,
    has_surrogates,
    parse_json,
    too_deep,
)
from jaxtrain.text_safety import name_type, show

MAX_TEXT = 1 << 21
"""Characters of one text."""
TOO_MUCH = f"more than {MAX_TEXT:,} characters"
MAX_OF_ROW = 1 << 23
"""Characters of a row's texts together."""
MAX_MESSAGES = 4000
"""Limit of what a chat template renders within its time budget."""
MAX_TOOLS = 1024

ALIASES: dict[str, tuple[str, ...]] = {
    "role": ("role", "from"),
    "content": ("content", "value", "refusal"),
    "reasoning_content": ("reasoning_content", "reasoning", "thinking"),
    "tool_calls": ("tool_calls", "function_call"),
    "tool_call_id": ("tool_call_id",),
    "name": ("name",),
    "train": ("train", "training", "trainable", "weight", "loss", "loss_mask"),
    "train_detail": ("train_detail", "training_detail"),
}
"""{key of a normalized message: keys of the data that mean it}."""
KEYS = tuple(ALIASES)
MEDIA = ("image", "images", "image_url", "video", "videos", "audio", "audios", "input_audio")
"""Keys and columns of what is no text."""
PARTIAL_MASKS = ("train_detail", "training_detail", "assistant_masks", "completion_mask")
"""Keys and columns that mask parts of a message, other than by characters of its text."""
TAGS = (
    ("<think>", "</think>"),
    ("<reasoning>", "</reasoning>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""What thoughts stand between in a text."""
ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Keys of the arguments of a tool call."""
OFFSETS = ("begin_offset", "end_offset")

ROLES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant"),
    **dict.fromkeys(("observation", "function_response", "tool_response", "function"), "tool"),
    "function_call": "function_call",
    "tool_call": "function_call",
}
"""Roles of ShareGPT and other data; function_call is a turn whose text is a tool call."""

ACCEPTED = ("system", "developer", "user", "assistant", "tool")
SYSTEM_ROLES = ("system", "developer")

PLAIN = {"role", "content"}
"""Keys of most messages, which stay as they are."""

Message = dict[str, Any]


class MalformedRow(Exception):
    """A row that cannot be read. The message is short and general, so that it can be counted."""

    location = ""
    """Position in the row: "message 3"."""

    def describe(self, origin: str) -> str:
        """Return "train.jsonl line 3, message 2: content is a list, not a text"."""
        return f"{self.locate(origin)}: {self}"

    def locate(self, origin: str) -> str:
        """Return "train.jsonl line 3, message 2"."""
        return f"{origin}, {self.location}" if self.location else origin


def read_messages(
    value: Any,
    fields: Mapping[str, str] | None = None,
    roles: Mapping[str, str] | None = None,
    unread: set[str] | None = None,
    speaker: str = "",
    spans: bool = False,
    images: Any = None,
) -> list[Message]:
    """Return messages in OpenAI form: arguments of tool calls as objects, empty keys removed.

    fields: renamed keys as {"messages.content": "value"}; roles: {role in the data: role}. unread:
    receives the keys that nothing reads. speaker: role of plain texts, and of messages without a
    role. spans: read `train_detail`, which is refused otherwise. images: the images.RowImages of
    the row; None refuses images. Normalized messages are returned as they are. Raises MalformedRow.
    """
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list | tuple) or not value:
        raise MalformedRow(f"messages must be a list of {{role, content}}, not {show(value, 40)}")
    if len(value) > MAX_MESSAGES:
        raise MalformedRow(f"more than {MAX_MESSAGES:,} messages")
    check_values(value, () if images is None else images.keys)
    messages = []
    reader = MessageReader(fields, roles, unread, speaker, spans=spans, images=images)
    for number, item in enumerate(value, 1):
        try:
            messages.append(reader.read(item))
        except MalformedRow as error:
            error.location = ", ".join(filter(None, (f"message {number}", error.location)))
            raise
    return messages


class MessageReader:
    """Normalize single messages."""

    def __init__(
        self,
        fields: Mapping[str, str] | None = None,
        roles: Mapping[str, str] | None = None,
        unread: set[str] | None = None,
        speaker: str = "",
        lenient: bool = False,
        spans: bool = False,
        images: Any = None,
    ):
        """Take the arguments of read_messages. lenient: for requests to a model, which may hold
        what the model wrote: arguments that are no JSON object stay text, and a message may be
        empty."""
        self.fields, self.roles = fields or {}, roles or {}
        self.renames = any(name.startswith("messages.") for name in self.fields)
        self.unread = set() if unread is None else unread
        self.speaker, self.lenient, self.spans, self.images = speaker, lenient, spans, images

    def read(self, item: Any) -> Message:
        """Return a normalized message; raises MalformedRow."""
        if isinstance(item, str) and self.speaker:
            item = {"role": self.speaker, "content": item}
        if not isinstance(item, Mapping):
            raise MalformedRow(f"a message is {name_type(item)}, not an object")
        if item.keys() == PLAIN and not self.renames:
            role, content = item["role"], item["content"]
            if role in ACCEPTED and role not in self.roles and type(content) is str:
                return {"role": role, "content": content}
        used: set[str] = set()
        role = self._pick(item, "role", used, self._role) or self.speaker
        if not role:
            raise MalformedRow(f"a message without role (its keys: {_list_keys(item)})")
        text = self._pick(item, "content", used, self._content)
        content, part_thought = text or ("", "")
        thought = self._pick(item, "reasoning_content", used, read_thought) or ""
        if part_thought and thought and part_thought != thought:
            raise MalformedRow("reasoning_content and the thinking part of content differ")
        calls = self._pick(item, "tool_calls", used, self._calls)
        if role == "function_call":
            role, content, calls = "assistant", "", self._calls("function_call", content)
        elif role not in ACCEPTED:
            raise MalformedRow(
                f"unknown role {show(role, 40)}; known are {', '.join(ACCEPTED)} (key roles of the"
                " dataset translates others)"
            )
        message: Message = {"role": role, "content": content}
        if role != "assistant" and (thought or part_thought or calls):
            self.unread.add(f"thoughts or tool calls of the role {show(role, 40)}")
            thought = part_thought = calls = None
        if thought or part_thought:
            message["reasoning_content"] = thought or part_thought
        if calls:
            message["tool_calls"] = calls
        for key in ("tool_call_id", "name"):
            if (identifier := self._pick(item, key, used, _identifier)) is not None:
                message[key] = identifier
        if (train := self._pick(item, "train", used, read_flag)) is not None:
            message["train"] = train
        if self.spans and (detail := self._pick(item, "train_detail", used, read_spans)):
            if detail[-1]["end_offset"] >= len(content):
                raise MalformedRow("train_detail goes beyond the text")
            message["train_detail"] = detail
        if without_block(message) is None and not self.lenient:
            raise MalformedRow("reasoning_content and the thought in content differ")
        ignored = [key for key in item if key not in used and not is_empty(item[key])]
        refuse(ignored, "message key")
        speaks = text is not None or thought or calls or (role == "tool" and not ignored)
        if not speaks and not self.lenient:
            raise MalformedRow(f"a message without content (its keys: {_list_keys(item)})")
        self.unread.update(f"message key {show(key, 60)}" for key in ignored)
        return message

    def _pick(
        self, item: Mapping[str, Any], key: str, used: set[str], read: Callable[[str, Any], Any]
    ) -> Any:
        """Return what the keys that mean `key` say; None if there are none."""
        renamed = self.fields.get(f"messages.{key}")
        if renamed is not None and item.get(renamed) not in (None, []):
            used.add(renamed)
            return read(key, item[renamed])
        return pick(item, ALIASES[key], used, read)

    def _role(self, key: str, value: Any) -> str:
        if not isinstance(value, str):
            raise MalformedRow(f"a role is {name_type(value)}, not a text")
        return self.roles.get(value, value if value in ACCEPTED else ROLES.get(value, value))

    def _content(self, key: str, value: Any) -> tuple[str, str]:
        """Return the text of a content, and the thought that its parts hold."""
        parts = value if isinstance(value, list) else [value]
        texts, thoughts = [], []
        for part in parts:
            if isinstance(part, str):
                texts.append(part)
            elif isinstance(part, Mapping) and part is not value:
                kind = part.get("type", "text")
                keys: tuple[str, ...] = ("type", "text", kind)
                if self.images is not None and self.images.is_image(part):
                    texts.append(self.images.write(part))
                    keys = ("type", *self.images.keys)
                elif kind in ("thinking", "reasoning"):
                    thoughts.append(read_thought(kind, part.get(kind, part.get("text"))))
                elif kind == "refusal" and isinstance(part.get(kind), str):
                    texts.append(part[kind])
                elif isinstance(part.get("text"), str):
                    texts.append(part["text"])
                else:
                    described = f"of type {show(kind, 40)}" if "type" in part else "without type"
                    raise MalformedRow(f"only text content is supported, not a part {described}")
                self._note_keys(part, keys, "content part key")
            elif part is value:
                raise MalformedRow(f"content is {name_type(value)}, not a text")
            else:
                raise MalformedRow("only text content is supported")
        return "".join(texts), "\n".join(filter(None, thoughts))

    def _calls(self, key: str, calls: Any) -> list[dict[str, Any]]:
        """Return calls with `arguments` as an object, because templates write the JSON."""
        if is_empty(calls):
            return []
        if isinstance(calls, str):
            calls = read_json(calls, key)
        if key == "function_call" and isinstance(calls, Mapping):
            calls = [calls]
        if not isinstance(calls, list):
            raise MalformedRow(f"{key} must be a list")
        return [self._call(call, key) for call in calls]

    def _call(self, call: Any, key: str) -> dict[str, Any]:
        if isinstance(call, str):
            call = read_json(call, key)
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise MalformedRow("a tool call needs function.name")
        name = function["name"]
        if not isinstance(call.get("id", ""), str | int | None):
            raise MalformedRow("the id of a tool call is not a text")
        arguments = pick(function, ARGUMENTS, set(), lambda _, value: self._arguments(name, value))
        call_keys = ("id", "type", "function") if function is not call else ("id", "type", "name")
        if function is not call:
            self._note_keys(function, ("name", *ARGUMENTS), "tool call key")
            self._note_keys(call, call_keys, "tool call key")
        else:
            self._note_keys(call, (*call_keys, *ARGUMENTS), "tool call key")
        call_id = {"id": call["id"]} if call.get("id") is not None else {}
        function = {"name": name, "arguments": {} if arguments is None else arguments}
        return {**call_id, "type": "function", "function": function}

    def _arguments(self, name: str, value: Any) -> Any:
        if isinstance(value, str):
            if not value.strip():
                return {}
            try:
                loaded = read_json(value, f"arguments of {show(name, 40)}")
            except MalformedRow:
                if not self.lenient:
                    raise
                return value
            value = value if self.lenient and not isinstance(loaded, Mapping) else loaded
        if isinstance(value, Mapping):
            return dict(value)
        if self.lenient and isinstance(value, str):
            return value
        raise MalformedRow(f"arguments of {show(name, 40)} are no object")

    def _note_keys(self, entry: Mapping[str, Any], read: Sequence[str], kind: str) -> None:
        ignored = [key for key in entry if key not in read and not is_empty(entry[key])]
        refuse(ignored, kind)
        self.unread.update(f"{kind} {show(key, 60)}" for key in ignored)


def _list_keys(item: Mapping[str, Any]) -> str:
    return ", ".join(show(key, 40) for key in sorted(map(str, item))[:8])


def pick(
    entry: Mapping[str, Any],
    names: Sequence[str],
    used: set[str],
    read: Callable[[str, Any], Any],
) -> Any:
    """Return what `names`, which mean the same, say in an entry; None if it has none of them.

    used: receives those that it has. read: (name, value) -> normalized value. Raises MalformedRow
    if two of them differ.
    """
    present = [name for name in names if entry.get(name) is not None]
    used.update(present)
    filled = [name for name in present if not is_empty(entry[name])] or present
    if not filled:
        return None
    first = read(filled[0], entry[filled[0]])
    for name in filled[1:]:
        if read(name, entry[name]) != first:
            raise MalformedRow(f"{filled[0]} and {name} differ")
    return first


def is_empty(value: Any) -> bool:
    """Return True for a value with which a format fills an absent key."""
    return value is None or (isinstance(value, str | list | tuple | Mapping) and not value)


def refuse(names: Sequence[str], kind: str) -> None:
    """Raise MalformedRow for a column or key that must not be left out."""
    for name in names:
        if name in MEDIA:
            raise MalformedRow(f"{kind} {name}: only text is read")
        if name in PARTIAL_MASKS:
            raise MalformedRow(f"{kind} {name}: masks of parts of a message are not read")


def read_thought(key: str, value: Any) -> str:
    """Return a thought, which may be a list of text parts."""
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in value]
        texts = [part for part in parts if isinstance(part, str)]
        value = "".join(texts) if len(texts) == len(parts) else value
    if is_empty(value):
        return ""
    if not isinstance(value, str):
        raise MalformedRow(f"{key} is {name_type(value)}, not a text")
    return value


def read_flag(key: str, value: Any) -> bool:
    """Return True where a message trains."""
    if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)):
        return bool(value)
    shown = show(value, 40) if isinstance(value, int | float | str) else name_type(value)
    raise MalformedRow(f"{key} is {shown}, not true, false, 1 or 0")


def read_spans(key: str, value: Any) -> list[dict[str, Any]]:
    """Return the spans of a text, sorted: {begin_offset, end_offset, train}, both characters
    included."""
    spans = value if isinstance(value, list | tuple) else [value]
    for span in spans:
        offsets = [span.get(name) for name in OFFSETS] if isinstance(span, Mapping) else []
        numbers = [offset for offset in offsets if type(offset) is int]
        if len(numbers) != 2 or not 0 <= numbers[0] <= numbers[1]:
            raise MalformedRow(f"{key} must be a list of {{begin_offset, end_offset, train}}")
        read_flag(f"train of {key}", span.get("train"))
    return sorted((dict(span) for span in spans), key=lambda span: span["end_offset"])


def _identifier(key: str, value: Any) -> str | int:
    if not isinstance(value, str | int):
        raise MalformedRow(f"{key} is {name_type(value)}, not a text")
    return value


def without_flags(messages: Sequence[Message]) -> list[Message]:
    """Return the messages as chat templates see them."""
    flags = ("train", "train_detail")
    return [{k: v for k, v in message.items() if k not in flags} for message in messages]


def split_thinking(message: Message) -> Message:
    """Return an assistant's message with the thoughts of its text as reasoning_content; others, and
    those that have it already, as they are. Raises MalformedRow if spans of the text move."""
    text = message.get("content")
    if message["role"] != "assistant" or not isinstance(text, str):
        return dict(message)
    if message.get("reasoning_content"):
        return dict(message)
    for opening, closing in TAGS:
        match = re.search(f"{re.escape(opening)}(.*?){re.escape(closing)}", text, re.DOTALL)
        if match:
            if "train_detail" in message:
                raise MalformedRow("train_detail of a text that split_thinking divides")
            rest = (text[: match.start()] + text[match.end() :]).strip()
            return {**message, "reasoning_content": match[1].strip(), "content": rest}
    return dict(message)


def without_block(message: Message) -> Message | None:
    """Return a message without the block at the beginning of its content that repeats its
    reasoning_content; None if the block holds another thought."""
    thought, content = message.get("reasoning_content"), message.get("content")
    openings = tuple(opening for opening, _ in TAGS)
    if not thought or not isinstance(content, str) or not content.lstrip().startswith(openings):
        return message
    split = split_thinking({**message, "reasoning_content": ""})
    if split["reasoning_content"] not in ("", thought.strip()):
        return None
    return {**split, "reasoning_content": thought}


def read_tools(value: Any, name: str = "tools") -> list[dict[str, Any]] | None:
    """Return tool schemas from a list or its JSON; None if there are none.

    name: column; entries of `functions` get the form {"type": "function", "function": ...}.
    """
    if isinstance(value, str):
        value = read_json(value, name) if value.strip() else None
    if not value:
        return None
    if not isinstance(value, list):
        raise MalformedRow(f"{name} must be a list of JSON schemas")
    if len(value) > MAX_TOOLS:
        raise MalformedRow(f"more than {MAX_TOOLS:,} tools")
    tools = [read_json(tool, name) if isinstance(tool, str) else tool for tool in value]
    check_values(tools)
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise MalformedRow(f"{name} must be a list of JSON schemas")
        if not isinstance(function.get("name", ""), str):
            raise MalformedRow("the name of a tool is not a string")
    if name == "functions":
        return [
            dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}
            for tool in tools
        ]
    return [dict(tool) for tool in tools]


def check_readable(row: Any) -> None:
    """Raise MalformedRow for a row that could not be read from its file."""
    if isinstance(row, UnreadableRow):
        raise MalformedRow(row.reason)


def check_values(value: Any, unchecked: Sequence[str] = ()) -> None:
    """Raise MalformedRow for values that would break a template or tokenizer: deep nesting, half a
    surrogate pair, texts above MAX_TEXT or, together, MAX_OF_ROW. unchecked: keys of images."""
    if too_deep(value):
        raise MalformedRow(f"nested deeper than {DEPTH} levels")
    size, pending = 0, [value]
    while pending:
        entry = pending.pop()
        if isinstance(entry, str):
            if len(entry) > MAX_TEXT:
                raise MalformedRow(TOO_MUCH)
            size += len(entry)
            if not entry.isascii() and has_surrogates(entry):
                raise MalformedRow("a text with half a surrogate pair")
        elif isinstance(entry, dict) and not unchecked:
            pending += [*entry, *entry.values()]
        elif isinstance(entry, Mapping):
            pending += [*entry, *(entry[key] for key in entry if key not in unchecked)]
        elif isinstance(entry, list | tuple):
            pending += entry
    if size > MAX_OF_ROW:
        raise MalformedRow(f"more than {MAX_OF_ROW:,} characters in all")


def read_json(text: str, name: str) -> Any:
    """Return the value of a JSON text in a row; MalformedRow names it."""
    try:
        return parse_json(text, unique=True)
    except InvalidValue as error:
        raise MalformedRow(f"{name}: {error}") from None
    except ValueError:
        raise MalformedRow(f"{name}: broken JSON") from None
