"""Every preference loss beside TRL's own code: values and gradients from the same log-probs.

TRL's losses are methods of its trainers; they are called with a stand-in for the trainer and one
for the model, which gives log-probs out of a table by token. Ours get the same table. Where TRL
1.16 does something else on purpose or by mistake, the test says so:

- its sigmoid, sigmoid_norm, hinge and ipo ignore label_smoothing without a word; here sigmoid and
  sigmoid_norm take it (cDPO) and the others refuse it
- ORPO and SimPO make `inf - inf` of answers with probability 1; here odds stay finite
- KTO's baseline and AOT's sort see one forward pass of one device in TRL, so they change with
  accumulation; here they see the whole step (docs/preferences.md)
"""

import math
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("trl", reason="needs TRL, which this environment has not")
pytestmark = pytest.mark.slow  # torch and TRL take long to import

import jax
import jax.numpy as jnp
import torch
from trl import DPOTrainer, KTOTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from trl.trainer.utils import FusedCausalLMOutput

from jaxtrain.config import Config
from jaxtrain.core.task import Round
from jaxtrain.data.pack import build_batch, lay_out, stack_batches
from jaxtrain.data.pairs import PairTrees
from jaxtrain.data.ranked import Answer, Pair, Ranked
from jaxtrain.losses.preference import preference_terms
from jaxtrain.tasks.preference import Preparation, preference_coef, read_fields, read_objective

LENGTHS = [(3, 5), (4, 2), (1, 6), (5, 5)]
"""Tokens of the chosen and rejected answer of each pair."""
PROMPT = 2
NUM_ANSWER_TOKENS = sum(map(sum, LENGTHS))
FIRST = PROMPT * len(LENGTHS)
"""Answers' token ids begin here; each token of the pairs has its own."""


def make_tables(seed=0):
    """(policy's, reference's, log of the sum of squared probabilities) by token, float64."""
    rng = np.random.default_rng(seed)
    size = FIRST + NUM_ANSWER_TOKENS
    policy = -rng.exponential(1.0, size)
    reference = policy + rng.normal(0, 0.8, size)
    return policy, np.minimum(reference, -1e-3), -rng.exponential(1.5, size)


def make_rows():
    """[(prompt, chosen, rejected)] of token ids."""
    ids = iter(range(FIRST, FIRST + NUM_ANSWER_TOKENS))
    return [
        (
            list(range(PROMPT * i, PROMPT * i + PROMPT)),
            [next(ids) for _ in range(chosen)],
            [next(ids) for _ in range(rejected)],
        )
        for i, (chosen, rejected) in enumerate(LENGTHS)
    ]


def of_us(options, tables, labels=None):
    """(loss, its gradient by the policy's table) of a config's section task."""
    table = {
        "run": {"max_steps": 1},
        "model": {"architecture": {"hidden_size": 8}, "tokenizer": "builtin"},
        "data": {"datasets": [{"path": "a"}]},
        "task": {"kind": "preference", **options},
    }
    task = (config := Config.model_validate(table)).task
    build = PairTrees(
        nll=task.knob("nll_on") if task.nll_weight else "none",
        tail=task.ld_alpha,
        average=task.average,
    )
    fields = read_fields(task, "float64")
    rows = []
    for index, (prompt, *answers) in enumerate(make_rows()):
        answers = [Answer(np.array(a, np.int32), np.ones(len(a), np.float32)) for a in answers]
        if labels is None:
            ranked = Ranked(np.array(prompt, np.int32), tuple(answers), (Pair(0, 1),))
        else:
            ranked = Ranked(np.array(prompt, np.int32), (answers[0],), labels=(labels[index],))
        rows.append([lay_out(build(ranked), "branch")])
    batch = stack_batches([build_batch(rows, 16, fields)])

    def score(batch, role, *rest):
        return tables[role == "reference"][batch.tokens]

    data = SimpleNamespace(row_tokens=16)
    prepared = Preparation(task, config, data)(Round([batch]), SimpleNamespace(logp=score))
    micro = jax.tree.map(lambda leaf: leaf[0], prepared.batches[0])
    objective, coef = read_objective(task), preference_coef(task)

    def total(policy):
        peak = jnp.asarray(tables[2])[micro.tokens]
        sums, _ = preference_terms(policy[micro.tokens], micro, objective, peak)
        return sum(coef[n] * sums[n] / jnp.sum(micro.weights[n]) for n in sums)

    with jax.enable_x64(True):
        value, grad = jax.value_and_grad(total)(jnp.asarray(tables[0]))
    return float(value), np.asarray(grad)


