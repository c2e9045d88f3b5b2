"""Requests to the policy endpoint that make no sense: refused by the field's name, and nothing else
happens. `python -m tests.environments.odd_requests` sends thousands of a seed."""

import asyncio
import gzip
import time
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_requests import draw_request, play
from test_environments_policy_server import ASK, SAMPLING, agent

from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.sources.calculator import TOOLS
from jaxtrain.environments import token_history
from jaxtrain.environments.policy_server import PolicyServer
from jaxtrain.environments.request_fields import RequestRefused, decompress, parse_body
from jaxtrain.environments.scripted import ScriptedEngine

CHAT, TOKENS = "/v1/chat/completions", "/inference/v1/generate"


@pytest.fixture(scope="module")
def server():
    lines = []
    policy_server = PolicyServer(load_tokenizer("builtin"), max_model_len=400, log=lines.append)
    policy_server.open()
    policy_server.lines = lines
    yield policy_server
    policy_server.close()


@settings(max_examples=12, deadline=None)
@given(st.randoms(use_true_random=False))
def test_no_request_fails_the_server_or_its_episode(rng):
    statuses = play(lambda episode: draw_request(rng, episode), 10)
    assert statuses.total() == 10


def ask(server, *bodies, path=CHAT, engine=None):
    """Answers to bodies, of one episode, and its record."""

    async def run():
        async with agent(server, ["A."] * len(bodies), engine=engine) as entry:
            headers = {"X-Session-ID": entry.record.id}
            answers = [await entry.post(path, body, **headers) for body in bodies]
            assert entry.record._error is None
            return answers, entry.record

    return asyncio.run(run())


