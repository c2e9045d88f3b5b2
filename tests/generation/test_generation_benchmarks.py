"""Benchmarks as sets of problems: columns, graders, their further numbers, averages and table."""

import csv
import json

import pytest

from jaxtrain.config import EvalSetConfig, validate_config
from jaxtrain.config.evals import GRADERS
from jaxtrain.data.sources.prompt_sets import SETS, ask_mmlu_pro, introduce_mmlu_pro
from jaxtrain.environments.rewards.load import call_function, find_function
from jaxtrain.errors import UserError
from jaxtrain.generation.evaluation.benchmark_metrics import (
    average_sets,
    measure_benchmark,
    write_table,
)
from jaxtrain.generation.evaluation.eval_sets import AnsweredProblem, summarize
from jaxtrain.generation.evaluation.problem_sets import read_problems

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
WRONG = {f"Incorrect Answer {number}": f"no {number}" for number in (1, 2, 3)}
GPQA = [{"Question": f"Why {i}?", "Correct Answer": " yes", **WRONG} for i in range(40)]
MMLU_PRO = {
    "question": "Which gas?",
    "options": ["O2", "CO2", "N/A"],
    "answer": "B",
    "cot_content": "A: Let's think step by step. Plants take CO2. The answer is (B).",
    "category": "biology",
}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "name, row, prompt, answer",
    [
        ("gsm8k", {"question": "1+1?", "answer": "so\n#### 2"}, "1+1?", "so\n#### 2"),
        ("aime24", {"Problem": "p", "Answer": 33}, "p", 33),
        ("aime25", {"problem": "p", "answer": "70"}, "p", "70"),
        ("amc23", {"problem": "p", "answer": 27.0, "url": "u"}, "p", 27.0),
        ("minerva", {"question": "p", "answer": "1.6"}, "p", "1.6"),
    ],
)
def test_problems_with_short_answers(tmp_path, name, row, prompt, answer):
    path = write(tmp_path / "rows.jsonl", [row] * 200)
    problems = read_problems(0, EvalSetConfig(path=path, benchmark=name))
    assert len(problems) == 200, "all rows, although drafts are measured on fewer"
    assert (problems[7]["prompt"], problems[7]["answer"]) == (prompt + BOXED, answer)


def test_choices_of_gpqa_are_shuffled_the_same_way_every_time(tmp_path):
    path = write(tmp_path / "gpqa.jsonl", GPQA)
    problems = read_problems(0, EvalSetConfig(path=path, benchmark="gpqa"))
    assert {problem["answer"] for problem in problems} == set("ABCD")
    for problem in problems:
        assert f"\n{problem['answer']}) yes" in problem["prompt"]
        assert sorted(problem["prompt"].rsplit("\n\n", 1)[1].split("\n"))[0].startswith("A) ")
    swapped = {**GPQA[3], "Incorrect Answer 1": "no 3", "Incorrect Answer 3": "no 1"}
    other = write(tmp_path / "other.jsonl", [swapped])
    (again,) = read_problems(0, EvalSetConfig(path=other, benchmark="gpqa"))
    assert again["prompt"] == problems[3]["prompt"]


def test_examples_of_mmlu_pro_are_five_of_the_category(tmp_path):
    others = [{**MMLU_PRO, "question": f"q{i}", "category": "law"} for i in range(3)]
    solved = [{**MMLU_PRO, "question": f"e{i}"} for i in range(7)]
    path = write(tmp_path / "test.jsonl", [MMLU_PRO])
    section = EvalSetConfig(path=path, benchmark="mmlu_pro")
    (alone,) = read_problems(0, section)
    assert alone["prompt"].startswith("The following are multiple choice questions")
    assert alone["prompt"].count("Question:") == 1 and alone["answer"] == "B"
    assert alone["prompt"].endswith("B. CO2\nAnswer: Let's think step by step.")
    examples = write(tmp_path / "validation.jsonl", others + solved)
    (shown,) = read_problems(0, section.model_copy(update={"examples": examples}))
    assert [f"e{i}\n" in shown["prompt"] for i in range(7)] == [True] * 5 + [False] * 2
    assert "q0\n" not in shown["prompt"]
    assert "step by step. Plants take CO2. The answer is (B).\n\nQuestion:" in shown["prompt"]
    with pytest.raises(UserError, match="no such file.*key eval.sets.0.examples"):
        read_problems(0, section.model_copy(update={"examples": "no.jsonl"}))


