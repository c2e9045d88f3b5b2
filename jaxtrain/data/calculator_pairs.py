"""Pairs of answers of a calculator agent, generated: a right one and a wrong one to each question.

The conversations are those of builtin:calculator, up to one of their questions. The right answer is
thought, call and result as there; the wrong one errs as a half-trained agent does:

    operand     a digit of an operand is copied wrongly, in thought and call
    operator    another operator
    result      thought and call are right, the number in the answer is not the tool's
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxtrain.data.calculator import OPERATORS, TOOLS, CalculatorRows, Problem, exchange

MISTAKES = ("operand", "operand", "operator", "result")
"""Each as often as it stands here: operands are what small models get wrong."""


@dataclass(frozen=True)
class CalculatorPairs:
    """Rows with prompt, chosen, rejected (lists of messages), tools and `mistake`; row i depends on
    the conversations and i alone."""

    talks: CalculatorRows

    def __len__(self) -> int:
        return len(self.talks)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.talks[index]
        chance = random.Random(f"{self.talks.seed} {self.talks.split} {index} wrong")
        asked = chance.randrange(len(row["problems"]))
        begin = 1 + 4 * asked  # behind the system message, four messages a question
        a, op, b = row["problems"][asked].split()
        mistake = chance.choice(MISTAKES)
        return {
            "prompt": row["messages"][: begin + 1],
            "chosen": row["messages"][begin + 1 : begin + 4],
            "rejected": err(chance, Problem(int(a), op, int(b)), mistake),
            "tools": TOOLS,
            "mistake": mistake,
        }

    def origin(self, index: int) -> str:
        """Name of a row in messages to people."""
        return f"builtin:calculator_pairs {self.talks.split} row {index}"


def err(chance: random.Random, problem: Problem, mistake: str) -> list[dict[str, Any]]:
    """Call, result and answer with a mistake in them."""
    if mistake == "result":
        right = exchange(problem, "")[1:]
        wrong = miscopy(chance, problem.result)
        return [*right[:2], {"role": "assistant", "content": f"The answer is {wrong}."}]
    if mistake == "operator":
        wrong = replace(problem, op=chance.choice([op for op in OPERATORS if op != problem.op]))
    elif chance.random() < 0.5:
        wrong = replace(problem, a=miscopy(chance, problem.a))
    else:
        wrong = replace(problem, b=miscopy(chance, problem.b))
    return exchange(wrong, "")[1:]


def miscopy(chance: random.Random, number: int) -> int:
    """A number of as many digits of which one is another."""
    digits = list(str(number))
    place = chance.randrange(len(digits))
    lowest = 1 if place == 0 and len(digits) > 1 else 0
    digits[place] = str(chance.choice([d for d in range(lowest, 10) if str(d) != digits[place]]))
    return int("".join(digits))
