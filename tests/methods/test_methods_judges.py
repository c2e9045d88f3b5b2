"""Reward models in a round: where they are read, and how their scores become rewards."""

import json

import numpy as np
import pytest
from tiny_vision import VISION

from jaxtrain.batch import Batch
from jaxtrain.config import ModelConfig
from jaxtrain.data.chat.control_tokens import add_tokens
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.images.setup import give_format
from jaxtrain.errors import UserError
from jaxtrain.methods.offline import reads_same_images
from jaxtrain.methods.rl.advantages import RewardTable
from jaxtrain.methods.rl.batch_builder import EPISODE, TURN
from jaxtrain.methods.rl.judges import RewardModelJudge, ask_judges, judge_table

NAN = np.nan


def make_batches():
    """Two batches: episode 0 has two turns (in sequences of their own), 1 one, 2 was left out; the
    stream "judge" is 10 times the place in the row."""
    index = np.arange(8, dtype=np.int32)
    rows = [
        # position, episode, turn of each token
        ([0, 1, 2, 3, 2, 3, 4, 0], [-1, -1, 0, 0, -1, 0, 0, -1], [-1, -1, 0, 0, -1, 1, 1, -1]),
        ([0, 1, 2, 3, 4, 5, 6, 0], [-1, -1, -1, 1, 1, 1, -1, -1], [-1, -1, -1, 0, 0, 0, -1, -1]),
    ]
    for position, episode, turn in rows:
        streams = {EPISODE: [[episode]], TURN: [[turn]], "judge": [[10.0 * index]]}
        streams = {name: np.array(values) for name, values in streams.items()}
        empty = np.zeros((1, 1, 8), np.int32)
        yield Batch(empty, np.array([[position]]), empty, empty, weights={}, streams=streams)


def test_texts_are_judged_at_their_last_drawn_token_and_steps_at_each_turns():
    batches, table = (
        list(make_batches()),
        RewardTable([np.array([[1.0], [NAN], [3.0]])], (2.0,), (2, 1)),
    )
    full, metrics = judge_table(table, [RewardModelJudge("judge", "rm", 0.5, steps=False)], batches)
    (rewards,) = full.rewards_TNK
    np.testing.assert_array_equal(rewards, [[1, 60], [NAN, 50], [3, NAN]])
    assert full.weights == (2.0, 0.5)
    assert metrics["rewards/rm/mean"] == 55.0
    assert metrics["reward"] == pytest.approx((2 + 30 + 25 + 6) / 3)
    # A turn sees what is still to come: of episode 0 both turns' scores, then the second's.
    turns, _ = judge_table(table, [RewardModelJudge("judge", "prm", 0.5, steps=True)], batches)
    first, second = turns.rewards_TNK
    np.testing.assert_array_equal(first, [[1, 90], [NAN, 50], [3, NAN]])
    np.testing.assert_array_equal(second, [[1, 60], [NAN, 0], [3, NAN]])


def test_a_process_reward_model_gives_the_probability_of_right():
    class Scores:
        def scores(self, batch, role):
            return np.array([[[[1.0, 1.0], [0.0, 2.0]]]], np.float32)

    batch = next(make_batches())
    judges = [
        RewardModelJudge("a", "a", 1.0, steps=True),
        RewardModelJudge("b", "b", 1.0, steps=False),
    ]
    actual = ask_judges(judges, batch, Scores())
    np.testing.assert_allclose(actual["a"], [[[0.5, 1 / (1 + np.exp(-2.0))]]])
    np.testing.assert_array_equal(actual["b"], [[[1.0, 0.0]]])


def test_images_are_judged_by_models_that_read_the_same_patches(tmp_path):
    tokenizer = load_tokenizer("builtin")
    add_tokens(tokenizer, (), ["<|image_pad|>"])
    raw = {**VISION["qwen3_vl"], "image_token_id": tokenizer.convert_tokens_to_ids("<|image_pad|>")}
    sizes = {"shortest_edge": 256, "longest_edge": 4096}
    settings = {"size": sizes, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}

    def reads(name, config, settings):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw | config))
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        return reads_same_images(ModelConfig(path=str(folder)), tokenizer)

    assert not reads("policy", {}, settings), "the policy reads none"
    give_format(tmp_path / "policy", raw, tokenizer)
    assert reads("same", {}, settings)
    assert not reads("sizes", {}, {**settings, "size": {**sizes, "longest_edge": 8192}})
    assert not reads("colors", {}, {**settings, "image_mean": [0.4] * 3})
    assert not reads("settings", {}, {**settings, "do_resize": False})
    assert not reads("text", {"vision_config": None}, settings)


def test_images_that_a_judge_does_not_read_end_a_run():
    batch = next(make_batches())._replace(images=object())
    judge = RewardModelJudge("judge_1", "rm", 1.0, steps=False)
    with pytest.raises(UserError, match=r"rewards\.1\.model reads no images"):
        ask_judges([judge], batch, None)
