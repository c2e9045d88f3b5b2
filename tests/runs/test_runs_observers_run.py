"""Requests of observers to a run: an evaluation, a checkpoint, its end; also after a resume."""

import json

import pytest
from toy_run import MODEL

from jaxtrain.main import main

ASKS = '''
import json

class Asks:
    """Notes all it hears, and asks for something at some steps."""
    def __init__(self, path, asks):
        self.path, self.asks = path, asks
    def note(self, *heard):
        with open(self.path, "a") as file:
            file.write(json.dumps(heard) + "\\n")
    def start(self, run):
        self.note("start", run.start_step, [line["step"] for line in run.earlier()])
    def step(self, step, values):
        self.note("step", step, sorted({"loss", "packing_efficiency"} & set(values)))
        return self.asks.get(str(step))
    def evaluation(self, step, values):
        self.note("evaluation", step, values["eval/loss"] > 0)
    def checkpoint(self, step, path):
        self.note("checkpoint", step, path.name)
    def end(self, state, message):
        self.note("end", state, message)
'''


@pytest.mark.slow
def test_a_run_saves_evaluates_and_ends_where_an_observer_asks(tmp_path, capsys):
    (tmp_path / "asks.py").write_text(ASKS)
    (tmp_path / "sft.toml").write_text(
        f"""{MODEL}
[run]
output_dir = "{tmp_path / "run"}"
max_steps = 20
export = false
[data]
sequence_len = 64
datasets = [{{ path = "{tmp_path / "x.jsonl"}" }}]
eval_datasets = [{{ path = "{tmp_path / "x.jsonl"}" }}]
[checkpoint]
background = false
[log]
plot = false
report = false
console = "plain"
every = 3
[[observers]]
kind = "{tmp_path / "asks.py"}:Asks"
options.path = "{tmp_path / "heard.jsonl"}"
options.asks = {{ 2 = "evaluate", 4 = "save", 7 = "stop" }}
"""
    )
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n}"},
                {"role": "assistant", "content": f"{n}!"},
            ]
        }
        for n in range(40)
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--config", str(tmp_path / "sft.toml"), "observers.0.options.asks.9=stop"]
    assert main(words) == 0
    heard = [json.loads(line) for line in (tmp_path / "heard.jsonl").read_text().splitlines()]
    steps = [step for step in heard if step[0] == "step"]
    # Numbers are read one step late: what is asked for at a step comes after the next one.
    assert [step[1] for step in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert all(step[2] == ["loss", "packing_efficiency"] for step in steps)
    assert ["evaluation", 3, True] in heard
    assert [step[1] for step in heard if step[0] == "checkpoint"] == [5, 8]
    assert heard[0] == ["start", 0, []] and heard[-1] == ["end", "finished", ""]
    assert "asks.py:Asks ends the run after step 8" in capsys.readouterr().out
    # The same command goes on behind it; it knows what was seen.
    assert main(words) == 0
    heard = [json.loads(line) for line in (tmp_path / "heard.jsonl").read_text().splitlines()]
    started = [step for step in heard if step[0] == "start"]
    assert started[1] == ["start", 8, [3, 3, 6]]
    assert [step[1] for step in heard if step[0] == "step"][8:] == [9, 10]
