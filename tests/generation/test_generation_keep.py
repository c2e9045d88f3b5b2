"""Groups in a checkpoint come back bit by bit, whatever numbers are in them."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtrain.generation.episode_codec import pack, unpack
from jaxtrain.generation.episodes import Episode, Group, TokenSequence

FLOATS = st.floats(allow_nan=False)


@st.composite
def sequences(draw):
    length = draw(st.integers(0, 5))
    numbers = st.lists(st.integers(-1, 2**31), min_size=length, max_size=length)
    logprobs = draw(st.lists(FLOATS, min_size=length, max_size=length))
    return [draw(numbers), [n % 2 == 0 for n in draw(numbers)], logprobs, draw(numbers)]


@st.composite
def episodes(draw):
    earlier = [TokenSequence(*entry) for entry in draw(st.lists(sequences(), max_size=2))]
    turns = draw(st.lists(st.dictionaries(st.text(max_size=3), FLOATS, max_size=2), max_size=2))
    return Episode(*draw(sequences()), "stop", "said", "asked", earlier=earlier, turn_rewards=turns)


@settings(max_examples=30, deadline=None)
@given(st.lists(episodes(), max_size=3), st.lists(st.none() | FLOATS, min_size=3, max_size=3))
def test_a_group_comes_back_through_json(played, rewards):
    given_rewards = [{"right": value} for value in rewards[: len(played)]]
    group = Group(7, {"prompt": object()}, played, given_rewards, dataset=1)
    back = unpack(json.loads(json.dumps(pack(group))))
    assert (back.draw, back.rewards, back.dataset, back.row) == (7, given_rewards, 1, {})
    for episode, reference in zip(back.episodes, played, strict=True):
        assert episode.completion == episode.prompt == ""
        assert repr(vars(episode)) == repr({**vars(reference), "completion": "", "prompt": ""})
