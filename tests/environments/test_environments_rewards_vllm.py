"""The reward of a reward model behind vLLM's pooling routes, against a small scripted server."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from jaxtrain.data.chat.template import end_of_turn_ids, load_tokenizer
from jaxtrain.environments.rewards.load import call_function, find_function
from jaxtrain.errors import UserError

PROMPT = [{"role": "user", "content": "2+2?"}]
ANSWERS = [[{"role": "assistant", "content": text}] for text in ("4", "it is 4 indeed", "")]


@pytest.fixture
def server():
    """Scores an input by its number of tokens or letters; `answer` replaces what it says."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, self.headers.get("Authorization"), body))
            status, answer = script.pop(0) if script else (200, log(self.path, body))
            raw = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *args):
            pass

    def log(path, body):
        texts = body.get("input", [body.get("messages")])
        if path == "/score":
            pairs = zip(body["text_1"], body["text_2"], strict=True)
            scored = [{"index": i, "score": len(a) - len(b)} for i, (a, b) in enumerate(pairs)]
            return {"data": scored[::-1], "object": "list"}
        if path == "/pooling":
            rows = [[[0.9, 1 / (1 + index)] for index in range(len(text))] for text in texts]
            return {"data": [{"index": i, "data": row} for i, row in enumerate(rows)]}
        entries = [{"index": i, "probs": [float(len(text))]} for i, text in enumerate(texts)]
        return {"data": entries[::-1]}

    seen, script = [], []
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    http.url, http.seen, http.script = f"http://127.0.0.1:{http.server_port}", seen, script
    yield http
    http.shutdown()
    http.server_close()


def judge(completions=ANSWERS, prompt=PROMPT, **options):
    arguments = {"prompts": [prompt] * len(completions), "completions": completions, **options}
    return call_function(find_function("vllm_reward"), arguments)


def test_answers_go_as_token_ids_that_end_with_the_turn(server):
    actual = judge(url=server.url, tokenizer="builtin", model="rm", api_key="k")
    ((route, key, body),) = server.seen
    assert (route, key, body["model"]) == ("/classify", "Bearer k", "rm")
    assert body["use_activation"] is False
    tokenizer = load_tokenizer("builtin")
    assert all(ids[-1] in end_of_turn_ids(tokenizer) for ids in body["input"])
    assert tokenizer.decode(body["input"][1]).count("it is 4 indeed") == 1
    assert actual == [float(len(ids)) for ids in body["input"]]
    long = judge(url=server.url, tokenizer="builtin", max_tokens=len(body["input"][0]))
    assert long == [actual[0], None, actual[2]]


def test_messages_are_read_as_rows_are(server):
    """An endpoint's call has its arguments as text, older models `function_call`."""
    function = {"name": "f", "arguments": {"x": 1}}
    forms = (
        {"tool_calls": [{"type": "function", "function": function}]},
        {"tool_calls": [{"function": {**function, "arguments": '{"x": 1}'}}]},
        {"function_call": {**function, "arguments": '{"x": 1}'}},
    )
    answers = [[{"role": "assistant", "content": None, **form}] for form in forms]
    judge(answers, prompt="2+2?", url=server.url, tokenizer="builtin")
    first, *others = server.seen[0][2]["input"]
    text = load_tokenizer("builtin").decode(first)
    assert '{"name": "f", "arguments": {"x": 1}}' in text and others == [first, first]
    judge([[{"role": "nobody"}], ANSWERS[0]], url=server.url, tokenizer="builtin")
    assert len(server.seen[1][2]["input"]) == 1, "what is no message is not scored"


def test_without_a_tokenizer_messages_and_texts_go_as_they_are(server):
    assert judge(ANSWERS[:2], url=[server.url]) == [2.0, 2.0]
    assert server.seen[0][2]["messages"] == PROMPT + ANSWERS[0]
    assert judge(["b", "bcd"], prompt="a", url=server.url) == [2.0, 4.0]


def test_encoders_get_prompt_and_answer_as_two_texts(server):
    prompt = [{"role": "system", "content": "Add."}, *PROMPT]
    actual = judge(url=server.url, prompt=prompt, pair=True, model="deberta")
    ((route, _, body),) = server.seen
    assert (route, body["model"], body["use_activation"]) == ("/score", "deberta", False)
    assert body["text_1"] == ["Add.\n\n2+2?"] * 2
    assert body["text_2"] == ["4", "it is 4 indeed"]
    assert actual == [9.0, -4.0, None], "an empty answer is not asked about"
    assert judge(["b", "bcd"], prompt="a", url=server.url, pair=True) == [0.0, -2.0]
    picture = {"role": "user", "content": [{"type": "image", "path": "a.png"}]}
    with pytest.raises(UserError, match="a prompt has images"):
        judge(prompt=[picture], url=server.url, pair=True)


def test_steps_are_scored_where_they_end(server):
    steps = [[{"role": "assistant", "content": text}] for text in ("a\nbb\n", "a\nbb\nccc", "")]
    options = {"url": server.url, "tokenizer": "builtin", "separator": "\n"}
    last = judge(steps, reduce="last", **options)
    (_, _, body), ends = server.seen[0], []
    assert body["task"] == "token_classify"
    for ids in body["input"]:
        ends.append(len(ids))
    assert last == [1 / ends[0], 1 / ends[1], None]
    assert judge(steps, **options) == last  # the scripted scores fall
    assert judge(steps, reduce="mean", **options)[0] > last[0]


@pytest.mark.parametrize(
    ("script", "options", "error", "output"),
    [
        ([(503, "loading")], {}, OSError, "HTTP 503"),
        ([(404, {"error": "no model x"})], {}, UserError, "no model x"),
        ([(200, {"data": []})], {}, UserError, "pooling model"),
        ([(200, {"data": [{"probs": [0.1, 0.9]}]})], {}, UserError, "not one number"),
        ([], {"separator": "\n"}, UserError, "options.tokenizer"),
        ([], {"pair": True, "tokenizer": "builtin"}, UserError, "options.pair sends texts"),
        ([(404, "no /score")], {"pair": True}, UserError, "/score refuses with HTTP 404"),
        ([], {"url": "localhost:8000"}, UserError, "must be a URL"),
        ([], {"url": "http://127.0.0.1:9", "seconds": 2}, OSError, "refused"),
    ],
)
def test_servers_that_fail_are_asked_again_and_those_that_refuse_are_told(
    server, script, options, error, output
):
    server.script.extend(script)
    with pytest.raises(error, match=output):
        judge(["b"], prompt="a", **{"url": server.url, **options})
