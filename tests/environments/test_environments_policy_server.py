"""The policy as an OpenAI-shaped server: whose episode, which tokens, what is refused."""

import asyncio
import json
import re
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from jaxtrain.config import SamplingConfig
from jaxtrain.data.chat.prompt import prompt_tokens
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.sources.calculator import TOOLS
from jaxtrain.environments.chat_request import RequestRefused, limit, read_input, read_message
from jaxtrain.environments.policy_server import PolicyServer
from jaxtrain.environments.scripted import ScriptedEngine
from jaxtrain.environments.tool_calls import find_family, split_calls
from jaxtrain.errors import RunStopped
from jaxtrain.generation.engine import Completion, EpisodeFailed

SAMPLING = SamplingConfig(max_new_tokens=64, temperature=1.0)
ARGUMENTS = '{"name": "calculator", "arguments": {"expression": "2 + 2"}}'
CALL = f"<think>so</think> <tool_call>{ARGUMENTS}</tool_call>"
XML = "<function=a><parameter=b>1</parameter></function>"
LLAMA = '{"name": "a", "parameters": {}}'
ASK = {"role": "user", "content": "What is 2 + 2?"}


@pytest.fixture(scope="module")
def server():
    policy_server = PolicyServer(load_tokenizer("builtin"), max_model_len=400)
    policy_server.open()
    yield policy_server
    policy_server.close()


