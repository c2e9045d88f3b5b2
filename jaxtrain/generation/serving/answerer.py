"""Answerer of `jaxtrain serve`: routes in OpenAI's form, answered by engines that sample here.

    body ─> thread: fields, template, tokens ─> n draws of the engine ─> response, or events as
                                                     │                   tokens come
    new weights ─> wait until no answer is under way ┘

Whoever hangs up cancels their draws, which frees their rows.
"""

import asyncio
import itertools
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from aiohttp import web

import jaxtrain
from jaxtrain.data.packing.tree import PlacedImages
from jaxtrain.environments.endpoint_app import Route, read_json, stream
from jaxtrain.environments.request_fields import RequestRefused, check_fields, refuse
from jaxtrain.environments.text_stream import TextStream
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import Completion, EpisodeFailed, Likely, Sampling
from jaxtrain.generation.serving.open_request import (
    DETOKENIZE,
    TOKENIZE,
    OpenRequest,
    ServingFormat,
)
from jaxtrain.generation.serving.open_response import ResponseWriter, ScoredTokens
from jaxtrain.text_safety import escape_control_chars, show

PUBLIC = ("/health", "/ping", "/metrics")
MAX_NOTED = 100
"""Names of fields that are logged, each once."""


class WatchedEngine(Protocol):
    """An engine whose answers can be watched: `local.engine.LocalEngine`."""

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        stop_ids: Sequence[int] = (),
        index: int = 0,
        likely: int = 0,
        watch: Callable[[Completion], None] | None = None,
        images: PlacedImages | None = None,
    ) -> Coroutine[Any, Any, Completion]:
        """Continue a prompt."""
        ...

    @property
    def reports_likely(self) -> bool:
        """True if `generate` takes `likely` and texts can be scored."""
        ...

    async def score(self, tokens: Sequence[int]) -> tuple[Sequence[float], Sequence[Likely]]:
        """Return (the log-prob of each token given those before it, the first: NaN, and the
        MAX_LIKELY most probable tokens of each place), at temperature 1."""
        ...

    def load(self) -> tuple[int, int]:
        """Return the numbers of requests that are drawn, and that wait for a row."""
        ...

    def prefix_tokens(self) -> tuple[int, int]:
        """Return the numbers of tokens of all prompts so far, and of those that were not read
        again, since an earlier answer had read them."""
        ...


class ServedModel:
    """A model by its name in requests, and the version of its weights."""

    def __init__(
        self,
        name: str,
        engine: WatchedEngine,
        version: str,
        root: str | None = None,
        parent: str | None = None,
    ):
        """root: folder of an adapter; default: the name. parent: name of its base."""
        self.name, self.engine, self.version = name, engine, version
        self.root, self.parent = root or name, parent
        self.running = 0
        """Requests that are being answered."""
        self._swap: tuple[Callable[[], None], str] | None = None
        self._free = asyncio.Event()
        self._free.set()

    def replace(self, swap: Callable[[], None], version: str) -> None:
        """Call `swap` as soon as no answer is under way; requests wait for that."""
        self._swap = (swap, version)
        self._free.clear()
        self._settle()

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[str]:
        """Hold the weights for one request; yields their version."""
        await self._free.wait()
        self.running += 1
        try:
            yield self.version
        finally:
            self.running -= 1
            self._settle()

    def _settle(self) -> None:
        if self._swap is not None and not self.running:
            (swap, self.version), self._swap = self._swap, None
            swap()
            self._free.set()


