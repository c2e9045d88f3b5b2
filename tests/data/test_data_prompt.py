"""Prompts that end in a begun turn: as they train, and as transformers has them."""

import asyncio

import pytest

from jaxtrain.config import SamplingConfig
from jaxtrain.config.data import DatasetConfig
from jaxtrain.data.chat.control_tokens import add_tokens
from jaxtrain.data.chat.named_templates import TOKENS, read_template
from jaxtrain.data.chat.prompt import prompt_tokens
from jaxtrain.data.chat.template import TemplateFailed, load_tokenizer
from jaxtrain.data.chat.tokenize import RowTokenizer
from jaxtrain.data.sample import Sample
from jaxtrain.environments.request_fields import RequestRefused
from jaxtrain.environments.single_turn import SingleTurn, find_prompt
from jaxtrain.errors import UnusableRow
from jaxtrain.generation.engine import Completion
from jaxtrain.generation.serving.open_request import ServingFormat

ASK = {"role": "user", "content": "hi"}


def begin(text, **keys):
    return [ASK, {"role": "assistant", "content": text, **keys}]


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "mistral", "zephyr"])
@pytest.mark.parametrize("opening", ["Sure, ", "1 +", "", "two\n\nlines\n"])
def test_a_begun_turn_is_continued_as_it_trains(name, opening):
    tokenizer = load_tokenizer("builtin")
    tokenizer.chat_template = read_template(name)
    add_tokens(tokenizer, special=TOKENS[name], roles={"bos_token": "<s>", "eos_token": "</s>"})
    data = DatasetConfig(path="x")
    row = {"prompt": begin(opening), "completion": "so it is."}
    [sample] = RowTokenizer(data, tokenizer, 512, "drop")(row, "x row 1")
    assert isinstance(sample, Sample)
    prompt = prompt_tokens(tokenizer, begin(opening))
    first = int(sample.weights.argmax())
    assert prompt == sample.tokens[:first].tolist()
    if opening:
        expected = tokenizer.apply_chat_template(
            begin(opening.rstrip()), continue_final_message=True, tokenize=False
        )
        assert tokenizer.decode(prompt).rstrip() == expected.removeprefix(" ")


def test_a_turn_that_cannot_be_continued_is_named(tokenizer):
    with pytest.raises(TemplateFailed, match="cannot be continued: the prompt ends in a turn"):
        prompt_tokens(tokenizer, begin("a", reasoning_content="t"))
    with pytest.raises(UnusableRow, match="only the environment single_turn continues"):
        find_prompt({"prompt": begin("Sure, ")}, "prompt")


def test_the_answer_of_an_episode_has_the_begun_turn(tokenizer):
    class Engine:
        async def generate(self, prompt, sampling, stop_ids, index=0):
            self.prompt = prompt
            tokens = [*tokenizer.encode("done"), tokenizer.eos_token_id]
            return Completion(tokens, [-1.0] * len(tokens), "stop")

    engine = Engine()
    env, row = SingleTurn(tokenizer), {"prompt": begin("Sure, ")}
    episode = asyncio.run(env.run(row, engine, SamplingConfig(), 0))
    # As in TRL: rewards see the prompt without the turn, and the whole turn as the answer.
    assert episode.prompt == [ASK]
    assert episode.completion == [{"role": "assistant", "content": "Sure, done"}]
    count = len(engine.prompt)
    assert tokenizer.decode(engine.prompt).endswith("assistant\nSure, ")
    assert not any(episode.sampled[:count]) and all(episode.sampled[count:])
    assert episode.logprobs[:count] == [0.0] * count and episode.logprobs[count] == -1.0


def test_a_request_continues_its_last_message_as_vllm_does(tokenizer):
    form = ServingFormat(tokenizer, len(tokenizer), 256)
    body = {"messages": begin("Sure, "), "continue_final_message": True}
    for extra in ({}, {"add_generation_prompt": False}):
        [tokens] = form.read_chat({**body, **extra}, print).prompts
        assert tokens == prompt_tokens(tokenizer, body["messages"])
    for extra, words in (
        ({"add_generation_prompt": True}, "one of add_generation_prompt and"),
        ({"continue_final_message": False, "add_generation_prompt": False}, "one of add_gen"),
        ({"messages": [ASK]}, "must be last, behind others"),
        ({"messages": begin("long " * 5000)}, "tokens"),
    ):
        with pytest.raises(RequestRefused, match=words):
            form.read_chat({**body, **extra}, print)


def test_a_request_that_continues_a_thought_is_answered_with_its_rest(tokenizer):
    form = ServingFormat(tokenizer, len(tokenizer), 256)
    for text, opened in (("<think>\nLet me", True), ("<think>So.</think>Yes, ", False)):
        body = {"messages": begin(text), "continue_final_message": True}
        assert form.read_chat(body, print).opened is opened
