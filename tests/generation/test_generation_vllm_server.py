"""A real vLLM server on CPU: after every kind of sync it computes what we compute.

JAXTRAIN_VLLM_PYTHON names the Python of an environment with vLLM. A server is up after half a
minute, so all of this is slow.
"""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from real_vllm import (
    CLOSE,
    PYTHON,
    RealServer,
    ask,
    cast,
    change,
    descendants,
    make_config,
    make_model,
    prompts,
    read,
    score,
    worst,
    write_run,
)

from jaxtrain.core.bundle import build_model_bundle
from jaxtrain.core.weights import abstract_params, open_params
from jaxtrain.generation.vllm.factory import open_vllm
from jaxtrain.main import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(
        not Path(PYTHON or "/nowhere").is_file(),
        reason="JAXTRAIN_VLLM_PYTHON does not name the Python of an environment with vLLM",
    ),
]


@pytest.fixture(scope="module", params=["weights-tied", "lora-untied"])
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    kind, tied = request.param.split("-")
    model = make_model(folder / "model", seed=0, tied=tied == "tied")
    real_server = RealServer(model, "lora" if kind == "lora" else "delta", folder / "server.log")
    yield real_server
    real_server.kill(signal.SIGTERM)


@pytest.fixture(scope="module")
def weights_server(server):
    if server.sync == "lora":
        pytest.skip("this server takes adapters")
    return server


@pytest.fixture(scope="module")
def lora_server(server):
    if server.sync != "lora":
        pytest.skip("this server takes whole weights")
    return server


@pytest.mark.parametrize("sync, dtype", [("full", "float32"), ("delta", "bfloat16")])
def test_served_weights_are_the_trainers(weights_server, tmp_path, sync, dtype):
    """The second case is also a second trainer on a server that knew another."""
    config = make_config(weights_server, tmp_path, sync, weight_dtype=dtype)
    parts = build_model_bundle(config)
    rebuild = abstract_params(parts)[1]
    params = open_params(parts, 0)
    engine, publisher = open_vllm(config, parts)
    try:
        for version in range(3):
            metrics = publisher.publish(version, params, None)
            assert metrics["sync/delta"] == (sync == "delta" and version > 0)
            actual = worst(engine, rebuild, cast(params, dtype), config, version)
            print(f"{sync} {dtype} version {version}: {actual:.1e}, {metrics}")
            assert actual < CLOSE
            params = change(params, 0.02, version)
        before = worst(engine, rebuild, cast(params, dtype), config, 2)
        assert before > 10 * CLOSE, "the test would not notice missing updates"
    finally:
        publisher.close()


def test_an_answer_that_spans_an_update_is_of_both_weights(weights_server, tmp_path):
    """Each part of it has the log-probs of its own version, over the whole prefix."""
    config = make_config(weights_server, tmp_path, "delta", weight_dtype="float32")
    sampling = config.sampling.model_copy(update={"max_new_tokens": 450})
    parts = build_model_bundle(config)
    rebuild = abstract_params(parts)[1]
    first = open_params(parts, 0)
    second = change(first, 0.02, 7)
    engine, publisher = open_vllm(config, parts)
    try:
        publisher.publish(0, first, None)

        def update():
            while not engine.servers.all[0].in_flight:
                time.sleep(0.01)
            time.sleep(0.4)
            publisher.publish(1, second, None)

        late = threading.Thread(target=update)
        late.start()
        answers = ask(engine, prompts(8), sampling)
        late.join()
    finally:
        publisher.close()
    mixed = [(p, a) for p, a in zip(prompts(8), answers, strict=True) if len(set(a.versions)) == 2]
    assert mixed, [set(answer.versions) for answer in answers]
    for prompt, answer in mixed[:2]:
        versions = np.array(answer.versions)
        assert (np.diff(versions) >= 0).all()
        for version, params in enumerate((first, second)):
            actual_values = score(rebuild(cast(params, "float32")), prompt, answer.tokens)
            off = np.abs(actual_values - answer.logprobs)
            assert off[versions == version].max() < CLOSE
            assert off[versions != version].max() > 10 * CLOSE


