"""`jaxtrain serve`: what it answers, piece by piece and whole, and what it refuses."""

import asyncio
import json
import random
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving_toy import WatchedScript, serving

from jaxtrain.cli.listen import read_key, require_key
from jaxtrain.data.sources.calculator import TOOLS
from jaxtrain.environments.text_stream import Detokenizer, TextStream
from jaxtrain.errors import UserError
from jaxtrain.main import main

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
ASK = [{"role": "user", "content": "What is 2 + 2?"}]
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2 + 2"}}</tool_call>'


@pytest.fixture(scope="module")
def server(tokenizer):
    with serving(tokenizer, WatchedScript(tokenizer, "Four, of course: 4 €."), key="k") as served:
        yield served


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40), st.randoms(use_true_random=False))
def test_pieces_join_to_the_decoded_whole(tokenizer, text, rng):
    tokens = encode(tokenizer, text) + [rng.randrange(4, 260) for _ in range(6)]
    detokenizer, pieces, start = Detokenizer(tokenizer.decode), [], 0
    while start < len(tokens):
        end = start + rng.randrange(1, 4)
        pieces.append(detokenizer.push(tokens[start:end], final=end >= len(tokens)))
        start = end
    assert "".join(pieces) == tokenizer.decode(tokens)


@pytest.mark.parametrize(
    "text, stops, family, whole",
    [
        ("one two three", ("two",), "", "one "),
        ("one tw", ("two",), "", "one tw"),
        ("ab abc abcd", ("abcd", "c a"), "", "ab ab"),
        ("Wait. " + CALL, (), "hermes", "Wait. "),
        ("5 < 7 <tool", (), "hermes", "5 < 7 <tool"),
        ('{"name": "f", "parameters": {}}', (), "llama3", ""),
        ("{ is a brace", (), "llama3", "{ is a brace"),
    ],
)
def test_stop_texts_and_calls_are_never_shown_in_part(tokenizer, text, stops, family, whole):
    shown = TextStream(tokenizer.decode, stops=stops, family=family)
    pieces = [shown.push([token]) for token in encode(tokenizer, text)]
    rest, calls = shown.finish()
    assert "".join([*pieces, rest]) == shown.text == whole
    assert len(calls) == (family != "" and ("tool_call>" in text or "parameters" in text))
    for piece in pieces:  # what is shown stays
        assert CALL[:3] not in piece or not calls


def test_a_thought_that_the_prompt_opened_is_shown_opened(tokenizer):
    for text, whole in (("so</think>4", "<think>\nso</think>4"), ("<think>a", "<think>a")):
        shown = TextStream(tokenizer.decode, opened=True)
        pieces = [shown.push([token]) for token in encode(tokenizer, text)]
        assert "".join([*pieces, shown.finish()[0]]) == whole


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_stream_joins_to_the_whole_answer(server, path):
    body = {"messages": ASK} if path == CHAT else {"prompt": "2 + 2 =", "max_tokens": 60}
    body |= {"logprobs": True if path == CHAT else 0, "n": 2, "return_token_ids": True, "seed": 3}
    status, whole = server.post(path, **body)
    chunks = server.stream(path, **body, stream_options={"include_usage": True})
    assert status == 200 and chunks.pop()["usage"] == whole["usage"]
    for choice in whole["choices"]:
        pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        if path == CHAT:
            text, joined = choice["message"]["content"], [p["delta"].get("content") for p in pieces]
            logs = [entry for p in pieces if p["logprobs"] for entry in p["logprobs"]["content"]]
            assert logs == choice["logprobs"]["content"] and len(logs) > 5
            assert pieces[0]["delta"]["role"] == "assistant"
        else:
            text, joined = choice["text"], [p["text"] for p in pieces]
        assert "".join(filter(None, joined)) == text == "Four, of course: 4 €."
        assert sum((p.get("token_ids", []) for p in pieces), []) == choice["token_ids"]
        assert pieces[-1]["finish_reason"] == choice["finish_reason"] == "stop"


