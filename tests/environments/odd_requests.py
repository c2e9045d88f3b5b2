"""Odd requests to the policy endpoint, generated from a seed, and what became of them.

    python -m tests.environments.odd_requests --seed 0 --count 10000
    python -m tests.environments.odd_requests --serve          # to the routes of `jaxtrain serve`

prints the answers by status. Each request must get an answer below 500, errors as JSON with a
message, nothing may be logged, and its episode must go on.
"""

import argparse
import asyncio
import collections
import contextlib
import gzip
import http.client
import json
import logging
import random
import time

from jaxtrain.config import SamplingConfig
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.sources.calculator import TOOLS
from jaxtrain.environments.policy_server import PolicyServer
from jaxtrain.environments.request_fields import CHAT, EMPTY, HARMLESS, NEUTRAL, SAMPLING
from jaxtrain.environments.scripted import ScriptedEngine

PATHS = ("/v1/chat/completions", "/tokenize", "/inference/v1/generate")
CALL = {"id": "abc", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
MESSAGES = (
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "system", "content": "Be short."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abc", "content": "4"},
    {"role": "assistant", "content": "A.", "generation_token_ids": [5, 6]},
)
NAMES = (
    "prompt",
    "tokens",
    "stream",
    *CHAT,
    *SAMPLING,
    *NEUTRAL,
    *EMPTY,
    *HARMLESS,
    "temprature",
    "stop_tokens",
    "",
    "\ud800",
)
MESSAGE_NAMES = ("role", "content", "tool_calls", "function_call", "name", "tool_call_id", "weight")
MESSAGE_NAMES += ("reasoning_content", "generation_token_ids", "image_url", "refusal", "prefix")
TEXTS = (
    "",
    "a",
    "user",
    "auto",
    "\ud800",
    "<|im_start|>",
    "\0",
    "é" * 40,
    "word " * 3000,
    "{",
    "(",
)
HEADERS = (
    {"Content-Type": "application/json; charset=nosuch"},
    {"Content-Type": "application/json; charset=utf-16"},
    {"Content-Type": "application/json; charset=idna"},
    {"Content-Type": "text/plain; charset=\xff"},
    {"Content-Type": "\xff\xfe"},
    {"Content-Encoding": "nosuch"},
    {"Content-Encoding": "gzip"},
    {"Content-Encoding": "br"},
    {"Content-Encoding": "zstd"},
    {"Content-Encoding": "deflate"},
    {"Content-Encoding": "\xff"},
    {"Authorization": "Bearer \xff\xfe"},
    {"Authorization": "Basic x"},
    {"X-Session-ID": "\xff"},
    {"X-Session-ID": ""},
    {"Accept": "\xe4"},
    {"Cookie": "\xff=\xff; =;"},
    {"Range": "bytes=9-1"},
)


def draw_value(rng, depth=2):
    """Draw a value of JSON of any type."""
    leaves = [
        lambda: None,
        lambda: rng.choice([True, False]),
        lambda: rng.choice([0, 1, -1, 2, 7, 64, 511, 2**31, -(2**63), 2**70, 10**400]),
        lambda: rng.choice([0.0, 1.0, -0.5, 0.3, 1e308, float("nan"), float("inf")]),
        lambda: rng.choice(TEXTS),
    ]
    if depth == 0:
        return rng.choice(leaves)()
    inner = [
        lambda: [draw_value(rng, depth - 1) for _ in range(rng.randrange(4))],
        lambda: {
            rng.choice([*TEXTS, *MESSAGE_NAMES]): draw_value(rng, depth - 1)
            for _ in range(rng.randrange(4))
        },
        lambda: rng.choice(MESSAGES),
        lambda: rng.choice([TOOLS, {"type": "json_object"}, {"regex": "("}, [[]] * 70]),
    ]
    return rng.choice([*leaves, *inner])()


def mutate(rng, body):
    """Change one place of a body."""
    places = [(body, NAMES)]
    for message in body.get("messages", ()):
        places.append((message, MESSAGE_NAMES))
        for call in message.get("tool_calls") or ():
            if isinstance(call, dict):
                places.append((call, ("id", "type", "function", "name", "arguments")))
    for tool in body.get("tools") or ():
        function = tool.get("function")
        places.append((function, ("name", "description", "parameters", "strict", "type")))
    if isinstance(body.get("sampling_params"), dict):
        places.append((body["sampling_params"], (*SAMPLING, *NEUTRAL, "stpo", "n")))
    place, names = rng.choice(places)
    place[rng.choice(names)] = draw_value(rng)


def draw_request(rng, episode):
    """Draw (path, body, headers) of a request to the policy endpoint."""
    path = rng.choice(PATHS)
    if path == PATHS[2]:
        body = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}}
    else:
        body = draw_conversation(rng)
    raw, headers = spoil(rng, {**body, "metadata": {"episode": episode}})
    return path, raw, {"X-Session-ID": episode, **headers} if rng.random() < 0.8 else headers