class Table(torch.nn.Module):
    """A model for TRL that knows nothing but log-probs by token."""

    is_gradient_checkpointing = False

    def __init__(self, logp, peak, dtype):
        super().__init__()
        self.logp = torch.nn.Parameter(torch.tensor(logp, dtype=dtype))
        self.peak = torch.tensor(peak, dtype=dtype)

    def forward(self, input_ids, attention_mask, labels, **kwargs):
        mask = (labels[:, 1:] != -100).to(self.logp.dtype)
        zeros = torch.zeros_like(mask)
        return FusedCausalLMOutput(
            log_probs=self.logp[input_ids[:, 1:]] * mask,
            entropy=zeros,
            log_sum_sq_probs=self.peak[input_ids[:, 1:]] * mask,
            mean_logits=zeros,
            is_top1=mask.bool(),
        )


def stand_in(tables, dtype=torch.float64, **options):
    """(what TRL's methods see as the trainer, its policy)."""
    policy, reference = (Table(table, tables[2], dtype) for table in tables[:2])

    def itself(x):
        return x

    accelerator = SimpleNamespace(
        device="cpu", gather=itself, gather_for_metrics=itself, unwrap_model=itself
    )
    trainer = SimpleNamespace(
        model=policy,
        ref_model=reference,
        accelerator=accelerator,
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        f_alpha_divergence_coef=0.5,
        label_smoothing=0.0,
        use_weighting=False,
        beta=0.1,
        loss_weights=[1.0],
        args=SimpleNamespace(discopop_tau=0.05, gradient_checkpointing_kwargs=None),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _total_train_tokens=0,
        _tp_size=1,
    )
    vars(trainer).update(options)
    return trainer, policy


def pad(rows):
    """input_ids, attention_mask and completion_mask of (prompt, answer)."""
    width = max(len(p) + len(a) for p, a in rows)
    ids, attention, completion = np.zeros((3, len(rows), width), np.int64)
    for i, (prompt, answer) in enumerate(rows):
        n = len(prompt) + len(answer)
        ids[i, :n], attention[i, :n] = prompt + answer, 1
        completion[i, len(prompt) : n] = 1
    names = ("input_ids", "attention_mask", "completion_mask")
    return {n: torch.tensor(v) for n, v in zip(names, (ids, attention, completion), strict=True)}


def of_trl(tables, loss="sigmoid", **options):
    """(loss, its gradient) by DPOTrainer."""
    losses = [loss] if isinstance(loss, str) else loss
    options.setdefault("loss_weights", [1.0] * len(losses))
    trainer, policy = stand_in(tables, loss_types=losses, **options)
    rows = make_rows()
    inputs = pad([(p, c) for p, c, _ in rows] + [(p, r) for p, _, r in rows])
    value = DPOTrainer._compute_loss(trainer, policy, inputs, False)
    value.backward()
    return float(value.detach()), policy.logp.grad.numpy()


def check(ours, theirs, rtol=1e-6):
    assert ours[0] == pytest.approx(theirs[0], rel=rtol, abs=1e-8)
    np.testing.assert_allclose(ours[1], theirs[1], rtol=10 * rtol, atol=rtol / 100)


PAIR_LOSSES = [
    ("sigmoid", {}),
    ("hinge", {}),
    ("ipo", {}),
    ("robust", {"label_smoothing": 0.2}),
    ("exo_pair", {"label_smoothing": 0.01}),
    ("nca_pair", {}),
    ("bco_pair", {}),
    ("sppo_hard", {}),
    ("aot", {"label_smoothing": 0.1}),
    ("aot_unpaired", {"label_smoothing": 0.1}),
    ("apo_zero", {}),
    ("apo_down", {}),
    ("discopop", {}),
    ("sft", {}),
    ("sigmoid_norm", {}),
]


@pytest.mark.parametrize("loss, options", PAIR_LOSSES, ids=[name for name, _ in PAIR_LOSSES])
def test_losses_of_pairs(loss, options):
    tables = make_tables()
    ours = of_us({"loss": loss, "beta": 0.6, **options}, tables)
    check(ours, of_trl(tables, loss, beta=0.6, **options))


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "sigmoid_norm"])
@pytest.mark.parametrize("ours, theirs", [
    ("forward_kl", "forward_kl"), ("js", "js_divergence"), ("alpha", "alpha_divergence")
])  # fmt: skip
def test_divergences(loss, ours, theirs):
    tables = make_tables(1)
    found = of_us({"loss": loss, "beta": 0.3, "f_divergence": ours, "f_alpha": 0.7}, tables)
    options = {"f_divergence_type": theirs, "f_alpha_divergence_coef": 0.7}
    if ours == "alpha":  # TRL's knows no float64
        check(found, of_trl(tables, loss, beta=0.3, dtype=torch.float32, **options), 1e-5)
    else:
        check(found, of_trl(tables, loss, beta=0.3, **options))