def test_tool_calls_come_whole(tokenizer):
    with serving(tokenizer, WatchedScript(tokenizer, "I ask. " + CALL)) as served:
        body = {"messages": ASK, "tools": TOOLS}
        _, whole = served.post(CHAT, **body)
        (choice,) = whole["choices"]
        (call,) = choice["message"]["tool_calls"]
        chunks = [c for chunk in served.stream(CHAT, **body) for c in chunk["choices"]]
        (streamed,) = chunks[-1]["delta"]["tool_calls"]
        _, bare = served.post(CHAT, messages=ASK)
    assert choice["finish_reason"] == chunks[-1]["finish_reason"] == "tool_calls"
    assert json.loads(call["function"]["arguments"]) == {"expression": "2 + 2"}
    assert streamed["function"] == call["function"] and streamed["index"] == 0
    texts = [c["delta"].get("content") or "" for c in chunks]
    assert "".join(texts) == choice["message"]["content"] == "I ask. "
    assert bare["choices"][0]["message"]["content"].endswith(CALL)  # none were offered


@pytest.mark.parametrize("forced", ["required", "calculator"])
def test_a_forced_call_is_json_of_the_function(tokenizer, forced):
    from jaxtrain.generation.local.constraints import Grammars

    other = {"type": "function", "function": {"name": "other"}}
    text = '{"name": "calculator", "parameters": {"expression": "2 + 2"}}'
    choice = forced
    if forced != "required":
        choice = {"type": "function", "function": {"name": forced}}
    with serving(tokenizer, WatchedScript(tokenizer, text), max_model_len=512) as served:
        body = {"messages": ASK, "tools": [*TOOLS, other], "tool_choice": choice}
        status, whole = served.post(CHAT, **body)
        assert status == 200, whole
        chunks = [c for chunk in served.stream(CHAT, **body) for c in chunk["choices"]]
        ((_, sampling, _, _), _) = served.model.engine.asked
        missing = {"type": "function", "function": {"name": "nobody"}}
        status, refused = served.post(CHAT, **{**body, "tool_choice": missing})
    (answer,) = whole["choices"]
    (call,) = answer["message"]["tool_calls"]
    assert call["function"]["name"] == "calculator" and not answer["message"]["content"]
    assert json.loads(call["function"]["arguments"]) == {"expression": "2 + 2"}
    assert answer["finish_reason"] == chunks[-1]["finish_reason"] == "tool_calls"
    assert chunks[-1]["delta"]["tool_calls"][0]["function"] == call["function"]
    assert status == 400 and "'nobody', but the functions of tools are: " in str(refused)
    pytest.importorskip("llguidance", reason="no llguidance")
    grammars, ends = Grammars(tokenizer, 512), [tokenizer.eos_token_id]
    for written, fits in ((text, True), ('{"name": "x', False), (text.replace('"2', "2"), False)):
        constraint = grammars.begin(sampling.structured_outputs, ends)
        assert matches(constraint, tokenizer, written) == fits, written


