"""`jaxtrain chat`, piped: against a server, and what it saves."""

import asyncio
import io
import json

import pytest
from serving_toy import WatchedScript, serving

from jaxtrain.cli.chat import Conversation, read_sampling
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.errors import UserError
from jaxtrain.main import main


@pytest.fixture(scope="module")
def server():
    tokenizer = load_tokenizer("builtin")
    with serving(tokenizer, WatchedScript(tokenizer, "Four €."), key="secret") as served:
        yield served


def talk(server, monkeypatch, *lines, arguments=(), key="secret"):
    """Exit code of a conversation of these lines."""
    monkeypatch.setenv("JAXTRAIN_API_KEY", key)
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    return main(["chat", f"http://127.0.0.1:{server.port}/v1", *arguments])


def test_turns_are_answered_and_saved_as_rows(server, monkeypatch, capsys, tmp_path):
    file = tmp_path / "rows.jsonl"
    lines = ["Hi.", "And 2 + 2?", f"/save {file}", "/system Be brief.", "Hi.", f"/save {file}"]
    arguments = ["sampling.temperature=0", "sampling.max_new_tokens=40"]
    assert talk(server, monkeypatch, *lines, "/exit", "never", arguments=arguments) == 0
    assert capsys.readouterr().out == "Four €.\n" * 3
    first, second = (json.loads(line)["messages"] for line in file.read_text().splitlines())
    roles = ["user", "assistant"]
    assert [m["role"] for m in first] == roles * 2 and first[-1]["content"] == "Four €."
    assert second[0] == {"role": "system", "content": "Be brief."} and len(second) == 3
    assert server.model.engine.asked[-1][1].temperature == 0


def test_what_is_wrong_is_one_line(server, monkeypatch, capsys, tmp_path):
    cases = [
        ((["Hi."], "no"), "answers 401"),
        ((["/save x.jsonl"], "secret"), "there is no answer yet"),
        ((["Hi.", "/save"], "secret"), "name a file"),
        ((["Hi.", f"/save {tmp_path}"], "secret"), "/save"),
        ((["x " * 4000], "secret"), "maximum context length"),
    ]
    for (lines, key), words in cases:
        assert talk(server, monkeypatch, *lines, key=key) == 2
        assert words in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi."))
    assert main(["chat", "http://127.0.0.1:1/v1"]) == 2
    assert "does not answer" in capsys.readouterr().err
    with pytest.raises(UserError, match="model is not for a server"):
        read_sampling(["model.path=x"])


class FailsOnce:
    """A speaker that fails, then answers with the types of the parts that it was sent."""

    def __init__(self):
        self.failed = False

    async def answer(self, messages):
        if not self.failed:
            self.failed = True
            raise UserError("chat: no answer")
        content = " ".join(part["type"] for part in messages[-1]["content"])
        yield {"choices": [{"delta": {"content": content}}]}


def test_pictures_of_a_message_without_an_answer_belong_to_the_next(tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (4, 3)).save(tmp_path / "small.png")
    conversation = Conversation(FailsOnce())
    conversation.add_picture(tmp_path / "small.png")
    with pytest.raises(UserError, match="no answer"):
        asyncio.run(conversation.say("What?"))
    assert not conversation.messages
    assert "its pictures wait for the next message" in capsys.readouterr().err
    asyncio.run(conversation.say("What?"))
    assert capsys.readouterr().out == "image_url text\n"
    assert [message["role"] for message in conversation.messages] == ["user", "assistant"]
    assert not conversation.pictures
