"""Columns of a row as prompts and conversations, for every method that reads rows.

| read as                | columns                                                              |
|------------------------|----------------------------------------------------------------------|
| messages               | `messages`, `conversations`, `conversation`                          |
| prompt                 | `prompt`, messages, `question`, `instruction` with `input`, `input`  |
| system message         | `system`, before messages that have none                             |
| earlier turns          | `history`: pairs of question and answer, or messages                 |
| tools                  | `tools`, `functions`                                                 |
| keywords of a template | `chat_template_kwargs`                                               |

A conversation may be its JSON, as in CSV files, but not in an `input` beside an `instruction`. Two
columns of a line that say different things make a row malformed, and so do videos, audio and,
unless the method reads them, images beside a conversation. Columns that nobody asked for are
`Row.unread`.
"""

import contextlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from jaxtrain.data.chat.messages import (
    MEDIA,
    PARTIAL_MASKS,
    SYSTEM_ROLES,
    MalformedRow,
    Message,
    check_readable,
    check_values,
    is_empty,
    pick,
    read_flag,
    read_json,
    read_messages,
    read_tools,
    refuse,
    split_thinking,
    without_flags,
)
from jaxtrain.data.chat.omissions import list_unwritten_names
from jaxtrain.safe_io import parse_json
from jaxtrain.text_safety import name_type, show

MESSAGES = ("messages", "conversations", "conversation")
TOOLS = ("tools", "functions")
PROMPTS = ("prompt", *MESSAGES, "question", "instruction", "input")
"""Columns of prompts, in order of preference."""
CONTEXT = ("system", "history", *TOOLS, "chat_template_kwargs")
"""Columns of what a chat template writes beside the messages."""
TALKS = {*PROMPTS, "completion", "chosen", "rejected"}
"""Columns that hold a text or messages."""
JSON_TALK = re.compile(r"\s*\[\s*\{\s*[\"']")
"""How messages begin that are written as JSON, or as Python prints them."""
JSON_TWICE = re.compile(r"\s*\"\s*\[\s*\{\s*\\\"")
"""How the JSON of a text begins that is such JSON."""
IMAGES = ("images", "image")
"""Columns of images, where a reader takes them."""
RESERVED = {"messages", "conversation", "tools", "chat_template", "add_generation_prompt"} | {
    "continue_final_message",
    "tokenize",
}
"""Keywords of templates that a row cannot set."""


@dataclass(frozen=True)
class Conversation:
    """Normalized messages with all that a chat template renders."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Keywords that the template receives, such as enable_thinking."""
    first: int = 0
    """Messages before it are the prompt of a completion."""