class Answerer:
    """Routes over models of one tokenizer. Its methods run in one event loop."""

    def __init__(
        self,
        form: ServingFormat,
        models: Sequence[ServedModel],
        *,
        max_waiting: int = 1024,
        log: Callable[[str], None] = print,
        find_other: Callable[[str], ServedModel | None] = lambda name: None,
    ):
        """models: the first answers requests without a name. max_waiting: requests at once, beyond
        which they are refused with 503. log: receives, once each, names of fields that change
        nothing. find_other: a model by a name that is not among these; None: there is none."""
        self.form, self.log, self.max_waiting = form, log, max_waiting
        self._find_other = find_other
        self.models = {model.name: model for model in models}
        self._numbers = itertools.count(1)
        self._noted: set[str] = set()
        self._num_answering = 0
        """Requests that are being answered."""
        self.totals = {"prompt_tokens": 0, "generation_tokens": 0, "request_success": 0}
        self.unloaded_prefix_tokens = (0, 0)
        """Tokens looked for and found by models that are gone: totals of /metrics never fall."""

    def routes(self) -> list[Route]:
        """Return the routes."""
        health: Any = self._health
        return [
            *(Route("GET", path, health) for path in ("/health", "/ping")),
            Route("GET", "/metrics", self._metrics),
            Route("GET", "/version", self._version),
            Route("GET", "/v1/models", self._list_models),
            Route("GET", "/v1/models/{name}", self._show_model),
            Route("GET", "/tokenizer_info", self._describe_tokenizer),
            Route("POST", "/v1/chat/completions", self._chat),
            Route("POST", "/v1/completions", self._complete),
            Route("POST", "/tokenize", self._tokenize),
            Route("POST", "/detokenize", self._detokenize),
        ]

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": jaxtrain.__version__})

    async def _metrics(self, request: web.Request) -> web.Response:
        loads = [model.engine.load() for model in self.models.values()]
        running, waiting = (sum(numbers) for numbers in zip(*loads, strict=True))
        lines = [f"vllm:num_requests_running {running}", f"vllm:num_requests_waiting {waiting}"]
        pairs = [model.engine.prefix_tokens() for model in self.models.values()]
        pairs.append(self.unloaded_prefix_tokens)
        queries, hits = (sum(numbers) for numbers in zip(*pairs, strict=True))
        totals = {**self.totals, "prefix_cache_queries": queries, "prefix_cache_hits": hits}
        lines += [f"vllm:{name}_total {count}" for name, count in totals.items()]
        return web.Response(text="\n".join(lines) + "\n")

    def unload(self, model: ServedModel) -> None:
        """Count what a model that is no longer served has found in its prefix cache."""
        counts = zip(self.unloaded_prefix_tokens, model.engine.prefix_tokens(), strict=True)
        queries, hits = map(sum, counts)
        self.unloaded_prefix_tokens = queries, hits

    async def _list_models(self, request: web.Request) -> web.Response:
        data = [self._describe(model) for model in self.models.values()]
        return web.json_response({"object": "list", "data": data})

    async def _show_model(self, request: web.Request) -> web.Response:
        return web.json_response(self._describe(self._find(request.match_info["name"])))

    def _describe(self, model: ServedModel) -> dict[str, Any]:
        return {
            "id": model.name,
            "object": "model",
            "created": 0,
            "owned_by": "jaxtrain",
            "root": model.root,
            "parent": model.parent,
            "max_model_len": self.form.max_model_len,
            "version": model.version,
        }

    async def _describe_tokenizer(self, request: web.Request) -> web.Response:
        tokenizer = self.form.tokenizer
        names = ("eos_token", "bos_token", "pad_token", "chat_template")
        return web.json_response({name: getattr(tokenizer, name, None) for name in names})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        check_fields(body, TOKENIZE, self._note)
        self._find(body.get("model"))
        if (body.get("prompt") is None) == (body.get("messages") is None):
            refuse("prompt or messages are needed, and not both")

        def read() -> list[int]:
            if body.get("messages") is not None:
                return self.form.render(body, self._note)[0]
            return self.form.read_prompts(body["prompt"], bool(body.get("add_special_tokens")))[0]

        tokens = await asyncio.to_thread(read)
        size = {"count": len(tokens), "max_model_len": self.form.max_model_len}
        return web.json_response({**size, "tokens": tokens})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        check_fields(body, DETOKENIZE, self._note)
        self._find(body.get("model"))
        tokens = body.get("tokens")
        if tokens is None or any(not 0 <= token < self.form.vocab_size for token in tokens):
            refuse(f"tokens must be token ids, which are 0 to {self.form.vocab_size - 1}")
        return web.json_response({"prompt": await asyncio.to_thread(self.form.decode, tokens)})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self.form.read_chat)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, self.form.read_completion)

    async def _answer(self, request: web.Request, read: Callable) -> web.StreamResponse:
        body = await read_json(request)
        model = self._find(body.get("model"))
        if self._num_answering >= self.max_waiting:
            raise RequestRefused(503, f"{self.max_waiting:,} requests are being answered")
        # Of all models together: those of _find_other are made for one request each.
        self._num_answering += 1
        try:
            return await self._answer_by(model, request, body, read)
        finally:
            self._num_answering -= 1

    async def _answer_by(
        self, model: ServedModel, request: web.Request, body: dict[str, Any], read: Callable
    ) -> web.StreamResponse:
        # In a thread: a long text takes seconds, and others wait.
        parsed: OpenRequest = await asyncio.to_thread(read, body, self._note)
        scored = parsed.logprobs or (parsed.echo and parsed.logprobs == 0)
        if scored and not model.engine.reports_likely:
            refuse("logprobs of likely tokens and of prompts cannot be had from this model")
        async with model.answering() as version:
            number = f"{next(self._numbers)}"
            writer = ResponseWriter(parsed, number, model.name, version, self.form.decode)
            answers = RequestAnswers(self.form, model, parsed, writer, self.totals)
            self.totals["prompt_tokens"] += sum(map(len, parsed.prompts))
            if parsed.stream:
                return await stream(request, answers.chunks())
            response = await answers.response()
            self.totals["request_success"] += 1
            return web.json_response(response)

    def _find(self, name: Any) -> ServedModel:
        """Return the model of a request; RequestRefused."""
        if name in (None, ""):
            return next(iter(self.models.values()))
        if not isinstance(name, str):
            refuse("model must be a text")
        if name not in self.models:
            if (model := self._find_other(name)) is not None:
                return model
            names = ", ".join(map(show, self.models))
            raise RequestRefused(404, f"model {show(name, 60)} is not served; {names} is", "model")
        return self.models[name]

    def _note(self, name: str) -> None:
        """Log, once, a field of requests that changes nothing; called from any thread."""
        if name not in self._noted and len(self._noted) < MAX_NOTED:
            self._noted.add(name)
            self.log(f"note: field {escape_control_chars(name)} of a request changes nothing")


