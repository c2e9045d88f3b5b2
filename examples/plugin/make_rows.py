"""Writes rows.jsonl: the numbers from which to count down."""

import json

with open("rows.jsonl", "w") as file:
    for start in range(1, 33):
        file.write(json.dumps({"start": start}) + "\n")