class Client:
    """An agent: keeps no more than its base URL and the token."""

    def __init__(self, server, session, record):
        self.server, self.session, self.record = server, session, record

    async def post(self, path, body, *, base="", **headers):
        headers = {"Authorization": f"Bearer {self.server.token}"} | headers
        url = f"http://127.0.0.1:{self.server.port}{base}{path}"
        async with self.session.post(url, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def chat(self, messages, **keys):
        body = {"messages": messages, "metadata": {"episode": self.record.id}, **keys}
        status, actual = await self.post("/v1/chat/completions", body)
        assert status == 200, actual
        return actual["choices"][0], actual


@asynccontextmanager
async def agent(server, texts, sampling=SAMPLING, engine=None):
    engine = engine or ScriptedEngine(server.template.tokenizer, texts)
    record = server.begin(engine, sampling, 11)
    async with aiohttp.ClientSession() as session:
        yield Client(server, session, record)
    server.end(record.id)


def test_turns_with_tools_are_one_sequence_of_the_drawn_tokens(server):
    """Also where the agent writes calls and thoughts in other fields and other JSON."""

    async def play():
        async with agent(server, [CALL, "It is 4.", "Bye."]) as entry:
            requests = {
                "logprobs": True,
                "return_token_ids": True,
                "tools": TOOLS,
                "max_tokens": 999,
            }
            choice, actual = await entry.chat([ASK], **requests)
            message = choice["message"]
            (call,) = message["tool_calls"]
            assert (
                choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "calculator"
            )
            assert actual["prompt_token_ids"] == prompt_tokens(
                server.template.tokenizer, [ASK], TOOLS
            )
            entries = choice["logprobs"]["content"]
            assert [e["token"] for e in entries] == [f"token_id:{t}" for t in choice["token_ids"]]
            messages = {"role": "tool", "tool_call_id": call["id"], "content": "4"}
            call["function"]["arguments"] = '{ "expression":"2 + 2" }'
            output = {"role": "assistant", "content": None, "tool_calls": [call]}
            second, actual = await entry.chat(
                [ASK, output | {"reasoning": "so"}, messages], **requests
            )
            first = [*choice["token_ids"]]
            assert actual["prompt_token_ids"][: len(first) + 1][-1] != -1
            return entry.record.finish(), first, second, actual

    episode, first, second, actual = asyncio.run(play())
    assert not episode.earlier and episode.metrics == {"turns": 2, "branches": 1, "tool_calls": 1}
    assert episode.drawn_tokens == [*first, *second["token_ids"]]
    assert episode.tokens == [*actual["prompt_token_ids"], *second["token_ids"]]
    assert episode.versions.count(0) == episode.num_sampled and episode.finish_reason == "stop"
    assert [m["role"] for m in episode.completion] == ["assistant", "tool", "assistant"]
    assert episode.prompt == [ASK]


def test_an_edited_history_begins_a_branch_and_two_agents_interleave(server):
    async def play():
        async with agent(server, ["A.", "B.", "C.", "D.", "E."]) as sequence:
            second = {"role": "user", "content": "Hello!"}
            a, _ = await sequence.chat([ASK])
            b, _ = await sequence.chat([second])
            await sequence.chat([ASK, a["message"], second])  # goes on with a's
            await sequence.chat([second, b["message"], ASK])  # and with b's
            await sequence.chat([ASK, a["message"] | {"content": "a."}, second])  # a turn of nobody
            return sequence.record.finish()

    episode = asyncio.run(play())
    drawn = [[t for t in sequence.turns if t >= 0] for sequence in episode.sequences]
    assert [sorted(set(turns)) for turns in drawn] == [[0, 2], [1, 3], [4]]
    assert sum(map(len, drawn)) == episode.num_sampled and episode.metrics["branches"] == 3


class Speller(ScriptedEngine):
    """Says each letter as a token of its own, as no tokenizer would."""

    async def generate(self, prompt, sampling, stop_ids=(), index=0):
        encode = lambda text: self.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
        tokens = [token for letter in self.texts.pop(0) for token in encode(letter)]
        tokens += stop_ids[:1]
        return Completion(tokens, [-1.0] * len(tokens), "stop", [0] * len(tokens))


@pytest.mark.parametrize(
    ("extra", "output", "branches"), [([], {}, 1), ([7], {}, 2), ([], {"content": "What is"}, 2)]
)
def test_ids_that_an_agent_hands_back_are_checked(server, extra, output, branches):
    """A turn stays as it was drawn; one of the same text and other tokens is none of ours, nor one
    of the same tokens and another text, but for thinking that got lost."""

    async def play():
        engine = Speller(server.template.tokenizer, ["<think>Hm.</think>What is it", "B."])
        async with agent(server, [], engine=engine) as entry:
            a, _ = await entry.chat([ASK], return_token_ids=True)
            ids = {"generation_token_ids": [*a["token_ids"], *extra]}
            await entry.chat([ASK, a["message"] | {"content": "What is it"} | ids | output, ASK])
            return entry.record.finish()

    assert asyncio.run(play()).metrics["branches"] == branches


@pytest.mark.parametrize("opens", [False, True])
def test_thoughts_that_the_template_drops_or_opens(opens):
    """Qwen3's template drops thoughts before the last question: the next turn is drawn behind
    another sequence, in which the answer stands with the very tokens that were drawn."""
    position = Path(__file__).parents[1] / "data" / "qwen3.jinja"
    tokenizer = load_tokenizer("builtin", str(position))
    if opens:
        prompt = "{{- '<|im_start|>assistant\\n' }}\n    {%- if enable_thinking"
        assert prompt in tokenizer.chat_template
        opened = prompt.replace("assistant\\n", "assistant\\n<think>\\n")
        tokenizer.chat_template = tokenizer.chat_template.replace(prompt, opened)
    server = PolicyServer(tokenizer, max_model_len=400)
    server.open()
    thought = "Hm.\n</think>\n\n" if opens else "<think>\nHm.\n</think>\n\n"

    async def play():
        engine = Speller(tokenizer, [f"{thought}It is A.", f"{thought}It is B."])
        async with agent(server, [], engine=engine) as entry:
            first, _ = await entry.chat([ASK])
            assert first["message"]["content"] == "<think>\nHm.\n</think>\n\nIt is A."
            await entry.chat([ASK, first["message"], {"role": "user", "content": "And now?"}])
            return entry.record.finish()

    try:
        episode = asyncio.run(play())
    finally:
        server.close()
    (first,) = episode.earlier
    drawn = [t for t, drawn in zip(first.tokens, first.sampled, strict=True) if drawn]
    assert tokenizer.decode(drawn).startswith(thought) and "Hm" not in tokenizer.decode(
        episode.tokens[: episode.sampled.index(True)]
    )
    letters = [tokenizer(x, add_special_tokens=False)["input_ids"] for x in "It is A."]
    output = [token for ids in letters for token in ids]
    text = ",".join(map(str, episode.tokens))
    assert ",".join(map(str, output)) in text, "the answer as it was drawn, letter by letter"


def test_token_ids_in_and_out(server):
    async def play():
        async with agent(server, ["A.", "B."]) as entry:
            headers, path = {"X-Session-ID": entry.record.id}, "/inference/v1/generate"
            body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 9, "temperature": 1}}
            _, actual = await entry.post(path, body, **headers)
            first = actual["choices"][0]["token_ids"]
            body["token_ids"] = [5, 6, *first, 8]
            _, actual = await entry.post(path, body, **headers)
            status, _ = await entry.post(path, {"token_ids": ["5"]}, **headers)
            return entry.record.finish(), first, actual["choices"][0]["token_ids"], status

    episode, first, second, status = asyncio.run(play())
    assert episode.tokens == [5, 6, *first, 8, *second] and status == 400
    assert episode.sampled == [False] * 2 + [True] * len(first) + [False] + [True] * len(second)


