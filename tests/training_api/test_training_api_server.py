"""The training API over HTTP: order, repetition, refusals, samples, two clients, restarts."""

import copy
import json
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest
from api_toy import Client, Server, as_data, draw_documents, open_base, read_output, write_request

from jaxtrain.errors import UserError
from jaxtrain.generation.engine import EpisodeFailed
from jaxtrain.models.parameters import split_model
from jaxtrain.training_api import model_queue, routes, weights_store, wire
from jaxtrain.training_api.journal import Journal, Record
from jaxtrain.training_api.weights_store import WeightsStore

DATA = as_data(draw_documents(3))
OTHER = as_data(draw_documents(3, seed=1))


@pytest.fixture(scope="module")
def base():
    return open_base()


@pytest.fixture(scope="module")
def server(base, tmp_path_factory):
    server = Server(tmp_path_factory.mktemp("api") / "state", base)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def alone(server):
    """Losses of a client that is alone, on DATA and on OTHER."""
    return {
        name: [client.step(data) for _ in range(4)]
        for name, data in (("data", DATA), ("other", OTHER))
        for client in [Client(server, rank=4 if name == "data" else 2)]
    }


def test_two_clients_at_once_see_the_losses_that_each_sees_alone(server, alone):
    first, second = Client(server), Client(server, rank=2)
    promises = []
    for _ in range(4):
        for client, data in ((second, OTHER), (first, DATA)):
            promises += [(client, client.forward_backward(data)), (client, client.optim_step())]
    losses = {first: [], second: []}
    for client, promise in promises:
        result = server.result(promise)
        if isinstance(result, bytes):
            losses[client].append(read_output(result)[1]["loss:sum"])
    assert losses[first] == alone["data"] and losses[second] == alone["other"]
    assert len(set(losses[first])) == 4


def test_repeated_and_reordered_requests_run_once_and_in_order(server, alone):
    client = Client(server)
    bodies = []
    for number in range(4):
        bodies.append(("forward_backward", write_request(client.model_id, 2 * number + 1, DATA)))
        body = {"model_id": client.model_id, "seq_id": 2 * number + 2}
        bodies.append(("optim_step", {**body, "adam_params": {"learning_rate": 3e-3, "eps": 1e-8}}))
    order = [3, 0, 0, 1, 2, 3, 5, 7, 6, 4, 0, 7]
    promises = {index: server.ask(*bodies[index]) for index in order}
    for index in order:  # the same body again is the same promise
        assert server.ask(*bodies[index]) == promises[index]
    results = [server.result(promises[index]) for index in range(8)]
    assert [read_output(raw)[1]["loss:sum"] for raw in results[::2]] == alone["data"]
    status, answer = server.send("forward_backward", write_request(client.model_id, 1, OTHER))
    assert status == 409 and answer["error"]["param"] == "seq_id"
    assert server.ask("create_model", client.create)["request_id"] == f"{client.model_id}/0"


def test_a_number_that_never_comes_fails_those_behind_it(server, alone, monkeypatch):
    monkeypatch.setattr(model_queue, "GAP_SECONDS", 0.2)
    client = Client(server)
    client.seq_id = 1
    failed = server.result(client.forward_backward(DATA))
    assert failed == {"error": "seq_id 1 did not come within 0 s", "category": "user"}
    late = server.ask("forward_backward", write_request(client.model_id, 1, DATA))
    assert "too late" in server.result(late)["error"]
    assert "did not come" in server.result(client.optim_step())["error"]
    assert client.step(DATA) == alone["data"][0]


def test_a_failed_part_of_the_gradients_fails_the_step_and_changes_nothing(server, alone):
    client = Client(server)
    promises = client.forward_backward(DATA), client.forward_backward(DATA, "nonsense")
    raw, failed = map(server.result, promises)
    assert read_output(raw)[1]["loss:sum"] == alone["data"][0]
    assert failed["category"] == "user" and "loss_fn 'nonsense' is unknown" in failed["error"]
    assert "seq_id 2 failed" in server.result(client.optim_step())["error"]
    assert "no forward_backward" in server.result(client.optim_step())["error"]
    assert [client.step(DATA) for _ in range(2)] == alone["data"][:2]


