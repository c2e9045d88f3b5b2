"""The real `openai` client against `jaxtrain serve`; log-probs are compared with transformers."""

import asyncio
import json

import numpy as np
import pytest
from serving_toy import WatchedScript, serving
from toy_run import save_model

from jaxtrain.api import Model
from jaxtrain.cli.serve import split_layers
from jaxtrain.generation.local.engine import LocalEngine

openai = pytest.importorskip("openai", reason="no openai: pip install 'jaxtrain[test]'")
pytestmark = pytest.mark.slow  # compiles a sampler

ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["four", "five"]}},
    "required": ["answer"],
    "additionalProperties": False,
}
ADD = {
    "type": "function",
    "function": {
        "name": "calculator",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 2"}}\n</tool_call>'


def connect(served, kind=openai.OpenAI, key="none"):
    return kind(base_url=f"http://127.0.0.1:{served.port}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """(client, model of transformers, tokenizer, server) of a tiny model."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("openai") / "tiny"
    save_model(folder)
    model = Model(folder)
    sampler = model.sampler(True, prefixes=1)
    sampler.use(split_layers(model, sampler.model), 0)
    engine = LocalEngine(sampler)
    peer = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    with serving(model.tokenizer, engine, vocab_size=model.vocab_size, max_model_len=128) as served:
        yield connect(served), peer, model.tokenizer, served


def score(peer, tokens):
    """Log-probs [T - 1, V] of the tokens after the first, by transformers."""
    import torch

    with torch.no_grad():
        logits = peer(torch.tensor([tokens])).logits[0, :-1]
    return torch.log_softmax(logits.double(), -1).numpy()


def test_models_are_listed_and_shown(opened):
    client, *_ = opened
    (listed,) = client.models.list().data
    assert listed == client.models.retrieve("toy") and listed.id == "toy"


def test_log_probs_of_a_chat_are_those_of_transformers(opened):
    client, peer, tokenizer, _ = opened
    body = {"model": "toy", "messages": ASK, "max_completion_tokens": 8}
    answer = client.chat.completions.create(
        **body, logprobs=True, top_logprobs=2, n=2, seed=3, extra_body={"return_token_ids": True}
    )
    prompt = tokenizer.apply_chat_template(ASK, add_generation_prompt=True, return_dict=False)
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.choices[0].token_ids != answer.choices[1].token_ids
    for choice in answer.choices:
        ids, places = choice.token_ids, choice.logprobs.content
        expected = score(peer, [*prompt, *ids])[len(prompt) - 1 :]
        assert len(ids) == len(places) == len(expected)
        drawn = [row[token] for row, token in zip(expected, ids, strict=True)]
        np.testing.assert_allclose([place.logprob for place in places], drawn, atol=1e-4)
        for place, row in zip(places, expected, strict=True):
            likely = sorted((top.logprob for top in place.top_logprobs), reverse=True)[:2]
            np.testing.assert_allclose(likely, np.sort(row)[::-1][:2], atol=1e-4)
    again = client.chat.completions.create(**body, n=2, seed=3)
    assert [c.message for c in again.choices] == [c.message for c in answer.choices]


def test_a_completion_echoes_scored_texts_and_ends_before_stop_texts(opened):
    client, peer, tokenizer, _ = opened
    text = "Water boils at 100 degrees"
    ids = tokenizer.encode(text, add_special_tokens=False)
    answer = client.completions.create(
        model="toy", prompt=text, max_tokens=0, echo=True, logprobs=1
    )
    scored = answer.choices[0].logprobs.token_logprobs
    assert answer.choices[0].text == text and scored[0] is None
    expected = [row[token] for row, token in zip(score(peer, ids), ids[1:], strict=True)]
    np.testing.assert_allclose(scored[1:], expected, atol=1e-4)
    body = {"model": "toy", "prompt": [ids, ids[:2]], "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**body).choices
    assert [choice.index for choice in whole] == [0, 1]
    stop = whole[0].text[3:5]
    cut = client.completions.create(**body, stop=[stop]).choices[0]
    assert cut.text == whole[0].text.partition(stop)[0] and cut.finish_reason == "stop"


def test_streams_join_to_the_whole_answer(opened):
    client, _, _, served = opened
    body = {"model": "toy", "messages": ASK, "max_tokens": 12, "seed": 1}
    whole = client.chat.completions.create(**body)
    *pieces, last = client.chat.completions.create(
        **body, stream=True, stream_options={"include_usage": True}
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
    assert text == whole.choices[0].message.content and len(pieces) > 2
    assert last.usage == whole.usage and not last.choices
    with client.chat.completions.stream(**body) as events:
        events.until_done()
        snapshot = events.current_completion_snapshot
    assert snapshot.choices[0].message.content == text
    body = {"model": "toy", "prompt": "Water", "max_tokens": 12, "seed": 1}
    pieces = client.completions.create(**body, stream=True)
    whole = client.completions.create(**body).choices[0].text
    assert "".join(piece.choices[0].text for piece in pieces) == whole

    async def ask(prompt):
        async with connect(served, openai.AsyncOpenAI) as several:
            return (await several.completions.create(**{**body, "prompt": prompt})).choices[0].text

    async def ask_all():
        return await asyncio.gather(*map(ask, ("Water", "Fire", "Water")))

    first, other, third = asyncio.run(ask_all())
    assert first == third == whole and isinstance(other, str)


def test_an_answer_matches_its_schema(opened):
    client, *_ = opened
    pytest.importorskip("llguidance", reason="no llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}
    body = {"model": "toy", "messages": ASK, "max_tokens": 80, "temperature": 0}
    answer = client.chat.completions.create(**body, response_format=form)
    assert json.loads(answer.choices[0].message.content)["answer"] in ("four", "five")
    answer = client.chat.completions.create(
        **body, extra_body={"structured_outputs": {"regex": "(yes|no)"}}
    )
    assert answer.choices[0].message.content in ("yes", "no")


def test_tools_are_called_whole_and_in_streams(tokenizer):
    with serving(
        tokenizer, WatchedScript(tokenizer, "I ask. " + CALL), max_model_len=512
    ) as served:
        client = connect(served)
        body = {"model": "toy", "messages": ASK, "tools": [ADD], "tool_choice": "auto"}
        answer = client.chat.completions.create(**body).choices[0]
        with client.chat.completions.stream(**body) as events:
            streamed = events.get_final_completion().choices[0]
        for choice in (answer, streamed):
            (call,) = choice.message.tool_calls
            assert choice.finish_reason == "tool_calls" and choice.message.content == "I ask. "
            assert call.function.name == "calculator"
            assert json.loads(call.function.arguments) == {"expression": "2 + 2"}
        # What the client sends back is understood.
        result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
        messages = [*ASK, answer.message.model_dump(exclude_none=True), result]
        again = client.chat.completions.create(**{**body, "messages": messages})
        assert again.usage.prompt_tokens > answer_length(client, body)


def answer_length(client, body):
    return client.chat.completions.create(**body).usage.prompt_tokens


@pytest.mark.parametrize(
    "kind, error, param, body",
    [
        ("chat", openai.NotFoundError, "model", {"model": "other"}),
        ("chat", openai.BadRequestError, "messages", {"messages": []}),
        ("chat", openai.BadRequestError, "temperature", {"temperature": -1}),
        ("chat", openai.BadRequestError, "presence_penalty", {"presence_penalty": 1.0}),
        ("chat", openai.BadRequestError, "color", {"extra_body": {"color": 1}}),
        ("completions", openai.BadRequestError, "prompt", {"prompt": "a " * 2000}),
        ("embeddings", openai.NotFoundError, None, {}),
    ],
)
def test_errors_have_the_clients_classes(opened, kind, error, param, body):
    client, *_ = opened
    needed = {"chat": {"messages": ASK}, "completions": {}, "embeddings": {"input": "a"}}[kind]
    create = client.chat.completions.create if kind == "chat" else getattr(client, kind).create
    with pytest.raises(error) as raised:
        create(**{"model": "toy", **needed, **body})
    assert raised.value.param == param and str(raised.value.code) == str(raised.value.status_code)


def test_a_wrong_key_and_a_full_server_have_the_clients_classes(tokenizer):
    engine = WatchedScript(tokenizer, "Four.")
    with serving(tokenizer, engine, key="secret", max_waiting=0) as served:
        with pytest.raises(openai.AuthenticationError):
            connect(served, key="wrong").models.list()
        with pytest.raises(openai.InternalServerError) as raised:
            connect(served, key="secret").completions.create(model="toy", prompt="a")
        assert raised.value.status_code == 503 and raised.value.response.headers["retry-after"]
