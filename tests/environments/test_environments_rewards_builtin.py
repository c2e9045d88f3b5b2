"""The built-in rewards on answers whose verdict is known."""

import json
from pathlib import Path

import pytest

from jaxtrain.environments.rewards.load import call_function, find_function
from jaxtrain.environments.rewards.python_tests import find_program, python_tests
from jaxtrain.environments.rewards.texts import text_of
from jaxtrain.errors import UserError


def judge(name, completions, **columns):
    count = len(completions)
    arguments = {"completions": completions, "completion_ids": [[0]] * count, **columns}
    return call_function(find_function(name), arguments)


@pytest.mark.parametrize(
    "text, answer, right",
    [
        (r"The answer is \boxed{42}.", "42", 1.0),
        (r"So $x = \frac{1}{2}$.", "0.5", 1.0),
        (r"\boxed{41}", "42", 0.0),
        (r"<think>\boxed{42}</think> I do not know", "42", 0.0),
        (r"<think>41?</think> \boxed{42}", "2 * 21 = 42\n#### 42", 1.0),
        (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1.0),
        ("down to 33%\n#### 33", "33", 1.0),
        ("#### Sum\n2 + 2 is 4", "4", 1.0),
        (r"it costs \boxed{\$32,\!348}", r"\$32,\!348", 1.0),
        ("", "42", 0.0),
    ],
)
def test_math_compares_values_not_texts(text, answer, right):
    pytest.importorskip("math_verify")
    assert judge("math", [text], answer=[answer]) == [right]


def test_math_gives_none_where_the_gold_answer_says_nothing():
    pytest.importorskip("math_verify")
    assert judge("math", [r"\boxed{1}"], answer=[""]) == [None]


def test_math_judges_real_gsm8k_solutions():
    """Each real worked solution is right for its own problem and wrong for the next one's."""
    pytest.importorskip("math_verify")
    path = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k_test.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is missing: GSM8K's test set")
    rows = [json.loads(line) for line in path.read_text().splitlines()[:40]]
    finals = [row["answer"].rsplit("####", 1)[1].strip() for row in rows]
    output = [f"The answer is \\boxed{{{final}}}." for final in finals]
    assert judge("math", output, answer=[row["answer"] for row in rows]) == [1.0] * 40
    turned = [row["answer"] for row in rows[1:] + rows[:1]]
    expected = [float(a == b) for a, b in zip(finals, finals[1:] + finals[:1], strict=True)]
    assert judge("math", output, answer=turned) == expected


def test_exact_match_ignores_thoughts_blanks_and_case():
    output = ["<think>hm</think> Paris ", "paris", "Lyon", "<think>Paris"]
    assert judge("exact_match", output, answer=["Paris"] * 4) == [1, 1, 0, 0]
    assert judge("exact_match", ["paris"], answer=["Paris"], ignore_case=False) == [0]
    assert judge("exact_match", ["7"], column_name="gold", gold=[7]) == [1]


def test_missing_column_is_named_with_those_that_there_are():
    with pytest.raises(UserError, match="'answer'.*question"):
        judge("exact_match", ["a"], question=["q"])


def test_format_wants_one_thought_and_then_an_answer():
    output = ["<think>a</think> b", "b", "<think>a</think>", "<think>a</think> <think>c</think> b"]
    assert judge("format", output) == [1, 0, 0, 0]
    assert judge("regex", ["ab12", "ab"], pattern=r"\d+") == [1, 0]
    with pytest.raises(UserError, match="pattern"):
        judge("regex", ["a"], pattern="(")


def test_length_falls_linearly_in_the_cache_as_in_dapo():
    arguments = {"completions": ["x"] * 5, "completion_ids": [[0] * n for n in (5, 6, 8, 10, 11)]}
    arguments |= {"max_tokens": 10, "cache_tokens": 4}
    assert call_function(find_function("length"), arguments) == [0.0, 0.0, -0.5, -1.0, -1.0]


def test_json_schema_reads_plain_and_fenced_answers():
    pytest.importorskip("jsonschema")
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    output = ['{"a": 1}', '```json\n{"a": 2}\n```', '{"a": "x"}', "{", "[" * 5000]
    assert judge("json_schema", output, schema=schema) == [1, 1, 0, 0, 0]


def test_conversations_are_judged_by_the_last_assistant_turn():
    output = [{"role": "assistant", "content": "1"}, {"role": "tool", "content": "9"}]
    output += [{"role": "assistant", "content": "2"}]
    assert text_of(output) == "2" and text_of([]) == ""
    assert judge("exact_match", [output], answer=["2"]) == [1]


PROGRAM = "Here:\n```python\ndef add(a, b):\n    return a + b\n```"


def test_python_tests_run_the_last_block():
    tests = [["assert add(1, 2) == 3", "assert add(0, 0) == 1"]]
    assert find_program(PROGRAM).startswith("def add")
    assert python_tests([PROGRAM], tests=tests, all_or_nothing=False) == [0.5]
    assert python_tests([PROGRAM], tests=tests) == [0.0]
    assert python_tests([PROGRAM], tests=["assert add(1, 2) == 3"]) == [1.0]
    assert python_tests(["no code"], tests=["assert True"]) == [0.0]


def test_python_tests_judge_a_group_side_by_side_and_in_order():
    sleeps = "```python\nimport time\ntime.sleep(60)\n```"
    tests = [["assert add(1, 2) == 3"]] * 4
    actual = python_tests([sleeps, PROGRAM, "none", sleeps], tests=tests, seconds=0.5)
    assert actual == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("options", [{"seconds": 0}, {"memory_mib": 8}, {"tests": [[1]]}])
def test_python_tests_name_a_wrong_option(options):
    with pytest.raises(UserError, match="python_tests"):
        judge("python_tests", [PROGRAM], **{"tests": [["assert True"]], **options})
