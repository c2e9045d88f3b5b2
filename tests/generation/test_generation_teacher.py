"""A teacher behind a server, whose answers a script makes; and answers that the data have."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from jaxtrain.config import DatasetConfig
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.packing.pack import Fields, build_batch, lay_out, stack_batches
from jaxtrain.data.packing.steps import StepShape
from jaxtrain.data.packing.tree import Node, Tree
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.engine import EpisodeFailed, PromptRequest
from jaxtrain.generation.episodes import Episode, Group
from jaxtrain.generation.offline_answers import OfflineAnswers
from jaxtrain.generation.vllm.teacher import TeacherServer, find_branches
from jaxtrain.methods.rl.batch_builder import DRAWN, BatchBuilder, build_batches


class Script(BaseHTTPRequestHandler):
    """At each place the tokens 1000 + sum of all before it, and what stands there."""

    failures: list[int] = []
    asked: list[dict] = []
    broken = False

    def log_message(self, *args):
        pass

    def do_GET(self):
        self.send({"data": [{"id": "teacher"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        if self.failures:
            return self.send({"error": {"message": "no"}}, self.failures.pop())
        tokens = body["prompt"]
        entries = [None] + [
            {
                str(tokens[i]): {"logprob": -9.0, "rank": 50},
                str(1000 + sum(tokens[:i])): {"logprob": -0.5, "rank": 1},
                str(2000 + i): {"logprob": -1.0, "rank": 2},
            }
            for i in range(1, len(tokens))
        ]
        self.send({"choices": [{"prompt_logprobs": entries[:-1] if self.broken else entries}]})

    def send(self, actual, status=200):
        raw = json.dumps(actual).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)


@pytest.fixture
def server():
    Script.failures, Script.asked, Script.broken = [], [], False
    threading_httpserver = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    threading.Thread(target=threading_httpserver.serve_forever, args=(0.02,), daemon=True).start()
    pauses: list[float] = []
    address = f"http://127.0.0.1:{threading_httpserver.server_port}/"
    yield TeacherServer(address, 2, concurrency=2, seconds=10, sleep=pauses.append), pauses
    threading_httpserver.shutdown()


def make_batch():
    """A prompt with two answers, and a document beside it."""

    def node(parent, tokens, trains):
        return Node(parent, np.array(tokens, np.int32), {"d": np.full(len(tokens), float(trains))})

    tree = Tree((node(-1, [1, 2], 0), node(0, [3, 4], 1), node(0, [5], 1)))
    second = Tree((node(-1, [6, 7, 8], 1),))
    rows = [[lay_out(tree, "branch"), lay_out(second, "branch")]]
    return stack_batches([build_batch(rows, 10, Fields(("d",)))])


def test_each_branch_is_asked_and_lies_on_its_tokens(server):
    batch = make_batch()
    expectation = batch.weights["d"] != 0
    ids, logp = server[0].score(batch, expectation)
    requests = sorted(body["prompt"] for body in Script.asked)
    assert requests == [[1, 2, 3, 4], [1, 2, 5], [6, 7, 8]]
    assert all(body["prompt_logprobs"] == 2 and body["model"] == "teacher" for body in Script.asked)
    # row:      1   2   3     4     5     6   7     8
    expected = [-1, -1, 1003, 1006, 1003, -1, 1006, 1013, -1, -1]
    assert ids[0, 0, :, 0].tolist() == expected
    assert ids[0, 0, 4].tolist() == [1003, 2002]
    np.testing.assert_allclose(logp[0, 0, 2], [-0.5, -1.0])
    assert (ids[~expectation] == -1).all()


def test_outages_are_waited_for_and_refusals_told(server):
    teacher, pauses = server
    batch = make_batch()
    Script.failures = [503, 429]
    teacher.score(batch, batch.weights["d"] != 0)
    assert sorted(pauses) in ([1.0, 1.0], [1.0, 2.0])
    Script.failures = [400]
    with pytest.raises(UserError, match="--max-logprobs 2"):
        teacher.score(batch, batch.weights["d"] != 0)
    Script.failures = [500] * 100
    with pytest.raises(RunStopped, match="failed 4 times"):
        teacher.ask([1, 2])
    Script.failures, Script.broken = [], True
    with pytest.raises(RunStopped, match="no prompt_logprobs"):
        teacher.ask([1, 2])


def test_branches_cover_every_wanted_token():
    prev = np.array([-1, 0, 1, 1, 3, -1, 5, -1])
    array = np.array([0, 1, 1, 0, 1, 0, 1, 0], bool)
    actual = [path.tolist() for path in find_branches(prev, array)]
    assert actual == [[0, 1, 2], [0, 1, 3, 4], [5, 6]]


def test_the_datas_answers():
    """A share of the prompts, the same for the same seed; their tokens train and are told apart
    from drawn ones; rows without an answer fail with a reason."""
    tokenizer = load_tokenizer("builtin")
    datasets = [DatasetConfig(path="x.jsonl")]
    row = {"prompt": "one and one is ", "completion": "two"}

    def make(share):
        return OfflineAnswers(datasets, tokenizer, row_tokens=64, drawn_share=share, seed=3)

    local_value = [make(0.3)(PromptRequest(draw, 0, row)) is None for draw in range(300)]
    assert local_value == [make(0.3)(PromptRequest(draw, 1, row)) is None for draw in range(300)]
    assert 60 <= sum(local_value) <= 120
    [provided] = make(0.0)(PromptRequest(0, 0, row)) or []
    assert provided.given and provided.completion == "two" and provided.num_sampled == 4
    with pytest.raises(EpisodeFailed, match="row: malformed row"):
        make(0.0)(PromptRequest(0, 0, {"prompt": "no answer"}))
    drawn = Episode([1, 2, 3], [False, True, True], [0.0, -1.0, -1.0], [-1, 0, 0], "stop")
    groups = [
        Group(i, row, [entry], [{}], np.zeros(1)) for i, entry in enumerate((provided, drawn))
    ]
    labels = BatchBuilder(StepShape(1, None, 64), "token", ("distillation",))
    [batch] = build_batches(groups, labels).batches
    trained = batch.weights["distillation"] != 0
    assert trained.sum() == 6 and batch.streams[DRAWN][trained].sum() == 2
    assert not batch.streams[DRAWN][~trained].any()