@pytest.mark.parametrize(
    "path, body, status, text",
    [
        ("create_session", b"{", 400, "no valid JSON"),
        ("forward_backward", b"\xff\xff", 400, "protobuf"),
        ("optim_step", {"model_id": "none", "seq_id": 1}, 404, "model_id 'none' is unknown"),
        ("session_heartbeat", {"session_id": "none"}, 404, "session_id 'none' is unknown"),
        ("retrieve_future", {"request_id": "none/1"}, 404, "request_id 'none/1' is unknown"),
        ("retrieve_future", {"request_id": "none/" + "9" * 5000}, 404, "is unknown"),
        ("retrieve_future", {"request_id": "sample/none/1"}, 410, "lost"),
        ("asample", {"base_model": "gpt"}, 404, "base_model 'gpt' is not served"),
        ("asample", {"base_model": "toy"}, 400, "prompt must be"),
        (
            "weights_info",
            {"tinker_path": f"tinker://{'a' * 300}/weights/x"},
            404,
            "tinker://MODEL_ID",
        ),
        ("weights_info", {"tinker_path": "tinker://../weights/x"}, 404, "tinker://MODEL_ID"),
        ("weights_info", {"tinker_path": "here"}, 404, "tinker://MODEL_ID/weights/NAME"),
    ],
)
def test_what_is_no_request_is_refused(server, path, body, status, text):
    code, answer = server.send(path, body)
    assert code == status and text in answer["error"]["message"]


def test_a_key_is_needed(server):
    assert server.send("create_session", {}, key="tml-other")[0] == 401
    assert server.send("healthz", b"", key="", method="GET") == (200, {"status": "ok"})


@pytest.mark.parametrize(
    "config, text",
    [
        ({"rank": -1}, "lora_config.rank must be 0 to"),
        ({"train_mlp": False, "train_attn": False}, "heads get none"),
        ({"seed": "x"}, "lora_config.seed must be a whole number"),
    ],
)
def test_models_that_cannot_be_made(server, config, text):
    client = Client(server, **config)
    assert text in client.created["error"] and client.created["category"] == "user"


