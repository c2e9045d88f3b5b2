"""Asynchronous reinforcement learning for an hour while everything around it breaks.

`python benchmarks/soak.py --minutes 60`, on CPU. Two vLLM servers (scripted ones of the tests, or
real ones by --server) stand behind proxies that hang (wholly, in drawing, in weight syncs), refuse,
are slow and spoil answers; a reward now and then raises, gives NaN, hangs or ends its process; a
server is killed every minute and the trainer a few times. At the end a table shows how often steps
and prompts were trained, and how memory and open files of each life of the trainer grew.
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
from collections.abc import Callable
from pathlib import Path

import aiohttp
from aiohttp import web
from harness import Report, read_lines

REPO = Path(__file__).parents[1]
FAULTS = {
    "hang": 40.0,
    "hang_draw": 40.0,
    "hang_sync": 40.0,
    "slow": 10.0,
    "exhausted": 8.0,
    "500": 8.0,
    "reset": 8.0,
    "cut": 8.0,
    "html": 8.0,
    "nan": 8.0,
    "null": 8.0,
    "floor": 8.0,
    "half": 8.0,
}
"""Seconds that each lasts: a server that hangs must be dropped meanwhile."""
REST_SECONDS = 6.0
SHARE = 0.3
"""Share of answers that a fault of answers spoils."""
SAMPLE_SECONDS = 2.0
ANSWERS = ("/inference/v1/generate", "/v1/completions")
SYNC = ("/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume")
DROPS = ("dropped/", "cancelled/", "episodes/redone")
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
[[rewards]]
function = "soak_reward.py:judge"
timeout = 3.0
[rollout]
engine = "vllm"
mode = "async"
max_lag = {max_lag}
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
MAX_LAG = 2
REWARD = '''
"""Verdicts of a coin, so that every group has something to learn; and what goes wrong."""
import os
import random
import time


def judge(completions, **columns):
    fault = random.random()
    if fault < 0.002:
        raise ConnectionError("no judge")
    if fault < 0.004:
        return [float("nan")] * len(completions)
    if fault < 0.005:
        time.sleep(60)
    if fault < 0.006:
        os._exit(1)
    return [float(random.random() < 0.5) for _ in completions]
'''


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
        answers, fault = request.path in ANSWERS, self.fault
        spoils = answers and self.dice.random() < SHARE
        if HANGS.get(fault, lambda _: False)(request.path):
            self.injected[fault] += 1
            while self.fault == fault:
                await asyncio.sleep(0.1)
            return self.abort(request)
        if fault == "slow":
            self.injected[fault] += 1
            await asyncio.sleep(2.0)
        if answers and fault == "exhausted":
            self.injected[fault] += 1
            return web.Response(status=503, text="out of memory", headers={"Retry-After": "1"})
        if spoils and fault == "500":
            self.injected[fault] += 1
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
        if spoils and status == 200 and fault == "reset":
            self.injected[fault] += 1
            return await self.break_off(request, raw)
        if spoils and status == 200 and fault in SPOILS:
            self.injected[fault] += 1
            raw = SPOILS[fault](raw)
        return web.Response(status=status, body=raw, content_type=kind)

    async def break_off(self, request: web.Request, raw: bytes) -> web.StreamResponse:
        """Break the connection in the middle of an answer of the announced length."""
        response = web.StreamResponse(headers={"Content-Length": str(len(raw))})
        await response.prepare(request)
        await response.write(raw[: len(raw) // 2])
        self.abort(request)
        return response

    @staticmethod
    def abort(request: web.Request) -> web.Response:
        """Break the connection, as the end of a process does."""
        if request.transport is not None:
            request.transport.abort()
        return web.Response()


def spoil_last(raw: bytes, value: float | None) -> bytes:
    """Replace the last log-prob of an answer."""
    body = json.loads(raw)
    for choice in body["choices"]:
        choice["logprobs"]["content"][-1]["logprob"] = value
    return json.dumps(body).encode()


def halve_logprobs(raw: bytes) -> bytes:
    """Leave the log-probs of the first half of an answer's tokens."""
    body = json.loads(raw)
    for choice in body["choices"]:
        content = choice["logprobs"]["content"]
        choice["logprobs"]["content"] = content[: len(content) // 2]
    return json.dumps(body).encode()


HANGS: dict[str, Callable[[str], bool]] = {
    "hang": lambda path: True,
    "hang_draw": lambda path: path in ANSWERS,
    "hang_sync": lambda path: path in SYNC,
}
"""Paths that are never answered."""
SPOILS: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda raw: raw[: len(raw) // 2],
    "html": lambda raw: b"<html>502 Bad Gateway</html>",
    "nan": lambda raw: spoil_last(raw, float("nan")),
    "null": lambda raw: spoil_last(raw, None),
    "floor": lambda raw: spoil_last(raw, -9999.0),
    "half": halve_logprobs,
}
"""Other answers of status 200. vLLM itself writes -9999 for a NaN."""


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
        (folder.parent / "soak_reward.py").write_text(REWARD)
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
    """Return how often steps and prompts were trained. A group with tokens that are too old is
    dropped, and one that becomes too old while it is played, or fails, is asked again a few
    times."""
    steps = Counter(line["step"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line)
    lag: dict[tuple[int, int], int] = {}
    for line in read_lines(folder / "samples.jsonl"):
        key = (line["step"], line["prompt_number"])
        lag[key] = max(lag.get(key, 0), line["step"] - 1 - line["policy_version"])
    prompts = Counter(number for (_, number), age in lag.items() if age <= MAX_LAG)
    judged = {number for _, number in lag}
    return {
        "steps": len(steps),
        "steps_lost": max(steps, default=0) - len(steps),
        "steps_twice": sum(count > 1 for count in steps.values()),
        "prompts": len(prompts),
        "prompts_twice": sum(count > 1 for count in prompts.values()),
        "prompts_too_old": len(judged - set(prompts)),
        "prompts_given_up": max(judged, default=-1) + 1 - len(judged),
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
    trainer = Trainer(root / "run", CONFIG.format(model=model, servers=urls, max_lag=MAX_LAG))
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
    lines, dropped = read_lines(root / "run" / "metrics.jsonl"), Counter()
    for line in lines:
        dropped.update({k: int(v) for k, v in line.items() if k.startswith(DROPS)})
    report.add(**dict(sorted(dropped.items())))
    counters = {k: int(v) for line in lines[-1:] for k, v in line.items() if k.startswith("vllm/")}
    report.add(life="last", **dict(sorted(counters.items())))
    print(f"the run and its log are in {root}")


if __name__ == "__main__":
    main()
