"""Tasks of lm-evaluation-harness: trees of continuations, options, and its own `hf` engine."""

import importlib.util
import json

import numpy as np
import pytest
from serving_toy import serving
from toy_run import save_model

from jaxtrain.api import Model
from jaxtrain.cli.lm_harness import HarnessModel, fit, group_by_context, grow, parse_options
from jaxtrain.cli.serve import split_layers
from jaxtrain.errors import UserError
from jaxtrain.generation.local.engine import LocalEngine
from jaxtrain.main import main

NEEDS_HARNESS = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None,
    reason="no lm-eval: pip install 'jaxtrain[lm-eval]'",
)


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


def make_requests(kind, *arguments):
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=pair, idx=i)
        for i, pair in enumerate(arguments)
    ]


PAIRS = [("Paris is", " big"), ("Paris is", " a city"), ("", "Hello"), ("One ", " two")]
UNTIL = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
ASKED = ("One two", UNTIL), ("Hello", UNTIL)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(folder, the harness's `hf` engine of it)."""
    from lm_eval.models.huggingface import HFLM

    folder = tmp_path_factory.mktemp("harness") / "tiny"
    save_model(folder, max_position_embeddings=64)
    return folder, HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1)


@NEEDS_HARNESS
@pytest.mark.slow
def test_the_hf_engine_agrees(tiny):
    """Compare sums of log-probs, greedy or not, whole texts in windows, and greedy answers."""
    folder, theirs = tiny
    ours = HarnessModel(Model(folder))

    def ask(kind, *arguments):
        requests = make_requests(kind, *arguments)
        return [getattr(model, kind)(requests) for model in (ours, theirs)]

    mine, hf = ask("loglikelihood", *PAIRS)
    np.testing.assert_allclose([x for x, _ in mine], [x for x, _ in hf], atol=1e-4)
    assert [greedy for _, greedy in mine] == [greedy for _, greedy in hf]
    mine, hf = ask("loglikelihood_rolling", ("word " * 60,), ("Hello",))
    np.testing.assert_allclose(mine, hf, rtol=1e-5)
    mine, hf = ask("generate_until", *ASKED)
    assert mine == hf and json.loads(json.dumps(mine)) == mine  # as the harness writes them


@NEEDS_HARNESS
@pytest.mark.skipif(
    importlib.util.find_spec("tenacity") is None,
    reason="no clients of lm-eval: pip install 'lm-eval[api]'",
)
@pytest.mark.slow
def test_local_completions_of_a_server_agree_with_the_hf_engine(tiny):
    """The harness asks `jaxtrain serve` over HTTP: echoed log-probs, and greedy answers."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    folder, hf = tiny
    model = Model(folder)
    sampler = model.sampler(True, prefixes=1)
    sampler.use(split_layers(model, sampler.model), 0)
    with serving(model.tokenizer, LocalEngine(sampler), max_model_len=64) as served:
        theirs = LocalCompletionsAPI(
            model="toy",
            base_url=f"http://127.0.0.1:{served.port}/v1/completions",
            tokenizer=str(folder),
            tokenizer_backend="huggingface",
            max_length=64,
            max_retries=1,
        )
        scored = theirs.loglikelihood(make_requests("loglikelihood", *PAIRS))
        answers = theirs.generate_until(make_requests("generate_until", *ASKED))
    expected = hf.loglikelihood(make_requests("loglikelihood", *PAIRS))
    np.testing.assert_allclose([x for x, _ in scored], [x for x, _ in expected], atol=1e-4)
    assert [greedy for _, greedy in scored] == [greedy for _, greedy in expected]
    assert answers == hf.generate_until(make_requests("generate_until", *ASKED))