def test_streams_and_paths_for_agents_that_know_only_a_url(server):
    async def play():
        async with agent(server, [CALL]) as entry:
            url = f"{entry.record.base_url}/chat/completions"
            headers = {"Authorization": f"Bearer {server.token}"}
            body = {
                "messages": [ASK],
                "tools": TOOLS,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            async with entry.session.post(url, json=body, headers=headers) as answer:
                lines = (await answer.text()).split("\n\n")
            async with entry.session.get(
                f"{entry.record.base_url}/models", headers=headers
            ) as answer:
                models = await answer.json()
            return lines, models

    lines, models = asyncio.run(play())
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert lines[-2] == "data: [DONE]" and chunks[-1]["usage"]["completion_tokens"] > 9
    deltas = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert deltas[1]["delta"]["tool_calls"][0]["function"]["arguments"] == '{"expression": "2 + 2"}'
    assert deltas[-1]["finish_reason"] == "tool_calls"
    assert models["data"][0]["max_model_len"] == 400


@pytest.mark.parametrize(
    ("body", "outputs"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": 1}}}},
            {"json_schema": {"a": 1}},
        ),
        ({"response_format": {"type": "text"}}, {}),
        ({"guided_json": '{"type": "array"}'}, {"json_schema": {"type": "array"}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"], "json": None}}, {"choice": ["a", "b"]}),
    ],
)
def test_agents_may_say_what_answers_must_match(body, outputs):
    sampling = limit(body, SamplingConfig(temperature=1.0))
    assert sampling.structured_outputs.model_dump(exclude_defaults=True) == outputs
    assert sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({"temperature": 0.3}, 400, "sampling.temperature is 1"),
        ({"top_p": 0.9}, 400, "top_p"),
        ({"n": 2}, 400, "n 2"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"response_format": {"type": "grammar"}}, 400, "response_format of type 'grammar'"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, 400, "keep one"),
        ({"structured_outputs": {"grammar": "root"}}, 400, "'grammar' is not served"),
        ({"guided_json": "{"}, 400, "the schema is no JSON"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "only text"),
        ({"metadata": {"episode": "99-9"}}, 404, "no episode '99-9'"),
        ({"messages": [ASK | {"content": "word " * 400}]}, 400, "context length"),
    ],
)
def test_what_is_refused(server, change, status, text):
    async def play():
        async with agent(server, ["A."]) as entry:
            body = {"messages": [ASK], "metadata": {"episode": entry.record.id}, **change}
            actual = await entry.post("/v1/chat/completions", body)
            return actual, entry.record.num_turns

    (actual, body), turns = asyncio.run(play())
    assert actual == status and text in body["message"] and turns == 0


