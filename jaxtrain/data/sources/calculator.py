"""Conversations with a calculator agent, generated: the project's own data, endless and checkable.

A row is one conversation in OpenAI message form: the user states a problem in one of several
phrasings, the assistant thinks (`reasoning_content`), calls the tool `calculator`, reads its
result and answers; sometimes the user goes on with that result. Everything the assistant writes
can be copied from what it has read, so a model of a million parameters learns it in minutes.

A problem statement (operator and operands, whichever way round for + and *) belongs to one split
by its hash, for every seed: no statement of the test split is ever seen in training.
"""

import hashlib
import json
import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.text_safety import show

SPLITS = ("train", "test")

SYSTEM = "You are a calculator agent."

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate an expression.",
            "parameters": {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        },
    }
]

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}

OPENINGS = {
    "any": ("What is {a} {op} {b}?", "Compute {a} {op} {b}.", "How much is {a} {op} {b}?"),
    "+": ("Add {a} and {b}.", "What is {a} plus {b}?"),
    "-": ("What is {a} minus {b}?", "From {a} take {b}."),
    "*": ("Multiply {a} by {b}.", "What is {a} times {b}?"),
    "/": ("Divide {a} by {b}.", "What is {a} divided by {b}?"),
}

FOLLOW_UPS = {
    "+": ("Now add {b}.", "Then plus {b}."),
    "-": ("Now subtract {b}.", "Then minus {b}."),
    "*": ("Now multiply by {b}.", "Then times {b}."),
    "/": ("Now divide by {b}.", "Then divided by {b}."),
}

MAX_ROWS = 2**24
"""Limit of rows, because the order of an epoch is kept in memory."""

HELD_OUT_SHARE = 10
"""One statement in this many belongs to the test split."""

LARGEST_RESULT = 999
"""Results have at most three digits, so that a conversation can continue with them."""

FOLLOW_UP_TRIES = 50
"""Attempts to find a follow-up; some results allow few statements of a split, or none."""

MAX_TURNS = 3
"""Questions of one conversation, the first included."""


@dataclass(frozen=True)
class CalculatorProblem:
    """Problem statement: a operator b."""

    a: int
    op: str
    b: int

    @property
    def expression(self) -> str:
        """Argument of the tool call: "12 + 34"."""
        return f"{self.a} {self.op} {self.b}"

    @property
    def result(self) -> int:
        """Right answer; a quotient is whole."""
        return int(OPERATORS[self.op](self.a, self.b))

    @property
    def split(self) -> str:
        """Split that may contain this statement."""
        a, b = self.a, self.b
        if self.op in "+*":
            a, b = min(a, b), max(a, b)
        digest = hashlib.blake2s(f"{a}{self.op}{b}".encode(), digest_size=4).digest()
        return "test" if int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0 else "train"


