"""Generated preference pairs of a calculator agent: a right and a wrong turn for each prompt.

The conversations are those of builtin:calculator, up to one of the agent's turns. The wrong turn
has the errors of a small model that has learned the form but not yet the copying: a number has
digits swapped, doubled, mixed up or lost.

    call      the thought is right, a number in the call is not
    answer    the call was right, the number in the answer is not the tool's
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jaxtrain.data.sources.calculator import TOOLS, CalculatorRows

MISTAKES = ("call", "answer")


@dataclass(frozen=True)
class CalculatorPairs:
    """Rows with prompt (messages), chosen, rejected (a message each), tools and `mistake`. Row i
    depends only on the conversations and i."""

    talks: CalculatorRows

    def __len__(self) -> int:
        return len(self.talks)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.talks[index]
        chance = random.Random(f"{self.talks.seed} {self.talks.split} {index} wrong")
        question = chance.randrange(len(row["problems"]))
        mistake = chance.choice(MISTAKES)
        # After the system message each question has four: user, call, result, answer.
        index_of_turn = 4 * question + (2 if mistake == "call" else 4)
        right = row["messages"][index_of_turn]
        if mistake == "call":
            a, op, b = row["problems"][question].split()
            a, b = (garble(chance, a), b) if chance.random() < 0.5 else (a, garble(chance, b))
            wrong = {**right, "tool_calls": [_call(right["tool_calls"][0], f"{a} {op} {b}")]}
        else:
            number = garble(chance, row["answers"][question])
            wrong = {**right, "content": f"The answer is {number}."}
        return {
            "prompt": row["messages"][:index_of_turn],
            "chosen": [right],
            "rejected": [wrong],
            "tools": TOOLS,
            "mistake": mistake,
        }

    def origin(self, index: int) -> str:
        """Return the name of a row in messages."""
        return f"builtin:calculator_pairs {self.talks.split} row {index}"


def garble(chance: random.Random, number: str) -> str:
    """Return a wrong copy of a number: digits swapped, doubled, lost or replaced."""
    while True:
        digits = list(number)
        position = chance.randrange(len(digits))
        slip = chance.choice(("swap", "double", "lose", "repeat", "other"))
        if slip == "swap":
            target = chance.randrange(len(digits))
            digits[position], digits[target] = digits[target], digits[position]
        elif slip == "double":
            digits.insert(position, digits[position])
        elif slip == "lose":
            del digits[position]
        elif slip == "repeat":
            digits[position] = chance.choice(number)
        else:
            digits[position] = str(chance.randrange(10))
        wrong = "".join(digits)
        if wrong and wrong != number and str(int(wrong)) == wrong:
            return wrong


def _call(call: dict[str, Any], expression: str) -> dict[str, Any]:
    arguments = json.dumps({"expression": expression})
    return {**call, "function": {**call["function"], "arguments": arguments}}
