"""A server of `jaxtrain serve`'s routes in a thread, over any engine, for tests."""

import asyncio
import http.client
import json
import threading
from contextlib import contextmanager

from jaxtrain.environments.endpoint_app import EndpointApp
from jaxtrain.environments.scripted import ScriptedEngine
from jaxtrain.generation.engine import Completion
from jaxtrain.generation.serving.answerer import PUBLIC, Answerer, ServedModel
from jaxtrain.generation.serving.open_request import ServingFormat


class WatchedScript(ScriptedEngine):
    """Says the same text for ever, token by token."""

    def __init__(self, tokenizer, text):
        super().__init__(tokenizer, [])
        self.text, self.asked = text, []

    def load(self):
        return 0, 0

    def prefix_tokens(self):
        return 0, 0

    reports_likely = False

    async def generate(self, prompt, sampling, stop_ids=(), index=0, likely=0, watch=None):
        self.texts = [self.text]
        self.asked.append((list(prompt), sampling, tuple(stop_ids), index))
        answer = await super().generate(prompt, sampling, stop_ids, index)
        count = min(len(answer.tokens), sampling.max_new_tokens)
        reason = "stop" if count == len(answer.tokens) else "length"
        answer = Completion(answer.tokens[:count], answer.logprobs[:count], reason)
        for end in range(1, count + 1) if watch else ():
            watch(Completion(answer.tokens[:end], answer.logprobs[:end], "length"))
            await asyncio.sleep(0)
        return answer


class Served:
    """A server that listens, and a client of it."""

    def __init__(self, loop, answerer, port, key):
        self.loop, self.answerer, self.port, self.key = loop, answerer, port, key

    @property
    def model(self):
        return next(iter(self.answerer.models.values()))

    def send(self, method, path, body=None, **headers):
        """(status, raw body)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.key}"} | headers
        try:
            connection.request(method, path, raw, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def post(self, path, **body):
        """(status, parsed body)."""
        status, raw = self.send("POST", path, body)
        return status, json.loads(raw)

    def stream(self, path, **body):
        """The chunks of a stream, without its end."""
        status, raw = self.send("POST", path, {**body, "stream": True})
        assert status == 200, raw
        *events, last, empty = raw.decode().split("\n\n")
        assert (last, empty) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    def call(self, function, *args):
        """Call a function in the server's event loop."""
        done = threading.Event()
        result = []

        def work():
            result.append(function(*args))
            done.set()

        self.loop.call_soon_threadsafe(work)
        assert done.wait(30)
        return result[0]


@contextmanager
def serving(
    tokenizer, engine, *, vocab_size=512, max_model_len=128, key=None, extend=None, **options
):
    """A server that is closed afterwards. extend: further routes of the answerer. options: of
    Answerer."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def begin():
        model = ServedModel("toy", engine, "step-1")
        form = ServingFormat(tokenizer, vocab_size, max_model_len)
        answerer = Answerer(form, [model], **{"log": lambda text: None, **options})
        routes = [*answerer.routes(), *(extend(answerer) if extend else ())]
        app = EndpointApp(routes, key, PUBLIC)
        return answerer, app, await app.listen("127.0.0.1", 0)

    def wait(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    answerer, app, port = wait(begin())
    try:
        yield Served(loop, answerer, port, key)
    finally:
        wait(app.close())
        wait(engine.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
