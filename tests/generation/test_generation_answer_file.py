"""Answers are on disk as they end: an interrupted `generate` goes on and writes what a whole one
would have."""

import json
import subprocess
import sys

import pytest
from fake_vllm import FakeVllm
from test_generation_drafts import TARGET, save

from jaxtrain.cli.answer_file import AnswerFile
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.vllm.engine import VllmEngine
from jaxtrain.generation.vllm.fixed import open_fixed
from jaxtrain.main import main
from jaxtrain.models import families
from jaxtrain.runs.run_files import write_output

ROWS = [{"prompt": f"{i}?", "id": i} for i in range(5)]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_that_have_ended_survive(tmp_path):
    path = tmp_path / "deep" / "out.jsonl"
    first = AnswerFile(path, ROWS, "model a")
    for index in (3, 0):
        first.add(index, {"completion": f"a{index}"})
    with first.part.open("ab") as file:
        file.write(b'[1, {"comple')  # killed in the middle of a line
    assert not path.exists()

    second = AnswerFile(path, ROWS, "model a")
    assert second.pending == [1, 2, 4]
    for index in second.pending:
        second.add(index, {"completion": f"b{index}"})
    second.finish()
    answers = ["a0", "b1", "b2", "a3", "b4"]
    expected = [{**row, "completion": a} for row, a in zip(ROWS, answers, strict=True)]
    assert lines(path) == expected and not second.part.exists()
    with pytest.raises(UserError, match="--overwrite"):
        AnswerFile(path, ROWS, "model a")


@pytest.mark.parametrize("changed", [{"settings": "model b"}, {"rows": ROWS[:4]}])
def test_answers_to_something_else_are_no_start(tmp_path, changed):
    path = tmp_path / "out.jsonl"
    AnswerFile(path, ROWS, "model a").add(0, {})
    arguments = {"rows": ROWS, "settings": "model a", **changed}
    with pytest.raises(UserError, match="another model, other keys or other prompts"):
        AnswerFile(path, **arguments)
    file = AnswerFile(path, **arguments, overwrite=True)
    assert len(file.pending) == len(arguments["rows"])
    file.add(1, {})
    assert len(lines(file.part)) == 2


def test_shards(tmp_path):
    file = AnswerFile(tmp_path / "out", ROWS, "", shard_rows=2)
    for index in file.pending:
        file.add(index, {"n": index})
    file.finish()
    shards = sorted((tmp_path / "out").iterdir())
    assert [shard.name for shard in shards] == [f"0000{i}-of-00003.jsonl" for i in range(3)]
    assert [row["n"] for shard in shards for row in lines(shard)] == list(range(5))
    with pytest.raises(UserError, match="--overwrite"):
        AnswerFile(tmp_path / "out", ROWS, "", shard_rows=2)


def test_shards_of_an_output_that_is_replaced_go(tmp_path):
    for size, names in ((2, 3), (3, 2)):
        file = AnswerFile(tmp_path / "out", ROWS, "", shard_rows=size, overwrite=True)
        for index in file.pending:
            file.add(index, {"n": index})
        file.finish()
        shards = sorted((tmp_path / "out").iterdir())
        assert len(shards) == names
        assert [row["n"] for shard in shards for row in lines(shard)] == list(range(5))


def test_an_output_that_was_cut_between_two_shards_is_finished(tmp_path, monkeypatch):
    path, arguments = tmp_path / "out", {"rows": ROWS, "settings": "", "shard_rows": 2}
    file = AnswerFile(path, **arguments)
    for index in file.pending:
        file.add(index, {"n": index})
    written = []

    def write(target, content):
        if written:
            raise KeyboardInterrupt
        written.append(target)
        write_output(target, content)

    with monkeypatch.context() as patch:
        patch.setattr("jaxtrain.cli.answer_file.write_output", write)
        with pytest.raises(KeyboardInterrupt):
            file.finish()
    again = AnswerFile(path, **arguments)
    assert not again.pending
    again.finish()
    assert [row["n"] for shard in sorted(path.iterdir()) for row in lines(shard)] == list(range(5))