class Row:
    """Row under the names of the formats, with a record of the columns that were read."""

    images: Any = None
    """The images.placing.RowImages of a caller that reads images; None refuses them."""
    tokenizer: Any = None
    """Its chat template writes the messages, for callers that report what it leaves out."""

    def __init__(
        self,
        row: Mapping[str, Any],
        fields: Mapping[str, str] | None = None,
        roles: Mapping[str, str] | None = None,
        column_formats: Mapping[str, Any] | None = None,
        drop_system_message: bool = False,
        split_thinking: bool = False,
        spans: bool = False,
    ):
        """fields: {name: column of the data}, message keys with a dot; the next ones as in
        DatasetConfig. spans: the caller applies `train_detail` of messages. Raises MalformedRow for
        a row that could not be read from its file, or whose columns are no texts to be formatted.
        """
        check_readable(row)
        self.fields, self.roles = fields or {}, roles or {}
        self.drops_system, self.splits, self.spans = drop_system_message, split_thinking, spans
        self.renamed = {
            name: column
            for name, column in self.fields.items()
            if "." not in name and column in row
        }
        self.original = row
        self.columns = {**row, **{name: row[column] for name, column in self.renamed.items()}}
        self._read: set[str] = set()
        # Before messages are parsed: a format writes the text that a column has.
        written = {name: self._write(value) for name, value in (column_formats or {}).items()}
        self.columns = {k: v for k, v in self.columns.items() if k not in self._read} | written
        # An instruction's input is what it is about, which may be a conversation as a text.
        texts = {"input", *written} if "instruction" in self else written.keys()
        self.parse(TALKS.difference(texts))
        self._notes: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return not is_empty(self.columns.get(name))

    def get(self, *names: str) -> Any:
        """Return the value of columns that mean the same; None without. Raises MalformedRow if two
        of them differ."""
        return self._pick(names, lambda _, value: value)

    def text(self, *names: str) -> str | None:
        """Return the text of a column, None without; MalformedRow for another type."""

        def read(name: str, value: Any) -> str:
            if not isinstance(value, str):
                raise MalformedRow(f"column {name} holds {name_type(value)}, not a text")
            check_values(value)
            return value

        return self._pick(names, read)

    def require(self, name: str) -> Any:
        """Return the value of a column; MalformedRow if it is missing."""
        if (value := self.get(name)) is None:
            raise MalformedRow(f"column {name} is missing or empty")
        return value

    def require_text(self, name: str) -> str:
        """Return the text of a column; MalformedRow if it is missing or of another type."""
        if (value := self.text(name)) is None:
            raise MalformedRow(f"column {name} is missing or empty")
        return value

    def ignore(self, text: str) -> None:
        """Report a part of the row that is not used."""
        self._notes.add(text)

    def read_messages(
        self, value: Any, speaker: str = "user", everywhere: bool = False, name: str = ""
    ) -> list[Message]:
        """Normalize messages of this row; a text is one of the speaker, and `everywhere` are texts
        and messages without a role in a list. name: column in reasons of refusal."""
        if isinstance(value, str):
            value = [{"role": speaker, "content": value}]
        if name and not isinstance(value, list | tuple | Mapping):
            raise MalformedRow(f"column {name} holds {name_type(value)}, not a text or messages")
        try:
            return self._shape(self._normalize(value, speaker if everywhere else ""))
        except MalformedRow as error:
            if name and error.location:
                error.location = f"column {name}, {error.location}"
            raise

    def messages(self, speaker: str = "") -> list[Message] | None:
        """Return the messages of a conversation, None without such a column. speaker: role of those
        without one."""

        def read(name: str, value: Any) -> list[Message]:
            if isinstance(value, str):
                with contextlib.suppress(ValueError):
                    if value.lstrip().startswith(("[", "{")) and parse_json(value) is not None:
                        raise MalformedRow(f"column {name} holds JSON that is no list of messages")
                value = [{"role": speaker or "user", "content": value}]
            return self._shape(self._flag(self._normalize(value, speaker)))

        return self._pick(MESSAGES, read)

    def _normalize(self, value: Any, speaker: str) -> list[Message]:
        options = {"speaker": speaker, "spans": self.spans, "images": self.images}
        messages = read_messages(value, self.fields, self.roles, self._notes, **options)
        self._notes.update(list_unwritten_names(self.tokenizer, messages))
        return messages

    def _shape(self, messages: list[Message]) -> list[Message]:
        """Apply the dataset's rules for messages."""
        roles = SYSTEM_ROLES if self.drops_system else ()
        messages = [*itertools.dropwhile(lambda message: message["role"] in roles, messages)]
        return [*map(split_thinking, messages)] if self.splits else messages

    def parse(self, names: Iterable[str]) -> None:
        """Put messages in the place of their JSON in some columns. Raises MalformedRow for messages
        as Python prints them."""
        for name in self.columns.keys() & names:
            self.columns[name] = parse_messages(name, self.columns[name], self.fields)

    def _write(self, formats: str | Sequence[str]) -> str:
        """Write a column by the first of the formats whose columns all hold something, else by the
        last; its columns count as read."""
        formats = [formats] if isinstance(formats, str) else formats
        parts = [[*Formatter().parse(text)] for text in formats]
        names = [{name for _, name, _, _ in part if name is not None} for part in parts]
        self._read.update(*names)
        filled = [all(name in self for name in needed) for needed in names]
        index = filled.index(True) if True in filled else -1
        for name in names[index]:
            if not isinstance(self.columns.get(name, ""), str | int | float | None):
                kind = name_type(self.columns[name])
                raise MalformedRow(f"column {name} holds {kind}, not a text to be formatted")
        texts = {name: self.columns.get(name) for name in names[index]}
        return formats[index].format(**{k: "" if v is None else v for k, v in texts.items()})

    def tools(self) -> list[dict[str, Any]] | None:
        """Return the tool schemas; None if there are none."""
        functions: dict[str, Any] = {}

        def read(name: str, value: Any) -> Any:
            functions[name] = read_tools(value, name)
            return [tool.get("function", tool) for tool in functions[name] or []]

        self._pick(TOOLS, read)
        return functions.get("tools") or functions.get("functions")

    def chat_template_kwargs(self) -> dict[str, Any] | None:
        """Return the keywords that the row gives to the chat template; None without."""
        value = self.get("chat_template_kwargs")
        if isinstance(value, str):
            value = read_json(value, "chat_template_kwargs") if value.strip() else None
        if not value:
            return None
        if not isinstance(value, Mapping):
            raise MalformedRow(f"chat_template_kwargs is {name_type(value)}, not a table")
        check_values(value)
        for key in value:
            if key in RESERVED:
                raise MalformedRow(f"chat_template_kwargs sets {key}, which the row says itself")
        return dict(value)

    def system(self) -> str | None:
        """Return the system message of a column."""
        system = self.text("system") or None
        return None if self.drops_system else system

    def history(self) -> list[Message]:
        """Return the turns before the prompt: pairs of question and answer, or messages."""
        value = self.get("history")
        if isinstance(value, str) and value.strip():
            value = read_json(value, "history")
        if is_empty(value):
            return []
        if not isinstance(value, list | tuple):
            raise MalformedRow(f"history is {name_type(value)}, not a list of pairs")
        if all(isinstance(pair, Mapping) for pair in value):
            return self.read_messages(value)
        messages = []
        for pair in value:
            texts = isinstance(pair, list | tuple) and all(isinstance(t, str) for t in pair)
            if not texts or len(pair) != 2:
                raise MalformedRow("history must be a list of pairs [question, answer]")
            messages += [{"role": r, "content": t} for r, t in zip(SPEAKERS, pair, strict=True)]
        check_values(messages)
        return messages

    def with_context(self, messages: list[Message]) -> list[Message]:
        """Return messages behind the system message and the history of the row's columns."""
        system, history = self.system(), self.history()
        opening = messages[:1] if messages and messages[0]["role"] in SYSTEM_ROLES else []
        if history and history[0]["role"] in SYSTEM_ROLES:
            if opening and opening[0]["content"].strip() != history[0]["content"].strip():
                raise MalformedRow("the system messages of history and messages differ")
            opening, messages, history = history[:1], messages[len(opening) :], history[1:]
        else:
            messages = messages[len(opening) :]
        if system is not None and opening:
            if opening[0]["content"].strip() != system.strip():
                raise MalformedRow("column system and the system message differ")
        elif system is not None:
            opening = [{"role": "system", "content": system}]
        return [*opening, *history, *messages]

    @property
    def has_context(self) -> bool:
        """True if columns hold what only a chat template can write."""
        images = IMAGES if self.images is not None else ()
        return any(name in self for name in (*CONTEXT, *images))

    def refuse_media(self) -> None:
        """Raise MalformedRow for images, videos or audio beside the texts, except images that are
        read."""
        self._read.update(IMAGES if self.images is not None else ())
        unused = self.unused()
        refuse([name for name in MEDIA if name in unused], "column")

    def conversation(self, messages: list[Message], first: int | None = None) -> Conversation:
        """Return the messages with all that the row says beside them.

        first: number of them that are a prompt. Raises MalformedRow for media, and for masks of
        parts of messages.
        """
        self.refuse_media()
        unused = self.unused()
        refuse([name for name in PARTIAL_MASKS if name in unused], "column")
        complete = self.with_context(messages)
        start = 0 if first is None else first + len(complete) - len(messages)
        if self.images is not None:
            complete = self.images.place(complete, self.get(*IMAGES))
        return Conversation(complete, self.tools(), self.chat_template_kwargs(), start)

    def prompt(self, column: str = "prompt") -> str | list[Message] | None:
        """Return what is to be answered, a text or messages; None without such a column.

        The assistant's turn at the end of a prompt is begun, and to be continued. Answers at the
        end of a conversation are left out, because they are not the policy's, unless column
        continue_final_message is true. A text stays one unless the row has a system message, a
        history or images.
        """
        self.parse({column}.difference(PROMPTS))
        name = next((name for name in (column, *PROMPTS) if name in self), None)
        if name is None:
            return None
        value = self.get(name) if name not in MESSAGES else self.messages()
        if isinstance(value, str):
            value = self.question(name)
        elif name not in MESSAGES:
            value = self.read_messages(value, name=name)
        messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
        self.refuse_media()
        plain = complete = self.with_context(list(messages or ()))
        if self.images is not None:
            complete = self.images.place(plain, self.get(*IMAGES))
        if isinstance(value, str) and complete == messages:
            self._compare(name, complete)
            return value
        while not self.continues(name) and complete and complete[-1]["role"] == "assistant":
            complete, plain = complete[:-1], plain[:-1]
        if all(message["role"] == "assistant" for message in complete):
            raise MalformedRow("the messages are all the assistant's; nothing to answer")
        if self.get("continue_final_message") and complete[-1]["role"] != "assistant":
            raise MalformedRow(
                "continue_final_message is true, but no turn of the assistant is last"
            )
        # The messages that it is compared with have no images of a column either.
        self._compare(name, plain)
        return without_flags(complete)

    def question(self, name: str) -> Any:
        """Return a column of a prompt: a text, an instruction with its input, or messages as they
        are."""
        value = self.require(name)
        if not isinstance(value, str):
            return value
        extra = self.text("input") if name == "instruction" else None
        value = f"{value}\n\n{extra}" if extra else value
        check_values(value)
        return value

    def continues(self, name: str) -> bool:
        """Return True if the assistant's turn at the end of a column is to be continued."""
        flag = self.get("continue_final_message")
        if flag is None:
            return name not in MESSAGES
        if not isinstance(flag, bool):
            raise MalformedRow(f"continue_final_message is {name_type(flag)}, not true or false")
        return flag

    @property
    def unread(self) -> tuple[str, ...]:
        """Columns and keys of messages that hold something and that nothing has read."""
        columns = [f"column {show(name, 60)}" for name in self.unused()]
        return (*columns, *self.unread_keys)

    @property
    def unread_keys(self) -> tuple[str, ...]:
        """Keys of messages that hold something and that nothing has read."""
        return tuple(sorted(self._notes))

    def unused(self) -> list[str]:
        """Return the columns of the file that hold something and were not read."""
        used = {self.renamed.get(name, name) for name in self._read}
        return [
            str(name)
            for name, value in self.original.items()
            if name not in used and not is_empty(value)
        ]

    def _pick(self, names: Sequence[str], read: Any) -> Any:
        try:
            return pick(self.columns, names, self._read, read)
        except MalformedRow as error:
            if str(error).endswith(" differ") and not error.location:
                raise MalformedRow(f"columns {error}") from None
            raise

    def _flag(self, messages: list[Message]) -> list[Message]:
        """Apply a column with a flag for each message."""
        flags = self.columns.get("loss_mask")
        if is_empty(flags):
            return messages
        self._read.add("loss_mask")
        if not isinstance(flags, list | tuple) or len(flags) != len(messages):
            raise MalformedRow("column loss_mask must have a flag for each message")
        merged = []
        for message, value in zip(messages, flags, strict=True):
            flag = read_flag("loss_mask", value)
            if message.get("train", flag) != flag:
                raise MalformedRow("column loss_mask and the flag of a message differ")
            merged.append({**message, "train": flag})
        return merged

    def _compare(self, name: str, prompt: list[Message]) -> None:
        """Raise MalformedRow if messages beside a column of prompts do not begin with it."""
        if name in MESSAGES or not any(column in self for column in MESSAGES):
            return
        if any(self.renamed.get(name) == self.renamed.get(m, m) for m in MESSAGES):
            return
        conversation = self.messages() or []

        def texts(messages: Sequence[Message]) -> list[tuple[str, str]]:
            return [
                (message["role"], message["content"].strip())
                for message in messages
                if message["role"] not in SYSTEM_ROLES
            ]

        expected = texts(prompt)
        actual = texts(conversation)[: len(expected)]
        if prompt[-1]["role"] == "assistant" and len(actual) == len(expected):
            speaker, text = actual[-1]
            actual[-1] = (speaker, text[: len(expected[-1][1])])
        if actual != expected:
            column = next(column for column in MESSAGES if column in self)
            raise MalformedRow(f"columns {name} and {column} ask different things")


SPEAKERS = ("user", "assistant")


def parse_messages(name: str, value: Any, fields: Mapping[str, str]) -> Any:
    """Return the messages whose JSON the text of a column is, other values as they are. Raises
    MalformedRow for messages as Python prints them."""
    if isinstance(value, str) and JSON_TWICE.match(value):
        with contextlib.suppress(ValueError):
            inner = parse_json(value)
            return value if (talk := parse_messages(name, inner, fields)) == inner else talk
    if not isinstance(value, str) or not JSON_TALK.match(value):
        return value
    if value.lstrip("[{ \n\t\r").startswith(("'role'", "'from'", "'content'", "'value'")):
        raise MalformedRow(
            f"column {name} holds messages as Python prints them; write them as JSON"
        )
    try:
        messages = parse_json(value)
    except ValueError:
        return value
    return messages if is_conversation(messages, fields) else value


def is_conversation(value: Any, fields: Mapping[str, str]) -> bool:
    """Return True for a list of what look like messages."""
    keys = {"role", "from", fields.get("messages.role", "role")}
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(entry, Mapping) and bool(keys & entry.keys()) for entry in value)
    )