def test_what_the_template_refuses_leaves_the_episode_alone():
    tokenizer = load_tokenizer("builtin")
    reason = "{{ raise_exception('no developer here') }}"
    tokenizer.chat_template = (
        "{% for m in messages if m.content == 'refuse me' %}" + reason + "{% endfor %}"
    ) + tokenizer.chat_template
    policy_server = PolicyServer(tokenizer, max_model_len=400)
    policy_server.open()

    async def play():
        async with agent(policy_server, ["A.", "B."]) as entry:
            answer, _ = await entry.chat([ASK])
            said = [ASK, answer["message"], {"role": "user", "content": "refuse me"}]
            body = {"messages": said, "metadata": {"episode": entry.record.id}}
            status, refusal = await entry.post("/v1/chat/completions", body)
            assert (status, refusal["error"]["param"]) == (400, "messages")
            assert "refuses them: chat template: no developer here" in refusal["message"]
            await entry.chat([*said[:2], ASK])
            return entry.record.finish()

    try:
        assert asyncio.run(play()).metrics["turns"] == 2
    finally:
        policy_server.close()


def test_without_the_token_nothing_is_answered(server):
    async def play():
        async with agent(server, ["A."]) as entry:
            body = {"messages": [ASK], "metadata": {"episode": entry.record.id}}
            wrong = await entry.post("/v1/chat/completions", body, Authorization="Bearer no")
            async with entry.session.get(f"{server.base_url}/models") as answer:
                return wrong[0], answer.status

    assert asyncio.run(play()) == (401, 401)


def test_an_agent_may_only_cut_answers_shorter(server):
    class Long(ScriptedEngine):
        async def generate(self, prompt, sampling, stop_ids=(), index=0):
            self.asked = (sampling.max_new_tokens, sampling.stop)
            return await super().generate(prompt, sampling, stop_ids, index)

    async def play(**keys):
        engine = Long(server.template.tokenizer, ["A."])
        async with agent(server, [], engine=engine) as entry:
            await entry.chat([ASK], **keys)
        return engine.asked

    assert asyncio.run(play(max_tokens=9, stop="\n")) == (9, ["\n"])
    assert asyncio.run(play(max_completion_tokens=900)) == (64, [])


@pytest.mark.parametrize(
    "error", [EpisodeFailed("server gone", pause=True), RunStopped("no server")]
)
def test_what_the_engine_raises_ends_the_agent_and_reaches_the_environment(server, error):
    """Not as an HTTP error of some agent, which would be counted under another name."""

    class Broken(ScriptedEngine):
        async def generate(self, *_, **__):
            raise error

    async def play():
        async with agent(server, [], engine=Broken(None, [])) as entry:

            async def stubborn():
                body = {"messages": [ASK], "metadata": {"episode": entry.record.id}}
                status, _ = await entry.post("/v1/chat/completions", body)
                assert status == 400
                await asyncio.sleep(60)

            with pytest.raises(type(error)) as actual:
                await entry.record.watch(stubborn())
            return actual.value

    assert asyncio.run(play()) is error


def test_a_client_that_leaves_and_an_episode_that_ends_free_their_requests(server):
    async def play():
        freed, requests = asyncio.Event(), asyncio.Event()

        class Slow(ScriptedEngine):
            async def generate(self, *_, **__):
                requests.set()
                try:
                    await asyncio.sleep(60)
                finally:
                    freed.set()

        statuses = []
        for leave in (True, False):
            freed.clear()
            requests.clear()
            async with agent(server, [], engine=Slow(None, [])) as entry:
                body = {"messages": [ASK], "metadata": {"episode": entry.record.id}}
                task = asyncio.ensure_future(entry.post("/v1/chat/completions", body))
                await requests.wait()
                task.cancel() if leave else server.end(entry.record.id)
                await asyncio.wait_for(freed.wait(), 5)
                if not leave:
                    statuses.append((await task)[0])
        return statuses

    assert asyncio.run(play()) == [410]


