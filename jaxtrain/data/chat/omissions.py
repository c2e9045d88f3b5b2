"""Parts of a conversation that a chat template leaves out: tools, system messages, tools' results,
thoughts, calls and their arguments.

A part is left out if the rendering is the same with another value. All parts are changed at once,
each by a word of its own; those whose word the rendering lacks are changed alone and compared. That
depends on which parts a conversation has and hardly on their values, so conversations of one shape
are tested once.
"""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.data.chat.messages import without_block
from jaxtrain.huggingface.chat_template import TemplateFailed, render

Kwargs = Mapping[str, Any] | None
"""chat_template_kwargs: variables of the template besides messages and tools."""
Write = Callable[[Any, Any], list[str]]
"""(messages, tools) -> their renderings."""

THOUGHTS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""Tags around a thought within a content."""
SCHEMAS = ("parameters", "input_schema")
"""Keys of a tool's parameters; the second is Anthropic's."""
EVERYWHERE = ("tools", "the system message")
"""Parts that every rendering of a conversation must have."""
MAX_SHAPES = 4096
MAX_ALONE = 64
"""Parts of one conversation that are changed alone."""


class TemplateOmission(TemplateFailed):
    """The chat template does not write a part of the row, which the message names."""


class Part(NamedTuple):
    """A value of a conversation that the template must write."""

    name: str
    path: tuple[Any, ...]
    """Keys from {"messages", "tools"} on."""
    tag: str = ""
    """Text of the value behind which the part begins; "": all of it is the part."""


_VERDICTS: "weakref.WeakKeyDictionary[Any, dict[Any, str]]" = weakref.WeakKeyDictionary()


def check_omissions(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Any,
    trained: Sequence[int],
    kwargs: Kwargs,
    texts: list[str],
    write: Write,
) -> None:
    """Raise TemplateOmission unless the template writes all that the model needs to see and learn:
    of messages and tools, of the assistant's turns those that train, and of the others the calls.

    trained: indices of messages; empty: of a prompt. texts: the renderings.
    """
    verdicts = _VERDICTS.setdefault(tokenizer, {})
    shape = _describe(tokenizer, messages, tools, trained, kwargs)
    if shape not in verdicts:
        if len(verdicts) >= MAX_SHAPES:
            verdicts.clear()
        parts = list(_list_parts(messages, tools, trained))
        verdicts[shape] = _find_omission(messages, tools, parts, texts, write)
    if verdicts[shape]:
        raise TemplateOmission(f"chat template leaves out {verdicts[shape]}")


_READS: "weakref.WeakKeyDictionary[Any, dict[Any, bool]]" = weakref.WeakKeyDictionary()
SPEAKERS = ("user", "assistant", "user", "assistant")
"""Roles of the conversation in which a key of messages is tried."""


def list_unwritten_names(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the note of a row whose messages have names that the chat template leaves out.

    A tool's name repeats that of its call, so it is not looked at.
    """
    roles = {message["role"] for message in messages if "name" in message} - {"tool"}
    if not getattr(tokenizer, "chat_template", None):
        return []
    unwritten = any(not _writes_key(tokenizer, role, "name") for role in roles)
    return ["message key 'name'"] if unwritten else []


