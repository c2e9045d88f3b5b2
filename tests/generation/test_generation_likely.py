"""The most probable tokens of each place, against the softmax of a plain forward pass, through each
of the endpoints that list them."""

import asyncio
import json

import numpy as np
import pytest
from aiohttp import ClientSession
from fake_vllm import FakeVllm
from serving_toy import serving
from test_generation_constraints import PATTERN, SIZES, V
from test_generation_local import log_softmax, next_logits
from test_generation_vllm import opened

from jaxtrain.config import SamplingConfig
from jaxtrain.config.task import StructuredOutputs
from jaxtrain.environments.policy_server import PolicyServer
from jaxtrain.generation.episode_engine import EpisodeEngine
from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.generation.local.sampler import LocalSampler
from jaxtrain.models import build, families

TOP, TEMPERATURE = 4, 0.7
ASK = [{"role": "user", "content": "2 + 2?"}]
SAMPLING = SamplingConfig(temperature=TEMPERATURE, max_new_tokens=6, seed=1)


@pytest.fixture(scope="module")
def sampler(tokenizer):
    model = build.init(families.config_from_hf(SIZES | {"max_position_embeddings": 128}), 0)
    return LocalSampler(model, (), max_len=128, tokenizer=tokenizer)


def expect(sampler, prompt, answer, temperature=TEMPERATURE, allowed=None, count=TOP):
    """Return (ids, log-probs) [n, count] of the most probable tokens; those that are not allowed
    have -inf."""
    row = np.zeros((1, 128), np.int32)
    row[0, : len(prompt) + len(answer)] = [*prompt, *answer]
    logits = np.asarray(next_logits(sampler.model, row))[0].astype(np.float64) / temperature
    logits = logits[len(prompt) - 1 : len(prompt) + len(answer) - 1]
    ids = np.argsort(-logits, axis=-1)[:, :count]
    if allowed is not None:
        logits = np.where(allowed, logits, -np.inf)
    return ids, np.take_along_axis(log_softmax(logits), ids, axis=-1)


def check(content, ids, logprobs, name="token_id:{}".format):
    assert len(content) == len(ids)
    for entry, best, values in zip(content, ids, logprobs, strict=True):
        assert [top["token"] for top in entry["top_logprobs"]] == [name(i) for i in best.tolist()]
        # float32 through another program than the drawn token's.
        reported = [top["logprob"] for top in entry["top_logprobs"]]
        np.testing.assert_allclose(reported, values, atol=1e-4)


async def ask_policy(tokenizer, engine, path, body):
    """Return the answer of the policy endpoint, and the log of fields that change nothing."""
    lines = []
    server = PolicyServer(tokenizer, max_model_len=128, log=lines.append)
    server.open()
    try:
        record = server.begin(EpisodeEngine(engine), SAMPLING, 0)
        headers = {"Authorization": f"Bearer {server.token}", "X-Session-ID": record.id}
        url = f"http://{server.host}:{server.port}{path}"
        async with (
            ClientSession(headers=headers) as session,
            session.post(url, json=body) as response,
        ):
            answer = await response.json()
            assert response.status == 200, answer
            return answer, lines
    finally:
        server.close()
        await engine.close()


@pytest.mark.slow
def test_the_policy_endpoint_lists_likely_tokens(tokenizer, sampler):
    body = {"messages": ASK, "logprobs": True, "top_logprobs": TOP, "return_token_ids": True}
    work = ask_policy(tokenizer, LocalEngine(sampler), "/v1/chat/completions", body)
    answer, lines = asyncio.run(work)
    (choice,) = answer["choices"]
    prompt, tokens = answer["prompt_token_ids"], choice["token_ids"]
    assert len(tokens) == 6 and not any("top_logprobs" in line for line in lines)
    check(choice["logprobs"]["content"], *expect(sampler, prompt, tokens))


@pytest.mark.parametrize("count", [1, TOP])
def test_the_token_route_lists_them_from_two_on(tokenizer, sampler, count):
    body = {"token_ids": [5, 9, 11], "sampling_params": {"logprobs": count}}
    work = ask_policy(tokenizer, LocalEngine(sampler), "/inference/v1/generate", body)
    (choice,) = asyncio.run(work)[0]["choices"]
    listed = [entry["top_logprobs"] for entry in choice["logprobs"]["content"]]
    if count == 1:
        assert listed == [[]] * 6
        return
    ids, logprobs = expect(sampler, [5, 9, 11], choice["token_ids"])
    assert [[top["token_id"] for top in place] for place in listed] == ids.tolist()
    values = [[top["logprob"] for top in place] for place in listed]
    np.testing.assert_allclose(values, logprobs, atol=1e-4)
    assert [top["rank"] for top in listed[0]] == [1, 2, 3, 4]


