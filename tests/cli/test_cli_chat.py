"""`jaxtrain chat`, piped: against a server, and what it saves."""

import asyncio
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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
        captured = capsys.readouterr().err
        assert words in captured and "does not answer" not in captured
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi."))
    assert main(["chat", "http://127.0.0.1:1/v1"]) == 2
    assert "does not answer" in capsys.readouterr().err
    assert main(["chat", "http://[bad"]) == 2
    assert "is no URL" in capsys.readouterr().err
    with pytest.raises(UserError, match="model is not for a server"):
        read_sampling(["model.path=x"])


STREAMS = {
    "comments and thoughts": (
        ': keep-alive\n\nevent: x\ndata: {"error": null, "choices": null}\n'
        'data: {"choices": [{"delta": {"role": "assistant", "reasoning": "2 and"}}, 7]}\n'
        'data: {"choices": [{"delta": {"reasoning": " 2."}}]}\n'
        'data: {"choices": [{"delta": {"content": "Four."}}, {"delta": null}]}\ndata: [DONE]\n'
    ),
    "no stream": (
        '{"choices": [{"message": {"content": "Four.", "reasoning_content": "2 and 2."}}]}'
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams_of_other_servers(name, monkeypatch, capsys, tmp_path):
    body = STREAMS[name].encode()
    kind = "application/json" if name == "no stream" else "text/event-stream"

    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer("application/json", b'{"data": [{"id": "m"}]}')

        def do_POST(self):
            sent = self.rfile.read(int(self.headers["Content-Length"]))
            assert b"reasoning_content" not in sent
            self.answer(kind, body)

        def answer(self, kind, body):
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    file = tmp_path / "rows.jsonl"
    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        monkeypatch.setattr("sys.stdin", io.StringIO(f"2 + 2?\n/save {file}\n3 + 1?"))
        assert main(["chat", f"http://127.0.0.1:{other.server_port}/v1"]) == 0
        other.shutdown()
    # Thoughts are shown and saved, but no part of the second request.
    assert capsys.readouterr().out == 2 * "<think>\n2 and 2.\n</think>\nFour.\n"
    [row] = [json.loads(line) for line in file.read_text().splitlines()]
    answer = {"role": "assistant", "content": "Four.", "reasoning_content": "2 and 2."}
    assert row["messages"][1] == answer


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
