"""Clients of `jaxtrain serve`: curl lines of its page, and many at once, of which some hang up."""

import asyncio
import http.client
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from serving_toy import WatchedScript, serving

from jaxtrain.environments.endpoint_app import EndpointApp, Route, stream

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
CLIENTS = 200


def read_curl_lines():
    (block,) = re.findall(r"```sh \{curl\}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return block.replace("\\\n", "").strip().split("\n")


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_curl_lines_of_the_page(tokenizer):
    engine = WatchedScript(tokenizer, "Four, of course.")
    with serving(tokenizer, engine, max_model_len=256) as served:
        outputs = []
        for line in read_curl_lines():
            line = line.replace("127.0.0.1:8000", f"127.0.0.1:{served.port}") + " --fail-with-body"
            done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, (line, done.stdout, done.stderr)
            outputs.append(done.stdout)
    models, chat, stream, completions, tokens, health = outputs
    assert json.loads(models)["data"][0]["id"] == "toy"
    assert json.loads(chat)["choices"][0]["message"]["content"].startswith("Four")
    assert stream.count("data: ") > 3 and stream.endswith("data: [DONE]\n\n")
    answers = json.loads(completions)["choices"]
    assert [answer["index"] for answer in answers] == [0, 1]
    assert json.loads(tokens)["count"] == len(tokenizer.encode("Water boils")) and health == ""


def test_a_client_that_hangs_up_in_a_stream_leaves_no_traceback(caplog):
    async def end(request):
        async def draw():
            yield {"text": "a"}
            request.transport.close()
            yield {"text": "b"}

        return await stream(request, draw())

    async def run():
        app = EndpointApp([Route("GET", "/stream", end)], None)
        port = await app.listen("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        await app.close()
        return answer

    assert b'{"text": "a"}' in asyncio.run(run()) and not caplog.text


class Echo(WatchedScript):
    """Engine that repeats the number of the prompt, and counts the answers under way."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer, "")
        self.decode, self.running = tokenizer.decode, 0

    async def generate(self, prompt, *args, **kwargs):
        self.running += 1
        try:
            await asyncio.sleep(0)
            number = re.findall(r"number (\d+)", self.decode(prompt))[-1]
            self.text = f" {number}" * 8  # read before the next answer gets its turn
            return await super().generate(prompt, *args, **kwargs)
        finally:
            self.running -= 1


def test_clients_that_hang_up_lose_and_mix_nothing(tokenizer):
    engine, answers = Echo(tokenizer), {}

    def ask(number, port):
        body = {"messages": [{"role": "user", "content": f"number {number}"}], "max_tokens": 100}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            raw = json.dumps({**body, "stream": number % 2 == 0})
            connection.request("POST", "/v1/chat/completions", raw)
            if number % 3 == 0:
                return  # with the request sent, and nothing read
            answer = connection.getresponse()
            raw = answer.read().decode()
            if number % 2:
                answers[number] = json.loads(raw)["choices"][0]["message"]["content"]
            else:
                lines = [line[6:] for line in raw.split("\n\n") if line.startswith("data: {")]
                deltas = [
                    choice["delta"] for line in lines for choice in json.loads(line)["choices"]
                ]
                answers[number] = "".join(delta.get("content") or "" for delta in deltas)
        finally:
            connection.close()

    with serving(tokenizer, engine, max_model_len=512) as served:
        threads = [
            threading.Thread(target=ask, args=(number, served.port)) for number in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        status, last = served.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": "number 7"}]
        )
        assert status == 200 and engine.running == served.call(lambda: served.model.running) == 0
    assert last["choices"][0]["message"]["content"].split() == ["7"] * 8
    expected = {n: [str(n)] * 8 for n in range(CLIENTS) if n % 3}
    assert {number: text.split() for number, text in answers.items()} == expected
