"""SGLang's servers by their documented protocol: requests, answers, weights from disk."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from fake_sglang import STOP, FakeSglang
from fake_vllm import FakeVllm
from test_generation_drafts import TARGET
from test_generation_vllm import ask

from jaxtrain.config import SamplingConfig, validate_config
from jaxtrain.core.bundle import build_model_bundle
from jaxtrain.core.weights import open_params
from jaxtrain.errors import RunStopped, UserError
from jaxtrain.generation.engines import find_engine
from jaxtrain.generation.sglang.factory import FOLDER
from jaxtrain.generation.vllm.messages import (
    NEVER,
    SGLANG,
    AnswerPart,
    GarbageAnswer,
    build_request,
    parse_answer,
)
from jaxtrain.huggingface.ops import full_index
from jaxtrain.huggingface.safetensors import SafetensorsFolder
from jaxtrain.models import build, families, saving
from jaxtrain.runs.folder import list_names

DRAW = SamplingConfig(temperature=0.7, top_k=5, max_new_tokens=8)


def make_config(tmp_path, fakes, model="model", **changes):
    vllm = {"servers": [fake.url for fake in fakes], "health_seconds": 0.05, "wait_seconds": 3}
    table = {
        "run": {"max_steps": 1, "output_dir": str(tmp_path / "run")},
        "model": {"path": str(tmp_path / model), "tokenizer": "builtin"},
        "data": {"datasets": [{"path": "x"}], "sequence_len": 64},
        "task": {"kind": "rl"},
        "env": {"kind": "calculator"},
        "rollout": {"engine": "sglang", "vllm": {**vllm, **changes.pop("vllm", {})}},
        "sampling": {"temperature": 0.7, "max_new_tokens": 8},
    }
    return validate_config({**table, **changes}, "test")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder with a model, bundle, parameters)."""
    folder = tmp_path_factory.mktemp("sglang")
    config = families.config_from_hf(TARGET)
    saving.save(build.init(config, 0), config, folder / "model")
    bundle = build_model_bundle(make_config(folder, [], vllm={"servers": ["http://x:1"]}))
    return folder, bundle, open_params(bundle, 0)


@pytest.fixture
def opened(trained):
    """(engine, publisher, fakes, log): two servers that hold no version yet."""
    folder, bundle, _ = trained
    fakes, output = [FakeSglang(), FakeSglang()], []
    config = make_config(folder, fakes)
    kind = find_engine(config)
    kind.check(config, bundle)
    engine, publisher = kind.open(config, bundle, output.append)
    yield engine, publisher, fakes, output
    publisher.close()
    for fake in fakes:
        fake.close()


def test_a_request_says_everything_that_changes_the_distribution():
    part = AnswerPart([5, 6], DRAW, (STOP,), max_tokens=4, seed=1, likely=2)
    body = build_request(SGLANG, part, "base")
    assert body == {
        "input_ids": [5, 6],
        "sampling_params": {
            "max_new_tokens": 4,
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": 5,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": [STOP],
            "stop": [],
        },
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 2,
        "stream": False,
    }
    regex = SamplingConfig(structured_outputs={"regex": "a+"})
    part = AnswerPart([5], regex, (), max_tokens=4, seed=1)
    assert build_request(SGLANG, part, "base")["sampling_params"]["regex"] == "a+"
    body = build_request(SGLANG, replace(part, never=(7,)), "base")
    assert body["sampling_params"]["logit_bias"] == {"7": NEVER}