def test_several_losses_tails_and_weights():
    tables = make_tables(2)
    found = of_us({"loss": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 0.5]}, tables)
    losses = ["sigmoid", "bco_pair", "sft"]
    check(found, of_trl(tables, losses, loss_weights=[0.8, 0.2, 0.5]))
    check(of_us({"ld_alpha": 0.3}, tables), of_trl(tables, ld_alpha=0.3))
    for loss in ("sigmoid", "ipo"):
        found = of_us({"loss": loss, "use_weighting": True}, tables)
        check(found, of_trl(tables, loss, use_weighting=True))


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
@pytest.mark.parametrize("labels", [(True, False, True, False), (False, False, False, False)])
def test_losses_of_labels(loss, labels):
    tables = make_tables(3)
    tables = (tables[0] + 0.5, *tables[1:])  # so that the baseline is above 0
    options = {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.7}
    ours = of_us({"loss": loss, **options}, tables, labels)
    trainer, policy = stand_in(
        tables,
        loss_type=loss,
        calculate_KL=loss == "kto",
        _compute_kl_logps=lambda model, batch: KTOTrainer._compute_kl_logps(trainer, model, batch),
        **options,
    )
    rows = [(prompt, chosen) for prompt, chosen, _ in make_rows()]
    rotated = [(prompt, rows[i - 1][1]) for i, (prompt, _) in enumerate(rows)]
    inputs = pad(rows) | {f"KL_{name}": value for name, value in pad(rotated).items()}
    inputs["label"] = torch.tensor(labels)
    value = KTOTrainer._compute_loss(trainer, policy, inputs, False)
    value.backward()
    check(ours, (float(value.detach()), policy.logp.grad.numpy()))
    if loss == "kto":
        assert trainer._metrics["train"]["kl"][0] > 0.1


def sums_of(policy):
    """(chosen, rejected) sums and lengths of the rows."""
    rows = make_rows()
    return [
        (
            torch.stack([policy[torch.tensor(row[side])].sum() for row in rows]),
            torch.tensor([len(row[side]) for row in rows]),
        )
        for side in (1, 2)
    ]


@pytest.mark.parametrize("ours, theirs, means, smoothing", [
    ("cpo", "sigmoid", False, 0.1), ("cpo_hinge", "hinge", False, 0.0),
    ("cpo_ipo", "ipo", True, 0.0), ("simpo", "simpo", True, 0.1), ("alphapo", "simpo", True, 0.0),
])  # fmt: skip
def test_losses_without_reference(ours, theirs, means, smoothing):
    tables = make_tables(4)
    alpha = 0.25 if ours == "alphapo" else 0.0
    options = {"beta": 0.8, "cpo_alpha": 0.6, "label_smoothing": smoothing}
    found = of_us({"loss": ours, **options}, tables)
    policy = torch.tensor(tables[0], requires_grad=True)
    (chosen, long), (rejected, short) = sums_of(policy)
    likelihood = -chosen.sum() / long.sum()
    if means:
        chosen, rejected = chosen / long, rejected / short
    trainer = SimpleNamespace(
        loss_type=theirs,
        alpha=alpha,
        simpo_gamma=0.5,
        accelerator=SimpleNamespace(device="cpu"),
        **options,
    )
    losses, *_ = CPOTrainer.cpo_loss(trainer, chosen, rejected)
    value = losses.mean() + 0.6 * likelihood
    value.backward()
    check(found, (float(value.detach()), policy.grad.numpy()))


def test_orpo():
    tables = make_tables(5)
    found = of_us({"loss": "orpo", "beta": 0.4}, tables)
    policy = torch.tensor(tables[0], requires_grad=True)
    (chosen, long), (rejected, short) = sums_of(policy)
    # TRL takes the likelihood over prompt and answer, but for the first token.
    prompts = sum(policy[torch.tensor(row[0][1:])].sum() for row in make_rows())
    likelihood = -(chosen.sum() + prompts) / (long.sum() + len(LENGTHS) * (PROMPT - 1))
    trainer = SimpleNamespace(beta=0.4, accelerator=SimpleNamespace(device="cpu"))
    losses, *_ = ORPOTrainer.odds_ratio_loss(trainer, chosen / long, rejected / short)
    value = likelihood - losses.mean()
    value.backward()
    # TRL computes the odds in float32.
    check(found, (float(value.detach()), policy.grad.numpy()), 1e-5)


def test_where_trl_is_not_followed():
    """Label smoothing of sigmoid is no-op in TRL; odds of a certain answer are not numbers."""
    tables = make_tables(6)
    smoothed = of_us({"label_smoothing": 0.3, "beta": 1.0}, tables)[0]
    ignored = of_trl(tables, beta=1.0, label_smoothing=0.3)
    check(of_us({"beta": 1.0}, tables), ignored)
    assert abs(smoothed - ignored[0]) > 0.01
    trainer = SimpleNamespace(beta=0.4, accelerator=SimpleNamespace(device="cpu"))
    certain = torch.zeros(1), torch.full((1,), -0.5)
    assert not math.isfinite(ORPOTrainer.odds_ratio_loss(trainer, *certain)[4])
    tables = (np.zeros_like(tables[0]), *tables[1:])
    value, grad = of_us({"loss": "orpo"}, tables)
    assert math.isfinite(value) and np.isfinite(grad).all()
