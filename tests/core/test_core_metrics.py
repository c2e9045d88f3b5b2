"""Averages, work counts and MFU against brute force."""

import numpy as np
import pytest
from tiny_models import RAW

from jaxtrain.batch import Batch
from jaxtrain.core.metrics import (
    Throughput,
    add_pairs,
    average,
    count_work,
    model_flops,
    peak_flops,
)
from jaxtrain.core.step_metrics import ExpertOverflowWarning, ZeroGradientWarning
from jaxtrain.methods.rl.round_metrics import SilentRewardWarning
from jaxtrain.models import build, families


def test_pairs_add_and_average_by_name():
    total = add_pairs({"a": (1.0, 2.0)}, {"a": (3.0, 2.0), "b": (1.0, 0.0)})
    assert average(total) == {"a": 1.0}


def test_work_counts_visible_pairs_and_no_padding():
    # Two documents of 3 and 4 tokens and one slot of padding.
    until = np.array([[[3, 3, 3, 7, 7, 7, 7, 8]]], np.int32)
    prev = np.array([[[-1, 0, 1, -1, 3, 4, 5, -1]]], np.int32)
    zeros = np.zeros_like(until)
    batch = Batch(tokens=zeros, positions=zeros, prev=prev, until=until, weights={})
    tokens, spans = count_work(batch)
    assert (tokens, spans.sum()) == (7, 6 + 10)
    model = build.abstract(families.config_from_hf({**RAW["mistral"], "sliding_window": 2}))
    # Within a window of 2 a token sees itself and the one before; QK and PV, 2 FLOPs each.
    pairs = (1 + 2 + 2) + (1 + 2 + 2 + 2)
    assert model.stack.mixing_flops(spans) == 2 * 4 * 32 * pairs


def test_flops_of_a_causal_row():
    # 2 per weight and token, and what mixes tokens, times 3 for the backward.
    assert model_flops(10, tokens=3, mixing=96) == 6 * 10 * 3 + 3 * 96


def test_throughput_is_per_device_and_starts_with_the_second_reading():
    meter = Throughput(num_devices=2, peak_flops=100.0)
    assert meter.read(1.0, 10, 50) == {}
    rates = meter.read(3.0, 10, 80)
    assert rates["tokens_per_second_per_device"] == 2.5
    assert rates["mfu"] == pytest.approx(80 / 2 / 200)


def test_peak_is_known_or_left_out():
    assert peak_flops("NVIDIA H200", "bfloat16", None) == 989e12
    assert peak_flops("NVIDIA H200", "float32", None) is None
    assert peak_flops("cpu", "bfloat16", None) is None
    assert peak_flops("cpu", "float32", 2.0) == 2e12


def test_gradients_of_zero_are_told_once_for_each_policy():
    check = ZeroGradientWarning().check
    few = [check({"grad_norm": 0.0}) for _ in range(9)] + [check({"grad_norm": 1e-9})]
    assert not any(few)
    lines = [check({"a/grad_norm": 0.0, "b/grad_norm": 1.0, "loss": 0.0}) for _ in range(30)]
    assert [i for i, line in enumerate(lines) if line] == [9]
    assert "a/grad_norm has been 0 for 10 steps in a row" in lines[9]


def test_rewards_that_never_fire_are_told_once():
    check = SilentRewardWarning().check
    silent = {"rewards/form/mean": 0.0, "rewards/form/std": 0.0, "reward": 0.5}
    fires = {"rewards/sum/mean": 0.0, "rewards/sum/std": 1.0}  # as often -1 as 1
    lines = [check({**silent, **fires}) for _ in range(25)]
    assert [i for i, found in enumerate(lines) if found] == [9]
    assert len(lines[9]) == 1 and "reward 'form' has given 0 to every answer" in lines[9][0]


def test_crowded_experts_are_told_once():
    check = ExpertOverflowWarning().check
    assert check({"loss": 1.0}) is None
    calm = [check({"expert_rounds": 1.4}) for _ in range(20)]
    crowded = [check({"expert_rounds": 1.7}) for _ in range(30)]
    assert not any(calm)
    assert [i for i, line in enumerate(crowded) if line] == [3]  # mean of 4 x 1.7 and 6 x 1.4
    assert "1.52 rounds" in crowded[3] and "parallel.expert_buffer" in crowded[3]
