"""A scripted vLLM server in a thread: the routes that the client uses, without a model.

It "draws" token 100 + i at place i of a row, 3 when the row is complete, each with log-prob -0.5.
Weights arrive through the same shelf and wire as in the real plugin. `script` says what becomes of
the next requests for tokens, in order: "ok", an HTTP status, "stall", "cut" (hang up half way) or
bytes to answer. `hangs` stops the engine but not the server, `trouble` single control calls.
"""

import asyncio
import gc
import json
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path

from aiohttp import web

from jaxtrain_vllm.adapter_store import FILES_HEADER, ROUTE, AdapterStore
from jaxtrain_vllm.weight_receiver import WeightReceiver, connect

STOP = 3
BODY = web.RequestKey("body", object)


class Shelf(WeightReceiver):
    """Refuses weights, or does not answer, when its server is told so."""

    def __init__(self, fake: "FakeVllm"):
        super().__init__(fake.open_ipc_memory)
        self.fake = fake

    def answer(self, header, payload):
        while self.fake.trouble.get("links") == "stall":
            time.sleep(0.02)
        return {"error": "no"} if self.fake.refuse_stage else super().answer(header, payload)


class FakeVllm:
    """`url` once started; `log` holds (path, body or query) of all control calls."""

    def __init__(
        self,
        *,
        tensors=None,
        world_size=1,
        scale_out=True,
        processed=True,
        version=None,
        open_ipc_memory=None,
        port=0,
    ):
        self.held, self.open_ipc_memory = tensors or {}, open_ipc_memory
        self.world_size, self.scale_out, self.processed = world_size, scale_out, processed
        self.vllm_version = version or "0.32.0"
        self.script: deque = deque()
        self.length, self.token_seconds = 4, 0.0
        self.log: list[tuple[str, object]] = []
        self.asked: list[dict] = []
        self.answered = self.drawn = 0
        self.healthy = True
        self.max_rank = 64
        self.refuse_stage = False
        self.hangs = False
        """Whether the engine does nothing any more, though the server goes on answering."""
        self.tells = True
        """Whether /metrics counts tokens."""
        self.trouble: dict[str, str] = {}
        """{path of a control call, or "links": "stall" or "drip"}: never answered, or a byte at a
        time."""
        self.tokenize = None
        self.expand = None
        """(tokens with placeholders, their content_parts) -> tokens of the whole prompt."""
        self.sees_disk = True
        """Whether the trainer's folders are its own, too."""
        self.store = AdapterStore()
        self.while_loading = None
        """What happens just then."""
        self.login = ""
        """Authorization header that every request must send; empty: any or none."""
        self.name, self.port = "127.0.0.1", port
        self.start()

    # -- life

    def start(self) -> None:
        """Come up, as a fresh process would: with its own weights and no adapters."""
        self.label, self.adapters = "default", {}
        self.shelves = [Shelf(self) for _ in range(self.world_size)]
        self.loaded = [{} for _ in range(self.world_size)]
        self.update_active = self.paused = self.asleep = False
        self.links = []
        ready = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self.thread.start()
        assert ready.wait(60)

    def kill(self) -> None:
        """Die at once: connections break, the port is closed."""
        for link in self.links:
            link.close()
        self.loop.call_soon_threadsafe(self._stop.set)
        self.thread.join(60)

    def after(self, tokens: int, act, *args) -> threading.Thread:
        """Call `act` in a thread as soon as so many tokens were drawn."""

        def run():
            while self.drawn < tokens:
                time.sleep(0.005)
            act(*args)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    @property
    def url(self) -> str:
        return f"http://{self.name}:{self.port}"

    def _run(self, ready: threading.Event) -> None:
        asyncio.run(self._serve(ready))
        # Closes a connection that was let in last, as the end of a process would. It is young; a
        # whole collection would go through all that a long session of tests holds: seconds.
        gc.collect(1)

    async def _serve(self, ready: threading.Event) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._aborted = asyncio.Event()
        app = web.Application(middlewares=[self._note])
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/tokenize", self._tokenize)
        for method in ("PUT", "DELETE"):
            app.router.add_route(method, ROUTE + "{name}", self._adapter)
        for path, method in CONTROL.items():
            getattr(app.router, f"add_{method}")(path, getattr(self, "_" + path.split("/")[-1]))
        runner = web.AppRunner(app, shutdown_timeout=0.01)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]
        ready.set()
        await self._stop.wait()
        for connection in list(runner.server.connections):
            connection.force_close()
            if connection.transport is not None:
                connection.transport.abort()
        await runner.cleanup()

    @web.middleware
    async def _note(self, request, handler):
        if self.login and request.headers.get("Authorization") != self.login:
            return web.json_response({"error": "Unauthorized"}, status=401)
        if request.path in CONTROL:
            body = json.loads(await request.text() or "null")
            self.log.append((request.path, dict(request.query) or body))
            request[BODY] = body
        trouble = self.trouble.get(request.path)
        if trouble == "stall":
            await asyncio.sleep(60)
        if trouble == "drip":
            request.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 600\r\n\r\n")
            for _ in range(600):
                request.transport.write(b" ")
                await asyncio.sleep(0.05)
        return await handler(request)

    # -- tokens

    async def _generate(self, request):
        if not self.scale_out:
            return web.json_response({"detail": "Forbidden"}, status=403)
        body = await request.json()
        params = body["sampling_params"]
        prompt = body["token_ids"]
        if "content_parts" in body:
            prompt = self.expand(prompt, body["content_parts"])
        drawn = await self._draw(request, body, prompt, params)
        if isinstance(drawn, web.StreamResponse):
            return drawn
        tokens, labels, reason = drawn
        spans = [{"version": v, "start": i, "end": i + 1} for i, v in enumerate(labels)]
        logprob = self._logprob(params)
        content = [{"token_id": token, "logprob": logprob} for token in tokens]
        for entry, best in zip(content, likely_tokens(tokens, params), strict=True):
            entry["top_logprobs"] = [{"token_id": t, "logprob": p} for t, p in best.items()]
        choice = {"index": 0, "finish_reason": reason, "token_ids": tokens}
        choice |= {"weight_versions": spans, "logprobs": {"content": content}}
        echo = {"prompt_token_ids": prompt} if body.get("return_token_ids") else {}
        return web.json_response({"choices": [choice], **echo})

    async def _complete(self, request):
        body = await request.json()
        drawn = await self._draw(request, body, body["prompt"], body)
        if isinstance(drawn, web.StreamResponse):
            return drawn
        tokens, _, reason = drawn
        logprobs = {"token_logprobs": [self._logprob(body)] * len(tokens)}
        if body["logprobs"]:
            assert body["return_tokens_as_token_ids"]
            logprobs["top_logprobs"] = [
                {f"token_id:{t}": p for t, p in best.items()}
                for best in likely_tokens(tokens, body)
            ]
        choice = {"finish_reason": reason, "token_ids": tokens, "logprobs": logprobs}
        return web.json_response({"choices": [choice]})

    def _logprob(self, params) -> float:
        return 0.0 if params["top_k"] == 1 and self.processed else -0.5

    async def _draw(self, request, body, prompt, params):
        """(tokens, label of each, finish reason), or a response that says something else."""
        while self.hangs or self.asleep:
            await asyncio.sleep(0.02)
        if params["top_k"] == 1:  # the client's look at the log-probs: not part of any script
            return [100], [self.label], "length"
        self.asked.append(body)
        do = self.script.popleft() if self.script else "ok"
        if isinstance(do, int):
            return web.json_response({"error": {"message": "EngineCore has an issue"}}, status=do)
        if isinstance(do, bytes):
            return web.Response(body=do, content_type="application/json")
        if do == "stall":
            await asyncio.sleep(60)
        if do == "cut":
            request.transport.abort()
            return web.Response()
        model = body["model"]
        if model != "base" and model not in self.adapters:
            error = {"message": f"The model `{model}` does not exist.", "type": "NotFoundError"}
            return web.json_response({"error": error}, status=404)
        tokens, labels = [], []
        done = len(prompt) - len([t for t in prompt if t >= 100])
        while len(tokens) < params["max_tokens"]:
            position = len(prompt) - done + len(tokens)
            aborted = asyncio.ensure_future(self._aborted.wait())
            resumed = asyncio.ensure_future(self._resumed.wait())
            await asyncio.wait({aborted, resumed}, return_when=asyncio.FIRST_COMPLETED)
            stop = self._aborted.is_set() and not self._resumed.is_set() and bool(tokens)
            aborted.cancel()
            if stop:
                return tokens, labels, "abort"
            await self._resumed.wait()
            while self.hangs:
                await asyncio.sleep(0.02)
            tokens.append(STOP if position == self.length - 1 else 100 + position)
            labels.append(self.label)
            self.drawn += 1
            if tokens[-1] == STOP:
                self.answered += 1
                return tokens, labels, "stop"
            await asyncio.sleep(self.token_seconds)
        self.answered += 1
        return tokens, labels, "length"

    # -- control

    async def _health(self, request):
        if self.healthy == "stalled":
            await asyncio.sleep(60)
        if self.healthy == "draining":
            return web.Response(status=503, text="draining: this server ends within 5 s")
        return web.Response(status=200 if self.healthy else 503)

    async def _metrics(self, request):
        lines = f'http_requests_total{{status="2xx"}} {time.monotonic_ns()}\n'
        if self.tells:
            name = 'vllm:generation_tokens_total{engine="0",model_name="a b"}'
            lines += f"{name} {self.drawn:.1f}\n"
        return web.Response(text=lines)

    async def _tokenize(self, request):
        if self.tokenize is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response({"tokens": self.tokenize((await request.json())["prompt"])})

    async def _version(self, request):
        return web.json_response({"version": self.vllm_version})

    async def _models(self, request):
        base = {"id": "base", "root": "/models/base", "parent": None, "max_model_len": 512}
        loaded = [{"id": n, "root": r, "parent": "base"} for n, r in self.adapters.items()]
        return web.json_response({"data": [base, *loaded]})

    async def _get_world_size(self, request):
        return web.json_response({"world_size": self.world_size})

    async def _weight_info(self, request):
        return web.json_response({"weight_version": self.label})

    async def _init_weight_transfer_engine(self, request):
        info = request[BODY]["init_info"]
        for rank, shelf in enumerate(self.shelves):
            serves = shelf.begin(info["token"])
            link = await asyncio.to_thread(connect, info, rank, self.held, serves)
            self.links.append(link)
            threading.Thread(target=shelf.listen, args=(link,), daemon=True).start()
        return web.json_response({"message": "ok"})

    async def _pause(self, request):
        self._resumed.clear()
        if request.query.get("mode") == "abort":
            self._aborted.set()
            await asyncio.sleep(self.token_seconds + 0.05)
        return web.json_response({"status": "paused"})

    async def _resume(self, request):
        self._aborted.clear()
        self._resumed.set()
        return web.json_response({"status": "resumed"})

    async def _start_weight_update(self, request):
        self.update_active = True
        return web.json_response({"message": "ok"})

    async def _update_weights(self, request):
        info = request[BODY]["update_info"]
        try:
            for shelf in self.shelves:
                shelf.check(info["version"], info["checksum"])
        except ValueError as error:
            return web.json_response({"error": {"message": str(error)}}, status=500)
        self.wanted = info["version"]
        return web.json_response({"message": "ok"})

    async def _finish_weight_update(self, request):
        assert self.update_active and not self._resumed.is_set()
        for rank, shelf in enumerate(self.shelves):
            shelf.commit(self.wanted, partial(self._load, rank))
        self.update_active, self.label = False, request[BODY]["weight_version"]
        return web.json_response({"message": "ok"})

    def _load(self, rank, tensors):
        """Store copies: memory that a GPU lends is freed after the update."""
        self.loaded[rank] = {
            name: bits.to_torch(shape, dtype).view(-1) if hasattr(bits, "to_torch") else bits
            for name, (shape, dtype, bits) in tensors.items()
        }
        if self.while_loading is not None:
            self.while_loading()

    async def _load_lora_adapter(self, request):
        name, path = request[BODY]["lora_name"], request[BODY]["lora_path"]
        config = Path(path) / "adapter_config.json"
        local_value = Path(path).parent == self.store._folder
        if not config.is_file() or not (self.sees_disk or local_value):
            error = {"message": f"Loading lora {name} failed: No adapter found for {path}"}
            return web.json_response({"error": error}, status=404)
        if json.loads(config.read_text())["r"] > self.max_rank:
            error = {"message": f"LoRA rank is greater than max_lora_rank {self.max_rank}."}
            return web.json_response({"error": error}, status=500)
        if name in self.adapters:
            error = {"message": f"The lora adapter '{name}' has already been loaded."}
            return web.json_response({"error": error}, status=400)
        self.adapters[name] = path
        return web.json_response("Success")

    async def _adapter(self, request):
        name, files = request.match_info["name"], request.headers.get(FILES_HEADER)
        status, actual = await self.store.handle(
            request.method, name, files, request.content.iter_any()
        )
        return web.json_response(actual, status=status)

    async def _unload_lora_adapter(self, request):
        actual = self.adapters.pop(request[BODY]["lora_name"], None)
        return web.json_response("Success", status=200 if actual else 404)

    async def _sleep(self, request):
        self.asleep = True
        return web.json_response({"status": "sleeping"})

    async def _is_sleeping(self, request):
        return web.json_response({"is_sleeping": self.asleep})

    async def _wake_up(self, request):
        self.asleep = self.asleep and request.query.get("tags") == "weights"
        return web.json_response({"status": "awake"})


def likely_tokens(tokens, params):
    """Return {token: log-prob} of each place, one of them impossible; empty unless asked for."""
    if not params["logprobs"]:
        return [{}] * len(tokens)
    return [{7: -1.5, 8: -9999.0, token: -0.5} for token in tokens]


CONTROL = {
    "/version": "get",
    "/v1/models": "get",
    "/get_world_size": "get",
    "/weight_info": "get",
    "/init_weight_transfer_engine": "post",
    "/pause": "post",
    "/resume": "post",
    "/start_weight_update": "post",
    "/update_weights": "post",
    "/finish_weight_update": "post",
    "/v1/load_lora_adapter": "post",
    "/v1/unload_lora_adapter": "post",
    "/sleep": "post",
    "/is_sleeping": "get",
    "/wake_up": "post",
}