@pytest.mark.parametrize("field", ["lora_config", "optimizer_config"])
def test_a_field_that_is_no_object_is_named(server, field):
    session = server.ask("create_session", {})["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "toy", field: "x"}
    failed = server.result(server.ask("create_model", body))
    assert failed["category"] == "user" and f"{field} must be an object" in failed["error"]


def test_a_failed_forward_pass_fails_no_step(server, alone):
    client = Client(server)
    failed = server.result(client.forward_backward(DATA, "nonsense", forward_only=True))
    assert failed["category"] == "user"
    assert client.step(DATA) == alone["data"][0]


@pytest.mark.parametrize(
    "params, text",
    [
        ({"stop": []}, "stop []"),
        ({"temperature": -1}, "sampling_params.temperature must be 0 to 1000"),
        ({"max_tokens": 0}, "sampling_params.max_tokens must be from 1 on"),
        ({"top_p": "x"}, "sampling_params.top_p must be"),
        ({"max_tokens": float("inf")}, "sampling_params.max_tokens must be from 1 on"),
        ("x", "sampling_params must be an object"),
    ],
)
def test_samples_that_cannot_be_drawn(server, params, text):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    body = {"base_model": "toy", "prompt": prompt, "sampling_params": params}
    status, answer = server.send("asample", body)
    assert status == 400 and text in answer["error"]["message"]


def draw(server, session, seq_id, tokens, **options):
    return read_samples(server.result(ask_sample(server, session, seq_id, tokens, **options)))


def ask_sample(server, session, seq_id, tokens, **options):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
    body = {"sampling_session_id": session, "seq_id": seq_id, "prompt": prompt, **options}
    return server.ask("asample", body)


def read_samples(result):
    message = wire.SampleResponse()
    message.ParseFromString(result)
    answers = [
        (np.frombuffer(s.tokens, np.int32), np.frombuffer(s.logprobs, np.float32))
        for s in message.sequences
    ]
    return answers, np.frombuffer(message.prompt_logprobs, np.float32)


@pytest.mark.slow  # compiles the sampler
def test_samples_have_the_log_probs_that_forward_gives(server):
    client = Client(server)
    client.step(DATA)
    saved = server.result(client.post("save_weights_for_sampler", sampling_session_seq_id=0))
    session, params = saved["sampling_session_id"], {"max_tokens": 6, "seed": 5}
    options = {"num_samples": 3, "sampling_params": params, "prompt_logprobs": True}
    answers, prompt = draw(server, session, 0, [5, 6, 7], **options)
    for tokens, logprobs in answers:
        sequence = np.array([5, 6, 7, *tokens])
        data = [(sequence[:-1], {"target_tokens": sequence[1:]})]
        promise = client.forward_backward(data, forward_only=True)
        (scored,), _ = read_output(server.result(promise))
        np.testing.assert_allclose(logprobs, scored[2:], atol=2e-5)
        np.testing.assert_allclose(prompt[1:], scored[:2], atol=2e-5)
    body = {"model": saved["path"], "prompt": [5, 6, 7], "max_tokens": 6, "temperature": 0}
    greedy = {"max_tokens": 6, "temperature": 0}
    ((tokens, _),), _ = draw(server, session, 2, [5, 6, 7], sampling_params=greedy)
    (choice,) = server.ask("/v1/completions", {**body, "return_token_ids": True})["choices"]
    assert choice["token_ids"] == tokens.tolist()
    status, answer = server.send("/v1/completions", {**body, "model": saved["path"] + "x"})
    assert status == 404 and "toy is" in answer["error"]["message"].replace("'", "")
    # The snapshot stays what it was; the base is another; a forward pass trains nothing.
    client.step(DATA)
    again, _ = draw(server, session, 1, [5, 6, 7], **options)
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(answers, again, strict=True))
    base = {"session_id": client.session, "sampling_session_seq_id": 1, "base_model": "toy"}
    bare = server.ask("create_sampling_session", base)["sampling_session_id"]
    _, base_logprobs = draw(server, bare, 0, [5, 6, 7], **options)
    assert np.isnan(base_logprobs[0]) and np.abs(base_logprobs[1:] - prompt[1:]).max() > 1e-4
    check_shared(server)


def check_shared(server):
    """The base's arrays are those of the model with slots, not laid out again."""
    samplers = server.api.samplers
    (shared, _), (slotted, _) = split_model(samplers._base), split_model(samplers.slots.model)
    assert len(slotted) > len(shared) and not samplers._layouts.by_kind
    assert all(slotted[path] is value for path, value in shared.items())


@pytest.mark.slow  # compiles the sampler
def test_adapters_and_the_base_are_drawn_together_and_whole_models_in_turns(server, monkeypatch):
    sampler, together = server.api.samplers.engine.sampler, []

    def step(draw=sampler.step):
        ended = draw()
        drawn = [*ended, *filter(None, sampler._running)]
        together.append(len({request.adapter for request in drawn}))
        return ended

    monkeypatch.setattr(sampler, "step", step)
    clients = [Client(server, 4), Client(server, 2, train_mlp=False), Client(server, 0)]
    saved = []
    for client in (*clients, clients[0], clients[1], clients[0]):
        client.step(DATA)
        data = [(np.arange(5, 15), {"target_tokens": np.arange(6, 16)})]
        (scored,), _ = read_output(server.result(client.forward_backward(data, forward_only=True)))
        number = len(saved)
        answer = client.post("save_weights_for_sampler", sampling_session_seq_id=number)
        saved.append((server.result(answer)["sampling_session_id"], scored))
    base = {"session_id": client.session, "sampling_session_seq_id": 99, "base_model": "toy"}
    sessions = [session for session, _ in saved]
    sessions.append(server.ask("create_sampling_session", base)["sampling_session_id"])
    params = {"max_tokens": 150, "temperature": 0}
    options = {"sampling_params": params, "prompt_logprobs": True}
    prompt = list(range(5, 16))
    promises = [
        [ask_sample(server, session, number, prompt, **options) for session in sessions]
        for number in range(3)
    ]
    for row in promises:
        answers = [read_samples(server.result(promise)) for promise in row]
        for (_, scored), (_, prompt_logprobs) in zip(saved, answers[:-1], strict=True):
            np.testing.assert_allclose(prompt_logprobs[1:], scored, atol=2e-5)
    assert max(together) > 2, "adapters are drawn in one batch"
    check_shared(server)