KILLED = """
import os, signal, sys
from jaxtrain.cli.answer_file import AnswerFile
from jaxtrain.main import main
add = AnswerFile.add
def add_and_die(self, index, keys):
    add(self, index, keys)
    if len(self.answers) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
AnswerFile.add = add_and_die
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_killed_command_goes_on_with_any_dataset(tmp_path, capsys):
    model = save(families.config_from_hf(TARGET), 0, tmp_path / "target")
    text = "id,question\n" + "".join(f"{i},What is {i} + {i}?\n" for i in range(12))
    (tmp_path / "rows.csv").write_text(text)
    words = ["generate", str(model), "model.tokenizer=builtin", "sampling.max_new_tokens=9"]
    words += ["sampling.temperature=1", "--input", str(tmp_path / "rows.csv"), "--output"]
    assert main([*words, str(tmp_path / "whole.jsonl")]) == 0

    killed = [*words, str(tmp_path / "killed.jsonl")]
    process = subprocess.run([sys.executable, "-c", KILLED, *killed], capture_output=True)
    assert process.returncode == -9 and not (tmp_path / "killed.jsonl").exists()
    assert len(lines(tmp_path / "killed.jsonl.part")) == 6
    capsys.readouterr()
    assert main(killed) == 0
    assert "5 answers are in" in capsys.readouterr().out
    rows = lines(tmp_path / "whole.jsonl")
    assert lines(tmp_path / "killed.jsonl") == rows
    assert [(row["id"], row["question"]) for row in rows][3] == ("3", "What is 3 + 3?")

    messages = [*words, str(tmp_path / "chats"), "--messages", "--shard-rows", "8"]
    assert main(messages) == 0
    chats = [row for file in sorted((tmp_path / "chats").iterdir()) for row in lines(file)]
    said = [row["messages"][-1]["content"] for row in chats]
    assert said == [row["completion"] for row in rows]
    for wrong in (["--raw", "--messages"], ["--shard-rows", "0"], ["dataset.streaming=true"]):
        assert main([*words, str(tmp_path / "x.jsonl"), *wrong]) == 2


@pytest.mark.slow
def test_servers_answer_and_an_interrupted_command_goes_on(tmp_path, capsys, monkeypatch):
    """No weights are read; what a server refuses is asked again by the same command."""
    fake = FakeVllm()
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = ["generate", "builtin", "model.tokenizer=builtin", "--servers", fake.url]
    command += ["--input", str(source), "--output", str(out), "sampling.max_new_tokens=4"]
    try:
        monkeypatch.setitem(VllmEngine.__init__.__kwdefaults__, "first_pause", 0.01)
        fake.script.extend([*["ok"] * 4, *[500] * 4])
        assert main(command) == 2
        assert "1 of 5 prompts got no answer" in capsys.readouterr().err
        assert len(lines(out.with_name("out.jsonl.part"))) == 1 + 4 and not out.exists()
        num_asked = len(fake.asked)
        assert main(command) == 0
        assert len(fake.asked) == num_asked + 1
        start = 100 + len(fake.asked[-1]["token_ids"])  # all prompts have this length
        expected = load_tokenizer("builtin").decode(range(start, start + 4))
        assert lines(out) == [{**row, "completion": expected} for row in ROWS]
        body = fake.asked[-1]
        assert body["sampling_params"]["max_tokens"] == 4
        prompts = {tuple(body["token_ids"]) for body in fake.asked}
        assert len(prompts) == 5
        # A prompt that is too long would be too long again.
        long = ["--prompt", "word " * 5_000]
        assert main([*command[:5], *long]) == 2
        captured = capsys.readouterr().err
        assert "1 of 1 prompts leave no room (number 0)" in captured
        assert "error: generate: no prompt leaves room for an answer" in captured
        assert len(fake.asked) == num_asked + 1
        # It is left out of the others' answers, and named.
        rows = [{"prompt": "word " * 5_000}, {"prompt": "short"}]
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert main([*command, "--overwrite"]) == 0
        assert "1 of 2 prompts leave no room (number 0): they get no" in capsys.readouterr().err
        [line] = lines(out)
        assert line["prompt"] == "short" and line["completion"]
    finally:
        fake.kill()


@pytest.mark.slow
def test_prompts_that_the_template_refuses_are_left_out(tmp_path, capsys):
    fake = FakeVllm()
    source, out, template = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "t.jinja"))
    builtin = load_tokenizer("builtin").chat_template
    check = "{% if messages[0].content == 'no' %}{{ raise_exception('it says no') }}{% endif %}"
    template.write_text(check + builtin)
    source.write_text('{"prompt": "no"}\n{"prompt": ""}\n{"prompt": "yes"}\n')
    command = ["generate", "builtin", "model.tokenizer=builtin", "--servers", fake.url]
    command += ["--input", str(source), "--output", str(out), "sampling.max_new_tokens=4"]
    command += [f"model.chat_template={template}"]
    try:
        assert main([*command, "--drop-malformed"]) == 0
    finally:
        fake.kill()
    captured = capsys.readouterr().err
    assert "1 of 3 rows left out; the first: " in captured and "line 2" in captured
    assert "1 of 2 prompts left out; the first: " in captured and "it says no" in captured
    [line] = lines(out)
    assert line["prompt"] == "yes" and line["completion"]


def test_a_server_that_does_not_answer_is_named_by_its_option():
    urls = ["http://127.0.0.1:1"]
    with pytest.raises(UserError, match=r"^--servers: none answered within 0.1 s: "):
        with open_fixed(urls, Sampling(), print, option="--servers", wait_seconds=0.1):
            pass


def test_what_servers_cannot_do_is_refused(capsys):
    base = ["generate", "builtin", "--servers", "http://localhost:1", "--prompt", "a"]
    for words, output in [
        (["--draft", "x"], "--servers takes neither --env nor --draft"),
        (["--env"], "--servers takes neither --env nor --draft"),
        (["--servers", "localhost:8000"], "--servers 'localhost:8000' is no URL"),
    ]:
        assert main([*base, *words]) == 2
        assert output in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out.csv", "out.Parquet"])
def test_rows_are_not_written_under_the_name_of_another_format(tmp_path, name):
    with pytest.raises(UserError, match="rows are written as JSON lines"):
        AnswerFile(tmp_path / name, ROWS, "")
