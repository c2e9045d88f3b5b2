"""The calculator agent's world: tool calls out of text, safe arithmetic, tool results, answers.

`solve_problems` plays whole conversations with any sampler. What the model wrote stays as it wrote
it, token for token; only what the world says (tool results, the user's next question) is rendered
and appended, so the model continues exactly the sequence that it has produced:

    prompt tokens | generated ... end-of-turn | tool result + header | generated ... | ...
"""

import ast
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxtrain.errors import UserError

Generate = Callable[[list[list[int]]], list[list[int]]]
"""Prompts in, continuations out (without the prompt, with the end-of-turn token if reached)."""

MAX_EXPRESSION = 100
"""Longest expression that is evaluated, in characters."""
LARGEST = 10**15
"""Numbers beyond it are an error, not a result."""

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
THINKING = re.compile(r"<think>.*?(</think>|$)", re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class CalculatorError(Exception):
    """A tool call that cannot be answered; its text goes back to the model."""


def evaluate(expression: str) -> int | float:
    """Value of an arithmetic expression: numbers, + - * / // %, brackets; nothing is executed.

    Raises CalculatorError with a short reason for anything else.
    """
    if len(expression) > MAX_EXPRESSION:
        raise CalculatorError("expression too long")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body)
    except ZeroDivisionError:
        raise CalculatorError("division by zero") from None
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError):
        raise CalculatorError("not an arithmetic expression") from None


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            result = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            result = _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            result = OPERATORS[type(op)](_value(left), _value(right))
        case _:
            raise CalculatorError("not an arithmetic expression")
    if not abs(result) <= LARGEST:
        raise CalculatorError("number too large")
    return result


def format_number(value: int | float) -> str:
    """A number as the tool writes it: whole numbers without a point."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def parse_tool_call(text: str) -> dict[str, Any] | None:
    """The first tool call of an assistant turn, as {"name", "arguments"}, or None if there is none.

    Raises CalculatorError when there is one that is not valid JSON of that form.
    """
    text = THINKING.sub("", text)
    found = CALL.search(text)
    if not found:
        if "<tool_call>" in text:
            raise CalculatorError("unfinished tool call")
        return None
    try:
        call = json.loads(found.group(1))
    except (ValueError, RecursionError):
        raise CalculatorError("tool call is not valid JSON") from None
    if not isinstance(call, dict) or not isinstance(call.get("arguments"), dict):
        raise CalculatorError("tool call needs name and arguments")
    return {"name": call.get("name"), "arguments": call["arguments"]}


def answer_tool_call(text: str) -> dict[str, Any] | None:
    """The tool message that answers an assistant turn; None if the turn calls no tool."""
    try:
        call = parse_tool_call(text)
        if call is None:
            return None
        if call["name"] != "calculator":
            raise CalculatorError(f"no tool named {call['name']}")
        expression = call["arguments"].get("expression")
        if not isinstance(expression, str):
            raise CalculatorError("argument expression is missing")
        content = format_number(evaluate(expression))
    except CalculatorError as error:
        content = f"error: {error}"
    return {"role": "tool", "name": "calculator", "content": content}


def check_answer(text: str, answer: str) -> bool:
    """Whether the last number of an assistant turn, its thinking left out, is the answer."""
    numbers = NUMBER.findall(THINKING.sub("", text).replace(",", ""))
    return bool(numbers) and float(numbers[-1]) == float(answer)


@dataclass
class Episode:
    """One played conversation."""

    answers: list[str]
    """The right answers, one per question."""
    tokens: list[int]
    """Everything, in the order the model saw it: prompt, what it wrote, what it was told."""
    generated: list[bool]
    """For each token, whether the model wrote it."""
    questions: list[dict[str, Any]] = field(default_factory=list)
    """User messages that are still to be asked."""
    num_right: int = 0
    """Questions answered rightly before the first wrong answer."""
    num_turns: int = 0
    """Assistant turns written."""
    stop: str | None = None
    """Why it ended: solved, wrong answer, unfinished turn, too many turns. None while it runs."""
    transcript: str = ""
    """The whole conversation as text, special tokens included."""

    @property
    def share_right(self) -> float:
        """Share of this conversation's questions that were answered rightly."""
        return self.num_right / len(self.answers)


def list_turns(episode: Episode, width: int = 160) -> list[str]:
    """A played conversation, a line a turn, without the system prompt; long turns are cut."""
    turns = [turn.partition("\n") for turn in episode.transcript.split("<|im_start|>")[1:]]
    return [
        f"  {role:>9}: {' '.join(text.replace('<|im_end|>', ' ').split())[:width]}"
        for role, _, text in turns
        if role != "system"
    ]