def test_weights_are_saved_and_loaded(server, alone):
    client = Client(server)
    client.step(DATA)
    path = server.result(client.post("save_weights", path="one"))["path"]
    assert path == f"tinker://{client.model_id}/weights/one"
    again = server.result(client.post("save_weights", path="one"))
    assert "set overwrite" in again["error"]
    about = server.ask("weights_info", {"tinker_path": path})
    assert about["lora_rank"] == 4 and not about["train_unembed"]
    for optimizer in (True, False):
        body = {"session_id": client.session, "model_seq_id": 1 + optimizer, "path": path}
        loaded = server.result(server.ask("load_weights", {**body, "optimizer": optimizer}))
        client.model_id, client.seq_id = loaded["model_id"], 0
        losses = [client.step(DATA) for _ in range(3)]
        assert losses[0] == alone["data"][1]
        assert (losses == alone["data"][1:]) == optimizer


def test_weights_with_a_time_to_live_are_deleted_after_it(server, base, monkeypatch):
    client = Client(server)
    for seconds in (0, -1, "10", True, 1e300):
        refused = server.result(client.post("save_weights", path="a", ttl_seconds=seconds))
        assert "ttl_seconds must be above 0" in refused["error"]
    path = server.result(client.post("save_weights", path="a", ttl_seconds=1000))["path"]
    body = {"path": "s", "ttl_seconds": 1000}
    sampler = server.result(client.post("save_weights_for_sampler", **body))["path"]
    forever = server.result(client.post("save_weights", path="b", ttl_seconds=None))["path"]
    body = {"session_id": client.session, "sampling_session_seq_id": 0, "model_path": sampler}
    session = server.ask("create_sampling_session", body)["sampling_session_id"]
    server.ask("weights_info", {"tinker_path": path})
    folder = server.api.store.find(sampler, "sampler_weights", "path").folder
    replaced = weights_store.replaced_folder(folder)  # a kill has left those that it replaced
    shutil.copytree(folder, replaced)
    about = json.loads((replaced / "about.json").read_text())
    (replaced / "about.json").write_text(json.dumps({**about, "expires": None}))
    clock = SimpleNamespace(time=lambda: time.time() + 1001)
    monkeypatch.setattr(weights_store, "time", clock)
    for gone in (path, sampler):
        status, answer = server.send("weights_info", {"tinker_path": gone})
        assert status == 404 and "no such weights" in answer["error"]["message"]
    prompt = {"chunks": [{"tokens": [5]}]}
    body = {"sampling_session_id": session, "seq_id": 0, "prompt": prompt}
    status, answer = server.send("asample", body)
    assert status == 404 and "its weights were deleted" in answer["error"]["message"]
    saved = server.result(client.post("save_weights", path="a", ttl_seconds=5))  # the name is free
    assert saved["path"] == path
    WeightsStore(server.api.folder, base).delete_expired()  # as a restart does
    server.device.submit(server.api.store.delete_expired).result(60)
    remaining = sorted(
        file.parent.name
        for file in server.api.folder.glob("models/*/*weights/*/about.json")
        if client.model_id.replace(":", "_") in str(file)
    )
    assert remaining == ["a", "b"]
    assert session in server.api.sampling
    server.api._forget_samplers()
    assert session not in server.api.sampling
    server.ask("weights_info", {"tinker_path": forever})


