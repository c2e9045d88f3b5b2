"""Asynchronous reinforcement learning for an hour while everything around it breaks.

`python benchmarks/soak.py --minutes 60`, on CPU. Two vLLM servers (scripted ones of the tests, or
real ones by --server) stand behind proxies that hang, answer 500, give NaN, cut answers and are
slow; a server is killed every minute and the trainer a few times. At the end a table says which
steps and prompts were trained how often, and how memory and open files of each trainer's life grew.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import aiohttp
from aiohttp import web
from harness import Report, read_lines

REPO = Path(__file__).parents[1]
FAULTS = {"hang": 40.0, "500": 8.0, "nan": 8.0, "cut": 8.0, "slow": 10.0}
"""Seconds that each lasts: a server that hangs must be dropped meanwhile."""
REST_SECONDS = 6.0
SHARE = 0.3
"""Share of answers that a fault of answers spoils."""
SAMPLE_SECONDS = 2.0
ANSWERS = ("/inference/v1/generate", "/v1/completions")
CONFIG = """
[run]
max_steps = 1000000
export = false
[model]
path = "{model}"
tokenizer = "builtin"
compute_dtype = "float32"
[checkpoint]
every = 5
keep = 2
[data]
sequence_len = 256
[[data.datasets]]
path = "builtin:calculator"
options = {{ num_rows = 100000, seed = 0 }}
[task]
kind = "rl"
entropy_coef = 0.01
[env]
kind = "calculator"
[rollout]
engine = "vllm"
mode = "async"
max_lag = 2
prompts_per_step = 4
group_size = 4
zero_advantage = "keep"
samples = "all"
[rollout.vllm]
servers = {servers}
weight_dtype = "float32"
[sampling]
temperature = 1.0
max_new_tokens = 16
[log]
console = "plain"
plot = false
"""


def make_model(folder: Path) -> Path:
    """Write a small model of random weights."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


class ScriptedServer:
    """A scripted server in a process of its own, killed and started again."""

    def __init__(self, port: int, model: Path):
        self.url, self.port, self.model = f"http://127.0.0.1:{port}", port, model
        self.kills = 0
        self.start()

    def start(self) -> None:
        script = REPO / "tests" / "generation" / "fake_child.py"
        path = f"{REPO}:{REPO / 'tests' / 'generation'}"
        self.process = subprocess.Popen(
            [sys.executable, str(script), "--model", str(self.model), "--port", str(self.port)],
            env=os.environ | {"PYTHONPATH": path},
        )

    def kill(self, away: float) -> None:
        """Kill it; it is back after `away` seconds."""
        self.process.kill()
        self.process.wait()
        self.kills += 1
        timer = threading.Timer(away, self.start)
        timer.daemon = True
        timer.start()