def test_the_words_of_mmlu_pro_are_the_harness_ones():
    utils = pytest.importorskip("lm_eval.tasks.mmlu_pro.utils", reason="no lm-eval")
    row = {**MMLU_PRO, "options": ["O2", "CO2"]}
    assert ask_mmlu_pro(row) == utils.format_cot_example(row, including_answer=False)
    shown = introduce_mmlu_pro(row, [row])
    assert shown.endswith(utils.format_cot_example(row))


@pytest.mark.parametrize(
    "text, letter",
    [
        ("so the answer is (C).", "C"),
        ("The answer is C. The answer is (D).", "C"),
        ("The answer is **(B)**", "B"),
        ("Answer: $D$", "D"),
        ("**Answer:** B", "B"),
        ("answer: (A)", "A"),
        (r"\boxed{\text{E}}", "E"),
        ("<think>the answer is (A)</think> Answer: B", "B"),
        ("The answer is Carbon", None),
        ("A", None),
    ],
)
def test_letters(text, letter):
    choice = find_function("choice")
    for answer in "ABCDE":
        assert call_function(choice, {"completions": [text], "answer": [answer]}) == [
            float(answer == letter)
        ]


def test_patterns_of_letters_are_checked():
    with pytest.raises(UserError, match="one group"):
        find_function("choice")(["A"], patterns=["[AB]"], answer=["A"])


INSTRUCTIONS = {
    "prompt": "Write ten words without commas.",
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": [{"num_words": None}, {"num_words": 10, "relation": "at least"}],
}


def test_instructions_of_ifeval_by_the_harness_rules():
    utils = pytest.importorskip("lm_eval.tasks.ifeval.utils", reason="no lm-eval")
    ten = " ".join(["word"] * 10)
    for text in (ten, "a, b", "a b", f"Sure, here:\n{ten}"):
        expected = utils.process_results({"key": 0, **INSTRUCTIONS}, [text])
        columns = {"completions": [text], **{k: [v] for k, v in INSTRUCTIONS.items()}}
        for function in GRADERS["ifeval"]:
            scope = "prompt" if function.options["level"] == "prompt" else "inst"
            kind = "loose" if function.options["loose"] else "strict"
            followed = expected[f"{scope}_level_{kind}_acc"]
            share = sum(followed) / 2 if isinstance(followed, list) else float(followed)
            reward = call_function(find_function("ifeval"), {**columns, **function.options})
            assert reward == [share], (text, function.label)


def answer(row, totals, scores=None, failed=0):
    return AnsweredProblem(row, [], scores or [{} for _ in totals], totals, failed)


def test_further_numbers():
    section = EvalSetConfig(path="x", benchmark="mmlu_pro", k=2)
    answered = [
        answer({"category": "computer science"}, [1.0, 0.0]),
        answer({"category": "law"}, [1.0], failed=1),
        answer({"category": "law"}, [1.0, 1.0]),
    ]
    assert measure_benchmark(section, answered) == {
        "category/computer_science": 0.5,
        "category/law": 0.75,
    }
    assert measure_benchmark(section.model_copy(update={"rewards": []}), answered) == {}
    # Of the three instructions one is followed strictly, and two loosely.
    scores = [{"instruction_strict": 0.5, "instruction_loose": 1.0}]
    rows = [{"instruction_id_list": ["a", "b"]}, {"instruction_id_list": ["c"]}]
    answered = [answer(rows[0], [0.0], scores), answer(rows[1], [], failed=1)]
    assert measure_benchmark(EvalSetConfig(benchmark="ifeval"), answered) == {
        "rewards/instruction_strict": pytest.approx(1 / 3),
        "rewards/instruction_loose": pytest.approx(2 / 3),
    }


