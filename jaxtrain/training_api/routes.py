"""Routes in Tinker's form, beside those in OpenAI's: sessions, models, samplers and futures.

A request is on disk before it is answered with an id, so that the id is valid after a restart, too.
Samples alone are not on disk: after a restart they are 410, and the client asks again.
"""

import asyncio
import fcntl
import hashlib
import json
import sys
import time
import traceback
import uuid
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from jaxtrain.environments.endpoint_app import Route, read_body, read_json
from jaxtrain.environments.request_fields import RequestRefused
from jaxtrain.errors import UserError
from jaxtrain.generation.engine import EpisodeFailed
from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.generation.serving.answerer import ServedModel
from jaxtrain.text_safety import escape_control_chars, show
from jaxtrain.training_api.futures import PROTOBUF, SERVER, Entry, Result
from jaxtrain.training_api.journal import Journal, Record
from jaxtrain.training_api.model_queue import RETENTION_SECONDS, ModelQueue
from jaxtrain.training_api.operations import Operations
from jaxtrain.training_api.requests import read_request
from jaxtrain.training_api.samplers import PathEngine, Samplers
from jaxtrain.training_api.sampling import draw, read_sample
from jaxtrain.training_api.trainer import Base
from jaxtrain.training_api.weights_store import MODEL_ID, PATH, WeightsStore

PREFIX = "/api/v1"
PUBLIC = (f"{PREFIX}/healthz",)
POLL_SECONDS = 30.0
"""Longest time that an answer to retrieve_future waits for the result."""
EXPIRY_SECONDS = 60.0
"""Between two looks for saved weights whose time is over."""
MAX_SAMPLES_WAITING, MAX_MODELS = 4096, 1024
FLAGS = {"proto_compress_fwdbwd": False}
"""Flags of the client: bodies come as they are."""


