"""The files of docs/environments.md do what the page says, from its very text."""

import asyncio
import runpy
import sys
from pathlib import Path

import pytest
from test_plugins_rl_page import MODEL, QWEN, ROWS, TITLED

from jaxtrain.config import EnvConfig, SamplingConfig, load_config
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.environments.factory import open_env
from jaxtrain.environments.scripted import ScriptedEngine, ScriptedSpeaker
from jaxtrain.main import main

PAGE = (Path(__file__).parents[2] / "docs/environments.md").read_text()
CONFIGS = [name for name, _ in TITLED.findall(PAGE) if name.endswith(".toml")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The page's files, with a model that trains in milliseconds."""
    folder = tmp_path_factory.mktemp("environments")
    for name, text in [*TITLED.findall(PAGE), *ROWS.findall(PAGE)]:
        assert not (folder / name).exists(), f"the page has two files {name}"
        (folder / name).write_text(text.replace(QWEN, MODEL))
    return folder


@pytest.fixture(autouse=True)
def there(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])


def play(name, row, *texts, peers=None, **options):
    tokenizer = load_tokenizer("builtin")
    env = open_env(EnvConfig(kind=f"{name}.py:{name}", options=options), tokenizer)
    script = ScriptedEngine(tokenizer, texts, peers)
    episode = asyncio.run(env.run(row, script, SamplingConfig(max_new_tokens=400), 0))
    assert not script.texts, "not all turns were asked for"
    return episode


def call(name, item):
    return f'<tool_call>{{"name": "{name}", "arguments": {{"item": "{item}"}}}}</tool_call>'


def told(episode):
    return [message["content"] for message in episode.completion if message["role"] != "assistant"]


def test_one_turn():
    row = {"country": "Norway", "capital": "Oslo"}
    assert play("capital", row, "Oslo.").all_rewards == {"capital": 1.0}
    assert play("capital", row, "Bergen").all_rewards == {"capital": 0.0}


def test_tools():
    row = {"prices": {"apple": 2.0, "plum": 1.5}}
    texts = (call("price", "pear"), call("price", "plum"), call("buy", "plum"), "Done.")
    episode = play("shop", row, *texts)
    assert told(episode) == ["error: KeyError: 'pear'", "1.5", "1 in the basket"]
    assert episode.all_rewards == {"shop": 1.0}
    calls = {"tool_calls": 3.0, "tool_errors": 1.0}
    assert episode.metrics == {"turns": 4.0, "bought": 1.0, **calls}
    assert play("shop", row, call("buy", "apple"), "Done.").all_rewards == {"shop": 0.0}


def test_several_turns():
    row = {"questions": ["1 + 1?", "Twice that?"], "answers": ["2", "4"]}
    episode = play("tutor", row, "2", "5")
    assert episode.turn_rewards == [{"tutor": 1.0}, {"tutor": 0.0}]


def test_against_itself():
    first = play("duel", {"prize": 9}, "3", "5")
    (second,) = first.others
    assert [entry.agent for entry in (first, second)] == ["first", "second"]
    assert [entry.all_rewards for entry in (first, second)] == [{"duel": 0.0}, {"duel": 4.0}]
    assert "the other bid 3" in second.prompt[-1]["content"] and len(first.completion) == 1


def test_a_judge():
    judge = ScriptedSpeaker(["It is too short.", "Yes."])
    episode = play("debate", {"question": "Why?"}, "So.", "Because.", peers={"judge": judge})
    assert episode.all_rewards == {"debate": 1.0}
    assert told(episode) == ["A critic says: It is too short.\nAnswer again."]


def test_a_game():
    assert play("tictactoe", {"seed": 1}, "x").all_rewards == {"tictactoe": -1.0}
    moves, lost = ["0", "1", "2", "3", "4", "5", "6", "7", "8"], set()
    for seed in range(8):
        board, texts = "." * 9, []
        while True:  # the first free field, whatever the rival did
            texts.append(next(n for n in moves if board[int(n)] == "."))
            try:
                episode = play("tictactoe", {"seed": seed}, *texts)
                break
            except Exception as error:
                assert "script has ended" in str(error)
                board = replay(seed, texts)
        lost.add(episode.all_rewards["tictactoe"])
        assert episode.metrics["illegal"] == 0.0
    assert 1.0 in lost and lost <= {1.0, -0.5, 0.2}


def replay(seed, texts):
    """The board after these moves and the rival's answers."""
    import random

    board, rival = ["."] * 9, random.Random(seed)
    for text in texts:
        board[int(text)] = "x"
        board[rival.choice([n for n in range(9) if board[n] == "."])] = "o"
    return "".join(board)


@pytest.mark.slow
def test_a_sandbox(folder):
    from jaxtrain.environments.rewards.load import call_function, find_function

    row = {"task": "Define add.", "example": "print(add(1, 2))", "tests": ["assert add(2, 2) == 4"]}
    block = "```python\ndef add(a, b):\n    return a {} b\n```"
    texts = (
        "Hm.\n```python\nimport time\ntime.sleep(60)\n```",
        block.format("-"),
        block.format("+"),
    )
    episode = play("programmer", row, *texts)
    first, second = told(episode)
    assert "(stopped: " in first and "\n-1\n" in second
    judge = find_function("python_tests")
    columns = {"completions": [episode.completion], "tests": [row["tests"]]}
    assert call_function(judge, columns) == [1.0]
    assert play("programmer", row, "No program.").num_sampled


def test_an_agent_over_http():
    tokenizer = load_tokenizer("builtin")
    env = open_env(EnvConfig(kind="caller.py:Caller"), tokenizer)
    row = {"question": "3 + 4?", "answer": "7"}
    try:
        work = env.run(row, ScriptedEngine(tokenizer, ["It is 7"]), SamplingConfig(), 0)
        episode = asyncio.run(work)
    finally:
        env.close()
    assert episode.rewards == {"right": 1.0}
    assert tokenizer.decode(episode.drawn_tokens) == "It is 7<|im_end|>"


def test_the_game_is_played_by_hand_as_the_page_says(capsys):
    runpy.run_path("check_game.py")
    output = PAGE.split("print(episode.all_rewards, episode.metrics)  # ")[1].splitlines()[0]
    assert capsys.readouterr().out == f"{output}\n"


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_the_page_is_valid(folder, name):
    assert CONFIGS == ["debate.toml", "programmer.toml", "openenv.toml", "verifiers.toml"]
    assert load_config(folder / name, []).task.kind == "rl"


@pytest.mark.slow
def test_a_dry_run_plays_the_sandbox(capsys):
    words = ["model.architecture.max_position_embeddings=4096"]
    assert main(["--config", "programmer.toml", "--dry-run", *words]) == 0
    assert "played one episode" in capsys.readouterr().out