def accuracy(episodes: Iterable[Episode]) -> float:
    """Share of all questions that were answered rightly; 0 for no episodes."""
    pairs = [(episode.num_right, len(episode.answers)) for episode in episodes]
    return sum(right for right, _ in pairs) / max(1, sum(total for _, total in pairs))


def solve_problems(
    generate: Generate, tokenizer: Any, rows: Iterable[Mapping[str, Any]], max_turns: int = 8
) -> list[Episode]:
    """Let a model solve calculator rows, all of them side by side, one assistant turn a round.

    tokenizer: a transformers tokenizer with a chat template; rows: CalculatorRows or a slice of
    them; max_turns: assistant turns per conversation, tool calls included. A conversation ends
    with its first wrong answer: what the user asks next would be about another number.
    """
    rows = list(rows)
    episodes = [open_episode(tokenizer, row) for row in rows]
    ends, joint = end_of_turn_ids(tokenizer), Joint(tokenizer)
    while running := [index for index, episode in enumerate(episodes) if episode.stop is None]:
        turns = generate([list(episodes[index].tokens) for index in running])
        for index, turn in zip(running, turns, strict=True):
            episode = episodes[index]
            extend(episode, turn, generated=True)
            episode.num_turns += 1
            reply = respond(episode, turn, tokenizer, ends, max_turns)
            if reply is not None:
                extend(episode, joint(reply, rows[index]["tools"]), generated=False)
    for episode in episodes:
        episode.transcript = tokenizer.decode(episode.tokens)
    return episodes


def open_episode(tokenizer: Any, row: Mapping[str, Any]) -> Episode:
    questions = [message for message in row["messages"] if message["role"] == "user"]
    system = [message for message in row["messages"] if message["role"] == "system"]
    text = tokenizer.apply_chat_template(
        [*system, questions[0]], tools=row["tools"], add_generation_prompt=True, tokenize=False
    )
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    return Episode(list(row["answers"]), tokens, [False] * len(tokens), questions[1:])


def extend(episode: Episode, tokens: list[int], generated: bool) -> None:
    episode.tokens.extend(int(token) for token in tokens)
    episode.generated.extend([generated] * len(tokens))


def respond(
    episode: Episode, turn: list[int], tokenizer: Any, ends: frozenset[int], max_turns: int
) -> dict[str, Any] | None:
    """The message that the world answers a turn with; None when the episode is over."""
    if not len(turn) or int(turn[-1]) not in ends:
        episode.stop = "unfinished turn"
        return None
    text = tokenizer.decode([int(token) for token in turn[:-1]])
    reply = answer_tool_call(text)
    if reply is None:
        if not check_answer(text, episode.answers[episode.num_right]):
            episode.stop = "wrong answer"
            return None
        episode.num_right += 1
        if not episode.questions:
            episode.stop = "solved"
            return None
        reply = episode.questions.pop(0)
    if episode.num_turns >= max_turns:
        episode.stop = "too many turns"
        return None
    return reply


def end_of_turn_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that end an assistant turn: the tokenizer's eos and what its chat template writes."""
    text, end = _ended_turn(tokenizer, None)
    token = tokenizer(text[:end], add_special_tokens=False)["input_ids"][-1]
    return frozenset({token} | {i for i in [tokenizer.eos_token_id] if i is not None})


class Joint:
    """Tokens between two assistant turns: what follows the end-of-turn token up to the next header.

    They do not depend on what the model wrote, so they are rendered after a placeholder turn.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, message: dict[str, Any], tools: list[dict[str, Any]]) -> list[int]:
        """Tokens of a tool or user message, with the generation prompt after it."""
        before, end = _ended_turn(self.tokenizer, tools)
        after = self.tokenizer.apply_chat_template(
            [*PLACEHOLDER, message], tools=tools, add_generation_prompt=True, tokenize=False
        )
        if not after.startswith(before[:end]):
            raise UserError(
                "the chat template rewrites earlier turns, so a conversation cannot be continued "
                "token by token: use a template that keeps them (model.chat_template)"
            )
        return self.tokenizer(after[end:], add_special_tokens=False)["input_ids"]


PLACEHOLDER = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "ANSWER"}]


def _ended_turn(tokenizer: Any, tools: list[dict[str, Any]] | None) -> tuple[str, int]:
    """A rendered placeholder conversation, and where its last turn's end-of-turn token ends."""
    text = tokenizer.apply_chat_template(PLACEHOLDER, tools=tools, tokenize=False)
    end = len(text.rstrip())
    if text[:end].endswith("ANSWER"):
        raise UserError(
            "the chat template writes no end-of-turn token after an assistant turn: "
            "use one that does (model.chat_template)"
        )
    return text, end