class TrainingApi:
    """Routes and the state behind them; its methods run in one event loop."""

    def __init__(
        self,
        folder: Path,
        name: str,
        base: Base,
        engine: LocalEngine,
        thread: ThreadPoolExecutor,
        tokenizer: str,
    ):
        """folder: what clients train, locked while this server uses it. name: of the base in
        requests. engine: over the base, for this alone. thread: launches the device's work.
        tokenizer: where clients find it. UserError for a folder that another server uses."""
        self.name, self.base, self.thread, self.tokenizer = name, base, thread, tokenizer
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = open(folder / "lock", "w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"--train {folder} cannot be used: {error.strerror or error} (or another server"
                " uses it)"
            ) from None
        self.store = WeightsStore(folder, base)
        self.samplers = Samplers(self.store, engine, thread)
        self.journal = Journal(folder / "sessions.log")
        self.sessions: set[str] = set()
        self.sampling: dict[str, str | None] = {}
        """Paths by the id of a sampling session; None: the base."""
        records = self.journal.read()
        remaining = [
            r for r in records if "session" in r.header or self._is_saved(r.header["path"])
        ]
        for header, _ in remaining:
            if "session" in header:
                self.sessions.add(header["session"])
            else:
                self.sampling[header["sampling"]] = header["path"]
        if len(remaining) < len(records):
            try:
                self.journal.rewrite(remaining)
            except OSError as error:  # a full disk: the longer log says the same
                print(f"{self.journal.path} cannot be shortened: {error}", file=sys.stderr)
        self.models: dict[str, ModelQueue] = {}
        self.samples: dict[str, Entry] = {}
        self._samples_seen: deque[tuple[float, Entry]] = deque()
        """Samples by the times at which they ended and were read."""
        self._tasks: set[asyncio.Task] = set()

    def start(self) -> None:
        """Open the models of earlier servers, within the event loop."""
        models = self.folder / "models"
        for path in sorted(models.iterdir()) if models.is_dir() else ():
            model_id = path.name.replace("_", ":")
            if MODEL_ID.fullmatch(model_id) and (path / "requests.log").is_file():
                self._open_model(model_id)
        # A server that is killed before such a result was read has not logged its sampler.
        entries = [entry for queue in self.models.values() for entry in queue.entries.values()]
        records = [record for entry in entries if (record := self._find_sampler(entry))]
        try:
            self.journal.append(*records)
        except OSError as error:
            raise UserError(f"--train {self.folder} cannot be written: {error}") from None
        self._note_samplers(*records)
        self._expiry = asyncio.ensure_future(self._delete_expired())

    async def _delete_expired(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await loop.run_in_executor(self.thread, self.store.delete_expired)
            await asyncio.to_thread(self._forget_samplers)
            await asyncio.sleep(EXPIRY_SECONDS)

    def _forget_samplers(self) -> None:
        """Forget the sampling sessions whose weights are gone."""
        for sampler_id, path in list(self.sampling.items()):
            if not self._is_saved(path):
                self.sampling.pop(sampler_id, None)

    def _is_saved(self, path: str | None) -> bool:
        """Return whether sampler weights are on disk; None: those of the base."""
        try:
            return path is None or bool(self.store.find(path, "sampler_weights", "model_path"))
        except UserError:
            return False

    async def close(self) -> None:
        """Stop after the request that is being run."""
        for task in (*self._tasks, self._expiry):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(queue.close() for queue in self.models.values()))
        self.journal.close()
        self._lock.close()

    def routes(self) -> list[Route]:
        """Return the routes."""
        posts = {
            "client/config": self._config,
            "client/dynamic_config": self._config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session_id}/finish": self._finish,
            "telemetry": self._accept,
            "create_model": self._create_model,
            "load_weights": self._load_weights,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._train,
            "save_weights": self._train,
            "save_weights_for_sampler": self._train,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "cancel_future": self._cancel,
            "retrieve_future": self._retrieve,
            "weights_info": self._weights_info,
        }
        gets = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler_id}": self._show_sampler,
        }
        return [
            *(Route("POST", f"{PREFIX}/{path}", handler) for path, handler in posts.items()),
            *(Route("GET", f"{PREFIX}/{path}", handler) for path, handler in gets.items()),
        ]

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _config(self, request: web.Request) -> web.Response:
        return web.json_response(FLAGS)

    async def _accept(self, request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({"status": "accepted"})

    async def _capabilities(self, request: web.Request) -> web.Response:
        model = {
            "model_name": self.name,
            "max_context_length": self.base.longest,
            "trainable": True,
            "sampleable": True,
        }
        return web.json_response({"supported_models": [model]})

    async def _create_session(self, request: web.Request) -> web.Response:
        await read_json(request)
        session = str(uuid.uuid4())
        await self._append(Record({"session": session}))
        self.sessions.add(session)
        return web.json_response({"session_id": session, "type": "create_session"})

    async def _heartbeat(self, request: web.Request) -> web.Response:
        self._session(await read_json(request))
        return web.json_response({"type": "session_heartbeat"})

    async def _finish(self, request: web.Request) -> web.Response:
        """Take the models of a session out of memory."""
        await request.read()
        session = self._session(request.match_info)
        for model_id, queue in list(self.models.items()):
            if model_id.startswith(f"{session}:"):
                await queue.unload()
        return web.json_response({"status": "accepted"})

    def _session(self, body: Mapping[str, Any]) -> str:
        session = body.get("session_id")
        if not isinstance(session, str) or session not in self.sessions:
            raise RequestRefused(404, f"session_id {show(session, 60)} is unknown", "session_id")
        return session

    def _model(self, model_id: Any) -> ModelQueue:
        if not isinstance(model_id, str) or model_id not in self.models:
            raise RequestRefused(404, f"model_id {show(model_id, 60)} is unknown", "model_id")
        return self.models[model_id]

    def _open_model(self, model_id: str) -> ModelQueue:
        operations = Operations(model_id, self.name, self.store, self.samplers)
        journal = Journal(self.store.model_folder(model_id) / "requests.log")
        queue = self.models[model_id] = ModelQueue(operations, journal, self.thread)
        queue.start()
        return queue

    async def _create(self, body: dict[str, Any], operation: str) -> web.Response:
        """Accept the first request of a model."""
        session, number = self._session(body), body.get("model_seq_id")
        if type(number) is not int or not 0 <= number < 10**9:
            raise RequestRefused(400, "model_seq_id must be a whole number", "model_seq_id")
        model_id = f"{session}:train:{number}"
        if model_id not in self.models and len(self.models) >= MAX_MODELS:
            raise RequestRefused(429, f"{MAX_MODELS:,} models are held already")
        queue = self.models.get(model_id) or self._open_model(model_id)
        return promise(await queue.submit(0, operation, write_body(body)), model_id)

    async def _create_model(self, request: web.Request) -> web.Response:
        return await self._create(await read_json(request), "create_model")

    async def _load_weights(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        if body.get("model_id") is None:
            return await self._create(body, "load_weights")
        return await self._submit(body["model_id"], body.get("seq_id"), request, write_body(body))

    async def _train(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        model_id, seq_id = body.get("model_id"), body.get("seq_id")
        return await self._submit(model_id, seq_id, request, write_body(body))

    async def _forward_backward(self, request: web.Request) -> web.Response:
        raw = await read_body(request)
        parsed = await asyncio.to_thread(read_request, raw)
        return await self._submit(parsed.model_id, parsed.seq_id, request, raw)

    async def _submit(
        self, model_id: Any, seq_id: Any, request: web.Request, payload: bytes
    ) -> web.Response:
        """Accept a request of a model, which the path names."""
        queue, operation = self._model(model_id), request.path.rpartition("/")[2]
        if seq_id == 0:
            raise RequestRefused(400, "seq_id must be a whole number from 1 on", "seq_id")
        return promise(await queue.submit(seq_id, operation, payload), model_id)

    async def _get_info(self, request: web.Request) -> web.Response:
        model_id = (await read_json(request)).get("model_id")
        model = await self._model(model_id).show()
        if model is None:
            raise RequestRefused(404, f"model_id {show(model_id, 60)} was not created", "model_id")
        rank = model.kind.lora.rank
        data = {
            "arch": self.base.bundle.architecture.architecture,
            "model_name": self.name,
            "tokenizer_id": self.tokenizer,
        }
        about = {"is_lora": rank > 0, "lora_rank": rank, "model_name": self.name}
        return web.json_response(
            {"type": "get_info", "model_data": data, "model_id": model_id, **about}
        )

    async def _weights_info(self, request: web.Request) -> web.Response:
        path = (await read_json(request)).get("tinker_path")
        match = PATH.fullmatch(path) if isinstance(path, str) else None
        kind = "weights" if match is None else match[2]
        try:
            lora = self.store.find(path, kind, "tinker_path").lora
        except UserError as error:
            raise RequestRefused(404, str(error), "tinker_path") from None
        about = {"train_unembed": False, "train_mlp": lora.mlp, "train_attn": lora.attention}
        return web.json_response(
            {"base_model": self.name, "is_lora": lora.rank > 0, "lora_rank": lora.rank, **about}
        )

    async def _create_sampling_session(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        session, number = self._session(body), body.get("sampling_session_seq_id")
        if type(number) is not int or not 0 <= number < 10**9:
            raise RequestRefused(400, "sampling_session_seq_id must be a whole number")
        path = self._find_path(body)
        sampler_id = f"{session}:sample:{number}"
        if self.sampling.get(sampler_id, path) != path:
            raise RequestRefused(
                409, f"sampling_session_seq_id {number} was sent with other weights before"
            )
        if sampler_id not in self.sampling:
            record = Record({"sampling": sampler_id, "path": path})
            await self._append(record)
            self._note_samplers(record)
        return web.json_response(
            {"type": "create_sampling_session", "sampling_session_id": sampler_id}
        )

    def _find_path(self, body: dict[str, Any]) -> str | None:
        """Return the sampler weights that a request names; None: the base. RequestRefused."""
        path, name = body.get("model_path"), body.get("base_model")
        if path is None:
            if name != self.name:
                raise RequestRefused(
                    404, f"base_model {show(name)} is not served here; {show(self.name)} is"
                )
            return None
        try:
            self.store.find(path, "sampler_weights", "model_path")
        except UserError as error:
            raise RequestRefused(404, str(error), "model_path") from None
        return path

    def find_served(self, name: str) -> ServedModel | None:
        """Return sampler weights by their path as a model for requests in OpenAI's form; None:
        there are none."""
        try:
            self.store.find(name, "sampler_weights", "model")
        except UserError:
            return None
        return ServedModel(name, PathEngine(self.samplers, name), name)

    async def _show_sampler(self, request: web.Request) -> web.Response:
        sampler_id = request.match_info["sampler_id"]
        about = {"sampler_id": sampler_id, "base_model": self.name}
        return web.json_response({**about, "model_path": self._sampler(sampler_id)})

    def _sampler(self, sampler_id: Any) -> str | None:
        known = isinstance(sampler_id, str) and sampler_id in self.sampling
        if not known or not self._is_saved(self.sampling[sampler_id]):
            raise RequestRefused(
                404,
                f"sampling_session_id {show(sampler_id, 60)} is unknown, or its weights were"
                " deleted: their ttl_seconds are over, or they had no name and newer ones came;"
                " save them again, with a name",
                "sampling_session_id",
            )
        return self.sampling[sampler_id]

    async def _append(self, record: Record) -> None:
        """Append a record to the log of sessions; RequestRefused."""
        try:
            await asyncio.to_thread(self.journal.append, record)
        except OSError as error:
            raise RequestRefused(503, f"the log cannot be written: {error.strerror}") from None

    def _find_sampler(self, entry: Entry) -> Record | None:
        """Return the sampling session that a save_weights_for_sampler has created, for the log;
        None: there is none that is new."""
        answer = {}
        if entry.operation == "save_weights_for_sampler" and entry.result is not None:
            answer = json.loads(entry.result.body or b"{}")
        sampler_id = answer.get("sampling_session_id")
        if sampler_id is None or sampler_id in self.sampling or not self._is_saved(answer["path"]):
            return None
        return Record({"sampling": sampler_id, "path": answer["path"]})

    def _note_samplers(self, *records: Record) -> None:
        """Note sampling sessions that are in the log."""
        for header, _ in records:
            self.sampling.setdefault(header["sampling"], header["path"])

    async def _sample(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        sampler_id, seq_id = body.get("sampling_session_id"), body.get("seq_id")
        if sampler_id is None:
            path, name = self._find_path(body), f"sample/{uuid.uuid4()}"
        else:
            path = self._sampler(sampler_id)
            if type(seq_id) is not int or seq_id < 0:
                raise RequestRefused(400, "seq_id must be a whole number", "seq_id")
            name = f"sample/{sampler_id}/{seq_id}"
        digest = hashlib.sha256(await request.read()).hexdigest()
        entry = self.samples.get(name)
        if entry is not None and entry.digest != digest:
            raise RequestRefused(409, f"seq_id {seq_id} was sent with another body before")
        if entry is None:
            self._forget_samples()
            size = self.base.bundle.architecture.vocab_size
            read = read_sample(body, name, size, self.base.longest)
            entry = self.samples[name] = Entry(name, 0, "asample", digest)
            task = asyncio.ensure_future(self._draw(entry, path, read))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        count = body.get("num_samples", 1)
        return web.json_response(
            {"request_id": name, "sample_sequence_ids": [f"{name}/{i}" for i in range(count)]}
        )

    async def _draw(self, entry: Entry, path: str | None, read: Any) -> None:
        try:
            async with self.samplers.turn(path) as engine:
                entry.end(Result.of(await draw(engine, read)))
        except UserError as error:
            entry.end(Result.error(str(error)))
        except EpisodeFailed as error:
            entry.end(Result.error(str(error), SERVER))
        except asyncio.CancelledError:
            entry.end(Result.error("the sample was cancelled", SERVER))
            raise
        # Whatever goes wrong with one request must not end the server.
        except Exception as error:
            print(escape_control_chars(traceback.format_exc()), file=sys.stderr)
            entry.end(Result.error(f"the server failed: {type(error).__name__}", SERVER))
        finally:
            assert entry.ended_at is not None
            self._samples_seen.append((entry.ended_at, entry))

    def _forget_samples(self) -> None:
        """Drop samples that were read, or have ended unread, long ago; RequestRefused if too many
        are being drawn."""
        late = time.monotonic() - RETENTION_SECONDS
        while self._samples_seen and self._samples_seen[0][0] < late:
            noted_at, entry = self._samples_seen.popleft()
            if noted_at == (entry.read_at or entry.ended_at):
                self.samples.pop(entry.id, None)
        if len(self._tasks) >= MAX_SAMPLES_WAITING:
            raise RequestRefused(429, f"{MAX_SAMPLES_WAITING:,} samples are being drawn")

    async def _cancel(self, request: web.Request) -> web.Response:
        await read_json(request)
        return web.json_response({"status": "accepted"})

    async def _retrieve(self, request: web.Request) -> web.Response:
        request_id = (await read_json(request)).get("request_id")
        queue, entry = self._find_entry(request_id)
        try:
            await asyncio.wait_for(entry.done.wait(), POLL_SECONDS)
        except TimeoutError:
            pending = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return web.json_response(pending, status=408)
        result = entry.result
        assert result is not None
        if not result.body:
            raise RequestRefused(
                410, f"the result of {show(request_id)} was read before, or not within a day"
            )
        if (record := self._find_sampler(entry)) is not None:
            await self._append(record)
            self._note_samplers(record)
        if queue is not None:
            queue.note_read(entry)
        elif entry.read_at is None:
            entry.read_at = time.monotonic()
            self._samples_seen.append((entry.read_at, entry))
        kind = "application/x-protobuf" if result.kind == PROTOBUF else "application/json"
        return web.Response(body=result.body, content_type=kind)

    def _find_entry(self, request_id: Any) -> tuple[ModelQueue | None, Entry]:
        """Return a request by its id, with the model that it is of; RequestRefused."""
        name = request_id if isinstance(request_id, str) else ""
        if name.startswith("sample/"):
            if name not in self.samples:
                raise RequestRefused(410, "the sample is lost; ask again")
            return None, self.samples[name]
        model_id, _, seq_id = name.rpartition("/")
        queue = self.models.get(model_id)
        number = int(seq_id) if seq_id.isdecimal() and len(seq_id) < 20 else -1
        entry = None if queue is None else queue.entries.get(number)
        if entry is None:
            if queue is not None:
                queue.check()
            raise RequestRefused(404, f"request_id {show(request_id)} is unknown", "request_id")
        return queue, entry


def write_body(body: dict[str, Any]) -> bytes:
    """Return a body for the log: equal bodies as equal bytes."""
    return json.dumps(body, sort_keys=True).encode()


def promise(entry: Entry, model_id: str) -> web.Response:
    """Build the answer to an accepted request."""
    return web.json_response({"request_id": entry.id, "model_id": model_id})
