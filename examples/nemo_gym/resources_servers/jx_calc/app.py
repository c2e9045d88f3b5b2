"""A calculator as a NeMo Gym environment: the agent may call the tool `calculator`, and is right
when the last number that it says is the row's `answer`. What ends in a call is judged by what the
call comes to, so that one answer without an agent (mode = "verify") can be right, too.

Gym runs this file in its own virtual environment; nothing of jaxtrain is imported here.
"""

import ast
import json
import operator
import re
from typing import Any

from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from nemo_gym.base_resources_server import (
    BaseResourcesServerConfig,
    BaseVerifyRequest,
    BaseVerifyResponse,
    SimpleResourcesServer,
)
from pydantic import BaseModel

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
LARGEST = 10**15
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
THINKING = re.compile(r"<think>.*?(</think>|$)", re.DOTALL)


class Call(BaseModel):
    """Arguments of the tool."""

    expression: str


class VerifyRequest(BaseVerifyRequest):
    """A row that was answered."""

    answer: str


class VerifyResponse(VerifyRequest, BaseVerifyResponse):
    """Reward of an answer."""

    called: float
    """Whether the tool was called."""


def evaluate(node: ast.expr) -> float:
    """Value of an arithmetic expression; ValueError for anything else."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            actual = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            actual = -evaluate(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            actual = OPERATORS[type(op)](evaluate(left), evaluate(right))
        case _:
            raise ValueError("not an arithmetic expression")
    if not abs(actual) <= LARGEST:
        raise ValueError("number too large")
    return actual


def compute(expression: str) -> str:
    """Return the tool's answer to an expression."""
    try:
        if len(expression) > 100:
            raise ValueError("expression too long")
        value = evaluate(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError) as error:
        reason = str(error) if type(error) is ValueError else "not an arithmetic expression"
        return f"error: {reason}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def read_text(item: Any) -> str:
    """Return the text of a response's last item, or the result of its call."""
    if item.type == "function_call":
        try:
            return compute(str(json.loads(item.arguments)["expression"]))
        except (ValueError, KeyError, TypeError):
            return ""
    if item.type == "message" and item.role == "assistant":
        return "".join(part.text for part in item.content if part.type == "output_text")
    return ""


class CalculatorServer(SimpleResourcesServer):
    """The tool and the judge."""

    config: BaseResourcesServerConfig

    def setup_webserver(self) -> FastAPI:
        app = super().setup_webserver()
        app.post("/calculator")(self.calculate)
        return app

    async def calculate(self, body: Call) -> PlainTextResponse:
        """Return the result as the text that the model reads."""
        return PlainTextResponse(compute(body.expression))

    async def verify(self, body: VerifyRequest) -> VerifyResponse:
        """Reward 1.0 where the last number is the answer."""
        items = body.response.output
        text = read_text(items[-1]) if items else ""
        numbers = NUMBER.findall(THINKING.sub("", text))
        right = bool(numbers) and float(numbers[-1]) == float(body.answer)
        called = float(any(item.type == "function_call" for item in items))
        return VerifyResponse(**body.model_dump(), reward=float(right), called=called)


if __name__ == "__main__":
    CalculatorServer.run_webserver()
