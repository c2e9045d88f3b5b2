"""Paired differences of two evaluations, against scipy's formulas."""

import json

import numpy as np
import pytest
from scipy import stats

from jaxtrain.cli.compare import compare, mcnemar
from jaxtrain.main import main


def write(folder, numbers, step=3, name="math", **more):
    """Write samples of a set: {problem: rewards of its answers}."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "samples.jsonl").open("a") as file:
        for problem, rewards in numbers.items():
            for reward in rewards:
                prompt = [{"role": "user", "content": problem}]
                line = {"step": step, "set": name, "reward": reward, "prompt": prompt, **more}
                file.write(json.dumps(line) + "\n")


def draw(count, k=1, seed=0, share=0.5):
    rng = np.random.default_rng(seed)
    return {f"p{i}": (rng.random(k) < share).astype(float).tolist() for i in range(count)}


@pytest.mark.parametrize("k", [1, 4])
def test_the_interval_is_that_of_a_paired_t_test(k):
    before, after = draw(200, k, 0, 0.4), draw(200, k, 1, 0.5)
    actual = compare(before, after, "math")
    x, y = (np.array([np.mean(v) for v in answers.values()]) for answers in (before, after))
    low, high = stats.ttest_rel(y, x).confidence_interval(0.95)
    expected = (200, x.mean(), y.mean(), (y - x).mean(), low, high)
    np.testing.assert_allclose(actual[:6], expected, rtol=1e-12)
    assert (actual.p is None) == (k > 1)


@pytest.mark.parametrize("won, lost", [(0, 0), (5, 5), (9, 1), (40, 21), (0, 7)])
def test_mcnemars_p_is_the_binomial_tests(won, lost):
    expected = stats.binomtest(won, won + lost).pvalue if won + lost else 1.0
    assert mcnemar([1.0] * won + [-1.0] * lost + [0.0] * 9) == pytest.approx(expected, rel=1e-12)


def test_intervals_hold_the_truth_as_often_as_they_say():
    rng, held = np.random.default_rng(0), 0
    for _ in range(400):
        share = rng.random(60)
        x, y = (rng.random(60) < share, rng.random(60) < np.minimum(share + 0.1, 1))
        truth = np.mean(np.minimum(share + 0.1, 1) - share)
        numbers = [{str(i): [float(v)] for i, v in enumerate(values)} for values in (x, y)]
        actual = compare(*numbers, "math")
        held += actual.low <= truth <= actual.high
    assert 0.93 * 400 <= held <= 0.99 * 400  # the true shares vary too, which widens it


def test_a_sentence(tmp_path, capsys):
    write(tmp_path / "a" / "eval", {f"p{i}": [float(i % 2)] for i in range(100)})
    write(tmp_path / "b", {f"p{i}": [0.0] for i in range(100)}, step=1)  # an older evaluation
    write(tmp_path / "b", {f"p{i}": [float(i % 2 or i < 10)] for i in range(100)})
    write(tmp_path / "b", {"p1": [1.0]}, name="other")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--set", "math"]) == 0
    assert capsys.readouterr().out == (
        "math: 50.0 -> 55.0: +5.0 points, 95 % interval 0.7 to 9.3, 100 problems, McNemar's p"
        " 0.062\n"
    )
    main(["compare", str(tmp_path / "a"), str(tmp_path / "a"), "--reward", "reward", "--json"])
    assert json.loads(capsys.readouterr().out)["math"]["difference"] == 0.0


def test_other_problems_are_refused(tmp_path, capsys):
    write(tmp_path / "a", draw(5), rewards={"math": 1.0})
    write(tmp_path / "b", draw(4) | {"other": [1.0], "q": [0.0]})
    write(tmp_path / "c", {"p0": [1.0]}, name="code")
    (tmp_path / "empty").mkdir()
    cases = {
        ("a", "b"): "1 are in the first (before) alone and 2 in the second (after) alone, such as",
        ("a", "c"): "has no answers to 'code'; its sets are 'math'",
        ("a", "empty"): "holds no answers; `jaxtrain eval` writes samples.jsonl",
        ("a", "nowhere"): "nowhere does not exist; `jaxtrain eval` writes samples.jsonl",
        ("c", "c"): "has one problem",
        ("a", "a", "--reward", "x"): "the rewards are 'math'",
    }
    for (first, second, *rest), words in cases.items():
        assert main(["compare", str(tmp_path / first), str(tmp_path / second), *rest]) == 2
        assert words in capsys.readouterr().err
