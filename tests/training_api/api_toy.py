"""A tiny model to train on, and requests as the `tinker` client writes them."""

import asyncio
import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxtrain.config import validate_config
from jaxtrain.core.roles import ModelSnapshot, Roles
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.environments.endpoint_app import EndpointApp
from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.generation.local.slots import unstack
from jaxtrain.generation.serving.answerer import Answerer, ServedModel
from jaxtrain.generation.serving.open_request import ServingFormat
from jaxtrain.methods.registry import make_task
from jaxtrain.training_api import wire
from jaxtrain.training_api.routes import PUBLIC, TrainingApi
from jaxtrain.training_api.trainer import Base, without_new_adapter

ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def make_config(**sections):
    table = {
        "run": {"max_steps": 1},
        "model": {"tokenizer": "builtin", "compute_dtype": "float32", "architecture": ARCHITECTURE},
        "parallel": {"data": 1, "fsdp": -1},
        "data": {"datasets": [{"path": "none"}], "sequence_len": 256},
    }
    return validate_config({**table, **sections}, "toy")


def open_base(**sections):
    config = make_config(**sections)
    roles = Roles(make_task(config).roles)
    weights, frozen, copies = roles.open(0)
    snapshot = without_new_adapter(ModelSnapshot(roles, {**frozen, **copies, **weights}, 0))
    base = Base(config, snapshot, 200)
    base.bundle_model = snapshot.model()
    return base


def write_tensor(message, values):
    values = np.asarray(values)
    dtype = np.int64 if np.issubdtype(values.dtype, np.integer) else np.float32
    message.dense = values.astype(dtype).tobytes()
    message.dtype = wire.INT64 if dtype == np.int64 else wire.FLOAT32
    message.shape.extend(values.shape)


def write_request(model_id, seq_id, data, loss="cross_entropy", settings=None, forward_only=False):
    """data: (tokens, {input: values}) each."""
    message = wire.ForwardBackwardRequest(
        model_id=model_id, seq_id=seq_id, loss_fn=loss, forward_only=forward_only
    )
    for tokens, inputs in data:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
        for name, values in inputs.items():
            write_tensor(datum.loss_fn_inputs.add(key=name).value, values)
    for name, value in (settings or {}).items():
        entry = message.loss_fn_config_v2.add(key=name)
        setattr(entry.value, "text" if isinstance(value, str) else "number", value)
    return message.SerializeToString()


def read_output(raw):
    """(log-probs by datum, metrics)."""
    message = wire.ForwardBackwardOutput()
    message.ParseFromString(raw)
    logprobs = []
    for record in message.loss_fn_outputs:
        (field,) = record.fields
        values = np.frombuffer(field.value.data, np.float32)
        offsets = np.frombuffer(field.value.offsets, np.int64) // 4
        shape = tuple(field.value.trailing_shape)
        logprobs += [
            values[a:b].reshape(-1, *shape) for a, b in zip(offsets[:-1], offsets[1:], strict=True)
        ]
    return logprobs, {entry.key: entry.value for entry in message.metrics}


def draw_documents(count, seed=0, longest=40):
    """Documents [n + 1] of random ids and the weights of their targets [n]."""
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(count):
        length = int(rng.integers(4, longest))
        weights = rng.integers(0, 2, length).astype(np.float32)
        weights[-1] = 1
        documents.append((rng.integers(4, 512, length + 1).astype(np.int32), weights))
    return documents


def as_data(documents):
    return [(ids[:-1], {"target_tokens": ids[1:], "weights": w}) for ids, w in documents]


KEY = "tml-key"


class Server:
    """The routes in a thread; `stop` ends it as a kill does: without any farewell to the log."""

    def __init__(self, folder, base):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.device = ThreadPoolExecutor(1)
        self.port = self.wait(self._begin(folder, base))

    def wait(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(300)

    async def _begin(self, folder, base):
        model = unstack(base.bundle_model)
        sampler = LocalSampler(
            model, {2}, max_len=base.longest, max_batch=8, to_text=str, mesh=base.mesh
        )
        engine = LocalEngine(sampler, self.device)
        self.api = TrainingApi(folder, "toy", base, engine, self.device, "toy")
        self.api.start()
        form = ServingFormat(load_tokenizer("builtin"), 512, base.longest)
        served = [ServedModel("toy", engine, "base")]
        answerer = Answerer(form, served, find_other=self.api.find_served)
        self.app = EndpointApp([*answerer.routes(), *self.api.routes()], KEY, PUBLIC)
        return await self.app.listen("127.0.0.1", 0)

    def stop(self):
        self.wait(self.app.close())
        self.wait(self.api.close())
        self.wait(self.api.samplers.engine.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)
        self.device.shutdown()
        self.loop.close()

    def send(self, path, body, key=KEY, method="POST"):
        """(status, body) of a JSON answer, or of bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            path = path if path.startswith("/") else f"/api/v1/{path}"
            connection.request(method, path, raw, {"X-API-Key": key})
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.headers["Content-Type"].startswith("application/json"):
            return answer.status, json.loads(content)
        return answer.status, content

    def ask(self, path, body):
        """The answer of a request that must succeed."""
        status, answer = self.send(path, body)
        assert status == 200, (path, answer)
        return answer

    def result(self, promise):
        """The result of a promise."""
        body = {"request_id": promise["request_id"]}
        while (answer := self.send("retrieve_future", body))[0] == 408:
            pass
        assert answer[0] == 200, answer
        return answer[1]


class Client:
    """A model of its own on a server, whose requests are numbered as the `tinker` client does."""

    def __init__(self, server, rank=4, seed=7, number=0, **lora):
        self.server, self.seq_id = server, 0
        self.session = server.ask("create_session", {"tags": [], "sdk_version": "0"})["session_id"]
        config = {"rank": rank, "seed": seed, **lora}
        body = {"session_id": self.session, "model_seq_id": number, "base_model": "toy"}
        self.create = {**body, "lora_config": config, "type": "create_model"}
        self.created = server.result(server.ask("create_model", self.create))
        self.model_id = self.created.get("model_id", "")

    def post(self, route, /, **body):
        self.seq_id += 1
        body = {"model_id": self.model_id, "seq_id": self.seq_id, **body}
        return self.server.ask(route, body)

    def forward_backward(self, data, loss="cross_entropy", **options):
        self.seq_id += 1
        raw = write_request(self.model_id, self.seq_id, data, loss, **options)
        return self.server.ask("forward_backward", raw)

    def optim_step(self, **adam):
        return self.post("optim_step", adam_params={"learning_rate": 3e-3, "eps": 1e-8, **adam})

    def step(self, data):
        """The loss of a step."""
        promises = self.forward_backward(data), self.optim_step()
        output, metrics = map(self.server.result, promises)
        assert metrics["metrics"]["grad_norm"] > 0
        return read_output(output)[1]["loss:sum"]
