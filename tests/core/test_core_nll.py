"""nll on a forest of three-token branches, against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtrain_kernels import LogProbs

from jaxtrain.batch import Batch, check_batch
from jaxtrain.core.losses.logp import exclude_tokens, token_logp
from jaxtrain.core.losses.nll import nll_loss
from jaxtrain.layers.stack import StackOutput


class Table:
    """A model whose hidden state at a token is a row of its own: logits are read off directly."""

    def __init__(self, logits_TV, logit_softcap=None):
        self.logits_TV = np.asarray(logits_TV, np.float32)
        self.logit_softcap = logit_softcap

    def hidden(self, batch):
        return StackOutput(jnp.asarray(self.logits_TV)[None], {}, {})

    def head(self):
        return jnp.eye(self.logits_TV.shape[1])


# A root token 0 with two children, 1 and 2; child 1 goes on with token 0; one slot of padding.
BATCH = Batch(
    tokens=np.array([[0, 1, 0, 2, 0]], np.int32),
    positions=np.array([[0, 1, 2, 1, 0]], np.int32),
    prev=np.array([[-1, 0, 1, 0, -1]], np.int32),
    until=np.array([[4, 3, 3, 4, 5]], np.int32),
    weights={"nll": np.array([[0, 0.5, 0.5, 0.5, 0]], np.float32)},
)
LOGITS = np.log([[0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [0.1, 0.1, 0.8], [0.9, 0.05, 0.05], [1, 1, 1]])


def test_both_children_are_predicted_by_the_root():
    check_batch(BATCH)
    scores = token_logp(Table(LOGITS), BATCH)
    # Token 1 and token 2 hang off row 0, the grandchild off row 1.
    np.testing.assert_allclose(scores.logp[0, 1:4], np.log([0.3, 0.6, 0.5]), rtol=1e-5)
    entropy = -np.sum(np.exp(LOGITS[0]) * LOGITS[0])
    np.testing.assert_allclose(scores.entropy[0, 1], entropy, rtol=1e-5)
    assert np.isfinite(scores.logp).all()


def test_nll_is_the_weighted_sum():
    sums, metrics = nll_loss(Table(LOGITS), BATCH)
    np.testing.assert_allclose(sums["nll"], -0.5 * np.log(0.3 * 0.6 * 0.5), rtol=1e-5)
    assert float(metrics["entropy"][1]) == 1.5


def test_logits_under_a_softcap():
    """Both ways to log-probs equal those of logits that were capped before."""
    plain, before, inside = Table(LOGITS), Table(np.tanh(LOGITS * 2) / 2), Table(LOGITS, 0.5)
    expected = nll_loss(before, BATCH)[0]["nll"]
    np.testing.assert_allclose(nll_loss(inside, BATCH)[0]["nll"], expected, rtol=1e-5)
    np.testing.assert_allclose(token_logp(inside, BATCH).lse, token_logp(before, BATCH).lse, 1e-5)
    assert abs(nll_loss(plain, BATCH)[0]["nll"] - expected) > 0.1


def test_target_ids_replace_the_tokens():
    batch = BATCH._replace(streams={"target": np.array([[0, 2, 2, 2, 0]], np.int32)})
    scores = token_logp(Table(LOGITS), batch)
    np.testing.assert_allclose(scores.logp[0, 1:4], np.log([0.5, 0.1, 0.5]), rtol=1e-5)


def test_all_masked_is_zero_not_nan():
    batch = BATCH._replace(weights={"nll": np.zeros((1, 5), np.float32)})
    sums, _ = nll_loss(Table(LOGITS), batch)
    assert float(sums["nll"]) == 0.0


def test_an_impossible_target_does_not_spoil_the_others():
    logits = LOGITS.copy()
    logits[0, 1] = -1e30
    scores = token_logp(Table(logits), BATCH)
    assert scores.logp[0, 1] < -1e29
    # Row 0 without its second entry: 0.2 and 0.5 share what is left.
    np.testing.assert_allclose(scores.logp[0, 2:4], np.log([0.6, 0.5 / 0.7]), rtol=1e-5)


def test_log_probs_without_some_tokens_are_those_of_the_others():
    logits = 3 * jax.random.normal(jax.random.key(0), (2, 6, 30))
    logits = logits.at[0, 0, 4].set(14.0)  # all but a hundred-thousandth of the whole
    target, never = jnp.full((2, 6), 7), jnp.array([4, 11])
    reference = log_probs_of(logits.at[..., never].set(-jnp.inf), target)
    whole = log_probs_of(logits, target)
    actual = exclude_tokens(whole, logits[..., never])
    for name in ("logp", "entropy", "lse"):
        gap = jnp.abs(getattr(actual, name) - getattr(reference, name))
        assert gap[0, 0] < 0.05 and gap.at[0, 0].set(0).max() < 2e-5, name
    unchanged = exclude_tokens(whole, jnp.full((2, 6, 2), -50.0))
    assert jnp.array_equal(unchanged.logp, whole.logp), "below rounding"


def log_probs_of(logits, target):
    logp = jax.nn.log_softmax(logits)
    entropy = -jnp.where(jnp.isfinite(logp), jnp.exp(logp) * logp, 0).sum(-1)
    chosen = jnp.take_along_axis(logp, target[..., None], -1)[..., 0]
    return LogProbs(chosen, entropy, jax.nn.logsumexp(logits, -1))
