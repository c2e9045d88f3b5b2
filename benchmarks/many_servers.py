"""Cost of many vLLM servers for a run: 5,000 requests at once over 64 of them.

    python benchmarks/many_servers.py

The run's side is its own (`rollout/vllm`): pool, affinity, admission, requests and answers. Servers
are ports of one other process that answer at once, with as many tokens as are asked for. CPU is
that of the run's process alone.
"""

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from aiohttp import web

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
FILES = 40_000


def serve(count: int) -> None:
    """So many servers; prints their URLs as JSON, then {port: requests} when its input ends."""
    requests: Counter[int] = Counter()

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        number = body["sampling_params"]["max_tokens"]
        requests[request.transport.get_extra_info("sockname")[1]] += 1
        content = [{"token_id": 7, "logprob": -0.5}] * number
        choice = {"index": 0, "finish_reason": "length", "token_ids": [7] * number}
        return web.json_response({"choices": [{**choice, "logprobs": {"content": content}}]})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "base", "max_model_len": 4096}]})

    async def version(request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def run() -> None:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", generate)
        for path, handler in (("/v1/models", models), ("/version", version), ("/health", health)):
            app.router.add_get(path, handler)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        for _ in range(count):
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        ports = [address[1] for address in runner.addresses]
        print(json.dumps([f"http://127.0.0.1:{port}" for port in ports]), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        print(json.dumps([requests[port] for port in ports]), flush=True)

    asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--groups", type=int, default=625)
    parser.add_argument("--size", type=int, default=8, help="answers of a group")
    parser.add_argument("--tokens", type=int, default=1, help="of an answer")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if options.serve:
        return serve(options.servers)

    from jaxtrain.config.vllm import VllmConfig
    from jaxtrain.generation.engine import Sampling
    from jaxtrain.generation.vllm.engine import VllmEngine
    from jaxtrain.generation.vllm.servers import Servers

    command = [sys.executable, __file__, "--serve", "--servers", str(options.servers)]
    popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    total = options.groups * options.size
    try:
        urls = json.loads(popen.stdout.readline())
        sampling = Sampling(max_new_tokens=options.tokens)
        config = VllmConfig(servers=urls, concurrency=total, health_seconds=60)
        servers = Servers(config, sampling, lambda line: None)
        servers.open()
        for server in servers.all:
            servers.mark_up(server, 0)
        engine = VllmEngine(servers, adapters=False, group_size=options.size)

        async def draw() -> list:
            prompt = list(range(3, 67))
            payload = (engine.generate(prompt, sampling, (), i) for i in range(total))
            try:
                return await asyncio.gather(*payload)
            finally:
                await engine.close()

        start, cpu = time.perf_counter(), time.process_time()
        answers = asyncio.run(draw())
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        counted = engine.counters()
        servers.close()
    finally:
        actual, _ = popen.communicate("")
    payload = json.loads(actual.splitlines()[-1])
    answered = sum(len(answer.tokens) == options.tokens for answer in answers)
    probes = sum(payload) - total
    print(f"{answered} of {total} answered, {probes} requests more than that (probes, retries)")
    retries, lost = (counted.get(f"vllm/{name}", 0) for name in ("retries", "servers_lost"))
    print(f"retries {retries:g}, servers lost {lost:g}")
    print(f"requests of a server: {min(payload)} to {max(payload)}")
    print(f"{seconds:.2f} s; CPU {1e3 * cpu / options.groups:.2f} ms a group of {options.size}")


if __name__ == "__main__":
    main()
