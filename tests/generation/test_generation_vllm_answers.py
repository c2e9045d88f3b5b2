"""Answers of servers that cannot be used, and what requests ask of them."""

import json
import math

import pytest
from fake_vllm import STOP, FakeVllm
from test_generation_vllm import ANSWER, DRAW, ask, opened

from jaxtrain.config.task import StructuredOutputs
from jaxtrain.config.vllm import find_kwargs_conflicts
from jaxtrain.errors import RunStopped


def choice(**changes):
    full = {
        "token_ids": [100, STOP],
        "finish_reason": "stop",
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.5}]},
        "weight_versions": [{"version": "x", "start": 0, "end": 2}],
    }
    return json.dumps({"choices": [{**full, **changes}]}).encode()


NOTHING = choice(logprobs={"content": [{"logprob": None}] * 2}, weight_versions=None)


@pytest.mark.parametrize(
    "raw, messages",
    [
        (b"<html>nginx</html>", "no JSON"),
        (b'{"choices": []}', "no list of one choice"),
        (b"[1]", "no list of one choice"),
        (choice(token_ids=None), "no list of token ids"),
        (choice(token_ids=["a"]), "no list of token ids"),
        (choice(token_ids=list(range(9))), "9 tokens, 1 to 8"),
        (choice(token_ids=[]), "0 tokens, 1 to 8"),
        (choice(finish_reason="tired"), "finish_reason is 'tired'"),
        (choice(logprobs=None), "0 log-probs for 2 tokens"),
        (choice(logprobs={"content": [{"logprob": -1}, {"logprob": 7.0}]}), "7.0 among them"),
        (choice(logprobs={"content": [{"logprob": -1}, {"logprob": "x"}]}), "'x' among them"),
        (choice(logprobs={"content": [{"token_id": 9, "logprob": -1}] * 2}), "other tokens"),
        (choice(weight_versions=[{"version": "x", "start": 0, "end": 1}]), "do not cover 2"),
        (choice(weight_versions=[{"from": 0}]), "weight_versions"),
        (choice()[:-9], "no JSON"),
    ],
)
def test_one_bad_answer_is_asked_again_elsewhere_and_counted(raw, messages):
    fakes = [FakeVllm(), FakeVllm()]
    for fake in fakes:
        fake.script += ["ok"] * 2 if fake is fakes[1] else [raw]
    with opened(fakes) as (engine, servers, output):
        answers = ask(engine, 2)
        assert [answer.tokens for answer in answers] == [ANSWER] * 2
        assert servers.counters["bad_answers"] == servers.counters["retries"] == 1
    assert [fake.answered for fake in fakes] == [0, 2]
    (line,) = [line for line in output if "bad answer" in line]
    assert messages in line and fakes[0].url in line


@pytest.mark.parametrize("raw", [b"<html>nginx</html>", NOTHING])
def test_many_bad_answers_end_the_run(raw, monkeypatch):
    monkeypatch.setattr("jaxtrain.generation.vllm.pool.MAX_BAD", 6)
    fake = FakeVllm()
    fake.script += [raw] * 20
    with opened([fake]) as (engine, *_), pytest.raises(RunStopped) as error:
        ask(engine, 4)
    words = ("6 of the last 6 answers", fake.url, "Is it a vLLM server")
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
    ("outputs", "sent"),
    [
        ({"regex": "a|b"}, {"regex": "a|b"}),
        ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"json_schema": {"type": "object"}}, {"json": {"type": "object"}}),
        ({}, None),
    ],
)
def test_what_answers_must_match_and_further_parameters_are_sent(outputs, sent):
    fake = FakeVllm()
    kwargs = {"min_tokens": 2, "bad_words": ["x"]}
    sampling = DRAW.model_copy(update={"structured_outputs": StructuredOutputs(**outputs)})
    with opened([fake], generation_kwargs=kwargs) as (engine, *_):
        ask(engine, sampling=sampling)
    (params,) = [body["sampling_params"] for body in fake.asked]
    assert params.get("structured_outputs") == sent
    assert params["min_tokens"] == 2 and params["bad_words"] == ["x"]
    assert params["repetition_penalty"] == 1.0 and params["temperature"] == 1.0


def test_parameters_that_the_run_sets_are_refused_by_name():
    kwargs = {"temperature": 0.5, "n": 2, "guided_regex": "a", "repetition_penalty": 1.1, "x": 1}
    conflicts = list(find_kwargs_conflicts(kwargs))
    assert len(conflicts) == 4
    for name, told in [
        ("temperature", "sampling.temperature"), ("n", "rollout.group_size"),
        ("guided_regex", "sampling.structured_outputs.regex"), ("repetition_penalty", "remove it"),
    ]:  # fmt: skip
        assert any(f"generation_kwargs.{name} is" in c and told in c for c in conflicts), name


@pytest.mark.parametrize("missing", [None, float("nan"), -9999.0])
def test_a_log_prob_that_is_no_number_costs_its_token_alone(missing):
    fake = FakeVllm()
    logprobs = {"content": [{"logprob": -1.0}, {"logprob": missing}]}
    nothing = {"content": [{"logprob": missing}] * 2}
    fake.script += [choice(logprobs=x, weight_versions=None) for x in (nothing, logprobs)]
    with opened([fake]) as (engine, servers, _):
        (answer,) = ask(engine)
        assert answer.logprobs[0] == -1.0 and math.isnan(answer.logprobs[1])
        assert servers.counters["tokens_without_logprob"] == 3 and servers.counters["retries"] == 1
        assert servers.counters["bad_answers"] == 2


def test_a_missing_log_prob_is_asked_for_elsewhere_first():
    fakes = [FakeVllm(), FakeVllm()]
    fakes[0].script.append(choice(logprobs={"content": [{"logprob": -1.0}, {"logprob": None}]}))
    with opened(fakes) as (engine, servers, _):
        answers = ask(engine, 2)
        assert not any(math.isnan(x) for answer in answers for x in answer.logprobs)
        assert servers.counters["bad_answers"] == 1
