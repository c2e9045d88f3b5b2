"""Environment of the calculator agent: safe arithmetic, tool results, user questions, answers.

Made for rows of builtin:calculator; other rows with messages can be played too.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxtrain.data.chat.messages import SYSTEM_ROLES
from jaxtrain.data.sources.calculator import SYSTEM, TOOLS
from jaxtrain.environments.conversation import ChatRules, Conversation
from jaxtrain.environments.token_history import TurnTemplate
from jaxtrain.environments.tool_calls import ToolCallError, parse_tool_calls, strip_thinking
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Engine, Sampling
from jaxtrain.generation.episodes import Episode

MAX_EXPRESSION = 100
"""Longest expression that is evaluated, in characters."""
LARGEST = 10**15
"""Larger numbers are an error, not a result."""

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def evaluate(expression: str) -> int | float:
    """Evaluate an arithmetic expression of numbers, + - * / // % and brackets, without executing
    code.

    Raises ToolCallError with a short reason for anything else.
    """
    if len(expression) > MAX_EXPRESSION:
        raise ToolCallError("expression too long")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        return _value(tree.body)
    except ZeroDivisionError:
        raise ToolCallError("division by zero") from None
    except (SyntaxError, ValueError, MemoryError, RecursionError, OverflowError):
        raise ToolCallError("not an arithmetic expression") from None


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
            raise ToolCallError("not an arithmetic expression")
    if not abs(result) <= LARGEST:
        raise ToolCallError("number too large")
    return result


def format_number(value: int | float) -> str:
    """Format a number as the tool does: integers without a decimal point."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def answer_tool_call(text: str) -> dict[str, Any] | None:
    """Return the tool message that answers an assistant turn; None if it calls no tool."""
    call = next(iter(parse_tool_calls(text)), None)
    if call is None:
        return None
    try:
        if call.error is not None:
            raise ToolCallError(call.error)
        if call.name != "calculator":
            raise ToolCallError(f"no tool named {call.name}")
        expression = call.arguments.get("expression")
        if not isinstance(expression, str):
            raise ToolCallError("argument expression is missing")
        content = format_number(evaluate(expression))
    except ToolCallError as error:
        content = f"error: {error}"
    return {"role": "tool", "name": "calculator", "content": content}


def check_answer(text: str, answer: str) -> bool:
    """Return True if the last number of a turn, ignoring its thinking, equals the answer."""
    numbers = NUMBER.findall(strip_thinking(text).replace(",", ""))
    return bool(numbers) and float(numbers[-1]) == float(answer)


class CalculatorEnv:
    """Environment with a user who asks questions in turn, and an agent with a calculator.

    The reward `solved` is the share of a row's questions answered correctly before the first wrong
    answer. The metric `accuracy` is a (sum, weight) over questions, so that its mean is the share
    of all questions. A row without `answers` is played to its last question and not rewarded.
    """

    def __init__(self, tokenizer: Any, max_turns: int = 8, rewritten: bool = True):
        """rewritten: True if earlier turns appear as the chat template rewrites them."""
        self.max_turns, self.rewritten = max_turns, rewritten
        self.template = TurnTemplate(tokenizer)

    async def run(
        self, row: Mapping[str, Any], engine: Engine, sampling: Sampling, index: int
    ) -> Episode:
        """Play a conversation. It ends when all questions are answered, with the first wrong answer
        (the next question builds on the right one), with an unfinished turn, or at max_turns."""
        prompt, follow_ups = read_questions(row)
        answers, asking = row.get("answers"), iter(follow_ups)
        if answers is not None and len(answers) != 1 + len(follow_ups):
            raise UserError(
                f"env.kind calculator: a row has {len(answers)} answers to {1 + len(follow_ups)}"
                " questions; it needs one for each message of the user"
            )
        rules = ChatRules(
            name="solved", rewritten=self.rewritten, kwargs=row.get("chat_template_kwargs")
        )
        schemas = row.get("tools") or TOOLS
        chat = Conversation(self.template, engine, sampling, index, rules, schemas=schemas)
        chat.say(prompt)
        num_right = 0
        while (answer := await chat.draw()).finished:
            reply = answer_tool_call(answer.raw)
            if reply is None:
                if answers is not None and not check_answer(answer.raw, answers[num_right]):
                    break
                num_right += 1
                reply = next(asking, None)
            if reply is None or chat.num_turns >= self.max_turns:
                break
            chat.say(reply)
        if answers is None:
            return chat.finish()
        return chat.finish(num_right / len(answers), accuracy=(num_right, len(answers)))


def read_questions(row: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return (messages up to the first question, later questions); a row without a system message
    gets the default one. The policy writes everything else."""
    messages = row.get("messages") or []
    questions = [message for message in messages if message.get("role") == "user"]
    system = [message for message in messages if message.get("role") in SYSTEM_ROLES]
    if not questions:
        raise UserError(
            "env.kind calculator needs rows with messages, one of them the user's, as those of"
            f" builtin:calculator; a row has only {', '.join(sorted(row)) or 'nothing'}"
        )
    return [*(system or [{"role": "system", "content": SYSTEM}]), questions[0]], questions[1:]