def write_thoughts_once(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Return messages whose thoughts stand in one place: a thought that a content repeats at its
    beginning stays in `reasoning_content` if the template writes that, else in the content."""
    united: list[Mapping[str, Any]] = []
    for message in messages:
        shortened = without_block(message)  # type: ignore[arg-type]
        if shortened is not None and shortened is not message:
            if _writes_key(tokenizer, "assistant", "reasoning_content"):
                message = shortened
            elif message["reasoning_content"].strip() in message["content"]:
                message = {k: v for k, v in message.items() if k != "reasoning_content"}
        united.append(message)
    return united


def _writes_key(tokenizer: Any, role: str, key: str) -> bool:
    """Return True if the template writes a key of messages of a role, or refuses it."""
    template = tokenizer.chat_template
    cache = _READS.setdefault(tokenizer, {})
    case = (template if isinstance(template, str) else repr(template), role, key)
    if case not in cache:
        messages = [{"role": entry, "content": "c"} for entry in SPEAKERS]
        messages = messages if role in SPEAKERS else [{"role": role, "content": "c"}, *messages]
        trial = [{**m, key: "zq0w"} if m["role"] == role else m for m in messages]
        try:
            cache[case] = "zq0w" in render(tokenizer, trial, None, False, None)
        except TemplateFailed:
            cache[case] = True
    return cache[case]


def _describe(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Any,
    trained: Sequence[int],
    kwargs: Kwargs,
) -> Any:
    """Return the shape of a conversation: its messages by role, keys and neighbors."""
    chosen, last = set(trained), len(messages) - 1
    kinds: list[Any] = [
        (
            message["role"],
            tuple(key for key, value in message.items() if value),
            tuple(len(call["function"].get("arguments") or ()) for call in _calls(message)),
            _find_tag(message.get("content")),
            index in chosen,
        )
        for index, message in enumerate(messages)
    ]
    around = zip([None, *kinds], kinds, [*kinds[1:], None], strict=False)
    template = tokenizer.chat_template
    return (
        template if isinstance(template, str) else repr(template),
        frozenset((index in (0, last), *near) for index, near in enumerate(around)),
        len(tools or ()),
        repr(kwargs or None),
    )


def _list_parts(
    messages: Sequence[Mapping[str, Any]], tools: Any, trained: Sequence[int]
) -> Iterator[Part]:
    for number, tool in enumerate(tools or ()):
        within = ("tools", number, *(("function",) if "function" in tool else ()))
        function = tool.get("function", tool)
        for key in ("name", "description", *SCHEMAS):
            value = function.get(key)
            if isinstance(value, Mapping) and key in SCHEMAS:
                value = value.get("properties")
            if value:
                yield Part("tools", (*within, key))
    names = {"system": "the system message", "developer": "the developer's message"}
    names |= {"tool": "a tool's result", "user": "a user's message"}
    count = max(trained) + 1 if trained else len(messages)
    for index, message in enumerate(messages[:count]):
        path = ("messages", index)
        content = message.get("content") or ""
        if message["role"] != "assistant":
            if content.strip():
                yield Part(names.get(message["role"], "a message"), (*path, "content"))
            continue
        # Of earlier turns templates leave thoughts out by design, but no calls: without them the
        # model reads results of unknown questions.
        for number, call in enumerate(_calls(message)):
            call_path = (*path, "tool_calls", number, "function")
            yield Part("tool_calls", (*call_path, "name"))
            if call["function"].get("arguments"):
                yield Part("tool_calls (arguments)", (*call_path, "arguments"))
        if index not in trained:
            continue
        if (message.get("reasoning_content") or "").strip():
            yield Part("reasoning_content", (*path, "reasoning_content"))
        if tag := _find_tag(content):
            yield Part("the thought in a content", (*path, "content"), tag)
        if content.strip():
            yield Part("content", (*path, "content"))


def _calls(message: Mapping[str, Any]) -> Sequence[Any]:
    return message.get("tool_calls") or ()


def _find_tag(content: Any) -> str:
    """Return the tag that opens a closed thought in a content; "" if there is none."""
    text = content or ""
    return next((tag for tag, close in THOUGHTS if close in text.partition(tag)[2]), "")


def _find_omission(
    messages: Any, tools: Any, parts: list[Part], texts: list[str], write: Write
) -> str:
    """Return the name of the first part that the template leaves out; "" if it writes all."""
    words = {part: f"zq{number}w" for number, part in enumerate(parts)}
    changed = _try(messages, tools, words, write) or []

    def lacks(part: Part, missing: list[bool]) -> bool:
        # Thoughts and results may be in some renderings alone: later questions take them away.
        return all(missing) or (part.name in EVERYWHERE and any(missing))

    unseen = [p for p, word in words.items() if lacks(p, [word not in text for text in changed])]
    for part in unseen[:MAX_ALONE]:
        alone = _try(messages, tools, {part: words[part]}, write)
        if alone and len(alone) == len(texts) and lacks(part, [*map(str.__eq__, alone, texts)]):
            return part.name
    return ""


def _try(messages: Any, tools: Any, words: Mapping[Part, str], write: Write) -> list[str] | None:
    """Render a conversation with changed parts; None if the template refuses it, which it can only
    do if it reads them."""
    everything = {"messages": copy.deepcopy(list(messages)), "tools": copy.deepcopy(tools)}
    for part, word in words.items():
        *path, key = part.path
        owner: Any = everything
        for step in path:
            owner = owner[step]
        owner[key] = _change(owner[key], word, key, part.tag)
    try:
        return write(everything["messages"], everything["tools"])
    except TemplateFailed:
        return None


def _change(value: Any, word: str, key: str, tag: str) -> Any:
    if isinstance(value, str):
        return value.replace(tag, tag + word, 1) if tag else value + word
    if key in SCHEMAS:
        new = {word: {"type": "string", "description": word}}
        return {**value, "properties": {**value["properties"], **new}}
    return {**value, word: word}
