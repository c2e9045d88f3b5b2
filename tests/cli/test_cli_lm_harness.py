"""Tasks of lm-evaluation-harness: trees of continuations, options, and its own `hf` engine."""

import importlib.util
import json

import numpy as np
import pytest
from toy_run import save_model

from jaxtrain.cli.lm_harness import HarnessModel, fit, group_by_context, grow, parse_options
from jaxtrain.errors import UserError
from jaxtrain.main import main

HAS_HARNESS = importlib.util.find_spec("lm_eval") is not None


def test_continuations_of_a_context_are_one_tree():
    pairs = [([1, 2], [3]), ([1], [9]), ([1, 2], [4, 5]), ([1, 2], [3])]
    assert group_by_context(pairs, 100, True) == [[0, 2, 3], [1]]
    assert group_by_context(pairs, 100, False) == [[0], [1], [2], [3]]
    assert group_by_context(pairs, 5, True) == [[0, 2], [1], [3]], "a tree has a longest one, too"
    tree = grow(pairs, [0, 2, 3])
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5, 3]
    assert tree.prev.tolist() == [-1, 0, 1, 1, 3, 1] and tree.positions.tolist()[-1] == 2


def test_long_contexts_lose_their_beginning():
    assert fit([1, 2, 3, 4], [5, 6], 4) == ([3, 4], [5, 6])
    assert fit([1], [5, 6], 4) == ([1], [5, 6])
    with pytest.raises(UserError, match="a continuation has 4 tokens"):
        fit([1], [2, 3, 4, 5], 4)


def test_options_of_the_harness():
    words = ["num_fewshot=5", "apply_chat_template=true", "system_instruction=Be short."]
    options = {"num_fewshot": 5, "apply_chat_template": True, "system_instruction": "Be short."}
    assert parse_options(words) == options
    for word in ("shots=5", "limit"):
        with pytest.raises(UserError, match="write KEY=VALUE, KEY one of num_fewshot, limit"):
            parse_options([word])


def test_mistakes_of_the_verb(capsys):
    assert main(["eval", "--config", "quickstart", "--lm-eval", "gsm8k"]) == 2
    assert "--lm-eval goes with RUN or MODEL" in capsys.readouterr().err
    assert main(["eval", "x", "--lm-eval-option", "limit=1"]) == 2
    assert "has no effect without --lm-eval" in capsys.readouterr().err


@pytest.mark.skipif(not HAS_HARNESS, reason="no lm-eval: pip install 'jaxtrain[lm-eval]'")
@pytest.mark.slow
def test_the_hf_engine_agrees(tmp_path):
    """Compare sums of log-probs, greedy or not, whole texts in windows, and greedy answers."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from jaxtrain.api import Model

    folder = tmp_path / "tiny"
    save_model(folder, max_position_embeddings=64)
    ours = HarnessModel(Model(folder))
    theirs = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1)

    def ask(kind, *arguments):
        requests = [
            Instance(request_type=kind, doc={}, arguments=pair, idx=i)
            for i, pair in enumerate(arguments)
        ]
        return [getattr(model, kind)(requests) for model in (ours, theirs)]

    pairs = [("Paris is", " big"), ("Paris is", " a city"), ("", "Hello"), ("One ", " two")]
    mine, hf = ask("loglikelihood", *pairs)
    np.testing.assert_allclose([x for x, _ in mine], [x for x, _ in hf], atol=1e-4)
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in hf]
    mine, hf = ask("loglikelihood_rolling", ("word " * 60,), ("Hello",))
    np.testing.assert_allclose(mine, hf, rtol=1e-5)
    kwargs = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    mine, hf = ask("generate_until", ("One two", kwargs), ("Hello", kwargs))
    assert mine == hf and json.loads(json.dumps(mine)) == mine  # as the harness writes them