class Proxy:
    """Passes requests on to a server, or does what `fault` names."""

    def __init__(self, target: str, dice: random.Random):
        self.target, self.dice = target, dice
        self.fault = ""
        self.injected: Counter[str] = Counter()
        self.port = 0

    async def open(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self.handle)
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        self.port = runner.addresses[0][1]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        answers = request.path in ANSWERS
        spoils = answers and self.dice.random() < SHARE
        if self.fault == "hang":
            self.injected["hang"] += 1
            while self.fault == "hang":
                await asyncio.sleep(0.1)
            return self.abort(request)
        if self.fault == "slow":
            self.injected["slow"] += 1
            await asyncio.sleep(2.0)
        if self.fault == "500" and spoils:
            self.injected["500"] += 1
            return web.Response(status=500, text="EngineCore encountered an issue")
        headers = {k: v for k, v in request.headers.items() if k != "Host"}
        url = self.target + str(request.rel_url)
        try:
            body = await request.read()
            async with self.session.request(
                request.method, url, data=body, headers=headers
            ) as answer:
                raw, status, kind = await answer.read(), answer.status, answer.content_type
        except (aiohttp.ClientError, OSError):
            return self.abort(request)
        if spoils and status == 200 and self.fault in ("nan", "cut"):
            self.injected[self.fault] += 1
            raw = raw[: len(raw) // 2] if self.fault == "cut" else spoil_logprobs(raw)
        return web.Response(status=status, body=raw, content_type=kind)

    @staticmethod
    def abort(request: web.Request) -> web.Response:
        """Break the connection, as the end of a process does."""
        if request.transport is not None:
            request.transport.abort()
        return web.Response()


def spoil_logprobs(raw: bytes) -> bytes:
    """Make the last log-prob of an answer NaN."""
    body = json.loads(raw)
    for choice in body.get("choices", ()):
        entries = (choice.get("logprobs") or {}).get("content") or [{}]
        entries[-1]["logprob"] = float("nan")
    return json.dumps(body).encode()


def run_proxies(proxies: list[Proxy]) -> None:
    """Serve all proxies in a thread of their own; returns once they listen."""
    ready = threading.Event()

    async def serve() -> None:
        for proxy in proxies:
            await proxy.open()
        ready.set()
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
    assert ready.wait(60)


def inject(proxies: list[Proxy], dice: random.Random, over: threading.Event) -> None:
    """Give one proxy after the other a fault, with rests between, until the end."""
    faults = list(FAULTS)
    for number in range(10**6):
        if not number % len(faults):
            dice.shuffle(faults)
        fault, proxy = faults[number % len(faults)], dice.choice(proxies)
        proxy.fault = fault
        over.wait(FAULTS[fault])
        proxy.fault = ""
        if over.wait(REST_SECONDS):
            return


class Trainer:
    """The run, over all its lives; memory (MiB) and open files are sampled."""

    def __init__(self, folder: Path, config: str):
        self.folder = folder
        (folder.parent / "soak.toml").write_text(config)
        self.lives: list[list[tuple[float, float, int]]] = []
        self.start()

    def start(self) -> None:
        env = os.environ | {
            "PYTHONPATH": f"{REPO}:{REPO / 'kernels'}",
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(self.folder.parent / "compiled"),
        }
        command = [sys.executable, "-m", "jaxtrain.main", "--config", "soak.toml"]
        with (self.folder.parent / "run.log").open("a") as log:
            self.process = subprocess.Popen(
                [*command, f"run.output_dir={self.folder}"],
                stdout=log,
                stderr=log,
                env=env,
                cwd=self.folder.parent,
            )
        self.began = time.monotonic()
        self.lines_before = len(read_lines(self.folder / "metrics.jsonl"))
        self.lives.append([])

    def sample(self) -> None:
        age, pid = time.monotonic() - self.began, self.process.pid
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            files = len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            return
        pages = [line for line in status.splitlines() if line.startswith("VmRSS")]
        # Before its first step a life imports and compiles.
        if pages and len(read_lines(self.folder / "metrics.jsonl")) > self.lines_before:
            self.lives[-1].append((age, int(pages[0].split()[1]) / 1024, files))


def check_training(folder: Path) -> dict[str, int]:
    """Return how often steps and prompts were trained."""
    steps = Counter(line["step"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line)
    trained = {
        (line["step"], line["prompt_number"]) for line in read_lines(folder / "samples.jsonl")
    }
    prompts = Counter(number for _, number in trained)
    return {
        "steps": len(steps),
        "steps_lost": max(steps, default=0) - len(steps),
        "steps_twice": sum(count > 1 for count in steps.values()),
        "prompts": len(prompts),
        "prompts_twice": sum(count > 1 for count in prompts.values()),
    }


def describe_life(samples: list[tuple[float, float, int]]) -> dict[str, float]:
    """Return the medians of the first and last quarter of a life's samples."""
    part = max(1, len(samples) // 4)
    first, last = samples[:part], samples[-part:]
    return {
        "seconds": round(samples[-1][0]),
        "mib_first": round(statistics.median(mib for _, mib, _ in first)),
        "mib_last": round(statistics.median(mib for _, mib, _ in last)),
        "files_first": int(statistics.median(files for *_, files in first)),
        "files_last": int(statistics.median(files for *_, files in last)),
        "files_most": max(files for *_, files in samples),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--kill-every", type=float, default=60.0, help="seconds between servers")
    parser.add_argument("--trainer-kills", type=int, default=5)
    parser.add_argument("--server", action="append", default=[], help="URL of a real one; model")
    parser.add_argument("--model", type=Path, help="folder of the model that --server serves")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="keep the run here")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report, dice = Report(options.out), random.Random(options.seed)
    root = options.folder or Path(tempfile.mkdtemp(prefix="soak-"))
    root.mkdir(parents=True, exist_ok=True)
    model = options.model or make_model(root / "model")
    sys.path.insert(0, str(REPO))
    from jaxtrain.generation.vllm.launch import find_ports

    scripted = [] if options.server else [ScriptedServer(port, model) for port in find_ports(2)]
    targets = options.server or [server.url for server in scripted]
    proxies = [Proxy(target, random.Random(dice.random())) for target in targets]
    run_proxies(proxies)
    urls = json.dumps([f"http://127.0.0.1:{proxy.port}" for proxy in proxies])
    trainer = Trainer(root / "run", CONFIG.format(model=model, servers=urls))
    while not read_lines(root / "run" / "metrics.jsonl"):
        assert trainer.process.poll() is None, (root / "run.log").read_text()[-3000:]
        time.sleep(SAMPLE_SECONDS)
    over = threading.Event()
    threading.Thread(target=inject, args=(proxies, dice, over), daemon=True).start()
    started, trainer_kills, server_kills = time.monotonic(), 0, 0
    total = 60 * options.minutes
    while (elapsed := time.monotonic() - started) < total:
        time.sleep(SAMPLE_SECONDS)
        trainer.sample()
        if trainer.process.poll() is not None:
            break
        if scripted and elapsed > (server_kills + 1) * options.kill_every:
            server_kills += 1
            dice.choice(scripted).kill(away=5.0)
        if elapsed > (trainer_kills + 1) * total / (options.trainer_kills + 1):
            trainer_kills += 1
            trainer.process.kill()
            trainer.process.wait()
            trainer.start()
    over.set()
    ended_by_itself = trainer.process.poll() is not None
    trainer.process.send_signal(signal.SIGTERM)
    code = trainer.process.wait(300)
    for server in scripted:
        server.process.kill()
    log = (root / "run.log").read_text()
    report.add(
        minutes=round((time.monotonic() - started) / 60, 1),
        exit_code=code,
        ended_by_itself=ended_by_itself,
        server_kills=server_kills,
        trainer_kills=trainer_kills,
        **{f"faults_{name}": sum(p.injected[name] for p in proxies) for name in FAULTS},
        dropped=log.count(" dropped ("),
        back=log.count(" is back with version"),
        tracebacks=log.count("Traceback (most recent call last)"),
        **check_training(root / "run"),
    )
    for number, samples in enumerate(life for life in trainer.lives if life):
        report.add(life=number, **describe_life(samples))
    counters: Counter[str] = Counter()
    for line in read_lines(root / "run" / "metrics.jsonl")[-1:]:
        counters.update({k: v for k, v in line.items() if k.startswith("vllm/")})
    report.add(life="last", **{name: int(count) for name, count in sorted(counters.items())})
    print(f"the run and its log are in {root}")


if __name__ == "__main__":
    main()