def test_a_server_drops_the_records_of_samplers_whose_weights_are_gone(base, tmp_path):
    records = [
        Record({"session": "s"}),
        Record({"sampling": "s:sample:0", "path": None}),
        Record({"sampling": "s:sample:1", "path": "tinker://s:train:0/sampler_weights/gone"}),
    ]
    journal = Journal(tmp_path / "sessions.log")
    journal.append(*records)
    server = Server(tmp_path, base)
    server.stop()
    assert journal.read() == records[:2]
    assert server.api.sampling == {"s:sample:0": None} and server.api.sessions == {"s"}


def test_weights_that_are_loaded_drop_waiting_gradients_and_say_so(server, alone):
    client = Client(server)
    path = server.result(client.post("save_weights", path="first"))["path"]
    assert "warning" not in server.result(client.post("load_weights", path=path))
    server.result(client.forward_backward(DATA))
    loaded = server.result(client.post("load_weights", path=path))
    assert loaded["warning"] == "gradients that had no optim_step were dropped"
    assert [client.step(DATA) for _ in range(2)] == alone["data"][:2]


def test_samples_are_forgotten_an_hour_after_they_were_read(server, monkeypatch):
    async def fail(engine, request):
        raise EpisodeFailed("the engine was closed")

    async def forget():
        server.api._forget_samples()
        return [seq_id for seq_id in range(3) if f"sample/{name}/{seq_id}" in server.api.samples]

    monkeypatch.setattr(routes, "draw", fail)
    session = server.ask("create_session", {})["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "toy"}
    name = server.ask("create_sampling_session", body)["sampling_session_id"]
    body = {"sampling_session_id": name, "prompt": {"chunks": [{"tokens": [5]}]}}
    promises = [server.ask("asample", {**body, "seq_id": seq_id}) for seq_id in range(3)]
    failed = {"error": "the engine was closed", "category": "server"}
    assert server.result(promises[0]) == failed
    entries = [server.api.samples[promise["request_id"]] for promise in promises]
    for entry in entries:
        server.wait(entry.done.wait())
    assert server.wait(forget()) == [0, 1, 2]
    entries[1].read_at = time.monotonic() + 1000  # read an hour later
    server.api._samples_seen.append((entries[1].read_at, entries[1]))
    monkeypatch.setattr(routes, "RETENTION_SECONDS", 0.0)
    assert server.wait(forget()) == [1]


def test_a_finished_session_leaves_memory_and_comes_back(server, alone):
    client = Client(server)
    losses = [client.step(DATA)]
    pending = Client(server)
    server.result(pending.forward_backward(DATA))
    for finished in (client, pending):
        server.ask(f"sessions/{finished.session}/finish", {"reason": {"type": "done"}})
    operations = {name: queue.operations for name, queue in server.api.models.items()}
    assert operations[client.model_id].model is None
    assert operations[pending.model_id].model is not None  # it has gradients
    info = server.ask("get_info", {"model_id": client.model_id})
    assert info["lora_rank"] == 4 and info["model_data"]["model_name"] == "toy"
    assert [*losses, *(client.step(DATA) for _ in range(3))] == alone["data"]


def test_a_model_whose_snapshot_is_damaged_fails_alone(base, alone, tmp_path):
    first = Server(tmp_path, base)
    client, other = Client(first), Client(first)
    client.step(DATA)
    first.ask(f"sessions/{client.session}/finish", {})
    first.stop()
    for path in (tmp_path / "models").glob("*/snapshot/0/state/**/*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    second = Server(tmp_path, base)
    client.server = other.server = second
    try:
        answer = second.result(client.forward_backward(DATA))
        assert answer["category"] == "server" and "cannot be opened" in answer["error"]
        client.seq_id += 1
        raw = write_request(client.model_id, client.seq_id, DATA)
        status, refusal = second.send("forward_backward", raw)
        assert status == 409 and "cannot be opened" in refusal["error"]["message"]
        status, refusal = second.send("get_info", {"model_id": client.model_id})
        assert status == 409 and "cannot be opened" in refusal["error"]["message"]
        assert other.step(DATA) == alone["data"][0]
    finally:
        second.stop()


@pytest.mark.slow  # compiles the sampler
@pytest.mark.parametrize("seconds, size", [(0.0, 1 << 28), (60.0, 1 << 28), (60.0, 0)])
def test_a_restart_goes_on_where_it_was(base, alone, tmp_path, monkeypatch, seconds, size):
    """Ids, gradients of a step that was not made and samplers survive, with a snapshot after every
    step, without any, and with one before every request that finds no gradients."""
    monkeypatch.setattr(model_queue, "SNAPSHOT_SECONDS", seconds)
    monkeypatch.setattr(model_queue, "SNAPSHOT_BYTES", size)
    first = Server(tmp_path, base)
    client = Client(first)
    assert client.step(DATA) == alone["data"][0]
    promise = client.forward_backward(DATA)
    raw = first.result(promise)
    saved = first.result(client.post("save_weights_for_sampler", sampling_session_seq_id=0))
    params = {"max_tokens": 4, "seed": 1}
    drawn, _ = draw(first, saved["sampling_session_id"], 0, [5, 6], sampling_params=params)
    first.stop()
    snapshots = list((tmp_path / "models").glob("*/snapshot"))
    assert len(snapshots) == (seconds == 0.0 or size == 0)
    log = tmp_path / "models" / client.model_id.replace(":", "_") / "requests.log"
    with open(log, "ab") as file:
        file.write(log.read_bytes()[:50])  # torn by a kill

    second = Server(tmp_path, base)
    client.server = second
    try:
        assert second.result(promise) == raw
        assert "grad_norm" in second.result(client.optim_step())["metrics"]
        assert [client.step(DATA) for _ in range(2)] == alone["data"][2:]
        again, _ = draw(second, saved["sampling_session_id"], 1, [5, 6], sampling_params=params)
        assert np.array_equal(again[0][0], drawn[0][0])
        status, answer = second.send("create_model", {**client.create, "base_model": "x"})
        assert status == 409, json.dumps(answer)
    finally:
        second.stop()


@pytest.mark.slow  # compiles the sampler
def test_adapters_over_a_quantized_base_are_trained_and_sampled(tmp_path):
    quantized = open_base(adapter={"kind": "lora", "quantize": "int8"})
    server = Server(tmp_path, quantized)
    try:
        client = Client(server)
        losses = [client.step(DATA) for _ in range(4)]
        assert losses[-1] < losses[0] - 0.1
        saved = server.result(client.post("save_weights_for_sampler", sampling_session_seq_id=0))
        params = {"max_tokens": 6, "seed": 5}
        ((tokens, logprobs),), _ = draw(
            server, saved["sampling_session_id"], 0, [5, 6, 7], sampling_params=params
        )
        sequence = np.array([5, 6, 7, *tokens])
        data = [(sequence[:-1], {"target_tokens": sequence[1:]})]
        (scored,), _ = read_output(server.result(client.forward_backward(data, forward_only=True)))
        np.testing.assert_allclose(logprobs, scored[2:], atol=2e-5)
        refused = Client(server, rank=0).created
        assert "rank 0 trains all weights" in refused["error"] and "int8" in refused["error"]
        check_shared(server)
    finally:
        server.stop()


def test_a_folder_of_another_base_is_refused(server, base, tmp_path):
    """Shapes are the same; one weight differs in its last place."""
    path = sorted(base.params)[-1]
    changed_base = copy.copy(base)
    weight = base.params[path]
    changed_base.params = {**base.params, path: weight.at[(-1,) * weight.ndim].add(1e-3)}
    (tmp_path / "base.json").write_bytes((server.api.folder / "base.json").read_bytes())
    assert WeightsStore(tmp_path, base).base is base
    with pytest.raises(
        UserError, match=r"its models train on the weights that were in .* are others"
    ):
        WeightsStore(tmp_path, changed_base)