def test_temperature_stop_texts_and_stop_tokens(weights_server, tmp_path):
    config = make_config(weights_server, tmp_path, "full", weight_dtype="float32")
    parts = build_model_bundle(config)
    params = open_params(parts, 0)
    model = abstract_params(parts)[1](params)
    warm = config.sampling.model_copy(update={"temperature": 1.7})
    greedy = config.sampling.model_copy(update={"temperature": 0.0})
    engine, publisher = open_vllm(config, parts)
    try:
        publisher.publish(0, params, None)
        [answer] = ask(engine, prompts(1), warm)
        actual_values = score(model, prompts(1)[0], answer.tokens, 1.7)
        assert np.abs(actual_values - answer.logprobs).max() < CLOSE
        again = ask(engine, prompts(1), warm)[0]
        assert again == answer, "the same seed, index and weights give the same answer"
        [plain] = ask(engine, prompts(1), greedy)
        stop = plain.tokens[5]
        [cut] = ask(engine, prompts(1), greedy, [stop])
        first = plain.tokens.index(stop)
        assert (cut.tokens, cut.finish_reason) == (plain.tokens[: first + 1], "stop")
        tokenizer = parts.tokenizer
        letter = next(
            text for text in map(tokenizer.decode, plain.tokens[3:])
            if len(text) == 1 and text.isascii() and text.isprintable()
        )  # fmt: skip
        texted = greedy.model_copy(update={"stop": [letter]})
        [actual] = ask(engine, prompts(1), texted)
        assert actual.finish_reason == "stop" and letter in tokenizer.decode(actual.tokens)
        assert letter not in tokenizer.decode(actual.tokens[:-1])
    finally:
        publisher.close()


def test_a_server_that_slept_takes_weights_and_answers(weights_server, tmp_path):
    config = make_config(weights_server, tmp_path, "full", weight_dtype="float32", sleep=True)
    parts = build_model_bundle(config)
    params = open_params(parts, 0)
    engine, publisher = open_vllm(config, parts)
    try:
        publisher.publish(0, params, None)
        publisher.sleep()
        params = change(params, 0.02, 3)
        publisher.publish(1, params, None)
        rebuild = abstract_params(parts)[1]
        assert worst(engine, rebuild, cast(params, "float32"), config, 1) < CLOSE
    finally:
        publisher.close()


def test_another_model_is_refused_before_anything_is_sent(weights_server, tmp_path):
    model = make_model(tmp_path / "untied", seed=0, tied=False)
    config = make_config(weights_server, tmp_path, "full", model=model)
    parts = build_model_bundle(config)
    _, publisher = open_vllm(config, parts)
    try:
        with pytest.raises(ValueError, match="missing there: lm_head.weight"):
            publisher.publish(0, open_params(parts, 0), None)
    finally:
        publisher.close()


def test_served_adapters_are_the_trainers(lora_server, tmp_path):
    config = make_config(lora_server, tmp_path, "lora")
    parts = build_model_bundle(config)
    rebuild = abstract_params(parts)[1]
    params = open_params(parts, 0)
    engine, publisher = open_vllm(config, parts)
    try:
        for version in range(4):
            metrics = publisher.publish(version, params, None)
            actual = worst(engine, rebuild, params, config, version)
            print(f"lora version {version}: {actual:.1e}, {metrics}")
            assert actual < CLOSE
            rng = np.random.default_rng(version)
            params = {
                name: array + 0.1 * rng.normal(size=array.shape).astype(np.float32)
                if ".adapter." in name
                else array
                for name, array in params.items()
            }
        assert len(list((tmp_path / "adapters").iterdir())) == 2
        assert worst(engine, rebuild, params, config, 3) > 10 * CLOSE
    finally:
        publisher.close()


def test_the_eval_verb_brings_its_weights_to_the_server(weights_server, tmp_path):
    """Greedy answers of a model that the server never had are those of the local engine."""
    second = make_model(tmp_path / "other", seed=5, tied=True)
    answers = {}
    for name, engine, model in (
        ("served", "vllm", second),
        ("local", "local", second),
        ("first", "vllm", None),
    ):
        (tmp_path / name).mkdir()
        config = write_run(weights_server, tmp_path / name, engine, model)
        assert main(["eval", "--config", str(config)]) == 0
        folder = tmp_path / name / "run" / "eval"
        answers[name] = [line["completion"] for line in read(folder / "samples.jsonl")]
        (line,) = read(folder / "metrics.jsonl")
        print(name, {key: value for key, value in line.items() if key.startswith("eval/")})
        assert len(answers[name]) == 12 and "eval/calculator/failed" not in line
    assert answers["served"] == answers["local"] != answers["first"]


