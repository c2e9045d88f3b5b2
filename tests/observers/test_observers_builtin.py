"""Built-in observers: early stop, spikes, webhook, Hub; no network."""

import http.server
import inspect
import json
import threading

import pytest
from scripted import make_run

from jaxtrain.errors import UserError
from jaxtrain.observers import hub
from jaxtrain.observers.early_stop import EarlyStop
from jaxtrain.observers.hub import Hub
from jaxtrain.observers.loss_spike import LossSpike
from jaxtrain.observers.webhook import Webhook


def make(kind, **options):
    return kind(kind.Section(**options))


def test_early_stop_counts_evaluations_that_are_no_better(tmp_path):
    said: list[str] = []
    stop = make(EarlyStop, patience=2, min_delta=0.1)
    assert stop.start(make_run(tmp_path, said)) is None
    for value, verdict in ((3.0, None), (2.95, None), (2.5, None), (2.45, None), (2.6, "stop")):
        assert stop.evaluation(1, {"eval/loss": value}) == verdict, value
    assert stop.evaluation(1, {"eval/other": 0.0}) == "stop"  # does not count, nor undo
    assert "better than 2.5 in 2 evaluations" in said[0]
    highest = make(EarlyStop, metric="eval/accuracy", mode="max", patience=1)
    highest.start(make_run(tmp_path, said))
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
    said: list[str] = []
    spike = make(LossSpike, warmup=10, steps=2, deviations=6.0, action="stop")
    spike.start(make_run(tmp_path, said))
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
    assert len(said) == 1 and said[0].startswith("alert: loss was nan after step 34")


def test_a_number_that_hardly_moves_is_no_spike_and_a_resumed_one_knows_the_median(tmp_path):
    lines = [json.dumps({"step": n, "loss": 0.5}) for n in range(10)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    said: list[str] = []
    spike = make(LossSpike, warmup=10, steps=1, action="save")
    spike.start(make_run(tmp_path, said, start=9))
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

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as made:
        threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{made.server_port}/hook/s3cret", bodies, status
        made.shutdown()


def test_a_webhook_is_told_of_start_alerts_and_end(server, tmp_path):
    url, bodies, _ = server
    said: list[str] = []
    hook = make(Webhook, secret_url=url)
    hook.start(make_run(tmp_path, said, start=4))
    hook.step(5, {})
    hook.alert("loss_spike: it leapt")
    hook.end("failed", "UserError: no")
    assert [(one["event"], one["step"], one["state"]) for one in bodies] == [
        ("start", 4, "running"),
        ("alert", 5, "running"),
        ("end", 5, "failed"),
    ]
    assert bodies[1]["message"] == "loss_spike: it leapt"
    assert bodies[2]["text"].endswith("failed, step 5 of 10: UserError: no")
    assert not said


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
    said: list[str] = []
    hook = make(Webhook, secret_url=url or server[0])
    hook.start(make_run(tmp_path, said))
    hook.end("finished", "")
    assert len(said) == 1 and reason in said[0] and "s3cret" not in said[0]


class Api:
    """What huggingface_hub.HfApi would be asked."""

    def __init__(self, **kwargs):
        self.repos, self.commits, self.fail = [], [], 0

    def create_repo(self, repo, *, private, exist_ok):
        self.repos.append((repo, private))
        return type("Url", (), {"repo_id": f"me/{repo}"})

    def upload_folder(self, *, repo_id, folder_path, commit_message, **place):
        if self.fail:
            self.fail -= 1
            raise ConnectionError("no route\nto anywhere")
        names = sorted(str(p.relative_to(folder_path)) for p in folder_path.rglob("*.bin"))
        self.commits.append((repo_id, commit_message, place.get("path_in_repo"), names))


@pytest.fixture
def api(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "t")
    monkeypatch.setattr(hub, "PAUSE", 0.0)


def make_checkpoint(folder, step):
    path = folder / "checkpoints" / str(step)
    path.mkdir(parents=True)
    (path / "a.bin").write_bytes(b"x")
    return path


def test_the_hub_gets_checkpoints_and_the_model(api, tmp_path):
    import shutil

    said: list[str] = []
    push = make(Hub, repo="mine", strategy="all_checkpoints")
    push.start(make_run(tmp_path, said))
    for step in (2, 4):
        path = make_checkpoint(tmp_path, step)
        push.checkpoint(step, path)
        shutil.rmtree(path)  # as checkpoint.keep would
    (tmp_path / "model").mkdir()
    (tmp_path / "model/w.bin").write_bytes(b"y")
    push.end("finished", "")
    assert push.api.repos == [("mine", True)]
    assert push.api.commits == [
        ("me/mine", "checkpoint of step 2", "checkpoints/2", ["a.bin"]),
        ("me/mine", "checkpoint of step 4", "checkpoints/4", ["a.bin"]),
        ("me/mine", "model of step 10", None, ["w.bin"]),
    ]
    assert not (tmp_path / "observers/one").exists()
    assert said[-1] == "model of step 10 pushed to mine"


def test_a_push_is_tried_again_and_then_given_up_with_a_command(api, tmp_path):
    said: list[str] = []
    push = make(Hub, repo="me/mine", strategy="checkpoint", private=False)
    push.start(make_run(tmp_path, said))
    push.api.fail = hub.TRIES - 1
    push.checkpoint(2, make_checkpoint(tmp_path, 2))
    (tmp_path / "model").mkdir()
    push.end("stopped", "SIGTERM")  # no model: it is not through
    assert [one[1:3] for one in push.api.commits] == [("checkpoint of step 2", "last-checkpoint")]
    push = make(Hub, repo="me/mine")
    push.start(make_run(tmp_path, said))
    push.api.fail = hub.TRIES
    push.end("finished", "")
    assert "not pushed to me/mine: ConnectionError: no route; hf upload me/mine" in said[-1]


def test_the_hub_s_own_client_takes_these_calls():
    from huggingface_hub import HfApi

    inspect.signature(HfApi).bind(library_name="x")
    inspect.signature(HfApi.create_repo).bind(None, "x", private=True, exist_ok=True)
    inspect.signature(HfApi.create_branch).bind(None, "x", branch="dev", exist_ok=True)
    place = {"path_in_repo": "last-checkpoint", "delete_patterns": "*"}
    words = {"repo_id": "x", "folder_path": "y", "revision": None, "commit_message": "z", **place}
    inspect.signature(HfApi.upload_folder).bind(None, **words)


def test_what_the_hub_refuses_is_not_tried_again():
    error = Exception()
    error.response = type("Response", (), {"status_code": 403})
    assert not hub._may_pass(error) and hub._may_pass(ConnectionError())


def test_the_hub_wants_a_token_and_something_to_push(api, tmp_path, monkeypatch):
    import huggingface_hub

    with pytest.raises(UserError, match="run.export is false"):
        make(Hub, repo="mine").start(make_run(tmp_path, [], export=False))
    with pytest.raises(ValueError, match='must be "name" or "owner/name"'):
        Hub.Section(repo="a/b/c")
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    with pytest.raises(UserError, match="no token to push to mine with; set HF_TOKEN"):
        make(Hub, repo="mine")