def test_the_page_shows_an_environment_of_ones_own(server):
    """docs/nemo_gym.md, as it stands there, with an agent that asks twice."""
    page = (Path(__file__).parents[2] / "docs" / "nemo_gym.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)

    async def my_agent(base_url, token, row):
        headers, output = {"Authorization": f"Bearer {token}"}, []
        async with aiohttp.ClientSession(headers=headers) as session:
            for question in row["questions"]:
                output.append({"role": "user", "content": question})
                url = f"{base_url}/chat/completions"
                async with session.post(url, json={"messages": output}) as answer:
                    output.append((await answer.json())["choices"][0]["message"])
        return float(output[-1]["content"] == "B.")

    names = {"PolicyServer": PolicyServer, "my_agent": my_agent}
    exec(code, names)
    tokenizer = server.template.tokenizer
    env, row = names["Remote"](tokenizer), {"questions": ["A?", "B?"]}
    try:
        episode = asyncio.run(env.run(row, ScriptedEngine(tokenizer, ["A.", "B."]), SAMPLING, 0))
    finally:
        env.close()
    assert episode.rewards == {"mine": 1.0} and episode.metrics["turns"] == 2


@pytest.mark.parametrize(
    ("family", "text", "content", "names"),
    [
        ("hermes", CALL, "<think>so</think> ", ["calculator"]),
        ("hermes", '<tool_call>{"name": 1}</tool_call>', None, []),
        ("hermes", '<think><tool_call>{"name": "a", "arguments": {}}</tool_call>', None, []),
        ("hermes", f"<tool_call>{XML}</tool_call>x", "x", ["a"]),
        ("llama3", '<|python_tag|>{"name": "a", "parameters": {"b": 1}}', "", ["a"]),
        ("llama3", f"{LLAMA}; {LLAMA}", "", ["a", "a"]),
        ("llama3", '{"name": "a"}', None, []),
        ("mistral", 'H.[TOOL_CALLS] [{"name": "a", "arguments": {}}]', "H.", ["a"]),
        ("mistral", "[TOOL_CALLS]a[ARGS]{}[TOOL_CALLS]b[CALL_ID]1a2[ARGS]{}", "", ["a", "b"]),
        ("mistral", "[TOOL_CALLS]a[ARGS]{", None, []),
    ],
)  # fmt: skip
def test_tool_calls_of_each_family(family, text, content, names):
    """Text in no form of its family stays text, and so do thoughts."""
    actual, calls = split_calls(text, family)
    assert actual == (text if content is None else content)
    assert [call.name for call in calls] == names


def test_families_by_their_templates(server):
    assert find_family(server.template.tokenizer.chat_template) == "hermes"
    assert find_family("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert find_family("""{{ '{"name": "' + x + '", "parameters": ' }}""") == "llama3"


def test_older_forms_of_messages_are_read_as_in_data():
    names: dict[str, str] = {}
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "?"}}
    read = read_message(call, names)
    assert read["tool_calls"][0]["function"] == {"name": "f", "arguments": "?"}
    parts = [{"type": "thinking", "thinking": "t"}, {"type": "output_text", "text": "hi"}]
    read = read_message({"role": "assistant", "content": parts}, names)
    assert read == {"role": "assistant", "content": "hi", "reasoning_content": "t"}
    items = [
        {"type": "function_call", "call_id": "c", "name": "g", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "\ud800"},
    ]
    asked, result = read_input(items)
    assert asked["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert result == {"role": "tool", "content": "?", "tool_call_id": "c", "name": "g"}
    with pytest.raises(RequestRefused, match="a role is a number"):
        read_message({"role": 3, "content": ""}, names)