def test_a_streamed_asynchronous_run(weights_server, tmp_path):
    """Six rounds of two steps, answers drawn all the time: versions, lag and log-probs hold."""
    assert main(["--config", str(write_run(weights_server, tmp_path))]) == 0
    lines = [line for line in read(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 13))
    rounds = [line for line in lines if "policy_version" in line]
    assert [line["policy_version"] for line in rounds] == list(range(6))
    assert max(line["lag/max"] for line in rounds) in (1, 2) and rounds[0]["lag/max"] == 0
    # The first part of the first round was drawn with the weights that train it.
    gaps = [line["sampling/sampling_logp_difference/max"] for line in lines]
    print("parts", [line["part"] for line in lines], "lags", [x["lag/max"] for x in rounds], gaps)
    print("sync", [(line["sync/seconds"], line["sync/pause_seconds"]) for line in rounds])
    assert gaps[0] < CLOSE < gaps[1]
    assert all(line["ratio/max"] == 1.0 for line in lines)
    trained = sum(line["part/groups"] for line in lines)
    assert trained == sum(line["groups"] for line in rounds)
    for line in rounds[1:]:  # the ratio to what drew them stays near 1: the versions are right
        assert 0.5 < line["sampling/importance_sampling_ratio/mean"] < 2.0
    (evaluation,) = [x for x in read(tmp_path / "run" / "metrics.jsonl") if "loss" not in x]
    assert "eval/calculator/avg@1" in evaluation


def test_a_stopped_engine_is_found_while_health_says_200(weights_server, tmp_path):
    """Its core and worker stand still under requests, then under a sync; the server answers on."""
    server = weights_server
    config = make_config(
        server,
        tmp_path,
        server.sync,
        progress_seconds=3.0,
        sync_seconds=5.0,
        weight_dtype="float32",
    )
    sampling = config.sampling.model_copy(update={"max_new_tokens": 300})
    parts = build_model_bundle(config)
    rebuild = abstract_params(parts)[1]
    params = [open_params(parts, 0)]
    params.append(change(params[0], 0.02, 13))
    output = []
    engine, publisher = open_vllm(config, parts, output.append)

    def stop_for(seconds):
        def signal_all(sign):
            for pid in descendants(server.process.pid):
                os.kill(pid, sign)

        signal_all(signal.SIGSTOP)
        threading.Timer(seconds, signal_all, [signal.SIGCONT]).start()

    try:
        publisher.publish(0, params[0], None)
        threading.Timer(0.5, stop_for, [10.0]).start()
        for version in (0, 1):
            if version:
                stop_for(10.0)
                started = time.monotonic()
                publisher.publish(1, params[1], None)
                print("publish", time.monotonic() - started)
            answers = ask(engine, prompts(), sampling)
            for prompt, answer in zip(prompts(), answers, strict=True):
                actual_values = score(rebuild(params[version]), prompt, answer.tokens)
                assert np.abs(actual_values - answer.logprobs).max() < CLOSE
                assert set(answer.versions) == {version}
    finally:
        publisher.close()
        print(*output, sep="\n")
    assert any("hung: no token for" in line for line in output)
    assert any("dropped (weight sync: " in line for line in output)
    assert any("is back with version 0" in line for line in output)


def test_a_killed_server_comes_back_with_the_weights(weights_server, tmp_path):
    """Last, as it costs a restart."""
    server = weights_server
    config = make_config(server, tmp_path, server.sync)
    sampling = config.sampling.model_copy(update={"max_new_tokens": 300})
    parts = build_model_bundle(config)
    rebuild = abstract_params(parts)[1]
    params = change(open_params(parts, 0), 0.02, 11)
    output = []
    engine, publisher = open_vllm(config, parts, output.append)

    def restart():
        time.sleep(0.5)
        server.kill()
        server.start()

    try:
        publisher.publish(0, params, None)
        thread = threading.Thread(target=restart)
        thread.start()
        answers = ask(engine, prompts(), sampling)
        thread.join()
        served = cast(params, "bfloat16")
        for prompt, answer in zip(prompts(), answers, strict=True):
            actual_values = score(rebuild(served), prompt, answer.tokens)
            assert np.abs(actual_values - answer.logprobs).max() < CLOSE
            assert set(answer.versions) == {0}
    finally:
        publisher.close()
    print(output)
    assert any("its requests are asked again; none left" in line for line in output)
    assert any("is back with version 0" in line for line in output)