def draw_open_request(rng):
    """Draw (path, body, headers) of a request to `jaxtrain serve`."""
    path = rng.choice([*PATHS[:2], "/v1/completions", "/detokenize"])
    match path:
        case "/v1/completions":
            body = {"prompt": rng.choice(["a", [5, 6], [[5], [6, 7]], ["a", "b"]]), "max_tokens": 4}
        case "/detokenize":
            body = {"tokens": [5, 6]}
        case _:
            body = draw_conversation(rng)
    return path, *spoil(rng, body)


def draw_conversation(rng):
    """Draw messages, perhaps with tools."""
    messages = [rng.choice(MESSAGES) for _ in range(rng.randrange(1, 4))]
    return {"messages": messages, **({"tools": TOOLS} if rng.random() < 0.3 else {})}


def spoil(rng, body):
    """Return (bytes, headers) of a body, most of the time changed."""
    body = json.loads(json.dumps(body))
    if rng.random() < 0.85:
        with contextlib.suppress(AttributeError, TypeError):  # a change of a changed place
            for _ in range(rng.randrange(1, 4)):
                mutate(rng, body)
    raw = json.dumps(body).encode()
    headers = {}
    match rng.randrange(24):
        case 0:
            raw = raw[: rng.randrange(len(raw))]
        case 1:
            raw = bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
        case 2:
            raw = json.dumps(draw_value(rng)).encode()
        case 3:
            raw = b'{"messages": ' + b"[" * rng.choice([90, 300, 100_000])
        case 4:
            raw = gzip.compress(raw)
            headers["Content-Encoding"] = "gzip"
        case 5:
            place = rng.randrange(len(raw))
            raw = raw[:place] + b"\xff" + raw[place:]
    if rng.random() < 0.12:
        headers |= rng.choice(HEADERS)
    return raw, headers


class Endless(ScriptedEngine):
    """Gives the same answer for ever."""

    async def generate(self, prompt, sampling, stop_ids=(), index=0):
        self.texts = ["A."]
        return await super().generate(prompt, sampling, stop_ids, index)


class Log(logging.Handler):
    """Keeps what servers and event loops log: tracebacks."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(self.format(record))


def send(port, token, request):
    """Return (status, body) of a request on a connection of its own."""
    path, raw, headers = request
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        sent = {"Content-Type": "application/json", "Authorization": f"Bearer {token}", **headers}
        connection.request("POST", path, raw, sent)
        answer = connection.getresponse()
        return answer.status, answer.read()


def play(draw, count, per_episode=20):
    """Send `count` requests that `draw(episode)` makes; return the number of each status.

    Raises AssertionError for one that is answered wrongly, with the request.
    """
    server = PolicyServer(load_tokenizer("builtin"), max_model_len=400, log=lambda text: None)
    server.open()
    log, statuses = Log(), collections.Counter()
    loggers = [logging.getLogger(name) for name in ("aiohttp", "asyncio")]

    async def run():
        for start in range(0, count, per_episode):
            engine = Endless(server.template.tokenizer, [])
            record = server.begin(engine, SamplingConfig(temperature=1.0, max_new_tokens=8), 3)
            for _ in range(min(per_episode, count - start)):
                request = draw(record.id)
                status, answer = await asyncio.to_thread(send, server.port, server.token, request)
                statuses[status] += 1
                assert status < 500 and not log.lines, (status, answer, log.lines, request)
                if status >= 400 and not answer.startswith(b"4"):  # aiohttp's own: "400: Bad ..."
                    message = json.loads(answer)["message"]
                    assert message, request
                    if message.startswith("the chat template refuses"):
                        record._error = None  # well-formed, but nothing that the template writes
                assert record._error is None, (record._error, request)
            server.end(record.id)

    for logger in loggers:
        logger.addHandler(log)
    try:
        asyncio.run(run())
    finally:
        for logger in loggers:
            logger.removeHandler(log)
        server.close()
    return statuses


def check_open(served, request):
    """Send a request to `jaxtrain serve`; return its status, which is below 500."""
    path, raw, headers = request
    status, answer = served.send("POST", path, raw, **headers)
    assert status < 500, (status, answer, path, raw)
    if status >= 400 and not answer.startswith(b"4"):  # aiohttp's own: "400: Bad ..."
        assert json.loads(answer)["error"]["message"], raw
    return status


def play_open(rng, count):
    """Send `count` requests to the routes of `jaxtrain serve`; return the number of each status."""
    from tests.generation.serving_toy import WatchedScript, serving

    tokenizer = load_tokenizer("builtin")
    with serving(tokenizer, WatchedScript(tokenizer, "Four, of course: 4."), key="k") as served:
        checked = (check_open(served, draw_open_request(rng)) for _ in range(count))
        return collections.Counter(checked)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--serve", action="store_true")
    args = parser.parse_args()
    rng, started = random.Random(args.seed), time.monotonic()
    if args.serve:
        statuses = play_open(rng, args.count)
    else:
        statuses = play(lambda episode: draw_request(rng, episode), args.count)
    for status, number in sorted(statuses.items()):
        print(f"HTTP {status}: {number}")
    print(f"{args.count} requests, seed {args.seed}, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
