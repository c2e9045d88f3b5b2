"""generation_config.json: what is ignored is told, what is broken is named."""

import json

import pytest

from jaxtrain.huggingface.generation import NAME, describe_ignored, find_problem, write_generation


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "not a JSON object"),
        ('{"temperature": "hot"}', "temperature is"),
        ('{"top_k": true}', "top_k is"),
        ('{"eos_token_id": [1, "x"]}', "eos_token_id is"),
        ("\xff", "UTF-8"),
        ("[" * 10_000, "deep"),
    ],
)
def test_a_broken_file_is_named_and_ends_nothing(tmp_path, content, messages):
    (tmp_path / NAME).write_text(content, encoding="latin-1")
    problem = find_problem(tmp_path)
    assert problem is not None and str(tmp_path / NAME) in problem and messages in problem
    assert len(problem) < 2000 and describe_ignored(tmp_path) is None


def test_what_a_good_file_says_about_drawing_is_told(tmp_path):
    assert find_problem(tmp_path) is None and describe_ignored(tmp_path) is None
    written = {"temperature": 0.6, "top_p": 0.95, "top_k": 50, "do_sample": True}
    (tmp_path / NAME).write_text(json.dumps({**written, "eos_token_id": [7, 8]}))
    assert find_problem(tmp_path) is None
    messages = describe_ignored(tmp_path)
    assert messages is not None and "temperature 0.6, top_p 0.95, which" in messages
    assert "sampling.temperature=0.6" in messages and "top_k" not in messages
    (tmp_path / NAME).write_text('{"eos_token_id": 3, "temperature": 1.0}')
    assert describe_ignored(tmp_path) is None


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (None, {"eos_token_id": [7, 9]}),
        ('{"eos_token_id": 8, "top_p": 0.8}', {"eos_token_id": [8, 7, 9], "top_p": 0.8}),
        ('{"eos_token_id": [9, 4]}', {"eos_token_id": [9, 4, 7]}),
        ('{"eos_token_id": -1}', {"eos_token_id": [7, 9]}),
        ("{", {"eos_token_id": [7, 9]}),
    ],
)
def test_an_export_ends_answers_where_the_base_and_the_template_do(tmp_path, printed, expected):
    base, output = tmp_path / "base", tmp_path / "out"
    base.mkdir(), output.mkdir()
    if printed is not None:
        (base / NAME).write_text(printed)
    write_generation(output, base, {9, 7})
    assert json.loads((output / NAME).read_text()) == expected
    assert find_problem(output) is None
