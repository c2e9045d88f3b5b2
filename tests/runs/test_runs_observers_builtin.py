"""Built-in observers: early stop, spikes, webhook."""

import http.server
import json
import threading

import pytest
from scripted import make_run

from jaxtrain.runs.observers.early_stop import EarlyStop
from jaxtrain.runs.observers.loss_spike import LossSpike
from jaxtrain.runs.observers.webhook import Webhook


def make(kind, **options):
    return kind(kind.Section(**options))


def test_early_stop_counts_evaluations_that_are_no_better(tmp_path):
    output: list[str] = []
    stop = make(EarlyStop, patience=2, min_delta=0.1)
    assert stop.start(make_run(tmp_path, output)) is None
    for value, verdict in ((3.0, None), (2.95, None), (2.5, None), (2.45, None), (2.6, "stop")):
        assert stop.evaluation(1, {"eval/loss": value}) == verdict, value
    assert stop.evaluation(1, {"eval/other": 0.0}) == "stop"  # does not count, nor undo
    assert "better than 2.5 in 2 evaluations" in output[0]
    highest = make(EarlyStop, metric="eval/accuracy", mode="max", patience=1)
    highest.start(make_run(tmp_path, output))
    for value, verdict in ((0.2, None), (0.3, None), (float("nan"), "stop")):
        assert highest.evaluation(1, {"eval/accuracy": value}) == verdict


def test_a_resumed_run_has_seen_what_the_earlier_ones_saw(tmp_path):
    lines = ['{"step": 1, "loss": 3.0}', '{"step": 2, "eval/loss": 1.5}', '{"step": 3, "ev']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))  # a crash cut the last one off
    stop = make(EarlyStop, patience=1)
    assert stop.start(make_run(tmp_path, [], start=2)) is None
    assert (stop.best, stop.waited) == (1.5, 0)
    (tmp_path / "metrics.jsonl").write_text('{"eval/loss": 1.5}\n{"eval/loss": null}\n')
    assert make(EarlyStop, patience=1).start(make_run(tmp_path, [], start=2)) == "stop"


def test_a_spike_is_what_leaps_out_of_the_median(tmp_path):
    output: list[str] = []
    spike = make(LossSpike, warmup=10, steps=2, deviations=6.0, action="stop")
    spike.start(make_run(tmp_path, output))
    calm = [2.0 + 0.01 * (i % 5) for i in range(20)]
    falls = [1.9 - 0.02 * i for i in range(10)]
    for step, value in enumerate(calm + falls):
        assert spike.step(step, {"loss": value}) is None
    assert spike.step(30, {"loss": 9.0}) is None  # one alone
    assert spike.step(31, {"loss": 1.7}) is None
    assert spike.step(32, {"loss": 9.0}) is None
    assert spike.step(33, {"reward": 1.0}) is None  # not there: does not count
    assert spike.step(34, {"loss": float("nan")}) == "stop"
    assert spike.step(35, {"loss": 9.0}) is None  # told once for each leap
    assert len(output) == 1 and output[0].startswith("alert: loss was nan after step 34")


def test_a_number_that_hardly_moves_is_no_spike_and_a_resumed_one_knows_the_median(tmp_path):
    lines = [json.dumps({"step": n, "loss": 0.5}) for n in range(10)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    output: list[str] = []
    spike = make(LossSpike, warmup=10, steps=1, action="save")
    spike.start(make_run(tmp_path, output, start=9))
    assert spike.step(10, {"loss": 0.501}) is None
    assert spike.step(11, {"loss": 0.6}) == "save"


@pytest.fixture
def server():
    """An HTTP server: (URL, bodies that came, status to answer with)."""
    bodies, status = [], [200]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(status[0])
            self.send_header("Location", "http://127.0.0.1:9/stolen")
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as created:
        threading.Thread(target=created.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{created.server_port}/hook/s3cret", bodies, status
        created.shutdown()


def test_a_webhook_is_told_of_start_alerts_and_end(server, tmp_path):
    url, bodies, _ = server
    output: list[str] = []
    hook = make(Webhook, secret_url=url)
    hook.start(make_run(tmp_path, output, start=4))
    hook.step(5, {})
    hook.alert("loss_spike: it leapt")
    hook.end("failed", "UserError: no")
    assert [(body["event"], body["step"], body["state"]) for body in bodies] == [
        ("start", 4, "running"),
        ("alert", 5, "running"),
        ("end", 5, "failed"),
    ]
    assert bodies[1]["message"] == "loss_spike: it leapt"
    assert bodies[2]["text"].endswith("failed, step 5 of 10: UserError: no")
    assert not output


@pytest.mark.parametrize(("state", "count"), [("finished", 0), ("failed", 1)])
def test_a_webhook_may_hear_of_failures_alone(server, tmp_path, state, count):
    url, bodies, _ = server
    hook = make(Webhook, secret_url=url, events=["failure"])
    hook.start(make_run(tmp_path, []))
    hook.alert("x")
    hook.end(state, "")
    assert len(bodies) == count


@pytest.mark.parametrize(
    ("status", "url", "reason"),
    [
        (500, None, "status 500"),
        (302, None, "status 302"),
        (200, "http://127.0.0.1:9/s3cret", "refused"),
        (200, "http://[s3cret/x", "ValueError"),
    ],
)
def test_a_webhook_that_fails_costs_one_warning_without_its_url(
    server, tmp_path, status, url, reason
):
    server[2][0] = status
    output: list[str] = []
    hook = make(Webhook, secret_url=url or server[0])
    hook.start(make_run(tmp_path, output))
    hook.end("finished", "")
    assert len(output) == 1 and reason in output[0] and "s3cret" not in output[0]