@pytest.mark.slow
def test_under_a_constraint_they_are_the_allowed_ones(tokenizer, sampler):
    sampling = SAMPLING.model_copy(
        update={"structured_outputs": StructuredOutputs(regex=PATTERN), "max_new_tokens": 4}
    )

    async def draw():
        engine = LocalEngine(sampler)
        ends = [tokenizer.eos_token_id]
        try:
            return await engine.generate([5, 9, 11], sampling, ends, 3, likely=20)
        finally:
            await engine.close()

    answer = asyncio.run(draw())
    request = sampler.request([5, 9, 11], sampling, [tokenizer.eos_token_id])
    allowed = []
    for token in answer.tokens:
        bits = request.constraint.allowed
        allowed.append([bool(bits[i // 32] >> (i % 32) & 1) for i in range(V)])
        request.constraint.accept(token)
    ids, logprobs = expect(sampler, [5, 9, 11], answer.tokens, allowed=np.array(allowed), count=20)
    assert len(answer.likely) == len(answer.tokens) == 4
    for place, best, values in zip(answer.likely, ids, logprobs, strict=True):
        # Those of the 20 most probable that are allowed.
        fits = np.isfinite(values)
        assert [token for token, _ in place] == best[fits].tolist()
        np.testing.assert_allclose([logp for _, logp in place], values[fits], atol=1e-4)
    assert any(answer.likely)


def test_served_answers_and_echoed_prompts_list_them(tokenizer, sampler):
    text, common = "2 + 2 =", {"temperature": TEMPERATURE, "max_tokens": 5, "seed": 2}
    with serving(tokenizer, LocalEngine(sampler)) as served:
        body = {**common, "messages": ASK, "logprobs": True, "top_logprobs": TOP}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        _, chat = served.post("/v1/chat/completions", **body)
        body = {**common, "prompt": text, "logprobs": TOP, "echo": True, "return_token_ids": True}
        body |= {"return_tokens_as_token_ids": True}
        _, completion = served.post("/v1/completions", **body)
    (choice,) = chat["choices"]
    tokens = choice["token_ids"]
    check(choice["logprobs"]["content"], *expect(sampler, choice["prompt_token_ids"], tokens))
    (choice,) = completion["choices"]
    prompt, log = choice["prompt_token_ids"], choice["logprobs"]
    answer = choice["token_ids"][len(prompt) :]
    assert len(answer) == 5 and log["token_logprobs"][0] is None and log["top_logprobs"][0] is None
    # The text's own are at temperature 1, and the token itself is among them.
    for start, place, temperature in (
        (1, prompt[1:], 1.0),
        (len(prompt), answer, TEMPERATURE),
    ):
        ids, logprobs = expect(sampler, choice["token_ids"][:start], place, temperature)
        listed = log["top_logprobs"][start : start + len(place)]
        for top, token, best, values in zip(listed, place, ids.tolist(), logprobs, strict=True):
            assert set(top) == {f"token_id:{i}" for i in (*best, token)}
            reported = [top[f"token_id:{i}"] for i in best]
            np.testing.assert_allclose(reported, values, atol=1e-4)


@pytest.mark.parametrize("scale_out", [True, False])
def test_those_of_vllm_are_passed_on(tokenizer, scale_out):
    fake = FakeVllm(scale_out=scale_out)
    body = {"messages": ASK, "logprobs": True, "top_logprobs": 2}
    with opened([fake]) as (engine, *_):
        work = ask_policy(tokenizer, engine, "/v1/chat/completions", body)
        (choice,) = asyncio.run(work)[0]["choices"]
    (asked,) = fake.asked
    assert asked.get("sampling_params", asked)["logprobs"] == 2
    for entry in choice["logprobs"]["content"]:
        best = [(top["token"], top["logprob"]) for top in entry["top_logprobs"]]
        assert best == [(entry["token"], -0.5), ("token_id:7", -1.5)]


@pytest.mark.parametrize(
    "content",
    [
        [{"logprob": -0.5, "top_logprobs": [{"token": "Paris", "logprob": -1.0}]}],
        [{"logprob": -0.5, "top_logprobs": [{"token_id": 3}]}],
        [{"logprob": -0.5, "top_logprobs": 3}],
        [{"logprob": -0.5, "top_logprobs": [{"token_id": 3, "logprob": "x"}]}],
    ],
)
def test_likely_tokens_that_are_none_are_a_bad_answer(content):
    fake = FakeVllm()
    choice = {"token_ids": [100], "finish_reason": "length", "logprobs": {"content": content}}
    fake.script += [json.dumps({"choices": [choice]}).encode()]
    with opened([fake]) as (engine, servers, output):

        async def draw():
            try:
                return await engine.generate([5], SAMPLING, (), 0, likely=2)
            finally:
                await engine.close()

        answer = asyncio.run(draw())
    assert len(answer.likely) == len(answer.tokens) and servers.counters["bad_answers"] == 1
    assert any("likely tokens" in line for line in output)