class RequestAnswers:
    """The answers to one request."""

    def __init__(
        self,
        form: ServingFormat,
        model: ServedModel,
        request: OpenRequest,
        writer: ResponseWriter,
        totals: dict[str, int],
    ):
        """totals: numbers of tokens, which are counted here."""
        self.form, self.model, self.request, self.writer = form, model, request, writer
        self.totals = totals
        self.count = len(request.prompts) * request.n
        self.streams = [self._open_stream() for _ in range(self.count)]

    async def response(self) -> dict[str, Any]:
        """Return the whole response; RequestRefused."""
        tasks = [asyncio.ensure_future(self._draw(index)) for index in range(self.count)]
        try:
            completions = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        choices = []
        for index, completion in enumerate(completions):
            text = self.streams[index]
            _, calls = text.finish(completion.tokens, self.request.tools)
            scored = await self._score(index, completion)
            shown = self._echo(index) + text.text
            reason = completion.finish_reason
            choices.append(self.writer.choice(index, shown, calls, scored, reason, text.stop))
        return self.writer.response(choices, sum(len(c.tokens) for c in completions))

    async def chunks(self) -> AsyncIterator[Mapping[str, Any]]:
        """Yield the chunks of a stream as tokens come; RequestRefused."""
        arrived: asyncio.Queue[tuple[int, ScoredTokens | None]] = asyncio.Queue()
        seen = [0] * self.count

        def watch(index: int) -> Callable[[Completion], None] | None:
            if self.is_scored:
                return None

            def take(answer: Completion) -> None:
                start, seen[index] = seen[index], len(answer.tokens)
                if start < seen[index]:
                    new = ScoredTokens(answer.tokens[start:], answer.logprobs[start:])
                    arrived.put_nowait((index, new))

            return take

        tasks = [asyncio.ensure_future(self._draw(i, watch(i))) for i in range(self.count)]
        for index, task in enumerate(tasks):
            task.add_done_callback(lambda _, index=index: arrived.put_nowait((index, None)))
        waiting, drawn, started = self.count, 0, set()
        try:
            while waiting:
                index, new = await arrived.get()
                if index not in started:
                    if new is None and tasks[index].exception() is not None:
                        tasks[index].result()
                    started.add(index)
                    empty = ScoredTokens([], [])
                    yield self.writer.chunk(
                        [self.writer.delta(index, self._echo(index), empty, True)]
                    )
                text = self.streams[index]
                if new is not None:
                    ended = new.tokens[-1] in self.request.ends
                    shown = text.push(new.tokens[:-1] if ended else new.tokens)
                    yield self.writer.chunk([self.writer.delta(index, shown, new, False)])
                    continue
                completion, waiting = tasks[index].result(), waiting - 1
                drawn += len(completion.tokens)
                rest, calls = text.finish(completion.tokens[seen[index] :], self.request.tools)
                new = completion.tokens[seen[index] :]
                scored = ScoredTokens(new, completion.logprobs[seen[index] :])
                if self.is_scored:
                    scored = await self._score(index, completion)
                if rest or scored.tokens:
                    yield self.writer.chunk([self.writer.delta(index, rest, scored, False)])
                reason = completion.finish_reason
                yield self.writer.chunk([self.writer.last(index, calls, reason, text.stop)])
            if self.request.usage:
                yield self.writer.chunk([], drawn)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def is_scored(self) -> bool:
        """True if log-probs are asked for that drawing does not give: they are computed from the
        whole answer."""
        request = self.request
        return request.logprobs is not None and (request.echo or request.logprobs > 0)

    def _open_stream(self) -> TextStream:
        request = self.request
        return TextStream(
            self.form.decode,
            ends=request.ends,
            stops=request.sampling.stop,
            family=request.family,
            opened=request.opened,
        )

    def _echo(self, index: int) -> str:
        """Return the text of the prompt, if it is part of the answer."""
        prompt = self.request.prompts[index // self.request.n]
        return self.form.decode(prompt) if self.request.echo else ""

    async def _draw(
        self, index: int, watch: Callable[[Completion], None] | None = None
    ) -> Completion:
        """Draw an answer; RequestRefused."""
        request = self.request
        if not request.draws:
            return Completion([], [], "length")
        prompt, number = request.prompts[index // request.n], index % request.n
        images = {} if request.images is None else {"images": request.images}
        try:
            completion = await self.model.engine.generate(
                prompt,
                request.sampling,
                request.ends,
                number,
                request.logprobs or 0,
                watch,
                **images,
            )
        except UserError as error:
            # Images of a model with a draft, or their tokens without them; a regex or a schema that
            # cannot be compiled.
            constrained = request.sampling.structured_outputs and request.images is None
            refuse(f"response_format: {error}" if constrained else str(error))
        except EpisodeFailed as error:
            raise RequestRefused(503, f"the answer came to nothing: {error}") from None
        except Exception as error:
            print(escape_control_chars(traceback.format_exc()), file=sys.stderr)
            raise RequestRefused(500, f"the sampler failed: {type(error).__name__}") from None
        self.totals["generation_tokens"] += len(completion.tokens)
        return completion

    async def _score(self, index: int, completion: Completion) -> ScoredTokens:
        """Return the tokens of an answer, after those of its prompt if it is echoed, with log-probs
        and likely tokens as they were asked for."""
        request, tokens = self.request, completion.tokens
        answer = ScoredTokens(tokens, completion.logprobs, completion.likely)
        if request.logprobs is None or not request.echo:
            return answer
        prompt = request.prompts[index // request.n]
        values, likely = await self.model.engine.score(prompt)
        best = [listed[: request.logprobs] for listed in likely]
        return ScoredTokens(
            [*prompt, *tokens],
            [*values, *completion.logprobs],
            [*best, *(completion.likely or [()] * len(tokens))] if request.logprobs else [],
        )