def test_standard_error_is_over_problems():
    answered = [answer({}, [1.0, 1.0]), answer({}, [0.0, 1.0]), answer({}, [0.0, 0.0])]
    # Shares 1, 0.5, 0: variance 1/4 with n - 1, over three problems.
    assert summarize(answered, 2, 1.0)["stderr"] == pytest.approx((0.25 / 3) ** 0.5)
    assert "stderr" not in summarize(answered[:1], 2, 1.0)


def test_averages_and_table():
    sections = [EvalSetConfig(benchmark="gsm8k", k=4), EvalSetConfig(path="a/own.jsonl")]
    metrics = {
        "eval/gsm8k/avg@4": 0.5,
        "eval/gsm8k/pass@4": 0.75,
        "eval/gsm8k/stderr": 0.1,
        "eval/own/avg@1": 0.25,
        "eval/own/pass@1": 0.25,
    }
    average = average_sets(metrics, sections)
    assert average == {"eval/average/avg": 0.375, "eval/average/pass": 0.5}
    assert average_sets(metrics, sections[:1]) == {}
    table = write_table(metrics | average, list(zip(sections, (1319, 3), strict=True)))
    first, second, last = csv.DictReader(table.splitlines())
    assert first == {
        **{"set": "gsm8k", "problems": "1319", "k": "4"},
        **{"avg": "0.5", "pass": "0.75", "stderr": "0.1"},
    }
    assert second["avg"] == "0.25" and second["stderr"] == ""
    assert (last["set"], last["avg"], last["pass"]) == ("average", "0.375", "0.5")


def test_missing_columns_and_sources_are_named(tmp_path):
    for name, row, words in [
        ("gsm8k", {"question": "q"}, "no column 'answer'"),
        ("aime24", {"problem": "q", "answer": None}, "'answer' is .*, not a text or a number"),
        ("gpqa", {"Question": "q", "Correct Answer": "a"}, "no column 'Incorrect Answer 1'"),
        ("mmlu_pro", {**MMLU_PRO, "options": "A"}, "'options' is .*, not a list of texts"),
        ("mmlu_pro", {"question": "q", "options": ["a"], "answer": "A"}, "no column 'category'"),
        ("ifeval", {"prompt": "p", "instruction_id_list": ["a"]}, "no column 'kwargs'"),
        ("ifeval", {**INSTRUCTIONS, "kwargs": [{}]}, "2 instructions but 1 kwargs"),
    ]:
        section = EvalSetConfig(path=write(tmp_path / "r.jsonl", [row]), benchmark=name)
        with pytest.raises(UserError, match=f"{name}: r.jsonl line 1.*{words}"):
            read_problems(0, section)
    base = {"run": {"max_steps": 1}, "model": {"path": "m"}, "data": {"datasets": [{"path": "d"}]}}
    for table, words in [
        ({"name": "x"}, "an eval set needs rows: set path"),
        ({"benchmark": "gpqa", "examples": "v.jsonl"}, "examples has no effect"),
        ({"benchmark": "humaneval"}, "eval.sets.0: nothing judges the answers"),
        ({"benchmark": "gsm8k", "rewards": []}, "eval.sets.0: nothing judges the answers"),
    ]:
        with pytest.raises(UserError, match=words):
            validate_config({**base, "eval": {"sets": [table]}}, "test")
    config = validate_config({**base, "eval": {"sets": [{"benchmark": "gsm8k"}]}}, "test")
    assert config.eval.sets[0].label == "gsm8k" and config.eval.sets[0].graders
    assert set(GRADERS) == {name for name, entry in SETS.items() if entry.answer}
