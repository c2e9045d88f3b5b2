"""A few rows of the table of verbs and configs, with secrets that no output may hold;
tests/cli/verb_table.py makes all of it."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.cli.verb_table import fill_row, make_world, shrink
from tests.generation.fake_vllm import FakeVllm

CANARY = "kv8Wq3canaryZt5"
"""A part of every secret."""
VARIABLES = (
    *("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY"),
    "JUDGE_KEY",
)
JUDGE = """
def judge(prompts, completions, api_key, judge_key, **rest):
    assert api_key.startswith("sk-") and judge_key.startswith("variable"), "keys are used"
    return [float(len(completion)) for completion in completions]
"""
GIVEN = ("judge.py", "sweep.toml")
"""Files that the user writes."""
ROWS = {
    "rl_calculator_vllm": ("export", "report", "resume with more steps"),
    "lora_qwen3": ("merge", "export", "report", "watch --once", "resume", "sweep"),
    "rl_draft_refresh": (
        *("generate", "generate --env", "eval", "export", "export --step", "merge", "quantize"),
        *("score", "speculate", "plot", "report", "watch --once", "resume", "sweep"),
    ),
}
"""Verbs of each row; more training is left to the table."""
REFUSED = {
    "rl_calculator_vllm": set(),
    "lora_qwen3": set(),
    "rl_draft_refresh": {"eval", "merge", "score"},
}
"""Verbs that these runs are nothing for."""


class Rows(BaseHTTPRequestHandler):
    """Rows for those who send a password, and a webhook that answers nobody."""

    def do_GET(self):
        sent = self.headers.get("Authorization", "").removeprefix("Basic ")
        allowed = CANARY in base64.b64decode(sent).decode() and self.path.startswith("/rows.jsonl")
        turns = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "1"}]
        body = (json.dumps({"messages": turns}) + "\n").encode() * 24 if allowed else b""
        self.send_response(200 if allowed else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def do_POST(self):
        self.send_error(500, self.path)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


@pytest.fixture
def secrets(world, monkeypatch):
    """Overrides of each row that hold secrets."""
    for name in VARIABLES:
        monkeypatch.setenv(name, f"variable-{CANARY}")
    (world.folder / "judge.py").write_text(JUDGE)
    keys = f'{{api_key="sk-{CANARY}",judge_key="$JUDGE_KEY"}}'
    server = ThreadingHTTPServer(("127.0.0.1", 0), Rows)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = f"127.0.0.1:{server.server_port}"
    hook = f'observers=[{{kind="webhook",options={{secret_url="http://{place}/{CANARY}"}}}}]'
    url = f"http://user:{CANARY}@{place}/rows.jsonl?token={CANARY}"
    engine = FakeVllm(tensors=world.tensors)
    engine.login = "Basic " + base64.b64encode(f"user:{CANARY}".encode()).decode()
    urls = [f"http://user:{CANARY}@127.0.0.1:{port}" for port in (engine.port, 9)]
    yield {
        "rl_calculator_vllm": [f"rollout.vllm.servers={json.dumps(urls[:1])}", hook],
        "lora_qwen3": [f'data.datasets=[{{path="{url}"}}]', hook],
        "rl_draft_refresh": [
            f'rewards=[{{function="{world.folder}/judge.py:judge",options={keys}}}]',
            hook,
        ],
        "no server": [f"rollout.vllm.servers={json.dumps(urls[1:])}"],
        "missing": [f"data.datasets.0.path={url.replace('rows', 'none')}"],
    }
    server.shutdown()
    server.server_close()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["lora_qwen3", "rl_calculator_vllm", "rl_draft_refresh"])
def test_every_verb_works_or_is_refused_and_shows_no_secret(world, secrets, name):
    row = fill_row(name, world, *secrets[name], verbs=ROWS[name])
    assert not [cell for cell in row.items() if cell[1].startswith("WRONG")]
    refused = {verb: cell for verb, cell in row.items() if cell != "ok"}
    assert refused.keys() == REFUSED[name], refused
    run = world.folder / name
    words = ["--config", name, f"run.output_dir={run}-other", *secrets[name], *secrets["missing"]]
    assert world.call(*words).startswith("refused")
    assert world.call(*words, "--print-config") == "ok"
    if name == "rl_calculator_vllm":
        words = [*words[:3], *shrink(name, world), *secrets["no server"]]
        assert world.call(*words, "rollout.vllm.wait_seconds=1").startswith("refused")
    assert world.call("doctor") in ("ok", "refused")
    holding = [
        path
        for path in world.folder.rglob("*")
        if path.is_file() and path.name not in GIVEN and CANARY.encode() in path.read_bytes()
    ]
    assert not holding