def matches(constraint, tokenizer, text):
    """Return whether a constraint allows each token of a text."""
    for token in encode(tokenizer, text):
        if not int(constraint.allowed[token // 32]) >> (token % 32) & 1:
            return False
        constraint.accept(token)
    return True


def test_a_request_samples_as_it_says(server):
    asked = server.model.engine.asked
    server.post(CHAT, messages=ASK, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=-1, n=2)
    assert [entry[3] for entry in asked[-2:]] == [0, 1]
    sampling = asked[-1][1]
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 0)
    assert (sampling.min_p, sampling.seed) == (0.1, 2**32 - 1)
    server.post(COMPLETE, prompt="a", stop=["x"], stop_token_ids=[9])
    assert asked[-1][1].max_new_tokens == 16 and asked[-1][1].temperature == 1.0
    assert asked[-1][1].stop == ["x"] and 9 in asked[-1][2]
    server.post(COMPLETE, prompt=[[5, 6], [7]], max_completion_tokens=None, max_tokens=3)
    assert [entry[0] for entry in asked[-2:]] == [[5, 6], [7]]


@pytest.mark.parametrize(
    "path, body, status, param",
    [
        (CHAT, {"model": "gpt-4o", "messages": ASK}, 404, "model"),
        (CHAT, {"messages": ASK, "temperature": -1}, 400, "temperature"),
        (CHAT, {"messages": ASK, "n": 0}, 400, "n"),
        (CHAT, {"messages": ASK, "max_tokens": 5000}, 400, "max_tokens"),
        (CHAT, {"messages": ASK, "presence_penalty": 1}, 400, "presence_penalty"),
        (CHAT, {"messages": ASK, "logit_bias": {"5": 1}}, 400, "logit_bias"),
        (CHAT, {"messages": ASK, "temprature": 1}, 400, "temprature"),
        (CHAT, {"messages": ASK, "tool_choice": "required"}, 400, "tool_choice"),
        (CHAT, {"messages": ASK, "tool_choice": "maybe", "tools": TOOLS}, 400, "tool_choice"),
        (CHAT, {"messages": ASK, "tool_choice": {"type": "function"}}, 400, "tool_choice"),
        (
            CHAT,
            {
                **{"messages": ASK, "tools": TOOLS, "guided_choice": ["a"]},
                "tool_choice": "required",
            },
            400,
            "tool_choice",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "x " * 4000}]}, 400, "prompt"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": ASK, "logprobs": True, "top_logprobs": 2}, 400, "logprobs"),
        (COMPLETE, {"prompt": "x " * 200}, 400, "prompt"),
        (COMPLETE, {"prompt": [1, 512]}, 400, "prompt"),
        (COMPLETE, {"prompt": [[1], 2]}, 400, "prompt"),
        (COMPLETE, {}, 400, "prompt"),
        (COMPLETE, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ("/tokenize", {"prompt": "a", "messages": ASK}, 400, "prompt"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/v1/nothing", {}, 404, None),
    ],
)  # fmt: skip
def test_errors_name_the_field(server, path, body, status, param):
    actual, answer = server.post(path, **body)
    error = answer["error"]
    assert (actual, error["code"], error["param"]) == (status, status, param), answer
    assert error["message"] and error["type"] in ("invalid_request_error", "not_found_error")


def test_texts_that_are_too_long_are_not_tokenized(server, monkeypatch):
    from jaxtrain.generation.serving import open_request

    monkeypatch.setattr(open_request, "encode", lambda *_: 1 / 0)
    assert server.post(COMPLETE, prompt="a" * 10_000_000)[0] == 400


def test_tokenize_and_back(server, tokenizer):
    _, answer = server.post("/tokenize", prompt="Hello, 4 €")
    assert answer["tokens"] == encode(tokenizer, "Hello, 4 €")
    assert server.post("/detokenize", tokens=answer["tokens"])[1] == {"prompt": "Hello, 4 €"}
    _, of_chat = server.post("/tokenize", messages=ASK)
    server.post(CHAT, messages=ASK)
    assert server.model.engine.asked[-1][0] == of_chat["tokens"]
    _, raw = server.send("GET", "/v1/models")
    (model,) = json.loads(raw)["data"]
    assert (model["id"], model["max_model_len"], model["version"]) == ("toy", 128, "step-1")
    assert json.loads(server.send("GET", "/v1/models/toy")[1])["id"] == "toy"
    assert b"vllm:generation_tokens_total" in server.send("GET", "/metrics")[1]
    assert "eos_token" in json.loads(server.send("GET", "/tokenizer_info")[1])


def test_a_key_guards_all_but_health(server, tokenizer):
    wrong = {"Authorization": "Bearer no"}
    for path in ("/v1/models", "/tokenizer_info", "/version", "/nothing"):
        assert server.send("GET", path, **wrong)[0] == 401, path
    assert [server.send("GET", p, **wrong)[0] for p in ("/health", "/ping", "/metrics")] == [
        200
    ] * 3
    with serving(tokenizer, WatchedScript(tokenizer, "A.")) as served:
        assert served.send("GET", "/v1/models")[0] == 200
        page = {"Origin": "https://example.org"}
        assert served.send("POST", CHAT, {"messages": ASK}, **page)[0] == 403


def test_other_machines_need_a_key(tmp_path, monkeypatch):
    monkeypatch.delenv("JAXTRAIN_API_KEY", raising=False)
    with pytest.raises(UserError, match="--host 0.0.0.0 lets other machines ask"):
        require_key("0.0.0.0", None)
    require_key("127.0.0.1", None)
    (tmp_path / "key").write_text("secret\n")
    assert read_key(tmp_path / "key") == "secret" and read_key(None) is None
    (tmp_path / "key").write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        read_key(tmp_path / "key")


@pytest.mark.parametrize(
    "options, text",
    [
        (["--max-model-len", "1"], "--max-model-len is at least 2"),
        (["--lora", "folder"], "--lora 'folder' must be NAME=FOLDER"),
        (["--lora", "a=x", "--lora", "a=y"], "--lora 'a': the name is taken"),
        (["--lora", "nowhere=x"], "--lora 'nowhere': the name is taken"),
        (["--max-loras", "2"], "--max-loras 2 must be at least 1"),
        (["--lora", "a=x", "--train", "folder"], "do not go with --train"),
        (["--lora", "a=x", "--draft", "folder"], "do not go with --draft"),
    ],
)
def test_wrong_options_are_named_before_anything_is_loaded(options, text, capsys, monkeypatch):
    monkeypatch.delenv("JAXTRAIN_API_KEY", raising=False)
    assert main(["serve", "nowhere", *options]) == 2
    assert text in capsys.readouterr().err


class Gate(WatchedScript):
    """Answers when it is let."""

    def __init__(self, tokenizer, loops):
        super().__init__(tokenizer, "A.")
        self.open = threading.Event()

    async def generate(self, *args, **kwargs):
        while not self.open.is_set():
            await asyncio.sleep(0.01)
        return await super().generate(*args, **kwargs)


def test_new_weights_come_between_two_requests_and_are_named(tokenizer):
    engine, answers, swapped = Gate(tokenizer, 0), [], []
    with serving(tokenizer, engine) as served:
        ask = lambda: answers.append(served.post(CHAT, messages=ASK)[1])  # noqa: E731
        first = threading.Thread(target=ask)
        first.start()
        while not served.call(lambda: served.model.running):
            pass
        served.call(served.model.replace, lambda: swapped.append(len(answers)), "step-2")
        second = threading.Thread(target=ask)
        second.start()
        assert not swapped  # the first answer is under way
        engine.open.set()
        first.join(30)
        second.join(30)
    assert sorted(answer["system_fingerprint"] for answer in answers) == ["step-1", "step-2"]
    assert len(swapped) == 1


def test_too_many_requests_are_refused(tokenizer):
    engine = Gate(tokenizer, 0)
    with serving(tokenizer, engine, max_waiting=1) as served:
        first = threading.Thread(target=served.post, args=(CHAT,), kwargs={"messages": ASK})
        first.start()
        while not served.call(lambda: served.model.running):
            pass
        status, answer = served.post(CHAT, messages=ASK)
        engine.open.set()
        first.join(30)
    assert status == 503 and answer["error"]["type"] == "service_unavailable_error"


@settings(max_examples=12, deadline=None)
@given(st.randoms(use_true_random=False))
def test_no_request_fails_the_server(server, rng):
    from odd_requests import check_open, draw_open_request

    for _ in range(10):
        check_open(server, draw_open_request(rng))


def test_odd_requests_of_a_seed_are_the_same():
    from odd_requests import draw_open_request

    assert draw_open_request(random.Random(3)) == draw_open_request(random.Random(3))
