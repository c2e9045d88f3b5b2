"""Rows with a teacher's log-probs: every known form of the columns, and what is refused."""

import pickle

import numpy as np
import pytest

from jaxtrain.config.data import DataConfig, DatasetConfig
from jaxtrain.data.chat.messages import MalformedRow
from jaxtrain.data.chat.template import load_tokenizer
from jaxtrain.data.packing.pack import Fields, build_batch, lay_out
from jaxtrain.data.sample import Dropped, Sample
from jaxtrain.methods.distillation.data import LogProbReader, TeacherRecipe

TOKENS = [7, 3, 5, 9]
SAMPLE = Sample(np.array(TOKENS, np.int32), np.array([0, 0, 1, 1], np.float32))
KNOWN = [[(5, -0.1), (8, -3.0)], [(9, -0.5), (2, -1.5), (4, -2.0)]]
"""What stands in the places of tokens 5 and 9."""
IDS = [[pair[0] for pair in entry] for entry in KNOWN]
NUMBERS = [[pair[1] for pair in entry] for entry in KNOWN]
CHAT = [[{"token": f"token_id:{i}", "logprob": x} for i, x in entry] for entry in KNOWN]
PROMPT = [None, {"3": {"logprob": -1.0}}] + [
    {str(i): {"logprob": x, "rank": n} for n, (i, x) in enumerate(entry)} for entry in KNOWN
]
ARRAY = np.array([[-0.1, -3.0], [-0.5, -1.5]])
FORMS = {
    "axolotl": {"logprobs": CHAT},
    "axolotl prepared": {"target_token_ids": IDS, "logprobs": NUMBERS},
    "score": {"input_ids": TOKENS, "target_token_ids": IDS, "target_logprobs": NUMBERS},
    "vllm prompt": {"prompt_logprobs": PROMPT, "prompt_token_ids": TOKENS},
    "vllm chat": {"logprobs": {"content": [{"top_logprobs": entry} for entry in CHAT]}},
    "vllm chat, its tokens": {
        "logprobs": {
            "content": [
                {"token": name, "top_logprobs": entry}
                for name, entry in zip(("token_id:5", "nine"), CHAT, strict=True)
            ]
        }
    },
    "distilabel": {"llm_text_generation_vllm_logprobs": CHAT},
    "whole sequence": {"logprobs": [[], None, *CHAT]},
    "as arrays": {"target_token_ids": np.array([[5, 8], [9, 2]]), "logprobs": ARRAY},
    "renamed": {"theirs": CHAT},
}


def reader(k=2, **renamed):
    return LogProbReader(("ids", "logp"), k, renamed, vocabulary=10)


@pytest.mark.parametrize("form", FORMS)
def test_forms(form):
    """The k likeliest of the last tokens, each in the place of the token that it is about."""
    actual = reader(logprobs="theirs" if form == "renamed" else "logprobs")(FORMS[form], SAMPLE)
    np.testing.assert_array_equal(actual["ids"][2:], [[5, 8], [9, 2]])
    np.testing.assert_allclose(actual["logp"][2:], [[-0.1, -3.0], [-0.5, -1.5]], rtol=1e-6)
    assert (actual["ids"][:2] == -1).all()


def test_fewer_than_k():
    """Places that are not known hold the id -1."""
    actual = reader(k=4)(FORMS["axolotl"], SAMPLE)
    assert actual["ids"].tolist()[2:] == [[5, 8, -1, -1], [9, 2, 4, -1]]


BAD = {
    "no column": {},
    "a trained token has none": {"logprobs": CHAT[1:]},
    "5 entries": {"logprobs": [None, None, None, *CHAT]},
    "occurs twice": {"target_token_ids": [[5, 5], [9, 2]], "logprobs": ARRAY},
    "outside the vocabulary": {"target_token_ids": [[5, 10], [9, 2]], "logprobs": ARRAY},
    "no log-probability": {"target_token_ids": IDS[:1] + [[9]], "logprobs": [[-1, -2], [0.5]]},
    "probabilities of one entry sum to 2.72": {
        "target_token_ids": IDS,
        "logprobs": [[-1.0, -1.2], [0.0, 0.0, -0.33]],
    },
    "is no log-prob": {"target_token_ids": [["x"], [9]], "logprobs": [[-1], [-1]]},
    "entry 2 is about token 4, where the tokenizer puts 5": {
        "prompt_logprobs": [*PROMPT[:2], {"4": {"logprob": -0.1}}, PROMPT[3]]
    },
    "entry 1 is about token 2, where the tokenizer puts 9": {
        "logprobs": {
            "content": [
                {"token": f"token_id:{token}", "top_logprobs": entry}
                for token, entry in zip((5, 2), CHAT, strict=True)
            ]
        }
    },
    "not the tokens": {"input_ids": [7, 3, 5, 8], "logprobs": CHAT},
    "1 target_token_ids": {"target_token_ids": IDS[:1], "logprobs": ARRAY},
    "needs token and logprob": {"logprobs": [[1, 2], [3]]},
    "list is needed": {"logprobs": "none"},
}


@pytest.mark.parametrize("reason", BAD)
def test_what_does_not_fit_is_told(reason):
    with pytest.raises(MalformedRow, match=reason):
        reader()(BAD[reason], SAMPLE)


def test_recipe():
    """Weights are the component's, streams lie on their tokens; a row without fitting log-probs is
    dropped and says why; the function travels to workers."""
    tokenizer = load_tokenizer("builtin")
    data = DataConfig(sequence_len=64)
    streams = {"ids": np.dtype((np.int32, (2,))), "logp": np.dtype((np.float32, (2,)))}
    recipe = TeacherRecipe(
        data,
        tokenizer,
        component="distillation",
        fields=Fields(("distillation",), streams),
        streams=("ids", "logp"),
        top_k=2,
    )
    row = {"prompt": "ab", "completion": "c"}  # its answer is a token and the end
    rows = [{**row, "logprobs": CHAT}, row]
    dataset = DatasetConfig(path="builtin:calculator", fields={"logprobs": "logprobs"})
    tokenize = pickle.loads(pickle.dumps(recipe.open(dataset).tokenize))
    [tree], [dropped] = (tokenize(entry, "row") for entry in rows)
    batch = build_batch([[lay_out(tree, "branch")]], 64, recipe.fields)
    trained = batch.weights["distillation"] != 0
    assert trained.sum() == 2
    np.testing.assert_array_equal(batch.streams["ids"][trained], [[5, 8], [9, 2]])
    assert isinstance(dropped, Dropped) and "no column" in dropped.reason