CALLS = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"temperature": "1"}, "temperature must be a number, found '1'"),
        ({"top_k": 1.5}, "top_k must be a whole number"),
        ({"max_tokens": True}, "max_tokens must be a whole number, found true"),
        ({"stop": [3]}, "stop must be a text or a list of texts, found a list"),
        ({"stop": [""]}, "stop: a text has 1 to"),
        ({"stop_token_ids": [512_000]}, "stop_token_ids must be token ids"),
        ({"tools": {"type": "function"}}, "tools must be a list of objects, found an object"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
         "tools[0].function.parameters must be an object"),
        ({"tool_choice": 3}, "tool_choice must be a text or an object"),
        ({"messages": [ASK, "x"]}, "messages must be a list of objects"),
        ({"messages": [ASK, CALLS]}, "messages[1]: arguments of 'f' are no object"),
        ({"messages": [{**ASK, "generation_token_ids": ["a"]}]}, "messages[0].generation_token"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs must be an object"),
        ({"chat_template_kwargs": {"messages": 1}}, "'messages' is no variable"),
        ({"response_format": "json"}, "response_format must be an object"),
        ({"top_logprobs": 3}, "top_logprobs 3 must be"),
        ({"seed": 0.5}, "seed must be a whole number"),
        ({"n": 10**400}, "n 1e399 or more is not served"),
        ({"ignore_eos": True}, "ignore_eos true is not served: only false"),
        ({"typical_p": 0.5}, "typical_p 0.5"),
        ({"temprature": 1}, "'temprature' is no field that is understood here; did you mean temp"),
        ({"model": "gpt-4o"}, "model 'gpt-4o' is not served; 'policy' is"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_and_the_episode_goes_on(server, change, words):
    good = {"messages": [ASK]}
    (refused, answered), record = ask(server, {**good, **change}, good)
    assert refused[0] in (400, 404) and words in refused[1]["message"]
    assert answered[0] == 200 and record.num_turns == 1


@pytest.mark.parametrize(
    "change, words",
    [
        ({"token_ids": "5"}, "token_ids must be a list of whole numbers"),
        ({"token_ids": []}, "token_ids must be one or more"),
        ({"token_ids": [-1]}, "token_ids must be one or more of the ids 0 to"),
        ({"sampling_params": [1]}, "sampling_params must be an object"),
        ({"sampling_params": {"max_tokens": "4"}}, "sampling_params.max_tokens must be"),
        ({"sampling_params": {"stpo": "4"}}, "'stpo' is no field"),
        ({"stream": True}, "'stream' is no field"),
    ],
)
def test_requests_of_tokens_are_checked_too(server, change, words):
    good = {"token_ids": [5, 6]}
    (refused, answered), _ = ask(server, {**good, **change}, good, path=TOKENS)
    assert refused[0] == 400 and words in refused[1]["message"] and answered[0] == 200


def test_what_changes_nothing_is_named_once(server):
    body = {"messages": [{**ASK, "annotations": ["a link"]}], "user": "me", "store": None}
    answers, _ = ask(server, body, body)
    assert [status for status, _ in answers] == [200, 200]
    told = [line.rpartition("does not read ")[2] for line in server.lines]
    assert told.count("user") == 1 and told.count("message key 'annotations'") == 1
    assert not any("store" in line for line in told)


class Asked(ScriptedEngine):
    """Keeps what it was asked."""

    async def generate(self, prompt, sampling, stop_ids=(), index=0):
        self.asked = (sampling, tuple(stop_ids))
        return await super().generate(prompt, sampling, stop_ids, index)


def test_seeds_stop_tokens_and_top_log_probs_work(server):
    engine = Asked(server.template.tokenizer, ["A."])
    body = {"messages": [ASK], "seed": -7, "stop_token_ids": [9, 11]}
    body |= {"logprobs": True, "top_logprobs": 2}
    [(status, answer)], record = ask(server, body, engine=engine)
    sampling, stops = engine.asked
    assert status == 200 and sampling.seed == (SAMPLING.seed - 7) % 2**32
    assert stops == (*record.form.template.ends, 9, 11)
    for entry in answer["choices"][0]["logprobs"]["content"]:
        assert entry.pop("top_logprobs") == [entry]


def test_half_a_surrogate_pair_is_a_question_mark_everywhere(server):
    tool = {**TOOLS[0]["function"], "description": "a\ud800b"}
    body = {"messages": [{**ASK, "content": "\ud800"}], "stop": ["\udfff"]}
    [(status, _)], record = ask(server, {**body, "tools": [{"type": "function", "function": tool}]})
    assert status == 200 and record._first[0]["content"] == "?"


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_text_that_no_row_can_hold_is_not_tokenized(server, role, monkeypatch):
    tokenized = []
    monkeypatch.setattr(
        token_history.TokenHistory, "_tokens", lambda self, piece: tokenized.append(piece) or []
    )
    message = {"role": role, "content": "word " * 400_000}
    [(status, answer)], record = ask(server, {"messages": [ASK, message]})
    assert status == 400 and "context length is 400 tokens" in answer["message"]
    assert record.is_full and not tokenized


def test_episodes_go_on_while_a_text_is_tokenized(server, monkeypatch):
    """The event loop of all episodes does not wait for it."""
    split = token_history.TurnTemplate.split

    def slow(self, *args):
        time.sleep(1.0)
        return split(self, *args)

    monkeypatch.setattr(token_history.TurnTemplate, "split", slow)

    async def run():
        async with agent(server, ["A."]) as entry:
            body, longest = {"messages": [ASK]}, 0.0
            headers = {"X-Session-ID": entry.record.id}
            task = asyncio.ensure_future(entry.post(CHAT, body, **headers))
            while not task.done():
                before = time.monotonic()
                await asyncio.sleep(0.01)
                longest = max(longest, time.monotonic() - before)
            return (await task)[0], longest

    status, longest = asyncio.run(run())
    assert status == 200 and longest < 0.9


@pytest.mark.parametrize(
    "raw, charset, status",
    [
        (b"{}", "nosuch", 415),
        (b"{}", "utf-16", 415),
        (b"\xff{}", None, 400),
        (b"[" * 100_000, None, 400),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "utf-8", 400),
        (b"[]", "UTF-8", 400),
        (b'{"a": ' + b"9" * 5000 + b"}", None, 400),
    ],
)
def test_bodies_that_are_no_json_object(raw, charset, status):
    with pytest.raises(RequestRefused) as refused:
        parse_body(raw, charset)
    assert refused.value.status == status


def test_content_codings():
    for coding, packed in (("gzip", gzip.compress(b"{}")), ("deflate", zlib.compress(b"{}"))):
        assert decompress(packed, coding, 9) == b"{}"
    assert decompress(b"{}", "identity", 9) == b"{}"
    bomb = gzip.compress(bytes(10**7))
    for raw, coding, status in ((b"{}", "br", 415), (b"{}", "gzip", 400), (bomb, "gzip", 413)):
        with pytest.raises(RequestRefused) as refused:
            decompress(raw, coding, 10**6)
        assert refused.value.status == status


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"stop": "a", "stop": "b"}', "the key 'stop' stands twice"),
        ('{"a": "é"}'.encode("latin-1"), "not UTF-8 text: byte 0xe9"),
        (b'{"a": }', r"Expecting value \(line 1, column 7\)"),
        (b"[" * 5000, "nested deeper than 100 levels"),
    ],
)
def test_a_body_that_is_no_json_is_refused_with_the_reason(body, reason):
    with pytest.raises(RequestRefused, match=f"the body is no valid JSON: {reason}"):
        parse_body(body, None)
