"""Ground truths beside drawn answers: the same prompt, own budgets, own remaining turns."""

import asyncio
import json

import pytest

from jaxtrain.config import DatasetConfig, EnvConfig, SamplingConfig
from jaxtrain.environments.factory import open_env
from jaxtrain.environments.scripted import ScriptedEngine
from jaxtrain.errors import UserError
from jaxtrain.generation.dataset_envs import DatasetEnvs
from jaxtrain.generation.engine import EpisodeFailed, PromptRequest
from jaxtrain.generation.episodes import RoundSlot
from jaxtrain.generation.group_player import AnswerOptions, GroupPlayer, GroupRules
from jaxtrain.generation.prompts import open_prompts
from jaxtrain.methods.ebft.ground_truth import GroundTruthRows, GroundTruths, count_prompt
from jaxtrain.safe_io import UnreadableRow


def open_rows(tmp_path, rows, turns="first", thinking="keep"):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    opened = open_prompts(DatasetConfig(path=str(path)), "data.datasets.0")
    return GroundTruthRows(opened, turns, thinking, "prompt", "data.datasets.0")


def make(rows, tokenizer, **options):
    limits = {"row_tokens": 256, "multiplier": 1.5, "least": 64}
    limits |= {key: options.pop(key) for key in limits if key in options}
    return GroundTruths([rows.dataset], tokenizer, EnvConfig(**options), **limits)


def play(env, row, texts, tokenizer, sampling=None):
    return asyncio.run(
        env.run(dict(row), ScriptedEngine(tokenizer, texts), sampling or SamplingConfig(), 0)
    )


@pytest.mark.parametrize(
    ("raw", "system"), [(False, None), (False, "Be brief."), (True, None)], ids=str
)
def test_the_truth_is_what_a_model_that_says_it_would_have_drawn(tmp_path, tokenizer, raw, system):
    """Token by token, with the prompt that answers are drawn behind and the end of the turn."""
    rows = open_rows(tmp_path, [{"prompt": "Where is it?", "ground_truth": "Over there, I say."}])
    truth = make(rows, tokenizer, raw=raw, system=system)(PromptRequest(0, 0, rows[0]))
    env = open_env(EnvConfig(raw=raw, system=system), tokenizer)
    drawn = play(env, rows[0], ["Over there, I say."], tokenizer)
    assert truth.tokens == drawn.tokens and truth.sampled == drawn.sampled
    assert count_prompt(truth) == count_prompt(drawn) and truth.given


def test_the_truth_has_the_prompt_of_a_developer_message(tmp_path, tokenizer):
    """It is a system message, before which env.system does not stand."""
    asked = [{"role": "developer", "content": "RULES"}, {"role": "user", "content": "Where?"}]
    rows = open_rows(tmp_path, [{"prompt": asked, "ground_truth": "Here."}])
    truth = make(rows, tokenizer, system="Be brief.")(PromptRequest(0, 0, rows[0]))
    drawn = play(open_env(EnvConfig(system="Be brief."), tokenizer), rows[0], ["Here."], tokenizer)
    assert truth.tokens == drawn.tokens


