"""Adapters by name beside their base: the answers of each are those of its folder alone."""

import dataclasses
import http.client
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from serving_toy import serving
from toy_run import save_model

from jaxtrain.adapters.peft import write_peft
from jaxtrain.adapters.spec import Adapter, LoRASpec, choose_slots, find_linears
from jaxtrain.api import Model
from jaxtrain.cli.serve import split_layers
from jaxtrain.core.weights import abstract_params
from jaxtrain.generation.local.adapter_slots import AdapterSlots
from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.generation.serving.adapters import AdapterLoader, AdapterRoutes

COMPLETE = "/v1/completions"
ASK = {
    "prompt": [5, 6, 7],
    "max_tokens": 12,
    "logprobs": 0,
    "return_token_ids": True,
}
GREEDY = {**ASK, "temperature": 0}
CLIENTS = 200


def write_adapter(folder, base, rank, seed, full=()):
    bundle = base.snapshot.roles.bundle
    slots = choose_slots(
        find_linears(bundle.architecture), ["all-linear"], LoRASpec(rank, 2.0 * rank), {}, {}
    )
    adapter, rng = Adapter(slots, full), np.random.default_rng(seed)
    shapes = abstract_params(dataclasses.replace(bundle, adapter=adapter))[0]
    values = {
        path: 0.3 * rng.standard_normal(shape.shape).astype(np.float32)
        for path, shape in sorted(shapes.items())
        if adapter.trains(path)
    }
    write_peft(values, bundle.architecture, adapter, folder, base.name)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A base and adapters of it: "one", "like" it with other numbers, and "table" of another rank
    and with a head of its own."""
    root = tmp_path_factory.mktemp("adapters")
    save_model(root / "base")
    base = Model(root / "base")
    write_adapter(root / "one", base, 4, 0)
    write_adapter(root / "like", base, 4, 1)
    write_adapter(root / "table", base, 2, 2, ("lm_head.embedding",))
    return root, base


def answer_alone(folder, sampling):
    (completion,) = Model(folder).generate([np.array(ASK["prompt"])], **sampling)
    return completion.tokens, completion.logprobs


def read(answer):
    (choice,) = answer["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@pytest.mark.slow  # compiles a sampler for every kind of adapters
def test_answers_by_name_are_those_of_the_folder_alone(folders):
    root, base = folders
    names = ("one", "like", "table")
    sampling = {"max_new_tokens": 12, "temperature": 0.0}
    alone = {name: answer_alone(root / name, sampling) for name in ("base", *names)}
    assert len({tuple(tokens) for tokens, _ in alone.values()}) == 4

    with ThreadPoolExecutor(1) as thread:
        sampler = base.sampler(True)
        sampler.use(split_layers(base, sampler.model), 0)
        engine, opened = LocalEngine(sampler, thread), []

        def open_engine(model):
            sampler = base.sampler(True, prefixes=2)
            sampler.use(model, 0)
            return LocalEngine(sampler, thread)

        def extend(answerer):
            bundle, params = base.snapshot.roles.bundle, base.snapshot.params()
            loader = AdapterLoader(bundle, params, engine, AdapterSlots(sampler, 4), open_engine)
            opened.append(loader)
            return AdapterRoutes(answerer, loader, thread, 3).routes()

        with serving(base.tokenizer, engine, extend=extend) as served:
            for name in names:
                body = {"lora_name": name, "lora_path": str(root / name)}
                status, raw = served.send("POST", "/v1/load_lora_adapter", body)
                assert (status, raw) == (
                    200,
                    f"Success: LoRA adapter '{name}' added successfully.".encode(),
                )
            listed = served.send("GET", "/v1/models")[1]
            for name in names:
                entry = f'"id": "{name}", "object": "model"'.encode()
                assert entry in listed and f'"root": "{root / name}"'.encode() in listed
            assert listed.count(b'"parent": "toy"') == 3
            answers, (loader,) = {}, opened
            assert len(loader.slots._free) == 2, "a table has no slot"

            def ask(name):
                model = "toy" if name == "base" else name
                status, answer = served.post(COMPLETE, model=model, temperature=0, **ASK)
                assert status == 200 and answer["model"] == model, answer
                answers[name] = read(answer)

            threads = [threading.Thread(target=ask, args=(name,)) for name in alone]
            for asking in threads:
                asking.start()
            for asking in threads:
                asking.join(300)
            for name, (tokens, logprobs) in alone.items():
                assert answers[name][0] == tokens, name
                np.testing.assert_allclose(answers[name][1], logprobs, atol=1e-5, err_msg=name)
            check_likely(served)
            check_hang_ups(served, answers)
            check_loading(served, root, answers)


def check_likely(served):
    """The most probable tokens are those of the adapter that has drawn the answer."""
    asked = {**GREEDY, "model": "one", "logprobs": 2}
    (choice,) = served.post(COMPLETE, **asked)[1]["choices"]
    logprobs = choice["logprobs"]
    best = [max(top.values()) for top in logprobs["top_logprobs"]]
    np.testing.assert_allclose(best, logprobs["token_logprobs"], atol=1e-4)


def check_hang_ups(served, answers):
    """200 clients ask the base and three adapters; a third of them hang up and read nothing."""
    models, read_back, lock = list(answers), [], threading.Lock()

    def ask(number):
        name = models[number % len(models)]
        model = "toy" if name == "base" else name
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=120)
        try:
            connection.request("POST", COMPLETE, json.dumps({"model": model, **GREEDY}))
            if number % 3 == 0:
                return
            status, answer = (reply := connection.getresponse()).status, json.load(reply)
            assert status == 200 and answer["model"] == model, answer
            with lock:
                read_back.append((number, name, read(answer)[0]))
        finally:
            connection.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for asking in threads:
        asking.start()
    for asking in threads:
        asking.join(120)
    assert sorted(number for number, *_ in read_back) == [n for n in range(CLIENTS) if n % 3]
    for number, name, tokens in read_back:
        assert tokens == answers[name][0], (number, name)


def count_prefix_tokens(served):
    lines = served.send("GET", "/metrics")[1].decode().splitlines()
    return int(dict(line.split() for line in lines)["vllm:prefix_cache_queries_total"])


def check_loading(served, root, answers):
    def change(route, **body):
        status, raw = served.send("POST", f"/v1/{route}_lora_adapter", body)
        return status, raw.decode()

    request = {"lora_name": "one", "lora_path": str(root / "like")}
    assert change("load", **request)[0] == 400
    status, text = change("load", lora_name="more", lora_path=str(root / "one"))
    assert status == 400 and "3 adapters are loaded already" in text
    assert change("load", load_inplace=True, **request)[0] == 200
    tokens, logprobs = read(served.post(COMPLETE, model="one", temperature=0, **ASK)[1])
    assert tokens == answers["like"][0]
    np.testing.assert_allclose(logprobs, answers["like"][1], atol=1e-5)
    counted = count_prefix_tokens(served)
    assert counted > 0
    assert change("unload", lora_name="one")[0] == 200
    assert count_prefix_tokens(served) == counted
    status, text = change("unload", lora_name="one")
    assert status == 404 and "is not loaded" in text
    assert change("unload", lora_name="toy")[0] == 404
    assert served.post(COMPLETE, model="one", **ASK)[0] == 404
    for path, cause in (
        (root / "base", "adapter_config.json"),
        (root / "none", "adapter_config.json"),
    ):
        status, text = change("load", lora_name="one", lora_path=str(path))
        assert status == 400 and cause in text, text
    for body in ({}, {"lora_name": "x"}, {"lora_name": 1, "lora_path": "x"}):
        assert change("load", **body)[0] == 400
