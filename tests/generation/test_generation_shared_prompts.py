"""Answers to one prompt: what the sampler says that rows share, their caches do hold alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generation_continuous import RAW, open_sampler
from toy_draft import ToyDraft

from jaxtrain.generation.engine import Sampling
from jaxtrain.generation.local import slots
from jaxtrain.generation.local.speculation import DraftedModel
from jaxtrain.layers import sharded_attention
from jaxtrain.layers.attention import store_cache
from jaxtrain.layers.kv_cache import Stored
from jaxtrain.layers.mixer import SharedSlots
from jaxtrain.models import build, families


class Watched:
    """`decode_attention` that looks at what each row shares."""

    def __init__(self, op):
        self.op, self.sharing, self.wrong = op, {}, []

    def __call__(self, q, k, v, layer, *rest, leader=None, shared=None, **options):
        if leader is not None:
            scales = [options[n][0] for n in ("k_scale", "v_scale") if options.get(n) is not None]
            jax.debug.callback(self.inspect, leader, shared, k[0], v[0], *scales)
        return self.op(q, k, v, layer, *rest, leader=leader, shared=shared, **options)

    def inspect(self, leader, shared, *retained):
        leader, shared, *retained = map(np.asarray, (leader, shared, *retained))
        B = len(leader)
        assert (leader < B).all(), "a jax array would take the last row for one beyond it"
        for row, (first, until) in enumerate(zip(leader, shared, strict=True)):
            self.sharing[B] = self.sharing.get(B, 0) + int(first != row and until > 0)
            same = all((entry[row, :until] == entry[first, :until]).all() for entry in retained)
            self.wrong += [] if same else [(row, first, until)]


@pytest.fixture
def watched(monkeypatch):
    actual = Watched(sharded_attention.decode_attention)
    monkeypatch.setattr(sharded_attention, "decode_attention", actual)
    return actual


def make_model(vocabulary: int, stored: Stored = "default"):
    """Build a model of a unique size, so that its programs are traced again under the test's
    probes."""
    model = build.init(families.config_from_hf({**RAW, "vocab_size": vocabulary}), 0)
    store_cache(model, stored)
    return model


def ask(sampler, groups):
    """Groups of answers of these lengths, as many at a time as there are rows."""
    rng = np.random.default_rng(1)
    requests = []
    for group, limits in enumerate(groups):
        prompt = rng.integers(4, 50, 11 + 7 * group).tolist()
        for i, limit in enumerate(limits):
            sampling = Sampling(temperature=1.0, max_new_tokens=limit, seed=group)
            requests.append(sampler.request(prompt, sampling, number=i))
    for request in requests:
        sampler.add(request)
    while sampler.busy:
        sampler.step()
    return requests


@pytest.mark.parametrize(
    "vocabulary, stored",
    [
        pytest.param(53, "default", marks=pytest.mark.slow),
        pytest.param(54, "int8", marks=pytest.mark.thorough),
    ],
)
def test_rows_hold_what_they_share(watched, vocabulary, stored):
    """Leaders end first and their rows are filled with other prompts; the rest stay a group."""
    model = make_model(vocabulary, stored)
    ask(open_sampler(model, max_batch=6), [(3, 60, 5, 70, 40)] * 3)
    jax.effects_barrier()
    assert watched.sharing[6] > 100 and not watched.wrong


@pytest.mark.thorough
def test_rows_hold_what_they_share_when_idle_ones_are_given_up(watched):
    """With a draft, which guesses once few rows are left: of one group the last, of the other all
    but its leader."""
    model = make_model(55)
    draft = ToyDraft({4: [4, 5]}, np.ones(4, bool), vocab=55)
    ask(
        open_sampler(DraftedModel(model, draft), max_batch=6, draft_rows=3),
        [(3, 5, 90), (4, 90, 90)],
    )
    jax.effects_barrier()
    assert watched.sharing[6] and watched.sharing[3] and not watched.wrong


def entry_of(rows, sources):
    """Fields of an entry that `share` reads."""
    none = np.zeros(len(rows), np.int32)
    leaders = [rows[sources.index(source)] for source in sources]
    number = [np.array(x, np.int32) for x in (rows, sources, leaders)]
    return slots.RowInsert(*number, none, none, none, None, none)


def test_who_leads():
    alone = SharedSlots(jnp.arange(6, dtype=jnp.int32), jnp.zeros(6, jnp.int32))
    # Rows 0 to 2 take one prompt, 3 and 4 another; what is beyond the rows is padding.
    first = slots.share(alone, entry_of([0, 1, 2, 3, 4, 6], [0, 0, 0, 1, 1, 0]), jnp.array([9, 5]))
    assert first.leader.tolist() == [0, 0, 0, 3, 3, 5]
    assert first.until.tolist() == [9, 9, 9, 5, 5, 0]
    # The leader's row and one more get a third prompt: of the others the first leads.
    then = slots.share(first, entry_of([0, 5], [0, 0]), jnp.array([4]))
    assert then.leader.tolist() == [0, 1, 1, 3, 3, 0]
    assert then.until.tolist() == [4, 9, 9, 5, 5, 4]
    # Rows 4, 2, 5 and 1 stay, in this order.
    index = np.array([4, 2, 5, 1])
    retained = slots.elect(jax.tree.map(lambda x: x[index], then), 6)
    assert retained.leader.tolist() == [0, 1, 2, 1] and retained.until.tolist() == [5, 9, 4, 9]
