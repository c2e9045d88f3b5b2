"""Rows of agent data to turns, rendered by the chat template or in a fixed ChatML form.

- "template" (default): the tokenizer's chat template, with tools. The visible trunk is the
  conversation without thoughts; a thought is the text that the template shows between the
  generation prompt and the end of the thinking block.
- "chatml": ChatML with Qwen's XML tool calls, each message tokenized separately, without tool
  definitions; the form of the published tree-training data, for comparisons.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxtrain.data.chat.control_tokens import SpecialTokens, encoder_of
from jaxtrain.data.chat.messages import SYSTEM_ROLES, MalformedRow
from jaxtrain.data.chat.omissions import Kwargs
from jaxtrain.data.chat.rows import Conversation, Row
from jaxtrain.data.chat.template import Renderer, TemplateFailed, render_text
from jaxtrain.data.formats import ANSWERS, QUESTIONS
from jaxtrain.methods.trees.turns import AssistantTurn, make_turns

START, END = "<|im_start|>", "<|im_end|>"
THINK, THINK_END = "<think>", "</think>"


def read_row(row: Row) -> Conversation:
    """Return the conversation of a row with messages, or with a question and an answer.

    Messages without a role are the user's, those of a completion the assistant's. Contents are
    stripped of outer white space. Raises MalformedRow.
    """
    messages = row.messages("user")
    if messages is None:
        question, answer = (
            next((n for n in names if n in row), None) for names in (QUESTIONS, ANSWERS)
        )
        if question is None or answer is None:
            raise MalformedRow("needs messages, or prompt and a non-empty completion")
        messages = row.read_messages(row.question(question), "user", True)
        messages += row.read_messages(row.get(answer), "assistant", True)
    conversation = row.conversation(messages)
    for message in conversation.messages:
        message["content"] = message["content"].strip()
    if not any(message["role"] == "assistant" for message in conversation.messages):
        raise MalformedRow("no assistant message")
    return conversation


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the thought of an assistant message, stripped; "" if there is none."""
    return (message.get("reasoning_content") or "").strip()


def render_chatml(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, special_tokens: SpecialTokens = "text"
) -> list[AssistantTurn]:
    """Render turns in the fixed form, up to the last assistant message.

    Raises MalformedRow for unsupported roles and for a conversation that starts with an assistant.
    """
    encoder = encoder_of(tokenizer, special_tokens)
    messages, mark, _ = encoder.protect(messages)
    parts, pending, trains = [], [], []
    for index, message in enumerate(messages):
        before = messages[index - 1]["role"] if index else None
        after = messages[index + 1]["role"] if index + 1 < len(messages) else None
        if message["role"] != "assistant":
            pending += encoder(_context_text(message, before, after), mark)
            continue
        if index == 0:
            raise MalformedRow("the conversation starts with an assistant message")
        thought = reasoning_of(message)
        reasoning = encoder(f"{THINK}{thought}{THINK_END}", mark) if thought else []
        parts.append((pending, reasoning, encoder(_assistant_text(message), mark)))
        trains.append(message.get("train") is not False)
        pending = []
    return make_turns(parts, trains)


def _context_text(message: Mapping[str, Any], before: str | None, after: str | None) -> str:
    role, content = message["role"], message["content"]
    role = "system" if role in SYSTEM_ROLES else role
    if role in ("system", "user"):
        text = f"{START}{role}\n{content}{END}\n"
    elif role == "tool":
        text = "" if before == "tool" else f"{START}user\n"
        text += f"<tool_response>\n{content}\n</tool_response>\n"
        text += "" if after == "tool" else f"{END}\n"
    else:
        raise MalformedRow(f"the chatml rendering has no role {role!r}")
    return text + (f"{START}assistant\n" if after == "assistant" else "")


def _assistant_text(message: Mapping[str, Any]) -> str:
    content, calls = message["content"], message.get("tool_calls")
    if not calls:
        return f"{content}\n{END}\n" if content else f"{END}\n"
    return "\n".join([*([content] if content else []), *map(_call_text, calls)]) + f"{END}\n"


def _call_text(call: Mapping[str, Any]) -> str:
    function = call["function"]
    lines = [f"<tool_call>\n<function={function['name']}>"]
    for key, value in function["arguments"].items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines.append(f"<parameter={key}>\n{shown}\n</parameter>")
    return "\n".join([*lines, "</function>\n</tool_call>"])