@dataclass(frozen=True)
class CalculatorRows:
    """Rows 0..num_rows-1 of a split; row i depends only on (seed, split, i) and the options."""

    num_rows: int = 20_000
    """Number of rows; a larger number only adds rows at the end."""
    seed: int = 0
    """Seed of the selection of problems."""
    split: str = "train"
    """train or test."""
    max_value: int = 99
    """Largest operand that a user names, 9 to 999."""
    follow_up: float = 0.3
    """Probability of a follow-up question after each answer, up to 3 questions."""
    claims: float = 0.0
    """Share of rows that check a claimed answer, half of which are wrong."""

    all_kinds: bool = False
    """Divisions, too, and any two operands: products have up to four digits, differences may be
    negative. Otherwise results are 0 to 999 and factors at most 9."""

    def __post_init__(self) -> None:
        if not isinstance(self.all_kinds, bool):
            raise UserError(
                f"builtin:calculator: all_kinds is {show(self.all_kinds)}, not true or false"
            )
        if self.split not in SPLITS:
            raise UserError(
                f"builtin:calculator has no split {self.split!r}: choose one of {', '.join(SPLITS)}"
            )
        for name, low, high in (
            ("num_rows", 1, MAX_ROWS),
            ("max_value", 9, LARGEST_RESULT),
            ("follow_up", 0, 1),
            ("claims", 0, 1),
        ):
            value = getattr(self, name)
            share = name in ("follow_up", "claims")
            kinds = (int, float) if share else (int,)
            if isinstance(value, bool) or not isinstance(value, kinds):
                expected = "a number" if share else "a whole number"
                raise UserError(f"builtin:calculator: {name} is {show(value)}, not {expected}")
            if not low <= value <= high:
                raise UserError(
                    f"builtin:calculator: {name} = {value} is not between {low} and {high}"
                )

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(self.num_rows))

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Build a row: messages, tools, answers (one string per question) and problems."""
        if not 0 <= index < self.num_rows:
            raise IndexError(index)
        # Seeding with a string hashes it, the same in every Python version and process.
        chance = random.Random(f"{self.seed} {self.split} {index}")
        problem = self._draw(chance)
        problems, messages = [problem], [{"role": "system", "content": SYSTEM}]
        if self.claims and chance.random() < self.claims:
            return _check(chance, problem)
        messages += exchange(problem, _phrase(chance, problem, OPENINGS))
        while len(problems) < MAX_TURNS and chance.random() < self.follow_up:
            following = self._follow(chance, problem.result)
            if following is None:
                break
            problem = following
            problems.append(problem)
            messages += exchange(problem, _phrase(chance, problem, FOLLOW_UPS))
        return {
            "messages": messages,
            "tools": TOOLS,
            "answers": [str(problem.result) for problem in problems],
            "problems": [problem.expression for problem in problems],
        }

    def origin(self, index: int) -> str:
        """Return the name of a row in messages."""
        return f"builtin:calculator {self.split} row {index}"

    def _draw(self, chance: random.Random) -> CalculatorProblem:
        """Draw a problem of this split."""
        while self.all_kinds:
            problem = self._draw_any(chance)
            if problem.split == self.split:
                return problem
        while True:
            op = chance.choice("+-*")
            a, b = chance.randint(1, self.max_value), self._operand(chance, op)
            problem = (
                CalculatorProblem(max(a, b), op, min(a, b))
                if op == "-"
                else CalculatorProblem(a, op, b)
            )
            if self._fits(problem):
                return problem

    def _draw_any(self, chance: random.Random) -> CalculatorProblem:
        """Draw a problem of one of four kinds, with one-digit operands as often as larger ones."""
        op = chance.choice("+-*/")
        a, b = (chance.randint(1, chance.choice((9, self.max_value))) for _ in "ab")
        if op == "/":
            a = b * chance.randint(1, max(self.max_value // b, 1))
        return CalculatorProblem(a, op, b)

    def _follow(self, chance: random.Random, result: int) -> CalculatorProblem | None:
        """Draw a problem of this split about the last result; None if no attempt succeeds."""
        for _ in range(FOLLOW_UP_TRIES):
            op = chance.choice("+-*")
            problem = CalculatorProblem(result, op, self._operand(chance, op))
            if self._fits(problem):
                return problem
        return None

    def _operand(self, chance: random.Random, op: str) -> int:
        return chance.randint(2, 9) if op == "*" else chance.randint(1, self.max_value)

    def _fits(self, problem: CalculatorProblem) -> bool:
        return 0 <= problem.result <= LARGEST_RESULT and problem.split == self.split


def exchange(problem: CalculatorProblem, question: str) -> list[dict[str, Any]]:
    """Build the four messages of a question: user, tool call, tool result, answer."""
    call = {
        "type": "function",
        "function": {
            "name": "calculator",
            "arguments": json.dumps({"expression": problem.expression}),
        },
    }
    return [
        {"role": "user", "content": question},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": f"I need {problem.expression}.",
            "tool_calls": [call],
        },
        {"role": "tool", "name": "calculator", "content": str(problem.result)},
        {"role": "assistant", "content": f"The answer is {problem.result}."},
    ]


def ask_whether(question: str, claim: int | str) -> str:
    """Write a question for a verdict on a claimed answer."""
    return f"{question} Somebody says {claim}. Right or wrong?"


def _check(chance: random.Random, problem: CalculatorProblem) -> dict[str, Any]:
    """Build a row whose answer is a verdict, "right" or "wrong"."""
    wrong = chance.random() < 0.5
    claim = abs(problem.result + wrong * chance.choice((-10, -1, 1, 10)))
    verdict = "right" if claim == problem.result else "wrong"
    messages = exchange(problem, ask_whether(_phrase(chance, problem, OPENINGS), claim))
    messages[-1] = {"role": "assistant", "content": f"It is {verdict}."}
    return {
        "messages": [{"role": "system", "content": SYSTEM}, *messages],
        "tools": TOOLS,
        "answers": [verdict],
        "problems": [problem.expression],
    }


def _phrase(
    chance: random.Random, problem: CalculatorProblem, phrasings: dict[str, tuple[str, ...]]
) -> str:
    choices = phrasings.get("any", ()) + phrasings[problem.op]
    return chance.choice(choices).format(a=problem.a, op=problem.op, b=problem.b)