def test_only_a_request_that_was_aborted_may_have_drawn_nothing():
    meta = {"id": "0", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
    answer = parse_answer(SGLANG, json.dumps({"text": "", "meta_info": meta}).encode(), 4)
    assert (answer.tokens, answer.finish_reason) == ([], "abort")
    meta["finish_reason"] = {"type": "stop", "matched": STOP}
    with pytest.raises(GarbageAnswer, match="no output_token_logprobs"):
        parse_answer(SGLANG, json.dumps({"text": "", "meta_info": meta}).encode(), 4)


@pytest.mark.slow
def test_weights_go_through_a_folder_and_answers_have_their_version(trained, opened):
    engine, publisher, fakes, _ = opened
    _, bundle, params = trained
    for version in range(3):
        changed = {path: value + version for path, value in params.items()}
        metrics = publisher.publish(version, changed, None)
        assert metrics["sync/bytes"] > 0
        answers = ask(engine, 4, DRAW)
        assert all(answer.versions == [version] * 4 for answer in answers)
    assert [answer.tokens for answer in answers] == [[102, 103, 104, STOP]] * 4
    assert answers[0].logprobs == [-0.5] * 4 and answers[0].finish_reason == "stop"
    for fake in fakes:
        assert [body["weight_version"] for body in fake.log] == [
            f"jaxtrain-{engine.servers.session}-{version}" for version in range(3)
        ]
        assert all(body["abort_all_requests"] and body["flush_cache"] for body in fake.log)
    newest = SafetensorsFolder(fakes[0].log[-1]["model_path"])
    names = sorted(path.name for path in newest.path.parent.iterdir())
    assert len(names) == 2, "older folders are deleted"
    first = next(entry for entry in families.family(bundle.architecture).names(bundle.architecture))
    for name, shape in first.op.shapes(changed[first.param].shape).items():
        stored = newest.fetch(name, full_index(shape)).astype(np.float32)
        piece = next(p for p in first.op.write(changed[first.param], np.asarray) if p.name == name)
        expected = np.asarray(piece.array.astype(jax.numpy.bfloat16)).astype(np.float32)
        np.testing.assert_array_equal(stored[piece.index], expected)
    raw = json.loads((newest.path / "config.json").read_text())
    assert raw["architectures"] == [bundle.architecture.architecture]
    assert raw["torch_dtype"] == "bfloat16"


@pytest.mark.slow
def test_an_update_cuts_answers_which_go_on_and_failures_are_asked_again(trained, opened):
    import threading
    import time

    engine, publisher, fakes, output = opened
    params = trained[2]
    publisher.publish(0, params, None)
    for fake in fakes:
        fake.script.append(503)
    assert len(ask(engine, 4, DRAW)) == 4
    for fake in fakes:
        fake.hold_at, fake.length = 1, 8

    def update():
        while sum(fake.held for fake in fakes) < 4:
            time.sleep(0.01)
        publisher.publish(1, params, None)

    thread = threading.Thread(target=update, daemon=True)
    thread.start()
    answers = ask(engine, 4, DRAW)
    thread.join()
    for answer in answers:
        assert answer.tokens == [102, 103, 104, 105, 106, STOP]
        assert answer.versions == sorted(answer.versions) and set(answer.versions) == {0, 1}
    assert engine.counters()["vllm/interrupted"] >= 4

    # A server that cannot read the folder is left out; the other one answers.
    fakes[0].success = False
    publisher.publish(2, params, None)
    assert any("did not read" in line and "no folder" in line for line in output), output
    assert ask(engine, 2, DRAW)[0].versions == [2] * 6


@pytest.mark.slow
def test_tensors_are_sent_to_every_rank(trained, monkeypatch):
    """Read by torch under the rules of SGLang's unpickler, they are those of the written folder."""
    folder, bundle, params = trained
    fake = FakeSglang()
    fake.ranks = 2
    monkeypatch.setattr("jaxtrain.generation.sglang.tensors.MOST_BYTES", 2**14)
    config = make_config(folder, [fake], vllm={"adapter_transport": "http"})
    engine, publisher = find_engine(config).open(config, bundle, lambda text: None)
    try:
        publisher.publish(0, params, None)
        assert ask(engine, 1, DRAW)[0].versions == [0] * 4
        assert len(fake.log) > 2 and all(body["abort_all_requests"] for body in fake.log)
        name = f"jaxtrain-{engine.servers.session}-0"
        versions = [body.get("weight_version") for body in fake.log]
        assert versions == [None] * (len(versions) - 1) + [name]
        assert [body["flush_cache"] for body in fake.log] == [v is not None for v in versions]
        written = SafetensorsFolder(folder / "run" / FOLDER / name)
        assert [key for key, _ in fake.tensors] == list(written.tensors)
        for key, tensor in fake.tensors:
            stored = written.tensors[key]
            expected = written.fetch(key, full_index(stored.shape))
            assert str(tensor.dtype) == f"torch.{expected.dtype.name}"
            np.testing.assert_array_equal(tensor.float().numpy(), expected.astype(np.float32))
        fake.success = False
        with pytest.raises(RunStopped, match="did not take the tensors: no folder; it must serve"):
            publisher.publish(1, params, None)
        assert fake.version == name
    finally:
        publisher.close()
        fake.close()


def test_what_cannot_be_is_refused(tmp_path, trained):
    fake = FakeVllm()
    try:
        config = make_config(trained[0], [fake])
        with pytest.raises(UserError, match="is this an SGLang server"):
            find_engine(config).open(config, trained[1], lambda text: None)
    finally:
        fake.kill()
    for vllm, output in [
        ({"servers": []}, "rollout.engine sglang needs rollout.vllm.servers"),
        ({"sync": "delta"}, "rollout.vllm.sync is for vLLM's servers"),
        ({"discover": "router+http://a:1"}, "reads file:///PATH and dns://NAME:PORT"),
        ({"servers": ["a:1"]}, "rollout.vllm.servers 'a:1' is no URL"),
        ({"generation_kwargs": {"temperature": 0.5}}, "is set by sampling.temperature"),
        ({"generation_kwargs": {"regex": "a"}}, "is set by sampling.structured_outputs.regex"),
    ]:
        with pytest.raises(UserError, match=output):
            make_config(tmp_path, [], vllm={"servers": ["http://a:1"], **vllm})
    choice = {"max_new_tokens": 4, "temperature": 1.0, "structured_outputs": {"choice": ["a"]}}
    with pytest.raises(UserError, match="sampling.structured_outputs.choice: SGLang takes"):
        make_config(tmp_path, [], vllm={"servers": ["http://a:1"]}, sampling=choice)
    rollout = {"engine": "sglang", "devices": 1, "vllm": {"servers": ["http://a:1"]}}
    with pytest.raises(UserError, match="rollout.devices is for the local engine"):
        make_config(tmp_path, [], rollout=rollout)


def test_the_run_folder_names_what_the_engine_writes(tmp_path):
    assert {"servers.json", FOLDER} <= {
        *list_names(make_config(tmp_path, [], vllm={"servers": ["http://a:1"]}))
    }