def render_template(
    messages: Sequence[Mapping[str, Any]], tools: Any, renderer: Renderer, kwargs: Kwargs = None
) -> list[AssistantTurn]:
    """Render turns with the chat template; raises TemplateFailed or RetokenizationError. kwargs:
    the row's own variables of the template.

    A response ends with its end-of-turn token; white space after it belongs to the next prompt.
    """
    kwargs = {**renderer.kwargs, **(kwargs or {})}
    (messages, tools, kwargs), mark, _ = renderer.encoder.protect((messages, tools, kwargs))
    keys = ("reasoning_content", "train")
    visible = [{k: v for k, v in m.items() if k not in keys} for m in messages]
    trained = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if trained[0] == 0:
        raise MalformedRow("the conversation starts with an assistant message")
    spans = {}
    for rendering in renderer.render(visible, tools, trained, mark, kwargs):
        for index in trained:
            positions = np.flatnonzero(rendering.author == index)
            if len(positions):
                spans[index] = (rendering.tokens, int(positions[0]), int(positions[-1]) + 1)
    turns = []
    for index in trained:
        if index not in spans:
            raise TemplateFailed(f"chat template: message {index + 1} is not shown")
        tokens, start, stop = spans[index]
        thought = _thought_text(visible, messages[index], index, tools, renderer.tokenizer, kwargs)
        reasoning = renderer.encoder(thought, mark) if thought else []
        prompt, response = tokens[:start], tokens[start:stop]
        trains = messages[index].get("train") is not False
        turns.append(AssistantTurn(prompt, np.asarray(reasoning, np.int32), response, trains))
    return turns


def _thought_text(
    visible: Sequence[Mapping[str, Any]],
    message: Mapping[str, Any],
    index: int,
    tools: Any,
    tokenizer: Any,
    kwargs: Kwargs,
) -> str:
    """Return a thought as the template shows it, from the generation prompt to the closing tag."""
    thought = reasoning_of(message)
    if not thought:
        return ""
    prompt = render_text(tokenizer, visible[:index], tools, True, kwargs)
    spoken = {**visible[index], "reasoning_content": thought}
    shown = render_text(tokenizer, [*visible[:index], spoken], tools, False, kwargs)
    tail = shown[len(prompt) :] if shown.startswith(prompt) else ""
    stop = tail.find(thought)
    if stop < 0:  # the template does not support reasoning
        return f"{THINK}\n{thought}\n{THINK_END}"
    stop += len(thought)
    close = tail.find(THINK_END, stop)
    return tail[:stop] if close < 0 else tail[: close + len(THINK_END)]


def _thinks(message: Mapping[str, Any]) -> bool:
    tagged = THINK_END in message["content"].partition(THINK)[2]
    return message["role"] == "assistant" and (tagged or bool(reasoning_of(message)))


def split_thinking(
    messages: Sequence[Mapping[str, Any]],
    tools: Any,
    tokenizer: Any,
    special_tokens: SpecialTokens = "text",
    kwargs: Kwargs = None,
) -> list[AssistantTurn]:
    """Split the last answer with a thought into one turn: before, thought, after.

    The answer is the last assistant message that contains <think>...</think> or has
    reasoning_content; later messages are left out. The three parts are encoded separately, so that
    no tokenizer can merge a tag with its neighbors. Raises MalformedRow if a tag or part is
    missing.
    """
    index = next((i for i in range(len(messages) - 1, -1, -1) if _thinks(messages[i])), 0)
    if index == 0:
        raise MalformedRow(f"no answer has {THINK}...{THINK_END} or reasoning_content")
    encoder = encoder_of(tokenizer, special_tokens)
    (messages, tools, kwargs), mark, _ = encoder.protect((messages, tools, dict(kwargs or {})))
    before, answer = messages[:index], dict(messages[index])
    thought = reasoning_of(answer)
    if thought:
        answer["content"] = f"{THINK}\n{thought}\n{THINK_END}\n\n{answer['content']}"
    prompt = render_text(tokenizer, before, tools, True, kwargs)
    spoken = {k: v for k, v in answer.items() if k in ("role", "content", "tool_calls")}
    full_text = render_text(tokenizer, [*before, spoken], tools, False, kwargs)
    if not full_text.startswith(prompt):
        prompt = render_text(tokenizer, before, tools, False, kwargs)
        if not full_text.startswith(prompt):
            raise TemplateFailed("chat template: the answer rewrites what precedes it")
    # Some generation prompts open the thinking block themselves.
    begin = full_text.find(THINK, max(len(prompt) - len(THINK) - 1, 0))
    close = full_text.find(THINK_END, begin)
    if begin < 0 or close < 0:
        raise TemplateFailed("chat template: strips the thinking of the answer")
    close += len(THINK_END)
    context, thought, response = (
        encoder(text, mark)
        for text in (full_text[:begin], full_text[begin:close], full_text[close:])
    )
    if not (context and thought and response):
        raise MalformedRow("think: the prompt, the thought or the response is empty")
    return make_turns([(context, thought, response)], [answer.get("train") is not False])
