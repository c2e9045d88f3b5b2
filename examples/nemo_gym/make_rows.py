"""Rows for the environment jx_calc, one a line, each the body of a POST /run to its agent.

python examples/nemo_gym/make_rows.py train 2000 > train.jsonl
python examples/nemo_gym/make_rows.py test 128 > test.jsonl
"""

import json
import sys

from jaxtrain.data.sources.calculator import SYSTEM, TOOLS, CalculatorRows

(function,) = [tool["function"] for tool in TOOLS]


def make_row(row: dict) -> dict:
    """A conversation of builtin:calculator that has one question, as a row of NeMo Gym."""
    (question,) = [message for message in row["messages"] if message["role"] == "user"]
    return {
        "responses_create_params": {
            "input": [{"role": "system", "content": SYSTEM}, question],
            "tools": [{"type": "function", "strict": True, **function}],
        },
        "answer": str(row["answers"][0]),
    }


if __name__ == "__main__":
    split, count = sys.argv[1:]
    for row in CalculatorRows(int(count), split=split, follow_up=0):
        print(json.dumps(make_row(row)))