def test_each_prompt_has_a_budget_of_its_own(tmp_path, tokenizer):
    """max(64, min(int(1.5 n), cap)) of its own truth, not of the longest one of a call; and never
    above the cap, for which rows and caches are made."""
    texts = ["x", "word " * 60, "word " * 100]
    rows = open_rows(tmp_path, [{"prompt": "Q", "ground_truth": text} for text in texts])
    truths = make(rows, tokenizer, row_tokens=4096)
    lengths = [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    assert lengths[0] < 40 < lengths[1] < lengths[2]
    cap = int(1.5 * lengths[1]) + 1
    sampling = SamplingConfig(max_new_tokens=cap)
    actual = [
        truths.limit(truths(PromptRequest(i, 0, rows[i])), sampling).max_new_tokens
        for i in range(len(rows))
    ]
    assert actual == [max(64, min(int(1.5 * n), cap)) for n in lengths]
    assert len(set(actual)) == 3
    small = SamplingConfig(max_new_tokens=16)
    assert truths.limit(truths(PromptRequest(0, 0, rows[0])), small).max_new_tokens == 16
    free = make(rows, tokenizer, row_tokens=4096, multiplier=None)
    assert free.limit(free(PromptRequest(0, 0, rows[0])), sampling) == sampling


def talk(number):
    return [
        {"role": "user", "content": f"ask {number}"},
        {"role": "assistant", "content": f"answer {number}"},
        {"role": "user", "content": f"more of {number}?"},
        {"role": "assistant", "content": f"end of {number}"},
    ]


def test_remaining_turns_are_those_of_the_own_row(tmp_path, tokenizer):
    """In any order of prompts and for any number of answers, the turns belong to a row, not with a
    place in a list."""
    rows = open_rows(tmp_path, [{"messages": talk(number)} for number in range(3)])
    env = open_env(EnvConfig(kind="dialogue"), tokenizer, 256)
    truths = make(rows, tokenizer, kind="dialogue")
    for number in (2, 0, 1):
        row = rows[number]
        drawn = play(env, row, ["so", "be it"], tokenizer)
        text = tokenizer.decode(drawn.tokens)
        assert f"more of {number}?" in text and "end of" not in text and text.count("more of") == 1
        # The first answer alone is trained, although the rest was drawn, too.
        retained = [
            t for t, local_value in zip(drawn.tokens, drawn.sampled, strict=True) if local_value
        ]
        assert tokenizer.decode(retained, skip_special_tokens=True) == "so"
        truth = truths(PromptRequest(number, 0, row))
        output = [f"answer {number}", f"end of {number}"]
        assert truth.tokens == play(env, row, output, tokenizer).tokens
        assert not any(truth.sampled) and count_prompt(truth) == count_prompt(drawn)


def test_rows_without_a_ground_truth_are_no_silent_zero(tmp_path, tokenizer):
    rows = open_rows(tmp_path, [{"prompt": "Q", "ground_truth": "A"}, {"prompt": "Q"}])
    assert isinstance(rows[1], UnreadableRow) and "no ground truth" in rows[1].reason
    with pytest.raises(UserError, match="no ground truth.*ground_truth = "):
        open_rows(tmp_path, [{"prompt": "Q", "answer": "A"}] * 3)


def test_all_turns_make_an_example_each(tmp_path):
    rows = open_rows(tmp_path, [{"messages": talk(number)} for number in range(2)], "all")
    assert len(rows) == 4
    assert [row["ground_truth"] for row in (rows[i] for i in range(4))] == [
        *["answer 0", "end of 0"],
        *["answer 1", "end of 1"],
    ]
    assert len(rows[1]["prompt"]) == 3 and rows[1]["remaining_turns"] == []


def test_a_group_is_played_with_its_truth_and_budget(tmp_path, tokenizer):
    rows = open_rows(tmp_path, [{"prompt": "Q", "ground_truth": "A"}, {"prompt": "Q" * 400}])
    seen = []

    class Env:
        async def run(self, row, engine, sampling, index):
            seen.append(sampling.max_new_tokens)
            return await open_env(EnvConfig(), tokenizer).run(row, engine, sampling, index)

    class NoRewards:
        async def score(self, episodes, row):
            return [{} for _ in episodes]

    player = GroupPlayer(
        DatasetEnvs(Env(), NoRewards()),
        ScriptedEngine(tokenizer, ["x"] * 8),
        SamplingConfig(max_new_tokens=99),
        GroupRules(2, {}),
        answers=AnswerOptions(truths=make(rows, tokenizer), need_reward=False),
    )

    group = asyncio.run(player.play(PromptRequest(0, 0, rows[0]), RoundSlot(None, [])))
    assert seen == [64, 64]
    assert tokenizer.decode(group.truth.drawn_tokens, skip_special_tokens=True) == "A"
    long = {**rows[0], "ground_truth_message": {"role": "assistant", "content": "word " * 400}}
    with pytest.raises(EpisodeFailed, match="too long"):
        player.answers.truths(PromptRequest(1, 0, long))
