"""Differences of log-probs with a known cause, made from random logits, must get its name."""

import numpy as np
import pytest

from jaxtrain.methods.rl.mismatch import RoundComparison, compare, measure

T, V = 1000, 80


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def draw(rng, logp):
    return (np.exp(logp).cumsum(-1) > rng.random((len(logp), 1))).argmax(-1)


def pick(logp, tokens):
    return np.take_along_axis(logp, tokens[:, None], 1)[:, 0]


def truncate(logp, top_p):
    order = np.argsort(-logp, -1)
    probs = np.take_along_axis(np.exp(logp), order, 1)
    keep = np.zeros(logp.shape, bool)
    np.put_along_axis(keep, order, probs.cumsum(-1) - probs < top_p, 1)
    return log_softmax(np.where(keep, logp, -np.inf))


def causes(scale, seed=0):
    """(name, sampler's log-probs, trainer's, temperature) for logits of that spread."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(T, V)) * scale
    logp = log_softmax(logits)
    # Where nearly every token is certain already, half the temperature leaves too little to see.
    for temperature in (0.7, 1.3, 1.5) if scale > 3 else (0.5, 0.7, 1.3, 1.5):
        warm = log_softmax(logits / temperature)
        tokens = draw(rng, warm)
        yield "temperature", pick(logp, tokens), pick(warm, tokens), temperature
        yield "temperature", pick(warm, tokens), pick(logp, tokens), 1.0
    for top_p in (0.8, 0.95, 0.99, 1e-6):
        cut = truncate(logp, top_p)
        tokens = draw(rng, cut)
        yield "truncation", pick(cut, tokens), pick(logp, tokens), 1.0
    for noise in (0.003, 0.01, 0.05):
        coarse = log_softmax(logits + rng.normal(size=logits.shape) * noise)
        tokens = draw(rng, coarse)
        yield "precision", pick(coarse, tokens), pick(logp, tokens), 1.0
    for second in (
        rng.normal(size=(T, V)) * scale,
        logits + rng.normal(size=(T, V)) * max(0.3 * scale, 0.3),
    ):
        stale = log_softmax(second)
        tokens = draw(rng, stale)
        yield "weights", pick(stale, tokens), pick(logp, tokens), 1.0
    tokens = draw(rng, logp)
    exact = pick(logp, tokens)
    yield None, exact + rng.normal(size=T) * 1e-5, exact, 1.0


@pytest.mark.parametrize("scale", [1.0, 3.0, 6.0])
def test_each_systematic_difference_gets_its_name(scale):
    for seed in range(2):
        for name, sampler, trainer, temperature in causes(scale, seed):
            actual = compare(sampler, trainer, temperature)
            assert actual.cause == name, (seed, actual.sentence)
            assert (actual.sentence is None) == (name is None)


def test_the_temperature_is_told_about_right():
    """Exact only where the normalizer hardly moves, as for flat distributions."""
    for name, sampler, trainer, temperature in causes(1.0):
        if name == "temperature" and temperature != 1.0:
            assert "look as of temperature 1" in compare(
                sampler, trainer, temperature
            ).sentence or (
                "look as of temperature 0.9" in compare(sampler, trainer, temperature).sentence
            )


def test_tokens_of_older_weights_do_not_count_as_a_mistake():
    rng = np.random.default_rng(0)
    logp = log_softmax(rng.normal(size=(T, V)))
    tokens = draw(rng, logp)
    trainer = pick(logp, tokens)
    sampler, fresh = trainer.copy(), np.arange(T) % 2 == 0
    sampler[~fresh] += rng.normal(size=T // 2)
    assert compare(sampler, trainer).cause == "weights"
    assert compare(sampler, trainer, fresh=fresh).cause is None
    assert compare(sampler, trainer, fresh=np.zeros(T, bool)).cause is None


def test_the_numbers_are_those_of_their_formulas():
    rng = np.random.default_rng(1)
    p, q = (log_softmax(rng.normal(size=(1, V))) for _ in range(2))
    tokens = draw(rng, np.repeat(p, 50000, 0))
    sampler, trainer = p[0, tokens], q[0, tokens]
    actual = measure(sampler, trainer)
    ratio = np.exp(trainer - sampler)
    exact = float((np.exp(p) * (p - q)).sum())
    # The mean of 50,000 draws with a spread near 2: a standard error of 0.01.
    assert actual["mismatch/kl"] == pytest.approx(exact, abs=0.05)
    assert actual["sampling/importance_sampling_ratio/mean"] == pytest.approx(ratio.mean())
    assert actual["mismatch/ratio_p99"] == pytest.approx(np.quantile(ratio, 0.99))
    largest = np.abs(trainer - sampler).max()
    assert actual["sampling/sampling_logp_difference/max"] == pytest.approx(largest)
    assert measure(np.zeros(0), np.zeros(0)) == {}


def test_a_cause_is_said_once_and_old_tokens_say_nothing():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(T, V))
    warm, raw = log_softmax(logits / 1.5), log_softmax(logits)
    tokens = draw(rng, warm)
    sampler, trainer = pick(raw, tokens), pick(warm, tokens)
    output = []
    comparison = RoundComparison(1.5, output.append)
    assert set(comparison(sampler, trainer, fresh=False)) >= {"mismatch/kl", "mismatch/ratio_p50"}
    noise = rng.normal(size=T)
    comparison(trainer + 0.01 * noise, trainer, fresh=True)
    assert output == []
    for _ in range(3):
        comparison(sampler, trainer, fresh=True)
    assert len(output) == 1 and "disagree (temperature)" in output[0]
