"""Braille curves: exact pictures of small ones, and sizes of all."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from jaxtrain.runs.dashboard.chart import Curve, chart, label_ticks, pick_ticks, spark
from jaxtrain.runs.dashboard.text import cut_middle


def draw(y, width=20, height=5, x=None, **options) -> list[str]:
    y = np.asarray(y, float)
    x = np.arange(1, len(y) + 1) if x is None else x
    return [
        line.plain for line in chart([Curve(np.asarray(x, float), y)], width, height, **options)
    ]


# fmt: off
PICTURES = {
    "rising": (dict(y=[0, 1, 2, 3]), """
 │             ⢀⣠⠴⠒⠋
2┤        ⢀⣀⡤⠖⠚⠉
 │    ⣀⣠⠴⠚⠉
0┤⣠⠴⠒⠋⠁
        2          4
"""),
    "constant": (dict(y=[5, 5, 5]), """
5.2┤
5.0┤⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀⣀
   │
4.8┤
    1       2      3
"""),
    "point": (dict(y=[3]), """
3.1┤
3.0┤               ⢀
   │
2.9┤
                   1
"""),
    "log": (dict(y=[1, 10, 100, 1000], log=True), """
   │            ⣀⡤⠖⠋
100┤       ⢀⣀⡤⠖⠋⠁
   │   ⢀⣠⠴⠚⠉
  1┤⣠⠴⠚⠉
         2         4
"""),
    "large": (dict(y=[1e9, 2e9]), """
2.0e9┤          ⢀⣠⠖⠋
1.5e9┤      ⢀⣠⠴⠚⠉
     │   ⣀⡤⠖⠋
1.0e9┤⣠⠴⠚⠁
      1            2
"""),
    "small": (dict(y=[1e-9, 3e-9, 2e-9]), """
    │     ⢀⡴⠛⠲⢤⣀
2e-9┤   ⢀⡴⠋    ⠈⠙⠲⢤⣀
    │ ⢀⡴⠋
1e-9┤⡴⠋
     1      2      3
"""),
}
# fmt: on


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(name):
    options, expected = PICTURES[name]
    shown = [f"{line.rstrip()}" for line in draw(**options)]
    assert shown == expected.removeprefix("\n").removesuffix("\n").split("\n")


def test_two_runs_cross_in_their_colors():
    x = np.arange(10.0)
    lines = chart([Curve(x, x, "cyan"), Curve(x, 9 - x, "yellow")], 30, 6)
    styles = {str(span.style) for line in lines for span in line.spans}
    assert {"cyan", "yellow"} <= styles
    assert lines[0].plain[2:4].strip() and lines[0].plain[-2:].strip()


def test_what_is_missing_or_not_finite_is_left_out():
    assert draw([1, math.nan, 3, math.inf], x=[1, 2, 3, 4]) == draw([1, 3], x=[1, 3])
    assert "no value yet" in "".join(draw([math.nan]))
    assert "no value yet" in "".join(draw([-1.0, 0.0], log=True))


def test_no_peak_is_lost():
    y = np.zeros(100_000)
    y[54_321] = 1
    assert draw(y, 40, 10)[0].strip(" │┤.0123456789")


finite = st.floats(allow_nan=False, allow_infinity=False, width=32)


@settings(max_examples=60, deadline=None)
@given(st.lists(finite, max_size=40), st.integers(1, 60), st.integers(1, 12), st.booleans())
def test_any_series_fills_its_place(values, width, height, log):
    lines = chart([Curve(np.arange(float(len(values))), np.asarray(values))], width, height, log)
    assert len(lines) == height and {cell_len(line.plain) for line in lines} == {width}


@settings(max_examples=60, deadline=None)
@given(finite, finite, st.integers(2, 9))
def test_ticks_are_few_and_told_apart(a, b, most):
    low, high = min(a, b), max(a, b)
    if high - low > 1e-6 * max(abs(a), abs(b)):
        ticks = pick_ticks(low, high, most)
        assert len(ticks) <= most + 2
        assert len(set(label_ticks(ticks))) == len(ticks)


def test_sparks():
    assert spark(np.array([1.0, 2.0, 3.0]), 3) == "▁▅█" and spark(np.ones(9), 4) == "▁▁▁▁"
    assert spark(np.zeros(0), 3) == "   "


def test_events_stand_between_the_labels():
    marks = [(2.0, "╵"), (5.0, "╵"), (5.0, "▴"), (9.0, "↻")]
    lines = draw(np.arange(10.0), 30, 6, np.arange(10.0), marks=marks)
    bottom = lines[-1]
    assert bottom.count("▴") == 1 and bottom.count("╵") <= 1 and bottom.rstrip().endswith("9")
    assert len(bottom) == 30


def test_long_names_are_cut_in_the_middle():
    assert cut_middle("eval/calculator/env/accuracy", 28) == "eval/calculator/env/accuracy"
    assert cut_middle("eval/calculator/env/accuracy", 20) == "eval/c…/env/accuracy"
    assert cut_middle("日本語の名前です", 8) == "日…です"
    assert [cut_middle("abc", width) for width in (0, 1, 2)] == ["", "…", "…c"]
