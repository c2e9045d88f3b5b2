"""Compare the sampler's log-probs with the trainer's, and diagnose systematic differences.

Both score the same tokens, drawn by the sampler, under what should be the same distribution. Small
symmetric noise is arithmetic; anything else is a mistake that importance weights would hide until
the run goes astray, so it is given a name. d = trainer - sampler everywhere.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

MAX_CUT = 2.0
"""-log of the mass that truncation may keep; truncation does not explain a larger difference."""
HARMLESS = 0.02
"""A scatter by precision below this is not reported."""
MIN_TOKENS = 256
"""Fewer tokens do not show a systematic difference."""
EXACT, COARSE = 1e-3, 0.15
"""Mean |d| below EXACT: same arithmetic. Spread of d up to COARSE: a coarser number format."""


class Mismatch(NamedTuple):
    """Comparison of one batch."""

    metrics: dict[str, float]
    cause: str | None
    """temperature, truncation, precision or weights; None: nothing systematic."""
    sentence: str | None
    """The cause in words, with what to do."""


class RoundComparison:
    """Compares rounds, and says once what is wrong with them."""

    def __init__(self, temperature: float, log: Callable[[str], None]):
        self.temperature, self.log = temperature, log
        self._said: set[str] = set()

    def __call__(
        self, sampler_logp: np.ndarray, trainer_logp: np.ndarray, fresh: bool
    ) -> dict[str, float]:
        """Metrics of a round's trained tokens; fresh: the trainer's present weights drew it."""
        mask = np.full(np.shape(sampler_logp), fresh)
        numbers = compare(sampler_logp, trainer_logp, self.temperature, mask)
        small = numbers.cause == "precision" and np.std(trainer_logp - sampler_logp) < HARMLESS
        if numbers.cause is not None and numbers.cause not in self._said and not small:
            self._said.add(numbers.cause)
            self.log(f"sampler and trainer disagree ({numbers.cause}): {numbers.sentence}")
        return {name: x for name, x in numbers.metrics.items() if name.startswith("mismatch/")}


def compare(
    sampler_logp: np.ndarray,
    trainer_logp: np.ndarray,
    temperature: float = 1.0,
    fresh: np.ndarray | None = None,
) -> Mismatch:
    """Compare float [T] log-probs of trained tokens, both as of softmax(logits / temperature).

    fresh: bool [T] tokens that the trainer's present weights drew; older ones differ by right and
    are left out of the diagnosis.
    """
    sampler, trainer = np.asarray(sampler_logp, np.float64), np.asarray(trainer_logp, np.float64)
    metrics = measure(sampler, trainer)
    if fresh is not None:
        sampler, trainer = sampler[fresh], trainer[fresh]
    cause, sentence = diagnose(sampler, trainer, temperature)
    return Mismatch(metrics, cause, sentence)


def measure(sampler: np.ndarray, trainer: np.ndarray) -> dict[str, float]:
    """Distances of float [T] log-probs, named as TRL names them where it does.

    mismatch/kl: mean of exp(d) - 1 - d, Schulman's estimate of KL(sampler || trainer) from the
    sampler's own tokens (joschu.net/blog/kl-approx.html).
    """
    if not sampler.size:
        return {}
    d = trainer - sampler
    ratio = np.exp(np.clip(d, -20, 20))
    low, middle, high = np.quantile(ratio, (0.01, 0.5, 0.99))
    return {
        "mismatch/kl": float(np.mean(np.expm1(np.clip(d, -20, 20)) - d)),
        "sampling/sampling_logp_difference/mean": float(np.abs(d).mean()),
        "sampling/sampling_logp_difference/max": float(np.abs(d).max()),
        "sampling/importance_sampling_ratio/min": float(ratio.min()),
        "sampling/importance_sampling_ratio/mean": float(ratio.mean()),
        "sampling/importance_sampling_ratio/max": float(ratio.max()),
        "mismatch/ratio_p01": float(low),
        "mismatch/ratio_p50": float(middle),
        "mismatch/ratio_p99": float(high),
    }


def diagnose(
    sampler: np.ndarray, trainer: np.ndarray, temperature: float = 1.0
) -> tuple[str | None, str | None]:
    """(cause, sentence) of a systematic difference of float [T] log-probs; (None, None): none."""
    if sampler.size < MIN_TOKENS:
        return None, None
    d = trainer - sampler
    size = float(np.abs(d).mean())
    if size < EXACT:
        return None, None
    if _looks_truncated(sampler, d):
        share = float(np.exp(d.mean()))
        return "truncation", (
            f"the sampler's log-probs are never below the trainer's and {-d.mean():.3g} above on"
            f" average: they are of a truncated distribution (about {share:.0%} of the mass). Set"
            " sampling.top_p 1, top_k 0 and min_p 0, or have the server return log-probs from"
            " before the cut (answers that had to match something are meant to be so:"
            " docs/sampling.md)"
        )
    slope, fit = _fit_line(trainer, sampler)
    # Other weights bend the line, too, but do not leave it so straight.
    if abs(slope - 1) > (0.05 if fit > 0.95 else 0.3) and fit > 0.8:
        # At temperature t unlikely tokens are near -gap / t: the slope is a ratio of temperatures.
        return "temperature", (
            f"the sampler's log-probs are {slope:.2f} times as steep as the trainer's (mean"
            f" difference {size:.3g}): they look as of temperature {temperature / slope:.2g}, the"
            f" trainer scores at {temperature:.2g}. Start the server with --logprobs-mode"
            " processed_logprobs, or set sampling.temperature 1"
        )
    if d.std() > COARSE:
        return "weights", (
            f"the sampler's and the trainer's log-probs differ by {size:.3g} on average and agree"
            " in nothing simple: the sampler holds other weights, another chat template's tokens or"
            " an adapter that was not applied"
        )
    if abs(d.mean()) <= 0.5 * size + 3 * d.std() / np.sqrt(d.size):
        return "precision", (
            f"the sampler's log-probs scatter around the trainer's by {d.std():.2g} without a"
            f" trend, {np.mean(d == 0):.0%} are equal: the two add in another order, or one rounds"
            " to a coarser format. Harmless below about 0.02, else serve in the trainer's"
            " compute_dtype; with the local engine on a CPU rollout.exact=true leaves no difference"
        )
    return "weights", (
        f"the trainer's log-probs are {d.mean():+.3g} off the sampler's on average: the sampler's"
        " weights are not quite the trainer's (an older version, or a coarser copy of them)"
    )


def _looks_truncated(sampler: np.ndarray, d: np.ndarray) -> bool:
    """Cutting a distribution raises what is left by -log(kept mass): never lowers, and by the same
    amount for every token of one distribution."""
    gain = -d
    if np.mean(sampler == 0) > 0.9:
        return True  # nothing but one token was left
    raised, lowered = np.mean(gain > EXACT), np.mean(gain < -EXACT)
    within = np.quantile(gain, 0.99) < MAX_CUT
    return bool(raised > 0.2 and lowered < 0.01 and gain.mean() > 3 * EXACT and within)


def _fit_line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """(slope, share of the variance explained) of y against x."""
    x, y = x - x.mean(), y - y.mean()
    spread = float(x @ x) * float(y @ y)
    if spread == 0:
        return 1.0, 0.0
    slope = float(x @ y) / float(x @ x)
    return slope, float(x @ y) ** 2 / spread
